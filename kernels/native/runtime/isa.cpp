// Table of the kernels of one instruction set. Each kernel source is compiled once per set; NPUSERVE_ISA is its name.
// Kernels without products by tiles would be the same code in avx512_amx as in avx512_bf16, so they are compiled once.
#include "runtime/op.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

namespace npuserve {
#if defined(__AMX_TILE__)
namespace avx512_bf16 {  // setup.py leaves the sources of these out of avx512_amx
#else
namespace NPUSERVE_ISA {
#endif

extern const Kernel ATTENTION[];
extern const Kernel ROPE[];
extern const Kernel ROWWISE[];
extern const Kernel RANKS[];
extern const Kernel SAMPLE[];
extern const Kernel UNIFORM[];
extern const Kernel VOCABULARY[];

}  // namespace
namespace NPUSERVE_ISA {

#if defined(__AMX_TILE__)
using namespace avx512_bf16;
#endif
extern const Kernel LINEAR[];
extern const Kernel COMPACT[];
extern const Kernel ATTENTION_BFLOAT16[];
extern const Kernel CEILINGS[];

static const Kernel *const GROUPS[] = {LINEAR, COMPACT, ATTENTION_BFLOAT16, ATTENTION, ROPE, ROWWISE, RANKS, SAMPLE,
                                      UNIFORM, VOCABULARY, CEILINGS, nullptr};
extern const KernelTable TABLE;
const KernelTable TABLE = {STRING(NPUSERVE_ISA), GROUPS};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
