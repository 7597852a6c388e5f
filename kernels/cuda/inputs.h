// Inputs of the products: norms and quantization.
#pragma once
#include "layout.h"

// RMS norm of two numbers: rounded before and after the product with gamma.
DEVICE u32 normed(u32 pair, u32 gamma, float inverse) {
    const u32 rounded = to_bf16(low(pair) * inverse, high(pair) * inverse);
    return to_bf16(low(rounded) * low(gamma), high(rounded) * high(gamma));
}
DEVICE uint4 normed(const uint4& x, const uint4& gamma, float inverse) {
    return {normed(x.x, gamma.x, inverse), normed(x.y, gamma.y, inverse), normed(x.z, gamma.z, inverse),
            normed(x.w, gamma.w, inverse)};
}

// Set the scale of a row's quantized inputs. Inputs below about 1e-28 become 0.
DEVICE void set_scale(const WarpState& own, int row, float largest) {
    const float scale = divided(largest, own.step.levels);
    own.scratch.scale[row] = scale > 1e-30f ? scale : 1;
    own.scratch.inverse[row] = divided(1, own.scratch.scale[row]);
}

// Wait for the residual stream, if another block writes it. Set inverse[i] to the inverse root mean square of row i, and
// the scales of its norm.
DEVICE void statistics(const WarpState& own, const u16* gamma, const u32* counter, float (&inverse)[ROWS]) {
    constexpr int VECTORS = HIDDEN / 8, COUNT = (VECTORS + THREADS - 1) / THREADS;
    Scratch& scratch = own.scratch;
    uint4 x[ROWS][COUNT] = {}, by[COUNT] = {};
    if (BYTES)
        for (int i = 0; i < COUNT; i++)
            if (thread() + i * THREADS < VECTORS) by[i] = reinterpret_cast<const uint4*>(gamma)[thread() + i * THREADS];
    if (counter != nullptr) own.wait(counter);
#pragma unroll
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < COUNT; i++)
            if (thread() + i * THREADS < VECTORS)
                x[row][i] = load_vector(own.step.residual + row * HIDDEN + 8 * (thread() + i * THREADS));
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float sum = 0;
        for (int i = 0; i < COUNT; i++)
            for (int j = 0; j < 4; j++) {
                const u32 both = word(x[row][i], j);
                sum = fma_of(high(both), high(both), fma_of(low(both), low(both), sum));
            }
        sum = sum_of_warp(sum);
        if (own.lane() == 0) scratch.reduced[0][own.warp()][row] = sum;
    }
    own.sync();
    for (int row = 0; row < ROWS; row++) {
        float sum = 0;
        for (int i = 0; i < WARPS; i++) sum += scratch.reduced[0][i][row];
        inverse[row] = rsqrt_of(sum / HIDDEN + own.step.eps);
    }
    if (!BYTES) return;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float largest = 0;
        for (int i = 0; i < COUNT; i++)
            for (int j = 0; j < 4; j++) {
                const u32 both = normed(word(x[row][i], j), word(by[i], j), inverse[row]);
                largest = larger(largest, larger(magnitude(low(both)), magnitude(high(both))));
            }
        largest = largest_of_warp(largest);
        if (own.lane() == 0) scratch.reduced[1][own.warp()][row] = largest;
    }
    own.sync();
    if (thread() < ROWS) {
        float largest = 0;
        for (int i = 0; i < WARPS; i++) largest = larger(largest, scratch.reduced[1][i][thread()]);
        set_scale(own, thread(), largest);
    }
    own.sync();
}

// Set the scales of inputs whose largest magnitudes other blocks have found.
DEVICE void scales_of(const WarpState& own, const u32* largest) {
    if (!BYTES) return;
    if (thread() < ROWS) set_scale(own, thread(), bits(load_l2(largest + thread())));
    own.sync();
}

// Quantize four numbers: x / scale, rounded once. The quotient by the reciprocal is corrected by its remainder
// (Markstein 1990, doi:10.1147/rd.341.0111).
DEVICE u32 quantized(u32 first, u32 second, float scale, float inverse) {
    const float x[4] = {low(first), high(first), low(second), high(second)};
    float q[4];
    for (int i = 0; i < 4; i++) {
        const float near = x[i] * inverse;
        q[i] = fma_of(fma_of(-near, scale, x[i]), inverse, near);
    }
    if (FORM == 1) return to_int8(q[0]) | to_int8(q[1]) << 8 | to_int8(q[2]) << 16 | to_int8(q[3]) << 24;
    return to_e4m3(q[0], q[1]) | to_e4m3(q[2], q[3]) << 16;
}

// Hold 16 bytes of inputs as the tensor cores take them.
DEVICE void hold(uint4 (&to)[HELD], const uint4& x) {
    if (FORM == 2) {
        to[0] = {e4m3_to_f16(x.x), e4m3_to_f16(x.x >> 16), e4m3_to_f16(x.y), e4m3_to_f16(x.y >> 16)};
        to[HELD - 1] = {e4m3_to_f16(x.z), e4m3_to_f16(x.z >> 16), e4m3_to_f16(x.w), e4m3_to_f16(x.w >> 16)};
    } else {
        to[0] = x;
    }
}

// Load this warp's inputs of the stages from `begin` on. Where there are fewer rows than lanes, lanes share the work.
// gamma: of the norm, or null. All loads are issued before the first is used.
DEVICE void load_inputs(const WarpState& own, uint4 (&x)[SPAN * PIECES][HELD], const u16* from, const u16* gamma,
                        const Sizes& sizes, int begin, const float (&inverse)[ROWS]) {
    constexpr int COUNT = SPAN * PIECES, SHARE = 8 / ROWS, SLOTS = (COUNT + SHARE - 1) / SHARE, VECTORS = EACH / 8;
    const int row = own.lane() / 4 % ROWS, share = own.lane() / 4 / ROWS, quarter = own.lane() % 4;
    const auto column = [&](int slot) {
        const int piece = slot * SHARE + share, offset = piece % PIECES * (64 / SIZE) + quarter * EACH;
        const int made = (begin + piece / PIECES) * COLUMNS + own.warp() * WIDTH + offset;
        return made < sizes.inputs ? made : 0;   // what lies beyond is not used
    };
    uint4 pairs[SLOTS][VECTORS], gammas[SLOTS][VECTORS] = {};
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++)
#pragma unroll
        for (int i = 0; i < VECTORS; i++) pairs[slot][i] = load_vector(from + row * sizes.inputs + column(slot) + 8 * i);
    if (gamma != nullptr)
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++)
#pragma unroll
            for (int i = 0; i < VECTORS; i++) gammas[slot][i] = load_vector(gamma + column(slot) + 8 * i);
    float own_inverse = inverse[0];
    for (int i = 1; i < ROWS; i++) own_inverse = row == i ? inverse[i] : own_inverse;
    const float scale = BYTES ? own.scratch.scale[row] : 1, unit = BYTES ? own.scratch.inverse[row] : 1;
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) {
        uint4(&pair)[VECTORS] = pairs[slot];
        if (gamma != nullptr)
#pragma unroll
            for (int i = 0; i < VECTORS; i++) pair[i] = normed(pair[i], gammas[slot][i], own_inverse);
        const uint4 &a = pair[0], &b = pair[VECTORS - 1];
        uint4 made = a;
        if (BYTES)
            made = {quantized(a.x, a.y, scale, unit), quantized(a.z, a.w, scale, unit), quantized(b.x, b.y, scale, unit),
                    quantized(b.z, b.w, scale, unit)};
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            const int lane = (i * ROWS + row) * 4 + quarter;
            const uint4 theirs = SHARE == 1 ? made : uint4{shuffle(made.x, lane), shuffle(made.y, lane),
                                                           shuffle(made.z, lane), shuffle(made.w, lane)};
            if (slot * SHARE + i < COUNT) hold(x[slot * SHARE + i], theirs);
        }
    }
}
