// The product that all matrix kernels are made of: R rows of x times P panels of 16 columns, in registers.
//
// A word is 32 bits along K: one float32, two bfloat16, four int8. A panel of w holds, word after word, the words of
// 16 columns; x holds its words row by row. Each output is one chain of additions along K, in ascending order, whatever
// R and P are: so a row's numbers do not depend on the rows beside it.
#pragma once

#include <algorithm>

#include "vec.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// acc + w . x over one word, by lane.
struct DotFloat32 {
    static constexpr int PER_WORD = 1;
    static constexpr int64_t PANEL = 64;  // bytes of a panel's word, as `stream` takes it
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

// int8 times int8, exactly, in int32.
struct DotInt8 {
    static constexpr int PER_WORD = 4;
    typedef I Acc;
    static INLINE Acc start() { return Acc{}; }
#if defined(__AVX512VNNI__)
    // The instruction takes unsigned times signed: x is taken plus 128, and whoever stores takes it off again.
    static constexpr int X_OFFSET = 128;
#else
    static constexpr int X_OFFSET = 0;
#endif
#if defined(__AVX512VNNI__)
    typedef __m512i W, X;
    static INLINE W get(const char *w) { return (__m512i)load_words(w, 0); }
    static INLINE X spread(uint32_t x) {
        return _mm512_xor_si512(_mm512_set1_epi32(int32_t(x)), _mm512_set1_epi8(char(X_OFFSET)));
    }
#else
    typedef const char *W;
    typedef uint32_t X;
    static INLINE W get(const char *w) { return w; }
    static INLINE X spread(uint32_t x) { return x; }
#endif
    static INLINE void step(Acc &acc, W w, X x) {
#if defined(__AVX512VNNI__)
        acc.v[0] = (ivec)_mm512_dpbusd_epi32((__m512i)acc.v[0], x, w);
#elif defined(__AVX2__)
        // Pairs of 16 bits: bytes 0 and 2 of each word, then 1 and 3.
        __m256i xs = _mm256_set1_epi32(int32_t(x));
        __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(xs, 8), 8), x_odd = _mm256_srai_epi16(xs, 8);
        EACH(i) {
            __m256i ws = (__m256i)load_words(w, i);
            __m256i even = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16(ws, 8), 8), x_even);
            __m256i odd = _mm256_madd_epi16(_mm256_srai_epi16(ws, 8), x_odd);
            acc.v[i] = acc.v[i] + (ivec)even + (ivec)odd;
        }
#else
        int32_t s = int32_t(x);
        EACH(i) {
            ivec v = load_words(w, i);
            acc.v[i] += ((v << 24) >> 24) * ((s << 24) >> 24) + ((v << 16) >> 24) * ((s << 16) >> 24) +
                        ((v << 8) >> 24) * ((s << 8) >> 24) + (v >> 24) * (s >> 24);
        }
#endif
    }
};

// The product of activations and weights of a dtype.
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

// acc[R][P] += x . w over `words` words. Row r of x is at x + r * x_stride bytes, word k of panel p at
// w[p] + k * w_stride. ahead: A runs of words that are needed next, which are fetched into the nearest cache; if FAR
// into the one after it, and all but the first may be null.
template <class Dot, int R, int P, int A, bool FAR>
INLINE void tile(typename Dot::Acc (&acc)[R][P], const char *x, int64_t x_stride, const char *const (&w)[P],
                 int64_t w_stride, int64_t words, const char *const *ahead) {
    for (int64_t k = 0; k < words; k++) {
        _Pragma("GCC unroll 4") for (int a = 0; a < A; a++)
            if (!FAR || a == 0 || ahead[a]) __builtin_prefetch(ahead[a] + k * w_stride, 0, FAR ? 2 : 3);
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
            uint32_t word = word_at(x + r * x_stride + k * 4);
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) Dot::step(acc[r][p], Dot::get(w[p] + k * w_stride), Dot::spread(word));
        }
    }
}

// What is read next: an address, and the bytes from one of its words to the next.
struct Next {
    const char *at;
    int64_t stride;
};

// The same of P panels side by side that come from memory: each of their words is loaded once for all rows. FETCH: some
// words before its use, and at the end the first words of `next`.
template <class Dot, int R, int P, bool FETCH>
INLINE void stream(typename Dot::Acc (&acc)[R][P], const char *x, int64_t x_stride, const char *w, int64_t w_stride,
                   int64_t words, Next next) {
    constexpr int64_t PANEL = Dot::PANEL, AHEAD = 512 / PANEL;
    auto run = [&](int64_t from, int64_t to, const char *ahead, int64_t stride) {
        for (int64_t k = from; k < to; k++, ahead += stride) {
            typename Dot::W v[P];
            _Pragma("GCC unroll 8") for (int p = 0; p < P; p++) {
                if (FETCH && p * PANEL % 64 == 0) __builtin_prefetch(ahead + p * PANEL, 0, 3);
                v[p] = Dot::get(w + k * w_stride + p * PANEL);
            }
            _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
                auto word = Dot::spread(word_at(x + r * x_stride + k * 4));
                _Pragma("GCC unroll 8") for (int p = 0; p < P; p++) Dot::step(acc[r][p], v[p], word);
            }
        }
    };
    int64_t last = std::max<int64_t>(0, words - AHEAD);
    run(0, last, w + AHEAD * w_stride, w_stride);
    run(last, words, next.at, next.stride);
}

// One more word for the elements that do not fill one: n of them, the others being 0 on both sides.
template <class Dot, int R, int P>
INLINE void tile_tail(typename Dot::Acc (&acc)[R][P], const char *x, int64_t x_stride, const char *const (&w)[P],
                      int64_t bytes) {
    _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
        uint32_t word = 0;
        std::memcpy(&word, x + r * x_stride, size_t(bytes));
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) Dot::step(acc[r][p], Dot::get(w[p]), Dot::spread(word));
    }
}

// The widest tile for m rows: as many panels as the registers allow beside them.
constexpr int MAX_ROWS = MAX_ACC / 2 > 1 ? MAX_ACC / 2 : 1;
constexpr int MAX_PANELS = 4;
constexpr int panels_for(int rows, int widest = MAX_PANELS) {
    int p = MAX_ACC / (rows < 1 ? 1 : rows);
    return p > widest ? widest : p < 1 ? 1 : p;
}
// Rows of a tile where there are more than MAX_ROWS of them.
constexpr int BLOCK_ROWS = MAX_ACC >= 24 ? 6 : MAX_ACC / 2 > 0 ? MAX_ACC / 2 : 1;
// The same where there are few enough that each panel meets them but a few times.
constexpr int FEW_ROWS = MAX_ACC >= 24 ? 8 : BLOCK_ROWS;

template <int R, int P, class Function>
INLINE void with_panels(int p, const Function &f) {
    if constexpr (P > 1) {
        if (p < P) return with_panels<R, P - 1>(p, f);
    }
    f.template run<R, P>();
}

// Calls f.template run<R, P>() for the tile of run-time sizes 1 <= r <= MAX_ROWS, 1 <= p <= panels_for(r, WIDEST).
template <int WIDEST = MAX_PANELS, int R = MAX_ROWS, class Function>
INLINE void with_rows(int r, int p, const Function &f) {
    if constexpr (R > 1) {
        if (r < R) return with_rows<WIDEST, R - 1>(r, p, f);
    }
    with_panels<R, panels_for(R, WIDEST)>(p, f);
}

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
