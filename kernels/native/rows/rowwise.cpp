// Kernels that compute each output row from one input row.
//
//   rms_norm            p: x [T, H], null, gamma [H] or null, out [T, H] or null with int8 from p[5] on, null, int8,
//                          float32 gamma [H] or null                                   n: T, H        f: eps, levels
//   add_rms_norm        p: x, residual [T, H], gamma or null, out or null, sum [T, H], int8, float32 gamma or null
//                                                                                      n: T, H        f: eps, levels
//   gated_rms_norm      p: x, z [T, N], gamma [D] or null, out [T, N], float32 gamma [D] or null
//                                                                                      n: T, N, D     f: eps
//   sigmoid_gate        p: x, gate, out [T, N]                                         n: T, N
//   swiglu              p: gate and up [T, 2 I], out [T, I]                            n: T, I
//   take_ids            p: ids [T] int64, last int64, out [T] int64                    n: T
//   keep_ids            p: ids [T, W] int64, last [T] int64                            n: T, W
//   keep_rows           p: x [T, H], memory [N, H]                                     n: T, H
//   embedding           p: ids [T] int64, table [V, H], out [T, H]                     n: T, H
//   greedy              p: logits [T, Vp], best [parts, T] float32, ids [parts, T] int32: for each part of the columns
//                          the largest logit and its first column                      n: T, Vp, vocabulary
//   greedy_merge        p: best, ids, out [T] int64                                    n: T, Vp, vocabulary
//   quantize            p: x [R, K], int8 of R rows; R is T, or T times n[2] unless that is 0   n: T, K, R / T   f: levels
//
// "int8" is six pointers: values [T, K], scale [T] float32, zero [T] int32 or null, sums of the values [T] int32, static
// scale or null, static zero or null. Null zeros stand for no zeros. levels: divisor of the largest magnitude in a scale
// without a zero.
#include <algorithm>

#include "runtime/vec.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Rows of a unit, for rows of `row_bytes`: work for a few microseconds.
INLINE int64_t rows_of_unit(int64_t row_bytes) { return std::max<int64_t>(1, (16 << 10) / row_bytes); }

// Kernel whose units are whole rows; Rowwise has `row_bytes` and `row`.
template <class Rowwise>
struct ByRows {
    static int64_t units(const Call &call) { return ceil_div(call.rows, rows_of_unit(Rowwise::row_bytes(call.op))); }
    static void run(const Call &call, int64_t unit) {
        int64_t rows = rows_of_unit(Rowwise::row_bytes(call.op)), end = std::min(call.rows, (unit + 1) * rows);
        for (int64_t row = unit * rows; row < end; row++) Rowwise::row(call.op, row);
    }
};

// Stores whole numbers, -128 to 127, as int8.
INLINE void put_int8(int8_t *p, F x, int64_t n) {
    int8_t l[LANES];
    int8_t *to = n < LANES ? l : p;
#if defined(__AVX512F__)
    __m512i whole = _mm512_maskz_cvtps_epi32(0xFFFF, (__m512)x.v[0]);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_maskz_cvtepi32_epi8(0xFFFF, whole));
#else
    typedef int8_t bvec __attribute__((vector_size(WIDTH)));
    EACH(i) {
        bvec bytes = __builtin_convertvector(__builtin_convertvector(x.v[i], ivec), bvec);
        std::memcpy(to + i * WIDTH, &bytes, WIDTH);
    }
#endif
    if (n < LANES) std::memcpy(p, l, size_t(n));
}

// Quantizes a row [size] to int8, as `quantize` of quantize.py does. p: index of the first pointer. f: index of the
// levels.
template <class D>
INLINE void quantize_row(const Op &op, int p, int f, int64_t row, const typename D::type *x, int64_t size) {
    int8_t *out = op.at<int8_t>(p) + row * size;
    int32_t *zeros = op.at<int32_t>(p + 2);
    const float *fixed = op.at<float>(p + 4);
    float scale, zero = 0;
    if (fixed) {
        scale = *fixed;
        if (zeros) zero = float(*op.at<int32_t>(p + 5));
    } else {
        F low = set1(0.0f), high = low;
        by_lanes(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            F v = get_n<D>(x + i, n);
            low = min(v, low), high = max(v, high);
        });
        float lowest = -lane_max(set1(0.0f) - low), highest = lane_max(high);
        scale = zeros ? highest / 255.0f - lowest / 255.0f : std::max(highest, -lowest) / float(op.f[f]);
        scale = scale > 0 ? scale : 1.0f;
        if (zeros) zero = std::min(std::max(std::nearbyint(-128.0f - lowest / scale), -128.0f), 127.0f);
    }
    op.at<float>(p + 1)[row] = scale;
    if (zeros) zeros[row] = int32_t(zero);
    F divisor = set1(scale), from = set1(-128.0f - zero), to = set1(127.0f - zero), shift = set1(zero);
    F sums = set1(0.0f);  // exact for rows of up to 2**17 numbers
    by_lanes(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        F v = nearest(min(max(get_n<D>(x + i, n) / divisor, from), to)) + shift;
        sums = sums + first(v, n, set1(0.0f));
        put_int8(out + i, v, n);
    });
    float sum = lane_sum(sums);
    op.at<int32_t>(p + 3)[row] = sum == sum ? int32_t(sum) : 0;  // if the zero is NaN, all values are 0
}

// Rounds the sum, and the normalized value before the product with gamma unless that is wide, as Hugging Face's models
// do.
template <class D, bool ADD>
struct NormRow {
    typedef typename D::type T;
    static int64_t row_bytes(const Op &op) { return op.n[1] * int64_t(sizeof(T)); }
    static INLINE void row(const Op &op, int64_t row) {
        int64_t size = op.n[1];
        const T *x = op.at<T>(0) + row * size, *residual = op.at<T>(1) + (ADD ? row * size : 0), *gamma = op.at<T>(2);
        const float *wide = op.at<float>(11);
        bool int8 = !op.p[3];
        T *out = int8 ? static_cast<T *>(scratch(size_t(row_bytes(op)))) : op.at<T>(3) + row * size;
        T *sum = op.at<T>(4) + (ADD ? row * size : 0);
        F squares = zero();
        by_lanes(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            F v = get_n<D>(x + i, n);
            if (ADD) {
                v = D::round(v + get_n<D>(residual + i, n));
                put_n<D>(sum + i, v, n);
            }
            squares = fma(v, v, squares);
        });
        F scale = set1(1.0f / std::sqrt(lane_sum(squares) / float(size) + float(op.f[0])));
        const T *normed = ADD ? sum : x;
        if (wide) {
            by_lanes(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
                put_n<D>(out + i, get_n<D>(normed + i, n) * scale * get_n<Float32>(wide + i, n), n);
            });
        } else {
            by_lanes(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
                put_n<D>(out + i, D::round(get_n<D>(normed + i, n) * scale) * get_n<D>(gamma + i, n), n);
            });
        }
        if (int8) quantize_row<D>(op, 5, 1, row, out, size);
    }
};
template <class D>
using RmsNorm = ByRows<NormRow<D, false>>;
template <class D>
using AddRmsNorm = ByRows<NormRow<D, true>>;

// Rounds after the norm, and after the product with gamma unless that is wide.
template <class D>
struct GatedNormRow {
    typedef typename D::type T;
    static int64_t row_bytes(const Op &op) { return op.n[1] * int64_t(sizeof(T)); }
    static INLINE void row(const Op &op, int64_t row) {
        int64_t width = op.n[1], size = op.n[2];
        const T *gamma = op.at<T>(2);
        const float *wide = op.at<float>(4);
        for (int64_t first = 0; first < width; first += size) {
            const T *x = op.at<T>(0) + row * width + first, *z = op.at<T>(1) + row * width + first;
            T *out = op.at<T>(3) + row * width + first;
            F squares = zero();
            by_lanes(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
                F v = get_n<D>(x + i, n);
                squares = fma(v, v, squares);
            });
            F scale = set1(1.0f / std::sqrt(lane_sum(squares) / float(size) + float(op.f[0])));
            by_lanes(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
                F v = D::round(get_n<D>(x + i, n) * scale), gate = get_n<D>(z + i, n);
                v = wide ? v * get_n<Float32>(wide + i, n) : D::round(v * get_n<D>(gamma + i, n));
                put_n<D>(out + i, v * (gate * sigmoid<D>(gate)), n);
            });
        }
    }
};
template <class D>
using GatedRmsNorm = ByRows<GatedNormRow<D>>;

template <class D>
struct SigmoidGateRow {
    typedef typename D::type T;
    static int64_t row_bytes(const Op &op) { return op.n[1] * int64_t(sizeof(T)); }
    static INLINE void row(const Op &op, int64_t row) {
        int64_t size = op.n[1];
        const T *x = op.at<T>(0) + row * size, *gate = op.at<T>(1) + row * size;
        T *out = op.at<T>(2) + row * size;
        by_lanes(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            put_n<D>(out + i, get_n<D>(x + i, n) * D::round(sigmoid<D>(get_n<D>(gate + i, n))), n);
        });
    }
};
template <class D>
using SigmoidGate = ByRows<SigmoidGateRow<D>>;

template <class D>
struct Swiglu {
    typedef typename D::type T;
    static constexpr int64_t COLUMNS = 4096;  // maximum columns of a unit
    static int64_t parts(const Op &op) { return ceil_div(op.n[1], COLUMNS); }
    static int64_t rows(const Op &op) { return std::max<int64_t>(1, COLUMNS / std::max<int64_t>(1, op.n[1])); }
    static int64_t units(const Call &call) { return ceil_div(call.rows, rows(call.op)) * parts(call.op); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        int64_t size = op.n[1], column = unit % parts(op) * COLUMNS, first = unit / parts(op) * rows(op);
        for (int64_t row = first; row < std::min(call.rows, first + rows(op)); row++) {
            const T *gate = op.at<T>(0) + row * 2 * size + column, *up = gate + size;
            T *out = op.at<T>(1) + row * size + column;
            by_lanes(std::min(COLUMNS, size - column), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
                put_n<D>(out + i, silu<D>(get_n<D>(gate + i, n)) * get_n<D>(up + i, n), n);
            });
        }
    }
};

template <class D>
struct EmbeddingRow {
    typedef typename D::type T;
    static int64_t row_bytes(const Op &op) { return op.n[1] * int64_t(sizeof(T)); }
    static INLINE void row(const Op &op, int64_t row) {
        std::memcpy(op.at<T>(2) + row * op.n[1], op.at<T>(1) + op.at<int64_t>(0)[row] * op.n[1], size_t(row_bytes(op)));
    }
};
template <class D>
using Embedding = ByRows<EmbeddingRow<D>>;


template <class D>
struct Greedy {
    typedef typename D::type T;
    static int64_t parts(const Op &op) { return ceil_div(op.n[2], GREEDY_PART); }
    static int64_t units(const Call &call) { return call.rows * parts(call.op); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        int64_t part = unit % parts(op), row = unit / parts(op), begin = part * GREEDY_PART;
        int64_t columns = std::min(GREEDY_PART, op.n[2] - begin), at = part * call.rows + row;
        const T *logits = op.at<T>(0) + row * op.n[1] + begin;

        constexpr int CHAINS = 4;
        F none = set1(-INFINITY), found[CHAINS] = {none, none, none, none};
        int64_t i = 0;
        for (; i + CHAINS * LANES <= columns; i += CHAINS * LANES)
            for (int c = 0; c < CHAINS; c++) found[c] = max(D::get(logits + i + c * LANES), found[c]);
        for (; i < columns; i += LANES) {
            int64_t n = std::min<int64_t>(LANES, columns - i);
            found[0] = max(first(get_n<D>(logits + i, n), n, none), found[0]);
        }
        float largest = lane_max(max(max(found[0], found[1]), max(found[2], found[3])));

        int64_t id = 0;
        if (largest > -INFINITY) {
            while (id + LANES <= columns && !at_least(D::get(logits + id), set1(largest))) id += LANES;
            while (!(D::get1(logits[id]) >= largest)) id++;
        }
        op.at<float>(1)[at] = largest;
        op.at<int32_t>(2)[at] = int32_t(begin + id);
    }
};

template <class D>
struct GreedyMerge {
    static int64_t units(const Call &) { return 1; }
    static void run(const Call &call, int64_t) {
        const Op &op = call.op;
        const float *best = op.at<float>(0);
        for (int64_t row = 0; row < call.rows; row++) {
            int64_t at = row;
            for (int64_t i = row; i < Greedy<D>::parts(op) * call.rows; i += call.rows)
                if (best[i] > best[at]) at = i;
            op.at<int64_t>(2)[row] = op.at<int32_t>(1)[at];
        }
    }
};

template <class D>
struct QuantizeRow {
    typedef typename D::type T;
    static int64_t row_bytes(const Op &op) { return op.n[1] * int64_t(sizeof(T)); }
    static INLINE void row(const Op &op, int64_t row) {
        quantize_row<D>(op, 1, 0, row, op.at<T>(0) + row * op.n[1], op.n[1]);
    }
};
template <class D>
struct Quantize {
    typedef ByRows<QuantizeRow<D>> Rows;
    static Call all(const Call &call) { return {call.op, call.rows * std::max<int64_t>(1, call.op.n[2]), call.threads}; }
    static int64_t units(const Call &call) { return Rows::units(all(call)); }
    static void run(const Call &call, int64_t unit) { Rows::run(all(call), unit); }
};

struct TakeId {
    static int64_t row_bytes(const Op &) { return sizeof(int64_t); }
    static INLINE void row(const Op &op, int64_t row) {
        int64_t id = op.at<int64_t>(0)[row];
        op.at<int64_t>(2)[row] = id < 0 ? op.at<int64_t>(1)[-1 - id] : id;
    }
};

struct KeepId {
    static int64_t row_bytes(const Op &) { return sizeof(int64_t); }
    static INLINE void row(const Op &op, int64_t row) { op.at<int64_t>(1)[row] = op.at<int64_t>(0)[row * op.n[1]]; }
};

template <class D>
struct KeepRow {
    typedef typename D::type T;
    static int64_t row_bytes(const Op &op) { return op.n[1] * int64_t(sizeof(T)); }
    static INLINE void row(const Op &op, int64_t row) {
        int64_t first = row * op.n[1];
        std::memcpy(op.at<T>(1) + first, op.at<T>(0) + first, size_t(row_bytes(op)));
    }
};
template <class D>
struct KeepRows : ByRows<KeepRow<D>> {};

extern const Kernel ROWWISE[] = {
    KERNEL("take_ids/int64", ByRows<TakeId>),
    KERNEL("keep_ids/int64", ByRows<KeepId>),
    BY_DTYPE("keep_rows", KeepRows),
    BY_DTYPE("rms_norm", RmsNorm),
    BY_DTYPE("add_rms_norm", AddRmsNorm),
    BY_DTYPE("gated_rms_norm", GatedRmsNorm),
    BY_DTYPE("sigmoid_gate", SigmoidGate),
    BY_DTYPE("swiglu", Swiglu),
    BY_DTYPE("embedding", Embedding),
    BY_DTYPE("greedy", Greedy),
    BY_DTYPE("greedy_merge", GreedyMerge),
    BY_DTYPE("quantize", Quantize),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
