"""`minillm bench materialize`: what copying one sequence's K and V out of the pages costs.

Per sequence length: one layer token by token in Python (as the original experiment did), one layer by a gather of
blocks (:meth:`PagedKVCache.materialize_request_kv`), and all layers in one gather. The default shape is that of the
original's reference model, Qwen2.5-0.5B: 24 layers of 2 KV heads, head_dim 64, block size 16, float16.

Before anything is timed, the copies are compared with the pages bit by bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minillm.bench import common
from minillm.bench.attention_batch import AttentionBatch, AttentionShape, WrongResultError
from minillm.bench.attention_paths import copy_tokens
from minillm.bench.paged_attention import LENGTHS, ORIGINAL_SHAPE, TOKEN_LOOP_LIMIT, TOKEN_LOOP_SECONDS
from minillm.bench.timing import PathTime, PathTimer, device_name

Progress = Callable[[str], None]

DEFAULT_LAYERS = 24
PATHS = ("token_loop", "one_layer", "all_layers")


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure."""

    device: torch.device
    shape: AttentionShape = ORIGINAL_SHAPE
    layers: int = DEFAULT_LAYERS
    lengths: Sequence[int] = LENGTHS
    iterations: int = 50
    token_loop_limit: int = TOKEN_LOOP_LIMIT
    seed: int = 0


def measure(options: Options, progress: Progress) -> list[dict[str, Any]]:
    """Rows of the CSV file, one per length; :class:`WrongResultError` before any timing if a copy is wrong."""
    for length in options.lengths:
        check(_batch(options, length), token_loop=length <= options.token_loop_limit)
    progress(f"all copies exact at {len(options.lengths)} lengths")
    timer = PathTimer(options.device)
    where = common.environment(device_name(options.device), ("torch",))
    return [{**_measure_length(options, timer, length, progress), **where} for length in options.lengths]


def _batch(options: Options, length: int) -> AttentionBatch:
    return AttentionBatch(
        options.shape, [1], [length], device=options.device, layers=options.layers, seed=options.seed + length
    )


def check(batch: AttentionBatch, *, token_loop: bool) -> None:
    """Compare every copy with single elements of the pages; raises :class:`WrongResultError`."""
    length, size = batch.context_lens[0], batch.shape.block_size
    table = torch.tensor(batch.tables[0], device=batch.device)
    at = torch.arange(length, device=batch.device)
    k_all, v_all = batch.cache.materialize_request_kv(table, length)
    for layer in sorted({0, batch.layers // 2, batch.layers - 1}):
        expected = [pages[table[at // size], :, at % size] for pages in (batch.k(layer), batch.v(layer))]
        copies = {
            "one layer's gather": batch.cache.materialize_request_kv(table, length, layer),
            "the gather of all layers": (k_all[layer], v_all[layer]),
        }
        if token_loop and layer == 0:
            copies["the token loop"] = copy_tokens(batch, layer)
        for name, copy in copies.items():
            if not all(torch.equal(mine, right) for mine, right in zip(copy, expected, strict=True)):
                raise WrongResultError(f"{name} is wrong at {length} tokens, layer {layer}, and was not timed")


def _measure_length(options: Options, timer: PathTimer, length: int, progress: Progress) -> dict[str, Any]:
    batch = _batch(options, length)
    table = torch.tensor(batch.tables[0], device=batch.device)
    cache, iterations = batch.cache, options.iterations
    times = {
        "one_layer": timer.time(lambda: cache.materialize_request_kv(table, length, 0), iterations),
        "all_layers": timer.time(lambda: cache.materialize_request_kv(table, length), iterations),
    }
    if length <= options.token_loop_limit:
        times["token_loop"] = timer.time(
            lambda: copy_tokens(batch, 0), iterations, warmup=1, max_seconds=TOKEN_LOOP_SECONDS
        )
    shape = options.shape
    row: dict[str, Any] = {
        "context_len": length,
        "layers": options.layers,
        **shape.columns(),
        "iterations": iterations,
        "seed": options.seed,
        "max_error": "0",
    }
    moved = 2 * shape.kv_bytes([length])  # read once, written once
    for name in PATHS:
        timed = times.get(name)
        columns = (timed or PathTime(1, 0, 0, 0, 0, 0)).columns(name)
        row.update(columns if timed else dict.fromkeys(columns, ""))
        bytes_moved = moved * (options.layers if name == "all_layers" else 1)
        row[f"{name}_gbps"] = f"{bytes_moved / timed.median_ms / 1e6:.5g}" if timed else ""
    loop = times.get("token_loop")
    row["speedup_over_token_loop"] = f"{loop.median_ms / times['one_layer'].median_ms:.2f}" if loop else ""
    progress(f"{length:6,} tokens: " + ", ".join(f"{name} {time.median_ms:.4f} ms" for name, time in times.items()))
    return row


def table_cells(rows: Sequence[Mapping[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells of a saved run: medians in milliseconds and GB/s (read plus written)."""
    layers = rows[0]["layers"]
    names = {
        "token_loop": "token loop, 1 layer",
        "one_layer": "gather, 1 layer",
        "all_layers": f"gather, {layers} layers",
    }
    heads = ["tokens"]
    for title in names.values():
        heads += [f"{title}, ms", "GB/s"]
    heads.append("gather over token loop")
    cells = []
    for row in rows:
        line = [f"{int(row['context_len']):,}"]
        for name in names:
            timed = PathTime.from_columns(name, row)
            line += [f"{timed.median_ms:.4f}", f"{float(row[f'{name}_gbps']):,.1f}"] if timed else ["-", "-"]
        line.append(f"{float(row['speedup_over_token_loop']):,.0f}" if row["speedup_over_token_loop"] else "-")
        cells.append(line)
    return heads, cells


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Least-squares line through a path's medians: milliseconds = fixed_ms + us_per_token / 1000 * tokens."""

    path: str
    fixed_ms: float
    us_per_token: float
    r_squared: float


def analyze(rows: Sequence[Mapping[str, str]]) -> list[LinearCost]:
    """The cost per token and per call of each path that was timed at two lengths or more."""
    costs = []
    for path in PATHS:
        points = [
            (int(row["context_len"]), timed.median_ms) for row in rows if (timed := PathTime.from_columns(path, row))
        ]
        if len(points) < 2:
            continue
        tokens, times = zip(*points, strict=True)
        slope, fixed = statistics.linear_regression(tokens, times)
        r = statistics.correlation(tokens, times) if len(set(times)) > 1 else 0.0
        costs.append(LinearCost(path, fixed, slope * 1e3, r * r))
    return costs


def analysis_cells(rows: Sequence[Mapping[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells of :func:`analyze`."""
    heads = ["path", "per call, ms", "per token, us", "r squared"]
    cells = [
        [cost.path.replace("_", " "), f"{cost.fixed_ms:.4f}", f"{cost.us_per_token:.4f}", f"{cost.r_squared:.3f}"]
        for cost in analyze(rows)
    ]
    return heads, cells
