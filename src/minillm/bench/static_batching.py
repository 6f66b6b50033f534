"""`minillm bench static`: classic static batching of a real model, by batch size and dtype.

All requests of a batch come at once, with equal prompts and outputs, and the static scheduler runs them together from
the first step to the last: the simplest serving loop there is, and the baseline of the original work. Batch sizes take
turns in rounds. Before anything is timed, in float32 a request must give the same tokens in every batch size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.bench import common, drawing
from minillm.bench.history import Figure
from minillm.bench.models import open_model
from minillm.bench.program import Cells, Program, Rows, provenance
from minillm.bench.runs import Target, drive, open_target
from minillm.bench.workloads import fixed
from minillm.core.errors import MiniLLMError

if TYPE_CHECKING:
    from minillm.models.loader import LoadedModel

BATCHES = (1, 2, 4, 8, 16)
TIES = 0.1
"""Share of requests whose float32 tokens may differ between batch sizes: ties within rounding are no errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure; lengths in tokens."""

    model: str
    device: str
    dtypes: Sequence[str]
    batches: Sequence[int] = BATCHES
    prompt: int = 64
    output: int = 32
    repeats: int = 5
    seed: int = 0
    cpu_time: bool = False


class BatchError(MiniLLMError):
    """A request's tokens depend on the batch that it is in: nothing may be timed."""


def measure(options: Options, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One row per dtype, batch size and repeat."""
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        rows += _measure_dtype(options, dtype, progress)
    return rows


def _measure_dtype(options: Options, dtype: str, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    model = open_model(options.model, dtype, options.device)
    targets = {batch: _target(model, options, batch) for batch in options.batches}
    try:
        first = next(iter(targets.values()))
        where = common.environment(first.device_name)
        outputs = {batch: _run(target, options, batch).outputs for batch, target in targets.items()}  # the warm-up
        same = _agreement(outputs)
        if first.dtype == "float32" and same < 1 - TIES:
            raise BatchError(f"{dtype}: only {same:.0%} of requests give the same tokens in every batch size")
        rows = []
        for repeat in range(options.repeats):
            for batch, target in targets.items():
                result = _run(target, options, batch)
                steps = result.steps
                decode = [b - a for a, b in zip(steps.time, steps.time[1:], strict=False)]
                rows.append(
                    {
                        "model": target.name,
                        "dtype": dtype,
                        "batch": batch,
                        "prompt": options.prompt,
                        "output": options.output,
                        "repeat": repeat,
                        "seed": options.seed,
                        "clock": common.clock_name(options.cpu_time),
                        "seconds": round(result.seconds, 6),
                        "output_tok_per_s": round(result.throughput, 2),
                        "ttft_ms": round(1e3 * statistics.fmean(r.ttft for r in result.requests), 4),
                        "decode_step_ms": round(1e3 * statistics.median(decode), 4) if decode else "",
                        "steps": len(steps),
                        "same_tokens": round(same, 4),
                        **where,
                    }
                )
            progress(f"{dtype}, round {repeat + 1} of {options.repeats}")
        return rows
    finally:
        for target in targets.values():
            target.engine.close()


def _target(model: LoadedModel, options: Options, batch: int) -> Target:
    longest = options.prompt + options.output
    return open_target(
        model,
        scheduler="static",
        max_num_seqs=batch,
        max_num_batched_tokens=batch * options.prompt,
        max_model_len=longest,
        num_gpu_blocks_override=batch * (-(-longest // 16) + 1),
        swap_space=0.0,
        enable_prefix_caching=False,
        cpu_time=options.cpu_time,
    )


def _run(target: Target, options: Options, batch: int) -> Any:
    return drive(target, fixed(batch, options.prompt, options.output, seed=options.seed), concurrency=batch)


def _agreement(outputs: dict[int, list[list[int]]]) -> float:
    """Share of (request, batch size) whose tokens are those of the same request in the largest batch."""
    reference = outputs[max(outputs)]
    pairs = [(ids, reference[i]) for made in outputs.values() for i, ids in enumerate(made)]
    return sum(a == b for a, b in pairs) / len(pairs)


def _groups(rows: Rows, dtype: str) -> dict[int, Rows]:
    groups: dict[int, Rows] = {}
    for row in rows:
        if row["dtype"] == dtype:
            groups.setdefault(int(row["batch"]), []).append(row)
    return groups


def _summary(rows: Rows, column: str) -> common.Summary:
    return common.Summary.of([float(row[column]) for row in rows if row[column]])


def tables(rows: Rows) -> dict[str, Cells]:
    """One table per dtype: rates, times to the first token, times of a step, and what batching gains."""
    made: dict[str, Cells] = {}
    columns = ["batch", "output tok/s: median (range)", "times batch of one", "TTFT, ms", "decode step, ms", "same"]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        lines = []
        groups = _groups(rows, dtype)
        one = _summary(groups[min(groups)], "output_tok_per_s").median
        for batch, group in groups.items():
            rate = _summary(group, "output_tok_per_s")
            step = _summary(group, "decode_step_ms") if group[0]["decode_step_ms"] else None
            lines.append(
                [
                    str(batch),
                    rate.text(),
                    f"{rate.median / one:.2f}",
                    _summary(group, "ttft_ms").text(".2f"),
                    step.text(".2f") if step else "-",
                    f"{float(group[0]['same_tokens']):.0%}",
                ]
            )
        row = rows[0]
        sizes = f"prompt {row['prompt']}, output {row['output']}, {len(next(iter(groups.values())))} repeats"
        made[f"{row['model']}, {dtype}: {sizes} ({provenance(rows)})"] = (columns, lines)
    return made


def draw(rows: Rows, path: Path) -> None:
    """Tokens per second and time of a decode step, by batch size, one curve per dtype."""
    figure, (left, right) = drawing.pyplot().subplots(1, 2, figsize=(11, 4.2))
    for number, dtype in enumerate(dict.fromkeys(row["dtype"] for row in rows)):
        groups = _groups(rows, dtype)
        for axes, column in ((left, "output_tok_per_s"), (right, "decode_step_ms")):
            found = {batch: _summary(group, column) for batch, group in groups.items() if group[0][column]}
            values = list(found.values())
            drawing.band(
                axes,
                list(found),
                [s.least for s in values],
                [s.median for s in values],
                [s.greatest for s in values],
                color=drawing.PALETTE[number],
                label=dtype,
            )
    batches = sorted({int(row["batch"]) for row in rows})
    for axes, title, label in (
        (left, "Throughput", "output tokens per second (median, range)"),
        (right, "Time per decode step", "ms per step (median, range)"),
    ):
        drawing.ticks(axes, batches, "batch size (requests)")
        axes.set_ylim(bottom=0)
        drawing.grid(axes, title, label)
    row = rows[0]
    sizes = f"prompt {row['prompt']}, output {row['output']} tokens"
    drawing.save(figure, path, f"Static batching, {row['model']}, {sizes}; {provenance(rows)}")


def figures(rows: Rows) -> list[Figure]:
    """Median tokens per second of each dtype and batch size."""
    found = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for batch, group in _groups(rows, dtype).items():
            rate = _summary(group, "output_tok_per_s")
            found.append(Figure(f"{dtype}, batch {batch}", rate.median, "tok/s", "higher", rate.spread))
    return found


PROGRAM = Program(
    name="static",
    title="Static batching",
    about="A batch is formed, runs from the first step to the last, and ends together: equal prompts and outputs, so "
    "nothing is lost to requests of different lengths and the figures show what batching itself gains. Batch sizes "
    "take turns in rounds, after a warm-up round; `same` is the share of requests whose tokens do not depend on the "
    "batch size (in float32 it is a condition for timing).",
    tables=tables,
    plots={"": draw},
    figures=figures,
    settings=lambda rows: f"{rows[0]['model']}, {rows[0]['prompt']} in, {rows[0]['output']} out",
)
