// Products of rows with the weights of the experts that a router chose for them.
//
//   linear_experts         p: x [R, K] by experts, packed weights of all experts one after the other, null, out [R, N],
//                             null, as for `linear` up to its last pointer; then begins [E + 1] int32, plan [2 E + 4] int64
//                          n: T, K, N of one expert, E
//   linear_swiglu_experts  p: as linear_experts; out [R, N / 2]
//
// R is the number of rows of x, several for each of the T rows of the step. Expert e has rows begins[e] up to begins[e + 1]
// of x, and N is a multiple of 16. Both also exist with the suffixes of `linear`.
//
// Each expert with rows is a product of its own, divided into units as by `linear`: its weights are read once for all its
// rows, and the sums of a row do not depend on other rows.
#pragma once

#include "gemm/epilogue.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Division of all products into units. `units` writes it when the op begins.
struct ExpertPlan {
    int64_t *active, *scratch_bytes;  // number of experts with rows; bytes of the scratch of any unit
    int64_t *first;                   // first unit of each of these experts, ascending, and the number of all units
    int64_t *expert;                  // its number

    ExpertPlan(const Op &op, int pointers) {
        int64_t *plan = op.at<int64_t>(pointers + 1), experts = op.n[3];
        active = plan, scratch_bytes = plan + 1, first = plan + 2, expert = first + experts + 1;
    }
};

template <class Of, template <class> class Product, bool PAIRED>
struct OfExperts {
    static int64_t units(const Call &call) {
        const Op &op = call.op;
        const int32_t *begins = op.at<int32_t>(Of::POINTERS);
        ExpertPlan plan(op, Of::POINTERS);
        int64_t active = 0, all = 0, bytes = 64;
        for (int64_t e = 0; e < op.n[3]; e++) {
            int64_t rows = begins[e + 1] - begins[e];
            if (rows == 0) continue;
            Call of_expert{op, rows, call.threads};
            Split split = split_of<Of>(of_expert, PAIRED);
            bytes = std::max(bytes, UnitLayoutOf<Of>(of_expert, split).bytes());
            plan.first[active] = all, plan.expert[active++] = e;
            all += split.units();
        }
        plan.first[active] = all;
        *plan.active = active, *plan.scratch_bytes = bytes;
        return all;
    }
    static void run(const Call &call, int64_t unit) {
        ExpertPlan plan(call.op, Of::POINTERS);
        // All units take scratch of one size, so that the copy of x stays from unit to unit (Call::again).
        void *memory = scratch(size_t(*plan.scratch_bytes));
        if (!call.again) std::memset(memory, 0, 64);
        int64_t i = std::upper_bound(plan.first, plan.first + *plan.active, unit) - plan.first - 1, e = plan.expert[i];
        const int32_t *begins = call.op.at<int32_t>(Of::POINTERS);
        int64_t row = begins[e], k = call.op.n[1], n = call.op.n[2];
        Op op = call.op;
        op.p[0] = op.at<typename Of::X>(0) + row * k;
        op.p[1] = op.at<char>(1) + e * (n / LANES) * typename Of::Panels(call.op).panel_bytes(k);
        op.p[3] = op.at<typename Of::Out::type>(3) + row * (PAIRED ? n / 2 : n);
        Of::advance(op, row, e * n);
        Product<Of>::run(Call{op, begins[e + 1] - row, call.threads, call.again}, unit - plan.first[i]);
    }
};

template <class Of>
using LinearExperts = OfExperts<Of, Linear, false>;
template <class Of>
using LinearSwigluExperts = OfExperts<Of, LinearSwiglu, true>;

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
