// All decoder layers of a decode step of a few rows, in one launch.
//
// A step of few rows takes as long as it takes to read the weights, if memory is never idle. One block of threads stays on
// each multiprocessor. Four of its warps copy the block's tiles of all weights of all layers, one after the other, into a
// ring of stages in shared memory. They run ahead of the other warps, so weights arrive while those wait for other blocks.
// The other warps multiply, and compute attention in between. Blocks meet at a counter after each operation. Source of the
// method: "Look Ma, No Bubbles! Designing a Low-Latency Megakernel for Llama-1B" (Hazy Research, 2025).
//
// Each warp multiplies its share of the columns of a stage, and the warps' sums are added in one order: results do not
// depend on which block is faster. Code that a layer executes once is fetched anew in each layer unless all of it fits the
// instruction cache: products share one loop, and only what needs registers is unrolled.
#include "attention.h"
#include "products.h"
#include "weights.h"

DEVICE void run(WarpState& own) {
    const Step& step = own.step;
#pragma unroll 1
    for (int index = 0; index < LAYERS; index++) {
        const Layer& layer = step.layers[index];
        u32* counters = step.counters + i64(index) * COUNTERS;
#pragma unroll 1
        for (int product = QKV; product <= DOWN; product++) {
            const u16* gamma = product == QKV ? layer.input_norm : product == GATE_UP ? layer.post_norm : nullptr;
            if (product == OUTPUT) {
                attention(own, layer, counters);
                own.finished(counters + AFTER_ATTENTION);
            }
            const u32* before = product == QKV      ? counters - COUNTERS + AFTER_DOWN
                              : product == OUTPUT   ? counters + AFTER_ATTENTION
                              : product == GATE_UP ? counters + AFTER_OUTPUT : counters + AFTER_GATE_UP;
            const Sizes sizes(product);
            const u16* from = product == OUTPUT ? step.attended : product == DOWN ? step.gated : step.residual;
            Vectors loaded;
            Scales scales;
            if (gamma != nullptr) {
                Vectors gammas;   // they do not depend on other blocks
                gammas.load(own, gamma, sizes, 0, 0);
                if (product != QKV || index != 0) own.wait(before);
                loaded.load(own, from, sizes, 0, sizes.inputs);
                scales = normalize(own, loaded, gammas);
            } else {
                own.wait(before);
                loaded.load(own, from, sizes, 0, sizes.inputs);
                scales = scales_of(own, counters + LARGEST + (product == DOWN) * ROWS);
            }
            compute(own, product, sizes, index, counters, from, loaded, scales);
            own.finished(counters + (product == QKV      ? AFTER_QKV
                                   : product == OUTPUT   ? AFTER_OUTPUT
                                   : product == GATE_UP ? AFTER_GATE_UP : AFTER_DOWN));
        }
    }
}

// Two groups of four warps multiply, with most of the registers. The third group copies.
extern "C" __global__ void __launch_bounds__(THREADS + 32 * COPYING, 1) decoder_layers(const __grid_constant__ Step step) {
    Scratch& scratch = *reinterpret_cast<Scratch*>(shared_memory());
    u8* ring = shared_memory() + RING;
    if (thread() == 0)
        for (int i = 0; i < STAGES; i++)
            barrier_init(&scratch.full[i], 32 * COPYING), barrier_init(&scratch.empty[i], WARPS);
    sync_block();
    if (thread() < THREADS) {
        take_registers<232>();
        WarpState own{step, scratch, ring, {0, 0}};
        run(own);
    } else {
        leave_registers<40>();
        copy_weights(step, scratch, ring);
    }
}
