// Hopper (sm_90a) building blocks: mbarriers, tensor copies (TMA), warpgroup products (wgmma), setmaxnreg.
//
// Sources: PTX ISA 8.x, "Asynchronous warpgroup level matrix instructions", "mbarrier", "cp.async.bulk.tensor"; the
// matrix descriptor's fields as in its section "Matrix descriptor format".
#pragma once

#include "common.cuh"

// The driver's CUtensorMap, whose header NVRTC users do not have; a kernel takes it by value as __grid_constant__.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

// ---- mbarriers -------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more of tensor copies.
__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Returns once the phase of the given parity has ended; a fresh barrier counts as if phase 1 had just ended.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// ---- Tensor copies global -> shared ----------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_2d(u32 dst, const TensorMap* map, u32 barrier, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
            "r"(dst),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void tma_load_3d(u32 dst, const TensorMap* map, u32 barrier, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(dst),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void tma_load_4d(u32 dst, const TensorMap* map, u32 barrier, int c0, int c1, int c2,
                                            int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], [%2];" ::"r"(dst),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void tma_load_2d_hint(u32 dst, const TensorMap* map, u32 barrier, int c0, int c1, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%3, %4}], [%2], %5;" ::"r"(dst),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void tma_load_4d_hint(u32 dst, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
        : "memory");
}

// Cache policies for the hint: what createpolicy.fractional gives for all of the data (CUTLASS' TMA::CacheHintSm90).
constexpr u64 kEvictNormal = 0x1000000000000000, kEvictFirst = 0x12f0000000000000;

// ---- Warpgroups ------------------------------------------------------------------------------------------------

// True in one lane of a converged warp. Unlike `lane == 0` it tells the compiler that one thread is left, which spares
// each tensor copy a loop over the active lanes.
__device__ __forceinline__ bool elect_one() {
    u32 elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(elected));
    return elected;
}

template <int Registers>
__device__ __forceinline__ void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Descriptor of an operand in shared memory in 128-byte rows under the 128-byte swizzle (1,024-byte aligned).
// K-major operands: `stride_bytes` from 8 rows to the next 8; `leading_bytes` is not used.
// MN-major operands: `leading_bytes` from 64 columns to the next 64, `stride_bytes` from 8 rows of K to the next 8.
__device__ __forceinline__ u64 wgmma_desc(u32 addr, u32 leading_bytes, u32 stride_bytes) {
    return u64((addr & 0x3ffff) >> 4) | u64(leading_bytes >> 4) << 16 | u64(stride_bytes >> 4) << 32 | u64(1) << 62;
}

// Orders this warpgroup's register and shared memory accesses before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `Pending` committed groups of products are under way.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving reads or writes of registers that products use across this point.
template <int Count>
__device__ __forceinline__ void wgmma_pin(float (&r)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// One product of a warpgroup, fp32 accumulators d[64 x N] (thread t of warp w holds, for each 8 columns, columns
// 2 (t % 4) and + 1 of rows 16 w + t / 4 and + 8):
//   ss: d = (accumulate ? d : 0) + a[64 x 16] b[16 x N], both K-major in shared memory;
//   rs: d += a b with a in registers (the layout of mma.m16n8k16's A in each warp) and b MN-major in shared memory.
template <typename T, int N>
struct Wgmma;

#define ACC8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                "+f"(d[i + 6]), "+f"(d[i + 7])

#define REGS_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGS_8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define REGS_16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define REGS_24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define REGS_32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define REGS_40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define REGS_48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define REGS_56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define REGS_64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define REGS_72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define REGS_80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define REGS_88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define REGS_96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define REGS_104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define REGS_112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define REGS_120 "%120, %121, %122, %123, %124, %125, %126, %127"

#define REGS_FOR_16 REGS_0
#define ACC_FOR_16 ACC8(0)
#define REGS_FOR_32 REGS_FOR_16 ", " REGS_8
#define ACC_FOR_32 ACC_FOR_16, ACC8(8)
#define REGS_FOR_48 REGS_FOR_32 ", " REGS_16
#define ACC_FOR_48 ACC_FOR_32, ACC8(16)
#define REGS_FOR_64 REGS_FOR_48 ", " REGS_24
#define ACC_FOR_64 ACC_FOR_48, ACC8(24)
#define REGS_FOR_80 REGS_FOR_64 ", " REGS_32
#define ACC_FOR_80 ACC_FOR_64, ACC8(32)
#define REGS_FOR_96 REGS_FOR_80 ", " REGS_40
#define ACC_FOR_96 ACC_FOR_80, ACC8(40)
#define REGS_FOR_112 REGS_FOR_96 ", " REGS_48
#define ACC_FOR_112 ACC_FOR_96, ACC8(48)
#define REGS_FOR_128 REGS_FOR_112 ", " REGS_56
#define ACC_FOR_128 ACC_FOR_112, ACC8(56)
#define REGS_FOR_160 REGS_FOR_128 ", " REGS_64 ", " REGS_72
#define ACC_FOR_160 ACC_FOR_128, ACC8(64), ACC8(72)
#define REGS_FOR_192 REGS_FOR_160 ", " REGS_80 ", " REGS_88
#define ACC_FOR_192 ACC_FOR_160, ACC8(80), ACC8(88)
#define REGS_FOR_224 REGS_FOR_192 ", " REGS_96 ", " REGS_104
#define ACC_FOR_224 ACC_FOR_192, ACC8(96), ACC8(104)
#define REGS_FOR_256 REGS_FOR_224 ", " REGS_112 ", " REGS_120
#define ACC_FOR_256 ACC_FOR_224, ACC8(112), ACC8(120)

// X0 to X4: names of the operands after the accumulators.
#define DEFINE_WGMMA(T, TYPE, N, REGS, ACC, X0, X1, X2, X3, X4)                                                       \
    template <>                                                                                                       \
    struct Wgmma<T, N> {                                                                                              \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                  \
            asm volatile(                                                                                             \
                "{\n.reg .pred p;\nsetp.ne.b32 p, " X2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE   \
                "." TYPE " {" REGS "}, " X0 ", " X1 ", p, 1, 1, 0, 0;\n}"                                             \
                : ACC                                                                                                 \
                : "l"(a), "l"(b), "r"(accumulate));                                                                   \
        }                                                                                                             \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], const u32* a, u64 b) {                           \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32."    \
                         TYPE "." TYPE " {" REGS "}, {" X0 ", " X1 ", " X2 ", " X3 "}, " X4 ", p, 1, 1, 1;\n}"        \
                         : ACC                                                                                        \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                       \
        }                                                                                                             \
    };

DEFINE_WGMMA(__half, "f16", 16, REGS_FOR_16, ACC_FOR_16, "%8", "%9", "%10", "%11", "%12")
DEFINE_WGMMA(__nv_bfloat16, "bf16", 16, REGS_FOR_16, ACC_FOR_16, "%8", "%9", "%10", "%11", "%12")
DEFINE_WGMMA(__half, "f16", 32, REGS_FOR_32, ACC_FOR_32, "%16", "%17", "%18", "%19", "%20")
DEFINE_WGMMA(__nv_bfloat16, "bf16", 32, REGS_FOR_32, ACC_FOR_32, "%16", "%17", "%18", "%19", "%20")
DEFINE_WGMMA(__half, "f16", 48, REGS_FOR_48, ACC_FOR_48, "%24", "%25", "%26", "%27", "%28")
DEFINE_WGMMA(__nv_bfloat16, "bf16", 48, REGS_FOR_48, ACC_FOR_48, "%24", "%25", "%26", "%27", "%28")
DEFINE_WGMMA(__half, "f16", 64, REGS_FOR_64, ACC_FOR_64, "%32", "%33", "%34", "%35", "%36")
DEFINE_WGMMA(__nv_bfloat16, "bf16", 64, REGS_FOR_64, ACC_FOR_64, "%32", "%33", "%34", "%35", "%36")
DEFINE_WGMMA(__half, "f16", 80, REGS_FOR_80, ACC_FOR_80, "%40", "%41", "%42", "%43", "%44")
DEFINE_WGMMA(__nv_bfloat16, "bf16", 80, REGS_FOR_80, ACC_FOR_80, "%40", "%41", "%42", "%43", "%44")
DEFINE_WGMMA(__half, "f16", 96, REGS_FOR_96, ACC_FOR_96, "%48", "%49", "%50", "%51", "%52")
DEFINE_WGMMA(__nv_bfloat16, "bf16", 96, REGS_FOR_96, ACC_FOR_96, "%48", "%49", "%50", "%51", "%52")
DEFINE_WGMMA(__half, "f16", 112, REGS_FOR_112, ACC_FOR_112, "%56", "%57", "%58", "%59", "%60")
DEFINE_WGMMA(__nv_bfloat16, "bf16", 112, REGS_FOR_112, ACC_FOR_112, "%56", "%57", "%58", "%59", "%60")
DEFINE_WGMMA(__half, "f16", 128, REGS_FOR_128, ACC_FOR_128, "%64", "%65", "%66", "%67", "%68")
DEFINE_WGMMA(__nv_bfloat16, "bf16", 128, REGS_FOR_128, ACC_FOR_128, "%64", "%65", "%66", "%67", "%68")
DEFINE_WGMMA(__half, "f16", 160, REGS_FOR_160, ACC_FOR_160, "%80", "%81", "%82", "%83", "%84")
DEFINE_WGMMA(__nv_bfloat16, "bf16", 160, REGS_FOR_160, ACC_FOR_160, "%80", "%81", "%82", "%83", "%84")
DEFINE_WGMMA(__half, "f16", 192, REGS_FOR_192, ACC_FOR_192, "%96", "%97", "%98", "%99", "%100")
DEFINE_WGMMA(__nv_bfloat16, "bf16", 192, REGS_FOR_192, ACC_FOR_192, "%96", "%97", "%98", "%99", "%100")
DEFINE_WGMMA(__half, "f16", 224, REGS_FOR_224, ACC_FOR_224, "%112", "%113", "%114", "%115", "%116")
DEFINE_WGMMA(__nv_bfloat16, "bf16", 224, REGS_FOR_224, ACC_FOR_224, "%112", "%113", "%114", "%115", "%116")
DEFINE_WGMMA(__half, "f16", 256, REGS_FOR_256, ACC_FOR_256, "%128", "%129", "%130", "%131", "%132")
DEFINE_WGMMA(__nv_bfloat16, "bf16", 256, REGS_FOR_256, ACC_FOR_256, "%128", "%129", "%130", "%131", "%132")
