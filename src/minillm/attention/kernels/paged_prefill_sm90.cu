// Paged prefill attention for Hopper (sm_90a).
#include "hopper.cuh"
#include "paged_prefill.cuh"

template <typename T, int D, int N, int Groups, int Stages, int QStages>
struct PrefillSmem {
    static constexpr int kRows = 64 * Groups;
    static constexpr int kChunks = (D + 63) / 64;
    static constexpr int kQBytes = kChunks * kRows * 128;
    static constexpr int kTileBytes = kChunks * N * 128;
    static constexpr int kK = QStages * kQBytes;
    static constexpr int kV = kK + Stages * kTileBytes;
    static constexpr int kWork = kV + Stages * kTileBytes;  // PrefillWork and the KV head, 64 bytes per Q stage
    static constexpr int kBarriers = kWork + 64 * QStages;
};

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

template <typename T, int D, int N, int Groups, bool SoftCap, int Stages, bool PingPong, int CubicEvery, int QStages>
__global__ void __launch_bounds__(128 * (Groups + 1), 1)
paged_prefill_sm90(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                   const __grid_constant__ TensorMap v_map, T* __restrict__ out, float* __restrict__ partial,
                   float* __restrict__ partial_lse, const int* __restrict__ block_tables, i64 table_stride,
                   const PrefillWork* __restrict__ work_list, const int* __restrict__ num_work, int* counters,
                   int num_kv_heads, int group, int block_shift, int rows_per_tile, float score_scale,
                   float exponent_scale, int window) {
    using Smem = PrefillSmem<T, D, N, Groups, Stages, QStages>;
    constexpr int kRows = Smem::kRows, kChunks = Smem::kChunks;
    extern __shared__ u8 smem_raw[];
    const u32 smem = (smem_addr(smem_raw) + 1023) & ~1023u;
    int* work_smem = reinterpret_cast<int*>(smem_raw + (smem - smem_addr(smem_raw)) + Smem::kWork);
    const u32 bars = smem + Smem::kBarriers;
    auto k_full = [&](int s) { return bars + 8 * s; };
    auto k_empty = [&](int s) { return bars + 8 * (Stages + s); };
    auto v_full = [&](int s) { return bars + 8 * (2 * Stages + s); };
    auto v_empty = [&](int s) { return bars + 8 * (3 * Stages + s); };
    auto work_full = [&](int s) { return bars + 8 * (4 * Stages + s); };
    auto q_full = [&](int s) { return bars + 8 * (4 * Stages + QStages + s); };
    auto q_empty = [&](int s) { return bars + 8 * (4 * Stages + 2 * QStages + s); };

    const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < Stages; ++s) {
            mbarrier_init(k_full(s), 1);
            mbarrier_init(v_full(s), 1);
            mbarrier_init(k_empty(s), 4 * Groups);
            mbarrier_init(v_empty(s), 4 * Groups);
        }
        for (int s = 0; s < QStages; ++s) {
            mbarrier_init(work_full(s), 1);
            mbarrier_init(q_full(s), 1);
            mbarrier_init(q_empty(s), 4 * Groups + 1);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    const int block_size = 1 << block_shift;
    const int box_rows = min(block_size, N);
    const int pages = N / box_rows;
    // Key tile n of one head to `dst`; lane p has the block of page p.
    auto load_tile = [&](const TensorMap* map, u32 full, u32 dst, int n, int head, int block) {
        const bool elected = elect_one();
        if (elected) mbarrier_arrive_expect(full, Smem::kTileBytes);
        for (int p = 0; p < pages; ++p) {
            const int from = __shfl_sync(kFullWarp, block, p);
            const int slot = (n * N + p * box_rows) & (block_size - 1);
            if (elected) {
#pragma unroll
                for (int c = 0; c < kChunks; ++c)
                    tma_load_4d(dst + (c * N + p * box_rows) * 128, map, full, 64 * c, slot, head, from);
            }
        }
    };

    if (warp < 4) {
        registers_shrink<(Groups == 2 ? 40 : 32)>();
        const int total = *num_work * num_kv_heads;
        if (warp == 0) {
            if (lane == 0) {
                prefetch_tensor_map(&q_map);
                prefetch_tensor_map(&k_map);
            }
            Ring<Stages> ring;
            Ring<QStages> q_ring;
            int index = blockIdx.x;
            while (index < total) {
                int next_index = 0;
                if (lane == 0) next_index = gridDim.x + atomicAdd(&counters[0], 1);
                const PrefillWork w = work_list[index / num_kv_heads];
                const int head = index % num_kv_heads;
                const int last_block = w.last_block(group, block_shift);
                const int* table = block_tables + w.sequence * table_stride;
                const int first = w.first_tile<N>(group, window), end = ceil_div(w.key_end, N);
                auto block_of = [&](int n) {
                    return lane < pages ? table[min((n * N + lane * box_rows) >> block_shift, last_block)] : 0;
                };
                int block = block_of(end - 1);
                auto load_k = [&](int n) {
                    const int next_block = n > first ? block_of(n - 1) : 0;
                    mbarrier_wait(k_empty(ring.stage), ring.phase ^ 1);
                    const u32 dst = smem + Smem::kK + ring.stage * Smem::kTileBytes;
                    load_tile(&k_map, k_full(ring.stage), dst, n, head, block);
                    block = next_block;
                    ring.next();
                };
                if (end > first) load_k(end - 1);
                mbarrier_wait(q_empty(q_ring.stage), q_ring.phase ^ 1);
                int* slot = work_smem + 16 * q_ring.stage;
                if (lane < 8) slot[lane] = reinterpret_cast<const int*>(work_list + index / num_kv_heads)[lane];
                if (lane == 8) slot[8] = head;
                __syncwarp();
                if (elect_one()) {
                    const u32 dst = smem + q_ring.stage * Smem::kQBytes, full = q_full(q_ring.stage);
                    mbarrier_arrive(work_full(q_ring.stage));
                    mbarrier_arrive_expect(full, kChunks * rows_per_tile * 128);
#pragma unroll
                    for (int c = 0; c < kChunks; ++c)
                        tma_load_3d(dst + c * kRows * 128, &q_map, full, 64 * c, head * group,
                                    w.token0 + w.row0 / group);
                }
                __syncwarp();
                q_ring.next();
                for (int n = end - 2; n >= first; --n) load_k(n);
                index = __shfl_sync(kFullWarp, next_index, 0);
            }
            mbarrier_wait(q_empty(q_ring.stage), q_ring.phase ^ 1);
            if (lane == 0) {
                work_smem[16 * q_ring.stage] = -1;
                mbarrier_arrive(work_full(q_ring.stage));
                mbarrier_arrive(q_full(q_ring.stage));
                // The last block leaves the counters as it found them.
                if (atomicAdd(&counters[1], 1) == gridDim.x - 1) {
                    counters[0] = 0;
                    counters[1] = 0;
                }
            }
        } else if (warp == 1) {
            Ring<Stages> ring;
            for (Ring<QStages> q_ring;; q_ring.next()) {
                mbarrier_wait(work_full(q_ring.stage), q_ring.phase);
                const PrefillWork w = *reinterpret_cast<const PrefillWork*>(work_smem + 16 * q_ring.stage);
                const int head = work_smem[16 * q_ring.stage + 8];
                __syncwarp();
                if (w.sequence < 0) break;
                if (lane == 0) mbarrier_arrive(q_empty(q_ring.stage));
                const int last_block = w.last_block(group, block_shift);
                const int* table = block_tables + w.sequence * table_stride;
                const int first = w.first_tile<N>(group, window), end = ceil_div(w.key_end, N);
                auto block_of = [&](int n) {
                    return lane < pages ? table[min((n * N + lane * box_rows) >> block_shift, last_block)] : 0;
                };
                int block = block_of(end - 1);
                for (int n = end - 1; n >= first; --n) {
                    const int next_block = n > first ? block_of(n - 1) : 0;
                    mbarrier_wait(v_empty(ring.stage), ring.phase ^ 1);
                    const u32 dst = smem + Smem::kV + ring.stage * Smem::kTileBytes;
                    load_tile(&v_map, v_full(ring.stage), dst, n, head, block);
                    block = next_block;
                    ring.next();
                }
            }
        }
    } else {
        registers_grow<(Groups == 2 ? 232 : 160)>();
        const int wg = warp / 4 - 1;
        constexpr int kBar = 1;
        auto turn_wait = [&]() {
            if constexpr (PingPong) named_barrier_sync(kBar + wg, 256);
        };
        auto turn_pass = [&]() {
            if constexpr (PingPong) named_barrier_arrive(kBar + (wg + 1 == Groups ? 0 : wg + 1), 256);
        };
        if (PingPong && wg == 0) named_barrier_arrive(kBar, 256);
        Ring<Stages> kr, vr;
        float s[N / 2], o[D / 2];
        u32 p[N / 4];
        const int tile_row = 64 * wg + 16 * (warp & 3) + lane / 4;

        Ring<QStages> qr;
        auto scores = [&]() {
            const u64 q_desc = wgmma_desc(smem + qr.stage * Smem::kQBytes + wg * 64 * 128, 16, 1024);
            const u64 k_desc = wgmma_desc(smem + Smem::kK + kr.stage * Smem::kTileBytes, 16, 1024);
#pragma unroll
            for (int k = 0; k < D / 16; ++k)
                Wgmma<T, N>::ss(s, q_desc + (k / 4) * (kRows * 128 >> 4) + (k % 4) * 2,
                                k_desc + (k / 4) * (N * 128 >> 4) + (k % 4) * 2, k > 0);
            wgmma_commit();
        };
        auto accumulate = [&]() {
            const u64 v_desc = wgmma_desc(smem + Smem::kV + vr.stage * Smem::kTileBytes, N * 128, 1024);
#pragma unroll
            for (int k = 0; k < N / 16; ++k) Wgmma<T, D>::rs(o, p + 4 * k, v_desc + k * (2048 >> 4));
            wgmma_commit();
        };
        auto release = [&](u32 barrier) {
            if (lane == 0) mbarrier_arrive(barrier);
        };

        for (;; qr.next()) {
            mbarrier_wait(q_full(qr.stage), qr.phase);
            const PrefillWork w = *reinterpret_cast<const PrefillWork*>(work_smem + 16 * qr.stage);
            const int head = work_smem[16 * qr.stage + 8];
            if (w.sequence < 0) break;
            const int first = w.first_tile<N>(group, window), end = ceil_div(w.key_end, N);
            SoftmaxRows rows;
            rows.start(w, tile_row, group);
            const int pos_low = w.pos0 + w.row0 / group;
            const int pos_high = w.pos0 + (w.row0 + rows_per_tile - 1) / group;
#pragma unroll
            for (int i = 0; i < D / 2; ++i) o[i] = 0.f;

            auto softmax = [&](int n, float (&shrink)[2]) {
                if constexpr (SoftCap) soft_cap<N>(s, score_scale);
                if (n * N + N - 1 > pos_low || (window > 0 && n * N <= pos_high - window))
                    rows.mask<N>(s, n * N, window);
                rows.weigh<N, CubicEvery>(s, exponent_scale, shrink);
            };
            auto pack = [&]() {
#pragma unroll
                for (int i = 0; i < N / 4; ++i) p[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
            };

            if (end > first) {
                float shrink[2];
                mbarrier_wait(k_full(kr.stage), kr.phase);
                wgmma_pin(s);
                wgmma_fence();
                scores();
                wgmma_wait<0>();
                wgmma_pin(s);
                release(k_empty(kr.stage));
                kr.next();
                if (end - 1 == first) release(q_empty(qr.stage));
                softmax(end - 1, shrink);
                pack();
                if (end - 1 > first) mbarrier_wait(k_full(kr.stage), kr.phase);
                for (int n = end - 2; n >= first; --n) {
                    turn_wait();
                    wgmma_pin(s);
                    wgmma_pin(o);
                    wgmma_fence();
                    scores();
                    mbarrier_wait(v_full(vr.stage), vr.phase);
                    accumulate();
                    turn_pass();
                    wgmma_wait<1>();
                    wgmma_pin(s);
                    release(k_empty(kr.stage));
                    kr.next();
                    if (n == first) release(q_empty(qr.stage));
                    softmax(n, shrink);
                    // This branch also keeps ptxas from moving the wait below to before the softmax, which is to run
                    // beside the second product.
                    wgmma_pin(s);
                    wgmma_pin(rows.sum);
                    if (n > first) mbarrier_wait(k_full(kr.stage), kr.phase);
                    wgmma_wait<0>();
                    wgmma_pin(o);
                    release(v_empty(vr.stage));
                    vr.next();
                    pack();
                    if (__any_sync(kFullWarp, shrink[0] != 1.f || shrink[1] != 1.f)) {
#pragma unroll
                        for (int i = 0; i < D / 2; ++i) o[i] *= shrink[(i / 2) % 2];
                    }
                }
                mbarrier_wait(v_full(vr.stage), vr.phase);
                wgmma_pin(o);
                wgmma_fence();
                accumulate();
                wgmma_wait<0>();
                wgmma_pin(o);
                release(v_empty(vr.stage));
                vr.next();
            } else {
                release(q_empty(qr.stage));
            }

            const PrefillOutput<T> to{out, partial, partial_lse, rows_per_tile};
            store_rows<T, D>(o, rows, w, to, head, num_kv_heads, group, tile_row, rows_per_tile, exponent_scale);
        }
    }
}
