// Small copies between the device and page-locked host memory by a kernel: a step's message and its report. A copy
// engine takes 2 us for them, and 5 to 8 more to take turns with the kernels around it; a kernel does not.

#include "common.cuh"

// target[i] = source[i] for i < count. One of the two is page-locked host memory: under unified addressing its pointer
// is valid on the device. Any grid, any number of threads.
__global__ void copy_words(u32* target, const volatile u32* source, int count) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) target[i] = source[i];
}
