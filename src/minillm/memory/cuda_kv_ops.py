"""Launching the kernels that move keys and values (``attention/kernels/kv_ops.cu``)."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_build import KernelSpec, get_kernel
from minillm.attention.cuda_checks import CheckedLayouts, check_paged_cache, check_tensor

_WRITE_16 = KernelSpec("kv_ops.cu", "write_kv<uint4>")
_WRITE_2 = KernelSpec("kv_ops.cu", "write_kv<u16>")
_COPY_TILES = KernelSpec("kv_ops.cu", "copy_tiles<4>")

_write_layouts = CheckedLayouts()

_COPY_THREADS = 512
_COPY_BYTES = 16 * 4 * _COPY_THREADS
"""Bytes that a thread block of `copy_tiles` moves per round."""


def specs(arch: str) -> list[KernelSpec]:
    """Every instance that may be launched; the same on all architectures."""
    return [_WRITE_16, _WRITE_2, _COPY_TILES]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k and v [T, num_kv_heads, head_dim] of T tokens to slots `slot_mapping` [T] int64 of one layer.

    k and v may have any row stride (views of a packed product) and have the dtype of the caches [num_blocks,
    num_kv_heads, block_size, head_dim]. A slot outside the pool, such as padding's -1, is skipped. Runs on the current
    stream; capturable. Raises ValueError for shapes, dtypes, devices and strides that don't fit.
    """
    layout = CheckedLayouts.of(k, v, k_cache, v_cache, slot_mapping)
    if layout not in _write_layouts:
        _check_write(k, v, k_cache, v_cache, slot_mapping)
        _write_layouts.add(layout)
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    device = k_cache.device
    if not len(k):
        return
    size = k.element_size()
    strides = (k.stride(0), v.stride(0), k_cache.stride(0))
    pointers = k.data_ptr() | v.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()
    aligned = not (pointers | (strides[0] | strides[1] | strides[2] | head_dim) * size) % 16
    unit = 16 if aligned else 2
    row_vecs = head_dim * size // unit
    get_kernel(_WRITE_16 if aligned else _WRITE_2, device).launch(
        len(k),
        min(256, -(-num_kv_heads * row_vecs // 32) * 32),
        (
            k_cache,
            v_cache,
            k,
            v,
            slot_mapping,
            np.int64(num_blocks * block_size),
            np.int32(num_kv_heads),
            np.int32(block_size),
            np.int32(row_vecs),
            *(np.int64(stride * size // unit) for stride in strides),
        ),
    )


def _check_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    check_paged_cache(k_cache, v_cache)
    _, num_kv_heads, _, head_dim = k_cache.shape
    device, dtype = k_cache.device, k_cache.dtype
    check_tensor("k", k, (None, num_kv_heads, head_dim), dtype, device, contiguous_from=1)
    check_tensor("v", v, k.shape, dtype, device, contiguous_from=1)
    check_tensor("slot_mapping", slot_mapping, (len(k),), torch.int64, device)


def copy_blocks(store: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks of all layers within `store` [num_layers, 2, num_blocks, ...], in one launch.

    `pairs` int32 [P, 2] are (source, destination). No block may be both in one call: the order of the copies is not
    defined. (Copies on write go to blocks that were just allocated, so theirs never are.) Runs on the current stream;
    capturable.
    """
    _copy_tiles(store, store, pairs, store, None)


def gather_blocks(store: Tensor, pages: Tensor, pairs: Tensor, *, max_thread_blocks: int | None = None) -> None:
    """Copy blocks of `store` to `pages` [num_pages, num_layers, 2, ...]; `pairs` int32 [P, 2] are (block, page).

    `pages` is on the device or page-locked. `max_thread_blocks` bounds what the copy takes of the multiprocessors from
    the work beside it. Runs on the current stream.
    """
    _check_pages(pages, store)
    _copy_tiles(pages, store, pairs, store, max_thread_blocks)


def scatter_blocks(pages: Tensor, store: Tensor, pairs: Tensor, *, max_thread_blocks: int | None = None) -> None:
    """Copy `pages` to blocks of `store`; `pairs` int32 [P, 2] are (page, block). The reverse of `gather_blocks`."""
    _check_pages(pages, store)
    _copy_tiles(store, pages, pairs, store, max_thread_blocks)


def _check_pages(pages: Tensor, store: Tensor) -> None:
    wanted = (*store.shape[:2], *store.shape[3:])
    if pages.dtype != store.dtype or pages.shape[1:] != wanted:
        raise ValueError(
            f"pages of shape {tuple(pages.shape)} and dtype {pages.dtype} must be (any, {', '.join(map(str, wanted))}) "
            f"of {store.dtype}"
        )
    if not pages.is_contiguous():
        raise ValueError(f"pages must be contiguous, their strides are {pages.stride()}")
    if pages.device != store.device and not pages.is_pinned():
        raise ValueError(f"pages are on {pages.device}: they must be on {store.device} or in page-locked memory")


def _copy_tiles(target: Tensor, source: Tensor, pairs: Tensor, store: Tensor, max_thread_blocks: int | None) -> None:
    device = store.device
    if device.type != "cuda" or store.dim() != 6 or not store.is_contiguous():
        raise ValueError(f"store of shape {tuple(store.shape)} on {device} must be a contiguous pool on a CUDA device")
    check_tensor("pairs", pairs, (None, 2), torch.int32, device)
    tile_bytes = store.shape[3:].numel() * store.element_size()
    if tile_bytes % 16:
        raise ValueError(f"a block of {tile_bytes} bytes per layer must be a multiple of 16 bytes")
    if not len(pairs):
        return
    planes = store.shape[0] * store.shape[1]
    thread_blocks = min(-(-len(pairs) * planes * tile_bytes // _COPY_BYTES), _most_thread_blocks(device))
    if max_thread_blocks is not None:
        thread_blocks = min(thread_blocks, max_thread_blocks)

    def strides(tensor: Tensor) -> tuple[np.int64, np.int64]:
        """In units of 16 bytes, from block to block and from plane to plane."""
        block, plane = (2, 1) if tensor is store else (0, 2)
        size = tensor.element_size()
        return np.int64(tensor.stride(block) * size // 16), np.int64(tensor.stride(plane) * size // 16)

    get_kernel(_COPY_TILES, device).launch(
        thread_blocks,
        _COPY_THREADS,
        (
            target,
            source,
            pairs,
            np.int64(len(pairs)),
            np.int32(planes),
            np.int32(tile_bytes // 16),
            *strides(source),
            *strides(target),
        ),
    )


@cache
def _most_thread_blocks(device: torch.device) -> int:
    """Thread blocks of `copy_tiles` that are resident at a time, four to a multiprocessor."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count
