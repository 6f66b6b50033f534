"""`minillm bench NAME` for what the scheduler's order and its prefix cache are worth: sla, prefix, and on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minillm.cli import console
from minillm.cli.bench_frame import RESULTS, FromCSV, Model, Output, Quick, Seed, bench_app, publish
from minillm.cli.options import with_options

_Conversation = Annotated[
    Path | None,
    typer.Option(
        help="Azure 2023 conversation trace (AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset); "
        "drawn after its published figures if not given.",
        show_default=False,
    ),
]
_Code = Annotated[
    Path | None, typer.Option(help="The code trace beside it, likewise (..._code.csv).", show_default=False)
]
_Ageing = Annotated[
    list[float] | None,
    typer.Option(min=0.001, help="Seconds of waiting per priority level; may be repeated.", show_default=False),
]
_Slots = Annotated[int, typer.Option(min=1, help="Sequence slots (requests in a step).")]
_PrefillTokens = Annotated[int, typer.Option(min=1, help="Prompt tokens that a step computes at most.")]


@bench_app.command("sla")
@with_options()
def sla(
    conversation: _Conversation = None,
    code: _Code = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Of the traces to take.")] = 20.0,
    load: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01, help="Work per second; may be repeated [0.5, 0.7, 0.8, 0.9, 1, 1.1].", show_default=False
        ),
    ] = None,
    ageing: _Ageing = None,
    slots: _Slots = 64,
    prefill_tokens: _PrefillTokens = 1024,
    quick: Quick = False,
    seed: Seed = 0,
    output: Output = RESULTS / "sla.csv",
    from_csv: FromCSV = None,
) -> None:
    """Priority classes under load in virtual time: objectives met, percentiles and the stated bound on waits."""
    from minillm.bench import sla as bench
    from minillm.bench.sla_program import PROGRAM

    rows = None
    if from_csv is None:
        loads = tuple(load) if load else bench.Options().loads
        intervals = tuple(ageing) if ageing else bench.Options().ageing
        options = bench.Options(
            conversation=conversation,
            code=code,
            minutes=1.0 if quick else minutes,
            loads=(0.9,) if quick else loads,
            ageing=intervals[:1] if quick else intervals,
            slots=slots,
            prefill_tokens=prefill_tokens,
            seed=seed,
        )
        rows = [row for part in bench.measure(options, console.info) for row in part]
    publish(PROGRAM, output, rows, from_csv)


@bench_app.command("sla-model")
@with_options()
def sla_model(
    model: Model = "smollm2-135m",
    conversation: _Conversation = None,
    code: _Code = None,
    requests: Annotated[int, typer.Option(min=8, help="The first so many of the merged traces.")] = 120,
    rounds: Annotated[int, typer.Option(min=1, help="In which the policies take turns.")] = 2,
    shrink: Annotated[float, typer.Option(min=1, help="Lengths are divided by this.")] = 16.0,
    load: Annotated[float, typer.Option(min=0.01, help="Share of the rate at which all are served at once.")] = 0.9,
    ageing: _Ageing = None,
    quick: Quick = False,
    seed: Seed = 0,
    output: Output = RESULTS / "sla_model.csv",
    from_csv: FromCSV = None,
) -> None:
    """The priority classes on a real model: a short piece of the traces, in real time."""
    from minillm.bench import sla as bench
    from minillm.bench.sla_program import MODEL_PROGRAM

    rows = None
    if from_csv is None:
        options = bench.ModelOptions(
            model="random:tiny" if quick else model,
            conversation=conversation,
            code=code,
            requests=min(requests, 24) if quick else requests,
            rounds=1 if quick else rounds,
            shrink=shrink,
            load=load,
            ageing=tuple(ageing) if ageing else bench.ModelOptions().ageing,
            seed=seed,
        )
        rows = [row for part in bench.measure_model(options, console.info) for row in part]
    publish(MODEL_PROGRAM, output, rows, from_csv)


@bench_app.command("prefix")
@with_options()
def prefix(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Mooncake trace (FAST25-release/traces/conversation_trace.jsonl of github.com/kvcache-ai/Mooncake); "
            "conversations are made if not given.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=8, help="The first so many [all; 2000 made].", show_default=False)
    ] = None,
    pool: Annotated[
        list[float] | None,
        typer.Option(
            min=0.001, help="Share of the distinct blocks; may be repeated [0.1, 0.3, 1].", show_default=False
        ),
    ] = None,
    load: Annotated[float, typer.Option(min=0.01, help="Work per second without a cache.")] = 0.8,
    slots: _Slots = 64,
    prefill_tokens: _PrefillTokens = 8192,
    quick: Quick = False,
    seed: Seed = 0,
    output: Output = RESULTS / "prefix.csv",
    from_csv: FromCSV = None,
) -> None:
    """Prefix sharing on a trace in virtual time: hit ratio against a plain LRU list, and the TTFT that it saves."""
    from minillm.bench import prefix as bench
    from minillm.bench.prefix_program import PROGRAM

    rows = None
    if from_csv is None:
        options = bench.Options(
            trace=trace,
            requests=min(requests or 200, 200) if quick else requests,
            pools=tuple(pool) if pool else bench.POOL_SHARES,
            load=load,
            slots=slots,
            prefill_tokens=prefill_tokens,
            seed=seed,
        )
        rows = list(bench.measure(options, console.info))
    publish(PROGRAM, output, rows, from_csv)


@bench_app.command("prefix-model")
@with_options()
def prefix_model(
    model: Model = "smollm2-135m",
    shared: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Tokens of the system prompt; may be repeated [64, 128, 256, 512, 1024].", show_default=False
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="Per length.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, with and without the cache in turn.")] = 3,
    quick: Quick = False,
    seed: Seed = 0,
    output: Output = RESULTS / "prefix_model.csv",
    from_csv: FromCSV = None,
) -> None:
    """TTFT of prompts that share a system prompt, with the prefix cache and without, on a real model."""
    from minillm.bench import prefix as bench
    from minillm.bench.prefix_program import MODEL_PROGRAM

    rows = None
    if from_csv is None:
        lengths = tuple(shared) if shared else bench.ModelOptions().prefixes
        options = bench.ModelOptions(
            model="random:tiny" if quick else model,
            prefixes=(64, 256) if quick else lengths,
            requests=min(requests, 6) if quick else requests,
            repeats=min(repeats, 2) if quick else repeats,
            seed=seed,
        )
        rows = list(bench.measure_model(options, console.info))
    publish(MODEL_PROGRAM, output, rows, from_csv)
