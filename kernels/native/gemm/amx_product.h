// Products with weights in panels by AMX tile registers: the work of one unit. product.h is the same for vectors.
#pragma once

#include <type_traits>

#include "gemm/amx.h"
#include "gemm/product.h"

#if defined(__AMX_TILE__)

namespace npuserve {
namespace NPUSERVE_ISA {

// Prefetches `lines` cache lines of each run at each step into the second-level cache. The lines of two successive
// steps are `stride` bytes apart.
template <int P>
struct Fetch {
    const char *const *runs;
    int64_t lines, stride;
    INLINE int64_t operator()(int64_t step) const {
        for (int p = 0; p < P; p++)
            for (int64_t line = 0; line < lines; line++)
                __builtin_prefetch(runs[p] + step * stride + line * 64, 0, 2);
        return step * TILE_BYTES;
    }
};

// Expands the words of the next step while the current step is multiplied. The ring buffer `to` holds `kept` steps.
template <class Panels, int P>
struct ExpandNext {
    const char *const *panels;
    int64_t words, begin, end, kept;  // words of a panel; first and last step to expand; steps in the ring buffer
    char *to;                         // [P][kept][TILE_BYTES]
    INLINE void expand(int64_t step) const {
        for (int p = 0; p < P; p++)
            Panels::expand_step(panels[p], begin + step, words, to + (p * kept + step % kept) * TILE_BYTES);
    }
    INLINE int64_t operator()(int64_t step) const {
        if (begin + step + 1 < end) expand(step + 1);
        return step % kept * TILE_BYTES;
    }
};

// Multiplies R x 16 rows of x by P panels, over `steps` steps of TILE_WORDS words.
//
//   x        address of the first row of each 16
//   panels   address of each panel's words
//   begins   true if the sums start from 0, false if they are loaded from `sums`
//   sums     accumulators of each 16 rows: [16 rows][P panels][16] of float32 or int32
//   feed     feed(step) prepares later words and returns the offset of this step's words from `panels`, in bytes
template <class Dot, int R, int P, class Feed>
__attribute__((noinline)) void product_of_tiles(const char *const (&x)[2], int64_t x_stride, const char *const *panels,
                                                int64_t steps, bool begins, char *const (&sums)[2], const Feed &feed) {
    static_assert(R <= 2 && P <= 2, "registers for sums");
    if (begins)
        each<R * P>([&](auto i) __attribute__((always_inline)) { tile_zero<i>(); });
    else
        each<R * P>([&](auto i) __attribute__((always_inline)) { tile_load<i>(sums[i / P] + i % P * 64, P * 64); });
    for (int64_t step = 0; step < steps; step++) {
        int64_t at = feed(step);
        each<P>([&](auto p) __attribute__((always_inline)) {
            tile_load<6 + p>(panels[p] + at, 64);
            each<R>([&](auto r) __attribute__((always_inline)) {
                if constexpr (p == 0) tile_load<4 + r>(x[r] + step * 64, x_stride);
                tile_dot<Dot, r * P + p, 4 + r, 6 + p>();
            });
        });
    }
    each<R * P>([&](auto i) __attribute__((always_inline)) { tile_store<i>(sums[i / P] + i % P * 64, P * 64); });
}

// Access to the panels of plain weights. A step's words are read in place, or copied and padded with zeros if K ends
// within the step.
template <class Dot>
struct PlainSteps {
    static constexpr bool EXPANDS = false;
    static INLINE void expand_step(const char *panel, int64_t step, int64_t words, char *to) {
        int64_t count = std::min(TILE_WORDS, words - step * TILE_WORDS);
        std::memcpy(to, panel + step * TILE_BYTES, size_t(count * 64));
        std::memset(to + count * 64, 0, size_t(TILE_BYTES - count * 64));
    }
};
template <class Panels>
struct StepsOf : PlainSteps<typename Panels::Dot> {};

// Layout of the memory of a unit of tiles, in this order.
template <class Of>
struct TileUnitLayout {
    typedef typename Of::Dot Dot;
    bool pads;                        // K ends within a step
    bool expands;                     // panels are copied or expanded before they are multiplied
    bool alone;                       // all rows are one pair of tiles
    int64_t steps;                    // steps of K
    int64_t block;                    // maximum steps of a block
    int64_t span;                     // panels whose sums are kept at the same time
    int64_t x, panels, accumulators;  // bytes

    TileUnitLayout(const Call &call, const Split &split) {
        constexpr int64_t NUMBERS = TILE_WORDS * Dot::PER_WORD;
        int64_t k = call.op.n[1];
        pads = k % NUMBERS != 0, expands = pads || StepsOf<typename Of::Panels>::EXPANDS;
        alone = split.rows_per_unit <= 2 * TILE_ROWS;
        steps = ceil_div(k, NUMBERS);
        block = alone ? steps : std::min(BLOCK, steps);
        x = pads ? split.rows_per_unit * steps * 64 : 0;
        // Otherwise all panels of the unit take one block before the next, so that their part of x stays in the cache.
        span = split.rows_per_unit * steps * 64 <= MAX_X_BYTES ? split.tile_panels : split.panels_per_unit;
        panels = !expands ? 0 : split.tile_panels * (alone ? 2 : block) * TILE_BYTES;
        accumulators = ceil_div<int64_t>(split.rows_per_unit, TILE_ROWS) * TILE_ROWS * span * 64;
    }
    int64_t bytes() const { return x + panels + accumulators; }

    static constexpr int64_t BLOCK = 16;        // steps; two panels stay in the first-level cache for all rows
    static constexpr int64_t MAX_X_BYTES = 1 << 20;  // bytes of x that stay in the second-level cache for all panels
};

// Work of a unit, as Unit of product.h.
template <class Of, class Take>
struct TileUnit {
    typedef typename Of::Dot Dot;
    typedef typename Of::Panels Panels;
    typedef StepsOf<Panels> Steps;
    typedef typename Of::X X;
    typedef typename Dot::Acc Acc;
    static_assert(sizeof(Acc) == 64, "a row of a tile");
    const Call &call;
    const Split &split;
    const Take &take;
    TileUnitLayout<Of> layout;
    char *x_copy, *expanded, *acc;
    int64_t k, words, row, rows, first, end, later;
    int64_t tiles;  // tiles of rows
    int height;     // rows of each tile

    TileUnit(const Call &call, const Split &split, int64_t unit, const Take &take, char *memory)
        : call(call), split(split), take(take), layout(call, split), x_copy(memory), expanded(memory + layout.x),
          acc(expanded + layout.panels), k(call.op.n[1]), words(words_of<Dot>(k)),
          row(unit % split.row_groups * split.rows_per_unit), rows(std::min(split.rows_per_unit, call.rows - row)),
          first(unit / split.row_groups * split.panels_per_unit),
          end(std::min(first + split.panels_per_unit, split.panels)),
          // Other threads take the units between this one and the next.
          later((unit + call.threads) / split.row_groups * split.panels_per_unit),
          tiles(ceil_div<int64_t>(rows, TILE_ROWS)), height(int(std::min<int64_t>(rows, TILE_ROWS))) {}

    void run() const {
        if (layout.pads) pad();
        TileRegisters registers(height);
        for (int64_t from = first; from < end; from += layout.span) {
            int64_t to = std::min(from + layout.span, end);
            for (int64_t begin = 0; begin < layout.steps; begin += layout.block)
                for (int64_t panel = from; panel < to; panel += 2) {
                    if (panel + 1 < to)
                        block<2>(begin, panel, from, to);
                    else
                        block<1>(begin, panel, from, to);
                }
            for (int64_t panel = from; panel < to; panel += 2) put(panel, from, to);
        }
    }

  private:
    INLINE const char *address(int64_t panel) const {
        int64_t panel_index = Take::PAIRED ? panel / 2 + panel % 2 * (split.panels / 2) : panel;
        return call.op.at<char>(1) + panel_index * Panels::panel_bytes(k);
    }
    void pad() const {
        int64_t bytes = layout.steps * 64, used = k * int64_t(sizeof(X));
        for (int64_t r = 0; r < rows; r++) {
            std::memcpy(x_copy + r * bytes, call.op.at<X>(0) + (row + r) * k, size_t(used));
            std::memset(x_copy + r * bytes + used, 0, size_t(bytes - used));
        }
    }

    // The first row of a tile. The last tile begins earlier if it would not be full otherwise. Rows shared with the
    // tile before get the same sums.
    int64_t begin_of(int64_t tile) const { return std::min<int64_t>(tile * TILE_ROWS, rows - height); }
    // The sums of a tile of rows and of `panels` adjacent panels from `panel` on.
    char *acc_of(int64_t panel, int64_t from, int64_t panels, int64_t tile) const {
        return acc + ((panel - from) * tiles + tile * panels) * TILE_ROWS * 64;
    }

    // Multiplies a block of P panels by all rows of the unit. begin: first step. [from, to): panels of the span.
    template <int P>
    INLINE void block(int64_t begin, int64_t panel, int64_t from, int64_t to) const {
        int64_t steps = std::min(layout.block, layout.steps - begin);
        const char *panels[P], *soon[P], *part[P];
        for (int p = 0; p < P; p++) panels[p] = address(panel + p);
        if (layout.expands) {
            int64_t kept = layout.alone ? 2 : layout.block;
            ExpandNext<Steps, P> feed{panels, words, begin, begin + steps, kept, expanded};
            const char *made[P];
            for (int p = 0; p < P; p++) made[p] = expanded + p * kept * TILE_BYTES;
            feed.expand(0);
            multiply<P>(begin, steps, panel, from, 0, made, feed);
            for (int64_t tile = 2; tile < tiles; tile += 2) multiply<P>(begin, steps, panel, from, tile, made, Fetch<P>{made, 0, 0});
        } else if (layout.alone) {
            for (int p = 0; p < P; p++) soon[p] = panels[p] + AHEAD;
            multiply<P>(begin, steps, panel, from, 0, panels, Fetch<P>{soon, TILE_BYTES / 64, TILE_BYTES});
        } else {
            // The next block is fetched while rows are multiplied by this one.
            int64_t following = panel + 2, next = begin;
            if (following >= to) following = from, next += layout.block;
            if (next >= layout.steps) following = to < end ? to : later, next = 0;
            for (int p = 0; p < P; p++) {
                panels[p] += begin * TILE_BYTES;
                soon[p] = address(following + p) + next * TILE_BYTES;
            }
            int64_t lines = ceil_div(TILE_BYTES / 64, ceil_div<int64_t>(tiles, 2));
            for (int64_t tile = 0; tile < tiles; tile += 2) {
                for (int p = 0; p < P; p++) part[p] = soon[p] + tile / 2 * steps * lines * 64;
                multiply<P>(begin, steps, panel, from, tile, panels, Fetch<P>{part, lines, lines * 64});
            }
        }
    }

    // Multiplies a pair of tiles of rows, or the last tile alone, by P panels.
    template <int P, class Feed>
    INLINE void multiply(int64_t begin, int64_t steps, int64_t panel, int64_t from, int64_t tile,
                     const char *const (&panels)[P], const Feed &feed) const {
        int64_t stride = layout.pads ? layout.steps * 64 : k * int64_t(sizeof(X)), other = std::min(tile + 1, tiles - 1);
        const char *base = (layout.pads ? x_copy : call.op.at<char>(0) + row * stride) + begin * 64;
        const char *x[2] = {base + begin_of(tile) * stride, base + begin_of(other) * stride};
        char *sums[2] = {acc_of(panel, from, P, tile), acc_of(panel, from, P, other)};
        if (other > tile)
            product_of_tiles<Dot, 2, P>(x, stride, panels, steps, begin == 0, sums, feed);
        else
            product_of_tiles<Dot, 1, P>(x, stride, panels, steps, begin == 0, sums, feed);
    }

    // The outputs of two panels are stored together for a few rows, since they share cache lines.
    INLINE void put(int64_t panel, int64_t from, int64_t to) const {
        constexpr int64_t TOGETHER = 4;
        int p = int(std::min<int64_t>(2, to - panel));
        for (int64_t begin = 0; begin < rows; begin += TOGETHER) {
            int64_t tile = begin / TILE_ROWS, within = begin - begin_of(tile);
            const Acc *sums = reinterpret_cast<const Acc *>(acc_of(panel, from, p, tile)) + within * p;
            for (int j = 0; j < p; j += Take::PAIRED ? 2 : 1) {
                int64_t column = (panel + j) / (Take::PAIRED ? 2 : 1) * LANES;
                take(row + begin, int(std::min(TOGETHER, rows - begin)), column, sums + j, p,
                     std::min<int64_t>(LANES, call.op.n[2] - column));
            }
        }
    }

    static constexpr int64_t AHEAD = 2048;  // bytes
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve

#endif
