// Paged prefill attention for Hopper (sm_90a): warp-specialised, with tensor copies (TMA) and warpgroup products
// (wgmma), after FlashAttention-3.
//
// One persistent block per multiprocessor. It takes tiles of 64 * Groups packed rows of one KV head from the work list,
// longest first, and walks over a tile's keys in tiles of N from the last to the first.
//
//   warp 0 (producer)      next tile from a global counter; Q, then K tiles through the block table
//   warp 1 (producer)      V tiles
//   warpgroups 1..Groups   64 rows each: S = Q K^T (both from shared memory), softmax in registers, O += P V with P as
//                          the register operand
//
// A cache block of one head is block_size x D elements in a row, so one tensor map over the layer's K [block, head,
// slot, D] with boxes of block_size x 64 makes every (page, 64 columns) one copy that lands as whole 8 x 128-byte
// swizzle atoms: a K tile is a plain K-major, a V tile a plain MN-major operand, whatever the pages. Columns behind D
// (80, 96) are filled with zeros by the copy engine. Pages behind the context are replaced by the last valid one and
// masked.
//
// Shared memory, all tiles as [64-column chunk][row][128 bytes] under the 128-byte swizzle:
//   Q [QStages], K [Stages], V [Stages], the current work items, mbarriers (full and empty of each stage).
//
// Overlap: in a warpgroup the softmax of a tile runs beside the product P V of the tile before; between warpgroups
// barriers pass the turn to issue products round, so that one's softmax runs beside another's products (ping-pong).
#include "hopper.cuh"
#include "paged_prefill.cuh"

template <typename T_, int D_, int N_, int Groups_, bool SoftCap_, int Stages_, int QStages_>
struct PrefillConfig {
    using T = T_;
    static constexpr int D = D_, N = N_, Groups = Groups_;
    static constexpr int Stages = Stages_, QStages = QStages_;
    static constexpr bool SoftCap = SoftCap_;
    static constexpr int kRows = 64 * Groups, kChunks = ceil_div(D, 64);
    static constexpr int kQBytes = kChunks * kRows * 128, kTileBytes = kChunks * N * 128;
    // (Groups + 1) * 128 threads start with an equal share of 64 K registers; producers give most of theirs away.
    static constexpr int kProducerRegisters = Groups == 2 ? 40 : 32, kConsumerRegisters = Groups == 2 ? 232 : 160;
    static_assert(Groups == 2 || Groups == 3, "registers are divided for these");
};

// Stage and phase parity of a ring of buffers.
template <int Stages>
struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == Stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Addresses in shared memory; `base` is 1,024-byte aligned.
template <typename C>
struct PrefillShared {
    static constexpr int kWorkInts = 16;  // PrefillWork and the KV head, for each stage of Q
    u32 base;
    u8* pointer;

    __device__ __forceinline__ u32 q(int stage) const { return base + stage * C::kQBytes; }
    __device__ __forceinline__ u32 k(int stage) const { return q(C::QStages) + stage * C::kTileBytes; }
    __device__ __forceinline__ u32 v(int stage) const { return k(C::Stages) + stage * C::kTileBytes; }
    __device__ __forceinline__ int* work(int stage) const {
        return reinterpret_cast<int*>(pointer + (v(C::Stages) - base)) + stage * kWorkInts;
    }
    __device__ __forceinline__ u32 barrier(int i) const { return v(C::Stages) + 4 * kWorkInts * C::QStages + 8 * i; }
    __device__ __forceinline__ u32 k_full(int stage) const { return barrier(stage); }
    __device__ __forceinline__ u32 k_empty(int stage) const { return barrier(C::Stages + stage); }
    __device__ __forceinline__ u32 v_full(int stage) const { return barrier(2 * C::Stages + stage); }
    __device__ __forceinline__ u32 v_empty(int stage) const { return barrier(3 * C::Stages + stage); }
    __device__ __forceinline__ u32 work_full(int stage) const { return barrier(4 * C::Stages + stage); }
    __device__ __forceinline__ u32 q_full(int stage) const { return barrier(4 * C::Stages + C::QStages + stage); }
    __device__ __forceinline__ u32 q_empty(int stage) const { return barrier(4 * C::Stages + 2 * C::QStages + stage); }

    __device__ __forceinline__ void init_barriers() const {
        for (int s = 0; s < C::Stages; ++s) {
            mbarrier_init(k_full(s), 1);
            mbarrier_init(v_full(s), 1);
            mbarrier_init(k_empty(s), 4 * C::Groups);
            mbarrier_init(v_empty(s), 4 * C::Groups);
        }
        for (int s = 0; s < C::QStages; ++s) {
            mbarrier_init(work_full(s), 1);
            mbarrier_init(q_full(s), 1);
            mbarrier_init(q_empty(s), 4 * C::Groups + 1);  // consumer warps and the V producer
        }
        mbarrier_init_fence();
    }
};

struct PrefillArgs {
    const int* block_tables;
    i64 table_stride;
    const PrefillWork* work_list;
    const int* num_work;
    int* counters;  // tiles handed out behind each block's first one; blocks that have ended
    int num_kv_heads, group, block_shift, rows_per_tile;
    float score_scale, exponent_scale;
    int window;
};

// The pages of a work item's key tiles; lane p of a producer warp looks page p up.
template <typename C>
struct PrefillPages {
    const int* table;
    int last_block, block_shift, box_rows, pages;

    __device__ __forceinline__ PrefillPages(const PrefillArgs& args, const PrefillWork& work)
        : table(args.block_tables + work.sequence * args.table_stride),
          last_block(work.last_block(args.group, args.block_shift)),
          block_shift(args.block_shift),
          box_rows(min(1 << args.block_shift, C::N)),
          pages(C::N / box_rows) {}

    __device__ __forceinline__ int block_of_lane(int tile) const {
        const int lane = threadIdx.x % kWarp;
        return lane < pages ? table[min((tile * C::N + lane * box_rows) >> block_shift, last_block)] : 0;
    }

    // `block` is this lane's block_of_lane(tile).
    __device__ __forceinline__ void load(const TensorMap* map, u32 dst, u32 full, int tile, int head, int block) const {
        const bool elected = elect_one();
        if (elected) mbarrier_arrive_expect(full, C::kTileBytes);
        for (int p = 0; p < pages; ++p) {
            const int from = __shfl_sync(kFullWarp, block, p);
            const int slot = (tile * C::N + p * box_rows) & ((1 << block_shift) - 1);
            if (elected) {
#pragma unroll
                for (int c = 0; c < C::kChunks; ++c)
                    tma_load_4d(dst + (c * C::N + p * box_rows) * 128, map, full, 64 * c, slot, head, from);
            }
        }
    }
};

// Warp 0: hands out work, loads Q and K.
template <typename C>
__device__ __forceinline__ void produce_queries_and_keys(const PrefillShared<C>& shared, const TensorMap* q_map,
                                                         const TensorMap* k_map, const PrefillArgs& args) {
    const int lane = threadIdx.x % kWarp;
    const int total = *args.num_work * args.num_kv_heads;
    Ring<C::Stages> ring;
    Ring<C::QStages> q_ring;
    for (int index = blockIdx.x; index < total;) {
        int next_index = 0;
        if (lane == 0) next_index = gridDim.x + atomicAdd(&args.counters[0], 1);
        const PrefillWork work = args.work_list[index / args.num_kv_heads];
        const int head = index % args.num_kv_heads;
        const int first = work.first_tile<C::N>(args.group, args.window), end = ceil_div(work.key_end, C::N);
        const PrefillPages<C> pages(args, work);
        int block = pages.block_of_lane(end - 1);
        auto load_keys = [&](int tile) {
            const int next_block = tile > first ? pages.block_of_lane(tile - 1) : 0;
            mbarrier_wait(shared.k_empty(ring.stage), ring.phase ^ 1);
            pages.load(k_map, shared.k(ring.stage), shared.k_full(ring.stage), tile, head, block);
            block = next_block;
            ring.next();
        };
        if (end > first) load_keys(end - 1);

        mbarrier_wait(shared.q_empty(q_ring.stage), q_ring.phase ^ 1);
        if (elect_one()) {
            // By the lane that arrives: its arrival is what publishes the words to the consumers.
            int* slot = shared.work(q_ring.stage);
#pragma unroll
            for (int i = 0; i < 8; ++i) slot[i] = reinterpret_cast<const int*>(&work)[i];
            slot[8] = head;
            const u32 full = shared.q_full(q_ring.stage);
            mbarrier_arrive(shared.work_full(q_ring.stage));
            mbarrier_arrive_expect(full, C::kChunks * args.rows_per_tile * 128);
#pragma unroll
            for (int c = 0; c < C::kChunks; ++c)
                tma_load_3d(shared.q(q_ring.stage) + c * C::kRows * 128, q_map, full, 64 * c, head * args.group,
                            work.token0 + work.row0 / args.group);
        }
        __syncwarp();
        q_ring.next();

        for (int tile = end - 2; tile >= first; --tile) load_keys(tile);
        index = __shfl_sync(kFullWarp, next_index, 0);
    }
    mbarrier_wait(shared.q_empty(q_ring.stage), q_ring.phase ^ 1);
    if (lane == 0) {
        shared.work(q_ring.stage)[0] = -1;  // no more work
        mbarrier_arrive(shared.work_full(q_ring.stage));
        mbarrier_arrive(shared.q_full(q_ring.stage));
        // The last block leaves the counters as it found them.
        if (atomicAdd(&args.counters[1], 1) == gridDim.x - 1) {
            args.counters[0] = 0;
            args.counters[1] = 0;
        }
    }
}

// Warp 1: loads V.
template <typename C>
__device__ __forceinline__ void produce_values(const PrefillShared<C>& shared, const TensorMap* v_map,
                                               const PrefillArgs& args) {
    Ring<C::Stages> ring;
    for (Ring<C::QStages> q_ring;; q_ring.next()) {
        mbarrier_wait(shared.work_full(q_ring.stage), q_ring.phase);
        const PrefillWork work = *reinterpret_cast<const PrefillWork*>(shared.work(q_ring.stage));
        const int head = shared.work(q_ring.stage)[8];
        if (work.sequence < 0) return;
        __syncwarp();
        if (threadIdx.x % kWarp == 0) mbarrier_arrive(shared.q_empty(q_ring.stage));
        const int first = work.first_tile<C::N>(args.group, args.window), end = ceil_div(work.key_end, C::N);
        const PrefillPages<C> pages(args, work);
        int block = pages.block_of_lane(end - 1);
        for (int tile = end - 1; tile >= first; --tile) {
            const int next_block = tile > first ? pages.block_of_lane(tile - 1) : 0;
            mbarrier_wait(shared.v_empty(ring.stage), ring.phase ^ 1);
            pages.load(v_map, shared.v(ring.stage), shared.v_full(ring.stage), tile, head, block);
            block = next_block;
            ring.next();
        }
    }
}

// Warpgroup `wg` of the consumers: rows 64 wg to 64 wg + 63 of each tile.
template <typename C>
__device__ __forceinline__ void consume(const PrefillShared<C>& shared, const PrefillArgs& args,
                                        const PrefillOutput<typename C::T>& to, int wg) {
    using T = typename C::T;
    constexpr int D = C::D, N = C::N;
    const int lane = threadIdx.x % kWarp, tile_row = 64 * wg + 16 * (threadIdx.x / kWarp % 4) + lane / 4;
    Ring<C::QStages> q_ring;
    Ring<C::Stages> k_ring, v_ring;
    float s[N / 2], o[D / 2];  // scores, then weights; results
    u32 p[N / 4];              // weights as the operand of the second product

    // Named barrier 1 + g is group g's turn; the one before it and the group itself arrive there.
    auto turn_wait = [&]() { named_barrier_sync(1 + wg, 256); };
    auto turn_pass = [&]() { named_barrier_arrive(1 + (wg + 1 == C::Groups ? 0 : wg + 1), 256); };
    auto release = [&](u32 barrier) {
        if (lane == 0) mbarrier_arrive(barrier);
    };
    auto issue_scores = [&]() {
        const u64 q = wgmma_desc(shared.q(q_ring.stage) + wg * 64 * 128, 16, 1024);
        const u64 k = wgmma_desc(shared.k(k_ring.stage), 16, 1024);
        wgmma_pin(s);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; ++i)  // descriptors count 16 bytes; 16 columns are 32 bytes
            Wgmma<T, N>::ss(s, q + i / 4 * (C::kRows * 8) + i % 4 * 2, k + i / 4 * (N * 8) + i % 4 * 2, i > 0);
        wgmma_commit();
    };
    auto issue_results = [&]() {
        const u64 v = wgmma_desc(shared.v(v_ring.stage), N * 128, 1024);
        wgmma_pin(o);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < N / 16; ++i) Wgmma<T, D>::rs(o, p + 4 * i, v + i * 128);  // 16 keys are 2,048 bytes
        wgmma_commit();
    };
    auto results_done = [&]() {
        wgmma_wait<0>();
        wgmma_pin(o);
        release(shared.v_empty(v_ring.stage));
        v_ring.next();
    };
    if (wg == 0) named_barrier_arrive(1, 256);  // the first turn is free
    for (;; q_ring.next()) {
        mbarrier_wait(shared.q_full(q_ring.stage), q_ring.phase);
        const PrefillWork work = *reinterpret_cast<const PrefillWork*>(shared.work(q_ring.stage));
        const int head = shared.work(q_ring.stage)[8];
        if (work.sequence < 0) return;
        const int first = work.first_tile<N>(args.group, args.window), end = ceil_div(work.key_end, N);
        const int lowest = work.pos0 + work.row0 / args.group;
        const int highest = work.pos0 + (work.row0 + args.rows_per_tile - 1) / args.group;
        SoftmaxRows rows;
        rows.start(work, tile_row, args.group);
#pragma unroll
        for (int i = 0; i < D / 2; ++i) o[i] = 0.f;

        auto exponents = [&](int tile) {
            if constexpr (C::SoftCap) soft_cap<N>(s, args.score_scale);
            if (tile * N + N - 1 > lowest || (args.window > 0 && tile * N <= highest - args.window))
                rows.mask<N>(s, tile * N, args.window);
            rows.exponents<N>(s, args.exponent_scale);
        };
        float shrink[2];
        auto scores_done = [&](int tile) {
            wgmma_pin(s);
            release(shared.k_empty(k_ring.stage));
            k_ring.next();
            if (tile == first) release(shared.q_empty(q_ring.stage));
        };

        if (end > first) {
            mbarrier_wait(shared.k_full(k_ring.stage), k_ring.phase);
            issue_scores();
            wgmma_wait<0>();
            scores_done(end - 1);
            exponents(end - 1);
            rows.add<T, N>(s, p, shrink, true);
            if (end - 1 > first) mbarrier_wait(shared.k_full(k_ring.stage), k_ring.phase);
            for (int tile = end - 2; tile >= first; --tile) {
                turn_wait();
                issue_scores();
                mbarrier_wait(shared.v_full(v_ring.stage), v_ring.phase);
                issue_results();
                turn_pass();
                wgmma_wait<1>();
                scores_done(tile);
                exponents(tile);
                // This branch also keeps ptxas from moving the wait to before the exponentials, which are to run beside
                // the second product.
                if (tile > first) mbarrier_wait(shared.k_full(k_ring.stage), k_ring.phase);
                results_done();
                if (rows.add<T, N>(s, p, shrink, false)) {
#pragma unroll
                    for (int i = 0; i < D / 2; ++i) o[i] *= shrink[i / 2 % 2];
                }
            }
            mbarrier_wait(shared.v_full(v_ring.stage), v_ring.phase);
            issue_results();
            results_done();
        } else {
            release(shared.q_empty(q_ring.stage));
        }
        store_rows<T, D>(o, rows, work, to, head, args.num_kv_heads, args.group, tile_row, args.rows_per_tile);
    }
}

template <typename T, int D, int N, int Groups, bool SoftCap, int Stages, int QStages>
__global__ void __launch_bounds__(128 * (Groups + 1), 1)
paged_prefill_sm90(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                   const __grid_constant__ TensorMap v_map, T* __restrict__ out, float* __restrict__ partial,
                   float* __restrict__ partial_lse, const int* __restrict__ block_tables, i64 table_stride,
                   const PrefillWork* __restrict__ work_list, const int* __restrict__ num_work, int* counters,
                   int num_kv_heads, int group, int block_shift, int rows_per_tile, float score_scale,
                   float exponent_scale, int window) {
    using C = PrefillConfig<T, D, N, Groups, SoftCap, Stages, QStages>;
    extern __shared__ u8 smem[];
    const u32 base = (smem_addr(smem) + 1023) & ~1023u;
    const PrefillShared<C> shared{base, smem + (base - smem_addr(smem))};
    const PrefillArgs args{block_tables, table_stride, work_list,     num_work,    counters,       num_kv_heads,
                           group,        block_shift,  rows_per_tile, score_scale, exponent_scale, window};
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarp, 0);
    if (warp < 4) {
        registers_shrink<C::kProducerRegisters>();
        if (warp == 0) produce_queries_and_keys<C>(shared, &q_map, &k_map, args);
        else if (warp == 1) produce_values<C>(shared, &v_map, args);
    } else {
        registers_grow<C::kConsumerRegisters>();
        consume<C>(shared, args, {out, partial, partial_lse, rows_per_tile}, warp / 4 - 1);
    }
}
