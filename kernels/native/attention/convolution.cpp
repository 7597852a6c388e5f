// Depthwise causal convolution of the inputs of each row, then SiLU.
//
//   causal_conv_silu p: x [T, C], weight [C, K], state [slots, C, K - 1], context_lens [R] int32,
//                       cu_seqlens_q [R + 1] int32, state_slots [R] int64, out [T, C]
//                    n: T, maximum R, C, K
#include <algorithm>

#include "attention/slots.h"

namespace npuserve {
namespace NPUSERVE_ISA {

template <class D>
struct CausalConvSilu {
    typedef typename D::type T;
    static constexpr int64_t COLUMNS = 256;  // maximum channels of a unit

    // Division into units: some channels of a group of rows. The weights are read once for a unit.
    struct Split {
        int64_t count, blocks, groups;
        Split(const Call &call, const SlotRows &rows)
            : count(rows.count()), blocks(ceil_div(call.op.n[2], COLUMNS)),
              groups(std::min(count, ceil_div<int64_t>(4 * call.threads, blocks))) {}
    };

    static int64_t units(const Call &call) {
        Split split(call, SlotRows(call, 3));
        return split.blocks * split.groups;
    }

    static void run(const Call &call, int64_t unit) {
        // Sizes known to the compiler become shuffles.
        if (call.op.n[3] == 4) return channels<4>(call, unit);
        return channels<0>(call, unit);
    }

    // States of rows are apart in memory, and the hardware does not foresee the next one.
    static INLINE void prefetch(const T *state, int64_t count) {
        for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(state + i, 1, 3);
    }

    template <int64_t TAPS>
    static void channels(const Call &call, int64_t unit) {
        const Op &op = call.op;
        const int64_t width = op.n[2], taps = TAPS ? TAPS : op.n[3], history = taps - 1;
        SlotRows rows(call, 3);
        Split split(call, rows);
        int64_t first = unit % split.blocks * COLUMNS, columns = std::min(COLUMNS, width - first);
        int64_t group = unit / split.blocks;
        float *weights = static_cast<float *>(
            scratch(size_t(taps * COLUMNS) * 4 + size_t(history * COLUMNS) * sizeof(T) + size_t(taps) * sizeof(T *)));
        const T **inputs = reinterpret_cast<const T **>(weights + taps * COLUMNS);
        T *earlier = reinterpret_cast<T *>(inputs + taps);  // [K - 1, COLUMNS]
        const T *weight = op.at<T>(1) + first * taps;
        for (int64_t c = 0; c < columns; c++)
            _Pragma("GCC unroll 4") for (int64_t j = 0; j < taps; j++)
                weights[j * COLUMNS + c] = D::get1(weight[c * taps + j]);

        auto state_of = [&](int64_t row) { return op.at<T>(2) + (rows.slots[row] * width + first) * history; };
        int64_t rows_end = split.count * (group + 1) / split.groups;
        for (int64_t row = split.count * group / split.groups; row < rows_end; row++) {
            int64_t begin = rows.begin(row), end = rows.end(row);
            if (begin == end) continue;
            T *state = state_of(row);
            if (row + 1 < rows_end) prefetch(state_of(row + 1), columns * history);
            if (rows.is_new(row)) {
                std::memset(earlier, 0, size_t(history * COLUMNS) * sizeof(T));
            } else {
                for (int64_t c = 0; c < columns; c++)
                    _Pragma("GCC unroll 3") for (int64_t j = 0; j < history; j++)
                        earlier[j * COLUMNS + c] = state[c * history + j];
            }
            // Address of the row's i-th input in this step; before the step if i is negative.
            auto input = [&](int64_t i) {
                return i < 0 ? earlier + (i + history) * COLUMNS : op.at<T>(0) + (begin + i) * width + first;
            };
            for (int64_t i = 0; i < end - begin; i++) {
                for (int64_t j = 0; j < taps; j++) inputs[j] = input(i - history + j);
                T *out = op.at<T>(6) + (begin + i) * width + first;
                by_lanes(columns, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
                    F sum = zero();
                    _Pragma("GCC unroll 4") for (int64_t j = 0; j < taps; j++)
                        sum = fma(get_n<D>(inputs[j] + c, n), load(weights + j * COLUMNS + c), sum);
                    put_n<D>(out + c, silu<D>(sum), n);
                });
            }
            for (int64_t j = 0; j < history; j++) inputs[j] = input(end - begin - history + j);
            if constexpr (TAPS == 4) {
                const T *a = inputs[0], *b = inputs[1], *d = inputs[2];
                for (int64_t c = 0; c < columns; c++)
                    state[3 * c] = a[c], state[3 * c + 1] = b[c], state[3 * c + 2] = d[c];
            } else {
                for (int64_t c = 0; c < columns; c++)
                    for (int64_t j = 0; j < history; j++) state[c * history + j] = inputs[j][c];
            }
        }
    }
};

extern const Kernel CONVOLUTION[] = {
    BY_DTYPE("causal_conv_silu", CausalConvSilu),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
