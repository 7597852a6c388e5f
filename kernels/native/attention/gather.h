// Keys and values of a split, copied from the cache's blocks to this thread's scratch for products with many rows.
//
// The copies are operands in the form that a product reads, widened once for all rows. They are in groups of GROUP
// adjacent panels. A tile reads a contiguous group, which stays in the first-level cache for all rows. Each output is
// the same chain of additions as over the blocks.
#pragma once

#include <type_traits>

#include "attention/sweep.h"

namespace npuserve {
namespace NPUSERVE_ISA {

#if defined(__AVX512VNNI__) && !BF16_DOT
constexpr bool GATHERS = true;
#define ONE_COPY __attribute__((noinline))
#else
constexpr bool GATHERS = false;  // products read the blocks themselves
#define ONE_COPY INLINE
#endif

constexpr int GROUP = 4;  // panels
constexpr int64_t MAX_PADDING = 7;

// Tiles of the instruction sets that gather. Rows are padded to 1, 2, 4, 8 or a multiple of 6, so that few tiles are
// compiled. The interface is that of Sweep.
template <bool FEW_ROWS>
struct PaddedTiles {
    static constexpr bool PADS = true;
    static constexpr int panels(int rows) { return rows > 6 ? 2 : GROUP; }
    static int rows(int64_t all, int64_t) { return !FEW_ROWS ? 6 : all > 4 ? 8 : all > 2 ? 4 : int(all); }
    static int fitting(int rows, int64_t most) {
        int p = panels(rows);
        while (p > most) p /= 2;
        return p;
    }
    static int64_t count(int64_t all) { return ceil_div<int64_t>(all, rows(all, 0)); }
    template <class Function>
    static INLINE void with(int r, int p, const Function &f) {
        if constexpr (!FEW_ROWS)
            with_width<6>(p, f);
        else if (r > 4)
            with_width<8>(p, f);
        else if (r > 2)
            with_width<4>(p, f);
        else if (r > 1)
            with_width<2>(p, f);
        else
            with_width<1>(p, f);
    }

  private:
    template <int R, int P = panels(R), class Function>
    static INLINE void with_width(int p, const Function &f) {
        if constexpr (P > 1) {
            if (p < P) return with_width<R, P / 2>(p, f);
        }
        f.template run<R, P>();
    }
};
typedef PaddedTiles<true> FewTiles;
typedef PaddedTiles<false> ManyTiles;

// Operands of the next step, of which one part is prefetched with each tile.
struct NextOperands {
    Prefetch runs[SPLIT_PANELS + 1];
    int64_t count = 0, current = 0, of_tile = 0;

    void add(const Prefetch &run) { runs[count++] = run; }
    void spread(int64_t bytes, int64_t tiles) { of_tile = ceil_div(bytes, std::max<int64_t>(1, tiles)); }
    void pass() {
        if (current == count) return;
        runs[current].pass(of_tile);
        if (runs[current].done()) current++;
    }
};
struct ByTile {
    NextOperands *upcoming;
    INLINE void begin_tile() { upcoming->pass(); }
    INLINE void pass(int64_t) {}
};

// Product over gathered operands. To: its type. STEPS: its words for each word of the cache. put: writes them, `stride`
// apart.
template <class Dot>
struct Gathered {
    typedef Dot To;
    static constexpr int STEPS = 1;
    static INLINE void put(const char *w, char *to, int64_t) { std::memcpy(to, w, Dot::PANEL); }
};

#if defined(__AVX512VNNI__) && !BF16_DOT
template <>
struct Gathered<DotWide> {
    typedef OfWords<DotFloat32> To;
    static constexpr int STEPS = 2;
    static INLINE void put(const char *w, char *to, int64_t stride) {
        DotWide::W both = DotWide::get(w);
        store(reinterpret_cast<float *>(to), both.even);
        store(reinterpret_cast<float *>(to + stride), both.odd);
    }
};

// DotInt16 over int8 held in int16.
struct DotHeldInt16 : DotInt16 {
    static constexpr int64_t PANEL = 64;
    static INLINE W get(const char *w) { return _mm512_loadu_si512(w); }
};
template <>
struct Gathered<DotInt16> {
    typedef DotHeldInt16 To;
    static constexpr int STEPS = 1;
    static INLINE void put(const char *w, char *to, int64_t) { _mm512_storeu_si512(to, DotInt16::get(w)); }
};
#endif

template <class C>
struct Gather {
    typedef typename C::Dot From;
    typedef Gathered<From> By;
    typedef typename By::To Dot;
    static constexpr int64_t PER_WORD = C::PER_WORD / By::STEPS;  // numbers to a word of To
    static constexpr int64_t STRIDE = GROUP * Dot::PANEL;         // bytes from one word of a group to the next
    static constexpr int64_t CHUNK = 128;                         // words of values in a group: 32 KB
    static constexpr int64_t MOST_RUNS = SPLIT_PANELS / GROUP;

    static int64_t bytes(const Shape &s) {
        int64_t keys = MOST_RUNS * (s.dim / PER_WORD), words = ceil_div(SPLIT / PER_WORD, CHUNK) * CHUNK;
        return std::max(keys, ceil_div<int64_t>(s.padded_dim, GROUP * LANES) * words) * STRIDE;
    }

    // Copies the keys of `runs` runs to runs of GROUP panels each. Returns the number of the new runs.
    static int64_t keys(const Shape &s, const Run *from, int64_t runs, uint16_t *scales, char *buffer, Run *to) {
        const int64_t words = s.dim / C::PER_WORD, stride = s.key_stride<C>(), size = s.dim / PER_WORD * STRIDE;
        for (int64_t i = 0; i < runs; i++) {
            C::copy_scales(from[i].scales, from[i].tokens, scales + from[i].first);
            for (int64_t token = 0; token < from[i].tokens; token += LANES) {
                int64_t panel = (from[i].first + token) / LANES;
                const char *w = from[i].at + token / LANES * s.key_panel<C>();
                char *at = buffer + panel / GROUP * size + panel % GROUP * Dot::PANEL;
                for (int64_t k = 0; k < words; k++) By::put(w + k * stride, at + k * By::STEPS * STRIDE, STRIDE);
            }
        }
        int64_t tokens = from[runs - 1].first + from[runs - 1].tokens, made = 0;
        for (int64_t first = 0; first < tokens; first += GROUP * LANES, made++)
            to[made] = {buffer + made * size, first, std::min<int64_t>(GROUP * LANES, tokens - first), scales + first};
        return made;
    }

    // Copies the values of `runs` runs to runs of CHUNK words each. `to` holds the runs of the first group of panels.
    // The runs of the next group begin CHUNK * STRIDE bytes later. Returns the number of the new runs.
    static int64_t values(const Shape &s, const Run *from, int64_t runs, char *buffer, Run *to) {
        const int64_t stride = s.value_stride<C>(), panels = s.padded_dim / LANES;
        const int64_t size = ceil_div<int64_t>(panels, GROUP) * CHUNK * STRIDE;
        for (int64_t i = 0; i < runs; i++) {
            int64_t words = ceil_div(from[i].tokens, C::PER_WORD);
            for (int64_t k = 0; k < words; k++) {
                int64_t word = (from[i].first / C::PER_WORD + k) * By::STEPS;
                char *at = buffer + word / CHUNK * size + word % CHUNK * STRIDE;
                const char *w = from[i].at + k * stride;
                for (int64_t panel = 0; panel < panels; panel++, w += From::PANEL)
                    By::put(w, at + panel / GROUP * CHUNK * STRIDE + panel % GROUP * Dot::PANEL, STRIDE);
            }
        }
        int64_t tokens = from[runs - 1].first + from[runs - 1].tokens, made = 0;
        for (int64_t first = 0; first < tokens; first += CHUNK * PER_WORD, made++)
            to[made] = {buffer + made * size, first, std::min(CHUNK * PER_WORD, tokens - first), nullptr};
        return made;
    }
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
