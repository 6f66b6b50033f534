// Paged attention, the simple right path: any head dimension that is a multiple of 8 up to 256, any block size, any
// GQA ratio, fp32, fp16 and bf16, decode and prefill in one kernel. Everything is computed in fp32 on the CUDA cores
// with expf and tanhf of the math library, so that fp32 runs agree with the CPU's to rounding. The tuned kernels
// (paged_decode.cu, paged_prefill.cu) are checked against the same oracle and start from what is read here.
//
// Work. A thread block takes a tile of kRows rows, a row being a (query token, query head) pair; all rows of a tile
// belong to one sequence and one KV head, so that they share K and V. It walks over that sequence's keys in steps of
// kKeys: stages K and V in shared memory as fp32, lets each warp compute the scores of its rows with one key per lane,
// and folds them into the rows' running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
//
// Order of summation. Steps start at multiples of kKeys whatever the tile, and a step in which a row sees no key leaves
// that row's state as it is, bit by bit. So a row's result depends on its own query and sequence alone: the same in a
// chunk, in a decode step, in any batch.
//
// Shared memory (floats): q [kRows][head_dim], k [kKeys][head_dim + 4], v [kKeys][32 * kChunks], p [kRows][kKeys].
// The 4 floats behind each key make a lane's 16-byte reads free of bank conflicts: the pitch in 16-byte units,
// head_dim / 4 + 1, is odd.

#include "common.cuh"

constexpr int kKeys = kWarp;
constexpr int kRows = 16;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRowsPerWarp = kRows / kWarps;
constexpr int kInFlight = 4;  // 16-byte loads of K, and of V, that a thread has under way

struct Tile {
    int sequence;  // -1: there are fewer tiles than thread blocks, this one has nothing to do
    int index;     // among the tiles of its sequence
};

// Tiles are numbered sequence after sequence. Every warp finds the block's tile by itself, 32 sequences at a time.
__device__ Tile find_tile(const int* query_start, int num_seqs, int tokens_per_tile, int number) {
    const int lane = threadIdx.x % kWarp;
    for (int first = 0; first < num_seqs; first += kWarp) {
        const int s = first + lane;
        const int tiles = s < num_seqs ? ceil_div(query_start[s + 1] - query_start[s], tokens_per_tile) : 0;
        int end = tiles;
#pragma unroll
        for (int offset = 1; offset < kWarp; offset *= 2) {
            const int below = __shfl_up_sync(kFullWarp, end, offset);
            if (lane >= offset) end += below;
        }
        const u32 beyond = __ballot_sync(kFullWarp, end > number);
        if (beyond) {
            const int owner = __ffs(beyond) - 1;
            return {first + owner, number - __shfl_sync(kFullWarp, end - tiles, owner)};
        }
        number -= __shfl_sync(kFullWarp, end, kWarp - 1);
    }
    return {-1, 0};
}

// out, q [T, num_kv_heads * group, head_dim], rows at q_stride and out_stride; caches [blocks, num_kv_heads,
// block_size, head_dim], blocks at block_stride; strides in elements. window 0: none; soft_cap 0: none.
// grid (tiles, num_kv_heads * ceil(group / kRows)), kThreads threads. head_dim <= 32 * kChunks.
template <typename T, int kChunks>
__global__ void __launch_bounds__(kThreads)
paged_simple(T* __restrict__ out, const T* __restrict__ q, const T* __restrict__ k_cache, const T* __restrict__ v_cache,
             const int* __restrict__ block_tables, const int* __restrict__ query_start,
             const int* __restrict__ context_lens, int num_seqs, int num_kv_heads, int group, int head_dim,
             int block_size, i64 table_stride, i64 q_stride, i64 out_stride, i64 block_stride, float scale, int window,
             float soft_cap) {
    extern __shared__ __align__(16) float shared[];
    __shared__ i64 key_offset[kKeys];
    const int k_pitch = head_dim + 4;
    constexpr int kVPitch = kWarp * kChunks;
    float* const q_tile = shared;
    float* const k_tile = q_tile + kRows * head_dim;
    float* const v_tile = k_tile + kKeys * k_pitch;
    float* const p_tile = v_tile + kKeys * kVPitch;

    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int head_chunks = ceil_div(group, kRows);
    const int kv_head = blockIdx.y / head_chunks;
    const int first_head = blockIdx.y % head_chunks * kRows;
    const int heads = min(group - first_head, kRows);
    const int tokens_per_tile = max(1, kRows / group);

    const Tile tile = find_tile(query_start, num_seqs, tokens_per_tile, blockIdx.x);
    if (tile.sequence < 0) return;
    const int begin = query_start[tile.sequence], query_len = query_start[tile.sequence + 1] - begin;
    const int context_len = context_lens[tile.sequence];
    const int first_token = tile.index * tokens_per_tile;
    const int tokens = min(tokens_per_tile, query_len - first_token);
    const int rows = tokens * heads;
    const int first_pos = context_len - query_len + first_token;  // < 0 only for the padding of a captured graph
    const i64 head_offset = i64(kv_head * group + first_head) * head_dim;

    for (int i = threadIdx.x; i < rows * head_dim; i += kThreads) {
        const int row = i / head_dim, dim = i % head_dim;
        const i64 token = begin + first_token + row / heads;
        q_tile[i] = to_float(q[token * q_stride + head_offset + (row % heads) * head_dim + dim]);
    }

    float max_score[kRowsPerWarp], sum[kRowsPerWarp], acc[kRowsPerWarp][kChunks];
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
        max_score[i] = -INFINITY;
        sum[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) acc[i][c] = 0.0f;
    }

    const int end = first_pos + tokens;  // keys that the tile's last token sees
    const int start = window > 0 ? max(0, first_pos - window + 1) / kKeys * kKeys : 0;
    const int vectors = head_dim / kPer16B<T>;
    // Where key `key` of this KV head lies. Looked up a step ahead, by warp 0, one key per lane.
    const auto offset_of = [&](int key) -> i64 {
        if (key >= end) return 0;
        const i64 block = block_tables[tile.sequence * table_stride + key / block_size];
        return block * block_stride + (i64(kv_head) * block_size + key % block_size) * head_dim;
    };
    i64 next_offset = warp == 0 ? offset_of(start + lane) : 0;
    for (int key0 = start; key0 < end; key0 += kKeys) {
        if (warp == 0) key_offset[lane] = next_offset;
        __syncthreads();  // also: all warps are done with the previous step's K and V, and q is complete
        for (int first = threadIdx.x; first < kKeys * vectors; first += kInFlight * kThreads) {
            uint4 k_raw[kInFlight], v_raw[kInFlight];
#pragma unroll
            for (int n = 0; n < kInFlight; ++n) {
                const int i = first + n * kThreads, key = i / vectors, dim = i % vectors * kPer16B<T>;
                k_raw[n] = v_raw[n] = make_uint4(0, 0, 0, 0);
                if (key < kKeys && key0 + key < end) {
                    k_raw[n] = load16(k_cache + key_offset[key] + dim);
                    v_raw[n] = load16(v_cache + key_offset[key] + dim);
                }
            }
#pragma unroll
            for (int n = 0; n < kInFlight; ++n) {
                const int i = first + n * kThreads, key = i / vectors, dim = i % vectors * kPer16B<T>;
                if (key >= kKeys) break;
                float k[kPer16B<T>], v[kPer16B<T>];
                unpack16<T>(k_raw[n], k);
                unpack16<T>(v_raw[n], v);
#pragma unroll
                for (int j = 0; j < kPer16B<T>; j += 4) {
                    *reinterpret_cast<float4*>(k_tile + key * k_pitch + dim + j) =
                        make_float4(k[j], k[j + 1], k[j + 2], k[j + 3]);
                    *reinterpret_cast<float4*>(v_tile + key * kVPitch + dim + j) =
                        make_float4(v[j], v[j + 1], v[j + 2], v[j + 3]);
                }
            }
        }
        if (warp == 0) next_offset = offset_of(key0 + kKeys + lane);
        __syncthreads();

        // Scores: lane l has key key0 + l, for each of the warp's rows.
        float score[kRowsPerWarp] = {};
        for (int dim = 0; dim < head_dim; dim += 4) {
            const float4 k4 = *reinterpret_cast<const float4*>(k_tile + lane * k_pitch + dim);
#pragma unroll
            for (int i = 0; i < kRowsPerWarp; ++i) {
                if (warp + i * kWarps < rows) {
                    const float4 q4 =
                        *reinterpret_cast<const float4*>(q_tile + (warp + i * kWarps) * head_dim + dim);
                    score[i] = fmaf(q4.x, k4.x, score[i]);
                    score[i] = fmaf(q4.y, k4.y, score[i]);
                    score[i] = fmaf(q4.z, k4.z, score[i]);
                    score[i] = fmaf(q4.w, k4.w, score[i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kRowsPerWarp; ++i) {
            const int row = warp + i * kWarps, key = key0 + lane;
            if (row >= rows) break;
            const int pos = first_pos + row / heads;
            float s = score[i] * scale;
            if (soft_cap > 0.0f) s = soft_cap * tanhf(s / soft_cap);
            const bool visible = key <= pos && (window <= 0 || key > pos - window);
            if (!visible) s = -INFINITY;
            const float step_max = warp_max(s);
            float p = 0.0f;
            if (step_max > -INFINITY) {
                const float new_max = fmaxf(max_score[i], step_max);
                p = expf(s - new_max);
                const float old = expf(max_score[i] - new_max);  // 0 at the first visible key, 1 if the maximum stays
                sum[i] = sum[i] * old + warp_sum(p);
                max_score[i] = new_max;
#pragma unroll
                for (int c = 0; c < kChunks; ++c) acc[i][c] *= old;
            }
            p_tile[row * kKeys + lane] = p;
        }
        __syncwarp();

        // Values: lane l has dimensions l, l + 32, ... of each row. What lies between head_dim and 32 * kChunks is
        // never written out.
        for (int key = 0; key < kKeys; key += 4) {
            float4 p4[kRowsPerWarp];
#pragma unroll
            for (int i = 0; i < kRowsPerWarp; ++i) {
                if (warp + i * kWarps < rows)
                    p4[i] = *reinterpret_cast<const float4*>(p_tile + (warp + i * kWarps) * kKeys + key);
            }
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                const float* v = v_tile + key * kVPitch + c * kWarp + lane;
                const float v0 = v[0], v1 = v[kVPitch], v2 = v[2 * kVPitch], v3 = v[3 * kVPitch];
#pragma unroll
                for (int i = 0; i < kRowsPerWarp; ++i) {
                    if (warp + i * kWarps < rows) {
                        acc[i][c] = fmaf(p4[i].x, v0, acc[i][c]);
                        acc[i][c] = fmaf(p4[i].y, v1, acc[i][c]);
                        acc[i][c] = fmaf(p4[i].z, v2, acc[i][c]);
                        acc[i][c] = fmaf(p4[i].w, v3, acc[i][c]);
                    }
                }
            }
        }
        __syncwarp();
    }

#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
        const int row = warp + i * kWarps;
        if (row >= rows) break;
        const i64 token = begin + first_token + row / heads;
        T* const to = out + token * out_stride + head_offset + (row % heads) * head_dim;
        const float norm = sum[i] > 0.0f ? 1.0f / sum[i] : 0.0f;  // a row without keys gives zeros
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            if (c * kWarp + lane < head_dim) to[c * kWarp + lane] = from_float<T>(acc[i][c] * norm);
        }
    }
}
