// The copying half of decode attention: what a thread block computes, and the way of K and V to its warps. See
// paged_decode.cu.
#pragma once

#include "paged_decode_plan.cuh"
#include "paged_decode_tree.cuh"

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
    asm volatile("ld.volatile.global.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ __forceinline__ u64 evict_first_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Which items a thread block computes: number(k) is its k-th, valid while below `total`.
template <int kAhead>
struct Schedule {
    int total;
    const volatile int* ring;

    __device__ __forceinline__ bool dynamic() const { return total > kAhead * int(gridDim.x); }
    __device__ __forceinline__ int number(int k) const {
        if (k >= kAhead && dynamic()) return ring[k % kRing];
        // Items become shorter: who had the longest one of a round gets the shortest of the next.
        return k * gridDim.x + (k % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
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

    // `low` and `high`: where the tile starts in the caches, for its first and its last 8 tokens (they may lie in two
    // blocks); in 16-byte units. What a lane copies is kWarp units apart, so most of an address is constant.
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
                if constexpr (S::kSwizzled) {
                    const u32 in_rows = S::offset(lane / S::kChunks, lane % S::kChunks);
                    to += i * kRows * S::kPitch + (in_rows ^ (i * kRows & 7) * 16);
                } else {
                    to += (i * kWarp + lane + row) * 16;
                }
                const bool first = S::kSwizzled ? i * kRows < 8 : row < 8;
                const uint4* const from = (first ? from_low : from_high) + i * kWarp;
                if constexpr (kWhole) copy16_streaming(to, from, policy);
                else cp_async16(to, from, token + row >= item.begin && token + row < item.end);
            }
        }
    }

    // Whether the next tile has its sequence's last token.
    __device__ __forceinline__ bool reads_last_token() const {
        return number < schedule.total && token_at(item, position, tiles_shift) + kTile >= item.len;
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
