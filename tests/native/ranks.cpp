// Tests of the collectives between ranks, and of the kernels for a part of the vocabulary. One process takes the part of
// every rank in turn: it publishes all slots before the first rank reads them.
#include "golden.h"

#include "runtime/constants.h"

namespace golden {

struct Shape {
    int64_t rows, columns, ranks;
};
static const Shape SHAPES[] = {{1, 1, 1}, {3, 5, 2}, {2, 16, 3}, {7, 515, 4}, {40, 1000, 2}};

// Region of memory that the ranks share, which begins at no collective.
struct Region {
    Shape shape;
    int64_t capacity;
    Array<uint8_t> bytes;
    Region(Memory &memory, Shape shape, int64_t row_bytes)
        : shape(shape), capacity((shape.rows * row_bytes + 63) / 64 * 64),
          bytes(memory.read<uint8_t>(shape.ranks * (npuserve::RANK_LINE_BYTES + 2 * capacity))) {
        std::memset(bytes.data, 0, size_t(bytes.size));
    }
    std::vector<int64_t> numbers(int64_t columns, int64_t rank) const {
        return {shape.rows, columns, rank, shape.ranks, capacity};
    }
    // Publishes a slot of each rank: the ranks' rows of `columns` numbers, one rank after the other.
    template <class T>
    void publish(const Array<T> &x, int64_t columns) const {
        for (int64_t rank = 0; rank < shape.ranks; rank++)
            run({make_op(typed<T>("rank_share"), {x.data + rank * shape.rows * columns, bytes}, numbers(columns, rank)),
                 make_op("rank_arrive/uint8", {bytes}, numbers(0, rank))});
    }
};

// Several collectives follow each other, so that slots of both parities are used again.
template <class T>
void sum_and_concatenate() {
    for (Shape shape : SHAPES)
        for (int threads : {1, 3}) {
            set_threads(threads);
            Memory memory;
            int64_t h = shape.columns, all = shape.rows * h;
            Region region(memory, shape, h * int64_t(sizeof(T)));
            for (int collective = 0; collective < 4; collective++) {
                Array<T> x = memory.normal<T>(shape.ranks * all), sum = memory.written<T>(all);
                Array<T> rows = memory.written<T>(shape.ranks * all);
                region.publish(x, h);
                std::vector<T> sums, concatenated(size_t(shape.ranks * all));
                for (int64_t i = 0; i < all; i++) {
                    float total = number(x[i]);
                    for (int64_t of = 1; of < shape.ranks; of++) total += number(x[of * all + i]);
                    sums.push_back(nearest<T>(total));
                    for (int64_t of = 0; of < shape.ranks; of++)
                        concatenated[size_t((i / h * shape.ranks + of) * h + i % h)] = x[of * all + i];
                }
                for (int64_t rank = 0; rank < shape.ranks; rank++) {
                    run({make_op(typed<T>("rank_sum"), {region.bytes, sum}, region.numbers(h, rank)),
                         make_op(typed<T>("rank_concatenate"), {region.bytes, rows}, region.numbers(h, rank))});
                    equal("sum", sum.data, sums);
                    equal("rows", rows.data, concatenated);
                }
            }
            memory.expect();
            memory.compare("collectives");
        }
}

void argmax() {
    for (Shape shape : SHAPES) {
        Memory memory;
        Region region(memory, shape, 2 * sizeof(float));
        Array<float> pairs = memory.read<float>(shape.ranks * shape.rows * 2);
        Array<int64_t> ids = memory.written<int64_t>(shape.rows);
        std::vector<int64_t> want;
        for (int64_t row = 0; row < shape.rows; row++) {
            float best = 0;
            for (int64_t rank = 0; rank < shape.ranks; rank++) {
                float *pair = pairs.data + (rank * shape.rows + row) * 2;
                pair[0] = float(random_numbers.below(3)) - 5, pair[1] = float(rank * 100 + row);  // equal values occur
                if (rank == 0) want.push_back(row), best = pair[0];
                if (pair[0] > best) want.back() = rank * 100 + row, best = pair[0];
            }
        }
        region.publish(pairs, 2);
        for (int64_t rank = 0; rank < shape.ranks; rank++) {
            run({make_op("rank_argmax/float32", {region.bytes, ids}, region.numbers(2, rank))});
            equal("ids", ids.data, want);
        }
        memory.expect();
        memory.compare("argmax");
    }
}

static const int64_t FIRST = 40, COUNT = 20;  // the rank's part of the vocabulary

void local_ids() {
    Program call(70);
    Array<int64_t> ids = call.integers<int64_t>(70, 1, 0, 99), out = call.written<int64_t>(70, 1);
    call.add("local_ids/int64", {ids, out}, {70, FIRST, COUNT});
    call.run();
    std::vector<int64_t> want;
    for (int64_t i = 0; i < 70; i++) want.push_back(ids[i] >= FIRST && ids[i] < FIRST + COUNT ? ids[i] - FIRST : 0);
    equal("out", out.data, want);
    call.repeat();
}

template <class T>
void zero_outside() {
    for (Shape shape : SHAPES) {
        int64_t h = shape.columns;
        Program call(shape.rows);
        Array<int64_t> ids = call.integers<int64_t>(shape.rows, 1, 0, 99);
        Array<T> x = call.written<T>(shape.rows * h, h);
        std::vector<T> want;
        for (int64_t i = 0; i < x.size; i++) {
            x[i] = nearest<T>(random_numbers.normal());
            want.push_back(ids[i / h] >= FIRST && ids[i / h] < FIRST + COUNT ? x[i] : T(0));
        }
        call.add(typed<T>("zero_outside"), {ids, x}, {shape.rows, h, FIRST, COUNT});
        call.run();
        equal("x", x.data, want);
        call.repeat();
    }
}

template <class T>
std::vector<Test> of_type() {
    return {
        {{typed<T>("rank_share"), typed<T>("rank_sum"), typed<T>("rank_concatenate")}, sum_and_concatenate<T>},
        {{typed<T>("zero_outside")}, zero_outside<T>},
    };
}

std::vector<Test> rank_tests() {
    std::vector<Test> all = {{{"rank_arrive/uint8", "rank_argmax/float32"}, argmax}, {{"local_ids/int64"}, local_ids}};
    for (const auto &tests : {of_type<float>(), of_type<bf16>()}) all.insert(all.end(), tests.begin(), tests.end());
    return all;
}

}  // namespace golden
