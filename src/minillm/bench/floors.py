"""The least time that a step can take on a device: the bytes that it must read, the products that it must do.

A decode step reads every weight and the live keys and values once; a prefill does two operations per weight and token.
What the device gives at best (a copy, a large product) is measured in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from minillm.models.decoder import Decoder
from minillm.models.linear import CodesLinear, DenseLinear, Linear, OneDnnLinear, RowSwitchLinear

CPU_COPY_BYTES = 256 << 20
CPU_MATMUL_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device gives at best: bytes per second of reading memory, operations per second of a product."""

    bytes_per_second: float
    flops_per_second: float


def measure_limits(device: torch.device, dtype: torch.dtype, *, cpu_time: bool = False) -> Limits:
    """Measure both, on a CPU in its time if so asked. A copy counts bytes read plus bytes written: reading alone can be
    no faster than that.
    """
    if device.type == "cuda":
        from minillm.bench.timing import measure_ceilings

        ceilings = measure_ceilings(device)
        return Limits(ceilings.copy_gbps * 1e9, ceilings.matmul_tflops * 1e12)
    source = torch.empty(CPU_COPY_BYTES, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source)
    clock = time.process_time if cpu_time else time.perf_counter
    copy = _seconds(lambda: target.copy_(source), clock)
    a, b = (torch.randn(CPU_MATMUL_SIZE, CPU_MATMUL_SIZE).to(dtype) for _ in range(2))
    product = _seconds(lambda: torch.mm(a, b), clock)
    return Limits(2 * CPU_COPY_BYTES / copy, 2 * CPU_MATMUL_SIZE**3 / product)


def _seconds(call: Any, clock: Callable[[], float], repeats: int = 7) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append(clock() - start)
    return statistics.median(times)


def linears(decoder: Decoder) -> Iterator[Linear]:
    """Every product of a step, the output head included."""
    for layer in decoder.layers:
        yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
    yield decoder.head


def weight_bytes(linear: Linear, rows: int) -> int:
    """Bytes that the product of `rows` rows with this weight reads."""
    if isinstance(linear, RowSwitchLinear):
        return weight_bytes(linear.codes if rows <= linear.max_rows else linear.many, rows)
    if isinstance(linear, CodesLinear):
        return linear.codes.nbytes + linear.scales_and_zeros.nbytes
    if isinstance(linear, DenseLinear):
        return linear.weight.nbytes
    assert isinstance(linear, OneDnnLinear)
    return linear.in_features * linear.out_features * 2


def decode_bytes(decoder: Decoder, batch: int, context: int, kv_bytes_per_token: int) -> int:
    """Bytes of one decode step: every weight once, and the keys and values of `batch` sequences of `context` tokens."""
    weights = sum(weight_bytes(linear, batch) for linear in linears(decoder))
    return weights + batch * context * kv_bytes_per_token


def prefill_flops(decoder: Decoder, tokens: int) -> float:
    """Operations of a prefill: 2 per weight and token (the head: last token only), and 4 per head element and pair."""
    config = decoder.config
    *layers, head = linears(decoder)
    weights = sum(linear.in_features * linear.out_features for linear in layers)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * tokens * (tokens + 1) / 2
    return 2.0 * weights * tokens + attention + 2.0 * head.in_features * head.out_features
