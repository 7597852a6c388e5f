// Which instruction sets this library holds (the build defines HAS_... and NPUSERVE_SOURCE), and which of them the
// processor has.
#include <cstring>

#include "pool.h"

namespace npuserve {

#define DECLARE(isa)                \
    namespace isa {                 \
    extern const KernelTable TABLE; \
    }
#if defined(HAS_avx512_bf16)
DECLARE(avx512_bf16)
#endif
#if defined(HAS_avx512_vnni)
DECLARE(avx512_vnni)
#endif
#if defined(HAS_avx2)
DECLARE(avx2)
#endif
DECLARE(portable)

const KernelTable *const TABLES[] = {
#if defined(HAS_avx512_bf16)
    &avx512_bf16::TABLE,
#endif
#if defined(HAS_avx512_vnni)
    &avx512_vnni::TABLE,
#endif
#if defined(HAS_avx2)
    &avx2::TABLE,
#endif
    &portable::TABLE,
    nullptr,
};

bool supported(const char *isa) {
#if defined(HAS_avx512_bf16) || defined(HAS_avx512_vnni)
    bool vnni = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vnni");
    if (std::strcmp(isa, "avx512_bf16") == 0) return vnni && __builtin_cpu_supports("avx512bf16");
    if (std::strcmp(isa, "avx512_vnni") == 0) return vnni;
#endif
#if defined(HAS_avx2)
    if (std::strcmp(isa, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return std::strcmp(isa, "portable") == 0;
}

}  // namespace npuserve

const char *npuserve_source(void) { return NPUSERVE_SOURCE; }
