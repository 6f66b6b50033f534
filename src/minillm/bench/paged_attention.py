"""`minillm bench paged-attention`: attention straight from the pages against materialise-then-attend.

One sequence, one layer, one decode step per call, at the shape of the original experiment unless told otherwise
(2 heads, head_dim 64, block size 16, float16). The original copied K and V out of the pages token by token in Python
before it attended; that baseline is kept (`token_loop`), and a fair one is beside it (`gather`: one gather of blocks
each for K and V). Attention over K and V that were never paged (`contiguous`) shows what paging costs at all.

Every path passes the correctness gate at every length before anything is timed; a wrong path ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from minillm.bench import common
from minillm.bench.attention_batch import AttentionBatch, AttentionShape, Error, gate, worst
from minillm.bench.attention_paths import AttentionPath, Contiguous, Gather, Simple, TokenLoop, direct_path
from minillm.bench.common import Verdict
from minillm.bench.timing import PathTime, PathTimer, StepGraph, device_name, step_layers, time_graphs

Progress = Callable[[str], None]

ORIGINAL_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
LENGTHS = (*ORIGINAL_LENGTHS, 8192, 16384, 32768)
ORIGINAL_SHAPE = AttentionShape(num_heads=2, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16)
TOKEN_LOOP_LIMIT = 4096
"""Tokens up to which the token loop is timed: it takes about 10 us per token and tensor."""
TOKEN_LOOP_SECONDS = 0.25
"""At most, for each of its two figures by events and by the clock."""

REPLAY_ROUNDS = 10

TOKEN_LOOP_SPEEDUP = 166.0
"""What the project asks for at 4,096 tokens: the original's own ratio on an A10G."""

PATHS = ("token_loop", "gather", "contiguous", "simple", "direct")


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure."""

    device: torch.device
    shape: AttentionShape = ORIGINAL_SHAPE
    lengths: Sequence[int] = LENGTHS
    iterations: int = 100
    token_loop_limit: int = TOKEN_LOOP_LIMIT
    seed: int = 0


def measure(options: Options, progress: Progress) -> list[dict[str, Any]]:
    """Rows of the CSV file, one per length; :class:`WrongResultError` before any timing if a path is wrong."""
    errors = {}
    for length in options.lengths:
        batch = _batch(options, length)
        errors[length] = worst([_gate(path, batch) for path in _paths(options, batch)])
    progress(f"all paths correct at {len(options.lengths)} lengths")
    timer = PathTimer(options.device)
    where = common.environment(device_name(options.device), ("torch",))
    return [
        {**_measure_length(options, timer, length, errors[length], progress), **where} for length in options.lengths
    ]


def _batch(options: Options, length: int) -> AttentionBatch:
    return AttentionBatch(options.shape, [1], [length], device=options.device, seed=options.seed + length)


def _paths(options: Options, batch: AttentionBatch) -> list[AttentionPath]:
    paths: list[AttentionPath] = [Gather(batch), Contiguous(batch), direct_path(batch)]
    if batch.context_lens[0] <= options.token_loop_limit:
        paths.append(TokenLoop(batch))
    if batch.device.type == "cuda":
        paths.append(Simple(batch))
    return paths


def _gate(path: AttentionPath, batch: AttentionBatch) -> Error:
    return gate(path.name, path.run(0), batch.reference(0), batch.shape.dtype)


def _measure_length(
    options: Options, timer: PathTimer, length: int, error: Error, progress: Progress
) -> dict[str, Any]:
    batch = _batch(options, length)
    gather, iterations = Gather(batch), options.iterations
    direct = direct_path(batch)
    times: dict[str, PathTime] = {
        "direct": _time(timer, direct, iterations),
        "contiguous": _time(timer, Contiguous(batch), iterations),
        "gather": _time(timer, gather, iterations),
        "gather_copy": timer.time(lambda: gather.materialize(0), iterations, prepare=gather.prepare),
    }
    if options.device.type == "cuda":
        times["simple"] = _time(timer, Simple(batch), iterations)
    if length <= options.token_loop_limit:
        loop, limit = TokenLoop(batch), TOKEN_LOOP_SECONDS
        times["token_loop"] = timer.time(lambda: loop.run(0), iterations, warmup=1, max_seconds=limit)
        times["token_loop_copy"] = timer.time(lambda: loop.materialize(0), iterations, warmup=1, max_seconds=limit)
    row: dict[str, Any] = {
        "context_len": length,
        "batch": 1,
        "layers": 1,
        **options.shape.columns(),
        "iterations": iterations,
        "seed": options.seed,
        "direct_path": direct.name,
    }
    for name in ("token_loop", "token_loop_copy", "gather", "gather_copy", "contiguous", "simple", "direct"):
        row.update(times[name].columns(name) if name in times else _blank(name))
    row.update(_derived(options.shape.kv_bytes([length]), times))
    row.update(_replay_columns(options, length))
    row["max_relative_error"] = f"{error.relative:.3e}"
    row["max_row_error"] = f"{error.worst_row:.3e}"
    row["max_abs_error"] = f"{error.absolute:.3e}"
    progress(f"{length:6,} tokens: " + ", ".join(f"{name} {time.median_ms:.4f} ms" for name, time in times.items()))
    return row


def _time(timer: PathTimer, path: AttentionPath, iterations: int) -> PathTime:
    return timer.time(lambda: path.run(0), iterations, prepare=path.prepare)


def _replay_columns(options: Options, length: int) -> dict[str, str]:
    """Microseconds per layer by graph replay of a step whose layers exceed the cache together; blank on a CPU."""
    names = ("direct", "contiguous", "gather")
    if options.device.type != "cuda":
        return dict.fromkeys([f"{name}_replay_us" for name in names] + ["layers_replayed"], "")
    layers = step_layers(options.shape.kv_bytes([length]), options.device)
    batch = AttentionBatch(options.shape, [1], [length], device=options.device, layers=layers, seed=options.seed)
    paths: dict[str, AttentionPath] = {
        "direct": direct_path(batch),
        "contiguous": Contiguous(batch),
        "gather": Gather(batch),
    }
    for path in paths.values():
        _gate(path, batch)
    graphs = {name: StepGraph([partial(path.run, layer) for layer in range(layers)]) for name, path in paths.items()}
    times = time_graphs(graphs, REPLAY_ROUNDS)
    columns = {f"{name}_replay_us": f"{times[name].median_us:.3f}" for name in names}
    return {**columns, "layers_replayed": str(layers)}


def _blank(prefix: str) -> dict[str, str]:
    return dict.fromkeys(PathTime(1, 0, 0, 0, 0, 0).columns(prefix), "")


def _derived(kv_bytes: int, times: Mapping[str, PathTime]) -> dict[str, str]:
    """Ratios of medians: speed-ups of the direct path, the copies' share of materialise-then-attend, GB/s of K/V."""

    def over_direct(name: str) -> str:
        return f"{times[name].median_ms / times['direct'].median_ms:.5g}" if name in times else ""

    def share(name: str) -> str:
        return f"{times[name + '_copy'].median_ms / times[name].median_ms:.5g}" if name in times else ""

    return {
        "speedup_over_token_loop": over_direct("token_loop"),
        "speedup_over_gather": over_direct("gather"),
        "speedup_over_contiguous": over_direct("contiguous"),
        "token_loop_copy_share": share("token_loop"),
        "gather_copy_share": share("gather"),
        "direct_gbps": f"{kv_bytes / times['direct'].median_ms / 1e6:.5g}",
        "contiguous_gbps": f"{kv_bytes / times['contiguous'].median_ms / 1e6:.5g}",
    }


def verdicts(rows: Sequence[Mapping[str, str]]) -> list[Verdict]:
    """What the project asks of the experiment, judged on its rows; nothing of a run on a CPU."""
    if rows[0]["direct_path"] == "cpu":
        return []
    found = []
    for row in rows:
        if row["context_len"] == "4096" and row["speedup_over_token_loop"]:
            ratio = float(row["speedup_over_token_loop"])
            text = f"over the token loop at 4,096 tokens, above {TOKEN_LOOP_SPEEDUP:.0f} times"
            found.append(Verdict(text, f"{ratio:,.0f} times", ratio > TOKEN_LOOP_SPEEDUP))
    found_ratios = {"events": {row["context_len"]: float(row["speedup_over_contiguous"]) for row in rows}}
    if rows[0].get("direct_replay_us"):
        found_ratios["graph replay"] = {row["context_len"]: _replay_ratio(row, "contiguous") for row in rows}
    for how, ratios in found_ratios.items():
        length = min(ratios, key=lambda key: ratios[key])
        text = f"never slower than torch's attention on contiguous K and V, by {how}"
        found.append(Verdict(text, f"{ratios[length]:.2f} times at {int(length):,} tokens", ratios[length] >= 1.0))
    return found


def _replay_ratio(row: Mapping[str, str], path: str) -> float:
    return float(row[f"{path}_replay_us"]) / float(row["direct_replay_us"])


def table_cells(rows: Sequence[Mapping[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells of a saved run: medians in milliseconds (device time) and the ratios."""
    timed = [name for name in PATHS if any(PathTime.from_columns(name, row) for row in rows)]
    replayed = bool(rows[0].get("direct_replay_us"))
    heads = ["tokens", *(f"{name.replace('_', ' ')}, ms" for name in timed)]
    heads += ["over token loop", "over gather", "over contiguous", "gather's copy", "GB/s", "error"]
    if replayed:
        heads += ["replay: direct, us", "contiguous, us", "over contiguous"]
    cells = []
    for row in rows:
        times = [PathTime.from_columns(name, row) for name in timed]
        line = [f"{int(row['context_len']):,}", *(f"{time.median_ms:.4f}" if time else "-" for time in times)]
        for name in ("token_loop", "gather", "contiguous"):
            value = row[f"speedup_over_{name}"]
            line.append(f"{float(value):,.2f}" if value else "-")
        line.append(f"{float(row['gather_copy_share']):.0%}")
        line.append(f"{float(row['direct_gbps']):,.1f}")
        line.append(f"{float(row['max_relative_error']):.1e}")
        if replayed:
            line += [f"{float(row[f'{name}_replay_us']):.2f}" for name in ("direct", "contiguous")]
            line.append(f"{_replay_ratio(row, 'contiguous'):.2f}")
        cells.append(line)
    return heads, cells


def provenance(rows: Sequence[Mapping[str, str]]) -> str:
    """Shape, device, versions, commit and date of the rows."""
    row = rows[0]
    return (
        f"{row['num_heads']}/{row['num_kv_heads']} heads, head_dim {row['head_dim']}, block size {row['block_size']}, "
        f"{row['dtype']}, {row['iterations']} iterations; {row['device']}, torch {row['torch']}, "
        f"commit {row['commit']}, {row['date']}"
    )
