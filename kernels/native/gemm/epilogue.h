// Epilogues of products: outputs, gated outputs, or the largest of the outputs.
#pragma once

#include "gemm/amx_product.h"
#include "gemm/product.h"
#include "rows/masks.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Float weights and x of a product. An accumulator becomes the output of its column before rounding to D.
template <class D>
struct Floats {
    typedef D Out;
    typedef typename DotOf<D>::type Dot;
    typedef Plain<Dot> Panels;
    typedef typename D::type X;
    static constexpr int POINTERS = 5;
    const X *bias;

    explicit Floats(const Op &op) : bias(op.at<X>(2)) {}
    // Moves the pointers beside x, weight and output to a row of x and a column of the output.
    static void advance(Op &, int64_t, int64_t) {}

    struct Columns {
        bool biased;
        F bias;
        INLINE F operator()(int64_t, const F &acc) const { return biased ? acc + bias : acc; }
    };
    INLINE Columns columns(int64_t column, int64_t n) const {
        return {bias != nullptr, bias ? get_n<D>(bias + column, n) : zero()};
    }
};

template <class D>
struct Int8s {
    typedef D Out;
    typedef DotInt8 Dot;
    typedef Plain<Dot> Panels;
    typedef int8_t X;
    static constexpr int POINTERS = 11;
    const typename D::type *bias;
    const float *x_scale, *w_scale;
    const int32_t *w_sum, *x_zero, *w_zero, *x_sum;
    int64_t k;

    explicit Int8s(const Op &op)
        : bias(op.at<typename D::type>(2)), x_scale(op.at<float>(5)), w_scale(op.at<float>(6)),
          w_sum(op.at<int32_t>(7)), x_zero(op.at<int32_t>(8)), w_zero(op.at<int32_t>(9)), x_sum(op.at<int32_t>(10)),
          k(op.n[1]) {}
    static void advance(Op &op, int64_t row, int64_t column) {
        for (int i : {5, 8, 10})
            if (op.p[i]) op.p[i] = op.at<int32_t>(i) + row;
        for (int i : {6, 7, 9})
            if (op.p[i]) op.p[i] = op.at<int32_t>(i) + column;
    }

    struct Columns {
        Int8s of;  // a copy stays in registers between stores
        const float *x_scale;
        bool plain;  // no zeros and no bias
        F scale, bias;
        I sum, zeros;
        // The exact sum of (x - x_zero) * (w - w_zero), times both scales, plus bias.
        INLINE F operator()(int64_t row, const Dot::Acc &acc) const {
            I total = Dot::W_OFFSET ? acc - of.x_sum[row] * Dot::W_OFFSET : acc;
            if (plain) return to_float(total) * (scale * set1(x_scale[row]));
            int32_t zero = of.x_zero ? of.x_zero[row] : 0;
            if (of.x_zero) total = total - sum * zero;
            if (of.w_zero) total = total - zeros * (of.x_sum[row] - int32_t(of.k) * zero);
            F x = to_float(total) * (scale * set1(x_scale[row]));
            return of.bias ? x + bias : x;
        }
    };
    INLINE Columns columns(int64_t column, int64_t n) const {
        return {*this,
                x_scale,
                !x_zero && !w_zero && !bias,
                get_n<Float32>(w_scale + column, n),
                bias ? get_n<D>(bias + column, n) : zero(),
                x_zero ? get_n(w_sum + column, n) : I{},
                w_zero ? get_n(w_zero + column, n) : I{}};
    }
};

#if defined(__AMX_TILE__)
template <class Of>
constexpr bool TAKES_TILES = BY_TILES<typename Of::Dot> && Of::Panels::TILES;
#endif

template <class Of>
Split split_of(const Call &call, bool paired = false) {
    int64_t words = words_of<typename Of::Dot>(call.op.n[1]);
#if defined(__AMX_TILE__)
    if (TAKES_TILES<Of>) return Split::of_tiles(call.rows, words, call.op.n[2], call.threads);
#endif
    bool whole = Of::Panels::block(call.rows, words) >= words;
    return Split(call.rows, words, call.op.n[2], call.threads, paired, whole, Of::Panels::prefers_tall_tiles(call.rows));
}

// Work and memory of a unit, with tiles or with vectors.
#if defined(__AMX_TILE__)
template <class Of>
using UnitLayoutOf = std::conditional_t<TAKES_TILES<Of>, TileUnitLayout<Of>, UnitLayout<Of>>;
template <class Of, class Take>
using UnitOf = std::conditional_t<TAKES_TILES<Of>, TileUnit<Of, Take>, Unit<Of, Take>>;
#else
template <class Of>
using UnitLayoutOf = UnitLayout<Of>;
template <class Of, class Take>
using UnitOf = Unit<Of, Take>;
#endif

template <class Of, class Take>
INLINE void run_product(const Call &call, const Split &split, int64_t unit, const Take &take) {
    char *memory = static_cast<char *>(scratch(size_t(UnitLayoutOf<Of>(call, split).bytes())));
    UnitOf<Of, Take>(call, split, unit, take, memory).run();
}

// Prefetches n numbers of some rows for writing. Outputs of many rows are in no cache, and stores would wait.
template <class T>
INLINE void prefetch_outputs(T *out, int64_t columns, int rows, int64_t n) {
    for (int r = 0; r < rows; r++, out += columns)
        for (int64_t i = 0; i < n; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(out + i, 1, 3);
}

template <class Of>
struct Store {
    typedef typename Of::Out D;
    typedef typename Of::Dot::Acc Acc;
    static constexpr bool PAIRED = false;
    Of value;
    typename D::type *out;
    int64_t columns;
    INLINE void prefetch(int64_t row, int rows, int64_t column, int64_t n) const {
        prefetch_outputs(out + row * columns + column, columns, rows, n);
    }
    INLINE void operator()(int64_t row, int rows, int64_t column, const Acc *acc, int stride, int64_t n) const {
        auto made = value.columns(column, n);
        for (int i = 0; i < rows; i++)
            put_n<D>(out + (row + i) * columns + column, made(row + i, acc[i * stride]), n);
    }
};

template <class Of>
struct Linear {
    static int64_t units(const Call &call) { return split_of<Of>(call).units(); }
    static void run(const Call &call, int64_t unit) {
        Store<Of> store{Of(call.op), call.op.at<typename Of::Out::type>(3), call.op.n[2]};
        run_product<Of>(call, split_of<Of>(call), unit, store);
    }
};

// out = silu(gate) * up, rounded as by the two kernels in sequence.
template <class Of>
struct StoreSwiglu {
    typedef typename Of::Out D;
    typedef typename Of::Dot::Acc Acc;
    static constexpr bool PAIRED = true;
    Of value;
    typename D::type *out;
    int64_t columns;  // columns of out
    INLINE void prefetch(int64_t row, int rows, int64_t column, int64_t n) const {
        prefetch_outputs(out + row * columns + column / 2, columns, rows, n / 2);
    }
    INLINE void operator()(int64_t row, int rows, int64_t column, const Acc *accs, int stride, int64_t n) const {
        auto gates = value.columns(column, n), ups = value.columns(columns + column, n);
        for (int i = 0; i < rows; i++) {
            F gate = gates(row + i, accs[i * stride]), up = ups(row + i, accs[i * stride + 1]);
            put_n<D>(out + (row + i) * columns + column, silu<D>(D::round(gate)) * D::round(up), n);
        }
    }
};

template <class Of>
struct LinearSwiglu {
    static int64_t units(const Call &call) { return split_of<Of>(call, true).units(); }
    static void run(const Call &call, int64_t unit) {
        StoreSwiglu<Of> store{Of(call.op), call.op.at<typename Of::Out::type>(3), call.op.n[2] / 2};
        run_product<Of>(call, split_of<Of>(call, true), unit, store);
    }
};

// Keeps, by row and lane, the largest allowed output after rounding to its dtype, and the first column that has it.
template <class Of>
struct KeepLargest {
    typedef typename Of::Dot::Acc Acc;
    static constexpr bool PAIRED = false;
    Of value;
    float *best;   // [rows, 16]
    int32_t *ids;  // [rows, 16]
    int64_t counting, first_row;
    Masks masks;
    INLINE void prefetch(int64_t, int, int64_t, int64_t) const {}
    INLINE void operator()(int64_t row, int rows, int64_t column, const Acc *acc, int stride, int64_t n) const {
        auto made = value.columns(column, n);
        const KeepLargest keep = *this;  // a copy stays in registers between stores
        for (int i = 0; i < rows; i++) {
            F x = first(Of::Out::round(made(row + i, acc[i * stride])), keep.counting - column, set1(-INFINITY));
            if (const int32_t *mask = keep.masks.of(row + i)) x = keep.masks.apply(mask, column, x);
            int64_t at = (row + i - keep.first_row) * LANES;
            EACH(j) {
                fvec_u &most = *reinterpret_cast<fvec_u *>(keep.best + at + j * WIDTH);
                ivec_u &id = *reinterpret_cast<ivec_u *>(keep.ids + at + j * WIDTH);
                ivec larger = x.v[j] > most;
                most = larger ? x.v[j] : most;
                id = larger ? lane_numbers(j) + int32_t(column) : id;
            }
        }
    }
};

// Writes the largest of each row's 16 lanes, and the first of the columns that have it. Not inlined, so that the kernels of
// a source share it.
__attribute__((noinline)) inline void put_largest(const float *best, const int32_t *ids, int64_t rows, float *to,
                                                  int32_t *id_to) {
    for (int64_t r = 0; r < rows; r++) {
        float largest = -INFINITY;
        int32_t id = INT32_MAX;
        for (int i = 0; i < LANES; i++) {
            float b = best[r * LANES + i];
            int32_t c = ids[r * LANES + i];
            if (b > largest || (b == largest && c < id)) largest = b, id = c;
        }
        to[r] = largest, id_to[r] = id;
    }
}

template <class Of>
struct LinearArgmax {
    static int64_t units(const Call &call) { return split_of<Of>(call).units(); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        Split split = split_of<Of>(call);
        int64_t row = split.row_group(unit) * split.rows_per_unit;
        int64_t rows = std::min(split.rows_per_unit, call.rows - row);
        // The product's memory is first, and all units ask for the same size: its address stays the same (Call::again).
        int64_t of_product = UnitLayoutOf<Of>(call, split).bytes();
        char *memory = static_cast<char *>(scratch(size_t(of_product + split.rows_per_unit * LANES * 8)));
        float *best = reinterpret_cast<float *>(memory + of_product);
        int32_t *ids = reinterpret_cast<int32_t *>(best + rows * LANES);
        for (int64_t i = 0; i < rows * LANES; i++) best[i] = -INFINITY, ids[i] = INT32_MAX;
        KeepLargest<Of> keep{Of(op), best, ids, op.n[3], row, Masks(op, Of::POINTERS, op.n[4])};
        UnitOf<Of, KeepLargest<Of>>(call, split, unit, keep, memory).run();
        int64_t at = split.panel_group(unit) * call.rows + row;
        put_largest(best, ids, rows, op.at<float>(3) + at, op.at<int32_t>(4) + at);
    }
};

// p: best and ids of `linear_argmax`, out, pairs [T, 2] float32 or null; n: T, K, N of that call, so that the groups of
// panels are the same, and the first id. Pairs are (largest, first id + column) for a part of a vocabulary.
template <class Of>
struct ArgmaxOfUnits {
    static int64_t units(const Call &) { return 1; }
    static void run(const Call &call, int64_t) {
        const Op &op = call.op;
        int64_t groups = split_of<Of>(call).panel_groups;
        for (int64_t row = 0; row < call.rows; row++) {
            float largest = -INFINITY;
            int32_t id = 0;
            for (int64_t g = 0; g < groups; g++) {
                float b = op.at<float>(0)[g * call.rows + row];
                if (b > largest) largest = b, id = op.at<int32_t>(1)[g * call.rows + row];
            }
            op.at<int64_t>(2)[row] = id;
            if (float *pairs = op.at<float>(3)) pairs[2 * row] = largest, pairs[2 * row + 1] = float(op.n[3] + id);
        }
    }
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
