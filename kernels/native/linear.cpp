// Products with packed weights.
//
// Packed: [N / 16] panels of [words of K] of 16 words, see tile.h; N and K are padded with zeros.
//
//   linear         p: x [T, K], packed weights, bias [N] or null, out [T, N]        n: T, K, N
//   linear_swiglu  the same, of gate and up; out [T, N / 2], N / 2 a multiple of 16
//   linear_w8a8    p: x [T, K] int8, packed int8 weights, bias or null, out, x_scale [T] float32, w_scale [N] float32,
//                     sums of each weight row [N] int32                            n: T, K, N
//   linear_argmax  p: x, packed weights, bias or null, best [panels, T] float32, ids [panels, T] int32: of each group
//                     of panels the largest output as its dtype rounds it, and its column   n: T, K, N, columns that
//                     count
//   argmax_of_units  p: best, ids, out [T] int64: the first column of the largest; 0 where none is above minus
//                     infinity                                                      n: T, K, N
//   pack           p: dense [T, K], packed                                          n: T, K, row of the first
//   unpack         p: packed, dense [T, K], row numbers [T] int64: also the embedding of ids   n: T, K
#include <algorithm>

#include "tile.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// How a product falls into units: groups of panels times groups of rows.
struct Split {
    int64_t panels, panels_per_unit, panel_groups, rows_per_unit, row_groups;
    int tile_rows, tile_panels;
    bool once;  // each weight meets all rows in one tile

    Split(int64_t rows, int64_t words, int64_t columns, int threads, bool paired = false) {
        panels = ceil_div<int64_t>(columns, LANES);
        once = rows <= MAX_ROWS;
        if (once) {
            // The weights are read once: units are small, so that threads end together.
            tile_rows = int(rows);
            tile_panels = tile_panels_of(tile_rows, paired);
            int64_t bytes = tile_panels * words * 64;
            panels_per_unit = tile_panels * std::max<int64_t>(1, UNIT_BYTES / bytes);
            rows_per_unit = rows;
        } else {
            // Blocks of rows share a panel in the cache. Where there are too few columns for all threads to end together,
            // units are narrower, and cut by rows too if there are many.
            int64_t wanted = UNITS_PER_THREAD * threads;
            bool wide = panels >= wanted * panels_for(BLOCK_ROWS) || rows > NARROW_ROWS;
            tile_rows = wide ? BLOCK_ROWS : MAX_ROWS;
            tile_panels = tile_panels_of(tile_rows, paired);
            panels_per_unit = tile_panels;
            int64_t groups = ceil_div(panels, panels_per_unit), cuts = rows > NARROW_ROWS ? ceil_div(wanted, groups) : 1;
            rows_per_unit = ceil_div(ceil_div(rows, cuts), int64_t(tile_rows)) * tile_rows;
        }
        rows_per_unit = std::max<int64_t>(rows_per_unit, 1);
        panel_groups = ceil_div(panels, panels_per_unit);
        row_groups = ceil_div(rows, rows_per_unit);
    }
    int64_t units() const { return panel_groups * row_groups; }
    static int tile_panels_of(int rows, bool paired) { return panels_for(rows) / (paired ? 2 : 1) * (paired ? 2 : 1); }

    static constexpr int64_t UNIT_BYTES = 64 << 10;
    static constexpr int64_t UNITS_PER_THREAD = 16;
    static constexpr int64_t NARROW_ROWS = 64;
};

template <class Dot>
int64_t words_of(int64_t k) {
    return ceil_div<int64_t>(k, Dot::PER_WORD);
}

// The product of one tile. The accumulator of row r and panel p goes to out[r * P + p].
template <class Dot, bool ONCE>
struct Tile {
    const char *x;  // of the tile's first row
    int64_t x_stride, words, tail_bytes;
    const char *const *panels;
    const char *next;  // a run of words that this thread reads later, unless ONCE
    typename Dot::Acc *out;

    // With few rows the processor follows the panels by itself, and faster than with our help. With more it does not
    // see far enough ahead.
    static constexpr int FOLLOWED_ROWS = 2;
    static constexpr int64_t AHEAD = 2048;  // bytes

    template <int R, int P>
    __attribute__((noinline)) void run() const {
        typename Dot::Acc acc[R][P];
        const char *w[P], *ahead[P];
        for (int p = 0; p < P; p++) w[p] = panels[p], ahead[p] = ONCE ? panels[p] + AHEAD : next;
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) acc[r][p] = Dot::start();
        tile<Dot, R, P, (!ONCE ? 1 : R > FOLLOWED_ROWS ? P : 0), !ONCE>(acc, x, x_stride, w, 64, words, ahead);
        if (tail_bytes) {
            for (int p = 0; p < P; p++) w[p] += words * 64;
            tile_tail<Dot, R, P>(acc, x + words * 4, x_stride, w, tail_bytes);
        }
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
            _Pragma("GCC unroll 4") for (int p = 0; p < P; p++) out[r * P + p] = acc[r][p];
    }
};

// Runs a unit of a product; element_bytes: of x. take(row, column, accumulators, n) stores the n columns from there on.
// Where Take::PAIRED, panel p of the first half of the columns and that of the second are neighbours in a tile, and take
// gets the accumulators of both.
template <class Dot, class Take>
INLINE void product_unit(const Call &call, const Split &split, int64_t unit, int64_t element_bytes, const Take &take) {
    const Op &op = call.op;
    int64_t k = op.n[1], x_stride = k * element_bytes, panel_bytes = words_of<Dot>(k) * 64;
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
    typename Dot::Acc out[MAX_ROWS * MAX_PANELS];
    for (int64_t panel = first; panel < end;) {
        int p = int(std::min<int64_t>(split.tile_panels, end - panel));
        int64_t following = panel + p < end ? panel + p : later;
        const char *panels[MAX_PANELS], *next[MAX_PANELS];
        for (int j = 0; j < p; j++) panels[j] = address(panel + j), next[j] = address(following + j);
        bool whole = (panel + p) * LANES <= op.n[2];
        for (int64_t r = row, block = 0; r < row_end; block++) {
            int rows = int(std::min<int64_t>(split.tile_rows, row_end - r));
            const char *from = x + r * x_stride, *run = block < p ? next[block] : from + rows * x_stride;
            if (split.once)
                with_rows(rows, p, Tile<Dot, true>{from, x_stride, words, tail, panels, nullptr, out});
            else
                with_rows(rows, p, Tile<Dot, false>{from, x_stride, words, tail, panels, run, out});
            for (int i = 0; i < rows; i++) {
                for (int j = 0; j < p; j += Take::PAIRED ? 2 : 1) {
                    int64_t column = (panel + j) / (Take::PAIRED ? 2 : 1) * LANES;
                    if (whole)
                        take(r + i, column, out + i * p + j, LANES);
                    else
                        take(r + i, column, out + i * p + j, std::min<int64_t>(LANES, op.n[2] - column));
                }
            }
            r += rows;
        }
        panel += p;
    }
}

// out = acc + bias
template <class D>
struct Store {
    static constexpr bool PAIRED = false;
    typename D::type *out;
    const typename D::type *bias;
    int64_t columns;
    INLINE void operator()(int64_t row, int64_t column, const F *accs, int64_t n) const {
        F acc = *accs;
        if (bias) acc = acc + get_n<D>(bias + column, n);
        put_n<D>(out + row * columns + column, acc, n);
    }
};

template <class Dot>
Split split_of(const Call &call) {
    return Split(call.rows, words_of<Dot>(call.op.n[1]), call.op.n[2], call.threads);
}

template <class D>
struct Linear {
    typedef typename DotOf<D>::type Dot;
    static int64_t units(const Call &call) { return split_of<Dot>(call).units(); }
    static void run(const Call &call, int64_t unit) {
        Store<D> store{call.op.at<typename D::type>(3), call.op.at<typename D::type>(2), call.op.n[2]};
        product_unit<Dot>(call, split_of<Dot>(call), unit, sizeof(typename D::type), store);
    }
};

// out = silu(gate + bias) * (up + bias), rounded as the two kernels do it one after the other.
template <class D>
struct StoreSwiglu {
    static constexpr bool PAIRED = true;
    typename D::type *out;
    const typename D::type *bias;
    int64_t columns;  // of out
    INLINE void operator()(int64_t row, int64_t column, const F *accs, int64_t n) const {
        F gate = accs[0], up = accs[1];
        if (bias) {
            gate = gate + get_n<D>(bias + column, n);
            up = up + get_n<D>(bias + columns + column, n);
        }
        put_n<D>(out + row * columns + column, silu<D>(D::round(gate)) * D::round(up), n);
    }
};

template <class D>
struct LinearSwiglu {
    typedef typename DotOf<D>::type Dot;
    static Split split(const Call &call) {
        return Split(call.rows, words_of<Dot>(call.op.n[1]), call.op.n[2], call.threads, true);
    }
    static int64_t units(const Call &call) { return split(call).units(); }
    static void run(const Call &call, int64_t unit) {
        StoreSwiglu<D> store{call.op.at<typename D::type>(3), call.op.at<typename D::type>(2), call.op.n[2] / 2};
        product_unit<Dot>(call, split(call), unit, sizeof(typename D::type), store);
    }
};

// out = acc * x_scale * w_scale + bias
template <class D>
struct StoreScaled {
    static constexpr bool PAIRED = false;
    typename D::type *out;
    const typename D::type *bias;
    const float *x_scale, *w_scale;
    const int32_t *sums;
    int64_t columns;
    INLINE void operator()(int64_t row, int64_t column, const DotInt8::Acc *acc, int64_t n) const {
        F x;
        EACH(i) {
            ivec offset = *reinterpret_cast<const ivec_u *>(sums + column + i * WIDTH) * DotInt8::X_OFFSET;
            x.v[i] = __builtin_convertvector(acc->v[i] - offset, fvec);
        }
        x = x * (get_n<Float32>(w_scale + column, n) * set1(x_scale[row]));
        if (bias) x = x + get_n<D>(bias + column, n);
        put_n<D>(out + row * columns + column, x, n);
    }
};

template <class D>
struct LinearW8A8 {
    static int64_t units(const Call &call) { return split_of<DotInt8>(call).units(); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        StoreScaled<D> store{op.at<typename D::type>(3), op.at<typename D::type>(2), op.at<float>(4),
                             op.at<float>(5),            op.at<int32_t>(6),          op.n[2]};
        product_unit<DotInt8>(call, split_of<DotInt8>(call), unit, 1, store);
    }
};

// Keeps, by row and lane, the largest output as its dtype rounds it, and its column: the first of equal ones.
template <class D>
struct KeepLargest {
    static constexpr bool PAIRED = false;
    float *best;   // [rows, 16]
    int32_t *ids;  // [rows, 16]
    const typename D::type *bias;
    int64_t columns, counting, first_row;
    INLINE void operator()(int64_t row, int64_t column, const F *accs, int64_t n) const {
        F acc = *accs;
        if (bias) acc = acc + get_n<D>(bias + column, n);
        acc = D::round(acc);
        float *b = best + (row - first_row) * LANES;
        int32_t *id = ids + (row - first_row) * LANES;
        float lanes[LANES];
        store(lanes, acc);
        for (int64_t i = 0; i < std::min<int64_t>(LANES, counting - column); i++) {
            bool larger = lanes[i] > b[i];
            b[i] = larger ? lanes[i] : b[i];
            id[i] = larger ? int32_t(column + i) : id[i];
        }
    }
};

template <class D>
struct LinearArgmax {
    typedef typename DotOf<D>::type Dot;
    static int64_t units(const Call &call) { return split_of<Dot>(call).units(); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        Split split = split_of<Dot>(call);
        int64_t row = unit % split.row_groups * split.rows_per_unit;
        int64_t rows = std::min(split.rows_per_unit, call.rows - row);
        float *best = static_cast<float *>(scratch(size_t(rows) * LANES * 8));
        int32_t *ids = reinterpret_cast<int32_t *>(best + rows * LANES);
        for (int64_t i = 0; i < rows * LANES; i++) best[i] = -INFINITY, ids[i] = INT32_MAX;
        KeepLargest<D> keep{best, ids, op.at<typename D::type>(2), op.n[2], op.n[3], row};
        product_unit<Dot>(call, split, unit, sizeof(typename D::type), keep);
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
template <class D>
struct ArgmaxOfUnits {
    typedef typename DotOf<D>::type Dot;
    static int64_t units(const Call &) { return 1; }
    static void run(const Call &call, int64_t) {
        const Op &op = call.op;
        int64_t groups = split_of<Dot>(call).panel_groups;
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

template <class T, class Dot>
struct Pack {
    static constexpr int64_t ROWS = 16;
    static int64_t units(const Call &call) { return ceil_div<int64_t>(call.rows + LANES, ROWS); }
    // A unit is a panel, of which the source may fill any rows.
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
                for (int64_t i = 0; i < count; i++) out[(w + i) * LANES + r % LANES] = line[i];
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
            for (int64_t w = 0; w < whole; w++) std::memcpy(out + w * Dot::PER_WORD, in + w * LANES, 4);
            if (whole < words)
                std::memcpy(out + whole * Dot::PER_WORD, in + whole * LANES, size_t(k % Dot::PER_WORD) * sizeof(T));
        }
    }
};

typedef Pack<float, DotFloat32> PackFloat32;
typedef Pack<uint16_t, DotBFloat16> PackBFloat16;
typedef Pack<int8_t, DotInt8> PackInt8;
typedef Unpack<float, DotFloat32> UnpackFloat32;
typedef Unpack<uint16_t, DotBFloat16> UnpackBFloat16;
typedef Unpack<int8_t, DotInt8> UnpackInt8;

extern const Kernel LINEAR[] = {
    BY_DTYPE("linear", Linear),
    BY_DTYPE("linear_swiglu", LinearSwiglu),
    BY_DTYPE("linear_w8a8", LinearW8A8),
    BY_DTYPE("linear_argmax", LinearArgmax),
    BY_DTYPE("argmax_of_units", ArgmaxOfUnits),
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
