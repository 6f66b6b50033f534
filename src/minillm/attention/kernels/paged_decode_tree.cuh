// The tree of decode attention: shapes, partial results and how they merge. See paged_decode.cu.
#pragma once

#include "common.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTile = 16;  // tokens
constexpr int kHeads = 8;  // query heads of an item
constexpr int kRing = 32;  // item numbers that a thread block remembers

template <int kDim>
struct Shape {
    static constexpr int kChunks = kDim / 8;  // 16-byte chunks of a row
    static constexpr bool kSwizzled = (kChunks & (kChunks - 1)) == 0;
    static constexpr int kPitch = kDim * 2 + (kSwizzled ? 0 : 16);
    static constexpr int kTileBytes = kTile * kPitch;
    static constexpr int kStageBytes = 2 * kTileBytes;
    static constexpr int kSteps = kDim / 16;                // of K Q^T; also the 16-row tiles of O^T
    static constexpr int kOwn = ceil_div(kSteps, kWarps);   // tiles of O^T that a warp merges
    static constexpr int kLoads = kChunks * kTile / kWarp;  // copies of a lane for K, and as many for V
    static constexpr int kPartial = kSteps * kWarp + 4;     // float4 of a partial result in the workspace
    // As many as registers allow:
    static constexpr int kTilesShift = kDim == 64 ? 2 : kDim <= 128 ? 1 : 0;  // log2(tiles of a warp in a round)
    static constexpr int kLevels = kDim <= 128 ? 3 : 1;                       // of a Stack outside of memory
    static constexpr int kAtOnce = kDim <= 128 ? 8 : 4;                       // results that a thread merges at a time
    static constexpr bool kEarlyQ = kDim <= 128;                              // the next item's queries

    static __device__ __forceinline__ u32 offset(int row, int chunk) {
        return row * kPitch + (kSwizzled ? chunk ^ (row & 7) : chunk) * 16;
    }
};

// ---- Partial results ---------------------------------------------------------------------------------------------

// Lane 4 * g + t holds O[d][head] for heads 2t and 2t + 1 of rows d = g and g + 8 of each 16-row tile: o[i] =
// {(g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)}; m and l of those two heads.
template <int kCount>
struct Partial {
    float m[2], l[2], o[kCount][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int h = 0; h < 2; ++h) m[h] = -INFINITY, l[h] = 0.0f;
#pragma unroll
        for (int i = 0; i < kCount; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) o[i][c] = 0.0f;
    }

    __device__ __forceinline__ void select(bool take, const Partial& other) {
#pragma unroll
        for (int h = 0; h < 2; ++h) m[h] = take ? other.m[h] : m[h], l[h] = take ? other.l[h] : l[h];
#pragma unroll
        for (int i = 0; i < kCount; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) o[i][c] = take ? other.o[i][c] : o[i][c];
    }
};

// into = merge(left, into), where `left` holds the earlier tokens. Rounding is spelled out: every place where two
// partial results meet must round alike.
template <int kCount>
__device__ __forceinline__ void merge(const Partial<kCount>& left, Partial<kCount>& into) {
    float by_left[2], by_right[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float m = fmaxf(left.m[h], into.m[h]);
        const float base = m == -INFINITY ? 0.0f : m;
        by_left[h] = exp2_fast(__fsub_rn(left.m[h], base));
        by_right[h] = exp2_fast(__fsub_rn(into.m[h], base));
        into.m[h] = m;
        into.l[h] = __fmaf_rn(left.l[h], by_left[h], __fmul_rn(into.l[h], by_right[h]));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            into.o[i][c] = __fmaf_rn(left.o[i][c], by_left[c & 1], __fmul_rn(into.o[i][c], by_right[c & 1]));
}

// Merges nodes that come one after the other along the binary tree over their indexes. Like a binary counter: node
// `index` completes the subtrees that end with it, and what can't be completed yet waits, at most one node per level.
// Levels from kLevels on are reached once in 2^kLevels nodes and live in `spill`, where each thread has a column.
template <int kCount, int kLevels>
struct Stack {
    Partial<kCount> levels[kLevels];
    float4* spill;

    // Nodes `first` to `index` have come, this one included. If it is the last, `node` becomes the merger of all.
    __device__ __forceinline__ void push(Partial<kCount>& node, int index, int first, bool last) {
        if (last && index == first) return;
        bool placed = false;
#pragma unroll
        for (int level = 0; level < kLevels; ++level) {
            const int at = index >> level;
            if (!placed && (at & 1) && (at << level) > first) merge(levels[level], node);
            if (last) continue;
            const bool here = !placed && !(at & 1);
            levels[level].select(here, node);  // a branch would make the compiler index `levels` in local memory
            placed |= here;
        }
        if (placed) return;
        for (int level = kLevels; (index >> level) != 0 || !last; ++level) {
            float4* const column = spill + (level - kLevels) * (kCount + 1) * kThreads + threadIdx.x;
            const int at = index >> level;
            if (at & 1) {
                if ((at << level) > first) {
                    Partial<kCount> left;
                    const float4 ml = column[0];
                    left.m[0] = ml.x, left.l[0] = ml.y, left.m[1] = ml.z, left.l[1] = ml.w;
#pragma unroll
                    for (int i = 0; i < kCount; ++i) {
                        const float4 o = column[(i + 1) * kThreads];
                        left.o[i][0] = o.x, left.o[i][1] = o.y, left.o[i][2] = o.z, left.o[i][3] = o.w;
                    }
                    merge(left, node);
                }
            } else if (!last) {
                column[0] = make_float4(node.m[0], node.l[0], node.m[1], node.l[1]);
#pragma unroll
                for (int i = 0; i < kCount; ++i)
                    column[(i + 1) * kThreads] = make_float4(node.o[i][0], node.o[i][1], node.o[i][2], node.o[i][3]);
                return;
            }
        }
    }
};
