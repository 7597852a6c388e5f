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

// Inputs that a lane has loaded: vectors of eight numbers, of the columns of its warp in a part of K.
constexpr int IN_ROW = SPAN * WIDTH / 8;                  // vectors of a warp in a row
constexpr int LOADED = (ROWS * IN_ROW + 31) / 32;         // vectors of a lane
struct Vectors {
    uint4 of[LOADED];

    // Load the vectors of the stages from `begin` on. stride: numbers between rows.
    DEVICE void load(const WarpState& own, const u16* from, const Sizes& sizes, int begin, int stride) {
#pragma unroll
        for (int i = 0; i < LOADED; i++) {
            const int at = own.lane() + 32 * i, in_row = at % IN_ROW;
            const int column = (begin + in_row / (WIDTH / 8)) * COLUMNS + own.warp() * WIDTH + in_row % (WIDTH / 8) * 8;
            of[i] = row(own, i) < ROWS && column < sizes.inputs ? load_vector(from + row(own, i) * stride + column) : uint4{};
        }
    }
    DEVICE static int row(const WarpState& own, int i) { return (own.lane() + 32 * i) / IN_ROW; }
};

// Numbers of each row. They are chosen by bits: by a condition, the compiler would load them from memory.
struct OfRows {
    float of[ROWS];
    DEVICE float operator[](int row) const {
        u32 made = bits(of[0]);
        for (int i = 1; i < ROWS; i++) made ^= (made ^ bits(of[i])) & -u32(row == i);
        return bits(made);
    }
};

// Quantization of inputs: x / scale. Inputs below about 1e-28 become 0.
struct Scales {
    OfRows scale, inverse;
    DEVICE void set(int row, float largest, float levels) {
        const float made = divided(largest, levels);
        scale.of[row] = made > 1e-30f ? made : 1;
        inverse.of[row] = divided(1, scale.of[row]);
    }
};

// Normalize the inputs. The warps of the block have whole rows. Return the scales of their quantization.
DEVICE Scales normalize(const WarpState& own, Vectors& x, const Vectors& gamma) {
    auto& reduced = own.scratch.reduced;
    OfRows sums = {};
    u32 largest[ROWS] = {};
#pragma unroll
    for (int i = 0; i < LOADED; i++) {
        float sum = 0;
        for (int j = 0; j < 4; j++) {
            const u32 both = word(x.of[i], j);
            sum = fma_of(high(both), high(both), fma_of(low(both), low(both), sum));
        }
        for (int row = 0; row < ROWS; row++) sums.of[row] += Vectors::row(own, i) == row ? sum : 0;
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const float sum = sum_of_warp(sums.of[row]);
        if (own.lane() == 0) reduced[0][own.warp()][row] = sum;
    }
    own.sync();
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float sum = 0;
        for (int i = 0; i < WARPS; i++) sum += reduced[0][i][row];
        sums.of[row] = rsqrt_of(sum / HIDDEN + own.step.eps);
    }
#pragma unroll
    for (int i = 0; i < LOADED; i++) {
        const int own_row = Vectors::row(own, i);
        x.of[i] = normed(x.of[i], gamma.of[i], sums[own_row]);
        u32 most = 0;
        for (int j = 0; j < 4; j++) {
            const u32 both = word(x.of[i], j);
            most = larger(most, larger(bits(magnitude(low(both))), bits(magnitude(high(both)))));
        }
        for (int row = 0; row < ROWS; row++) largest[row] = larger(largest[row], own_row == row ? most : 0u);
    }
    Scales made = {};
    if (!BYTES) return made;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const u32 most = largest_of_lanes(largest[row]);
        if (own.lane() == 0) reduced[1][own.warp()][row] = bits(most);
    }
    own.sync();
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float most = 0;
        for (int i = 0; i < WARPS; i++) most = larger(most, reduced[1][i][row]);
        made.set(row, most, own.step.levels);
    }
    return made;
}

// Return the scales of inputs whose largest magnitudes other blocks have found.
DEVICE Scales scales_of(const WarpState& own, const u32* largest) {
    Scales made = {};
    if (BYTES)
        for (int row = 0; row < ROWS; row++) made.set(row, bits(load_l2(largest + row)), own.step.levels);
    return made;
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
        const uint2 a = e4m3_to_f16(x.x), b = e4m3_to_f16(x.y), c = e4m3_to_f16(x.z), d = e4m3_to_f16(x.w);
        to[0] = {a.x, a.y, b.x, b.y}, to[HELD - 1] = {c.x, c.y, d.x, d.y};
    } else {
        to[0] = x;
    }
}

// Quantize the inputs, and hold them as the tensor cores take them. The lanes of a warp exchange them in shared memory.
DEVICE void hold(const WarpState& own, uint4 (&x)[INPUTS][HELD], const Vectors& loaded, const Scales& scales) {
    u8* inputs = own.scratch.inputs[own.warp()];
    sync_warp();   // all lanes have read the inputs before
#pragma unroll
    for (int i = 0; i < LOADED; i++) {
        const int at = own.lane() + 32 * i, row = Vectors::row(own, i);
        const uint4& full = loaded.of[i];
        const float scale = scales.scale[row], inverse = scales.inverse[row];
        if (row >= ROWS) continue;
        if (BYTES)
            reinterpret_cast<uint2*>(inputs)[at] = {quantized(full.x, full.y, scale, inverse),
                                                    quantized(full.z, full.w, scale, inverse)};
        else reinterpret_cast<uint4*>(inputs)[at] = full;
    }
    sync_warp();
    const u8* row = inputs + own.lane() / 4 % ROWS * INPUTS * 64 + own.lane() % 4 * 16;
#pragma unroll
    for (int piece = 0; piece < INPUTS; piece++) hold(x[piece], *reinterpret_cast<const uint4*>(row + piece * 64));
}
