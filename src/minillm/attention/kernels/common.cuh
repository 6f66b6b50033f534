// What all kernels share: scalar types, 16-byte vectors, asynchronous copies, tensor core products, reductions.
//
// NVRTC compiles these files on the user's machine with the headers of the CUDA runtime alone: keep to cuda_fp16.h,
// cuda_bf16.h, cuda_fp8.h and inline PTX (no <cstdint>, mma.h, cooperative_groups.h or cuda/std).
//
// PTX instructions and fragment layouts: PTX ISA 8.x, "Warp-level matrix instructions" (mma.m16n8k16, ldmatrix) and
// "Data movement" (cp.async).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef INFINITY  // of math.h, which NVRTC does not have
#define INFINITY __int_as_float(0x7f800000)
#endif

using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int kWarp = 32;
constexpr u32 kFullWarp = 0xffffffffu;
constexpr float kLog2e = 1.4426950408889634f;

template <typename A, typename B>
constexpr bool is_same = false;
template <typename A>
constexpr bool is_same<A, A> = true;

template <typename T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

// ---- Scalars: float <-> T with rounding to nearest even --------------------------------------------------------

template <typename T>
__device__ __forceinline__ float to_float(T x) {
    if constexpr (is_same<T, __half>) return __half2float(x);
    else if constexpr (is_same<T, __nv_bfloat16>) return __bfloat162float(x);
    else return x;
}

template <typename T>
__device__ __forceinline__ T from_float(float x) {
    if constexpr (is_same<T, __half>) return __float2half_rn(x);
    else if constexpr (is_same<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
    else return x;
}

// Two values of T in one register, `lo` in the lower half: the layout of tensor core fragments.
template <typename T>
__device__ __forceinline__ u32 pack2(float lo, float hi) {
    static_assert(sizeof(T) == 2, "two 16-bit values fill a register");
    u32 out;
    if constexpr (is_same<T, __half>) {
        __half2 pair = __floats2half2_rn(lo, hi);
        out = *reinterpret_cast<u32*>(&pair);
    } else {
        __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
        out = *reinterpret_cast<u32*>(&pair);
    }
    return out;
}

template <typename T>
__device__ __forceinline__ float2 unpack2(u32 bits) {
    static_assert(sizeof(T) == 2, "two 16-bit values fill a register");
    if constexpr (is_same<T, __half>) return __half22float2(*reinterpret_cast<__half2*>(&bits));
    else return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&bits));
}

// ---- 16 bytes at a time ----------------------------------------------------------------------------------------

template <typename T>
constexpr int kPer16B = 16 / int(sizeof(T));

// p must be 16-byte aligned.
__device__ __forceinline__ uint4 load16(const void* p) { return *reinterpret_cast<const uint4*>(p); }
__device__ __forceinline__ void store16(void* p, uint4 v) { *reinterpret_cast<uint4*>(p) = v; }

// Global memory that is read once: through the read-only path, not kept in L1.
__device__ __forceinline__ uint4 load16_streaming(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// The 16 / sizeof(T) values of a vector as floats.
template <typename T>
__device__ __forceinline__ void unpack16(uint4 v, float (&out)[kPer16B<T>]) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
            out[i] = __uint_as_float(words[i]);
        } else {
            const float2 pair = unpack2<T>(words[i]);
            out[2 * i] = pair.x;
            out[2 * i + 1] = pair.y;
        }
    }
}

// ---- Asynchronous copies global -> shared (sm_80) ---------------------------------------------------------------

__device__ __forceinline__ u32 smem_addr(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// 16 bytes past L1. With `valid` false nothing is read and zeros are written.
__device__ __forceinline__ void cp_async16(u32 dst, const void* src, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's committed groups are still under way.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- Tensor cores: m16n8k16, 16-bit inputs, fp32 accumulators ----------------------------------------------------

// Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

// d[16x8] += a[16x16] (row major) * b[16x8] (column major).
template <typename T>
__device__ __forceinline__ void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 b0, const u32 b1) {
    static_assert(sizeof(T) == 2, "16-bit inputs");
    if constexpr (is_same<T, __half>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// ---- Arithmetic --------------------------------------------------------------------------------------------------

// 2^x in one instruction (2 ulp); exp2_fast(-inf) is 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Over groups of `Width` neighbouring lanes; every lane gets the result. The tree's shape is fixed, so is the rounding.
template <int Width = kWarp>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = Width / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullWarp, x, offset);
    return x;
}

template <int Width = kWarp>
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = Width / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, offset));
    return x;
}
