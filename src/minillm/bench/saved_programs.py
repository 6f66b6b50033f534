"""The programs that measure parts (kernels, scheduler, swapping, this CPU), as descriptions of their saved rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from minillm.bench import (
    common,
    cpu_bench,
    drawing,
    materialize,
    paged_attention,
    peers,
    plots,
    sampling,
    scheduler_bench,
    swap,
)
from minillm.bench.history import Figure
from minillm.bench.program import Program, Rows, provenance
from minillm.bench.timing import PathTime


def _shape(rows: Rows) -> str:
    row = rows[0]
    return f"{row['num_heads']}/{row['num_kv_heads']} heads of {row['head_dim']}, {row['dtype']}"


# -- cpu --------------------------------------------------------------------------------------------------------------


def _cpu_figures(rows: Rows) -> list[Figure]:
    figures = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        mine = common.Summary.of(cpu_bench.by_contender(rows, workload)[cpu_bench.ENGINE])
        unit, better = ("s", "lower") if workload == "load" else ("tok/s", "higher")
        figures.append(Figure(workload, mine.median, unit, better, mine.spread))
    return figures


def draw_cpu(rows: Rows, path: Path) -> None:
    """Tokens per second of every contender, one panel per workload."""
    workloads = [
        workload
        for workload in dict.fromkeys(row["workload"] for row in rows)
        if workload != "load" and len(cpu_bench.by_contender(rows, workload)) > 1
    ] or [rows[0]["workload"]]
    figure, panels = drawing.pyplot().subplots(1, len(workloads), figsize=(5 * len(workloads), 3.6), squeeze=False)
    for axes, workload in zip(panels[0], workloads, strict=True):
        rates = cpu_bench.by_contender(rows, workload)
        summaries = [common.Summary.of(values) for values in rates.values()]
        low = [s.median - s.least for s in summaries]
        high = [s.greatest - s.median for s in summaries]
        colours = [drawing.PALETTE[0 if name == cpu_bench.ENGINE else 2] for name in rates]
        axes.bar(range(len(rates)), [s.median for s in summaries], yerr=[low, high], color=colours, capsize=4)
        axes.set_xticks(range(len(rates)), [name.replace(" ", "\n") for name in rates], fontsize=8)
        unit = "seconds to ready" if workload == "load" else "output tokens per second"
        drawing.grid(axes, workload, f"{unit} (median, range)", legend=False)
    drawing.save(figure, path, provenance(rows, cpu_bench.MODEL))


CPU = Program(
    name="cpu",
    title="The engine against transformers on a CPU",
    about="SmolLM2-135M, greedy, the same token ids for both; each contender in a process of its own, taking turns in "
    "rounds. In float32 both must give the same tokens before anything is timed. A time is from handing over the "
    "prompts to having all tokens, prefill included.",
    tables=cpu_bench.tables,
    plots={"": draw_cpu},
    figures=_cpu_figures,
    settings=lambda rows: cpu_bench.MODEL,
)


# -- scheduler --------------------------------------------------------------------------------------------------------


def draw_scheduler(rows: Rows, path: Path) -> None:
    """Microseconds per step by running requests."""
    figure, axes = drawing.pyplot().subplots(figsize=(6.4, 4.2))
    running = [int(row["running"]) for row in rows]
    for number, (column, label) in enumerate(
        (
            ("p99_us", "99th percentile"),
            ("median_us", "median"),
            ("schedule_median_us", "of it schedule"),
            ("commit_median_us", "of it commit"),
        )
    ):
        colour = drawing.PALETTE[(3, 0, 2, 1)[number]]
        axes.plot(running, [float(row[column]) for row in rows], marker="o", ms=4, color=colour, label=label)
    drawing.ticks(axes, running, "running requests")
    drawing.log_y(axes)
    drawing.grid(axes, "CPU cost of a step of the scheduler", "microseconds per step")
    drawing.save(figure, path, provenance(rows))


SCHEDULER = Program(
    name="scheduler",
    title="CPU cost of the scheduler",
    about="Schedule + commit per step in a steady state, driven as the engine drives it, with ready-made outcomes "
    "in the place of a device. Prompts of 32 to 512 tokens (a quarter share a prefix), outputs of 64 to 448; whoever "
    "ends is replaced at once; the pool is full of cached prefixes, so every allocation evicts.",
    tables=lambda rows: {
        f"schedule + commit per step ({provenance(rows)}, Python {rows[0]['python']})": scheduler_bench.table_cells(
            rows
        )
    },
    plots={"": draw_scheduler},
    figures=lambda rows: [Figure(f"{row['running']} running", float(row["median_us"]), "us", "lower") for row in rows],
    settings=lambda rows: f"{rows[0]['steps']} steps",
)


# -- kernels ----------------------------------------------------------------------------------------------------------


def _path_figures(path: str, rows: Rows) -> list[Figure]:
    times = {row["context_len"]: PathTime.from_columns(path, row) for row in rows}
    return [
        Figure(f"{int(n):,} tokens", time.median_ms, "ms", "lower", time.max_ms - time.min_ms)
        for n, time in times.items()
        if time
    ]


MATERIALIZE = Program(
    name="materialize",
    title="Copying K and V out of the pages",
    about="The cost of gathering a sequence's keys and values into contiguous tensors, which paged attention avoids: "
    "by a loop over tokens as in the original experiment, and by one gather per layer, for one layer and for all.",
    tables=lambda rows: {
        "Copying K and V out of the pages": materialize.table_cells(rows),
        "Cost by least squares": materialize.analysis_cells(rows),
    },
    plots={"": plots.draw_materialize},
    figures=partial(_path_figures, "all_layers"),
    settings=lambda rows: f"{rows[0]['layers']} layers, {_shape(rows)}",
)

PAGED_ATTENTION = Program(
    name="paged-attention",
    title="Paged attention against materialising",
    about="One decode step of one layer: attention straight from the pages, against gathering first and attending "
    "then, and against torch's attention on K and V that are contiguous already. Every path is checked against the "
    "float32 reference before it is timed. Device time by events with a cold cache; wall clock beside it.",
    tables=lambda rows: {
        f"One decode step, one layer\n{paged_attention.provenance(rows)}": paged_attention.table_cells(rows)
    },
    plots={"": plots.draw_paged_attention},
    figures=partial(_path_figures, "direct"),
    settings=lambda rows: f"{_shape(rows)}, block size {rows[0]['block_size']}",
    verdicts=paged_attention.verdicts,
)


def _peers(table: str, title: str) -> Program:
    def figures(rows: Rows) -> Sequence[Figure]:
        ratios = [item.ratio for item in peers.comparisons(rows) if peers.OURS in item.best and len(item.best) > 1]
        return [Figure("best peer's time / ours, geometric mean", common.geometric_mean(ratios), "times", "higher")]

    return Program(
        name=f"{table}-peers",
        title=title,
        about="The kernels against every variant that FlashInfer and torch offer on the same inputs, in one run: CUDA "
        "graph replay of a step of many layers with inputs of their own, rounds interleaved, medians. Each contender "
        "must agree with the float32 reference first. From `minillm bench paged-attention --peers "
        f"{table}`.",
        tables=lambda rows: {f"Paged {table} attention\n{peers.provenance(rows)}": peers.table_cells(table, rows)},
        plots={"": plots.draw_peers},
        figures=figures,
        settings=lambda rows: table,
        verdicts=partial(peers.verdicts, table),
    )


DECODE_PEERS = _peers("decode", "Decode kernels against FlashInfer and torch")
PREFILL_PEERS = _peers("prefill", "Prefill kernels against FlashInfer and torch")


# -- swap -------------------------------------------------------------------------------------------------------------


def draw_swap(rows: Rows, path: Path) -> None:
    """GB/s of swapping out and in by number of blocks, beside a plain copy of as many bytes."""
    figure, axes = drawing.pyplot().subplots(figsize=(6.4, 4.2))
    for number, direction in enumerate(dict.fromkeys(row["direction"] for row in rows)):
        chosen = [row for row in rows if row["direction"] == direction]
        blocks = [int(row["blocks"]) for row in chosen]
        colour = drawing.PALETTE[number]
        axes.plot(blocks, [float(r["swap_gbps"]) for r in chosen], marker="o", color=colour, label=f"swap {direction}")
        plain = [float(row["plain_gbps"]) for row in chosen]
        axes.plot(blocks, plain, ls="--", marker="x", color=colour, label=f"plain copy {direction}")
        drawing.ticks(axes, blocks, "blocks moved at once")
    axes.set_ylim(bottom=0)
    drawing.grid(axes, "KV blocks to host memory and back", "GB/s")
    drawing.save(figure, path, swap.provenance(rows))


def _swap_figures(rows: Rows) -> list[Figure]:
    figures = []
    for row in rows:
        rate = float(row["swap_gbps"])
        median, least, most = (float(row[f"swap_{name}_ms"]) for name in ("median", "min", "max"))
        name = f"{row['blocks']} blocks {row['direction']}"
        figures.append(Figure(name, rate, "GB/s", "higher", rate * median * (1 / least - 1 / most)))
    return figures


SWAP = Program(
    name="swap",
    title="Swapping KV blocks",
    about="Scattered KV blocks of an 8B model to host memory and back, against a plain copy of as many bytes between "
    "the same memories, and beside computing: the share of the copy that costs no time then.",
    tables=lambda rows: {f"Swapping KV blocks\n{swap.provenance(rows)}": swap.table_cells(rows)},
    plots={"": draw_swap},
    figures=_swap_figures,
    settings=lambda rows: f"{rows[0]['num_layers']} layers, {rows[0]['num_kv_heads']} KV heads, {rows[0]['dtype']}",
    verdicts=swap.verdicts,
)


# -- sampling ---------------------------------------------------------------------------------------------------------


def draw_sampling(rows: Rows, path: Path) -> None:
    """Microseconds by batch size, a line per kind; the tensor path dashed."""
    figure, axes = drawing.pyplot().subplots(figsize=(6.4, 4.2))
    batches = sorted({int(row["batch"]) for row in rows})
    for number, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
        chosen = [row for row in rows if row["mode"] == mode]
        at = [int(row["batch"]) for row in chosen]
        colour = drawing.PALETTE[number % len(drawing.PALETTE)]
        axes.plot(at, [float(row["kernel_us"]) for row in chosen], marker="o", ms=4, color=colour, label=mode)
        axes.plot(at, [float(row["tensor_us"]) for row in chosen], ls="--", marker="x", ms=4, color=colour)
    drawing.ticks(axes, batches, "rows")
    drawing.log_y(axes)
    drawing.grid(axes, "From logits to tokens (dashed: tensor operations)", "microseconds")
    drawing.save(figure, path, sampling.provenance(rows))


SAMPLING = Program(
    name="sampling",
    title="Sampling on the GPU",
    about="From float32 logits to tokens by the sampling kernels (graph replay of calls with logits of their own), the "
    "host's time of a call of the sampler, and the tensor operations for the same rows. Both draw the same tokens "
    "before anything is timed. GB/s counts the logits once.",
    tables=lambda rows: {f"Sampling\n{sampling.provenance(rows)}": sampling.table_cells(rows)},
    plots={"": draw_sampling},
    figures=lambda rows: [
        Figure(
            f"{row['batch']} rows, {row['mode']}",
            float(row["kernel_us"]),
            "us",
            "lower",
            float(row["kernel_max_us"]) - float(row["kernel_min_us"]),
        )
        for row in rows
    ],
    settings=lambda rows: f"V {rows[0]['vocab']}, float32",
    verdicts=sampling.verdicts,
)
