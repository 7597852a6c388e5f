// Interface between Python and the kernels: a call of a kernel as plain data, and programs of such calls.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/constants.h"

namespace npuserve {

enum DType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// One call. The head of each kernel's file describes p, n and f. n[0] is always the number of rows, which a program
// replaces by the step's.
struct Op {
    int32_t kernel;
    int32_t dtype;
    const void *p[OP_POINTERS];
    int64_t n[OP_SIZES];
    double f[OP_FLOATS];

    template <class T>
    T *at(int i) const {
        return static_cast<T *>(const_cast<void *>(p[i]));
    }
};
static_assert(sizeof(Op) == 8 + 8 * (OP_POINTERS + OP_SIZES + OP_FLOATS), "as Python packs it");

// An op to run: with its number of rows and its maximum number of threads.
// again: true if this thread's scratch is as an earlier unit of this call left it. A kernel that relies on it asks for
// scratch of the same size in all units.
struct Call {
    const Op &op;
    int64_t rows;
    int threads;
    bool again = false;
};

// Kernel: its work is divided into units, which may run in any order and concurrently. No number that a unit writes
// depends on the number of units or threads. `units` returns their number. One thread calls it when the op begins, so
// that it may read what earlier ops wrote, and write to the op's memory.
struct Kernel {
    const char *name;
    int64_t (*units)(const Call &);
    void (*run)(const Call &, int64_t unit);
};

// Kernels of one instruction set: groups, terminated by null, of kernels, terminated by one without a name. A kernel's
// number is its group's times GROUP plus its own.
struct KernelTable {
    const char *isa;
    const Kernel *const *groups;

    static constexpr int GROUP = 256;
    const Kernel &kernel(int number) const { return groups[number / GROUP][number % GROUP]; }
};

// A kernel's name ends with its dtype, as torch spells it.
#define KERNEL(name, type) {name, &type::units, &type::run}
#define BY_DTYPE(name, type) KERNEL(name "/float32", type<Float32>), KERNEL(name "/bfloat16", type<BFloat16>)

// Returns this thread's scratch of at least `bytes`, aligned to 64 and reused by later calls. Throws std::bad_alloc.
void *scratch(size_t bytes);

// Always inline: of a function that the objects of several sets share, the linker would keep the one of any set.
template <class T>
inline __attribute__((always_inline)) T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

}  // namespace npuserve
