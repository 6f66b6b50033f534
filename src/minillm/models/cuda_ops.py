"""The decoder's operations on a GPU, each in one kernel: launch wrappers.

```
embed ─► residual (float32) ─► norm ─► qkv product ─► qk_norm_rope_write ─► attention ─► output product ─► + residual
                               norm ─► gate-up product ─► silu(gate) * up ─► down product ─► + residual
```
A step of many tokens runs `add_rms_norm`, `qk_norm_rope_write` and `silu_and_mul` between torch's products. A step of
a few tokens runs `small_linear` (:mod:`minillm.models.cuda_small_linear`) for its products, with the norm in front of
it and the activation or the addition behind it in the same kernel; one of up to some hundred runs `batch_linear`
(:mod:`minillm.models.cuda_batch_linear`), with the activation or the addition.

Every wrapper launches on the current stream, waits for nothing, allocates nothing where `out` is given, and may be
captured in a CUDA graph once it has run with that kernel before (loading one is not capturable). Raises ValueError for
shapes, dtypes, strides and devices that don't fit. All kernels are launched as dependents
(``attention/kernels/dependent_launch.cuh``).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_build import KernelSpec, get_kernel
from minillm.attention.cuda_checks import FLOAT_DTYPES, check_paged_cache, check_tensor
from minillm.models.cuda_batch_linear import batch_linear, check_deferred, deferred_key, supports_batch_linear
from minillm.models.cuda_op_launches import (
    ceil_div,
    check_rows,
    fixed_layout,
    float_name,
    launches,
    misaligned,
    multiprocessors,
    prepare,
    whole_warps,
)
from minillm.models.cuda_small_linear import small_linear, supports_small_linear
from minillm.models.deferred_norm import DeferredNorm

__all__ = [
    "add_rms_norm",
    "batch_linear",
    "embed",
    "qk_norm_rope_write",
    "silu_and_mul",
    "small_linear",
    "supports_batch_linear",
    "supports_small_linear",
]

_MAX_HIDDEN_VECTORS = 4096
_NORM_VECTORS = (1, 2, 4)
"""16-byte vectors of a row that a thread of `add_rms_norm` may hold."""

_FEW_TOKENS = 256
"""Up to so many, kernels are shorter than the gaps between them: then they share the multiprocessors with their
neighbours. More tokens want L1 for the loads that are under way (embedding of 8,192 tokens: 15.5 against 20.6 us)."""


def specs(arch: str) -> list[KernelSpec]:
    """Every kernel that may be launched on `arch`."""
    types = tuple(FLOAT_DTYPES.values())
    return [
        *(KernelSpec("decoder_ops.cu", f"embed<{t}>") for t in types),
        *(KernelSpec("decoder_ops.cu", f"add_rms_norm<{t}, {n}>") for t in types for n in _NORM_VECTORS),
        *(KernelSpec("decoder_ops.cu", f"silu_and_mul<{t}>") for t in types),
        *(_rope_spec(t, cache_type) for t in types for cache_type in types),
    ]


# ---- Row-wise operations ---------------------------------------------------------------------------------------------


def embed(input_ids: Tensor, embedding: Tensor, residual: Tensor) -> Tensor:
    """``residual[t] = float(embedding[input_ids[t]])``; returns `residual`.

    `input_ids` int64 [T], `embedding` [V, H] in any float dtype, `residual` float32 [T, H]. An id outside [0, V) gives
    a row of NaN.
    """
    key = (
        "embed",
        *(input_ids.shape, input_ids.stride(), input_ids.dtype, input_ids.device),
        fixed_layout(embedding),
        *(residual.shape, residual.stride(), residual.dtype, residual.device),
    )
    launch = launches.prepared.get(key)
    if launch is None:
        tokens, (vocab, hidden), device = len(input_ids), embedding.shape, embedding.device
        name = float_name("embedding", embedding.dtype)
        check_tensor("embedding", embedding, (None, None), embedding.dtype, device)
        check_tensor("input_ids", input_ids, (None,), torch.int64, device)
        check_tensor("residual", residual, (tokens, hidden), torch.float32, device)
        check_rows("embedding", hidden, embedding.dtype)
        threads = whole_warps(hidden * embedding.element_size() // 16, 256)
        kernel = get_kernel(KernelSpec("decoder_ops.cu", f"embed<{name}>"), device, overlapping=tokens <= _FEW_TOKENS)
        if not tokens:
            return residual
        launch = prepare(key, kernel, (tokens, 1), threads, 3, (np.int64(vocab), np.int32(hidden)))
    to, table = residual.data_ptr(), embedding.data_ptr()
    if (to | table) & 15:
        raise misaligned(embedding=embedding, residual=residual)
    launch(to, input_ids.data_ptr(), table)
    return residual


def add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """``residual += x`` in place, then ``out = weight * residual / sqrt(mean(residual^2) + eps)``; returns `out`.

    `x` [T, H] in `out`'s dtype, its rows at any stride, or None to add nothing; `residual` float32 [T, H], `weight`
    float32 [H], `out` [T, H]. Computed in float32 and rounded once.
    """
    key = (
        "norm",
        *((None,) if x is None else (x.shape, x.stride(), x.dtype, x.device)),
        *(residual.shape, residual.stride(), residual.dtype, residual.device),
        fixed_layout(weight),
        *(out.shape, out.stride(), out.dtype, out.device),
        eps,
    )
    launch = launches.prepared.get(key)
    if launch is None:
        (tokens, hidden), device, dtype = residual.shape, residual.device, out.dtype
        name = float_name("out", dtype)
        check_tensor("residual", residual, (None, None), torch.float32, device)
        check_tensor("weight", weight, (hidden,), torch.float32, device)
        check_tensor("out", out, (tokens, hidden), dtype, device)
        if x is not None:
            check_tensor("x", x, (tokens, hidden), dtype, device, contiguous_from=1)
        stride = 0 if x is None else x.stride(0)
        check_rows("x", hidden, dtype, stride)
        vectors = hidden * dtype.itemsize // 16
        if vectors > _MAX_HIDDEN_VECTORS:
            raise ValueError(f"rows of {hidden} elements are longer than {_MAX_HIDDEN_VECTORS * 16 // dtype.itemsize}")
        held = 1 if vectors <= 512 else 2 if vectors <= 1024 else 4
        kernel = get_kernel(
            KernelSpec("decoder_ops.cu", f"add_rms_norm<{name}, {held}>"), device, overlapping=tokens <= _FEW_TOKENS
        )
        if not tokens:
            return out
        scalars = (np.int64(stride), np.int32(hidden), np.float32(eps))
        launch = prepare(key, kernel, (tokens, 1), whole_warps(ceil_div(vectors, held), 1024), 4, scalars)
    addresses = out.data_ptr(), residual.data_ptr(), 0 if x is None else x.data_ptr(), weight.data_ptr()
    if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & 15:
        raise misaligned(x=x, residual=residual, weight=weight, out=out)
    launch(*addresses)
    return out


def silu_and_mul(gate_up: Tensor, out: Tensor, deferred: DeferredNorm | None = None) -> Tensor:
    """``silu(gate) * up`` of `gate_up` [T, 2 * I], gate first, rows at any stride -> `out` [T, I]; returns `out`.

    Computed in float32 and rounded once. `deferred`: the norm of the rows that were multiplied is applied first.
    """
    key = (
        "silu",
        *(gate_up.shape, gate_up.stride(), gate_up.dtype, gate_up.device),
        *(out.shape, out.stride(), out.dtype, out.device),
        *deferred_key(deferred),
    )
    launch = launches.prepared.get(key)
    if launch is None:
        (tokens, inner), device, dtype = out.shape, out.device, out.dtype
        name = float_name("out", dtype)
        check_tensor("out", out, (None, None), dtype, device)
        check_tensor("gate_up", gate_up, (tokens, 2 * inner), dtype, device, contiguous_from=1)
        stride = gate_up.stride(0)
        check_rows("gate_up", inner, dtype, stride)
        vectors = inner * dtype.itemsize // 16
        threads = whole_warps(vectors, 256)
        kernel = get_kernel(
            KernelSpec("decoder_ops.cu", f"silu_and_mul<{name}>"), device, overlapping=tokens <= _FEW_TOKENS
        )
        if not tokens:
            return out
        squares_stride, hidden, squares_eps = _deferred_scalars(deferred, tokens, dtype)
        scalars = (np.int64(tokens), np.int64(stride), np.int32(inner), squares_stride, hidden, squares_eps)
        launch = prepare(key, kernel, (ceil_div(vectors, threads), min(tokens, 65535)), threads, 3, scalars)
    to, source = out.data_ptr(), gate_up.data_ptr()
    if (to | source) & 15:
        raise misaligned(gate_up=gate_up, out=out)
    launch(to, source, 0 if deferred is None else deferred.squares.data_ptr())
    return out


def _deferred_scalars(
    deferred: DeferredNorm | None, rows: int, dtype: torch.dtype
) -> tuple[np.int32, np.int32, np.float32]:
    """The kernels' squares_stride, hidden and eps."""
    if deferred is None:
        return np.int32(0), np.int32(1), np.float32(0.0)
    check_deferred(deferred, rows, deferred.hidden, dtype)
    return np.int32(deferred.squares.stride(0)), np.int32(deferred.hidden), np.float32(deferred.eps)


# ---- From the packed product to attention ----------------------------------------------------------------------------

_ROPE_THREADS = 256


def _rope_spec(name: str, cache_name: str) -> KernelSpec:
    return KernelSpec("qk_norm_rope_write.cu", f"qk_norm_rope_write<{name}, {cache_name}>")


def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    inv_freq: Tensor,
    attention_factor: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_out: Tensor,
    deferred: DeferredNorm | None = None,
) -> Tensor:
    """q and k norm, rotary embedding, k and v into the cache, q to `q_out`; returns `q_out`.

    Args:
        qkv: the packed product [T, (Hq + 2 * Hkv) * d], rows at any stride; d a multiple of 8 up to 256.
        q_weight, k_weight: float32 [d], or both None for a model without these norms.
        eps: of the norms.
        positions: int64 or int32 [T].
        inv_freq: float32 [d / 2]; angles are its float32 products with the positions.
        attention_factor: cos and sin are multiplied by it.
        k_cache, v_cache: one layer's, [num_blocks, Hkv, block_size, d]; any float dtype, not only qkv's.
        slot_mapping: int64 [T]; the K and V of a token whose slot is outside the pool (negative: padding) are dropped.
        q_out: [T, Hq, d] in the cache's dtype, which attention takes.
        deferred: the norm of the rows that were multiplied is applied first.

    Rounds where :mod:`minillm.models.layers` does.
    """
    key = (
        "rope",
        *(qkv.shape, qkv.stride(), qkv.dtype, qkv.device),
        fixed_layout(q_weight),
        fixed_layout(k_weight),
        *(positions.shape, positions.stride(), positions.dtype, positions.device),
        fixed_layout(inv_freq),
        fixed_layout(k_cache),
        fixed_layout(v_cache),
        *(slot_mapping.shape, slot_mapping.stride(), slot_mapping.dtype, slot_mapping.device),
        *(q_out.shape, q_out.stride(), q_out.dtype, q_out.device),
        eps,
        attention_factor,
        *deferred_key(deferred),
    )
    launch = launches.prepared.get(key)
    if launch is None:
        check_paged_cache(k_cache, v_cache)
        num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
        tokens, num_heads, device = len(qkv), q_out.shape[1], k_cache.device
        name, cache_name = float_name("qkv", qkv.dtype), float_name("k_cache", k_cache.dtype)
        width = (num_heads + 2 * num_kv_heads) * head_dim
        check_tensor("qkv", qkv, (None, width), qkv.dtype, device, contiguous_from=1)
        check_tensor("q_out", q_out, (tokens, num_heads, head_dim), k_cache.dtype, device)
        check_tensor("inv_freq", inv_freq, (head_dim // 2,), torch.float32, device)
        check_tensor("slot_mapping", slot_mapping, (tokens,), torch.int64, device)
        if (q_weight is None) != (k_weight is None):
            raise ValueError("q_weight and k_weight must be given both or neither")
        for weight_name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            if weight is not None:
                check_tensor(weight_name, weight, (head_dim,), torch.float32, device)
        if positions.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"positions has dtype {positions.dtype}, it must be torch.int32 or torch.int64")
        check_tensor("positions", positions, (tokens,), positions.dtype, device)
        check_rows("qkv", head_dim, qkv.dtype, qkv.stride(0))
        check_rows("k_cache", head_dim, k_cache.dtype, k_cache.stride(0))
        lanes = 8 if head_dim <= 64 else 16 if head_dim <= 128 else 32
        rounds = -(-(num_heads + 2 * num_kv_heads) * lanes // _ROPE_THREADS)
        parts = rounds if tokens * rounds <= 2 * multiprocessors(device) else 1
        squares_stride, hidden, squares_eps = _deferred_scalars(deferred, tokens, qkv.dtype)
        scalars = (
            np.int64(num_blocks * block_size),
            np.int64(qkv.stride(0)),
            np.int64(k_cache.stride(0)),
            np.int32(positions.dtype == torch.int64),
            *map(np.int32, (num_heads, num_kv_heads, head_dim, block_size, lanes)),
            squares_stride,
            hidden,
            np.float32(attention_factor),
            np.float32(eps),
            squares_eps,
        )
        if not tokens:
            return q_out
        kernel = get_kernel(_rope_spec(name, cache_name), device, overlapping=tokens <= _FEW_TOKENS)
        launch = prepare(key, kernel, (tokens, parts), _ROPE_THREADS, 10, scalars)
    to, keys, values, source = q_out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), qkv.data_ptr()
    q_norm = 0 if q_weight is None else q_weight.data_ptr()
    k_norm = 0 if k_weight is None else k_weight.data_ptr()
    if (to | keys | values | source | q_norm | k_norm) & 15:
        raise misaligned(qkv=qkv, q_weight=q_weight, k_weight=k_weight, k_cache=k_cache, v_cache=v_cache, q_out=q_out)
    squares = 0 if deferred is None else deferred.squares.data_ptr()
    rest = positions.data_ptr(), inv_freq.data_ptr(), slot_mapping.data_ptr(), squares
    launch(to, keys, values, source, q_norm, k_norm, *rest)
    return q_out
