"""What the commands under `minillm bench` share: the group itself, common options, and publishing a run's results."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minillm.cli import console

if TYPE_CHECKING:
    import torch

    from minillm.bench.program import Program

bench_app = typer.Typer(help="Measure this runtime on this machine.", no_args_is_help=True, rich_markup_mode=None)

RESULTS = Path("benchmarks/results")

FromCSV = Annotated[
    Path | None,
    typer.Option(help="Print the tables and draw the plots of this CSV file; measure nothing.", show_default=False),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Output = Annotated[Path, typer.Option(help="CSV file to write; the plot goes beside it.")]
DType = Annotated[str, typer.Option(help="As for `minillm generate`.")]
Seed = Annotated[int, typer.Option(help="Of the inputs.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed repeats, after a warm-up; figures are medians.")]
Model = Annotated[
    str, typer.Option("--model", "-m", help="As for `minillm generate`, or random:tiny (random weights, made here).")
]
CpuTime = Annotated[
    bool,
    typer.Option("--cpu-time", help="Measure CPU time of this process: on a machine that others use, with one thread."),
]
Quick = Annotated[bool, typer.Option("--quick", help="A tiny model and small sizes: a check that everything runs.")]


def publish(
    program: Program, output: Path, rows: Sequence[Mapping[str, Any]] | None = None, from_csv: Path | None = None
) -> None:
    """Save fresh `rows` in `output` and the history beside it; print the tables and draw the plots of what is saved.

    With `from_csv` that file is shown, and nothing is written but plots beside it.
    """
    from minillm.bench import common, drawing

    if rows is not None:
        common.write_csv(output, with_command(rows))
        console.info(f"written: {output}")
    path = from_csv or output
    shown = program.show(path)
    answer = console.answer_console()
    for title, cells in shown.tables.items():
        answer.print(common.make_table(title, *cells))
    for verdict in shown.verdicts:
        print(f"{'met' if verdict.met else 'NOT MET'}: {verdict.requirement}: {verdict.found}")
    if drawing.has_matplotlib():
        for picture in program.draw(shown.rows, path):
            console.info(f"drawn: {picture}")
    else:
        console.info("no plot: pip install 'minillm-runtime[benchmark]' for matplotlib")
    if rows is not None:
        history = output.parent / "history.csv"
        program.remember(shown.rows, history)
        console.info(f"remembered: {history}")


def with_command(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the command line that is running, in those that were measured by it and not read from a file."""
    return [{**row, "command": row.get("command") or command_line()} for row in rows]


def command_line() -> str:
    """The command that is running, as it was given; that of the program where `all` or a script began it."""
    return shlex.join(["minillm", *console.arguments])


def device_of(name: str) -> torch.device:
    """The device of a benchmark; ConfigError for one that is not there or cannot be used."""
    import torch

    from minillm.engine.devices import resolve_device

    return torch.device(resolve_device(name))
