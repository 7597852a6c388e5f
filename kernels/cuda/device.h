// Instructions of Hopper that decoder_layers.cu uses, one function each. In tests, tests/kernels/cuda/emulated.h defines
// the same functions for a CPU.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#ifndef EMULATED

#define DEVICE __device__ __forceinline__

DEVICE u8* shared_memory() {
    extern __shared__ __align__(1024) u8 memory[];
    return memory;
}
DEVICE int thread() { return threadIdx.x; }
DEVICE int block() { return blockIdx.x; }

DEVICE u32 address(const void* shared) { return static_cast<u32>(__cvta_generic_to_shared(shared)); }

// Barriers of copies (mbarrier), in shared memory.
DEVICE void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
}
DEVICE void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}
DEVICE bool barrier_passed(u64* barrier, u32 parity) {
    u32 passed;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(passed) : "r"(address(barrier)), "r"(parity) : "memory");
    return passed;
}

// Wait for a condition. A kernel that waits for seconds is wrong: it ends with an error instead of never.
template <class Condition> DEVICE void wait_until(Condition condition) {
    u64 begin = 0, now;
    for (u32 tries = 1; !condition(); tries++) {
        if (tries % 256) continue;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (!begin) begin = now;
        if (now - begin > 10000000000ull) __trap();
    }
}

// Copy 16 bytes to shared memory, past the L1 cache.
DEVICE void copy_to_shared(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from) : "memory");
}
// Arrive at the barrier once this thread's copies have.
DEVICE void barrier_arrive_after_copies(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address(barrier)) : "memory");
}

// Barriers of threads: the block, its first `THREADS`, a warp.
DEVICE void sync_block() { __syncthreads(); }
template <int THREADS> DEVICE void sync_first() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
// Change the registers of a group of four warps.
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void leave_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE float shuffle_xor(float value, int lanes) { return __shfl_xor_sync(0xFFFFFFFF, value, lanes); }
DEVICE u32 largest_of_lanes(u32 value) { return __reduce_max_sync(0xFFFFFFFF, value); }
DEVICE bool any_lane(bool value) { return __any_sync(0xFFFFFFFF, value); }

// Global memory that other blocks write: read from the L2 cache.
DEVICE uint4 load_vector(const u16* from) { return __ldcg(reinterpret_cast<const uint4*>(from)); }
DEVICE float2 load_l2(const float2* from) { return __ldcg(from); }
DEVICE float4 load_l2(const float4* from) { return __ldcg(from); }
DEVICE u32 load_l2(const u32* from) { return __ldcg(from); }
DEVICE u16 load_l2(const u16* from) { return __ldcg(from); }
DEVICE void atomic_max(u32* to, u32 value) { atomicMax(to, value); }
// Add 1 and return the old number. All earlier writes of the thread, and of threads synchronized with it, come first.
DEVICE u32 count(u32* counter) {
    u32 old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(old) : "l"(counter) : "memory");
    return old;
}
DEVICE void signal(u32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
DEVICE u32 load_acquire(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Tensor cores: add products of 16 rows of a weight and 8 rows of x, 32 bytes of each. A lane has 8 bytes of rows lane / 4
// (w0, w2) and lane / 4 + 8 (w1, w3) of the weight, and of row lane / 4 of x. The lane's sums are of these two rows of the
// weight, each with rows 2 * (lane % 4) and 2 * (lane % 4) + 1 of x.
DEVICE void multiply_bf16(float (&sums)[4], u32 w0, u32 w1, u32 w2, u32 w3, u32 x0, u32 x1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(w0), "r"(w1), "r"(w2), "r"(w3), "r"(x0), "r"(x1));
}
DEVICE void multiply_f16(float (&sums)[4], u32 w0, u32 w1, u32 w2, u32 w3, u32 x0, u32 x1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(w0), "r"(w1), "r"(w2), "r"(w3), "r"(x0), "r"(x1));
}
DEVICE void multiply_int8(int (&sums)[4], u32 w0, u32 w1, u32 w2, u32 w3, u32 x0, u32 x1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(w0), "r"(w1), "r"(w2), "r"(w3), "r"(x0), "r"(x1));
}

// Conversions, rounded to nearest, ties to even. Two numbers in one word: the first is in the lower half.
DEVICE u32 to_bf16(float first, float second) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
DEVICE u32 to_e4m3(float first, float second) {
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    return both;
}
DEVICE uint2 e4m3_to_f16(u32 four) {
    uint2 made;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(made.x), "=r"(made.y) : "r"(four));
    return made;
}
DEVICE u32 to_int8(float value) {
    int whole;
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(whole) : "f"(value));
    return whole & 0xFF;
}
DEVICE float bits(u32 value) { return __uint_as_float(value); }
DEVICE u32 bits(float value) { return __float_as_uint(value); }
DEVICE float exp2_of(float value) {
    float made;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(value));
    return made;
}
DEVICE float rsqrt_of(float value) { return rsqrtf(value); }
DEVICE float fma_of(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float divided(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float multiplied(float a, float b) { return __fmul_rn(a, b); }
#endif
