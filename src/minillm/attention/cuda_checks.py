"""Checks of kernel arguments, shared by all launch wrappers.

They read shapes and strides only, nothing on the device. Values on the device (block ids, lengths) are checked when
``MINILLM_DEBUG_KERNELS=1`` is set: that waits for the device, so it is no part of a captured graph.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

DEBUG_KERNELS = os.environ.get("MINILLM_DEBUG_KERNELS", "0") not in ("", "0")

FLOAT_DTYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""dtype -> C++ type of the kernels."""

MAX_HEAD_DIM = 256


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtype: torch.dtype,
    device: torch.device,
    *,
    contiguous_from: int = 0,
) -> None:
    """Raise ValueError unless `tensor` has this shape (None: any size), dtype and device.

    Dimensions from `contiguous_from` on must lie densely in memory: [T, H, d] with ``contiguous_from=1`` may have any
    row stride.
    """
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, it must be on {device}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}, it must be {dtype}")
    have = tensor.shape
    fits = len(have) == len(shape)
    for size, wanted in zip(have, shape, strict=False):
        fits &= wanted is None or size == wanted
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(have)}, it must be ({sizes})")
    if tensor.is_contiguous():
        return
    dense, strides = 1, tensor.stride()
    for dim in range(len(have) - 1, contiguous_from - 1, -1):
        if have[dim] != 1 and strides[dim] != dense:
            raise ValueError(
                f"{name} with shape {tuple(have)} has strides {strides}, dimensions from {contiguous_from} on must be "
                "contiguous"
            )
        dense *= have[dim]


_MOST_LAYOUTS = 4096

Layout = tuple[object, ...]


class CheckedLayouts:
    """Layouts of arguments that a wrapper has found right: the layers of a step, and most steps, share one."""

    def __init__(self) -> None:
        self._seen: set[Layout] = set()

    @staticmethod
    def of(*tensors: Tensor) -> Layout:
        """All that checks look at: shapes, strides, dtypes and devices."""
        return tuple([(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors])

    def __contains__(self, layout: Layout) -> bool:
        return layout in self._seen

    def add(self, layout: Layout) -> None:
        """Remember one that passed; forgets all when there are too many (prompts of every length)."""
        if len(self._seen) >= _MOST_LAYOUTS:
            self._seen.clear()
        self._seen.add(layout)


def check_paged_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise ValueError unless K and V are views [num_blocks, num_kv_heads, block_size, head_dim] of one CUDA pool.

    The block stride is free (K and V of a layer may be interleaved) but the same for both.
    """
    if k_cache.device.type != "cuda":
        raise ValueError(f"k_cache is on {k_cache.device}, it must be on a CUDA device")
    if k_cache.dtype not in FLOAT_DTYPES:
        raise ValueError(f"k_cache has dtype {k_cache.dtype}, it must be one of {', '.join(map(str, FLOAT_DTYPES))}")
    if k_cache.dim() != 4:
        raise ValueError(f"k_cache has shape {tuple(k_cache.shape)}, it must have 4 dimensions")
    head_dim = k_cache.shape[3]
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim} must be a multiple of 8, at most {MAX_HEAD_DIM}")
    check_tensor("k_cache", k_cache, k_cache.shape, k_cache.dtype, k_cache.device, contiguous_from=1)
    check_tensor("v_cache", v_cache, k_cache.shape, k_cache.dtype, k_cache.device, contiguous_from=1)
    if v_cache.stride(0) != k_cache.stride(0):
        raise ValueError(f"block strides differ: k_cache {k_cache.stride(0)}, v_cache {v_cache.stride(0)}")


def check_heads(num_q_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless every KV head serves the same number of query heads."""
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads={num_q_heads} is not a multiple of num_kv_heads={num_kv_heads}")


def debug_check_tables(block_tables: Tensor, context_lens: Tensor, num_blocks: int, block_size: int) -> None:
    """With ``MINILLM_DEBUG_KERNELS=1``: raise ValueError if a sequence names a block outside the pool."""
    if not DEBUG_KERNELS or torch.cuda.is_current_stream_capturing():
        return
    tables, lens = block_tables.cpu(), context_lens.cpu().tolist()
    for row, length in enumerate(lens):
        count = -(-length // block_size)
        if count > tables.shape[1]:
            raise ValueError(f"context_lens[{row}]={length} needs {count} blocks, the table has {tables.shape[1]}")
        used = tables[row, :count]
        if count and not 0 <= int(used.min()) <= int(used.max()) < num_blocks:
            raise ValueError(f"block_tables[{row}] names blocks outside [0, {num_blocks}): {used.tolist()}")
