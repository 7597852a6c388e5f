// Products with compact bfloat16 weights; see compact.h for their form.
//
//   linear_compact, linear_swiglu_compact, linear_argmax_compact, argmax_of_units_compact     as in linear.cpp
//   linear_experts_compact, linear_swiglu_experts_compact                                     as in experts.h
//   pack_compact    p: dense [T, K], packed, failed [1] int32: set to 1 if a block cannot be packed; that block is
//                      unchanged                                                    n: T, K, row of the first
//   unpack_compact  p: packed, dense [T, K], row numbers [T] int64                  n: T, K
#include "gemm/compact.h"
#include "gemm/epilogue.h"
#include "gemm/experts.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Product of a tile of packed panels. Two words at a time are unpacked in registers, if they fit there.
struct CompactTile : Tile<DotBFloat16> {
    typedef DotBFloat16 Dot;
    static constexpr int64_t X_BYTES = Steps<Dot>::X_BYTES;

    // True if two words fit the registers beside the accumulators.
    template <int R>
    static constexpr bool IN_REGISTERS = WIDTH == LANES || R <= 2;

    // Multiplies a block of each panel; from: its words of the first row of x. ahead, packed_ahead: what to prefetch
    // beside plain words (tile.h) and beside the lines of packed ones.
    template <int R, int P, class Ahead, class PackedAhead>
    INLINE void multiply(Dot::Acc (&acc)[R][P], const char *from, const char *const (&block)[P], int64_t count, Ahead &ahead,
                         PackedAhead &packed_ahead) const {
        uint32_t exceptions = 0;
        for (int p = 0; p < P; p++) exceptions |= header(block[p]).exceptions;
        if (!IN_REGISTERS<R> || __builtin_expect(exceptions != 0, 0)) {
            alignas(64) char own[P * BLOCK_WORDS * PANEL_WORD_BYTES];
            const char *w[P];
            for (int p = 0; p < P; p++) {
                char *to = own + p * BLOCK_WORDS * PANEL_WORD_BYTES;
                expand(block[p], count, to);
                w[p] = to;
            }
            tile<Dot, R, P>(acc, from, x_stride, w, count, ahead);
            return;
        }
        ivec table[P];
        for (int p = 0; p < P; p++) table[p] = spread_table(block[p]);
        for (int64_t at = sizeof(Header), k = 0; k < count; k += GROUP_WORDS, at += GROUP_BYTES) {
            packed_ahead(k, 0);
            pair<R, P, 0>(acc, from + k * X_BYTES, block, at, table);
            packed_ahead(k, 1);
            pair<R, P, 1>(acc, from + k * X_BYTES, block, at, table);
            packed_ahead(k, 2);
        }
    }

  private:
    template <int R, int P, int J>
    INLINE void pair(Dot::Acc (&acc)[R][P], const char *from, const char *const (&block)[P], int64_t at,
                     const ivec (&table)[P]) const {
        if constexpr (BY_PANELS) {
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) {
                ivec both[2][PARTS];
                EACH(i) expand_part<J>(block[p] + at, table[p], i, both[0][i], both[1][i]);
                _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)
                    panel_step<Dot>(acc, p, from + (2 * J + v) * X_BYTES, x_stride, both[v]);
            }
            return;
        }
        ivec word[2][P][PARTS];
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++)
            EACH(i) expand_part<J>(block[p] + at, table[p], i, word[0][p][i], word[1][p][i]);
        _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)
            tile_step<Dot>(acc, from + (2 * J + v) * X_BYTES, x_stride, word[v]);
    }
};

// Prefetch of the lines of the next blocks beside the lines of other blocks, unless FETCH is false.
template <int P, bool FETCH>
struct LinePrefetch {
    const char *const (&next)[P];
    INLINE void operator()(int64_t k, int line) {
        if (!FETCH) return;
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) {
            if (line == 0 && k == 0) __builtin_prefetch(next[p], 0, 2);
            __builtin_prefetch(next[p] + sizeof(Header) + k / GROUP_WORDS * GROUP_BYTES + line * 64, 0, 2);
        }
    }
};

// Calls a SpreadPrefetch before every EVERY-th word of packed blocks.
struct SpreadLinePrefetch {
    SpreadPrefetch &fetch;
    INLINE void operator()(int64_t k, int line) {
        if (line == 0 && k % SpreadPrefetch::EVERY == 0) fetch(k);
    }
};

// Tile of packed panels that are multiplied by no other rows; next as in OnceTile.
struct CompactOnceTile : CompactTile {
    const char *const *next;

    template <int R, int P>
    __attribute__((noinline)) void run() const {
        Dot::Acc acc[R][P];
        start(acc);
        const char *block[P], *soon[P];
        for (int p = 0; p < P; p++) block[p] = panels[p];
        for (int64_t done = 0; done < words; done += BLOCK_WORDS) {
            int64_t count = std::min(BLOCK_WORDS, words - done);
            for (int p = 0; p < P; p++) soon[p] = done + count < words ? block[p] + BLOCK_BYTES : next[p];
            RunPrefetch<P> ahead = {{}, BLOCK_BYTES / BLOCK_WORDS};
            std::copy(soon, soon + P, ahead.at);
            LinePrefetch<P, OnceTile<Dot>::FETCH<R>> packed_ahead = {soon};
            multiply<R, P>(acc, x + done * X_BYTES, block, count, ahead, packed_ahead);
            for (int p = 0; p < P; p++) block[p] += BLOCK_BYTES;
        }
        store(acc);
    }
};

// Tile of packed panels in the cache; ahead as in BlockTile.
struct CompactBlockTile : CompactTile {
    SpreadPrefetch ahead;

    template <int R, int P>
    __attribute__((noinline)) void run() const {
        Dot::Acc acc[R][P];
        start(acc);
        SpreadPrefetch fetch = ahead;
        SpreadLinePrefetch lines = {fetch};
        fetch.start(words);
        const char *block[P];
        for (int p = 0; p < P; p++) block[p] = panels[p];
        for (int64_t done = 0; done < words; done += BLOCK_WORDS) {
            multiply<R, P>(acc, x + done * X_BYTES, block, std::min(BLOCK_WORDS, words - done), fetch, lines);
            for (int p = 0; p < P; p++) block[p] += BLOCK_BYTES;
        }
        store(acc);
    }
};

// Panels of compact weights; the interface is described at Plain (product.h).
struct Compact {
    typedef DotBFloat16 Dot;
    // True if each tile of up to MAX_UNPACKED_ROWS rows unpacks its panels in registers. More rows are at least four
    // tiles, and expanding the panels once takes less time.
    static constexpr bool UNPACKS = BF16_DOT && CompactTile::IN_REGISTERS<ONCE_ROWS>;
    static constexpr int64_t MAX_UNPACKED_ROWS = UNPACKS ? 3 * ONCE_ROWS : 0;
    static constexpr bool EXPANDS = !UNPACKS, TILES = true;
    explicit Compact(const Op &) {}
    static INLINE CompactOnceTile once(const Tile<Dot> &tile, const char *const *next) { return {{tile}, next}; }
    template <class TileDot, bool EXPANDED>
    static INLINE auto in_block(const Tile<TileDot> &tile, const SpreadPrefetch &ahead) {
        if constexpr (EXPANDED)
            return BlockTile<TileDot>{tile, ahead};
        else
            return CompactBlockTile{{tile}, ahead};
    }
    static int64_t expanded_bytes(int64_t words) { return words * Inner<Dot>::WORDS * PANEL_WORD_BYTES; }
    static bool unpacks(int64_t rows) { return rows <= MAX_UNPACKED_ROWS; }
    static bool prefers_tall_tiles(int64_t rows) { return unpacks(rows); }
    static bool expands(int64_t rows) { return !unpacks(rows); }
    // Many words at once, since every block loads and stores all accumulators. Expanded panels stay in the second-level
    // cache.
    static int64_t block(int64_t rows, int64_t words) {
        if (unpacks(rows)) return words;
        constexpr int64_t MOST = Inner<Dot>::WORDS > 1 ? BLOCK_WORDS : 1536;
        return ceil_div(words, ceil_div(words, MOST) * BLOCK_WORDS) * BLOCK_WORDS;
    }
    static int64_t panel_bytes(int64_t k) { return compact_panel_bytes(k); }
    static INLINE const char *at(const char *panel, int64_t first) { return panel + first / BLOCK_WORDS * BLOCK_BYTES; }
    static INLINE int64_t bytes(int64_t words) { return compact_bytes(words); }
    static INLINE void expand(const char *block, int64_t words, char *out) {
        constexpr int64_t WORD_BYTES = Inner<Dot>::WORDS * PANEL_WORD_BYTES;
        for (int64_t done = 0; done < words; done += BLOCK_WORDS, block += BLOCK_BYTES) {
            int64_t n = std::min(BLOCK_WORDS, words - done);
            if constexpr (Inner<Dot>::WORDS > 1)
                expand_wide(block, n, out + done * WORD_BYTES);
            else
                NPUSERVE_ISA::expand(block, n, out + done * WORD_BYTES);
        }
    }
};

#if !defined(NPUSERVE_BORROWED)  // linear.cpp compiles it
extern template void with_tile(int, int, const BlockTile<Inner<DotBFloat16>::type> &);
#endif

struct CompactFloats : Floats<BFloat16> {
    typedef Compact Panels;
    using Floats<BFloat16>::Floats;
};

struct PackCompact {
    static int64_t units(const Call &call) { return ceil_div<int64_t>(call.rows + LANES, LANES); }
    // A unit is a panel; the source may fill any of its rows.
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        int64_t k = op.n[1], first = op.n[2], words = k / 2, panel = first / LANES + unit;
        int64_t begin = std::max(first, panel * LANES), end = std::min(first + call.rows, (panel + 1) * LANES);
        if (begin >= end) return;
        char *block = op.at<char>(1) + panel * compact_panel_bytes(k);
        alignas(64) char plain[BLOCK_WORDS * PANEL_WORD_BYTES];
        for (int64_t w = 0; w < words; w += BLOCK_WORDS, block += BLOCK_BYTES) {
            int64_t n = std::min(BLOCK_WORDS, words - w);
            if (end - begin < LANES) expand(block, n, plain);
            for (int64_t r = begin; r < end; r++) {
                const char *in = op.at<char>(0) + ((r - first) * k + w * 2) * 2;
                for (int64_t i = 0; i < n; i++) std::memcpy(plain + i * PANEL_WORD_BYTES + r % LANES * 4, in + i * 4, 4);
            }
            if (!compress(plain, n, block)) __atomic_store_n(op.at<int32_t>(2), 1, __ATOMIC_RELAXED);
        }
    }
};

struct UnpackCompact {
    static constexpr int64_t ROWS = 8;
    static int64_t units(const Call &call) { return ceil_div<int64_t>(call.rows, ROWS); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        int64_t k = op.n[1], words = k / 2;
        for (int64_t i = unit * ROWS; i < std::min(call.rows, (unit + 1) * ROWS); i++) {
            int64_t row = op.at<int64_t>(2)[i];
            const char *block = op.at<char>(0) + row / LANES * compact_panel_bytes(k);
            char *out = op.at<char>(1) + i * k * 2;
            for (int64_t w = 0; w < words; w += BLOCK_WORDS, block += BLOCK_BYTES, out += BLOCK_WORDS * 4)
                column(block, std::min(BLOCK_WORDS, words - w), int(row % LANES) * 2, out);
        }
    }

    // Writes numbers `at` and at + 1 of each of the block's words.
    static void column(const char *block, int64_t words, int at, char *out) {
        const Header &head = header(block);
        const char *group = block + sizeof(Header);
        int index = at / 8 * 16 + at % 8;  // position of the first word in the line of two words
        for (int64_t w = 0; w < words; w += GROUP_WORDS, group += GROUP_BYTES)
            for (int i = 0; i < 2 * GROUP_WORDS; i++) {
                int j = i / 4, from = index + i / 2 % 2 * 8 + i % 2;
                out[w * 4 + i * 2] = group[64 + j * 64 + from];
                out[w * 4 + i * 2 + 1] = char(head.table[uint8_t(group[from]) >> 4 * j & 15]);
            }
        for (uint32_t e = 0; e < head.exceptions; e++) {
            int within = head.exception[e].index % 32 - at;
            if (within == 0 || within == 1)
                out[head.exception[e].index / 32 * 4 + within * 2 + 1] = char(head.exception[e].upper);
        }
    }
};

extern const Kernel COMPACT[] = {
    KERNEL("linear_compact/bfloat16", Linear<CompactFloats>),
    KERNEL("linear_swiglu_compact/bfloat16", LinearSwiglu<CompactFloats>),
    KERNEL("linear_argmax_compact/bfloat16", LinearArgmax<CompactFloats>),
    KERNEL("argmax_of_units_compact/bfloat16", ArgmaxOfUnits<CompactFloats>),
    KERNEL("linear_experts_compact/bfloat16", LinearExperts<CompactFloats>),
    KERNEL("linear_swiglu_experts_compact/bfloat16", LinearSwigluExperts<CompactFloats>),
    KERNEL("pack_compact/bfloat16", PackCompact),
    KERNEL("unpack_compact/bfloat16", UnpackCompact),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
