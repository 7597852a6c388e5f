// Products with plain weights, in float and in int8, and packing of these weights.
#include "golden.h"

namespace golden {

struct Size {
    int64_t rows, k, n;
};
// Rows of one tile, of a few tiles and of blocks; odd K and N, which leave partial words, panels and tiles.
static const Size SIZES[] = {{1, 1, 1},    {2, 7, 17},   {3, 64, 48},  {5, 33, 100}, {6, 130, 65},   {8, 257, 33},
                             {11, 66, 80}, {12, 40, 16}, {13, 129, 35}, {29, 70, 81}, {70, 200, 50}, {150, 131, 19},
                             {400, 5, 256}};
static const Size PAIRED[] = {{1, 9, 32}, {4, 65, 96}, {7, 130, 160}, {12, 34, 64}, {27, 131, 96}, {80, 67, 160}};

// Weights, x and bias of a product in float, and its result in float64.
template <class T>
struct Floats {
    const Size size;
    Program call;
    Array<T> x, w, bias, out;
    Array<uint32_t> panels;

    explicit Floats(Size s, bool biased, int64_t columns_out)
        : size(s), call(s.rows), x(call.normal<T>(s.rows * s.k, s.k)), w(call.normal<T>(s.n * s.k)),
          bias(call.normal<T>(s.n)), out(call.written<T>(s.rows * columns_out, columns_out)),
          panels(packed(call, w.data, s.n, s.k)) {
        if (!biased) bias.data = nullptr;
    }
    // magnitude: sum of the products' magnitudes, to which rounding errors are relative.
    double product(int64_t row, int64_t column, double &magnitude) const {
        double sum = bias.data ? number(bias[column]) : 0;
        magnitude = std::abs(sum);
        for (int64_t i = 0; i < size.k; i++) {
            double term = double(number(x[row * size.k + i])) * number(w[column * size.k + i]);
            sum += term, magnitude += std::abs(term);
        }
        return sum;
    }
    void compare_product() const {
        for (int64_t row = 0; row < size.rows; row++)
            for (int64_t column = 0; column < size.n; column++) {
                double magnitude, want = product(row, column, magnitude);
                near("out", row * size.n + column, number(out[row * size.n + column]), want,
                     magnitude * 2e-6 + std::abs(want) * EPSILON<T>);
            }
    }
};

template <class T>
void linear() {
    for (Size size : SIZES)
        for (bool biased : {false, true}) {
            Floats<T> on(size, biased, size.n);
            on.call.add(typed<T>("linear"), {on.x, on.panels, on.bias, on.out}, {size.rows, size.k, size.n});
            on.call.run();
            on.compare_product();
            on.call.repeat();
        }
}

// Without FMA the kernels' exp(x) has a relative error of 4e-8 |x|.
static double silu(double x) { return x / (1 + std::exp(-x)); }

template <class T>
void linear_swiglu() {
    for (Size size : PAIRED) {
        int64_t half = size.n / 2;
        Floats<T> on(size, size.k % 2, half);
        on.call.add(typed<T>("linear_swiglu"), {on.x, on.panels, on.bias, on.out}, {size.rows, size.k, size.n});
        on.call.run();
        for (int64_t row = 0; row < size.rows; row++)
            for (int64_t column = 0; column < half; column++) {
                double error[2];
                double gate = on.product(row, column, error[0]), up = on.product(row, half + column, error[1]);
                double s = silu(gate), sums = (error[0] * 1.1 + 1) * std::abs(up) + std::abs(s) * error[1];
                double rounding = 1.1 * std::abs(gate * up) + 3 * std::abs(s * up);  // of gate, s, up and the result
                near("out", row * half + column, number(on.out[row * half + column]), s * up,
                     sums * 2e-6 + rounding * EPSILON<T>);
            }
        on.call.repeat();
    }
}

// Index of the first of the largest of n numbers; with `masks` of the allowed ones.
template <class T>
int64_t argmax(const T *out, int64_t counting, const Masks *masks = nullptr, int64_t row = 0) {
    int64_t best = -1;
    for (int64_t i = 0; i < counting; i++)
        if ((!masks || masks->allows(row, i)) && (best < 0 || number(out[i]) > number(out[best]))) best = i;
    return std::max<int64_t>(best, 0);
}

template <class T>
void linear_argmax() {
    for (Size size : SIZES)
        for (int64_t counting : {size.n, (size.n + 1) / 2}) {
            Floats<T> on(size, size.k % 2, size.n);
            // Equal columns, of which the first one counts.
            for (int64_t i = 0; i < size.k && size.n > 20; i++)
                for (int64_t column : {3, 18}) on.w[column * size.k + i] = on.w[7 * size.k + i];
            on.panels = packed(on.call, on.w.data, size.n, size.k);
            int64_t panels = (size.n + 15) / 16;
            Array<float> best = on.call.template read<float>(panels * size.rows);
            Array<int32_t> ids = on.call.template read<int32_t>(panels * size.rows);
            Array<int64_t> chosen = on.call.template written<int64_t>(size.rows, 1);
            Array<int64_t> allowed = on.call.template written<int64_t>(size.rows, 1);
            Masks masks(on.call, size.rows, counting);
            on.call.add(typed<T>("linear"), {on.x, on.panels, on.bias, on.out}, {size.rows, size.k, size.n});
            on.call.add(typed<T>("linear_argmax"), {on.x, on.panels, on.bias, best, ids},
                        {size.rows, size.k, size.n, counting});
            on.call.add(typed<T>("argmax_of_units"), {best, ids, chosen}, {size.rows, size.k, size.n});
            on.call.add(typed<T>("linear_argmax"), {on.x, on.panels, on.bias, best, ids, masks.bits, masks.of_row},
                        {size.rows, size.k, size.n, counting, masks.words});
            on.call.add(typed<T>("argmax_of_units"), {best, ids, allowed}, {size.rows, size.k, size.n});
            on.call.run();
            for (int64_t row = 0; row < size.rows; row++) {
                const T *out = on.out.data + row * size.n;
                near("id", row, double(chosen[row]), double(argmax(out, counting)), 0);
                near("allowed id", row, double(allowed[row]), double(argmax(out, counting, &masks, row)), 0);
            }
            on.call.repeat();
        }
}

// Weights and x in int8, with scales, zeros and sums. Results are bit-identical, since sums are exact.
template <class T>
struct Int8s {
    const Size size;
    Program call;
    bool zeros;
    Array<int8_t> x, w;
    Array<T> bias, out;
    Array<float> x_scale, w_scale;
    Array<int32_t> w_sum, x_zero, w_zero, x_sum;
    Array<uint32_t> panels;

    Int8s(Size s, bool zeros, int64_t columns_out)
        : size(s), call(s.rows), zeros(zeros), x(call.integers<int8_t>(s.rows * s.k, s.k, -128, 127)),
          w(call.integers<int8_t>(s.n * s.k, 0, -128, 127)), bias(call.normal<T>(s.n)),
          out(call.written<T>(s.rows * columns_out, columns_out)), x_scale(call.normal<float>(s.rows, 1, 1e-2f)),
          w_scale(call.normal<float>(s.n, 0, 1e-2f)), w_sum(call.read<int32_t>(s.n)),
          x_zero(call.integers<int32_t>(s.rows, 1, -128, 127)), w_zero(call.integers<int32_t>(s.n, 0, -128, 127)),
          x_sum(call.read<int32_t>(s.rows, 1)), panels(packed(call, w.data, s.n, s.k)) {
        for (int64_t i = 0; i < s.n; i++) w_sum[i] = sum(w.data + i * s.k);
        for (int64_t i = 0; i < s.rows; i++) x_sum[i] = sum(x.data + i * s.k);
        // The extremes, with the largest products.
        for (int64_t i = 0; i < s.k; i++) x[i] = w[i] = -128;
        panels = packed(call, w.data, s.n, s.k);
        w_sum[0] = sum(w.data), x_sum[0] = sum(x.data);
        if (zeros) bias.data = nullptr;
    }
    int32_t sum(const int8_t *row) const {
        int32_t all = 0;
        for (int64_t i = 0; i < size.k; i++) all += row[i];
        return all;
    }
    void add(const char *kernel, const void *third, const void *fourth, int64_t counting,
             const Masks *masks = nullptr) {
        Array<int32_t> none = {nullptr, 0};
        call.add(typed<T>(kernel),
                 {x, panels, bias, third, fourth, x_scale, w_scale, w_sum, zeros ? x_zero : none,
                  zeros ? w_zero : none, x_sum, masks ? masks->bits : none,
                  masks ? masks->of_row : none},
                 {size.rows, size.k, size.n, counting, masks ? masks->words : 0});
    }
    // Result before rounding to T.
    float product(int64_t row, int64_t column) const {
        int32_t total = 0;
        for (int64_t i = 0; i < size.k; i++)
            total += (x[row * size.k + i] - (zeros ? x_zero[row] : 0)) *
                     (w[column * size.k + i] - (zeros ? w_zero[column] : 0));
        float made = float(total) * (w_scale[column] * x_scale[row]);
        return bias.data ? made + number(bias[column]) : made;
    }
};

template <class T>
void linear_int8() {
    for (Size size : SIZES)
        for (bool zeros : {false, true}) {
            Int8s<T> on(size, zeros, size.n);
            on.add("linear_int8", on.out, nullptr, 0);
            on.call.run();
            std::vector<T> want;
            for (int64_t i = 0; i < size.rows * size.n; i++)
                want.push_back(nearest<T>(on.product(i / size.n, i % size.n)));
            equal("out", on.out.data, want);
            on.call.repeat();
        }
}

template <class T>
void linear_swiglu_int8() {
    for (Size size : PAIRED) {
        int64_t half = size.n / 2;
        Int8s<T> on(size, size.k % 2, half);
        on.add("linear_swiglu_int8", on.out, nullptr, 0);
        on.call.run();
        for (int64_t row = 0; row < size.rows; row++)
            for (int64_t column = 0; column < half; column++) {
                double gate = rounded<T>(on.product(row, column)), up = rounded<T>(on.product(row, half + column));
                double want = rounded<T>(silu(gate)) * up;
                near("out", row * half + column, number(on.out[row * half + column]), want,
                     std::abs(want) * (2e-6 + 5e-8 * std::abs(gate) + 3 * EPSILON<T>) + 1e-30);
            }
        on.call.repeat();
    }
}

template <class T>
void linear_argmax_int8() {
    for (Size size : SIZES) {
        Int8s<T> on(size, size.k % 2, size.n);
        int64_t panels = (size.n + 15) / 16, counting = (size.n * 3 + 3) / 4;
        Array<float> best = on.call.template read<float>(panels * size.rows);
        Array<int32_t> ids = on.call.template read<int32_t>(panels * size.rows);
        Array<int64_t> chosen = on.call.template written<int64_t>(size.rows, 1);
        Array<int64_t> allowed = on.call.template written<int64_t>(size.rows, 1);
        Masks masks(on.call, size.rows, counting);
        on.add("linear_int8", on.out, nullptr, 0);
        on.add("linear_argmax_int8", best, ids, counting);
        on.call.add(typed<T>("argmax_of_units_int8"), {best, ids, chosen}, {size.rows, size.k, size.n});
        on.add("linear_argmax_int8", best, ids, counting, &masks);
        on.call.add(typed<T>("argmax_of_units_int8"), {best, ids, allowed}, {size.rows, size.k, size.n});
        on.call.run();
        for (int64_t row = 0; row < size.rows; row++) {
            const T *out = on.out.data + row * size.n;
            near("id", row, double(chosen[row]), double(argmax(out, counting)), 0);
            near("allowed id", row, double(allowed[row]), double(argmax(out, counting, &masks, row)), 0);
        }
        on.call.repeat();
    }
}

template <class T>
void embedding_int8() {
    for (Size size : SIZES)
        for (bool zeros : {false, true}) {
            Int8s<T> on(size, zeros, 1);
            int64_t k = size.k;
            Array<int64_t> ids = on.call.template integers<int64_t>(size.rows, 1, 0, size.n - 1);
            Array<T> out = on.call.template written<T>(size.rows * k, k);
            Array<int32_t> zero = zeros ? on.w_zero : Array<int32_t>{nullptr, 0};
            on.call.add(typed<T>("embedding_int8"), {ids, on.panels, out, on.w_scale, zero}, {size.rows, k});
            on.call.run();
            std::vector<T> want;
            for (int64_t i = 0; i < size.rows * k; i++) {
                int64_t id = ids[i / k];
                float whole = float(on.w[id * k + i % k]) - (zeros ? float(on.w_zero[id]) : 0.0f);
                want.push_back(nearest<T>(whole * on.w_scale[id]));
            }
            equal("out", out.data, want);
            on.call.repeat();
        }
}

template <class T>
std::string plain(const char *name) {
    return sizeof(T) == 1 ? std::string(name) + "/int8" : typed<T>(name);
}

// `pack` writes rows to any position of the panels, also in parts; `unpack` reads any rows.
template <class T>
void pack() {
    for (Size size : SIZES) {
        int64_t k = size.k, n = size.n;
        Memory memory;
        Array<T> dense = memory.read<T>(n * k);
        for (int64_t i = 0; i < n * k; i++) dense[i] = T(random_numbers.below(127));
        Array<uint32_t> want = packed(memory, dense.data, n, k), made = memory.written<uint32_t>(want.size);
        std::memset(made.data, 0, size_t(made.size) * 4);
        memory.keep();
        std::vector<uint32_t> words(want.data, want.data + want.size);
        for (int64_t cut : {n, n / 2, n / 3}) {
            memory.restore();
            set_threads(cut == n ? 1 : 3);
            std::vector<Op> ops = {make_op(plain<T>("pack"), {dense.data + cut * k, made}, {n - cut, k, cut})};
            if (cut) ops.push_back(make_op(plain<T>("pack"), {dense, made}, {cut, k, 0}));
            run(ops);
            equal("packed", made.data, words);
        }
        Program unpacked(size.rows);
        Array<int64_t> rows = unpacked.integers<int64_t>(size.rows, 1, 0, n - 1);
        Array<T> out = unpacked.written<T>(size.rows * k, k);
        unpacked.add(plain<T>("unpack"), {want, out, rows}, {size.rows, k});
        unpacked.run();
        std::vector<T> numbers;
        for (int64_t i = 0; i < size.rows * k; i++) numbers.push_back(dense[rows[i / k] * k + i % k]);
        equal("unpacked", out.data, numbers);
        unpacked.repeat();
    }
}

static void read() {
    for (int64_t rows : {1, 5}) {
        const int64_t BYTES = 1536;
        Program call(rows);
        Array<int32_t> words = call.integers<int32_t>(rows * BYTES / 4, BYTES / 4, -(1 << 30), 1 << 30);
        Array<int32_t> found = call.written<int32_t>(rows, 1);
        call.add("read/int8", {words, found}, {rows, BYTES});
        call.run();
        std::vector<int32_t> want(size_t(rows), 0);
        for (int64_t i = 0; i < rows * BYTES / 4; i++) want[size_t(i / (BYTES / 4))] ^= words[i];
        equal("found", found.data, want);
        call.repeat();
    }
}

static void peak() {
    for (const char *kernel : {"peak/float32", "peak/bfloat16", "peak/int8"}) {
        Program call(4);
        Array<int64_t> done = call.written<int64_t>(4, 1), twice = call.written<int64_t>(4, 1);
        call.add(kernel, {done}, {4, 10}), call.add(kernel, {twice}, {4, 20});
        call.run();
        if (done[0] < 10 * 4 * 9 * 2) fail("%s: %lld operations", kernel, (long long)done[0]);
        for (int64_t i = 0; i < 4; i++) near("done", i, double(twice[i]), 2.0 * double(done[0]), 0);
        call.repeat();
    }
}

std::vector<Test> product_tests() {
    return {{{"linear/float32"}, linear<float>},
            {{"linear/bfloat16"}, linear<bf16>},
            {{"linear_swiglu/float32"}, linear_swiglu<float>},
            {{"linear_swiglu/bfloat16"}, linear_swiglu<bf16>},
            {{"linear_argmax/float32", "argmax_of_units/float32"}, linear_argmax<float>},
            {{"linear_argmax/bfloat16", "argmax_of_units/bfloat16"}, linear_argmax<bf16>},
            {{"linear_int8/float32"}, linear_int8<float>},
            {{"linear_int8/bfloat16"}, linear_int8<bf16>},
            {{"linear_swiglu_int8/float32"}, linear_swiglu_int8<float>},
            {{"linear_swiglu_int8/bfloat16"}, linear_swiglu_int8<bf16>},
            {{"linear_argmax_int8/float32", "argmax_of_units_int8/float32"}, linear_argmax_int8<float>},
            {{"linear_argmax_int8/bfloat16", "argmax_of_units_int8/bfloat16"}, linear_argmax_int8<bf16>},
            {{"embedding_int8/float32"}, embedding_int8<float>},
            {{"embedding_int8/bfloat16"}, embedding_int8<bf16>},
            {{"pack/float32", "unpack/float32"}, pack<float>},
            {{"pack/bfloat16", "unpack/bfloat16"}, pack<bf16>},
            {{"pack/int8", "unpack/int8"}, pack<int8_t>},
            {{"read/int8"}, read},
            {{"peak/float32", "peak/bfloat16", "peak/int8"}, peak}};
}

}  // namespace golden
