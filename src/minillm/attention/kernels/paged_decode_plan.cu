// The plan of decode attention: which thread block computes what. Run once per step, for all layers.
//
// The result of attention does not depend on the plan (see paged_decode.cu), so it is chosen for speed alone: items as
// large as they can be, for every item has a start and an end to pay and every partial result is written and read, and
// small enough to keep all thread blocks busy to the end.

#include "common.cuh"
#include "paged_decode_plan.cuh"


constexpr int kSizes = 16;  // S is one of 64 * 2^0 .. 64 * 2^15
constexpr int kPlanThreads = 256;
constexpr int kBucketShift = 5;  // the last items of sequences are ordered by size in steps of S / 32

// Sum of `value` over the threads before this one; `total` is over all. `scratch` has an int per warp.
__device__ int block_scan(int value, int* scratch, int& total) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    int end = value;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const int below = __shfl_up_sync(kFullWarp, end, offset);
        if (lane >= offset) end += below;
    }
    if (lane == kWarp - 1) scratch[warp] = end;
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < int(blockDim.x) / kWarp; ++w) {
        if (w < warp) before += scratch[w];
        all += scratch[w];
    }
    __syncthreads();
    total = all;
    return before + end - value;
}

// The estimated time of a step, in ns, if its items have `size` tokens. Items are computed in waves of one per thread
// block; a wave takes the time of its bytes or that of one item, whichever is longer, and some of the other. Where
// lengths differ, thread blocks that finish early take more items, so what counts is all tokens and the last item. Then
// come the steps in which partial results meet. Constants: see cuda_decode.py.
struct Costs {
    float token_bytes;  // reading a token's K and V of one head, at the rate of the whole device
    float token;        // computing a token in a thread block that has no lack of data
    float item;         // starting and ending an item
    float level;        // a step of merging
};

__device__ float wave(float bytes, float item) { return fmaxf(bytes, item) + 0.25f * fminf(bytes, item); }

__device__ float estimate(const Costs& cost, float tokens, float longest, float items, int size, int grid) {
    const float length = fminf(size, longest);
    const float item = fmaxf(length, 100.0f) * cost.token + cost.item;  // half a round takes most of a round's time
    const float waves = floorf(items / grid), rest = items - waves * grid;
    const float even = waves * wave(grid * length * cost.token_bytes, item) +
                       (rest > 0.0f ? wave(rest * length * cost.token_bytes, item) : 0.0f);
    const float uneven = wave(tokens * cost.token_bytes, (tokens * cost.token + items * cost.item) / grid) + item;
    const float parts = ceilf(longest / size);
    const float levels = parts <= 1 ? 0.0f : parts <= 8 ? 1.0f : parts <= 16 ? 1.5f : parts <= 64 ? 2.0f : 3.0f;
    return fminf(even, uneven) + levels * cost.level;
}

// Chooses S and lists the items. One thread block per sliding window in use: plans[blockIdx.x] for windows[blockIdx.x].
// `heads` counts items of an entry, `grid` the attention kernel's thread blocks. At most `max_items` items have partial
// results. `forced_shift`, if not 0, fixes log2(S).
__global__ void __launch_bounds__(kPlanThreads)
paged_decode_plan(int4* __restrict__ plans, const int* __restrict__ seq_lens, const int* __restrict__ windows,
                  int num_seqs, int capacity, int max_items, int heads, int grid, int forced_shift,
                  float token_bytes_ns, float token_ns, float item_ns, float level_ns) {
    __shared__ int scratch[kWarp], entries_of[kSizes], slots_of[kSizes], last_items[kWarp], longest, best;
    __shared__ unsigned long long tokens;
    int4* const plan = plans + i64(blockIdx.x) * (capacity + 1);
    const int window = windows[blockIdx.x], lane = threadIdx.x % kWarp;
    if (threadIdx.x < kSizes) entries_of[threadIdx.x] = slots_of[threadIdx.x] = 0;
    if (threadIdx.x < kWarp) last_items[threadIdx.x] = 0;
    if (threadIdx.x == 0) longest = 0, tokens = 0;
    __syncthreads();

    for (int first = 0; first < num_seqs; first += kPlanThreads) {
        const int s = first + threadIdx.x;
        const int given = s < num_seqs ? seq_lens[s] : -1, len = max(given, 0);
        const int seen = window > 0 ? min(len, window) : len;
        const int top = __reduce_max_sync(kFullWarp, seen), sum = __reduce_add_sync(kFullWarp, seen);
        if (lane == 0) atomicMax(&longest, top), atomicAdd(&tokens, (unsigned long long)sum);
#pragma unroll
        for (int k = 0; k < kSizes; ++k) {
            const Span span = item_span(len, window, kMinItemShift + k);
            const int count = given >= 0 ? span.end - span.begin : 0;
            const int all = __reduce_add_sync(kFullWarp, count);
            const int several = __reduce_add_sync(kFullWarp, count > 1 ? count : 0);
            if (lane == k) atomicAdd(&entries_of[k], all), atomicAdd(&slots_of[k], several);
        }
    }
    __syncthreads();

    if (threadIdx.x < kWarp) {
        const int k = lane % kSizes;
        const float ns = estimate({token_bytes_ns, token_ns, item_ns, level_ns}, float(tokens) * heads, longest,
                                  float(entries_of[k]) * heads, 1 << (kMinItemShift + k), grid);
        const bool fits = i64(slots_of[k]) * heads <= max_items;
        // Positive floats order like their bits; the size takes the lowest four.
        const u32 lowest = __reduce_min_sync(kFullWarp, (fits ? __float_as_uint(ns) & ~15u : 0x7f800000u) | k);
        if (lane == 0) {
            best = forced_shift ? forced_shift - kMinItemShift : int(lowest & 15u);
            plan[0] = make_int4(entries_of[best], kMinItemShift + best, window, 0);
        }
    }
    __syncthreads();

    // Whole items first, then what is left of each sequence, the longest first: thread blocks take items in this order,
    // so what they end with is short.
    const int shift = kMinItemShift + best;
    const auto bucket_of = [&](int len, const Span& span) {
        const int missing = (span.end << shift) - len;  // of the last item's S tokens
        return min(missing >> (shift - kBucketShift), kWarp - 1);
    };
    for (int s = threadIdx.x; s < num_seqs; s += kPlanThreads) {
        const int len = seq_lens[s];
        if (len >= 0) atomicAdd(&last_items[bucket_of(len, item_span(len, window, shift))], 1);
    }
    __syncthreads();
    if (threadIdx.x < kWarp) {
        const int count = last_items[lane];
        int end = count;
#pragma unroll
        for (int offset = 1; offset < kWarp; offset *= 2) {
            const int below = __shfl_up_sync(kFullWarp, end, offset);
            if (lane >= offset) end += below;
        }
        const int sequences = __shfl_sync(kFullWarp, end, kWarp - 1);
        last_items[lane] = entries_of[best] - sequences + end - count;  // from here on: the next place
    }
    __syncthreads();

    int entries_before = 0, slots_before = 0;
    for (int first = 0; first < num_seqs; first += kPlanThreads) {
        const int s = first + threadIdx.x;
        const int given = s < num_seqs ? seq_lens[s] : -1, len = max(given, 0);
        const Span span = item_span(len, window, shift);
        const int count = given >= 0 ? span.end - span.begin : 0;
        int entries, several;
        const int entry = entries_before + block_scan(max(count - 1, 0), scratch, entries);
        const int slot = slots_before + block_scan(count > 1 ? count : 0, scratch, several);
        if (count) {
            const int place = atomicAdd(&last_items[bucket_of(len, span)], 1);
            plan[1 + place] = make_int4(s, (span.end - 1) << shift, len, count > 1 ? slot : -1);
        }
        for (int owner = 0; owner < kWarp; ++owner) {  // a warp writes the entries of one sequence after the other
            const int from = __shfl_sync(kFullWarp, entry, owner), number = __shfl_sync(kFullWarp, count, owner) - 1;
            const int begin = __shfl_sync(kFullWarp, span.begin, owner), of_len = __shfl_sync(kFullWarp, len, owner);
            const int of_slot = __shfl_sync(kFullWarp, slot, owner);
            for (int i = lane; i < number; i += kWarp)
                plan[1 + from + i] = make_int4(s - lane + owner, (begin + i) << shift, of_len, of_slot);
        }
        entries_before += entries;
        slots_before += several;
    }
}
