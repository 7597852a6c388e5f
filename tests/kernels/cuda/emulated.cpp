// The kernel of kernels/cuda/decoder_layers.cu as a shared library for a CPU.
#include "emulated.h"
#include "decoder_layers.cu"

// Return 0, or 1 if the launch would never end.
extern "C" int launch(const Step* step) {
    return !emulated::launch(BLOCKS, THREADS + 32 * COPYING, SHARED, [&] { decoder_layers(*step); });
}
extern "C" int counters() { return COUNTERS; }
extern "C" int partial() { return UNITS * SPLIT * HEADS * (DIM + 4); }
extern "C" int threads() { return THREADS + 32 * COPYING; }
extern "C" int size() { return sizeof(Step); }
