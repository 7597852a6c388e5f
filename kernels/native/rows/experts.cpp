// Router of a mixture of experts, and the order of its rows. gemm/experts.h has the products of the experts.
//
//   router_logits     p: x [T, H], weight [E, H], out [T, E] float32                       n: T, H, E
//   choose_experts    p: logits [T, E] float32, experts [T, k] int32: those of the largest logits, in descending order and
//                        the first of equal ones; weights [T, k] float32: their softmax over all experts, or over the k
//                     n: T, E, k, 1 for a softmax over the k
//   group_experts     p: experts [T, k], places [T, k] int32, begins [E + 1] int32, tokens [E] int64 or null: the rows of
//                        each of E experts follow each other, in the order of T; a place is the number of a row, or -1 for
//                        other experts; the rows of each expert are added to its tokens
//                     n: T, k, first expert, E
//   gather_experts    p: x [T, K], places, out [R, K]: copies a row of x to each of its places
//                     n: T, K, k
//   gather_experts_int8  p: values [T, K], places, out [R, K], scale [T] float32, its copies [R], zero [T] int32 or null,
//                        its copies or null, sums [T] int32, its copies               n: T, K, k
//   sum_experts       p: x [R, H], places, weights [T, k], shared [T, H] or null, gate [T] or null, out [T, H]: the sum of
//                        each row's products with its weights, plus shared * sigmoid(gate), in float32
//                     n: T, H, k
#include <algorithm>

#include "runtime/vec.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Logits in float32. Each is one chain of sums along H for each lane, whatever the other rows and experts.
template <class D>
struct RouterLogits {
    typedef typename D::type T;
    static constexpr int64_t ROWS = 16, EXPERTS = 4;  // of a unit
    static constexpr int TILE = 2;                    // rows multiplied at the same time

    static int64_t groups(const Call &call) { return ceil_div(call.op.n[2], EXPERTS); }
    static int64_t units(const Call &call) { return ceil_div(call.rows, ROWS) * groups(call); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        int64_t first = unit / groups(call) * ROWS, end = std::min(first + ROWS, call.rows);
        int64_t expert = unit % groups(call) * EXPERTS;
        int64_t row = first;
        for (; row + TILE <= end; row += TILE) tile<TILE>(op, row, expert);
        for (; row < end; row++) tile<1>(op, row, expert);
    }

  private:
    template <int R>
    static void tile(const Op &op, int64_t row, int64_t expert) {
        int64_t size = op.n[1], all = op.n[2], count = std::min(EXPERTS, all - expert);
        const T *x = op.at<T>(0) + row * size, *w[EXPERTS];
        for (int64_t e = 0; e < EXPERTS; e++) w[e] = op.at<T>(1) + (expert + std::min(e, count - 1)) * size;
        F sums[R][EXPERTS];
        for (int r = 0; r < R; r++)
            for (int64_t e = 0; e < EXPERTS; e++) sums[r][e] = zero();
        by_lanes(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            F v[EXPERTS];
            _Pragma("GCC unroll 4") for (int64_t e = 0; e < EXPERTS; e++) v[e] = get_n<D>(w[e] + i, n);
            _Pragma("GCC unroll 2") for (int r = 0; r < R; r++) {
                F of_row = get_n<D>(x + r * size + i, n);
                _Pragma("GCC unroll 4") for (int64_t e = 0; e < EXPERTS; e++) sums[r][e] = fma(of_row, v[e], sums[r][e]);
            }
        });
        for (int r = 0; r < R; r++)
            for (int64_t e = 0; e < count; e++) op.at<float>(2)[(row + r) * all + expert + e] = lane_sum(sums[r][e]);
    }
};

struct ChooseExperts {
    static constexpr int64_t ROWS = 8;
    static int64_t units(const Call &call) { return ceil_div(call.rows, ROWS); }
    static void run(const Call &call, int64_t unit) {
        for (int64_t row = unit * ROWS; row < std::min(call.rows, (unit + 1) * ROWS); row++) choose(call.op, row);
    }

  private:
    static void choose(const Op &op, int64_t row) {
        int64_t all = op.n[1], chosen = op.n[2];
        const float *logits = op.at<float>(0) + row * all;
        int32_t *experts = op.at<int32_t>(1) + row * chosen;
        float *weights = op.at<float>(2) + row * chosen;  // the logits of the chosen until all are known
        for (int64_t e = 0, kept = 0; e < all; e++) {
            float logit = logits[e] == logits[e] ? logits[e] : -INFINITY;
            if (kept == chosen && !(logit > weights[kept - 1])) continue;
            int64_t i = kept < chosen ? kept++ : kept - 1;
            for (; i > 0 && logit > weights[i - 1]; i--) weights[i] = weights[i - 1], experts[i] = experts[i - 1];
            weights[i] = logit, experts[i] = int32_t(e);
        }
        F largest = set1(weights[0]), sums = zero();
        if (!op.n[3])
            by_lanes(all, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
                sums = sums + first(exp(get_n<Float32>(logits + i, n) - largest), n, zero());
            });
        float sum = 0;
        by_lanes(chosen, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            put_n<Float32>(weights + i, exp(get_n<Float32>(weights + i, n) - largest), n);
            for (int64_t j = i; j < i + n; j++) sum += weights[j];
        });
        if (!op.n[3]) sum = lane_sum(sums);
        for (int64_t i = 0; i < chosen; i++) weights[i] /= sum;
    }
};

struct GroupExperts {
    static int64_t units(const Call &) { return 1; }
    static void run(const Call &call, int64_t) {
        const Op &op = call.op;
        int64_t pairs = call.rows * op.n[1], begin = op.n[2], count = op.n[3];
        const int32_t *experts = op.at<int32_t>(0);
        int32_t *places = op.at<int32_t>(1), *begins = op.at<int32_t>(2);
        std::fill(begins, begins + count + 1, 0);
        auto is_ours = [&](int64_t e) { return e >= 0 && e < count; };
        for (int64_t i = 0; i < pairs; i++)
            if (int64_t e = experts[i] - begin; is_ours(e)) begins[e + 1]++;
        if (int64_t *tokens = op.at<int64_t>(3))
            for (int64_t e = 0; e < count; e++) tokens[e] += begins[e + 1];
        for (int64_t e = 0; e < count; e++) begins[e + 1] += begins[e];
        // begins[e] counts up to begins[e + 1], and is moved back afterwards.
        for (int64_t i = 0; i < pairs; i++) {
            int64_t e = experts[i] - begin;
            places[i] = is_ours(e) ? begins[e]++ : -1;
        }
        for (int64_t e = count; e > 0; e--) begins[e] = begins[e - 1];
        begins[0] = 0;
    }
};

// Calls copy(place) for each place of a row.
template <class Copy>
INLINE void at_places(const Op &op, int64_t row, const Copy &copy) {
    const int32_t *places = op.at<int32_t>(1) + row * op.n[2];
    for (int64_t i = 0; i < op.n[2]; i++)
        if (places[i] >= 0) copy(int64_t(places[i]));
}

template <class T>
struct GatherExperts {
    static int64_t units(const Call &call) { return call.rows; }
    static void run(const Call &call, int64_t row) {
        const Op &op = call.op;
        int64_t size = op.n[1];
        at_places(op, row, [&](int64_t place) {
            std::memcpy(op.at<T>(2) + place * size, op.at<T>(0) + row * size, size_t(size) * sizeof(T));
        });
    }
};

struct GatherExpertsInt8 {
    static int64_t units(const Call &call) { return call.rows; }
    static void run(const Call &call, int64_t row) {
        GatherExperts<int8_t>::run(call, row);
        const Op &op = call.op;
        at_places(op, row, [&](int64_t place) {
            for (int p = 3; p < 9; p += 2)
                if (op.p[p]) op.at<int32_t>(p + 1)[place] = op.at<int32_t>(p)[row];
        });
    }
};

template <class D>
struct SumExperts {
    typedef typename D::type T;
    static constexpr int64_t COLUMNS = 1024;  // of a unit
    static int64_t parts(const Op &op) { return ceil_div(op.n[1], COLUMNS); }
    static int64_t units(const Call &call) { return call.rows * parts(call.op); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        int64_t size = op.n[1], chosen = op.n[2], row = unit / parts(op), begin = unit % parts(op) * COLUMNS;
        const int32_t *places = op.at<int32_t>(1) + row * chosen;
        const float *weights = op.at<float>(2) + row * chosen;
        const T *x = op.at<T>(0) + begin, *shared = op.at<T>(3), *gates = op.at<T>(4);
        if (shared) shared += row * size + begin;
        F gate = gates ? sigmoid<Float32>(set1(D::get1(gates[row]))) : set1(1.0f);
        T *out = op.at<T>(5) + row * size + begin;
        by_lanes(std::min(COLUMNS, size - begin), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            F sum = zero();
            for (int64_t j = 0; j < chosen; j++)
                if (places[j] >= 0) sum = fma(set1(weights[j]), get_n<D>(x + places[j] * size + i, n), sum);
            if (shared) sum = fma(gate, get_n<D>(shared + i, n), sum);
            put_n<D>(out + i, sum, n);
        });
    }
};

extern const Kernel EXPERTS[] = {
    BY_DTYPE("router_logits", RouterLogits),
    KERNEL("choose_experts/float32", ChooseExperts),
    KERNEL("group_experts/int32", GroupExperts),
    KERNEL("gather_experts/float32", GatherExperts<float>),
    KERNEL("gather_experts/bfloat16", GatherExperts<uint16_t>),
    KERNEL("gather_experts_int8/int8", GatherExpertsInt8),
    BY_DTYPE("sum_experts", SumExperts),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
