"""`minillm bench latency`: time to the first token by prompt length and time per token by batch, beside their floors.

Time to first token: one request alone, from its arrival to its first token, medians of repeats, the prefix cache empty.
Time per token: a batch decodes together; the figure is the median time between the commits of steps that decode the
whole batch and nothing else, which is what a reader of a stream sees. The floor is what the device needs for the bytes
and operations alone (:mod:`minillm.bench.floors`), from ceilings measured in the same run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.bench import common, drawing, floors
from minillm.bench.floors import Limits
from minillm.bench.history import Figure
from minillm.bench.models import open_model
from minillm.bench.program import Cells, Program, Rows, provenance
from minillm.bench.runs import Target, drive, open_target, warm_up
from minillm.bench.workloads import fixed

CPU_BUDGET, GPU_BUDGET = 512, 8192
"""Tokens of a step at most, prefill and decode together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure; lengths in tokens. `context` is the prompt of the decode batches, `output` their steps."""

    model: str
    device: str
    dtype: str = "auto"
    batches: Sequence[int] = (1, 2, 4, 8, 16)
    prompts: Sequence[int] = (32, 128, 512)
    context: int = 128
    output: int = 33
    repeats: int = 5
    seed: int = 0
    cpu_time: bool = False


def measure(options: Options, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One row per prompt length and per batch size."""
    model = open_model(options.model, options.dtype, options.device)
    batch = max(options.batches)
    budget = max(CPU_BUDGET if options.device == "cpu" else GPU_BUDGET, 2 * batch)
    most = options.context + _outputs(options, batch, budget)
    longest = max(max(options.prompts) + 1, most)
    blocks = batch * (-(-most // 16) + 1) + -(-longest // 16)
    limits = floors.measure_limits(model.decoder.device, model.decoder.dtype, cpu_time=options.cpu_time)
    progress(f"ceilings: {limits.bytes_per_second / 1e9:,.1f} GB/s, {limits.flops_per_second / 1e12:,.2f} TFLOP/s")
    with open_target(
        model,
        max_num_seqs=batch,
        max_num_batched_tokens=budget,
        max_model_len=longest,
        num_gpu_blocks_override=blocks,
        swap_space=0.0,
        cpu_time=options.cpu_time,
    ) as target:
        common_columns = {
            "model": target.name,
            "dtype": target.dtype,
            "copy_gbps": round(limits.bytes_per_second / 1e9, 2),
            "matmul_tflops": round(limits.flops_per_second / 1e12, 4),
            "repeats": options.repeats,
            "seed": options.seed,
            "clock": common.clock_name(options.cpu_time),
            **common.environment(target.device_name),
        }
        warm_up(target, requests=min(4, batch), prompt=options.context, output=4)
        rows = []
        for prompt in options.prompts:
            samples = _first_token(target, options, prompt)
            least = _prefill_floor(model.own_decoder, limits, prompt)
            rows.append({"kind": "ttft", "batch": 1, "tokens": prompt, **_columns(samples, least), **common_columns})
            progress(f"first token, prompt {prompt}: {statistics.median(samples) * 1e3:.2f} ms")
        per_token = target.bytes_per_block // target.config.block_size
        for size in options.batches:
            samples = _decode_steps(target, options, size)
            context = options.context + _outputs(options, size, budget) - options.output // 2
            least = floors.decode_bytes(model.own_decoder, size, context, per_token) / limits.bytes_per_second
            row = {"kind": "decode", "batch": size, "tokens": context, **_columns(samples, least)}
            rows.append({**row, **common_columns})
            progress(f"decode, batch {size}: {statistics.median(samples) * 1e3:.2f} ms per step")
    return rows


def _outputs(options: Options, batch: int, budget: int) -> int:
    """Output tokens of each request, so that `options.output` steps decode the whole batch.

    While the last prompts are computed, the first requests decode already: about a token per step of prefill.
    """
    return options.output + math.ceil(batch * options.context / (budget - batch))


def _prefill_floor(decoder: Any, limits: Limits, prompt: int) -> float:
    """Seconds: the longer of reading the weights and doing the products."""
    reading = floors.decode_bytes(decoder, prompt, 0, 0) / limits.bytes_per_second
    return max(reading, floors.prefill_flops(decoder, prompt) / limits.flops_per_second)


def _columns(samples: Sequence[float], floor: float) -> dict[str, Any]:
    median = statistics.median(samples)
    return {
        "samples": len(samples),
        "median_ms": round(median * 1e3, 4),
        "min_ms": round(min(samples) * 1e3, 4),
        "max_ms": round(max(samples) * 1e3, 4),
        "floor_ms": round(floor * 1e3, 4),
        "over_floor": round(median / floor, 3),
    }


def _first_token(target: Target, options: Options, prompt: int) -> list[float]:
    work = fixed(1, prompt, 1, seed=options.seed)
    drive(target, work)
    return [drive(target, work).requests[0].ttft for _ in range(options.repeats)]


def _decode_steps(target: Target, options: Options, batch: int) -> list[float]:
    """Seconds between commits of the steps that decode the whole batch and prefill nothing."""
    outputs = _outputs(options, batch, target.config.max_num_batched_tokens)
    work = fixed(batch, options.context, outputs, seed=options.seed + 1)
    samples: list[float] = []
    for repeat in range(max(1, options.repeats // 2) + 1):
        steps = drive(target, work).steps
        whole = [
            rows == batch and not chunks for rows, chunks in zip(steps.decode_rows, steps.prefill_chunks, strict=True)
        ]
        times = [steps.time[i] - steps.time[i - 1] for i in range(1, len(steps)) if whole[i] and whole[i - 1]]
        if repeat:  # the first is the warm-up
            samples += times
    return samples


def _of(rows: Rows, kind: str) -> Rows:
    return [row for row in rows if row["kind"] == kind]


def tables(rows: Rows) -> dict[str, Cells]:
    """First tokens and decode steps with their floors."""
    row = rows[0]
    what = f"{row['model']}, {row['dtype']}"
    device = f"{row['copy_gbps']} GB/s, {row['matmul_tflops']} TFLOP/s measured; {provenance(rows)}"
    end = ["ms: median (range)", "floor, ms", "measured / floor"]

    def cells(row: dict[str, str]) -> list[str]:
        times = f"{float(row['median_ms']):.2f} ({float(row['min_ms']):.2f}-{float(row['max_ms']):.2f})"
        return [times, f"{float(row['floor_ms']):.3f}", f"{float(row['over_floor']):.2f}"]

    first = [[row["tokens"], *cells(row)] for row in _of(rows, "ttft")]
    decode = [
        [row["batch"], row["tokens"], *cells(row), f"{1e3 * int(row['batch']) / float(row['median_ms']):,.0f}"]
        for row in _of(rows, "decode")
    ]
    return {
        f"Time to first token, {what} ({device})": (["prompt tokens", *end], first),
        f"Time per token by batch, {what}": (["batch", "context", *end, "tok/s"], decode),
    }


def draw(rows: Rows, path: Path) -> None:
    """Measured times and floors: first token by prompt length, token by batch."""
    figure, (left, right) = drawing.pyplot().subplots(1, 2, figsize=(11, 4.2))
    for axes, kind, column, label, title in (
        (left, "ttft", "tokens", "prompt tokens", "Time to first token, one request"),
        (right, "decode", "batch", "batch size (requests)", "Time per token"),
    ):
        chosen = _of(rows, kind)
        x = [int(row[column]) for row in chosen]
        low, mid, high = ([float(row[name]) for row in chosen] for name in ("min_ms", "median_ms", "max_ms"))
        drawing.band(axes, x, low, mid, high, color=drawing.PALETTE[0], label="measured (median, range)")
        floor = [float(row["floor_ms"]) for row in chosen]
        axes.plot(x, floor, ls="--", color=drawing.PALETTE[3], label="floor: bytes and operations alone")
        drawing.ticks(axes, x, label)
        drawing.log_y(axes)
        drawing.grid(axes, title, "milliseconds")
    drawing.save(figure, path, f"{rows[0]['model']}, {rows[0]['dtype']}; {provenance(rows)}")


def figures(rows: Rows) -> list[Figure]:
    """Medians of every row."""
    found = []
    for row in rows:
        name = f"first token, prompt {row['tokens']}" if row["kind"] == "ttft" else f"token, batch {row['batch']}"
        spread = float(row["max_ms"]) - float(row["min_ms"])
        found.append(Figure(name, float(row["median_ms"]), "ms", "lower", spread))
    return found


PROGRAM = Program(
    name="latency",
    title="Latency: first token and token",
    about="One request alone from its arrival to its first token; and batches that decode together, by the time "
    "between the commits of their steps. Each beside its floor: the bytes that must be read (every weight once per "
    "step, the live keys and values) over the measured copy rate, or for a prefill the operations over the rate of "
    "a measured large product, whichever is longer. A ratio of 1 would be perfect.",
    tables=tables,
    plots={"": draw},
    figures=figures,
    settings=lambda rows: f"{rows[0]['model']}, {rows[0]['dtype']}",
)
