// Copies of the weights into the ring in shared memory.
#pragma once
#include "layout.h"

// The pairs of tiles of this block in the order in which `compute` takes them: layers, products, batches of outputs,
// parts of K, pairs.
struct Cursor {
    int layer = 0, product = QKV;
    Sizes sizes{QKV};
    int base = sizes.first(0), begin = 0, tile = -2;

    // Go to the next pair; return false after the last.
    DEVICE bool next() {
        if ((tile += 2) < KEPT && sizes.has(base, tile)) return true;
        tile = 0;
        if (base < sizes.tiles) {
            if ((begin += sizes.span) < sizes.stages) return true;
            begin = 0;
            base += BLOCKS * sizes.batch();
        }
        while (base >= sizes.tiles) {
            if (++product > DOWN) product = QKV, layer++;
            if (layer == LAYERS) return false;
            sizes = Sizes(product);
            base = sizes.first(layer);
        }
        return true;
    }
    // Row `index` of the first or second tile of the pair, from the part of K on.
    DEVICE const u8* row(const Layer* layers, int second, int index) const {
        const int each = tile + second;
        const i64 at = (base + (each >> sizes.gated) * BLOCKS) * TILE + index + (each & sizes.gated) * INTERMEDIATE;
        return layers[layer].weight[product] + (at * sizes.inputs + begin * COLUMNS) * SIZE;
    }
};

// Copy this block's tiles of all weights. A thread copies 16 bytes of some rows of every stage.
DEVICE void copy_weights(const Step& step, Scratch& scratch, u8* ring) {
    constexpr int LINE = COLUMNS * SIZE / 16, AT_ONCE = 32 * COPYING / LINE;   // copies of a row; rows at a time
    const int index = (thread() - THREADS) / LINE, offset = (thread() - THREADS) % LINE * 16;
    u8* own = ring + index * PITCH + offset;
    Cursor now;
    Place place{0, 0};
    int product = QKV, copied = 0;   // stages of the product
    while (now.next()) {
        if (now.product != product) product = now.product, copied = 0;
        const i64 pitch = i64(now.sizes.inputs) * SIZE;
        const bool two = now.sizes.has(now.base, now.tile + 1);   // a last tile is alone
        const u8* first = now.row(step.layers, 0, index) + offset;
        const u8* second = now.row(step.layers, 1, index) + offset;
#pragma unroll 1
        for (int left = now.sizes.count(now.begin); left; left--, copied++) {
            const int in_flight = copied >= STAGES ? IN_FLIGHT : product == OUTPUT ? FILLING_IN_ATTENTION : FILLING;
            const Place before = place.earlier(two ? in_flight : 2 * in_flight);
            wait_until([&] { return barrier_passed(&scratch.full[before.stage], before.parity); });
            wait_until([&] { return barrier_passed(&scratch.empty[place.stage], place.parity ^ 1); });
            u8* to = own + place.stage * STAGE;
#pragma unroll
            for (int i = 0; i < TILE; i += AT_ONCE) copy_to_shared(to + i * PITCH, first + i * pitch);
            if (two)
#pragma unroll
                for (int i = 0; i < TILE; i += AT_ONCE) copy_to_shared(to + (TILE + i) * PITCH, second + i * pitch);
            barrier_arrive_after_copies(&scratch.full[place.stage]);
            first += COLUMNS * SIZE, second += COLUMNS * SIZE;
            place.advance();
        }
    }
}
