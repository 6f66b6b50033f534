"""Captured steps: one CUDA graph for each size, the padded number of rows or, with prompts in the step, of tokens.

A small step is some two hundred short kernels; launched one by one from Python they take longer to launch than to run.
A graph launches all of them in one call. It holds addresses and sizes, so everything that a step reads stays in its
place (:mod:`minillm.attention.cuda_prepare`, :mod:`minillm.runner.short_steps`) and steps are padded to a few sizes.

The first step of a size runs launch by launch, which also lets the libraries load what they need for it; the second is
captured, in 7 ms. All graphs share one memory pool, and hardly need it.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

GRAPH_BYTES = 4 << 20
"""Reserved on the device for each graph: the driver's copy of some 300 kernel launches, of which two graphs took 2 MiB
(H200, 2026-11-29)."""


class Graph(Protocol):
    """A captured step (`torch.cuda.CUDAGraph` is one)."""

    def replay(self) -> None:
        """Launch it on the current stream."""
        ...


Capture = Callable[[Callable[[], None]], Graph]
"""From launches to a graph of them; nothing runs."""


def padded_sizes(max_rows: int) -> list[int]:
    """Numbers of rows to pad decode steps to, ascending, the last one `max_rows`: kernels have room for no more.

    Fine where a product's time follows its rows, 16 apart up to 64, then 32 and 64: a padded row costs hardly more
    than its share of the norms, since it has no keys to read and weights are read once for all rows.
    """
    sizes = [1]
    while sizes[-1] < max_rows:
        last = sizes[-1]
        sizes.append(min(max_rows, last + min(last, 16 if last < 64 else 32 if last < 256 else 64)))
    return sizes


class StepGraphs:
    """Runs steps of the sizes given, captured where they come again.

    `capture` None runs every step launch by launch.
    """

    def __init__(self, sizes: Sequence[int], capture: Capture | None) -> None:
        self.sizes = sizes
        self._capture = capture
        self._graphs: dict[int, Graph] = {}
        self._seen: set[int] = set()

    @property
    def captured(self) -> list[int]:
        """Sizes that have a graph."""
        return sorted(self._graphs)

    @property
    def reserved_bytes(self) -> int:
        """Device memory that the graphs of all sizes may take."""
        return GRAPH_BYTES * len(self.sizes) if self._capture is not None else 0

    def size_for(self, count: int) -> int:
        """The smallest size that holds so many rows (tokens); IndexError if none does."""
        return self.sizes[bisect_left(self.sizes, count)]

    def run(self, size: int, step: Callable[[int], None]) -> None:
        """Run ``step(size)``, which enqueues the same launches each time it is called with this size."""
        graph = self._graphs.get(size)
        if graph is None and self._capture is not None and size in self._seen:
            graph = self._try_capture(self._capture, size, step)
        self._seen.add(size)
        if graph is not None:
            graph.replay()
        else:
            step(size)

    def _try_capture(self, capture: Capture, size: int, step: Callable[[int], None]) -> Graph | None:
        try:
            graph = capture(lambda: step(size))
        except Exception as error:
            logger.warning("steps run without CUDA graphs: capturing size %d failed: %s", size, error)
            self._capture = None
            return None
        self._graphs[size] = graph
        return graph

    def warm_up(self, step: Callable[[int], None]) -> None:
        """Run and capture a step of each size, the largest first; nothing without graphs."""
        for size in reversed(self.sizes):
            for _ in range(2 if self._capture is not None else 0):
                self.run(size, step)

    def forget(self) -> None:
        """Drop the graphs: what they read has moved."""
        self._graphs.clear()
        self._seen.clear()

    def close(self) -> None:
        """Drop the graphs; steps run launch by launch from now on."""
        self._graphs.clear()
        self._capture = None


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all runners of a device: cuBLAS keeps a workspace for every stream that it has seen."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        # That workspace must not come from a graph's memory.
        for dtype in (torch.float32, torch.bfloat16):
            some = torch.zeros((16, 16), dtype=dtype, device=device)
            torch.addmm(some[0], some, some)
            torch.mm(some, some)
    stream.synchronize()
    return stream


def cuda_capture(device: torch.device) -> Capture:
    """Captures on `device`. Other threads may go on using it meanwhile."""
    pool, stream = torch.cuda.graph_pool_handle(), _capture_stream(device)

    def capture(work: Callable[[], None]) -> Any:
        # Not `torch.cuda.graph`: that waits for the device and empties torch's memory cache, once for each graph.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    return capture
