"""The paged KV cache: every layer's keys and values in fixed-size blocks, addressed through block tables.

Layout
------
One allocation ``store[layer, k|v, block, kv_head, slot in block, head_dim]``; ``k(layer)`` and ``v(layer)`` are views
``[num_blocks, num_kv_heads, block_size, head_dim]``. A *slot* is one token's place: ``block * block_size + offset``.

Why heads are outside the slots of a block: gathering a sequence by (head, block) rows of ``block_size * head_dim``
elements gives a contiguous ``[kv_head, token, head_dim]`` operand for the CPU's fused attention. At one stream that ran
1.2 to 1.3 times as fast as on a token-major operand (9/3 heads, head_dim 64, 112 tokens: fp32 13.4 against 17.3 us a
layer, bf16 14.0 against 16.9), at 16 streams up to 1.1 times, and the gather costs the same. For a CUDA kernel that
works on one (sequence, KV head) at a time a block is one contiguous tile, and all strides are ordinary.
One allocation for all layers lets swapping and copy-on-write move whole blocks in one call.

Ownership
---------
The cache holds bytes only. Who may write which block is decided by the core's block manager. One extra block behind
the addressable ones is scratch: padding (a negative slot) is written there, so a padded row can never touch a
request's slot, and no host-device synchronisation is needed to find out.

Every slot always holds finite numbers: attention reads whole blocks and masks the part that it must not see, and
0 * NaN would leak through a mask. So the store starts as zeros, and whoever finds a row that produced NaN calls
:meth:`PagedKVCache.clear_slots` on what it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from minillm.core.errors import ConfigError
from minillm.memory import cuda_kv_ops

KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEFAULT_CPU_MEMORY_FRACTION = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """Shape of one KV block; raises :class:`ConfigError` for sizes below 1 or a dtype that is not a float one."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.dtype not in KV_DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in KV_DTYPES)
            raise ConfigError(f"KV cache dtype={self.dtype} must be one of {known}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block in all layers."""
        return self.bytes_per_token * self.block_size

    def blocks_for_tokens(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens of one sequence."""
        return -(-tokens // self.block_size)


def available_memory(device: torch.device | str = "cpu") -> int:
    """Free bytes on `device`; on CPU also bounded by what the process's cgroup (container) may still take."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # no cgroup v2 here: the machine's figure stands
    return free


def default_num_blocks(
    spec: KVCacheSpec,
    *,
    max_num_seqs: int,
    max_model_len: int,
    free_bytes: int | None = None,
    memory_fraction: float = DEFAULT_CPU_MEMORY_FRACTION,
) -> int:
    """Number of KV blocks: what fits `memory_fraction` of free memory, at most `max_num_seqs` full-length sequences.

    `free_bytes` defaults to the CPU's free memory. Raises :class:`ConfigError` when not even one block fits.
    """
    free = available_memory() if free_bytes is None else free_bytes
    budget = int(free * memory_fraction)
    fitting = budget // spec.bytes_per_block
    if fitting < 1:
        raise ConfigError(
            f"KV cache: one block of block_size={spec.block_size} needs {spec.bytes_per_block} bytes, but "
            f"{memory_fraction:.0%} of the free memory is {budget} bytes"
        )
    return min(fitting, max_num_seqs * spec.blocks_for_tokens(max_model_len))


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A zero CPU tensor whose pages become resident only when they are first written.

    `torch.zeros` touches every page, so a pool sized for the worst case would be resident from the start; numpy
    asks the operating system for zero pages instead.
    """
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(*shape)


class PagedKVCache:
    """K and V of all layers in `num_blocks` blocks on one device (see the module's text for layout and rules)."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks={num_blocks} must be at least 1")
        self.spec = spec
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.scratch_block = num_blocks
        shape = (spec.num_layers, 2, num_blocks + 1, spec.num_kv_heads, spec.block_size, spec.head_dim)
        try:
            if self.device.type == "cpu":
                self.store = lazy_zeros(shape, spec.dtype)
            else:
                self.store = torch.zeros(shape, dtype=spec.dtype, device=self.device)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ConfigError(
                f"num_blocks={num_blocks} needs {num_blocks * spec.bytes_per_block} bytes, which the device does not "
                f"have: {error}"
            ) from error
        self.device = self.store.device  # with its index
        heads, size, dim = spec.num_kv_heads, spec.block_size, spec.head_dim
        layers = range(spec.num_layers)
        self._key_slots = [self.store[layer, 0].view(-1, dim) for layer in layers]
        self._value_slots = [self.store[layer, 1].view(-1, dim) for layer in layers]
        self.page_rows = [self.store[layer].view(-1, size * dim) for layer in layers]
        """Per layer [2 * (num_blocks + 1) * num_kv_heads, block_size * head_dim]: the keys of (block, kv_head) are row
        ``block * num_kv_heads + kv_head``, its values `value_row_offset` rows further."""
        self.value_row_offset = (num_blocks + 1) * heads
        self._heads = torch.arange(heads, device=self.device)

    @property
    def num_slots(self) -> int:
        """Tokens that the addressable blocks hold."""
        return self.num_blocks * self.spec.block_size

    def k(self, layer: int) -> Tensor:
        """Keys of `layer`: [num_blocks, num_kv_heads, block_size, head_dim], a view."""
        return self.store[layer, 0, : self.num_blocks]

    def v(self, layer: int) -> Tensor:
        """Values of `layer`: [num_blocks, num_kv_heads, block_size, head_dim], a view."""
        return self.store[layer, 1, : self.num_blocks]

    def slot_rows(self, slot_mapping: Tensor) -> Tensor:
        """Where each (token, KV head) of `slot_mapping` [T] int64 goes: int64 [T, num_kv_heads].

        The same for all layers, so a step computes it once and passes it to :meth:`write_rows`.
        """
        size, heads = self.spec.block_size, self.spec.num_kv_heads
        slots = torch.where(slot_mapping < 0, self.num_slots, slot_mapping)
        block = torch.div(slots, size, rounding_mode="floor")
        first = block * (heads * size) + (slots - block * size)
        return first[:, None] + self._heads * size

    def write_rows(self, layer: int, k: Tensor, v: Tensor, slot_rows: Tensor) -> None:
        """Write k and v [T, num_kv_heads, head_dim] to the rows that :meth:`slot_rows` gave."""
        dtype = self.spec.dtype
        if k.dtype != dtype:
            k, v = k.to(dtype), v.to(dtype)
        index = (slot_rows,)
        self._key_slots[layer].index_put_(index, k)  # unlike index_copy_ it takes the strided views of a packed product
        self._value_slots[layer].index_put_(index, v)

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Write k and v [T, num_kv_heads, head_dim] of T tokens to slots `slot_mapping` [T] int64.

        A negative slot is padding and changes no addressable slot; neither does one behind the pool (IndexError, or
        the scratch block; on a GPU it is skipped).
        """
        if self.device.type == "cuda":
            dtype = self.spec.dtype
            cuda_kv_ops.write_kv(k.to(dtype), v.to(dtype), self.k(layer), self.v(layer), slot_mapping)
            return
        self.write_rows(layer, k, v, self.slot_rows(slot_mapping))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers, for copy-on-write.

        All sources are read before any destination is written. Destinations must differ from each other.
        """
        if not pairs:
            return
        sources = self._block_index([pair[0] for pair in pairs])
        destinations = self._block_index([pair[1] for pair in pairs])
        if self.device.type == "cuda" and not {pair[0] for pair in pairs} & {pair[1] for pair in pairs}:
            cuda_kv_ops.copy_blocks(self.store, torch.stack((sources, destinations), dim=1).int())
            return
        self.store.index_copy_(2, destinations, self.store.index_select(2, sources))

    def clear_slots(self, slot_mapping: Tensor) -> None:
        """Zero the given slots [T] int64 in all layers; negative ones are skipped."""
        slots = slot_mapping[slot_mapping >= 0].to(self.device, non_blocking=True)
        block = torch.div(slots, self.spec.block_size, rounding_mode="floor")
        self.store[:, :, block, :, slots - block * self.spec.block_size] = 0

    def materialize_request_kv(
        self, block_table: Sequence[int] | Tensor, length: int, layer: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Gather one sequence's K and V to contiguous tensors: the reference for everything that reads the pages.

        Returns k, v: [length, num_kv_heads, head_dim], or with `layer=None` [num_layers, length, ...].
        Raises ValueError if the table is shorter than `length` needs.
        """
        blocks = self._block_index(block_table)[: self.spec.blocks_for_tokens(length)]
        if len(blocks) < self.spec.blocks_for_tokens(length):
            raise ValueError(
                f"block table of {len(blocks)} blocks of {self.spec.block_size} is too short for {length} tokens"
            )
        store = self.store if layer is None else self.store[layer : layer + 1]
        pages = store.index_select(2, blocks).transpose(3, 4)  # [layers, 2, blocks, slot, head, dim]
        tokens = pages.reshape(len(store), 2, -1, self.spec.num_kv_heads, self.spec.head_dim)[:, :, :length]
        if layer is not None:
            return tokens[0, 0].contiguous(), tokens[0, 1].contiguous()
        return tokens[:, 0].contiguous(), tokens[:, 1].contiguous()

    def _block_index(self, blocks: Sequence[int] | Tensor) -> Tensor:
        """Block ids as an int64 index on the device; IndexError for an id outside the addressable pool."""
        index = torch.as_tensor(blocks, dtype=torch.int64)
        if (
            index.device.type == "cpu"
            and index.numel()
            and not (0 <= int(index.min()) <= int(index.max()) < self.num_blocks)
        ):
            raise IndexError(f"block ids {index.tolist()} are not all in [0, {self.num_blocks})")
        return index.to(self.device, non_blocking=True)
