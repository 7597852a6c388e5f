// Vector of sixteen float32 lanes, in as many registers as the instruction set needs, and its operations. The namespace
// is named for the instruction set that the file is compiled for.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "runtime/op.h"

#define INLINE inline __attribute__((always_inline))

// Defined if the set has an instruction for products of pairs of bfloat16.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define BF16_DOT 1
#else
#define BF16_DOT 0
#endif

namespace npuserve {
namespace NPUSERVE_ISA {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
constexpr int MAX_ACC = 24;  // accumulators of 16 lanes that fit the registers beside their operands
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
constexpr int MAX_ACC = 6;
#else
constexpr int WIDTH = 4;
#if defined(__aarch64__)
constexpr int MAX_ACC = 6;
#else
constexpr int MAX_ACC = 3;
#endif
#endif
constexpr int PARTS = LANES / WIDTH;

typedef float fvec __attribute__((vector_size(WIDTH * 4)));
typedef int32_t ivec __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t uvec __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t hvec __attribute__((vector_size(WIDTH * 2)));
typedef fvec fvec_u __attribute__((aligned(4), may_alias));
typedef ivec ivec_u __attribute__((aligned(4), may_alias));
typedef hvec hvec_u __attribute__((aligned(2), may_alias));

struct F {
    fvec v[PARTS];
};

struct I {
    ivec v[PARTS];
};

#define EACH(i) _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)

INLINE F set1(float x) {
    F r;
    EACH(i) r.v[i] = x - fvec{};
    return r;
}
INLINE F zero() { return set1(0.0f); }
INLINE F load(const float *p) {
    F r;
    EACH(i) r.v[i] = *reinterpret_cast<const fvec_u *>(p + i * WIDTH);
    return r;
}
INLINE void store(float *p, F x) { EACH(i) *reinterpret_cast<fvec_u *>(p + i * WIDTH) = x.v[i]; }
INLINE F operator+(F a, F b) {
    EACH(i) a.v[i] = a.v[i] + b.v[i];
    return a;
}
INLINE F operator-(F a, F b) {
    EACH(i) a.v[i] = a.v[i] - b.v[i];
    return a;
}
INLINE F operator-(F a) {
    EACH(i) a.v[i] = -a.v[i];
    return a;
}
INLINE F operator*(F a, F b) {
    EACH(i) a.v[i] = a.v[i] * b.v[i];
    return a;
}
INLINE F operator/(F a, F b) {
    EACH(i) a.v[i] = a.v[i] / b.v[i];
    return a;
}
// a * b + c, with one rounding if the processor has FMA.
INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
    c.v[0] = (fvec)_mm512_fmadd_ps((__m512)a.v[0], (__m512)b.v[0], (__m512)c.v[0]);
#elif defined(__FMA__)
    EACH(i) c.v[i] = (fvec)_mm256_fmadd_ps((__m256)a.v[i], (__m256)b.v[i], (__m256)c.v[i]);
#elif defined(__aarch64__)
    EACH(i) c.v[i] = (fvec)vfmaq_f32((float32x4_t)c.v[i], (float32x4_t)a.v[i], (float32x4_t)b.v[i]);
#else
    EACH(i) c.v[i] = a.v[i] * b.v[i] + c.v[i];
#endif
    return c;
}
// Returns a where it is larger, else b; also b where one of them is NaN. For `min` the same holds with "smaller".
INLINE F max(F a, F b) {
#if defined(__AVX512F__)
    a.v[0] = (fvec)_mm512_maskz_max_ps(0xFFFF, (__m512)a.v[0], (__m512)b.v[0]);
#elif defined(__AVX2__)
    EACH(i) a.v[i] = (fvec)_mm256_max_ps((__m256)a.v[i], (__m256)b.v[i]);
#else
    EACH(i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
#endif
    return a;
}
INLINE F min(F a, F b) {
#if defined(__AVX512F__)
    a.v[0] = (fvec)_mm512_maskz_min_ps(0xFFFF, (__m512)a.v[0], (__m512)b.v[0]);
#elif defined(__AVX2__)
    EACH(i) a.v[i] = (fvec)_mm256_min_ps((__m256)a.v[i], (__m256)b.v[i]);
#else
    EACH(i) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
#endif
    return a;
}
// The number of each lane.
INLINE ivec lane_numbers(int part) {
    static const int32_t NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return *reinterpret_cast<const ivec_u *>(NUMBERS + part * WIDTH);
}
// The first n lanes of x, and the other lanes of `other`.
INLINE F first(F x, int64_t n, F other) {
    ivec most = ivec{} + int32_t(n < LANES ? n : LANES);
    EACH(i) x.v[i] = lane_numbers(i) < most ? x.v[i] : other.v[i];
    return x;
}

// yes where a is at least b, else no, also where one of them is NaN.
INLINE F where_at_least(F a, F b, F yes, F no) {
    EACH(i) yes.v[i] = a.v[i] >= b.v[i] ? yes.v[i] : no.v[i];
    return yes;
}
// Lane i of yes where bit i is set, else that of no.
INLINE F where_bits(uint32_t bits, F yes, F no) {
#if defined(__AVX512F__)
    no.v[0] = (fvec)_mm512_mask_mov_ps((__m512)no.v[0], __mmask16(bits), (__m512)yes.v[0]);
#else
    static const int32_t LANE_BITS[LANES] = {1,       2,       4,       8,       1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                             1 << 8,  1 << 9,  1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    EACH(i) {
        ivec set = (ivec{} + int32_t(bits)) & *reinterpret_cast<const ivec_u *>(LANE_BITS + i * WIDTH);
        no.v[i] = set != 0 ? yes.v[i] : no.v[i];
    }
#endif
    return no;
}
// Bit i is set if lane i of a is at least that of b; it is clear if one of them is NaN.
INLINE uint32_t at_least(F a, F b) {
    uint32_t bits = 0;
#if defined(__AVX512F__)
    bits = _mm512_cmp_ps_mask((__m512)a.v[0], (__m512)b.v[0], _CMP_GE_OQ);
#elif defined(__AVX2__)
    EACH(i)
    bits |= uint32_t(_mm256_movemask_ps(_mm256_cmp_ps((__m256)a.v[i], (__m256)b.v[i], _CMP_GE_OQ))) << i * WIDTH;
#elif defined(__aarch64__)
    uint16x4_t larger[PARTS];
    EACH(i) larger[i] = vmovn_u32(vcgeq_f32((float32x4_t)a.v[i], (float32x4_t)b.v[i]));
    const uint8x8_t bit_values = {1, 2, 4, 8, 16, 32, 64, 128};
    bits = vaddv_u8(vand_u8(vmovn_u16(vcombine_u16(larger[0], larger[1])), bit_values));
    bits |= uint32_t(vaddv_u8(vand_u8(vmovn_u16(vcombine_u16(larger[2], larger[3])), bit_values))) << 8;
#else
    EACH(i) {
        ivec larger = a.v[i] >= b.v[i];
        for (int l = 0; l < WIDTH; l++) bits |= uint32_t(larger[l] & 1) << (i * WIDTH + l);
    }
#endif
    return bits;
}

// Sum and maximum of the lanes. Combines the upper half of the lanes with the lower half, and repeats this.
typedef float quad __attribute__((vector_size(16)));
INLINE float lane_sum(F x) {
    quad q[4];
    std::memcpy(q, &x, sizeof q);
    quad s = (q[0] + q[2]) + (q[1] + q[3]);
    return (s[0] + s[2]) + (s[1] + s[3]);
}
INLINE float lane_max(F x) {
    auto larger = [](quad a, quad b) { return a > b ? a : b; };
    quad q[4];
    std::memcpy(q, &x, sizeof q);
    quad s = larger(larger(q[0], q[2]), larger(q[1], q[3]));
    float even = s[0] > s[2] ? s[0] : s[2], odd = s[1] > s[3] ? s[1] : s[3];
    return even > odd ? even : odd;
}

// Rounds to the nearest whole number, ties to even. |x| below 2**22.
INLINE F nearest(F x) {
#if defined(__AVX512F__)
    x.v[0] = (fvec)_mm512_maskz_roundscale_ps(0xFFFF, (__m512)x.v[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    EACH(i) x.v[i] = (fvec)_mm256_round_ps((__m256)x.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
    EACH(i) x.v[i] = (fvec)vrndnq_f32((float32x4_t)x.v[i]);
#else
    EACH(i) x.v[i] = (x.v[i] + 12582912.0f) - 12582912.0f;  // next to 1.5 * 2**23, float32 has only whole numbers
#endif
    return x;
}

// 2**(whole + t), |t| <= 0.5, whole in -127 .. 128; -127 gives 0 and 128 infinity.
//
// Polynomial of degree 6 with constant term 1 and minimal relative error over [-0.5, 0.5] by Remez's exchange. The
// relative error is 2.6e-9, or 2.1e-8 with coefficients rounded to float32. With the roundings of its evaluation it is
// below 1.1e-7.
INLINE F exp2_of(F whole, F t) {
    F p = fma(t, set1(1.55946778e-4f), set1(1.34066434e-3f));
    p = fma(t, p, set1(9.61769279e-3f));
    p = fma(t, p, set1(5.55031039e-2f));
    p = fma(t, p, set1(2.40226522e-1f));
    p = fma(t, p, set1(6.93147242e-1f));
    p = fma(t, p, set1(1.0f));
#if defined(__AVX512F__)
    __mmask16 some = _mm512_cmp_ps_mask((__m512)whole.v[0], _mm512_set1_ps(-127.0f), _CMP_NEQ_UQ);
    p.v[0] = (fvec)_mm512_maskz_scalef_ps(some, (__m512)p.v[0], (__m512)whole.v[0]);
#else
    EACH(i) p.v[i] *= (fvec)((__builtin_convertvector(whole.v[i], ivec) + 127) << 23);
#endif
    return p;
}
// 2**x: 0 below -126.5, infinity above 127.5; 0 of NaN.
INLINE F exp2(F x) {
    x = min(max(x, set1(-127.0f)), set1(128.0f));
    F whole = nearest(x);
    return exp2_of(whole, x - whole);
}
// e**x: 0 below -87.6, infinity above 88.3; 0 of NaN.
INLINE F exp(F x) {
    // log2(e) in two parts, so that t is exact also for large x. (Without FMA it is not: the relative error is then
    // 4e-8 |x|.)
    x = min(max(x, set1(-88.0f)), set1(88.7228394f));
    F high = set1(1.44269502f), low = set1(1.92596299e-8f), whole = nearest(x * high);
    return exp2_of(whole, fma(x, low, fma(x, high, -whole)));
}

// 2**x, relative error below 3e-6, for results that are rounded to bfloat16 or int16: 0 far below -126 and of NaN,
// infinity above 128. A polynomial of degree 4, made like that of exp2_of.
INLINE F exp2_short(F x) {
#if defined(__AVX512F__)
    x = max(x, set1(-152.0f));
#else
    x = min(max(x, set1(-127.0f)), set1(128.0f));
#endif
    F whole = nearest(x), t = x - whole;
    F p = fma(t, set1(9.58285294e-3f), set1(5.59064262e-2f));
    p = fma(t, p, set1(2.40240991e-1f));
    p = fma(t, p, set1(6.93124175e-1f));
    p = fma(t, p, set1(1.0f));
#if defined(__AVX512F__)
    p.v[0] = (fvec)_mm512_maskz_scalef_ps(0xFFFF, (__m512)p.v[0], (__m512)whole.v[0]);
#else
    EACH(i) p.v[i] *= (fvec)((__builtin_convertvector(whole.v[i], ivec) + 127) << 23);
#endif
    return p;
}

// 1 / x for x of at least 1, relative error below 2e-7; 0 where x is above 2**120.
INLINE F reciprocal(F x) {
#if defined(__AVX512F__) && (defined(__AMX_TILE__) || !defined(__AVX512BF16__))
    // Processors of these instruction sets take 16 cycles for a division. An estimate of 14 bits and one step of
    // Newton's method, which would turn an infinite x into NaN.
    F most = set1(0x1p120f), near = min(x, most), r;
    r.v[0] = (fvec)_mm512_rcp14_ps((__m512)near.v[0]);
    r = fma(fma(-near, r, set1(1.0f)), r, r);
    return where_at_least(most, x, r, zero());
#else
    return set1(1.0f) / x;
#endif
}

// Conversion between bfloat16 and float32; to the nearest, ties to even, as torch rounds.
INLINE fvec widen(hvec h) {
#if defined(__AVX512F__)
    return (fvec)((uvec)_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)h) << 16);
#elif defined(__AVX2__)
    return (fvec)((uvec)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
    return (fvec)(__builtin_convertvector(h, uvec) << 16);
#endif
}
INLINE F widen(const uint16_t *p) {
    F r;
    EACH(i) r.v[i] = widen(*reinterpret_cast<const hvec_u *>(p + i * WIDTH));
    return r;
}
// Rounds x to bfloat16. NaN stays NaN; denormal numbers may become 0.
INLINE F round_bfloat16(F x) {
#if defined(__AVX512BF16__)
    x.v[0] = widen((hvec)_mm512_cvtneps_pbh((__m512)x.v[0]));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    EACH(i) x.v[i] = (fvec)vcvtq_low_f32_bf16(vcvtq_low_bf16_f32((float32x4_t)x.v[i]));
#else
    EACH(i) {
        uvec u = (uvec)x.v[i];
        uvec rounded = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000u;
        x.v[i] = (fvec)(x.v[i] == x.v[i] ? rounded : uvec{} + 0x7FC00000u);
    }
#endif
    return x;
}
INLINE void narrow(uint16_t *p, F x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x.v[0]));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    EACH(i) {
        bfloat16x8_t numbers = vcvtq_low_bf16_f32((float32x4_t)x.v[i]);
        std::memcpy(p + i * WIDTH, &numbers, WIDTH * 2);
    }
#else
    x = round_bfloat16(x);
    EACH(i) *reinterpret_cast<hvec_u *>(p + i * WIDTH) = __builtin_convertvector((uvec)x.v[i] >> 16, hvec);
#endif
}
INLINE float widen1(uint16_t h) {
    uint32_t u = uint32_t(h) << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

// Storage type of a dtype, numbers of it to a 32-bit word, loads, and stores with rounding.
struct Float32 {
    typedef float type;
    static constexpr int PER_WORD = 1;
    static INLINE F get(const float *p) { return load(p); }
    static INLINE void put(float *p, F x) { store(p, x); }
    static INLINE float get1(float x) { return x; }
    static INLINE F round(F x) { return x; }
};
struct BFloat16 {
    typedef uint16_t type;
    static constexpr int PER_WORD = 2;
    static INLINE F get(const uint16_t *p) { return widen(p); }
    static INLINE void put(uint16_t *p, F x) { narrow(p, x); }
    static INLINE float get1(uint16_t x) { return widen1(x); }
    static INLINE F round(F x) { return round_bfloat16(x); }
};

// get and put of the n lanes, 1 <= n <= 16, at the end of a line; the other lanes are 0.
template <class D>
INLINE F get_n(const typename D::type *p, int64_t n) {
    if (n >= LANES) return D::get(p);
    typename D::type l[LANES] = {};
    for (int64_t i = 0; i < n; i++) l[i] = p[i];
    return D::get(l);
}
template <class D>
INLINE void put_n(typename D::type *p, F x, int64_t n) {
    if (n >= LANES) return D::put(p, x);
    typename D::type l[LANES];
    D::put(l, x);
    for (int64_t i = 0; i < n; i++) p[i] = l[i];
}

// Sixteen int32 lanes, which wrap.
INLINE I operator-(I a, I b) {
    EACH(i) a.v[i] = a.v[i] - b.v[i];
    return a;
}
INLINE I operator-(I a, int32_t b) {
    EACH(i) a.v[i] = a.v[i] - b;
    return a;
}
INLINE I operator*(I a, int32_t b) {
    EACH(i) a.v[i] = a.v[i] * b;
    return a;
}
INLINE I get_n(const int32_t *p, int64_t n) {
    int32_t l[LANES] = {};
    if (n < LANES) {
        for (int64_t i = 0; i < n; i++) l[i] = p[i];
        p = l;
    }
    I r;
    EACH(i) r.v[i] = *reinterpret_cast<const ivec_u *>(p + i * WIDTH);
    return r;
}
INLINE F to_float(I x) {
    F r;
    EACH(i) r.v[i] = __builtin_convertvector(x.v[i], fvec);
    return r;
}
INLINE F to_float(const int8_t *p) {
    typedef int8_t bvec __attribute__((vector_size(WIDTH)));
    F r;
    EACH(i) {
        bvec bytes;
        std::memcpy(&bytes, p + i * WIDTH, WIDTH);
        r.v[i] = __builtin_convertvector(__builtin_convertvector(bytes, ivec), fvec);
    }
    return r;
}

// 1 / (1 + e**-x), for results that are rounded to D.
template <class D>
INLINE F sigmoid(F x) {
    F power = sizeof(typename D::type) < 4 ? exp2_short(x * set1(-1.44269504f)) : exp(-x);
    return reciprocal(set1(1.0f) + power);
}
// x * sigmoid(x), rounded.
template <class D>
INLINE F silu(F x) {
    return D::round(x * sigmoid<D>(x));
}

// Calls body(i, n) for the lanes [i, i + n) of a line of `length`; n is 16 except for the last.
template <class Body>
INLINE void by_lanes(int64_t length, const Body &body) {
    int64_t i = 0;
    for (; i + LANES <= length; i += LANES) body(i, int64_t(LANES));
    if (i < length) body(i, length - i);
}

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
