// Products with expanded panels of weights of four bits, by AMX tile registers.
//
// Tile registers add up the products of a group. Vectors add the sums times the group's scales to the accumulators, group
// by group in ascending order. The sums pass through memory and are read two groups later, since a load waits for a store
// of a tile register.
#pragma once

#include <algorithm>

#include "gemm/amx.h"

#if defined(__AMX_TILE__)

namespace npuserve {
namespace NPUSERVE_ISA {

// Calls function(p, count) for panels p and p + 1 of P at a time; both are integral constants, and count is 1 or 2.
template <int P, int FIRST = 0, class Function>
INLINE void each_pair(const Function &function) {
    constexpr int COUNT = P - FIRST > 1 ? 2 : 1;
    function(std::integral_constant<int, FIRST>(), std::integral_constant<int, COUNT>());
    if constexpr (FIRST + COUNT < P) each_pair<P, FIRST + COUNT>(function);
}

// Denormal numbers are 0, as in tile registers, so that few rows that vectors multiply have the same bits.
class NoDenormals {
  public:
    NoDenormals() : before(_mm_getcsr()) { _mm_setcsr(before | 0x8040); }
    ~NoDenormals() { _mm_setcsr(before); }
    NoDenormals(const NoDenormals &) = delete;
    NoDenormals &operator=(const NoDenormals &) = delete;

  private:
    unsigned before;
};

// Multiplies R rows of x by P panels over `groups` groups of `words` words: acc[r * stride + p] += x . w.
//
//   x       words of the first group in the first row
//   feed    feed(g) makes group g available and returns the offset of its 16 scales in float32, which its words follow,
//           from panels[p]
template <class Dot, int R, int P, class Feed>
INLINE void product_of_groups(const char *x, int64_t x_stride, int64_t groups, int64_t words, const char *const *panels,
                              F *acc, int stride, Feed &&feed) {
    static_assert(R <= TILE_ROWS && P <= 2, "registers for sums");
    NoDenormals no_denormals;
    constexpr int64_t DELAY = 2, RING = 4;  // groups
    alignas(64) char sums[RING][P][R * 64];
    F scales[RING][P];
    int64_t steps = words / TILE_WORDS, rest = words % TILE_WORDS;
    F total[R][P];
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 2") for (int p = 0; p < P; p++) total[r][p] = acc[r * stride + p];
    TileRegisters registers(R, int(rest ? rest : TILE_WORDS));
    for (int64_t g = 0; g < groups + DELAY; g++) {
        if (g < groups) {
            int64_t at = feed(g), slot = g % RING;
            each<P>([&](auto p) __attribute__((always_inline)) { tile_zero<p>(); });
            for (int64_t step = 0; step < steps; step++) {
                tile_load<4>(x + step * 64, x_stride);
                each<P>([&](auto p) __attribute__((always_inline)) {
                    tile_load<6>(panels[p] + at + 64 + step * TILE_BYTES, 64);
                    tile_dot<Dot, p, 4, 6>();
                });
            }
            if (rest) {
                tile_load<5>(x + steps * 64, x_stride);
                each<P>([&](auto p) __attribute__((always_inline)) {
                    tile_load<7>(panels[p] + at + 64 + steps * TILE_BYTES, 64);
                    tile_dot<Dot, p, 5, 7>();
                });
            }
            each<P>([&](auto p) __attribute__((always_inline)) {
                tile_store<p>(sums[slot][p], 64);
                scales[slot][p] = load(reinterpret_cast<const float *>(panels[p] + at));
            });
            x += words * 4;
        }
        if (g >= DELAY) {
            int64_t slot = (g - DELAY) % RING;
            _Pragma("GCC unroll 2") for (int p = 0; p < P; p++) {
                _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {
                    F sum = load(reinterpret_cast<const float *>(sums[slot][p] + r * 64));
                    total[r][p] = fma(scales[slot][p], sum, total[r][p]);
                }
            }
        }
    }
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 2") for (int p = 0; p < P; p++) acc[r * stride + p] = total[r][p];
}

// The same for `words` words of expanded panels in the cache, of which the last group may be shorter.
template <class Dot, int R, int P, class Ahead>
INLINE void product_of_expanded(const char *x, int64_t x_stride, int64_t words, int64_t group_words,
                                const char *const *panels, F *acc, int stride, Ahead &ahead) {
    int64_t whole = words / group_words, last = words % group_words, bytes = (group_words + 1) * 64;
    if (whole)
        product_of_groups<Dot, R, P>(x, x_stride, whole, group_words, panels, acc, stride,
                                     [&](int64_t g) __attribute__((always_inline)) {
                                         for (int64_t k = 0; k < group_words; k += Ahead::EVERY) ahead(k);
                                         return g * bytes;
                                     });
    if (last)
        product_of_groups<Dot, R, P>(x + whole * group_words * 4, x_stride, 1, last, panels, acc, stride,
                                     [&](int64_t) { return whole * bytes; });
}

}  // namespace NPUSERVE_ISA
}  // namespace npuserve

#endif
