// Random numbers as a function of (seed, position): the golden function of kernels/uniform.py.
//
//   uniform  p: seeds, positions [T] uint64, out [T] float64                     n: T
#include <algorithm>
#include <cstring>

#include "runtime/op.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Philox4x32-10 of (position, seed).
struct Uniform {
    static constexpr int64_t ROWS = 64;
    static int64_t units(const Call &call) { return ceil_div<int64_t>(call.rows, ROWS); }
    static void run(const Call &call, int64_t unit) {
        const Op &op = call.op;
        for (int64_t i = unit * ROWS; i < std::min(call.rows, (unit + 1) * ROWS); i++) {
            uint64_t seed = op.at<uint64_t>(0)[i], position = op.at<uint64_t>(1)[i];
            uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), 0, 0};
            uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
            for (int round = 0; round < 10; round++) {
                uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
                uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ key[1],
                                    uint32_t(a)};
                std::memcpy(c, next, sizeof c);
                key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
            }
            uint64_t bits = (uint64_t(c[0]) << 21) | (c[1] >> 11);
            op.at<double>(2)[i] = double(bits) * 0x1p-53;
        }
    }
};

extern const Kernel UNIFORM[] = {
    KERNEL("uniform/float64", Uniform),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
