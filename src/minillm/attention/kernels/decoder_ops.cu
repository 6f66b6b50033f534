// The decoder's row-wise operations around the matrix products: embedding, residual + RMS norm, gated activation. All
// are bound by memory: 16 bytes per access, everything read once. The residual stream is float32 (models/decoder.py).
// Only weights are __restrict__ (dependent_launch.cuh says why).

#include "activation.cuh"
#include "common.cuh"
#include "deferred_norm.cuh"
#include "dependent_launch.cuh"

// 16 / sizeof(T) floats, as they lie in float32 memory.
template <typename T>
__device__ __forceinline__ void load_floats(const float* from, float (&out)[kPer16B<T>]) {
#pragma unroll
    for (int i = 0; i < kPer16B<T>; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(from + i);
        out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
    }
}

template <typename T>
__device__ __forceinline__ void store_floats(float* to, const float (&v)[kPer16B<T>]) {
#pragma unroll
    for (int i = 0; i < kPer16B<T>; i += 4)
        *reinterpret_cast<float4*>(to + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
}

// 16 / sizeof(T) floats rounded to T.
template <typename T>
__device__ __forceinline__ uint4 pack16(const float (&v)[kPer16B<T>]) {
    if constexpr (sizeof(T) == 4) {
        return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
    } else {
        return make_uint4(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]), pack2<T>(v[6], v[7]));
    }
}

// residual[t] = float(embedding[ids[t]]); an id outside [0, vocab) gives NaN, which fails its row and no other.
// residual [T, hidden], embedding [vocab, hidden]. grid (T).
template <typename T>
__global__ void __launch_bounds__(256)
embed(float* residual, const i64* ids, const T* __restrict__ embedding, i64 vocab, int hidden) {
    wait_for_previous_grid();
    let_next_grid_start();  // behind the wait: paged_decode's `history_ready` builds on it
    const i64 token = blockIdx.x, id = ids[token];
    const bool known = u64(id) < u64(vocab);
    const T* const row = embedding + (known ? id : 0) * hidden;
    for (int at = threadIdx.x * kPer16B<T>; at < hidden; at += blockDim.x * kPer16B<T>) {
        float v[kPer16B<T>];
        unpack16<T>(load16(row + at), v);
        if (!known) {
#pragma unroll
            for (int i = 0; i < kPer16B<T>; ++i) v[i] = __int_as_float(0x7fffffff);  // NaN
        }
        store_floats<T>(residual + token * hidden + at, v);
    }
}

// residual[t] += x[t] (if there is an x), out[t] = T(weight * residual[t] / sqrt(mean(residual[t]^2) + eps)).
// x at x_stride; residual, out [T, hidden]; weight [hidden]. grid (T); blockDim.x * kVecs * kPer16B<T> >= hidden.
template <typename T, int kVecs>
__global__ void __launch_bounds__(kVecs == 4 ? 1024 : 512)
add_rms_norm(T* out, float* residual, const T* x, const float* __restrict__ weight, i64 x_stride, int hidden,
             float eps) {
    __shared__ float warp_sums[kWarp];
    const i64 token = blockIdx.x;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int first = threadIdx.x * kPer16B<T>, step = blockDim.x * kPer16B<T>;
    constexpr bool kWeightFirst = kVecs < 4;  // long rows leave no registers for it
    float w[kVecs][kPer16B<T>] = {};
    if constexpr (kWeightFirst) {
#pragma unroll
        for (int n = 0; n < kVecs; ++n) {
            if (first + n * step < hidden) load_floats<T>(weight + first + n * step, w[n]);
        }
    }
    let_next_grid_start();
    wait_for_previous_grid();

    float* const residual_row = residual + token * hidden;
    const T* const x_row = x + token * x_stride;
    float r[kVecs][kPer16B<T>] = {};
    uint4 added[kVecs];
#pragma unroll
    for (int n = 0; n < kVecs; ++n) {
        if (first + n * step < hidden) {
            load_floats<T>(residual_row + first + n * step, r[n]);
            if (x != nullptr) added[n] = load16(x_row + first + n * step);
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kVecs; ++n) {
        if (first + n * step < hidden && x != nullptr) {
            float v[kPer16B<T>];
            unpack16<T>(added[n], v);
#pragma unroll
            for (int i = 0; i < kPer16B<T>; ++i) r[n][i] += v[i];
            store_floats<T>(residual_row + first + n * step, r[n]);
        }
#pragma unroll
        for (int i = 0; i < kPer16B<T>; ++i) sum = fmaf(r[n][i], r[n][i], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) warp_sums[warp] = sum;
    __syncthreads();
    sum = warp_sum(lane < warps ? warp_sums[lane] : 0.0f);
    const float scale = rsqrtf(sum / float(hidden) + eps);
#pragma unroll
    for (int n = 0; n < kVecs; ++n) {
        if (first + n * step < hidden) {
            if constexpr (!kWeightFirst) load_floats<T>(weight + first + n * step, w[n]);
            float v[kPer16B<T>];
#pragma unroll
            for (int i = 0; i < kPer16B<T>; ++i) v[i] = r[n][i] * scale * w[n][i];
            store16(out + token * hidden + first + n * step, pack16<T>(v));
        }
    }
}

// out[t, i] = T(silu(gate_up[t, i]) * gate_up[t, inner + i]), in float32 with one rounding. gate_up at gate_up_stride,
// out [T, inner]. With `squares`, gate_up is first multiplied by its row's 1 / rms (deferred_norm.cuh). grid
// (ceil(inner / (blockDim.x * kPer16B<T>)), min(T, 65535)).
template <typename T>
__global__ void __launch_bounds__(256)
silu_and_mul(T* out, const T* gate_up, const float* squares, i64 num_tokens, i64 gate_up_stride, int inner,
             int squares_stride, int hidden, float eps) {
    let_next_grid_start();
    wait_for_previous_grid();
    const int at = (blockIdx.x * blockDim.x + threadIdx.x) * kPer16B<T>;
    for (i64 token = blockIdx.y; token < num_tokens; token += gridDim.y) {
        const T* const row = gate_up + token * gate_up_stride + at;
        float gate[kPer16B<T>], up[kPer16B<T>];
        const bool inside = at < inner;
        const uint4 raw_gate = inside ? load16(row) : make_uint4(0, 0, 0, 0);
        const uint4 raw_up = inside ? load16(row + inner) : make_uint4(0, 0, 0, 0);
        const float scale = squares == nullptr ? 1.0f : warp_rms_scale(squares + token, squares_stride, hidden, eps);
        if (!inside) continue;
        unpack16<T>(raw_gate, gate);
        unpack16<T>(raw_up, up);
#pragma unroll
        for (int i = 0; i < kPer16B<T>; ++i) gate[i] = silu_times(gate[i] * scale, up[i] * scale);
        store16(out + token * inner + at, pack16<T>(gate));
    }
}
