// Runs kernels on a CPU, one thread block after the other: what common.cuh and CUDA's built-ins are to sampling.cu.
//
// Every thread of a block is a fibre. A fibre runs until it waits at a barrier (of the block, or of its warp inside a
// shuffle or ballot) that others have not reached. For tests only: it is slow, and sees no race between blocks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using std::max;
using std::min;

constexpr int kWarp = 32;
constexpr u32 kFullWarp = 0xffffffffu;

struct Index { u32 x, y, z; };
inline Index threadIdx, blockIdx, gridDim;

inline float to_float(float x) { return x; }

struct Barrier {
    int count = 0, generation = 0;
};

// Stores the registers that a call must keep (x86-64, System V) on this stack and goes on with another.
extern "C" void switch_stack(void** from, void* to);
asm(R"(
    .text
    .globl switch_stack
    .hidden switch_stack
switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

constexpr int kStackBytes = 1 << 15;

struct Block {
    std::vector<void*> fibres;  // stack pointers of those that do not run
    std::vector<char> stacks;
    std::vector<bool> ended;
    void* scheduler;
    std::function<void()> body;
    Barrier all, warps[32];
    u64 exchange[32][kWarp];
    int current = 0;
};
inline Block block;

inline void wait(Barrier& barrier, int members) {
    const int generation = barrier.generation;
    if (++barrier.count == members) {
        barrier.count = 0;
        ++barrier.generation;
        return;
    }
    while (barrier.generation == generation) switch_stack(&block.fibres[block.current], block.scheduler);
}

inline void fibre_main() {
    block.body();
    block.ended[block.current] = true;
    switch_stack(&block.fibres[block.current], block.scheduler);
}

inline void run_block(int threads, std::function<void()> body) {
    block.body = body;
    block.fibres.resize(threads);
    block.stacks.resize(size_t(threads) * kStackBytes);
    block.ended.assign(threads, false);
    for (int i = 0; i < threads; ++i) {
        // As switch_stack leaves it: six registers, then where it returns to (with the stack as behind a call).
        const auto top = reinterpret_cast<uintptr_t>(block.stacks.data() + size_t(i + 1) * kStackBytes) & ~uintptr_t(15);
        void** stack = reinterpret_cast<void**>(top) - 8;
        stack[6] = reinterpret_cast<void*>(fibre_main);
        block.fibres[i] = stack;
    }
    for (int left = threads; left > 0;) {
        left = 0;
        for (int i = 0; i < threads; ++i) {
            if (block.ended[i]) continue;
            block.current = i;
            threadIdx = {u32(i), 0, 0};
            switch_stack(&block.scheduler, block.fibres[i]);
            left += !block.ended[i];
        }
    }
}

inline void run_grid(int x, int y, int threads, std::function<void()> body) {
    gridDim = {u32(x), u32(y), 1};
    for (int j = 0; j < y; ++j) {
        for (int i = 0; i < x; ++i) {
            blockIdx = {u32(i), u32(j), 0};
            run_block(threads, body);
        }
    }
}

inline void __syncthreads() { wait(block.all, int(block.fibres.size())); }
inline void __threadfence() {}

// Every lane's value, at every lane.
inline const u64* exchanged(u64 value) {
    const int warp = threadIdx.x / kWarp;
    block.exchange[warp][threadIdx.x % kWarp] = value;
    wait(block.warps[warp], kWarp);
    return block.exchange[warp];
}

inline void exchange_read() { wait(block.warps[threadIdx.x / kWarp], kWarp); }

template <typename V>
V __shfl_sync(u32, V value, int source) {
    u64 bits = 0;
    std::memcpy(&bits, &value, sizeof(V));
    bits = exchanged(bits)[source & (kWarp - 1)];
    exchange_read();
    std::memcpy(&value, &bits, sizeof(V));
    return value;
}
template <typename V>
V __shfl_xor_sync(u32 mask, V value, int offset) {
    return __shfl_sync(mask, value, int(threadIdx.x % kWarp) ^ offset);
}
template <typename V>
V __shfl_up_sync(u32 mask, V value, int offset) {
    const int lane = threadIdx.x % kWarp;
    return __shfl_sync(mask, value, lane >= offset ? lane - offset : lane);
}
inline u32 __ballot_sync(u32, bool predicate) {
    const u64* values = exchanged(predicate);
    u32 mask = 0;
    for (int i = 0; i < kWarp; ++i) mask |= u32(values[i]) << i;
    exchange_read();
    return mask;
}

template <typename V>
V atomicAdd(V* address, V value) {
    const V old = *address;
    *address += value;
    return old;
}
template <typename V>
V __ldcg(const V* address) { return *address; }

struct uint4 { u32 x, y, z, w; };
template <typename T>
constexpr int kPer16B = 16 / int(sizeof(T));
template <typename T>
void unpack16(uint4 v, float (&out)[kPer16B<T>]) { std::memcpy(out, &v, sizeof(v)); }

inline int __clzll(i64 bits) { return bits ? __builtin_clzll(u64(bits)) : 64; }
inline int __ffs(u32 bits) { return __builtin_ffs(int(bits)); }
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline u32 __float_as_uint(float x) { u32 bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline int __float2int_rz(float x) {
    return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : x <= -0x1p31f ? INT32_MIN : int(x);
}
inline float __frcp_rn(float x) { return 1.0f / x; }
inline u64 __float2ull_rz(float x) { return u64(x); }
inline double __ull2double_rn(u64 x) { return double(x); }
