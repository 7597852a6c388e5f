// Bit masks of columns, which some rows have.
#pragma once

#include "runtime/vec.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// bits: masks of `words` words each; bit i of word j allows column 32 j + i.
// of_row: the mask of each row, -1 for none; null if no row has one.
struct Masks {
    const int32_t *bits, *of_row;
    int64_t words;

    // `first` is the position of `bits` and `of_row` among the pointers of an op.
    Masks(const Op &op, int first, int64_t words)
        : bits(op.at<int32_t>(first)), of_row(op.at<int32_t>(first + 1)), words(words) {}

    INLINE const int32_t *of(int64_t row) const {
        return of_row && of_row[row] >= 0 ? bits + of_row[row] * words : nullptr;
    }
    // Keeps the allowed lanes of x, whose first lane is `column`, a multiple of 16; the others become minus infinity.
    INLINE F apply(const int32_t *mask, int64_t column, F x) const {
        uint32_t word = column / 32 < words ? uint32_t(mask[column / 32]) : 0;
        return where_bits(word >> column % 32, x, set1(-INFINITY));
    }
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
