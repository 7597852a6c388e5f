// Weights of four bits in groups, as int4.cpp and int4_int8.cpp multiply them.
//
// Packed: [N / 16] panels of [K / group] groups, of which the last may be shorter. K is a multiple of 8. A group is
//
//   scales   of 16 columns, 16 or 32 bits each
//   zeros    of 16 columns, int8, -16 .. 16 less 8; only with zero points
//   lines    64 bytes for every 8 numbers of K: 32 bits of each column, in which number i is at bit 16 (i % 2) + 4 (i / 2)
//
// A number n of 0 .. 15 stands for (n - 8 - zero) * scale. The products of a group are added up before they are
// multiplied by its scale, in ascending order along K, so that a row's results do not depend on other rows.
#pragma once

#include <algorithm>

#include "gemm/epilogue.h"

namespace npuserve {
namespace NPUSERVE_ISA {

constexpr int64_t LINE_NUMBERS = 8;

enum ScaleType { SCALE_BFLOAT16 = 0, SCALE_FLOAT16 = 1, SCALE_FLOAT32 = 2 };

// Form of the groups of a weight.
struct Groups {
    int64_t group, header;  // numbers of a group, bytes before its lines
    bool wide, has_zeros;
    int shift;  // a scale of 16 bits is its bits, moved by `shift` into a float32, times `factor`
    float factor;

    explicit Groups(const Op &op) : group(op.n[5]), has_zeros(op.n[6] & 4) {
        int64_t type = op.n[6] & 3;
        wide = type == SCALE_FLOAT32;
        shift = type == SCALE_FLOAT16 ? 13 : 16;
        factor = type == SCALE_FLOAT16 ? 0x1p112f : 1.0f;
        header = LANES * (wide ? 4 : 2) + (has_zeros ? LANES : 0);
    }
    INLINE F scale(const char *group) const {
        if (wide) return load(reinterpret_cast<const float *>(group));
        F r;
#if defined(__AVX512F__)
        if (shift == 13) {  // also numbers that are denormal in float16, where denormal float32 are 0
            __m256i bits;
            std::memcpy(&bits, group, sizeof bits);
            r.v[0] = (fvec)_mm512_cvtph_ps(bits);
            return r;
        }
#endif
        EACH(i) {
            hvec bits = reinterpret_cast<const hvec_u *>(group)[i];
            r.v[i] = (fvec)((ivec)widen(bits) >> (16 - shift)) * factor;
        }
        return r;
    }
    // Bytes of `numbers` numbers of K of a panel, from the beginning of a group on.
    INLINE int64_t bytes(int64_t numbers) const {
        return ceil_div(numbers, group) * header + numbers / LINE_NUMBERS * 64;
    }
    INLINE ivec zero(const char *group, int part) const {
        typedef int8_t bvec __attribute__((vector_size(WIDTH)));
        bvec bytes;
        std::memcpy(&bytes, group + header - LANES + part * WIDTH, WIDTH);
        return __builtin_convertvector(bytes, ivec);
    }
};

// Packed panels of a tile, read line by line. next: the panels that follow, prefetched.
template <int P>
struct Lines {
    static constexpr int64_t AHEAD = 2048, LINE_BYTES = 64;
    const char *at[P], *const *next;
    int64_t left;  // bytes of a panel

    Lines(const char *const *panels, const char *const *next, int64_t bytes) : next(next), left(bytes) {
        for (int p = 0; p < P; p++) at[p] = panels[p];
    }
    INLINE void skip(int64_t bytes) {
        left -= bytes;
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) at[p] += bytes;
    }
    INLINE void fetch() const {
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++)
            __builtin_prefetch(left > AHEAD ? at[p] + AHEAD : next[p] + (AHEAD - left), 0, 2);
    }
};

template <int R, int P>
INLINE void clear(F *acc, int stride) {
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) acc[r * stride + p] = zero();
}

// Packed panels; the rest of the interface, described at Plain (product.h), depends on the form of x.
template <class D>
struct Int4Panels {
    typedef D Dot;
    static constexpr bool EXPANDS = true, TILES = false;
    static constexpr int64_t MAX_GROUP = 128, MIN_GROUP = 32;
    Groups groups;

    explicit Int4Panels(const Op &op) : groups(op) {}
    static bool prefers_tall_tiles(int64_t) { return false; }
    static bool expands(int64_t) { return true; }
    static int64_t expanded_bytes(int64_t words) {
        return (words * Inner<Dot>::WORDS + ceil_div(words * Dot::PER_WORD, MIN_GROUP)) * PANEL_WORD_BYTES;
    }
    INLINE int64_t bytes(int64_t words) const { return groups.bytes(words * Dot::PER_WORD); }
    int64_t panel_bytes(int64_t k) const { return bytes(k / Dot::PER_WORD); }
    INLINE const char *at(const char *panel, int64_t first) const { return panel + bytes(first); }
    // Words of a block of at most `most` numbers, which is whole groups.
    static int64_t block_of(int64_t words, int64_t most) {
        int64_t numbers = words * Dot::PER_WORD, blocks = ceil_div(numbers, most);
        return ceil_div(numbers, blocks * MAX_GROUP) * MAX_GROUP / Dot::PER_WORD;
    }
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
