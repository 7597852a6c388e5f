// Products of weights in the ring with inputs, and their outputs.
#pragma once
#include "inputs.h"

union Sums { float real[4]; int whole[4]; };   // of a lane; see `multiply_bf16`

DEVICE Number added(Number a, Number b) {
    if (FORM == 1) a.whole += b.whole;
    else a.real += b.real;
    return a;
}

// Multiply 64 bytes of each of 16 rows of weights, of which a lane has two rows, by the inputs.
DEVICE void multiply(Sums& a, Sums& b, const uint4& first, const uint4& second, const uint4 (&x)[HELD]) {
    if (FORM == 0) {
        multiply_bf16(a.real, first.x, second.x, first.y, second.y, x[0].x, x[0].y);
        multiply_bf16(b.real, first.z, second.z, first.w, second.w, x[0].z, x[0].w);
    } else if (FORM == 1) {
        multiply_int8(a.whole, first.x, second.x, first.y, second.y, x[0].x, x[0].y);
        multiply_int8(b.whole, first.z, second.z, first.w, second.w, x[0].z, x[0].w);
    } else {   // in float16: Hopper has no float8 products of this shape
        for (int i = 0; i < 4; i++) {
            const uint2 one = e4m3_to_f16(word(first, i)), two = e4m3_to_f16(word(second, i));
            const uint4& by = x[HELD == 2 ? i / 2 : 0];
            multiply_f16(i % 2 ? b.real : a.real, one.x, two.x, one.y, two.y, word(by, i % 2 * 2), word(by, i % 2 * 2 + 1));
        }
    }
}

// Wait for a stage, and load this lane's numbers of its two tiles.
DEVICE void load_stage(const WarpState& own, uint4 (&w)[PIECES][2], const Place& at) {
    wait_until([&] { return barrier_passed(&own.scratch.full[at.stage], at.parity); });
    const u8* from = own.ring + at.stage * STAGE + own.lane() / 4 * PITCH + own.warp() * WIDTH * SIZE + own.lane() % 4 * 16;
    for (int i = 0; i < PIECES; i++)
        for (int tile = 0; tile < 2; tile++) w[i][tile] = *reinterpret_cast<const uint4*>(from + tile * TILE * PITCH + i * 64);
}

// Multiply the next `count` stages of the ring. A stage is loaded while the one before it is multiplied.
DEVICE void add(WarpState& own, Sums (&sums)[2], const uint4 (&x)[INPUTS][HELD], int count) {
    uint4 w[2][PIECES][2];
    load_stage(own, w[0], own.place);
#pragma unroll
    for (int each = 0; each < SPAN; each++) {
        u64* empty = &own.scratch.empty[own.place.stage];
        own.place.advance();
        if (each + 1 < SPAN && each + 1 < count) load_stage(own, w[(each + 1) % 2], own.place);
#pragma unroll
        for (int i = 0; i < PIECES; i++) multiply(sums[0], sums[1], w[each % 2][i][0], w[each % 2][i][1], x[each * PIECES + i]);
        sync_warp();
        if (own.lane() == 0) barrier_arrive(empty);
        if (each + 1 >= count) break;
    }
}

// What a lane's output of a tile is computed with. Lanes have an output of row lane / TILE, if there is such a row.
struct Operands {
    float scale[2];
    u16 residual;
};
DEVICE Operands operands(const WarpState& own, const float* scale, int product, const Sizes& sizes, int tile) {
    Operands made = {};
    const int column = tile * TILE + own.lane() % TILE;
    if (BYTES) {
        made.scale[0] = scale[column];
        if (sizes.gated) made.scale[1] = scale[column + INTERMEDIATE];
    }
    if ((product == OUTPUT || product == DOWN) && own.lane() / TILE < ROWS)
        made.residual = load_l2(own.step.residual + own.lane() / TILE * HIDDEN + column);
    return made;
}

// Add the warps' sums of a kept tile, for the lane's output of a row.
DEVICE float sum_of(const WarpState& own, int kept, int row) {
    const auto& sums = own.scratch.sums[kept];
    Number sum = sums[0][row][own.lane() % TILE];
    for (int other = 1; other < WARPS; other++) sum = added(sum, sums[other][row][own.lane() % TILE]);
    return FORM == 1 ? float(sum.whole) : sum.real;
}

// Compute and store the `index`-th outputs of a batch.
DEVICE void store(const WarpState& own, int product, const Sizes& sizes, u32* counters, int tile, int index,
                  const Operands& by, const Scales& scales) {
    const Step& step = own.step;
    const int row = own.lane() / TILE, column = tile * TILE + own.lane() % TILE;
    const bool inside = row < ROWS;
    const int at = inside ? row : 0;
    const float scale = scales.scale[at];
    float value = sum_of(own, index << sizes.gated, at);
    if (BYTES) value = value * scale * by.scale[0];
    u16* to = product == QKV ? step.qkv : step.residual;
    if (sizes.gated) {
        constexpr float LOG2_E = 1.44269504f;
        float up = sum_of(own, index * 2 + 1, at);
        if (BYTES) up = up * scale * by.scale[1];
        value = value / (1 + exp2_of(-LOG2_E * value)) * up;
        to = step.gated;
    } else if (product != QKV) {
        value = low(to_bf16(value, 0)) + low(by.residual);
    }
    const u32 made = to_bf16(value, 0);
    if (inside) to[row * sizes.outputs + column] = u16(made);
    if (BYTES && sizes.gated) {
        float largest = inside ? magnitude(low(made)) : 0;
        for (int lanes = 1; lanes < TILE; lanes *= 2) largest = larger(largest, shuffle_xor(largest, lanes));
        if (inside && own.lane() % TILE == 0) atomic_max(counters + LARGEST + ROWS + row, bits(largest));
    }
}

// Keep a warp's sums of two tiles. begin: first stage of the part of K; sums of later parts are added.
DEVICE void keep(const WarpState& own, int tile, int begin, const Sums (&sums)[2]) {
    for (int i = 0; i < 4; i++) {
        const int row = own.lane() % 4 * 2 + i % 2;
        if (row >= ROWS) continue;
        Number& to = own.scratch.sums[tile + i / 2][own.warp()][row][own.lane() / 4];
        Number sum;
        if (FORM == 1) sum.whole = sums[0].whole[i] + sums[1].whole[i];
        else sum.real = sums[0].real[i] + sums[1].real[i];
        to = begin == 0 ? sum : added(to, sum);
    }
}

// Compute this block's outputs of a product. loaded: inputs of the first part of K. The warps' sums of a batch of tiles
// are kept in shared memory. Then each warp adds the sums of one tile, in one order.
DEVICE void compute(WarpState& own, int product, const Sizes& sizes, int layer, u32* counters, const u16* from,
                    Vectors& loaded, const Scales& scales) {
    const Step& step = own.step;
    uint4 x[INPUTS][HELD] = {};
    int held = -1;   // part of K of which x holds the inputs
#pragma unroll 1
    for (int base = sizes.first(layer); base < sizes.tiles; base += BLOCKS * sizes.batch()) {
        const int mine = base + own.warp() * BLOCKS;
        const bool stores = own.warp() < sizes.batch() && mine < sizes.tiles;
        const Operands by = stores ? operands(own, step.layers[layer].scale[product], product, sizes, mine) : Operands{};
#pragma unroll 1
        for (int begin = 0; begin < sizes.stages; begin += sizes.span) {
            if (held != begin) {
                hold(own, x, loaded, scales);
                held = begin;
                const int next = begin + sizes.span < sizes.stages ? begin + sizes.span : 0;
                if (next != begin) loaded.load(own, from, sizes, next, sizes.inputs);   // while this part is multiplied
            }
#pragma unroll 1
            for (int tile = 0; tile < KEPT && sizes.has(base, tile); tile += 2) {
                Sums sums[2] = {};
                add(own, sums, x, sizes.count(begin));
                keep(own, tile, begin, sums);
            }
        }
        own.sync();
        if (stores) store(own, product, sizes, counters, mine, own.warp(), by, scales);
        own.sync();
    }
}
