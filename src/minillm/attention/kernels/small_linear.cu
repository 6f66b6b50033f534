// Matrix products with few rows of x (decode steps of small batches): out[m, n] = sum over k of x[m, k] * weight[n, k].
// Bound by the bytes of the weight, which is read once, so everything here serves to keep loads of it under way.
//
// Division of the work. A pass is kTiles tiles of 8 weight rows over the whole of k; a thread block takes passes
// blockIdx.x, blockIdx.x + gridDim.x, ... with one block per multiprocessor. Within a pass the block's warps take chunks
// of kChunk columns in turn: warp w has chunks w, w + 8, ... and a ring of kStages of its own in shared memory, which
// cp.async fills, past the end of a pass too. So no barrier stands in the stream, and 96 KiB are under way per
// multiprocessor. After a pass the warps' partial sums are added in the order of the warps: the result does not depend
// on the grid, on timing, or on the other rows of x.
//
// Dependent launch. The ring's first fill starts before the previous kernel has ended: weights do not depend on it. With
// the weights of small layers that is most of them.
//
// Tensor cores, with the weight as the 16x8 operand ("b", 8 weight rows) and x as the 16 rows of "a": 8 rows of x fill a
// half of it, and the other half is zero registers (kRowTiles = 1) or 8 more rows (2). The order of the k index within a
// product is free as long as both operands agree, so a lane takes 16 contiguous bytes of a row for two products.
//
// x comes from shared memory (kSharedX), where the block puts it once, normalised on the way if there is a norm weight;
// or from global memory chunk by chunk, where it is read once anyway (one pass) or would not fit.

#include "activation.cuh"
#include "common.cuh"
#include "dependent_launch.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTile = 8;   // weight rows of a tensor core product
constexpr int kSegment = 32;  // columns that four lanes cover with 16 bytes each

// Epilogues, beside a bias: y to `out` in T or in float32, or added to the float32 residual.
constexpr int kToOut = 0, kToFloat = 1, kToResidual = 2;

struct Args {
    const void* weight;        // T [n, k]; gated [2 n, k], gate first
    const void* x;             // T [rows, k], or with norm_weight float32
    const float* norm_weight;  // [k] or null
    const void* bias;          // T [n] (gated [2 n]) or null
    void* out;                 // [rows, n], T or float32
    i64 x_stride, out_stride;  // in elements, between rows
    int rows, n, k, target;
    float eps;
};

template <int kTiles>
struct Shape {
    static constexpr int kChunk = kTiles >= 4 ? 64 : 128;  // columns of a stage
    static constexpr int kRows = kTiles * kTile;
    static constexpr int kStageBytes = kRows * kChunk * 2;
    static constexpr int kVecs = kChunk / 8;                // 16-byte vectors of a row of a stage
    static constexpr int kRowsPerCopy = kWarp / kVecs;      // rows that a warp copies with one instruction
    static constexpr int kCopies = kRows / kRowsPerCopy;
    static constexpr int kSegments = kChunk / kSegment;
};

__device__ __forceinline__ void copy16_weight(u32 dst, const void* src, bool valid, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}

// A warp's walk over its chunks of all passes of its block. `number` counts the block's passes.
struct Cursor {
    int pass, number, chunk;

    // The first chunk of a pass for a warp: the chunks of all passes go round the warps without a break.
    static __device__ __forceinline__ int first(int number, int chunks) {
        return (threadIdx.x / kWarp - number * chunks) & (kWarps - 1);
    }

    __device__ __forceinline__ Cursor(int passes, int chunks) : pass(blockIdx.x), number(0), chunk(first(0, chunks)) {
        skip(passes, chunks);
    }

    __device__ __forceinline__ void advance(int passes, int chunks) {
        chunk += kWarps;
        skip(passes, chunks);
    }

    __device__ __forceinline__ void skip(int passes, int chunks) {
        while (chunk >= chunks && pass < passes) {
            pass += gridDim.x, ++number;
            chunk = first(number, chunks);
        }
    }
};

// Starts the copy of one stage; behind the last pass nothing. Row r, vector q of the stage
// lies at vector q ^ (r % 2 * 4) of the row, so that the 8 lanes of a 128-byte read (two rows, 64 bytes of each) meet
// every bank once.
template <typename T, int kTiles, bool kGated>
__device__ __forceinline__ void issue(const Args& a, const Cursor& at, int passes, u32 stage, u64 policy) {
    using S = Shape<kTiles>;
    constexpr int kOutputs = kGated ? S::kRows / 2 : S::kRows;
    if (at.pass < passes) {
        const int lane = threadIdx.x % kWarp, row0 = lane / S::kVecs, vec = lane % S::kVecs;
        const int column = at.chunk * S::kChunk + vec * 8;
        const bool inside = column < a.k;
        const T* const base =
            static_cast<const T*>(a.weight) + i64(at.pass * kOutputs + row0) * a.k + (inside ? column : 0);
#pragma unroll
        for (int i = 0; i < S::kCopies; ++i) {
            const int first = i * S::kRowsPerCopy;  // of the stage's rows; row0 is less than kRowsPerCopy
            const int tile = first / kTile;
            const int output = kGated ? tile / 2 * kTile + first % kTile : first;
            const bool valid = inside && at.pass * kOutputs + output + row0 < a.n;
            const i64 ahead = output + (kGated && tile % 2 ? i64(a.n) : 0);
            const int row = first + row0;
            copy16_weight(stage + row * S::kChunk * 2 + ((vec ^ (row % 2 * 4)) * 16), valid ? base + ahead * a.k : base,
                          valid, policy);
        }
    }
    cp_async_commit();
}

// x [rows, k] into shared memory as T, rows at `pitch` elements; columns from k to the end of the last chunk are zero.
// `sums` is scratch, one float per warp.
template <typename T>
__device__ __forceinline__ void normalise_x(const Args& a, T* shared_x, int pitch, int padded_k, float* sums) {
    // Vectors of x that a thread keeps in registers between the two passes over its row, and those of the weight that it
    // has before there is an x.
    constexpr int kHeld = 8, kReady = 4;
    const int warps = a.rows == 1 ? 8 : a.rows == 2 ? 4 : a.rows <= 4 ? 2 : 1;  // per row
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int step = warps * kWarp, thread = threadIdx.x % step, vecs = a.k / 4;
    const float4* const weight = reinterpret_cast<const float4*>(a.norm_weight);
    float4 w[kReady];
#pragma unroll
    for (int n = 0; n < kReady; ++n) {
        if (thread + n * step < vecs) w[n] = weight[thread + n * step];
    }
    wait_for_previous_grid();
    for (int first = 0; first < a.rows; first += kWarps / warps) {
        const int row = first + warp / warps;
        const bool present = row < a.rows;
        const float4* const x = reinterpret_cast<const float4*>(static_cast<const float*>(a.x) + row * a.x_stride);
        float4 held[kHeld];
        float sum = 0.0f;
        if (present) {
#pragma unroll
            for (int n = 0; n < kHeld; ++n) {
                held[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (thread + n * step < vecs) held[n] = x[thread + n * step];
            }
#pragma unroll
            for (int n = 0; n < kHeld; ++n)
                sum += held[n].x * held[n].x + held[n].y * held[n].y + held[n].z * held[n].z + held[n].w * held[n].w;
#pragma unroll 4
            for (int i = thread + kHeld * step; i < vecs; i += step) {
                const float4 v = x[i];
                sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            }
        }
        sum = warp_sum(sum);
        if (lane == 0) sums[warp] = sum;
        __syncthreads();
        sum = 0.0f;
        for (int i = 0; i < warps; ++i) sum += sums[warp / warps * warps + i];
        if (first + kWarps / warps < a.rows) __syncthreads();  // before the next rows' sums
        if (!present) continue;
        const float scale = rsqrtf(sum / float(a.k) + a.eps);
        T* const to = shared_x + row * pitch;
        const auto put = [&](int i, float4 v, float4 by) {
            *reinterpret_cast<uint2*>(to + 4 * i) = make_uint2(pack2<T>(v.x * scale * by.x, v.y * scale * by.y),
                                                               pack2<T>(v.z * scale * by.z, v.w * scale * by.w));
        };
#pragma unroll
        for (int n = 0; n < kHeld; ++n) {
            if (thread + n * step < vecs) put(thread + n * step, held[n], n < kReady ? w[n % kReady] : weight[thread + n * step]);
        }
#pragma unroll 4
        for (int i = thread + kHeld * step; i < vecs; i += step) put(i, x[i], weight[i]);
        for (int i = a.k + thread; i < padded_k; i += step) to[i] = from_float<T>(0.0f);
    }
    __syncthreads();
}

template <typename T>
__device__ __forceinline__ void copy_x(const Args& a, T* shared_x, int pitch, int padded_k) {
    wait_for_previous_grid();
    const int vecs = padded_k / 8, total = a.rows * vecs;
#pragma unroll 8
    for (int at = threadIdx.x; at < total; at += kThreads) {
        const int row = at / vecs, i = at - row * vecs;
        const T* const x = static_cast<const T*>(a.x) + row * a.x_stride;
        store16(shared_x + row * pitch + 8 * i, 8 * i < a.k ? load16(x + 8 * i) : make_uint4(0, 0, 0, 0));
    }
    __syncthreads();
}

// Adds the bias, and stores the outputs (m, column) and (m, column + 1) of one lane.
template <typename T>
__device__ __forceinline__ void store_pair(const Args& a, int m, int column, float2 y, float2 residual) {
    const float values[2] = {y.x, y.y}, old[2] = {residual.x, residual.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (column + i >= a.n) break;
        const i64 at = m * a.out_stride + column + i;
        if (a.target == kToOut) static_cast<T*>(a.out)[at] = from_float<T>(values[i]);
        else static_cast<float*>(a.out)[at] = a.target == kToFloat ? values[i] : old[i] + values[i];
    }
}

// grid: at most one block per multiprocessor; kThreads threads. Shared memory: the ring [kWarps][kStages], x [rows]
// [padded k + 32] if kSharedX, and partial sums [2][kWarps][kTiles][8 * kRowTiles or rows][8] as float.
// rows <= 8 * kRowTiles, k a multiple of 8, all pointers and row strides aligned to 16 bytes.
template <typename T, int kTiles, bool kGated, bool kSharedX, int kRowTiles, int kStages>
__global__ void __launch_bounds__(kThreads, 2)
small_linear(const void* weight, const void* x, const float* norm_weight, const void* bias, void* out, i64 x_stride,
             i64 out_stride, int rows, int n, int k, int target, float eps) {
    const Args a{weight, x, norm_weight, bias, out, x_stride, out_stride, rows, n, k, target, eps};
    using S = Shape<kTiles>;
    constexpr int kOutTiles = kGated ? kTiles / 2 : kTiles;
    constexpr int kOutputs = kOutTiles * kTile;
    extern __shared__ __align__(128) u8 shared[];
    __shared__ float sums[kWarps];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int group = lane / 4, quad = lane % 4;  // of tensor core fragments: row of a or of b, place within the row
    const int passes = ceil_div(a.n, kOutputs), chunks = ceil_div(a.k, S::kChunk);
    const int padded_k = chunks * S::kChunk, pitch = padded_k + kSegment;
    u8* const ring = shared + warp * kStages * S::kStageBytes;
    T* const shared_x = reinterpret_cast<T*>(shared + kWarps * kStages * S::kStageBytes);
    float* const partial = reinterpret_cast<float*>(shared_x + (kSharedX ? a.rows * pitch : 0));
    const int partial_rows = a.rows;  // floats of a tile of partial sums: [rows][8]
    const u32 ring_addr = smem_addr(ring);

    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    Cursor ahead(passes, chunks);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
        issue<T, kTiles, kGated>(a, ahead, passes, ring_addr + stage * S::kStageBytes, policy);
        ahead.advance(passes, chunks);
    }
    let_next_grid_start();
    if constexpr (kSharedX) {
        if (a.norm_weight != nullptr) normalise_x<T>(a, shared_x, pitch, padded_k, sums);
        else copy_x<T>(a, shared_x, pitch, padded_k);
    } else {
        wait_for_previous_grid();
    }

    // Rows of x behind the last are the last again; their results are not stored.
    const T* x_rows[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
        const int row = min(group + r * 8, a.rows - 1);
        x_rows[r] = (kSharedX ? shared_x + row * pitch : static_cast<const T*>(a.x) + row * a.x_stride) + quad * 8;
    }
    const auto load_x = [&](int chunk, uint4 (&to)[S::kSegments][kRowTiles]) {
#pragma unroll
        for (int s = 0; s < S::kSegments; ++s) {
            const int column = chunk * S::kChunk + s * kSegment;
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                if constexpr (kSharedX) to[s][r] = load16(x_rows[r] + column);
                else to[s][r] = column + quad * 8 < a.k ? load16(x_rows[r] + column) : make_uint4(0, 0, 0, 0);
            }
        }
    };

    Cursor at(passes, chunks);
    uint4 next_x[S::kSegments][kRowTiles];
    if constexpr (!kSharedX) {
        if (at.pass < passes) load_x(at.chunk, next_x);
    }
    int slot = 0, parity = 0;
    for (int pass = blockIdx.x, number = 0; pass < passes; pass += gridDim.x, ++number, parity ^= 1) {
        // The warp that will store tile t of this pass, and what it adds to.
        const int my_tile = (warp + number) % kWarps, column = pass * kOutputs + my_tile * kTile + quad * 2;
        float2 residual[kRowTiles] = {};
        if (a.target == kToResidual && my_tile < kOutTiles) {
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                const float* const from = static_cast<const float*>(a.out) + (group + r * 8) * a.out_stride + column;
                if (group + r * 8 < a.rows) {
                    if (column < a.n) residual[r].x = from[0];
                    if (column + 1 < a.n) residual[r].y = from[1];
                }
            }
        }
        float acc[kTiles][2][4] = {};
        while (at.pass == pass) {
            uint4 x[S::kSegments][kRowTiles];
            if constexpr (kSharedX) {
                load_x(at.chunk, x);
                at.advance(passes, chunks);
            } else {
#pragma unroll
                for (int s = 0; s < S::kSegments; ++s)
#pragma unroll
                    for (int r = 0; r < kRowTiles; ++r) x[s][r] = next_x[s][r];
                at.advance(passes, chunks);
                if (at.pass < passes) load_x(at.chunk, next_x);
            }
            cp_async_wait<kStages - 1>();
            __syncwarp();
            const u8* const stage = ring + slot * S::kStageBytes + group * S::kChunk * 2 + quad * 16;
#pragma unroll
            for (int s = 0; s < S::kSegments; ++s) {
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    const uint4 w = load16(stage + t * kTile * S::kChunk * 2 + (s ^ (group & 1)) * 64);
                    const u32 low[4] = {x[s][0].x, kRowTiles == 2 ? x[s][kRowTiles - 1].x : 0, x[s][0].y,
                                        kRowTiles == 2 ? x[s][kRowTiles - 1].y : 0};
                    const u32 high[4] = {x[s][0].z, kRowTiles == 2 ? x[s][kRowTiles - 1].z : 0, x[s][0].w,
                                         kRowTiles == 2 ? x[s][kRowTiles - 1].w : 0};
                    mma_16816<T>(acc[t][0], low, w.x, w.y);
                    mma_16816<T>(acc[t][1], high, w.z, w.w);
                }
            }
            __syncwarp();
            issue<T, kTiles, kGated>(a, ahead, passes, ring_addr + slot * S::kStageBytes, policy);
            ahead.advance(passes, chunks);
            slot = slot + 1 == kStages ? 0 : slot + 1;
        }

        // Two buffers: the warps that read one are past it when they arrive at the barrier of the next pass.
        float* const sums_here = partial + parity * kWarps * kTiles * partial_rows * 8;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                const int m = group + r * 8;
                if (m < a.rows)
                    *reinterpret_cast<float2*>(sums_here + ((warp * kTiles + t) * partial_rows + m) * 8 + quad * 2) =
                        make_float2(acc[t][0][r * 2] + acc[t][1][r * 2], acc[t][0][r * 2 + 1] + acc[t][1][r * 2 + 1]);
            }
        }
        __syncthreads();
        if (my_tile >= kOutTiles) continue;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            const int m = group + r * 8;
            if (m >= a.rows) continue;
            const auto total = [&](int tile, int first_row) {
                float2 y = make_float2(0.0f, 0.0f);
#pragma unroll
                for (int w = 0; w < kWarps; ++w) {
                    const float2 part = *reinterpret_cast<const float2*>(
                        sums_here + ((w * kTiles + tile) * partial_rows + m) * 8 + quad * 2);
                    y.x += part.x, y.y += part.y;
                }
                if (a.bias != nullptr) {
                    const T* const bias = static_cast<const T*>(a.bias) + first_row;
                    if (column < a.n) y.x += to_float(bias[column]);
                    if (column + 1 < a.n) y.y += to_float(bias[column + 1]);
                }
                return y;
            };
            float2 y;
            if constexpr (kGated) {
                const float2 gate = total(2 * my_tile, 0), up = total(2 * my_tile + 1, a.n);
                y = make_float2(silu_times(gate.x, up.x), silu_times(gate.y, up.y));
            } else {
                y = total(my_tile, 0);
            }
            store_pair<T>(a, m, column, y, residual[r]);
        }
    }
    cp_async_wait<0>();
}
