"""Timing of device work: events, synchronised wall clock, graph replay, and the ceilings of the device.

How a figure is made, on a GPU:

- *events*: before every call a buffer larger than the L2 cache is overwritten, so that each call finds q, K and V in
  device memory (the step's plan and block table are read again behind that, as they are in the cache when a layer
  runs); the host has queued the call by the time that write is done, so the events see device time and not the host's
  launch gaps. (The method of ``triton.testing.do_bench``.)
- *wall clock*: the device is synchronised, the same calls run back to back, the device is synchronised again. This is
  what a caller sees, launches included, with inputs that may lie in the cache.
- *graph replay*: a step of many layers, each with its own inputs, is captured once and replayed. What a serving engine
  does; launch gaps shrink to a microsecond. The caller makes enough layers for their inputs to exceed the L2 cache.

On a CPU the calls are timed by the clock alone, and both figures come from it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.memory.swap_space import timing_events

Call = Callable[[], object]

FLUSH_BYTES = 2 << 30
"""Written before each timed call: many times any L2 cache, and long enough (half a millisecond on an H200) for the host
to queue the call, even a slow one."""

MATMUL_SIZE = 8192


@dataclass(frozen=True, slots=True)
class PathTime:
    """Times of one path, milliseconds per call."""

    iterations: int
    median_ms: float
    mean_ms: float
    min_ms: float
    max_ms: float
    wall_ms: float
    """By the synchronised wall clock, mean over `iterations` calls in a row."""

    @classmethod
    def of(cls, samples_ms: Sequence[float], wall_ms: float) -> PathTime:
        """Summarise at least one sample."""
        return cls(
            len(samples_ms),
            statistics.median(samples_ms),
            statistics.fmean(samples_ms),
            min(samples_ms),
            max(samples_ms),
            wall_ms,
        )

    def columns(self, prefix: str) -> dict[str, str]:
        """CSV columns `<prefix>_iterations`, `_median_ms`, `_mean_ms`, `_min_ms`, `_max_ms`, `_wall_ms`."""
        return {
            f"{prefix}_iterations": str(self.iterations),
            f"{prefix}_median_ms": f"{self.median_ms:.6f}",
            f"{prefix}_mean_ms": f"{self.mean_ms:.6f}",
            f"{prefix}_min_ms": f"{self.min_ms:.6f}",
            f"{prefix}_max_ms": f"{self.max_ms:.6f}",
            f"{prefix}_wall_ms": f"{self.wall_ms:.6f}",
        }

    @classmethod
    def from_columns(cls, prefix: str, row: Mapping[str, str]) -> PathTime | None:
        """The path's times in a CSV row; None where it was not timed."""
        if not row.get(f"{prefix}_median_ms"):
            return None
        names = ("median_ms", "mean_ms", "min_ms", "max_ms", "wall_ms")
        return cls(int(row[f"{prefix}_iterations"]), *(float(row[f"{prefix}_{name}"]) for name in names))


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    from minillm.doctor import cpu_name

    return cpu_name()


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PathTimer:
    """Times calls one path at a time on one device; holds the buffer that empties the cache between calls."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush: Tensor | None = None
        if device.type == "cuda":
            size = min(FLUSH_BYTES, torch.cuda.get_device_properties(device).total_memory // 16)
            self._flush = torch.empty(size // 4, dtype=torch.int32, device=device)

    def time(
        self,
        call: Call,
        iterations: int,
        *,
        prepare: Call | None = None,
        warmup: int = 3,
        max_seconds: float = 10.0,
    ) -> PathTime:
        """Time `iterations` calls, fewer (but at least three) if they would take more than `max_seconds` each way.

        `prepare` runs untimed before each call that events time, behind the write that empties the cache: it brings
        back what a step has just made and is the same for all layers, such as its plan.
        """
        for _ in range(warmup):
            call()
        once = self._wall(call, 1)
        iterations = max(min(iterations, 3), min(iterations, int(max_seconds / max(once / 1e3, 1e-9))))
        if self._flush is None:
            samples = self._host_samples(call, iterations)
        else:
            samples = self._events(call, iterations, self._flush, prepare)
        return PathTime.of(samples, self._wall(call, iterations))

    def _wall(self, call: Call, iterations: int) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(iterations):
            call()
        synchronize(self.device)
        return (time.perf_counter() - start) * 1e3 / iterations

    @staticmethod
    def _host_samples(call: Call, iterations: int) -> list[float]:
        samples = []
        for _ in range(iterations):
            start = time.perf_counter()
            call()
            samples.append((time.perf_counter() - start) * 1e3)
        return samples

    def _events(self, call: Call, iterations: int, flush: Tensor, prepare: Call | None) -> list[float]:
        pairs = [timing_events() for _ in range(iterations)]
        for start, end in pairs:
            flush.zero_()
            if prepare is not None:
                prepare()
            start.record()
            call()
            end.record()
        synchronize(self.device)
        return [start.elapsed_time(end) for start, end in pairs]


class StepGraph:
    """Calls (one per layer) captured in one CUDA graph, which keeps them, and so the memory that they use, alive."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.num_calls = len(calls)
        self._calls = calls
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # capture wants everything lazy (modules, workspaces, plans) to exist
            for call in calls:
                call()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Not `with torch.cuda.graph(...)`: it collects garbage and empties the allocator's cache, seconds for a table.
        with torch.cuda.stream(side):
            self._graph.capture_begin()
            try:
                for call in calls:
                    call()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)

    def replay(self) -> None:
        """Queue one replay."""
        self._graph.replay()


@dataclass(frozen=True, slots=True)
class ReplayTime:
    """Microseconds per call within a graph: median, least and greatest of the rounds, and by the wall clock."""

    rounds: int
    median_us: float
    min_us: float
    max_us: float
    wall_us: float


def time_graphs(graphs: Mapping[str, StepGraph], rounds: int) -> dict[str, ReplayTime]:
    """Replay all graphs `rounds` times, interleaved: each round runs every one, starting one further than the last.

    A device that changes its clock during the run then does so for all. An untimed round comes first; nothing
    synchronises between the timed replays, so the device never waits for the host.
    """
    names = list(graphs)
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
    for graph in graphs.values():
        graph.replay()
        torch.cuda.synchronize()
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start, end = timing_events()
            start.record()
            graphs[name].replay()
            end.record()
            pairs[name].append((start, end))
    torch.cuda.synchronize()
    times = {}
    for name, graph in graphs.items():
        samples = [start.elapsed_time(end) * 1e3 / graph.num_calls for start, end in pairs[name]]
        begin = time.perf_counter()
        for _ in range(rounds):
            graph.replay()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - begin) * 1e6 / (rounds * graph.num_calls)
        times[name] = ReplayTime(rounds, statistics.median(samples), min(samples), max(samples), wall)
    return times


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device gives at best in this run."""

    copy_gbps: float
    """GB/s of a device-to-device copy, bytes read plus bytes written."""
    matmul_tflops: float
    """TFLOP/s of torch's bf16 product of 8192 cubed, random data."""


def l2_bytes(device: torch.device) -> int:
    """Size of the L2 cache; 64 MiB where torch does not say."""
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))


CACHE_FACTOR = 3
"""Inputs of a replayed step's layers exceed the L2 cache this many times."""
MIN_LAYERS = 3


def step_layers(layer_bytes: int, device: torch.device) -> int:
    """Layers of a step whose inputs, `layer_bytes` each, exceed the L2 cache of `device` :data:`CACHE_FACTOR` times."""
    return max(MIN_LAYERS, math.ceil(CACHE_FACTOR * l2_bytes(device) / layer_bytes))


def measure_ceilings(device: torch.device, repeats: int = 20) -> Ceilings:
    """Measure both, medians of `repeats`."""
    copy_gbps = _copy_gbps(device, repeats)
    torch.cuda.empty_cache()
    return Ceilings(copy_gbps, _matmul_tflops(device, repeats))


def _copy_gbps(device: torch.device, repeats: int) -> float:
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_ms(lambda: target.copy_(source), repeats) / 1e6


def _matmul_tflops(device: torch.device, repeats: int) -> float:
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * MATMUL_SIZE**3 / _median_ms(lambda: torch.mm(a, b, out=out), repeats) / 1e9


def _median_ms(call: Call, repeats: int) -> float:
    for _ in range(3):
        call()
    pairs = [timing_events() for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)
