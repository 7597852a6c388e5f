// Product in registers from which all matrix kernels are built: R rows of x times P panels of 16 columns.
//
// A word is 32 bits along K: one float32, two bfloat16 or four int8. A panel of w holds, word after word, the words of
// 16 columns; x holds its words row by row. Each output is one chain of additions along K in ascending order for every
// R and P, so a row's numbers do not depend on other rows.
#pragma once

#include <type_traits>

#include "vec.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// acc + w . x over one word, by lane.
struct DotFloat32 {
    static constexpr int PER_WORD = 1;
    static constexpr int64_t PANEL = 64;  // bytes of a panel's word
    typedef F Acc, W, X;
    static INLINE Acc start() { return zero(); }
    static INLINE W get(const char *w) { return load(reinterpret_cast<const float *>(w)); }
    static INLINE X spread(uint32_t x) {
        float f;
        std::memcpy(&f, &x, 4);
        return set1(f);
    }
    static INLINE void step(Acc &acc, W w, X x) { acc = fma(w, x, acc); }
};

INLINE ivec load_words(const char *w, int part) {
    return *reinterpret_cast<const ivec_u *>(w + part * WIDTH * 4);
}

struct DotBFloat16 {
    static constexpr int PER_WORD = 2;
    static constexpr int64_t PANEL = 64;
    typedef F Acc;
    static INLINE Acc start() { return zero(); }
#if defined(__AVX512BF16__)
    typedef __m512bh W, X;
    static INLINE W get(const char *w) { return (__m512bh)load_words(w, 0); }
    static INLINE X spread(uint32_t x) { return (__m512bh)_mm512_set1_epi32(int32_t(x)); }
    static INLINE void step(Acc &acc, W w, X x) { acc.v[0] = (fvec)_mm512_dpbf16_ps((__m512)acc.v[0], w, x); }
#elif BF16_DOT
    struct W {
        ivec v[PARTS];
    };
    typedef bfloat16x4_t X;  // the word is in the first lane
    static INLINE W get(const char *w) {
        W r;
        EACH(i) r.v[i] = load_words(w, i);
        return r;
    }
    static INLINE X spread(uint32_t x) { return (X)uint32x2_t{x, 0}; }
    // Not bfmmla, which rounds differently and takes two rows.
    static INLINE void step(Acc &acc, W w, X x) {
        EACH(i) acc.v[i] = (fvec)vbfdotq_lane_f32((float32x4_t)acc.v[i], (bfloat16x8_t)w.v[i], x, 0);
    }
#else
    struct W {
        F even, odd;
    };
    typedef W X;
    static INLINE W get(const char *w) {
        W both;
        EACH(i) {
            ivec v = load_words(w, i);
            both.even.v[i] = (fvec)(v << 16);
            both.odd.v[i] = (fvec)(v & int32_t(0xFFFF0000u));
        }
        return both;
    }
    static INLINE X spread(uint32_t x) {
        uint32_t low = x << 16, high = x & 0xFFFF0000u;
        float a, b;
        std::memcpy(&a, &low, 4);
        std::memcpy(&b, &high, 4);
        return {set1(a), set1(b)};
    }
    static INLINE void step(Acc &acc, W w, X x) { acc = fma(w.odd, x.odd, fma(w.even, x.even, acc)); }
#endif
};

// int8 times int8, exact in int32.
struct DotInt8 {
    static constexpr int PER_WORD = 4;
    typedef I Acc;
    static INLINE Acc start() { return Acc{}; }
#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
    // The instruction multiplies unsigned by signed bytes: x is copied plus 128, and the epilogue subtracts 128 times
    // the sum of the weights.
    static constexpr int X_OFFSET = 128;
#else
    static constexpr int X_OFFSET = 0;
#endif
};

// Product of activations and weights of a dtype.
template <class D>
struct DotOf;
template <>
struct DotOf<Float32> {
    typedef DotFloat32 type;
};
template <>
struct DotOf<BFloat16> {
    typedef DotBFloat16 type;
};

INLINE uint32_t word_at(const char *p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

// Loads the word at x into every lane, in one instruction at each use: compilers would otherwise shift a number before
// they broadcast it, or keep it for the word's next step where registers are scarce.
INLINE ivec everywhere(const char *x) {
    ivec v;
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm volatile("vpbroadcastd %1, %0" : "=x"(v) : "m"(*reinterpret_cast<const uint32_t *>(x)));
#else
    v = ivec{} + int32_t(word_at(x));
#endif
    return v;
}

// Product of a word in steps that each need few registers beside the accumulators, and the form of x for the steps.
//
//   COUNT, X_BYTES  steps of a word, bytes of a word of x
//   COPIES          true if x is copied before it is multiplied; otherwise X_BYTES is 4 and x stays where it is
//   copy            copies `count` numbers of x
template <class Dot>
struct Steps {
    static constexpr int COUNT = 1;
    static constexpr int64_t X_BYTES = 4;
    static constexpr bool COPIES = false;
    typedef typename Dot::W W;
    typedef typename Dot::X X;
    template <int>
    static INLINE W get(const char *w) {
        return Dot::get(w);
    }
    // The same for a word in registers.
    template <int>
    static INLINE W get(const ivec (&w)[PARTS]) {
#if defined(__aarch64__)
        return Dot::get(reinterpret_cast<const char *>(w));
#else
        return (W)w[0];
#endif
    }
    template <int>
    static INLINE X spread(const char *x) {
        return Dot::spread(word_at(x));
    }
    static INLINE void step(typename Dot::Acc &acc, W w, X x) { Dot::step(acc, w, x); }
    template <class T>
    static void copy(const T *x, int64_t count, char *to) {
        std::memcpy(to, x, size_t(count) * sizeof(T));
    }
};

#if !BF16_DOT
// The even number, then the odd one; x in float32.
template <>
struct Steps<DotBFloat16> {
    static constexpr int COUNT = 2;
    static constexpr int64_t X_BYTES = 8;
    static constexpr bool COPIES = true;
    typedef F W;
    typedef fvec X;
    template <int S>
    static INLINE W get(const ivec (&w)[PARTS]) {
        W half;
        EACH(i) half.v[i] = (fvec)(S ? w[i] & int32_t(0xFFFF0000u) : w[i] << 16);
        return half;
    }
    template <int S>
    static INLINE W get(const char *w) {
        ivec words[PARTS];
        EACH(i) words[i] = load_words(w, i);
        return get<S>(words);
    }
    template <int S>
    static INLINE X spread(const char *x) {
        return (fvec)everywhere(x + S * 4);
    }
    static INLINE void step(F &acc, W w, X x) {
        F all;
        EACH(i) all.v[i] = x;
        acc = fma(w, all, acc);
    }
    static void copy(const uint16_t *x, int64_t count, char *to) {
        by_lanes(count, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            put_n<Float32>(reinterpret_cast<float *>(to) + i, get_n<BFloat16>(x + i, n), n);
        });
    }
};
#endif

#if defined(__AVX512VNNI__)
template <>
struct Steps<DotInt8> {
    static constexpr int COUNT = 1;
    static constexpr int64_t X_BYTES = 4;
    static constexpr bool COPIES = true;
    typedef __m512i W, X;
    template <int>
    static INLINE W get(const char *w) {
        return (__m512i)load_words(w, 0);
    }
    template <int>
    static INLINE X spread(const char *x) {
        return (__m512i)everywhere(x);
    }
    static INLINE void step(I &acc, W w, X x) { acc.v[0] = (ivec)_mm512_dpbusd_epi32((__m512i)acc.v[0], x, w); }
    static void copy(const int8_t *x, int64_t count, char *to) {
        for (int64_t i = 0; i < count; i++) to[i] = char(x[i] ^ 0x80);
    }
};
#elif defined(__AVX2__)
// Bytes 0 and 2 of each word as pairs of 16 bits, then 1 and 3; x as those pairs.
template <>
struct Steps<DotInt8> {
    static constexpr int COUNT = 2;
    static constexpr int64_t X_BYTES = 8;
    static constexpr bool COPIES = true;
    struct W {
        __m256i v[PARTS];
    };
    typedef __m256i X;
    template <int S>
    static INLINE W get(const char *w) {
        W half;
        EACH(i) {
            __m256i v = (__m256i)load_words(w, i);
            half.v[i] = _mm256_srai_epi16(S ? v : _mm256_slli_epi16(v, 8), 8);
        }
        return half;
    }
    template <int S>
    static INLINE X spread(const char *x) {
        return (__m256i)everywhere(x + S * 4);
    }
    static INLINE void step(I &acc, W w, X x) { EACH(i) acc.v[i] += (ivec)_mm256_madd_epi16(w.v[i], x); }
    static void copy(const int8_t *x, int64_t count, char *to) {
        int16_t *pairs = reinterpret_cast<int16_t *>(to);
        for (int64_t i = 0; i < count; i++) pairs[i / 4 * 4 + i % 2 * 2 + i / 2 % 2] = x[i];
    }
};
#elif defined(__ARM_FEATURE_DOTPROD)
template <>
struct Steps<DotInt8> {
    static constexpr int COUNT = 1;
    static constexpr int64_t X_BYTES = 4;
    static constexpr bool COPIES = false;
    struct W {
        ivec v[PARTS];
    };
    typedef int8x8_t X;  // the word is in the first lane
    template <int>
    static INLINE W get(const char *w) {
        W r;
        EACH(i) r.v[i] = load_words(w, i);
        return r;
    }
    template <int>
    static INLINE X spread(const char *x) {
        return (X)uint32x2_t{word_at(x), 0};
    }
    static INLINE void step(I &acc, W w, X x) {
        EACH(i) acc.v[i] = (ivec)vdotq_lane_s32((int32x4_t)acc.v[i], (int8x16_t)w.v[i], x, 0);
    }
    static void copy(const int8_t *x, int64_t count, char *to) { std::memcpy(to, x, size_t(count)); }
};
#elif defined(__aarch64__)
// Bytes 0 and 2 of each word as 16 bits, then 1 and 3: of four words byte 0 or 1, then byte 2 or 3. x in that order.
template <>
struct Steps<DotInt8> {
    static constexpr int COUNT = 2;
    static constexpr int64_t X_BYTES = 8;
    static constexpr bool COPIES = true;
    struct W {
        int16x8_t v[PARTS];
    };
    typedef int16x4_t X;
    template <int S>
    static INLINE W get(const char *w) {
        W half;
        EACH(i) {
            int16x8_t v = (int16x8_t)load_words(w, i);
            v = vshrq_n_s16(S ? v : vshlq_n_s16(v, 8), 8);
            half.v[i] = vuzp1q_s16(v, vextq_s16(v, v, 1));
        }
        return half;
    }
    template <int S>
    static INLINE X spread(const char *x) {
        return (X)uint32x2_t{word_at(x + S * 4), 0};
    }
    static INLINE void step(I &acc, W w, X x) {
        EACH(i) {
            int32x4_t sum = vmlal_lane_s16((int32x4_t)acc.v[i], vget_low_s16(w.v[i]), x, 0);
            acc.v[i] = (ivec)vmlal_high_lane_s16(sum, w.v[i], x, 1);
        }
    }
    static void copy(const int8_t *x, int64_t count, char *to) {
        int16_t *pairs = reinterpret_cast<int16_t *>(to);
        for (int64_t i = 0; i < count; i++) pairs[i / 4 * 4 + i % 2 * 2 + i / 2 % 2] = x[i];
    }
};
#else
template <>
struct Steps<DotInt8> {
    static constexpr int COUNT = 1;
    static constexpr int64_t X_BYTES = 4;
    static constexpr bool COPIES = false;
    typedef const char *W;
    typedef int32_t X;
    template <int>
    static INLINE W get(const char *w) {
        return w;
    }
    template <int>
    static INLINE X spread(const char *x) {
        return int32_t(word_at(x));
    }
    static INLINE void step(I &acc, W w, X x) {
        EACH(i) {
            ivec v = load_words(w, i);
            acc.v[i] += ((v << 24) >> 24) * ((x << 24) >> 24) + ((v << 16) >> 24) * ((x << 16) >> 24) +
                        ((v << 8) >> 24) * ((x << 8) >> 24) + (v >> 24) * (x >> 24);
        }
    }
    static void copy(const int8_t *x, int64_t count, char *to) { std::memcpy(to, x, size_t(count)); }
};
#endif

// Steps S and later of one word of panel p. w: its address, or the word itself in registers.
template <class Dot, int R, int P, int S = 0, class Word>
INLINE void panel_step(typename Dot::Acc (&acc)[R][P], int p, const char *x, int64_t x_stride, const Word &w) {
    typedef Steps<Dot> By;
    typename By::W v = By::template get<S>(w);
    _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) By::step(acc[r][p], v, By::template spread<S>(x + r * x_stride));
    if constexpr (S + 1 < By::COUNT) panel_step<Dot, R, P, S + 1>(acc, p, x, x_stride, w);
}

// True if one word of a panel takes so many registers that a tile processes one panel after the other.
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
template <int R, int A, bool SOME>
INLINE int64_t tile_word_pairs(I (&acc)[R][1], const char *x, int64_t x_stride, const char *w, int64_t w_stride,
                               int64_t words, const char *const *ahead, int64_t ahead_stride) {
    constexpr int PAIRS = (R + 1) / 2, LAST = R - 1;  // an odd last row is paired with itself
    int32x4_t sums[PAIRS][2 * PARTS];                 // of two rows: two columns of the first, two of the second
    _Pragma("GCC unroll 3") for (int q = 0; q < PAIRS; q++) EACH(i) {
        int64x2_t a = (int64x2_t)acc[2 * q][0].v[i], b = (int64x2_t)acc[2 * q < LAST ? 2 * q + 1 : LAST][0].v[i];
        sums[q][2 * i] = (int32x4_t)vzip1q_s64(a, b), sums[q][2 * i + 1] = (int32x4_t)vzip2q_s64(a, b);
    }
    int64_t k = 0;
    for (; k + 2 <= words; k += 2) {
        _Pragma("GCC unroll 4") for (int a = 0; a < A; a++)
            if (!SOME || ahead[a]) {
                __builtin_prefetch(ahead[a] + k * ahead_stride, 0, 2);
                __builtin_prefetch(ahead[a] + (k + 1) * ahead_stride, 0, 2);
            }
        int8x16_t rows[PAIRS];
        _Pragma("GCC unroll 3") for (int q = 0; q < PAIRS; q++) {
            const int8_t *first = reinterpret_cast<const int8_t *>(x + k * 4) + 2 * q * x_stride;
            rows[q] = vcombine_s8(vld1_s8(first), vld1_s8(2 * q < LAST ? first + x_stride : first));
        }
        EACH(i) {
            int32x4_t a = (int32x4_t)load_words(w + k * w_stride, i);
            int32x4_t b = (int32x4_t)load_words(w + (k + 1) * w_stride, i);
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
// w[p] + k * w_stride. ahead: A runs of words that are needed next, ahead_stride bytes apart, which are prefetched into
// the second-level cache: the first level has too few outstanding loads for the memory's speed. With SOME, entries may
// be null.
template <class Dot, int R, int P, int A, bool SOME>
INLINE void tile(typename Dot::Acc (&acc)[R][P], const char *x, int64_t x_stride, const char *const (&w)[P],
                 int64_t w_stride, int64_t words, const char *const *ahead, int64_t ahead_stride = 64) {
    int64_t k = 0;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (BY_WORD_PAIRS<Dot, R, P>)
        k = tile_word_pairs<R, A, SOME>(acc, x, x_stride, w[0], w_stride, words, ahead, ahead_stride);
#endif
    for (; k < words; k++) {
        _Pragma("GCC unroll 4") for (int a = 0; a < A; a++)
            if (!SOME || ahead[a]) __builtin_prefetch(ahead[a] + k * ahead_stride, 0, 2);
        const char *word[P];
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) word[p] = w[p] + k * w_stride;
        tile_step<Dot>(acc, x + k * Steps<Dot>::X_BYTES, x_stride, word);
    }
}

// Panels of a tile of `rows` rows: as many as `accumulators` allows, and at most `widest`.
constexpr int panels_for(int rows, int widest, int accumulators) {
    int p = accumulators / (rows < 1 ? 1 : rows);
    return p > widest ? widest : p < 1 ? 1 : p;
}

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
