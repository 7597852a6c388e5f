// Attention of one query a row, over a cache in bfloat16. The context is split among blocks.
#pragma once
#include "layout.h"

constexpr float NEVER = -3.402823466e38f;   // score of no key

// A part of the context of a row, for the query heads of a pass.
struct Unit {
    int row, head, pass, part, context, begin, end, filled;   // filled: parts that hold keys
    DEVICE Unit(const Step& step, int index) {
        part = index % SPLIT, index /= SPLIT;
        pass = index % PASSES, index /= PASSES;
        head = index % KV_HEADS, row = index / KV_HEADS;
        context = step.contexts[row] > 1 ? step.contexts[row] : 1;
        const int each = ((context + SPLIT - 1) / SPLIT + 31) / 32 * 32;
        filled = (context + each - 1) / each;
        begin = part * each, end = begin + each < context ? begin + each : context;
    }
    DEVICE int counter() const { return (row * KV_HEADS + head) * PASSES + pass; }
    // The key that this lane has a share of, `from` keys after the first of the unit.
    DEVICE int key(int from) const { return begin + from + thread() / 32 * KEYS + thread() % 32 / LANES; }
};

struct KeyValue { uint4 key, value; };

// A lane's keys and values of the next two iterations, and the blocks of the cache of the third: the number of a block is
// loaded an iteration before its keys.
struct Loaded {
    KeyValue now[TOGETHER], next[TOGETHER];
    int pages[TOGETHER];
};
DEVICE int load_page(const WarpState& own, const Unit& unit, int from) {
    const int key = unit.key(from);
    return key < unit.end ? own.step.tables[unit.row * own.step.table_stride + key / PAGE] : 0;
}
// Load a key and value of an earlier step; 0 for others.
DEVICE KeyValue load_key(const Layer& layer, const Unit& unit, int from, int page) {
    const int key = unit.key(from);
    if (key >= unit.end || key == unit.context - 1) return {};
    const i64 at = ((i64(page) * PAGE + key % PAGE) * KV_HEADS + unit.head) * DIM + thread() % LANES * OWN;
    return {*reinterpret_cast<const uint4*>(layer.keys + at), *reinterpret_cast<const uint4*>(layer.values + at)};
}
DEVICE Loaded load_first(const WarpState& own, const Layer& layer, const Unit& unit) {
    Loaded made;
    int pages[2 * TOGETHER];
    for (int k = 0; k < 2 * TOGETHER; k++) pages[k] = load_page(own, unit, k * STRIDE);
    for (int k = 0; k < TOGETHER; k++) made.pages[k] = load_page(own, unit, (2 * TOGETHER + k) * STRIDE);
    for (int k = 0; k < TOGETHER; k++) {
        made.now[k] = load_key(layer, unit, k * STRIDE, pages[k]);
        made.next[k] = load_key(layer, unit, (TOGETHER + k) * STRIDE, pages[TOGETHER + k]);
    }
    return made;
}

// What a warp prepares for a unit: a query head, or its key or value if it has the last part of the context. These
// numbers do not depend on other operations of the step, so they are loaded before the queries are there.
constexpr int PAIRS = DIM / 64;   // of numbers that a lane rotates
struct Task {
    const u16* from;
    u16 *to, *cache;
    float gamma[2][PAIRS], cosine[PAIRS], sine[PAIRS];
    bool normed, rotated;
};
DEVICE Task task(const WarpState& own, const Layer& layer, const Unit& unit) {
    const Step& step = own.step;
    const int which = own.warp() - HEADS;   // 0 for the key, 1 for the value
    Task made = {};
    if (which > 1 || (which >= 0 && unit.end != unit.context)) return made;
    const u16* qkv = step.qkv + unit.row * QKV_SIZE;
    const u16* gamma = which < 0 ? layer.q_norm : which == 0 ? layer.k_norm : nullptr;
    const float* angles = step.cos_sin + step.positions[unit.row] * DIM + own.lane() * PAIRS;
    if (which < 0) {
        const int head = unit.pass * HEADS + own.warp() < GROUP ? unit.pass * HEADS + own.warp() : GROUP - 1;
        made.from = qkv + (unit.head * GROUP + head) * DIM;
        made.to = own.scratch.heads.queries[own.warp()];
    } else {
        const i64 slot = step.slots[unit.row];
        made.from = qkv + Q_SIZE + which * KV_SIZE + unit.head * DIM;
        made.to = own.scratch.heads.fresh[which];
        if (slot >= 0 && unit.pass == 0)
            made.cache = (which ? layer.values : layer.keys) + (slot * KV_HEADS + unit.head) * DIM;
    }
    made.normed = gamma != nullptr;
    made.rotated = which < 1;
    for (int i = 0; i < PAIRS; i++) {
        made.cosine[i] = angles[i], made.sine[i] = angles[DIM / 2 + i];
        for (int half = 0; half < 2 && made.normed; half++)
            made.gamma[half][i] = low(gamma[half * DIM / 2 + own.lane() * PAIRS + i]);
    }
    return made;
}

// Normalize a head where there is a gamma, rotate it unless it is a value, and round it.
DEVICE void prepare(const WarpState& own, const Task& task) {
    if (task.from == nullptr) return;
    float x[2][PAIRS], sum = 0;
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < PAIRS; i++) {
            x[half][i] = low(load_l2(task.from + half * DIM / 2 + own.lane() * PAIRS + i));
            sum = fma_of(x[half][i], x[half][i], sum);
        }
    if (task.normed) {
        const float inverse = rsqrt_of(sum_of_warp(sum) / DIM + own.step.eps);
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < PAIRS; i++)
                x[half][i] = low(to_bf16(low(to_bf16(x[half][i] * inverse, 0)) * task.gamma[half][i], 0));
    }
    for (int i = 0; i < PAIRS; i++) {
        float a = x[0][i], b = x[1][i];
        const int at = own.lane() * PAIRS + i;
        if (task.rotated) {
            const float rotated = multiplied(a, task.cosine[i]) - multiplied(b, task.sine[i]);
            b = multiplied(b, task.cosine[i]) + multiplied(a, task.sine[i]);
            a = rotated;
        }
        task.to[at] = u16(to_bf16(a, 0)), task.to[DIM / 2 + at] = u16(to_bf16(b, 0));
        if (task.cache != nullptr) task.cache[at] = task.to[at], task.cache[DIM / 2 + at] = task.to[DIM / 2 + at];
    }
}

// A lane's share of the query heads, with a running maximum (Milakov and Gimelshein 2018, arXiv:1805.02867).
struct Running {
    float queries[HEADS][OWN], sums[HEADS][OWN], largest[HEADS], weights[HEADS];

    DEVICE Running(const Heads& heads) {
        for (int j = 0; j < HEADS; j++) {
            largest[j] = NEVER, weights[j] = 0;
            for (int i = 0; i < OWN; i++) {
                queries[j][i] = low(heads.queries[j][thread() % LANES * OWN + i]);
                sums[j][i] = 0;
            }
        }
    }

    // Add keys and values. inside: they are keys of the context; else their values are 0.
    DEVICE void add(const KeyValue (&given)[TOGETHER], const bool (&inside)[TOGETHER], float scale) {
        float scores[TOGETHER][HEADS] = {}, shrunk[HEADS];
#pragma unroll
        for (int k = 0; k < TOGETHER; k++)
#pragma unroll
            for (int i = 0; i < OWN / 2; i++)
#pragma unroll
                for (int j = 0; j < HEADS; j++) {
                    scores[k][j] = fma_of(queries[j][2 * i], low(word(given[k].key, i)), scores[k][j]);
                    scores[k][j] = fma_of(queries[j][2 * i + 1], high(word(given[k].key, i)), scores[k][j]);
                }
        bool moved = false;
#pragma unroll
        for (int j = 0; j < HEADS; j++) {
            float most = largest[j];
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) {
#pragma unroll
                for (int lanes = 1; lanes < LANES; lanes *= 2) scores[k][j] += shuffle_xor(scores[k][j], lanes);
                scores[k][j] = inside[k] ? scores[k][j] * scale : NEVER;
                most = larger(most, scores[k][j]);
            }
            shrunk[j] = most == largest[j] ? 1 : exp2_of(largest[j] - most);
            moved |= most != largest[j];
            largest[j] = most;
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) scores[k][j] = scores[k][j] == NEVER ? 0 : exp2_of(scores[k][j] - most);
        }
        if (any_lane(moved))
#pragma unroll
            for (int j = 0; j < HEADS; j++) {
                weights[j] *= shrunk[j];
#pragma unroll
                for (int i = 0; i < OWN; i++) sums[j][i] *= shrunk[j];
            }
#pragma unroll
        for (int k = 0; k < TOGETHER; k++)
#pragma unroll
            for (int j = 0; j < HEADS; j++) {
                weights[j] += scores[k][j];
#pragma unroll
                for (int i = 0; i < OWN / 2; i++) {
                    sums[j][2 * i] = fma_of(scores[k][j], low(word(given[k].value, i)), sums[j][2 * i]);
                    sums[j][2 * i + 1] = fma_of(scores[k][j], high(word(given[k].value, i)), sums[j][2 * i + 1]);
                }
            }
    }

    // Add the lanes that have the same numbers of a head, and store the warp's sums. Each lane stores a share.
    DEVICE void store(Heads& heads) {
        const int warp = thread() / 32, lane = thread() % 32;
#pragma unroll
        for (int j = 0; j < HEADS; j++) {
            float most = largest[j];
#pragma unroll
            for (int lanes = LANES; lanes < 32; lanes *= 2) most = larger(most, shuffle_xor(most, lanes));
            const float by = largest[j] == NEVER ? 0 : exp2_of(largest[j] - most);
            float weight = weights[j] * by;
#pragma unroll
            for (int i = 0; i < OWN; i++) sums[j][i] *= by;
            int at = lane % LANES * OWN;
#pragma unroll
            for (int lanes = LANES, half = OWN / 2; lanes < 32; lanes *= 2, half /= 2) {
                const bool upper = lane & lanes;
                weight += shuffle_xor(weight, lanes);
#pragma unroll
                for (int i = 0; i < half; i++) {
                    const float other = shuffle_xor(upper ? sums[j][i] : sums[j][i + half], lanes);
                    sums[j][i] = (upper ? sums[j][i + half] : sums[j][i]) + other;
                }
                at += upper * half;
            }
#pragma unroll
            for (int i = 0; i < OWN / KEYS; i++) heads.sums[warp][j][at + i] = sums[j][i];
            if (lane == 0) heads.weights[warp][j][0] = most, heads.weights[warp][j][1] = weight;
        }
    }
};

// Attend to the warp's keys of a unit. The results go to scratch.heads.
DEVICE void attend(const WarpState& own, const Layer& layer, const Unit& unit, Loaded& loaded) {
    constexpr float LOG2_E = 1.44269504f;
    Heads& heads = own.scratch.heads;
    const u16* fresh = heads.fresh[0] + own.lane() % LANES * OWN;
    Running running(heads);
#pragma unroll 1
    for (int from = 0; from < unit.end - unit.begin; from += TOGETHER * STRIDE) {
        KeyValue later[TOGETHER];
        bool inside[TOGETHER];
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
            later[k] = load_key(layer, unit, from + (2 * TOGETHER + k) * STRIDE, loaded.pages[k]);
            loaded.pages[k] = load_page(own, unit, from + (3 * TOGETHER + k) * STRIDE);
            const int key = unit.key(from + k * STRIDE);
            inside[k] = key < unit.end;
            if (inside[k] && key == unit.context - 1)   // other parts have not prepared it
                loaded.now[k] = {*reinterpret_cast<const uint4*>(fresh), *reinterpret_cast<const uint4*>(fresh + DIM)};
        }
        running.add(loaded.now, inside, own.step.scale * LOG2_E);
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) loaded.now[k] = loaded.next[k], loaded.next[k] = later[k];
    }
    running.store(heads);
}

// Merge `count` parts, of which `AT_ONCE` are loaded at a time. weights_of: largest score of a part and the sum of its
// weights. sums_of: four of its sums.
struct Merged { float most, weight; float4 sum; };
template <int AT_ONCE, class Weights, class Sums> DEVICE Merged merged(int count, Weights weights_of, Sums sums_of) {
    Merged made = {NEVER, 0, {0, 0, 0, 0}};
#pragma unroll 1
    for (int first = 0; first < count; first += AT_ONCE) {
        float2 weights[AT_ONCE + 1];
        float4 sums[AT_ONCE + 1];
        weights[AT_ONCE] = {made.most, made.weight}, sums[AT_ONCE] = made.sum;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            weights[i] = {NEVER, 0}, sums[i] = {0, 0, 0, 0};
            if (first + i < count) weights[i] = weights_of(first + i), sums[i] = sums_of(first + i);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) made.most = larger(made.most, weights[i].x);
        made.weight = 0, made.sum = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i <= AT_ONCE; i++) {
            const float by = weights[i].x == NEVER ? 0 : exp2_of(weights[i].x - made.most);
            made.weight = fma_of(by, weights[i].y, made.weight);
            made.sum = {fma_of(by, sums[i].x, made.sum.x), fma_of(by, sums[i].y, made.sum.y),
                        fma_of(by, sums[i].z, made.sum.z), fma_of(by, sums[i].w, made.sum.w)};
        }
    }
    return made;
}

// Merge the warps' sums of a unit and, in the block that arrives last, the parts of the context.
DEVICE void merge(const WarpState& own, const Unit& unit, u32* counters) {
    constexpr int NUMBERS = HEADS * DIM, PART = HEADS * (DIM + 4);   // aligned to 16 bytes
    static_assert(NUMBERS / 4 <= THREADS, "a thread merges four numbers");
    Heads& heads = own.scratch.heads;
    float* parts = own.step.partial + i64(unit.counter()) * SPLIT * PART;
    float* mine = parts + unit.part * PART;
    const int at = 4 * thread(), head = at / DIM;   // of the unit
    const bool inside = at < NUMBERS;
    float largest = 0;
    const auto store = [&](const Merged& made) {
        const int stored = unit.pass * HEADS + head;
        if (stored >= GROUP) return;
        const u32 a = to_bf16(divided(made.sum.x, made.weight), divided(made.sum.y, made.weight));
        const u32 b = to_bf16(divided(made.sum.z, made.weight), divided(made.sum.w, made.weight));
        u16* to = own.step.attended + unit.row * Q_SIZE + (unit.head * GROUP + stored) * DIM + at % DIM;
        *reinterpret_cast<uint2*>(to) = {a, b};
        largest = larger(larger(magnitude(low(a)), magnitude(high(a))), larger(magnitude(low(b)), magnitude(high(b))));
    };
    if (inside) {
        const Merged made = merged<WARPS>(
            WARPS, [&](int i) { return *reinterpret_cast<const float2*>(heads.weights[i][head]); },
            [&](int i) { return *reinterpret_cast<const float4*>(heads.sums[i][head] + at % DIM); });
        if (unit.filled == 1) {
            store(made);
        } else {
            *reinterpret_cast<float4*>(mine + at) = made.sum;
            if (at % DIM == 0) *reinterpret_cast<float2*>(mine + NUMBERS + 2 * head) = {made.most, made.weight};
        }
    }
    if (unit.filled > 1) {
        own.sync();
        if (thread() == 0) own.scratch.last = count(counters + ARRIVED + unit.counter()) == u32(unit.filled - 1);
        own.sync();
        if (!own.scratch.last) return;
        if (inside)
            store(merged<16>(
                unit.filled,
                [&](int i) { return load_l2(reinterpret_cast<const float2*>(parts + i * PART + NUMBERS) + head); },
                [&](int i) { return load_l2(reinterpret_cast<const float4*>(parts + i * PART + at)); }));
    }
    if (BYTES) {
        const u32 most = largest_of_lanes(bits(largest));   // the bits of numbers without a sign have their order
        if (own.lane() == 0) atomic_max(counters + LARGEST + unit.row, most);
    }
}

// Write this step's keys and values to the cache, and compute `attended`.
DEVICE void attention(const WarpState& own, const Layer& layer, u32* counters) {
    for (int index = block(); index < UNITS * SPLIT; index += BLOCKS) {
        const Unit unit(own.step, index);
        const bool filled = unit.begin < unit.end;
        Loaded loaded = load_first(own, layer, unit);
        const Task mine = filled ? task(own, layer, unit) : Task{};
        if (index < BLOCKS) own.wait(counters + AFTER_QKV);   // also synchronizes the block; later units have waited
        if (!filled) continue;
        prepare(own, mine);
        own.sync();
        attend(own, layer, unit, loaded);
        own.sync();
        merge(own, unit, counters);
    }
}
