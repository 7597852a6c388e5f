// Tile registers of AMX: eight registers of up to 16 rows of 64 bytes.
//
// The function `tile_dot` multiplies 16 rows of x by 16 columns of a panel over 16 words of K. It adds the products to
// 16 x 16 sums. Intel's manual (TDPBF16PS) defines the order of the bfloat16 additions: even and odd products are
// summed separately, then both sums are added to the accumulator. Each addition is rounded to float32, and denormal
// numbers are 0. The sums of a row do not depend on other rows.
#pragma once

#include <type_traits>

#include "gemm/tile.h"

#if defined(__AMX_TILE__)

namespace npuserve {
namespace NPUSERVE_ISA {

constexpr int TILE_ROWS = 16;
constexpr int64_t TILE_WORDS = 16;           // words along K of one tile product
constexpr int64_t TILE_BYTES = 64 * TILE_WORDS;  // bytes of a panel's words in a tile

// Calls function(std::integral_constant<int, i>) for 0 <= i < N.
template <int N, class Function>
INLINE void each(const Function &function) {
    if constexpr (N > 1) each<N - 1>(function);
    function(std::integral_constant<int, N - 1>());
}

// Configuration of the tile registers. Tiles 0 to 3 are sums, and 4 and 5 hold rows of x; each of them has `rows` rows.
// Tiles 6 and 7 hold words of panels. Tiles 5 and 7 hold `words` words of each row and panel, the others 16. The
// registers are released at the end, so that a thread switch does not save them.
class TileRegisters {
  public:
    explicit TileRegisters(int rows, int words = TILE_WORDS) {
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        static_assert(sizeof config == 64, "as the processor reads it");
        for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = uint8_t(i < 6 ? rows : TILE_WORDS);
        config.row_bytes[5] = uint16_t(words * 4), config.rows[7] = uint8_t(words);
        asm volatile("ldtilecfg %0" : : "m"(config));
    }
    ~TileRegisters() { asm volatile("tilerelease"); }
    TileRegisters(const TileRegisters &) = delete;
    TileRegisters &operator=(const TileRegisters &) = delete;
};

// T is the number of a register. Inline assembly, since the compilers' intrinsics take no template parameters.
template <int T>
INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
INLINE void tile_load(const void *from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
INLINE void tile_store(void *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}

// True if the products of Dot use tiles.
template <class Dot>
constexpr bool BY_TILES = false;
template <>
constexpr bool BY_TILES<DotBFloat16> = true;
template <>
constexpr bool BY_TILES<DotInt8> = true;

// Tile C += rows of x in tile A times words of a panel in tile B.
template <class Dot, int C, int A, int B>
INLINE void tile_dot() {
    static_assert(BY_TILES<Dot>, "bfloat16 or int8");
    if constexpr (std::is_same<Dot, DotInt8>::value)
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
    else
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace NPUSERVE_ISA
}  // namespace npuserve

#endif
