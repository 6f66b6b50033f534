"""`minillm bench NAME`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minillm.cli import console
from minillm.cli.options import with_options
from minillm.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from minillm.bench.attention_batch import AttentionShape
    from minillm.bench.common import Verdict

bench_app = typer.Typer(help="Measure this runtime on this machine.", no_args_is_help=True, rich_markup_mode=None)

_FromCSV = Annotated[
    Path | None, typer.Option(help="Print the tables of this CSV file; measure nothing.", show_default=False)
]
_RedrawCSV = Annotated[
    Path | None,
    typer.Option(help="Print the tables and draw the plots of this CSV file; measure nothing.", show_default=False),
]
_Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
_Lengths = Annotated[
    list[int] | None,
    typer.Option("--length", min=1, help="Tokens in the sequence; may be repeated.", show_default=False),
]
_Seed = Annotated[int, typer.Option(help="Of the inputs.")]

_Cells = tuple[list[str], list[list[str]]]


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


@bench_app.command("materialize")
@with_options()
def materialize(
    device: _Device = "auto",
    length: _Lengths = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the cache.")] = 24,
    heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 2,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 64,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    iterations: Annotated[int, typer.Option(min=3, help="Timed calls of each path and length.")] = 50,
    seed: _Seed = 0,
    output: Annotated[Path, typer.Option(help="CSV file to write; the plot goes beside it.")] = Path(
        "benchmarks/results/materialize.csv"
    ),
    from_csv: _RedrawCSV = None,
) -> None:
    """What copying a sequence's K and V out of the pages costs, per length, one layer and all."""
    from minillm.bench import common, plots
    from minillm.bench import materialize as bench

    if from_csv is None:
        where = _device(device)
        options = bench.Options(
            device=where,
            shape=_shape(heads, heads, head_dim, block_size, dtype),
            layers=layers,
            lengths=_lengths(length, where),
            iterations=iterations,
            seed=seed,
        )
        common.write_csv(output, bench.measure(options, console.info))
        console.info(f"written: {output}")
    rows = common.read_csv(from_csv or output)
    _print_table("Copying K and V out of the pages", bench.table_cells(rows))
    _print_table("Cost by least squares", bench.analysis_cells(rows))
    _draw(plots.draw_materialize, rows, from_csv or output)


@bench_app.command("paged-attention")
@with_options()
def paged_attention(
    device: _Device = "auto",
    length: _Lengths = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 2,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads [as many].", show_default=False)] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 64,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    iterations: Annotated[int, typer.Option(min=3, help="Timed calls of each path and length.")] = 100,
    seed: _Seed = 0,
    peers: Annotated[
        str | None,
        typer.Option(help="Instead, the kernels against FlashInfer and torch: decode or prefill.", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds of --peers.")] = 30,
    output: Annotated[
        Path | None, typer.Option(help="CSV file to write; the plot goes beside it.", show_default=False)
    ] = None,
    from_csv: _RedrawCSV = None,
) -> None:
    """Attention straight from the pages against materialise-then-attend and against contiguous K and V."""
    from minillm.bench import common, plots
    from minillm.bench import paged_attention as bench

    if peers is not None:
        _peers(peers, rounds, output, from_csv)
        return
    output = output or common.RESULTS / "paged_attention.csv"
    if from_csv is None:
        where = _device(device)
        options = bench.Options(
            device=where,
            shape=_shape(heads, kv_heads or heads, head_dim, block_size, dtype),
            lengths=_lengths(length, where),
            iterations=iterations,
            seed=seed,
        )
        common.write_csv(output, bench.measure(options, console.info))
        console.info(f"written: {output}")
    rows = common.read_csv(from_csv or output)
    _print_table(f"One decode step, one layer\n{bench.provenance(rows)}", bench.table_cells(rows))
    _print_verdicts(bench.verdicts(rows))
    _draw(plots.draw_paged_attention, rows, from_csv or output)


@bench_app.command("swap")
@with_options()
def swap(
    device: _Device = "auto",
    blocks: Annotated[
        list[int] | None, typer.Option(min=1, help="Blocks to move; may be repeated [16, 64, 256].", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats; figures are medians.")] = 10,
    seed: _Seed = 0,
    output: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("benchmarks/results/swap.csv"),
    from_csv: _FromCSV = None,
) -> None:
    """KV blocks of Llama-3.1-8B to host memory and back, against a plain copy and beside computing."""
    from minillm.bench import common
    from minillm.bench import swap as bench

    if from_csv is None:
        counts = tuple(blocks) if blocks else bench.BLOCK_COUNTS
        options = bench.Options(device=_device(device), blocks=counts, repeats=repeats, seed=seed)
        common.write_csv(output, bench.measure(options, console.info))
        console.info(f"written: {output}")
    rows = common.read_csv(from_csv or output)
    _print_table(f"Swapping KV blocks\n{bench.provenance(rows)}", bench.table_cells(rows))
    _print_verdicts(bench.verdicts(rows))


def _peers(table: str, rounds: int, output: Path | None, from_csv: Path | None) -> None:
    """`bench paged-attention --peers`."""
    from minillm.bench import common, plots
    from minillm.bench import peers as bench

    if table not in bench.TABLES:
        raise ConfigError(f"peers={table!r} must be one of {', '.join(bench.TABLES)}")
    output = output or common.RESULTS / f"{table}_peers.csv"
    if from_csv is None:
        _device("cuda")
        found: list[dict[str, str]] = []
        for part in bench.measure(table, rounds, console.info):
            found += part
            common.write_csv(output, found)
        console.info(f"written: {output}")
    rows = common.read_csv(from_csv or output)
    _print_table(f"Paged {table} attention\n{bench.provenance(rows)}", bench.table_cells(table, rows))
    _print_verdicts(bench.verdicts(table, rows))
    _draw(plots.draw_peers, rows, from_csv or output)


def _device(name: str) -> torch.device:
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


def _lengths(given: list[int] | None, device: torch.device) -> tuple[int, ...]:
    """The lengths given; else the original experiment's, with longer ones on a GPU."""
    from minillm.bench.paged_attention import LENGTHS, ORIGINAL_LENGTHS

    if given:
        return tuple(given)
    return LENGTHS if device.type == "cuda" else ORIGINAL_LENGTHS


def _shape(heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: str) -> AttentionShape:
    from minillm.bench.attention_batch import DTYPES
    from minillm.bench.attention_batch import AttentionShape as Shape

    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    if heads % kv_heads:
        raise ConfigError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
    return Shape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=DTYPES[dtype])


def _print_table(title: str, cells: _Cells) -> None:
    from minillm.bench.common import make_table

    console.answer_console().print(make_table(title, *cells))


def _print_verdicts(verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        print(f"{'met' if verdict.met else 'NOT MET'}: {verdict.requirement}: {verdict.found}")


def _draw(draw: Callable[[Sequence[Mapping[str, str]], Path], None], rows: list[dict[str, str]], csv: Path) -> None:
    """The plot beside the CSV file, where matplotlib is installed."""
    from minillm.bench.plots import has_matplotlib

    if not has_matplotlib():
        console.info("no plot: pip install 'minillm-runtime[benchmark]' for matplotlib")
        return
    path = csv.with_suffix(".png")
    draw(rows, path)
    console.info(f"drawn: {path}")
