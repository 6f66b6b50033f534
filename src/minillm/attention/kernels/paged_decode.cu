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
// block or pass. That leaves the division of work free: the plan gives a batch of one 64 tokens per thread block and a
// large batch whole sequences, without a change in any result.
//
// Work. An item is a subtree of S = 64 * 2^k tokens of one (sequence, KV head, up to 8 query heads of its group). The
// grid is fixed (multiprocessors * resident thread blocks) and each thread block walks over items: the first few by
// its number, the rest from a counter. An item is computed in rounds of 4 warps * 1, 2 or 4 tiles. Each warp owns its
// tiles from the copy to the partial result, without a barrier: it keeps kStages tiles (K and V) in flight through
// cp.async and runs ahead over the ends of rounds and items, so that memory is busy while results are merged. At the
// end of a round the warps exchange their results through shared memory, each merges the four for its share of the
// head dimension, and the rounds merge in registers (a binary counter: see Stack). If the sequence has several items,
// the results go to the workspace and meet there, in blocks of the tree: see hand_over.
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

#include "dependent_launch.cuh"
#include "paged_decode_loader.cuh"

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
    const auto at_step = [](u32 address, int step) {
        return S::kSwizzled ? address ^ (step * 32) : address + step * 32;
    };

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
__device__ __forceinline__ void exchange(float4* shared_o, float4* shared_sums,
                                         const Partial<Shape<kDim>::kSteps>& mine,
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
// base were there, `stride` float4 after each other. For those that are not there, `nothing` is read: so all loads
// start at once, without a condition on what they bring.
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
//
// `history_ready`: once the launches in front of this one have started, plan and tables are complete, and K and V but for
// each sequence's last token. Then copies start before the wait for them.
template <typename T, int kDim, int kStages>
__global__ void __launch_bounds__(kThreads, kResidentBlocks<kDim>)
paged_decode(T* out, const T* q, const T* k_cache, const T* v_cache, const int* tables, const int4* plan,
             float4* partials, float4* spill, int* arrivals, int* counters, i64 table_stride,
             i64 q_stride, i64 out_stride, i64 spill_stride, u32 block_stride, Divisor head_items, Divisor chunks,
             int max_items, int group, int block_shift, int window, int history_ready, float scale_log2,
             float cap_log2, float scale_by_cap) {
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

    if (!history_ready) wait_for_previous_grid();
    let_next_grid_start();
    // A plan has room for an entry of each thread block, so it is read before the plan's length is known.
    const int4 header = load_now(plan);
    int4 entry = load_now(plan + 1 + head_items.quotient(blockIdx.x));
    const int shift = header.y, plan_window = header.z;
    const int tiles_shift = min(S::kTilesShift, shift - kMinItemShift);
    const Schedule<kAhead> schedule{header.x * int(head_items.divisor), ring};
    if (int(blockIdx.x) >= schedule.total) {
        wait_for_previous_grid();  // no launch ends before those in front of it
        return;
    }
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
            to[step][0] = used ? *reinterpret_cast<const u32*>(row + step * 16) : 0;
            to[step][1] = used ? *reinterpret_cast<const u32*>(row + step * 16 + 8) : 0;
        }
    };
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
        if (loader.reads_last_token()) wait_for_previous_grid();
        loader.issue(stages + i * S::kStageBytes);
    }
    wait_for_previous_grid();
    fetch_q(entry.x, head_items.remainder(blockIdx.x), q_operand);

    for (int k = 0;; ++k) {
        Item item;
        item.set(entry, head_items.remainder(number), window, shift, tiles_shift + 6);
        // What the next item needs is fetched now: its queries, and the entry of the one behind it.
        const int following_number = schedule.number(k + 2);
        int4 following_entry;
        if (next_number < schedule.total) {
            if constexpr (S::kEarlyQ) fetch_q(next_entry.x, head_items.remainder(next_number), next_q);
            if (following_number < schedule.total)
                following_entry = __ldg(plan + 1 + head_items.quotient(following_number));
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
        const Span span = item_span(item.len, plan_window, shift);
        if (item.slot < 0 || hand_over<T, kDim>(a, item, span, shift, heads, is_last, node))
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
