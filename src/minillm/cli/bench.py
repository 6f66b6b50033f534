"""`minillm bench NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minillm.cli import console
from minillm.cli.options import with_options

bench_app = typer.Typer(help="Measure this runtime on this machine.", no_args_is_help=True, rich_markup_mode=None)

_FromCSV = Annotated[
    Path | None, typer.Option(help="Print the tables of this CSV file; measure nothing.", show_default=False)
]


@bench_app.command("cpu")
@with_options()
def cpu(
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds; figures are medians.")] = 7,
    streams: Annotated[int, typer.Option(min=2, help="Concurrent requests of the second workload.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per request.")] = 64,
    load: Annotated[bool, typer.Option(help="Also time loading, in fresh processes.")] = True,
    memory: Annotated[bool, typer.Option(help="Also measure the peak memory of generating for 64 requests.")] = True,
    output: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("benchmarks/results/cpu.csv"),
    from_csv: _FromCSV = None,
) -> None:
    """This engine against transformers' `generate` on this CPU, same weights, one run."""
    from minillm.bench import common, cpu_bench

    if from_csv is None:
        options = cpu_bench.Options(repeats=repeats, streams=streams, new_tokens=new_tokens, load=load, memory=memory)
        common.write_csv(output, cpu_bench.measure(options, console.info))
        console.info(f"written: {output}")
    answer = console.answer_console()
    for table in cpu_bench.report(common.read_csv(from_csv or output)):
        answer.print(table)


@bench_app.command("scheduler")
@with_options()
def scheduler(
    running: Annotated[list[int] | None, typer.Option(min=1, help="Running requests; may be repeated.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the load.")] = 0,
    output: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("benchmarks/results/scheduler.csv"),
    from_csv: _FromCSV = None,
) -> None:
    """Time of schedule + commit per step, by running requests (1, 16, 64, 256, 1024 if not given)."""
    from minillm.bench import scheduler_bench

    numbers = tuple(running) if running else scheduler_bench.RUNNING
    scheduler_bench.run(running=numbers, steps=steps, seed=seed, output=output, from_csv=from_csv)
