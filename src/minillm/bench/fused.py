"""`minillm bench fused`: the decoder's fused kernels against their floors and against torch.

Times are of CUDA graph replays over rotating inputs (:mod:`minillm.bench.timing`), so kernels that follow each other
overlap as they do in a decode step; "no overlap" is the same with dependent launches off. The floor of a call is its
bytes over the rate of a large copy measured in the same run. torch's contender of a product is the product alone: what
is fused to ours would come on top. "step" is a whole decode step but for attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from minillm.attention import cuda_build, cuda_launch
from minillm.attention.cuda_checks import FLOAT_DTYPES
from minillm.bench import common, drawing
from minillm.bench.attention_batch import ERROR_BOUNDS, WrongResultError
from minillm.bench.common import Verdict
from minillm.bench.fused_cases import (
    DTYPE,
    LAYERS,
    LIBRARY,
    LLAMA8B,
    NORM_APART,
    OURS,
    QWEN3,
    QWEN25,
    SMOL,
    Call,
    Case,
    DecodeStep,
    all_cases,
    contenders,
    variants_of,
)
from minillm.bench.history import Figure
from minillm.bench.program import Program
from minillm.bench.timing import Ceilings, ReplayTime, StepGraph, measure_ceilings, step_layers, time_graphs

Progress = Callable[[str], None]
Rows = Sequence[Mapping[str, str]]

MOST_SETS = 48
NO_OVERLAP = f"{OURS}, no overlap"
STEP_ROWS = (1, 2, 4, 8)
LARGE_BYTES, LARGE_GBPS = 30e6, 4000.0
"""What the project asks: weights of at least so many bytes are read at this rate with one row."""


@contextmanager
def _without_overlap() -> Iterator[None]:
    before = cuda_launch.DEPENDENT_LAUNCHES
    cuda_launch.DEPENDENT_LAUNCHES = False
    try:
        yield
    finally:
        cuda_launch.DEPENDENT_LAUNCHES = before


def measure(
    rounds: int, progress: Progress, *, variants: bool = False, models: Collection[str] = ()
) -> Iterator[list[dict[str, str]]]:
    """Rows of the CSV file, case by case, one per contender.

    `variants` adds other instances of the product kernel; `models` are names of models to leave it at (none: all).
    """
    device = torch.device("cuda", torch.cuda.current_device())
    ceilings = measure_ceilings(device)
    progress(f"copy {ceilings.copy_gbps:,.0f} GB/s, bf16 product {ceilings.matmul_tflops:,.0f} TFLOP/s")
    where = common.environment(torch.cuda.get_device_name(device), ("torch",))
    if variants:
        _build_variants(device)
    for case in all_cases():
        if models and case.model.name not in models:
            continue
        sets = min(MOST_SETS, step_layers(case.set_bytes, device))
        found = contenders(case, sets, device, variants and _has_variants(case))
        times = _time(found, rounds)
        del found
        columns = {"op": case.op, "model": case.model.name, "shape": case.shape, "rows": str(case.rows)}
        _report(progress, columns, case.set_bytes, times, ceilings)
        yield [_row(columns, case.set_bytes, sets, name, t, ceilings, rounds) | where for name, t in times.items()]
        torch.cuda.empty_cache()
    for model in (SMOL, QWEN25, QWEN3, LLAMA8B):
        for rows in STEP_ROWS if not models or model.name in models else ():
            step = DecodeStep(model, rows, device)
            _check_step(step)
            calls = {OURS: step.run, NORM_APART: step.run_norms_apart, "torch": step.run_library}
            times = _time({name: [call] for name, call in calls.items()}, rounds)
            size = step.set_bytes
            columns = {"op": "step", "model": model.name, "shape": f"{LAYERS[model.name]} layers", "rows": str(rows)}
            _report(progress, columns, size, times, ceilings)
            yield [_row(columns, size, 1, name, timed, ceilings, rounds) | where for name, timed in times.items()]
            del step, calls
            torch.cuda.empty_cache()


def _has_variants(case: Case) -> bool:
    return case.n > 0 and case.rows == 1 and case.model in (QWEN3, LLAMA8B)


def _build_variants(device: torch.device) -> None:
    """Compile side by side what would be compiled one after the other."""
    arch = cuda_build.arch_of(torch.cuda.get_device_capability(device))
    name = FLOAT_DTYPES[DTYPE]
    wanted = {config.spec(name) for case in all_cases() if _has_variants(case) for config in variants_of(case, device)}
    for _ in cuda_build.build_many([(spec, arch) for spec in sorted(wanted, key=str)]):
        pass


def _check_step(step: DecodeStep) -> None:
    expected = step.run_library()
    for run in (step.run, step.run_norms_apart):
        error = float((run() - expected).norm() / expected.norm())
        if not error <= 10 * ERROR_BOUNDS[DTYPE]:  # both round every layer in bfloat16, at other places
            raise WrongResultError(f"step of {step.model.name}, {len(step.ids)} rows: relative error {error:.2e}")


def _time(found: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, ReplayTime]:
    graphs = {name: StepGraph(calls) for name, calls in found.items()}
    if OURS in found:
        with _without_overlap():
            graphs[NO_OVERLAP] = StepGraph(found[OURS])
    return time_graphs(graphs, rounds)


def _report(
    progress: Progress, columns: Mapping[str, str], size: int, times: Mapping[str, ReplayTime], ceilings: Ceilings
) -> None:
    floor = size / ceilings.copy_gbps / 1e3
    line = ", ".join(f"{name.removeprefix(f'{OURS}, ')} {timed.median_us:.2f}" for name, timed in times.items())
    progress(f"{' '.join(columns.values())}: floor {floor:.2f} us: {line}")


def _row(
    columns: Mapping[str, str], size: int, sets: int, name: str, timed: ReplayTime, ceilings: Ceilings, rounds: int
) -> dict[str, str]:
    floor = size / ceilings.copy_gbps / 1e3
    return {
        **columns,
        "contender": name,
        "dtype": "bfloat16",
        "bytes": str(size),
        "sets": str(sets),
        "rounds": str(rounds),
        "median_us": f"{timed.median_us:.3f}",
        "min_us": f"{timed.min_us:.3f}",
        "max_us": f"{timed.max_us:.3f}",
        "gbps": f"{size / timed.median_us / 1e3:.1f}",
        "floor_us": f"{floor:.3f}",
        "copy_gbps": f"{ceilings.copy_gbps:.0f}",
        "matmul_tflops": f"{ceilings.matmul_tflops:.0f}",
    }


# ---- Saved rows ------------------------------------------------------------------------------------------------------


def _by_case(rows: Rows) -> dict[tuple[str, ...], dict[str, Mapping[str, str]]]:
    found: dict[tuple[str, ...], dict[str, Mapping[str, str]]] = {}
    for row in rows:
        key = (row["op"], row["model"], row["shape"], row["rows"])
        found.setdefault(key, {})[row["contender"]] = row
    return found


def _us(of: Mapping[str, Mapping[str, str]], name: str) -> str:
    return f"{float(of[name]['median_us']):,.2f}" if name in of else "-"


def table_cells(rows: Rows, kind: str) -> tuple[list[str], list[list[str]]]:
    """Column names and cells of one table: 'rows' (row-wise operations), 'products' or 'steps'."""
    peer = LIBRARY if kind == "products" else "torch"
    more = [] if kind == "rows" else [NORM_APART]
    heads = ["operation", "model", "shape", "rows", "floor, us", "minillm, us", "GB/s", "time / floor", "no overlap"]
    heads += ["norm apart"] * len(more) + [f"{peer}", "torch / ours"]
    cells = []
    for (op, model, shape, count), of in _by_case(rows).items():
        kinds = {True: "steps", False: "products" if LIBRARY in of else "rows"}
        if kinds[op == "step"] != kind or OURS not in of:
            continue
        mine = of[OURS]
        time_us, floor = float(mine["median_us"]), float(mine["bytes"]) / float(mine["copy_gbps"]) / 1e3
        ratio = float(of[peer]["median_us"]) / time_us
        line = [op, model, shape, count, f"{floor:,.2f}", f"{time_us:,.2f}", f"{float(mine['gbps']):,.0f}"]
        line += [f"{time_us / floor:.2f}", _us(of, NO_OVERLAP)]
        line += [_us(of, name) for name in (*more, peer)]
        cells.append([*line, f"{ratio:.2f}"])
    return heads, cells


def tables(rows: Rows) -> dict[str, tuple[list[str], list[list[str]]]]:
    """All tables by title."""
    names = {"rows": "Row-wise operations", "products": "Products of up to 128 rows", "steps": "A decode step"}
    return {f"{title}\n{provenance(rows)}": table_cells(rows, kind) for kind, title in names.items()}


def verdicts(rows: Rows) -> list[Verdict]:
    """What the project asks of the product kernel."""
    large = [
        of[OURS]
        for (op, *_, count), of in _by_case(rows).items()
        if LIBRARY in of and OURS in of and count == "1" and float(of[OURS]["bytes"]) >= LARGE_BYTES
    ]
    if not large:
        return []
    least = min(large, key=lambda row: float(row["gbps"]))
    text = f"weights of 30 MB and more with one row, at least {LARGE_GBPS:,.0f} GB/s at the worst shape"
    found = f"{float(least['gbps']):,.0f} GB/s ({least['model']} {least['op']})"
    return [Verdict(text, found, float(least["gbps"]) >= LARGE_GBPS)]


def provenance(rows: Rows) -> str:
    """Where the rows are from."""
    row = rows[0]
    return (
        f"{row['device']}, torch {row['torch']}, commit {row['commit']}, {row['date']}; in the same run a device copy "
        f"at {int(row['copy_gbps']):,} GB/s and a bf16 product of 8192 cubed at {row['matmul_tflops']} TFLOP/s; "
        f"{row['dtype']}"
    )


def _figures(rows: Rows) -> list[Figure]:
    figures = []
    for (op, model, _, count), of in _by_case(rows).items():
        if op == "step" and OURS in of:
            mine = of[OURS]
            spread = float(mine["max_us"]) - float(mine["min_us"])
            figures.append(Figure(f"{model} step, {count} rows", float(mine["median_us"]), "us", "lower", spread))
    return figures


def draw(rows: Rows, path: Path) -> None:
    """Share of the floor by the product's bytes, one row."""
    figure, axes = drawing.pyplot().subplots(figsize=(7, 4.4))
    cases = [of for (*_, count), of in _by_case(rows).items() if LIBRARY in of and OURS in of and count == "1"]
    for number, name in enumerate((OURS, NO_OVERLAP, LIBRARY)):
        points = sorted((float(of[name]["bytes"]) / 1e6, float(of[name]["gbps"])) for of in cases if name in of)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", ms=4, color=drawing.PALETTE[number], label=name)
    axes.set_xscale("log")
    axes.axhline(float(rows[0]["copy_gbps"]), color="black", linewidth=0.8)
    axes.set_xlabel("MB of the weight")
    drawing.grid(axes, "Products of one row, graph replay", "GB/s (line: a large copy)")
    drawing.save(figure, path, provenance(rows))


PROGRAM = Program(
    name="fused",
    title="Fused decoder kernels",
    about="The decoder's operations around attention at the shapes of known models, by CUDA graph replay over rotating "
    "inputs: norms, rotary embedding with the KV write, activation, and the products of up to 128 rows with what is "
    "fused to them, against torch and against the bytes that must move at the rate of a large copy in the same run.",
    tables=tables,
    plots={"": draw},
    figures=_figures,
    settings=lambda rows: rows[0]["dtype"],
    verdicts=verdicts,
)
