"""`minillm bench serve`: latencies and goodput of a running server under a workload.

Against any OpenAI-compatible server (--url), or against a server of this package that is started for the run in a
process of its own, with whatever model the other programs take.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.bench import common, drawing
from minillm.bench.history import Figure
from minillm.bench.load import Answer, Goals, Target, good, run_load, served_models
from minillm.bench.program import Cells, Program, Rows, provenance
from minillm.bench.recording import percentile
from minillm.bench.workloads import LAWS, Workload, fixed, lognormal, shared_prefix, uniform
from minillm.core.errors import ConfigError

MEASURES = ("ttft", "tpot", "itl", "e2el")
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
GENERATORS = ("fixed", "uniform", "shared-prefix", *LAWS)
SERVER = (sys.executable, "-m", "minillm.bench.serve_target")
START_TIMEOUT = 600.0
"""Seconds that a server may take to load its model; one that hangs is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A workload and how it is sent. Lengths in tokens; `rate` in requests per second (infinite: all at once).

    `concurrency` sends that many at a time instead (closed loop). `trace` is a file that `bench/traces.py` reads; its
    own arrival times hold, times `time_scale`, unless `rate` is finite.
    """

    workload: str = "uniform"
    trace: Path | None = None
    requests: int = 256
    prompt: int = 128
    output: int = 64
    rate: float = math.inf
    cv: float = 1.0
    concurrency: int | None = None
    time_scale: float = 1.0
    max_total: int | None = None
    seed: int = 0
    goals: Goals = field(default_factory=Goals)

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency={self.concurrency} must be at least 1")
        if self.concurrency is not None and math.isfinite(self.rate):
            raise ConfigError(f"concurrency={self.concurrency} and rate={self.rate:g}: give one of them")


def make_workload(options: Options) -> Workload:
    """The requests with their arrival times."""
    if options.trace is not None:
        from minillm.bench.traces import read_trace

        load = read_trace(options.trace, rows=options.requests, seed=options.seed).scaled(options.time_scale)
    elif options.workload == "fixed":
        load = fixed(options.requests, options.prompt, options.output, seed=options.seed)
    elif options.workload == "uniform":
        around = [(max(1, size // 2), size + size // 2) for size in (options.prompt, options.output)]
        load = uniform(options.requests, around[0], around[1], seed=options.seed)
    elif options.workload == "shared-prefix":
        suffix = max(1, options.prompt // 8)
        load = shared_prefix(
            options.requests,
            groups=4,
            prefix=options.prompt - suffix or 1,
            suffix=(suffix, suffix),
            output=(options.output, options.output),
            seed=options.seed,
        )
    elif options.workload in LAWS:
        load = lognormal(options.workload, options.requests, seed=options.seed).scaled(options.time_scale)
    else:
        raise ConfigError(f"workload={options.workload!r} must be one of {', '.join(GENERATORS)}, or give --trace")
    load = load.limited(max_total=options.max_total) if options.max_total is not None else load
    return load.with_arrivals(options.rate, options.cv) if math.isfinite(options.rate) else load


def measure(target: Target, options: Options, device: str, progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Send the workload once, after one request to warm up; one row."""
    load = make_workload(options)
    warm, _ = run_load(target, fixed(1, min(8, options.prompt), 2), concurrency=1)
    if warm[0].error:
        raise ConfigError(f"url={target.url!r} does not serve: {warm[0].error}")

    def told(done: int, total: int) -> None:
        if done * 10 // total != (done - 1) * 10 // total:
            progress(f"{done:,} of {total:,} requests")

    answers, seconds = run_load(target, load, concurrency=options.concurrency, progress=told)
    errors = [answer for answer in answers if answer.error]
    for answer in errors[:3]:
        progress(f"request {answer.index}: {answer.error}")
    if len(errors) == len(answers):
        raise ConfigError(f"url={target.url!r}: every request failed; the first: {errors[0].error}")
    sent = f"{options.concurrency} at a time" if options.concurrency else "open loop"
    return {
        "url": target.url,
        "model": target.model,
        "endpoint": target.endpoint,
        "workload": load.source,
        "sent": sent,
        "seed": options.seed,
        **_columns(answers, seconds, options.goals),
        **common.environment(device),
    }


def _columns(answers: Sequence[Answer], seconds: float, goals: Goals) -> dict[str, Any]:
    """Counts and rates, then mean, p50, p90 and p99 of each latency in milliseconds."""
    ended = [answer for answer in answers if not answer.error]
    output, prompt = sum(a.output_tokens for a in ended), sum(a.prompt_tokens for a in ended)
    columns: dict[str, Any] = {
        "requests": len(answers),
        "completed": len(ended),
        "errors": len(answers) - len(ended),
        "seconds": round(seconds, 4),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "request_per_s": round(len(ended) / seconds, 3),
        "output_tok_per_s": round(output / seconds, 2),
        "total_tok_per_s": round((output + prompt) / seconds, 2),
        "goal_ttft_ms": goals.ttft_ms if goals.ttft_ms is not None else "",
        "goal_tpot_ms": goals.tpot_ms if goals.tpot_ms is not None else "",
        "goal_e2el_ms": goals.latency_ms if goals.latency_ms is not None else "",
        "good": good(answers, goals),
        "goodput_per_s": round(good(answers, goals) / seconds, 3),
    }
    values = {
        "ttft": [a.ttft for a in ended],
        "tpot": [a.tpot for a in ended],
        "itl": [gap for a in ended for gap in a.gaps],
        "e2el": [a.latency for a in ended],
    }
    for name in MEASURES:
        finite = [1e3 * value for value in values[name] if math.isfinite(value)]
        columns[f"{name}_mean_ms"] = round(statistics.fmean(finite), 3) if finite else math.nan
        for share in (50, 90, 99):
            columns[f"{name}_p{share}_ms"] = round(percentile(finite, share / 100), 3)
    return columns


@contextlib.contextmanager
def own_server(
    model: str, device: str, dtype: str, progress: Callable[[str], None], fields: Sequence[str] = ()
) -> Iterator[str]:
    """A server of this package in its own process, on a free port; its URL. It is told to end, and does.

    `fields` are of :class:`EngineConfig`, each as NAME=JSON.
    """
    command = [*SERVER, model, device, dtype, *fields]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            progress(f"starting a server of {model}")
            assert process.stdout is not None
            with _killed_after(START_TIMEOUT, process):
                match = re.search(r"http://\S+", process.stdout.readline())
            if match is None:
                raise ConfigError(f"the server of model={model!r} did not start (its message is above)")
            yield match[0]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def _killed_after(seconds: float, process: subprocess.Popen[str]) -> Iterator[None]:
    """End the process if the block takes longer: a read of its output then comes to its end."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def target_of(url: str, model: str | None, **options: Any) -> Target:
    """The server at `url`; its first model where none is named."""
    return Target(url=url, model=model or served_models(url, options.get("api_key"))[0], **options)


def tables(rows: Rows) -> dict[str, Cells]:
    """Rates, and the latencies of each run."""
    rates = ["run", "requests", "errors", "requests/s", "output tok/s", "all tok/s", "good", "goodput, requests/s"]
    lines, latencies = [], []
    for number, row in enumerate(rows, 1):
        lines.append(
            [
                f"{number}: {row['workload']}; {row['sent']}",
                row["completed"],
                row["errors"],
                f"{float(row['request_per_s']):,.2f}",
                f"{float(row['output_tok_per_s']):,.0f}",
                f"{float(row['total_tok_per_s']):,.0f}",
                f"{row['good']} of {row['requests']}",
                f"{float(row['goodput_per_s']):,.2f}",
            ]
        )
        for name in MEASURES:
            cells = [f"{float(row[f'{name}_{kind}_ms']):,.2f}" for kind in ("mean", "p50", "p90", "p99")]
            latencies.append([str(number), TITLES[name], *cells])
    where = f"{rows[0]['model']} at {rows[0]['url']}, client on {provenance(rows)}"
    return {
        f"Load on a server: {where}": (rates, lines),
        "Latencies, ms": (["run", "", "mean", "p50", "p90", "p99"], latencies),
    }


def draw(rows: Rows, path: Path) -> None:
    """p50, p90 and p99 of each latency, one group of bars per run."""
    figure, axes = drawing.pyplot().subplots(1, len(MEASURES), figsize=(11, 3.4))
    for axis, name in zip(axes, MEASURES, strict=True):
        for number, kind in enumerate(("p50", "p90", "p99")):
            heights = [float(row[f"{name}_{kind}_ms"]) for row in rows]
            places = [run + 1 + 0.25 * (number - 1) for run in range(len(rows))]
            axis.bar(places, heights, width=0.25, color=drawing.PALETTE[number], label=kind)
        axis.set_xticks(range(1, len(rows) + 1))
        axis.set_xlabel("run")
        drawing.grid(axis, TITLES[name], "ms" if name == MEASURES[0] else "", legend=name == MEASURES[0])
    figure.tight_layout()
    drawing.save(figure, path, f"{rows[0]['model']}: {provenance(rows)}")


def figures(rows: Rows) -> list[Figure]:
    """Output rate and median TTFT of the last run."""
    row = rows[-1]
    return [
        Figure("output rate", float(row["output_tok_per_s"]), "tok/s", "higher"),
        Figure("TTFT p50", float(row["ttft_p50_ms"]), "ms", "lower"),
    ]


PROGRAM = Program(
    name="serve",
    title="Serving over HTTP",
    about="A load generator on the same machine as the server. Latencies count from when a request was due, not from "
    "when it was sent; an inter-token latency is the time between two chunks with text; a request is good if it ended "
    "without error and kept every goal that is given.",
    tables=tables,
    plots={"": draw},
    figures=figures,
    settings=lambda rows: f"{rows[-1]['model']}, {rows[-1]['workload']}, {rows[-1]['sent']}",
)
