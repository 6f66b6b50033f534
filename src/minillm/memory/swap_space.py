"""The swap space: a bounded pool of KV block slots in host memory, and the copies between it and the device.

One slot holds one block of all layers, contiguously (``host[slot, layer, k|v, kv_head, slot in block, head_dim]``), so
that a swapped block is one long transfer. Which slot belongs to which request is the block manager's business.

On a GPU the copies run on a stream of their own, through a staging buffer on the device: a kernel gathers scattered
blocks into it (or scatters them out of it), and the copy engine moves it over the bus, one transfer per run of
consecutive slots. Outgoing: the compute stream waits for the gather alone (0.3 ms for 512 MiB), after which the blocks
may be written again while the bus transfer still runs. Incoming: the compute stream waits for the scatter. Both
directions share one stream, so a slot is never read before the copy that filled it is done. On the CPU the copies are
done when the call returns.

A kernel that reads and writes the host's memory itself fills the bus as well (16 thread blocks: 48 to 51 GB/s on an
H200 against 54 of a plain copy), but matrix products beside it take 1.2 to 1.6 times as long; beside the copy engine
1.04 times (both in one run; `minillm bench swap`, where each block is scattered, has 1.14 to 1.19).

Measured on an H200 (32 layers, 8 KV heads, head_dim 128, bf16: 2 MiB a block), 256 scattered blocks: 49 GB/s both ways
with scattered slots, 52 and 53 with slots in a row, against 55 of a plain pinned copy in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_launch import memcpy_async
from minillm.core.config import GIB
from minillm.core.errors import ConfigError
from minillm.memory import cuda_kv_ops
from minillm.memory.paged_kv_cache import KVCacheSpec, PagedKVCache, lazy_zeros
from minillm.memory.pinned import PinnedMemory
from minillm.memory.staging import PinnedUpload, StagingRing

STAGING_FRACTION = 1 / 128
"""Share of the device's memory that one round of copies may be staged in: 1.1 GiB on an H200."""


class SwapCopy:
    """One batched copy: how many blocks and bytes, and (once done) how many seconds it took."""

    def __init__(self, num_blocks: int, num_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.num_bytes = num_bytes
        self._seconds = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def done(self) -> bool:
        """Whether the copy is finished."""
        return self._events is None or self._events[1].query()

    def seconds(self) -> float:
        """Duration of the copy; waits for its end."""
        if self._events is not None:
            start, end = self._events
            end.synchronize()
            self._seconds = start.elapsed_time(end) / 1e3
            self._events = None
        return self._seconds


class SwapSpace:
    """`num_slots` block slots in host memory beside `cache`; page-locked if the cache is on a GPU and `pin_memory`."""

    def __init__(self, cache: PagedKVCache, num_slots: int, *, pin_memory: bool = True) -> None:
        if num_slots < 1:
            raise ConfigError(f"num_slots={num_slots} must be at least 1; leave the swap space out to disable swapping")
        spec = cache.spec
        self.cache = cache
        self.num_slots = num_slots
        self.pinned = pin_memory and cache.device.type == "cuda"
        shape = (num_slots, spec.num_layers, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)
        try:
            if self.pinned:
                self._memory = PinnedMemory(num_slots * spec.bytes_per_block)
                self._host = self._memory.tensor.view(spec.dtype).view(*shape)
            else:
                self._host = lazy_zeros(shape, spec.dtype)
        except (MemoryError, RuntimeError) as error:
            needed = num_slots * spec.bytes_per_block / GIB
            how = "page-locked host memory (pin_memory=False does without)" if self.pinned else "host memory"
            raise ConfigError(f"swap space of {needed:.2f} GiB does not fit {how}: {error}") from error
        self._stream: torch.cuda.Stream | None = None
        if cache.device.type == "cuda":
            self._stream = torch.cuda.Stream(cache.device)
            self._upload = PinnedUpload(cache.device, StagingRing(slab_bytes=64 << 10))
            total = torch.cuda.get_device_properties(cache.device).total_memory
            self._staging_blocks = self.staging_blocks(spec, total)

    @staticmethod
    def slots_within(spec: KVCacheSpec, gib: float) -> int:
        """Block slots that fit `gib` GiB (0 disables swapping); raises :class:`ConfigError` if negative."""
        if not gib >= 0:
            raise ConfigError(f"swap_space={gib} GiB must not be negative")
        return int(gib * GIB) // spec.bytes_per_block

    @staticmethod
    def staging_blocks(spec: KVCacheSpec, total_memory: int) -> int:
        """Blocks that one round of copies stages on a device with `total_memory` bytes."""
        return max(1, int(total_memory * STAGING_FRACTION) // spec.bytes_per_block)

    def swap_out(self, blocks: Sequence[int], slots: Sequence[int]) -> SwapCopy:
        """Copy device `blocks` to host `slots`, position by position, all layers in one call.

        When it returns, work queued on the current stream may overwrite the blocks.
        """
        self._check(blocks, slots)
        copy = SwapCopy(len(blocks), len(blocks) * self.cache.spec.bytes_per_block)
        if not len(blocks):
            return copy
        if self._stream is None:
            begin = time.perf_counter()
            self._host.index_copy_(0, torch.tensor(slots), self._gather(torch.tensor(blocks)))
            copy._seconds = time.perf_counter() - begin
            return copy
        compute = torch.cuda.current_stream(self.cache.device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            start, end = timing_events()
            pairs = self._pairs(blocks, places_first=False)
            start.record()
            for part in self._rounds(len(blocks)):
                self._send(pairs[part], slots[part], compute)
            end.record()
        copy._events = (start, end)
        return copy

    def swap_in(self, slots: Sequence[int], blocks: Sequence[int]) -> SwapCopy:
        """Copy host `slots` to device `blocks`, position by position, all layers in one call.

        When it returns, work queued on the current stream sees the blocks filled.
        """
        self._check(blocks, slots)
        copy = SwapCopy(len(blocks), len(blocks) * self.cache.spec.bytes_per_block)
        if not len(blocks):
            return copy
        if self._stream is None:
            begin = time.perf_counter()
            self._scatter(torch.tensor(blocks), self._host.index_select(0, torch.tensor(slots)))
            copy._seconds = time.perf_counter() - begin
            return copy
        compute = torch.cuda.current_stream(self.cache.device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            start, end = timing_events()
            pairs = self._pairs(blocks, places_first=True)
            start.record()
            for part in self._rounds(len(blocks)):
                self._fetch(slots[part], pairs[part])
            end.record()
            compute.wait_event(end)
        copy._events = (start, end)
        return copy

    def slot(self, index: int) -> Tensor:
        """One slot's content [num_layers, 2, num_kv_heads, block_size, head_dim], a view."""
        return self._host[index]

    def _rounds(self, count: int) -> Iterator[slice]:
        """Parts of a copy of `count` blocks that staging holds."""
        for first in range(0, count, self._staging_blocks):
            yield slice(first, min(count, first + self._staging_blocks))

    def _pairs(self, blocks: Sequence[int], *, places_first: bool) -> Tensor:
        """Each block and its place in its round's staging, int32 [n, 2] on the device."""
        pairs = np.empty((len(blocks), 2), dtype=np.int32)
        pairs[:, int(places_first)] = blocks
        pairs[:, 1 - int(places_first)] = np.arange(len(blocks)) % self._staging_blocks
        return self._upload(pairs)

    def _staging(self, count: int) -> Tensor:
        """Pages on the device for `count` blocks, from torch's pool of the copy stream: rounds share the memory."""
        return torch.empty((count, *self._host.shape[1:]), dtype=self._host.dtype, device=self.cache.device)

    def _send(self, pairs: Tensor, slots: Sequence[int], compute: torch.cuda.Stream) -> None:
        """One round to `slots` on the current stream; `compute` goes on when the blocks are gathered."""
        staging = self._staging(len(slots))
        cuda_kv_ops.gather_blocks(self.cache.store, staging, pairs)
        compute.wait_event(torch.cuda.current_stream(self.cache.device).record_event())
        self._transfer(staging, slots, to_host=True)

    def _fetch(self, slots: Sequence[int], pairs: Tensor) -> None:
        """One round from `slots` on the current stream."""
        staging = self._staging(len(slots))
        self._transfer(staging, slots, to_host=False)
        cuda_kv_ops.scatter_blocks(staging, self.cache.store, pairs)

    def _transfer(self, staging: Tensor, slots: Sequence[int], *, to_host: bool) -> None:
        """Staging's pages to `slots` or back, by the copy engine."""
        host, size = self._host.data_ptr(), self.cache.spec.bytes_per_block
        stream = torch.cuda.current_stream(self.cache.device).cuda_stream
        for first, slot, count in _runs(slots):
            there, here = host + slot * size, staging.data_ptr() + first * size
            target, source = (there, here) if to_host else (here, there)
            memcpy_async(target, source, count * size, stream)

    def _gather(self, blocks: Tensor) -> Tensor:
        """Blocks of all layers as [n, num_layers, 2, num_kv_heads, block_size, head_dim]."""
        return self.cache.store.index_select(2, blocks).movedim(2, 0)

    def _scatter(self, blocks: Tensor, pages: Tensor) -> None:
        self.cache.store.index_copy_(2, blocks, pages.movedim(0, 2))

    def _check(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        if len(blocks) != len(slots):
            raise ValueError(f"{len(blocks)} blocks and {len(slots)} swap slots do not match")
        for name, ids, limit in (("block", blocks, self.cache.num_blocks), ("swap slot", slots, self.num_slots)):
            if len(ids) and not 0 <= min(ids) <= max(ids) < limit:
                raise IndexError(f"{name} ids {list(ids)} are not all in [0, {limit})")


def timing_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Two events that take times, for the start and the end of something."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Maximal runs of consecutive ids as (position of the first, first id, count): one transfer each."""
    first = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            yield first, ids[first], end - first
            first = end
