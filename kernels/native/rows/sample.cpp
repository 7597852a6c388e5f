// Sampling of a token in each row: the golden function of kernels/sample.py, without sorting.
//
//   sample  p: logits [T, Vp], temperature [T] float32, top_k [T] int64, top_p, min_p [T] float32, uniform [T] float64,
//              out [T] int64                                                  n: T, Vp, vocabulary
//
// The filters top_k and top_p each keep the first tokens in the order of falling scores, equal scores by id. The result
// of each is a border: a score, and the number of kept tokens with exactly this score. One search finds both borders,
// by bisection of the range of scores. It adds ones for top_k, and weights for top_p, above the middle. It visits only
// candidates. The largest scores of each block of columns have enough mass that smaller scores are not needed.
#include <algorithm>
#include <cfloat>

#include "rows/sum.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Appends the lanes of x whose bits are set to out[n] and returns the new n. Writes up to 16 lanes past it.
INLINE int64_t append(float *out, int64_t n, F x, uint32_t bits) {
#if defined(__AVX512F__)
    store(out + n, F{{(fvec)_mm512_maskz_compress_ps(__mmask16(bits), (__m512)x.v[0])}});
    return n + __builtin_popcount(bits);
#else
    float l[LANES];
    store(l, x);
    for (int i = 0; i < LANES; i++) {
        out[n] = l[i];
        n += (bits >> i) & 1;
    }
    return n;
#endif
}

// The smallest number above x; NaN above infinity.
INLINE float next_above(float x) { return x < INFINITY ? std::nextafter(x, INFINITY) : NAN; }
INLINE float lane_min(F x) { return -lane_max(zero() - x); }

template <class D>
struct Row {
    typedef typename D::type T;
    static constexpr int64_t BLOCK = 32 * LANES;

    // Border of a filter. It keeps all tokens with scores above `score`, and the `ties` smallest ids among the tokens
    // with exactly this score. `reached` is false if all candidates together do not reach the limit.
    struct Border {
        float score;
        double ties;
        bool reached;
    };

    const T *logits;
    int64_t columns, blocks;
    float *largest;     // [blocks, 16]: by lane
    float *candidates;  // [most + 16]
    double *sums;       // [blocks]
    float peak, scale;

    Row(const T *of, int64_t width, float temperature)
        : logits(of), columns(width), blocks(ceil_div(width, BLOCK)), scale(1.44269504f / temperature) {
        int64_t most = blocks * BLOCK;
        char *memory = static_cast<char *>(scratch(size_t(blocks * (LANES * 4 + 8) + (most + LANES) * 4)));
        largest = reinterpret_cast<float *>(memory);
        sums = reinterpret_cast<double *>(largest + blocks * LANES);
        candidates = reinterpret_cast<float *>(sums + blocks);
        F all = set1(-INFINITY);
        for (int64_t b = 0; b < blocks; b++) {
            F found = set1(-INFINITY);
            each(b, [&](int64_t, F x) __attribute__((always_inline)) { found = max(x, found); });
            store(largest + b * LANES, found);
            all = max(found, all);
        }
        peak = lane_max(all);
    }

    // Calls body(column of the first lane, scores) for the lanes of a block. NaN counts as minus infinity; lanes past
    // the last column are NaN, which has no weight and fails every comparison.
    template <class Body>
    INLINE void each(int64_t block, const Body &body) const {
        int64_t begin = block * BLOCK;
        by_lanes(std::min(BLOCK, columns - begin), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            F x = max(get_n<D>(logits + begin + i, n), set1(-INFINITY));
            body(begin + i, n < LANES ? first(x, n, set1(NAN)) : x);
        });
    }
    INLINE bool reaches(int64_t block, float score) const {
        return at_least(load(largest + block * LANES), set1(score)) != 0;
    }

    // Likelihood relative to the most likely token, which has 1 also if scores are infinite or the temperature is tiny.
    INLINE F weight(F x) const {
        return where_at_least(x, set1(peak), set1(1.0f), exp2((x - set1(peak)) * set1(scale)));
    }

    double total() const {
        Sum sum;
        for (int64_t b = 0; b < blocks; b++)
            each(b, [&](int64_t, F x) __attribute__((always_inline)) { sum.add(weight(x)); });
        return sum.total();
    }
    // Total weight of the tokens that a border keeps.
    double total(const Border &kept) const {
        int64_t n = collect(next_above(kept.score));
        Sum sum;
        for (int64_t i = 0; i < n; i += LANES) sum.add(weight(load(candidates + i)));
        return sum.total() + kept.ties * lane_max(weight(set1(kept.score)));
    }

    // Fills `candidates` with the scores of at least `score`, then NaN up to whole lanes. Returns their number.
    int64_t collect(float score) const {
        int64_t n = 0;
        for (int64_t b = 0; b < blocks; b++)
            if (reaches(b, score))
                each(b, [&](int64_t, F x) __attribute__((always_inline)) {
                    n = append(candidates, n, x, at_least(x, set1(score)));
                });
        store(candidates + n, set1(NAN));
        return n;
    }

    // Returns a score above low and at most high.
    static float between(float low, float high) {
        float middle = std::max(low, -FLT_MAX) / 2 + std::min(high, FLT_MAX) / 2;
        return middle > low && middle <= high ? middle : high;
    }

    // Returns the border at which the n > 0 candidates, largest first, sum to `limit`. MASS: sums weights; otherwise
    // counts candidates. Changes the candidates.
    template <bool MASS>
    Border search(int64_t n, double limit) const {
        F lows = set1(INFINITY), highs = set1(-INFINITY);
        for (int64_t i = 0; i < n; i += LANES) {
            F x = load(candidates + i);
            lows = min(x, lows), highs = max(x, highs);
        }
        float low = lane_min(lows), high = lane_max(highs);
        double above = 0;  // sum of what is larger than all remaining candidates; less than the limit
        while (low < high) {
            F pivot = set1(between(low, high));
            Sum mass;
            int64_t count = 0;
            lows = set1(INFINITY), highs = set1(-INFINITY);
            for (int64_t i = 0; i < n; i += LANES) {
                F x = load(candidates + i);
                if (MASS)
                    mass.add(where_at_least(x, pivot, weight(x), zero()));
                else
                    count += __builtin_popcount(at_least(x, pivot));
                lows = min(where_at_least(x, pivot, x, lows), lows);
                highs = max(where_at_least(x, pivot, highs, x), highs);
            }
            double upper = above + (MASS ? mass.total() : double(count));
            bool up = upper >= limit;
            if (up)
                low = lane_min(lows);
            else
                high = lane_max(highs), above = upper;
            n = keep(n, pivot, up);
        }
        double each_of_them = MASS ? lane_max(weight(set1(low))) : 1.0;
        double ties = std::ceil((limit - above) / each_of_them);
        return Border{low, std::max(1.0, std::min(double(n), ties)), above + double(n) * each_of_them >= limit};
    }
    // Keeps only the candidates from the pivot up, or only the candidates below it. Returns their number.
    int64_t keep(int64_t n, F pivot, bool up) const {
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i += LANES) {
            F x = load(candidates + i);
            uint32_t bits = at_least(x, pivot), all = n - i < LANES ? (1u << (n - i)) - 1 : 0xFFFF;
            kept = append(candidates, kept, x, up ? bits : ~bits & all);
        }
        store(candidates + kept, set1(NAN));
        return kept;
    }

    template <bool MASS>
    Border border(double limit, const Border &before) const {
        std::memcpy(candidates, largest, size_t(blocks * LANES) * 4);
        Border bound = search<MASS>(blocks * LANES, limit);
        return search<MASS>(collect(std::max(bound.reached ? bound.score : -INFINITY, before.score)), limit);
    }

    // Returns the column after the last kept tie of the border.
    int64_t ties_end(const Border &kept) const {
        double count = 0;
        int64_t end = columns;
        for (int64_t b = 0; b < blocks && end == columns; b++)
            if (reaches(b, kept.score))
                each(b, [&](int64_t column, F x) {
                    uint32_t ties = at_least(x, set1(kept.score)) & at_least(set1(kept.score), x);
                    for (; ties && end == columns; ties &= ties - 1)
                        if (++count >= kept.ties) end = column + __builtin_ctz(ties) + 1;
                });
        return end;
    }

    int64_t draw(const Border &kept, float min_p, double uniform) const {
        int64_t end = kept.ties < double(columns) ? ties_end(kept) : columns;
        F score = set1(kept.score), more = set1(next_above(kept.score));
        auto weights = [&](int64_t column, F x) __attribute__((always_inline)) {
            F least = column + LANES <= end ? score : column >= end ? more : first(score, end - column, more);
            F w = where_at_least(x, least, weight(x), zero());
            return where_at_least(w, set1(min_p), w, zero());
        };
        // Minus infinity, the score of a masked token, has no weight unless all tokens have it.
        float least_weighted = peak > -INFINITY ? std::max(kept.score, -FLT_MAX) : kept.score;
        double whole = 0;
        for (int64_t b = 0; b < blocks; b++) {
            Sum sum;
            if (reaches(b, least_weighted))
                each(b, [&](int64_t column, F x) __attribute__((always_inline)) { sum.add(weights(column, x)); });
            sums[b] = sum.total();
            whole += sums[b];
        }
        // A float64 below 1 times the total is less than the total: the block exists and has a weight.
        double target = uniform * whole, before = 0;
        int64_t block = 0;
        while (block < blocks - 1 && before + sums[block] <= target) before += sums[block++];
        float w[BLOCK] = {};
        int64_t begin = block * BLOCK, id = begin;
        each(block, [&](int64_t column, F x) __attribute__((always_inline)) {
            store(w + (column - begin), weights(column, x));
        });
        for (int64_t i = 0; i < BLOCK && before <= target; i++) {
            id = w[i] > 0 ? begin + i : id;
            before += w[i];
        }
        return id;
    }
};

template <class D>
struct Sample {
    static int64_t units(const Call &call) { return call.rows; }
    static void run(const Call &call, int64_t row) {
        const Op &op = call.op;
        typedef typename Row<D>::Border Border;
        Row<D> r(op.at<typename D::type>(0) + row * op.n[1], op.n[2], op.at<float>(1)[row]);
        int64_t top_k = op.at<int64_t>(2)[row];
        float top_p = op.at<float>(3)[row];
        Border all{-INFINITY, double(r.columns), true}, kept = all;
        bool few = 0 < top_k && top_k < r.columns;
        if (few) kept = r.template border<false>(double(top_k), all);
        if (top_p < 1) {
            Border likely = r.template border<true>(double(top_p) * (few ? r.total(kept) : r.total()), kept);
            if (likely.score > kept.score || likely.ties < kept.ties) kept = likely;
        }
        op.at<int64_t>(6)[row] = r.draw(kept, op.at<float>(4)[row], op.at<double>(5)[row]);
    }
};

extern const Kernel SAMPLE[] = {
    BY_DTYPE("sample", Sample),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
