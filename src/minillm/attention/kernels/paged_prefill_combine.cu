// Joins the partial results of tiles whose keys were computed in pieces.
#include "paged_prefill.cuh"

// A tile of packed rows whose pieces lie in partial slots [slot0, slot0 + pieces).
struct PrefillSplit {
    int token0, row0, rows, slot0, pieces;
    int pad[3];
};

// Grid (splits, KV heads); a warp takes a row at a time. Pieces are added in their order.
template <typename T, int D>
__global__ void __launch_bounds__(256)
paged_prefill_combine(T* __restrict__ out, const float* __restrict__ partial,
                      const float* __restrict__ partial_lse, const PrefillSplit* __restrict__ splits,
                      int num_kv_heads, int group, int tile_rows) {
    const PrefillSplit split = splits[blockIdx.x];
    const int head = blockIdx.y, lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < tile_rows && split.row0 + row < split.rows; row += 8) {
        const i64 at = (i64(split.slot0) * num_kv_heads + head) * tile_rows + row;
        const i64 step = i64(num_kv_heads) * tile_rows;
        float top = minus_infinity();
        for (int i = 0; i < split.pieces; ++i) top = fmaxf(top, partial_lse[at + i * step]);
        float total = 0.f;
        float2 sum[ceil_div(D, 64)] = {};
        for (int i = 0; i < split.pieces; ++i) {
            const float weight = top == minus_infinity() ? 0.f : exp2_fast(partial_lse[at + i * step] - top);
            total += weight;
            const float2* from = reinterpret_cast<const float2*>(partial + (at + i * step) * D);
#pragma unroll
            for (int c = 0; c < ceil_div(D, 64); ++c)
                if (32 * c + lane < D / 2) {
                    const float2 x = from[32 * c + lane];
                    sum[c].x = fmaf(weight, x.x, sum[c].x);
                    sum[c].y = fmaf(weight, x.y, sum[c].y);
                }
        }
        const float inverse = total > 0.f ? 1.f / total : 0.f;
        const int query = (split.row0 + row) / group, sub = (split.row0 + row) % group;
        T* dst = out + ((i64(split.token0) + query) * num_kv_heads * group + head * group + sub) * D;
#pragma unroll
        for (int c = 0; c < ceil_div(D, 64); ++c)
            if (32 * c + lane < D / 2)
                reinterpret_cast<u32*>(dst)[32 * c + lane] = pack2<T>(sum[c].x * inverse, sum[c].y * inverse);
    }
}
