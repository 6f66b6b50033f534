"""What the rows of `minillm bench prefix` say: tables, plots, headline figures and requirements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from minillm.bench import drawing
from minillm.bench.common import Summary, Verdict
from minillm.bench.history import Figure
from minillm.bench.program import Cells, Program, Rows, provenance, source

NEAR_LRU = 0.02
"""Greatest difference of the scheduler's hit ratio from the LRU list's."""


def _split(rows: Rows) -> tuple[dict[str, str], Rows]:
    """(the run without a cache, the runs with one by size of pool)."""
    (without,) = (row for row in rows if row["cache"] == "off")
    return without, sorted((row for row in rows if row["cache"] == "on"), key=lambda row: float(row["pool_share"]))


def table_cells(rows: Rows) -> Cells:
    """One line per pool."""
    without, cached = _split(rows)
    columns = ["pool", "blocks", "hit ratio", "LRU list's", "prompt tokens from the cache"]
    columns += ["TTFT mean, s", "p50", "p90", "p99", "mean, times as fast"]
    cells = []
    for row in [without, *cached]:
        on = row["cache"] == "on"
        cells.append(
            [
                f"{float(row['pool_share']):.0%} of the distinct blocks" if on else "without cache",
                f"{int(row['pool_blocks']):,}",
                f"{float(row['hit_ratio']):.2%}" if on else "",
                f"{float(row['lru_hit_ratio']):.2%}" if on else "",
                f"{int(row['cached_tokens']) / int(row['prompt_tokens']):.1%}",
                *(f"{float(row[f'ttft_{name}']):.2f}" for name in ("mean", "p50", "p90", "p99")),
                f"{float(without['ttft_mean']) / float(row['ttft_mean']):.2f}",
            ]
        )
    return columns, cells


def verdicts(rows: Rows) -> list[Verdict]:
    """The hit ratio against the LRU list's; a gain in TTFT in every pool."""
    without, cached = _split(rows)
    apart = {row["pool_share"]: float(row["hit_ratio"]) - float(row["lru_hit_ratio"]) for row in cached}
    gains = {row["pool_share"]: float(without["ttft_mean"]) / float(row["ttft_mean"]) for row in cached}
    return [
        Verdict(
            f"hit ratio within {NEAR_LRU * 100:g} points of an LRU list over the same blocks",
            ", ".join(f"{gap * 100:+.2f} in a pool of {float(share):.0%}" for share, gap in apart.items()),
            all(abs(gap) <= NEAR_LRU for gap in apart.values()),
        ),
        Verdict(
            "the mean TTFT is lower with the cache than without",
            ", ".join(f"{gain:.2f} times in a pool of {float(share):.0%}" for share, gain in gains.items()),
            all(gain > 1 for gain in gains.values()),
        ),
    ]


def figures(rows: Rows) -> Sequence[Figure]:
    """For the history: hit ratio and TTFT of each pool."""
    made = []
    for row in _split(rows)[1]:
        pool = f"pool {float(row['pool_share']):.0%}"
        made.append(Figure(f"hit ratio, {pool}", float(row["hit_ratio"]) * 100, "%", "higher"))
        made.append(Figure(f"TTFT mean, {pool}", float(row["ttft_mean"]), "s", "lower"))
    return made


def draw(rows: Rows, path: Path) -> None:
    """Hit ratio beside the LRU list's, and TTFT beside that without a cache, by pool."""
    without, cached = _split(rows)
    figure, (left, right) = drawing.pyplot().subplots(1, 2, figsize=(12, 4.6))
    pools = [f"{float(row['pool_share']):.0%}\n{int(row['pool_blocks']):,} blocks" for row in cached]
    for offset, column, label in ((-0.2, "hit_ratio", "scheduler"), (0.2, "lru_hit_ratio", "plain LRU list")):
        values = [float(row[column]) * 100 for row in cached]
        bars = left.bar(
            [index + offset for index in range(len(cached))],
            values,
            0.38,
            color=drawing.PALETTE[0 if offset < 0 else 2],
            label=label,
        )
        left.bar_label(bars, [f"{value:.1f}" for value in values], fontsize=8)
    left.set_xticks(range(len(cached)), pools)
    left.set_xlabel("pool, as a share of the trace's distinct blocks")
    drawing.grid(left, "Blocks found in the prefix cache", "% of blocks looked up")
    runs = [without, *cached]
    for number, (name, label) in enumerate((("mean", "mean"), ("p50", "median"), ("p99", "99th percentile"))):
        values = [float(row[f"ttft_{name}"]) for row in runs]
        at = [index + (number - 1) * 0.27 for index in range(len(runs))]
        bars = right.bar(at, values, 0.25, color=drawing.PALETTE[number], label=label)
        right.bar_label(bars, [f"{value:.1f}" for value in values], fontsize=7)
    right.set_xticks(range(len(runs)), ["without\ncache", *(pool.replace(" blocks", "") for pool in pools)])
    right.set_xlabel("pool (blocks)")
    drawing.grid(right, f"Time to first token, load {without['load']} without cache", "seconds (predicted)")
    drawing.save(figure, path, provenance(rows, source(rows)))


def _model_medians(rows: Rows, column: str) -> dict[tuple[int, str], Summary]:
    """Of a column over the repeats, by (prefix length, cache)."""
    groups: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        groups.setdefault((int(row["prefix"]), row["cache"]), []).append(float(row[column]))
    return {key: Summary.of(values) for key, values in groups.items()}


def _prefixes(rows: Rows) -> list[int]:
    return sorted({int(row["prefix"]) for row in rows})


def model_table_cells(rows: Rows) -> Cells:
    """One line per prefix length."""
    columns = ["shared tokens", "from the cache", "TTFT p50 without, ms", "with", "times as fast", "mean without, ms"]
    columns += ["with", "times as fast"]
    p50, mean = _model_medians(rows, "ttft_p50_ms"), _model_medians(rows, "ttft_mean_ms")
    cells = []
    for prefix in _prefixes(rows):
        row = next(row for row in rows if int(row["prefix"]) == prefix and row["cache"] == "on")
        cell = [f"{prefix:,}", f"{int(row['cached_tokens']) / int(row['prompt_tokens']):.1%}"]
        for summaries in (p50, mean):
            off, on = summaries[prefix, "off"], summaries[prefix, "on"]
            cell += [off.text(), on.text(), f"{off.median / on.median:.2f}"]
        cells.append(cell)
    return columns, cells


def draw_model(rows: Rows, path: Path) -> None:
    """TTFT with and without the cache, by length of the shared prefix."""
    figure, axes = drawing.pyplot().subplots(figsize=(6.8, 4.4))
    summaries, prefixes = _model_medians(rows, "ttft_p50_ms"), _prefixes(rows)
    for number, (cache, label) in enumerate((("on", "with prefix cache"), ("off", "without"))):
        chosen = [summaries[prefix, cache] for prefix in prefixes]
        low, mid, high = ([getattr(s, name) for s in chosen] for name in ("least", "median", "greatest"))
        drawing.band(axes, prefixes, low, mid, high, color=drawing.PALETTE[(0, 3)[number]], label=label)
    drawing.ticks(axes, prefixes, "tokens of the shared system prompt")
    axes.set_ylim(bottom=0)
    drawing.grid(axes, "Median TTFT of one request at a time (band: least to greatest of the rounds)", "milliseconds")
    drawing.save(figure, path, provenance(rows, rows[0]["workload"].partition(";")[0]))


def _model_figures(rows: Rows) -> Sequence[Figure]:
    p50 = _model_medians(rows, "ttft_p50_ms")
    gains = {prefix: p50[prefix, "off"].median / p50[prefix, "on"].median for prefix in _prefixes(rows)}
    made = [Figure(f"TTFT gain, {prefix} shared tokens", gain, "times", "higher") for prefix, gain in gains.items()]
    return [*made, Figure("TTFT p50 with cache", statistics.median(p50[p, "on"].median for p in gains), "ms", "lower")]


def _model_verdicts(rows: Rows) -> list[Verdict]:
    longest = _prefixes(rows)[-1]
    p50 = _model_medians(rows, "ttft_p50_ms")
    off, on = p50[longest, "off"], p50[longest, "on"]
    found = f"{on.text()} ms against {off.text()} ms at {longest:,} shared tokens"
    return [Verdict("the cache shortens the median TTFT in every round", found, on.greatest < off.least)]


PROGRAM = Program(
    name="prefix",
    title="Sharing prefixes on a trace",
    about="The real scheduler over a trace that says who shares what, with blocks of 512 tokens so that one of its "
    "hash ids is a block, in pools of a share of the distinct blocks; steps charged after an 8B model on one H200, so "
    "times are predictions. The LRU list is counted apart from the scheduler, prompt after prompt in order of arrival.",
    tables=lambda rows: {f"Prefix cache by pool ({provenance(rows, source(rows))})": table_cells(rows)},
    plots={"": draw},
    figures=figures,
    settings=lambda rows: f"load {rows[0]['load']}; {source(rows)}",
    verdicts=verdicts,
)

MODEL_PROGRAM = Program(
    name="prefix-model",
    title="Sharing prefixes on a real model",
    about="One request at a time on the built-in model; two system prompts, each shared by half of the requests; the "
    "same requests with the prefix cache and without, in turn. The first request of each prompt pays for it.",
    tables=lambda rows: {
        f"TTFT by shared prefix ({provenance(rows, rows[0]['workload'].partition(';')[0])})": model_table_cells(rows)
    },
    plots={"": draw_model},
    figures=_model_figures,
    settings=lambda rows: f"{rows[0]['workload'].partition(';')[0]}; {rows[0]['requests']} requests",
    verdicts=_model_verdicts,
)
