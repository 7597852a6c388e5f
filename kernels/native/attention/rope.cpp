// Norm, rotary embedding and cache write between projection and attention. See attention.cpp for the cache's layout.
//
//   qk_norm_rope_kv_write
//                    p: qkv [T, (Hq + 2 Hkv) D], q_gamma, k_gamma [D] or null, cos_sin [P, R] float32, positions [T]
//                       int64, slot_mapping [T] int64, keys, values, q [T, Hq, D], null, null, float32 q_gamma, k_gamma
//                       or null
//                    n: T, Hq, Hkv, D, block_size, R                                             f: eps
//   qk_norm_rope_kv_write_int8
//                    p: as qk_norm_rope_kv_write, with scales of the keys and scales of the values in place of null
#include <algorithm>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "attention/cache.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Norms and rotations of a token's heads, and their positions in the cache. Rounds where the golden function rounds.
template <class C>
struct QkNormRopeKvWrite {
    typedef typename C::Activation D;
    typedef typename D::type T;
    typedef typename C::Number Number;
    static constexpr int64_t PER_WORD = C::PER_WORD;
    // Tokens of a panel share cache lines: threads that process alternate tokens would wait for each other.
    static constexpr int64_t UNIT_TOKENS = LANES;

    // Division of a call into units: some tokens with all heads. If threads would have no work, a unit is one KV head
    // with its queries.
    struct Split {
        int64_t groups, cuts;
        explicit Split(const Call &call)
            : groups(ceil_div<int64_t>(call.rows, UNIT_TOKENS)), cuts(groups < call.threads ? call.op.n[2] : 1) {}
    };

    static int64_t units(const Call &call) {
        Split split(call);
        return split.groups * split.cuts;
    }

    static void run(const Call &call, int64_t unit) {
        // Sizes known to the compiler stay in registers.
        const int64_t dim = call.op.n[3], rotary = call.op.n[5];
        const bool whole = dim == rotary && !call.op.p[11];
        if (dim == 128 && whole) return tokens<128>(call, unit);
        if (dim == 64 && whole) return tokens<64>(call, unit);
        return tokens<0>(call, unit);
    }

    // Position of a token's head in the cache. part: index of its value within the word.
    struct CacheSlot {
        char *key, *value;
        int64_t key_stride, value_stride, scale, part;

        CacheSlot(const Op &op, int64_t head, int64_t dim, int64_t slot) {
            int64_t block_size = op.n[4], block = slot / block_size * op.n[2] + head, offset = slot % block_size;
            key_stride = LANES * C::WORD, value_stride = ceil_div<int64_t>(dim, LANES) * LANES * C::WORD;
            int64_t panel = block * (block_size / LANES) + offset / LANES;
            key = op.at<char>(6) + panel * (dim / PER_WORD) * key_stride + offset % LANES * C::WORD;
            value = op.at<char>(7) + (block * block_size + offset) / PER_WORD * value_stride;
            scale = block * block_size + offset, part = offset % PER_WORD;
        }
        // A store that waits for its cache line delays all later stores.
        void fetch(int64_t dim) const {
            for (int64_t w = 0; w < dim / PER_WORD; w++) __builtin_prefetch(key + w * key_stride, 1);
            for (int64_t i = 0; i < value_stride; i += 64) __builtin_prefetch(value + i, 1);
        }
    };

    // DIM: size of a head that is rotated as a whole, with gammas of its dtype or none; 0 for any head.
    template <int64_t DIM>
    static void tokens(const Call &call, int64_t unit) {
        const Op &op = call.op;
        const Split split(call);
        const int64_t q_heads = op.n[1], kv_heads = op.n[2];
        const int64_t dim = DIM ? DIM : op.n[3], rotary = DIM ? DIM : op.n[5];
        const int64_t group = q_heads / kv_heads, row_size = (q_heads + 2 * kv_heads) * dim;
        const int64_t head = unit % split.cuts, heads_end = split.cuts > 1 ? head + 1 : kv_heads;
        const int64_t kept = (heads_end - head) * UNIT_TOKENS * dim;  // numbers of the keys: [heads, n, D]
        T *rotated = static_cast<T *>(scratch(size_t(kept) * (sizeof(T) + sizeof(Number)) + size_t(dim) * 4));
        float *normed = reinterpret_cast<float *>(rotated + kept);
        Number *buffers = reinterpret_cast<Number *>(normed + dim);
        const int64_t *positions = op.at<int64_t>(4), *slots = op.at<int64_t>(5);
        float eps = float(op.f[0]);
        int64_t first = unit / split.cuts * UNIT_TOKENS, end = std::min(call.rows, first + UNIT_TOKENS);
        auto fetch = [&](int64_t t) {
            if (t < end && slots[t] >= 0 && split.cuts > 1) CacheSlot(op, head, dim, slots[t]).fetch(dim);
        };
        fetch(first);
        for (int64_t t = first, n; t < end; t += n) {
            // Tokens [t, t + n) are adjacent in a panel.
            for (n = 1; t + n < end && slots[t + n] == slots[t] + n && slots[t + n] % LANES;) n++;
            fetch(t + n);
            for (int64_t i = 0; i < n; i++) {
                const T *in = op.at<T>(0) + (t + i) * row_size;
                const float *cos = op.at<float>(3) + positions[t + i] * rotary;
                T *q = op.at<T>(8) + (t + i) * q_heads * dim;
                for (int64_t h = head * group; h < heads_end * group; h++)
                    rotate<DIM>(in + h * dim, op.at<T>(1), op.at<float>(11), eps, cos, dim, rotary, normed, q + h * dim);
                for (int64_t h = head; h < heads_end && slots[t] >= 0; h++)
                    rotate<DIM>(in + (q_heads + h) * dim, op.at<T>(2), op.at<float>(12), eps, cos, dim, rotary, normed,
                                rotated + ((h - head) * n + i) * dim);
            }
            for (int64_t h = head; h < heads_end && slots[t] >= 0; h++)
                write(op, CacheSlot(op, h, dim, slots[t]), n, rotated + (h - head) * n * dim, dim,
                      op.at<T>(0) + t * row_size + (q_heads + kv_heads + h) * dim, row_size, dim, buffers);
        }
    }

    // Writes keys and values of n adjacent tokens, whose sources are a stride apart.
    static INLINE void write(const Op &op, const CacheSlot &at, int64_t n, const T *keys, int64_t keys_stride,
                             const T *values, int64_t values_stride, int64_t dim, Number *buffers) {
        const Number *numbers[UNIT_TOKENS];
        for (int64_t i = 0; i < n; i++)
            numbers[i] = C::number(keys + i * keys_stride, dim, buffers + i * dim, op.at<uint16_t>(9) + at.scale + i);
        write_keys(at.key, at.key_stride, numbers, n, dim / PER_WORD);
        for (int64_t i = 0; i < n; i++)
            numbers[i] = C::number(values + i * values_stride, dim, buffers + i * dim,
                                   op.at<uint16_t>(10) + at.scale + i);
        for (int64_t i = 0, both; i < n; i += 1 + both) {
            int64_t number = at.part + i;
            both = PER_WORD == 2 && number % 2 == 0 && i + 1 < n;
            Number *words = reinterpret_cast<Number *>(at.value + number / PER_WORD * at.value_stride);
            if (both)
                write_values(words, numbers[i], numbers[i + 1], dim);
            else
                write_value(words, numbers[i], dim, number % PER_WORD);
        }
    }

    // Writes word w of token i of n to keys + w * stride + i * WORD. A cache line holds the same word of 16 tokens.
    static INLINE void write_keys(char *keys, int64_t stride, const Number *const *tokens, int64_t n, int64_t words) {
        int64_t done = 0;  // tokens written, four at a time
#if defined(__SSE2__)
        if constexpr (C::WORD == 4) {
            for (; done + 4 <= n && words % 4 == 0; done += 4)
                for (int64_t w = 0; w < words; w += 4) {
                    __m128i v[4], pairs[4];
                    for (int t = 0; t < 4; t++)
                        v[t] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(tokens[done + t] + w * PER_WORD));
                    pairs[0] = _mm_unpacklo_epi32(v[0], v[1]), pairs[1] = _mm_unpackhi_epi32(v[0], v[1]);
                    pairs[2] = _mm_unpacklo_epi32(v[2], v[3]), pairs[3] = _mm_unpackhi_epi32(v[2], v[3]);
                    v[0] = _mm_unpacklo_epi64(pairs[0], pairs[2]), v[1] = _mm_unpackhi_epi64(pairs[0], pairs[2]);
                    v[2] = _mm_unpacklo_epi64(pairs[1], pairs[3]), v[3] = _mm_unpackhi_epi64(pairs[1], pairs[3]);
                    for (int t = 0; t < 4; t++)
                        _mm_storeu_si128(reinterpret_cast<__m128i *>(keys + (w + t) * stride + done * 4), v[t]);
                }
        }
#endif
        if (n - done == 1) {
            for (int64_t w = 0; w < words; w++)
                std::memcpy(keys + w * stride + done * C::WORD, tokens[done] + w * PER_WORD, C::WORD);
        } else if (n > done) {
            for (int64_t w = 0; w < words; w++)
                for (int64_t t = done; t < n; t++)
                    std::memcpy(keys + w * stride + t * C::WORD, tokens[t] + w * PER_WORD, C::WORD);
        }
    }

    // Writes words of two tokens.
    static INLINE void write_values(Number *__restrict words, const Number *__restrict a, const Number *__restrict b,
                                    int64_t dim) {
        for (int64_t d = 0; d < dim; d++) words[2 * d] = a[d], words[2 * d + 1] = b[d];
    }

    // Writes only this token's part of each word; another thread may write the other part.
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

    // The normalized numbers x [n] times gamma at d. Rounds as NormRow.
    static INLINE F scaled(F x, F factor, const T *gamma, const float *wide, int64_t d, int64_t n) {
        if (wide) return D::round(x * factor * get_n<Float32>(wide + d, n));
        return D::round(D::round(x * factor) * get_n<D>(gamma + d, n));
    }

    // Normalizes one head [dim] if there is a gamma, of x's dtype or wide, then rotates its first `rotary` numbers.
    // normed: [dim], buffer.
    template <int64_t DIM>
    static INLINE void rotate(const T *x, const T *gamma, const float *wide, float eps, const float *cos_sin,
                              int64_t dim, int64_t rotary, float *normed, T *out) {
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
        if (gamma || wide) {
            F squares = zero();
            by_lanes(dim, [&](int64_t d, int64_t n) {
                F v = get_n<D>(x + d, n);
                squares = fma(v, v, squares);
            });
            F factor = set1(1.0f / std::sqrt(lane_sum(squares) / float(dim) + eps));
            by_lanes(dim, [&](int64_t d, int64_t n) {
                put_n<Float32>(normed + d, scaled(get_n<D>(x + d, n), factor, gamma, wide, d, n), n);
            });
        } else {
            by_lanes(dim, [&](int64_t d, int64_t n) { put_n<Float32>(normed + d, get_n<D>(x + d, n), n); });
        }
        int64_t half = rotary / 2;
        by_lanes(half, [&](int64_t d, int64_t n) {
            F a = get_n<Float32>(normed + d, n), b = get_n<Float32>(normed + half + d, n);
            F c = get_n<Float32>(cos_sin + d, n), s = get_n<Float32>(cos_sin + half + d, n);
            put_n<D>(out + d, a * c - b * s, n);
            put_n<D>(out + half + d, b * c + a * s, n);
        });
        by_lanes(dim - rotary, [&](int64_t d, int64_t n) {
            put_n<D>(out + rotary + d, get_n<Float32>(normed + rotary + d, n), n);
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
