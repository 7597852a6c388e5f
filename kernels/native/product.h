// Products with weights in panels: how they fall into units, what a unit does, and where the results go. The form of
// the weights is a parameter: see linear.cpp for the plain one, compact.cpp for the other.
#pragma once

#include <algorithm>

#include "tile.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Accumulators of a tile: where registers are few, weights and x take more of them than in other kernels.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int TILE_ACC = 5;
#else
constexpr int TILE_ACC = MAX_ACC;
#endif
// Rows of a tile, at most: where it is the only one of its panels; where the panels meet few, or many.
constexpr int ONCE_ROWS = TILE_ACC >= 24 ? TILE_ACC / 2 : TILE_ACC;
constexpr int FEW_ROWS = TILE_ACC >= 24 ? 8 : TILE_ACC;
constexpr int MANY_ROWS = TILE_ACC < 6 ? TILE_ACC : 6;
constexpr int MAX_PANELS = 4;
constexpr int widest_tile(int rows) { return panels_for(rows, MAX_PANELS, TILE_ACC); }

// How a product falls into units: groups of panels times groups of rows.
struct Split {
    int64_t panels, panels_per_unit, panel_groups, rows_per_unit, row_groups;
    int tile_rows, tile_panels;
    bool once;  // each weight meets all rows in one tile

    Split(int64_t rows, int64_t words, int64_t columns, int threads, bool paired = false) {
        panels = ceil_div<int64_t>(columns, LANES);
        once = rows <= ONCE_ROWS;
        if (once) {
            // The weights are read once: units are small, so that threads end together.
            tile_rows = int(rows);
            tile_panels = tile_panels_of(tile_rows, paired);
            int64_t bytes = tile_panels * words * 64;
            panels_per_unit = tile_panels * std::max<int64_t>(1, UNIT_BYTES / bytes);
            rows_per_unit = rows;
        } else {
            // Blocks of rows, of one size if there are few, share a panel in the cache. Where there are too few columns
            // for all threads to end together, units are narrower, and cut by rows too if there are many.
            bool few = rows <= NARROW_ROWS;
            int most = few && !paired ? FEW_ROWS : MANY_ROWS;
            if (few && panels < LEAST_UNITS_PER_THREAD * threads * widest_tile(most)) most = ONCE_ROWS;
            tile_rows = few ? int(ceil_div(rows, ceil_div<int64_t>(rows, most))) : most;
            tile_panels = tile_panels_of(tile_rows, paired);
            panels_per_unit = tile_panels;
            int64_t groups = ceil_div(panels, panels_per_unit);
            int64_t cuts = few ? 1 : ceil_div(UNITS_PER_THREAD * threads, groups);
            rows_per_unit = ceil_div(ceil_div(rows, cuts), int64_t(tile_rows)) * tile_rows;
        }
        rows_per_unit = std::max<int64_t>(rows_per_unit, 1);
        panel_groups = ceil_div(panels, panels_per_unit);
        row_groups = ceil_div(rows, rows_per_unit);
    }
    int64_t units() const { return panel_groups * row_groups; }
    static int tile_panels_of(int rows, bool paired) {
        return paired ? std::max(2, widest_tile(rows) / 2 * 2) : widest_tile(rows);
    }

    static constexpr int64_t UNIT_BYTES = 64 << 10;
    static constexpr int64_t UNITS_PER_THREAD = 16, LEAST_UNITS_PER_THREAD = 10;
    static constexpr int64_t NARROW_ROWS = 64;
};

template <class Dot>
int64_t words_of(int64_t k) {
    return ceil_div<int64_t>(k, Dot::PER_WORD);
}

// The product of one tile. The accumulator of row r and panel p goes to out[r * out_stride + p].
template <class Dot, bool ONCE>
struct Tile {
    const char *x;  // of the tile's first row
    int64_t x_stride, words, tail_bytes;
    const char *const *panels;
    const char *const *next;  // ONCE: the panels that follow these; else two runs of words that this thread reads
                              // later, of which the second may be null
    typename Dot::Acc *out;
    int out_stride;
    int64_t next_stride = 64;  // bytes from one of `next`'s words to the following

    // With few rows the processor follows the panels by itself, and faster than with our help. With more it does not
    // see far enough ahead.
    static constexpr int FOLLOWED_ROWS = 2;
    static constexpr int64_t AHEAD = 2048;  // bytes

    template <int R, int P>
    __attribute__((noinline)) void run() const {
        typename Dot::Acc acc[R][P];
        const char *w[P], *ahead[P];
        for (int p = 0; p < P; p++) w[p] = panels[p], ahead[p] = panels[p] + AHEAD;
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) acc[r][p] = Dot::start();
        constexpr int FETCHED = !ONCE ? 2 : R > FOLLOWED_ROWS ? P : 0;
        int64_t last = ONCE && FETCHED ? std::min(words, AHEAD / 64) : 0;
        tile<Dot, R, P, FETCHED, !ONCE>(acc, x, x_stride, w, 64, words - last, ONCE ? ahead : next, next_stride);
        if (last) {
            for (int p = 0; p < P; p++) w[p] += (words - last) * 64;
            tile<Dot, R, P, FETCHED, !ONCE>(acc, x + (words - last) * 4, x_stride, w, 64, last, next, next_stride);
        }
        if (tail_bytes) {
            for (int p = 0; p < P; p++) w[p] = panels[p] + words * 64;
            tile_tail<Dot, R, P>(acc, x + words * 4, x_stride, w, tail_bytes);
        }
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) out[r * out_stride + p] = acc[r][p];
    }
};

template <int R, int P, class Function>
INLINE void with_panels(int p, const Function &f) {
    if constexpr (P > 1) {
        if (p < P) return with_panels<R, P - 1>(p, f);
    }
    f.template run<R, P>();
}

// Calls f.template run<R, P>() for the tile of run-time sizes 1 <= r <= ONCE_ROWS, 1 <= p <= widest_tile(r).
template <int R = ONCE_ROWS, class Function>
INLINE void with_tile(int r, int p, const Function &f) {
    if constexpr (R > 1) {
        if (r < R) return with_tile<R - 1>(r, p, f);
    }
    with_panels<R, widest_tile(R)>(p, f);
}

// Panels of words as they are, of a product by Dot.
template <class Dot>
struct Plain {
    static int64_t panel_bytes(int64_t k) { return words_of<Dot>(k) * 64; }
    // Bytes of memory that a unit works in.
    static int64_t room(const Split &, int64_t) { return 0; }
    // The product of a tile: the only one of its panels, or that of the block of rows of this number. place: that of
    // its first panel among those of the unit's group.
    static INLINE void once(int rows, int p, const Tile<Dot, true> &tile) { with_tile(rows, p, tile); }
    static INLINE void block(int64_t, int rows, int, int p, const Tile<Dot, false> &tile, char *) {
        with_tile(rows, p, tile);
    }
};

template <class Of>
int64_t room_of(const Call &call, const Split &split) {
    return Of::Panels::room(split, call.op.n[1]);
}

// Runs a unit of a product. take(row, rows, column, accumulators, stride, n) stores the n columns from there on of some
// rows, `stride` accumulators apart. Where Take::PAIRED, panel p of the first half of the columns and that of the
// second are neighbours in a tile, and take gets the accumulators of both. room: of so many bytes as `room_of` says.
template <class Of, class Take>
INLINE void product_unit(const Call &call, const Split &split, int64_t unit, const Take &take, char *room) {
    typedef typename Of::Dot Dot;
    typedef typename Of::Panels Panels;
    constexpr int64_t element_bytes = sizeof(typename Of::X);
    const Op &op = call.op;
    int64_t k = op.n[1], x_stride = k * element_bytes, panel_bytes = Panels::panel_bytes(k);
    int64_t words = k / Dot::PER_WORD, tail = k % Dot::PER_WORD * element_bytes;
    const char *x = op.at<char>(0), *w = op.at<char>(1);
    int64_t first = unit / split.row_groups * split.panels_per_unit;
    int64_t end = std::min(first + split.panels_per_unit, split.panels);
    int64_t row = unit % split.row_groups * split.rows_per_unit;
    int64_t row_end = std::min(row + split.rows_per_unit, call.rows);
    // Other threads take the units between this one and the next.
    int64_t later = (unit + call.threads) / split.row_groups * split.panels_per_unit;
    auto address = [&](int64_t panel) {
        return w + (Take::PAIRED ? panel / 2 + panel % 2 * (split.panels / 2) : panel) * panel_bytes;
    };
    int64_t blocks = ceil_div<int64_t>(row_end - row, split.tile_rows);
    typename Dot::Acc out[ONCE_ROWS * MAX_PANELS];
    for (int64_t panel = first; panel < end;) {
        int p = int(std::min<int64_t>(split.tile_panels, end - panel));
        int64_t following = panel + p < end ? panel + p : later;
        const char *panels[MAX_PANELS], *next[MAX_PANELS];
        for (int j = 0; j < p; j++) panels[j] = address(panel + j), next[j] = address(following + j);
        bool whole = (panel + p) * LANES <= op.n[2];
        for (int64_t r = row, block = 0; r < row_end; block++) {
            int rows = int(std::min<int64_t>(split.tile_rows, row_end - r));
            const char *from = x + r * x_stride;
            for (int j = 0, some; j < p; j += some) {
                some = std::min(p - j, widest_tile(rows));
                if (split.once) {
                    Tile<Dot, true> tile{from, x_stride, words, tail, panels + j, next + j, out + j, p};
                    Panels::once(rows, some, tile);
                    continue;
                }
                const char *runs[2] = {j == 0 && block < p ? next[block] : from + rows * x_stride,
                                       j == 0 && block + blocks < p ? next[block + blocks] : nullptr};
                Panels::block(block, rows, j, some,
                              Tile<Dot, false>{from, x_stride, words, tail, panels + j, runs, out + j, p}, room);
            }
            for (int j = 0; j < p; j += Take::PAIRED ? 2 : 1) {
                int64_t column = (panel + j) / (Take::PAIRED ? 2 : 1) * LANES;
                if (whole)
                    take(r, rows, column, out + j, p, LANES);
                else
                    take(r, rows, column, out + j, p, std::min<int64_t>(LANES, op.n[2] - column));
            }
            r += rows;
        }
        panel += p;
    }
}

// What a product is of, and by its columns how an accumulator becomes numbers of D: the output but for its rounding.
template <class D>
struct Floats {
    typedef D Out;
    typedef typename DotOf<D>::type Dot;
    typedef Plain<Dot> Panels;
    typedef typename D::type X;
    const X *bias;

    explicit Floats(const Op &op) : bias(op.at<X>(2)) {}

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
    const typename D::type *bias;
    const float *x_scale, *w_scale;
    const int32_t *w_sum, *x_zero, *w_zero, *x_sum;
    int64_t k;

    explicit Int8s(const Op &op)
        : bias(op.at<typename D::type>(2)), x_scale(op.at<float>(5)), w_scale(op.at<float>(6)),
          w_sum(op.at<int32_t>(7)), x_zero(op.at<int32_t>(8)), w_zero(op.at<int32_t>(9)), x_sum(op.at<int32_t>(10)),
          k(op.n[1]) {}

    struct Columns {
        const Int8s &of;
        F scale, bias;
        I sum, offset, zeros;
        // The sum of (x - x_zero) * (w - w_zero), exactly, times both scales, plus bias.
        INLINE F operator()(int64_t row, const Dot::Acc &acc) const {
            int32_t zero = of.x_zero ? of.x_zero[row] : 0;
            I total = acc - offset;
            if (of.x_zero) total = total - sum * zero;
            if (of.w_zero) total = total - zeros * (of.x_sum[row] - int32_t(of.k) * zero);
            F x = to_float(total) * (scale * set1(of.x_scale[row]));
            return of.bias ? x + bias : x;
        }
    };
    INLINE Columns columns(int64_t column, int64_t n) const {
        I sum = get_n(w_sum + column, n);
        return {*this, get_n<Float32>(w_scale + column, n), bias ? get_n<D>(bias + column, n) : zero(), sum,
                sum * Dot::X_OFFSET, w_zero ? get_n(w_zero + column, n) : I{}};
    }
};

template <class Of>
Split split_of(const Call &call, bool paired = false) {
    return Split(call.rows, words_of<typename Of::Dot>(call.op.n[1]), call.op.n[2], call.threads, paired);
}

template <class Of, class Take>
INLINE void run_product(const Call &call, const Split &split, int64_t unit, const Take &take) {
    product_unit<Of>(call, split, unit, take, static_cast<char *>(scratch(size_t(room_of<Of>(call, split)))));
}

template <class Of>
struct Store {
    typedef typename Of::Out D;
    typedef typename Of::Dot::Acc Acc;
    static constexpr bool PAIRED = false;
    Of value;
    typename D::type *out;
    int64_t columns;
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

// out = silu(gate) * up, rounded as the two kernels do it one after the other.
template <class Of>
struct StoreSwiglu {
    typedef typename Of::Out D;
    typedef typename Of::Dot::Acc Acc;
    static constexpr bool PAIRED = true;
    Of value;
    typename D::type *out;
    int64_t columns;  // of out
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

// Keeps, by row and lane, the largest output as its dtype rounds it, and its column: the first of equal ones.
template <class Of>
struct KeepLargest {
    typedef typename Of::Dot::Acc Acc;
    static constexpr bool PAIRED = false;
    Of value;
    float *best;   // [rows, 16]
    int32_t *ids;  // [rows, 16]
    int64_t counting, first_row;
    INLINE void operator()(int64_t row, int rows, int64_t column, const Acc *acc, int stride, int64_t n) const {
        auto made = value.columns(column, n);
        for (int i = 0; i < rows; i++) {
            F x = first(Of::Out::round(made(row + i, acc[i * stride])), counting - column, set1(-INFINITY));
            int64_t at = (row + i - first_row) * LANES;
            EACH(j) {
                fvec_u &most = *reinterpret_cast<fvec_u *>(best + at + j * WIDTH);
                ivec_u &id = *reinterpret_cast<ivec_u *>(ids + at + j * WIDTH);
                ivec larger = x.v[j] > most;
                most = larger ? x.v[j] : most;
                id = larger ? places(j) + int32_t(column) : id;
            }
        }
    }
};

template <class Of>
struct LinearArgmax {
    static int64_t units(const Call &call) { return split_of<Of>(call).units(); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        Split split = split_of<Of>(call);
        int64_t row = unit % split.row_groups * split.rows_per_unit;
        int64_t rows = std::min(split.rows_per_unit, call.rows - row);
        float *best = static_cast<float *>(scratch(size_t(rows * LANES * 8 + room_of<Of>(call, split))));
        int32_t *ids = reinterpret_cast<int32_t *>(best + rows * LANES);
        for (int64_t i = 0; i < rows * LANES; i++) best[i] = -INFINITY, ids[i] = INT32_MAX;
        KeepLargest<Of> keep{Of(op), best, ids, op.n[3], row};
        product_unit<Of>(call, split, unit, keep, reinterpret_cast<char *>(ids + rows * LANES));
        for (int64_t r = 0; r < rows; r++) {
            float largest = -INFINITY;
            int32_t id = INT32_MAX;
            for (int i = 0; i < LANES; i++) {
                float b = best[r * LANES + i];
                int32_t c = ids[r * LANES + i];
                if (b > largest || (b == largest && c < id)) largest = b, id = c;
            }
            int64_t at = unit / split.row_groups * call.rows + row + r;
            op.at<float>(3)[at] = largest;
            op.at<int32_t>(4)[at] = id;
        }
    }
};

// p: best and ids of `linear_argmax`, out; n: T, K, N as there, so that the groups of panels are the same.
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
        }
    }
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
