// Paged prefill attention for any GPU with 16-bit mma.sync (sm_80 and newer), after FlashAttention-2.
//
// A block of 4 warps takes one tile of 64 packed rows (16 a warp) of one KV head and walks over its keys in tiles of N,
// from the last to the first. K and V tiles come through the block table with cp.async, one buffer each: K of the next
// tile flies while the softmax and the second product run, V flies while the first product runs. Several blocks per
// multiprocessor hide what is left.
//
// Shared memory: Q [64][D + 8], K [N][D + 8], V [N][D + 8]. The 16 bytes of padding put 8 consecutive rows into
// different banks for ldmatrix with any D that is a multiple of 16.
#include "paged_prefill.cuh"

template <int D>
constexpr int kPrefillRowBytes = 2 * D + 16;

template <typename T, int D, int N, bool SoftCap>
__global__ void __launch_bounds__(128)
paged_prefill(const T* __restrict__ q, i64 q_token_stride, const T* __restrict__ k_cache, const T* __restrict__ v_cache,
              i64 k_block_stride, i64 v_block_stride, T* __restrict__ out, float* __restrict__ partial,
              float* __restrict__ partial_lse, const int* __restrict__ block_tables, i64 table_stride,
              const PrefillWork* __restrict__ work_list, const int* __restrict__ num_work,
              int num_kv_heads, int group, int block_shift, float score_scale, float exponent_scale, int window) {
    constexpr int kRow = kPrefillRowBytes<D>, kVectors = D / 8, kTileRows = 64;
    extern __shared__ __align__(16) u8 smem_raw[];
    const u32 q_smem = smem_addr(smem_raw), k_smem = q_smem + kTileRows * kRow, v_smem = k_smem + N * kRow;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tile_row = 16 * warp + lane / 4;
    const int block_size = 1 << block_shift;

    const int total = *num_work * num_kv_heads;
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
        const PrefillWork work = work_list[index / num_kv_heads];
        const int head = index % num_kv_heads;
        const int first = work.first_tile<N>(group, window), end = ceil_div(work.key_end, N);
        const int last_key = work.pos0 + (work.rows - 1) / group;
        const int* table = block_tables + work.sequence * table_stride;

        for (int i = threadIdx.x; i < kTileRows * kVectors; i += 128) {
            const int row = i / kVectors, packed = work.row0 + row;
            const int query = packed / group, sub = packed % group;
            cp_async16(q_smem + row * kRow + i % kVectors * 16,
                       q + (i64(work.token0) + query) * q_token_stride + (head * group + sub) * D + i % kVectors * 8,
                       packed < work.rows);
        }
        auto load = [&](u32 dst, const T* cache, i64 block_stride, int tile) {
            for (int i = threadIdx.x; i < N * kVectors; i += 128) {
                const int row = i / kVectors, key = tile * N + row;
                const bool valid = key <= last_key;
                const i64 block = valid ? table[key >> block_shift] : 0;
                const int slot = head * block_size + (key & (block_size - 1));
                const T* src = cache + block * block_stride + slot * D + i % kVectors * 8;
                cp_async16(dst + row * kRow + i % kVectors * 16, src, valid);
            }
            cp_async_commit();
        };

        SoftmaxRows rows;
        rows.start(work, tile_row, group);
        float o[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; ++i) o[i] = 0.f;

        if (end > first) load(k_smem, k_cache, k_block_stride, end - 1);
        for (int tile = end - 1; tile >= first; --tile) {
            cp_async_wait<0>();
            __syncthreads();
            load(v_smem, v_cache, v_block_stride, tile);

            float s[N / 2];
#pragma unroll
            for (int i = 0; i < N / 2; ++i) s[i] = 0.f;
#pragma unroll
            for (int k = 0; k < D / 16; ++k) {
                u32 a[4];
                ldmatrix_x4(a, q_smem + (16 * warp + lane % 16) * kRow + k * 32 + lane / 16 * 16);
#pragma unroll
                for (int j = 0; j < N / 16; ++j) {
                    u32 b[4];
                    ldmatrix_x4(b, k_smem + (16 * j + lane % 8 + lane / 16 * 8) * kRow + k * 32 + lane / 8 % 2 * 16);
                    mma_16816<T>(reinterpret_cast<float(&)[4]>(s[8 * j]), a, b[0], b[1]);
                    mma_16816<T>(reinterpret_cast<float(&)[4]>(s[8 * j + 4]), a, b[2], b[3]);
                }
            }
            cp_async_wait<0>();
            __syncthreads();
            if (tile > first) load(k_smem, k_cache, k_block_stride, tile - 1);

            if constexpr (SoftCap) soft_cap<N>(s, score_scale);
            if (tile * N + N - 1 > work.pos0 + work.row0 / group ||
                (window > 0 && tile * N <= work.pos0 + (work.row0 + kTileRows - 1) / group - window))
                rows.mask<N>(s, tile * N, window);
            rows.exponents<N>(s, exponent_scale);
            u32 p[N / 4];
            float shrink[2];
            if (rows.add<T, N>(s, p, shrink, tile == end - 1)) {
#pragma unroll
                for (int i = 0; i < D / 2; ++i) o[i] *= shrink[i / 2 % 2];
            }
#pragma unroll
            for (int k = 0; k < N / 16; ++k) {
                const u32 a[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]};
#pragma unroll
                for (int j = 0; j < D / 16; ++j) {
                    u32 b[4];
                    ldmatrix_x4_trans(b, v_smem + (16 * k + lane % 16) * kRow + j * 32 + lane / 16 * 16);
                    mma_16816<T>(reinterpret_cast<float(&)[4]>(o[8 * j]), a, b[0], b[1]);
                    mma_16816<T>(reinterpret_cast<float(&)[4]>(o[8 * j + 4]), a, b[2], b[3]);
                }
            }
        }
        cp_async_wait<0>();
        const PrefillOutput<T> to{out, partial, partial_lse, kTileRows};
        store_rows<T, D>(o, rows, work, to, head, num_kv_heads, group, tile_row, kTileRows);
        __syncthreads();
    }
}
