// Ceilings of the machine, for benchmarks: loops that only read memory, or only compute.
//
//   read  p: memory [T, bytes], xor of the words of each piece [T] int32                n: T, bytes, a multiple of 512
//   peak  p: operations done [T] int64; a product and its sum are two                   n: T, iterations
#include "gemm/amx.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Makes the value opaque to the compiler, which must assume that it changed. It stays in its register.
template <class V>
INLINE void make_opaque(V &value) {
#if defined(__x86_64__)
    asm volatile("" : "+v"(value));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(value));
#else
    asm volatile("" : "+m"(value));
#endif
}

struct Read {
    static int64_t units(const Call &call) { return call.rows; }
    static void run(const Call &call, int64_t unit) {
        constexpr int64_t STEP = 512, VECTORS = STEP / sizeof(ivec);
        const char *piece = call.op.at<char>(0) + unit * call.op.n[1];
        ivec found[VECTORS] = {};
        for (int64_t at = 0; at < call.op.n[1]; at += STEP) {
            _Pragma("GCC unroll 32") for (int64_t i = 0; i < VECTORS; i++)
                found[i] ^= *reinterpret_cast<const ivec_u *>(piece + at + i * int64_t(sizeof(ivec)));
        }
        int32_t all = 0;
        for (int64_t i = 0; i < VECTORS; i++)
            for (int lane = 0; lane < WIDTH; lane++) all ^= found[i][lane];
        call.op.at<int32_t>(1)[unit] = all;
    }
};

// acc + a . b of one register each, as in the kernels. PRODUCTS: products of one step.
struct PeakFloat32 {
    typedef fvec Vector;
    static constexpr int64_t PRODUCTS = WIDTH;
    static INLINE void step(fvec &acc, ivec a, ivec b) {
#if defined(__AVX512F__)
        acc = (fvec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)acc);
#elif defined(__FMA__)
        acc = (fvec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)acc);
#elif defined(__aarch64__)
        acc = (fvec)vfmaq_f32((float32x4_t)acc, (float32x4_t)a, (float32x4_t)b);
#else
        acc = (fvec)a * (fvec)b + acc;
#endif
    }
};
#if defined(__AVX512BF16__)
struct PeakBFloat16 {
    typedef fvec Vector;
    static constexpr int64_t PRODUCTS = 2 * WIDTH;
    static INLINE void step(fvec &acc, ivec a, ivec b) {
        acc = (fvec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
    }
};
#elif BF16_DOT
struct PeakBFloat16 {
    typedef fvec Vector;
    static constexpr int64_t PRODUCTS = 2 * WIDTH;
    static INLINE void step(fvec &acc, ivec a, ivec b) {
        acc = (fvec)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
    }
};
#else
typedef PeakFloat32 PeakBFloat16;
#endif
struct PeakInt8 {
    typedef ivec Vector;
#if BYTE_DOT
    static constexpr int64_t PRODUCTS = 4 * WIDTH;
    static INLINE void step(ivec &acc, ivec a, ivec b) { acc = dot_bytes(acc, a, b); }
#elif defined(__AVX2__)
    static constexpr int64_t PRODUCTS = 2 * WIDTH;
    static INLINE void step(ivec &acc, ivec a, ivec b) { acc += (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    static constexpr int64_t PRODUCTS = 8 * WIDTH;
    static INLINE void step(ivec &acc, ivec a, ivec b) {
        acc = (ivec)vmmlaq_s32((int32x4_t)acc, (int8x16_t)a, (int8x16_t)b);
    }
#elif defined(__ARM_FEATURE_DOTPROD)
    static constexpr int64_t PRODUCTS = 4 * WIDTH;
    static INLINE void step(ivec &acc, ivec a, ivec b) {
        acc = (ivec)vdotq_s32((int32x4_t)acc, (int8x16_t)a, (int8x16_t)b);
    }
#elif defined(__aarch64__)
    static constexpr int64_t PRODUCTS = WIDTH;
    static INLINE void step(ivec &acc, ivec a, ivec b) {
        acc = (ivec)vmlal_s16((int32x4_t)acc, vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
    }
#else
    static constexpr int64_t PRODUCTS = WIDTH;
    static INLINE void step(ivec &acc, ivec a, ivec b) { acc += a * b; }
#endif
};

// Products of A registers with B others in a loop, with enough accumulators that no product waits for the one before.
template <class Step>
struct Peak {
#if defined(__AVX512F__) || defined(__aarch64__)
    static constexpr int A = 5, B = 4;
#else
    static constexpr int A = 3, B = 3;
#endif
    static constexpr int32_t START = 0x3F913F8B;  // about 1 in float32 and in bfloat16
    static int64_t units(const Call &call) { return call.rows; }
    static void run(const Call &call, int64_t unit) {
        int64_t iterations = call.op.n[1];
        typename Step::Vector acc[A][B] = {};
        ivec a[A], b[B];
        _Pragma("GCC unroll 5") for (auto &one : a) one = ivec{} + START;
        _Pragma("GCC unroll 4") for (auto &one : b) {
            one = ivec{} + START;
            make_opaque(one);
        }
        for (int64_t i = 0; i < iterations; i++) {
            _Pragma("GCC unroll 5") for (int m = 0; m < A; m++) {
                make_opaque(a[m]);
                _Pragma("GCC unroll 4") for (int n = 0; n < B; n++) Step::step(acc[m][n], a[m], b[n]);
            }
        }
        _Pragma("GCC unroll 5") for (auto &row : acc)
            _Pragma("GCC unroll 4") for (auto &one : row) make_opaque(one);
        call.op.at<int64_t>(0)[unit] = iterations * A * B * Step::PRODUCTS * 2;
    }
};

#if defined(__AMX_TILE__)
// Products of two tiles of x with two tiles of panels.
template <class Dot>
struct PeakTiles {
    static int64_t units(const Call &call) { return call.rows; }
    static void run(const Call &call, int64_t unit) {
        int64_t iterations = call.op.n[1];
        char *zeros = static_cast<char *>(scratch(TILE_BYTES));
        std::memset(zeros, 0, TILE_BYTES);
        TileRegisters registers(TILE_ROWS);
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        tile_load<4>(zeros, 64), tile_load<5>(zeros, 64), tile_load<6>(zeros, 64), tile_load<7>(zeros, 64);
        for (int64_t i = 0; i < iterations; i++)
            tile_dot<Dot, 0, 4, 6>(), tile_dot<Dot, 1, 4, 7>(), tile_dot<Dot, 2, 5, 6>(), tile_dot<Dot, 3, 5, 7>();
        tile_store<0>(zeros, 64), tile_store<1>(zeros, 64), tile_store<2>(zeros, 64), tile_store<3>(zeros, 64);
        call.op.at<int64_t>(0)[unit] = iterations * 4 * TILE_ROWS * LANES * TILE_WORDS * Dot::PER_WORD * 2;
    }
};
typedef PeakTiles<DotBFloat16> PeakOfBFloat16;
typedef PeakTiles<DotInt8> PeakOfInt8;
#else
typedef Peak<PeakBFloat16> PeakOfBFloat16;
typedef Peak<PeakInt8> PeakOfInt8;
#endif

extern const Kernel CEILINGS[] = {
    KERNEL("read/int8", Read),
    KERNEL("peak/float32", Peak<PeakFloat32>),
    KERNEL("peak/bfloat16", PeakOfBFloat16),
    KERNEL("peak/int8", PeakOfInt8),
    {nullptr, nullptr, nullptr},
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
