// Greedy and random choice of tokens from rows of logits; the definition is in sampling.cuh.
//
//   sample_best     every row: its greatest logit; greedy rows and rows that fail are done
//   sample_mass     random rows: the weight of each split; rows without top_k and top_p are drawn. The others get a
//                   histogram over logits, which tells the bins that the cuts fall into
//   sample_cut      filtered rows: tokens of those bins are listed, sorted and cut; the row is drawn
//   sample_search   rows with more tokens in those bins than are sorted (ties): the cut by bisection over the orders
//
// The first three run as grid (splits, rows): a split is `tiles` tiles of ids of a row, and the block of a row that
// arrives last finishes the row's part of the launch. Nothing returns to the host in between, and later launches end at
// once for rows that are done, so one sequence of launches serves any mixture of rows.

#include "sampling.cuh"

// Arguments that all launches share. Arrays of rows have one element per row of logits, `sums` and `best` one per split.
struct Call {
    const void* logits;
    i64 stride;          // elements between rows
    const u32* invalid;  // bitmap of ids that stand for no token, or null
    const int* slots;    // [R] sequence slot of each row
    const int* indices;  // [R] output index that each row samples
    const SlotParams* params;
    Row* rows;
    u64* best;           // [R][splits] greatest (key, lowest id)
    float* least;        // [R][splits] least finite logit
    u64* sums;           // [R][splits] weight that may be drawn
    u32* counts;         // [R][kBins] histogram: tokens; zeros between calls
    u64* masses;         // [R][kBins] histogram: their weight; zeros between calls
    u64* list;           // [R][kMaxList] orders of tokens
    u32* listed;         // [R] how many; zeros between calls
    u32* arrivals;       // [R] zeros between launches
    i64* tokens;         // [R] out
    u8* failed;          // [R] out
    int end;             // first id of the padding
    int tiles;           // of a split

    template <typename T>
    __device__ __forceinline__ Logits<T> row_logits(int row) const {
        const T* const at = static_cast<const T*>(logits) + row * stride;
        return {at, invalid, end, reinterpret_cast<u64>(at) % 16 == 0};
    }
};

// Thread 0: the row's outcome or its parameters, from its greatest logit.
__device__ void begin_row(const Call& call, int row, u64 best, float least) {
    const u32 key = u32(best >> 32);
    const float max = key == 0xffffffffu ? INFINITY : logit_of_key(key);
    const bool failed = !(fabsf(max) < INFINITY);
    const SlotParams params = call.params[call.slots[row]];
    call.failed[row] = failed;
    Row& state = call.rows[row];
    if (failed || params.greedy) {
        call.tokens[row] = failed ? 0 : u32(~best);
        state.mode = kDone;
        return;
    }
    state.max = max;
    state.temperature = params.temperature;
    state.reciprocal = __frcp_rn(params.temperature);
    state.min_p = params.min_p;
    state.top_p = params.top_p;
    state.top_k = params.top_k;
    state.uniform = philox_uniform(params.seed, params.choice, u32(call.indices[row]));
    state.bins_per_logit = kBins / fminf(-kLeastScaled * params.temperature, max - least);
    state.mode = params.top_k < call.end || params.top_p < 1.0 ? kFiltered : kPlain;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 6) sample_best(const Call call) {
    let_next_grid_start();
    wait_for_previous_grid();
    const int row = blockIdx.y, split = blockIdx.x, split_ids = call.tiles * kTile;
    const Logits<T> logits = call.row_logits<T>(row);
    float max = -INFINITY, least = INFINITY;
    int at = 0;
    bool nan = false;
    for (int first = split * split_ids, i = 0; i < call.tiles && first < call.end; ++i, first += kTile) {
        float value[kPerThread];
        logits.tile(first, value);
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) {
            nan |= value[j] != value[j];
            if (value[j] > max) max = value[j], at = logits.id(first, j);
            least = fminf(least, value[j] > -INFINITY ? value[j] : INFINITY);
        }
    }
    u64 best = u64(nan ? 0xffffffffu : order_key(max)) << 32 | u32(~at);
    best = block_reduce<kThreads>(best, Max());
    least = -block_reduce<kThreads>(-least, Max());
    if (threadIdx.x == 0) {
        call.best[row * gridDim.x + split] = best;
        call.least[row * gridDim.x + split] = least;
    }
    if (!arrives_last(call.arrivals + row)) return;
    for (int i = threadIdx.x; i < int(gridDim.x); i += kThreads) {
        best = Max()(best, __ldcg(call.best + row * gridDim.x + i));
        least = fminf(least, __ldcg(call.least + row * gridDim.x + i));
    }
    best = block_reduce<kThreads>(best, Max());
    least = -block_reduce<kThreads>(-least, Max());
    if (threadIdx.x == 0) begin_row(call, row, best, least);
}

// The block that arrives last: into which bins the cuts fall, and so which tokens must be looked at one by one. Leaves
// the histogram zero. False if nothing is cut.
__device__ bool choose_bins(Row& state, u32* counts, u64* masses) {
    __shared__ int k_bin, p_bin, first_bin, last_bin, mode;
    __shared__ u64 k_before, k_size, p_count, p_before;
    const int first = threadIdx.x * kBinsPerThread;
    u64 count[kBinsPerThread], mass[kBinsPerThread], own_count = 0, own_mass = 0;
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) {
        own_count += count[i] = __ldcg(counts + first + i);
        own_mass += mass[i] = __ldcg(masses + first + i);
        counts[first + i] = 0;
        masses[first + i] = 0;
    }
    u64 num_tokens, total;
    u64 count_before = block_scan<kThreads>(own_count, num_tokens);
    u64 mass_before = block_scan<kThreads>(own_mass, total);
    const u64 top_k = state.top_k, limit = mass_limit(total, state.top_p);
    const bool by_count = top_k < num_tokens, by_mass = state.top_p < 1.0;
    if (!by_count && !by_mass) return false;
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) {
        if (count_before < top_k && top_k <= count_before + count[i]) {
            k_bin = first + i, k_before = count_before, k_size = count[i];
        }
        if (mass_before < limit && limit <= mass_before + mass[i]) {
            p_bin = first + i, p_before = mass_before, p_count = count[i];
        }
        count_before += count[i];
        mass_before += mass[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 size;
        if (by_count && by_mass) {  // top_p is of what top_k leaves: all of that is listed
            first_bin = 0, last_bin = k_bin, size = k_before + k_size;
        } else {
            first_bin = last_bin = by_count ? k_bin : p_bin;
            size = by_count ? k_size : p_count;
        }
        mode = size <= kMaxList ? kListed : kSearched;
        state.total = total;
        state.first_bin = first_bin;
        state.last_bin = last_bin;
        state.count_before = by_count && !by_mass ? k_before : 0;
        state.mass_before = by_mass && !by_count ? p_before : 0;
        if (!by_count) state.top_k = kNoTopK;
        state.mode = mode;
    }
    return true;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sample_mass(const Call call) {
    // A weight is at most 2^40: its halves of 20 bits can be added kTile times in 32 bits, which shared memory does in
    // one instruction.
    __shared__ u32 counts[kBins], low[kBins], high[kBins];
    let_next_grid_start();
    wait_for_previous_grid();
    // The last rows come first: they are in the cache since the launch before, and the first will be for the next one.
    const int row = gridDim.y - 1 - blockIdx.y, split = blockIdx.x, split_ids = call.tiles * kTile;
    const Row state = call.rows[row];
    if (state.mode == kDone) return;
    const bool filtered = state.mode == kFiltered;
    const Logits<T> logits = call.row_logits<T>(row);
    const Weigher weigh(state);
    u64 sum = 0, masses[kBinsPerThread] = {};
    if (filtered) {
        for (int i = threadIdx.x; i < kBins; i += kThreads) counts[i] = low[i] = high[i] = 0;
        __syncthreads();
    }
    for (int first = split * split_ids, i = 0; i < call.tiles && first < call.end; ++i, first += kTile) {
        float value[kPerThread];
        logits.tile(first, value);
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) {
            const u64 weight = weigh(value[j]);
            sum += weight;
            if (filtered && weight) {
                const int bin = bin_of(state, value[j]);
                atomicAdd(counts + bin, 1u);
                atomicAdd(low + bin, u32(weight) & 0xfffffu);
                atomicAdd(high + bin, u32(weight >> 20));
            }
        }
        if (filtered) {
            __syncthreads();
#pragma unroll
            for (int j = 0; j < kBinsPerThread; ++j) {
                const int bin = j * kThreads + threadIdx.x;
                masses[j] += low[bin] + (u64(high[bin]) << 20);
                low[bin] = high[bin] = 0;
            }
            __syncthreads();
        }
    }
    if (filtered) {
#pragma unroll
        for (int j = 0; j < kBinsPerThread; ++j) {
            const int bin = j * kThreads + threadIdx.x;
            if (counts[bin]) {
                atomicAdd(call.counts + i64(row) * kBins + bin, counts[bin]);
                atomicAdd(call.masses + i64(row) * kBins + bin, masses[j]);
            }
        }
    }
    sum = block_reduce<kThreads>(sum, Sum());
    u64* const sums = call.sums + i64(row) * gridDim.x;
    if (threadIdx.x == 0) sums[split] = sum;
    if (!arrives_last(call.arrivals + row)) return;
    Row& shared_state = call.rows[row];
    if (filtered && choose_bins(shared_state, call.counts + i64(row) * kBins, call.masses + i64(row) * kBins)) return;
    draw<kThreads>(state, logits, 0, sums, gridDim.x, split_ids, call.tokens + row);
    if (threadIdx.x == 0) shared_state.mode = kDone;
}

// `size` (a power of two, at most kMaxList) numbers in shared memory, descending: a bitonic network.
__device__ void sort_descending(u64* values, int size) {
    for (int width = 2; width <= size; width *= 2) {
        for (int stride = width / 2; stride > 0; stride /= 2) {
            for (int i = threadIdx.x; i < size / 2; i += kThreads) {
                const int low = 2 * i - (i & (stride - 1)), high = low + stride;
                const bool descending = (low & width) == 0;
                const u64 a = values[low], b = values[high];
                if ((a < b) == descending) values[low] = b, values[high] = a;
            }
            __syncthreads();
        }
    }
}

// The block that arrives last: sorts the `size` listed tokens, adds the weight of those that are kept to their splits'
// sums, and returns the order of the last of them.
__device__ u64 cut_list(const Row& state, const u64* list, int size, u64* sums, int split_ids) {
    constexpr int kOwn = kMaxList / kThreads;
    __shared__ u64 orders[kMaxList];
    const Weigher weigh(state);
    int padded = 2;
    while (padded < size) padded *= 2;
    for (int i = threadIdx.x; i < padded; i += kThreads) orders[i] = i < size ? __ldcg(list + i) : 0;
    __syncthreads();
    sort_descending(orders, padded);
    const int first = threadIdx.x * kOwn;
    const i64 most = state.top_k - state.count_before;
    u64 weights[kOwn], own = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        weights[i] = first + i < size && first + i < most ? weigh(logit_of_key(u32(orders[first + i] >> kIdBits))) : 0;
        own += weights[i];
    }
    u64 listed;
    u64 before = block_scan<kThreads>(own, listed);
    // top_p is of what top_k leaves; then all of that is listed.
    const u64 whole = state.top_k < kNoTopK ? listed : state.total;
    const u64 limit = state.top_p < 1.0 ? mass_limit(whole, state.top_p) - state.mass_before : ~0ull;
    int kept = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        if (first + i < size && first + i < most && before < limit) {
            ++kept;
            atomicAdd(sums + id_of(orders[first + i]) / split_ids, weights[i]);
        }
        before += weights[i];
    }
    kept = block_reduce<kThreads>(kept, Sum());
    return orders[kept - 1];
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sample_cut(const Call call) {
    let_next_grid_start();
    wait_for_previous_grid();
    const int row = blockIdx.y, split = blockIdx.x, split_ids = call.tiles * kTile, lane = threadIdx.x % kWarp;
    const Row state = call.rows[row];
    if (state.mode != kListed) return;
    const Logits<T> logits = call.row_logits<T>(row);
    const Weigher weigh(state);
    u64* const list = call.list + i64(row) * kMaxList;
    u64 sum = 0;
    for (int first = split * split_ids, i = 0; i < call.tiles && first < call.end; ++i, first += kTile) {
        float value[kPerThread];
        logits.tile(first, value);
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) {
            const int bin = bin_of(state, value[j]);
            const u64 weight = bin <= state.last_bin ? weigh(value[j]) : 0;
            const bool listed = weight && bin >= state.first_bin;
            if (!listed) sum += weight;
            const u32 lanes = __ballot_sync(kFullWarp, listed);
            if (lanes) {
                u32 at = 0;
                if (lane == 0) at = atomicAdd(call.listed + row, u32(__popc(lanes)));
                at = __shfl_sync(kFullWarp, at, 0) + __popc(lanes & ((1u << lane) - 1));
                if (listed) list[at] = order_of(value[j], logits.id(first, j));
            }
        }
    }
    sum = block_reduce<kThreads>(sum, Sum());
    u64* const sums = call.sums + i64(row) * gridDim.x;
    if (threadIdx.x == 0) sums[split] = sum;
    if (!arrives_last(call.arrivals + row)) return;
    const u64 cut = cut_list(state, list, int(__ldcg(call.listed + row)), sums, split_ids);
    __syncthreads();
    draw<kThreads>(state, logits, cut, sums, gridDim.x, split_ids, call.tokens + row);
    if (threadIdx.x == 0) {
        call.listed[row] = 0;
        call.rows[row].mode = kDone;
    }
}

// Calls visit(logit, id) for the ids below `end` and up to a few above, whose logit is -inf.
template <typename T, typename Visit>
__device__ __forceinline__ void for_each_token(const Logits<T>& logits, Visit visit) {
    constexpr int kLoads = 8;
    for (int first = threadIdx.x; first < logits.end; first += kLoads * kSearchThreads) {
        float value[kLoads];
        logits.strided(first, kSearchThreads, value);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) visit(value[i], first + i * kSearchThreads);
    }
}

// The order of the token at which `limit` of the measure (tokens, or their weight) is reached: the greatest order such
// that tokens of that order or higher have that much. It is in [from, last], and `beyond` is the measure above `last`.
// Four bits a pass over the row: tokens below the orders in question, and those above, which are counted already, cost
// no more than being read.
template <bool Count, typename T>
__device__ u64 search_order(const Logits<T>& logits, const Weigher& weigh, u64 limit, u64 from, u64 last, u64 beyond) {
    constexpr int kPivots = 15, kWarps = kSearchThreads / kWarp;
    __shared__ u64 parts[kPivots][kWarps], totals[kPivots];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int bits = 64 - __clzll(i64(last - from));
    for (int shift = (bits + 3) / 4 * 4 - 4; shift >= 0; shift -= 4) {
        u64 sums[kPivots] = {};
        for_each_token(logits, [&](float logit, int id) {
            const u64 order = order_of(logit, id);
            if (order < from || order > last) return;
            const u64 amount = Count ? 1 : weigh(logit);
            const int steps = int((order - from) >> shift);
#pragma unroll
            for (int i = 0; i < kPivots; ++i) sums[i] += steps > i ? amount : 0;
        });
#pragma unroll
        for (int i = 0; i < kPivots; ++i) {
            const u64 sum = warp_reduce(sums[i], Sum());
            if (lane == 0) parts[i][warp] = sum;
        }
        __syncthreads();
        if (warp < kPivots) {
            const u64 sum = warp_reduce(parts[warp][lane], Sum());
            if (lane == 0) totals[warp] = sum;
        }
        __syncthreads();
        int most = 0;
#pragma unroll
        for (int i = 0; i < kPivots; ++i) most += beyond + totals[i] >= limit;
        from += u64(most) << shift;
        if (most < kPivots) {
            beyond += totals[most];
            last = min(last, from + (u64(1) << shift) - 1);
        }
    }
    return from;
}

template <typename T>
__global__ void __launch_bounds__(kSearchThreads) sample_search(const Call call, int splits) {
    let_next_grid_start();
    wait_for_previous_grid();
    const int row = blockIdx.x, split_ids = call.tiles * kTile;
    const Row state = call.rows[row];
    if (state.mode != kSearched) return;
    const Logits<T> logits = call.row_logits<T>(row);
    const Weigher weigh(state);
    u64* const sums = call.sums + i64(row) * splits;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    // The weight of tokens from `cut` on, split by split and in all.
    const auto weigh_splits = [&](u64 cut) -> u64 {
        u64 total = 0;
        for (int split = warp; split < splits; split += kSearchThreads / kWarp) {
            u64 sum = 0;
            for (int id = split * split_ids + lane; id < (split + 1) * split_ids; id += kPerThread * kWarp) {
                float value[kPerThread];
                logits.strided(id, kWarp, value);
#pragma unroll
                for (int i = 0; i < kPerThread; ++i) {
                    sum += order_of(value[i], id + i * kWarp) >= cut ? weigh(value[i]) : 0;
                }
            }
            sum = warp_reduce(sum, Sum());
            if (lane == 0) sums[split] = sum, total += sum;
        }
        return block_reduce<kSearchThreads>(total, Sum());
    };
    // The bins tell between which orders the cuts are.
    u64 least = ~0ull, most = 0;
    for_each_token(logits, [&](float logit, int id) {
        const int bin = bin_of(state, logit);
        if (bin < state.first_bin || bin > state.last_bin || !weigh(logit)) return;
        least = min(least, order_of(logit, id));
        most = max(most, order_of(logit, id));
    });
    least = ~block_reduce<kSearchThreads>(~least, Max());
    most = block_reduce<kSearchThreads>(most, Max());
    u64 cut = least, total = state.total;
    if (state.top_k < kNoTopK) {
        cut = search_order<true>(logits, weigh, state.top_k, cut, most, state.count_before);
        total = weigh_splits(cut);
    }
    if (state.top_p < 1.0) {
        cut = search_order<false>(logits, weigh, mass_limit(total, state.top_p), cut, most, state.mass_before);
        weigh_splits(cut);
    }
    draw<kSearchThreads>(state, logits, cut, sums, splits, split_ids, call.tokens + row);
    if (threadIdx.x == 0) call.rows[row].mode = kDone;
}
