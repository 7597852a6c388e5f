// Rows of a step whose states are in slots.
#pragma once

#include "runtime/vec.h"

namespace npuserve {
namespace NPUSERVE_ISA {

struct SlotRows {
    const int32_t *context_lens, *starts;
    const int64_t *slots;
    int64_t tokens, capacity;

    // first: index of the pointer to context_lens; those to cu_seqlens_q and state_slots follow. n[1]: maximum rows.
    SlotRows(const Call &call, int first)
        : context_lens(call.op.at<int32_t>(first)), starts(call.op.at<int32_t>(first + 1)),
          slots(call.op.at<int64_t>(first + 2)), tokens(call.rows), capacity(call.op.n[1]) {}

    // Number of rows, some of which may have no tokens.
    int64_t count() const {
        int64_t rows = 0;
        while (rows < capacity && starts[rows] < tokens) rows++;
        return rows;
    }
    int64_t begin(int64_t row) const { return starts[row]; }
    int64_t end(int64_t row) const { return starts[row + 1]; }
    // True if the row's state before this step is 0, whatever its slot holds.
    bool is_new(int64_t row) const { return context_lens[row] == end(row) - begin(row); }
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
