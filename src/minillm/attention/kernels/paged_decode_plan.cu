// The plan of decode attention: which thread block computes what. Run once per step, for all layers.
//
// The result of attention does not depend on the plan (see paged_decode.cu), so it is chosen for speed alone: items as
// large as they can be, for every item has a start and an end to pay and every partial result is written and read, and
// small enough to keep all thread blocks busy to the end.

#include "common.cuh"
#include "paged_decode_plan.cuh"


constexpr int kSizes = 16;  // S is one of 64 * 2^0 .. 64 * 2^15

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

// Chooses S and lists the items. One thread block per sliding window in use: plans[blockIdx.x] for windows[blockIdx.x].
// `heads` counts items of an entry, `grid` the attention kernel's thread blocks, `item_cost` what an item costs beyond
// its tokens and `merge_cost` what a partial result costs the thread block that merges, both in tokens. At most `max_slots`
// items have partial results. `forced_shift`, if not 0, fixes log2(S).
__global__ void __launch_bounds__(1024)
paged_decode_plan(int4* __restrict__ plans, const int* __restrict__ seq_lens, const int* __restrict__ windows,
                  int num_seqs, int capacity, int max_slots, int heads, int grid, int item_cost, int merge_cost,
                  int forced_shift) {
    extern __shared__ int ends[];  // [num_seqs] entries up to and with this sequence, then [num_seqs] slots before it
    __shared__ int scratch[kWarp], entries_of[kSizes], slots_of[kSizes], longest, best;
    __shared__ unsigned long long tokens;
    int4* const plan = plans + i64(blockIdx.x) * (capacity + 1);
    const int window = windows[blockIdx.x], lane = threadIdx.x % kWarp;
    if (threadIdx.x < kSizes) entries_of[threadIdx.x] = slots_of[threadIdx.x] = 0;
    if (threadIdx.x == 0) longest = 0, tokens = 0;
    __syncthreads();

    for (int first = 0; first < num_seqs; first += blockDim.x) {
        const int s = first + threadIdx.x;
        const int len = s < num_seqs ? seq_lens[s] : 0;
        const int seen = window > 0 ? min(len, window) : len;
        const int top = __reduce_max_sync(kFullWarp, seen), sum = __reduce_add_sync(kFullWarp, seen);
        if (lane == 0) atomicMax(&longest, top), atomicAdd(&tokens, (unsigned long long)sum);
#pragma unroll
        for (int k = 0; k < kSizes; ++k) {
            const Span span = item_span(len, window, kMinItemShift + k);
            const int count = s < num_seqs ? span.end - span.begin : 0;
            const int all = __reduce_add_sync(kFullWarp, count);
            const int several = __reduce_add_sync(kFullWarp, count > 1 ? count : 0);
            if (lane == 0) atomicAdd(&entries_of[k], all), atomicAdd(&slots_of[k], several);
        }
    }
    __syncthreads();

    // The time of a size, in tokens that one thread block reads: either all thread blocks walk through equally many
    // full items, or they share the tokens and end within an item of each other, whichever estimate is lower; then the
    // longest sequence's partial results are merged.
    if (threadIdx.x == 0) {
        float lowest = INFINITY;
        best = kSizes - 1;
        for (int k = 0; k < kSizes; ++k) {
            const float size = min(1 << (kMinItemShift + k), longest), items = float(entries_of[k]) * heads;
            const float rounds = ceilf(items / grid) * (size + item_cost);
            const float shared = (float(tokens) * heads + items * item_cost) / grid + size + item_cost;
            const float parts = ceilf(longest / float(1 << (kMinItemShift + k)));
            const float cost = fminf(rounds, shared) + 0.125f * size + (parts > 1 ? parts * merge_cost : 0);
            if (slots_of[k] * heads <= max_slots && cost < lowest) lowest = cost, best = k;
        }
        if (forced_shift) best = forced_shift - kMinItemShift;
        plan[0] = make_int4(entries_of[best], kMinItemShift + best, window, 0);
    }
    __syncthreads();

    const int shift = kMinItemShift + best;
    int* const slots = ends + num_seqs;
    int entries_before = 0, slots_before = 0;
    for (int first = 0; first < num_seqs; first += blockDim.x) {
        const int s = first + threadIdx.x;
        const Span span = item_span(s < num_seqs ? seq_lens[s] : 0, window, shift);
        const int count = s < num_seqs ? span.end - span.begin : 0;
        int entries, several;
        const int entry = block_scan(count, scratch, entries);
        const int slot = block_scan(count > 1 ? count : 0, scratch, several);
        if (s < num_seqs) {
            ends[s] = entries_before + entry + count;
            slots[s] = count > 1 ? slots_before + slot : -1;
        }
        entries_before += entries;
        slots_before += several;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < entries_before; e += blockDim.x) {
        int low = 0, high = num_seqs - 1;  // the first sequence whose entries end behind e
        while (low < high) {
            const int middle = (low + high) / 2;
            if (ends[middle] > e) high = middle;
            else low = middle + 1;
        }
        const int len = seq_lens[low];
        const Span span = item_span(len, window, shift);
        const int index = span.end - (ends[low] - e);
        plan[1 + e] = make_int4(low, index << shift, len, slots[low]);
    }
}
