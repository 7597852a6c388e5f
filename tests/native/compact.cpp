// Products with compact weights, which must be bit-identical to products with plain weights.
#include "golden.h"

namespace golden {

struct Size {
    int64_t rows, k, n;
};
static const Size SIZES[] = {{1, 8, 1},     {2, 128, 17},  {3, 136, 48},  {5, 264, 100}, {6, 248, 65},
                             {11, 40, 80},  {13, 392, 35}, {29, 128, 81}, {70, 264, 50}, {130, 136, 19}};

// Weights with few exponents, as in models, and some rare ones.
static Array<bf16> weights(Memory &memory, int64_t n, int64_t k) {
    Array<bf16> made = memory.normal<bf16>(n * k, 0, 0.05f);
    for (int64_t i = 0; i < n * k; i += 700) made[i] = nearest<bf16>(i % 1400 ? 37.5f : -1e-30f);
    return made;
}
static int64_t compact_bytes(int64_t n, int64_t k) {
    return (n + 15) / 16 * ((k / 2 + 63) / 64 * 64 + k / 2 / 4 * 192);
}
static Array<char> compact(Memory &memory, const Array<bf16> &dense, int64_t n, int64_t k) {
    Array<char> made = memory.read<char>(compact_bytes(n, k));
    Array<int32_t> failed = memory.read<int32_t>(1);
    std::memset(made.data, 0, size_t(made.size));
    failed[0] = 0;
    set_threads(3);
    run({make_op("pack_compact/bfloat16", {dense, made, failed}, {n, k, 0})});
    if (failed[0]) fail("weights [%lld, %lld] are not packed", (long long)n, (long long)k);
    return made;
}

static void pack() {
    for (Size size : SIZES) {
        int64_t k = size.k, n = size.n;
        Memory call;
        Array<bf16> dense = weights(call, n, k);
        Array<char> made = compact(call, dense, n, k);
        // The same in two parts that share a panel.
        Array<char> parts = call.read<char>(made.size);
        Array<int32_t> failed = call.read<int32_t>(1);
        std::memset(parts.data, 0, size_t(parts.size));
        failed[0] = 0;
        int64_t cut = n / 2;
        run({make_op("pack_compact/bfloat16", {dense.data + cut * k, parts, failed}, {n - cut, k, cut})});
        if (cut) run({make_op("pack_compact/bfloat16", {dense, parts, failed}, {cut, k, 0})});
        Array<int64_t> rows = call.integers<int64_t>(size.rows, 1, 0, n - 1);
        for (const Array<char> &packed : {made, parts}) {
            Program unpacked(size.rows);
            Array<int64_t> ids = unpacked.read<int64_t>(size.rows, 1);
            Array<bf16> numbers = unpacked.written<bf16>(size.rows * k, k);
            std::memcpy(ids.data, rows.data, size_t(size.rows) * 8);
            unpacked.add("unpack_compact/bfloat16", {packed, numbers, ids}, {size.rows, k});
            unpacked.run();
            std::vector<bf16> want;
            for (int64_t i = 0; i < size.rows * k; i++) want.push_back(dense[rows[i / k] * k + i % k]);
            equal("unpacked", numbers.data, want);
            unpacked.repeat();
        }
    }
    // A block of all exponents cannot be packed, which the kernel reports.
    Memory memory;
    Array<bf16> any = memory.integers<bf16>(16 * 64, 0, 0, 65535);
    Array<char> made = memory.read<char>(compact_bytes(16, 64));
    Array<int32_t> failed = memory.read<int32_t>(1);
    std::memset(made.data, 0, size_t(made.size));
    failed[0] = 0;
    run({make_op("pack_compact/bfloat16", {any, made, failed}, {16, 64, 0})});
    if (failed[0] != 1) fail("numbers of all exponents are packed");
}

static void linear(const char *kernel, const char *plain, bool paired) {
    for (Size size : SIZES) {
        if (paired) size.n = (size.n + 31) / 32 * 32;
        int64_t k = size.k, n = size.n, columns = paired ? n / 2 : n;
        Program call(size.rows);
        Array<bf16> dense = weights(call, n, k), x = call.normal<bf16>(size.rows * k, k), bias = call.normal<bf16>(n);
        Array<bf16> out = call.written<bf16>(size.rows * columns, columns);
        Array<bf16> same = call.written<bf16>(size.rows * columns, columns);
        Array<char> made = compact(call, dense, n, k);
        call.add(kernel, {x, made, bias, out}, {size.rows, k, n});
        call.add(plain, {x, packed(call, dense.data, n, k), bias, same}, {size.rows, k, n});
        call.run();
        equal("out", out.data, std::vector<bf16>(same.data, same.data + same.size));
        call.repeat();
    }
}
static void linear() { linear("linear_compact/bfloat16", "linear/bfloat16", false); }
static void linear_swiglu() { linear("linear_swiglu_compact/bfloat16", "linear_swiglu/bfloat16", true); }

static void linear_argmax() {
    for (Size size : SIZES) {
        int64_t k = size.k, n = size.n, panels = (n + 15) / 16, counting = (n * 3 + 3) / 4;
        Program call(size.rows);
        Array<bf16> dense = weights(call, n, k), x = call.normal<bf16>(size.rows * k, k), bias = call.normal<bf16>(n);
        Array<float> best = call.read<float>(panels * size.rows);
        Array<int32_t> ids = call.read<int32_t>(panels * size.rows);
        Array<int64_t> out = call.written<int64_t>(size.rows, 1), same = call.written<int64_t>(size.rows, 1);
        Array<char> made = compact(call, dense, n, k);
        Masks masks(call, size.rows, counting);
        const std::vector<int64_t> sizes = {size.rows, k, n, counting, masks.words};
        call.add("linear_argmax_compact/bfloat16", {x, made, bias, best, ids, masks.bits, masks.of_row}, sizes);
        call.add("argmax_of_units_compact/bfloat16", {best, ids, out}, sizes);
        call.add("linear_argmax/bfloat16",
                 {x, packed(call, dense.data, n, k), bias, best, ids, masks.bits, masks.of_row}, sizes);
        call.add("argmax_of_units/bfloat16", {best, ids, same}, sizes);
        call.run();
        equal("ids", out.data, std::vector<int64_t>(same.data, same.data + same.size));
        call.repeat();
    }
}

std::vector<Test> compact_tests() {
    return {{{"pack_compact/bfloat16", "unpack_compact/bfloat16"}, pack},
            {{"linear_compact/bfloat16"}, linear},
            {{"linear_swiglu_compact/bfloat16"}, linear_swiglu},
            {{"linear_argmax_compact/bfloat16", "argmax_of_units_compact/bfloat16"}, linear_argmax}};
}

}  // namespace golden
