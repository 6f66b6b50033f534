"""`minillm bench startup`: from the start of a process to its first token, phase by phase.

Every run is a fresh Python process, as a user's is: nothing is imported, no context exists on the device. The model's
files are read once before, so that they are in the page cache, and a run that is not counted comes first, so that
kernels are in the disk cache.

Phases, in the order in which they end: `interpreter` (Python itself, until its first line), `imports` (this package and
torch), `device` (finding it and the CUDA context), `weights`, `tokenizer` (what of it was not hidden behind the
weights), `engine` (KV pool, swap space, the largest step), `first token` (a prompt of 16 tokens).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.bench import common, drawing
from minillm.bench.history import Figure
from minillm.bench.program import Cells, Program, Rows, provenance

PHASES = ("interpreter", "imports", "device", "weights", "tokenizer", "engine", "first token")
TIMEOUT = 600.0


def _column(phase: str) -> str:
    return f"{phase.replace(' ', '_')}_s"


CHILD = """
import time
marks = [("interpreter", time.time())]
import json, sys
from minillm import EngineConfig, Runtime, SamplingParams
from minillm.engine import factory
import torch
import minillm.models.loader, minillm.models.tokenizer, minillm.runner.pytorch_model_runner
marks.append(("imports", time.time()))
options = json.loads(sys.argv[1])

def marked(owner, name, phase, *more):
    function = getattr(owner, name)
    def call(*arguments, **keywords):
        result = function(*arguments, **keywords)
        if phase == "device" and str(result).startswith("cuda"):
            torch.zeros(1, device=result)
        marks.append((phase, time.time()))
        return result
    setattr(owner, name, call)

marked(factory, "resolve_device", "device")
marked(minillm.models.loader, "load_model", "weights")
marked(factory, "_limits", "tokenizer")
with Runtime(EngineConfig(**options)) as runtime:
    marks.append(("engine", time.time()))
    output = runtime.submit(list(range(3, 19)), SamplingParams(max_tokens=1, ignore_eos=True)).result()
    marks.append(("first token", time.time()))
    assert len(output.outputs[0].token_ids) == 1
    print(json.dumps({"marks": marks, "device": runtime.model_info.device, "dtype": runtime.model_info.dtype}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to start; `settings` are further fields of EngineConfig."""

    model: str
    device: str
    runs: int = 3
    settings: Mapping[str, Any] = field(default_factory=dict)


def measure(options: Options, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One row per run: seconds of each phase and in all."""
    import torch

    from minillm.bench.timing import device_name

    size = _read_files(Path(options.model))
    arguments = {"model": options.model, "device": options.device, **options.settings}
    start_process(arguments)
    rows = []
    for run in range(options.runs):
        phases, more = start_process(arguments)
        rows.append(
            {
                "model": Path(options.model).name,
                "dtype": more["dtype"],
                "run": run,
                "weights_bytes": size,
                **{_column(name): round(phases[name], 4) for name in PHASES},
                "seconds": round(sum(phases.values()), 4),
                **common.environment(device_name(torch.device(options.device))),
            }
        )
        progress(f"run {run + 1}: {rows[-1]['seconds']:.2f} s to the first token")
    return rows


def start_process(options: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Start one process; seconds of each phase, and what it says of itself."""
    begin = time.time()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    if done.returncode != 0:
        raise RuntimeError(f"the process ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    phases, before = {}, begin
    for name, moment in answer["marks"]:
        phases[name] = moment - before
        before = moment
    return phases, answer


def _read_files(folder: Path) -> int:
    """Read the model's weights, so that they are in the page cache; their bytes (0 for a model that is no folder)."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with path.open("rb", buffering=0) as file:
            while data := file.read(64 << 20):
                total += len(data)
    return total


def tables(rows: Rows) -> dict[str, Cells]:
    """Medians of the phases, one line per model."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        medians = [statistics.median(float(row[_column(name)]) for row in mine) for name in PHASES]
        whole = common.Summary.of([float(row["seconds"]) for row in mine])
        size = f"{int(mine[0]['weights_bytes']) / 1e9:.1f}"
        lines.append([model, mine[0]["dtype"], size, *(f"{value:.2f}" for value in medians), whole.text(".2f")])
    columns = ["model", "dtype", "weights, GB", *PHASES, "process start to first token, s: median (range)"]
    return {f"Start-up, seconds, {len({row['run'] for row in rows})} runs ({provenance(rows)})": (columns, lines)}


def draw(rows: Rows, path: Path) -> None:
    """The phases of every model's median, one behind the other."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = drawing.pyplot().subplots(figsize=(8, 0.6 * len(models) + 1.6))
    for place, model in enumerate(models):
        mine, left = [row for row in rows if row["model"] == model], 0.0
        for number, name in enumerate(PHASES):
            value = statistics.median(float(row[_column(name)]) for row in mine)
            colour = drawing.PALETTE[number % len(drawing.PALETTE)]
            axes.barh(place, value, left=left, color=colour, alpha=0.9, label=name if not place else None)
            left += value
    axes.set_yticks(range(len(models)), models, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the start of the process")
    drawing.grid(axes, "Start-up", "")
    drawing.save(figure, path, provenance(rows))


def figures(rows: Rows) -> list[Figure]:
    """Median seconds of each model."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        whole = common.Summary.of([float(row["seconds"]) for row in rows if row["model"] == model])
        found.append(Figure(model, whole.median, "s", "lower", whole.spread))
    return found


def run(models: Sequence[str], options: Options, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """All models, one after the other."""
    rows: list[dict[str, Any]] = []
    for model in models:
        progress(model)
        rows += measure(
            Options(model=model, device=options.device, runs=options.runs, settings=options.settings), progress
        )
    return rows


PROGRAM = Program(
    name="startup",
    title="Start-up",
    about="From the start of a fresh Python process to the first token of a prompt of 16 tokens. The weights are in "
    "the page cache and the kernels in the disk cache: one process that is not counted runs before. `tokenizer` is "
    "what of its loading was not hidden behind the weights; `engine` is KV pool, swap space and the largest step.",
    tables=tables,
    plots={"": draw},
    figures=figures,
    settings=lambda rows: rows[0]["dtype"],
)
"""The program of `minillm bench startup`."""
