// Tests of the kernels that compute each row from one row.
#include "golden.h"

namespace golden {

struct Size {
    int64_t rows, columns;
};
static const Size SIZES[] = {{1, 1}, {2, 5}, {3, 16}, {9, 31}, {20, 100}, {7, 515}, {70, 37}};

// Row quantized to int8 by the float32 operations of `quantize` (quantize.py). Scale and zero are given, or computed.
struct Quantized {
    float scale;
    int32_t zero = 0, sum = 0;
    std::vector<int8_t> values;
};
struct Scheme {
    bool fixed, zeros;
    float levels;
};
static const Scheme SCHEMES[] = {{false, false, 127.5f}, {false, true, 127.5f}, {true, false, 1}, {true, true, 1}};
static const float FIXED_SCALE = 0.02f;
static const int32_t FIXED_ZERO = -9;

template <class T>
Quantized quantized(const T *row, int64_t size, Scheme by) {
    float low = 0, high = 0;
    for (int64_t i = 0; i < size; i++) low = std::min(low, number(row[i])), high = std::max(high, number(row[i]));
    Quantized made;
    if (by.fixed) {
        made.scale = FIXED_SCALE;
        if (by.zeros) made.zero = FIXED_ZERO;
    } else {
        made.scale = by.zeros ? high / 255.0f - low / 255.0f : std::max(high, -low) / by.levels;
        if (!(made.scale > 0)) made.scale = 1;
        if (by.zeros) made.zero = int32_t(std::min(std::max(std::nearbyint(-128.0f - low / made.scale), -128.0f), 127.0f));
    }
    for (int64_t i = 0; i < size; i++) {
        float whole = std::nearbyint(number(row[i]) / made.scale) + float(made.zero);
        made.values.push_back(int8_t(std::min(std::max(whole, -128.0f), 127.0f)));
        made.sum += made.values.back();
    }
    return made;
}

// The six pointers of an int8 output, and its comparison with rows of T.
struct Int8Out {
    int64_t rows, size;
    Scheme by;
    Array<int8_t> values;
    Array<float> scale, fixed;
    Array<int32_t> zero, sums, fixed_zero;
    Int8Out(Memory &memory, Size of, Scheme by)
        : rows(of.rows), size(of.columns), by(by), values(memory.written<int8_t>(rows * size, size)),
          scale(memory.written<float>(rows, 1)), fixed(memory.read<float>(1)), zero(memory.written<int32_t>(rows, 1)),
          sums(memory.written<int32_t>(rows, 1)), fixed_zero(memory.read<int32_t>(1)) {
        fixed[0] = FIXED_SCALE, fixed_zero[0] = FIXED_ZERO;
    }
    std::vector<const void *> after(std::vector<const void *> p) const {
        p.insert(p.end(), {values, scale, by.zeros ? zero.data : nullptr, sums, by.fixed ? fixed.data : nullptr,
                           by.fixed && by.zeros ? fixed_zero.data : nullptr});
        return p;
    }
    template <class T>
    void compare(const T *numbers) const {
        for (int64_t row = 0; row < rows; row++) {
            Quantized want = quantized(numbers + row * size, size, by);
            equal("values", values.data + row * size, want.values);
            near("scale", row, scale[row], want.scale, 0);
            near("sum", row, sums[row], want.sum, 0);
            if (by.zeros) near("zero", row, zero[row], want.zero, 0);
        }
    }
};

template <class T>
void quantize() {
    for (Size size : SIZES)
        for (Scheme by : SCHEMES) {
            Program call(size.rows);
            Array<T> x = call.normal<T>(size.rows * size.columns, size.columns, 2);
            Int8Out out(call, size, by);
            call.add(typed<T>("quantize"), out.after({x}), {size.rows, size.columns}, {by.levels});
            call.run();
            out.compare(x.data);
            call.repeat();
        }
}

// ADD: with a residual. The int8 output is compared with the same kernel's output in T, quantized.
template <class T, bool ADD>
void rms_norm() {
    const double EPS = 1e-6;
    std::string kernel = typed<T>(ADD ? "add_rms_norm" : "rms_norm");
    for (Size size : SIZES) {
        int64_t n = size.columns, all = size.rows * n;
        Program call(size.rows);
        Array<T> x = call.normal<T>(all, n), residual = call.normal<T>(all, n), gamma = call.normal<T>(n);
        Array<T> out = call.written<T>(all, n), sum = call.written<T>(all, n);
        Array<T> none = {nullptr, 0};
        if (!ADD) residual.data = nullptr;
        call.add(kernel, {x, residual, gamma, out, ADD ? sum : none}, {size.rows, n}, {EPS, 127.5});
        call.run();
        for (int64_t row = 0; row < size.rows; row++) {
            double squares = 0;
            std::vector<double> v;
            for (int64_t i = row * n; i < row * n + n; i++) {
                v.push_back(ADD ? rounded<T>(number(x[i]) + number(residual[i])) : number(x[i]));
                if (ADD) near("sum", i, number(sum[i]), v.back(), 0);
                squares += v.back() * v.back();
            }
            for (int64_t i = 0; i < n; i++) {
                double want = v[size_t(i)] / std::sqrt(squares / double(n) + EPS) * number(gamma[i]);
                near("out", row * n + i, number(out[row * n + i]), want, std::abs(want) * (2e-6 + 2.1 * EPSILON<T>));
            }
        }
        call.repeat();
        for (Scheme by : SCHEMES) {
            Program quantizing(size.rows);
            Array<T> a = quantizing.read<T>(all, n), b = quantizing.read<T>(all, n);
            std::memcpy(a.data, x.data, size_t(all) * sizeof(T));
            if (ADD) std::memcpy(b.data, residual.data, size_t(all) * sizeof(T));
            Array<T> again = quantizing.written<T>(all, n);
            Int8Out int8(quantizing, size, by);
            quantizing.add(kernel, int8.after({a, ADD ? b : none, gamma, none, ADD ? again : none}), {size.rows, n},
                           {EPS, by.levels});
            quantizing.run();
            int8.compare(out.data);
            if (ADD) equal("sum", again.data, std::vector<T>(sum.data, sum.data + all));
            quantizing.repeat();
        }
    }
}

template <class T>
void swiglu() {
    for (Size size : {Size{1, 1}, {3, 16}, {9, 31}, {20, 100}, {2, 4200}}) {
        int64_t n = size.columns;
        Program call(size.rows);
        Array<T> x = call.normal<T>(size.rows * 2 * n, 2 * n, 3), out = call.written<T>(size.rows * n, n);
        x[0] = nearest<T>(-200.0f);  // exp overflows
        call.add(typed<T>("swiglu"), {x, out}, {size.rows, n});
        call.run();
        for (int64_t i = 0; i < size.rows * n; i++) {
            double gate = number(x[i / n * 2 * n + i % n]), up = number(x[i / n * 2 * n + n + i % n]);
            double want = gate / (1 + std::exp(-gate)) * up;
            near("out", i, number(out[i]), want, std::abs(want) * (2e-6 + 5e-8 * std::abs(gate) + 2.1 * EPSILON<T>) + 1e-30);
        }
        call.repeat();
    }
}

template <class T>
void embedding() {
    for (Size size : SIZES) {
        const int64_t VOCABULARY = 50, n = size.columns;
        Program call(size.rows);
        Array<int64_t> ids = call.integers<int64_t>(size.rows, 1, 0, VOCABULARY - 1);
        Array<T> table = call.normal<T>(VOCABULARY * n), out = call.written<T>(size.rows * n, n);
        call.add(typed<T>("embedding"), {ids, table, out}, {size.rows, n});
        call.run();
        std::vector<T> want;
        for (int64_t i = 0; i < size.rows * n; i++) want.push_back(table[ids[i / n] * n + i % n]);
        equal("out", out.data, want);
        call.repeat();
    }
}

template <class T>
void keep_rows() {
    for (Size size : SIZES) {
        const int64_t n = size.columns;
        Program call(size.rows);
        Array<T> x = call.normal<T>(size.rows * n, n), memory = call.written<T>(size.rows * n, n);
        call.add(typed<T>("keep_rows"), {x, memory}, {size.rows, n});
        call.run();
        equal("memory", memory.data, std::vector<T>(x.data, x.data + x.size));
        call.repeat();
    }
}

static void ids() {
    const int64_t ROWS = 33, WIDTH = 3;
    Program call(ROWS);
    Array<int64_t> tokens = call.integers<int64_t>(ROWS, 1, -20, 1000), last = call.integers<int64_t>(20, 0, 0, 99);
    Array<int64_t> taken = call.written<int64_t>(ROWS, 1), kept = call.written<int64_t>(ROWS, 1);
    Array<int64_t> wide = call.integers<int64_t>(ROWS * WIDTH, WIDTH, 0, 1000);
    call.add("take_ids/int64", {tokens, last, taken}, {ROWS});
    call.add("keep_ids/int64", {wide, kept}, {ROWS, WIDTH});
    call.run();
    std::vector<int64_t> want;
    for (int64_t i = 0; i < ROWS; i++) want.push_back(tokens[i] < 0 ? last[-1 - tokens[i]] : tokens[i]);
    equal("taken", taken.data, want);
    for (int64_t i = 0; i < ROWS; i++) near("kept", i, double(kept[i]), double(wide[i * WIDTH]), 0);
    call.repeat();
}

std::vector<Test> row_tests() {
    return {{{"rms_norm/float32"}, rms_norm<float, false>},
            {{"rms_norm/bfloat16"}, rms_norm<bf16, false>},
            {{"add_rms_norm/float32"}, rms_norm<float, true>},
            {{"add_rms_norm/bfloat16"}, rms_norm<bf16, true>},
            {{"swiglu/float32"}, swiglu<float>},
            {{"swiglu/bfloat16"}, swiglu<bf16>},
            {{"quantize/float32"}, quantize<float>},
            {{"quantize/bfloat16"}, quantize<bf16>},
            {{"embedding/float32"}, embedding<float>},
            {{"embedding/bfloat16"}, embedding<bf16>},
            {{"keep_rows/float32"}, keep_rows<float>},
            {{"keep_rows/bfloat16"}, keep_rows<bf16>},
            {{"take_ids/int64", "keep_ids/int64"}, ids}};
}

}  // namespace golden
