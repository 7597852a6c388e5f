// Products with bfloat16 weights that are packed losslessly in 12.25 bits a number.
//
// The upper byte of a number, its sign and seven bits of its exponent, has few values among neighbours. The lower byte
// is stored unchanged. The upper byte is stored as a code of four bits, an index into a table of 16. The exponents of
// trained weights have two to three bits of information. DFloat11 (arXiv:2504.11651) also relies on this, with codes of
// variable length. K is a multiple of 8.
//
// Packed: [N / 16] panels of [K / 128] blocks, of which the last may be shorter. A block is 64 bytes of Header, then
// for every 4 words of 16 columns (tile.h) 64 bytes of codes and twice 64 lower bytes. Position of words 2 j, 2 j + 1:
//
//   lower bytes     line j; the first word's 8 even bytes of quarter q at 16 q, the second word's at 16 q + 8
//   codes           bits 4 j to 4 j + 3 of the bytes at the same positions
//
//   linear_compact, linear_swiglu_compact, linear_argmax_compact     as in linear.cpp
//   pack_compact    p: dense [T, K], packed, failed [1] int32: set to 1 if a block cannot be packed; that block is
//                      unchanged                                                    n: T, K, row of the first
//   unpack_compact  p: packed, dense [T, K], row numbers [T] int64                  n: T, K
#include <algorithm>

#include "gemm/epilogue.h"

namespace npuserve {
namespace NPUSERVE_ISA {

constexpr int64_t GROUP_WORDS = 4, GROUP_BYTES = 3 * 64;
constexpr int64_t BLOCK_WORDS = COMPACT_BLOCK / 2, PANEL_WORD_BYTES = 64;

// Header of a block. Upper bytes missing from the table are coded as its first entry and listed as exceptions.
struct Header {
    static constexpr int MAX_EXCEPTIONS = 11;
    uint8_t table[16];
    uint32_t exceptions;
    struct {
        uint16_t index;  // of the number among the block's words
        uint8_t upper, unused;
    } exception[MAX_EXCEPTIONS];
};
static_assert(sizeof(Header) == COMPACT_HEADER_BYTES, "one cache line");
constexpr int64_t BLOCK_BYTES = sizeof(Header) + BLOCK_WORDS / GROUP_WORDS * GROUP_BYTES;

INLINE const Header &header(const char *block) { return *reinterpret_cast<const Header *>(block); }

INLINE int64_t compact_bytes(int64_t words) {
    return ceil_div(words, BLOCK_WORDS) * int64_t(sizeof(Header)) + words / GROUP_WORDS * GROUP_BYTES;
}
int64_t compact_panel_bytes(int64_t k) { return compact_bytes(k / 2); }

// Repeats a table in every 16 bytes of a register.
INLINE ivec spread_table(const char *table) {
    ivec t;
    for (int i = 0; i < WIDTH / 4; i++) std::memcpy(reinterpret_cast<char *>(&t) + i * 16, table, 16);
    return t;
}

// Expands part i of words 2 j and 2 j + 1 of a group.
template <int J>
INLINE void expand_part(const char *group, ivec table, int i, ivec &first, ivec &second) {
    typedef uint16_t pairs __attribute__((vector_size(WIDTH * 4)));
    ivec codes = load_words(group, i), lower = load_words(group + 64 + J * 64, i);
    codes = (ivec)((pairs)codes >> (4 * J)) & 0x0F0F0F0F;
#if defined(__AVX512BW__)
    __m512i upper = _mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
    first = (ivec)_mm512_unpacklo_epi8((__m512i)lower, upper);
    second = (ivec)_mm512_unpackhi_epi8((__m512i)lower, upper);
#elif defined(__AVX2__)
    __m256i upper = _mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
    first = (ivec)_mm256_unpacklo_epi8((__m256i)lower, upper);
    second = (ivec)_mm256_unpackhi_epi8((__m256i)lower, upper);
#elif defined(__aarch64__)
    uint8x16_t upper = vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
    first = (ivec)vzip1q_u8((uint8x16_t)lower, upper);
    second = (ivec)vzip2q_u8((uint8x16_t)lower, upper);
#else
    uint8_t t[16], c[16], l[16], out[32];
    std::memcpy(t, &table, 16), std::memcpy(c, &codes, 16), std::memcpy(l, &lower, 16);
    for (int n = 0; n < 16; n++) out[n * 2] = l[n], out[n * 2 + 1] = t[c[n]];
    std::memcpy(&first, out, 16), std::memcpy(&second, out + 16, 16);
#endif
}

// Calls put(word, part, numbers) for the words of groups, ignoring exceptions.
template <class Put>
INLINE void each_group(const char *group, ivec table, int64_t words, const Put &put) {
    for (int64_t w = 0; w < words; w += GROUP_WORDS, group += GROUP_BYTES)
        EACH(i) {
            ivec first, second;
            expand_part<0>(group, table, i, first, second);
            put(w, i, first), put(w + 1, i, second);
            expand_part<1>(group, table, i, first, second);
            put(w + 2, i, first), put(w + 3, i, second);
        }
}

// Calls put(word, part, numbers) for the words of a block, ignoring exceptions.
template <class Put>
INLINE void each_word(const char *block, int64_t words, const Put &put) {
    each_group(block + sizeof(Header), spread_table(block), words, put);
}

// Unpacks the words of a block to plain words.
void expand(const char *block, int64_t words, char *out) {
    each_word(block, words, [&](int64_t word, int i, ivec numbers) __attribute__((always_inline)) {
        *reinterpret_cast<ivec_u *>(out + word * PANEL_WORD_BYTES + i * WIDTH * 4) = numbers;
    });
    const Header &head = header(block);
    for (uint32_t e = 0; e < head.exceptions; e++) out[head.exception[e].index * 2 + 1] = char(head.exception[e].upper);
}

// Unpacks the words of a block to float32, the even number of each word before the odd one.
void expand_wide(const char *block, int64_t words, char *out) {
    each_word(block, words, [&](int64_t word, int i, ivec numbers) __attribute__((always_inline)) {
        char *to = out + word * 2 * PANEL_WORD_BYTES + i * WIDTH * 4;
        *reinterpret_cast<ivec_u *>(to) = numbers << 16;
        *reinterpret_cast<ivec_u *>(to + PANEL_WORD_BYTES) = numbers & int32_t(0xFFFF0000u);
    });
    const Header &head = header(block);
    for (uint32_t e = 0; e < head.exceptions; e++) {
        int index = head.exception[e].index, number = (index / 32 * 2 + index % 2) * LANES + index % 32 / 2;
        out[number * 4 + 3] = char(head.exception[e].upper);
    }
}

// Packs `words` words of plain panels as a block. Returns false and writes nothing if too many upper bytes are rare.
bool compress(const char *plain, int64_t words, char *block) {
    constexpr int HISTOGRAMS = 4;  // separate counters, since neighbours are alike and an increment would wait for the one before
    uint32_t counts[HISTOGRAMS][256] = {}, times[256];
    for (int64_t i = 0; i < words * 32; i += HISTOGRAMS)
        for (int h = 0; h < HISTOGRAMS; h++) counts[h][uint8_t(plain[(i + h) * 2 + 1])]++;
    uint8_t values[256], code[256] = {};
    int different = 0;
    for (int v = 0; v < 256; v++) {
        times[v] = 0;
        for (int h = 0; h < HISTOGRAMS; h++) times[v] += counts[h][v];
        if (times[v]) values[different++] = uint8_t(v);
    }
    std::stable_sort(values, values + different, [&](uint8_t a, uint8_t b) { return times[a] > times[b]; });
    uint32_t rare = 0;
    for (int i = 16; i < different; i++) rare += times[values[i]];
    if (rare > Header::MAX_EXCEPTIONS) return false;

    Header head = {};
    for (int i = 0; i < std::min(different, 16); i++) head.table[i] = values[i], code[values[i]] = uint8_t(i);
    char *group = block + sizeof(Header);
    for (int64_t w = 0; w < words; w += GROUP_WORDS, group += GROUP_BYTES) {
        const char *word = plain + w * PANEL_WORD_BYTES;
        uint8_t codes[2][64], lower[2][64];
        for (int j = 0; j < 2; j++)
            for (int q = 0; q < 4; q++)
                for (int v = 0; v < 2; v++)
                    for (int i = 0; i < 8; i++) {
                        uint16_t number;
                        std::memcpy(&number, word + (2 * j + v) * PANEL_WORD_BYTES + q * 16 + i * 2, 2);
                        lower[j][q * 16 + v * 8 + i] = uint8_t(number);
                        codes[j][q * 16 + v * 8 + i] = code[number >> 8];
                    }
        for (int index = 0; index < 64; index++) codes[0][index] = uint8_t(codes[0][index] | codes[1][index] << 4);
        std::memcpy(group, codes[0], 64);
        std::memcpy(group + 64, lower, 128);
    }
    if (different > 16)
        for (int64_t i = 0; i < words * 32; i++) {
            uint8_t upper = uint8_t(plain[i * 2 + 1]);
            if (head.table[code[upper]] != upper) head.exception[head.exceptions++] = {uint16_t(i), upper, 0};
        }
    std::memcpy(block, &head, sizeof head);
    return true;
}

#if defined(__AMX_TILE__)
struct Compact;
template <>
struct StepsOf<Compact> {
    static constexpr bool EXPANDS = true;
    static INLINE void expand_step(const char *panel, int64_t step, int64_t words, char *to) {
        constexpr int64_t STEPS = BLOCK_WORDS / TILE_WORDS, AHEAD = 2048;
        const char *block = panel + step / STEPS * BLOCK_BYTES;
        int64_t within = step % STEPS, count = std::min(TILE_WORDS, words - step * TILE_WORDS);
        const char *group = block + sizeof(Header) + within * (TILE_WORDS / GROUP_WORDS) * GROUP_BYTES;
        for (int64_t line = 0; line < 13; line++) __builtin_prefetch(group + AHEAD + line * 64, 0, 2);
        each_group(group, spread_table(block), count, [&](int64_t word, int i, ivec numbers) __attribute__((always_inline)) {
            *reinterpret_cast<ivec_u *>(to + word * PANEL_WORD_BYTES + i * WIDTH * 4) = numbers;
        });
        if (count < TILE_WORDS) std::memset(to + count * PANEL_WORD_BYTES, 0, size_t((TILE_WORDS - count) * PANEL_WORD_BYTES));
        const Header &head = header(block);
        for (uint32_t e = 0; __builtin_expect(e < head.exceptions, 0); e++) {
            int64_t index = head.exception[e].index - within * TILE_BYTES / 2;
            if (index >= 0 && index < TILE_BYTES / 2) to[index * 2 + 1] = char(head.exception[e].upper);
        }
    }
};
#endif

// Tile of packed panels that are multiplied by no other rows.
struct CompactTile : OnceTile<DotBFloat16> {
    typedef DotBFloat16 Dot;
    static constexpr int64_t X_BYTES = Steps<Dot>::X_BYTES;

    template <int R, int P>
    __attribute__((noinline)) void run() const {
        Dot::Acc acc[R][P];
        load(acc);
        const char *block[P];
        for (int p = 0; p < P; p++) block[p] = panels[p];
        alignas(64) char own[P * BLOCK_WORDS * PANEL_WORD_BYTES];
        for (int64_t done = 0; done < words; done += BLOCK_WORDS) {
            int64_t n = std::min(BLOCK_WORDS, words - done), left = words - done - n;
            const char *soon[P], *from = x + done * X_BYTES;
            uint32_t exceptions = 0;
            for (int p = 0; p < P; p++) {
                soon[p] = left ? block[p] + BLOCK_BYTES : next[p];
                exceptions |= header(block[p]).exceptions;
            }
            if (!IN_REGISTERS<R> || __builtin_expect(exceptions != 0, 0)) {
                const char *w[P];
                for (int p = 0; p < P; p++) {
                    char *to = own + p * BLOCK_WORDS * PANEL_WORD_BYTES;
                    expand(block[p], n, to);
                    w[p] = to;
                }
                tile<Dot, R, P, P, false>(acc, from, x_stride, w, PANEL_WORD_BYTES, n, soon, BLOCK_BYTES / BLOCK_WORDS);
            } else {
                whole<R, P>(acc, from, block, n, soon);
            }
            for (int p = 0; p < P; p++) block[p] += BLOCK_BYTES;
        }
        store(acc);
    }

    // Multiplies a block of each panel without exceptions, two words at a time in registers.
    template <int R, int P>
    INLINE void whole(Dot::Acc (&acc)[R][P], const char *from, const char *const (&block)[P], int64_t n,
                      const char *const (&soon)[P]) const {
        ivec table[P];
        for (int p = 0; p < P; p++) {
            table[p] = spread_table(block[p]);
            if (FETCH<R>) __builtin_prefetch(soon[p], 0, 2);
        }
        for (int64_t at = sizeof(Header), k = 0; k < n; k += GROUP_WORDS, at += GROUP_BYTES)
            _Pragma("GCC unroll 3") for (int line = 0; line < GROUP_BYTES; line += 64) {
                _Pragma("GCC unroll 4") for (int p = 0; p < P; p++)
                    if (FETCH<R>) __builtin_prefetch(soon[p] + at + line, 0, 2);
                if (line == 0) pair<R, P, 0>(acc, from + k * X_BYTES, block, at, table);
                if (line == 64) pair<R, P, 1>(acc, from + k * X_BYTES, block, at, table);
            }
    }

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

    // True if two words fit the registers beside the accumulators.
    template <int R>
    static constexpr bool IN_REGISTERS = WIDTH == LANES || R <= 2;

    // With few rows the hardware prefetcher follows the panels; see OnceTile.
    template <int R>
    static constexpr bool FETCH = R > 2;
};

// Panels of compact weights; the interface is described at Plain (product.h).
struct Compact {
    typedef DotBFloat16 Dot;
    static constexpr bool EXPANDS = true;
    static bool expands(bool) { return true; }
    // Many words at once, since every block loads and stores all accumulators. Expanded panels stay in the second-level
    // cache.
    static int64_t block(bool, int64_t words) {
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
    static INLINE void once(int rows, int p, const OnceTile<Dot> &tile) { with_tile(rows, p, CompactTile{tile}); }
};

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
    KERNEL("pack_compact/bfloat16", PackCompact),
    KERNEL("unpack_compact/bfloat16", UnpackCompact),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
