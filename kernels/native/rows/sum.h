// Sum of many float32 numbers.
#pragma once

#include "runtime/vec.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Sum of float32 in float64, by lane.
struct Sum {
    typedef double dvec __attribute__((vector_size(WIDTH * 4)));
    dvec v[2 * PARTS] = {};

    INLINE void add(F x) {
#if defined(__AVX512F__)
        __m256 half[2];
        std::memcpy(half, &x, sizeof half);
        v[0] += (dvec)_mm512_maskz_cvtps_pd(0xFF, half[0]);
        v[1] += (dvec)_mm512_maskz_cvtps_pd(0xFF, half[1]);
#elif defined(__AVX2__)
        EACH(i) {
            __m256 part = (__m256)x.v[i];
            v[2 * i] += (dvec)_mm256_cvtps_pd(_mm256_castps256_ps128(part));
            v[2 * i + 1] += (dvec)_mm256_cvtps_pd(_mm256_extractf128_ps(part, 1));
        }
#elif defined(__aarch64__)
        EACH(i) {
            float32x4_t part = (float32x4_t)x.v[i];
            v[2 * i] += (dvec)vcvt_f64_f32(vget_low_f32(part));
            v[2 * i + 1] += (dvec)vcvt_high_f64_f32(part);
        }
#else
        EACH(i) {
            for (int l = 0; l < WIDTH; l++) v[2 * i + l / (WIDTH / 2)][l % (WIDTH / 2)] += double(x.v[i][l]);
        }
#endif
    }
    INLINE double total() const {
        double l[LANES];
        std::memcpy(l, v, sizeof l);
        for (int i = 0; i < 8; i++) l[i] += l[i + 8];
        for (int i = 0; i < 4; i++) l[i] += l[i + 4];
        return (l[0] + l[2]) + (l[1] + l[3]);
    }
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
