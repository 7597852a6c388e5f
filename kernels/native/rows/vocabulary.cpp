// Penalties and masks on logits, and log-probabilities, over the whole vocabulary.
//
//   penalize        p: logits [T, Vp] float32, in_prompt [T, Vp] bool, output_counts [T, Vp] int32, repetition,
//                      presence, frequency [T] float32                        n: T, Vp
//   mask_logits     p: logits [T, Vp], bits [masks, words] int32, the mask of each row [T] int32 (masks.h)
//                   n: T, Vp, vocabulary, words
//   logprobs        p: logits [T, Vp], ids [T] int64, sums [T, parts, 3] float64, largest [T, blocks] float32
//   logprobs_merge  p: as logprobs, then logprob [T] float32, rank [T] int64, top_ids [T, top] int64,
//                      top_logprobs [T, top] float32
//                   n of both: T, Vp, vocabulary, top
//
// A row is divided into parts of PART columns, which threads share. Parts lie at absolute columns and are merged in
// ascending order, so that a row's numbers do not depend on the number of threads.
#include <algorithm>

#include "rows/masks.h"
#include "rows/sum.h"

namespace npuserve {
namespace NPUSERVE_ISA {

constexpr int64_t PART = LOGPROBS_PART, BLOCK = LOGPROBS_BLOCK;

// Performs the operations of the golden function in the same order, so that the results are bit-identical.
struct Penalize {
    static int64_t units(const Call &call) { return call.rows * ceil_div(call.op.n[1], PART); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        int64_t width = op.n[1], parts = ceil_div(width, PART), row = unit / parts, begin = unit % parts * PART;
        int64_t at = row * width + begin;
        float *logits = op.at<float>(0) + at;
        const uint8_t *in_prompt = op.at<uint8_t>(1) + at;
        const int32_t *counts = op.at<int32_t>(2) + at;
        F repetition = set1(op.at<float>(3)[row]), one = set1(1.0f);
        F presence = set1(op.at<float>(4)[row]), frequency = set1(op.at<float>(5)[row]);
        by_lanes(std::min(PART, width - begin), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            int8_t prompt[LANES] = {};
            std::memcpy(prompt, in_prompt + i, size_t(n));
            F x = get_n<Float32>(logits + i, n), count = to_float(get_n(counts + i, n));
            F in_output = where_at_least(count, one, one, zero());
            F penalty = where_at_least(max(to_float(prompt), in_output), one, repetition, one);
            x = where_at_least(zero(), x, x * penalty, where_at_least(x, zero(), x / penalty, x));
            x = x - frequency * count;
            put_n<Float32>(logits + i, x - presence * in_output, n);
        });
    }
};

// Makes masked logits minus infinity.
template <class D>
struct MaskLogits {
    static int64_t units(const Call &call) { return call.rows * ceil_div(call.op.n[2], PART); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        Masks masks(op, 1, op.n[3]);
        int64_t parts = ceil_div(op.n[2], PART), row = unit / parts, begin = unit % parts * PART;
        const int32_t *mask = masks.of(row);
        if (!mask) return;
        typename D::type *logits = op.at<typename D::type>(0) + row * op.n[1], low[32];
        D::put(low, set1(-INFINITY));
        D::put(low + LANES, set1(-INFINITY));
        for (int64_t end = std::min(begin + PART, op.n[2]), i = begin; i < end; i += 32) {
            uint32_t banned = ~uint32_t(mask[i / 32]);
            if (end - i < 32) {
                banned &= (1u << (end - i)) - 1;
                for (; banned; banned &= banned - 1) logits[i + __builtin_ctz(banned)] = low[0];
            } else if (banned) {
                copy_where(banned, low, logits + i);
            }
        }
    }

    // Copies those of 32 numbers whose bits are set. The others keep their bits: a conversion may change denormal ones.
    template <class T>
    static INLINE void copy_where(uint32_t bits, const T *from, T *to) {
#if defined(__AVX512BW__)
        __m512i x = _mm512_loadu_si512(from);
        if (sizeof(T) == 2) {
            _mm512_mask_storeu_epi16(to, bits, x);
        } else {
            _mm512_mask_storeu_epi32(to, __mmask16(bits), x);
            _mm512_mask_storeu_epi32(to + LANES, __mmask16(bits >> LANES), x);
        }
#else
        if (__builtin_popcount(bits) <= 16) {
            for (; bits; bits &= bits - 1) to[__builtin_ctz(bits)] = from[__builtin_ctz(bits)];
            return;
        }
        T kept[32];
        std::memcpy(kept, to, sizeof kept);
        std::memcpy(to, from, sizeof kept);
        for (bits = ~bits; bits; bits &= bits - 1) to[__builtin_ctz(bits)] = kept[__builtin_ctz(bits)];
#endif
    }
};

// Sizes of a logprobs op.
struct Report {
    const Op &op;
    int64_t width, columns, top, parts, blocks;
    explicit Report(const Op &op)
        : op(op), width(op.n[1]), columns(op.n[2]), top(op.n[3]), parts(ceil_div(columns, PART)),
          blocks(ceil_div(columns, BLOCK)) {}
    // Sums of a part: its largest logit, its weights relative to this logit, the number of logits above the id's logit.
    double *sums(int64_t row, int64_t part) const { return op.at<double>(2) + (row * parts + part) * 3; }
    float *largest(int64_t row) const { return op.at<float>(3) + row * blocks; }
    template <class D>
    const typename D::type *logits(int64_t row) const {
        return op.at<typename D::type>(0) + row * width;
    }
    // Logit of a column. NaN counts as minus infinity.
    template <class D>
    float logit(int64_t row, int64_t column) const {
        float x = D::get1(logits<D>(row)[column]);
        return x == x ? x : -INFINITY;
    }
};

// Loads n logits; the other lanes, and NaN, are minus infinity.
template <class D>
INLINE F get_logits(const typename D::type *p, int64_t n) {
    F low = set1(-INFINITY), x = max(get_n<D>(p, n), low);
    return n < LANES ? first(x, n, low) : x;
}

template <class D>
struct Logprobs {
    static int64_t units(const Call &call) { return call.rows * Report(call.op).parts; }
    static void run(const Call &call, int64_t unit) {
        Report r(call.op);
        int64_t row = unit / r.parts, part = unit % r.parts, begin = part * PART;
        int64_t size = std::min(PART, r.columns - begin), larger = 0;
        const typename D::type *logits = r.logits<D>(row) + begin;
        float *largest = r.largest(row) + begin / BLOCK;
        F chosen = set1(r.logit<D>(row, call.op.at<int64_t>(1)[row])), low = set1(-INFINITY), all = low;
        for (int64_t block = 0; block < size; block += BLOCK) {
            F most = low;
            by_lanes(std::min(BLOCK, size - block), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
                F x = get_logits<D>(logits + block + i, n);
                most = max(x, most);
                larger += __builtin_popcount(~at_least(chosen, x) & 0xFFFF);
            });
            largest[block / BLOCK] = lane_max(most);
            all = max(most, all);
        }
        float peak = lane_max(all);
        Sum mass;
        by_lanes(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            mass.add(exp(get_logits<D>(logits + i, n) - set1(peak)));
        });
        double *sums = r.sums(row, part);
        sums[0] = peak, sums[1] = mass.total(), sums[2] = double(larger);
    }
};

template <class D>
struct LogprobsMerge {
    struct Candidate {
        float logit;
        int32_t id;
        // Orders the most likely first, equal logits by id.
        bool operator<(const Candidate &other) const {
            return logit > other.logit || (logit == other.logit && id < other.id);
        }
    };

    static int64_t units(const Call &call) { return call.rows; }
    static void run(const Call &call, int64_t row) {
        const Op &op = call.op;
        Report r(op);
        double peak = -INFINITY, mass = 0, larger = 0;
        for (int64_t part = 0; part < r.parts; part++) peak = std::max(peak, r.sums(row, part)[0]);
        for (int64_t part = 0; part < r.parts; part++) {
            const double *sums = r.sums(row, part);
            mass += sums[1] * std::exp(sums[0] - peak);
            larger += sums[2];
        }
        double logarithm = std::log(mass);
        auto logprob = [&](float logit) { return float((double(logit) - peak) - logarithm); };
        op.at<float>(4)[row] = logprob(r.logit<D>(row, op.at<int64_t>(1)[row]));
        op.at<int64_t>(5)[row] = int64_t(larger) + 1;
        if (r.top == 0) return;
        Candidate *found = static_cast<Candidate *>(scratch(size_t(r.blocks * BLOCK) * sizeof(Candidate)));
        Candidate *end = candidates(r, row, found);
        std::partial_sort(found, found + r.top, end);
        for (int64_t i = 0; i < r.top; i++) {
            op.at<int64_t>(6)[row * r.top + i] = found[i].id;
            op.at<float>(7)[row * r.top + i] = logprob(found[i].logit);
        }
    }

    // Collects all logits of at least the top-th largest of the blocks' maxima; these are `top` or more.
    static Candidate *candidates(const Report &r, int64_t row, Candidate *found) {
        const float *largest = r.largest(row);
        float least = -INFINITY;
        if (r.top < r.blocks) {
            float *order = reinterpret_cast<float *>(found);
            std::copy(largest, largest + r.blocks, order);
            std::nth_element(order, order + (r.top - 1), order + r.blocks, [](float a, float b) { return a > b; });
            least = order[r.top - 1];
        }
        Candidate *end = found;
        for (int64_t block = 0; block < r.blocks; block++) {
            if (largest[block] < least) continue;
            int64_t begin = block * BLOCK;
            const typename D::type *logits = r.logits<D>(row) + begin;
            by_lanes(std::min(BLOCK, r.columns - begin), [&](int64_t i, int64_t n) {
                F x = get_logits<D>(logits + i, n);
                float lanes[LANES];
                store(lanes, x);
                uint32_t bits = at_least(x, set1(least)) & (n < LANES ? (1u << n) - 1 : 0xFFFF);
                for (; bits; bits &= bits - 1) {
                    int lane = __builtin_ctz(bits);
                    *end++ = {lanes[lane], int32_t(begin + i + lane)};
                }
            });
        }
        return end;
    }
};

extern const Kernel VOCABULARY[] = {
    KERNEL("penalize/float32", Penalize),
    BY_DTYPE("mask_logits", MaskLogits),
    BY_DTYPE("logprobs", Logprobs),
    BY_DTYPE("logprobs_merge", LogprobsMerge),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
