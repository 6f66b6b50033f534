"""What the commands under `minillm bench` share: the group itself, common options, and publishing a run's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minillm.cli import console
from minillm.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from minillm.bench.program import Program

bench_app = typer.Typer(help="Measure this runtime on this machine.", no_args_is_help=True, rich_markup_mode=None)

RESULTS = Path("benchmarks/results")

FromCSV = Annotated[
    Path | None,
    typer.Option(help="Print the tables and draw the plots of this CSV file; measure nothing.", show_default=False),
]
Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
Seed = Annotated[int, typer.Option(help="Of the inputs.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed repeats, after a warm-up; figures are medians.")]
Model = Annotated[
    str, typer.Option("--model", "-m", help="As for `minillm generate`, or random:tiny (random weights, made here).")
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
        common.write_csv(output, rows)
        console.info(f"written: {output}")
    path = from_csv or output
    saved = common.read_csv(path)
    if not saved:
        raise ConfigError(f"{path} has no rows")
    answer = console.answer_console()
    try:
        tables = program.tables(saved)
    except KeyError as error:
        raise ConfigError(f"{path} is not a result of `bench {program.name}`: it has no column {error}") from error
    for title, cells in tables.items():
        answer.print(common.make_table(title, *cells))
    for verdict in program.verdicts(saved):
        print(f"{'met' if verdict.met else 'NOT MET'}: {verdict.requirement}: {verdict.found}")
    if drawing.has_matplotlib():
        for picture in program.draw(saved, path):
            console.info(f"drawn: {picture}")
    else:
        console.info("no plot: pip install 'minillm-runtime[benchmark]' for matplotlib")
    if rows is not None:
        history = output.parent / "history.csv"
        program.remember(saved, history)
        console.info(f"remembered: {history}")


def device_of(name: str) -> torch.device:
    """The device of a benchmark; ConfigError for one that is not there."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cuda", "cpu"):
        raise ConfigError(f"device={name!r} must be auto, cuda or cpu")
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device=cuda: torch sees no CUDA device here (see `minillm doctor`)")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
