// The gated activation, for the kernels that end with it.
#pragma once

// silu(gate) * up. expf of the math library: the result is right to the last bits of float32.
__device__ __forceinline__ float silu_times(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }
