// Products of one word of x and w, which gemm/tile.h adds up along K. W_BITS: what differs between a word of weights and
// a panel's word.
//
// A word is 32 bits along K: one float32, two bfloat16 or four int8. A panel of w holds, word after word, the words of
// 16 columns; x holds its words row by row.
#pragma once

#include "runtime/vec.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// acc + w . x over one word, by lane.
struct DotFloat32 {
    static constexpr int PER_WORD = 1;
    static constexpr int64_t PANEL = 64;  // bytes of a panel's word
    static constexpr uint32_t W_BITS = 0;
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
    static constexpr uint32_t W_BITS = 0;
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

// 1 if the set has an instruction that multiplies unsigned by signed bytes. `dot_bytes` is acc + w . x over the four bytes
// of each lane; w is unsigned.
#if defined(__AVX512VNNI__)
#define BYTE_DOT 1
INLINE ivec dot_bytes(ivec acc, ivec w, ivec x) { return (ivec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x); }
#elif defined(__AVXVNNI__)
#define BYTE_DOT 1
INLINE ivec dot_bytes(ivec acc, ivec w, ivec x) {
#if defined(NPUSERVE_EVEX)  // tests on processors that know this instruction in the encoding of AVX-512 only
    asm("vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
    return acc;
#else
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
#endif
}
#else
#define BYTE_DOT 0
#endif

// int8 times int8, exact in int32.
struct DotInt8 {
    static constexpr int PER_WORD = 4;
    typedef I Acc;
    static INLINE Acc start() { return Acc{}; }
    // With BYTE_DOT panels hold the weights plus W_OFFSET, and the epilogue subtracts W_OFFSET times the sum of x.
#if BYTE_DOT && !defined(__AMX_INT8__)
    static constexpr int W_OFFSET = 128;
#else
    static constexpr int W_OFFSET = 0;
#endif
    static constexpr uint32_t W_BITS = W_OFFSET ? 0x80808080u : 0;  // to add 128 to a byte changes its highest bit
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

// Loads the word at x into every lane, in one instruction at each use. Otherwise compilers would shift a number before
// they broadcast it, or keep it for the word's next step although registers are scarce.
INLINE ivec broadcast(const char *x) {
    ivec v;
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm volatile("vpbroadcastd %1, %0" : "=x"(v) : "m"(*reinterpret_cast<const uint32_t *>(x)));
#else
    v = ivec{} + int32_t(word_at(x));
#endif
    return v;
}

// Loads the number at x into every lane.
INLINE F broadcast_float(const char *x) {
    F r;
#if defined(__AVX2__) && !defined(__AVX512F__)
    fvec all = (fvec)broadcast(x);
    EACH(i) r.v[i] = all;
#else
    float number;
    std::memcpy(&number, x, sizeof number);
    r = set1(number);
#endif
    return r;
}

// Product of a word in steps that each need few registers beside the accumulators, and the form of x for the steps.
//
//   COUNT, X_BYTES  steps of a word, bytes of a word of x
//   COPIES          true if x is copied before it is multiplied; otherwise x is read in place and X_BYTES is 4
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
        return (fvec)broadcast(x + S * 4);
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

#if BYTE_DOT
template <>
struct Steps<DotInt8> {
    static constexpr int COUNT = 1;
    static constexpr int64_t X_BYTES = 4;
    static constexpr bool COPIES = false;
    typedef I W;
    typedef ivec X;
    template <int>
    static INLINE W get(const char *w) {
        W r;
        EACH(i) r.v[i] = load_words(w, i);
        return r;
    }
    template <int>
    static INLINE X spread(const char *x) {
        return broadcast(x);
    }
    static INLINE void step(I &acc, W w, X x) { EACH(i) acc.v[i] = dot_bytes(acc.v[i], w.v[i], x); }
    static void copy(const int8_t *x, int64_t count, char *to) { std::memcpy(to, x, size_t(count)); }
};
#elif defined(__AVX2__)
// Bytes 0 and 2 of each word as pairs of 16 bits, then 1 and 3; x is in the same pairs.
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
        return (__m256i)broadcast(x + S * 4);
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
// Bytes 0 and 2 of each word as 16 bits, then 1 and 3. A register has byte 0 or 1 of four words, then byte 2 or 3. The
// numbers of x are in the same order.
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

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
