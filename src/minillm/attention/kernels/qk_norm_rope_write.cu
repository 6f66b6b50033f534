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
#include "deferred_norm.cuh"
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
// [0, num_slots), such as padding's -1, writes its q alone. With `squares`, qkv is first multiplied by its row's 1 / rms
// over `hidden` columns (deferred_norm.cuh).
// grid (T, parts): part p has heads p, p + parts, ... of each round of kThreads / lanes heads. head_dim <= 8 * lanes.
template <typename T, typename Cache>
__global__ void __launch_bounds__(kThreads)
qk_norm_rope_write(Cache* q_out, Cache* k_cache, Cache* v_cache, const T* qkv, const float* __restrict__ q_weight,
                   const float* __restrict__ k_weight, const void* positions, const float* __restrict__ inv_freq,
                   const i64* slot_mapping, const float* squares, i64 num_slots, i64 qkv_stride, i64 block_stride,
                   int positions_are_long, int num_q, int num_kv, int head_dim, int block_size, int lanes,
                   int squares_stride, int hidden, float attention_factor, float eps, float squares_eps) {
    __shared__ __align__(16) float cosines[kMaxHalf], sines[kMaxHalf];
    const int half = head_dim / 2, heads = num_q + 2 * num_kv;
    const int lane = threadIdx.x % lanes, dim = 4 * lane;
    const bool active = dim < half;
    const float frequency = threadIdx.x < half ? inv_freq[threadIdx.x] : 0.0f;
    Quad<float> weights[2][2] = {};  // of q and k, lower and upper half
    if (q_weight != nullptr && active) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            weights[0][i].load(q_weight + i * half + dim);
            weights[1][i].load(k_weight + i * half + dim);
        }
    }
    // Of a few tokens, attention's blocks would keep those of the product behind it from fetching weights.
    const bool few = gridDim.x <= 8;
    if (!few) let_next_grid_start();
    wait_for_previous_grid();
    if (few) let_next_grid_start();

    // All loads before the first use: each is a trip to L2.
    const i64 token = blockIdx.x;
    const int position = *reinterpret_cast<const int*>(static_cast<const u8*>(positions) +
                                                       token * (positions_are_long ? 8 : 4));  // its lower half
    const i64 slot = slot_mapping[token];
    const T* const row = qkv + token * qkv_stride;
    const int per_round = kThreads / lanes * gridDim.y, first_head = threadIdx.x / lanes * gridDim.y + blockIdx.y;
    Quad<T> next_low = {}, next_high = {};
    const auto load = [&](int head) {
        if (active && head < heads) {
            next_low.load(row + i64(head) * head_dim + dim);
            next_high.load(row + i64(head) * head_dim + half + dim);
        }
    };
    load(first_head);
    const float row_scale =
        squares == nullptr ? 1.0f : warp_rms_scale(squares + token, squares_stride, hidden, squares_eps);
    if (threadIdx.x < half) {
        float sine, cosine;
        sincosf(float(position) * frequency, &sine, &cosine);
        cosines[threadIdx.x] = rounded<T>(cosine * attention_factor);
        sines[threadIdx.x] = rounded<T>(sine * attention_factor);
    }
    __syncthreads();
    const bool stored = u64(slot) < u64(num_slots);
    const i64 block = stored ? slot / block_size : 0;
    const i64 cache_at = block * block_stride + (stored ? slot - block * block_size : 0) * head_dim;
    // All threads take every round, since lanes of a warp exchange sums.
    for (int first = 0; first < heads; first += per_round) {
        const int head = first + first_head;
        const bool present = active && head < heads;
        Quad<T> low = next_low, high = next_high;
        load(head + per_round);  // in front of this round's stores, which the compiler must keep in their place
#pragma unroll
        for (int i = 0; i < 4; ++i) low.v[i] *= row_scale, high.v[i] *= row_scale;
        if (q_weight != nullptr) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) sum = fmaf(low.v[i], low.v[i], fmaf(high.v[i], high.v[i], sum));
            for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
            const float scale = rsqrtf(sum / float(head_dim) + eps);
            if (present && head < num_q + num_kv) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int of = head < num_q ? 0 : 1;
                    low.v[i] = rounded<T>(low.v[i] * scale * (of ? weights[1][0] : weights[0][0]).v[i]);
                    high.v[i] = rounded<T>(high.v[i] * scale * (of ? weights[1][1] : weights[0][1]).v[i]);
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
