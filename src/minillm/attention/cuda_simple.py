"""Launching the simple paged attention kernel (``kernels/paged_simple.cu``): every shape, decode and prefill."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_build import KernelSpec, get_kernel
from minillm.attention.cuda_checks import (
    FLOAT_DTYPES,
    CheckedLayouts,
    check_heads,
    check_paged_cache,
    check_tensor,
    debug_check_tables,
)
from minillm.attention.interface import LayerAttention

_WARP = 32
_KEYS = 32
_ROWS = 16
_THREADS = 128
"""As in the kernel: lanes of a warp, keys of a step, rows of a tile, threads of a block."""


def _spec(dtype: torch.dtype, chunks: int) -> KernelSpec:
    return KernelSpec("paged_simple.cu", f"paged_simple<{FLOAT_DTYPES[dtype]}, {chunks}>")


_CHUNKS = (2, 4, 8)
"""Dimensions per lane of an instance, which serves every head_dim up to 32 times as much."""

_SPECS = {(dtype, chunks): _spec(dtype, chunks) for dtype in FLOAT_DTYPES for chunks in _CHUNKS}


_checked = CheckedLayouts()


def specs(arch: str) -> list[KernelSpec]:
    """Every instance that may be launched; the same on all architectures."""
    return list(_SPECS.values())


def shared_bytes(head_dim: int, chunks: int) -> int:
    """Dynamic shared memory of a thread block (layout: the kernel's header)."""
    return 4 * (_ROWS * head_dim + _KEYS * (head_dim + 4) + _KEYS * _WARP * chunks + _ROWS * _KEYS)


def paged_attention_simple(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    params: LayerAttention,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of S sequences' queries, which stand at the end of their contexts; K and V are in the cache already.

    q [T, num_q_heads, head_dim], any token stride; k_cache, v_cache [num_blocks, num_kv_heads, block_size, head_dim] in
    q's dtype, any block stride that is a multiple of 16 bytes; block_tables int32 [S, W], any row stride; query_start
    int32 [S + 1], sequence s has the queries query_start[s] up to query_start[s + 1]; context_lens int32 [S], its
    tokens including the queries. A sequence with context 0 (padding) gets zeros. Returns `out` [T, num_q_heads,
    head_dim], allocated if not given. Raises ValueError for shapes, dtypes, devices and strides that don't fit.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    layout = CheckedLayouts.of(q, k_cache, v_cache, block_tables, query_start, context_lens, out)
    if layout not in _checked:
        _check(q, k_cache, v_cache, block_tables, query_start, context_lens, out)
        _checked.add(layout)
    if (k_cache.data_ptr() | v_cache.data_ptr()) % 16:
        raise ValueError("k_cache and v_cache must start at multiples of 16 bytes")
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    tokens, num_q_heads = q.shape[:2]
    num_seqs, device = len(context_lens), q.device
    debug_check_tables(block_tables, context_lens, len(k_cache), block_size)
    if not tokens or not num_seqs:
        return out
    group = num_q_heads // num_kv_heads
    tiles = min(tokens, -(-tokens // max(1, _ROWS // group)) + num_seqs)
    chunks = next(chunks for chunks in _CHUNKS if head_dim <= _WARP * chunks)
    get_kernel(_SPECS[q.dtype, chunks], device).launch(
        (tiles, num_kv_heads * -(-group // _ROWS)),
        _THREADS,
        (
            out,
            q,
            k_cache,
            v_cache,
            block_tables,
            query_start,
            context_lens,
            np.int32(num_seqs),
            np.int32(num_kv_heads),
            np.int32(group),
            np.int32(head_dim),
            np.int32(block_size),
            np.int64(block_tables.stride(0)),
            np.int64(q.stride(0)),
            np.int64(out.stride(0)),
            np.int64(k_cache.stride(0)),
            np.float32(params.scale),
            np.int32(params.sliding_window or 0),
            np.float32(params.soft_cap or 0.0),
        ),
        shared_bytes=shared_bytes(head_dim, chunks),
    )
    return out


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    out: Tensor,
) -> None:
    check_paged_cache(k_cache, v_cache)
    num_kv_heads, _, head_dim = k_cache.shape[1:]
    device, dtype = k_cache.device, k_cache.dtype
    check_tensor("q", q, (None, None, head_dim), dtype, device, contiguous_from=1)
    check_heads(q.shape[1], num_kv_heads)
    check_tensor("context_lens", context_lens, (None,), torch.int32, device)
    num_seqs = len(context_lens)
    check_tensor("query_start", query_start, (num_seqs + 1,), torch.int32, device)
    check_tensor("block_tables", block_tables, (num_seqs, None), torch.int32, device, contiguous_from=1)
    check_tensor("out", out, q.shape, dtype, device, contiguous_from=1)
    if k_cache.stride(0) * dtype.itemsize % 16:
        raise ValueError(f"the block stride of k_cache, {k_cache.stride(0)} elements, must be a multiple of 16 bytes")
