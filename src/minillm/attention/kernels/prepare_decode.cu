// From what the host sends for a decode step to what its kernels read: one small launch in front of the embedding.
//
// The host's message `step` (int32) is a header of 4 (number of rows, number of table updates, unused, unused), then
// four columns of `stride` entries (row, input token or -1, position, output index), then the updates as (row, index,
// block):
//
//     | rows, updates, -, - | row ... | token ... | position ... | output index ... | row, index, block | ...
//
// The output indices are there for sampling; nothing here reads them.
//
// Thread block i prepares batch row i. Rows from the header's number on are padding: position 0, context length 0,
// slot -1. A row's table updates are applied by the row's own block before it reads the table, so one launch does both;
// the host sends updates of other rows another way. The step's tables get the entries in use, no more.

#include "common.cuh"

constexpr int kHeader = 4, kColumns = 4;

__global__ void __launch_bounds__(128)
prepare_decode(i64* __restrict__ input_ids, i64* __restrict__ positions, int* __restrict__ context_lens,
               i64* __restrict__ slot_mapping, i64* __restrict__ rows, int* __restrict__ step_tables, int* tables,
               const int* __restrict__ step, const i64* __restrict__ last_tokens, int stride, int table_width,
               int block_size) {
    const int i = blockIdx.x;
    if (i >= step[0]) {
        if (threadIdx.x == 0) {
            input_ids[i] = 0;
            positions[i] = 0;
            context_lens[i] = 0;
            slot_mapping[i] = -1;
            rows[i] = 0;
        }
        return;
    }
    const int row = step[kHeader + i];
    const int token = step[kHeader + stride + i];
    const int position = step[kHeader + 2 * stride + i];
    int* const table = tables + i64(row) * table_width;
    const int* const updates = step + kHeader + kColumns * stride;
    const int num_updates = step[1];
    for (int k = threadIdx.x; k < num_updates; k += blockDim.x) {
        if (updates[3 * k] == row) table[updates[3 * k + 1]] = updates[3 * k + 2];
    }
    __syncthreads();
    const int last = position / block_size;
    int* const step_table = step_tables + i64(i) * table_width;
    for (int k = threadIdx.x; k <= last; k += blockDim.x) step_table[k] = table[k];
    if (threadIdx.x == 0) {
        input_ids[i] = token >= 0 ? token : last_tokens[row];
        positions[i] = position;
        context_lens[i] = position + 1;
        slot_mapping[i] = i64(table[last]) * block_size + position % block_size;
        rows[i] = row;
    }
}
