// Attention over the paged KV cache.
//
// Layout per layer, with w numbers to a word (cache.h) and Dp the head's size rounded up to 16:
//     keys    [blocks, Hkv, block_size / 16, D / w, 16, w]     words along the head, panels of 16 along the tokens
//     values  [blocks, Hkv, block_size / w, Dp, w]             words along tokens, panels along the head
//     scales  [blocks, Hkv, block_size] bfloat16               of keys and of values, in an int8 cache
//
// An int8 cache is multiplied by queries and weights in int16, each row with its own scale. Sums are exact. The only
// error is the quantization of the cache.
//
// A query's context is cut into splits of SPLIT tokens at absolute positions. Each split is computed independently
// (scores, largest score, weights, weighted sum) and merged into the total in ascending order. The order of additions
// does not depend on the number of queries or threads.
//
//   attention        p: q [T, Hq, D], keys, values, block_tables [R, stride] int32, context_lens [R] int32,
//                       cu_seqlens_q [R + 1] int32, out [T, Hq D], plan [R + 2] int32, partial float32
//                    n: T, maximum R, Hq, Hkv, D, block_size, stride, capacity of partial in items   f: scale
//   attention_int8   p: as attention, then scales of the keys, scales of the values
//   attention_merge  as attention or attention_int8; the pointers before context_lens and after partial are null
#include <algorithm>

#include "attention/amx_attention.h"
#include "attention/gather.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Scores and weighted sums of rows [from, count) over runs. They depend on the cache by Sums alone, so that both dtypes of
// activations share them.
template <class Sums, class By, class Height, int64_t PER, class Fetch>
ONE_COPY void product_of_keys(const Shape &s, const typename Sums::X *q, const float *q_scales, const Run &keys, int64_t stride,
                              int64_t panel_stride, int64_t from, int64_t count, const Visibility &visible, float *scores,
                              const Fetch &ahead) {
    int64_t dim_bytes = s.dim * int64_t(sizeof(*q));
    for_tiles<Height>(
        count - from, ceil_div<int64_t>(keys.tokens, LANES),
        Scores<Sums, By, Fetch>{reinterpret_cast<const char *>(q) + from * dim_bytes, q_scales + from, dim_bytes, s.dim / PER,
                                stride, panel_stride, keys, scores + from * SPLIT, visible, 0, 0, ahead});
}
template <class Sums, class By, class Height, int64_t PER, class Fetch>
ONE_COPY void product_of_values(const Shape &s, const typename Sums::X *weights, const float *weight_scales, const Run *values,
                                int64_t begin, int64_t end, int64_t runs, int64_t stride, int64_t panels, int64_t from,
                                int64_t count, float *to, const Merging &merging, const Visibility &visible,
                                const Fetch &ahead) {
    for_tiles<Height>(
        count - from, panels,
        Weighted<Sums, By, PER, Fetch>{reinterpret_cast<const char *>(weights + from * SPLIT), weight_scales + from, values,
                                       begin, end, runs, stride, panels, s.padded_dim, to, merging, visible, 0, 0, ahead});
}

template <class C>
struct Attention {
    typedef typename C::Activation D;
    typedef typename C::Sums Sums;
    typedef typename D::type T;
    typedef typename C::X X;
    typedef typename C::Dot Dot;
    typedef std::conditional_t<GATHERS, FewTiles, Sweep<Dot>> Tiles;
    typedef AttentionTiles<C> Amx;
    static constexpr int64_t PER_WORD = C::PER_WORD;
    static constexpr float LOG2E = 1.44269504f;

    // 2**x, where x is a score minus the largest score.
    static INLINE F power(F x) {
        if constexpr (sizeof(T) < 4) return exp2_short(x);
        x = max(x, set1(-127.0f));
        F whole = nearest(x);
        return exp2_of(whole, x - whole);
    }

    // Memory of a unit in this thread's scratch.
    struct UnitScratch {
        X *q;             // [rows, D]
        X *weights;       // [rows, SPLIT]
        float *scores;    // [rows, SPLIT]
        float *sum;       // [rows, Dp] of one split
        float *total;     // [rows, Dp] of all splits so far
        float *largest, *mass, *total_largest, *total_mass;  // [rows]
        float *q_scales, *weight_scales, *old, *young;        // [rows]
        float *value_scales;   // [SPLIT]
        uint32_t *last_word;   // [Dp]
        uint16_t *key_scales;  // [SPLIT], of gathered keys
        char *buffer;          // gathered keys or values, or copied values

        explicit UnitScratch(const Shape &s) {
            int64_t rows = s.item_queries * s.group + (GATHERS ? MAX_PADDING : Amx::PADDING), size = int64_t(sizeof(X));
            int64_t of_row = s.dim * size + SPLIT * (size + 4) + s.padded_dim * 8 + 8 * 4;
            int64_t copied = GATHERS ? Gather<C>::bytes(s) : Amx::bytes(s);
            int64_t bytes = rows * of_row + SPLIT * (4 + 2) + s.padded_dim * 4 + copied + 18 * 64;
            at = static_cast<char *>(scratch(size_t(bytes)));
            take(q, rows * s.dim + 64 / size);
            take(scores, rows * SPLIT);
            if constexpr (GATHERS && sizeof(X) == sizeof(float))
                weights = scores;  // a weight overwrites its score
            else
                take(weights, rows * SPLIT);
            for (float **made : {&sum, &total}) take(*made, rows * s.padded_dim);
            for (float **made : {&largest, &mass, &total_largest, &total_mass, &q_scales, &weight_scales, &old, &young})
                take(*made, rows);
            take(value_scales, SPLIT);
            take(last_word, s.padded_dim);
            if (GATHERS) take(key_scales, SPLIT);
            take(buffer, copied);
        }

        // Sets the padding rows of the last tile to 0.
        void pad(const Shape &s, int64_t count) const {
            std::memset(static_cast<void *>(q + count * s.dim), 0, size_t(MAX_PADDING * s.dim) * sizeof(X));
            std::memset(static_cast<void *>(weights + count * SPLIT), 0, size_t(MAX_PADDING * SPLIT) * sizeof(X));
            std::fill_n(q_scales + count, MAX_PADDING, 0.0f);
            std::fill_n(weight_scales + count, MAX_PADDING, 0.0f);
        }

      private:
        char *at;
        template <class Element>
        void take(Element *&made, int64_t n) {
            made = reinterpret_cast<Element *>(at);
            at += ceil_div<int64_t>(n * int64_t(sizeof(Element)), 64) * 64;
        }
    };

    static int64_t units(const Call &call) {
        Shape s(call);
        int64_t rows = s.make_plan(), items = s.plan()[rows];
        return items * s.kv_heads * (s.cut(items, call.threads) ? s.most_splits(rows) : 1);
    }

    // Work of a unit: splits [split, end) of an item, for the queries of one key-value head.
    struct UnitRange {
        int64_t items;
        bool cut;
        int64_t splits, index, head;
        Item item;
        int64_t last, split, end;  // last: context of the last query

        // Items of one head are adjacent, since they share its keys and values. The last items of a prompt have the
        // most work and are first. If items are cut by splits, units of adjacent heads are adjacent.
        UnitRange(const Shape &s, int64_t rows, int threads, int64_t unit)
            : items(s.plan()[rows]), cut(s.cut(items, threads)), splits(cut ? s.most_splits(rows) : 1),
              index(items - 1 - (cut ? unit / s.kv_heads / splits : unit % items)),
              head(cut ? unit % s.kv_heads : unit / items), item(s, rows, index),
              last(item.position + item.end - item.first), split(cut ? unit / s.kv_heads % splits : 0),
              end(cut ? split + 1 : ceil_div(last, SPLIT)) {}
        bool empty() const { return split * SPLIT >= last; }
        int64_t units(const Shape &s) const { return items * s.kv_heads * splits; }
        // The first keys of a split, to prefetch.
        Prefetch keys(const Shape &s, int64_t split) const {
            int64_t token = split * SPLIT;
            int64_t tokens = std::min({SPLIT, s.block_size - token % s.block_size, last - token});
            return keys_ahead(s, {s.key<C>(item.row, head, token), 0, tokens, nullptr});
        }
    };

    static void run(const Call &call, int64_t unit) {
        Shape s(call);
        int64_t rows = s.rows();
        UnitRange part(s, rows, call.threads, unit);
        if (part.empty()) return;
        const Item &item = part.item;
        int64_t count = (item.end - item.first) * s.group, following = unit + call.threads;

        UnitScratch work(s);
        for (int64_t i = 0; i < count; i++) {
            int64_t place = (item.first + i / s.group) * s.q_heads + part.head * s.group + i % s.group;
            work.q_scales[i] = C::query(s.op.at<T>(0) + place * s.dim, s.dim, work.q + i * s.dim);
        }
        if (GATHERS) work.pad(s, count);
        Amx tiles(s, count);
        bool first = !part.cut;
        for (int64_t split = part.split; split < part.end; split++) {
            int64_t from = std::max<int64_t>(0, split * SPLIT - item.position) * s.group;  // earlier rows see no token
            Prefetch after;
            if (split + 1 < part.end) {
                after = part.keys(s, split + 1);
            } else if (count <= MEMORY_BOUND_ROWS && following < part.units(s)) {  // the most likely next unit of this thread
                UnitRange next(s, rows, call.threads, following);
                if (!next.empty()) after = next.keys(s, next.split);
            }
            attend(s, work, tiles, item, part.head, split, from, count, after, first ? work.total : work.sum,
                   first ? work.total_largest : work.largest, first ? work.total_mass : work.mass, !first && !part.cut);
            for (int64_t i = part.cut ? from : count; i < count; i++) {
                float *p = s.partial(part.index, part.splits, split, part.head * s.group + i);
                p[0] = work.largest[i], p[1] = work.mass[i];
                std::memcpy(p + LANES, work.sum + i * s.padded_dim, size_t(s.padded_dim) * 4);
            }
            first = false;
        }
        if (part.cut) return;
        for (int64_t i = 0; i < count; i++)
            put(s, work.total + i * s.padded_dim, work.total_mass[i], item.first + i / s.group,
                part.head * s.group + i % s.group);
    }

    // Computes sum, largest and mass of rows [from, count) over one split. merges: adds them to the totals.
    static void attend(const Shape &s, const UnitScratch &work, const Amx &tiles, const Item &item, int64_t head, int64_t split, int64_t from,
                       int64_t count, const Prefetch &after, float *sum, float *largest_of, float *mass_of, bool merges) {
        int64_t begin = split * SPLIT, tokens = std::min(SPLIT, item.position + count / s.group - begin);
        int64_t padded = ceil_div<int64_t>(tokens, PER_WORD) * PER_WORD;
        int64_t weighed = std::max(padded, ceil_div(tokens, Amx::TOKENS) * Amx::TOKENS);
        int64_t whole = C::ABSORBS ? padded : tokens / PER_WORD * PER_WORD;
        Run keys[SPLIT_PANELS], values[SPLIT_PANELS + 1];
        const uint16_t *value_scales[SPLIT_PANELS];
        int64_t runs = 0, value_runs = 0;
        for (int64_t token = 0; token < tokens; runs++) {
            int64_t at = begin + token, here = std::min(s.block_size - at % s.block_size, tokens - token);
            keys[runs] = {s.key<C>(item.row, head, at), token, here, s.scales(9, item.row, head, at)};
            value_scales[runs] = s.scales(10, item.row, head, at);
            C::prefetch_scales(keys[runs].scales, here), C::prefetch_scales(value_scales[runs], here);
            if (token < whole)
                values[value_runs++] = {s.value<C>(item.row, head, at), token, std::min(here, whole - token), nullptr};
            token += here;
        }
        if (whole < tokens) {
            // The second half of the last word belongs to no token and may hold any number.
            const char *word = s.value<C>(item.row, head, begin + whole);
            for (int64_t d = 0; d < s.padded_dim; d++) work.last_word[d] = word_at(word + d * 4) & 0xFFFF;
            values[value_runs++] = {reinterpret_cast<const char *>(work.last_word), whole, padded - whole, nullptr};
        }
        Visibility visible{item.position + from / s.group + 1 - begin, s.group, tokens};
        // Few rows are bound by memory, so the next operands are prefetched while a block is multiplied.
        bool few = count - from <= MEMORY_BOUND_ROWS;
        Prefetch none;
        if constexpr (Amx::USED)
            tiles.scores(work.q, keys, runs, from, count, visible, work.scores);
        else if (GATHERS && !few)
            gathered_scores(s, work, keys, runs, values, value_runs, from, count, visible);
        else
            for (int64_t i = 0; i < runs; i++)
                product_of_keys<Sums, Dot, Tiles, PER_WORD>(
                    s, work.q, work.q_scales, keys[i], s.key_stride<C>(), s.key_panel<C>(), from, count, visible, work.scores,
                    !few ? none : i + 1 < runs ? keys_ahead(s, keys[i + 1]) : values_ahead(s, values[0]));
        for (int64_t i = 0; i < runs; i++)
            C::value_scales(value_scales[i], keys[i].tokens, work.value_scales + keys[i].first);
        float factor = float(s.op.f[0]) * LOG2E;
        // A loop of its own, so that the weights of a row do not wait for its largest score.
        for (int64_t i = from; i < count; i++) {
            int64_t mine = visible.by(i - from), full = mine / LANES * LANES;
            const float *scores = work.scores + i * SPLIT;
            F low = set1(-INFINITY), most = low;
            for (int64_t t = 0; t < full; t += LANES) most = max(most, load(scores + t));
            if (full < mine) most = max(most, first(load(scores + full), mine - full, low));
            largest_of[i] = lane_max(most) * factor;
        }
        for (int64_t i = from; i < count; i++) {
            int64_t mine = visible.by(i - from), full = mine / LANES * LANES;
            float *scores = work.scores + i * SPLIT;
            typename C::Weights weights(work.weights + i * SPLIT, scores, work.value_scales);
            F mass = zero(), peak = set1(largest_of[i]), scale = set1(factor);
            for (int64_t t = 0; t < full; t += LANES)
                mass = mass + weights.add(t, power(fma(load(scores + t), scale, -peak)));
            int64_t t = full;
            if (full < mine) {
                F p = first(power(fma(load(scores + full), scale, -peak)), mine - full, zero());
                mass = mass + weights.add(full, p);
                t += LANES;
            }
            for (; t < weighed; t += LANES) weights.add(t, zero());
            work.weight_scales[i] = weights.end(weighed);
            mass_of[i] = lane_sum(mass);
        }
        Merging merging{merges ? work.old + from : nullptr, work.young + from, work.total - sum};
        if (merges)
            merging.masses(count - from, work.largest + from, work.mass + from, work.total_largest + from,
                           work.total_mass + from);
        if constexpr (Amx::USED) {
            const char *made[SPLIT / Amx::TOKENS];
            int64_t steps = tiles.values(values, value_runs, work.buffer, made);
            tiles.weighted(work.weights, made, steps, from, count, visible, sum);
            for (int64_t i = merges ? from : count; i < count; i++)
                for (int64_t d = 0; d < s.padded_dim; d += LANES)
                    merging.put(i - from, sum + i * s.padded_dim + d, load(sum + i * s.padded_dim + d));
            return;
        }
        float *to = sum + from * s.padded_dim;
        if (GATHERS && !few)
            return gathered_weighted(s, work, values, value_runs, item, head, begin + SPLIT, from, count, to, merging, visible);
        int64_t step = few ? 1 : value_runs;  // one block at a time, or all of them in registers
        for (int64_t i = 0; i < value_runs; i += step)
            product_of_values<Sums, Dot, Tiles, PER_WORD>(
                s, work.weights, work.weight_scales, values, i, i + step, value_runs, s.value_stride<C>(), s.padded_dim / LANES,
                from, count, to, merging, visible, !few ? none : i + 1 < value_runs ? values_ahead(s, values[i + 1]) : after);
    }

    // Scores of many rows over gathered keys. The values of the split are prefetched meanwhile.
    static void gathered_scores(const Shape &s, const UnitScratch &work, const Run *keys, int64_t runs, const Run *values,
                                int64_t value_runs, int64_t from, int64_t count, const Visibility &visible) {
        if constexpr (GATHERS) {
            typedef Gather<C> G;
            Run gathered[G::MOST_RUNS];
            int64_t made = G::keys(s, keys, runs, work.key_scales, work.buffer, gathered);
            NextOperands next;
            for (int64_t i = 0; i < value_runs; i++) next.add(values_ahead(s, values[i]));
            next.spread(s.padded_dim * visible.tokens * C::WORD / PER_WORD, made * ManyTiles::count(count - from));
            for (int64_t i = 0; i < made; i++)
                product_of_keys<Sums, typename G::Dot, ManyTiles, G::PER_WORD>(
                    s, work.q, work.q_scales, gathered[i], G::STRIDE, G::Dot::PANEL, from, count, visible, work.scores,
                    ByTile{&next});
        }
    }
    // Weighted sums over gathered values. The keys of the next split, from `next_split` on, are prefetched meanwhile.
    static void gathered_weighted(const Shape &s, const UnitScratch &work, const Run *values, int64_t runs, const Item &item,
                                  int64_t head, int64_t next_split, int64_t from, int64_t count, float *to,
                                  const Merging &merging, const Visibility &visible) {
        if constexpr (GATHERS) {
            typedef Gather<C> G;
            Run gathered[G::MOST_RUNS];
            int64_t made = G::values(s, values, runs, work.buffer, gathered), panels = s.padded_dim / LANES;
            int64_t end = std::min(next_split + SPLIT, item.position + count / s.group);
            NextOperands next;
            for (int64_t token = next_split, here; token < end; token += here) {
                here = std::min(s.block_size - token % s.block_size, end - token);
                next.add(keys_ahead(s, {s.key<C>(item.row, head, token), 0, here, nullptr}));
            }
            next.spread((end - next_split) * s.dim * C::WORD / PER_WORD,
                        made * ceil_div<int64_t>(panels, GROUP) * ManyTiles::count(count - from));
            for (int64_t panel = 0; panel < panels; panel += GROUP, to += GROUP * LANES)
                for (int64_t i = 0; i < made; i++) {
                    int64_t here = std::min<int64_t>(GROUP, panels - panel);
                    product_of_values<Sums, typename G::Dot, ManyTiles, G::PER_WORD>(
                        s, work.weights, work.weight_scales, gathered, i, i + 1, made, G::STRIDE, here, from, count, to,
                        merging, visible, ByTile{&next});
                    gathered[i].at += G::CHUNK * G::STRIDE;
                }
        }
    }

    static Prefetch keys_ahead(const Shape &s, const Run &run) {
        return {run.at, s.key_panel<C>(), ceil_div<int64_t>(run.tokens, LANES), s.key_panel<C>()};
    }
    static Prefetch values_ahead(const Shape &s, const Run &run) {
        return {run.at, s.value_stride<C>(), ceil_div<int64_t>(run.tokens, PER_WORD), s.value_stride<C>()};
    }

    static INLINE void put(const Shape &s, const float *total, float mass, int64_t token, int64_t q_head) {
        T *out = s.op.template at<T>(6) + (token * s.q_heads + q_head) * s.dim;
        F factor = set1(1.0f / mass);
        for (int64_t d = 0; d < s.dim; d += LANES) put_n<D>(out + d, load(total + d) * factor, s.dim - d);
    }
};

template <class D>
using AttentionPlain = Attention<PlainCache<D>>;
template <class D>
using AttentionInt8 = Attention<Int8Cache<D>>;

template <class D>
struct AttentionMerge {
    static int64_t units(const Call &call) {
        Shape s(call);
        int64_t rows = s.rows(), items = s.plan()[rows];
        return s.cut(items, call.threads) ? items * s.kv_heads : 0;
    }
    static void run(const Call &call, int64_t unit) {
        Shape s(call);
        int64_t rows = s.rows(), splits = s.most_splits(rows), index = unit / s.kv_heads, head = unit % s.kv_heads;
        Item item(s, rows, index);
        float *total = static_cast<float *>(scratch(size_t(s.padded_dim) * 4));
        for (int64_t i = 0; i < (item.end - item.first) * s.group; i++) {
            float largest = 0, mass = 0;
            int64_t context = item.position + i / s.group + 1;
            for (int64_t split = 0; split * SPLIT < context; split++) {
                const float *p = s.partial(index, splits, split, head * s.group + i);
                merge(s, p[0], p[1], p + LANES, largest, mass, total);
            }
            AttentionPlain<D>::put(s, total, mass, item.first + i / s.group, head * s.group + i % s.group);
        }
    }
};

#if !defined(NPUSERVE_BORROWED) || !BF16_DOT  // a table that has these kernels of avx512_bf16 has its own for bfloat16
extern const Kernel ATTENTION_BFLOAT16[] = {
    KERNEL("attention/bfloat16", AttentionPlain<BFloat16>),
    {nullptr, nullptr, nullptr},
};
#endif

#if !defined(__AMX_TILE__)  // without tiles: isa.cpp takes those of avx512_bf16
extern const Kernel ATTENTION[] = {
    KERNEL("attention/float32", AttentionPlain<Float32>),
    BY_DTYPE("attention_int8", AttentionInt8),
    BY_DTYPE("attention_merge", AttentionMerge),
    {nullptr, nullptr, nullptr},
};
#endif

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
