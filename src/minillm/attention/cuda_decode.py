"""Paged decode attention on CUDA: the plan of a step and the launch of ``kernels/paged_decode.cu``.

A step's :class:`DecodePlan` is made once by :meth:`DecodePlan.update` from the lengths on the device, and serves every
layer. It only says which thread block computes what; the result for a sequence depends on its own tokens alone, to the
last bit (the kernel's header says how).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_build import Kernel, KernelSpec, arch_of, get_kernel
from minillm.attention.cuda_checks import (
    FLOAT_DTYPES,
    check_heads,
    check_paged_cache,
    check_tensor,
    debug_check_tables,
)
from minillm.attention.interface import LayerAttention

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = (torch.float16, torch.bfloat16)

_WARPS = 4
_THREADS = 32 * _WARPS
_TILE_TOKENS = 16
_ITEM_HEADS = 8
_MIN_ITEM_TOKENS = 64
_PLAN_THREADS = 256
_RING = 32
_MERGE_LEVELS = 8
"""As in the kernels: warps and threads of a block, tokens of a tile, query heads and least tokens of an item, threads
of the plan, item numbers that a block remembers; and more levels of merging than items can need."""

_SHARED_KIB = {80: 164, 87: 164, 90: 228, 100: 228, 103: 228, 86: 100, 89: 100, 120: 100, 121: 100}
"""Shared memory of a multiprocessor by compute capability (CUDA programming guide, "Technical specifications")."""

_SYSTEM_SHARED = 1 << 10
"""Shared memory that the system takes per thread block."""

_MOST_IN_FLIGHT = 136 << 10
"""Bytes on their way to a multiprocessor; on an H200, 192 KiB were up to 3% slower."""

_ITEMS_PER_BLOCK = 8
"""Room in the workspace: items with partial results per resident thread block."""

_BYTES_PER_NS = 4200.0
_ITEM_NS = 1500.0
_LEVEL_NS = 1700.0
"""What the plan reckons with, measured on an H200: the device's memory rate, what an item costs beside its tokens, and
a step of merging. They decide on speed only, never on results."""


def _token_ns(head_dim: int) -> float:
    """The same: a token in a thread block that does not wait for data."""
    return 4.0 + 0.086 * head_dim


def _stage_bytes(head_dim: int) -> int:
    """K and V of a tile; rows whose 16-byte chunks are no power of two are padded."""
    chunks = head_dim // 8
    pitch = 2 * head_dim + (0 if chunks & (chunks - 1) == 0 else 16)
    return 2 * _TILE_TOKENS * pitch


def shared_bytes(head_dim: int, stages: int) -> int:
    """Dynamic shared memory of a thread block (layout: the kernel's header)."""
    exchange = _WARPS * (head_dim * _ITEM_HEADS * 4 + 4 * 16)
    return _WARPS * stages * _stage_bytes(head_dim) + exchange + 4 * _RING + 16


def _stages(head_dim: int, arch: str) -> int:
    """Tiles that a warp keeps in flight, 0 if not even two fit; thread blocks per multiprocessor come first."""
    number = int("".join(filter(str.isdigit, arch)))
    total = _SHARED_KIB.get(number, 0) << 10
    for blocks in (1,) if head_dim == 256 else (2, 1):
        for stages in (4, 3, 2):
            fits = blocks * (shared_bytes(head_dim, stages) + _SYSTEM_SHARED) <= total
            if fits and (stages == 2 or blocks * _WARPS * stages * _stage_bytes(head_dim) <= _MOST_IN_FLIGHT):
                return stages
    return 0


def supports(dtype: torch.dtype, head_dim: int, block_size: int, arch: str) -> bool:
    """Whether :func:`paged_decode` takes this; `arch` as NVRTC calls it ("sm_90a")."""
    return dtype in DTYPES and head_dim in HEAD_DIMS and block_size in BLOCK_SIZES and _stages(head_dim, arch) > 0


_PLAN_SPEC = KernelSpec("paged_decode_plan.cu", "paged_decode_plan")


@cache
def _attention_spec(dtype: torch.dtype, head_dim: int, arch: str) -> KernelSpec:
    return KernelSpec("paged_decode.cu", f"paged_decode<{FLOAT_DTYPES[dtype]}, {head_dim}, {_stages(head_dim, arch)}>")


def specs(arch: str) -> list[KernelSpec]:
    """Every instance that may be launched on `arch`."""
    dims = [head_dim for head_dim in HEAD_DIMS if _stages(head_dim, arch)]
    return [_PLAN_SPEC, *(_attention_spec(dtype, head_dim, arch) for dtype in DTYPES for head_dim in dims)]


class DecodePlan:
    """Work division of decode steps, and the workspace of the attention kernel; made once, valid for all layers.

    Both live on the device and keep their addresses, so a captured graph may hold :meth:`update` and the attention of
    a step, and adapts when it is replayed after the lengths have changed. One plan serves one stream at a time.
    """

    def __init__(
        self,
        device: torch.device | str | int,
        max_seqs: int,
        max_seq_len: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        sliding_windows: Sequence[int | None] = (None,),
        item_tokens: int | None = None,
    ) -> None:
        """Allocate for up to `max_seqs` sequences of up to `max_seq_len` tokens.

        `sliding_windows`: those of the model's layers. A layer with a window that is not listed is computed right, but
        its work is divided as if it saw everything. `item_tokens` fixes the tokens per item, 64 times a power of two
        (for tests and tuning). Raises ValueError for what :func:`supports` refuses.
        """
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(f"device={self.device} must be a CUDA device")
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        arch = arch_of(torch.cuda.get_device_capability(self.device))
        if not supports(dtype, head_dim, block_size, arch):
            raise ValueError(
                f"dtype={dtype}, head_dim={head_dim}, block_size={block_size} on {arch}: the decode kernel takes "
                f"{DTYPES}, head_dim in {HEAD_DIMS}, block_size in {BLOCK_SIZES}, and needs enough shared memory"
            )
        check_heads(num_q_heads, num_kv_heads)
        if max_seqs < 1 or max_seq_len < 1:
            raise ValueError(f"max_seqs={max_seqs} and max_seq_len={max_seq_len} must be at least 1")
        self.forced_shift = 0 if item_tokens is None else _item_shift(item_tokens)
        self.max_seqs, self.max_seq_len = max_seqs, max_seq_len
        self.num_q_heads, self.num_kv_heads = num_q_heads, num_kv_heads
        self.head_dim, self.block_size, self.dtype = head_dim, block_size, dtype
        self.group = num_q_heads // num_kv_heads
        self.chunks = -(-self.group // _ITEM_HEADS)
        self.head_items = num_kv_heads * self.chunks
        self.num_seqs = 0
        self.divisors = [struct.pack("=II", n, -(-(1 << 32) // n) % (1 << 32)) for n in (self.head_items, self.chunks)]

        spec = _attention_spec(dtype, head_dim, arch)
        self.shared_bytes = shared_bytes(head_dim, _stages(head_dim, arch))
        self.kernel: Kernel = get_kernel(spec, self.device)
        self._plan_kernel: Kernel = get_kernel(_PLAN_SPEC, self.device)
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.grid = processors * self.kernel.max_active_blocks(_THREADS, self.shared_bytes)
        self._allocate(sliding_windows)

    def _allocate(self, sliding_windows: Sequence[int | None]) -> None:
        windows = dict.fromkeys([0, *(window or 0 for window in sliding_windows)])
        if None not in sliding_windows:
            del windows[0]
        self._windows = torch.tensor(list(windows), dtype=torch.int32, device=self.device)

        # A fixed item size (tests) may leave any number of partial results.
        longest = -(-self.max_seq_len // (1 << self.forced_shift)) if self.forced_shift else 0
        self.max_items = max(_ITEMS_PER_BLOCK * self.grid, self.max_seqs * longest * self.head_items)
        slots = self.max_items // self.head_items
        self.capacity = self.max_seqs + slots + self.grid
        tiles = self.head_dim // 16

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.plans = zeros(len(windows), self.capacity + 1, 4)
        self._plan_of = dict(zip(windows, self.plans.unbind(), strict=True))
        self.partials = torch.empty((self.max_items + 1, 4 * (32 * tiles + 4)), dtype=torch.float32, device=self.device)
        self.partials[-1] = 0.0  # the result of no tokens: sums 0, maxima -inf
        self.partials[-1, 4 * 32 * tiles :: 2] = -math.inf
        self.arrivals = zeros(_MERGE_LEVELS, self.max_items)
        self.counters = zeros(2)
        rounds = max(-(-self.max_seq_len // _MIN_ITEM_TOKENS), 2)
        levels = (rounds - 1).bit_length()  # of a Stack beyond its registers, one more than needed at most
        self._spill_stride = levels * (-(-tiles // _WARPS) + 1) * _THREADS
        self.spill = torch.empty((self.grid, self._spill_stride, 4), dtype=torch.float32, device=self.device)

    def update(self, seq_lens: Tensor) -> None:
        """Plan a step of sequences with these lengths, int32 [num_seqs] on the device; 0 stands for a padded row, less
        for one whose output is somebody else's to write.

        Enqueues one small kernel, does not wait, can be captured. Lengths must be at most `max_seq_len`.
        """
        check_tensor("seq_lens", seq_lens, (None,), torch.int32, self.device)
        num_seqs = len(seq_lens)
        if not 1 <= num_seqs <= self.max_seqs:
            raise ValueError(f"seq_lens has {num_seqs} rows, the plan has room for 1 to {self.max_seqs}")
        self.num_seqs = num_seqs
        self._plan_kernel.launch(
            len(self._plan_of),
            _PLAN_THREADS,
            (
                self.plans,
                seq_lens,
                self._windows,
                np.int32(num_seqs),
                np.int32(self.capacity),
                np.int32(self.max_items),
                np.int32(self.head_items),
                np.int32(self.grid),
                np.int32(self.forced_shift),
                np.float32(4 * self.head_dim / _BYTES_PER_NS),
                np.float32(_token_ns(self.head_dim)),
                np.float32(_ITEM_NS),
                np.float32(_LEVEL_NS),
            ),
        )

    def for_window(self, window: int) -> Tensor:
        """The plan for a sliding window (0: none), or the one without a window if it has none of its own."""
        found = self._plan_of.get(window, self._plan_of.get(0))
        if found is None:
            known = ", ".join(map(str, self._plan_of))
            raise ValueError(f"sliding_window={window or None} is not in the plan, which has {known}")
        return found


def _item_shift(item_tokens: int) -> int:
    shift = item_tokens.bit_length() - 1
    if item_tokens < _MIN_ITEM_TOKENS or item_tokens != 1 << shift or shift > 21:
        raise ValueError(f"item_tokens={item_tokens} must be {_MIN_ITEM_TOKENS} times a power of two, at most 2^21")
    return shift


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    params: LayerAttention,
    plan: DecodePlan,
    out: Tensor | None = None,
    *,
    history_ready: bool = False,
) -> Tensor:
    """Attention of one query token per sequence to all of its tokens; K and V are in the cache already.

    q [num_seqs, num_q_heads, head_dim] in fp16 or bf16, any row stride; k_cache, v_cache [num_blocks, num_kv_heads,
    block_size, head_dim], any block stride; block_tables int32 [num_seqs, W], any row stride; seq_lens int32
    [num_seqs] (its values were read by ``plan.update``), 0 gives a row of zeros, less leaves the row alone. Returns
    `out` [num_seqs, num_q_heads, head_dim], allocated if not given. Raises ValueError for shapes, dtypes, devices and
    strides that don't fit.

    `history_ready`: block tables, and K and V of all but each sequence's last token, are complete once the launches in
    front of this one have started. Then they are copied while those still run. It holds for the layers of a model's
    step: ``embed``, behind everything that prepares it, lets no launch start before its own wait has ended.
    """
    check_paged_cache(k_cache, v_cache)
    num_seqs, device, dtype = plan.num_seqs, plan.device, plan.dtype
    shape = (num_seqs, plan.num_q_heads, plan.head_dim)
    cache_shape = (None, plan.num_kv_heads, plan.block_size, plan.head_dim)
    check_tensor("q", q, shape, dtype, device, contiguous_from=1)
    check_tensor("k_cache", k_cache, cache_shape, dtype, device, contiguous_from=1)
    check_tensor("block_tables", block_tables, (num_seqs, None), torch.int32, device, contiguous_from=1)
    check_tensor("seq_lens", seq_lens, (num_seqs,), torch.int32, device)
    if k_cache.stride(0) % 8 or k_cache.data_ptr() % 16 or v_cache.data_ptr() % 16:
        raise ValueError(f"k_cache and v_cache must start at and step by multiples of 16 bytes: {k_cache.stride()}")
    if q.stride(0) % 2 or q.data_ptr() % 4:
        raise ValueError(f"q must start at and step by multiples of 4 bytes: row stride {q.stride(0)}")
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    else:
        check_tensor("out", out, shape, dtype, device, contiguous_from=1)
    debug_check_tables(block_tables, seq_lens, len(k_cache), plan.block_size)
    window, cap, log2e = params.sliding_window or 0, params.soft_cap, math.log2(math.e)
    plan.kernel.launch(
        plan.grid,
        _THREADS,
        (
            out,
            q,
            k_cache,
            v_cache,
            block_tables,
            plan.for_window(window),
            plan.partials,
            plan.spill,
            plan.arrivals,
            plan.counters,
            np.int64(block_tables.stride(0)),
            np.int64(q.stride(0)),
            np.int64(out.stride(0)),
            np.int64(plan._spill_stride),
            np.uint32(k_cache.stride(0) // 8),
            plan.divisors[0],
            plan.divisors[1],
            np.int32(plan.max_items),
            np.int32(plan.group),
            np.int32(plan.block_size.bit_length() - 1),
            np.int32(window),
            np.int32(history_ready),
            np.float32(params.scale * log2e),
            np.float32(cap * log2e if cap else 0.0),
            np.float32(2.0 * log2e * params.scale / cap if cap else 0.0),
        ),
        shared_bytes=plan.shared_bytes,
        dependent=True,
    )
    return out
