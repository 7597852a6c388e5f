// Products with weights of four bits in groups, and activations of floats (W4A16).
//
//   linear_int4, linear_swiglu_int4, linear_argmax_int4, argmax_of_units_int4     as in linear.cpp, and
//   linear_experts_int4, linear_swiglu_experts_int4 as in experts.h; the products also
//                take n[5]: numbers of a group, 32 or more, which divide 128; n[6]: dtype of the scales (ScaleType), plus 4
//                with zero points
//
// int4.h has the form of packed weights.
#include "gemm/experts.h"
#include "gemm/int4.h"
#if defined(__AMX_TILE__)
#include "gemm/amx_groups.h"
#endif

namespace npuserve {
namespace NPUSERVE_ISA {

// Numbers of a line in steps, as words of Steps<Dot>: a step is one number, or a pair with an instruction for bfloat16.
template <class Dot>
struct LineSteps {
    static constexpr bool PAIRS = BF16_DOT && std::is_same<Dot, DotBFloat16>::value;
    static constexpr int COUNT = PAIRS ? 4 : 8;
    typedef typename Steps<Dot>::W W;

    // Zero points of a group's columns, as `get` takes them.
    struct Zeros {
        ivec v[PARTS];
    };
    template <bool ZEROS>
    static INLINE Zeros zeros(const Groups &groups, const char *group) {
        Zeros r = {};
        if constexpr (ZEROS) EACH(i) {
            ivec zero = groups.zero(group, i) + 8;
            r.v[i] = PAIRS ? (zero & 0xFFFF) | zero << 16 : zero;
        }
        return r;
    }

    // Numbers of step S of part i in float32, one to a lane: number 2 j of a line for S = j, 2 j + 1 for S = 4 + j.
    template <int BIT, bool ZEROS>
    static INLINE fvec floats(ivec v, ivec zero) {
#if defined(__AVX512F__)
        if constexpr (!ZEROS) {
            const __m512 table = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
            return (fvec)_mm512_permutexvar_ps((__m512i)((uvec)v >> BIT), table);  // by the lowest four bits
        }
#endif
        if constexpr (ZEROS) return __builtin_convertvector((ivec)((uvec)v >> BIT & 15) - zero, fvec);
        return __builtin_convertvector(((v ^ int32_t(0x88888888u)) << (28 - BIT)) >> 28, fvec);
    }
    template <int S, bool ZEROS>
    static INLINE W get(const char *line, const Zeros &zeros) {
        if constexpr (!PAIRS) {
            W r;
            EACH(i) r.v[i] = floats<S / 2 * 4 + S % 2 * 16, ZEROS>(load_words(line, i), zeros.v[i]);
            return r;
        } else {
#if defined(__AVX512BF16__)
            // Whole numbers of -16 .. 15 in bfloat16, by the lowest five bits; without zero points -8 .. 7 twice.
            static const uint16_t TABLES[2][32] = {
                {0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0,
                 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0, 0x3F80, 0x4000, 0x4040,
                 0x4080, 0x40A0, 0x40C0, 0x40E0},
                {0, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150,
                 0x4160, 0x4170, 0xC180, 0xC170, 0xC160, 0xC150, 0xC140, 0xC130, 0xC120, 0xC110, 0xC100, 0xC0E0, 0xC0C0,
                 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80}};
            __m512i v = (__m512i)load_words(line, 0);
            v = S ? _mm512_srli_epi16(v, 4 * S) : v;
            if constexpr (ZEROS)
                v = _mm512_sub_epi16(_mm512_and_si512(v, _mm512_set1_epi16(15)), (__m512i)zeros.v[0]);
            return (W)_mm512_permutexvar_epi16(v, _mm512_loadu_si512(TABLES[ZEROS]));
#else
            W r;
            EACH(i) {
                ivec v = load_words(line, i), zero = zeros.v[i];
                fvec even = floats<4 * S, ZEROS>(v, (zero << 16) >> 16), odd = floats<4 * S + 16, ZEROS>(v, zero >> 16);
                r.v[i] = (ivec)((uvec)(ivec)even >> 16) | ((ivec)odd & int32_t(0xFFFF0000u));
            }
            return r;
#endif
        }
    }
};

template <class Dot, bool ZEROS, int S = 0>
INLINE void expand_line(const char *line, const typename LineSteps<Dot>::Zeros &zeros, char *out) {
    typedef LineSteps<Dot> By;
    typename By::W numbers = By::template get<S, ZEROS>(line, zeros);
    static_assert(sizeof numbers == PANEL_WORD_BYTES, "a word of 16 columns");
    std::memcpy(out + S * PANEL_WORD_BYTES, &numbers, sizeof numbers);
    if constexpr (S + 1 < By::COUNT) expand_line<Dot, ZEROS, S + 1>(line, zeros, out);
}
// Expands `left` numbers of a panel, whole groups or the last ones: before the words of each group are its scales.
template <class Dot, bool ZEROS>
INLINE void expand_groups(const Groups &groups, const char *w, int64_t left, char *out) {
    typedef LineSteps<Dot> By;
    for (int64_t count; left > 0; left -= count) {
        count = std::min(left, groups.group);
        typename By::Zeros zeros = By::template zeros<ZEROS>(groups, w);
        store(reinterpret_cast<float *>(out), groups.scale(w));
        w += groups.header, out += PANEL_WORD_BYTES;
        for (int64_t i = 0; i < count; i += LINE_NUMBERS, w += 64, out += By::COUNT * PANEL_WORD_BYTES)
            expand_line<Dot, ZEROS>(w, zeros, out);
    }
}

// acc[r * stride + p] += scale of panel p * sums[r][p].
template <int R, int P>
INLINE void add_scaled(F *acc, int stride, const F (&sums)[R][P], const F (&scale)[P]) {
    _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) acc[r * stride + p] = fma(scale[p], sums[r][p], acc[r * stride + p]);
}
template <class Dot, int R, int P>
INLINE void start_sums(F (&sums)[R][P]) {
    _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) sums[r][p] = Dot::start();
}
// Multiplies packed panels by the rows of a tile, group by group. multiply(sums, x, lines, count) adds the products of the
// `count` numbers of a group to `sums`, and moves x and the lines behind them.
template <int R, int P, class Dot, class Multiply>
INLINE void multiply_groups(const Tile<Dot> &tile, const Groups &groups, const char *const *next, const Multiply &multiply) {
    const char *x = tile.x;
    int64_t left = tile.words * Dot::PER_WORD;
    Lines<P> lines(tile.panels, next, groups.bytes(left));
    clear<R, P>(tile.acc, tile.acc_stride);
    for (int64_t count; left > 0; left -= count) {
        count = std::min(left, groups.group);
        F sums[R][P], scale[P];
        start_sums<Dot>(sums);
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) scale[p] = groups.scale(lines.at[p]);
        lines.skip(groups.header);
        multiply(sums, x, lines, count);
        add_scaled(tile.acc, tile.acc_stride, sums, scale);
    }
}
// Tile of packed panels that are multiplied by no other rows: each line is unpacked in registers.
template <class Dot>
struct Int4OnceTile : Tile<Dot> {
    Groups groups;
    const char *const *next;

    template <int R, int P>
    INLINE void run() const {
        if (groups.has_zeros)
            sweep<R, P, true>();
        else
            sweep<R, P, false>();
    }

  private:
    template <int R, int P, bool ZEROS>
    __attribute__((noinline)) void sweep() const {
        typedef LineSteps<Dot> By;
        multiply_groups<R, P>(*this, groups, next, [&](F (&sums)[R][P], const char *&x, Lines<P> &lines, int64_t count)
                                                       __attribute__((always_inline)) {
            typename By::Zeros zeros[P];
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++)
                zeros[p] = By::template zeros<ZEROS>(groups, lines.at[p] - groups.header);
            for (int64_t i = 0; i < count; i += LINE_NUMBERS) {
                lines.fetch();
                line<R, P, ZEROS>(sums, x, lines.at, zeros);
                x += By::COUNT * 4;
                lines.skip(Lines<P>::LINE_BYTES);
            }
        });
    }
    template <int R, int P, bool ZEROS, int S = 0>
    INLINE void line(F (&sums)[R][P], const char *x, const char *const (&w)[P],
                     const typename LineSteps<Dot>::Zeros (&zeros)[P]) const {
        typedef LineSteps<Dot> By;
        typename By::W v[P];
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) v[p] = By::template get<S, ZEROS>(w[p], zeros[p]);
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
            const char *word = x + r * this->x_stride + S * 4;
            if constexpr (By::PAIRS) {
                auto spread = Steps<Dot>::template spread<0>(word);
                _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) Steps<Dot>::step(sums[r][p], v[p], spread);
            } else {
                F spread = broadcast_float(word);
                _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) sums[r][p] = fma(v[p], spread, sums[r][p]);
            }
        }
        if constexpr (S + 1 < By::COUNT) line<R, P, ZEROS, S + 1>(sums, x, w, zeros);
    }
};

#if defined(__AMX_TILE__)
// The same with the sums of tile registers. Few rows are multiplied by vectors, which add up in the order of TDPBF16PS
// (amx.h). More rows are multiplied by tile registers: each group is expanded in the cache while the groups before it are
// multiplied.
template <class Dot>
struct Int4TileOrderOnceTile : Tile<Dot> {
    Groups groups;
    const char *const *next;

    static constexpr int VECTOR_ROWS = 4;  // up to which vectors are faster
    static constexpr int64_t AHEAD = 2048;  // bytes
    static constexpr int64_t EARLY = 2, RING = EARLY + 1;  // groups that are expanded before they are multiplied

    template <int R, int P>
    INLINE void run() const {
        if constexpr (R <= VECTOR_ROWS) {
            if (groups.has_zeros)
                sweep<R, P, true>();
            else
                sweep<R, P, false>();
            return;
        }
        clear<R, P>(this->acc, this->acc_stride);
        each_pair<P>([&](auto p, auto count) __attribute__((always_inline)) {
            if (groups.has_zeros)
                product<R, count, true>(p);
            else
                product<R, count, false>(p);
        });
    }

  private:
    // Even and odd products of 32 numbers are summed separately, then both sums are added to those of the group.
    template <int R, int P, bool ZEROS>
    __attribute__((noinline)) void sweep() const {
        NoDenormals no_denormals;
        constexpr int64_t STEP = TILE_WORDS * Dot::PER_WORD;
        multiply_groups<R, P>(*this, groups, next, [&](F (&sums)[R][P], const char *&x, Lines<P> &lines, int64_t count)
                                                       __attribute__((always_inline)) {
            ivec zeros[P];
            if constexpr (ZEROS) _Pragma("GCC unroll 4") for (int p = 0; p < P; p++)
                zeros[p] = groups.zero(lines.at[p] - groups.header, 0) + 8;
            for (int64_t begin = 0; begin < count; begin += STEP) {
                F even[R][P], odd[R][P];
                _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)
                    _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) even[r][p] = odd[r][p] = zero();
                for (int64_t i = begin; i < std::min(count, begin + STEP); i += LINE_NUMBERS) {
                    lines.fetch();
                    pairs<R, P, ZEROS>(even, odd, x, lines.at, zeros);
                    x += LINE_NUMBERS * 2;
                    lines.skip(Lines<P>::LINE_BYTES);
                }
                _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)
                    _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) sums[r][p] = sums[r][p] + (even[r][p] + odd[r][p]);
            }
        });
    }
    // Pairs S and later of a line, numbers 2 S and 2 S + 1 of each column.
    template <int R, int P, bool ZEROS, int S = 0>
    INLINE void pairs(F (&even)[R][P], F (&odd)[R][P], const char *x, const char *const (&w)[P],
                      const ivec (&zeros)[P]) const {
        typedef LineSteps<DotFloat32> By;
        F low[P], high[P];
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) {
            ivec line = load_words(w[p], 0);
            low[p].v[0] = By::template floats<4 * S, ZEROS>(line, zeros[p]);
            high[p].v[0] = By::template floats<4 * S + 16, ZEROS>(line, zeros[p]);
        }
        _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) {
            ivec pair = broadcast(x + r * this->x_stride + S * 4);
            F x_low, x_high;
            x_low.v[0] = (fvec)(pair << 16), x_high.v[0] = (fvec)(pair & int32_t(0xFFFF0000u));
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) {
                even[r][p] = fma(low[p], x_low, even[r][p]);
                odd[r][p] = fma(high[p], x_high, odd[r][p]);
            }
        }
        if constexpr (S + 1 < LINE_NUMBERS / 2) pairs<R, P, ZEROS, S + 1>(even, odd, x, w, zeros);
    }
    template <int R, int P, bool ZEROS>
    __attribute__((noinline)) void product(int first) const {
        constexpr int64_t GROUP_BYTES = (Int4Panels<Dot>::MAX_GROUP / Dot::PER_WORD + 1) * 64;
        alignas(64) char ring[P][RING * GROUP_BYTES];
        const char *expanded[P];
        for (int p = 0; p < P; p++) expanded[p] = ring[p];
        const int64_t k = this->words * Dot::PER_WORD, whole = k / groups.group, last = k % groups.group;
        const int64_t bytes = groups.bytes(groups.group), end = groups.bytes(k);
        auto expand = [&](int64_t g, int64_t count) __attribute__((always_inline)) {
            for (int p = 0; p < P; p++) {
                const char *soon = this->panels[first + p] + g * bytes + AHEAD;
                if (g * bytes + AHEAD >= end) soon += next[first + p] - this->panels[first + p] - end;
                for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(soon + i, 0, 2);
                expand_groups<Dot, ZEROS>(groups, this->panels[first + p] + g * bytes, count,
                                          ring[p] + g % RING * GROUP_BYTES);
            }
        };
        auto feed = [&](int64_t g) __attribute__((always_inline)) {
            if (g + EARLY < whole) expand(g + EARLY, groups.group);
            return g % RING * GROUP_BYTES;
        };
        for (int64_t g = 0; g < std::min(EARLY, whole); g++) expand(g, groups.group);
        F *acc = this->acc + first;
        const int64_t words = groups.group / Dot::PER_WORD;
        const int stride = this->acc_stride;
        if (whole) product_of_groups<Dot, R, P>(this->x, this->x_stride, whole, words, expanded, acc, stride, feed);
        if (last) {
            expand(whole, last);
            product_of_groups<Dot, R, P>(this->x + whole * words * 4, this->x_stride, 1, last / Dot::PER_WORD, expanded,
                                         acc, stride, [&](int64_t) { return whole % RING * GROUP_BYTES; });
        }
    }
};
#endif

// Tile of expanded panels in the cache. Before the words of each group are its scales in float32.
template <class Dot>
struct Int4BlockTile : Tile<Dot> {
    int64_t group_words;
    SpreadPrefetch ahead;

    template <int R, int P>
    __attribute__((noinline)) void run() const {
        const char *w[P], *x = this->x;
        for (int p = 0; p < P; p++) w[p] = this->panels[p];
        if (this->fresh) clear<R, P>(this->acc, this->acc_stride);
        SpreadPrefetch fetch = ahead;
        fetch.start(this->words);
#if defined(__AMX_TILE__)
        if constexpr (BY_TILES<Dot>) {
            each_pair<P>([&](auto p, auto some) __attribute__((always_inline)) {
                product_of_expanded<Dot, R, some>(x, this->x_stride, this->words, group_words, w + p, this->acc + p,
                                                  this->acc_stride, fetch);
            });
            return;
        }
#endif
        for (int64_t done = 0, count; done < this->words; done += count) {
            count = std::min(group_words, this->words - done);
            F sums[R][P], scale[P];
            start_sums<Dot>(sums);
            const char *scales[P];
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) scales[p] = w[p], w[p] += PANEL_WORD_BYTES;
            tile<Dot, R, P>(sums, x, this->x_stride, w, count, fetch);
            x += count * Steps<Dot>::X_BYTES;
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) {
                scale[p] = load(reinterpret_cast<const float *>(scales[p]));
                w[p] += count * PANEL_WORD_BYTES;
            }
            add_scaled(this->acc, this->acc_stride, sums, scale);
        }
    }
};

// Panels of weights of four bits; the interface is described at Plain (product.h).
template <class D>
struct Int4 : Int4Panels<D> {
    typedef D Dot;
    using Int4Panels<D>::Int4Panels;
    using Int4Panels<D>::groups;

    // Without an instruction for bfloat16, x is in float32 (Steps), and both dtypes have the same tiles.
    typedef typename Inner<Dot>::type OnceDot;
#if defined(__AMX_TILE__)
    typedef std::conditional_t<BY_TILES<Dot>, Int4TileOrderOnceTile<OnceDot>, Int4OnceTile<OnceDot>> Once;
#else
    typedef Int4OnceTile<OnceDot> Once;
#endif
    INLINE Once once(const Tile<Dot> &tile, const char *const *next) const {
        return {{tile.x, tile.x_stride, tile.words * Inner<Dot>::WORDS, tile.panels, tile.acc, tile.acc_stride, tile.fresh},
                groups, next};
    }
    template <class TileDot, bool>
    INLINE Int4BlockTile<TileDot> in_block(const Tile<TileDot> &tile, const SpreadPrefetch &ahead) const {
        return {tile, groups.group / TileDot::PER_WORD, ahead};
    }
    // Expanded panels stay in the second-level cache.
    static int64_t block(int64_t, int64_t words) {
#if defined(__AMX_TILE__)
        if (BY_TILES<Dot>) return Int4::block_of(words, 384);  // two panels stay in the first-level cache
#endif
        return Int4::block_of(words, LineSteps<Dot>::PAIRS ? 3072 : 256);
    }
#if defined(__AMX_TILE__)
    static bool prefers_tall_tiles(int64_t) { return BY_TILES<Dot>; }  // a tile register of weights serves all rows
#endif
    void expand(const char *block, int64_t words, char *out) const {
        typedef typename Inner<Dot>::type By;
        if (groups.has_zeros)
            expand_groups<By, true>(groups, block, words * Dot::PER_WORD, out);
        else
            expand_groups<By, false>(groups, block, words * Dot::PER_WORD, out);
    }
};

template <class D>
struct Int4Floats : Floats<D> {
    typedef Int4<typename Floats<D>::Dot> Panels;
    using Floats<D>::Floats;
};

#define OF_INT4(name, type) \
    KERNEL(name "_int4/float32", type<Int4Floats<Float32>>), KERNEL(name "_int4/bfloat16", type<Int4Floats<BFloat16>>)

extern const Kernel INT4[] = {
    OF_INT4("linear", Linear),
    OF_INT4("linear_swiglu", LinearSwiglu),
    OF_INT4("linear_argmax", LinearArgmax),
    OF_INT4("argmax_of_units", ArgmaxOfUnits),
    OF_INT4("linear_experts", LinearExperts),
    OF_INT4("linear_swiglu_experts", LinearSwigluExperts),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
