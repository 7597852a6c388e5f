// Table of the kernels of one instruction set. Each kernel source is compiled once per set; NPUSERVE_ISA is its name.
#include "runtime/op.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

namespace npuserve {
namespace NPUSERVE_ISA {

extern const Kernel LINEAR[];
extern const Kernel COMPACT[];
extern const Kernel ATTENTION[];
extern const Kernel ROPE[];
extern const Kernel ROWWISE[];
extern const Kernel RANKS[];
extern const Kernel SAMPLE[];
extern const Kernel UNIFORM[];
extern const Kernel VOCABULARY[];
extern const Kernel CEILINGS[];

static const Kernel *const GROUPS[] = {LINEAR, COMPACT, ATTENTION, ROPE, ROWWISE, RANKS, SAMPLE,
                                      UNIFORM, VOCABULARY, CEILINGS, nullptr};
extern const KernelTable TABLE;
const KernelTable TABLE = {STRING(NPUSERVE_ISA), GROUPS};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
