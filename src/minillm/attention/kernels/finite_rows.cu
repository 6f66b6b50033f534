// Which rows hold a number that is not finite: flags[row] = any(x is NaN or inf for x in rows[row]).

#include "common.cuh"

// grid (rows), any number of threads; T float, __half or __nv_bfloat16.
template <typename T>
__global__ void flag_not_finite(bool* __restrict__ flags, const T* __restrict__ rows, i64 stride, int width) {
    const T* const row = rows + blockIdx.x * stride;
    bool bad = false;
#pragma unroll 4
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float x = to_float(row[i]);
        bad |= x - x != 0.0f;  // inf - inf and NaN - NaN are NaN, which equals nothing
    }
    bad = __syncthreads_or(bad);
    if (threadIdx.x == 0) flags[blockIdx.x] = bad;
}
