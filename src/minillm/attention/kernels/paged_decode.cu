// Paged attention for decode: one query token per sequence, fp16 and bf16, head dimensions 64, 80, 96, 128 and 256.
//
// Decode reads every K and V once and does little with them, so the kernel is a memory pipeline: copies that never
// stop, and arithmetic cheap enough to hide behind them.
//
// The tree. A sequence is cut into tiles of 16 tokens at multiples of 16. A tile gives a partial result per query
// head: maximum m of the scores, sum l of exp2(score - m), and O = sum of exp2(score - m) * V. Two partial results
// merge into one (Milakov and Gimelshein 2018, arXiv:1805.02867). Tiles are merged along the binary tree over their
// indexes: (0,1), (2,3), ((0,1),(2,3)), and so on; a part without visible tokens is the identity. The tree depends on
// the sequence alone, so its result does too, to the last bit, whatever subtree is computed by which warp, thread
// block or pass. That leaves the division of work free: plan() gives a batch of one 64 tokens per thread block and a
// large batch whole sequences, without a change in any result.
//
// Work. An item is a subtree of S = 64 * 2^k tokens of one (sequence, KV head, up to 8 query heads of its group). The
// grid is fixed (multiprocessors * resident thread blocks) and each thread block walks over items: the first few by
// its number, the rest from a counter. An item is computed in rounds of 4 warps * 1, 2 or 4 tiles. Each warp owns its
// tiles from the copy to the partial result, without a barrier: it keeps kStages tiles (K and V) in flight through
// cp.async and runs ahead over the ends of rounds and items, so that memory is busy while results are merged. At the
// end of a round the warps exchange their results through shared memory, each merges the four for its share of the
// head dimension, and the rounds merge in registers (a binary counter: see Stack). If the sequence has several items,
// the results go to the workspace, and the thread block that finishes last merges them, in the order of the tree.
//
// Tensor cores. Scores are computed transposed, S^T[16 tokens x 8 heads] = K Q^T, and so is the output,
// O^T[d x 8 heads] = V^T P^T: the tokens, of which there are many, take the 16 rows of mma.m16n8k16 and the heads of
// the group its 8 columns, half the padding of the usual arrangement. P^T comes out of the first product in the
// layout of an accumulator and goes into the second as its B operand, by one movmatrix per 8 tokens. l is one more
// product, with a matrix of ones, so it sums the rounded P that O is made of. Everything is accumulated in fp32.
//
// Shared memory of a thread block:
//   [warp][stage] K tile, V tile: 16 rows of head_dim; rows of 128 bytes * 2^n have their 16-byte chunks XORed with
//                 the row, others are padded by 16 bytes, so that ldmatrix meets no bank conflicts
//   [warp][head_dim / 16][lane] float4: O of a round, in the layout of the accumulators
//   [warp][4] float4: m and l of heads 2i and 2i + 1
//   [kRing] int: numbers of the next items; bool: whether this thread block brought the last partial result

#include "common.cuh"
#include "paged_decode_plan.cuh"


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
    static constexpr int kSteps = kDim / 16;                  // of K Q^T; also the 16-row tiles of O^T
    static constexpr int kOwn = ceil_div(kSteps, kWarps);     // tiles of O^T that a warp merges
    static constexpr int kTilesShift = kDim == 64 ? 2 : kDim <= 128 ? 1 : 0;  // log2(tiles of a warp in a round)
    static constexpr int kLoads = kChunks * kTile / kWarp;    // copies of a lane for K, and as many for V
    static constexpr int kPartial = kSteps * kWarp + 4;       // float4 of a partial result in the workspace
    static constexpr int kLevels = kDim <= 128 ? 3 : 1;  // of the Stack in registers
    static constexpr int kAtOnce = kDim <= 128 ? 8 : 4;       // partial results that a thread merges at a time
    static constexpr bool kEarlyQ = kDim <= 128;              // registers for the next item's queries

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

// ---- Attention ---------------------------------------------------------------------------------------------------

// Division by a number that the host knows: magic = ceil(2^32 / divisor), exact for n < 2^32 / divisor.
struct Divisor {
    u32 divisor, magic;

    __device__ __forceinline__ int quotient(int n) const { return divisor == 1 ? n : int(__umulhi(n, magic)); }
    __device__ __forceinline__ int remainder(int n) const { return n - quotient(n) * int(divisor); }
};

template <typename T>
struct Args {
    T* out;             // [num_seqs, num_heads, kDim], rows at out_stride
    const T* q;         // the same shape, rows at q_stride
    const T* k_cache;   // [blocks, kv_heads, 2^block_shift, kDim], blocks at block_stride
    const T* v_cache;
    const int* tables;  // [num_seqs, ...], rows at table_stride
    const int4* plan;
    float4* partials;   // [slot][head item]: O as in Partial [kDim / 16][lane], m and l of heads 2i and 2i + 1 [4];
                        // behind the last one (max_items) a result of no tokens
    float4* spill;      // [thread block], spill_stride each: columns of its Stack
    int* arrivals;      // [level][slot][head item]; zero between launches
    int* counters;      // items handed out, thread blocks that are done; zero between launches
    i64 table_stride, q_stride, out_stride, spill_stride;
    u32 block_stride;    // in 16-byte units
    Divisor head_items;  // of an entry: KV heads * chunks
    Divisor chunks;      // of at most 8 query heads of a KV head's group
    int max_items;      // slots * head_items
    int group, block_shift, window;
    float scale_log2;              // scale * log2(e): scores to base-2 exponents
    float cap_log2, scale_by_cap;  // with a soft cap: cap * log2(e), 2 * log2(e) * scale / cap
};

__device__ __forceinline__ void copy16_streaming(u32 dst, const void* src, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "l"(policy)
                 : "memory");
}

// A load that stays where it stands: the compiler puts others behind branches that depend on earlier loads.
__device__ __forceinline__ int4 load_now(const int4* p) {
    int4 v;
    asm volatile("ld.volatile.global.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ u64 evict_first_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Transposes an 8x8 matrix of 16-bit values that lies across the warp as in an accumulator or operand of mma.
__device__ __forceinline__ u32 movmatrix_trans(u32 a) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(a));
    return out;
}

// What the thread block wrote before the last barrier is visible to whoever sees this arrival, and the other way round.
__device__ __forceinline__ int arrive(int* counter) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Which items a thread block computes: number(k) is its k-th, valid while below `total`.
template <int kAhead>
struct Schedule {
    int total;
    const volatile int* ring;

    __device__ __forceinline__ bool dynamic() const { return total > kAhead * int(gridDim.x); }
    __device__ __forceinline__ int number(int k) const {
        return k < kAhead || !dynamic() ? blockIdx.x + k * gridDim.x : ring[k % kRing];
    }
};

struct Item {
    int seq, start, len, slot;
    int head;                 // head item: KV head * chunks + chunk
    int begin, end;           // tokens of it that are visible
    int first_round, rounds;  // it goes through rounds first_round .. rounds - 1

    __device__ __forceinline__ void set(int4 entry, int head_item, int window, int shift, int round_shift) {
        seq = entry.x, start = entry.y, len = entry.z, slot = entry.w, head = head_item;
        end = min(len, start + (1 << shift));
        begin = min(max(start, window > 0 ? len - window : 0), end);
        first_round = max(begin - start, 0) >> round_shift;
        rounds = max((end - start + (1 << round_shift) - 1) >> round_shift, first_round + 1);
    }
    // Whether any of the tokens of the tile at `token` is visible, and whether all are.
    __device__ __forceinline__ bool touches(int token) const { return token < end && token + kTile > begin; }
    __device__ __forceinline__ bool covers(int token) const { return begin <= token && token + kTile <= end; }
};

// The copying half of a warp: walks over the warp's tiles of all items of the thread block, kStages tiles ahead of the
// computing half. A position is a place for a tile in a round: position p of a warp is tile p % 2^tiles_shift of
// round p >> tiles_shift. Places behind the end of a sequence are passed without copying.
template <typename T, int kDim, int kAhead>
struct Loader {
    using S = Shape<kDim>;
    const Args<T>& a;
    Schedule<kAhead> schedule;
    int shift, tiles_shift;
    u64 policy;
    Item item;
    int number, k, kv_head, position, positions;
    int ids[2];  // lane l: block ids of the tile at position l (modulo 32), of its second half if blocks have 8 tokens
    int4 next_entry;
    int next_number, next_ids[2];
    bool have_next_ids;

    __device__ __forceinline__ Loader(const Args<T>& args) : a(args) {}

    __device__ __forceinline__ int round_shift() const { return tiles_shift + 6; }

    static __device__ __forceinline__ int token_at(const Item& item, int position, int tiles_shift) {
        const int warp = threadIdx.x / kWarp;
        const int round = item.first_round + (position >> tiles_shift);
        const int tile = (((round * kWarps) + warp) << tiles_shift) + (position & ((1 << tiles_shift) - 1));
        return item.start + tile * kTile;
    }

    __device__ __forceinline__ void fetch_ids(const Item& of, int first_position, int (&to)[2]) const {
        const int token = token_at(of, first_position + threadIdx.x % kWarp, tiles_shift);
        const int* const table = a.tables + of.seq * a.table_stride;
        to[0] = of.touches(token) ? __ldg(table + (token >> a.block_shift)) : 0;
        if (a.block_shift == 3) to[1] = of.touches(token) && token + 8 < of.end ? __ldg(table + (token >> 3) + 1) : 0;
    }

    __device__ __forceinline__ void fetch_next_entry() {
        next_number = schedule.number(k + 1);
        if (next_number < schedule.total) next_entry = __ldg(a.plan + 1 + a.head_items.quotient(next_number));
        have_next_ids = false;
    }

    __device__ __forceinline__ void set_item(int4 entry) {
        item.set(entry, a.head_items.remainder(number), a.window, shift, round_shift());
        kv_head = a.chunks.quotient(item.head);
        position = 0;
        positions = (item.rounds - item.first_round) << tiles_shift;
    }

    __device__ __forceinline__ void start(int4 first_entry, int4 second_entry) {
        k = 0;
        number = schedule.number(0), next_number = schedule.number(1);
        set_item(first_entry);
        fetch_ids(item, 0, ids);
        next_entry = second_entry;
        have_next_ids = false;
    }

    __device__ __forceinline__ void fetch_next_ids() {
        Item next;
        next.set(next_entry, 0, a.window, shift, round_shift());
        fetch_ids(next, 0, next_ids);
        have_next_ids = true;
    }

    __device__ __forceinline__ void advance() {
        if (++position == positions) {
            ++k;
            number = next_number;
            if (number >= schedule.total) return;
            if (!have_next_ids) fetch_next_ids();
            set_item(next_entry);
            ids[0] = next_ids[0], ids[1] = next_ids[1];
            fetch_next_entry();
        } else if (position % kWarp == 0) {
            fetch_ids(item, position, ids);
        } else if (!have_next_ids && next_number < schedule.total) {
            fetch_next_ids();
        }
    }

    // `low` and `high`: where the tile's first 8 tokens lie in the caches, and where the others would start from so that
    // they lie behind them; in 16-byte units. What a lane copies is kWarp units apart, so most of the address is constant.
    template <bool kWhole>
    __device__ __forceinline__ void copy_tile(u32 stage, u64 low, u64 high, int token) const {
        constexpr int kRows = S::kSwizzled ? kWarp / S::kChunks : 0;  // rows that the warp copies at a time
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4* const cache = reinterpret_cast<const uint4*>(half ? a.v_cache : a.k_cache) + lane;
            const uint4 *const from_low = cache + low, *const from_high = cache + high;
#pragma unroll
            for (int i = 0; i < S::kLoads; ++i) {
                const int row = S::kSwizzled ? i * kRows + lane / S::kChunks : (i * kWarp + lane) / S::kChunks;
                u32 to = stage + half * S::kTileBytes;
                // A swizzled row is i * kRows, whose bits are constant, with lane / kChunks below them.
                if constexpr (S::kSwizzled)
                    to += i * kRows * S::kPitch + (S::offset(lane / S::kChunks, lane % S::kChunks) ^ (i * kRows & 7) * 16);
                else to += (i * kWarp + lane + row) * 16;
                const bool first = S::kSwizzled ? i * kRows < 8 : row < 8;
                const uint4* const from = (first ? from_low : from_high) + i * kWarp;
                if constexpr (kWhole) copy16_streaming(to, from, policy);
                else cp_async16(to, from, token + row >= item.begin && token + row < item.end);
            }
        }
    }

    // Starts the copy of the next tile into `stage`. One group of cp.async per call, an empty one if there is nothing.
    __device__ __forceinline__ void issue(u32 stage) {
        if (number < schedule.total) {
            const int token = token_at(item, position, tiles_shift);
            if (item.touches(token)) {
                const u64 in_block = (kv_head << a.block_shift | token & (1 << a.block_shift) - 1) * S::kChunks;
                const u64 low = u64(u32(__shfl_sync(kFullWarp, ids[0], position % kWarp))) * a.block_stride + in_block;
                u64 high = low;
                if (a.block_shift == 3)
                    high = u64(u32(__shfl_sync(kFullWarp, ids[1], position % kWarp))) * a.block_stride + in_block -
                           8 * S::kChunks;
                if (item.covers(token)) copy_tile<true>(stage, low, high, token);
                else copy_tile<false>(stage, low, high, token);
            }
            advance();
        }
        cp_async_commit();
    }
};

// A score's base-2 exponent. With a soft cap c: c * tanh(s / c), tanh(x) = 1 - 2 / (exp(2x) + 1).
template <typename T>
__device__ __forceinline__ float exponent(const Args<T>& a, float dot) {
    if (a.cap_log2 == 0.0f) return dot * a.scale_log2;
    return a.cap_log2 * (1.0f - __fdividef(2.0f, exp2_fast(dot * a.scale_by_cap) + 1.0f));
}

// Attention of 8 heads to kCount neighbouring tiles from `token` on, whose K and V lie in `stages`. Two tiles at a time
// hide much of each other's latency: they have nothing to do with each other until their results merge.
template <typename T, int kDim, int kCount>
__device__ __forceinline__ void attend_tiles(const Args<T>& a, const u32 (&stages)[kCount],
                                             const u32 (&q)[Shape<kDim>::kSteps][2], const Item& item, int token,
                                             Partial<Shape<kDim>::kSteps> (&result)[kCount]) {
    using S = Shape<kDim>;
    const int lane = threadIdx.x % kWarp;
    // ldmatrix addresses: K's matrices are (tokens 0-7, dims 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15); V's are
    // transposed on the way, so dims take the place of rows and the middle two change places.
    const u32 k_lane = S::offset(lane % 16, lane / 16);
    const u32 v_lane = S::kTileBytes + S::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const auto at_step = [](u32 address, int step) { return S::kSwizzled ? address ^ (step * 32) : address + step * 32; };

    float x[kCount][4];  // {token g, heads 2t and 2t + 1}, {token g + 8, the same heads}
    float even[kCount][4] = {}, odd[kCount][4] = {};  // two chains of products: half the latency
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step)
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
            u32 k[4];
            ldmatrix_x4(k, at_step(stages[n] + k_lane, step));
            mma_16816<T>(step % 2 ? odd[n] : even[n], k, q[step][0], q[step][1]);
        }
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = exponent(a, __fadd_rn(even[n][i], odd[n][i]));
        if (!item.covers(token + n * kTile)) {
            const int low = token + n * kTile + lane / 4, high = low + 8;
            if (low < item.begin || low >= item.end) x[n][0] = x[n][1] = -INFINITY;
            if (high < item.begin || high >= item.end) x[n][2] = x[n][3] = -INFINITY;
        }
    }
    float m[kCount][2];
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) m[n][h] = fmaxf(x[n][h], x[n][h + 2]);
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2)
#pragma unroll
        for (int n = 0; n < kCount; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) m[n][h] = fmaxf(m[n][h], __shfl_xor_sync(kFullWarp, m[n][h], offset));
    u32 p[kCount][2];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = exp2_fast(__fsub_rn(x[n][i], m[n][i % 2]));
#pragma unroll
        for (int half = 0; half < 2; ++half) p[n][half] = movmatrix_trans(pack2<T>(x[n][2 * half], x[n][2 * half + 1]));
    }
    const u32 one = pack2<T>(1.0f, 1.0f);
    const u32 ones[4] = {one, one, one, one};
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
        float sum[4] = {};
        mma_16816<T>(sum, ones, p[n][0], p[n][1]);
#pragma unroll
        for (int h = 0; h < 2; ++h) result[n].m[h] = m[n][h], result[n].l[h] = sum[h];
    }
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step)
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
            u32 v[4];
            ldmatrix_x4_trans(v, at_step(stages[n] + v_lane, step));
#pragma unroll
            for (int c = 0; c < 4; ++c) result[n].o[step][c] = 0.0f;
            mma_16816<T>(result[n].o[step], v, p[n][0], p[n][1]);
        }
}

// Merges the round's results of the four warps; each warp gets its tiles of O^T: warp, warp + 4, ...
template <int kDim>
__device__ __forceinline__ void exchange(float4* shared_o, float4* shared_sums, const Partial<Shape<kDim>::kSteps>& mine,
                                         Partial<Shape<kDim>::kOwn>& node) {
    using S = Shape<kDim>;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int i = 0; i < S::kSteps; ++i)
        shared_o[(warp * S::kSteps + i) * kWarp + lane] =
            make_float4(mine.o[i][0], mine.o[i][1], mine.o[i][2], mine.o[i][3]);
    if (lane < 4) shared_sums[warp * 4 + lane] = make_float4(mine.m[0], mine.l[0], mine.m[1], mine.l[1]);
    __syncthreads();
    Partial<S::kOwn> part[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        const float4 ml = shared_sums[w * 4 + lane % 4];
        part[w].m[0] = ml.x, part[w].l[0] = ml.y, part[w].m[1] = ml.z, part[w].l[1] = ml.w;
#pragma unroll
        for (int i = 0; i < S::kOwn; ++i) {
            float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (S::kSteps % kWarps == 0 || warp + i * kWarps < S::kSteps)
                o = shared_o[(w * S::kSteps + warp + i * kWarps) * kWarp + lane];
            part[w].o[i][0] = o.x, part[w].o[i][1] = o.y, part[w].o[i][2] = o.z, part[w].o[i][3] = o.w;
        }
    }
    __syncthreads();  // the next round may write
    merge(part[0], part[1]);
    merge(part[2], part[3]);
    merge(part[1], part[3]);
    node = part[3];
}

// Where a thread's share of a partial result lies in the workspace: O of its first tile of O^T, the next kWarps * kWarp
// float4 further; m and l behind all of O.
template <typename T, int kDim>
__device__ __forceinline__ float4* workspace(const Args<T>& a, int slot, int head) {
    return a.partials + (i64(slot) * int(a.head_items.divisor) + head) * Shape<kDim>::kPartial;
}

template <typename T, int kDim>
__device__ __forceinline__ void write_partial(const Args<T>& a, int slot, int head, int heads,
                                              const Partial<Shape<kDim>::kOwn>& node) {
    using S = Shape<kDim>;
    if (2 * (int(threadIdx.x) % 4) >= heads) return;
    float4* const to = workspace<T, kDim>(a, slot, head);
    if (threadIdx.x < 4) to[S::kSteps * kWarp + threadIdx.x] = make_float4(node.m[0], node.l[0], node.m[1], node.l[1]);
#pragma unroll
    for (int i = 0; i < S::kOwn; ++i)
        if (S::kSteps % kWarps == 0 || int(threadIdx.x) / kWarp + i * kWarps < S::kSteps)
            to[i * kThreads + threadIdx.x] = make_float4(node.o[i][0], node.o[i][1], node.o[i][2], node.o[i][3]);
}

// node = the merger of up to 2 * kAtOnce partial results, those with begin <= i < end of the block of the tree that
// starts at i = base. The one of `begin` lies at `first_place`, the others would follow one that lies at `place` if i =
// base were there, `stride` float4 after each other. For those that are not there, `nothing` is read: so all loads start
// at once, without a condition on what they bring.
template <int kDim>
__device__ __forceinline__ void merge_slots(const float4* first_place, const float4* place, i64 stride,
                                            const float4* nothing, int base, int begin, int end,
                                            Partial<Shape<kDim>::kOwn>& node) {
    using S = Shape<kDim>;
    // Lanes of heads that the group does not have read what nobody wrote; it stays in their own columns.
    Partial<S::kOwn> before;
#pragma unroll 1
    for (int first = base; first < end; first += S::kAtOnce) {
        Partial<S::kOwn> part[S::kAtOnce];
#pragma unroll
        for (int j = 0; j < S::kAtOnce; ++j) {
            const int i = first + j;
            const float4* const from = i == begin ? first_place : i > begin && i < end ? place : nothing;
            place += stride;
            const float4 ml = __ldcg(from + S::kSteps * kWarp + threadIdx.x % 4);
            part[j].m[0] = ml.x, part[j].l[0] = ml.y, part[j].m[1] = ml.z, part[j].l[1] = ml.w;
#pragma unroll
            for (int n = 0; n < S::kOwn; ++n) {
                float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (S::kSteps % kWarps == 0 || int(threadIdx.x) / kWarp + n * kWarps < S::kSteps)
                    o = __ldcg(from + n * kThreads + threadIdx.x);
                part[j].o[n][0] = o.x, part[j].o[n][1] = o.y, part[j].o[n][2] = o.z, part[j].o[n][3] = o.w;
            }
        }
#pragma unroll
        for (int step = 1; step < S::kAtOnce; step *= 2)
#pragma unroll
            for (int j = 2 * step - 1; j < S::kAtOnce; j += 2 * step) merge(part[j - step], part[j]);
        node = part[S::kAtOnce - 1];
        if (first > base) merge(before, node);
        before = node;
    }
}

// Hands over an item's result. Results of the items of a sequence meet in blocks of the tree: who brings the last one
// of a block merges the block and carries the merger on to the next level. So the thread blocks share the merging, and
// long sequences take a few short steps instead of one long one. True for the one that ends with the whole sequence.
template <typename T, int kDim>
__device__ __forceinline__ bool hand_over(const Args<T>& a, const Item& item, Span span, int shift, int heads,
                                          bool& is_last, Partial<Shape<kDim>::kOwn>& node) {
    constexpr int kShift = Shape<kDim>::kAtOnce == 8 ? 3 : 2;
    const int first_item = span.begin;
    int index = item.start >> shift, below = 0;  // this node among those of its level; levels below, as a shift
#pragma unroll 1
    for (int* counters = a.arrivals; span.end - span.begin > 1; counters += a.max_items) {
        // A node takes the slot of its first item. Window or not, slots count from the first item that there is.
        const auto slot_of = [&](int i) { return item.slot + max(i << below, first_item) - first_item; };
        const int count = span.end - span.begin;
        const int fan = kShift + (count <= 2 << kShift || count > 1 << 2 * kShift);  // fewer levels, or shorter ones
        const int base = index >> fan << fan, begin = max(span.begin, base), end = min(span.end, base + (1 << fan));
        if (below) __syncthreads();  // all have read m and l of the children, whose first slot the node takes
        write_partial<T, kDim>(a, slot_of(index), item.head, heads, node);
        __syncthreads();
        if (threadIdx.x == 0) {
            int* const arrived = counters + i64(slot_of(begin)) * int(a.head_items.divisor) + item.head;
            is_last = arrive(arrived) == end - begin - 1;
            if (is_last) *arrived = 0;
        }
        __syncthreads();
        if (!is_last) return false;
        const i64 stride = i64(a.head_items.divisor) * Shape<kDim>::kPartial << below;
        merge_slots<kDim>(workspace<T, kDim>(a, slot_of(begin), item.head),
                          workspace<T, kDim>(a, item.slot + (base << below) - first_item, item.head), stride,
                          a.partials + i64(a.max_items) * Shape<kDim>::kPartial, base, begin, end, node);
        index >>= fan, below += fan;
        span = {span.begin >> fan, ((span.end - 1) >> fan) + 1};
    }
    return true;
}

template <typename T, int kDim>
__device__ __forceinline__ void write_out(const Args<T>& a, const Item& item, int heads,
                                          const Partial<Shape<kDim>::kOwn>& node) {
    using S = Shape<kDim>;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int first_head = a.chunks.quotient(item.head) * a.group + a.chunks.remainder(item.head) * kHeads;
    T* const rows = a.out + item.seq * a.out_stride + i64(first_head) * kDim;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int head = 2 * (lane % 4) + h;
        if (head >= heads) continue;
        const float norm = node.l[h] > 0.0f ? __fdividef(1.0f, node.l[h]) : 0.0f;  // no tokens: zeros
#pragma unroll
        for (int i = 0; i < S::kOwn; ++i) {
            if (S::kSteps % kWarps != 0 && warp + i * kWarps >= S::kSteps) continue;
            T* const to = rows + head * kDim + (warp + i * kWarps) * 16 + lane / 4;
            to[0] = from_float<T>(node.o[i][h] * norm);
            to[8] = from_float<T>(node.o[i][h + 2] * norm);
        }
    }
}

template <int kDim>
constexpr int kResidentBlocks = kDim == 256 ? 1 : 2;

// Arguments as in Args. grid: multiprocessors * resident blocks. Strides in elements, spill_stride in float4. window 0:
// none; cap_log2 0: no soft cap. `plan` was made by paged_decode_plan for this window, or without one.
template <typename T, int kDim, int kStages>
__global__ void __launch_bounds__(kThreads, kResidentBlocks<kDim>)
paged_decode(T* out, const T* q, const T* k_cache, const T* v_cache, const int* tables, const int4* plan,
             float4* partials, float4* spill, int* arrivals, int* counters, i64 table_stride,
             i64 q_stride, i64 out_stride, i64 spill_stride, u32 block_stride, Divisor head_items, Divisor chunks,
             int max_items, int group, int block_shift, int window, float scale_log2, float cap_log2, float scale_by_cap) {
    using S = Shape<kDim>;
    constexpr int kAhead = kStages + 3;  // the copies of item k + kStages end with looking up the number two further
    static_assert(2 * kAhead <= kRing, "numbers are kept until the computing half is done with them");
    extern __shared__ __align__(1024) u8 shared[];
    const Args<T> a{out,      q,        k_cache,  v_cache,    tables,       plan,         partials,
                    spill,    arrivals, counters, table_stride, q_stride,   out_stride,   spill_stride,
                    block_stride, head_items, chunks, max_items, group,     block_shift,  window,
                    scale_log2, cap_log2, scale_by_cap};
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const u32 stages = smem_addr(shared) + warp * kStages * S::kStageBytes;
    float4* const shared_o = reinterpret_cast<float4*>(shared + kWarps * kStages * S::kStageBytes);
    float4* const shared_sums = shared_o + kWarps * S::kSteps * kWarp;
    int* const ring = reinterpret_cast<int*>(shared_sums + kWarps * 4);
    bool& is_last = *reinterpret_cast<bool*>(ring + kRing);

    // A plan has room for an entry of each thread block, so it is read before the plan's length is known.
    const int4 header = load_now(plan);
    int4 entry = load_now(plan + 1 + head_items.quotient(blockIdx.x));
    const int shift = header.y, plan_window = header.z;
    const int tiles_shift = min(S::kTilesShift, shift - kMinItemShift);
    const Schedule<kAhead> schedule{header.x * int(head_items.divisor), ring};
    if (int(blockIdx.x) >= schedule.total) return;
    int stage = 0, number = blockIdx.x, next_number = schedule.number(1);
    int4 next_entry = {};
    if (next_number < schedule.total) next_entry = load_now(plan + 1 + head_items.quotient(next_number));

    Loader<T, kDim, kAhead> loader(a);
    loader.schedule = schedule, loader.shift = shift, loader.tiles_shift = tiles_shift;
    loader.policy = evict_first_policy();
    loader.start(entry, next_entry);

    u32 q_operand[S::kSteps][2], next_q[S::kEarlyQ ? S::kSteps : 1][2];
    const auto fetch_q = [&](int seq, int head, u32 (&to)[S::kSteps][2]) {
        const int skipped = chunks.remainder(head) * kHeads, first = chunks.quotient(head) * group + skipped;
        const bool used = skipped + lane / 4 < group;
        const T* const row = q + seq * q_stride + i64(first + lane / 4) * kDim + lane % 4 * 2;
#pragma unroll
        for (int step = 0; step < S::kSteps; ++step) {
            to[step][0] = used ? __ldg(reinterpret_cast<const u32*>(row + step * 16)) : 0;
            to[step][1] = used ? __ldg(reinterpret_cast<const u32*>(row + step * 16 + 8)) : 0;
        }
    };
    fetch_q(entry.x, head_items.remainder(blockIdx.x), q_operand);
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) loader.issue(stages + i * S::kStageBytes);

    for (int k = 0;; ++k) {
        Item item;
        item.set(entry, head_items.remainder(number), window, shift, tiles_shift + 6);
        // What the next item needs is fetched now: its queries, and the entry of the one behind it.
        const int following_number = schedule.number(k + 2);
        int4 following_entry;
        if (next_number < schedule.total) {
            if constexpr (S::kEarlyQ) fetch_q(next_entry.x, head_items.remainder(next_number), next_q);
            if (following_number < schedule.total) following_entry = __ldg(plan + 1 + head_items.quotient(following_number));
        }
        int handed_out = 0;
        if (schedule.dynamic() && threadIdx.x == 0) handed_out = atomicAdd(counters, 1);
        Partial<S::kOwn> node;
        Stack<S::kOwn, S::kLevels> stack;
        stack.spill = spill + blockIdx.x * spill_stride;
#pragma unroll
        for (int level = 0; level < S::kLevels; ++level) stack.levels[level].clear();
        for (int round = item.first_round; round < item.rounds; ++round) {
            // The warp's part of the round: one tile, or one or two pairs of neighbours.
            Partial<S::kSteps> mine;
            mine.clear();
#pragma unroll 1
            for (int i = 0; i < 1 << tiles_shift; i += 2) {
                const int position = ((round - item.first_round) << tiles_shift) + i;
                const int token = Loader<T, kDim, kAhead>::token_at(item, position, tiles_shift);
                u32 places[2];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    places[n] = stages + stage * S::kStageBytes;
                    if (n < 1 << tiles_shift && ++stage == kStages) stage = 0;
                }
                if (tiles_shift) cp_async_wait<kStages - 2>();
                else cp_async_wait<kStages - 1>();
                __syncwarp();
                const bool first = item.touches(token), second = tiles_shift && item.touches(token + kTile);
                if (S::kTilesShift > 0 && first && second) {
                    Partial<S::kSteps> tiles[2];
                    attend_tiles<T, kDim, 2>(a, places, q_operand, item, token, tiles);
                    merge(tiles[0], tiles[1]);
                    if (S::kTilesShift > 1 && i) merge(mine, tiles[1]);
                    mine = tiles[1];
                } else if (first || second) {
                    Partial<S::kSteps> tile[1];
                    attend_tiles<T, kDim, 1>(a, {first ? places[0] : places[1]}, q_operand, item,
                                             first ? token : token + kTile, tile);
                    if (S::kTilesShift > 1 && i) merge(mine, tile[0]);
                    mine = tile[0];
                }
                __syncwarp();
#pragma unroll 1
                for (int n = 0; n < 2 && n < 1 << tiles_shift; ++n) loader.issue(n ? places[1] : places[0]);
            }
            const bool last = round + 1 == item.rounds;
            if (last && schedule.dynamic() && threadIdx.x == 0)
                ring[(k + kAhead) % kRing] = kAhead * gridDim.x + handed_out;
            exchange<kDim>(shared_o, shared_sums, mine, node);
            stack.push(node, round, item.first_round, last);
        }

        const int heads = min(kHeads, group - chunks.remainder(item.head) * kHeads);
        if (item.slot < 0 || hand_over<T, kDim>(a, item, item_span(item.len, plan_window, shift), shift, heads, is_last, node))
            write_out<T, kDim>(a, item, heads, node);
        if (next_number >= schedule.total) break;
        number = next_number, next_number = following_number;
        entry = next_entry, next_entry = following_entry;
        if constexpr (S::kEarlyQ) {
#pragma unroll
            for (int step = 0; step < S::kSteps; ++step)
                q_operand[step][0] = next_q[step][0], q_operand[step][1] = next_q[step][1];
        } else {
            fetch_q(entry.x, head_items.remainder(number), q_operand);
        }
    }

    // The last thread block to leave puts the counter back for the next launch.
    if (schedule.dynamic() && threadIdx.x == 0) {
        __threadfence();
        if (atomicInc(reinterpret_cast<u32*>(counters + 1), gridDim.x - 1) == gridDim.x - 1) counters[0] = 0;
    }
}
