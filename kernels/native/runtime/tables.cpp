// Tables of the library: its instruction sets, their detection on this processor, and the constants for Python. The
// build defines HAS_... and NPUSERVE_SOURCE.
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(HAS_avx512_amx)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(HAS_neon)
#include <sys/auxv.h>
#endif

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
#else
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
#else
    &portable::TABLE,
#endif
    nullptr,
};

#if defined(HAS_avx512_amx)
// True if the processor has AMX with bfloat16 and int8, and the system grants this process its registers.
static bool has_amx() {
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, ALL = BF16 | TILE | INT8;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA: Linux 5.16
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & ALL) == ALL &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

#if defined(HAS_avx2_vnni)
static bool has_avx_vnni() {
#if defined(NPUSERVE_EVEX)
    return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
    constexpr unsigned AVX_VNNI = 1u << 4;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & AVX_VNNI;
#endif
}
#endif

bool supported(const char *isa) {
#if defined(HAS_avx512_bf16) || defined(HAS_avx512_vnni)
    bool vnni = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vnni");
#if defined(HAS_avx512_amx)
    static const bool amx = vnni && __builtin_cpu_supports("avx512bf16") && has_amx();
    if (std::strcmp(isa, "avx512_amx") == 0) return amx;
#endif
    if (std::strcmp(isa, "avx512_bf16") == 0) return vnni && __builtin_cpu_supports("avx512bf16");
    if (std::strcmp(isa, "avx512_vnni") == 0) return vnni;
#endif
#if defined(HAS_avx2)
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (std::strcmp(isa, "avx2") == 0) return avx2;
#if defined(HAS_avx2_vnni)
    if (std::strcmp(isa, "avx2_vnni") == 0) return avx2 && has_avx_vnni();
#endif
#endif
#if defined(HAS_neon)
    // Bits of the kernel's interface that older headers lack.
    constexpr unsigned long DOTPROD = 1ul << 20, I8MM = 1ul << 13, BF16 = 1ul << 14;
    unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    if (std::strcmp(isa, "neon_bf16") == 0) return first & DOTPROD && second & I8MM && second & BF16;
    if (std::strcmp(isa, "neon_dotprod") == 0) return first & DOTPROD;
    if (std::strcmp(isa, "neon") == 0) return true;
#endif
    return std::strcmp(isa, "portable") == 0;
}

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
