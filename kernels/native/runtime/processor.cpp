// Detection of this processor's instruction sets. setup.py also builds this file alone, to find the tables to compile.
#include "runtime/processor.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace npuserve {

#if defined(__x86_64__)

static const char *const NAMES[] = {"avx512_amx", "avx512_bf16", "avx512_vnni", "avx2_vnni", "avx2", "portable"};

// Features of leaf 7. Older compilers have no names for them.
struct Leaf7 {
    unsigned ecx0 = 0, edx0 = 0, eax1 = 0;

    Leaf7() {
        unsigned eax, ebx, ecx, edx;
        if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
            ecx0 = ecx;
            edx0 = edx;
        }
        if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) eax1 = eax;
    }
    bool avx512_vnni() const { return ecx0 >> 11 & 1; }
    bool avx512_bf16() const { return eax1 >> 5 & 1; }
    bool avx_vnni() const { return eax1 >> 4 & 1; }
    bool amx() const {
        constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, ALL = BF16 | TILE | INT8;
        return (edx0 & ALL) == ALL;
    }
};

// True if the system grants this process the registers of AMX.
static bool may_use_tiles() {
#if defined(__linux__)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA: Linux 5.16
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

bool supported(const char *isa) {
    static const Leaf7 leaf7;
    // The compiler's function also asks whether the system keeps the wide registers.
    static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    static const bool vnni = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                             leaf7.avx512_vnni();
    static const bool amx = vnni && leaf7.avx512_bf16() && leaf7.amx() && may_use_tiles();
    if (std::strcmp(isa, "avx512_amx") == 0) return amx;
    if (std::strcmp(isa, "avx512_bf16") == 0) return vnni && leaf7.avx512_bf16();
    if (std::strcmp(isa, "avx512_vnni") == 0) return vnni;
#if defined(NPUSERVE_EVEX)
    if (std::strcmp(isa, "avx2_vnni") == 0) return avx2 && vnni;
#else
    if (std::strcmp(isa, "avx2_vnni") == 0) return avx2 && leaf7.avx_vnni();
#endif
    if (std::strcmp(isa, "avx2") == 0) return avx2;
    return std::strcmp(isa, "portable") == 0;
}

#elif defined(__aarch64__)

static const char *const NAMES[] = {"neon_bf16", "neon_dotprod", "neon"};

bool supported(const char *isa) {
#if defined(__linux__)
    // Bits of the kernel's interface that older headers lack.
    constexpr unsigned long DOTPROD = 1ul << 20, I8MM = 1ul << 13, BF16 = 1ul << 14;
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    if (std::strcmp(isa, "neon_bf16") == 0) return first & DOTPROD && second & I8MM && second & BF16;
    if (std::strcmp(isa, "neon_dotprod") == 0) return first & DOTPROD;
#endif
    return std::strcmp(isa, "neon") == 0;
}

#else

static const char *const NAMES[] = {"portable"};

bool supported(const char *isa) { return std::strcmp(isa, "portable") == 0; }

#endif

}  // namespace npuserve

const char *npuserve_processor_isa(int i) {
    for (const char *name : npuserve::NAMES)
        if (npuserve::supported(name) && i-- == 0) return name;
    return nullptr;
}
