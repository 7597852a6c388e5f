// Tests of argmax, sampling, masks, penalties and log-probabilities.
#include <algorithm>
#include <numeric>

#include "golden.h"

namespace golden {

struct Size {
    int64_t rows, width, columns;
};
static const Size SIZES[] = {{1, 1, 1}, {3, 40, 33}, {5, 130, 130}, {9, 1100, 1029}, {2, 17000, 16999}};

// Logits with ties, NaN and infinities, and larger ones in the padding columns.
template <class T>
Array<T> some_logits(Memory &memory, Size size, bool odd) {
    Array<T> made = memory.normal<T>(size.rows * size.width, size.width, 3);
    for (int64_t row = 0; row < size.rows; row++) {
        T *x = made.data + row * size.width;
        for (int64_t i = size.columns; i < size.width; i++) x[i] = nearest<T>(100.0f);
        if (size.columns < 30) continue;
        std::copy(x, x + 9, x + 20);  // ties
        if (odd) x[random_numbers.below(size.columns)] = nearest<T>(-INFINITY);
        if (odd && row % 2) x[random_numbers.below(size.columns)] = sizeof(T) == 4 ? T(NAN) : T(0x7FC0);
    }
    return made;
}
// Logit of x; NaN counts as minus infinity.
template <class T>
float logit(T x) {
    float v = number(x);
    return v == v ? v : -INFINITY;
}

template <class T>
void greedy() {
    for (Size size : SIZES) {
        int64_t parts = (size.columns + 16383) / 16384;
        Program call(size.rows);
        Array<T> logits = some_logits<T>(call, size, true);
        Array<float> best = call.read<float>(parts * size.rows);
        Array<int32_t> ids = call.read<int32_t>(parts * size.rows);
        Array<int64_t> out = call.written<int64_t>(size.rows, 1);
        const std::vector<int64_t> sizes = {size.rows, size.width, size.columns};
        call.add(typed<T>("greedy"), {logits, best, ids}, sizes);
        call.add(typed<T>("greedy_merge"), {best, ids, out}, sizes);
        call.run();
        for (int64_t row = 0; row < size.rows; row++) {
            const T *x = logits.data + row * size.width;
            int64_t want = 0;
            for (int64_t i = 1; i < size.columns; i++)
                if (logit(x[i]) > logit(x[want])) want = i;
            near("id", row, double(out[row]), double(want), 0);
        }
        call.repeat();
    }
}

// Weights from which a row is sampled, in order of ids: the golden function of sample.py, by sorting.
static std::vector<double> weights_of(const std::vector<float> &x, double temperature, int64_t top_k, double top_p,
                                      double min_p) {
    std::vector<size_t> order(x.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x[a] > x[b]; });
    if (top_k > 0 && top_k < int64_t(x.size())) order.resize(size_t(top_k));
    std::vector<double> all(x.size(), 0);
    auto weight = [&](size_t id) { return x[id] == x[order[0]] ? 1 : std::exp((double(x[id]) - x[order[0]]) / temperature); };
    double total = 0, before = 0;
    for (size_t id : order) total += weight(id);
    for (size_t id : order) {
        if (top_p < 1 && before >= top_p * total) break;
        before += weight(id);
        all[id] = weight(id) < min_p ? 0 : weight(id);
    }
    return all;
}

template <class T>
void sample() {
    for (Size size : SIZES) {
        Program call(size.rows);
        Array<T> logits = some_logits<T>(call, size, true);
        Array<float> temperature = call.read<float>(size.rows, 1), top_p = call.read<float>(size.rows, 1);
        Array<float> min_p = call.read<float>(size.rows, 1);
        Array<int64_t> top_k = call.read<int64_t>(size.rows, 1), out = call.written<int64_t>(size.rows, 1);
        Array<double> uniform = call.read<double>(size.rows, 1);
        for (int64_t row = 0; row < size.rows; row++) {
            temperature[row] = float(0.5 + random_numbers.uniform());
            top_k[row] = row % 3 == 1 ? 1 + random_numbers.below(40) : 0;
            top_p[row] = row % 4 >= 2 ? 0.8f : 1.0f;
            min_p[row] = row % 5 == 4 ? 0.05f : 0.0f;
        }
        call.add(typed<T>("sample"), {logits, temperature, top_k, top_p, min_p, uniform, out},
                 {size.rows, size.width, size.columns});
        for (int64_t row = 0; row < size.rows; row++) uniform[row] = random_numbers.uniform();
        call.run();
        for (int64_t row = 0; row < size.rows; row++) {
            std::vector<float> x;
            for (int64_t i = 0; i < size.columns; i++) x.push_back(logit(logits[row * size.width + i]));
            std::vector<double> weights = weights_of(x, temperature[row], top_k[row], top_p[row], min_p[row]);
            double whole = std::accumulate(weights.begin(), weights.end(), 0.0), before = 0;
            int64_t id = out[row];
            if (id < 0 || id >= size.columns || weights[size_t(id)] == 0) {
                fail("row %lld: %lld is not among the likeliest", (long long)row, (long long)id);
                continue;
            }
            // The id whose part of the total contains the uniform number; rounding decides at its borders.
            before = std::accumulate(weights.begin(), weights.begin() + id, 0.0);
            double from = before / whole - 1e-6, to = (before + weights[size_t(id)]) / whole + 1e-6;
            if (!(uniform[row] >= from && uniform[row] <= to))
                fail("row %lld: %lld takes %.9g to %.9g, not %.9g", (long long)row, (long long)id, from, to, uniform[row]);
        }
        call.repeat();
    }
}

// Philox4x32-10, with 53 bits of its first two words.
static void uniform() {
    const int64_t ROWS = 150;
    Program call(ROWS);
    Array<uint64_t> seeds = call.read<uint64_t>(ROWS, 1), positions = call.read<uint64_t>(ROWS, 1);
    Array<double> out = call.written<double>(ROWS, 1);
    for (int64_t i = 0; i < ROWS; i++)
        seeds[i] = uint64_t(random_numbers.engine()) << 31 ^ random_numbers.engine(), positions[i] = uint64_t(i) * 77;
    seeds[1] = positions[1] = ~0ull, seeds[2] = positions[2] = 0;
    call.add("uniform/float64", {seeds, positions, out}, {ROWS});
    call.run();
    for (int64_t i = 0; i < ROWS; i++) {
        uint64_t key0 = seeds[i] & 0xFFFFFFFF, key1 = seeds[i] >> 32;
        uint64_t c[4] = {positions[i] & 0xFFFFFFFF, positions[i] >> 32, 0, 0};
        for (int round = 0; round < 10; round++) {
            uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
            uint64_t c0 = (b >> 32) ^ c[1] ^ key0, c2 = (a >> 32) ^ c[3] ^ key1;
            c[0] = c0, c[1] = b & 0xFFFFFFFF, c[2] = c2, c[3] = a & 0xFFFFFFFF;
            key0 = (key0 + 0x9E3779B9u) & 0xFFFFFFFF, key1 = (key1 + 0xBB67AE85u) & 0xFFFFFFFF;
        }
        near("uniform", i, out[i], double((c[0] << 32 | c[1]) >> 11) / 9007199254740992.0, 0);
    }
    // Published result of Random123 for counter and key of zeros: 6627e8d5 e169c58d.
    near("uniform", 2, out[2], double(0x6627E8D5E169C58Dull >> 11) / 9007199254740992.0, 0);
    call.repeat();
}

// The same float32 operations in the same order give the same bits.
static void penalize() {
    for (Size size : SIZES) {
        int64_t all = size.rows * size.width;
        Program call(size.rows);
        Array<float> logits = call.written<float>(all, size.width);
        for (int64_t i = 0; i < all; i++) logits[i] = random_numbers.normal();
        Array<uint8_t> in_prompt = call.integers<uint8_t>(all, size.width, 0, 1);
        Array<int32_t> counts = call.integers<int32_t>(all, size.width, -1, 3);
        for (int64_t i = 0; i < all; i++) counts[i] = std::max(0, counts[i]);
        Array<float> repetition = call.normal<float>(size.rows, 1), presence = call.normal<float>(size.rows, 1);
        Array<float> frequency = call.normal<float>(size.rows, 1);
        for (int64_t row = 0; row < size.rows; row++) repetition[row] = std::abs(repetition[row]) + 0.5f;
        std::vector<float> want;
        for (int64_t i = 0; i < all; i++) {
            int64_t row = i / size.width;
            float count = float(counts[i]), x = logits[i];
            float penalty = in_prompt[i] || counts[i] > 0 ? repetition[row] : 1.0f;
            x = x > 0 ? x / penalty : x * penalty;
            x = x - frequency[row] * count;
            want.push_back(x - presence[row] * (counts[i] > 0 ? 1.0f : 0.0f));
        }
        call.add("penalize/float32", {logits, in_prompt, counts, repetition, presence, frequency}, {size.rows, size.width});
        call.run();
        for (int64_t i = 0; i < all; i++) near("logit", i, logits[i], want[size_t(i)], 0);
        call.repeat();
    }
}

template <class T>
void mask_logits() {
    for (Size size : SIZES) {
        Program call(size.rows);
        Array<T> logits = call.written<T>(size.rows * size.width, size.width);
        for (int64_t i = 0; i < logits.size; i++) logits[i] = nearest<T>(random_numbers.normal());
        Masks masks(call, size.rows, size.columns);
        std::vector<T> want(logits.data, logits.data + logits.size);
        for (int64_t i = 0; i < logits.size; i++)
            if (i % size.width < size.columns && !masks.allows(i / size.width, i % size.width))
                want[size_t(i)] = nearest<T>(-INFINITY);
        call.add(typed<T>("mask_logits"), {logits, masks.bits, masks.of_row},
                 {size.rows, size.width, size.columns, masks.words});
        call.run();
        equal("logits", logits.data, want);
        call.repeat();
    }
}

template <class T>
void logprobs() {
    for (Size size : SIZES) {
        int64_t top = std::min<int64_t>(size.columns, 7), parts = (size.columns + 16383) / 16384;
        int64_t blocks = (size.columns + 127) / 128;
        Program call(size.rows);
        Array<T> logits = some_logits<T>(call, size, size.columns > 40);
        Array<int64_t> ids = call.integers<int64_t>(size.rows, 1, 0, size.columns - 1);
        Array<double> sums = call.written<double>(size.rows * parts * 3, parts * 3);
        Array<float> largest = call.written<float>(size.rows * blocks, blocks);
        Array<float> logprob = call.written<float>(size.rows, 1), tops = call.written<float>(size.rows * top, top);
        Array<int64_t> rank = call.written<int64_t>(size.rows, 1), top_ids = call.written<int64_t>(size.rows * top, top);
        const std::vector<int64_t> sizes = {size.rows, size.width, size.columns, top};
        call.add(typed<T>("logprobs"), {logits, ids, sums, largest}, sizes);
        call.add(typed<T>("logprobs_merge"), {logits, ids, sums, largest, logprob, rank, top_ids, tops}, sizes);
        call.run();
        for (int64_t row = 0; row < size.rows; row++) {
            std::vector<float> x;
            std::vector<size_t> order(static_cast<size_t>(size.columns));
            for (int64_t i = 0; i < size.columns; i++) x.push_back(logit(logits[row * size.width + i]));
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x[a] > x[b]; });
            double peak = x[order[0]], mass = 0, above = 1;
            for (float v : x) mass += std::exp(v - peak), above += v > x[size_t(ids[row])];
            auto log_of = [&](size_t id) { return x[id] - peak - std::log(mass); };
            near("logprob", row, logprob[row], log_of(size_t(ids[row])), 2e-5);
            near("rank", row, double(rank[row]), above, 0);
            for (int64_t i = 0; i < top; i++) {
                near("top id", i, double(top_ids[row * top + i]), double(order[size_t(i)]), 0);
                near("top logprob", i, tops[row * top + i], log_of(order[size_t(i)]), 2e-5);
            }
        }
        call.repeat();
    }
}

std::vector<Test> vocabulary_tests() {
    return {{{"greedy/float32", "greedy_merge/float32"}, greedy<float>},
            {{"greedy/bfloat16", "greedy_merge/bfloat16"}, greedy<bf16>},
            {{"sample/float32"}, sample<float>},
            {{"sample/bfloat16"}, sample<bf16>},
            {{"uniform/float64"}, uniform},
            {{"penalize/float32"}, penalize},
            {{"mask_logits/float32"}, mask_logits<float>},
            {{"mask_logits/bfloat16"}, mask_logits<bf16>},
            {{"logprobs/float32", "logprobs_merge/float32"}, logprobs<float>},
            {{"logprobs/bfloat16", "logprobs_merge/bfloat16"}, logprobs<bf16>}};
}

}  // namespace golden
