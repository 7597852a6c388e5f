// Gated delta rule: token by token, decay, correction of the values, sum with an outer product, product with the query.
//
// Columns of a state are independent, so a unit has a row, a value head and some panels of 16 columns. The order of
// additions in a column is the same for any division into units and steps. Rows of the state with even numbers are added
// in ascending order, then rows with odd numbers, then both sums.
//
//   gated_delta_rule p: qkv [T, 2 Hk Dk + Hv Dv], a, b [T, Hv], a_log, dt_bias [Hv] float32,
//                       state [slots, Hv, Dk, Dv] float32, context_lens [R] int32, cu_seqlens_q [R + 1] int32,
//                       state_slots [R] int64, out [T, Hv Dv]
//                    n: T, maximum R, Hk, Hv, Dk, Dv                                        f: epsilon of the norms
#include <algorithm>
#include <type_traits>

#include "attention/slots.h"

namespace npuserve {
namespace NPUSERVE_ISA {

constexpr int PANELS = WIDTH == LANES ? 2 : 1;  // panels of a block, whose sums stay in registers
constexpr int64_t BLOCK = PANELS * LANES;
constexpr int64_t CHUNK = 32;  // tokens whose queries and keys are normalized before their states are computed

template <class D>
struct GatedDeltaRule {
    typedef typename D::type T;

    struct Shape {
        const Op &op;
        SlotRows rows;
        int64_t key_heads, value_heads, key_dim, value_dim, blocks, cuts;

        explicit Shape(const Call &call)
            : op(call.op), rows(call, 6), key_heads(op.n[2]), value_heads(op.n[3]), key_dim(op.n[4]),
              value_dim(op.n[5]), blocks(ceil_div(value_dim, BLOCK)), cuts(1) {}

        // Cuts heads into blocks if there are too few to occupy all threads evenly.
        void cut(int64_t count, int threads) { cuts = count * value_heads < 4 * threads ? blocks : 1; }

        float *state(int64_t row, int64_t head) const {
            return op.at<float>(5) + (rows.slots[row] * value_heads + head) * key_dim * value_dim;
        }
    };

    static int64_t units(const Call &call) {
        Shape s(call);
        int64_t count = s.rows.count();
        s.cut(count, call.threads);
        return count * s.value_heads * s.cuts;
    }

    static void run(const Call &call, int64_t unit) {
        Shape s(call);
        int64_t count = s.rows.count();
        s.cut(count, call.threads);
        int64_t row = unit / s.cuts / s.value_heads, head = unit / s.cuts % s.value_heads, block = unit % s.cuts;
        int64_t tokens = s.rows.end(row) - s.rows.begin(row);
        int64_t first = block * BLOCK, end = s.cuts > 1 ? std::min(s.value_dim, first + BLOCK) : s.value_dim;
        float *state = s.state(row, head) + first;
        int64_t following = (unit + call.threads) / s.cuts;  // head of the most likely next unit of this thread
        const float *next = following < count * s.value_heads
                                ? s.state(following / s.value_heads, following % s.value_heads) + first : nullptr;
        if (tokens == 1)
            one_token(s, row, head, first, end - first, state, next);
        else if (tokens > 1)
            many_tokens(s, row, head, first, end - first, state);
    }

    // Query, key, decay and learning rate of one token.
    struct Token {
        float *q, *k;
        float decay, beta;

        void prepare(const Shape &s, int64_t token, int64_t head) {
            const T *in = s.op.template at<T>(0) + token * width(s) + head / (s.value_heads / s.key_heads) * s.key_dim;
            float eps = float(s.op.f[0]);
            normalize(in, s.key_dim, eps, 1.0f / std::sqrt(float(s.key_dim)), q);
            normalize(in + s.key_heads * s.key_dim, s.key_dim, eps, 1.0f, k);
            float a = D::get1(s.op.template at<T>(1)[token * s.value_heads + head]);
            float b = D::get1(s.op.template at<T>(2)[token * s.value_heads + head]);
            float x = a + s.op.template at<float>(4)[head];
            float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
            decay = std::exp(-std::exp(s.op.template at<float>(3)[head]) * softplus);
            beta = 1.0f / (1.0f + std::exp(-b));
        }

        static INLINE void normalize(const T *x, int64_t dim, float eps, float scale, float *out) {
            F squares = zero();
            by_lanes(dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
                F v = get_n<D>(x + i, n);
                squares = fma(v, v, squares);
            });
            F factor = set1(scale / std::sqrt(lane_sum(squares) + eps));
            by_lanes(dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
                put_n<Float32>(out + i, get_n<D>(x + i, n) * factor, n);
            });
        }
    };

    static int64_t width(const Shape &s) { return 2 * s.key_heads * s.key_dim + s.value_heads * s.value_dim; }
    static const T *values(const Shape &s, int64_t token, int64_t head) {
        return s.op.template at<T>(0) + token * width(s) + 2 * s.key_heads * s.key_dim + head * s.value_dim;
    }
    static T *out(const Shape &s, int64_t token, int64_t head) {
        return s.op.template at<T>(9) + (token * s.value_heads + head) * s.value_dim;
    }
    // beta (v - decay S^T k), for the product of the state before the token with its key.
    static INLINE F correction(F v, F product, float decay, float beta) {
        return set1(beta) * (v - set1(decay) * product);
    }

    // One token reads the state twice, the second time from the cache, and writes it once. Whole rows are processed, in
    // the order of the memory. The state `next` is prefetched, unless it is null.
    static void one_token(const Shape &s, int64_t row, int64_t head, int64_t first, int64_t columns, float *state,
                          const float *next) {
        int64_t dim = s.key_dim, stride = s.value_dim, token = s.rows.begin(row);
        int64_t padded = ceil_div<int64_t>(columns, LANES) * LANES, padded_dim = ceil_div<int64_t>(dim, LANES) * LANES;
        float *q = static_cast<float *>(scratch(size_t(2 * padded_dim + 3 * padded) * 4)), *k = q + padded_dim;
        float *sums = k + padded_dim, *delta = sums + 2 * padded;  // sums: of rows with even numbers, with odd numbers
        Token made{q, k, 0, 0};
        made.prepare(s, token, head);
        if (s.rows.is_new(row))
            for (int64_t i = 0; i < dim; i++) std::memset(state + i * stride, 0, size_t(columns) * 4);

        each_row(dim, columns, padded, sums, [&](int64_t i, int64_t c, int64_t n, F sum)
                                                  __attribute__((always_inline)) {
            if (next) __builtin_prefetch(next + i / 2 * stride + c, 0, 2);
            return fma(set1(k[i]), get_n<Float32>(state + i * stride + c, n), sum);
        });
        const T *v = values(s, token, head) + first;
        by_lanes(columns, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
            F product = load(sums + c) + load(sums + padded + c);
            store(delta + c, correction(get_n<D>(v + c, n), product, made.decay, made.beta));
        });
        F decay = set1(made.decay);
        each_row(dim, columns, padded, sums, [&](int64_t i, int64_t c, int64_t n, F sum)
                                                  __attribute__((always_inline)) {
            if (next) __builtin_prefetch(next + (dim + i) / 2 * stride + c, 0, 2);
            F x = fma(set1(k[i]), load(delta + c), decay * get_n<Float32>(state + i * stride + c, n));
            put_n<Float32>(state + i * stride + c, x, n);
            return fma(set1(q[i]), x, sum);
        });
        T *to = out(s, token, head) + first;
        by_lanes(columns, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
            put_n<D>(to + c, load(sums + c) + load(sums + padded + c), n);
        });
    }

    // Computes sums [2, padded], of the rows with even numbers and of those with odd numbers: a sum begins with 0 and
    // becomes add(row, column, columns, sum) at each row.
    template <class Add>
    static INLINE void each_row(int64_t dim, int64_t columns, int64_t padded, float *sums, const Add &add) {
        constexpr int64_t ROWS = 8;  // rows for which the sums of a panel stay in registers; even
        std::memset(sums, 0, size_t(2 * padded) * 4);
        int64_t i = 0;
        auto rows = [&](auto count) __attribute__((always_inline)) {
            by_lanes(columns, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
                F even = load(sums + c), odd = load(sums + padded + c);
                _Pragma("GCC unroll 8") for (int64_t j = 0; j < decltype(count)::value; j += 2) {
                    even = add(i + j, c, n, even);
                    if (j + 1 < decltype(count)::value) odd = add(i + j + 1, c, n, odd);
                }
                store(sums + c, even), store(sums + padded + c, odd);
            });
            i += decltype(count)::value;
        };
        while (i + ROWS <= dim) rows(std::integral_constant<int64_t, ROWS>());
        while (i + 2 <= dim) rows(std::integral_constant<int64_t, 2>());
        if (i < dim) rows(std::integral_constant<int64_t, 1>());
    }

    // Copies blocks of columns to memory of their own, [Dk, BLOCK] each, so that a block stays in the first-level cache
    // for all tokens of a chunk.
    static void many_tokens(const Shape &s, int64_t row, int64_t head, int64_t first, int64_t columns, float *state) {
        int64_t dim = s.key_dim, blocks = ceil_div(columns, BLOCK), end = s.rows.end(row);
        int64_t padded_dim = ceil_div<int64_t>(dim, LANES) * LANES;
        float *copies =
            static_cast<float *>(scratch(size_t(blocks * dim * BLOCK + 2 * CHUNK * padded_dim) * 4));
        float *keys = copies + blocks * dim * BLOCK, *queries = keys + CHUNK * padded_dim;
        if (s.rows.is_new(row))
            std::memset(copies, 0, size_t(blocks * dim * BLOCK) * 4);
        else
            copy(blocks, dim, columns, [&](int64_t i, int64_t column, int64_t n, float *at) {
                store(at, get_n<Float32>(state + i * s.value_dim + column, n));
            }, copies);
        Token chunk[CHUNK];
        for (int64_t i = 0; i < CHUNK; i++) chunk[i] = {queries + i * padded_dim, keys + i * padded_dim, 0, 0};
        for (int64_t begin = s.rows.begin(row); begin < end; begin += CHUNK) {
            int64_t count = std::min(CHUNK, end - begin);
            for (int64_t i = 0; i < count; i++) chunk[i].prepare(s, begin + i, head);
            for (int64_t b = 0; b < blocks; b++)
                advance(s, copies + b * dim * BLOCK, chunk, begin, count, head, first + b * BLOCK,
                        std::min(BLOCK, columns - b * BLOCK));
        }
        copy(blocks, dim, columns, [&](int64_t i, int64_t column, int64_t n, float *at) {
            put_n<Float32>(state + i * s.value_dim + column, load(at), n);
        }, copies);
    }

    // Calls move(row, column, columns, address in the copies) for each vector of the state.
    template <class Move>
    static INLINE void copy(int64_t blocks, int64_t dim, int64_t columns, const Move &move, float *copies) {
        for (int64_t i = 0; i < dim; i++)
            for (int64_t column = 0; column < blocks * BLOCK; column += LANES) {
                float *at = copies + (column / BLOCK * dim + i) * BLOCK + column % BLOCK;
                if (column < columns)
                    move(i, column, std::min<int64_t>(LANES, columns - column), at);
                else
                    store(at, zero());
            }
    }

    // Advances a block by the tokens of a chunk. column: its first column in the head. columns: at most BLOCK.
    static void advance(const Shape &s, float *state, const Token *chunk, int64_t begin, int64_t count, int64_t head,
                        int64_t column, int64_t columns) {
        F product[PANELS], delta[PANELS], result[PANELS];
        multiply(state, s.key_dim, chunk[0].k, product);
        for (int64_t i = 0; i < count; i++) {
            const T *v = values(s, begin + i, head) + column;
            T *to = out(s, begin + i, head) + column;
            for (int p = 0; p < PANELS; p++) {
                int64_t n = std::min<int64_t>(LANES, columns - p * LANES);
                F value = n > 0 ? get_n<D>(v + p * LANES, n) : zero();
                delta[p] = correction(value, product[p], chunk[i].decay, chunk[i].beta);
            }
            const float *next = i + 1 < count ? chunk[i + 1].k : chunk[i].k;
            update(state, s.key_dim, chunk[i], next, delta, result, product);
            for (int p = 0; p < PANELS; p++) {
                int64_t n = std::min<int64_t>(LANES, columns - p * LANES);
                if (n > 0) put_n<D>(to + p * LANES, result[p], n);
            }
        }
    }

    // product = S^T k.
    static INLINE void multiply(const float *state, int64_t dim, const float *k, F *product) {
        F even[PANELS], odd[PANELS];
        for (int p = 0; p < PANELS; p++) even[p] = odd[p] = zero();
        int64_t i = 0;
        for (; i + 2 <= dim; i += 2, state += 2 * BLOCK)
            for (int p = 0; p < PANELS; p++) {
                even[p] = fma(set1(k[i]), load(state + p * LANES), even[p]);
                odd[p] = fma(set1(k[i + 1]), load(state + BLOCK + p * LANES), odd[p]);
            }
        if (i < dim)
            for (int p = 0; p < PANELS; p++) even[p] = fma(set1(k[i]), load(state + p * LANES), even[p]);
        for (int p = 0; p < PANELS; p++) product[p] = even[p] + odd[p];
    }

    // S = decay S + k delta^T, result = S^T q and product = S^T next, the key of the next token.
    static INLINE void update(float *state, int64_t dim, const Token &token, const float *next, const F *delta,
                              F *result, F *product) {
        F by_q[2][PANELS], by_k[2][PANELS], change[PANELS], decay = set1(token.decay);
        for (int p = 0; p < PANELS; p++) by_q[0][p] = by_q[1][p] = by_k[0][p] = by_k[1][p] = zero();
        for (int p = 0; p < PANELS; p++) change[p] = delta[p];
        const float *k = token.k, *q = token.q;
        auto row = [&](int64_t i, int parity) __attribute__((always_inline)) {
            F own = set1(k[i]), query = set1(q[i]), key = set1(next[i]);
            _Pragma("GCC unroll 2") for (int p = 0; p < PANELS; p++) {
                float *at = state + i * BLOCK + p * LANES;
                F x = fma(own, change[p], decay * load(at));
                store(at, x);
                by_q[parity][p] = fma(query, x, by_q[parity][p]);
                by_k[parity][p] = fma(key, x, by_k[parity][p]);
            }
        };
        int64_t i = 0;
        for (; i + 2 <= dim; i += 2) row(i, 0), row(i + 1, 1);
        if (i < dim) row(i, 0);
        for (int p = 0; p < PANELS; p++) result[p] = by_q[0][p] + by_q[1][p], product[p] = by_k[0][p] + by_k[1][p];
    }
};

extern const Kernel DELTA[] = {
    BY_DTYPE("gated_delta_rule", GatedDeltaRule),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
