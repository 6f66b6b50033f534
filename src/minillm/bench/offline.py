"""`minillm bench offline`: the public offline workload of nano-vllm and mini-sglang, all requests at once.

256 requests of 100-1024 prompt and 100-1024 output tokens, `random.seed(0)`, temperature 0.6, end-of-sequence ignored:
133,966 output tokens. The figure is output tokens per second, from the first step to the last commit, prompts' tokens
ready. A warm-up run comes first. On a CPU the lengths are cut (see --scale), which makes it another workload: the
settings say so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.bench import common, drawing
from minillm.bench.history import Figure
from minillm.bench.models import open_model
from minillm.bench.program import Cells, Program, Rows, provenance
from minillm.bench.recording import RunResult
from minillm.bench.runs import drive, open_target, warm_up
from minillm.bench.workloads import Workload
from minillm.bench.workloads import offline as offline_workload

POINTS = 400
"""Points of the curves over time that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run; `max_prompt` and `max_output` cut lengths (tokens)."""

    model: str
    device: str
    dtype: str = "auto"
    requests: int = 256
    max_prompt: int | None = None
    max_output: int | None = None
    max_num_seqs: int = 256
    repeats: int = 1
    seed: int = 0
    cpu_time: bool = False


def workload_of(options: Options) -> Workload:
    """The public workload with the options' limits."""
    whole = offline_workload(options.requests, options.seed)
    if options.max_prompt is None and options.max_output is None:
        return whole
    return whole.limited(max_prompt=options.max_prompt, max_output=options.max_output)


def measure(options: Options, progress: Callable[[str], None] = print) -> tuple[list[dict[str, Any]], RunResult]:
    """One row per repeat, and the last run whole."""
    workload = workload_of(options)
    longest = workload.longest
    model = open_model(options.model, options.dtype, options.device)
    rows = []
    with open_target(
        model,
        max_num_seqs=min(options.max_num_seqs, options.requests),
        max_model_len=longest,
        max_num_batched_tokens=None if options.device == "cpu" else 8192,
        cpu_time=options.cpu_time,
    ) as target:
        where = common.environment(target.device_name)
        warm_up(target, requests=min(8, target.config.max_num_seqs), prompt=32, output=8)
        for repeat in range(options.repeats):
            result = drive(target, workload, temperature=0.6, progress=_every_tenth(progress))
            rows.append(
                {
                    "model": target.name,
                    "dtype": target.dtype,
                    "max_num_seqs": target.config.max_num_seqs,
                    "max_num_batched_tokens": target.config.max_num_batched_tokens,
                    "num_blocks": target.config.num_blocks,
                    "workload": workload.source,
                    "prompt_tokens": sum(workload.prompt_tokens()),
                    "repeat": repeat,
                    "seed": options.seed,
                    "clock": common.clock_name(options.cpu_time),
                    **result.figures(),
                    **where,
                }
            )
            progress(f"repeat {repeat + 1}: {result.throughput:,.0f} output tok/s")
    return rows, result


def _every_tenth(progress: Callable[[str], None]) -> Callable[[int, int], None]:
    """Tell about every tenth of the requests."""

    def told(done: int, total: int) -> None:
        if done * 10 // total != (done - 1) * 10 // total:
            progress(f"{done:,} of {total:,} requests")

    return told


def curve_rows(result: RunResult) -> list[dict[str, Any]]:
    """The run over time, thinned to some hundred points."""
    rows = result.steps.rows()
    return rows[:: max(1, len(rows) // POINTS)]


def curve_path(path: Path) -> Path:
    """Where the curve of the results in `path` is kept."""
    return path.with_name(f"{path.stem}_steps.csv")


def tables(rows: Rows) -> dict[str, Cells]:
    """The repeats with their rates, latencies and waste."""
    columns = ["repeat", "output tok/s", "all tok/s", "seconds", "TTFT p50, s", "TPOT p50, ms", "steps", "mean batch"]
    columns += ["preempted", "recomputed tokens"]
    lines = [
        [
            row["repeat"],
            f"{float(row['output_tok_per_s']):,.0f}",
            f"{float(row['total_tok_per_s']):,.0f}",
            f"{float(row['seconds']):.2f}",
            f"{float(row['ttft_p50']):.3f}",
            f"{float(row['tpot_p50']) * 1e3:.2f}",
            row["steps"],
            row["mean_batch"],
            str(int(row["preemptions_swap"]) + int(row["preemptions_recompute"])),
            row["recomputed_tokens"],
        ]
        for row in rows
    ]
    row = rows[0]
    what = f"{int(row['prompt_tokens']):,} prompt and {int(row['output_tokens']):,} output tokens"
    return {f"{row['model']}, {row['dtype']}: {row['workload']}; {what} ({provenance(rows)})": (columns, lines)}


def draw(rows: Rows, path: Path) -> None:
    """The batch, what waits, and the blocks in use over the time of the last repeat."""
    saved = curve_path(path)
    steps = common.read_csv(saved) if saved.is_file() else []
    figure, (top, bottom) = drawing.pyplot().subplots(2, 1, figsize=(8, 5.6), sharex=True)
    times = [float(step["time"]) for step in steps]
    for number, (column, label) in enumerate((("running", "running"), ("waiting", "waiting"), ("swapped", "swapped"))):
        values = [int(step[column]) for step in steps]
        if any(values):
            top.plot(times, values, color=drawing.PALETTE[number], label=label)
    bottom.plot(times, [int(step["blocks_used"]) for step in steps], color=drawing.PALETTE[3], label="in use")
    bottom.axhline(int(rows[0]["num_blocks"]), color="black", linewidth=0.8, ls="--", label="in the pool")
    bottom.set_xlabel("seconds from the start")
    drawing.grid(top, "Requests over time", "requests")
    drawing.grid(bottom, "KV blocks", "blocks")
    row = rows[-1]
    title = f"Offline workload, {row['model']}: {float(row['output_tok_per_s']):,.0f} output tok/s; {provenance(rows)}"
    drawing.save(figure, path, title)


def figures(rows: Rows) -> list[Figure]:
    """Median output tokens per second."""
    rate = common.Summary.of([float(row["output_tok_per_s"]) for row in rows])
    return [Figure("output rate", rate.median, "tok/s", "higher", rate.spread)]


PROGRAM = Program(
    name="offline",
    title="Offline throughput",
    about="The public workload of nano-vllm and mini-sglang: 256 requests at once, 100-1024 random prompt tokens, "
    "100-1024 output tokens, Python's `random.seed(0)`, temperature 0.6, end-of-sequence ignored, 133,966 output "
    "tokens in all. Where lengths are cut, the table's title says so, and the figure is not comparable with theirs. "
    "A small warm-up run comes first.",
    tables=tables,
    plots={"": draw},
    figures=figures,
    settings=lambda rows: f"{rows[0]['model']}, {rows[0]['dtype']}, {rows[0]['workload']}",
)
