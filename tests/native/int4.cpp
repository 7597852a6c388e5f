// Products with weights of four bits, for x in float and in int8, against their numbers in float64. A row's results must
// not depend on other rows.
#include "golden.h"

namespace golden {

struct Size {
    int64_t rows, k, n, group;
    int type;  // as n[6] of the products
};
static const Size SIZES[] = {{1, 8, 1, 32, 0},     {1, 136, 130, 64, 2},  {2, 72, 17, 32, 1},   {3, 128, 48, 32, 4},
                             {5, 264, 100, 64, 0}, {6, 248, 65, 128, 5},  {11, 40, 80, 128, 2}, {13, 392, 35, 32, 6},
                             {29, 128, 81, 64, 1}, {70, 264, 50, 32, 4},  {130, 136, 19, 128, 0}};
static const Size PAIRED[] = {{1, 64, 32, 32, 0}, {4, 72, 96, 64, 4}, {13, 136, 64, 128, 1}, {80, 264, 160, 32, 5}};

// A positive number that float16 and bfloat16 have, and its bits in a type of scales.
struct Scale {
    float value;
    uint32_t bits[3];
    Scale() {
        uint32_t exponent = uint32_t(random_numbers.below(4)), fraction = uint32_t(random_numbers.below(128));
        bits[0] = (120 + exponent) << 7 | fraction;
        bits[1] = (8 + exponent) << 10 | fraction << 3;
        bits[2] = bits[0] << 16;
        std::memcpy(&value, &bits[2], 4);
    }
};

// Weights [n, k] with their packed form, x and bias of a product. X: T, or int8_t for x with a scale for each row and
// weights without zero points.
template <class T, class X = T>
struct Int4s {
    static constexpr bool INT8 = sizeof(X) == 1;
    const Size size;
    Program call;
    Array<X> x;
    Array<float> x_scale;
    Array<T> bias, out;
    Array<char> panels;
    std::vector<float> w;

    Int4s(Size s, bool biased, int64_t columns_out)
        : size{s.rows, s.k, s.n, s.group, INT8 ? s.type % 4 : s.type}, call(s.rows), x(numbers(s)),
          x_scale(call.read<float>(s.rows, 1)), bias(call.normal<T>(s.n)), out(call.written<T>(s.rows * columns_out, columns_out)), panels(call.read<char>((s.n + 15) / 16 * panel_bytes())),
          w(size_t(s.n * s.k)) {
        if (!biased) bias.data = nullptr;
        for (int64_t row = 0; row < s.rows; row++) x_scale[row] = INT8 ? float(0.01 + random_numbers.uniform()) : 1;
        std::memset(panels.data, 0, size_t(panels.size));
        for (int64_t row = 0; row < s.n; row++) fill(row);
    }
    Array<X> numbers(Size s) {
        if constexpr (INT8) {
            return call.integers<int8_t>(s.rows * s.k, s.k, -128, 127);
        } else {
            return call.normal<T>(s.rows * s.k, s.k);
        }
    }
    // Adds a call of a product. after: pointers that follow those of every product.
    void add(const std::string &name, const void *first_out, const void *second_out, std::vector<const void *> after = {},
             int64_t counting = 0, int64_t words = 0) {
        std::vector<const void *> p = {x, panels, bias, first_out, second_out};
        if (INT8) p.push_back(x_scale);
        p.insert(p.end(), after.begin(), after.end());
        call.add(of(name), p, {size.rows, size.k, size.n, counting, words, size.group, size.type});
    }
    static std::string of(const std::string &name) { return typed<T>((name + (INT8 ? "_int4_int8" : "_int4")).c_str()); }
    int64_t scale_bytes() const { return size.type % 4 == 2 ? 4 : 2; }
    int64_t header() const { return 16 * scale_bytes() + (size.type & 4 ? 16 : 0); }
    int64_t panel_bytes() const { return (size.k + size.group - 1) / size.group * header() + size.k * 8; }
    void fill(int64_t row) {
        char *at = panels.data + row / 16 * panel_bytes();
        int64_t lane = row % 16;
        for (int64_t first = 0; first < size.k; first += size.group) {
            Scale scale;
            std::memcpy(at + lane * scale_bytes(), &scale.bits[size.type % 4], size_t(scale_bytes()));
            int zero = size.type & 4 ? int(random_numbers.below(17)) - 8 : 0;
            if (size.type & 4) at[header() - 16 + lane] = char(zero);
            at += header();
            int64_t count = std::min(size.group, size.k - first);
            for (int64_t i = 0; i < count; i++) {
                int code = int(random_numbers.below(16));
                uint32_t word;
                char *place = at + i / 8 * 64 + lane * 4;
                std::memcpy(&word, place, 4);
                word |= uint32_t(code) << (i % 2 * 16 + i % 8 / 2 * 4);
                std::memcpy(place, &word, 4);
                w[size_t(row * size.k + first + i)] = float(code - 8 - zero) * scale.value;
            }
            at += count / 8 * 64;
        }
    }
    static float value(X of) {
        if constexpr (INT8) {
            return float(of);
        } else {
            return number(of);
        }
    }
    double product(int64_t row, int64_t column, double &magnitude) const {
        double sum = bias.data ? number(bias[column]) : 0;
        magnitude = std::abs(sum);
        for (int64_t i = 0; i < size.k; i++) {
            double term = double(value(x[row * size.k + i])) * x_scale[row] * w[size_t(column * size.k + i)];
            sum += term, magnitude += std::abs(term);
        }
        return sum;
    }
};

template <class T, class X>
void linear() {
    for (Size size : SIZES)
        for (bool biased : {false, true}) {
            Int4s<T, X> on(size, biased, size.n);
            on.add("linear", on.out, nullptr);
            on.call.run();
            for (int64_t row = 0; row < size.rows; row++)
                for (int64_t column = 0; column < size.n; column++) {
                    double magnitude, want = on.product(row, column, magnitude);
                    near("out", row * size.n + column, number(on.out[row * size.n + column]), want,
                         magnitude * 2e-6 + std::abs(want) * EPSILON<T>);
                }
            on.call.repeat();
        }
}

template <class T, class X>
void linear_swiglu() {
    for (Size size : PAIRED) {
        int64_t half = size.n / 2;
        Int4s<T, X> on(size, size.rows % 2, half);
        Array<T> product = on.call.template written<T>(size.rows * size.n, size.n);
        Array<T> same = on.call.template written<T>(size.rows * half, half);
        on.add("linear_swiglu", on.out, nullptr);
        on.add("linear", product, nullptr);
        on.call.add(typed<T>("swiglu"), {product, same}, {size.rows, half});
        on.call.run();
        equal("out", on.out.data, std::vector<T>(same.data, same.data + same.size));
        on.call.repeat();
    }
}

template <class T, class X>
void linear_argmax() {
    for (Size size : SIZES) {
        Int4s<T, X> on(size, size.k % 16, size.n);
        int64_t panels = (size.n + 15) / 16, counting = (size.n * 3 + 3) / 4;
        Array<float> best = on.call.template read<float>(panels * size.rows);
        Array<int32_t> ids = on.call.template read<int32_t>(panels * size.rows);
        Array<int64_t> chosen = on.call.template written<int64_t>(size.rows, 1);
        Masks masks(on.call, size.rows, counting);
        on.add("linear", on.out, nullptr);
        on.add("linear_argmax", best, ids, {masks.bits, masks.of_row}, counting, masks.words);
        on.call.add(on.of("argmax_of_units"), {best, ids, chosen}, {size.rows, size.k, size.n});
        on.call.run();
        for (int64_t row = 0; row < size.rows; row++) {
            int64_t want = -1;
            const T *out = on.out.data + row * size.n;
            for (int64_t i = 0; i < counting; i++)
                if (masks.allows(row, i) && (want < 0 || number(out[i]) > number(out[want]))) want = i;
            near("id", row, double(chosen[row]), double(std::max<int64_t>(want, 0)), 0);
        }
        on.call.repeat();
    }
}

template <class T, class X>
void add_tests(std::vector<Test> &tests) {
    auto of = Int4s<T, X>::of;
    tests.insert(tests.end(), {{{of("linear")}, linear<T, X>},
                               {{of("linear_swiglu")}, linear_swiglu<T, X>},
                               {{of("linear_argmax"), of("argmax_of_units")}, linear_argmax<T, X>}});
}

std::vector<Test> int4_tests() {
    std::vector<Test> tests;
    add_tests<float, float>(tests), add_tests<bf16, bf16>(tests);
    add_tests<float, int8_t>(tests), add_tests<bf16, int8_t>(tests);
    return tests;
}

}  // namespace golden
