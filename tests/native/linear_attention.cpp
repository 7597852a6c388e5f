// Tests of linear attention: convolution and delta rule with states in slots, gated norm, gate.
#include "golden.h"

namespace golden {

// Row of a step: tokens [begin, end) of the call's arrays. before: its tokens in earlier steps.
struct StepRow {
    int64_t begin, end, before, slot;
};

// Rows with states of which some begin in the step, one has no tokens, and slots are in no order.
static std::vector<StepRow> random_rows(int64_t rows, int64_t most) {
    std::vector<StepRow> made;
    int64_t begin = 0;
    for (int64_t row = 0; row < rows; row++) {
        int64_t tokens = row == 1 ? 0 : 1 + random_numbers.below(most);
        made.push_back({begin, begin + tokens, random_numbers.below(2) * 7, rows - row});
        begin += tokens;
    }
    return made;
}

// The pointers of a step's rows. The kernel gets one row more than there are.
struct StepArrays {
    Array<int32_t> context_lens, starts;
    Array<int64_t> slots;

    StepArrays(Memory &memory, const std::vector<StepRow> &rows)
        : context_lens(memory.read<int32_t>(int64_t(rows.size()) + 1)),
          starts(memory.read<int32_t>(int64_t(rows.size()) + 2)), slots(memory.read<int64_t>(int64_t(rows.size()) + 1)) {
        int64_t size = int64_t(rows.size()), first = rows[0].begin, end = rows.back().end - first;
        for (int64_t i = 0; i < size; i++) {
            const StepRow &row = rows[size_t(i)];
            context_lens[i] = int32_t(row.before + row.end - row.begin);
            starts[i] = int32_t(row.begin - first), slots[i] = row.slot;
        }
        starts[size] = starts[size + 1] = int32_t(end), context_lens[size] = 0, slots[size] = 0;
    }
};

// Runs the rows in one step, then each alone in steps of some tokens, on several threads: each bit must be the same.
// step(rows): runs a step of these rows.
template <class Step>
void in_steps(Memory &memory, const std::vector<StepRow> &rows, const Step &step) {
    memory.restore();
    set_threads(3);
    step(rows);
    memory.compare("on three threads");
    for (int64_t most : {1, 3, 40}) {
        memory.restore();
        set_threads(most == 3 ? 3 : 1);
        for (const StepRow &row : rows)
            for (int64_t at = row.begin; at < row.end; at += most)
                step({{at, std::min(row.end, at + most), row.before + at - row.begin, row.slot}});
        memory.compare("in steps");
    }
    set_threads(1);
}

static double silu(double x) { return x / (1 + std::exp(-x)); }

template <class T>
void convolution() {
    struct Shape {
        int64_t rows, tokens, channels, taps;
    };
    for (Shape size : {Shape{1, 1, 16, 4}, {4, 1, 40, 4}, {3, 9, 300, 4}, {5, 45, 24, 3}, {2, 5, 7, 2}}) {
        int64_t channels = size.channels, history = size.taps - 1;
        Memory memory;
        std::vector<StepRow> rows = random_rows(size.rows, size.tokens);
        int64_t tokens = rows.back().end;
        Array<T> x = memory.normal<T>(tokens * channels), weight = memory.normal<T>(channels * size.taps);
        Array<T> state = memory.written<T>((size.rows + 1) * channels * history), out = memory.written<T>(tokens * channels);
        for (int64_t i = 0; i < state.size; i++) state[i] = nearest<T>(random_numbers.normal());
        std::vector<T> before(state.data, state.data + state.size);
        auto step = [&](const std::vector<StepRow> &of) {
            StepArrays arrays(memory, of);
            int64_t first = of[0].begin, count = of.back().end - first;
            run({make_op(typed<T>("causal_conv_silu"),
                         {x.data + first * channels, weight, state, arrays.context_lens, arrays.starts, arrays.slots,
                          out.data + first * channels},
                         {count, int64_t(of.size()) + 1, channels, size.taps})});
        };
        memory.keep();
        set_threads(1);
        step(rows);
        memory.expect();
        for (const StepRow &row : rows)
            for (int64_t c = 0; c < channels; c++) {
                std::vector<T> inputs;
                for (int64_t j = 0; j < history; j++)
                    inputs.push_back(row.before ? before[size_t((row.slot * channels + c) * history + j)] : T());
                for (int64_t t = row.begin; t < row.end; t++) {
                    inputs.push_back(x[t * channels + c]);
                    double sum = 0, size_of_sum = 0;
                    for (int64_t j = 0; j < size.taps; j++) {
                        double product = double(number(inputs[inputs.size() - size_t(size.taps) + size_t(j)])) *
                                         number(weight[c * size.taps + j]);
                        sum += product, size_of_sum += std::abs(product);
                    }
                    near("out", t * channels + c, number(out[t * channels + c]), silu(sum),
                         2e-6 * size_of_sum + std::abs(silu(sum)) * (4e-6 + 1.1 * EPSILON<T>));
                }
                for (int64_t j = 0; j < history && row.end > row.begin; j++)
                    near("state", (row.slot * channels + c) * history + j,
                         number(state[(row.slot * channels + c) * history + j]),
                         number(inputs[inputs.size() - size_t(history) + size_t(j)]), 0);
            }
        in_steps(memory, rows, step);
    }
}

struct Heads {
    int64_t rows, tokens, keys, values, key_dim, value_dim;
};

// The results [Dv] of one token, which advances the state [Dk, Dv].
static std::vector<double> advance(std::vector<double> &state, const std::vector<double> &q, const std::vector<double> &k,
                                   const std::vector<double> &v, double decay, double beta) {
    size_t key_dim = k.size(), value_dim = v.size();
    std::vector<double> out(value_dim);
    for (size_t c = 0; c < value_dim; c++) {
        double product = 0;
        for (size_t i = 0; i < key_dim; i++) product += k[i] * (state[i * value_dim + c] *= decay);
        double delta = beta * (v[c] - product);
        for (size_t i = 0; i < key_dim; i++) out[c] += q[i] * (state[i * value_dim + c] += k[i] * delta);
    }
    return out;
}

template <class T>
void delta_rule() {
    const double EPS = 1e-6;
    for (Heads size : {Heads{1, 1, 1, 1, 16, 16}, {4, 1, 2, 4, 32, 48}, {3, 40, 1, 2, 9, 37}, {2, 70, 2, 2, 64, 64}}) {
        Memory memory;
        std::vector<StepRow> rows = random_rows(size.rows, size.tokens);
        int64_t tokens = rows.back().end, keys = size.keys * size.key_dim, width = 2 * keys + size.values * size.value_dim;
        int64_t of_state = size.key_dim * size.value_dim, of_out = size.values * size.value_dim;
        Array<T> qkv = memory.normal<T>(tokens * width), a = memory.normal<T>(tokens * size.values);
        Array<T> b = memory.normal<T>(tokens * size.values), out = memory.written<T>(tokens * of_out);
        Array<float> a_log = memory.normal<float>(size.values), dt_bias = memory.normal<float>(size.values);
        Array<float> state = memory.written<float>((size.rows + 1) * size.values * of_state);
        for (int64_t i = 0; i < state.size; i++) state[i] = random_numbers.normal();
        std::vector<float> before(state.data, state.data + state.size);
        auto step = [&](const std::vector<StepRow> &of) {
            StepArrays arrays(memory, of);
            int64_t first = of[0].begin, count = of.back().end - first;
            run({make_op(typed<T>("gated_delta_rule"),
                         {qkv.data + first * width, a.data + first * size.values, b.data + first * size.values, a_log,
                          dt_bias, state, arrays.context_lens, arrays.starts, arrays.slots, out.data + first * of_out},
                         {count, int64_t(of.size()) + 1, size.keys, size.values, size.key_dim, size.value_dim}, {EPS})});
        };
        memory.keep();
        set_threads(1);
        step(rows);
        memory.expect();
        for (const StepRow &row : rows)
            for (int64_t head = 0; head < size.values; head++) {
                int64_t at = (row.slot * size.values + head) * of_state;
                std::vector<double> expected(size_t(of_state), 0.0);
                if (row.before) expected.assign(before.begin() + at, before.begin() + at + of_state);
                for (int64_t t = row.begin; t < row.end; t++) {
                    auto part = [&](int64_t first, int64_t dim, bool is_normalized, double scale) {
                        std::vector<double> made;
                        double squares = EPS;
                        for (int64_t i = 0; i < dim; i++) made.push_back(number(qkv[t * width + first + i]));
                        for (double each : made) squares += each * each;
                        for (double &each : made) each *= is_normalized ? scale / std::sqrt(squares) : 1;
                        return made;
                    };
                    int64_t key_head = head / (size.values / size.keys);
                    double gate = number(a[t * size.values + head]) + double(dt_bias[head]);
                    double decay = std::exp(-std::exp(double(a_log[head])) * std::log1p(std::exp(gate)));
                    double beta = 1 / (1 + std::exp(-double(number(b[t * size.values + head]))));
                    std::vector<double> want = advance(
                        expected, part(key_head * size.key_dim, size.key_dim, true, 1 / std::sqrt(double(size.key_dim))),
                        part(keys + key_head * size.key_dim, size.key_dim, true, 1),
                        part(2 * keys + head * size.value_dim, size.value_dim, false, 1), decay, beta);
                    for (int64_t c = 0; c < size.value_dim; c++) {
                        int64_t place = t * of_out + head * size.value_dim + c;
                        near("out", place, number(out[place]), want[size_t(c)],
                             2e-5 + std::abs(want[size_t(c)]) * 1.1 * EPSILON<T>);
                    }
                }
                for (int64_t i = 0; i < of_state && row.end > row.begin; i++)
                    near("state", at + i, state[at + i], expected[size_t(i)], 2e-5 * (1 + std::abs(expected[size_t(i)])));
            }
        in_steps(memory, rows, step);
    }
}

// WIDE: the norm's gamma is in float32, and the norm's result is not rounded before the gate.
template <class T, bool WIDE>
void gated_rms_norm() {
    const double EPS = 1e-6;
    struct Shape {
        int64_t rows, heads, dim;
    };
    for (Shape size : {Shape{1, 1, 16}, {3, 2, 31}, {9, 4, 128}, {20, 3, 5}}) {
        int64_t width = size.heads * size.dim;
        Program call(size.rows);
        Array<T> x = call.normal<T>(size.rows * width, width), z = call.normal<T>(size.rows * width, width, 3);
        Array<T> gamma = call.normal<T>(size.dim), out = call.written<T>(size.rows * width, width);
        Array<float> wide = call.normal<float>(size.dim);
        const void *none = nullptr;
        call.add(typed<T>("gated_rms_norm"), {x, z, WIDE ? none : gamma.data, out, WIDE ? wide.data : none},
                 {size.rows, width, size.dim}, {EPS});
        call.run();
        for (int64_t i = 0; i < size.rows * width; i++) {
            double squares = 0;
            for (int64_t j = i / size.dim * size.dim; j < (i / size.dim + 1) * size.dim; j++)
                squares += double(number(x[j])) * number(x[j]);
            double by = WIDE ? wide[i % size.dim] : number(gamma[i % size.dim]), gate = number(z[i]);
            double want = number(x[i]) / std::sqrt(squares / double(size.dim) + EPS) * by * silu(gate);
            near("out", i, number(out[i]), want, std::abs(want) * (6e-6 + 5e-8 * std::abs(gate) + 3.2 * EPSILON<T>));
        }
        call.repeat();
    }
}

template <class T>
void sigmoid_gate() {
    for (int64_t columns : {1, 16, 31, 515}) {
        const int64_t ROWS = 9;
        Program call(ROWS);
        Array<T> x = call.normal<T>(ROWS * columns, columns), gate = call.normal<T>(ROWS * columns, columns, 3);
        Array<T> out = call.written<T>(ROWS * columns, columns);
        call.add(typed<T>("sigmoid_gate"), {x, gate, out}, {ROWS, columns});
        call.run();
        for (int64_t i = 0; i < ROWS * columns; i++) {
            double want = number(x[i]) / (1 + std::exp(-double(number(gate[i]))));
            near("out", i, number(out[i]), want, std::abs(want) * (4e-6 + 2.1 * EPSILON<T>));
        }
        call.repeat();
    }
}

std::vector<Test> linear_attention_tests() {
    return {{{"causal_conv_silu/float32"}, convolution<float>},
            {{"causal_conv_silu/bfloat16"}, convolution<bf16>},
            {{"gated_delta_rule/float32"}, delta_rule<float>},
            {{"gated_delta_rule/bfloat16"}, delta_rule<bf16>},
            {{"gated_rms_norm/float32"}, [] { gated_rms_norm<float, false>(), gated_rms_norm<float, true>(); }},
            {{"gated_rms_norm/bfloat16"}, [] { gated_rms_norm<bf16, false>(), gated_rms_norm<bf16, true>(); }},
            {{"sigmoid_gate/float32"}, sigmoid_gate<float>},
            {{"sigmoid_gate/bfloat16"}, sigmoid_gate<bf16>}};
}

}  // namespace golden
