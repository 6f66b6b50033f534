"""Where the time of a decode step goes on a GPU: kernels, gaps between them, the host's parts, and the floor.

    python -m minillm.bench.decode_profile --model random:qwen3-0.6b --batches 1 256 --output decode_profile.csv
    python -m minillm.bench.decode_profile --batches 32 --arrivals 100 --output mixed_profile.csv

An engine decodes a batch of equal prompts. Once all of them decode together, some steps are timed as they are, with the
host's parts measured around the engine's own calls, and some more are traced (CUPTI, by torch.profiler). A gap is time
in which no kernel and no copy runs; kernels that overlap count once as busy time. `exposed` is how much longer than
the device's work a step takes. The floor is :mod:`minillm.bench.floors`' at the copy rate of the same run.

With `--arrivals N` a request of N prompt tokens and one output token arrives before every step, so that each step has
its chunk beside the rows that decode; `--launch-mixed` has such steps launched as they come, without CUDA graphs. The
floor remains the decode rows'.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from minillm.bench import common, floors
from minillm.bench.models import open_model
from minillm.bench.runs import Target, open_target
from minillm.core.errors import ConfigError
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.engine.process import own_process
from minillm.models.decoder import Decoder

SETTLE, TIMED, TRACED = 24, 64, 12
"""Steps before the timed ones (graphs are captured in them), timed ones, traced ones."""

HOST_PARTS = (
    ("scheduler", "schedule"),
    ("runner", "forward"),
    ("runner", "sample"),
    ("runner", "collect"),
    ("scheduler", "commit"),
)
"""Calls of the engine's step that are timed, as (attribute of the engine, method). `collect` waits for the device."""


class Span(NamedTuple):
    """Something that ran on the device; microseconds."""

    name: str
    start: float
    end: float


def kernel_rows(spans: Iterable[Span], steps: int) -> list[dict[str, Any]]:
    """Per step: calls and time of each kernel and the gaps in front of it, longest first; then busy time and gaps."""
    spans = sorted(spans, key=lambda span: span.start)
    if not spans:
        return []
    total: dict[str, list[float]] = defaultdict(list)
    before: dict[str, float] = defaultdict(float)
    busy = gaps = 0.0
    reached = spans[0].start
    for span in spans:
        total[span.name].append(span.end - span.start)
        gap = max(0.0, span.start - reached)
        before[span.name] += gap
        gaps += gap
        busy += max(0.0, span.end - max(reached, span.start))
        reached = max(reached, span.end)
    rows: list[dict[str, Any]] = [
        {
            "kind": "kernel",
            "name": name,
            "calls": len(times) / steps,
            "us": sum(times) / steps,
            "gap_us": before[name] / steps,
        }
        for name, times in total.items()
    ]
    rows.sort(key=lambda row: -row["us"])
    rows.append({"kind": "gpu", "name": "busy", "calls": len(spans) / steps, "us": busy / steps})
    rows.append({"kind": "gpu", "name": "gaps", "calls": len(spans) / steps, "us": gaps / steps})
    return rows


class _Decoding:
    """An engine whose `batch` requests all decode, step after step."""

    def __init__(self, target: Target, batch: int, context: int, temperature: float, arrivals: int = 0) -> None:
        self.target, self.engine, self.batch = target, target.engine, batch
        self.arrivals, self.arrived = arrivals, 0
        self.seconds: dict[str, float] = defaultdict(float)
        engine = self.engine
        engine.reset_prefix_cache()
        most = engine.scheduler.max_model_len - context
        params = SamplingParams(
            temperature=temperature, top_p=0.95 if temperature else 1.0, max_tokens=most, ignore_eos=True
        )
        for i in range(batch):
            self._add(f"r{i}", i, context, params)
        recorder = target.recorder
        recorder.begin({}, engine.clock())
        while not (len(recorder.steps) and recorder.steps.decode_rows[-1] == batch):
            engine.step()
        self.run(SETTLE)

    def _add(self, name: str, number: int, tokens: int, params: SamplingParams) -> None:
        ids = [(number * 7919 + j * 31) % (self.target.vocab_size - 3) + 3 for j in range(tokens)]
        request = Request(name, ids, params, seed=number, arrival_time=self.engine.clock())
        self.engine.add_request(request, wants_events=False)

    def run(self, steps: int) -> list[float]:
        """Seconds of each step."""
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            if self.arrivals:
                self.arrived += 1
                one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
                self._add(f"a{self.arrived}", 1000 + self.arrived, self.arrivals, one)
            self.engine.step()
            times.append(time.perf_counter() - start)
        return times

    @contextmanager
    def timed_parts(self) -> Any:
        """Adds up the time of the engine's calls."""
        wrapped: list[tuple[Any, str]] = []
        for holder, name in HOST_PARTS:
            owner = getattr(self.engine, holder)
            setattr(owner, name, self._timed(f"{holder}.{name}", getattr(owner, name)))
            wrapped.append((owner, name))
        try:
            yield
        finally:
            for owner, name in wrapped:
                delattr(owner, name)  # the class' own shows again

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return timed

    def end(self) -> None:
        """Cancel the requests and let the steps in flight end."""
        for i in range(self.batch):
            self.engine.cancel(f"r{i}")
        while self.engine.has_work:
            self.engine.step()


def trace(run: Callable[[], Any]) -> list[Span]:
    """What the device does in a call."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = profiler.events() or []
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
    ]


def profile_batch(
    target: Target, batch: int, context: int, temperature: float, floor: float, arrivals: int = 0
) -> list[dict[str, Any]]:
    """Rows (kind, name, calls, us) of one batch size; `floor` in seconds."""
    on_gpu = target.device != "cpu"
    decoding = _Decoding(target, batch, context, temperature, arrivals)
    try:
        with decoding.timed_parts():
            start = time.perf_counter()
            times = decoding.run(TIMED)
            wall = (time.perf_counter() - start) / TIMED
        spans = trace(lambda: decoding.run(TRACED)) if on_gpu else []
    finally:
        decoding.end()
    median = statistics.median(times)
    rows: list[dict[str, Any]] = [
        {"kind": "step", "name": "median", "calls": 1, "us": median * 1e6},
        {"kind": "step", "name": "mean", "calls": 1, "us": wall * 1e6},
        {"kind": "step", "name": "floor", "calls": 1, "us": floor * 1e6},
    ]
    parts = {name: seconds / TIMED for name, seconds in decoding.seconds.items()}
    parts["engine and output"] = wall - sum(parts.values())
    rows += [{"kind": "host", "name": name, "calls": 1, "us": seconds * 1e6} for name, seconds in parts.items()]
    working = wall - parts.get("runner.collect", 0.0)
    rows.append({"kind": "host", "name": "all but collect", "calls": 1, "us": working * 1e6})
    device_rows = kernel_rows(spans, TRACED)
    busy = next((row["us"] for row in device_rows if row["name"] == "busy"), None)
    if busy is not None:
        rows.append({"kind": "step", "name": "exposed", "calls": 1, "us": median * 1e6 - busy})
    rows += device_rows
    for row in rows:
        row["share"] = round(row["us"] / (median * 1e6), 4)
        row["us"] = round(row["us"], 2)
        row["calls"] = round(row["calls"], 2)
        row["gap_us"] = round(row.get("gap_us", 0.0), 2)
    return rows


def measure(options: argparse.Namespace, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Rows of all batch sizes, each with its settings."""
    model = open_model(options.model, options.dtype, options.device)
    decoder = model.decoder
    if not isinstance(decoder, Decoder):
        raise ConfigError(f"model={options.model!r} is no decoder of this package: its floor is not known")
    limits = floors.measure_limits(decoder.device, decoder.dtype)
    length = options.context + SETTLE + TIMED + TRACED + 64
    most, blocks = max(options.batches), -(-max(length, options.arrivals + 1) // 16) + 1
    extra = 4 if options.arrivals else 0
    settings = {
        "max_num_seqs": most + extra,
        "max_model_len": max(length, options.arrivals + 1),
        "num_gpu_blocks_override": (most + extra) * blocks,
        "swap_space": 0.0,
        "enforce_eager": options.enforce_eager,
    }
    found = []
    with open_target(model, **settings) as target:
        if options.launch_mixed:
            launch_mixed(target)
        per_token = target.bytes_per_block // target.config.block_size
        for batch in options.batches:
            context = options.context + SETTLE + TIMED // 2
            least = floors.decode_bytes(decoder, batch, context, per_token) / limits.bytes_per_second
            rows = profile_batch(target, batch, options.context, options.temperature, least, options.arrivals)
            same = {
                "model": target.name,
                "dtype": target.dtype,
                "batch": batch,
                "context": context,
                "temperature": options.temperature,
                "arrivals": options.arrivals,
                "graphs": "none" if options.enforce_eager else "all but mixed" if options.launch_mixed else "all",
                "copy_gbps": round(limits.bytes_per_second / 1e9, 1),
                **common.environment(target.device_name),
            }
            found += [{**row, **same} for row in rows]
            progress(summary(batch, rows))
    return found


def launch_mixed(target: Target) -> None:
    """Steps with prefills are launched as they come from now on. ConfigError on a device without such graphs."""
    forward = getattr(target.engine.runner, "cuda_forward", None)
    if forward is None:
        raise ConfigError(
            f"launch_mixed=True is for a GPU and a model that its fused forward pass takes: {target.name}"
        )
    forward.short.enabled = False


def summary(batch: int, rows: Sequence[dict[str, Any]], kernels: int = 16) -> str:
    """A few lines for a terminal: the step, the host's parts, the kernels that take most."""
    step = {row["name"]: row["us"] for row in rows if row["kind"] == "step"}
    lines = [
        f"batch {batch}: {step['median'] / 1e3:.3f} ms a step (mean {step['mean'] / 1e3:.3f}), floor "
        f"{step['floor'] / 1e3:.3f} ms, measured / floor {step['median'] / max(step['floor'], 1e-9):.2f}"
    ]
    if "exposed" in step:
        lines[0] += f", exposed {step['exposed']:.0f} us ({step['exposed'] / step['median']:.1%})"
    host = [f"{row['name']} {row['us']:.0f}" for row in rows if row["kind"] == "host"]
    lines.append(f"    host, us: {', '.join(host)}")
    shown = [row for row in rows if row["kind"] == "kernel"][:kernels] + [row for row in rows if row["kind"] == "gpu"]
    lines += [
        f"    {row['us']:9.1f} us {row['share']:6.1%} x{row['calls']:<6g} gaps before {row['gap_us']:5.1f} us "
        f"{row['name'][:80]}"
        for row in shown
    ]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-0.6b", help="as `minillm generate` takes it, or random:NAME")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each request")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0 with top_p 0.95")
    parser.add_argument("--arrivals", type=int, default=0, help="prompt tokens of a request that arrives every step")
    parser.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--launch-mixed", action="store_true", help="steps with prefills without CUDA graphs")
    parser.add_argument("--output", type=Path, help="CSV file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the CSV."""
    options = parse(arguments)
    rows = measure(options)
    if options.output:
        common.write_csv(options.output, rows)
    return 0


if __name__ == "__main__":
    own_process()
    raise SystemExit(main())
