"""`minillm bench NAME` for whole engines, and what works on all results: report, history, all."""

from __future__ import annotations

import time
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
    Quick,
    Repeats,
    Seed,
    bench_app,
    device_of,
    publish,
)
from minillm.cli.options import with_options
from minillm.core.errors import ConfigError, MiniLLMError

_Results = Annotated[Path, typer.Option("--results", help="Folder with the CSV files and the history.")]
_Batches = Annotated[
    list[int] | None, typer.Option("--batch", min=1, help="Requests together; may be repeated.", show_default=False)
]
_ModelByDevice = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="As for `minillm generate`, or random:NAME [CPU: smollm2-135m; GPU: random:qwen3-0.6b].",
        show_default=False,
    ),
]

DEFAULT_MODEL = "smollm2-135m"
GPU_MODEL = "random:qwen3-0.6b"
QUICK_FOLDER = "quick"


@bench_app.command("static")
@with_options()
def static(
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated [CPU: float32, auto; GPU: float16, bfloat16].", show_default=False),
    ] = None,
    batch: _Batches = None,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens.")] = 32,
    repeats: Repeats = 5,
    cpu_time: CpuTime = False,
    seed: Seed = 0,
    output: Output = RESULTS / "static.csv",
    from_csv: FromCSV = None,
) -> None:
    """Static batching: a batch runs from its first step to its last; batch 1, 2, 4, 8, 16 if not given, per dtype."""
    from minillm.bench import static_batching as bench

    rows = None
    if from_csv is None:
        where = device_of(device).type
        options = bench.Options(
            model=model,
            device=where,
            dtypes=dtype or (("float32", "auto") if where == "cpu" else ("float16", "bfloat16")),
            batches=batch or bench.BATCHES,
            prompt=prompt,
            output=output_tokens,
            repeats=repeats,
            seed=seed,
            cpu_time=cpu_time,
        )
        rows = bench.measure(options, console.info)
    publish(bench.PROGRAM, output, rows, from_csv)


@bench_app.command("offline")
@with_options()
def offline(
    model: _ModelByDevice = None,
    device: Device = "auto",
    dtype: DType = "auto",
    requests: Annotated[int | None, typer.Option(min=1, help="[GPU: 256; CPU: 32]", show_default=False)] = None,
    max_prompt: Annotated[
        int | None, typer.Option(min=1, help="Cut prompts to so many tokens [CPU: 256].", show_default=False)
    ] = None,
    max_output: Annotated[
        int | None, typer.Option(min=1, help="Cut outputs to so many tokens [CPU: 64].", show_default=False)
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences that run at once.")] = 256,
    repeats: Repeats = 1,
    cpu_time: CpuTime = False,
    seed: Seed = 0,
    output: Output = RESULTS / "offline.csv",
    from_csv: FromCSV = None,
) -> None:
    """Output tokens per second on the public offline workload: 256 requests, 100-1024 tokens in, 100-1024 out."""
    from minillm.bench import common
    from minillm.bench import offline as bench

    rows = None
    if from_csv is None:
        where = device_of(device).type
        small = where == "cpu"
        options = bench.Options(
            model=model or (DEFAULT_MODEL if small else GPU_MODEL),
            device=where,
            dtype=dtype,
            requests=requests or (32 if small else 256),
            max_prompt=max_prompt or (256 if small else None),
            max_output=max_output or (64 if small else None),
            max_num_seqs=max_num_seqs,
            repeats=repeats,
            seed=seed,
            cpu_time=cpu_time,
        )
        rows, last = bench.measure(options, console.info)
        common.write_csv(bench.curve_path(output), bench.curve_rows(last))
    publish(bench.PROGRAM, output, rows, from_csv)


@bench_app.command("latency")
@with_options()
def latency(
    model: _ModelByDevice = None,
    device: Device = "auto",
    dtype: DType = "auto",
    batch: _Batches = None,
    prompt: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Prompt tokens of first-token times; may be repeated.", show_default=False),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens of the batches [CPU: 128; GPU: 512].", show_default=False)
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=3, help="Steps that decode a whole batch.")] = 33,
    repeats: Repeats = 5,
    cpu_time: CpuTime = False,
    seed: Seed = 0,
    output: Output = RESULTS / "latency.csv",
    from_csv: FromCSV = None,
) -> None:
    """Time to the first token by prompt length and per token by batch, each as measured / floor."""
    from minillm.bench import latency as bench

    rows = None
    if from_csv is None:
        where = device_of(device).type
        small = where == "cpu"
        options = bench.Options(
            model=model or (DEFAULT_MODEL if small else GPU_MODEL),
            device=where,
            dtype=dtype,
            batches=batch or ((1, 2, 4, 8, 16) if small else (1, 8, 32, 64, 128, 256)),
            prompts=prompt or ((32, 128, 512) if small else (128, 1024, 8192)),
            context=context or (128 if small else 512),
            output=output_tokens,
            repeats=repeats,
            seed=seed,
            cpu_time=cpu_time,
        )
        rows = bench.measure(options, console.info)
    publish(bench.PROGRAM, output, rows, from_csv)


@bench_app.command("gpu-table")
@with_options()
def gpu_table(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="May be repeated [random:qwen3-0.6b, random:llama-3.1-8b, random:qwen2.5-0.5b].",
            show_default=False,
        ),
    ] = None,
    device: Device = "cuda",
    dtype: DType = "auto",
    runs: Annotated[int, typer.Option(min=1, help="Of everything; figures are medians.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Of the short measurements within a run.")] = 5,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Look prompts up in the prefix cache.")] = False,
    quick: Quick = False,
    seed: Seed = 0,
    output: Output = RESULTS / "gpu_table.csv",
    from_csv: FromCSV = None,
) -> None:
    """Offline throughput, time per token, decode steps, first token, prefill: each beside its floor and vLLM's."""
    from minillm.bench import gpu_table as bench

    rows = None
    if from_csv is None:
        options = bench.Options(
            models=model or (("random:tiny",) if quick else bench.MODELS),
            device=device_of("auto" if quick else device).type,
            dtype=dtype,
            sizes=bench.SMALL if quick else bench.Sizes(),
            runs=runs,
            repeats=repeats,
            seed=seed,
            prefix_caching=enable_prefix_caching,
        )
        rows = bench.measure(options, console.info)
    publish(bench.PROGRAM, output, rows, from_csv)


@bench_app.command("startup")
@with_options()
def startup(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="A model's folder or name, or random:NAME, which is written to --folder first; may be repeated "
            "[CPU: smollm2-135m; GPU: random:qwen3-0.6b].",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
    folder: Annotated[Path, typer.Option(help="Where folders of random:NAME are written and kept.")] = Path("/tmp"),
    runs: Annotated[int, typer.Option(min=1, help="Processes that count; figures are medians.")] = 3,
    output: Output = RESULTS / "startup.csv",
    from_csv: FromCSV = None,
) -> None:
    """From the start of a process to its first token, phase by phase, in fresh processes."""
    from minillm.bench import startup as bench

    rows = None
    if from_csv is None:
        from minillm.bench.model_folder import write_model_folder

        where = device_of(device).type
        names = model or [DEFAULT_MODEL if where == "cpu" else GPU_MODEL]
        paths = []
        for name in names:
            shape = name.removeprefix("random:")
            if shape != name:
                name = str(write_model_folder(shape, folder / f"minillm-{shape}", device=where))
            paths.append(name)
        rows = bench.run(paths, bench.Options(model=paths[0], device=where, runs=runs), console.info)
    publish(bench.PROGRAM, output, rows, from_csv)


@bench_app.command("pressure")
@with_options()
def pressure(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="[CPU: random:tiny; GPU: random:qwen3-0.6b].", show_default=False),
    ] = None,
    device: Device = "auto",
    dtype: DType = "auto",
    requests: Annotated[int | None, typer.Option(min=4, help="[GPU: 192; CPU: 16]", show_default=False)] = None,
    prompt: Annotated[
        tuple[int, int] | None,
        typer.Option(help="Prompt tokens, from and to [GPU: 2048 2560; CPU: 32 96].", show_default=False),
    ] = None,
    output_tokens: Annotated[
        tuple[int, int] | None,
        typer.Option(help="Output tokens, from and to [GPU: 160 304; CPU: 32 64].", show_default=False),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Of each way; figures are medians.")] = 3,
    seed: Seed = 0,
    output: Output = RESULTS / "pressure.csv",
    from_csv: FromCSV = None,
) -> None:
    """Throughput and tokens with a KV pool of a quarter of the need, by swapping and by recomputing."""
    from minillm.bench import pressure as bench

    rows = None
    if from_csv is None:
        where = device_of(device).type
        small = where == "cpu"
        options = bench.Options(
            model=model or ("random:tiny" if small else GPU_MODEL),
            device=where,
            dtype=dtype,
            requests=requests or (16 if small else 192),
            prompt=prompt or ((32, 96) if small else (2048, 2560)),
            output=output_tokens or ((32, 64) if small else (160, 304)),
            runs=runs,
            seed=seed,
        )
        rows = bench.measure(options, console.info)
    publish(bench.PROGRAM, output, rows, from_csv)


@bench_app.command("report")
@with_options()
def report(
    results: _Results = RESULTS,
    output: Annotated[
        Path | None, typer.Option(help="Markdown file to write [report.md in the folder].", show_default=False)
    ] = None,
) -> None:
    """One Markdown page with the tables and plots of all saved results, the tested environments and the history."""
    _write_report(results, output or results / "report.md")


def _write_report(results: Path, output: Path) -> None:
    from minillm.bench import report as bench

    titles = bench.write(results, output)
    print(f"{output}: {len(titles)} sections: {', '.join(titles)}" if titles else f"{output}: no results in {results}")


@bench_app.command("history")
@with_options()
def history(
    results: _Results = RESULTS,
    program: Annotated[str | None, typer.Option(help="Only this program's figures.", show_default=False)] = None,
    fail: Annotated[bool, typer.Option("--fail-on-regression", help="Exit code 1 if there is a regression.")] = False,
) -> None:
    """Every headline figure's last value against its earlier runs; regressions beyond the noise seen are flagged."""
    if not (results / "history.csv").is_file():
        raise ConfigError(f"{results} has no history.csv")
    if _show_history(results, program) and fail:
        raise typer.Exit(console.FAILURE)


def _show_history(results: Path, program: str | None) -> bool:
    """Print and draw the changes; whether there is a regression."""
    from minillm.bench import common, drawing
    from minillm.bench import history as bench
    from minillm.bench.report import draw_history, summary

    found = bench.changes(bench.read(results / "history.csv"))
    if program is not None:
        found = [change for change in found if change.last.program == program]
    console.answer_console().print(common.make_table("Last run against those before", *bench.table_cells(found)))
    print(summary(found))
    if drawing.has_matplotlib() and any(change.before for change in found):
        draw_history(found, results / "history.png")
        console.info(f"drawn: {results / 'history.png'}")
    return any(change.verdict == "REGRESSION" for change in found)


QUICK: dict[str, list[str]] = {
    "static": ["--model", "random:tiny", "--dtype", "float32", "--dtype", "bfloat16", "--repeats", "3"],
    "offline": [
        "--model",
        "random:tiny",
        "--requests",
        "32",
        "--max-prompt",
        "128",
        "--max-output",
        "48",
        "--repeats",
        "3",
    ],
    "latency": ["--model", "random:tiny", "--repeats", "3", "--output-tokens", "17"],
    "pressure": ["--requests", "8", "--prompt", "24", "48", "--output-tokens", "30", "50", "--runs", "1"],
    "startup": ["--model", "random:tiny", "--runs", "1"],
    **{name: ["--quick"] for name in ("sla", "sla-model", "prefix", "prefix-model")},
    "scheduler": ["--running", "1", "--running", "16", "--running", "64", "--steps", "300"],
    "engine": ["--running", "1", "--running", "16", "--steps", "100", "--step-ms", "2"],
    "materialize": ["--layers", "4", "--length", "128", "--length", "1024", "--iterations", "5"],
    "paged-attention": ["--length", "128", "--length", "1024", "--iterations", "5", "--dtype", "float32"],
    "swap": ["--blocks", "4", "--blocks", "16", "--repeats", "3"],
    "modes": ["--model", "random:tiny", "--requests", "16", "--mean-output", "20", "--repeats", "3"],
    "stress": ["--model", "random:toy", "--factor", "victim", "--factor", "preemption", "--repeats", "3"],
}
"""What programs are run with by `bench all --quick`; those that are not here have a --quick of their own."""
GPU_ONLY: dict[str, list[str]] = {
    "gpu-table": ["gpu-table"],
    "fused": ["fused"],
    **{f"{table}-peers": ["paged-attention", "--peers", table] for table in ("decode", "prefill")},
    "sampling": ["sampling"],
}
"""Programs that have nothing to measure without a GPU, with their command."""
NOT_QUICK = {
    "cpu": "it compares with transformers on the built-in model, minutes and a download",
    **dict.fromkeys(GPU_ONLY, "minutes of a GPU"),
}


@bench_app.command("all")
@with_options()
def run_all(
    quick: Quick = False,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            help="Folder to write to [benchmarks/results; with --quick its folder quick].",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Every program, then the report and the history. A program that fails is named, and the others still run."""
    from minillm.bench.program import PROGRAMS

    results = results or (RESULTS / QUICK_FOLDER if quick else RESULTS)
    begin, failed = time.perf_counter(), []
    has_gpu = device_of("auto").type == "cuda"
    for name in PROGRAMS:
        if name in GPU_ONLY and not has_gpu:
            console.info(f"{name}: skipped: it needs a GPU")
            continue
        if quick and name in NOT_QUICK:
            console.info(f"{name}: skipped by --quick: {NOT_QUICK[name]}")
            continue
        if not _run_program(name, results, quick):
            failed.append(name)
    _write_report(results, results / "report.md")
    _show_history(results, None)
    print(f"{time.perf_counter() - begin:.0f} s" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if failed:
        raise typer.Exit(console.FAILURE)


def _run_program(name: str, results: Path, quick: bool) -> bool:
    """Run one program's command; an error of its own is one line, and False."""
    from minillm.bench.program import get_program
    from minillm.cli.app import app

    arguments = [*GPU_ONLY.get(name, [name]), *(QUICK.get(name, ["--quick"]) if quick else [])]
    start = time.perf_counter()
    console.info(f"-- {name}")
    console.arguments = ("bench", *arguments, "--output", str(results / get_program(name).csv))
    try:
        app(list(console.arguments), standalone_mode=False)
    except MiniLLMError as error:
        console.print_error(f"{name}: {error}")
        return False
    except Exception as error:
        console.print_error(f"{name}: {type(error).__name__}: {error}")
        return False
    console.info(f"{name}: {time.perf_counter() - start:.1f} s")
    return True
