// Products with int8 weights packed in four bits, which must be bit-identical to products with plain int8 weights.
#include <numeric>

#include "golden.h"

namespace golden {

struct Size {
    int64_t rows, k, n;
};
static const Size SIZES[] = {{1, 8, 1},     {2, 128, 17},  {3, 136, 48},  {5, 264, 100}, {6, 248, 65},
                             {11, 40, 80},  {13, 392, 35}, {29, 128, 81}, {70, 264, 50}, {130, 4232, 19}};

static Array<char> nibbles(Memory &memory, const Array<int8_t> &dense, int64_t n, int64_t k) {
    Array<char> made = memory.read<char>((n + 15) / 16 * k * 8);
    std::memset(made.data, 0, size_t(made.size));
    set_threads(3);
    run({make_op("pack_nibbles/int8", {dense, made}, {n, k, 0})});
    return made;
}

static void pack() {
    for (Size size : SIZES) {
        int64_t k = size.k, n = size.n;
        Memory call;
        Array<int8_t> dense = call.integers<int8_t>(n * k, 0, -8, 7);
        Array<char> made = nibbles(call, dense, n, k);
        // The same in two parts that share a panel.
        Array<char> parts = call.read<char>(made.size);
        std::memset(parts.data, 0, size_t(parts.size));
        int64_t cut = n / 2;
        run({make_op("pack_nibbles/int8", {dense.data + cut * k, parts}, {n - cut, k, cut})});
        if (cut) run({make_op("pack_nibbles/int8", {dense, parts}, {cut, k, 0})});
        equal("packed", parts.data, std::vector<char>(made.data, made.data + made.size));
        Program unpacked(size.rows);
        Array<int64_t> rows = unpacked.integers<int64_t>(size.rows, 1, 0, n - 1);
        Array<int8_t> numbers = unpacked.written<int8_t>(size.rows * k, k);
        unpacked.add("unpack_nibbles/int8", {made, numbers, rows}, {size.rows, k});
        unpacked.run();
        std::vector<int8_t> want;
        for (int64_t i = 0; i < size.rows * k; i++) want.push_back(dense[rows[i / k] * k + i % k]);
        equal("unpacked", numbers.data, want);
        unpacked.repeat();
    }
}

// x and weights of a product, with zero points in every second size.
template <class T>
struct Product {
    const Size size;
    Program call;
    Array<int8_t> x, w;
    Array<char> panels;
    Array<uint32_t> plain;
    Array<T> bias;
    Array<float> x_scale, w_scale;
    Array<int32_t> x_zero, w_zero, x_sum, w_sum;

    explicit Product(Size s)
        : size(s), call(s.rows), x(call.integers<int8_t>(s.rows * s.k, s.k, -128, 127)),
          w(call.integers<int8_t>(s.n * s.k, 0, -8, 7)), panels(nibbles(call, w, s.n, s.k)),
          plain(packed(call, w.data, s.n, s.k)), bias(call.normal<T>(s.n)), x_scale(call.normal<float>(s.rows, 1)),
          w_scale(call.normal<float>(s.n)), x_zero(call.integers<int32_t>(s.rows, 1, -20, 20)),
          w_zero(call.integers<int32_t>(s.n, 0, -20, 20)), x_sum(call.read<int32_t>(s.rows, 1)),
          w_sum(call.read<int32_t>(s.n)) {
        for (int64_t i = 0; i < s.rows; i++) x_sum[i] = std::accumulate(x.data + i * s.k, x.data + (i + 1) * s.k, 0);
        for (int64_t i = 0; i < s.n; i++) w_sum[i] = std::accumulate(w.data + i * s.k, w.data + (i + 1) * s.k, 0);
        if (s.k % 16) x_zero.data = w_zero.data = nullptr, bias.data = nullptr;
    }
    void add(const std::string &name, bool packs, const void *third, const void *fourth, int64_t counting,
             const Masks *masks = nullptr) {
        const void *weights = packs ? static_cast<const void *>(panels) : plain;
        std::vector<const void *> p = {x,     weights, bias,   third,  fourth, x_scale,
                                       w_scale, w_sum,   x_zero, w_zero, x_sum};
        if (masks) p.push_back(masks->bits), p.push_back(masks->of_row);
        call.add(typed<T>((name + (packs ? "_int8_nibbles" : "_int8")).c_str()), p,
                 {size.rows, size.k, size.n, counting, masks ? masks->words : 0});
    }
};

template <class T, bool PAIRED>
static void linear() {
    for (Size size : SIZES) {
        if (PAIRED) size.n = (size.n + 31) / 32 * 32;
        int64_t columns = PAIRED ? size.n / 2 : size.n;
        Product<T> on(size);
        Array<T> out = on.call.template written<T>(size.rows * columns, columns);
        Array<T> same = on.call.template written<T>(size.rows * columns, columns);
        std::string name = PAIRED ? "linear_swiglu" : "linear";
        on.add(name, true, out, nullptr, 0), on.add(name, false, same, nullptr, 0);
        on.call.run();
        equal("out", out.data, std::vector<T>(same.data, same.data + same.size));
        on.call.repeat();
    }
}

template <class T>
static void linear_argmax() {
    for (Size size : SIZES) {
        int64_t panels = (size.n + 15) / 16, counting = (size.n * 3 + 3) / 4;
        Product<T> on(size);
        Masks masks(on.call, size.rows, counting);
        Array<float> best = on.call.template read<float>(panels * size.rows);
        Array<int32_t> ids = on.call.template read<int32_t>(panels * size.rows);
        Array<int64_t> out = on.call.template written<int64_t>(size.rows, 1);
        Array<int64_t> same = on.call.template written<int64_t>(size.rows, 1);
        on.add("linear_argmax", true, best, ids, counting, &masks);
        on.call.add(typed<T>("argmax_of_units_int8_nibbles"), {best, ids, out}, {size.rows, size.k, size.n});
        on.add("linear_argmax", false, best, ids, counting, &masks);
        on.call.add(typed<T>("argmax_of_units_int8"), {best, ids, same}, {size.rows, size.k, size.n});
        on.call.run();
        equal("ids", out.data, std::vector<int64_t>(same.data, same.data + same.size));
        on.call.repeat();
    }
}

std::vector<Test> nibbles_tests() {
    return {{{"pack_nibbles/int8", "unpack_nibbles/int8"}, pack},
            {{"linear_int8_nibbles/float32"}, linear<float, false>},
            {{"linear_int8_nibbles/bfloat16"}, linear<bf16, false>},
            {{"linear_swiglu_int8_nibbles/float32"}, linear<float, true>},
            {{"linear_swiglu_int8_nibbles/bfloat16"}, linear<bf16, true>},
            {{"linear_argmax_int8_nibbles/float32", "argmax_of_units_int8_nibbles/float32"}, linear_argmax<float>},
            {{"linear_argmax_int8_nibbles/bfloat16", "argmax_of_units_int8_nibbles/bfloat16"}, linear_argmax<bf16>}};
}

}  // namespace golden
