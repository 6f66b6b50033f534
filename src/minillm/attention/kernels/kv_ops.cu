// Moving keys and values: writing new tokens into their slots, and copying whole blocks within the pool and between
// the pool and pages of one block each (host memory or a staging buffer). Pure copies of bytes, so one instance serves
// every dtype. All of them are bound by memory (the bus for host pages): 16 bytes per access, several in flight.

#include "common.cuh"

// A token's k and v [num_kv_heads][row_vecs] go to slot `slot_mapping[token]` of [block][kv_head][block_size][row_vecs].
// Vec is the unit of copying (uint4, or u16 where something is not aligned to 16 bytes); all strides are in units of
// Vec. A slot outside [0, num_slots), that is padding's -1, is skipped. grid (T), any number of threads.
template <typename Vec>
__global__ void write_kv(Vec* __restrict__ k_cache, Vec* __restrict__ v_cache, const Vec* __restrict__ k,
                         const Vec* __restrict__ v, const i64* __restrict__ slot_mapping, i64 num_slots,
                         int num_kv_heads, int block_size, int row_vecs, i64 k_stride, i64 v_stride,
                         i64 block_stride) {
    const i64 token = blockIdx.x;
    const i64 slot = slot_mapping[token];
    if (u64(slot) >= u64(num_slots)) return;
    const i64 to = slot / block_size * block_stride + slot % block_size * row_vecs;
    const Vec* const k_row = k + token * k_stride;
    const Vec* const v_row = v + token * v_stride;
    for (int i = threadIdx.x; i < num_kv_heads * row_vecs; i += blockDim.x) {
        const int head = i / row_vecs;
        const i64 at = to + i64(head) * block_size * row_vecs + (i - head * row_vecs);
        const Vec key = k_row[i], value = v_row[i];
        k_cache[at] = key;
        v_cache[at] = value;
    }
}

// For each of `num_pairs` pairs (source id, destination id), and each of `planes` planes (layers x {k, v}), one tile of
// tile_vecs * 16 bytes:
//     dst[id * dst_id_stride + plane * dst_plane_stride] = src[id * src_id_stride + plane * src_plane_stride]
// with strides in units of 16 bytes. No tile may be both read and written in one launch: copies on write go to blocks
// that were just allocated, pages and pool are different memory. dst or src may be page-locked host memory: under
// unified addressing its pointer is valid on the device, and the stores and loads cross the bus. kInFlight x 16 bytes
// per thread are under way at a time: a bus round trip takes about 2 us, so 55 GB/s need some 110 KB in flight.
template <int kInFlight>
__global__ void __launch_bounds__(512)
copy_tiles(uint4* __restrict__ dst, const uint4* __restrict__ src, const int2* __restrict__ pairs, i64 num_pairs,
           int planes, int tile_vecs, i64 src_id_stride, i64 src_plane_stride, i64 dst_id_stride,
           i64 dst_plane_stride) {
    const i64 total = num_pairs * planes * tile_vecs;
    const i64 step = i64(blockDim.x) * kInFlight;
    for (i64 first = blockIdx.x * step + threadIdx.x; first < total; first += gridDim.x * step) {
        uint4 value[kInFlight];
        i64 to[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const i64 at = first + i64(i) * blockDim.x;
            if (at >= total) break;
            const i64 tile = at / tile_vecs, vec = at - tile * tile_vecs;
            const i64 pair = tile / planes, plane = tile - pair * planes;
            const int2 ids = pairs[pair];
            to[i] = ids.y * dst_id_stride + plane * dst_plane_stride + vec;
            value[i] = load16_streaming(src + ids.x * src_id_stride + plane * src_plane_stride + vec);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            if (first + i64(i) * blockDim.x >= total) break;
            dst[to[i]] = value[i];
        }
    }
}
