// What happens to queries, keys and values between their projection and attention. The cache is laid out as
// attention.cpp says.
//
//   qk_norm_rope_kv_write
//                    p: qkv [T, (Hq + 2 Hkv) D], q_gamma, k_gamma [D] or null, cos_sin [P, D] float32, positions [T]
//                       int64, slot_mapping [T] int64, keys, values, q [T, Hq, D]
//                    n: T, Hq, Hkv, D, block_size                                                f: eps
//   qk_norm_rope_kv_write_int8
//                    also p: scales of the keys, scales of the values
#include <algorithm>

#include "cache.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// The norms and turns of a token's heads, and its places in the cache. Rounds where the golden function rounds.
template <class C>
struct QkNormRopeKvWrite {
    typedef typename C::Activation D;
    typedef typename D::type T;
    typedef typename C::Number Number;
    static constexpr int64_t PER_WORD = C::PER_WORD;
    // Tokens of a panel share its cache lines: threads that took them in turn would wait for each other.
    static constexpr int64_t UNIT_TOKENS = LANES;

    static int64_t units(const Call &call) { return ceil_div<int64_t>(call.rows, UNIT_TOKENS); }

    static void run(const Call &call, int64_t unit) {
        // Sizes that the compiler knows stay in registers.
        switch (call.op.n[3]) {
            case 128: return tokens<128>(call, unit);
            case 64: return tokens<64>(call, unit);
            default: return tokens<0>(call, unit);
        }
    }

    template <int64_t DIM>
    static void tokens(const Call &call, int64_t unit) {
        const Op &op = call.op;
        const int64_t q_heads = op.n[1], kv_heads = op.n[2], dim = DIM ? DIM : op.n[3], block_size = op.n[4];
        const int64_t padded_dim = ceil_div<int64_t>(dim, LANES) * LANES;
        T *turned = static_cast<T *>(scratch(size_t(dim) * (sizeof(T) + 4 + sizeof(Number)) + 256));
        float *normed = reinterpret_cast<float *>(turned) + ceil_div<int64_t>(dim * int64_t(sizeof(T)), 64) * 16;
        Number *room = reinterpret_cast<Number *>(normed + dim);
        const int64_t *positions = op.at<int64_t>(4), *slots = op.at<int64_t>(5);
        float eps = float(op.f[0]);
        for (int64_t t = unit * UNIT_TOKENS; t < std::min(call.rows, (unit + 1) * UNIT_TOKENS); t++) {
            const T *in = op.at<T>(0) + t * (q_heads + 2 * kv_heads) * dim;
            const float *cos = op.at<float>(3) + positions[t] * dim;
            T *q = op.at<T>(8) + t * q_heads * dim;
            for (int64_t h = 0; h < q_heads; h++)
                turn<DIM>(in + h * dim, op.at<T>(1), eps, cos, dim, normed, q + h * dim);
            int64_t slot = slots[t];
            if (slot < 0) continue;
            int64_t block = slot / block_size, offset = slot % block_size;
            for (int64_t h = 0; h < kv_heads; h++) {
                turn<DIM>(in + (q_heads + h) * dim, op.at<T>(2), eps, cos, dim, normed, turned);
                int64_t place = block * kv_heads + h, scale = place * block_size + offset;
                const Number *key = C::number(turned, dim, room, op.at<uint16_t>(9) + scale);
                char *keys = op.at<char>(6) + (place * (dim / PER_WORD) * block_size + offset) * C::WORD;
                for (int64_t w = 0; w < dim / PER_WORD; w++)
                    std::memcpy(keys + w * block_size * C::WORD, key + w * PER_WORD, C::WORD);
                const T *v = in + (q_heads + kv_heads + h) * dim;
                int64_t word = place * (block_size / PER_WORD) + offset / PER_WORD;
                write_value(op.at<Number>(7) + word * padded_dim * PER_WORD,
                            C::number(v, dim, room, op.at<uint16_t>(10) + scale), dim, offset % PER_WORD);
            }
        }
    }

    // Only this token's part of each word is written: another thread may write the other.
    static INLINE void write_value(Number *words, const Number *v, int64_t dim, int64_t part) {
        int64_t d = 0;
#if defined(__AVX512BW__)
        if (sizeof(Number) == 2) {
            __mmask32 mine = part ? 0xAAAAAAAAu : 0x55555555u;
            for (; d + LANES <= dim; d += LANES) {
                __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(v + d)));
                _mm512_mask_storeu_epi16(words + d * 2, mine, part ? _mm512_slli_epi32(x, 16) : x);
            }
        } else if (sizeof(Number) == 1) {
            __mmask64 mine = part ? 0xAAAAAAAAAAAAAAAAu : 0x5555555555555555u;
            for (; d + 2 * LANES <= dim; d += 2 * LANES) {
                __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(v + d)));
                _mm512_mask_storeu_epi8(words + d * 2, mine, part ? _mm512_slli_epi16(x, 8) : x);
            }
        }
#endif
        for (; d < dim; d++) words[d * PER_WORD + part] = v[d];
    }

    // One head [dim]: normalized if there is a gamma, then turned. normed: [dim], for the numbers between.
    template <int64_t DIM>
    static INLINE void turn(const T *x, const T *gamma, float eps, const float *cos_sin, int64_t dim, float *normed,
                            T *out) {
        if constexpr (DIM > 0) {
            constexpr int VECTORS = DIM / LANES, HALF = VECTORS / 2;
            F v[VECTORS];
            _Pragma("GCC unroll 8") for (int i = 0; i < VECTORS; i++) v[i] = D::get(x + i * LANES);
            if (gamma) {
                F squares = zero();
                _Pragma("GCC unroll 8") for (int i = 0; i < VECTORS; i++) squares = fma(v[i], v[i], squares);
                F factor = set1(1.0f / std::sqrt(lane_sum(squares) / float(DIM) + eps));
                _Pragma("GCC unroll 8") for (int i = 0; i < VECTORS; i++)
                    v[i] = D::round(D::round(v[i] * factor) * D::get(gamma + i * LANES));
            }
            _Pragma("GCC unroll 4") for (int i = 0; i < HALF; i++) {
                F c = load(cos_sin + i * LANES), s = load(cos_sin + DIM / 2 + i * LANES);
                D::put(out + i * LANES, v[i] * c - v[i + HALF] * s);
                D::put(out + DIM / 2 + i * LANES, v[i + HALF] * c + v[i] * s);
            }
            return;
        }
        if (gamma) {
            F squares = zero();
            by_lanes(dim, [&](int64_t d, int64_t n) {
                F v = get_n<D>(x + d, n);
                squares = fma(v, v, squares);
            });
            F factor = set1(1.0f / std::sqrt(lane_sum(squares) / float(dim) + eps));
            by_lanes(dim, [&](int64_t d, int64_t n) {
                F v = D::round(get_n<D>(x + d, n) * factor);
                put_n<Float32>(normed + d, D::round(v * get_n<D>(gamma + d, n)), n);
            });
        } else {
            by_lanes(dim, [&](int64_t d, int64_t n) { put_n<Float32>(normed + d, get_n<D>(x + d, n), n); });
        }
        int64_t half = dim / 2;
        by_lanes(half, [&](int64_t d, int64_t n) {
            F a = get_n<Float32>(normed + d, n), b = get_n<Float32>(normed + half + d, n);
            F c = get_n<Float32>(cos_sin + d, n), s = get_n<Float32>(cos_sin + half + d, n);
            put_n<D>(out + d, a * c - b * s, n);
            put_n<D>(out + half + d, b * c + a * s, n);
        });
    }
};

template <class D>
using WritePlain = QkNormRopeKvWrite<PlainCache<D>>;
template <class D>
using WriteInt8 = QkNormRopeKvWrite<Int8Cache<D>>;

extern const Kernel ROPE[] = {
    BY_DTYPE("qk_norm_rope_kv_write", WritePlain),
    BY_DTYPE("qk_norm_rope_kv_write_int8", WriteInt8),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
