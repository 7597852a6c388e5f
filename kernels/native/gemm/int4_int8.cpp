// Products with weights of four bits in groups, and int8 activations (W4A8).
//
//   linear_int4_int8, linear_swiglu_int4_int8, linear_argmax_int4_int8, argmax_of_units_int4_int8, linear_experts_int4_int8,
//   linear_swiglu_experts_int4_int8     as in int4.cpp, for int8 x and weights without zero points; p[5]: x_scale [T] float32
//
// The sum of a group is exact in int32. int4.h has the form of packed weights.
#include "gemm/experts.h"
#include "gemm/int4.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Product of four numbers of x and w at a time; a tile adds up groups by DotInt8.
struct DotInt4Int8 {
    static constexpr int PER_WORD = 4;
    typedef F Acc;
    static INLINE Acc start() { return zero(); }
};

// Bytes of weights are the codes 0 .. 15 where an instruction multiplies unsigned by signed bytes. The sum of a group then
// begins with minus CODE_OFFSET times the sum of x.
constexpr int32_t CODE_OFFSET = BYTE_DOT ? 8 : 0;

// A row of a block of x has its words, four bytes each in the order of `line_bytes`, and then for each SUMMED numbers the
// beginning of their sum in int32.
constexpr int64_t SUMMED = 32;

template <>
struct Steps<DotInt4Int8> {
    typedef Steps<DotInt8> Bytes;
    static constexpr int64_t X_BYTES = Bytes::X_BYTES + 4;
    static constexpr bool COPIES = true;
    static void copy(const int8_t *x, int64_t count, char *to) {
        static_assert(LINE_NUMBERS == 8, "two words");
        for (int64_t i = 0; i < count; i += LINE_NUMBERS) {
            const int8_t line[LINE_NUMBERS] = {x[i], x[i + 4], x[i + 1], x[i + 5], x[i + 2], x[i + 6], x[i + 3], x[i + 7]};
            Bytes::copy(line, LINE_NUMBERS, to + i / 4 * Bytes::X_BYTES);
        }
        int32_t *sums = reinterpret_cast<int32_t *>(to + count / 4 * Bytes::X_BYTES);
        for (int64_t i = 0; i < count; i += SUMMED) {
            int32_t sum = 0;
            for (int64_t j = i; j < std::min(count, i + SUMMED); j++) sum += x[j];
            sums[i / SUMMED] = -CODE_OFFSET * sum;
        }
    }
};

constexpr int64_t X_WORD_BYTES = Steps<DotInt8>::X_BYTES;

// Bytes of a line: numbers 0, 4, 1, 5 of each column, and 2, 6, 3, 7.
template <int HALF>
INLINE ivec line_bytes(const char *line, int part) {
    ivec codes = (ivec)((uvec)load_words(line, part) >> (4 * HALF)) & 0x0F0F0F0F;
    if (CODE_OFFSET) return codes;
    return codes ^ 0x08080808 ^ ((~codes & 0x08080808) * 30);  // less 8, byte by byte
}

// Begins the sums of a group. x_sums: of row 0 in the group, as many as `parts`.
template <int R, int P>
INLINE void start_group(I (&sums)[R][P], const char *x_sums, int64_t x_stride, int64_t parts) {
    _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
        int32_t first = 0;
        if (CODE_OFFSET) {
            const int32_t *of_row = reinterpret_cast<const int32_t *>(x_sums + r * x_stride);
            static_assert(Int4Panels<DotInt4Int8>::MAX_GROUP == 4 * SUMMED, "up to four parts");
            first = of_row[0];  // not a loop, which compilers would vectorize for any number of parts
            if (parts > 1) first += of_row[1];
            if (parts > 2) first += of_row[2];
            if (parts > 3) first += of_row[3];
        }
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) EACH(i) sums[r][p].v[i] = ivec{} + first;
    }
}

// Adds the sums of a group times its scales to the accumulators.
template <int R, int P>
INLINE void add_group(F *acc, int stride, const I (&sums)[R][P], const F (&scale)[P]) {
    _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++)
            acc[r * stride + p] = fma(scale[p], to_float(sums[r][p]), acc[r * stride + p]);
}

// Tile of packed panels that are multiplied by no other rows: each line becomes bytes in registers.
struct Int4Int8OnceTile : Tile<DotInt4Int8> {
    Groups groups;
    const char *const *next;

    template <int R, int P>
    __attribute__((noinline)) void run() const {
        const char *x = this->x, *x_sums = x + words * X_WORD_BYTES;
        int64_t left = words * DotInt4Int8::PER_WORD;
        Lines<P> lines(panels, next, groups.bytes(left));
        clear<R, P>(acc, acc_stride);
        for (int64_t count; left > 0; left -= count) {
            count = std::min(left, groups.group);
            int64_t parts = ceil_div(count, SUMMED);
            I sums[R][P];
            F scale[P];
            start_group(sums, x_sums, x_stride, parts);
            x_sums += parts * 4;
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) scale[p] = groups.scale(lines.at[p]);
            lines.skip(groups.header);
            for (int64_t i = 0; i < count; i += LINE_NUMBERS) {
                lines.fetch();
                half<0>(sums, x, lines.at);
                half<1>(sums, x + X_WORD_BYTES, lines.at);
                x += 2 * X_WORD_BYTES;
                lines.skip(Lines<P>::LINE_BYTES);
            }
            add_group(acc, acc_stride, sums, scale);
        }
    }

  private:
    template <int HALF, int R, int P>
    INLINE void half(I (&sums)[R][P], const char *x, const char *const (&w)[P]) const {
#if BYTE_DOT
        typedef Steps<DotInt8> By;
        typename By::W v[P];
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) EACH(i) v[p].v[i] = line_bytes<HALF>(w[p], i);
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
            auto spread = By::template spread<0>(x + r * x_stride);
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) By::step(sums[r][p], v[p], spread);
        }
#else
        alignas(64) ivec bytes[P][PARTS];
        const char *word[P];
        _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) {
            EACH(i) bytes[p][i] = line_bytes<HALF>(w[p], i);
            word[p] = reinterpret_cast<const char *>(bytes[p]);
        }
        tile_step<DotInt8>(sums, x, x_stride, word);
#endif
    }
};

// Tile of expanded panels in the cache. Before the words of each group are its scales in float32.
struct Int4Int8BlockTile : Tile<DotInt4Int8> {
    int64_t group_words;
    SpreadPrefetch ahead;

    template <int R, int P>
    __attribute__((noinline)) void run() const {
        const char *w[P], *x = this->x, *x_sums = x + words * X_WORD_BYTES;
        for (int p = 0; p < P; p++) w[p] = panels[p];
        if (fresh) clear<R, P>(acc, acc_stride);
        SpreadPrefetch fetch = ahead;
        fetch.start(words);
        for (int64_t done = 0, count; done < words; done += count) {
            count = std::min(group_words, words - done);
            int64_t parts = ceil_div(count * DotInt4Int8::PER_WORD, SUMMED);
            I sums[R][P];
            F scale[P];
            start_group(sums, x_sums, x_stride, parts);
            x_sums += parts * 4;
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) w[p] += PANEL_WORD_BYTES;
            tile<DotInt8, R, P>(sums, x, x_stride, w, count, fetch);
            x += count * X_WORD_BYTES;
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) {
                scale[p] = load(reinterpret_cast<const float *>(w[p] - PANEL_WORD_BYTES));
                w[p] += count * PANEL_WORD_BYTES;
            }
            add_group(acc, acc_stride, sums, scale);
        }
    }
};

struct Int4Bytes : Int4Panels<DotInt4Int8> {
    using Int4Panels<DotInt4Int8>::Int4Panels;

    INLINE Int4Int8OnceTile once(const Tile<DotInt4Int8> &tile, const char *const *next) const {
        return {tile, groups, next};
    }
    template <class, bool>
    INLINE Int4Int8BlockTile in_block(const Tile<DotInt4Int8> &tile, const SpreadPrefetch &ahead) const {
        return {tile, groups.group / DotInt4Int8::PER_WORD, ahead};
    }
    // Expanded panels stay in the second-level cache.
    static int64_t block(int64_t, int64_t words) { return block_of(words, 4096); }
    void expand(const char *w, int64_t words, char *out) const {
        for (int64_t left = words * DotInt4Int8::PER_WORD, count; left > 0; left -= count) {
            count = std::min(left, groups.group);
            store(reinterpret_cast<float *>(out), groups.scale(w));
            w += groups.header, out += PANEL_WORD_BYTES;
            for (int64_t i = 0; i < count; i += LINE_NUMBERS, w += 64, out += 2 * PANEL_WORD_BYTES) EACH(j) {
                ivec first = line_bytes<0>(w, j), second = line_bytes<1>(w, j);
                std::memcpy(out + j * WIDTH * 4, &first, sizeof first);
                std::memcpy(out + PANEL_WORD_BYTES + j * WIDTH * 4, &second, sizeof second);
            }
        }
    }
};

// An accumulator times the scale of its row, plus bias.
template <class D>
struct Int4Int8s {
    typedef D Out;
    typedef DotInt4Int8 Dot;
    typedef Int4Bytes Panels;
    typedef int8_t X;
    static constexpr int POINTERS = 6;
    const typename D::type *bias;
    const float *x_scale;

    explicit Int4Int8s(const Op &op) : bias(op.at<typename D::type>(2)), x_scale(op.at<float>(5)) {}
    static void advance(Op &op, int64_t row, int64_t) { op.p[5] = op.at<float>(5) + row; }

    struct Columns {
        const float *x_scale;
        bool biased;
        F bias;
        INLINE F operator()(int64_t row, const F &acc) const {
            F x = acc * set1(x_scale[row]);
            return biased ? x + bias : x;
        }
    };
    INLINE Columns columns(int64_t column, int64_t n) const {
        return {x_scale, bias != nullptr, bias ? get_n<D>(bias + column, n) : zero()};
    }
};

#define OF_INT4_INT8(name, type)                                                                 \
    KERNEL(name "_int4_int8/float32", type<Int4Int8s<Float32>>), KERNEL(name "_int4_int8/bfloat16", \
                                                                      type<Int4Int8s<BFloat16>>)

extern const Kernel INT4_INT8[] = {
    OF_INT4_INT8("linear", Linear),
    OF_INT4_INT8("linear_swiglu", LinearSwiglu),
    OF_INT4_INT8("linear_argmax", LinearArgmax),
    OF_INT4_INT8("argmax_of_units", ArgmaxOfUnits),
    OF_INT4_INT8("linear_experts", LinearExperts),
    OF_INT4_INT8("linear_swiglu_experts", LinearSwigluExperts),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
