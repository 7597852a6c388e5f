// Product in registers from which all matrix kernels are built: R rows of x times P panels of 16 columns.
//
// Each output is one chain of additions along K in ascending order for every R and P. A row's results therefore do not
// depend on other rows. See dot.h for words and panels.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gemm/dot.h"

namespace npuserve {
namespace NPUSERVE_ISA {

constexpr int64_t PANEL_WORD_BYTES = 64;

// Prefetches of the words that are needed next, into the second-level cache: the first level has too few outstanding
// loads for the memory's speed.
//
// RunPrefetch: A lines beside each word, each in a run of its own. stride: bytes of a run from word to word.
template <int A>
struct RunPrefetch {
    static constexpr int64_t EVERY = 1;
    const char *at[A > 0 ? A : 1];
    int64_t stride;
    INLINE void operator()(int64_t k) {
        _Pragma("GCC unroll 4") for (int a = 0; a < A; a++) __builtin_prefetch(at[a] + k * stride, 0, 2);
    }
};

// SpreadPrefetch: two runs of `lines` lines, spread over the words of a tile. If there is one run, both addresses are equal.
// A prefetch beside each word would cost up to a twentieth of a tile on Zen 4.
struct SpreadPrefetch {
    static constexpr int64_t EVERY = 8;
    const char *at[2];
    int64_t lines, each = 0;  // lines left; lines prefetched by a call

    INLINE void start(int64_t words) { each = words < EVERY ? 0 : ceil_div(lines, words / EVERY); }
    INLINE void operator()(int64_t) {
        for (int64_t i = each < lines ? each : lines; i > 0; i--)
            for (auto &line : at) __builtin_prefetch(line, 0, 2), line += 64;
        lines -= each;
    }
};

// Steps S and later of one word of panel p. w: its address, or the word itself in registers.
template <class Dot, int R, int P, int S = 0, class Word>
INLINE void panel_step(typename Dot::Acc (&acc)[R][P], int p, const char *x, int64_t x_stride, const Word &w) {
    typedef Steps<Dot> By;
    typename By::W v = By::template get<S>(w);
    _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) By::step(acc[r][p], v, By::template spread<S>(x + r * x_stride));
    if constexpr (S + 1 < By::COUNT) panel_step<Dot, R, P, S + 1>(acc, p, x, x_stride, w);
}

// True if a tile processes one panel after the other, since one word of a panel takes many registers.
constexpr bool BY_PANELS = PARTS > 2;

// Steps S and later of one word of all panels.
template <class Dot, int R, int P, int S = 0, class Word>
INLINE void tile_step(typename Dot::Acc (&acc)[R][P], const char *x, int64_t x_stride, const Word (&w)[P]) {
    if constexpr (BY_PANELS) {
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) panel_step<Dot>(acc, p, x, x_stride, w[p]);
        return;
    }
    typedef Steps<Dot> By;
    typename By::W v[P];
    _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) v[p] = By::template get<S>(w[p]);
    _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
        auto spread = By::template spread<S>(x + r * x_stride);
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) By::step(acc[r][p], v[p], spread);
    }
    if constexpr (S + 1 < By::COUNT) tile_step<Dot, R, P, S + 1>(acc, x, x_stride, w);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// True if a tile takes two words at once: smmla multiplies 8 bytes of two rows by 8 bytes of two columns. With fewer
// than four rows, arranging these bytes costs as many instructions as it saves.
template <class Dot, int R, int P>
constexpr bool BY_WORD_PAIRS = std::is_same<Dot, DotInt8>::value && R >= 4 && P == 1;

// Sums of `tile` over pairs of words; returns the number of words done. For integers the order does not matter.
template <int R, class Ahead>
INLINE int64_t tile_word_pairs(I (&acc)[R][1], const char *x, int64_t x_stride, const char *w, int64_t words, Ahead &ahead) {
    constexpr int PAIRS = (R + 1) / 2, LAST = R - 1;  // an odd last row is paired with itself
    int32x4_t sums[PAIRS][2 * PARTS];                 // of two rows: two columns of the first, two of the second
    _Pragma("GCC unroll 3") for (int q = 0; q < PAIRS; q++) EACH(i) {
        int64x2_t a = (int64x2_t)acc[2 * q][0].v[i], b = (int64x2_t)acc[2 * q < LAST ? 2 * q + 1 : LAST][0].v[i];
        sums[q][2 * i] = (int32x4_t)vzip1q_s64(a, b), sums[q][2 * i + 1] = (int32x4_t)vzip2q_s64(a, b);
    }
    int64_t k = 0;
    for (; k + 2 <= words; k += 2) {
        _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
            if ((k + i) % Ahead::EVERY == 0) ahead(k + i);
        int8x16_t rows[PAIRS];
        _Pragma("GCC unroll 3") for (int q = 0; q < PAIRS; q++) {
            const int8_t *first = reinterpret_cast<const int8_t *>(x + k * 4) + 2 * q * x_stride;
            rows[q] = vcombine_s8(vld1_s8(first), vld1_s8(2 * q < LAST ? first + x_stride : first));
        }
        EACH(i) {
            int32x4_t a = (int32x4_t)load_words(w + k * PANEL_WORD_BYTES, i);
            int32x4_t b = (int32x4_t)load_words(w + (k + 1) * PANEL_WORD_BYTES, i);
            int8x16_t low = (int8x16_t)vzip1q_s32(a, b), high = (int8x16_t)vzip2q_s32(a, b);
            _Pragma("GCC unroll 3") for (int q = 0; q < PAIRS; q++) {
                sums[q][2 * i] = vmmlaq_s32(sums[q][2 * i], rows[q], low);
                sums[q][2 * i + 1] = vmmlaq_s32(sums[q][2 * i + 1], rows[q], high);
            }
        }
    }
    _Pragma("GCC unroll 3") for (int q = 0; q < PAIRS; q++) EACH(i) {
        int64x2_t a = (int64x2_t)sums[q][2 * i], b = (int64x2_t)sums[q][2 * i + 1];
        acc[2 * q][0].v[i] = (ivec)vzip1q_s64(a, b);
        if (2 * q < LAST) acc[2 * q + 1][0].v[i] = (ivec)vzip2q_s64(a, b);
    }
    return k;
}
#endif

// acc[R][P] += x . w over `words` words. Row r of x is at x + r * x_stride bytes, word k of panel p at
// w[p] + k * PANEL_WORD_BYTES. ahead(k) is called before each group of Ahead::EVERY words and the rest; see RunPrefetch and
// SpreadPrefetch.
template <class Dot, int R, int P, class Ahead>
INLINE void tile(typename Dot::Acc (&acc)[R][P], const char *x, int64_t x_stride, const char *const (&w)[P], int64_t words,
                 Ahead &ahead) {
    int64_t k = 0;
    auto step = [&]() __attribute__((always_inline)) {
        const char *word[P];
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) word[p] = w[p] + k * PANEL_WORD_BYTES;
        tile_step<Dot>(acc, x + k * Steps<Dot>::X_BYTES, x_stride, word);
        k++;
    };
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (BY_WORD_PAIRS<Dot, R, P>) k = tile_word_pairs<R>(acc, x, x_stride, w[0], words, ahead);
#endif
    if constexpr (Ahead::EVERY == 1) {
        while (k < words) ahead(k), step();
    } else {
        while (k < words) {
            int64_t end = std::min(k + Ahead::EVERY, words);
            ahead(k);
            _Pragma("GCC unroll 1") while (k < end) step();  // unrolled, the code of all tiles would be eight times as long
        }
    }
}

// Panels of a tile of `rows` rows: as many as `accumulators` allows, and at most `widest`.
constexpr int panels_for(int rows, int widest, int accumulators) {
    int p = accumulators / (rows < 1 ? 1 : rows);
    return p > widest ? widest : p < 1 ? 1 : p;
}

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
