"""`minillm bench swap`: KV blocks between the device and host memory, against a plain copy and beside computing.

Blocks are scattered over the pool, slots are consecutive, as in the runtime. The default is 256 blocks of Llama-3.1-8B
(32 layers, 8 KV heads, head_dim 128, block size 16, bfloat16: 2 MiB a block, 512 MiB in all). Three figures each way:

- the swap by itself, timed by the events of its own stream;
- a plain copy of the same number of bytes between one contiguous device tensor and one page-locked host tensor: what
  the bus gives;
- the swap while the compute stream multiplies matrices: how much longer the two take together than the longer of them.

Content is checked first: what was swapped out and in again must be equal bit by bit, in other blocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from minillm.bench import common
from minillm.bench.attention_batch import WrongResultError, dtype_name
from minillm.bench.common import Verdict
from minillm.bench.timing import device_name
from minillm.memory.paged_kv_cache import KVCacheSpec, PagedKVCache
from minillm.memory.swap_space import SwapCopy, SwapSpace, timing_events

Progress = Callable[[str], None]

LLAMA_8B = KVCacheSpec(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16)
BLOCK_COUNTS = (16, 64, 256)
MATMUL_SIZE = 4096
REQUIRED_GBPS, REQUIRED_SHARE = 40.0, 0.8
"""What the project asks of 256 blocks, each way: this rate, or this share of the plain copy in the same run."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure."""

    device: torch.device
    spec: KVCacheSpec = LLAMA_8B
    blocks: Sequence[int] = BLOCK_COUNTS
    repeats: int = 10
    seed: int = 0


class _Setup:
    """A pool with three times the blocks that are moved, its swap space, and both block lists of the round trip."""

    def __init__(self, options: Options, count: int) -> None:
        generator = torch.Generator(options.device).manual_seed(options.seed)
        self.cache = PagedKVCache(options.spec, 3 * count, options.device)
        self.cache.store.normal_(generator=generator)
        self.space = SwapSpace(self.cache, count)
        ids = list(range(3 * count))
        Random(options.seed).shuffle(ids)
        self.sources, self.targets = ids[:count], ids[count : 2 * count]
        self.slots = list(range(count))

    def out(self) -> SwapCopy:
        """Device to host."""
        return self.space.swap_out(self.sources, self.slots)

    def back(self) -> SwapCopy:
        """Host to device, to other blocks."""
        return self.space.swap_in(self.slots, self.targets)

    def check(self) -> None:
        """One round trip; raises :class:`WrongResultError` unless every bit arrives."""
        self.out()
        self.back()
        source, target = (torch.tensor(ids, device=self.cache.device) for ids in (self.sources, self.targets))
        store = self.cache.store
        if not torch.equal(store.index_select(2, source), store.index_select(2, target)):
            raise WrongResultError("swapped blocks differ after a round trip, so swapping was not timed")


def measure(options: Options, progress: Progress) -> list[dict[str, Any]]:
    """Rows of the CSV file: one per number of blocks and direction."""
    where = common.environment(device_name(options.device), ("torch",))
    rows: list[dict[str, Any]] = []
    for count in options.blocks:
        setup = _Setup(options, count)
        setup.check()
        for direction, swap in (("out", setup.out), ("in", setup.back)):
            figures = _figures(swap, direction, options, count * options.spec.bytes_per_block)
            progress(
                f"{count} blocks {direction}: {figures['swap_gbps']} GB/s, plain copy {figures['plain_gbps']} GB/s"
            )
            rows.append({"blocks": count, "direction": direction, **_shape_columns(options), **figures, **where})
        del setup
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _shape_columns(options: Options) -> dict[str, Any]:
    spec = options.spec
    return {
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "block_size": spec.block_size,
        "dtype": dtype_name(spec.dtype),
        "repeats": options.repeats,
        "seed": options.seed,
    }


def _figures(swap: Callable[[], SwapCopy], direction: str, options: Options, size: int) -> dict[str, Any]:
    swap().seconds()
    seconds = [swap().seconds() for _ in range(options.repeats)]
    plain = _plain_copy_seconds(direction, options, size)
    figures = {
        "bytes": size,
        "swap_median_ms": f"{statistics.median(seconds) * 1e3:.4f}",
        "swap_min_ms": f"{min(seconds) * 1e3:.4f}",
        "swap_max_ms": f"{max(seconds) * 1e3:.4f}",
        "swap_gbps": f"{size / statistics.median(seconds) / 1e9:.2f}",
        "plain_gbps": f"{size / plain / 1e9:.2f}",
        "share_of_plain": f"{plain / statistics.median(seconds):.3f}",
    }
    overlap = ("", "", "", "")
    if options.device.type == "cuda":
        overlap = _overlap(swap, options, compute_first=direction == "in")
    names = ("compute_ms", "compute_and_swap_ms", "swap_beside_compute_ms", "hidden_share")
    return {**figures, **dict(zip(names, overlap, strict=True))}


def _plain_copy_seconds(direction: str, options: Options, size: int) -> float:
    """Median seconds of one copy between contiguous memory, page-locked where there is a GPU."""
    on_gpu = options.device.type == "cuda"
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
    device = torch.zeros(size, dtype=torch.uint8, device=options.device)
    source, target = (device, host) if direction == "out" else (host, device)
    target.copy_(source)
    seconds = []
    for _ in range(options.repeats):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _overlap(swap: Callable[[], SwapCopy], options: Options, *, compute_first: bool) -> tuple[str, str, str, str]:
    """Milliseconds of compute alone, of both together, of the swap beside it, and the share of the swap hidden.

    The compute is about twice as long as the swap, so a swap that runs beside it costs nothing: hidden share 1. A swap
    out is queued before the compute (whose blocks it frees), a swap in behind the compute that it does not concern.
    """
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=options.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    alone = swap().seconds()
    products = max(4, int(2 * alone / _matmul_seconds(a, b, out, 8)))
    compute = statistics.median(_matmul_seconds(a, b, out, products) * products for _ in range(3))
    together, beside = [], []
    for _ in range(options.repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy = None if compute_first else swap()
        for _ in range(products):
            torch.mm(a, b, out=out)
        copy = copy or swap()
        torch.cuda.synchronize()
        together.append(time.perf_counter() - start)
        beside.append(copy.seconds())
    both = statistics.median(together)
    hidden = 1 - max(0.0, both - compute) / alone
    return f"{compute * 1e3:.4f}", f"{both * 1e3:.4f}", f"{statistics.median(beside) * 1e3:.4f}", f"{hidden:.3f}"


def _matmul_seconds(a: Tensor, b: Tensor, out: Tensor, products: int) -> float:
    """Seconds of one product, mean of `products` in a row, by events."""
    torch.mm(a, b, out=out)
    start, end = timing_events()
    start.record()
    for _ in range(products):
        torch.mm(a, b, out=out)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / products


def verdicts(rows: Sequence[Mapping[str, str]]) -> list[Verdict]:
    """What the project asks of swapping 256 blocks, judged on saved rows."""
    found = []
    for row in rows:
        if row["blocks"] != "256":
            continue
        rate, share = float(row["swap_gbps"]), float(row["share_of_plain"])
        text = f"256 blocks {row['direction']}: {REQUIRED_GBPS:.0f} GB/s or {REQUIRED_SHARE:.0%} of a plain copy"
        met = rate >= REQUIRED_GBPS or share >= REQUIRED_SHARE
        found.append(Verdict(text, f"{rate:.1f} GB/s, {share:.0%}", met))
    return found


def table_cells(rows: Sequence[Mapping[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells of a saved run."""
    heads = ["blocks", "direction", "MiB", "ms", "GB/s", "plain copy, GB/s", "share of plain", "hidden behind compute"]
    cells = [
        [
            row["blocks"],
            row["direction"],
            f"{int(row['bytes']) / 2**20:,.0f}",
            f"{float(row['swap_median_ms']):.2f}",
            f"{float(row['swap_gbps']):.1f}",
            f"{float(row['plain_gbps']):.1f}",
            f"{float(row['share_of_plain']):.0%}",
            f"{float(row['hidden_share']):.0%}" if row["hidden_share"] else "-",
        ]
        for row in rows
    ]
    return heads, cells


def provenance(rows: Sequence[Mapping[str, str]]) -> str:
    """Shape, device, versions, commit and date of the rows."""
    row = rows[0]
    return (
        f"{row['num_layers']} layers, {row['num_kv_heads']} KV heads, head_dim {row['head_dim']}, block size "
        f"{row['block_size']}, {row['dtype']}; {row['device']}, torch {row['torch']}, commit {row['commit']}, "
        f"{row['date']}"
    )
