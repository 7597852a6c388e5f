// Bfloat16 weights that are packed losslessly in 12.25 bits a number.
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
#pragma once

#include <algorithm>
#include <cstring>

#include "gemm/amx_product.h"

namespace npuserve {
namespace NPUSERVE_ISA {

constexpr int64_t GROUP_WORDS = 4, GROUP_BYTES = 3 * 64;
constexpr int64_t BLOCK_WORDS = COMPACT_BLOCK / 2;

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
INLINE int64_t compact_panel_bytes(int64_t k) { return compact_bytes(k / 2); }

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
inline void expand(const char *block, int64_t words, char *out) {
    each_word(block, words, [&](int64_t word, int i, ivec numbers) __attribute__((always_inline)) {
        *reinterpret_cast<ivec_u *>(out + word * PANEL_WORD_BYTES + i * WIDTH * 4) = numbers;
    });
    const Header &head = header(block);
    for (uint32_t e = 0; e < head.exceptions; e++) out[head.exception[e].index * 2 + 1] = char(head.exception[e].upper);
}

// Unpacks the words of a block to float32, the even number of each word before the odd one.
inline void expand_wide(const char *block, int64_t words, char *out) {
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
inline bool compress(const char *plain, int64_t words, char *block) {
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
    // The 16 most frequent values first. A sort of the standard library would be shared with the other sets.
    for (int i = 0; i < std::min(different, 16); i++) {
        int most = i;
        for (int j = i + 1; j < different; j++) {
            uint32_t a = times[values[j]], b = times[values[most]];
            if (a > b || (a == b && values[j] < values[most])) most = j;
        }
        std::swap(values[i], values[most]);
    }
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

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
