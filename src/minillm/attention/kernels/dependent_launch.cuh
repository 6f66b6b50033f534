// Programmatic dependent launch (CUDA programming guide; PTX ISA, griddepcontrol; compute capability 9.0 and newer): a
// kernel that is launched as a dependent starts while the kernel in front of it on the stream still runs.
//
// The contract of every kernel that is launched so (Kernel.launch(..., dependent=True)): each thread block calls
// wait_for_previous_grid() before it reads or writes anything that earlier work on the stream reads or writes. What it
// may do before is read constants: weights, tables. When the wait returns, all earlier work is done, not the previous
// kernel's alone, since that kernel could not end before its own wait returned. Memory that earlier kernels write is
// read with ordinary loads, never through ld.global.nc, and its pointers are not `const __restrict__`: from that the
// compiler concludes that the memory never changes during the kernel, and may move loads in front of the wait.
//
// let_next_grid_start() says that the next kernel's blocks may be placed as soon as all blocks of this one have said so
// or ended. It promises nothing about memory. Said in front of the wait, it lets a chain of kernels gather: each has its
// blocks where there is room, and its constants on their way, before the first one has ended.
#pragma once

__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_grid_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
