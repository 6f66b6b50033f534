// RMS norms that are applied behind the product of what they normalise (batch_linear_sm90.cu): a row comes with the sums
// of squares of each 64 of its columns, [hidden / 64][stride] for all rows.
#pragma once

#include "common.cuh"

// 1 / rms of a row of `hidden` columns; `squares` is the row's column. For a whole warp.
__device__ __forceinline__ float warp_rms_scale(const float* squares, int stride, int hidden, float eps) {
    float sum = 0.0f;
    for (int i = threadIdx.x % kWarp; i < ceil_div(hidden, 64); i += kWarp) sum += squares[i64(i) * stride];
    return rsqrtf(warp_sum(sum) / float(hidden) + eps);
}

// The same for a single thread.
__device__ __forceinline__ float thread_rms_scale(const float* squares, int stride, int hidden, float eps) {
    constexpr int kAtOnce = 32;
    const int count = ceil_div(hidden, 64);
    float sum = 0.0f;
    for (int first = 0; first < count; first += kAtOnce) {
        float part[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) part[i] = first + i < count ? squares[i64(first + i) * stride] : 0.0f;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) sum += part[i];
    }
    return rsqrtf(sum / float(hidden) + eps);
}
