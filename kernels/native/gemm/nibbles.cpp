// Products with int8 weights of -8 .. 7, which are packed in four bits. Sums are exact in int32, so that the results have
// the bits of those with plain int8 weights.
//
//   linear_int8_nibbles, linear_swiglu_int8_nibbles, linear_argmax_int8_nibbles, argmax_of_units_int8_nibbles,
//   linear_experts_int8_nibbles, linear_swiglu_experts_int8_nibbles     as with the suffix _int8 in linear.cpp, experts.h
//   pack_nibbles    p: dense [T, K], packed, failed [1] int32, which is not set     n: T, K, row of the first
//   unpack_nibbles  p: packed, dense [T, K], row numbers [T] int64                  n: T, K
//
// Packed: [N / 16] panels of [K / 8] lines of 64 bytes; K is a multiple of 8. A line has 32 bits of each column: bits 0 to
// 3 of byte i are number i of the line, bits 4 to 7 number 4 + i. They are stored plus 8.
#include <algorithm>

#include "gemm/epilogue.h"
#include "gemm/experts.h"
#include "gemm/int4.h"

namespace npuserve {
namespace NPUSERVE_ISA {

constexpr int64_t LINE_BYTES = 64, LINE_WORDS = LINE_NUMBERS / DotInt8::PER_WORD;
constexpr int CODE_OFFSET = 8;

// Part i of word HALF of a line, as a panel of plain int8 weights has it.
template <int HALF>
INLINE ivec word_of_line(const char *line, int i) {
    typedef int8_t bytes __attribute__((vector_size(WIDTH * 4)));
    ivec codes = (ivec)((uvec)load_words(line, i) >> (4 * HALF)) & 0x0F0F0F0F;
    return (ivec)((bytes)codes + int8_t(DotInt8::W_OFFSET - CODE_OFFSET));
}

INLINE void expand_lines(const char *line, int64_t words, char *out) {
    for (int64_t w = 0; w < words; w += LINE_WORDS, line += LINE_BYTES, out += LINE_WORDS * PANEL_WORD_BYTES) EACH(i) {
        *reinterpret_cast<ivec_u *>(out + i * WIDTH * 4) = word_of_line<0>(line, i);
        *reinterpret_cast<ivec_u *>(out + PANEL_WORD_BYTES + i * WIDTH * 4) = word_of_line<1>(line, i);
    }
}

// Tile of packed panels that are multiplied by no other rows: each line becomes words in registers. next as in OnceTile.
struct NibblesOnceTile : Tile<DotInt8> {
    const char *const *next;

    static constexpr int64_t X_BYTES = Steps<DotInt8>::X_BYTES;

    template <int R, int P>
    __attribute__((noinline)) void run() const {
        I acc[R][P];
        start(acc);
        Lines<P> lines(panels, next, words / LINE_WORDS * LINE_BYTES);
        for (int64_t k = 0; k < words; k += LINE_WORDS) {
            lines.fetch();
            word<0>(acc, x + k * X_BYTES, lines.at);
            word<1>(acc, x + (k + 1) * X_BYTES, lines.at);
            lines.skip(LINE_BYTES);
        }
        store(acc);
    }

  private:
    template <int HALF, int R, int P>
    INLINE void word(I (&acc)[R][P], const char *from, const char *const (&w)[P]) const {
        ivec words_of_panels[P][PARTS];
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++)
            EACH(i) words_of_panels[p][i] = word_of_line<HALF>(w[p], i);
        const char *at[P];
        for (int p = 0; p < P; p++) at[p] = reinterpret_cast<const char *>(words_of_panels[p]);
        tile_step<DotInt8>(acc, from, x_stride, at);
    }
};

// Packed panels; the interface is described at Plain (product.h).
struct Nibbles {
    typedef DotInt8 Dot;
    static constexpr bool EXPANDS = true, TILES = true;
    explicit Nibbles(const Op &) {}
    static INLINE NibblesOnceTile once(const Tile<Dot> &tile, const char *const *next) { return {{tile}, next}; }
    template <class TileDot, bool>
    static INLINE BlockTile<TileDot> in_block(const Tile<TileDot> &tile, const SpreadPrefetch &ahead) {
        return {tile, ahead};
    }
    static int64_t expanded_bytes(int64_t words) { return words * PANEL_WORD_BYTES; }
    static bool expands(int64_t) { return true; }
    static bool prefers_tall_tiles(int64_t) { return false; }
    // Expanded panels stay in the second-level cache.
    static int64_t block(int64_t, int64_t words) {
        constexpr int64_t MOST = 1024;
        return ceil_div(words, ceil_div(words, MOST) * LINE_WORDS) * LINE_WORDS;
    }
    static int64_t panel_bytes(int64_t k) { return k / LINE_NUMBERS * LINE_BYTES; }
    static INLINE const char *at(const char *panel, int64_t first) { return panel + first / LINE_WORDS * LINE_BYTES; }
    static INLINE int64_t bytes(int64_t words) { return words / LINE_WORDS * LINE_BYTES; }
    static INLINE void expand(const char *block, int64_t words, char *out) { expand_lines(block, words, out); }
};

#if defined(__AMX_TILE__)
template <>
struct StepsOf<Nibbles> {
    static constexpr bool EXPANDS = true;
    static INLINE void expand_step(const char *panel, int64_t step, int64_t words, char *to) {
        constexpr int64_t STEP_BYTES = TILE_WORDS / LINE_WORDS * LINE_BYTES, AHEAD = 2048;
        const char *line = panel + step * STEP_BYTES;
        int64_t count = std::min(TILE_WORDS, words - step * TILE_WORDS);
        for (int64_t i = 0; i < STEP_BYTES; i += LINE_BYTES) __builtin_prefetch(line + AHEAD + i, 0, 2);
        expand_lines(line, count, to);
        if (count < TILE_WORDS) std::memset(to + count * PANEL_WORD_BYTES, 0, size_t((TILE_WORDS - count) * PANEL_WORD_BYTES));
    }
};
#endif

extern template void with_tile(int, int, const BlockTile<DotInt8> &);  // linear.cpp compiles it

template <class D>
struct NibblesInt8s : Int8s<D> {
    typedef Nibbles Panels;
    using Int8s<D>::Int8s;
};

struct PackNibbles {
    static int64_t units(const Call &call) { return ceil_div<int64_t>(call.rows + LANES, LANES); }
    // A unit is a panel; the source may fill any of its rows.
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        int64_t k = op.n[1], first = op.n[2], panel = first / LANES + unit;
        int64_t begin = std::max(first, panel * LANES), end = std::min(first + call.rows, (panel + 1) * LANES);
        uint8_t *out = op.at<uint8_t>(1) + panel * Nibbles::panel_bytes(k);
        for (int64_t r = begin; r < end; r++) {
            const int8_t *in = op.at<int8_t>(0) + (r - first) * k;
            uint8_t *column = out + r % LANES * 4;
            for (int64_t i = 0; i < k; i += LINE_NUMBERS, in += LINE_NUMBERS, column += LINE_BYTES)
                for (int b = 0; b < 4; b++)
                    column[b] = uint8_t(((in[b] + CODE_OFFSET) & 15) | ((in[4 + b] + CODE_OFFSET) & 15) << 4);
        }
    }
};

struct UnpackNibbles {
    static constexpr int64_t ROWS = 8;
    static int64_t units(const Call &call) { return ceil_div<int64_t>(call.rows, ROWS); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        int64_t k = op.n[1];
        for (int64_t i = unit * ROWS; i < std::min(call.rows, (unit + 1) * ROWS); i++) {
            int64_t row = op.at<int64_t>(2)[i];
            const uint8_t *column = op.at<uint8_t>(0) + row / LANES * Nibbles::panel_bytes(k) + row % LANES * 4;
            int8_t *out = op.at<int8_t>(1) + i * k;
            for (int64_t j = 0; j < k; j += LINE_NUMBERS, out += LINE_NUMBERS, column += LINE_BYTES)
                for (int b = 0; b < 4; b++) {
                    out[b] = int8_t((column[b] & 15) - CODE_OFFSET);
                    out[4 + b] = int8_t((column[b] >> 4) - CODE_OFFSET);
                }
        }
    }
};

#define OF_NIBBLES(name, type)                                            \
    KERNEL(name "_int8_nibbles/float32", type<NibblesInt8s<Float32>>), \
        KERNEL(name "_int8_nibbles/bfloat16", type<NibblesInt8s<BFloat16>>)

extern const Kernel NIBBLES[] = {
    OF_NIBBLES("linear", Linear),
    OF_NIBBLES("linear_swiglu", LinearSwiglu),
    OF_NIBBLES("linear_argmax", LinearArgmax),
    OF_NIBBLES("argmax_of_units", ArgmaxOfUnits),
    OF_NIBBLES("linear_experts", LinearExperts),
    OF_NIBBLES("linear_swiglu_experts", LinearSwigluExperts),
    KERNEL("pack_nibbles/int8", PackNibbles),
    KERNEL("unpack_nibbles/int8", UnpackNibbles),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
