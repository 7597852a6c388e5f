// Collectives between the ranks of one machine, over memory that all of them map.
//
//   rank_share         p: x [T, H], region                            n: T, H, rank, size, capacity
//                         copies x to the rank's slot
//   rank_arrive        p: region                                      n: T, 0, rank, size, capacity
//                         publishes the slot; begins the next collective
//   rank_sum           p: region, out [T, H]                          n: T, H, rank, size, capacity
//                         waits for all slots; out is their sum in the order of the ranks
//   rank_concatenate   p: region, out [T, size H]                     n: T, H, rank, size, capacity
//                         waits for all slots; a row of out holds the rows of the slots, in the order of the ranks
//   rank_argmax        p: region, out [T] int64                       n: T, 2, rank, size, capacity
//                         waits for all slots of pairs (value, id) in float32; out is the id of the largest value,
//                         at equal values from the first rank
//
//   local_ids          p: ids [T] int64, out [T] int64                n: T, first, count
//                         out is the id minus first, or 0 for ids outside [first, first + count)
//   zero_outside       p: ids [T] int64, x [T, H]                     n: T, H, first, count
//                         x becomes 0 in the rows of such ids
//
// A collective is rank_share, rank_arrive, and one of the next three, in this order. The region begins with a line of
// 64 bytes for each rank: the number of collectives that the rank has published. Then follows a slot of `capacity`
// bytes for each parity of that number and each rank. A rank that publishes collective n has read all slots of n - 1.
// So no rank reads the slots of n - 2 any more, which have the parity of n.
#include <sched.h>

#include <algorithm>
#include <atomic>

#include "runtime/vec.h"

namespace npuserve {
namespace NPUSERVE_ISA {

struct Ranks {
    char *region;
    int64_t rank, size, capacity;

    INLINE Ranks(const Op &op, int pointer)
        : region(op.at<char>(pointer)), rank(op.n[2]), size(op.n[3]), capacity(op.n[4]) {}
    INLINE std::atomic<uint64_t> &published(int64_t of) const {
        return *reinterpret_cast<std::atomic<uint64_t> *>(region + of * RANK_LINE_BYTES);
    }
    // Returns the number of the collectives that this rank has published. Only its own threads change it.
    INLINE uint64_t own() const { return published(rank).load(std::memory_order_acquire); }
    template <class T>
    INLINE T *slot(uint64_t collective, int64_t of) const {
        char *slots = region + size * RANK_LINE_BYTES;
        return reinterpret_cast<T *>(slots + (int64_t(collective & 1) * size + of) * capacity);
    }
    // Waits until all ranks have published this rank's last collective. Returns its number.
    INLINE uint64_t wait() const {
        uint64_t last = own();
        for (int64_t of = 0; of < size; of++)
            for (int spins = 0; published(of).load(std::memory_order_acquire) < last; spins++) {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
                // The other rank may need this core.
                if (spins > 2000) sched_yield();
            }
        return last;
    }
};

constexpr int64_t RANK_UNIT = 16 << 10;  // numbers of a unit

// Units of a matrix [T, H]: ranges of its numbers.
struct RankUnits {
    static int64_t units(const Call &call) { return ceil_div(call.rows * call.op.n[1], RANK_UNIT); }
    static int64_t begin(int64_t unit) { return unit * RANK_UNIT; }
    static int64_t end(const Call &call, int64_t unit) {
        return std::min(call.rows * call.op.n[1], (unit + 1) * RANK_UNIT);
    }
};

template <class D>
struct RankShare : RankUnits {
    typedef typename D::type T;
    static void run(const Call &call, int64_t unit) {
        Ranks ranks(call.op, 1);
        const T *x = call.op.at<T>(0);
        T *slot = ranks.slot<T>(ranks.own() + 1, ranks.rank);
        std::copy(x + begin(unit), x + end(call, unit), slot + begin(unit));
    }
};

struct RankArrive {
    static int64_t units(const Call &) { return 1; }
    static void run(const Call &call, int64_t) {
        Ranks ranks(call.op, 0);
        ranks.published(ranks.rank).store(ranks.own() + 1, std::memory_order_release);
    }
};

template <class D>
struct RankSum : RankUnits {
    typedef typename D::type T;
    static void run(const Call &call, int64_t unit) {
        Ranks ranks(call.op, 0);
        uint64_t last = ranks.wait();
        T *out = call.op.at<T>(1) + begin(unit);
        by_lanes(end(call, unit) - begin(unit), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            F sum = get_n<D>(ranks.slot<T>(last, 0) + begin(unit) + i, n);
            for (int64_t of = 1; of < ranks.size; of++)
                sum = sum + get_n<D>(ranks.slot<T>(last, of) + begin(unit) + i, n);
            put_n<D>(out + i, sum, n);
        });
    }
};

template <class D>
struct RankConcatenate {
    typedef typename D::type T;
    static int64_t rows(const Op &op) { return std::max<int64_t>(1, RANK_UNIT / std::max<int64_t>(1, op.n[1])); }
    static int64_t units(const Call &call) { return call.op.n[3] * ceil_div(call.rows, rows(call.op)); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        Ranks ranks(op, 0);
        int64_t width = op.n[1], of = unit % ranks.size, first = unit / ranks.size * rows(op);
        const T *slot = ranks.slot<T>(ranks.wait(), of);
        for (int64_t row = first; row < std::min(call.rows, first + rows(op)); row++)
            std::copy(slot + row * width, slot + (row + 1) * width, op.at<T>(1) + (row * ranks.size + of) * width);
    }
};

struct RankArgmax {
    static int64_t units(const Call &) { return 1; }
    static void run(const Call &call, int64_t) {
        Ranks ranks(call.op, 0);
        uint64_t last = ranks.wait();
        for (int64_t row = 0; row < call.rows; row++) {
            const float *best = ranks.slot<float>(last, 0) + 2 * row;
            for (int64_t of = 1; of < ranks.size; of++) {
                const float *other = ranks.slot<float>(last, of) + 2 * row;
                if (other[0] > best[0]) best = other;
            }
            call.op.at<int64_t>(1)[row] = int64_t(best[1]);
        }
    }
};

INLINE bool is_inside(int64_t id, int64_t first, int64_t count) { return id >= first && id < first + count; }

struct LocalId {
    static int64_t units(const Call &) { return 1; }
    static void run(const Call &call, int64_t) {
        const Op &op = call.op;
        for (int64_t row = 0; row < call.rows; row++) {
            int64_t id = op.at<int64_t>(0)[row];
            op.at<int64_t>(1)[row] = is_inside(id, op.n[1], op.n[2]) ? id - op.n[1] : 0;
        }
    }
};

template <class D>
struct ZeroOutside {
    static int64_t units(const Call &) { return 1; }
    static void run(const Call &call, int64_t) {
        const Op &op = call.op;
        typename D::type *x = op.at<typename D::type>(1);
        for (int64_t row = 0; row < call.rows; row++)
            if (!is_inside(op.at<int64_t>(0)[row], op.n[2], op.n[3]))
                std::memset(x + row * op.n[1], 0, size_t(op.n[1]) * sizeof *x);
    }
};

extern const Kernel RANKS[] = {
    KERNEL("local_ids/int64", LocalId),
    BY_DTYPE("zero_outside", ZeroOutside),
    BY_DTYPE("rank_share", RankShare),
    KERNEL("rank_arrive/uint8", RankArrive),
    BY_DTYPE("rank_sum", RankSum),
    BY_DTYPE("rank_concatenate", RankConcatenate),
    KERNEL("rank_argmax/float32", RankArgmax),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
