// Products with weights in panels: the work of one unit. split.h divides a product into units, epilogue.h stores
// results. The form of the weights is a template parameter: Plain below, or Compact of compact.cpp.
#pragma once

#include <algorithm>

#include "gemm/split.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Product of blocks of panels with many rows, and its number of words for each word of Dot. Without a bfloat16
// instruction, panels and x are widened to float32 once for all rows.
template <class Dot>
struct Inner {
    typedef Dot type;
    static constexpr int64_t WORDS = 1;
};
#if !BF16_DOT
template <>
struct Inner<DotBFloat16> {
    typedef DotFloat32 type;
    static constexpr int64_t WORDS = 2;
};
#endif

template <class Dot>
int64_t words_of(int64_t k) {
    return ceil_div<int64_t>(k, Dot::PER_WORD);
}

// Tile: acc[r][p] += x . w, where acc[r][p] is at acc[r * acc_stride + p]. fresh: the sums begin at zero instead of the
// accumulators' values.
template <class Dot>
struct Tile {
    typedef typename Dot::Acc Acc;
    const char *x;  // the tile's first row
    int64_t x_stride, words;
    const char *const *panels;
    Acc *acc;
    int acc_stride;
    bool fresh;

    template <int R, int P>
    INLINE void start(Acc (&to)[R][P]) const {
        if (fresh) {
            _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
                _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) to[r][p] = Dot::start();
        } else {
            _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
                _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) to[r][p] = acc[r * acc_stride + p];
        }
    }
    template <int R, int P>
    INLINE void store(const Acc (&from)[R][P]) const {
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) acc[r * acc_stride + p] = from[r][p];
    }
};

// Tile of panels that are multiplied by no other rows. next: the panels that follow, prefetched.
template <class Dot>
struct OnceTile : Tile<Dot> {
    const char *const *next;

    // With few rows the hardware prefetcher follows the panels and is faster than software prefetch. With more rows it
    // does not reach far enough ahead.
    template <int R>
    static constexpr bool FETCH = R > 2;
    static constexpr int64_t AHEAD = 2048;  // bytes

    template <int R, int P>
    __attribute__((noinline)) void run() const {
        typename Dot::Acc acc[R][P];
        this->start(acc);
        const char *w[P], *x = this->x;
        RunPrefetch<FETCH<R> ? P : 0> ahead = {{}, PANEL_WORD_BYTES};
        for (int p = 0; p < P; p++) w[p] = this->panels[p];
        if constexpr (!FETCH<R>) {
            tile<Dot, R, P>(acc, x, this->x_stride, w, this->words, ahead);
        } else {
            int64_t last = std::min(this->words, AHEAD / PANEL_WORD_BYTES), words = this->words - last;
            for (int p = 0; p < P; p++) ahead.at[p] = w[p] + AHEAD;
            _Pragma("GCC unroll 1") for (int part = 0; part < 2; part++) {  // one copy of the loop for both parts
                tile<Dot, R, P>(acc, x, this->x_stride, w, words, ahead);
                x += words * Steps<Dot>::X_BYTES;
                for (int p = 0; p < P; p++) w[p] += words * PANEL_WORD_BYTES, ahead.at[p] = next[p];
                words = last;
            }
        }
        this->store(acc);
    }
};

// Tile of panels in the cache. ahead: what this thread needs next.
template <class Dot>
struct BlockTile : Tile<Dot> {
    SpreadPrefetch ahead;

    template <int R, int P>
    __attribute__((noinline)) void run() const {
        typename Dot::Acc acc[R][P];
        this->start(acc);
        const char *w[P];
        for (int p = 0; p < P; p++) w[p] = this->panels[p];
        SpreadPrefetch fetch = ahead;
        fetch.start(this->words);
        tile<Dot, R, P>(acc, this->x, this->x_stride, w, this->words, fetch);
        this->store(acc);
    }
};

template <int R, int P, class Function>
INLINE void with_panels(int p, const Function &f) {
    if constexpr (P > 1) {
        if (p < P) return with_panels<R, P - 1>(p, f);
    }
    f.template run<R, P>();
}

template <int R, class Function>
INLINE void with_rows(int r, int p, const Function &f) {
    if constexpr (R > 1) {
        if (r < R) return with_rows<R - 1>(r, p, f);
    }
    with_panels<R, widest_tile(R)>(p, f);
}

// Calls f.template run<R, P>() with run-time sizes 1 <= r <= ONCE_ROWS, 1 <= p <= widest_tile(r). Not inlined: each kernel
// would have the branches for all sizes.
template <class Function>
__attribute__((noinline)) void with_tile(int r, int p, const Function &f) {
    with_rows<ONCE_ROWS>(r, p, f);
}

// Panels of plain words. Interface of a form of weights, which is made of the op:
//
//   EXPANDS         true if blocks are always expanded to words of Inner before they are multiplied by several tiles
//   TILES           true if tile registers multiply the panels where a set has them
//   expands         true if blocks are expanded for this number of rows
//   prefers_tall_tiles  true if a tile works as long on its panels for few rows as for many, for this number of rows
//   block           maximum words of a block for this number of rows and of words
//   panel_bytes     bytes of a panel
//   at, bytes       address of a panel's block from word `first` on, bytes of a block of that many words
//   expand          writes that block to `out` as words of Inner
//   expanded_bytes  bytes that `expand` writes at most for a block of that many words
//   once            tile of panels that are multiplied by no other rows; next: the panels that follow
//   in_block        tile of panels in the cache, expanded or not
template <class D>
struct Plain {
    typedef D Dot;
    static constexpr bool EXPANDS = false, TILES = true;
    explicit Plain(const Op &) {}
    static INLINE OnceTile<Dot> once(const Tile<Dot> &tile, const char *const *next) { return {tile, next}; }
    template <class TileDot, bool EXPANDED>
    static INLINE BlockTile<TileDot> in_block(const Tile<TileDot> &tile, const SpreadPrefetch &ahead) {
        return {tile, ahead};
    }
    static int64_t expanded_bytes(int64_t words) { return words * Inner<Dot>::WORDS * PANEL_WORD_BYTES; }
    // With few rows, words are multiplied unexpanded: each tile widens them in registers.
    static bool expands(int64_t rows) { return Inner<Dot>::WORDS > 1 && rows > Split::NARROW_ROWS; }
    static bool prefers_tall_tiles(int64_t) { return false; }
    static int64_t block(int64_t rows, int64_t) {
        if (!Steps<Dot>::COPIES) return INT64_MAX;
        return rows <= Split::NARROW_ROWS ? 512 : expands(rows) ? 64 : 128;
    }
    static int64_t panel_bytes(int64_t k) { return words_of<Dot>(k) * PANEL_WORD_BYTES; }
    static INLINE const char *at(const char *panel, int64_t first) { return panel + first * PANEL_WORD_BYTES; }
    static INLINE int64_t bytes(int64_t words) { return words * PANEL_WORD_BYTES; }
    static INLINE void expand(const char *block, int64_t words, char *out) {
        if constexpr (Inner<Dot>::WORDS > 1) {
            typedef Steps<Dot> By;
            for (int64_t w = 0; w < words; w++, block += 64, out += 128) {
                store(reinterpret_cast<float *>(out), By::template get<0>(block));
                store(reinterpret_cast<float *>(out + 64), By::template get<1>(block));
            }
        }
    }
};

// Layout of the memory of a unit, apart from its own variables.
template <class Of>
struct UnitLayout {
    typedef typename Of::Dot Dot;
    typedef typename Of::Panels Panels;
    bool copies;         // x is copied
    int64_t block;       // words of a block
    int64_t x, panels, accumulators;  // bytes

    UnitLayout(const Call &call, const Split &split) {
        int64_t k = call.op.n[1], words = words_of<Dot>(k);
        copies = Steps<Dot>::COPIES || k % Dot::PER_WORD;
        block = split.whole ? words : Panels::block(call.rows, words);
        x = copies ? MARK + rounded(split.rows_per_unit * block * Steps<Dot>::X_BYTES) : 0;
        panels = !split.once && Panels::expands(call.rows) ? split.tile_panels * Panels::expanded_bytes(block) : 0;
        int64_t kept = split.whole ? split.tile_rows * split.tile_panels : split.rows_per_unit * split.panels_per_unit;
        accumulators = kept * int64_t(sizeof(typename Dot::Acc));
    }
    int64_t bytes() const { return x + panels + accumulators; }
    static constexpr int64_t MARK = 64;  // bytes before the copy of x; they hold the address of its first row
    static int64_t rounded(int64_t bytes) { return ceil_div<int64_t>(bytes, 64) * 64; }
};

// Unit of a product. take(row, rows, column, accumulators, stride, n) stores n columns of some rows, whose accumulators
// are `stride` apart. take.prefetch(row, rows, column, n) prefetches the memory that `take` will write. With
// Take::PAIRED, panels p of the first and the second half of the columns are adjacent in a tile. `take` then gets both
// accumulators. memory: UnitLayout::bytes() bytes, aligned to 64.
template <class Of, class Take>
struct Unit {
    typedef typename Of::Dot Dot;
    typedef typename Of::Panels Panels;
    typedef typename Of::X X;
    typedef typename Dot::Acc Acc;
    typedef Steps<Dot> By;
    const Call &call;
    const Split &split;
    const Take &take;
    Panels panels;
    UnitLayout<Of> layout;
    char *x_copy, *expanded;
    Acc *acc;
    int64_t k, words, row, rows, first, end, later;

    Unit(const Call &call, const Split &split, int64_t unit, const Take &take, char *memory)
        : call(call), split(split), take(take), panels(call.op), layout(call, split), x_copy(memory + layout.MARK),
          expanded(memory + layout.x), acc(reinterpret_cast<Acc *>(expanded + layout.panels)), k(call.op.n[1]),
          words(words_of<Dot>(k)),
          row(split.row_group(unit) * split.rows_per_unit), rows(std::min(split.rows_per_unit, call.rows - row)),
          first(split.panel_group(unit) * split.panels_per_unit),
          end(std::min(first + split.panels_per_unit, split.panels)),
          // Other threads take the units between this one and the next.
          later(split.panel_group(unit + call.threads) * split.panels_per_unit) {}

    INLINE void run() const {
        if (split.once)
            once();
        else
            blocks();
    }

  private:
    INLINE const char *address(int64_t panel) const {
        int64_t panel_index = Take::PAIRED ? panel / 2 + panel % 2 * (split.panels / 2) : panel;
        return call.op.at<char>(1) + panel_index * panels.panel_bytes(k);
    }

    // Address of the rows of which this thread has copied all words; null if it has copied a part of some rows since.
    INLINE const X *&copied() const { return *reinterpret_cast<const X **>(x_copy - layout.MARK); }
    // Copies words [begin, begin + count) of the unit's rows of x side by side and pads the last word with zeros.
    INLINE void copy(int64_t begin, int64_t count) const {
        copied() = nullptr;
        int64_t numbers = std::min(count * Dot::PER_WORD, k - begin * Dot::PER_WORD);
        const X *from = call.op.at<X>(0) + row * k + begin * Dot::PER_WORD;
        for (int64_t r = 0; r < rows; r++) {
            char *to = x_copy + r * count * By::X_BYTES;
            if (numbers < count * Dot::PER_WORD) std::memset(to + (count - 1) * By::X_BYTES, 0, By::X_BYTES);
            By::copy(from + r * k, numbers, to);
        }
    }
    // Copies all words of the unit's rows, unless this thread's last copy was of the same rows.
    INLINE void copy_all() const {
        const X *begin = call.op.at<X>(0) + row * k;
        if (call.again && copied() == begin) return;
        copy(0, words);
        copied() = begin;
    }
    INLINE const char *x_of(int64_t r, int64_t begin, int64_t count) const {
        if (layout.copies) return x_copy + r * count * By::X_BYTES;
        return reinterpret_cast<const char *>(call.op.at<X>(0) + (row + r) * k) + begin * 4;
    }
    INLINE int64_t x_stride(int64_t count) const {
        return layout.copies ? count * By::X_BYTES : k * int64_t(sizeof(X));
    }

    INLINE void once() const {
        if (layout.copies) copy_all();
        int most = widest_tile(int(rows));
        for (int64_t panel = first, p; panel < end; panel += p) {
            p = tile_panels(panel);
            int64_t following = panel + p < end ? panel + p : later;
            const char *w[MAX_PANELS], *next[MAX_PANELS];
            for (int64_t j = 0; j < p; j++) w[j] = address(panel + j), next[j] = address(following + j);
            for (int j = 0, some; j < p; j += some) {
                some = std::min(int(p) - j, most);
                with_tile(int(rows), some, panels.once(
                    {x_of(0, 0, words), x_stride(words), words, w + j, acc + j, int(p), true}, next + j));
            }
            put(panel, int(p), 0, rows, acc);
        }
    }

    INLINE void blocks() const {
        bool expands = Panels::EXPANDS || Panels::expands(call.rows);
        for (int64_t begin = 0, count; begin < words; begin += count) {
            count = std::min(layout.block, words - begin);
            if (layout.copies) count == words ? copy_all() : copy(begin, count);
            for (int64_t panel = first, p; panel < end; panel += p) {
                p = tile_panels(panel);
                if (expands)
                    block<typename Inner<Dot>::type, true>(begin, count, panel, int(p));
                else if constexpr (!Panels::EXPANDS)
                    block<Dot, false>(begin, count, panel, int(p));
            }
        }
        if (split.whole) return;
        for (int64_t begin = 0; begin < rows; begin += TOGETHER) {
            int64_t count = std::min(TOGETHER, rows - begin);
            for (int64_t panel = first, p; panel < end; panel += p) {
                p = tile_panels(panel);
                put(panel, int(p), begin, count, acc_of(panel) + begin * p);
            }
        }
    }

    // Multiplies words [begin, begin + count) of p panels by all rows of the unit. If these are all words, stores the
    // outputs of each tile.
    template <class TileDot, bool EXPANDS>
    INLINE void block(int64_t begin, int64_t count, int64_t panel, int p) const {
        constexpr int64_t PER = EXPANDS ? Inner<Dot>::WORDS : 1;
        bool wraps = panel + p >= end;
        int64_t following = wraps ? first : panel + p, next_begin = wraps ? begin + count : begin;
        if (next_begin >= words) following = later, next_begin = 0;
        const char *w[MAX_PANELS], *soon[MAX_PANELS];
        for (int j = 0; j < p; j++) {
            w[j] = panels.at(address(panel + j), begin);
            soon[j] = panels.at(address(following + j), next_begin);
            if constexpr (EXPANDS) {
                char *to = expanded + j * Panels::expanded_bytes(layout.block);
                panels.expand(w[j], count, to);
                w[j] = to;
            }
        }
        int64_t tiles = ceil_div<int64_t>(rows, split.tile_rows), inner = count * PER;
        // The tiles prefetch the next panels, in equal pieces if there are enough tiles.
        int64_t pieces = std::max<int64_t>(1, tiles / p), lines = ceil_div(panels.bytes(count), 64 * pieces);
        for (int64_t r = 0, tile = 0; r < rows; tile++) {
            int here = int(ceil_div(rows - r, tiles - tile)), most = widest_tile(here);
            Acc *sums = split.whole ? acc : acc_of(panel) + r * p;
            if (split.whole && !split.few) take.prefetch(row + r, here, panel * LANES, p * LANES);
            for (int j = 0, some; j < p; j += some) {
                some = std::min(p - j, most);
                SpreadPrefetch ahead = {{}, j == 0 && tile < pieces * p ? lines : 0};
                ahead.at[0] = ahead.at[1] = soon[tile % p] + tile / p * lines * 64;
                if (tile + tiles < p) ahead.at[1] = soon[tile + tiles];
                with_tile(here, some, panels.template in_block<TileDot, EXPANDS>(
                    {x_of(r, begin, count), x_stride(count), inner, w + j, sums + j, p, begin == 0}, ahead));
            }
            if (split.whole) put(panel, p, r, here, sums);
            r += here;
        }
    }

    INLINE int64_t tile_panels(int64_t panel) const { return std::min<int64_t>(split.tile_panels, end - panel); }
    // Returns the accumulators of a tile's panels, row after row.
    INLINE Acc *acc_of(int64_t panel) const { return acc + (panel - first) * rows; }

    // Stores `count` rows, from row `begin` of the unit on, of p panels. Not inlined, since it is long.
    __attribute__((noinline)) void put(int64_t panel, int p, int64_t begin, int64_t count, const Acc *from) const {
        bool whole = (panel + p) * LANES <= call.op.n[2];
        for (int j = 0; j < p; j += Take::PAIRED ? 2 : 1) {
            int64_t column = (panel + j) / (Take::PAIRED ? 2 : 1) * LANES;
            if (whole)
                take(row + begin, int(count), column, from + j, p, LANES);
            else
                take(row + begin, int(count), column, from + j, p, std::min<int64_t>(LANES, call.op.n[2] - column));
        }
    }

    // Rows whose outputs are stored for all panels together, since panels share cache lines and pages.
    static constexpr int64_t TOGETHER = 8;
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
