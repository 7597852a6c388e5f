// Storage of the KV cache: numbers of the activations' dtype D, or int8 with a bfloat16 scale for each token and head.
// Both have one interface, so that attention and cache writes are one template.
//
// A word is the operand of one product step along K: 32 bits of numbers of D, or two int8 (16 bits). Two int8 are
// multiplied by two int16; their sums are exact in int32.
#pragma once

#include <algorithm>
#include <cfloat>

#include "gemm/tile.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Product whose rows of x are words of 32 bits. TAKES_MUCH: its operands take many registers.
template <class Dot>
struct OfWords : Dot {
    static constexpr int64_t X_BYTES = 4;  // bytes of a word of x
    static constexpr bool TAKES_MUCH = false;
    static INLINE auto take(const char *x) { return Dot::spread(word_at(x)); }
};

#if !BF16_DOT
// bfloat16 (w) times bfloat16 (x) held in float32, so that its words need no unpacking.
struct DotWide : DotBFloat16 {
    static constexpr int64_t X_BYTES = 8;
    static constexpr bool TAKES_MUCH = true;
    static INLINE X take(const char *x) {
        float even, odd;
        std::memcpy(&even, x, 4);
        std::memcpy(&odd, x + 4, 4);
        return {set1(even), set1(odd)};
    }
};
#endif

// int16 (x) times int8 (w), exact in int32.
struct DotInt16 {
    static constexpr int64_t PANEL = 32;
    static constexpr int64_t X_BYTES = 4;
    static constexpr bool TAKES_MUCH = false;
    typedef I Acc;
    static INLINE Acc start() { return Acc{}; }
#if defined(__AVX512VNNI__)
    typedef __m512i W, X;
    static INLINE W get(const char *w) {
        return _mm512_maskz_cvtepi8_epi16(0xFFFFFFFFu, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w)));
    }
    static INLINE X take(const char *x) { return _mm512_set1_epi32(int32_t(word_at(x))); }
    static INLINE void step(Acc &acc, W w, X x) { acc.v[0] = (ivec)_mm512_dpwssd_epi32((__m512i)acc.v[0], w, x); }
#elif defined(__AVX2__)
    struct W {
        __m256i v[PARTS];
    };
    typedef __m256i X;
    static INLINE W get(const char *w) {
        W r;
        EACH(i) r.v[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(w + i * WIDTH * 2)));
        return r;
    }
    static INLINE X take(const char *x) { return _mm256_set1_epi32(int32_t(word_at(x))); }
    static INLINE void step(Acc &acc, W w, X x) { EACH(i) acc.v[i] += (ivec)_mm256_madd_epi16(w.v[i], x); }
#elif defined(__aarch64__)
    struct W {
        int16x8_t even[2], odd[2];
    };
    typedef int16x4_t X;
    static INLINE W get(const char *w) {
        int8x16x2_t v = vld2q_s8(reinterpret_cast<const int8_t *>(w));
        return {{vmovl_s8(vget_low_s8(v.val[0])), vmovl_high_s8(v.val[0])},
                {vmovl_s8(vget_low_s8(v.val[1])), vmovl_high_s8(v.val[1])}};
    }
    static INLINE X take(const char *x) { return (X)uint32x2_t{word_at(x), 0}; }
    static INLINE void step(Acc &acc, W w, X x) {
        _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {
            int32x4_t low = vmlal_lane_s16((int32x4_t)acc.v[2 * i], vget_low_s16(w.even[i]), x, 0);
            int32x4_t high = vmlal_high_lane_s16((int32x4_t)acc.v[2 * i + 1], w.even[i], x, 0);
            acc.v[2 * i] = (ivec)vmlal_lane_s16(low, vget_low_s16(w.odd[i]), x, 1);
            acc.v[2 * i + 1] = (ivec)vmlal_high_lane_s16(high, w.odd[i], x, 1);
        }
    }
#else
    struct W {
        ivec even[PARTS], odd[PARTS];
    };
    struct X {
        int32_t even, odd;
    };
    static INLINE W get(const char *w) {
        W r;
        EACH(i) {
            uvec v = __builtin_convertvector(*reinterpret_cast<const hvec_u *>(w + i * WIDTH * 2), uvec);
            r.even[i] = (ivec)(v << 24) >> 24;
            r.odd[i] = (ivec)(v << 16) >> 24;
        }
        return r;
    }
    static INLINE X take(const char *x) {
        uint32_t word = word_at(x);
        return {int16_t(word), int16_t(word >> 16)};
    }
    static INLINE void step(Acc &acc, W w, X x) { EACH(i) acc.v[i] += w.even[i] * x.even + w.odd[i] * x.odd; }
#endif
};

// The product for a cache of D, and the form of its x.
template <class D>
struct Product {
    typedef OfWords<DotFloat32> Dot;
    typedef Float32 Held;
    typedef float X;
};
template <>
struct Product<BFloat16> {
#if BF16_DOT
    typedef OfWords<DotBFloat16> Dot;
    typedef BFloat16 Held;
#else
    typedef DotWide Dot;
    typedef Float32 Held;
#endif
    typedef Held::type X;
};

// Stores the n lanes of whole numbers, 1 <= n <= 16, as T.
template <class T>
INLINE void put_whole(T *p, F whole, int64_t n) {
    typedef T part __attribute__((vector_size(WIDTH * sizeof(T))));
    typedef part part_u __attribute__((aligned(sizeof(T)), may_alias));
    T l[LANES], *to = n < LANES ? l : p;
    EACH(i) {
        ivec numbers = __builtin_convertvector(whole.v[i], ivec);
        *reinterpret_cast<part_u *>(to + i * WIDTH) = __builtin_convertvector(numbers, part);
    }
    if (n < LANES)
        for (int64_t i = 0; i < n; i++) p[i] = l[i];
}

template <class D>
INLINE float largest_magnitude(const typename D::type *x, int64_t size) {
    F most = zero();
    by_lanes(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        F v = get_n<D>(x + i, n);
        most = max(max(v, zero() - v), most);
    });
    return lane_max(most);
}

// Sums of products with a plain cache.
template <class Operand>
struct PlainSums {
    typedef Operand X;
    static INLINE F score(F sum, float, const uint16_t *) { return sum; }
    static INLINE F weighted(F sum, float) { return sum; }
};

// Interface of PlainCache and Int8Cache:
//   Number, WORD, PER_WORD, Dot: type of a stored number, bytes of a word, numbers to a word, the product. X: type of
//     queries and weights in the product. ABSORBS: a weight of 0 makes 0 of any stored number.
//   number: converts a head [size] to its stored form, with `buffer` as scratch, and sets `scale`.
//   query: converts a head [size] to the product's form and returns its scale. score: converts sums to scores.
//   Weights: weights of one query. Call add(token, lanes) in ascending order; it returns the weights to sum up.
//     The function `end` writes the weights to `to` and returns their scale. weighted: converts sums of products to
//     sums of values.
//   value_scales: reads the scales of n tokens, for Weights. copy_scales: copies the scales of n tokens.
//   Sums: class that has X, score and weighted, the same for all activations that share tiles.
template <class D>
struct PlainCache : PlainSums<typename Product<D>::X> {
    typedef PlainSums<typename Product<D>::X> Sums;
    typedef typename Sums::X X;
    typedef D Activation;
    typedef typename D::type Number;
    typedef typename Product<D>::Dot Dot;
    static constexpr int64_t WORD = 4, PER_WORD = D::PER_WORD;
    static constexpr bool ABSORBS = false;

    static INLINE const Number *number(const Number *head, int64_t, Number *, uint16_t *) { return head; }
    static INLINE float query(const Number *head, int64_t size, X *to) {
        for (int64_t i = 0; i < size; i++) {
            if constexpr (sizeof(X) == sizeof(Number))
                to[i] = head[i];
            else
                to[i] = D::get1(head[i]);
        }
        return 1;
    }
    static INLINE void prefetch_scales(const uint16_t *, int64_t) {}
    static INLINE void value_scales(const uint16_t *, int64_t, float *) {}
    static INLINE void copy_scales(const uint16_t *, int64_t, uint16_t *) {}

    struct Weights {
        X *to;
        Weights(X *to, float *, const float *) : to(to) {}
        INLINE F add(int64_t token, F p) {
            if constexpr (sizeof(X) == sizeof(Number)) {
                D::put(to + token, p);
                return D::get(to + token);
            }
            p = D::round(p);
            Product<D>::Held::put(to + token, p);
            return p;
        }
        INLINE float end(int64_t) { return 1; }
    };
};

struct Int8Sums {
    typedef int16_t X;
    static INLINE F score(I sum, float query_scale, const uint16_t *key_scales) {
        return to_float(sum) * (widen(key_scales) * set1(query_scale));
    }
    static INLINE F weighted(I sum, float scale) { return to_float(sum) * set1(scale); }
};

template <class D>
struct Int8Cache : Int8Sums {
    typedef Int8Sums Sums;
    typedef D Activation;
    typedef int8_t Number;
    typedef DotInt16 Dot;
    static constexpr int64_t WORD = 2, PER_WORD = INT8_CACHE_PER_WORD;
    static constexpr bool ABSORBS = true;
    static constexpr float MIN_MAGNITUDE = 1e-30f;  // minimum magnitude of a scale, so that its reciprocal is finite

    // The scale is the largest magnitude divided by 127, rounded up to bfloat16, so that nothing is clipped.
    static INLINE const Number *number(const typename D::type *head, int64_t size, Number *buffer, uint16_t *scale) {
        float exact = largest_magnitude<D>(head, size) / 127.0f;
        uint32_t bits;
        std::memcpy(&bits, &exact, 4);
        *scale = exact > 0 ? uint16_t((bits + 0xFFFF) >> 16) : uint16_t(0x3F80);
        F by = set1(widen1(*scale)), most = set1(127.0f);
        by_lanes(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            put_whole(buffer + i, nearest(min(max(get_n<D>(head + i, n) / by, zero() - most), most)), n);
        });
        return buffer;
    }
    static INLINE float query(const typename D::type *head, int64_t size, X *to) {
        // The sum over the head must fit an int32.
        float most = float(std::min<int64_t>(32767, INT32_MAX / (127 * size)));
        float largest = std::max(largest_magnitude<D>(head, size), MIN_MAGNITUDE);
        F factor = set1(most / largest);
        by_lanes(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            put_whole(to + i, nearest(get_n<D>(head + i, n) * factor), n);
        });
        return largest / most;
    }
    static INLINE void prefetch_scales(const uint16_t *scales, int64_t n) {
        for (int64_t i = 0; i < n; i += 32) __builtin_prefetch(scales + i);
    }
    static INLINE void value_scales(const uint16_t *scales, int64_t n, float *to) {
        by_lanes(n, [&](int64_t i, int64_t m) { store(to + i, get_n<BFloat16>(scales + i, m)); });
    }

    static INLINE void copy_scales(const uint16_t *scales, int64_t n, uint16_t *to) {
        std::memcpy(to, scales, size_t(n) * 2);
    }

    // Weights times the scales of their values, as int16 relative to the largest one. kept: buffer of the float
    // weights.
    struct Weights {
        X *to;
        float *kept;
        const float *scales;
        F most = zero();
        Weights(X *to, float *kept, const float *scales) : to(to), kept(kept), scales(scales) {}
        INLINE F add(int64_t token, F p) {
            F scaled = p * load(scales + token);
            most = max(scaled, most);
            store(kept + token, scaled);
            return p;
        }
        INLINE float end(int64_t count) {
            constexpr float MAX_INT16 = 32767;  // a sum of 256 times 127 fits an int32
            float largest = std::max(lane_max(most), MIN_MAGNITUDE);
            F factor = set1(MAX_INT16 / largest);
            for (int64_t t = 0; t < count; t += LANES) put_whole(to + t, nearest(load(kept + t) * factor), LANES);
            return largest / MAX_INT16;
        }
    };
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
