"""`minillm bench pressure`: what preemption costs when the KV pool is a quarter of what the requests need together.

One workload of long prompts runs three ways: with room for all, and with a quarter of the blocks, victims swapped out
or recomputed. With a quarter of the blocks only about a quarter of the requests can run at a time, so steps are shorter
and more; where keys and values are most of what a step reads, that alone costs little, and what is left is the price of
preempting. Greedy tokens must be those of the run with room (in float32; in bfloat16 a batch of another size rounds
otherwise, so the share of equal tokens up to the first difference is reported).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.bench import common, drawing
from minillm.bench.common import Verdict
from minillm.bench.history import Figure
from minillm.bench.models import open_model
from minillm.bench.program import Cells, Program, Rows, provenance
from minillm.bench.runs import drive, open_target
from minillm.bench.workloads import Workload, fixed, uniform
from minillm.core.errors import MiniLLMError

BLOCK_SIZE = 16
ROOMY, SWAP, RECOMPUTE = "room for all", "a quarter, swap", "a quarter, recompute"
LEAST_RATIO = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run; lengths in tokens, drawn evenly.

    Outputs must outgrow what the prompts leave free of the small pool: many prompts of about the same length leave
    little, a few of very different lengths leave so much that nothing is ever preempted.
    """

    model: str
    device: str
    dtype: str = "auto"
    requests: int = 192
    prompt: tuple[int, int] = (2048, 2560)
    output: tuple[int, int] = (160, 304)
    runs: int = 3
    seed: int = 0


class TokensDiffer(MiniLLMError):
    """In float32 a request's tokens depend on whether it was preempted."""


def measure(options: Options, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One row per way and run."""
    model = open_model(options.model, options.dtype, options.device)
    work = uniform(options.requests, options.prompt, options.output, seed=options.seed)
    longest = work.longest
    need = sum(-(-(request.own_tokens + request.max_tokens) // BLOCK_SIZE) for request in work.requests)
    rows: list[dict[str, Any]] = []
    expected: list[list[int]] = []
    for way in (ROOMY, SWAP, RECOMPUTE):
        blocks = need + 2 * options.requests if way == ROOMY else need // 4
        swap_gib = blocks * _block_bytes(model) / (1 << 30) if way == SWAP else 0.0
        with open_target(
            model,
            max_num_seqs=options.requests,
            max_num_batched_tokens=8192,
            max_model_len=longest,
            num_gpu_blocks_override=blocks,
            swap_space=swap_gib,
            preemption_mode="recompute" if way == RECOMPUTE else "swap",
            enable_prefix_caching=False,
            block_size=BLOCK_SIZE,
        ) as target:
            drive(target, _warm_up(options))
            for run in range(options.runs):
                result = drive(target, work)
                expected = expected or result.outputs
                row = {
                    "model": target.name,
                    "dtype": target.dtype,
                    "way": way,
                    "run": run,
                    "blocks": blocks,
                    "workload": work.source,
                    "same_tokens": round(_agreement(expected, result.outputs), 4),
                    **result.figures(),
                    "seed": options.seed,
                    **common.environment(target.device_name),
                }
                if target.dtype == "float32" and row["same_tokens"] < 1:
                    raise TokensDiffer(f"{way}: {row['same_tokens']:.1%} of the tokens are those of the run with room")
                if row["completed"] != options.requests:
                    raise TokensDiffer(f"{way}: {row['completed']} of {options.requests} requests got all their tokens")
                rows.append(row)
                progress(f"{way}, run {run + 1}: {result.throughput:,.0f} output tok/s")
    return rows


def _block_bytes(model: Any) -> int:
    from minillm.runner.pytorch_model_runner import kv_cache_spec

    return kv_cache_spec(model.decoder, BLOCK_SIZE).bytes_per_block


def _warm_up(options: Options) -> Workload:
    return fixed(options.requests, min(64, *options.prompt), min(16, *options.output), seed=options.seed + 1)


def _agreement(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> float:
    """Share of tokens before a request's first difference."""
    same = total = 0
    for wanted, got in zip(expected, found, strict=True):
        total += len(wanted)
        same += next(
            (i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got))
        )
    return same / total


def _of(rows: Rows, way: str) -> Rows:
    return [row for row in rows if row["way"] == way]


def _rate(rows: Rows) -> common.Summary:
    return common.Summary.of([float(row["output_tok_per_s"]) for row in rows])


def _ratio(rows: Rows, way: str) -> float:
    return _rate(_of(rows, way)).median / _rate(_of(rows, ROOMY)).median


def tables(rows: Rows) -> dict[str, Cells]:
    """The three ways."""
    lines = []
    for way in (ROOMY, SWAP, RECOMPUTE):
        mine = _of(rows, way)
        preemptions = statistics.median(
            int(row["preemptions_swap"]) + int(row["preemptions_recompute"]) for row in mine
        )
        lines.append(
            [
                way,
                mine[0]["blocks"],
                _rate(mine).text(",.0f"),
                f"{_ratio(rows, way):.2f}",
                f"{statistics.median(float(row['mean_batch']) for row in mine):.1f}",
                f"{preemptions:.0f}",
                f"{statistics.median(int(row['swapped_bytes']) for row in mine) / 1e9:.2f}",
                f"{statistics.median(int(row['recomputed_tokens']) for row in mine):,.0f}",
                f"{min(float(row['same_tokens']) for row in mine):.1%}",
            ]
        )
    row = rows[0]
    what = f"{row['model']}, {row['dtype']}, {row['workload']}"
    columns = ["pool", "blocks", "output tok/s: median (range)", "of room for all", "mean batch", "preemptions"]
    return {f"{what} ({provenance(rows)})": ([*columns, "swapped, GB", "recomputed tokens", "same tokens"], lines)}


def draw(rows: Rows, path: Path) -> None:
    """Throughput of the three ways."""
    figure, axes = drawing.pyplot().subplots(figsize=(5.6, 3.8))
    ways = (ROOMY, SWAP, RECOMPUTE)
    rates = [_rate(_of(rows, way)) for way in ways]
    spread = [[r.median - r.least for r in rates], [r.greatest - r.median for r in rates]]
    colours = [drawing.PALETTE[number] for number in range(len(ways))]
    axes.bar(range(len(ways)), [r.median for r in rates], yerr=spread, color=colours, capsize=4)
    axes.set_xticks(range(len(ways)), [way.replace(", ", ",\n") for way in ways], fontsize=8)
    drawing.grid(axes, "A KV pool of a quarter", "output tokens per second (median, range)", legend=False)
    drawing.save(figure, path, f"{rows[0]['model']}; {provenance(rows)}")


def figures(rows: Rows) -> list[Figure]:
    """Throughput of each way."""
    found = []
    for way in (ROOMY, SWAP, RECOMPUTE):
        rate = _rate(_of(rows, way))
        found.append(Figure(way, rate.median, "tok/s", "higher", rate.spread))
    return found


def verdicts(rows: Rows) -> list[Verdict]:
    """Preemption must happen, and must not cost more than its share."""
    found = []
    for way, column in ((SWAP, "preemptions_swap"), (RECOMPUTE, "preemptions_recompute")):
        ratio = _ratio(rows, way)
        found.append(Verdict(f"{way}: >= {LEAST_RATIO} of room for all", f"{ratio:.2f}", ratio >= LEAST_RATIO))
        forced = min(int(row[column]) for row in _of(rows, way))
        found.append(Verdict(f"{way}: requests are preempted", f"{forced} in a run", forced > 0))
    return found


PROGRAM = Program(
    name="pressure",
    title="A KV pool of a quarter",
    about="Requests with long prompts, all at once: with room for all of them, and with a quarter of the blocks, "
    "victims swapped out or recomputed. About a quarter of the requests can run at a time then, so a part of the "
    "difference is the smaller batch. `same tokens` is the share of greedy tokens before a request's first difference "
    "from the run with room; in float32 it has to be all.",
    tables=tables,
    plots={"": draw},
    figures=figures,
    settings=lambda rows: f"{rows[0]['model']}, {rows[0]['dtype']}, {rows[0]['workload']}",
    verdicts=verdicts,
)
