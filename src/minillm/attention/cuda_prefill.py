"""Launching the prefill kernels: attention of chunks of prompts over the paged cache.

Two kernels with one work list: ``kernels/paged_prefill_sm90.cu`` for Hopper, ``kernels/paged_prefill.cu`` for every
GPU from sm_80 on. :class:`PrefillPlan` cuts a step's chunks into tiles once, on the host; each layer's call then only
launches. The query heads of a KV head are packed into the rows of a tile (kernels/paged_prefill.cuh).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_build import KernelSpec, get_kernel, tensor_map
from minillm.attention.cuda_checks import (
    FLOAT_DTYPES,
    CheckedLayouts,
    check_heads,
    check_paged_cache,
    check_tensor,
    debug_check_tables,
)
from minillm.attention.cuda_launch import current_raw_stream, memcpy_async
from minillm.attention.interface import LayerAttention

TUNED_HEAD_DIMS = (64, 80, 96, 128, 256)
"""Built by `minillm kernels build`; other multiples of 16 are compiled when they are first used."""

_LOG2E = 1.4426950408889634
_DTYPES = (torch.float16, torch.bfloat16)
_MIN_BLOCK_SIZE, _MAX_BLOCK_SIZE = 8, 128
_SM90_MAX_GROUP = 64
_SWIZZLE_COLUMNS = 64
"""16-bit elements of a 128-byte row, the width of a tensor copy's box."""

_WORK_FIELDS = 8
_BEGIN, _END, _PARTIAL = 5, 6, 7
"""Columns of the work list that pieces differ in: their keys, and where their partial result goes."""

_HEADER_INTS = 16
_MAX_MAPS = 4096

# ---- Kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillKernel:
    """One kernel and the tiles that it works in: `tile_rows` packed rows against `key_tile` keys at a time.

    `wave` is how many tiles run at a time on the GPU that it is tuned for: a constant, since the pieces that long
    contexts are cut into follow from it, and with them the rounding.
    """

    source: str
    tile_rows: int
    key_tile: int
    threads: int
    shared_bytes: int
    wave: int
    template: str = ""
    """Template arguments behind the soft cap's."""

    @property
    def hopper(self) -> bool:
        """Whether it is the Hopper kernel."""
        return self.source == "paged_prefill_sm90.cu"

    def spec(self, dtype: torch.dtype, head_dim: int, soft_cap: bool) -> KernelSpec:
        """The instance to compile."""
        name = self.source.removesuffix(".cu")
        if self.hopper:
            tiles = f"{self.key_tile}, {self.tile_rows // 64}"
        else:
            tiles = f"{self.key_tile}"
        symbol = f"{name}<{FLOAT_DTYPES[dtype]}, {head_dim}, {tiles}, {str(soft_cap).lower()}{self.template}>"
        return KernelSpec(self.source, symbol)


def portable_kernel(head_dim: int) -> PrefillKernel:
    """The mma.sync kernel for a head dim that is a multiple of 16."""
    key_tile = 64 if head_dim <= 128 else 32
    shared = (64 + 2 * key_tile) * (2 * head_dim + 16)
    return PrefillKernel("paged_prefill.cu", 64, key_tile, 128, shared, wave=264)


def sm90_kernel(
    head_dim: int, *, warpgroups: int | None = None, stages: int | None = None, q_stages: int | None = None
) -> PrefillKernel:
    """The Hopper kernel for a tuned head dim; the keywords override its tuning (docs/kernels.md).

    `warpgroups` of 64 rows each, `stages` of K and V tiles and `q_stages` of Q in shared memory.
    """
    warpgroups = warpgroups or (3 if head_dim == 64 else 2)
    key_tile = 64 if head_dim == 256 else 128
    stages = stages or (3 if head_dim == 64 else 2)
    q_stages = q_stages or (1 if head_dim == 256 else 2)
    row_bytes = -(-head_dim // _SWIZZLE_COLUMNS) * 128
    shared = row_bytes * (q_stages * 64 * warpgroups + 2 * stages * key_tile)
    shared += 64 * q_stages + 8 * (4 * stages + 3 * q_stages) + 1024  # work items, mbarriers, alignment
    template = f", {stages}, {q_stages}"
    return PrefillKernel(
        "paged_prefill_sm90.cu", 64 * warpgroups, key_tile, 128 * (warpgroups + 1), shared, 132, template
    )


def _combine_spec(dtype: torch.dtype, head_dim: int) -> KernelSpec:
    return KernelSpec("paged_prefill_combine.cu", f"paged_prefill_combine<{FLOAT_DTYPES[dtype]}, {head_dim}>")


def choose_kernel(head_dim: int, group: int, arch: str) -> PrefillKernel:
    """The fastest kernel for a head dim and a number of query heads per KV head on `arch`."""
    if arch == "sm_90a" and head_dim in TUNED_HEAD_DIMS and group <= _SM90_MAX_GROUP:
        return sm90_kernel(head_dim)
    return portable_kernel(head_dim)


def supports(dtype: torch.dtype, head_dim: int, block_size: int, arch: str) -> bool:
    """Whether :func:`paged_prefill` takes this cache on `arch` ('sm_90a'); what it does not is the simple path's."""
    version = re.fullmatch(r"sm_(\d+)[a-z]?", arch)
    return (
        version is not None
        and int(version[1]) >= 80
        and dtype in _DTYPES
        and head_dim % 16 == 0
        and 16 <= head_dim <= 256
        and _MIN_BLOCK_SIZE <= block_size <= _MAX_BLOCK_SIZE
        and block_size & (block_size - 1) == 0
    )


def specs(arch: str) -> list[KernelSpec]:
    """The instances for the tuned head dims on `arch`."""
    kernels = [(head_dim, choose_kernel(head_dim, 1, arch)) for head_dim in TUNED_HEAD_DIMS]
    if arch == "sm_90a":  # groups of more query heads than a tile has rows for
        kernels += [(head_dim, portable_kernel(head_dim)) for head_dim in TUNED_HEAD_DIMS]
    found = [
        kernel.spec(dtype, head_dim, soft_cap)
        for head_dim, kernel in kernels
        for dtype in _DTYPES
        for soft_cap in (False, True)
    ]
    return found + [_combine_spec(dtype, head_dim) for head_dim in TUNED_HEAD_DIMS for dtype in _DTYPES]


# ---- Plan ------------------------------------------------------------------------------------------------------------

_MIN_PIECE_KEYS = 2048
_MAX_PIECES = 8
_PIECE_OVERHEAD_KEYS = 384
"""A partial result is written, read again and joined in about the time of so many keys."""


@lru_cache(maxsize=4096)
def pieces_of(queries: int, context: int, *, step: int, group: int, copies: int, wave: int) -> int:
    """Into how many pieces of equal size the keys of a chunk are cut; its tiles have `step` packed rows, and each KV
    head (`copies`) has them all.

    `wave` tiles run at a time. One tile more than that doubles the time, unless there are shorter tiles to fill up
    with, as in a whole prompt; pieces fill up too, but each costs. Depends on the sequence alone, so its rounding does.
    """
    most = min(_MAX_PIECES, context // _MIN_PIECE_KEYS)
    if most < 2:
        return 1
    key_ends = _key_ends(np.arange(0, queries * group, step), step, group, queries * group, context - queries)
    if _time(key_ends, copies, wave) < 1.05 * key_ends.sum() * copies / wave:
        return 1

    def time(pieces: int) -> float:
        size = -(-context // pieces)
        whole, rest = key_ends // size, key_ends % size
        lengths = np.concatenate([np.full(int(whole.sum()), size), rest[rest > 0]])
        return _time(lengths + (_PIECE_OVERHEAD_KEYS if pieces > 1 else 0), copies, wave)

    return min(range(1, most + 1), key=time)


def _time(lengths: np.ndarray, copies: int, wave: int) -> float:
    """When the last of `copies` tiles of each length ends, if the longest is handed out first."""
    waiting = np.repeat(np.sort(lengths)[::-1], copies)
    waiting = np.append(waiting, np.zeros(-len(waiting) % wave, dtype=waiting.dtype))
    busy = np.zeros(wave, dtype=np.int64)
    for turn in waiting.reshape(-1, wave):
        busy = np.sort(busy) + turn
    return float(busy.max())


class PrefillPlan:
    """How a step's chunks are cut into tiles; the buffers on the device stay and grow when a step needs more.

    Calls of one plan must follow each other on one stream (they share the partial results and a work counter). A
    captured graph stays valid for later steps of as many rows of q, as long as `version` is the same and no tile of
    either step is split (`num_splits`): the number of sequences and their lengths are read on the device.
    """

    def __init__(
        self,
        device: torch.device,
        max_seqs: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        kernel: PrefillKernel | None = None,
    ) -> None:
        """`kernel` overrides the choice for the device. Raises ValueError for what :func:`supports` refuses."""
        from minillm.attention.cuda_build import arch_of

        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device={device} must be a CUDA device")
        properties = torch.cuda.get_device_properties(device)
        arch = arch_of((properties.major, properties.minor))
        if not supports(dtype, head_dim, block_size, arch):
            raise ValueError(f"dtype={dtype}, head_dim={head_dim}, block_size={block_size} on {arch} is not supported")
        check_heads(num_q_heads, num_kv_heads)
        self.num_q_heads, self.num_kv_heads = num_q_heads, num_kv_heads
        self.head_dim, self.block_size, self.dtype = head_dim, block_size, dtype
        self.group = num_q_heads // num_kv_heads
        self.kernel = kernel or choose_kernel(head_dim, self.group, arch)
        self.rows_per_tile = rows_per_tile(self.kernel, self.group)
        self.num_tokens = self.num_seqs = self.num_work = self.num_splits = 0
        self.max_blocks = properties.multi_processor_count * (1 if self.kernel.hopper else 8)
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.counters = torch.zeros(2, dtype=torch.int32, device=self.device)
        self.maps: dict[tuple[int, ...], bytes] = {}
        self.checked = CheckedLayouts()
        """Arguments of this plan's calls that were found right; all layers of a step share one layout."""
        self._staging: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = 0
        self.version = 0
        """Grows whenever the lists get another place, where a captured graph would not find them."""
        self._reserve(max(256, 2 * max_seqs), max(64, max_seqs))
        self.partial = torch.empty(0, dtype=torch.float32, device=self.device)
        self.partial_lse = self.partial

    def _reserve(self, work: int, splits: int) -> None:
        """Buffers for so many tiles and split tiles: a header (their number), the work list, the split list."""
        for _, copied in self._staging:
            copied.synchronize()
        self._work_capacity, self._split_capacity = work, splits
        self.version += 1
        size = _HEADER_INTS + _WORK_FIELDS * (work + splits)
        self._lists = torch.zeros(size, dtype=torch.int32, device=self.device)
        self.header = self._lists[:_HEADER_INTS]
        self.work = self._lists[_HEADER_INTS : _HEADER_INTS + _WORK_FIELDS * work]
        self.splits = self._lists[_HEADER_INTS + _WORK_FIELDS * work :]
        self._staging = [(torch.zeros(size, dtype=torch.int32, pin_memory=True), torch.cuda.Event()) for _ in range(2)]

    def update(self, query_start: Sequence[int] | np.ndarray, context_lens: Sequence[int] | np.ndarray) -> None:
        """Plan a step from lengths on the host: sequence s has the queries query_start[s] up to query_start[s + 1] of
        q, at the end of its context_lens[s] tokens; one without queries is skipped. Does not wait for the device.

        Raises ValueError for lengths that don't fit together.
        """
        starts, contexts = _check_lengths(query_start, context_lens)
        work, splits, slots = build_work(starts, contexts, self.kernel, self.group, self.num_kv_heads)
        if len(work) > self._work_capacity or len(splits) > self._split_capacity:
            self._reserve(
                max(self._work_capacity, 1 << len(work).bit_length()),
                max(self._split_capacity, 1 << len(splits).bit_length()),
            )
        if slots * self.num_kv_heads * self.rows_per_tile > len(self.partial_lse):
            rows = slots * self.num_kv_heads * self.rows_per_tile
            self.partial = torch.empty(rows * self.head_dim, dtype=torch.float32, device=self.device)
            self.partial_lse = torch.empty(rows, dtype=torch.float32, device=self.device)
        self.num_seqs, self.num_tokens = len(contexts), int(starts[-1])
        self.num_work, self.num_splits = len(work), len(splits)
        staging, copied = self._staging[self._turn]
        self._turn ^= 1
        copied.synchronize()  # the copy of two steps ago, which has long ended
        lists = staging.numpy()
        lists[0] = len(work)
        lists[_HEADER_INTS : _HEADER_INTS + work.size] = work.reshape(-1)
        at = _HEADER_INTS + _WORK_FIELDS * self._work_capacity
        lists[at : at + splits.size] = splits.reshape(-1)
        used = at + splits.size if len(splits) else _HEADER_INTS + work.size
        # As in memory/staging.py: torch is not told of copies out of memory that outlives them.
        memcpy_async(self._lists.data_ptr(), lists.ctypes.data, 4 * used, current_raw_stream(self.device.index))
        copied.record(torch.cuda.current_stream(self.device))

    def map_of(self, tensor: Tensor, box: Sequence[int]) -> bytes:
        """The tensor map of a q or of one layer's K or V; kept, since encoding one costs more than a launch."""
        key = (tensor.data_ptr(), *tensor.shape, *tensor.stride())
        found = self.maps.get(key)
        if found is None:
            if len(self.maps) >= _MAX_MAPS:
                self.maps.clear()
            found = tensor_map(tensor, tensor.shape, tensor.stride(), box, swizzle_bytes=128)
            self.maps[key] = found
        return found


def rows_per_tile(kernel: PrefillKernel, group: int) -> int:
    """Packed rows of a tile in use: the Hopper kernel copies whole queries, all heads of the group, into it."""
    return kernel.tile_rows // group * group if kernel.hopper else kernel.tile_rows


def _check_lengths(
    query_start: Sequence[int] | np.ndarray, context_lens: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    starts = np.asarray(query_start, dtype=np.int64)
    contexts = np.asarray(context_lens, dtype=np.int64)
    if starts.shape != (len(contexts) + 1,):
        raise ValueError(f"query_start has {len(starts)} entries for {len(contexts)} sequences, it must have one more")
    lens = np.diff(starts)
    if starts[0] < 0 or (lens < 0).any():
        raise ValueError(f"query_start must not decrease: {starts.tolist()}")
    if (lens > contexts).any():
        at = int(np.argmax(lens > contexts))
        raise ValueError(f"sequence {at} has {lens[at]} queries, more than its context_lens[{at}]={contexts[at]}")
    return starts, contexts


def build_work(
    starts: np.ndarray, contexts: np.ndarray, kernel: PrefillKernel, group: int, num_kv_heads: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """(work list [n, 8], split list [m, 8], partial slots): the structs of kernels/paged_prefill*.cu* as int32.

    Work is sorted by its number of keys, longest first, so that what is handed out last is short.
    """
    step = rows_per_tile(kernel, group)
    used = np.flatnonzero(np.diff(starts))
    start, context = starts[used], contexts[used]
    queries = starts[used + 1] - start
    rows, pos0 = queries * group, context - queries

    tiles = -(-rows // step)
    of = np.repeat(np.arange(len(used)), tiles)  # each tile's sequence, as an index into `used`
    row0 = step * _ranks(tiles)
    key_end = _key_ends(row0, step, group, rows[of], pos0[of])

    work = np.zeros((len(of), _WORK_FIELDS), dtype=np.int32)
    for column, values in enumerate((used[of], start[of], row0, rows[of], pos0[of])):
        work[:, column] = values
    work[:, _END], work[:, _PARTIAL] = key_end, -1
    splits, slots = np.zeros((0, _WORK_FIELDS), dtype=np.int32), 0
    if context.max(initial=0) >= 2 * _MIN_PIECE_KEYS:
        pieces = [
            pieces_of(n, c, step=step, group=group, copies=num_kv_heads, wave=kernel.wave)
            for n, c in zip(queries.tolist(), context.tolist(), strict=True)
        ]
        size = -(-context // (np.array(pieces, dtype=np.int64) * kernel.key_tile)) * kernel.key_tile
        work, splits, slots = _cut(work, size[of])
    return work[np.argsort(work[:, _BEGIN] - work[:, _END], kind="stable")], splits, slots


def _cut(work: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """The work list with tiles of more than `size[i]` keys cut into pieces, the split list, and the partial slots."""
    counts = -(-work[:, _END] // size)
    tile = np.repeat(np.arange(len(work)), counts)
    pieces = work[tile]
    pieces[:, _BEGIN] = size[tile] * _ranks(counts)
    pieces[:, _END] = np.minimum(pieces[:, _BEGIN] + size[tile], pieces[:, _END])
    cut = counts > 1
    slots = int(counts[cut].sum())
    pieces[cut[tile], _PARTIAL] = np.arange(slots)
    splits = np.zeros((int(cut.sum()), _WORK_FIELDS), dtype=np.int32)
    splits[:, :3] = work[cut, 1:4]  # start, first row, rows
    splits[:, 3] = np.cumsum(counts[cut]) - counts[cut]
    splits[:, 4] = counts[cut]
    return pieces, splits, slots


def _key_ends(row0: np.ndarray, step: int, group: int, rows: np.ndarray | int, pos0: np.ndarray | int) -> np.ndarray:
    """How many keys each tile of `step` packed rows from `row0` on sees: up to its last query's own."""
    return pos0 + (np.minimum(row0 + step, rows) - 1) // group + 1


def _ranks(counts: np.ndarray) -> np.ndarray:
    """0 to count - 1 for each of `counts`, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


# ---- Launch ----------------------------------------------------------------------------------------------------------


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    params: LayerAttention,
    plan: PrefillPlan,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of S sequences' chunks, whose queries stand at the end of their contexts; K and V are cached already.

    q [T, num_q_heads, head_dim] with any token stride that is a multiple of 16 bytes; k_cache, v_cache [num_blocks,
    num_kv_heads, block_size, head_dim] in q's dtype, any block stride; block_tables int32 [S, W], any row stride;
    query_start int32 [S + 1] and context_lens int32 [S]: the lengths that `plan` was last updated with (the kernels
    read the plan's). Returns `out` [T, num_q_heads, head_dim], allocated if not given; rows of q behind the last
    chunk are left alone. Raises ValueError for shapes, dtypes, devices and strides that don't fit.
    """
    out = _check(q, k_cache, v_cache, block_tables, query_start, context_lens, params, plan, out)
    if not plan.num_work:
        return out
    kernel, group = plan.kernel, plan.group
    soft_cap = params.soft_cap
    score_scale = params.scale / soft_cap if soft_cap else params.scale
    exponent_scale = (soft_cap or params.scale) * _LOG2E
    step = plan.rows_per_tile
    if kernel.hopper:
        box_rows = min(plan.block_size, kernel.key_tile)
        inputs: tuple[object, ...] = (
            plan.map_of(q, (step // group, group, _SWIZZLE_COLUMNS)),
            plan.map_of(k_cache, (1, 1, box_rows, _SWIZZLE_COLUMNS)),
            plan.map_of(v_cache, (1, 1, box_rows, _SWIZZLE_COLUMNS)),
        )
        tail: tuple[object, ...] = (np.int32(step),)
        counters: tuple[object, ...] = (plan.counters,)
    else:
        strides = np.int64(k_cache.stride(0)), np.int64(v_cache.stride(0))
        inputs = (q, np.int64(q.stride(0)), k_cache, v_cache, *strides)
        tail = counters = ()
    lists = (block_tables, np.int64(block_tables.stride(0)), plan.work, plan.header, *counters)
    heads = (np.int32(plan.num_kv_heads), np.int32(group), np.int32(plan.block_size.bit_length() - 1), *tail)
    scales = (np.float32(score_scale), np.float32(exponent_scale), np.int32(params.sliding_window or 0))
    # A graph may be replayed with a longer list of work; thread blocks that find none end at once.
    capturing = torch.cuda.is_current_stream_capturing()
    get_kernel(kernel.spec(plan.dtype, plan.head_dim, soft_cap is not None), plan.device).launch(
        plan.max_blocks if capturing else min(plan.max_blocks, plan.num_work * plan.num_kv_heads),
        kernel.threads,
        (*inputs, out, plan.partial, plan.partial_lse, *lists, *heads, *scales),
        shared_bytes=kernel.shared_bytes,
    )
    if plan.num_splits:
        get_kernel(_combine_spec(plan.dtype, plan.head_dim), plan.device).launch(
            (plan.num_splits, plan.num_kv_heads),
            256,
            (
                out,
                plan.partial,
                plan.partial_lse,
                plan.splits,
                np.int32(plan.num_kv_heads),
                np.int32(group),
                np.int32(step),
            ),
        )
    return out


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    params: LayerAttention,
    plan: PrefillPlan,
    out: Tensor | None,
) -> Tensor:
    """The checks of :func:`paged_prefill`; returns its output."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tensors = (q, k_cache, v_cache, block_tables, query_start, context_lens, out)
    layout = (*CheckedLayouts.of(*tensors), plan.num_seqs, plan.num_tokens)
    if layout not in plan.checked:
        _check_layout(*tensors, plan)
        plan.checked.add(layout)
    if (q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) % 16:
        raise ValueError("q, k_cache and v_cache must start at multiples of 16 bytes")
    if not params.scale > 0:
        raise ValueError(f"scale={params.scale} must be positive")
    debug_check_tables(block_tables, context_lens, len(k_cache), plan.block_size)
    return out


def _check_layout(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    out: Tensor,
    plan: PrefillPlan,
) -> None:
    check_paged_cache(k_cache, v_cache)
    device, dtype = k_cache.device, k_cache.dtype
    if (device, dtype, *k_cache.shape[1:]) != (
        plan.device,
        plan.dtype,
        plan.num_kv_heads,
        plan.block_size,
        plan.head_dim,
    ):
        raise ValueError(
            f"k_cache {tuple(k_cache.shape)} {dtype} on {device} is not what the plan was made for: "
            f"[any, {plan.num_kv_heads}, {plan.block_size}, {plan.head_dim}] {plan.dtype} on {plan.device}"
        )
    check_tensor("q", q, (None, plan.num_q_heads, plan.head_dim), dtype, device, contiguous_from=1)
    if len(q) < plan.num_tokens:
        raise ValueError(f"q has {len(q)} rows, the plan's chunks have {plan.num_tokens}")
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.stride(0) * dtype.itemsize % 16:
            raise ValueError(f"{name} must step by multiples of 16 bytes: stride {tensor.stride(0)}")
    check_tensor("block_tables", block_tables, (plan.num_seqs, None), torch.int32, device, contiguous_from=1)
    check_tensor("query_start", query_start, (plan.num_seqs + 1,), torch.int32, device)
    check_tensor("context_lens", context_lens, (plan.num_seqs,), torch.int32, device)
    check_tensor("out", out, (len(q), plan.num_q_heads, plan.head_dim), dtype, device)
