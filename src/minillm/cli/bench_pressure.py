"""`minillm bench modes` and `stress`: ways of serving, and what memory pressure does to them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minillm.cli import console
from minillm.cli.bench_frame import (
    RESULTS,
    CpuTime,
    Device,
    DType,
    FromCSV,
    Model,
    Output,
    Repeats,
    Seed,
    bench_app,
    device_of,
    publish,
    with_command,
)
from minillm.cli.options import with_options
from minillm.core.errors import ConfigError


@bench_app.command("modes")
@with_options()
def modes(
    model: Model = "smollm2-135m",
    device: Device = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="As for `minillm generate` [auto; a CPU that multiplies bfloat16: bfloat16, whose steps cost about "
            "the same for one row and for eight].",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option(help="Of the outputs: uniform, lognormal, fixed; may be repeated.", show_default=False),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests, all there from the start.")] = 32,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens of each.")] = 16,
    mean_output: Annotated[int, typer.Option(min=1, help="Output tokens, on average.")] = 40,
    batch: Annotated[int, typer.Option(min=1, help="Most requests that run at once.")] = 8,
    pool_share: Annotated[
        float, typer.Option(help="Pool of the modes under pressure: share of what the batch needs at its longest.")
    ] = 0.5,
    repeats: Repeats = 5,
    cpu_time: CpuTime = False,
    seed: Seed = 0,
    output: Output = RESULTS / "modes.csv",
    from_csv: FromCSV = None,
) -> None:
    """Static, continuous, continuous under pressure (recompute, swap, auto) and the raw kernel loop on one workload."""
    from minillm.bench import modes as bench

    rows = None
    if from_csv is None:
        where = device_of(device).type
        options = bench.Options(
            model=model,
            device=where,
            dtype=dtype or bench.default_dtype(where),
            lengths=lengths or ("uniform", "lognormal"),
            requests=requests,
            prompt=prompt,
            mean_output=mean_output,
            batch=batch,
            pool_share=pool_share,
            repeats=repeats,
            seed=seed,
            cpu_time=cpu_time,
        )
        rows = bench.measure(options, console.info)
    publish(bench.PROGRAM, output, rows, from_csv)


@bench_app.command("stress")
@with_options()
def stress(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="As for `minillm generate`, or random:SHAPE [CPU: random:toy; GPU: smollm2-135m].",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
    dtype: DType = "auto",
    design: Annotated[
        str, typer.Option(help="victims (every policy), factorial (every combination of the factors), or all.")
    ] = "all",
    factor: Annotated[
        list[str] | None,
        typer.Option(
            help="Switched by the factorial: admission, victim, preemption, cap; may be repeated.", show_default=False
        ),
    ] = None,
    large: Annotated[int, typer.Option(min=0, help="Requests of 64 + 80 tokens.")] = 4,
    small: Annotated[int, typer.Option(min=0, help="Requests of 8 + 10 tokens.")] = 4,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of 16 tokens in the pool.")] = 16,
    policy_file: Annotated[
        Path | None,
        typer.Option(help="Python file that registers policies of your own; they take part.", show_default=False),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rounds, each over all settings [random:toy on a CPU: 40; else 20].", show_default=False
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the rounds saved in the CSV file.")] = False,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which no further round begins.", show_default=False)
    ] = None,
    cpu_time: CpuTime = False,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option(help="CSV file to write; plot and page go beside it.")] = RESULTS
    / "stress.csv",
    from_csv: FromCSV = None,
) -> None:
    """Memory pressure: victim policies against each other, and a difference attributed to four switched factors."""
    from minillm.bench import common, stress_report
    from minillm.bench import stress as bench

    rows = None
    if from_csv is None:
        queues, victims = _own_policies(policy_file)
        where = device_of(device).type
        by_default = "random:toy" if where == "cpu" else "smollm2-135m"
        options = bench.Options(
            model=model or by_default,
            device=where,
            dtype=dtype,
            design=design,
            factors=tuple(factor) if factor else bench.FACTORS,
            large=large,
            small=small,
            num_blocks=blocks,
            repeats=repeats or (40 if (model or by_default, where) == ("random:toy", "cpu") else 20),
            time_limit=time_limit,
            seed=seed,
            cpu_time=cpu_time,
            extra_queues=queues,
            extra_victims=victims,
        )
        rows = list(bench.read(output)) if resume and output.is_file() else []
        for part in bench.measure(options, console.info, rows):
            rows += with_command(part)
            common.write_csv(output, rows)
        if not rows:
            raise ConfigError(f"time_limit={time_limit}: not one round was run")
    publish(stress_report.PROGRAM, output, rows, from_csv)
    path = from_csv or output
    page = path.with_suffix(".md")
    picture = path.with_suffix(".png").name
    page.write_text(stress_report.markdown(common.read_csv(path), picture), encoding="utf-8")
    console.info(f"written: {page}")


def _own_policies(path: Path | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of (queue, victim) policies that the user's file registers."""
    if path is None:
        return (), ()
    from minillm.core.policies import QUEUE_POLICIES, VICTIM_POLICIES
    from minillm.core.policy_file import load_policy_file

    names = load_policy_file(path)
    return tuple(n for n in names if n in QUEUE_POLICIES), tuple(n for n in names if n in VICTIM_POLICIES)
