// Products of a decode batch on Hopper (sm_90a): x [rows, k] times a weight [n, k], transposed, for some ten to some
// hundred rows, with what follows them in a decoder: a bias, silu(gate) * up, the addition to the residual stream.
//
// The weight is read once and is most of the bytes, so it takes the tensor cores' long side: out^T = weight x^T, a
// warpgroup has 64 rows of the weight and kTokens columns, one per token. A cluster of `splits` thread blocks shares
// the columns of k of a tile; each reduces its share of the tokens over the blocks' partial sums in shared memory
// (distributed shared memory), always in the same order.
//
//   warp 4 * kGroups (producer)   weights, then x of the same stage, as tensor copies into a ring
//   warpgroups 0 .. kGroups - 1   products of a stage; then all warps reduce and store
//
// Weights do not depend on the kernel in front, so as many stages of them as the ring has are under way before the wait
// for it (dependent_launch.cuh): in a chain of short products that is the whole share of a block, and what is left
// behind the wait is x alone.
//
// RMS norms around the residual stream may be deferred: a row's norm is a factor 1 / rms for all of it, which may as well
// be applied behind the next product. So what adds to the residual also stores the row times the norm's weight, and the
// sums of squares of each 64 columns; the next product multiplies that row, and its results by 1 / rms. That saves two
// launches a layer, each a trip to memory and back with the whole device waiting.
//
// A gated weight is [2, n, k], gate first. Its tile takes 8 rows of gate and 8 of up by turns, so both halves of an
// output are sums of one thread block.
#include "activation.cuh"
#include "deferred_norm.cuh"
#include "dependent_launch.cuh"
#include "hopper.cuh"

enum Target { kToOut = 0, kToFloat = 1, kToResidual = 2 };

constexpr int kStep = 64;         // columns of k of a stage: 128 bytes, the swizzle's width
constexpr int kGroupRows = 64;    // weight rows of a warpgroup
constexpr int kConsumersDone = 1; // named barrier

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Four floats at the address `addr` of this block, in the block `rank` of the cluster.
__device__ __forceinline__ float4 load_cluster(u32 addr, int rank) {
    float4 v;
    asm volatile(
        "{\n"
        ".reg .u32 remote;\n"
        "mapa.shared::cluster.u32 remote, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
        "}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(addr), "r"(rank)
        : "memory");
    return v;
}

__device__ __forceinline__ float4 load_shared(u32 addr) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(addr)
                 : "memory");
    return v;
}

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ float4 operator*(float4 a, float by) {
    return make_float4(a.x * by, a.y * by, a.z * by, a.w * by);
}

// Sums of `kCount` vectors of four over the cluster's blocks, in their order; all loads are under way at once.
template <int kSplits, int kCount>
__device__ __forceinline__ void sum_cluster(const u32 (&addr)[kCount], float4 (&sum)[kCount]) {
    if constexpr (kSplits == 1) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] = load_shared(addr[i]);
    } else {
        float4 parts[kCount][kSplits];
#pragma unroll
        for (int i = 0; i < kCount; ++i)
#pragma unroll
            for (int s = 0; s < kSplits; ++s) parts[i][s] = load_cluster(addr[i], s);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            sum[i] = parts[i][0];
#pragma unroll
            for (int s = 1; s < kSplits; ++s) sum[i] = sum[i] + parts[i][s];
        }
    }
}

template <typename T>
__device__ __forceinline__ float4 load4(const T* from) {
    const uint2 bits = *reinterpret_cast<const uint2*>(from);
    const float2 low = unpack2<T>(bits.x), high = unpack2<T>(bits.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

template <typename T>
struct Outputs {
    void* out;
    const T* bias;
    const float* scales;  // of the tile's tokens, in shared memory; or null
    T* next_x;            // [rows, n] = T(out * next_norm), if the norm behind is deferred, else null
    const float* next_norm;
    float* next_squares;  // [n / 64][squares_stride]
    i64 stride;
    int n, token0, tokens, target, squares_stride;

    __device__ __forceinline__ float4* floats(int token, int column) const {
        return reinterpret_cast<float4*>(static_cast<float*>(out) + (token0 + token) * stride + column);
    }
    __device__ __forceinline__ void store(int token, int column, float4 y) const {
        if (target == kToOut) {
            T* const to = static_cast<T*>(out) + (token0 + token) * stride + column;
            *reinterpret_cast<uint2*>(to) = make_uint2(pack2<T>(y.x, y.y), pack2<T>(y.z, y.w));
        } else {
            *floats(token, column) = y;
        }
    }
    // What the deferred norm behind takes of four outputs; by all lanes, sixteen neighbours of which have 64 columns.
    __device__ __forceinline__ void store_next(int token, int column, bool present, float4 y) const {
        if (present) {
            const float4 by = *reinterpret_cast<const float4*>(next_norm + column);
            *reinterpret_cast<uint2*>(next_x + i64(token0 + token) * n + column) =
                make_uint2(pack2<T>(y.x * by.x, y.y * by.y), pack2<T>(y.z * by.z, y.w * by.w));
        }
        const float squares = warp_sum<16>(y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w);
        if (present && column % 64 == 0) next_squares[i64(column / 64) * squares_stride + token0 + token] = squares;
    }
};

// This block's share of a tile: tokens split, split + kSplits, ..., of the partial sums [token][kPitch] that lie at
// `base` in every block of the cluster.
template <typename T, int kOutputs, int kPitch, bool kGated, int kSplits>
__device__ __forceinline__ void reduce(const Outputs<T>& to, u32 base, int first_column, int split) {
    constexpr int kQuads = kOutputs / 4, kSums = kGated ? 2 : 1;
    constexpr int kLoads = kSplits * kSums, kUnits = kLoads >= 8 ? 1 : 8 / kLoads;  // eight loads under way
    const int units = (to.tokens - split + kSplits - 1) / kSplits * kQuads;
    for (int warp_first = threadIdx.x / kWarp * kWarp; warp_first < units; warp_first += kUnits * blockDim.x) {
        const int first = warp_first + threadIdx.x % kWarp;
        u32 addr[kUnits * kSums];
        float4 sum[kUnits * kSums], residual[kUnits] = {};
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            const int unit = min(first + i * int(blockDim.x), units - 1), quad = unit % kQuads;
            const int token = split + kSplits * (unit / kQuads), column = first_column + quad * 4;
            const u32 row = base + 4 * token * kPitch;
            if (to.target == kToResidual && column < to.n) residual[i] = *to.floats(token, column);
            if constexpr (kGated) {
                addr[2 * i] = row + 4 * (quad / 2 * 16 + quad % 2 * 4);
                addr[2 * i + 1] = addr[2 * i] + 32;
            } else {
                addr[i] = row + 16 * quad;
            }
        }
        sum_cluster<kSplits>(addr, sum);
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            const int unit = first + i * int(blockDim.x), column = first_column + unit % kQuads * 4;
            const int token = split + kSplits * (unit / kQuads);
            const bool present = unit < units && column < to.n;
            float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (present) {
                const float scale = to.scales == nullptr ? 1.0f : to.scales[token];
                y = sum[i * kSums] * scale;
                if (to.bias != nullptr) y = y + load4<T>(to.bias + column);
                if constexpr (kGated) {
                    float4 up = sum[i * kSums + 1] * scale;
                    if (to.bias != nullptr) up = up + load4<T>(to.bias + to.n + column);
                    y = make_float4(silu_times(y.x, up.x), silu_times(y.y, up.y), silu_times(y.z, up.z),
                                    silu_times(y.w, up.w));
                }
                if (to.target == kToResidual) y = residual[i] + y;
                to.store(token, column, y);
            }
            if constexpr (!kGated) {
                if (to.next_x != nullptr) to.store_next(token, column, present, y);
            }
        }
    }
}

// Grid (tiles * splits, ceil(rows / kTokens)), cluster (splits: 1, 2 or 4), 128 * kGroups + 32 threads. Shared memory: 1,024 bytes
// to align, `stages` stages of kStageBytes, at least the partial sums [kTokens][kPitch] as float, two barriers a stage.
// n and k multiples of 8, out (rows at out_stride) and bias aligned to 4 of their elements. `squares` [k / 64]
// [squares_stride], or null: of x's deferred norm; next_x, next_norm and next_squares, or null: of the one behind.
template <typename T, int kTokens, int kGroups, bool kGated>
__global__ void __launch_bounds__(128 * kGroups + 32, 1)
batch_linear_sm90(void* out, const T* bias, const float* squares, T* next_x, const float* next_norm,
                  float* next_squares, const __grid_constant__ TensorMap weight_map,
                  const __grid_constant__ TensorMap x_map, i64 out_stride, int rows, int n, int k, int splits,
                  int stages, int target, int squares_stride, float eps) {
    constexpr int kWeightBytes = kGroups * kGroupRows * 128, kStageBytes = kWeightBytes + kTokens * 128;
    constexpr int kPitch = kGroups * kGroupRows + 4;  // 4 floats more: the stores of a warp meet every bank once
    constexpr int kOutputs = kGroups * kGroupRows / (kGated ? 2 : 1);
    extern __shared__ u8 shared[];
    __shared__ float scales[kTokens];
    const u32 base = (smem_addr(shared) + 1023) & ~1023u;
    const u32 barriers = base + max(stages * kStageBytes, kTokens * kPitch * 4);
    const auto full = [&](int stage) { return barriers + 16 * stage; };
    const auto empty = [&](int stage) { return barriers + 16 * stage + 8; };
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
    const int tile = blockIdx.x / splits, split = blockIdx.x % splits, token0 = blockIdx.y * kTokens;
    const int k_steps = ceil_div(k, kStep);
    const int first_step = k_steps * split / splits, steps = k_steps * (split + 1) / splits - first_step;
    const int ahead = min(stages, steps);

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < stages; ++stage) {
            mbarrier_init(full(stage), 1);
            mbarrier_init(empty(stage), 4 * kGroups);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    // A weight that is read once needs no place in the L2 cache.
    const u64 policy = gridDim.y == 1 ? kEvictFirst : kEvictNormal;
    const auto load_weight = [&](int stage, int step) {
        mbarrier_arrive_expect(full(stage), kStageBytes);
        const int column = (first_step + step) * kStep;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const u32 part = base + stage * kStageBytes + g * kGroupRows * 128;
            const int group = tile * kGroups + g;
            if constexpr (kGated) tma_load_4d_hint(part, &weight_map, full(stage), column, 0, 0, group * 4, policy);
            else tma_load_2d_hint(part, &weight_map, full(stage), column, group * kGroupRows, policy);
        }
    };
    if (warp == 4 * kGroups && elect_one()) {
        for (int step = 0; step < ahead; ++step) load_weight(step, step);
        let_next_grid_start();
    }
    __syncwarp();

    if (warp == 4 * kGroups) {
        if (elect_one()) {
            const auto load_x = [&](int stage, int step) {
                const u32 to = base + stage * kStageBytes + kWeightBytes;
                tma_load_2d(to, &x_map, full(stage), (first_step + step) * kStep, token0);
            };
            wait_for_previous_grid();
            for (int step = 0; step < ahead; ++step) load_x(step, step);
            int stage = 0;
            u32 phase = 0;
            for (int step = ahead; step < steps; ++step) {
                mbarrier_wait(empty(stage), phase);
                load_weight(stage, step);
                load_x(stage, step);
                if (++stage == stages) stage = 0, phase ^= 1;
            }
        }
        __syncwarp();
    } else {
        wait_for_previous_grid();
        if (squares != nullptr) {
            for (int t = threadIdx.x; t < min(rows - token0, kTokens); t += 128 * kGroups)
                scales[t] = thread_rms_scale(squares + token0 + t, squares_stride, k, eps);
        }
        float sums[kTokens / 2];
        int stage = 0, before = 0;
        u32 phase = 0;
        for (int step = 0; step < steps; ++step) {
            mbarrier_wait(full(stage), phase);
            const u32 at = base + stage * kStageBytes;
            const u64 a = wgmma_desc(at + warp / 4 * kGroupRows * 128, 16, 1024);
            const u64 b = wgmma_desc(at + kWeightBytes, 16, 1024);
            wgmma_pin(sums);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kStep / 16; ++i)  // descriptors count 16 bytes
                Wgmma<T, kTokens>::ss(sums, a + 2 * i, b + 2 * i, step > 0 || i > 0);
            wgmma_commit();
            if (step > 0) {
                wgmma_wait<1>();
                if (lane == 0) mbarrier_arrive(empty(before));
            }
            before = stage;
            if (++stage == stages) stage = 0, phase ^= 1;
        }
        wgmma_wait<0>();
        wgmma_pin(sums);
        // The partial sums take the ring's place.
        named_barrier_sync(kConsumersDone, 128 * kGroups);
        float* const partial = reinterpret_cast<float*>(shared + (base - smem_addr(shared)));
        const int row = warp * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i)
            partial[(i / 4 * 8 + lane % 4 * 2 + i % 2) * kPitch + row + i / 2 % 2 * 8] = sums[i];
    }
    if (splits > 1) cluster_sync();
    else __syncthreads();

    const Outputs<T> to{out,       bias,         squares == nullptr ? nullptr : scales,
                        next_x,    next_norm,    next_squares,
                        out_stride, n,           token0,
                        min(rows - token0, kTokens), target, squares_stride};
    const int first_column = tile * kOutputs;
    if (splits == 1) reduce<T, kOutputs, kPitch, kGated, 1>(to, base, first_column, split);
    else if (splits == 2) reduce<T, kOutputs, kPitch, kGated, 2>(to, base, first_column, split);
    else reduce<T, kOutputs, kPitch, kGated, 4>(to, base, first_column, split);
    if (splits > 1) cluster_sync();  // until all have read this block's sums
}
