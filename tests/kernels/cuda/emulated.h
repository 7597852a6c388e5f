// The functions of kernels/cuda/device.h on a CPU. Each thread of the grid is a fiber; one fiber runs at a time, and
// leaves the processor where it waits. A launch that can make no progress ends with an error.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define EMULATED
#include "device.h"

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

#define DEVICE inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

namespace emulated {

struct Warp {
    u32 values[2][32][4];
    int arrived = 0, generation = 0;
};
struct Group { int arrived = 0, generation = 0; };
struct Block {
    std::vector<u8> memory;
    std::vector<Warp> warps;
    Group all, first;
};
struct Fiber {
    ucontext_t context;   // of its start
    jmp_buf place;
    std::vector<u8> stack;
    Block* block;
    int thread, index;
    bool started = false, ended = false;
    bool (*ready)(const void*) = nullptr;   // of `condition`: whether it may go on; null: it may
    const void* condition;
};
inline jmp_buf scheduler;
inline Fiber* now;
inline int threads;
inline u64 progress;   // counts all that may let another fiber go on

// Leave the processor until a condition holds, which the scheduler checks.
template <class Condition> void wait_until(const Condition& condition) {
    if (condition()) return;
    now->condition = &condition;
    now->ready = [](const void* of) { return bool((*static_cast<const Condition*>(of))()); };
    if (!_setjmp(now->place)) _longjmp(scheduler, 1);
    now->ready = nullptr;
}

inline void meet(Group& group, int count) {
    const int generation = group.generation;
    progress++;
    if (++group.arrived == count) group.arrived = 0, group.generation++;
    else wait_until([&] { return group.generation != generation; });
}

// Meet the other lanes of the warp; return what each brought.
inline const u32 (*exchange(u32 a, u32 b = 0, u32 c = 0, u32 d = 0))[4] {
    Warp& warp = now->block->warps[now->thread / 32];
    const int generation = warp.generation;
    auto& values = warp.values[generation % 2];
    u32* own = values[now->thread % 32];
    own[0] = a, own[1] = b, own[2] = c, own[3] = d;
    progress++;
    if (++warp.arrived == 32) warp.arrived = 0, warp.generation++;
    else wait_until([&] { return warp.generation != generation; });
    return values;
}

struct Barrier { u16 arrivals, pending; u32 parity; };
inline void settle(Barrier& barrier) {
    progress++;
    if (barrier.pending) return;
    barrier.pending = barrier.arrivals;
    barrier.parity ^= 1;
}

// Run the fiber `now` until it waits or ends. swapcontext would call the system twice for each switch.
inline void resume() {
    if (_setjmp(scheduler)) return;
    if (now->started) _longjmp(now->place, 1);
    now->started = true;
    setcontext(&now->context);
}

// Run `kernel` in blocks of `count` threads with `shared` bytes each; return false if all fibers wait forever.
template <class Kernel> bool launch(int blocks, int count, int shared, Kernel kernel) {
    static Kernel* running;
    running = &kernel;
    threads = count;
    std::vector<Block> all(blocks);
    std::vector<Fiber> fibers(size_t(blocks) * count);
    for (int i = 0; i < blocks; i++) all[i].memory.assign(shared + 1024, 0xA5), all[i].warps.resize(count / 32);
    for (size_t i = 0; i < fibers.size(); i++) {
        Fiber& fiber = fibers[i];
        fiber.block = &all[i / count], fiber.index = int(i / count), fiber.thread = int(i % count);
        fiber.stack.resize(1 << 16);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, reinterpret_cast<void (*)()>(+[] {
            (*running)();
            now->ended = true;
            _longjmp(scheduler, 1);
        }), 0);
    }
    size_t ended = 0;
    for (int idle = 0; ended < fibers.size();) {
        const u64 before = progress;
        for (Fiber& fiber : fibers) {
            if (fiber.ended) continue;
            now = &fiber;
            if (fiber.ready && !fiber.ready(fiber.condition)) continue;
            resume();
            if (fiber.ended) ended++, progress++;
        }
        idle = progress == before ? idle + 1 : 0;
        if (idle > 3) return false;
    }
    return true;
}

inline float of_bf16(u32 value) {
    value <<= 16;
    float real;
    std::memcpy(&real, &value, 4);
    return real;
}
inline float of_e4m3(u32 byte) {
    const int exponent = byte >> 3 & 15, fraction = byte & 7;
    const float size = exponent ? std::ldexp(8.f + fraction, exponent - 10) : std::ldexp(float(fraction), -9);
    return byte & 0x80 ? -size : size;
}
inline float of_f16(u32 value) {
    const int exponent = value >> 10 & 31, fraction = value & 0x3FF;
    const float size = exponent ? std::ldexp(1024.f + fraction, exponent - 25) : std::ldexp(float(fraction), -24);
    return value & 0x8000 ? -size : size;
}

// The numbers of a format by their bits.
template <int COUNT> std::vector<float> table(float (*of)(u32)) {
    std::vector<float> made(COUNT);
    for (u32 bits = 0; bits < COUNT; bits++) made[bits] = of(bits);
    return made;
}
inline const std::vector<float> E4M3 = table<1 << 8>(of_e4m3), F16 = table<1 << 16>(of_f16);

// Add the products of 16 rows of a weight and 8 rows of x. bits: of a number.
template <class Sum, class Number>
void multiply(Sum (&sums)[4], u32 w0, u32 w1, u32 w2, u32 w3, u32 x0, u32 x1, int bits, Number of) {
    u32 weights[32][4], rows[32][2];
    const auto* brought = exchange(w0, w1, w2, w3);
    std::memcpy(weights, brought, sizeof(weights));
    brought = exchange(x0, x1);
    for (int lane = 0; lane < 32; lane++) rows[lane][0] = brought[lane][0], rows[lane][1] = brought[lane][1];
    const int lane = now->thread % 32;
    const u32 mask = (1u << bits) - 1;
    for (int i = 0; i < 4; i++) {
        double sum = sums[i];
        for (int t = 0; t < 4; t++)
            for (int each = 0; each < 2; each++)
                for (int shift = 0; shift < 32; shift += bits)
                    sum += double(of(weights[lane / 4 * 4 + t][each * 2 + i / 2] >> shift & mask))
                        * double(of(rows[(lane % 4 * 2 + i % 2) * 4 + t][each] >> shift & mask));
        sums[i] = Sum(sum);
    }
}

}  // namespace emulated

inline u8* shared_memory() {
    u8* begin = emulated::now->block->memory.data();
    return begin + (1024 - reinterpret_cast<uintptr_t>(begin) % 1024) % 1024;
}
inline int thread() { return emulated::now->thread; }
inline int block() { return emulated::now->index; }

inline void barrier_init(u64* barrier, u32 arrivals) {
    static_assert(sizeof(emulated::Barrier) == 8);
    *reinterpret_cast<emulated::Barrier*>(barrier) = {u16(arrivals), u16(arrivals), 0};
}
inline void barrier_arrive(u64* barrier) {
    auto& made = *reinterpret_cast<emulated::Barrier*>(barrier);
    if (!made.pending) std::fprintf(stderr, "more arrivals than a barrier has\n"), std::abort();
    made.pending--;
    emulated::settle(made);
}
// A phase has passed if the barrier is in the phase of the other parity.
inline bool barrier_passed(u64* barrier, u32 parity) {
    return reinterpret_cast<emulated::Barrier*>(barrier)->parity != parity;
}
template <class Condition> void wait_until(Condition condition) { emulated::wait_until(condition); }
inline void copy_to_shared(void* to, const void* from) {
    if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16)
        std::fprintf(stderr, "a copy is not aligned to 16 bytes\n"), std::abort();
    std::memcpy(to, from, 16);
}
inline void barrier_arrive_after_copies(u64* barrier) { barrier_arrive(barrier); }

inline void sync_block() { emulated::meet(emulated::now->block->all, emulated::threads); }
template <int THREADS> void sync_first() { emulated::meet(emulated::now->block->first, THREADS); }
template <int COUNT> void take_registers() {}
template <int COUNT> void leave_registers() {}
inline void sync_warp() { emulated::exchange(0); }
inline u32 bits(float value) { u32 made; std::memcpy(&made, &value, 4); return made; }
inline float bits(u32 value) { float made; std::memcpy(&made, &value, 4); return made; }
inline u32 shuffle(u32 value, int lane) { return emulated::exchange(value)[lane][0]; }
inline float shuffle_xor(float value, int lanes) { return bits(shuffle(bits(value), (thread() % 32) ^ lanes)); }
inline u32 largest_of_lanes(u32 value) {
    const auto* values = emulated::exchange(value);
    for (int lane = 0; lane < 32; lane++) value = std::max(value, values[lane][0]);
    return value;
}
inline bool any_lane(bool value) {
    const auto* values = emulated::exchange(value);
    return std::any_of(values, values + 32, [](const u32 (&each)[4]) { return each[0]; });
}

inline uint4 load_vector(const u16* from) { return *reinterpret_cast<const uint4*>(from); }
inline float2 load_l2(const float2* from) { return *from; }
inline float4 load_l2(const float4* from) { return *from; }
inline u32 load_l2(const u32* from) { return *from; }
inline u16 load_l2(const u16* from) { return *from; }
inline void atomic_max(u32* to, u32 value) { *to = std::max(*to, value); }
inline u32 count(u32* counter) { emulated::progress++; return (*counter)++; }
inline void signal(u32* counter) { count(counter); }
inline u32 load_acquire(const u32* from) { return *from; }

inline void multiply_bf16(float (&sums)[4], u32 w0, u32 w1, u32 w2, u32 w3, u32 x0, u32 x1) {
    emulated::multiply(sums, w0, w1, w2, w3, x0, x1, 16, [](u32 half) { return emulated::of_bf16(half); });
}
inline void multiply_f16(float (&sums)[4], u32 w0, u32 w1, u32 w2, u32 w3, u32 x0, u32 x1) {
    emulated::multiply(sums, w0, w1, w2, w3, x0, x1, 16, [](u32 half) { return emulated::F16[half]; });
}
inline void multiply_int8(int (&sums)[4], u32 w0, u32 w1, u32 w2, u32 w3, u32 x0, u32 x1) {
    emulated::multiply(sums, w0, w1, w2, w3, x0, x1, 8, [](u32 byte) { return int8_t(byte); });
}

inline u32 rounded_bf16(float value) {
    const u32 all = bits(value);
    return (all + 0x7FFF + (all >> 16 & 1)) >> 16;
}
inline u32 to_bf16(float first, float second) { return rounded_bf16(first) | rounded_bf16(second) << 16; }
inline u32 rounded_e4m3(float value) {
    if (std::isnan(value)) return 0x7F;
    const float size = std::min(std::fabs(value), 448.f);
    const float step = std::ldexp(1.f, std::max(std::ilogb(std::max(size, 1e-30f)), -6) - 3);
    const float near = std::nearbyint(size / step) * step;
    u32 made = 0;
    for (u32 byte = 0; byte < 0x7F; byte++)
        if (emulated::E4M3[byte] == near) made = byte;
    return made | (std::signbit(value) ? 0x80 : 0);
}
inline u32 to_e4m3(float first, float second) { return rounded_e4m3(first) | rounded_e4m3(second) << 8; }
inline u32 f16_of_e4m3(u32 byte) {   // every number of e4m3 is one of f16
    if ((byte & 0x7F) == 0x7F) return 0x7E00;   // NaN
    const float size = std::fabs(emulated::E4M3[byte]);
    u32 made = 0;
    if (size > 0) {
        const int exponent = std::ilogb(size);
        made = u32(exponent + 15) << 10 | u32(std::ldexp(size, 10 - exponent) - 1024);
    }
    return made | (byte & 0x80) << 8;
}
inline uint2 e4m3_to_f16(u32 four) {
    return {f16_of_e4m3(four & 0xFF) | f16_of_e4m3(four >> 8 & 0xFF) << 16,
            f16_of_e4m3(four >> 16 & 0xFF) | f16_of_e4m3(four >> 24) << 16};
}
inline u32 to_int8(float value) { return u8(int8_t(std::min(127.f, std::max(-128.f, std::nearbyint(value))))); }
inline float exp2_of(float value) { return std::exp2(value); }
inline float rsqrt_of(float value) { return 1 / std::sqrt(value); }
inline float fma_of(float a, float b, float c) { return std::fma(a, b, c); }
inline float divided(float a, float b) { return a / b; }
inline float multiplied(float a, float b) { return a * b; }
