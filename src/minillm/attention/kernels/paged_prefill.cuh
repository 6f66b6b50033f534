// What the prefill kernels share: the work list, packed rows, masks, the online softmax and the end of a tile.
//
// A chunk of a sequence has some query tokens, which stand at its last positions. The query heads of one KV head are
// packed into the rows of a tile: packed row r is query r / group and head r % group of the group. So a short chunk
// still fills tiles, K and V are read once per group, and a tile spans few positions along the causal diagonal.
//
// Both kernels hold scores and results in the accumulator layout of their tensor core instruction, which is the same
// one: lane l of a warp has, for each 8 columns j, s[4 j + 2 r + e] = row l / 4 + 8 r, column 8 j + 2 (l % 4) + e.
//
// A row's numbers depend on its own sequence only: keys are cut into tiles of N at multiples of N and taken from the
// last to the first, a tile that a row sees nothing of adds exact zeros, and pieces of long contexts are cut by a rule
// over the sequence's own lengths (attention/cuda_prefill.py).
#pragma once

#include "common.cuh"

// A tile of packed rows against a range of keys; the host writes the list, longest first.
struct PrefillWork {
    int sequence;   // row of the block table
    int token0;     // row in q of the chunk's first query
    int row0;       // first packed row of the tile
    int rows;       // packed rows of the chunk
    int pos0;       // position of the chunk's first query
    int key_begin;  // keys of this piece: [key_begin, key_end); key_begin is a multiple of N
    int key_end;
    int partial;    // -1: the piece is whole and writes the output; else the slot of its partial result

    // Block of the last position in the chunk, the last one that may be read.
    __device__ __forceinline__ int last_block(int group, int block_shift) const {
        return (pos0 + (rows - 1) / group) >> block_shift;
    }

    // First tile of N keys that some row of this tile may see; window 0 is none.
    template <int N>
    __device__ __forceinline__ int first_tile(int group, int window) const {
        return max(key_begin, window > 0 ? pos0 + row0 / group - window + 1 : 0) / N;
    }
};

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Weights are relative to a row's base, which is renewed only when a thread's share of a tile's weights sums up to more
// than this: fp16 weights stay finite, and nearly every tile is spared the search for its maximum.
constexpr float kMaxWeights = 16384.f;

// tanh as (e - 1) / (e + 1), e = 2^(2 x log2 e): 1e-6 absolute. tanh.approx is off by 5e-4, which a soft cap of 50
// would turn into percents of a weight.
__device__ __forceinline__ float tanh_accurate(float x) {
    const float e = exp2_fast(fminf(x, 15.f) * (2.f * kLog2e));
    return __fdividef(e - 1.f, e + 1.f);
}

// The two rows of a thread in the tile's softmax.
//
// FlashAttention's online softmax takes the maximum of every tile of scores and rescales older results when it grew.
// Any base will do as long as the weights 2^(score - base) neither overflow nor vanish, so here the base is the maximum
// of the first tile in which the row sees a key, and later tiles are weighed with it at once. Only if the weights' sum,
// which is needed anyway, comes out large is the maximum taken and the tile weighed again. That spares a third of the
// instructions and the wait for the maximum across lanes. (FlashAttention-4 skips the rescaling the same way, but not
// the maximum.) Whether a row's base is renewed follows from the row alone.
struct SoftmaxRows {
    int pos[2];     // position of the row's query
    float base[2];  // log2 of the unit of weights; -inf before the first key
    float sum[2];   // of weights, this thread's columns only

    __device__ __forceinline__ void start(const PrefillWork& work, int tile_row, int group) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            pos[r] = work.pos0 + (work.row0 + tile_row + 8 * r) / group;
            base[r] = minus_infinity();
            sum[r] = 0.f;
        }
    }

    // Hides what the rows may not see of the keys from `key0` on.
    template <int N>
    __device__ __forceinline__ void mask(float (&s)[N / 2], int key0, int window) const {
        const int column = key0 + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int last = pos[r] - column;
            const int before = window > 0 ? last - window : -N;
#pragma unroll
            for (int j = 0; j < N / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * j + e > last || 8 * j + e <= before) s[4 * j + 2 * r + e] = minus_infinity();
        }
    }

    // Scores to exponents: log2 of weights.
    template <int N>
    __device__ __forceinline__ void exponents(float (&s)[N / 2], float scale) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float shift = base[r] == minus_infinity() ? 0.f : base[r];
#pragma unroll
            for (int j = 0; j < N / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) s[4 * j + 2 * r + e] = fmaf(s[4 * j + 2 * r + e], scale, -shift);
        }
    }

    // Exponents x to weights p, packed as the A operand of the second product, and their sums in the two rows.
    template <typename T, int N>
    static __device__ __forceinline__ void weights(const float (&x)[N / 2], u32 (&p)[N / 4], float (&total)[2]) {
        total[0] = total[1] = 0.f;
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {  // pair i is of row i % 2
            const float a = exp2_fast(x[2 * i]), b = exp2_fast(x[2 * i + 1]);
            total[i % 2] += a;
            total[i % 2] += b;
            p[i] = pack2<T>(a, b);
        }
    }

    // Takes a tile's exponents x in; `first` is a tile before which no key was seen. Returns whether older results must
    // be multiplied by `shrink` (the same answer in all lanes of a warp).
    template <typename T, int N>
    __device__ __forceinline__ bool add(float (&x)[N / 2], u32 (&p)[N / 4], float (&shrink)[2], bool first) {
        float total[2] = {0.f, 0.f};
        if (!first) weights<T, N>(x, p, total);
        const bool asked0 = total[0] > kMaxWeights || base[0] == minus_infinity();
        const bool asked1 = total[1] > kMaxWeights || base[1] == minus_infinity();
        const bool renewed = __any_sync(kFullWarp, asked0 || asked1);
        if (renewed) {
            shrink[0] = renew<N>(x, 0, asked0);
            shrink[1] = renew<N>(x, 1, asked1);
            weights<T, N>(x, p, total);
        }
        sum[0] += total[0];
        sum[1] += total[1];
        return renewed;
    }

    // Makes the tile's maximum row r's base, if one of the row's four threads asks for it; returns by how much older
    // results shrink.
    template <int N>
    __device__ __forceinline__ float renew(float (&x)[N / 2], int r, bool asked) {
        float top = x[2 * r];
#pragma unroll
        for (int j = 0; j < N / 8; ++j) top = fmaxf(top, fmaxf(x[4 * j + 2 * r], x[4 * j + 2 * r + 1]));
        top = warp_max<4>(top);
        const u32 askers = __ballot_sync(kFullWarp, asked) >> (threadIdx.x % kWarp & ~3) & 15;
        if (askers == 0 || top == minus_infinity()) return 1.f;
        const bool had_base = base[r] != minus_infinity();
        const float shrink = had_base ? exp2_fast(-top) : 0.f;
        base[r] = had_base ? base[r] + top : top;
        sum[r] *= shrink;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            x[4 * j + 2 * r] -= top;
            x[4 * j + 2 * r + 1] -= top;
        }
        return shrink;
    }
};

template <int N>
__device__ __forceinline__ void soft_cap(float (&s)[N / 2], float score_scale) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) s[i] = tanh_accurate(s[i] * score_scale);
}

// Where results go: `out` [tokens, heads, D], or a partial result of `tile_rows` rows per (slot, KV head).
template <typename T>
struct PrefillOutput {
    T* out;
    float* partial;      // [slots, KV heads, tile_rows, D]: results as if the piece's keys were all
    float* partial_lse;  // [slots, KV heads, tile_rows]: log2 of the sum of weights; -inf if it saw no key
    int tile_rows;
};

// Writes a thread's two rows, divided by their sums. The four lanes of a row swap pairs of columns for 16 bytes in a
// row each.
template <typename T, int D>
__device__ __forceinline__ void store_rows(const float (&o)[D / 2], const SoftmaxRows& rows, const PrefillWork& work,
                                           const PrefillOutput<T>& to, int head, int num_kv_heads, int group,
                                           int tile_row, int rows_in_tile) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = tile_row + 8 * r;
        const bool mine = row < rows_in_tile && work.row0 + row < work.rows;
        const float sum = warp_sum<4>(rows.sum[r]);
        const float inverse = sum > 0.f ? 1.f / sum : 0.f;
        if (work.partial < 0) {
            const int query = (work.row0 + row) / group, sub = (work.row0 + row) % group;
            T* dst = to.out + ((i64(work.token0) + query) * num_kv_heads * group + head * group + sub) * D;
#pragma unroll
            for (int j = 0; j + 4 <= D / 8; j += 4) {
                u32 v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    v[i] = pack2<T>(o[4 * (j + i) + 2 * r] * inverse, o[4 * (j + i) + 2 * r + 1] * inverse);
#pragma unroll
                for (int step = 1; step <= 2; step *= 2)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if ((i & step) == 0) {
                            const bool upper = t & step;
                            const u32 got = __shfl_xor_sync(kFullWarp, upper ? v[i] : v[i + step], step);
                            if (upper) v[i] = got;
                            else v[i + step] = got;
                        }
                if (mine) store16(dst + 8 * (j + t), make_uint4(v[0], v[1], v[2], v[3]));
            }
#pragma unroll
            for (int j = D / 32 * 4; j < D / 8; ++j)
                if (mine)
                    *reinterpret_cast<u32*>(dst + 8 * j + 2 * t) =
                        pack2<T>(o[4 * j + 2 * r] * inverse, o[4 * j + 2 * r + 1] * inverse);
        } else if (mine) {
            const i64 at = (i64(work.partial) * num_kv_heads + head) * to.tile_rows + row;
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
                *reinterpret_cast<float2*>(to.partial + at * D + 8 * j + 2 * t) =
                    make_float2(o[4 * j + 2 * r] * inverse, o[4 * j + 2 * r + 1] * inverse);
            if (t == 0) to.partial_lse[at] = sum > 0.f ? rows.base[r] + log2f(sum) : minus_infinity();
        }
    }
}
