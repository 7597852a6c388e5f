// Shared parts of the tests of the native kernels: arrays with a guard behind them, and calls of kernels. A call is
// repeated with the same rows in other pieces and on other threads, and must write the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "runtime/pool.h"

namespace golden {

using npuserve::Op;

// Conversion of bfloat16 and float32 to numbers.
typedef uint16_t bf16;
inline float number(float x) { return x; }
inline float number(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float made;
    std::memcpy(&made, &bits, 4);
    return made;
}
// The T nearest to x, ties to even.
template <class T>
T nearest(float x) {
    if constexpr (sizeof(T) == 4) {
        return x;
    } else {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        return bf16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
}
template <class T>
float rounded(double x) {
    return number(nearest<T>(float(x)));
}
// Largest relative error of rounding to T.
template <class T>
constexpr double EPSILON = sizeof(T) == 4 ? 0x1p-24 : 0x1p-8;
template <class T>
std::string typed(const char *name) {
    return std::string(name) + (sizeof(T) == 4 ? "/float32" : "/bfloat16");
}

// Random numbers of all tests.
struct Random {
    std::mt19937 engine{1};
    int64_t below(int64_t n) { return int64_t(engine() % uint64_t(n)); }
    double uniform() { return double(engine()) * 0x1p-32; }
    float normal() { return std::normal_distribution<float>()(engine); }
};
extern Random random_numbers;

// Index in npuserve_isa of the instruction set under test, and the first failure of the running test.
extern int isa;
extern std::string complaint;
void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void set_threads(int threads);

// Fails unless |got - want| <= tolerance.
inline void near(const char *what, int64_t place, double got, double want, double tolerance) {
    if (!(std::abs(got - want) <= tolerance) && !(got == want))
        fail("%s[%lld] is %.9g, not %.9g within %.2g", what, (long long)place, got, want, tolerance);
}
template <class T>
void equal(const char *what, const T *got, const std::vector<T> &want) {
    for (size_t i = 0; i < want.size(); i++)
        if (std::memcmp(got + i, &want[i], sizeof(T)))
            return fail("%s[%zu] is %.9g, not %.9g", what, i, double(got[i]), double(want[i]));
}

Op make_op(const std::string &kernel, const std::vector<const void *> &p, const std::vector<int64_t> &n,
           const std::vector<double> &f = {});
void run(const std::vector<Op> &ops);

// Memory of a kernel: numbers, followed by bytes that no kernel may change.
template <class T>
struct Array {
    T *data;
    int64_t size;
    T &operator[](int64_t i) const { return data[i]; }
    operator const void *() const { return data; }
};
class Memory {
  public:
    Memory() {}
    Memory(const Memory &) = delete;
    ~Memory() {
        for (Piece &piece : pieces_) std::free(piece.data);
    }
    // Numbers that kernels only read, or that the test does not compare. row: numbers to a row of the call; 0 if all
    // rows share them.
    template <class T>
    Array<T> read(int64_t size, int64_t row = 0) {
        return {reinterpret_cast<T *>(add(size * int64_t(sizeof(T)), row * int64_t(sizeof(T)), false)), size};
    }
    // Numbers that kernels write. Before each run they are reset to their values at the first one.
    template <class T>
    Array<T> written(int64_t size, int64_t row = 0) {
        return {reinterpret_cast<T *>(add(size * int64_t(sizeof(T)), row * int64_t(sizeof(T)), true)), size};
    }
    template <class T>
    Array<T> normal(int64_t size, int64_t row = 0, float by = 1) {
        Array<T> made = read<T>(size, row);
        for (int64_t i = 0; i < size; i++) made[i] = nearest<T>(random_numbers.normal() * by);
        return made;
    }
    template <class T>
    Array<T> integers(int64_t size, int64_t row, int64_t low, int64_t high) {
        Array<T> made = read<T>(size, row);
        for (int64_t i = 0; i < size; i++) made[i] = T(low + random_numbers.below(high - low + 1));
        return made;
    }

    void keep();     // stores the current contents as the start of runs
    void restore();  // restores the start of runs
    void expect();   // stores the current contents as the result of all later runs
    void compare(const char *run);
    int64_t row_bytes(const void *of) const;

  private:
    static constexpr int64_t GUARD = 64;
    struct Piece {
        char *data;
        int64_t bytes, row_bytes;
        bool written;
        std::vector<char> before, expected;
    };
    std::deque<Piece> pieces_;
    char *add(int64_t bytes, int64_t row_bytes, bool written);
};

// Calls of kernels in sequence over the same rows: n[0] of each.
class Program : public Memory {
  public:
    explicit Program(int64_t rows) : rows_(rows) {}
    void add(const std::string &kernel, const std::vector<const void *> &p, const std::vector<int64_t> &n,
             const std::vector<double> &f = {});
    // Runs all rows at once, on one thread.
    void run();
    // Runs the same rows in other pieces, on three threads, and in another order of units: each bit that `run` wrote must
    // be the same.
    void repeat();

  private:
    int64_t rows_;
    std::vector<Op> ops_;
    void run(int64_t first, int64_t end);
    void pieces(const std::vector<int64_t> &sizes, int threads, const char *name);
    void last_unit_first();
};

// Masks for some of the rows: see kernels/native/rows/masks.h.
struct Masks {
    static constexpr int64_t COUNT = 3;
    int64_t words;
    Array<int32_t> bits, of_row;

    Masks(Memory &memory, int64_t rows, int64_t columns)
        : words((columns + 31) / 32), bits(memory.integers<int32_t>(COUNT * words, 0, INT32_MIN, INT32_MAX)),
          of_row(memory.integers<int32_t>(rows, 1, -1, COUNT - 1)) {
        std::fill(bits.data, bits.data + words, 0);
        bits[columns / 2 / 32] = int32_t(1u << columns / 2 % 32);  // the first mask allows one column
    }
    bool allows(int64_t row, int64_t column) const {
        int64_t mask = of_row[row];
        return mask < 0 || uint32_t(bits[mask * words + column / 32]) >> column % 32 & 1;
    }
};

// Test of some kernels.
struct Test {
    std::vector<std::string> kernels;
    void (*run)();
};
std::vector<Test> product_tests(), compact_tests(), int4_tests(), nibbles_tests(), cache_tests(), row_tests(),
    vocabulary_tests(), rank_tests(), expert_tests(), linear_attention_tests();

// True if the instruction set under test multiplies unsigned by signed bytes: its panels hold int8 plus 128.
bool adds_128();

// [N, K] in the form of the products: panels of 16 rows, words of 32 bits.
template <class T>
Array<uint32_t> packed(Memory &memory, const T *dense, int64_t n, int64_t k) {
    constexpr int64_t PER_WORD = 4 / sizeof(T);
    int64_t words = (k + PER_WORD - 1) / PER_WORD, panels = (n + 15) / 16;
    Array<uint32_t> made = memory.read<uint32_t>(panels * words * 16);
    std::memset(made.data, 0, size_t(made.size) * 4);
    uint32_t bits = sizeof(T) == 1 && adds_128() ? 0x80808080 : 0;
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < words; i++) {
            uint32_t &word = made[(row / 16 * words + i) * 16 + row % 16];
            std::memcpy(&word, dense + row * k + i * PER_WORD, size_t(std::min(PER_WORD, k - i * PER_WORD)) * sizeof(T));
            word ^= bits;
        }
    return made;
}

}  // namespace golden
