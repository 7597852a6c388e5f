// Sizes, arguments and memory of decoder_layers.cu.
//
// Constants of a compilation (see launch_decoder_layers.py):
// ROWS: rows of the step: 1 or 2. BLOCKS: blocks of the grid. SHARED: bytes of shared memory of a block.
// LAYERS, HIDDEN, INTERMEDIATE, Q_HEADS, KV_HEADS, DIM: of the model. PAGE: tokens of a block of the KV cache.
// COLUMNS: columns of a stage. FORM: 0 for weights in bfloat16, 1 for int8, 2 for float8 (e4m3).
#pragma once
#include "device.h"

constexpr int WARPS = 8, COPYING = 4;   // warps that multiply, and that copy
constexpr int THREADS = 32 * WARPS;     // that multiply; they come first
constexpr bool BYTES = FORM != 0;
constexpr int SIZE = BYTES ? 1 : 2;

// Weights. A stage is what is copied at a time: COLUMNS columns of two tiles.
constexpr int TILE = 8;                      // rows of a weight
constexpr int PITCH = COLUMNS * SIZE + 64;   // bytes between the rows of a stage: neighbours use other banks
constexpr int STAGE = 2 * TILE * PITCH;
constexpr int WIDTH = COLUMNS / WARPS;       // columns of a warp
constexpr int PIECES = WIDTH * SIZE / 64;    // pieces of a warp in a stage: 64 bytes of each row, 16 of each lane
constexpr int HELD = FORM == 2 ? 2 : 1;      // vectors in which a lane holds its inputs of a piece; float8 as float16
constexpr int SPAN = (BYTES ? 10 : 20) / PIECES;   // stages of a tile whose inputs registers hold
constexpr int INPUTS = SPAN * PIECES;        // pieces of these
constexpr int KEPT = 8;                      // tiles whose sums are kept until they are added

// Products of a layer, and the operations after which blocks wait for each other.
enum Product { QKV, OUTPUT, GATE_UP, DOWN };
enum Operation { AFTER_QKV, AFTER_ATTENTION, AFTER_OUTPUT, AFTER_GATE_UP, AFTER_DOWN, OPERATIONS };
constexpr int Q_SIZE = Q_HEADS * DIM, KV_SIZE = KV_HEADS * DIM, QKV_SIZE = Q_SIZE + 2 * KV_SIZE;

// Sizes of a product. They are no template arguments: code for each product would not fit the instruction cache.
struct Sizes {
    int outputs, inputs, tiles, stages, span, before, gated;
    DEVICE Sizes(int p)
        : outputs(p == QKV ? QKV_SIZE : p == GATE_UP ? INTERMEDIATE : HIDDEN),
          inputs(p == OUTPUT ? Q_SIZE : p == DOWN ? INTERMEDIATE : HIDDEN),
          tiles(outputs / TILE),
          stages(inputs / COLUMNS),   // of a tile
          span(p == OUTPUT ? even(Q_SIZE) : p == DOWN ? even(INTERMEDIATE) : even(HIDDEN)),   // of a part of K
          before(p == QKV ? 0 : p == OUTPUT ? QKV_SIZE / TILE : (QKV_SIZE + HIDDEN + (p == DOWN) * INTERMEDIATE) / TILE),
          gated(p == GATE_UP) {}      // 1: tiles are pairs, of gate and up
    static constexpr int ALL = (QKV_SIZE + 2 * HIDDEN + INTERMEDIATE) / TILE;   // outputs of a layer, in tiles
    // Cut the stages of a tile into as few parts as registers allow, of about the same size.
    static DEVICE constexpr int even(int inputs) {
        const int stages = inputs / COLUMNS, parts = (stages + SPAN - 1) / SPAN;
        return (stages + parts - 1) / parts;
    }
    DEVICE int batch() const { return KEPT >> gated; }   // outputs whose sums are kept, in tiles
    DEVICE bool has(int base, int tile) const { return base + (tile >> gated) * BLOCKS < tiles; }
    DEVICE int count(int begin) const { return span < stages - begin ? span : stages - begin; }
    // First tile of this block. Tiles of all products and layers are dealt out in turn, so that all blocks have as many.
    DEVICE int first(int layer) const { return (block() + BLOCKS - (layer * ALL + before) % BLOCKS) % BLOCKS; }
};

// Attention. A unit is a part of the context of a row, for some query heads of a KV head.
constexpr int GROUP = Q_HEADS / KV_HEADS;                // query heads of a KV head
constexpr int PASSES = (GROUP + 5) / 6;
constexpr int HEADS = (GROUP + PASSES - 1) / PASSES;     // query heads of a unit: each has a warp that prepares it
constexpr int UNITS = ROWS * KV_HEADS * PASSES;          // units of a context that is not split
constexpr int SPLIT = BLOCKS / UNITS > 1 ? BLOCKS / UNITS : 1;   // parts of a context
constexpr int OWN = 8, LANES = DIM / OWN;                // numbers of a head that a lane has, lanes of a head
constexpr int KEYS = 32 / LANES, STRIDE = KEYS * WARPS;  // keys that a warp, and a block, read side by side
constexpr int TOGETHER = 2;                              // keys of a lane between two maxima
static_assert(HEADS + 2 <= WARPS, "each warp prepares one head");

struct Layer {
    const u8* weight[4];          // of each product, [outputs, inputs]; gate's rows before up's
    const float* scale[4];        // [outputs] of weights in bytes
    const u16 *input_norm, *post_norm, *q_norm, *k_norm;   // bfloat16; the last two may be null
    u16 *keys, *values;           // [blocks, PAGE, KV_HEADS, DIM] bfloat16
};

struct Step {
    Layer layers[LAYERS];
    u16 *residual, *qkv, *attended, *gated;   // [ROWS, HIDDEN], QKV_SIZE, Q_SIZE, INTERMEDIATE; bfloat16
    float* partial;               // [UNITS * SPLIT, HEADS * (DIM + 4)]
    u32* counters;                // [LAYERS, COUNTERS], 0 before the launch
    const float* cos_sin;         // [positions, DIM]
    const i64 *positions, *slots; // [ROWS]
    const int *tables, *contexts; // [ROWS, table_stride], [ROWS]
    i64 table_stride;
    float eps, levels, scale;     // of norms, of quantization (see Scheme), of attention
};

// Counters of a layer: blocks that have finished each operation; largest magnitudes, as bits, of the inputs of `OUTPUT`
// and `DOWN` of each row; parts of attention that have arrived.
constexpr int LARGEST = OPERATIONS, ARRIVED = LARGEST + 2 * ROWS, COUNTERS = ARRIVED + UNITS;

union Number { float real; int whole; };
struct alignas(16) Heads {
    u16 queries[HEADS][DIM];              // bfloat16
    u16 fresh[2][DIM];                    // this token's key and value
    float sums[WARPS][HEADS][DIM];
    float weights[WARPS][HEADS][2];       // largest score and sum of the weights
};
constexpr int MOST_STAGES = 32;
struct Scratch {
    u64 full[MOST_STAGES], empty[MOST_STAGES];   // barriers of the stages
    float reduced[2][WARPS][ROWS];
    u32 last;
    union {
        struct {
            Number sums[KEPT][WARPS][ROWS][TILE];
            u8 inputs[WARPS][ROWS * INPUTS * 64];   // see `hold`
        };
        Heads heads;
    };
};
constexpr int RING = (sizeof(Scratch) + 127) / 128 * 128;   // first byte of the ring in shared memory
constexpr int STAGES = (SHARED - RING) / STAGE < MOST_STAGES ? (SHARED - RING) / STAGE : MOST_STAGES;

// Stages of two tiles that are copied at a time. With more bytes, some blocks get less of the memory's rate than others.
// While blocks wait for each other the ring is filled, and less than the memory's rate keeps their signals fast.
DEVICE constexpr int stages_of(int bytes) { return bytes / (2 * TILE * COLUMNS * SIZE); }
constexpr int IN_FLIGHT = stages_of(48 << 10), FILLING = stages_of(32 << 10), FILLING_IN_ATTENTION = stages_of(16 << 10);
static_assert(ROWS <= 2 && HIDDEN <= SPAN * COLUMNS, "registers hold the inputs of a norm");
static_assert(STAGES > 2 * IN_FLIGHT && FILLING_IN_ATTENTION > 0, "SHARED is too small");

// Place in the ring. All warps pass over the stages in the same order.
struct Place {
    int stage;
    u32 parity;
    DEVICE void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    DEVICE Place earlier(int stages) const {
        return stage >= stages ? Place{stage - stages, parity} : Place{stage - stages + STAGES, parity ^ 1};
    }
};

// State of a warp that multiplies.
struct WarpState {
    const Step& step;
    Scratch& scratch;
    u8* ring;
    Place place;

    DEVICE int lane() const { return thread() % 32; }
    DEVICE int warp() const { return thread() / 32; }
    DEVICE static void sync() { sync_first<THREADS>(); }

    // Signal that this block has finished an operation.
    DEVICE void finished(u32* counter) const {
        sync();
        if (thread() == 0) signal(counter);
    }
    // Wait until all blocks have.
    DEVICE void wait(const u32* counter) const {
        if (thread() == 0) wait_until([&] { return load_acquire(counter) >= BLOCKS; });
        sync();
    }
};

DEVICE float low(u32 pair) { return bits(pair << 16); }
DEVICE float high(u32 pair) { return bits(pair & 0xFFFF0000); }
DEVICE float magnitude(float x) { return bits(bits(x) & 0x7FFFFFFF); }
DEVICE float larger(float a, float b) { return a > b ? a : b; }
DEVICE u32 larger(u32 a, u32 b) { return a > b ? a : b; }
DEVICE u32 word(const uint4& four, int i) { return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w; }
DEVICE float sum_of_warp(float x) {
    for (int lanes = 16; lanes; lanes /= 2) x += shuffle_xor(x, lanes);
    return x;
}
