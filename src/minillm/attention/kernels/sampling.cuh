// What the sampling kernels share: parameters, weights, random numbers, reductions, and the draw itself.
//
// The definition is that of runner/sampling_ops.py. Probabilities are integer weights floor(2^40 exp((l - max) / T)), so
// every sum is exact in any order: how a row is split over thread blocks cannot change its token. Candidates are ordered
// by (logit descending, id ascending), as one 52-bit number, the *order* of a token: the higher, the earlier. Filters cut
// that order at one place, so what is kept is "order >= cut". The draw inverts the cumulative weights by id.
#pragma once

#include "common.cuh"
#include "dependent_launch.cuh"

constexpr int kThreads = 256;
constexpr int kSearchThreads = 1024;
constexpr int kPerThread = 8;
constexpr int kTile = kThreads * kPerThread;
constexpr int kMaxTiles = 8;         // of one split
constexpr int kSubTile = 256;        // ids that the draw looks at together
constexpr int kBins = 1024;          // of the histogram over logits
constexpr int kBinsPerThread = kBins / kThreads;
constexpr int kMaxList = 2048;       // candidates that are sorted; more are searched for
constexpr int kIdBits = 20;          // ids are below 2^20
constexpr int kOrderBits = 32 + kIdBits;
constexpr float kLeastScaled = -28.0f;  // below ln(2^-40) = -27.73 a weight is 0

constexpr i64 kNoTopK = 1ll << 40;      // in `Row`: top_k cuts nothing

// Parameters of a sequence slot: 40 bytes, mirrored by `PARAMS_DTYPE` in runner/cuda_sampling.py.
struct SlotParams {
    float temperature;  // > 0
    float min_p;        // 0: off
    double top_p;       // (0, 1], 1: off
    i64 top_k;          // >= 1; at least the vocabulary's size: off
    u64 seed;
    u32 choice;
    u32 greedy;
};

enum Mode : int { kDone, kPlain, kFiltered, kListed, kSearched };

// What the launches of one call tell each other about a row: 80 bytes (`ROW_BYTES`).
struct Row {
    double uniform;
    double top_p;
    i64 top_k;
    u64 total;         // weight of the whole row
    u64 mass_before;   // weight of the bins before the listed ones
    i64 count_before;  // tokens in them
    float max, temperature, reciprocal, min_p, bins_per_logit;
    int mode;
    int first_bin, last_bin;  // whose tokens are listed
};
static_assert(sizeof(SlotParams) == 40 && sizeof(Row) == 80, "mirrored on the host");

// ---- Logits ----------------------------------------------------------------------------------------------------------

// One row of logits; ids at `end` and beyond, and those in the bitmap `invalid` (or null), stand for no token.
template <typename T>
struct Logits {
    static constexpr int kVec = kPer16B<T>;
    const T* row;
    const u32* invalid;
    int end;
    bool aligned;  // to 16 bytes

    __device__ __forceinline__ bool no_token(int id) const { return invalid && (invalid[id >> 5] >> (id & 31) & 1); }

    // Ids first, first + step, ...: all loads are under way together.
    template <int Count>
    __device__ __forceinline__ void strided(int first, int step, float (&out)[Count]) const {
#pragma unroll
        for (int i = 0; i < Count; ++i) out[i] = first + i * step < end ? to_float(row[first + i * step]) : -INFINITY;
        if (invalid) {
#pragma unroll
            for (int i = 0; i < Count; ++i) {
                const int id = min(first + i * step, end - 1);
                out[i] = no_token(id) ? -INFINITY : out[i];
            }
        }
    }

    // Ids of this thread in the tile at `first`, ascending in i.
    __device__ __forceinline__ int id(int first, int i) const {
        const int thread = threadIdx.x;
        return first + (aligned ? (i / kVec * kThreads + thread) * kVec + i % kVec : i * kThreads + thread);
    }

    // Their logits.
    __device__ __forceinline__ void tile(int first, float (&out)[kPerThread]) const {
        if (first + kTile > end) {
#pragma unroll
            for (int i = 0; i < kPerThread; ++i) {
                const int at = id(first, i);
                out[i] = at < end && !no_token(at) ? to_float(row[at]) : -INFINITY;
            }
            return;
        }
        if (aligned) {
            uint4 loaded[kPerThread / kVec];
#pragma unroll
            for (int i = 0; i < kPerThread / kVec; ++i) {
                loaded[i] = *reinterpret_cast<const uint4*>(row + id(first, i * kVec));
            }
#pragma unroll
            for (int i = 0; i < kPerThread / kVec; ++i) {
                float values[kVec];
                unpack16<T>(loaded[i], values);
#pragma unroll
                for (int j = 0; j < kVec; ++j) out[i * kVec + j] = values[j];
            }
        } else {
#pragma unroll
            for (int i = 0; i < kPerThread; ++i) out[i] = to_float(row[id(first, i)]);
        }
        if (invalid) {
#pragma unroll
            for (int i = 0; i < kPerThread; ++i) out[i] = no_token(id(first, i)) ? -INFINITY : out[i];
        }
    }
};

// Increasing in the logit; -0.0 and 0.0 are equal. NaN has the highest of all.
__device__ __forceinline__ u32 order_key(float logit) {
    if (logit != logit) return 0xffffffffu;
    const u32 bits = __float_as_uint(logit + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of_key(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ u64 order_of(float logit, int id) {
    return u64(order_key(logit)) << kIdBits | u32((1 << kIdBits) - 1 - id);
}

__device__ __forceinline__ int id_of(u64 order) { return (1 << kIdBits) - 1 - int(order & ((1u << kIdBits) - 1)); }

// ---- Weights ---------------------------------------------------------------------------------------------------------

struct Weigher {
    float max, temperature, reciprocal, min_p, least;

    __device__ __forceinline__ explicit Weigher(const Row& row)
        : max(row.max),
          temperature(row.temperature),
          reciprocal(row.reciprocal),
          min_p(row.min_p),
          least(kLeastScaled * row.temperature) {}

    __device__ __forceinline__ u64 operator()(float logit) const {
        const float x = fmaxf(logit - max, least);  // of weight 0 there, and no infinity
        // x / temperature, correctly rounded: two steps of Newton with the rounded reciprocal (P. Markstein, "Computation
        // of elementary functions on the IBM RISC System/6000 processor", 1990), cheaper than the general division.
        float q = x * reciprocal;
        q = fmaf(fmaf(-temperature, q, x), reciprocal, q);
        q = fmaf(fmaf(-temperature, q, x), reciprocal, q);
        const float relative = expf(q);
        return __float2ull_rz(relative >= min_p ? relative * 0x1p40f : 0.0f);
    }
};

// The histogram's bin: not decreasing as the logit falls. The conversion saturates, and makes 0 of NaN (0 times infinity:
// the row's logits are all equal).
__device__ __forceinline__ int bin_of(const Row& row, float logit) {
    return min(__float2int_rz((row.max - logit) * row.bins_per_logit), kBins - 1);
}

// A token stays while the weight before it is below this.
__device__ __forceinline__ u64 mass_limit(u64 total, double top_p) {
    return top_p >= 1.0 ? total : u64(ceil(top_p * __ull2double_rn(total)));
}

// ---- Random numbers --------------------------------------------------------------------------------------------------

// (m + 1/2) / 2^52 for the first 52 bits m of Philox4x32-10 with key `seed` and counter (choice, index, 0, 0); see
// runner/philox.py.
__device__ inline double philox_uniform(u64 seed, u32 choice, u32 index) {
    u32 c0 = choice, c1 = index, c2 = 0, c3 = 0, k0 = u32(seed), k1 = u32(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = u64(0xD2511F53u) * c0, p1 = u64(0xCD9E8D57u) * c2;
        c0 = u32(p1 >> 32) ^ c1 ^ k0;
        c1 = u32(p1);
        c2 = u32(p0 >> 32) ^ c3 ^ k1;
        c3 = u32(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const u64 mantissa = u64(c0) << 20 | c1 >> 12;
    return (__ull2double_rn(mantissa) + 0.5) * 0x1p-52;
}

// ---- Reductions and scans over a thread block; all threads get the result ----------------------------------------------

struct Sum {
    template <typename V>
    __device__ __forceinline__ V operator()(V a, V b) const { return a + b; }
};
struct Max {
    template <typename V>
    __device__ __forceinline__ V operator()(V a, V b) const { return a > b ? a : b; }
};

template <typename V, typename Op>
__device__ __forceinline__ V warp_reduce(V value, Op op) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(kFullWarp, value, offset));
    return value;
}

template <int Threads, typename V, typename Op>
__device__ __forceinline__ V block_reduce(V value, Op op) {
    __shared__ V parts[Threads / kWarp];
    value = warp_reduce(value, op);
    __syncthreads();  // the last call's parts have been read
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = parts[0];
#pragma unroll
    for (int i = 1; i < Threads / kWarp; ++i) value = op(value, parts[i]);
    return value;
}

// Sum over this lane and those before it.
__device__ __forceinline__ u64 warp_scan(u64 value) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const u64 other = __shfl_up_sync(kFullWarp, value, offset);
        if (lane >= offset) value += other;
    }
    return value;
}

// Sum over the threads before this one; `total` over all.
template <int Threads>
__device__ __forceinline__ u64 block_scan(u64 value, u64& total) {
    __shared__ u64 parts[Threads / kWarp];
    const u64 inclusive = warp_scan(value);
    __syncthreads();
    if (threadIdx.x % kWarp == kWarp - 1) parts[threadIdx.x / kWarp] = inclusive;
    __syncthreads();
    u64 before = 0;
    total = 0;
#pragma unroll
    for (int i = 0; i < Threads / kWarp; ++i) {
        if (i < int(threadIdx.x) / kWarp) before += parts[i];
        total += parts[i];
    }
    return before + inclusive - value;
}

// True in the thread block that arrives last of the gridDim.x blocks of a row: it sees what the others wrote before.
// The counter is 0 again afterwards, as the next launch (or replay of a graph) needs it.
__device__ __forceinline__ bool arrives_last(u32* arrivals) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrivals, 1u) == gridDim.x - 1;
        if (last) *arrivals = 0;
    }
    __syncthreads();
    if (last) __threadfence();
    return last;
}

// ---- The draw --------------------------------------------------------------------------------------------------------

// One thread block draws the token of a row: the first id at which the cumulative weight of tokens with order >= cut
// exceeds the target. `sums` holds that weight for each of `splits` ranges of `split_ids` ids.
template <int Threads, typename T>
__device__ void draw(const Row& row, const Logits<T>& logits, u64 cut, const u64* sums, int splits, int split_ids,
                     i64* token) {
    __shared__ u64 sub_sums[kMaxTiles * kTile / kSubTile];
    __shared__ int chosen;
    __shared__ u64 rest;
    const Weigher weigh(row);
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    u64 mine = 0;
    for (int i = threadIdx.x; i < splits; i += Threads) mine += __ldcg(sums + i);
    const u64 total = block_reduce<Threads>(mine, Sum());
    if (warp == 0) {
        u64 target = u64(row.uniform * __ull2double_rn(total));
        if (target >= total) target = total - 1;
        for (int first = 0; first < splits; first += kWarp) {
            const u64 inclusive = warp_scan(first + lane < splits ? __ldcg(sums + first + lane) : 0);
            const u32 beyond = __ballot_sync(kFullWarp, inclusive > target);
            if (beyond) {
                const int at = __ffs(beyond) - 1;
                const u64 before = at ? __shfl_sync(kFullWarp, inclusive, at ? at - 1 : 0) : 0;
                if (lane == 0) chosen = first + at, rest = target - before;
                break;
            }
            target -= __shfl_sync(kFullWarp, inclusive, kWarp - 1);
        }
    }
    __syncthreads();
    // Weights of 256 ids from `first` on, kLanes of them in each lane: first + i * kWarp + lane.
    constexpr int kLanes = kSubTile / kWarp;
    const auto kept = [&](int first, u64(&weights)[kLanes]) {
        float values[kLanes];
        logits.strided(first + lane, kWarp, values);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
            weights[i] = order_of(values[i], first + i * kWarp + lane) >= cut ? weigh(values[i]) : 0;
        }
    };
    const int first_id = chosen * split_ids;
    u64 weights[kLanes];
    for (int sub = warp; sub < split_ids / kSubTile; sub += Threads / kWarp) {
        kept(first_id + sub * kSubTile, weights);
        u64 sum = 0;
#pragma unroll
        for (int i = 0; i < kLanes; ++i) sum += weights[i];
        sum = warp_reduce(sum, Sum());
        if (lane == 0) sub_sums[sub] = sum;
    }
    __syncthreads();
    // The warp that weighed the chosen ids last still holds them if there is one round.
    u64 target = rest;
    int sub = 0;
    for (; sub_sums[sub] <= target; ++sub) target -= sub_sums[sub];
    if (warp == sub % (Threads / kWarp)) {
        const int first = first_id + sub * kSubTile;
        if (split_ids / kSubTile > Threads / kWarp) kept(first, weights);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
            const u64 inclusive = warp_scan(weights[i]);
            const u32 beyond = __ballot_sync(kFullWarp, inclusive > target);
            if (beyond) {
                if (lane == 0) *token = first + i * kWarp + __ffs(beyond) - 1;
                break;
            }
            target -= __shfl_sync(kFullWarp, inclusive, kWarp - 1);
        }
    }
    __syncthreads();
}
