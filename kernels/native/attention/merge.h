// Merges of the results of a split into the totals of all splits before.
#pragma once

#include <algorithm>
#include <cfloat>

#include "attention/paged.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Merges splits into totals whose rows are in memory: total = total * old + sum * young. A product merges its sums
// while they are in registers. old: null if sums are only stored. total: distance of a total from its sum.
struct Merging {
    float *old, *young;
    int64_t total;

    INLINE void put(int64_t row, float *sum, F lanes) const {
        if (!old) return store(sum, lanes);
        store(sum + total, fma(load(sum + total), set1(old[row]), lanes * set1(young[row])));
    }
    // Merges largest scores and masses, and sets the powers for `put`. A total of mass 0 is empty.
    void masses(int64_t rows, const float *largest, const float *mass, float *total_largest, float *total_mass) const {
        by_lanes(rows, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            F had = get_n<Float32>(total_mass + i, n), here = get_n<Float32>(largest + i, n);
            F before = where_at_least(had, set1(FLT_MIN), get_n<Float32>(total_largest + i, n), here);
            F most = max(here, before), a = exp2(before - most), b = exp2(here - most);
            put_n<Float32>(old + i, a, n), put_n<Float32>(young + i, b, n);
            put_n<Float32>(total_largest + i, most, n);
            put_n<Float32>(total_mass + i, had * a + get_n<Float32>(mass + i, n) * b, n);
        });
    }
};

// The same for one row whose split is in memory.
INLINE void merge(const Shape &s, float largest, float mass, const float *sum, float &total_largest, float &total_mass,
                  float *total) {
    if (total_mass == 0) {
        total_largest = largest, total_mass = mass;
        std::memcpy(total, sum, size_t(s.padded_dim) * 4);
        return;
    }
    float most = largest > total_largest ? largest : total_largest;
    float powers[LANES] = {total_largest - most, largest - most};
    store(powers, exp2(load(powers)));
    F old = set1(powers[0]), young = set1(powers[1]);
    for (int64_t d = 0; d < s.padded_dim; d += LANES)
        store(total + d, fma(load(total + d), old, load(sum + d) * young));
    total_mass = total_mass * powers[0] + mass * powers[1];
    total_largest = most;
}

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
