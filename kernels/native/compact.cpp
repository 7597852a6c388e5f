// Products with weights of bfloat16 that are packed without loss in 12.25 bits a number.
//
// Of a number's two bytes the upper one, its sign and seven bits of its exponent, has few values among neighbours: the
// eight bits below it are kept as they are, and of it a code of four bits, its place in a table of 16. (That exponents
// of trained weights carry two to three bits of information is what DFloat11, arXiv:2504.11651, lives on, with codes of
// various lengths.) K is a multiple of 8.
//
// Packed: [N / 16] panels of [K / 128] blocks, the last of which may be shorter. A block: 64 bytes of Header, then for
// every 4 words of 16 columns, see tile.h, 64 bytes of codes and twice 64 of lower bytes. Of words 2 j and 2 j + 1:
//
//   lower bytes     line j; the first word's 8 even bytes of quarter q at 16 q, the second's at 16 q + 8
//   codes           bits 4 j to 4 j + 3 of the bytes of the same places
//
//   linear_compact, linear_swiglu_compact, linear_argmax_compact     as in linear.cpp
//   pack_compact    p: dense [T, K], packed, failed [1] int32: made 1 where a block cannot be packed, which is left
//                      as it was                                                    n: T, K, row of the first
//   unpack_compact  p: packed, dense [T, K], row numbers [T] int64                  n: T, K
#include <algorithm>

#include "product.h"

namespace npuserve {
namespace NPUSERVE_ISA {

constexpr int64_t GROUP_WORDS = 4, GROUP_BYTES = 3 * 64;
constexpr int64_t BLOCK_WORDS = 64, WORD_BYTES = 64;

// Upper bytes that the table lacks are coded as its first, and listed.
struct Header {
    static constexpr int MOST = 11;
    uint8_t table[16];
    uint32_t exceptions;
    struct {
        uint16_t place;  // of the number among the block's words
        uint8_t upper, unused;
    } exception[MOST];
};
static_assert(sizeof(Header) == 64, "one line");
constexpr int64_t BLOCK_BYTES = sizeof(Header) + BLOCK_WORDS / GROUP_WORDS * GROUP_BYTES;

INLINE const Header &header(const char *block) { return *reinterpret_cast<const Header *>(block); }

int64_t compact_panel_bytes(int64_t k) {
    int64_t words = k / 2;
    return ceil_div(words, BLOCK_WORDS) * int64_t(sizeof(Header)) + words / GROUP_WORDS * GROUP_BYTES;
}

// A table in every 16 bytes of a register.
INLINE ivec spread_table(const char *table) {
    ivec t;
    for (int i = 0; i < WIDTH / 4; i++) std::memcpy(reinterpret_cast<char *>(&t) + i * 16, table, 16);
    return t;
}

// Part i of words 2 j and 2 j + 1 of a group.
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
#else
    uint8_t t[16], c[16], l[16], out[32];
    std::memcpy(t, &table, 16), std::memcpy(c, &codes, 16), std::memcpy(l, &lower, 16);
    for (int n = 0; n < 16; n++) out[n * 2] = l[n], out[n * 2 + 1] = t[c[n]];
    std::memcpy(&first, out, 16), std::memcpy(&second, out + 16, 16);
#endif
}

// The words of a block as they are without packing.
void expand(const char *block, int64_t words, char *out) {
    const Header &head = header(block);
    ivec table = spread_table(block);
    const char *group = block + sizeof(Header);
    auto put = [&](int64_t word, int i, ivec numbers) {
        *reinterpret_cast<ivec_u *>(out + word * WORD_BYTES + i * WIDTH * 4) = numbers;
    };
    for (int64_t w = 0; w < words; w += GROUP_WORDS, group += GROUP_BYTES)
        EACH(i) {
            ivec first, second;
            expand_part<0>(group, table, i, first, second);
            put(w, i, first), put(w + 1, i, second);
            expand_part<1>(group, table, i, first, second);
            put(w + 2, i, first), put(w + 3, i, second);
        }
    for (uint32_t e = 0; e < head.exceptions; e++) out[head.exception[e].place * 2 + 1] = char(head.exception[e].upper);
}

// `words` words of plain panels as a block. False, and nothing written, if too many upper bytes are rare.
bool compress(const char *plain, int64_t words, char *block) {
    constexpr int WAYS = 4;  // of counting, since neighbours are alike and each sum would wait for the one before
    uint32_t counts[WAYS][256] = {}, times[256];
    for (int64_t i = 0; i < words * 32; i += WAYS)
        for (int way = 0; way < WAYS; way++) counts[way][uint8_t(plain[(i + way) * 2 + 1])]++;
    uint8_t values[256], code[256] = {};
    int different = 0;
    for (int v = 0; v < 256; v++) {
        times[v] = 0;
        for (int way = 0; way < WAYS; way++) times[v] += counts[way][v];
        if (times[v]) values[different++] = uint8_t(v);
    }
    std::stable_sort(values, values + different, [&](uint8_t a, uint8_t b) { return times[a] > times[b]; });
    uint32_t rare = 0;
    for (int i = 16; i < different; i++) rare += times[values[i]];
    if (rare > Header::MOST) return false;

    Header head = {};
    for (int i = 0; i < std::min(different, 16); i++) head.table[i] = values[i], code[values[i]] = uint8_t(i);
    char *group = block + sizeof(Header);
    for (int64_t w = 0; w < words; w += GROUP_WORDS, group += GROUP_BYTES) {
        const char *word = plain + w * WORD_BYTES;
        uint8_t codes[2][64], lower[2][64];
        for (int j = 0; j < 2; j++)
            for (int q = 0; q < 4; q++)
                for (int v = 0; v < 2; v++)
                    for (int i = 0; i < 8; i++) {
                        uint16_t number;
                        std::memcpy(&number, word + (2 * j + v) * WORD_BYTES + q * 16 + i * 2, 2);
                        lower[j][q * 16 + v * 8 + i] = uint8_t(number);
                        codes[j][q * 16 + v * 8 + i] = code[number >> 8];
                    }
        for (int place = 0; place < 64; place++) codes[0][place] = uint8_t(codes[0][place] | codes[1][place] << 4);
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

// The product of one tile of packed panels. KEEP: their words go to `plain` as well, panel after panel.
template <bool KEEP>
struct Expanded {
    typedef DotBFloat16 Dot;
    typedef Dot::Acc Acc;
    const char *x;
    int64_t x_stride, words;
    const char *const *panels;
    const char *const *next;  // as Tile has it: without KEEP panels, with it two runs
    Acc *out;
    int out_stride;
    char *plain;

    template <int R, int P>
    __attribute__((noinline)) void run() const {
        Acc acc[R][P];
        const char *block[P];
        for (int p = 0; p < P; p++) block[p] = panels[p];
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) acc[r][p] = Dot::start();
        alignas(64) char own[KEEP ? 64 : P * BLOCK_WORDS * WORD_BYTES];
        for (int64_t done = 0; done < words; done += BLOCK_WORDS) {
            int64_t n = std::min(BLOCK_WORDS, words - done), left = words - done - n;
            const char *soon[P];
            char *lines[P];
            for (int p = 0; p < P; p++) {
                soon[p] = left || KEEP ? block[p] + BLOCK_BYTES : next[p];
                lines[p] = KEEP ? plain + (p * words + done) * WORD_BYTES : own + p * BLOCK_WORDS * WORD_BYTES;
            }
            const char *from = x + done * 4;
            const char *later[2] = {};
            if (KEEP)
                for (int i = 0; i < 2; i++)
                    if (next[i]) later[i] = next[i] + done / BLOCK_WORDS * BLOCK_BYTES;
            uint32_t exceptions = 0;
            for (int p = 0; p < P; p++) exceptions |= header(block[p]).exceptions;
            if (!IN_REGISTERS<R> || __builtin_expect(exceptions != 0, 0)) {
                const char *w[P];
                for (int p = 0; p < P; p++) expand(block[p], n, lines[p]), w[p] = lines[p];
                for (const char *line : later)
                    for (int64_t at = 0; line && at < BLOCK_BYTES; at += 64) __builtin_prefetch(line + at, 0, 2);
                tile<Dot, R, P, P, false>(acc, from, x_stride, w, WORD_BYTES, n, soon, BLOCK_BYTES / BLOCK_WORDS);
            } else {
                whole<R, P>(acc, from, block, n, soon, later, lines);
            }
            for (int p = 0; p < P; p++) block[p] += BLOCK_BYTES;
        }
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) out[r * out_stride + p] = acc[r][p];
    }

    // A block of each panel without exceptions, two words after two in registers.
    template <int R, int P>
    INLINE void whole(Acc (&acc)[R][P], const char *from, const char *const (&block)[P], int64_t n,
                      const char *const (&soon)[P], const char *const (&later)[2], char *const (&lines)[P]) const {
        ivec table[P];
        for (int p = 0; p < P; p++) {
            table[p] = spread_table(block[p]);
            if (FETCH<R>) __builtin_prefetch(soon[p], 0, 2);
        }
        for (int i = 0; i < 2; i++)
            if (KEEP && later[i]) __builtin_prefetch(later[i], 0, 2);
        for (int64_t at = sizeof(Header), k = 0; k < n; k += GROUP_WORDS, at += GROUP_BYTES)
            _Pragma("GCC unroll 3") for (int line = 0; line < GROUP_BYTES; line += 64) {
                _Pragma("GCC unroll 4") for (int p = 0; p < P; p++)
                    if (FETCH<R>) __builtin_prefetch(soon[p] + at + line, 0, 2);
                for (int i = 0; i < 2; i++)
                    if (KEEP && later[i]) __builtin_prefetch(later[i] + at + line, 0, 2);
                if (line == 0) pair<R, P, 0>(acc, from + k * 4, block, at, table, lines, k);
                if (line == 64) pair<R, P, 1>(acc, from + k * 4, block, at, table, lines, k);
            }
    }

    template <int R, int P, int J>
    INLINE void pair(Acc (&acc)[R][P], const char *from, const char *const (&block)[P], int64_t at,
                     const ivec (&table)[P], char *const (&lines)[P], int64_t k) const {
        ivec word[2][P][PARTS];
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) EACH(i) {
            expand_part<J>(block[p] + at, table[p], i, word[0][p][i], word[1][p][i]);
            if (KEEP) _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)
                *reinterpret_cast<ivec_u *>(lines[p] + (k + 2 * J + v) * WORD_BYTES + i * WIDTH * 4) = word[v][p][i];
        }
        _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)
            tile_step<Dot>(acc, from + (2 * J + v) * 4, x_stride, word[v]);
    }

    // Where registers are short, more rows leave none for words on their way.
    template <int R>
    static constexpr bool IN_REGISTERS = WIDTH == LANES || R <= 2;

    // With few rows the processor follows the panels by itself; see Tile.
    template <int R>
    static constexpr bool FETCH = R > 2;
};

struct Compact {
    typedef DotBFloat16 Dot;
    static int64_t panel_bytes(int64_t k) { return compact_panel_bytes(k); }
    static int64_t room(const Split &split, int64_t k) {
        return split.once ? 0 : split.tile_panels * k / 2 * WORD_BYTES;
    }
    static INLINE void once(int rows, int p, const Tile<Dot, true> &t) {
        with_tile(rows, p, Expanded<false>{t.x, t.x_stride, t.words, t.panels, t.next, t.out, t.out_stride, nullptr});
    }
    // The first block of rows leaves the panels' words in `plain`, where the others find them.
    static INLINE void block(int64_t number, int rows, int place, int p, const Tile<Dot, false> &t, char *plain) {
        plain += place * t.words * WORD_BYTES;
        if (number == 0)
            return with_tile(
                rows, p, Expanded<true>{t.x, t.x_stride, t.words, t.panels, t.next, t.out, t.out_stride, plain});
        const char *panels[MAX_PANELS];
        for (int j = 0; j < p; j++) panels[j] = plain + j * t.words * WORD_BYTES;
        with_tile(rows, p, Tile<Dot, false>{t.x, t.x_stride, t.words, 0, panels, t.next, t.out, t.out_stride,
                                            BLOCK_BYTES / BLOCK_WORDS});
    }
};

struct CompactFloats : Floats<BFloat16> {
    typedef Compact Panels;
    using Floats<BFloat16>::Floats;
};

struct PackCompact {
    static int64_t units(const Call &call) { return ceil_div<int64_t>(call.rows + LANES, LANES); }
    // A unit is a panel, of which the source may fill any rows.
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        int64_t k = op.n[1], first = op.n[2], words = k / 2, panel = first / LANES + unit;
        int64_t begin = std::max(first, panel * LANES), end = std::min(first + call.rows, (panel + 1) * LANES);
        if (begin >= end) return;
        char *block = op.at<char>(1) + panel * compact_panel_bytes(k);
        alignas(64) char plain[BLOCK_WORDS * WORD_BYTES];
        for (int64_t w = 0; w < words; w += BLOCK_WORDS, block += BLOCK_BYTES) {
            int64_t n = std::min(BLOCK_WORDS, words - w);
            if (end - begin < LANES) expand(block, n, plain);
            for (int64_t r = begin; r < end; r++) {
                const char *in = op.at<char>(0) + ((r - first) * k + w * 2) * 2;
                for (int64_t i = 0; i < n; i++) std::memcpy(plain + i * WORD_BYTES + r % LANES * 4, in + i * 4, 4);
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

    // Numbers `at` and at + 1 of each of the block's words.
    static void column(const char *block, int64_t words, int at, char *out) {
        const Header &head = header(block);
        const char *group = block + sizeof(Header);
        int place = at / 8 * 16 + at % 8;  // in the line of two words, of the first one's
        for (int64_t w = 0; w < words; w += GROUP_WORDS, group += GROUP_BYTES)
            for (int i = 0; i < 2 * GROUP_WORDS; i++) {
                int j = i / 4, from = place + i / 2 % 2 * 8 + i % 2;
                out[w * 4 + i * 2] = group[64 + j * 64 + from];
                out[w * 4 + i * 2 + 1] = char(head.table[uint8_t(group[from]) >> 4 * j & 15]);
            }
        for (uint32_t e = 0; e < head.exceptions; e++) {
            int within = head.exception[e].place % 32 - at;
            if (within == 0 || within == 1)
                out[head.exception[e].place / 32 * 4 + within * 2 + 1] = char(head.exception[e].upper);
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
