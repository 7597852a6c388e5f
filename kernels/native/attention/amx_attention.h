// Products of attention by AMX tile registers, read directly from the blocks of a bfloat16 cache.
//
// A panel of keys is one tile of 16 tokens for every 32 numbers of the head. The values of 32 tokens, at multiples of
// 32 in the split, are one tile for every 16 numbers of the head.
#pragma once

#include <type_traits>

#include "gemm/amx.h"
#include "attention/paged.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Products of an item's rows with one split. USED is false for caches without tiles.
template <class C>
struct AttentionTiles {
    static constexpr bool USED = false;
    static constexpr int64_t TOKENS = 1, PADDING = 0;
    static int64_t bytes(const Shape &) { return 0; }
    AttentionTiles(const Shape &, int64_t) {}
};

#if defined(__AMX_TILE__)

template <>
class AttentionTiles<PlainCache<BFloat16>> {
    typedef PlainCache<BFloat16> C;

  public:
    static constexpr bool USED = true;
    static constexpr int64_t TOKENS = 32;              // tokens of a tile of values
    static constexpr int64_t PADDING = TILE_ROWS - 1;  // rows past the last one; they may hold any numbers
    // Size of the buffer for copied values.
    static int64_t bytes(const Shape &s) { return SPLIT / 2 * s.value_stride<C>(); }

    AttentionTiles(const Shape &s, int64_t rows)
        : s(s), height(std::min<int64_t>(rows, TILE_ROWS)),
          registers(int(height), int(s.dim % 32 ? s.dim % 32 / 2 : TILE_WORDS)) {}

    // scores[row][token] = q . k for the tokens of `runs` and rows [from, count), for the tokens visible to each row.
    void scores(const uint16_t *q, const Run *keys, int64_t runs, int64_t from, int64_t count, const Visibility &visible,
                float *scores) const {
        const char *panels[SPLIT_PANELS];
        int64_t made = 0;
        for (int64_t i = 0; i < runs; i++)
            for (int64_t token = 0; token < keys[i].tokens; token += LANES)
                panels[made++] = keys[i].at + token / LANES * s.key_panel<C>();
        for (int64_t panel = 0, p; panel < made; panel += p) {
            p = count - from > TILE_ROWS ? std::min<int64_t>(4, made - panel) : 1;
            for (int64_t row = from; row < count; row += height) {
                int64_t last = std::min(row + height, count) - 1;
                if (visible.by(last - from) <= panel * LANES) continue;
                with_panels(p, [&](auto P) __attribute__((always_inline)) {
                    score<P>(q + row * s.dim, panels + panel, scores + row * SPLIT + panel * LANES);
                });
            }
        }
    }

    // Returns the number of tiles of the values in `runs`, whose addresses go to `tiles`. A tile is read in place. If
    // two blocks share it or the tokens end within it, it is copied to `buffer` and padded with zeros.
    int64_t values(const Run *runs, int64_t count, char *buffer, const char **tiles) const {
        int64_t stride = s.value_stride<C>(), made = 0;
        int64_t tokens = runs[count - 1].first + runs[count - 1].tokens;
        for (int64_t i = 0, first = 0; first < tokens; first += TOKENS, made++) {
            while (runs[i].first + runs[i].tokens <= first) i++;
            if (runs[i].first + runs[i].tokens >= first + TOKENS) {
                tiles[made] = runs[i].at + (first - runs[i].first) / 2 * stride;
                continue;
            }
            char *to = buffer + first / 2 * stride, *end = to + TOKENS / 2 * stride;
            tiles[made] = to;
            for (int64_t j = i; j < count && runs[j].first < first + TOKENS; j++) {
                int64_t begin = std::max<int64_t>(0, first - runs[j].first);
                int64_t words = std::min(runs[j].first + runs[j].tokens, first + TOKENS) - runs[j].first - begin;
                size_t some = size_t(ceil_div<int64_t>(words, 2) * stride);
                std::memcpy(to, runs[j].at + begin / 2 * stride, some);
                to += some;
            }
            std::memset(to, 0, size_t(end - to));
        }
        return made;
    }

    // sums[row] = weights . v over the tiles visible to the row. Weights of tokens that it does not see are 0.
    void weighted(const uint16_t *weights, const char *const *tiles, int64_t made, int64_t from, int64_t count,
                  const Visibility &visible, float *sums) const {
        int64_t panels = s.padded_dim / LANES;
        for (int64_t panel = 0, p; panel < panels; panel += p) {
            p = std::min<int64_t>(4, panels - panel);
            for (int64_t row = from; row < count; row += height) {
                int64_t last = std::min(row + height, count) - 1;
                int64_t steps = std::min(made, ceil_div(visible.by(last - from), TOKENS));
                with_panels(p, [&](auto P) __attribute__((always_inline)) {
                    sum<P>(weights + row * SPLIT, tiles, steps, panel, sums + row * s.padded_dim + panel * LANES);
                });
            }
        }
    }

  private:
    const Shape &s;
    int64_t height;
    TileRegisters registers;

    template <class Function>
    static INLINE void with_panels(int64_t p, const Function &function) {
        if (p == 4) function(std::integral_constant<int, 4>());
        else if (p == 3) function(std::integral_constant<int, 3>());
        else if (p == 2) function(std::integral_constant<int, 2>());
        else function(std::integral_constant<int, 1>());
    }

    template <int P>
    __attribute__((noinline)) void score(const uint16_t *q, const char *const *panels, float *scores) const {
        each<P>([&](auto p) __attribute__((always_inline)) { tile_zero<p>(); });
        int64_t steps = s.dim / 32, stride = s.dim * 2;
        for (int64_t step = 0; step < steps; step++) {
            tile_load<4>(q + step * 32, stride);
            each<P>([&](auto p) __attribute__((always_inline)) {
                tile_load<6>(panels[p] + step * TILE_BYTES, 64);
                tile_dot<DotBFloat16, p, 4, 6>();
            });
        }
        if (s.dim % 32) {
            tile_load<5>(q + steps * 32, stride);
            each<P>([&](auto p) __attribute__((always_inline)) {
                tile_load<7>(panels[p] + steps * TILE_BYTES, 64);
                tile_dot<DotBFloat16, p, 5, 7>();
            });
        }
        each<P>([&](auto p) __attribute__((always_inline)) { tile_store<p>(scores + p * LANES, SPLIT * 4); });
    }

    template <int P>
    __attribute__((noinline)) void sum(const uint16_t *weights, const char *const *tiles, int64_t steps, int64_t panel,
                                       float *sums) const {
        int64_t stride = s.value_stride<C>();
        each<P>([&](auto p) __attribute__((always_inline)) { tile_zero<p>(); });
        for (int64_t step = 0; step < steps; step++) {
            tile_load<4>(weights + step * TOKENS, SPLIT * 2);
            each<P>([&](auto p) __attribute__((always_inline)) {
                tile_load<6>(tiles[step] + (panel + p) * 64, stride);
                tile_dot<DotBFloat16, p, 4, 6>();
            });
        }
        each<P>([&](auto p) __attribute__((always_inline)) { tile_store<p>(sums + p * LANES, s.padded_dim * 4); });
    }
};

#endif

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
