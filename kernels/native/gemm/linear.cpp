// Products with packed weights.
//
// Packed: [N / 16] panels of [words of K] of 16 words (tile.h); N and K are padded with zeros. int8 numbers are stored plus
// DotInt8::W_OFFSET, which depends on the instruction set; so is the padding of K.
//
//   linear         p: x [T, K], packed weights, bias [N] or null, out [T, N]        n: T, K, N
//   linear_swiglu  p: as linear, weights of gate and up; out [T, N / 2], N / 2 a multiple of 16
//   linear_argmax  p: x, packed weights, bias or null, best [panels, T] float32, ids [panels, T] int32: for each group
//                     of panels the largest output after rounding to its dtype, and its column
//                  n: T, K, N, vocabulary (the columns that count), words of a mask
//   argmax_of_units  p: best, ids, out [T] int64: the first column of the largest; 0 where none is above minus
//                     infinity; pairs [T, 2] float32 or null (epilogue.h)           n: T, K, N, id of the first column
//   pack           p: dense [T, K], packed, failed [1] int32, which only pack_compact sets   n: T, K, row of the first
//   unpack         p: packed, dense [T, K], row numbers [T] int64: also the embedding of ids   n: T, K
//   embedding_int8  p: row numbers [T] int64, packed, out [T, K], scale of each of the table's rows float32, zero int32
//                     or null                                                       n: T, K
//
// Masks of `linear_argmax` may be the last pointers (rows/masks.h): bits [masks, words] int32, and the mask of each row
// [T] int32. Masked columns do not count.
//
// The first four also exist with the suffix _int8, for int8 x and weights. In the products more pointers follow from p[5]
// on. The first are x_scale [T] float32, and scale [N] float32 and sum [N] int32 of each weight row. Then follow int32
// zeros [T] of x or null, int32 zeros [N] of weight rows or null, and the int32 sums [T] of x's rows.
#include <algorithm>

#include "gemm/epilogue.h"
#include "gemm/experts.h"

namespace npuserve {
namespace NPUSERVE_ISA {

template <class T, class Dot>
struct Pack {
    static constexpr int64_t ROWS = 16;
    static int64_t units(const Call &call) { return ceil_div<int64_t>(call.rows + LANES, ROWS); }
    // A unit is a panel; the source may fill any of its rows.
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        int64_t k = op.n[1], first = op.n[2], words = words_of<Dot>(k);
        int64_t panel = first / LANES + unit;
        int64_t begin = std::max(first, panel * LANES), end = std::min(first + call.rows, (panel + 1) * LANES);
        uint32_t *out = op.at<uint32_t>(1) + panel * words * LANES;
        for (int64_t w = 0; w < words; w += LANES) {
            int64_t count = std::min<int64_t>(LANES, words - w);
            size_t bytes = size_t(std::min(count * Dot::PER_WORD, k - w * Dot::PER_WORD)) * sizeof(T);
            for (int64_t r = begin; r < end; r++) {
                const T *in = op.at<const T>(0) + (r - first) * k + w * Dot::PER_WORD;
                uint32_t line[LANES] = {};
                if (bytes == sizeof(line))
                    std::memcpy(line, in, sizeof(line));
                else
                    std::memcpy(line, in, bytes);
                for (int64_t i = 0; i < count; i++) out[(w + i) * LANES + r % LANES] = line[i] ^ Dot::W_BITS;
            }
        }
    }
};

template <class T, class Dot>
struct Unpack {
    static constexpr int64_t ROWS = 8;
    static int64_t units(const Call &call) { return ceil_div<int64_t>(call.rows, ROWS); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        int64_t k = op.n[1], words = words_of<Dot>(k), whole = k / Dot::PER_WORD;
        for (int64_t i = unit * ROWS; i < std::min(call.rows, (unit + 1) * ROWS); i++) {
            int64_t row = op.at<int64_t>(2)[i];
            const uint32_t *in = op.at<uint32_t>(0) + row / LANES * words * LANES + row % LANES;
            T *out = op.at<T>(1) + i * k;
            for (int64_t w = 0; w < words; w++) {
                uint32_t word = in[w * LANES] ^ Dot::W_BITS;
                if (w < whole)
                    std::memcpy(out + w * Dot::PER_WORD, &word, sizeof word);
                else
                    std::memcpy(out + w * Dot::PER_WORD, &word, size_t(k % Dot::PER_WORD) * sizeof(T));
            }
        }
    }
};

// Converts rows of an int8 table to D.
template <class D>
struct EmbeddingInt8 {
    static int64_t units(const Call &call) { return call.rows; }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        int64_t k = op.n[1], words = words_of<DotInt8>(k), row = op.at<int64_t>(0)[unit];
        const uint32_t *in = op.at<uint32_t>(1) + row / LANES * words * LANES + row % LANES;
        typename D::type *out = op.at<typename D::type>(2) + unit * k;
        const int32_t *zeros = op.at<int32_t>(4);
        F scale = set1(op.at<float>(3)[row]), zero = set1(zeros ? float(zeros[row]) : 0.0f);
        by_lanes(k, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            int8_t line[LANES] = {};
            for (int64_t j = 0; j < n; j += 4) {
                uint32_t word = in[(i + j) / 4 * LANES] ^ DotInt8::W_BITS;
                std::memcpy(line + j, &word, sizeof word);
            }
            put_n<D>(out + i, (to_float(line) - zero) * scale, n);
        });
    }
};

typedef Pack<float, DotFloat32> PackFloat32;
typedef Pack<uint16_t, DotBFloat16> PackBFloat16;
typedef Pack<int8_t, DotInt8> PackInt8;
typedef Unpack<float, DotFloat32> UnpackFloat32;
typedef Unpack<uint16_t, DotBFloat16> UnpackBFloat16;
typedef Unpack<int8_t, DotInt8> UnpackInt8;

#define BY_OPERANDS(name, type)                                                        \
    KERNEL(name "/float32", type<Floats<Float32>>), KERNEL(name "/bfloat16", type<Floats<BFloat16>>), \
        KERNEL(name "_int8/float32", type<Int8s<Float32>>), KERNEL(name "_int8/bfloat16", type<Int8s<BFloat16>>)

#if !defined(__AMX_TILE__)  // compact.cpp and nibbles.cpp call these, too
template void with_tile(int, int, const BlockTile<Inner<DotBFloat16>::type> &);
template void with_tile(int, int, const BlockTile<DotInt8> &);
#endif

extern const Kernel LINEAR[] = {
    BY_OPERANDS("linear", Linear),
    BY_OPERANDS("linear_swiglu", LinearSwiglu),
    BY_OPERANDS("linear_argmax", LinearArgmax),
    BY_OPERANDS("argmax_of_units", ArgmaxOfUnits),
    BY_OPERANDS("linear_experts", LinearExperts),
    BY_OPERANDS("linear_swiglu_experts", LinearSwigluExperts),
    BY_DTYPE("embedding_int8", EmbeddingInt8),
    KERNEL("pack/float32", PackFloat32),
    KERNEL("pack/bfloat16", PackBFloat16),
    KERNEL("pack/int8", PackInt8),
    KERNEL("unpack/float32", UnpackFloat32),
    KERNEL("unpack/bfloat16", UnpackBFloat16),
    KERNEL("unpack/int8", UnpackInt8),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
