// Tests of the KV cache: writes of keys and values, and attention.
#include <algorithm>
#include <numeric>

#include "golden.h"

namespace golden {

// Layout of a cache, as at the head of attention.cpp. N: stored type, int8_t or the activations' dtype.
template <class N>
struct Layout {
    static constexpr int64_t PER_WORD = sizeof(N) == 4 ? 1 : 2;
    int64_t blocks, heads, dim, block_size;
    int64_t padded() const { return (dim + 15) / 16 * 16; }
    int64_t key_size() const { return blocks * heads * dim * block_size; }
    int64_t value_size() const { return blocks * heads * padded() * block_size; }
    int64_t scale_size() const { return blocks * heads * block_size; }
    // slot: block * block_size + offset.
    int64_t scale(int64_t head, int64_t slot) const {
        return (slot / block_size * heads + head) * block_size + slot % block_size;
    }
    int64_t key(int64_t head, int64_t slot, int64_t d) const {
        int64_t panel = (slot / block_size * heads + head) * (block_size / 16) + slot % block_size / 16;
        return ((panel * (dim / PER_WORD) + d / PER_WORD) * 16 + slot % 16) * PER_WORD + d % PER_WORD;
    }
    int64_t value(int64_t head, int64_t slot, int64_t d) const {
        int64_t word = ((slot / block_size * heads + head) * block_size + slot % block_size) / PER_WORD;
        return (word * padded() + d) * PER_WORD + slot % block_size % PER_WORD;
    }
};

// Value of a stored number; int8 is multiplied by its scale.
inline double stored(int8_t x, bf16 scale) { return double(x) * number(scale); }
inline double stored(float x, bf16) { return x; }
inline double stored(bf16 x, bf16) { return number(x); }

// The scale of an int8 head: the bfloat16 at or above the largest magnitude / 127.
template <class T>
bf16 scale_of(const T *x, int64_t size) {
    float most = 0;
    for (int64_t i = 0; i < size; i++) most = std::max(most, std::abs(number(x[i])));
    float exact = most / 127.0f;
    bf16 made = nearest<bf16>(exact);
    return number(made) < exact ? bf16(made + 1) : made;
}

struct RopeSize {
    int64_t q_heads, kv_heads, dim, block_size, tokens;
    bool norm;
    int64_t rotary;
};

template <class T, class N>
void rope() {
    constexpr bool INT8 = sizeof(N) == 1;
    const double EPS = 1e-6;
    const int64_t POSITIONS = 60;
    for (RopeSize s : {RopeSize{4, 2, 128, 16, 37, true, 128}, {6, 2, 64, 32, 20, true, 64}, {2, 2, 40, 16, 21, true, 40},
                       {4, 1, 10, 16, 5, false, 10}, {2, 1, 64, 16, 70, false, 64}, {4, 1, 256, 16, 21, true, 256},
                       {6, 2, 256, 32, 20, true, 64}, {3, 1, 16, 16, 9, true, 6}, {2, 1, 64, 16, 5, false, 22}}) {
        int64_t wide = (s.q_heads + 2 * s.kv_heads) * s.dim, half = s.rotary / 2;
        Layout<N> cache{s.tokens / s.block_size + 3, s.kv_heads, s.dim, s.block_size};
        Program call(s.tokens);
        Array<T> qkv = call.normal<T>(s.tokens * wide, wide);
        Array<T> q_gamma = call.normal<T>(s.dim), k_gamma = call.normal<T>(s.dim);
        if (!s.norm) q_gamma.data = k_gamma.data = nullptr;
        Array<float> cos_sin = call.read<float>(POSITIONS * s.rotary);
        for (int64_t i = 0; i < POSITIONS * half; i++) {
            double angle = random_numbers.uniform() * 6.3;
            cos_sin[i / half * s.rotary + i % half] = float(std::cos(angle));
            cos_sin[i / half * s.rotary + half + i % half] = float(std::sin(angle));
        }
        Array<int64_t> positions = call.integers<int64_t>(s.tokens, 1, 0, POSITIONS - 1);
        Array<int64_t> slots = call.read<int64_t>(s.tokens, 1);
        // A prompt that begins within a block, a token that is not kept, then separate tokens.
        int64_t slot = 3;
        for (int64_t i = 0; i < s.tokens; i++) slots[i] = i % 19 == 11 ? -1 : (slot += i > s.tokens - 4 ? 5 : 1);
        Array<N> keys = call.written<N>(cache.key_size()), values = call.written<N>(cache.value_size());
        Array<T> q = call.written<T>(s.tokens * s.q_heads * s.dim, s.q_heads * s.dim);
        Array<bf16> key_scales = call.written<bf16>(cache.scale_size()), value_scales = call.written<bf16>(cache.scale_size());
        call.add(typed<T>(INT8 ? "qk_norm_rope_kv_write_int8" : "qk_norm_rope_kv_write"),
                 {qkv, q_gamma, k_gamma, cos_sin, positions, slots, keys, values, q, key_scales, value_scales},
                 {s.tokens, s.q_heads, s.kv_heads, s.dim, s.block_size, s.rotary}, {EPS});
        call.run();
        const double RELATIVE = sizeof(T) == 4 ? 4e-6 : 3 * 0x1p-8;
        for (int64_t t = 0; t < s.tokens; t++)
            for (int64_t h = 0; h < s.q_heads + 2 * s.kv_heads; h++) {
                const T *in = qkv.data + t * wide + h * s.dim;
                bool is_q = h < s.q_heads, is_value = h >= s.q_heads + s.kv_heads;
                int64_t kv = is_q ? 0 : (h - s.q_heads) % s.kv_heads;
                if (!is_q && slots[t] < 0) continue;
                if (is_value) {
                    bf16 scale = INT8 ? scale_of(in, s.dim) : bf16(0);
                    if (INT8) near("value scale", t, number(value_scales[cache.scale(kv, slots[t])]), number(scale), 0);
                    for (int64_t d = 0; d < s.dim; d++) {
                        double want = INT8 ? std::nearbyint(number(in[d]) / number(scale)) * number(scale) : number(in[d]);
                        near("value", d, stored(values[cache.value(kv, slots[t], d)], scale), want, 0);
                    }
                    continue;
                }
                const T *gamma = is_q ? q_gamma.data : k_gamma.data;
                double squares = 0;
                for (int64_t d = 0; d < s.dim; d++) squares += double(number(in[d])) * number(in[d]);
                double factor = 1 / std::sqrt(squares / double(s.dim) + EPS);
                std::vector<double> v;
                for (int64_t d = 0; d < s.dim; d++)
                    v.push_back(gamma ? rounded<T>(rounded<T>(number(in[d]) * factor) * number(gamma[d])) : number(in[d]));
                for (int64_t d = 0; d < s.dim; d++) {
                    const float *turn = cos_sin.data + positions[t] * s.rotary + d % half;
                    const bool turned = d < s.rotary;
                    double a = v[size_t(d)] * (turned ? turn[0] : 1);
                    double b = turned ? v[size_t((d + half) % s.rotary)] * turn[half] : 0;
                    double want = d < half ? a - b : a + b, error = (std::abs(a) + std::abs(b)) * RELATIVE + 1e-30;
                    if (is_q) {
                        near("q", d, number(q[(t * s.q_heads + h) * s.dim + d]), want, error);
                    } else {
                        bf16 scale = INT8 ? key_scales[cache.scale(kv, slots[t])] : bf16(0);
                        double step = INT8 ? number(scale) * 0.51 : 0;
                        near("key", d, stored(keys[cache.key(kv, slots[t], d)], scale), want, error + step);
                    }
                }
                if (is_q || !INT8) continue;
                int8_t most = 0;
                for (int64_t d = 0; d < s.dim; d++) most = int8_t(std::max<int>(most, std::abs(keys[cache.key(kv, slots[t], d)])));
                if (most < 125) fail("keys of token %lld reach %d only", (long long)t, most);
            }
        call.repeat();
    }
}

// Queries [first, end) of a request.
struct Part {
    int64_t request, first, end;
};
struct Request {
    int64_t queries, context;
};
struct AttentionSize {
    int64_t q_heads, kv_heads, dim, block_size;
    std::vector<Request> requests;
};

template <class T, class N>
struct Attention {
    static constexpr bool INT8 = sizeof(N) == 1;
    const AttentionSize &size;
    Layout<N> cache;
    Memory memory;
    Array<T> q, out;  // of all requests
    Array<N> keys, values;
    Array<bf16> key_scales, value_scales;
    std::vector<std::vector<int32_t>> tables;
    std::vector<int64_t> begins;  // of each request in q
    int64_t tokens = 0, stride = 0;

    explicit Attention(const AttentionSize &of) : size(of), cache{0, of.kv_heads, of.dim, of.block_size} {
        for (Request r : size.requests) {
            begins.push_back(tokens), tokens += r.queries;
            tables.emplace_back((r.context + of.block_size - 1) / of.block_size);
            for (int32_t &block : tables.back()) block = int32_t(cache.blocks++);
            stride = std::max(stride, int64_t(tables.back().size()));
        }
        for (auto &table : tables)  // blocks in any order
            for (int32_t &block : table) std::swap(block, tables[0][size_t(random_numbers.below(int64_t(tables[0].size())))]);
        int64_t row = of.q_heads * of.dim;
        q = memory.normal<T>(tokens * row), out = memory.written<T>(tokens * row);
        keys = memory.read<N>(cache.key_size()), values = memory.read<N>(cache.value_size());
        key_scales = memory.read<bf16>(cache.scale_size()), value_scales = memory.read<bf16>(cache.scale_size());
        // Slots without a token may hold anything: NaN, or the largest int8.
        for (int64_t i = 0; i < keys.size; i++) keys[i] = anything();
        for (int64_t i = 0; i < values.size; i++) values[i] = anything();
        for (int64_t i = 0; i < key_scales.size; i++) key_scales[i] = value_scales[i] = 0x7FC0;
        for (size_t r = 0; r < tables.size(); r++)
            for (int64_t token = 0; token < size.requests[r].context; token++)
                for (int64_t h = 0; h < of.kv_heads; h++) {
                    key_scales[cache.scale(h, slot(r, token))] = nearest<bf16>(0.01f + float(random_numbers.uniform()) / 50);
                    value_scales[cache.scale(h, slot(r, token))] = nearest<bf16>(0.01f + float(random_numbers.uniform()) / 50);
                    for (int64_t d = 0; d < of.dim; d++) {
                        keys[cache.key(h, slot(r, token), d)] = some();
                        values[cache.value(h, slot(r, token), d)] = some();
                    }
                }
        memory.keep();
    }
    static N anything() {
        if constexpr (INT8) return -128;
        else return sizeof(N) == 4 ? N(NAN) : N(0x7FC0);
    }
    static N some() {
        if constexpr (INT8) return int8_t(random_numbers.below(255) - 127);
        else return nearest<N>(random_numbers.normal());
    }
    int64_t slot(size_t request, int64_t token) const {
        return tables[request][size_t(token / size.block_size)] * size.block_size + token % size.block_size;
    }

    // One call for these parts, whose outputs are copied to their positions in `out`.
    void run(const std::vector<Part> &parts) {
        int64_t all = 0, most = 0, rows = int64_t(parts.size()), row = size.q_heads * size.dim;
        for (const Part &part : parts) all += part.end - part.first;
        Memory call;
        Array<T> some = call.read<T>(all * row), made = call.written<T>(all * row);
        Array<int32_t> table = call.read<int32_t>(rows * stride), context = call.read<int32_t>(rows);
        Array<int32_t> begin = call.read<int32_t>(rows + 1), plan = call.read<int32_t>(rows + 2);
        begin[0] = 0;
        for (int64_t i = 0; i < rows; i++) {
            const Part &part = parts[size_t(i)];
            const Request &request = size.requests[size_t(part.request)];
            int64_t here = part.end - part.first;
            std::memcpy(some.data + begin[i] * row, q.data + (begins[size_t(part.request)] + part.first) * row,
                        size_t(here * row) * sizeof(T));
            context[i] = int32_t(request.context - request.queries + part.end), begin[i + 1] = int32_t(begin[i] + here);
            most = std::max<int64_t>(most, context[i]);
            std::copy(tables[size_t(part.request)].begin(), tables[size_t(part.request)].end(), table.data + i * stride);
        }
        Array<float> partial = call.read<float>(all * ((most + 255) / 256) * size.q_heads * (cache.padded() + 16));
        call.keep();
        const std::vector<int64_t> sizes = {all, rows, size.q_heads, size.kv_heads, size.dim, size.block_size, stride, all};
        std::vector<const void *> p = {some, keys, values, table, context, begin, made, plan, partial};
        if (INT8) p.push_back(key_scales), p.push_back(value_scales);
        double scale = 1 / std::sqrt(double(size.dim));
        golden::run({make_op(typed<T>(INT8 ? "attention_int8" : "attention"), p, sizes, {scale}),
                     make_op(typed<T>("attention_merge"), p, sizes, {scale})});
        call.expect();
        call.compare("attention");
        for (int64_t i = 0; i < rows; i++)
            std::memcpy(out.data + (begins[size_t(parts[size_t(i)].request)] + parts[size_t(i)].first) * row,
                        made.data + begin[i] * row, size_t(begin[i + 1] - begin[i]) * size_t(row) * sizeof(T));
    }

    void compare() const {
        const double RELATIVE = INT8 ? 5e-4 : sizeof(T) == 4 ? 1e-5 : 0x1p-8;
        for (size_t r = 0; r < size.requests.size(); r++)
            for (int64_t i = 0; i < size.requests[r].queries; i++)
                for (int64_t h = 0; h < size.q_heads; h++)
                    compare(r, i, h, h * size.kv_heads / size.q_heads, RELATIVE);
    }
    void compare(size_t r, int64_t query, int64_t h, int64_t kv, double relative) const {
        int64_t context = size.requests[r].context - size.requests[r].queries + query + 1;
        int64_t at = ((begins[r] + query) * size.q_heads + h) * size.dim;
        std::vector<double> weights;
        for (int64_t token = 0; token < context; token++) {
            double score = 0;
            for (int64_t d = 0; d < size.dim; d++)
                score += number(q[at + d]) * stored(keys[cache.key(kv, slot(r, token), d)], key_scales[cache.scale(kv, slot(r, token))]);
            weights.push_back(score / std::sqrt(double(size.dim)));
        }
        double most = *std::max_element(weights.begin(), weights.end()), mass = 0;
        for (double &w : weights) w = std::exp(w - most), mass += w;
        for (int64_t d = 0; d < size.dim; d++) {
            double want = 0, magnitude = 0;
            for (int64_t token = 0; token < context; token++) {
                bf16 scale = value_scales[cache.scale(kv, slot(r, token))];
                double v = stored(values[cache.value(kv, slot(r, token), d)], scale), w = weights[size_t(token)] / mass;
                // Errors of weights in int16 are relative to the largest weight, whatever this value is.
                want += w * v, magnitude += w * (INT8 ? 127 * number(scale) : std::abs(v));
            }
            near("out", at + d, number(out[at + d]), want, magnitude * relative + std::abs(want) * EPSILON<T>);
        }
    }

    std::vector<Part> whole() const {
        std::vector<Part> parts;
        for (size_t r = 0; r < size.requests.size(); r++) parts.push_back({int64_t(r), 0, size.requests[r].queries});
        return parts;
    }
    // Must give the same bits: each request alone; each in chunks; one query of each request in a call, whose splits of
    // the context are separate units with several threads.
    void repeat() {
        for (int threads : {1, 3}) {
            set_threads(threads);
            memory.restore(), run(whole()), memory.compare("all together");
            memory.restore();
            for (const Part &part : whole()) run({part});
            memory.compare("alone");
            memory.restore();
            const int64_t CHUNKS[] = {1, 4, 2, 7, 40};
            for (const Part &part : whole())
                for (int64_t first = 0, i = 0, end; first < part.end; first = end)
                    end = std::min(part.end, first + CHUNKS[i++ % 5]), run({{part.request, first, end}});
            memory.compare("in chunks");
            memory.restore();
            for (int64_t query = 0, any = 1; any; query++) {
                std::vector<Part> parts;
                for (const Part &part : whole())
                    if (query < part.end) parts.push_back({part.request, query, query + 1});
                any = !parts.empty();
                if (any) run(parts);
            }
            memory.compare("token by token");
        }
    }
};

template <class T, class N>
void attention() {
    for (const AttentionSize &size :
         {AttentionSize{4, 4, 8, 16, {{1, 1}}}, {6, 2, 16, 16, {{1, 17}, {5, 5}, {3, 20}, {1, 33}}},
          {3, 1, 10, 32, {{7, 31}, {1, 5}}}, {6, 3, 64, 16, {{70, 70}, {1, 300}, {33, 290}}}, {4, 1, 24, 16, {{1, 700}}},
          {4, 2, 128, 64, {{1, 130}, {5, 40}, {1, 7}, {2, 513}}}, {6, 1, 256, 16, {{1, 130}, {33, 290}}},
          {2, 2, 256, 32, {{1, 270}, {3, 20}}}}) {
        Attention<T, N> on(size);
        set_threads(1);
        on.run(on.whole());
        on.memory.expect();
        on.compare();
        on.repeat();
    }
}

std::vector<Test> cache_tests() {
    return {{{"qk_norm_rope_kv_write/float32"}, rope<float, float>},
            {{"qk_norm_rope_kv_write/bfloat16"}, rope<bf16, bf16>},
            {{"qk_norm_rope_kv_write_int8/float32"}, rope<float, int8_t>},
            {{"qk_norm_rope_kv_write_int8/bfloat16"}, rope<bf16, int8_t>},
            {{"attention/float32", "attention_merge/float32"}, attention<float, float>},
            {{"attention/bfloat16", "attention_merge/bfloat16"}, attention<bf16, bf16>},
            {{"attention_int8/float32", "attention_merge/float32"}, attention<float, int8_t>},
            {{"attention_int8/bfloat16", "attention_merge/bfloat16"}, attention<bf16, int8_t>}};
}

}  // namespace golden
