// Between the packed q, k, v product and attention: q and k norm (if the model has them), rotary embedding, and the new
// keys and values into their slots of the paged cache. Reads the product once, writes q, K and V once.
//
// Rounding is that of models/layers.py: the norm in float32, rounded to T; cos and sin rounded to T; x * cos rounded to
// T, then the sum with the other half's product in float32, rounded to T. Angles are float32 products of position and
// frequency, and sincosf reduces them accurately at any position.
//
// A head is worked on by `lanes` neighbouring lanes (a power of two): lane l has dimensions 4l .. 4l + 3 of both halves,
// which rotate with each other. cos and sin are computed once per thread block and token.

#include "common.cuh"
#include "dependent_launch.cuh"

constexpr int kThreads = 256;
constexpr int kMaxHalf = 128;

template <typename T>
struct Quad {
    float v[4];

    __device__ __forceinline__ void load(const T* from) {
        if constexpr (sizeof(T) == 4) {
            const float4 raw = *reinterpret_cast<const float4*>(from);
            v[0] = raw.x, v[1] = raw.y, v[2] = raw.z, v[3] = raw.w;
        } else {
            const uint2 raw = *reinterpret_cast<const uint2*>(from);
            const float2 low = unpack2<T>(raw.x), high = unpack2<T>(raw.y);
            v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
        }
    }

    template <typename To>
    __device__ __forceinline__ void store(To* to) const {
        if constexpr (sizeof(To) == 4) *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
        else *reinterpret_cast<uint2*>(to) = make_uint2(pack2<To>(v[0], v[1]), pack2<To>(v[2], v[3]));
    }
};

template <typename T>
__device__ __forceinline__ float rounded(float x) {
    return to_float(from_float<T>(x));
}

// qkv [T, (num_q + 2 * num_kv) * head_dim] at qkv_stride; q_weight, k_weight float32 [head_dim], both or neither null; positions int64
// or int32 [T]; inv_freq float32 [head_dim / 2]; caches [blocks, num_kv, block_size, head_dim], blocks at block_stride;
// q_out [T, num_q, head_dim] in the cache's type, since attention takes it in that. A token whose slot is outside
// [0, num_slots), such as padding's -1, writes its q alone.
// grid (T, parts): part p has heads p, p + parts, ... of each round of kThreads / lanes heads. head_dim <= 8 * lanes.
template <typename T, typename Cache>
__global__ void __launch_bounds__(kThreads)
qk_norm_rope_write(Cache* __restrict__ q_out, Cache* __restrict__ k_cache, Cache* __restrict__ v_cache,
                   const T* __restrict__ qkv, const float* __restrict__ q_weight, const float* __restrict__ k_weight,
                   const void* __restrict__ positions, const float* __restrict__ inv_freq,
                   const i64* __restrict__ slot_mapping, i64 num_slots, i64 qkv_stride, i64 block_stride,
                   int positions_are_long, int num_q, int num_kv, int head_dim, int block_size, int lanes,
                   float attention_factor, float eps) {
    __shared__ __align__(16) float cosines[kMaxHalf], sines[kMaxHalf];
    const int half = head_dim / 2, heads = num_q + 2 * num_kv;
    const float frequency = threadIdx.x < half ? inv_freq[threadIdx.x] : 0.0f;
    wait_for_previous_grid();
    let_next_grid_start();

    const i64 token = blockIdx.x;
    if (threadIdx.x < half) {
        const float position = positions_are_long ? float(static_cast<const i64*>(positions)[token])
                                                  : float(static_cast<const int*>(positions)[token]);
        float sine, cosine;
        sincosf(position * frequency, &sine, &cosine);
        cosines[threadIdx.x] = rounded<T>(cosine * attention_factor);
        sines[threadIdx.x] = rounded<T>(sine * attention_factor);
    }
    const i64 slot = slot_mapping[token];
    const bool stored = u64(slot) < u64(num_slots);
    const i64 block = stored ? slot / block_size : 0;
    const i64 cache_at = block * block_stride + (stored ? slot - block * block_size : 0) * head_dim;
    const T* const row = qkv + token * qkv_stride;
    const int lane = threadIdx.x % lanes, dim = 4 * lane;
    const bool active = dim < half;
    const int per_round = kThreads / lanes * gridDim.y;
    bool tables_ready = false;
    // All threads take every round, since lanes of a warp exchange sums and the first round waits for the tables.
    for (int first = 0; first < heads; first += per_round) {
        const int head = first + threadIdx.x / lanes * gridDim.y + blockIdx.y;
        const bool present = active && head < heads;
        Quad<T> low = {}, high = {};
        if (present) {
            low.load(row + i64(head) * head_dim + dim);
            high.load(row + i64(head) * head_dim + half + dim);
        }
        if (!tables_ready) __syncthreads();
        tables_ready = true;
        if (q_weight != nullptr) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) sum = fmaf(low.v[i], low.v[i], fmaf(high.v[i], high.v[i], sum));
            for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
            const float scale = rsqrtf(sum / float(head_dim) + eps);
            if (present && head < num_q + num_kv) {
                const float* const weight = head < num_q ? q_weight : k_weight;
                Quad<float> low_weight, high_weight;
                low_weight.load(weight + dim);
                high_weight.load(weight + half + dim);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    low.v[i] = rounded<T>(low.v[i] * scale * low_weight.v[i]);
                    high.v[i] = rounded<T>(high.v[i] * scale * high_weight.v[i]);
                }
            }
        }
        if (!present) continue;
        Cache* to;
        if (head < num_q) {
            to = q_out + (token * num_q + head) * head_dim;
        } else {
            if (!stored) continue;
            const bool is_key = head < num_q + num_kv;
            const i64 kv_head = head - num_q - (is_key ? 0 : num_kv);
            to = (is_key ? k_cache : v_cache) + cache_at + kv_head * block_size * head_dim;
        }
        if (head < num_q + num_kv) {
            Quad<float> cosine, sine;
            cosine.load(cosines + dim);
            sine.load(sines + dim);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float x = low.v[i], y = high.v[i];
                low.v[i] = rounded<T>(fmaf(-y, sine.v[i], rounded<T>(x * cosine.v[i])));
                high.v[i] = rounded<T>(fmaf(x, sine.v[i], rounded<T>(y * cosine.v[i])));
            }
        }
        low.store(to + dim);
        high.store(to + half + dim);
    }
}
