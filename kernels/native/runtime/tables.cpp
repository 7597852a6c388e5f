// Tables of the library: its instruction sets, and the constants for Python. The build defines HAS_... and
// NPUSERVE_SOURCE.
#include "runtime/pool.h"

namespace npuserve {

#define DECLARE(isa)                \
    namespace isa {                 \
    extern const KernelTable TABLE; \
    }
#if defined(HAS_avx512_amx)
DECLARE(avx512_amx)
#endif
#if defined(HAS_avx512_bf16)
DECLARE(avx512_bf16)
#endif
#if defined(HAS_avx512_vnni)
DECLARE(avx512_vnni)
#endif
#if defined(HAS_avx2_vnni)
DECLARE(avx2_vnni)
#endif
#if defined(HAS_avx2)
DECLARE(avx2)
#endif
#if defined(HAS_neon_bf16)
DECLARE(neon_bf16)
#endif
#if defined(HAS_neon_dotprod)
DECLARE(neon_dotprod)
#endif
#if defined(HAS_neon)
DECLARE(neon)
#endif
#if defined(HAS_portable)
DECLARE(portable)
#endif

const KernelTable *const TABLES[] = {
#if defined(HAS_avx512_amx)
    &avx512_amx::TABLE,
#endif
#if defined(HAS_avx512_bf16)
    &avx512_bf16::TABLE,
#endif
#if defined(HAS_avx512_vnni)
    &avx512_vnni::TABLE,
#endif
#if defined(HAS_avx2_vnni)
    &avx2_vnni::TABLE,
#endif
#if defined(HAS_avx2)
    &avx2::TABLE,
#endif
#if defined(HAS_neon_bf16)
    &neon_bf16::TABLE,
#endif
#if defined(HAS_neon_dotprod)
    &neon_dotprod::TABLE,
#endif
#if defined(HAS_neon)
    &neon::TABLE,
#endif
#if defined(HAS_portable)
    &portable::TABLE,
#endif
    nullptr,
};

}  // namespace npuserve

const char *npuserve_source(void) { return NPUSERVE_SOURCE; }

const char *npuserve_constant(int i, int64_t *value) {
    using namespace npuserve;
#define CONSTANT(name) {#name, int64_t(name)}
    static const struct {
        const char *name;
        int64_t value;
    } ALL[] = {
        CONSTANT(OP_POINTERS),        CONSTANT(OP_SIZES),       CONSTANT(OP_FLOATS),
        {"OP_BYTES", int64_t(sizeof(Op))},
        CONSTANT(LANES),              CONSTANT(WORD_BYTES),     CONSTANT(INT8_CACHE_PER_WORD),
        CONSTANT(COMPACT_BLOCK),      CONSTANT(COMPACT_HEADER_BYTES),
        CONSTANT(ATTENTION_SPLIT),    CONSTANT(ATTENTION_UNITS_PER_THREAD),
        CONSTANT(GREEDY_PART),        CONSTANT(LOGPROBS_PART),  CONSTANT(LOGPROBS_BLOCK),
        CONSTANT(RANK_LINE_BYTES),    CONSTANT(LARGE_PAGE),
    };
#undef CONSTANT
    if (i >= int(sizeof ALL / sizeof *ALL)) return nullptr;
    *value = ALL[i].value;
    return ALL[i].name;
}
