"""`minillm bench serve`: the load generator's command."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Annotated

import typer

from minillm.cli import console
from minillm.cli.bench_frame import RESULTS, Device, FromCSV, Output, Quick, Seed, bench_app, device_of, publish
from minillm.cli.options import with_options
from minillm.core.errors import ConfigError

_Goal = Annotated[float | None, typer.Option(min=0, help="Milliseconds that a good request keeps.", show_default=False)]


@bench_app.command("serve")
@with_options()
def serve(
    url: Annotated[
        str | None,
        typer.Option(help="Server to load, as http://127.0.0.1:8000 [one is started for --model].", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="With --url the server's name for it [its first]; else what to serve."),
    ] = None,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="Of a server that is started.")] = "auto",
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Key to send.", show_default=False)
    ] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    workload: Annotated[
        str, typer.Option(help="fixed, uniform, shared-prefix, azure-conv, azure-code, mooncake-conv, servegen-reason.")
    ] = "uniform",
    trace: Annotated[
        Path | None, typer.Option(help="A trace instead: Azure .csv, Mooncake .jsonl, ServeGen .json.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to send (of a trace: its first).")] = 256,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens (uniform: half to one and a half of it).")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens, likewise.")] = 64,
    rate: Annotated[
        float, typer.Option(min=0, help="Requests per second, Poisson; inf: at once or as traced.")
    ] = math.inf,
    cv: Annotated[float, typer.Option(min=0, help="Variation of the gaps: 1 Poisson, 0 even, more bursty.")] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: so many at a time.", show_default=False)
    ] = None,
    time_scale: Annotated[float, typer.Option(min=0, help="Of a trace's times: 0.5 doubles the rate.")] = 1.0,
    max_total: Annotated[
        int | None, typer.Option(min=2, help="Cut requests to so many tokens in all.", show_default=False)
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=1, help="Prompts are random ids below it.")] = 10_000,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for all output tokens (not every server knows it).")] = True,
    goodput_ttft: _Goal = None,
    goodput_tpot: _Goal = None,
    goodput_e2el: _Goal = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one request.")] = 600.0,
    quick: Quick = False,
    seed: Seed = 0,
    output: Output = RESULTS / "serve.csv",
    from_csv: FromCSV = None,
) -> None:
    """Load a server: TTFT, TPOT, inter-token and end-to-end latency (mean, p50, p90, p99), rates and goodput."""
    from minillm.bench import serve as bench
    from minillm.bench.load import Goals

    if from_csv is not None:
        publish(bench.PROGRAM, output, None, from_csv)
        return
    if quick:
        requests, prompt, output_tokens, concurrency, vocab_size = 24, 32, 8, concurrency or 8, 256
        model = model or (None if url else "random:tiny")
    options = bench.Options(
        workload=workload,
        trace=trace,
        requests=requests,
        prompt=prompt,
        output=output_tokens,
        rate=rate or math.inf,
        cv=cv,
        concurrency=concurrency,
        time_scale=time_scale,
        max_total=max_total,
        seed=seed,
        goals=Goals(ttft_ms=goodput_ttft, tpot_ms=goodput_tpot, latency_ms=goodput_e2el),
    )
    where = device_of(device).type if url is None else "cpu"
    own = bench.own_server(model or "smollm2-135m", where, dtype, console.info)
    with contextlib.nullcontext(url) if url is not None else own as address:
        if address is None:
            raise ConfigError("url is empty")
        target = bench.target_of(
            address,
            model if url is not None else None,
            endpoint=endpoint,
            api_key=api_key if url is not None else None,
            vocab_size=vocab_size,
            ignore_eos=ignore_eos,
            timeout=timeout,
        )
        row = bench.measure(target, options, _name(where), console.info)
    publish(bench.PROGRAM, output, [row])


def _name(device: str) -> str:
    import torch

    from minillm.bench.timing import device_name

    return device_name(torch.device(device))
