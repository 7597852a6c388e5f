// Products of attention: rows of queries or weights times panels of the KV cache.
//
// Each output is one chain of additions along K in ascending order, whatever the tiles are (tile.h).
#pragma once

#include <algorithm>

#include "cache.h"

namespace npuserve {
namespace NPUSERVE_ISA {

constexpr int WIDEST = 8;  // panels of a tile
constexpr int MAX_ROWS = MAX_ACC / 2 > 1 ? MAX_ACC / 2 : 1;
// Rows of a tile where there are more than MAX_ROWS of them.
constexpr int BLOCK_ROWS = MAX_ACC >= 24 ? 6 : MAX_ROWS;

// The tiles of a product: as many rows and panels as the registers hold beside their operands.
template <class Dot>
struct Sweep {
    static constexpr int ACC = Dot::TAKES_MUCH ? std::min(MAX_ACC, 5) : MAX_ACC;
    static constexpr int MOST_ROWS = Dot::TAKES_MUCH ? ACC : MAX_ROWS;
    static constexpr int BLOCK = Dot::TAKES_MUCH ? ACC : BLOCK_ROWS;  // rows where there are more than MOST_ROWS
    static constexpr int panels(int rows) { return panels_for(rows, WIDEST, ACC); }
    static int rows(int64_t all, int64_t panels_of_all) {
        return all <= MOST_ROWS ? int(all) : panels_of_all >= panels(BLOCK) ? BLOCK : MOST_ROWS;
    }

    // The widest tile of so many rows for at most so many panels: not every width is compiled, each takes its time.
    static int fitting(int rows, int64_t most) {
        int p = panels(rows);
        while (p > most) p = narrower(p);
        return p;
    }

    // Calls f.template run<R, P>() for 1 <= r <= MOST_ROWS and a `fitting` p.
    template <int R = MOST_ROWS, class Function>
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
        f.template run<R, P>();
    }
};

// So few rows wait for memory.
constexpr int64_t FEW = 8;

// A stretch of words that is read soon: fetched by rows of `bytes`, one whenever as many bytes of another are read.
struct Ahead {
    const char *at = nullptr;
    int64_t stride = 0, rows = 0, bytes = INT64_MAX, read = 0;

    Ahead() {}
    // Words, and of each so many bytes side by side. Those that follow each other without a gap are one line.
    Ahead(const char *at, int64_t stride, int64_t words, int64_t bytes_of_word)
        : at(at), stride(stride), rows(words), bytes(bytes_of_word) {
        if (bytes == stride) this->stride = bytes = WHOLE, rows = ceil_div(words * stride, WHOLE);
        if (rows <= 0) bytes = INT64_MAX;
    }
    INLINE void pass(int64_t more) {
        read += more;
        while (__builtin_expect(read >= bytes, 0)) fetch();
    }

  private:
    static constexpr int64_t WHOLE = 512;
    // Into the second cache: the first is too small for what lies between.
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

// acc += x . w over `words` words of P panels side by side.
template <class Dot, int R, int P>
INLINE void meet(typename Dot::Acc (&acc)[R][P], const char *x, int64_t x_stride, const char *w, int64_t w_stride,
                 int64_t words, Ahead &ahead) {
    for (int64_t k = 0; k < words; k++) {
        const char *panels = w + k * w_stride, *row = x + k * Dot::X_BYTES;
        if constexpr (Dot::TAKES_MUCH) {
            _Pragma("GCC unroll 8") for (int p = 0; p < P; p++) {
                auto v = Dot::get(panels + p * Dot::PANEL);
                _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
                    Dot::step(acc[r][p], v, Dot::take(row + r * x_stride));
            }
        } else {
            typename Dot::W v[P];
            _Pragma("GCC unroll 8") for (int p = 0; p < P; p++) v[p] = Dot::get(panels + p * Dot::PANEL);
            _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
                auto word = Dot::take(row + r * x_stride);
                _Pragma("GCC unroll 8") for (int p = 0; p < P; p++) Dot::step(acc[r][p], v[p], word);
            }
        }
        ahead.pass(P * Dot::PANEL);
    }
}

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
