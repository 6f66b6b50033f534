"""`minillm bench NAME` for the programs that measure parts: kernels, scheduler, swapping, this CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minillm.cli import console
from minillm.cli.bench_frame import RESULTS, Device, FromCSV, Output, Seed, bench_app, device_of, publish
from minillm.cli.options import with_options
from minillm.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from minillm.bench.attention_batch import AttentionShape

_Lengths = Annotated[
    list[int] | None,
    typer.Option("--length", min=1, help="Tokens in the sequence; may be repeated.", show_default=False),
]


@bench_app.command("cpu")
@with_options()
def cpu(
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds; figures are medians.")] = 7,
    streams: Annotated[int, typer.Option(min=2, help="Concurrent requests of the second workload.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per request.")] = 64,
    load: Annotated[bool, typer.Option(help="Also time loading, in fresh processes.")] = True,
    memory: Annotated[bool, typer.Option(help="Also measure the peak memory of generating for 64 requests.")] = True,
    output: Output = RESULTS / "cpu.csv",
    from_csv: FromCSV = None,
) -> None:
    """This engine against transformers' `generate` on this CPU, same weights, one run."""
    from minillm.bench import cpu_bench
    from minillm.bench.saved_programs import CPU

    rows = None
    if from_csv is None:
        options = cpu_bench.Options(repeats=repeats, streams=streams, new_tokens=new_tokens, load=load, memory=memory)
        rows = cpu_bench.measure(options, console.info)
    publish(CPU, output, rows, from_csv)


@bench_app.command("scheduler")
@with_options()
def scheduler(
    running: Annotated[list[int] | None, typer.Option(min=1, help="Running requests; may be repeated.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the load.")] = 0,
    output: Output = RESULTS / "scheduler.csv",
    from_csv: FromCSV = None,
) -> None:
    """Time of schedule + commit per step, by running requests (1, 16, 64, 256, 1024 if not given)."""
    from minillm.bench import scheduler_bench
    from minillm.bench.saved_programs import SCHEDULER

    rows = None
    if from_csv is None:
        numbers = tuple(running) if running else scheduler_bench.RUNNING
        rows = scheduler_bench.run(running=numbers, steps=steps, seed=seed, progress=console.info)
    publish(SCHEDULER, output, rows, from_csv)


@bench_app.command("engine")
@with_options()
def engine(
    running: Annotated[list[int] | None, typer.Option(min=1, help="Running requests; may be repeated.")] = None,
    reader: Annotated[
        list[str] | None,
        typer.Option(help="future, stop or stream; may be repeated [all three].", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Timed steps of each.")] = 500,
    step_ms: Annotated[float, typer.Option(min=0.01, help="What the device takes per step.")] = 5.0,
    tokenizer: Annotated[
        str | None, typer.Option(help="Of this model [a made-up one of 151,936 tokens].", show_default=False)
    ] = None,
    seed: Seed = 0,
    output: Output = RESULTS / "engine.csv",
    from_csv: FromCSV = None,
) -> None:
    """CPU time of the engine's thread per step around a device of fixed speed (1, 16, 64, 256, 1024 if not given)."""
    from minillm.bench import engine_bench as bench

    rows = None
    if from_csv is None:
        for name in reader or ():
            if name not in bench.READERS:
                raise ConfigError(f"reader={name!r} must be one of {', '.join(bench.READERS)}")
        rows = bench.run(
            running=tuple(running) if running else bench.RUNNING,
            readers=tuple(reader) if reader else bench.READERS,
            steps=steps,
            step_seconds=step_ms / 1e3,
            seed=seed,
            tokenizer=_tokenizer_of(tokenizer),
            progress=console.info,
        )
    publish(bench.PROGRAM, output, rows, from_csv)


def _tokenizer_of(model: str | None) -> Any:
    """The tokenizer of a model by its name, or None."""
    if model is None:
        return None
    from minillm.models.default_model import resolve_model
    from minillm.models.tokenizer import load_tokenizer

    return load_tokenizer(resolve_model(model, console.info, "tokenizer").path)


@bench_app.command("materialize")
@with_options()
def materialize(
    device: Device = "auto",
    length: _Lengths = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the cache.")] = 24,
    heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 2,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 64,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    iterations: Annotated[int, typer.Option(min=3, help="Timed calls of each path and length.")] = 50,
    seed: Seed = 0,
    output: Output = RESULTS / "materialize.csv",
    from_csv: FromCSV = None,
) -> None:
    """What copying a sequence's K and V out of the pages costs, per length, one layer and all."""
    from minillm.bench import materialize as bench
    from minillm.bench.saved_programs import MATERIALIZE

    measured = None
    if from_csv is None:
        where = device_of(device)
        options = bench.Options(
            device=where,
            shape=_shape(heads, heads, head_dim, block_size, dtype),
            layers=layers,
            lengths=_lengths(length, where),
            iterations=iterations,
            seed=seed,
        )
        measured = bench.measure(options, console.info)
    publish(MATERIALIZE, output, measured, from_csv)


@bench_app.command("paged-attention")
@with_options()
def paged_attention(
    device: Device = "auto",
    length: _Lengths = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 2,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads [as many].", show_default=False)] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 64,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    iterations: Annotated[int, typer.Option(min=3, help="Timed calls of each path and length.")] = 100,
    seed: Seed = 0,
    peers: Annotated[
        str | None,
        typer.Option(help="Instead, the kernels against FlashInfer and torch: decode or prefill.", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds of --peers.")] = 30,
    output: Annotated[
        Path | None, typer.Option(help="CSV file to write; the plot goes beside it.", show_default=False)
    ] = None,
    from_csv: FromCSV = None,
) -> None:
    """Attention straight from the pages against materialise-then-attend and against contiguous K and V."""
    from minillm.bench import paged_attention as bench
    from minillm.bench.saved_programs import PAGED_ATTENTION

    if peers is not None:
        _peers(peers, rounds, output, from_csv)
        return
    measured = None
    if from_csv is None:
        where = device_of(device)
        options = bench.Options(
            device=where,
            shape=_shape(heads, kv_heads or heads, head_dim, block_size, dtype),
            lengths=_lengths(length, where),
            iterations=iterations,
            seed=seed,
        )
        measured = bench.measure(options, console.info)
    publish(PAGED_ATTENTION, output or RESULTS / "paged_attention.csv", measured, from_csv)


@bench_app.command("swap")
@with_options()
def swap(
    device: Device = "auto",
    blocks: Annotated[
        list[int] | None, typer.Option(min=1, help="Blocks to move; may be repeated [16, 64, 256].", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats; figures are medians.")] = 10,
    seed: Seed = 0,
    output: Output = RESULTS / "swap.csv",
    from_csv: FromCSV = None,
) -> None:
    """KV blocks of Llama-3.1-8B to host memory and back, against a plain copy and beside computing."""
    from minillm.bench import swap as bench
    from minillm.bench.saved_programs import SWAP

    rows = None
    if from_csv is None:
        counts = tuple(blocks) if blocks else bench.BLOCK_COUNTS
        options = bench.Options(device=device_of(device), blocks=counts, repeats=repeats, seed=seed)
        rows = bench.measure(options, console.info)
    publish(SWAP, output, rows, from_csv)


@bench_app.command("fused")
@with_options()
def fused(
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds; figures are medians.")] = 20,
    variants: Annotated[bool, typer.Option("--variants", help="Also other instances of the product kernel.")] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Shapes of this model alone, such as Qwen3-0.6B; may be repeated.", show_default=False),
    ] = None,
    output: Output = RESULTS / "fused.csv",
    from_csv: FromCSV = None,
) -> None:
    """The decoder's fused kernels against torch and against the time that their bytes take."""
    from minillm.bench import common
    from minillm.bench import fused as bench

    found: list[dict[str, str]] | None = None
    if unknown := sorted(set(model or ()) - set(bench.LAYERS)):
        raise ConfigError(f"model={unknown[0]!r} must be one of {', '.join(bench.LAYERS)}")
    if from_csv is None:
        device_of("cuda")
        found = []
        for part in bench.measure(rounds, console.info, variants=variants, models=model or ()):
            found += part
            common.write_csv(output, found)  # what is there stays if the rest fails
    publish(bench.PROGRAM, output, found, from_csv)


@bench_app.command("sampling")
@with_options()
def sampling(
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows; may be repeated [1, 8, 32, 256].", show_default=False)
    ] = None,
    vocab: Annotated[int, typer.Option(min=2, help="Width of the logits.")] = 151_936,
    rounds: Annotated[int, typer.Option(min=3, help="Timed replays; figures are medians.")] = 30,
    seed: Seed = 0,
    output: Output = RESULTS / "sampling.csv",
    from_csv: FromCSV = None,
) -> None:
    """From logits to tokens on a GPU: greedy, plain, top-k, top-p, against tensor operations."""
    from minillm.bench import sampling as bench
    from minillm.bench.saved_programs import SAMPLING

    rows = None
    if from_csv is None:
        batches = tuple(batch) if batch else bench.BATCHES
        options = bench.Options(device=device_of("cuda"), batches=batches, vocab=vocab, rounds=rounds, seed=seed)
        rows = bench.measure(options, console.info)
    publish(SAMPLING, output, rows, from_csv)


def _peers(table: str, rounds: int, output: Path | None, from_csv: Path | None) -> None:
    """`bench paged-attention --peers`."""
    from minillm.bench import common
    from minillm.bench import peers as bench
    from minillm.bench.program import get_program

    if table not in bench.TABLES:
        raise ConfigError(f"peers={table!r} must be one of {', '.join(bench.TABLES)}")
    output = output or RESULTS / f"{table}_peers.csv"
    found: list[dict[str, str]] | None = None
    if from_csv is None:
        device_of("cuda")
        found = []
        for part in bench.measure(table, rounds, console.info):
            found += part
            common.write_csv(output, found)  # what is there stays if the rest fails
    publish(get_program(f"{table}-peers"), output, found, from_csv)


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
