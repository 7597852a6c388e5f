// Table of the kernels of one instruction set. Each kernel source is compiled once per set; NPUSERVE_ISA is its name.
// Some sets only have kernels whose code differs from that of a narrower set, REST, which has the others.
#include "runtime/op.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

#if defined(__AMX_TILE__)
#define REST avx512_bf16
#elif defined(__AVXVNNI__)
#define REST avx2
#else
#define REST NPUSERVE_ISA
#endif

namespace npuserve {
namespace REST {  // setup.py leaves the sources of these out

#if defined(__AVXVNNI__)
extern const Kernel COMPACT[];
extern const Kernel INT4[];
extern const Kernel ATTENTION_BFLOAT16[];
#endif
extern const Kernel ATTENTION[];
extern const Kernel CONVOLUTION[];
extern const Kernel DELTA[];
extern const Kernel EXPERTS[];
extern const Kernel ROPE[];
#if !defined(__AMX_TILE__)
extern const Kernel ROWWISE[];
#endif
extern const Kernel RANKS[];
extern const Kernel SAMPLE[];
extern const Kernel UNIFORM[];
extern const Kernel VOCABULARY[];

}  // namespace
namespace NPUSERVE_ISA {

using namespace REST;
#if defined(__AMX_TILE__)
extern const Kernel ROWWISE[];  // its swiglu rounds as the epilogue of linear_swiglu does
#endif
extern const Kernel LINEAR[];
extern const Kernel INT4_INT8[];
extern const Kernel NIBBLES[];
extern const Kernel CEILINGS[];
#if !defined(__AVXVNNI__)
extern const Kernel COMPACT[];
extern const Kernel INT4[];
extern const Kernel ATTENTION_BFLOAT16[];
#endif

static const Kernel *const GROUPS[] = {LINEAR, COMPACT, INT4, INT4_INT8, NIBBLES, ATTENTION_BFLOAT16, ATTENTION,
                                      CONVOLUTION, DELTA, EXPERTS, ROPE, ROWWISE, RANKS, SAMPLE, UNIFORM, VOCABULARY, CEILINGS,
                                      nullptr};
extern const KernelTable TABLE;
const KernelTable TABLE = {STRING(NPUSERVE_ISA), GROUPS};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
