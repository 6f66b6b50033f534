"""What the rows of `minillm bench sla` say: tables, plots, headline figures and requirements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.bench import drawing
from minillm.bench.common import Verdict
from minillm.bench.history import Figure
from minillm.bench.program import Cells, Program, Rows, provenance, source
from minillm.bench.sla import AGED, CLASSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HIGH_ATTAINMENT = 0.99
"""Share of the highest class that must keep its TTFT objective..."""
FCFS_ATTAINMENT = 0.80
"""...at a load where `fcfs` keeps it for less than this."""
HIGH, LOW = CLASSES[0].name, CLASSES[-1].name


def policies_of(rows: Rows) -> list[str]:
    """Names of the policies, in the order in which they were run."""
    return list(dict.fromkeys(row["policy"] for row in rows))


def classes_of(rows: Rows) -> list[str]:
    """Names of the classes, highest first."""
    names = {row["class"]: int(row["priority"]) for row in rows}
    return sorted(names, key=lambda name: names[name])


def column_by_load(rows: Rows, policy: str, klass: str, column: str) -> dict[float, float]:
    """A column of a class under a policy, by load; rows that leave it empty are left out."""
    return {
        float(row["load"]): float(row[column])
        for row in rows
        if row["policy"] == policy and row["class"] == klass and row[column]
    }


def table_cells(rows: Rows) -> Cells:
    """One line per load, policy and class."""
    columns = [
        "load, policy, class",
        "requests",
        "TTFT objective met",
        "TPOT objective met",
        "TTFT p50, s",
        "p90",
        "p99",
    ]
    columns += ["TPOT p50, ms", "p99", "longest wait, s", "stated bound, s"]
    cells = [
        [
            f"{row['load']}, {row['policy']}, {row['class']}",
            row["requests"],
            f"{float(row['ttft_attained']):.1%} in {float(row['ttft_slo_s']):g} s",
            f"{float(row['tpot_attained']):.1%} in {float(row['tpot_slo_s']) * 1000:g} ms",
            *(f"{float(row[f'ttft_p{share}_s']):.2f}" for share in (50, 90, 99)),
            *(f"{float(row[f'tpot_p{share}_s']) * 1000:.1f}" for share in (50, 99)),
            f"{float(row['wait_max_s']):.1f}",
            f"{float(row['wait_bound_s']):.1f}" if row["wait_bound_s"] else "none",
        ]
        for row in rows
    ]
    return columns, cells


def verdicts(rows: Rows) -> list[Verdict]:
    """The two requirements of the study."""
    policy = next(name for name in policies_of(rows) if name.startswith(AGED))
    fcfs = column_by_load(rows, "fcfs", HIGH, "ttft_attained")
    aged = column_by_load(rows, policy, HIGH, "ttft_attained")
    overloaded = [load for load, share in fcfs.items() if share < FCFS_ATTAINMENT]
    kept = any(aged[load] >= HIGH_ATTAINMENT for load in overloaded)
    shown = ", ".join(f"{aged[load]:.1%} where fcfs has {fcfs[load]:.1%} (load {load:g})" for load in overloaded)
    high = Verdict(
        f"{HIGH} keeps its TTFT objective for at least {HIGH_ATTAINMENT:.0%} under {policy}, at a load where fcfs "
        f"keeps it for less than {FCFS_ATTAINMENT:.0%}",
        shown or "no load where fcfs falls that low",
        kept,
    )
    bounded = [row for row in rows if row["wait_bound_s"]]
    waits = ", ".join(
        f"{float(row['wait_max_s']):.1f} of {float(row['wait_bound_s']):.1f} s (load {row['load']})"
        for row in bounded
        if row["class"] == LOW and row["policy"] == policy
    )
    low = Verdict(
        f"no request waits longer than its own stated bound; {LOW}'s longest wait under {policy}",
        waits or "no bounded policy was run",
        bool(bounded) and all(float(row["least_spare_s"]) >= 0 for row in bounded),
    )
    return [high, low]


def figures(rows: Rows) -> Sequence[Figure]:
    """For the history: what the highest and the lowest class get under ageing, by load."""
    made = []
    for policy in policies_of(rows):
        if policy.startswith(AGED):
            for load, share in column_by_load(rows, policy, HIGH, "ttft_attained").items():
                made.append(Figure(f"{HIGH} TTFT met, {policy}, load {load:g}", share * 100, "%", "higher"))
            for load, wait in column_by_load(rows, policy, LOW, "wait_max_s").items():
                made.append(Figure(f"{LOW} longest wait, {policy}, load {load:g}", wait, "s", "lower"))
    return made


def draw(rows: Rows, path: Path) -> None:
    """By load: objectives met by the higher classes; the lowest one's TTFT, and its longest wait with its bounds."""
    figure, panels = drawing.pyplot().subplots(2, 2, figsize=(12, 8.4))
    high, middle, tail, wait = panels.flat
    for axes, klass in ((high, HIGH), (middle, CLASSES[1].name)):
        slo = next((float(row["ttft_slo_s"]) for row in rows if row["class"] == klass), 0.0)
        _curves(axes, rows, klass, "ttft_attained", 100.0)
        axes.set_ylim(-3, 103)
        drawing.grid(axes, f"{klass}: first token within {slo:g} s", "% of requests", legend=False)
    _curves(tail, rows, LOW, "ttft_p99_s")
    drawing.grid(tail, f"{LOW}: 99th percentile of TTFT", "seconds", legend=False)
    _curves(wait, rows, LOW, "wait_max_s")
    for number, policy in enumerate(policies_of(rows)):
        bound = column_by_load(rows, policy, LOW, "wait_bound_s")
        if bound:
            wait.plot(list(bound), list(bound.values()), ls="--", color=drawing.PALETTE[number])
    drawing.grid(wait, f"{LOW}: longest wait for a first step (dashed: stated bound)", "seconds", legend=False)
    for axes in (tail, wait):
        axes.set_ylim(bottom=0)
    for axes in panels.flat:
        axes.set_xlabel("load (work per second)")
    figure.tight_layout(rect=(0, 0.04, 1, 0.97))
    figure.legend(*high.get_legend_handles_labels(), loc="lower center", ncols=len(policies_of(rows)), fontsize=9)
    drawing.save(figure, path, provenance(rows))


def _curves(axes: Axes, rows: Rows, klass: str, column: str, factor: float = 1.0) -> None:
    """One curve per policy; markers and widths differ, so that curves that lie on one another stay visible."""
    for number, policy in enumerate(policies_of(rows)):
        points = column_by_load(rows, policy, klass, column)
        axes.plot(
            list(points),
            [value * factor for value in points.values()],
            color=drawing.PALETTE[number],
            label=policy,
            marker="osv^Dx"[number % 6],
            ms=(8, 5, 9, 5, 5, 5)[number % 6],
            lw=(2, 2, 3.5, 1.5, 1.5, 1.5)[number % 6],
        )


def draw_model(rows: Rows, path: Path) -> None:
    """TTFT attainment, and the median and 99th percentile of TTFT, per class and policy."""
    figure, (left, right) = drawing.pyplot().subplots(1, 2, figsize=(12, 4.4))
    names, policies = classes_of(rows), policies_of(rows)
    width = 0.8 / len(policies)
    for number, policy in enumerate(policies):
        own = {row["class"]: row for row in rows if row["policy"] == policy}
        at = [index + (number - (len(policies) - 1) / 2) * width for index in range(len(names))]
        colour = drawing.PALETTE[number]
        left.bar(at, [float(own[n]["ttft_attained"]) * 100 for n in names], width * 0.9, color=colour, label=policy)
        right.bar(at, [float(own[n]["ttft_p99_s"]) for n in names], width * 0.9, color=colour, label=policy)
        right.plot(at, [float(own[n]["ttft_p50_s"]) for n in names], "_", color="black", ms=10)
    slos = {row["class"]: float(row["ttft_slo_s"]) for row in rows}
    left.set_xticks(range(len(names)), [f"{name}\nwithin {slos[name]:g} s" for name in names])
    right.set_xticks(range(len(names)), names)
    drawing.grid(left, "First token in time", "% of requests", legend=False)
    drawing.grid(right, "TTFT: 99th percentile (line: median)", "seconds", legend=False)
    figure.tight_layout(rect=(0, 0.07, 1, 0.97))
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=len(policies), fontsize=9)
    drawing.save(figure, path, provenance(rows, f"load {rows[0]['load']}"))


PROGRAM = Program(
    name="sla",
    title="Priority classes under load",
    about="Three classes, merged by time from the Azure 2023 traces: interactive (three quarters of the "
    "conversations), code (bursts of hundreds of requests) and batch (the other conversations). The real scheduler "
    "and step loop in virtual time, steps charged after an 8B model on one H200. Up to load 1 a full engine is sure "
    "to keep up in the long run. Under fcfs and under priority with ageing no request waits longer than a bound that "
    "is computed before the run (dashed); plain priority and fair have none.",
    tables=lambda rows: {f"Priority classes ({provenance(rows, source(rows))})": table_cells(rows)},
    plots={"": draw},
    figures=figures,
    settings=source,
    verdicts=verdicts,
)

MODEL_PROGRAM = Program(
    name="sla-model",
    title="Priority classes on a real model",
    about="A short piece of the same on the built-in model, lengths divided, at a share of the rate at which it serves "
    "the same requests when all are there at once. The policies take turns in rounds; percentiles are over all rounds.",
    tables=lambda rows: {f"Priority classes ({provenance(rows, source(rows))})": table_cells(rows)},
    plots={"": draw_model},
    figures=lambda rows: [
        Figure(f"{row['class']} TTFT p99, {row['policy']}", float(row["ttft_p99_s"]), "s", "lower") for row in rows
    ],
    settings=lambda rows: f"load {rows[0]['load']}; {source(rows)}",
)
