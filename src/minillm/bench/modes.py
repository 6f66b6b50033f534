"""`minillm bench modes`: one workload through five ways of serving, on the same model and weights.

| mode | what it is |
|---|---|
| `static` | a batch runs to its last member, then the next is formed; a row that has ended is not computed any more |
| `continuous` | requests join and leave between steps; the pool holds all that are active |
| `recompute`, `swap`, `auto` | continuous in a pool too small for them: preempted that way |
| `raw` | the model stepped at full batch, every plan made beforehand: no scheduler, no queue (see `raw_loop`) |

How far continuous can be ahead of static follows from the lengths alone (:func:`step_bound`), if a step costs the same
whatever its batch. Modes take turns in rounds.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from minillm.bench import common, drawing
from minillm.bench.attribution import Interval, bootstrap
from minillm.bench.history import Figure
from minillm.bench.models import open_model
from minillm.bench.program import Cells, Program, Rows, provenance
from minillm.bench.raw_loop import drive_raw, list_schedule
from minillm.bench.recording import RunResult
from minillm.bench.runs import Target, drive, open_target, virtual_target, warm_up
from minillm.bench.stress import active_curve
from minillm.bench.virtual import H200_8B
from minillm.bench.workloads import LengthLaw, Segment, Workload, WorkloadRequest
from minillm.core.block_manager import blocks_for
from minillm.core.config import SchedulerConfig
from minillm.core.errors import ConfigError

DEFAULT_CSV = common.RESULTS / "modes.csv"
MODES = ("static", "continuous", "recompute", "swap", "auto", "raw")
PRESSURED = ("recompute", "swap", "auto")
LENGTHS = ("uniform", "lognormal", "fixed")
BLOCK_SIZE = 16
LINKS = {"50 GB/s": 4.2e-5, "4 GB/s": 5.2e-4, "0.5 GB/s": 4.2e-3}
"""Seconds to copy a block of 2 MiB to or from the host."""
LINK_REQUESTS = 4
"""Times as many requests in virtual time: what it takes to learn the costs should not be all that is seen."""
CURVE_POINTS = 60
SHARE_OF_BOUND = 0.9
NOISE = 0.03
"""What auto may be behind the better of swap and recompute."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, and on what. Lengths in tokens; `mean_output` is exact for `fixed` alone."""

    model: str = "smollm2-135m"
    device: str = "cpu"
    dtype: str = "auto"
    lengths: Sequence[str] = ("uniform", "lognormal")
    requests: int = 32
    prompt: int = 16
    mean_output: int = 40
    batch: int = 8
    pool_share: float = 0.5
    """Of the blocks that all active requests need at their longest: the pool of the modes under pressure."""
    repeats: int = 5
    seed: int = 0
    cpu_time: bool = False
    """Take this process's CPU time for the clock: for a machine that others use, with one thread."""
    links: bool = True
    """Also swap, recompute and auto in virtual time, over a fast and a slow link."""

    def __post_init__(self) -> None:
        for name in ("requests", "prompt", "mean_output", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.pool_share <= 1:
            raise ConfigError(f"pool_share={self.pool_share} must be in (0, 1]")
        unknown = [name for name in self.lengths if name not in LENGTHS]
        if unknown:
            raise ConfigError(f"lengths={unknown[0]!r} must be one of {', '.join(LENGTHS)}")


def default_dtype(device: str) -> str:
    """`auto`, but on a CPU that multiplies bfloat16 that alone.

    A bound in steps is one in time where a step costs the same whatever its batch. The codes that `auto` adds on a CPU
    make steps of a few rows quicker than others, and plain float32 products grow with every row.
    """
    if device != "cpu":
        return "auto"
    from minillm.models.linear import cpu_packs_bfloat16

    return "bfloat16" if cpu_packs_bfloat16() else "auto"


def make_workload(kind: str, requests: int, prompt: int, mean_output: int, seed: int = 0) -> Workload:
    """Equal prompts, and outputs of one length, spread evenly from 1 to twice the mean, or lognormal.

    The lognormal law has the spread of the conversation trace of Azure 2023 as published (p90/p50 of 3.29) and is cut
    at eight times the mean.
    """
    rng = Random(f"{seed} modes {kind}")
    if kind == "fixed":
        outputs = [mean_output] * requests
    elif kind == "uniform":
        outputs = [rng.randint(1, 2 * mean_output - 1) for _ in range(requests)]
    else:
        median = 0.65 * mean_output  # the mean of the law is exp(sigma^2 / 2) = 1.54 medians
        law = LengthLaw(median, median * 424 / 129, 8 * mean_output)
        outputs = [law.draw(rng) for _ in range(requests)]
    made = tuple(
        WorkloadRequest(segments=(Segment(f"r{i}", prompt),), max_tokens=output) for i, output in enumerate(outputs)
    )
    return Workload(
        kind, made, seed, f"{requests} requests, {prompt} in, {kind} out, mean {sum(outputs) / requests:.0f}"
    )


@dataclass(frozen=True, slots=True)
class StepBound:
    """Steps of a workload by lengths alone; `bound` is how many times faster continuous can be."""

    static: int
    continuous: int

    @property
    def bound(self) -> float:
        """Ratio of the steps."""
        return self.static / self.continuous


def step_bound(outputs: Sequence[int], batch: int) -> StepBound:
    """Static: each batch takes its longest output. Continuous: requests in order, each on the row that is free first.

    One step makes one token of every active request, the first token included.
    """
    static = sum(max(outputs[first : first + batch]) for first in range(0, len(outputs), batch))
    places = list_schedule(outputs, batch)
    return StepBound(static, max(start + length for (_, start), length in zip(places, outputs, strict=True)))


def pool_blocks(load: Workload, batch: int, share: float) -> tuple[int, int]:
    """Blocks that the `batch` longest requests fill at their ends, and the smaller pool: `share` of them, but enough
    for the longest request."""
    totals = [prompt + r.max_tokens for prompt, r in zip(load.prompt_tokens(), load.requests, strict=True)]
    needed = [blocks_for(total, BLOCK_SIZE) for total in heapq.nlargest(batch, totals)]
    return sum(needed), max(needed[0], round(share * sum(needed)))


def measure(options: Options, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One row per workload, mode and repeat."""
    model = open_model(options.model, options.dtype, options.device)
    rows: list[dict[str, Any]] = []
    for kind in options.lengths:
        load = make_workload(kind, options.requests, options.prompt, options.mean_output, options.seed)
        rows += _measure_workload(model, options, load, progress)
        if options.links:
            many = make_workload(
                kind, LINK_REQUESTS * options.requests, options.prompt, options.mean_output, options.seed
            )
            rows += _measure_links(options, many, rows[-1])
    return rows


def _measure_workload(
    model: Any, options: Options, load: Workload, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    ample, tight = pool_blocks(load, options.batch, options.pool_share)
    width = blocks_for(load.longest, BLOCK_SIZE)
    pools = {mode: tight if mode in PRESSURED else max(ample, options.batch * width) for mode in MODES}
    targets: dict[str, Target] = {}
    try:
        for mode in MODES:
            changes = _engine_options(mode, options, load, pools[mode])
            targets[mode] = open_target(model, cpu_time=options.cpu_time, **changes)
            warm_up(targets[mode])
        first = targets["static"]
        where = common.environment(first.device_name) | {"model": first.name, "dtype": first.dtype}
        rows = []
        for repeat in range(options.repeats):
            progress(f"{load.name}: round {repeat + 1} of {options.repeats}")
            shift = repeat % len(MODES)
            results = {
                mode: drive_raw(targets[mode], load) if mode == "raw" else drive(targets[mode], load)
                for mode in MODES[shift:] + MODES[:shift]
            }
            rows += [_row(where, options, load, mode, pools[mode], repeat, results[mode]) for mode in MODES]
        return rows
    finally:
        for target in targets.values():
            target.engine.close()


def _engine_options(mode: str, options: Options, load: Workload, num_blocks: int) -> dict[str, Any]:
    return {
        "scheduler": "static" if mode == "static" else "continuous",
        "preemption_mode": mode if mode in PRESSURED else "auto",
        "num_gpu_blocks_override": num_blocks,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": options.batch,
        "max_num_batched_tokens": max(512, options.batch * options.prompt),
        "max_model_len": load.longest,
        "swap_space": 0.1 if mode in ("swap", "auto") else 0.0,
        "enable_prefix_caching": False,
    }


def _measure_links(options: Options, load: Workload, like: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The modes under pressure in virtual time, where copying is cheap and where it is dear: exact, so run once."""
    _, tight = pool_blocks(load, options.batch, options.pool_share)
    rows = []
    for link, seconds in LINKS.items():
        costs = replace(H200_8B, swap_block=seconds)
        for mode in PRESSURED:
            config = SchedulerConfig(
                num_blocks=tight,
                block_size=BLOCK_SIZE,
                max_num_seqs=options.batch,
                max_model_len=load.longest,
                num_swap_blocks=4 * tight,
                preemption_mode=mode,
                enable_prefix_caching=False,
            )
            where = {
                name: like[name] for name in ("date", "commit", "device", "cores", "python", "torch", "transformers")
            }
            where |= {"model": f"virtual 8B, host link {link}", "dtype": "none"}
            with virtual_target(costs, config, overlap=False) as target:
                rows.append(_row(where, options, load, mode, tight, 0, drive(target, load)))
    return rows


def _row(
    where: Mapping[str, str], options: Options, load: Workload, mode: str, pool: int, repeat: int, result: RunResult
) -> dict[str, Any]:
    bound = step_bound([request.max_tokens for request in load.requests], options.batch)
    return {
        **where,
        "seed": options.seed,
        "clock": common.clock_name(options.cpu_time),
        "lengths": load.name,
        "mode": mode,
        "repeat": repeat,
        "batch": options.batch,
        "prompt": options.prompt,
        "num_blocks": pool,
        "static_steps": bound.static,
        "continuous_steps": bound.continuous,
        **result.figures(),
        "active": ";".join(map(str, active_curve(result, CURVE_POINTS))),
    }


# -- what the rows say ------------------------------------------------------------------------------------------------


def groups(rows: Rows) -> dict[tuple[str, str], dict[str, Rows]]:
    """Rows by (model, lengths), then by mode."""
    found: dict[tuple[str, str], dict[str, Rows]] = {}
    for row in rows:
        found.setdefault((row["model"], row["lengths"]), {}).setdefault(row["mode"], []).append(row)
    return found


def median(rows: Rows, name: str) -> float:
    """Median of a column."""
    return statistics.median(float(row[name]) for row in rows)


def paired(rows: Rows, other: Rows, name: str = "output_tok_per_s") -> float:
    """Median over rounds of one mode's figure over the other's of the same round."""
    return statistics.median(_ratios(rows, other, name))


def _ratios(rows: Rows, other: Rows, name: str) -> list[float]:
    theirs = {row["repeat"]: float(row[name]) for row in other}
    return [float(row[name]) / theirs[row["repeat"]] for row in rows]


def paired_interval(rows: Rows, other: Rows, name: str = "output_tok_per_s") -> Interval:
    """:func:`paired` with its 95 % interval over rounds; of one round its ratio alone."""
    return bootstrap({"ratio": _ratios(rows, other, name)}, lambda medians: medians)["ratio"]


def tables(rows: Rows) -> dict[str, Cells]:
    """One table per model and lengths."""
    columns = [
        "mode",
        "tok/s: median (range)",
        "x static",
        "TTFT p50, ms",
        "TPOT p50, ms",
        "steps",
        "attention calls",
        "mean batch",
        "preempted: swap / recompute",
        "wasted tokens",
        "swapped, MiB",
    ]
    made: dict[str, Cells] = {}
    for (model, lengths), modes in groups(rows).items():
        lines = []
        first = next(iter(modes.values()))[0]
        for mode, mine in modes.items():
            rates = common.Summary.of([float(row["output_tok_per_s"]) for row in mine])
            lines.append(
                [
                    mode,
                    rates.text(),
                    f"{paired(mine, modes['static']):.2f}" if "static" in modes else "",
                    f"{1e3 * median(mine, 'ttft_p50'):.1f}",
                    f"{1e3 * median(mine, 'tpot_p50'):.2f}",
                    f"{median(mine, 'steps'):.0f}",
                    f"{median(mine, 'attention_calls'):.0f}",
                    f"{median(mine, 'mean_batch'):.2f}",
                    f"{median(mine, 'preemptions_swap'):.0f} / {median(mine, 'preemptions_recompute'):.0f}",
                    f"{median(mine, 'wasted_tokens'):.0f}",
                    f"{median(mine, 'swapped_bytes') / 2**20:.1f}",
                ]
            )
        static, ideal = int(first["static_steps"]), int(first["continuous_steps"])
        title = (
            f"{model}, {lengths} outputs, {first['requests']} requests, batch {first['batch']}; steps by lengths: "
            f"static {static}, continuous {ideal}, bound {static / ideal:.2f}x\n"
            f"{provenance(rows, first['dtype'])}"
        )
        made[title] = (columns, lines)
    return made


def verdicts(rows: Rows) -> list[common.Verdict]:
    """Continuous against static by the bound; auto against the better of swap and recompute."""
    found = []
    for (model, lengths), modes in groups(rows).items():
        if "static" in modes:
            first = modes["static"][0]
            bound = int(first["static_steps"]) / int(first["continuous_steps"])
            gain = paired(modes["continuous"], modes["static"])
            found.append(
                common.Verdict(
                    f"{model}, {lengths}: continuous reaches {SHARE_OF_BOUND} of the step-count bound over static",
                    f"{gain:.2f} of {bound:.2f} times: {gain / bound:.2f}",
                    gain >= SHARE_OF_BOUND * bound,
                )
            )
        rates = {mode: median(modes[mode], "output_tok_per_s") for mode in PRESSURED}
        better = max(("swap", "recompute"), key=rates.__getitem__)
        share = paired_interval(modes["auto"], modes[better])
        found_rates = ", ".join(f"{mode} {rate:.1f}" for mode, rate in rates.items())
        found.append(
            common.Verdict(
                f"{model}, {lengths}: auto is within {NOISE:.0%} of the better of swap and recompute, or ahead of it",
                f"{share.text('.3f')} times {better}, round by round; tok/s: {found_rates}",
                share.value >= 1 - NOISE,
            )
        )
    return found


def figures(rows: Rows) -> list[Figure]:
    """Throughput of every mode on the model, and continuous over static."""
    made = []
    for (_, lengths), modes in groups(rows).items():
        if "static" not in modes:
            continue
        for mode, mine in modes.items():
            made.append(Figure(f"{lengths}, {mode}", median(mine, "output_tok_per_s"), "tok/s", "higher"))
        gain = paired(modes["continuous"], modes["static"])
        made.append(Figure(f"{lengths}, continuous over static", gain, "x", "higher"))
    return made


def settings(rows: Rows) -> str:
    """What the figures depend on."""
    row = rows[0]
    return f"{row['model']} {row['dtype']}, {row['requests']} requests, prompt {row['prompt']}, batch {row['batch']}"


def _draw_rates(rows: Rows, path: Any, modes: Sequence[str], log: bool) -> None:
    plt = drawing.pyplot()
    found = [(key, them) for key, them in groups(rows).items() if "static" in them]
    figure, axes = plt.subplots(len(found), 2, figsize=(12, 3.8 * len(found)), squeeze=False)
    for (rate_axes, batch_axes), ((model, lengths), them) in zip(axes, found, strict=True):
        shown = [mode for mode in modes if mode in them]
        rates = [common.Summary.of([float(row["output_tok_per_s"]) for row in them[mode]]) for mode in shown]
        colours = [drawing.PALETTE[MODES.index(mode)] for mode in shown]
        spread = [[r.median - r.least for r in rates], [r.greatest - r.median for r in rates]]
        rate_axes.bar(shown, [r.median for r in rates], color=colours, yerr=spread, capsize=4)
        for place, rate in enumerate(rates):
            rate_axes.text(place, rate.greatest * 1.02, f"{rate.median:,.0f}", ha="center", fontsize=8)
        if log:
            drawing.log_y(rate_axes)
            rate_axes.set_ylim(min(r.least for r in rates) / 2, max(r.greatest for r in rates) * 1.5)
        else:
            rate_axes.set_ylim(0, max(r.greatest for r in rates) * 1.1)
        drawing.grid(rate_axes, f"{model}, {lengths} outputs", "output tokens/s", legend=False)
        for mode, colour in zip(shown, colours, strict=True):
            row = them[mode][0]
            curve = [int(active) for active in row["active"].split(";")]
            seconds = float(row["seconds"])
            times = [(point + 0.5) / len(curve) * seconds for point in range(len(curve))]
            batch_axes.step(times, curve, where="mid", color=colour, label=mode)
        batch_axes.set_xlabel("seconds")
        drawing.grid(batch_axes, "active batch over time, first round", "requests in the step")
    figure.tight_layout()
    drawing.save(figure, path)


def draw_all(rows: Rows, path: Any) -> None:
    """Throughput of all modes on a logarithmic scale, and their batches over time."""
    _draw_rates(rows, path, MODES, log=True)


def draw_continuous(rows: Rows, path: Any) -> None:
    """Continuous batching alone: with room, and under pressure by each way of preempting."""
    _draw_rates(rows, path, ("continuous", *PRESSURED), log=False)


PROGRAM = Program(
    name="modes",
    title="Serving modes",
    about=(
        "One workload through static batching, continuous batching, continuous batching under memory pressure "
        "(recompute, swap, auto), and the raw kernel loop: the model stepped at full batch, all plans made beforehand. "
        "Modes take turns in rounds. The bound is the ratio of step counts that follows from the lengths alone. The "
        "same pressure in virtual time, over host links of three speeds, shows whether auto takes the cheaper way."
    ),
    tables=tables,
    plots={"compare_serving_modes_log.png": draw_all, "compare_continuous_only.png": draw_continuous},
    figures=figures,
    settings=settings,
    verdicts=verdicts,
)
