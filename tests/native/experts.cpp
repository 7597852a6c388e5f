// Router and products of experts. A product by experts must have the bits of the product of each row with its expert.
#include <numeric>

#include "golden.h"

namespace golden {

struct Size {
    int64_t rows, experts, chosen, k, n;
};
static const Size SIZES[] = {{1, 4, 1, 8, 32}, {3, 5, 2, 40, 64}, {21, 3, 2, 136, 96}, {90, 9, 4, 72, 32}, {700, 4, 3, 64, 32}};
static const int64_t GROUP = 32;  // numbers of a group of four bits

// Weights of all experts in a form of the products, and the pointers that follow those of `linear`.
template <class T>
struct Weights {
    const std::string form;
    const Size size;
    Array<char> panels;
    Array<float> scale;
    Array<int32_t> sum, zero;

    Weights(Memory &memory, const std::string &form, Size s)
        : form(form), size(s), panels(memory.read<char>(columns() / 16 * panel_bytes())),
          scale(memory.normal<float>(columns())), sum(memory.read<int32_t>(columns())),
          zero(memory.integers<int32_t>(columns(), 0, -20, 20)) {
        std::memset(panels.data, 0, size_t(panels.size));
        if (is_int4()) {
            fill_int4();
        } else if (has_sums()) {
            bool nibbles = form == "_int8_nibbles";
            Array<int8_t> dense = memory.integers<int8_t>(columns() * size.k, 0, nibbles ? -8 : -128, nibbles ? 7 : 127);
            for (int64_t row = 0; row < columns(); row++)
                sum[row] = std::accumulate(dense.data + row * size.k, dense.data + (row + 1) * size.k, 0);
            if (nibbles)
                run({make_op("pack_nibbles/int8", {dense, panels}, {columns(), size.k, 0})});
            else
                copy(packed(memory, dense.data, columns(), size.k));
        } else {
            Array<T> dense = memory.normal<T>(columns() * size.k, 0, 0.1f);
            if (form.empty())
                copy(packed(memory, dense.data, columns(), size.k));
            else
                compact(memory, dense);
        }
    }
    int64_t columns() const { return size.experts * size.n; }
    bool is_int4() const { return form == "_int4" || form == "_int4_int8"; }
    bool has_sums() const { return form == "_int8" || form == "_int8_nibbles"; }
    int64_t panel_bytes() const {
        if (form == "_int8_nibbles") return size.k * 8;
        if (is_int4()) return (size.k + GROUP - 1) / GROUP * 64 + size.k * 8;
        if (form == "_compact") return (size.k / 2 + 63) / 64 * 64 + size.k / 2 / 4 * 192;
        int64_t bytes = form == "_int8" ? 1 : int64_t(sizeof(T));
        return (size.k * bytes + 3) / 4 * 64;
    }
    // Pointers and sizes of a product with the weights from `column` on; x_scale, x_zero, x_sum: of its first row.
    std::vector<const void *> pointers(const void *x, void *out, int64_t column, const float *x_scale,
                                       const int32_t *x_zero, const int32_t *x_sum) const {
        std::vector<const void *> p = {x, panels.data + column / 16 * panel_bytes(), nullptr, out, nullptr};
        if (form == "_int4_int8") p.push_back(x_scale);
        if (has_sums())
            p.insert(p.end(), {x_scale, scale.data + column, sum.data + column, x_zero, zero.data + column, x_sum});
        return p;
    }
    std::vector<int64_t> sizes(std::vector<int64_t> n) const {
        n.resize(5);
        if (is_int4()) n.insert(n.end(), {GROUP, 2});
        return n;
    }

  private:
    void compact(Memory &memory, const Array<T> &dense) {
        Array<int32_t> failed = memory.read<int32_t>(1);
        failed[0] = 0;
        run({make_op("pack_compact/bfloat16", {dense, panels, failed}, {columns(), size.k, 0})});
        if (failed[0]) fail("weights are not packed");
    }
    void copy(const Array<uint32_t> &from) { std::memcpy(panels.data, from.data, size_t(panels.size)); }
    void fill_int4() {
        for (int64_t panel = 0; panel < columns() / 16; panel++) {
            char *at = panels.data + panel * panel_bytes();
            for (int64_t first = 0; first < size.k; first += GROUP) {
                float scales[16];
                for (float &one : scales) one = 0.05f * random_numbers.normal();
                std::memcpy(at, scales, 64);
                int64_t bytes = std::min(GROUP, size.k - first) * 8;
                for (int64_t i = 64; i < 64 + bytes; i++) at[i] = char(random_numbers.below(256));
                at += 64 + bytes;
            }
        }
    }
};

// Router over given logits, in the order of the kernels.
struct Router {
    Array<float> logits, weights;
    Array<int32_t> experts, places, begins;

    Router(Program &call, Size size, bool same)
        : logits(call.normal<float>(size.rows * size.experts, size.experts)),
          weights(call.written<float>(size.rows * size.chosen, size.chosen)),
          experts(call.written<int32_t>(size.rows * size.chosen, size.chosen)),
          places(call.read<int32_t>(size.rows * size.chosen)), begins(call.read<int32_t>(size.experts + 1)) {
        for (int64_t i = 0; i < logits.size; i++)
            logits[i] = same ? logits[i % size.experts] : i % 7 ? logits[i] : 0.5f;  // some are equal
        call.add("choose_experts/float32", {logits, experts, weights}, {size.rows, size.experts, size.chosen, same});
        call.add("group_experts/int32", {experts, places, begins}, {size.rows, size.chosen, 0, size.experts});
    }
    void compare(Size size, bool normalized) const {
        for (int64_t row = 0; row < size.rows; row++) {
            const float *of_row = logits.data + row * size.experts;
            std::vector<int64_t> order(size_t(size.experts));
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return of_row[a] > of_row[b]; });
            double sum = 0;
            for (int64_t i = 0; i < (normalized ? size.chosen : size.experts); i++) sum += std::exp(of_row[order[size_t(i)]]);
            for (int64_t i = 0; i < size.chosen; i++) {
                int64_t at = row * size.chosen + i, expert = order[size_t(i)], place = places[at];
                near("expert", at, experts[at], double(expert), 0);
                near("weight", at, weights[at], std::exp(of_row[expert]) / sum, 2e-6);
                if (place < begins[expert] || place >= begins[expert + 1]) fail("place %lld", (long long)place);
                // The rows of an expert are in the order of T.
                for (int64_t other = 0; other < at; other++)
                    if (experts[other] == expert && places[other] >= place) fail("order of places");
                if (size.rows > 100 && row > 20) break;
            }
        }
    }
};

template <class T, bool SWIGLU>
static void products(const std::string &form) {
    std::string product = SWIGLU ? "linear_swiglu" : "linear";
    for (Size size : SIZES)
        for (bool same : {false, true}) {
            bool int8 = form.rfind("_int8", 0) == 0 || form == "_int4_int8";
            int64_t columns = SWIGLU ? size.n / 2 : size.n, all = size.rows * size.chosen;
            Program call(size.rows);
            Weights<T> weights(call, form, size);
            Array<T> x = call.normal<T>(size.rows * size.k, size.k), by_expert = call.read<T>(all * size.k);
            Array<int8_t> x8 = call.integers<int8_t>(size.rows * size.k, size.k, -128, 127);
            Array<int8_t> by_expert8 = call.read<int8_t>(all * size.k);
            Array<float> scale = call.normal<float>(size.rows, 1, 1e-2f), scales = call.read<float>(all);
            Array<int32_t> zero = call.integers<int32_t>(size.rows, 1, -20, 20), zeros = call.read<int32_t>(all);
            Array<int32_t> sum = call.read<int32_t>(size.rows, 1), sums = call.read<int32_t>(all);
            for (int64_t row = 0; row < size.rows; row++)
                sum[row] = std::accumulate(x8.data + row * size.k, x8.data + (row + 1) * size.k, 0);
            Array<T> results = call.read<T>(all * columns), one = call.read<T>(columns);
            Array<int64_t> plan = call.read<int64_t>(2 * size.experts + 4);
            Array<T> shared = call.normal<T>(size.rows * columns, columns), gate = call.normal<T>(size.rows, 1);
            Array<T> out = call.written<T>(size.rows * columns, columns), alone = call.written<T>(out.size, columns);
            Router router(call, size, same);
            if (int8)
                call.add("gather_experts_int8/int8", {x8, router.places, by_expert8, scale, scales, zero, zeros, sum, sums},
                         {size.rows, size.k, size.chosen});
            else
                call.add(typed<T>("gather_experts"), {x, router.places, by_expert}, {size.rows, size.k, size.chosen});
            const void *rows = int8 ? static_cast<const void *>(by_expert8) : by_expert;
            auto p = weights.pointers(rows, results.data, 0, scales.data, zeros.data, sums.data);
            p.insert(p.end(), {router.begins, plan});
            call.add(typed<T>((product + "_experts" + form).c_str()), p,
                     weights.sizes({size.rows, size.k, size.n, size.experts, size.chosen}));
            call.add(typed<T>("sum_experts"), {results, router.places, router.weights, shared, gate, out},
                     {size.rows, columns, size.chosen});
            call.add(typed<T>("sum_experts"), {results, router.places, router.weights, nullptr, nullptr, alone},
                     {size.rows, columns, size.chosen});
            call.run();
            router.compare(size, same);
            for (int64_t row = 0; row < size.rows; row += size.rows > 100 ? 9 : 1) {
                std::vector<double> total(size_t(columns), 0), magnitude(size_t(columns), 0);
                for (int64_t i = row * size.chosen; i < (row + 1) * size.chosen; i++) {
                    const void *of_row = int8 ? static_cast<const void *>(x8.data + row * size.k) : x.data + row * size.k;
                    run({make_op(typed<T>((product + form).c_str()),
                                 weights.pointers(of_row, one.data, router.experts[i] * size.n, scale.data + row,
                                                  zero.data + row, sum.data + row),
                                 weights.sizes({1, size.k, size.n}))});
                    const T *got = results.data + router.places[i] * columns;
                    equal("result", got, std::vector<T>(one.data, one.data + columns));
                    for (int64_t c = 0; c < columns; c++) {
                        double term = double(router.weights[i]) * number(got[c]);
                        total[size_t(c)] += term, magnitude[size_t(c)] += std::abs(term);
                    }
                }
                for (int64_t c = 0; c < columns; c++) {
                    int64_t at = row * columns + c;
                    double s = number(shared[at]) / (1 + std::exp(-double(number(gate[row])))), want = total[size_t(c)];
                    double error = 2e-6 * (magnitude[size_t(c)] + std::abs(s));
                    near("sum", at, number(out[at]), want + s, error + std::abs(want + s) * EPSILON<T>);
                    near("sum alone", at, number(alone[at]), want, error + std::abs(want) * EPSILON<T>);
                }
            }
            call.repeat();
        }
}

template <class T>
static void router_logits() {
    const int64_t SHAPES[][3] = {{1, 1, 1}, {2, 5, 9}, {19, 33, 6}, {40, 128, 13}};  // T, H, E
    for (const auto &shape : SHAPES) {
        int64_t rows = shape[0], size = shape[1], experts = shape[2];
        Program call(rows);
        Array<T> x = call.normal<T>(rows * size, size), w = call.normal<T>(experts * size);
        Array<float> out = call.written<float>(rows * experts, experts);
        call.add(typed<T>("router_logits"), {x, w, out}, {rows, size, experts});
        call.run();
        for (int64_t i = 0; i < out.size; i++) {
            double want = 0, magnitude = 0;
            for (int64_t j = 0; j < size; j++) {
                double term = double(number(x[i / experts * size + j])) * number(w[i % experts * size + j]);
                want += term, magnitude += std::abs(term);
            }
            near("logit", i, out[i], want, magnitude * 2e-6);
        }
        call.repeat();
    }
}

// Places of the experts of one rank; the others have none.
static void part() {
    const Size size = {30, 8, 3, 0, 0};
    Program call(size.rows);
    Array<int32_t> experts = call.integers<int32_t>(size.rows * size.chosen, size.chosen, 0, size.experts - 1);
    Array<int32_t> places = call.read<int32_t>(experts.size), begins = call.read<int32_t>(4);
    Array<int64_t> tokens = call.read<int64_t>(3);
    tokens[0] = 1000, tokens[1] = tokens[2] = 0;
    call.add("group_experts/int32", {experts, places, begins, tokens}, {size.rows, size.chosen, 2, 3});
    call.run();
    for (int64_t i = 0; i < 3; i++)
        near("tokens", i, double(tokens[i]), (i ? 0 : 1000) + begins[i + 1] - begins[i], 0);
    int32_t next = 0;
    for (int64_t expert = 2; expert < 5; expert++) {
        near("begin", expert, begins[expert - 2], next, 0);
        for (int64_t i = 0; i < experts.size; i++)
            if (experts[i] == expert) near("place", i, places[i], next++, 0);
    }
    near("end", 0, begins[3], next, 0);
    for (int64_t i = 0; i < experts.size; i++)
        if (experts[i] < 2 || experts[i] > 4) near("place", i, places[i], -1, 0);
}

template <class T, bool SWIGLU>
static void plain() {
    products<T, SWIGLU>("");
}
template <class T, bool SWIGLU>
static void int8() {
    products<T, SWIGLU>("_int8");
}
template <class T, bool SWIGLU>
static void int4() {
    products<T, SWIGLU>("_int4");
}
template <class T, bool SWIGLU>
static void int4_int8() {
    products<T, SWIGLU>("_int4_int8");
}
template <class T, bool SWIGLU>
static void nibbles() {
    products<T, SWIGLU>("_int8_nibbles");
}
template <bool SWIGLU>
static void compact() {
    products<bf16, SWIGLU>("_compact");
}

std::vector<Test> expert_tests() {
    return {{{"router_logits/float32"}, router_logits<float>},
            {{"router_logits/bfloat16"}, router_logits<bf16>},
            {{"group_experts/int32"}, part},
            {{"choose_experts/float32", "gather_experts/float32", "sum_experts/float32", "linear_experts/float32"},
             plain<float, false>},
            {{"gather_experts/bfloat16", "sum_experts/bfloat16", "linear_experts/bfloat16"}, plain<bf16, false>},
            {{"linear_swiglu_experts/float32"}, plain<float, true>},
            {{"linear_swiglu_experts/bfloat16"}, plain<bf16, true>},
            {{"gather_experts_int8/int8", "linear_experts_int8/float32"}, int8<float, false>},
            {{"linear_experts_int8/bfloat16"}, int8<bf16, false>},
            {{"linear_swiglu_experts_int8/float32"}, int8<float, true>},
            {{"linear_swiglu_experts_int8/bfloat16"}, int8<bf16, true>},
            {{"linear_experts_int4/float32"}, int4<float, false>},
            {{"linear_experts_int4/bfloat16"}, int4<bf16, false>},
            {{"linear_swiglu_experts_int4/float32"}, int4<float, true>},
            {{"linear_swiglu_experts_int4/bfloat16"}, int4<bf16, true>},
            {{"linear_experts_int4_int8/float32"}, int4_int8<float, false>},
            {{"linear_experts_int4_int8/bfloat16"}, int4_int8<bf16, false>},
            {{"linear_swiglu_experts_int4_int8/float32"}, int4_int8<float, true>},
            {{"linear_swiglu_experts_int4_int8/bfloat16"}, int4_int8<bf16, true>},
            {{"linear_experts_int8_nibbles/float32"}, nibbles<float, false>},
            {{"linear_experts_int8_nibbles/bfloat16"}, nibbles<bf16, false>},
            {{"linear_swiglu_experts_int8_nibbles/float32"}, nibbles<float, true>},
            {{"linear_swiglu_experts_int8_nibbles/bfloat16"}, nibbles<bf16, true>},
            {{"linear_experts_compact/bfloat16"}, compact<false>},
            {{"linear_swiglu_experts_compact/bfloat16"}, compact<true>}};
}

}  // namespace golden
