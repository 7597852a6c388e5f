// Products of attention: rows of queries or weights times panels of the KV cache.
//
// Each output is one chain of additions along K in ascending order, whatever the tiles are (tile.h).
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/merge.h"

namespace npuserve {
namespace NPUSERVE_ISA {

constexpr int MAX_TILE_PANELS = 8;
constexpr int MAX_ROWS = MAX_ACC / 2 > 1 ? MAX_ACC / 2 : 1;
// Rows of a tile if there are more than MAX_ROWS.
constexpr int BLOCK_ROWS = MAX_ACC >= 24 ? 6 : MAX_ROWS;

// Tiles of a product: as many rows and panels as the registers hold beside the operands.
template <class Dot>
struct Sweep {
    static constexpr bool PADS = false;  // rows are padded to the height of a tile
    static constexpr int ACC = Dot::TAKES_MUCH ? std::min(MAX_ACC, 5) : MAX_ACC;
    static constexpr int MAX_TILE_ROWS = Dot::TAKES_MUCH ? ACC : MAX_ROWS;
    static constexpr int BLOCK = Dot::TAKES_MUCH ? ACC : BLOCK_ROWS;  // rows if there are more than MAX_TILE_ROWS
    static constexpr int panels(int rows) { return panels_for(rows, MAX_TILE_PANELS, ACC); }
    static int rows(int64_t all, int64_t panels_of_all) {
        return all <= MAX_TILE_ROWS ? int(all) : panels_of_all >= panels(BLOCK) ? BLOCK : MAX_TILE_ROWS;
    }

    // Widest tile of `rows` rows for at most `most` panels. Only some widths are compiled, to save build time.
    static int fitting(int rows, int64_t most) {
        int p = panels(rows);
        while (p > most) p = narrower(p);
        return p;
    }

    // Calls f.template run<R, P>() for 1 <= r <= MAX_TILE_ROWS and a `fitting` p.
    template <int R = MAX_TILE_ROWS, class Function>
    static INLINE void with(int r, int p, const Function &f) {
        if constexpr (R > 1) {
            if (r < R) return with<R - 1>(r, p, f);
        }
        with_width<R, panels(R)>(p, f);
    }

  private:
    static constexpr int narrower(int p) { return p > 4 ? 4 : p > 2 ? 2 : 1; }
    template <int R, int P, class Function>
    static INLINE void with_width(int p, const Function &f) {
        if constexpr (P > 1) {
            if (p < P) return with_width<R, narrower(P)>(p, f);
        }
        if constexpr (Function::APART)
            apart<R, P>(f);
        else
            f.template run<R, P>();
    }
    template <int R, int P, class Function>
    __attribute__((noinline)) static void apart(const Function &f) {
        f.template run<R, P>();
    }
};

// True if each tile is a function of its own. One function of the 36 tiles that a set with BF16_DOT has takes three times
// as long to compile. Calls would cost a tenth of the time of short products of bfloat16.
template <class Dot>
constexpr bool TILES_APART = BF16_DOT && !std::is_base_of<DotBFloat16, Dot>::value;

// Up to this many rows, a product is bound by memory.
constexpr int64_t MEMORY_BOUND_ROWS = 8;

// Words that are read soon: prefetched by rows of `bytes`, one row whenever the same number of other bytes is read.
struct Prefetch {
    const char *at = nullptr;
    int64_t stride = 0, rows = 0, bytes = INT64_MAX, read = 0;

    Prefetch() {}
    // Words with `bytes_of_word` contiguous bytes each. Adjacent words are one line.
    Prefetch(const char *at, int64_t stride, int64_t words, int64_t bytes_of_word)
        : at(at), stride(stride), rows(words), bytes(bytes_of_word) {
        if (bytes == stride) this->stride = bytes = WHOLE, rows = ceil_div(words * stride, WHOLE);
        if (rows <= 0) bytes = INT64_MAX;
    }
    INLINE void pass(int64_t more) {
        read += more;
        while (__builtin_expect(read >= bytes, 0)) fetch();
    }
    INLINE void begin_tile() {}
    bool done() const { return bytes == INT64_MAX; }

  private:
    static constexpr int64_t WHOLE = 512;
    // Prefetches into the second-level cache: the first is too small for the operands in between.
    INLINE void fetch() {
        read -= bytes;
        if (bytes == WHOLE) {
            _Pragma("GCC unroll 8") for (int64_t i = 0; i < WHOLE; i += 64) __builtin_prefetch(at + i, 0, 2);
        } else {
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
        }
        at += stride;
        if (--rows == 0) bytes = INT64_MAX;
    }
};

// A tile of one of many sizes is a function of its own: one function of all tiles takes three times as long to compile.
#if BF16_DOT
#define ONE_TILE __attribute__((noinline))
#else
#define ONE_TILE INLINE
#endif

// acc += x . w over `words` words of P panels, panel_stride bytes apart.
template <class Dot, int R, int P, class Fetch>
INLINE void multiply(typename Dot::Acc (&acc)[R][P], const char *x, int64_t x_stride, const char *w, int64_t w_stride,
                 int64_t panel_stride, int64_t words, Fetch &ahead) {
    for (int64_t k = 0; k < words; k++) {
        const char *panels = w + k * w_stride, *row = x + k * Dot::X_BYTES;
        if constexpr (Dot::TAKES_MUCH || BY_PANELS) {
            _Pragma("GCC unroll 8") for (int p = 0; p < P; p++) {
                auto v = Dot::get(panels + p * panel_stride);
                _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
                    Dot::step(acc[r][p], v, Dot::take(row + r * x_stride));
            }
        } else {
            typename Dot::W v[P];
            _Pragma("GCC unroll 8") for (int p = 0; p < P; p++) v[p] = Dot::get(panels + p * panel_stride);
            _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
                auto word = Dot::take(row + r * x_stride);
                _Pragma("GCC unroll 8") for (int p = 0; p < P; p++) Dot::step(acc[r][p], v[p], word);
            }
        }
        ahead.pass(P * Dot::PANEL);
    }
}

// S[row][token] = q . k, for one run. A call of `run` computes `tiles` tiles of R rows from `row` on.
template <class C, class Dot, class Fetch>
struct Scores {
    static constexpr bool APART = TILES_APART<Dot>;
    const char *q;
    const float *q_scales;
    int64_t row_bytes, words, stride, panel_stride;
    Run keys;
    float *scores;
    Visibility visible;
    int64_t row, panel;
    mutable Fetch ahead;
    int64_t tiles = 1;

    // Number of panels from `panel` on that are visible to some of the rows.
    INLINE int64_t panels(int rows) const {
        return ceil_div<int64_t>(visible.by(row + rows - 1) - keys.first, LANES) - panel;
    }
    template <int R, int P>
    ONE_TILE void run() const {
        Fetch next = ahead;
        const char *w = keys.at + panel * panel_stride;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t first = row + tile * R;
            float *to = scores + first * SPLIT + keys.first + panel * LANES;
            typename Dot::Acc acc[R][P];
            for (int r = 0; r < R; r++)
                for (int p = 0; p < P; p++) acc[r][p] = Dot::start();
            next.begin_tile();
            multiply<Dot, R, P>(acc, q + first * row_bytes, row_bytes, w, stride, panel_stride, words, next);
            for (int r = 0; r < R; r++)
                for (int p = 0; p < P; p++)
                    store(to + r * SPLIT + p * LANES, C::score(acc[r][p], q_scales[first + r], keys.scales + (panel + p) * LANES));
        }
        ahead = next;
    }
};

// out[row] = weights . v, for a split's runs [begin, end) of `runs`; the runs before are in `out` already. `run` as in
// Scores. PER_WORD: tokens to a word of Dot.
template <class C, class Dot, int64_t PER_WORD, class Fetch>
struct Weighted {
    static constexpr bool APART = TILES_APART<Dot>;
    const char *weights;
    const float *weight_scales;
    const Run *values;
    int64_t begin, end, runs, stride, of_panels, padded_dim;
    float *out;
    Merging merging;
    Visibility visible;
    int64_t row, panel;
    mutable Fetch ahead;
    int64_t tiles = 1;

    INLINE int64_t panels(int) const { return of_panels - panel; }
    template <int R, int P>
    ONE_TILE void run() const {
        typedef typename Dot::Acc Acc;
        constexpr int64_t row_bytes = SPLIT * int64_t(sizeof(typename C::X));
        Fetch next = ahead;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t first = row + tile * R;
            const char *x = weights + first * row_bytes;
            float *to = out + first * padded_dim + panel * LANES;
            Acc acc[R][P];
            for (int r = 0; r < R; r++)
                for (int p = 0; p < P; p++) {
                    acc[r][p] = Dot::start();
                    if (begin > 0) std::memcpy(&acc[r][p], to + r * padded_dim + p * LANES, sizeof(Acc));
                }
            int64_t see = visible.by(first + R - 1);
            next.begin_tile();
            for (int64_t i = begin; i < end && values[i].first < see; i++) {
                int64_t words = ceil_div<int64_t>(std::min(see - values[i].first, values[i].tokens), PER_WORD);
                multiply<Dot, R, P>(acc, x + values[i].first / PER_WORD * Dot::X_BYTES, row_bytes,
                                values[i].at + panel * Dot::PANEL, stride, Dot::PANEL, words, next);
            }
            for (int r = 0; r < R; r++)
                for (int p = 0; p < P; p++) {
                    float *lanes = to + r * padded_dim + p * LANES;
                    if (end < runs)
                        std::memcpy(lanes, &acc[r][p], sizeof(Acc));
                    else
                        merging.put(first + r, lanes, C::weighted(acc[r][p], weight_scales[first + r]));
                }
        }
        ahead = next;
    }
};

// Panels stay in the cache for all rows. Tiles of equal size are one call: with one call each, a tile of 64 words took a
// twentieth more time on a Zen 4.
template <class By, class Functor>
INLINE void for_tiles(int64_t rows, int64_t panels, Functor f) {
    int most_rows = By::rows(rows, panels), most = By::panels(most_rows);
    for (int64_t panel = 0; panel < panels; panel += most)
        for (f.row = 0; f.row < rows; f.row += most_rows * f.tiles) {
            int here = By::PADS ? most_rows : int(std::min<int64_t>(most_rows, rows - f.row));
            f.panel = panel;
            int64_t whole = std::min<int64_t>(panel + most, panels), end = std::min(whole, panel + f.panels(here));
            // Later rows see no fewer panels.
            f.tiles = end == whole ? std::max<int64_t>(1, (rows - f.row) / most_rows) : 1;
            for (int some; f.panel < end; f.panel += some) {
                some = By::fitting(here, end - f.panel);
                By::with(here, some, f);
            }
        }
}

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
