// The product that all matrix kernels are made of: R rows of x times P panels of 16 columns, in registers.
//
// A word is 32 bits along K: one float32, two bfloat16, four int8. A panel of w holds, word after word, the words of
// 16 columns; x holds its words row by row. Each output is one chain of additions along K, in ascending order, whatever
// R and P are: so a row's numbers do not depend on the rows beside it.
#pragma once

#include "vec.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// acc + w . x over one word, by lane.
struct DotFloat32 {
    static constexpr int PER_WORD = 1;
    typedef F Acc;
    static INLINE Acc start() { return zero(); }
    static INLINE void step(Acc &acc, const char *w, uint32_t x) {
        float f;
        std::memcpy(&f, &x, 4);
        acc = fma(load(reinterpret_cast<const float *>(w)), set1(f), acc);
    }
};

INLINE ivec load_words(const char *w, int part) {
    return *reinterpret_cast<const ivec_u *>(w + part * WIDTH * 4);
}

struct DotBFloat16 {
    static constexpr int PER_WORD = 2;
    typedef F Acc;
    static INLINE Acc start() { return zero(); }
    static INLINE void step(Acc &acc, const char *w, uint32_t x) {
#if defined(__AVX512BF16__)
        acc.v[0] = (fvec)_mm512_dpbf16_ps((__m512)acc.v[0], (__m512bh)load_words(w, 0),
                                          (__m512bh)_mm512_set1_epi32(int32_t(x)));
#else
        uint32_t low = x << 16, high = x & 0xFFFF0000u;
        float a, b;
        std::memcpy(&a, &low, 4);
        std::memcpy(&b, &high, 4);
        F even, odd;
        EACH(i) {
            ivec v = load_words(w, i);
            even.v[i] = (fvec)(v << 16);
            odd.v[i] = (fvec)(v & int32_t(0xFFFF0000u));
        }
        acc = fma(odd, set1(b), fma(even, set1(a), acc));
#endif
    }
};

// int8 times int8, exactly, in int32.
struct DotInt8 {
    static constexpr int PER_WORD = 4;
    struct Acc {
        ivec v[PARTS];
    };
    static INLINE Acc start() { return Acc{}; }
#if defined(__AVX512VNNI__)
    // The instruction takes unsigned times signed: x is taken plus 128, and whoever stores takes it off again.
    static constexpr int X_OFFSET = 128;
#else
    static constexpr int X_OFFSET = 0;
#endif
    static INLINE void step(Acc &acc, const char *w, uint32_t x) {
#if defined(__AVX512VNNI__)
        acc.v[0] = (ivec)_mm512_dpbusd_epi32((__m512i)acc.v[0], _mm512_set1_epi32(int32_t(x ^ 0x80808080u)),
                                             (__m512i)load_words(w, 0));
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
// w[p] + k * w_stride. ahead: A <= P runs of words that are needed next, which are fetched into the nearest cache, or if
// FAR into the one after it.
template <class Dot, int R, int P, int A, bool FAR>
INLINE void tile(typename Dot::Acc (&acc)[R][P], const char *x, int64_t x_stride, const char *const (&w)[P],
                 int64_t w_stride, int64_t words, const char *const *ahead) {
    for (int64_t k = 0; k < words; k++) {
        _Pragma("GCC unroll 4") for (int a = 0; a < A; a++)
            __builtin_prefetch(ahead[a] + k * w_stride, 0, FAR ? 2 : 3);
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
            uint32_t word = word_at(x + r * x_stride + k * 4);
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) Dot::step(acc[r][p], w[p] + k * w_stride, word);
        }
    }
}

// One more word for the elements that do not fill one: n of them, the others being 0 on both sides.
template <class Dot, int R, int P>
INLINE void tile_tail(typename Dot::Acc (&acc)[R][P], const char *x, int64_t x_stride, const char *const (&w)[P],
                      int64_t bytes) {
    _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
        uint32_t word = 0;
        std::memcpy(&word, x + r * x_stride, size_t(bytes));
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) Dot::step(acc[r][p], w[p], word);
    }
}

// The widest tile for m rows: as many panels as the registers allow beside them.
constexpr int MAX_ROWS = MAX_ACC / 2 > 1 ? MAX_ACC / 2 : 1;
constexpr int MAX_PANELS = 4;
constexpr int panels_for(int rows) {
    int p = MAX_ACC / (rows < 1 ? 1 : rows);
    return p > MAX_PANELS ? MAX_PANELS : p < 1 ? 1 : p;
}
// Rows of a tile where there are more than MAX_ROWS of them.
constexpr int BLOCK_ROWS = MAX_ACC >= 24 ? 6 : MAX_ACC / 2 > 0 ? MAX_ACC / 2 : 1;

// Calls f.template operator()<R, P>() for the tile of run-time sizes 1 <= r <= MAX_ROWS, 1 <= p <= panels_for(r).
template <class Function, int R = MAX_ROWS>
INLINE void with_rows(int r, int p, const Function &f) {
    if constexpr (R >= 1) {
        if (r == R) {
            constexpr int MOST = panels_for(R);
            if constexpr (MOST >= 4) {
                if (p == 4) return f.template run<R, 4>();
            }
            if constexpr (MOST >= 3) {
                if (p == 3) return f.template run<R, 3>();
            }
            if constexpr (MOST >= 2) {
                if (p == 2) return f.template run<R, 2>();
            }
            return f.template run<R, 1>();
        }
        return with_rows<Function, R - 1>(r, p, f);
    }
}

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
