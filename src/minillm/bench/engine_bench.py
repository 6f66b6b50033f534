"""`minillm bench engine`: what a step costs the engine's thread, by the number of running requests.

The whole engine as it serves: its thread, the real scheduler with one plan in flight, output processing with a
tokenizer of a real size, futures and streams. Only the model is missing: the runner flattens each plan into a batch, as
a real one does, and then is a device that takes a fixed time per step, one step after the other. So two figures come
out: the CPU time of the thread per step, part by part, and how long the device stood idle because the next plan came
too late.

The load is a steady state: more requests than may run are queued (prompts of 32 to 256 tokens, outputs of 64 to 448),
so whoever ends is replaced by the next. Readers:

- ``future``: the caller wants the whole output at the end, as in offline inference;
- ``stop``: the same with stop strings, which have to be looked for in the text of every token;
- ``stream``: every token is an event with its text, which a coroutine of its own awaits, as in a server.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from minillm.bench import common, drawing
from minillm.bench.history import Figure
from minillm.bench.program import Cells, Program, Rows, provenance
from minillm.bench.random_tokenizer import random_tokenizer
from minillm.core.observer import Observer
from minillm.core.plan import StepEvents, StepOutcome, StepPlan
from minillm.core.sampling_params import SamplingParams
from minillm.engine.config import EngineConfig
from minillm.engine.factory import EngineParts, ModelLimits, assemble_engine
from minillm.engine.runtime import Runtime

RUNNING = (1, 16, 64, 256, 1024)
READERS = ("future", "stop", "stream")
VOCAB_SIZE = 151_936
BLOCK_SIZE = 16
PROMPT_TOKENS = (32, 256)
OUTPUT_TOKENS = (64, 448)
STOP_STRINGS = ["\n\nUser:", "</answer>", "###"]
PARTS = ("schedule", "build", "commit", "text", "deliver")
"""Of a step, in the thread's CPU time; `other` is the rest of it: the loop, inputs, readers that are woken."""


class TimedRunner:
    """A device that takes `step_seconds` per plan and samples tokens that follow from request and index alone."""

    def __init__(self, step_seconds: float, vocab_size: int, block_size: int, max_num_seqs: int) -> None:
        self.step_seconds = step_seconds
        self.idle_seconds = 0.0
        self._block_size = block_size
        self._free_at = 0.0
        rng = Random(0)
        # Tokens are drawn once: the outcome must not be what the benchmark spends its time on.
        self._tokens = [[rng.randrange(3, vocab_size)] for _ in range(max(4096, 4 * max_num_seqs))]
        self._rng = rng

    def forward(self, plan: StepPlan) -> tuple[StepPlan, float]:
        """Flatten the plan and put it behind what the device has to do already."""
        from minillm.runner.batch_builder import batch_columns

        batch_columns(plan, self._block_size)
        now = time.perf_counter()
        if self._free_at:
            self.idle_seconds += max(0.0, now - self._free_at)
        self._free_at = max(self._free_at, now) + self.step_seconds
        return plan, self._free_at

    def sample(self, handle: Any, masks: Any | None = None) -> None:
        """Part of the step."""

    def collect(self, handle: tuple[StepPlan, float]) -> StepOutcome:
        """Sleep until the device is done; reading what it sampled is a slice of a list, as it is of a tensor."""
        plan, done = handle
        time.sleep(max(0.0, done - time.perf_counter()))
        count = plan.num_sampling_rows
        first = self._rng.randrange(len(self._tokens) - count)
        return StepOutcome(plan.step, self._tokens[first : first + count])

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class _Clock:
    """CPU seconds of the engine's thread by part."""

    seconds: dict[str, float]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its CPU time added to the part's."""
        seconds, clock = self.seconds, time.thread_time

        def call(*arguments: Any) -> Any:
            begin = clock()
            try:
                return function(*arguments)
            finally:
                seconds[part] += clock() - begin

        return call


class _Window(Observer):
    """Takes the thread's CPU time at every commit between step `first` and step `first + steps`."""

    def __init__(self, first: int, steps: int, clock: _Clock, runner: TimedRunner) -> None:
        self.first, self.last = first, first + steps
        self.clock = clock
        self.runner = runner
        self.done = threading.Event()
        self.rows = 0
        self._cpu: list[float] = []
        self._wall: list[float] = []
        self._parts: list[dict[str, float]] = []
        self._idle: list[float] = []

    def on_commit(self, plan: StepPlan, outcome: StepOutcome, events: StepEvents, now: float) -> None:
        """One step further."""
        if not self.first <= plan.step <= self.last:
            return
        self._cpu.append(time.thread_time())
        self._wall.append(time.perf_counter())
        self.rows += len(plan.decodes)
        if plan.step in (self.first, self.last):
            self._parts.append(dict(self.clock.seconds))
            self._idle.append(self.runner.idle_seconds)
        if plan.step == self.last:
            self.done.set()

    def columns(self) -> dict[str, Any]:
        """Microseconds per step: the thread's CPU time (median, 99th percentile, mean), its parts (means), the step."""
        steps = self.last - self.first
        cpu = sorted((b - a) * 1e6 for a, b in zip(self._cpu, self._cpu[1:], strict=False))
        wall = [(b - a) * 1e6 for a, b in zip(self._wall, self._wall[1:], strict=False)]
        begin, end = self._parts
        parts = {f"{name}_us": round((end[name] - begin[name]) / steps * 1e6, 1) for name in PARTS}
        mean = statistics.fmean(cpu)
        return {
            "mean_rows": round(self.rows / (steps + 1), 1),
            "cpu_us": round(statistics.median(cpu), 1),
            "cpu_p99_us": round(cpu[int(0.99 * (len(cpu) - 1))], 1),
            "cpu_mean_us": round(mean, 1),
            **parts,
            "other_us": round(mean - sum(parts.values()), 1),
            "wall_us": round(statistics.median(wall), 1),
            "idle_share": round((self._idle[1] - self._idle[0]) / (self._wall[-1] - self._wall[0]), 5),
        }


def make_parts(running: int, tokenizer: Any, step_seconds: float) -> EngineParts:
    """An engine for `running` requests around a :class:`TimedRunner`."""
    longest = PROMPT_TOKENS[1] + OUTPUT_TOKENS[1]
    limits = ModelLimits(
        name="timed",
        path="timed",
        architecture="timed",
        dtype="none",
        device="cpu",
        vocab_size=tokenizer.vocab_size,
        max_model_len=longest,
        num_blocks=(running + 2) * -(-longest // BLOCK_SIZE),
        num_swap_blocks=0,
    )
    config = EngineConfig(
        "timed", block_size=BLOCK_SIZE, max_num_seqs=running, max_num_batched_tokens=max(8192, 2 * running)
    )
    runner = TimedRunner(step_seconds, tokenizer.vocab_size, BLOCK_SIZE, running)
    return assemble_engine(config, limits, runner, tokenizer, eos_token_ids=(), asynchronous=True)


async def _read(stream: Any) -> None:
    async for _ in stream:
        pass


def _start_readers(runtime: Runtime, requests: list[tuple[list[int], SamplingParams]]) -> None:
    """Open the streams in a thread with an event loop, one coroutine each, until all have ended."""

    async def read_all() -> None:
        await asyncio.gather(*(_read(runtime.astream(*request)) for request in requests))

    threading.Thread(target=asyncio.run, args=(read_all(),), daemon=True).start()


def _submit(runtime: Runtime, reader: str, count: int, seed: int) -> None:
    """Queue `count` requests."""
    rng = Random(seed)
    vocab_size = runtime.model_info.vocab_size
    requests = []
    for _ in range(count):
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randint(*PROMPT_TOKENS))]
        params = SamplingParams(
            max_tokens=rng.randint(*OUTPUT_TOKENS), ignore_eos=True, stop=STOP_STRINGS if reader == "stop" else []
        )
        requests.append((prompt, params))
    if reader == "stream":
        _start_readers(runtime, requests)
    else:
        runtime.submit_many([{"prompt": prompt, "sampling_params": params} for prompt, params in requests])


def measure(
    running: int, reader: str, *, steps: int, step_seconds: float, seed: int = 0, tokenizer: Any = None
) -> dict[str, Any]:
    """One row: microseconds of the engine's thread per step of `running` requests, and the device's idle share."""
    from minillm.doctor import cpu_name

    parts = make_parts(running, tokenizer or random_tokenizer(VOCAB_SIZE), step_seconds)
    engine, runner = parts.engine, parts.engine.runner
    assert isinstance(runner, TimedRunner)
    clock = _Clock(dict.fromkeys(PARTS, 0.0))
    for owner, name, part in (
        (engine.scheduler, "schedule", "schedule"),
        (engine.scheduler, "commit", "commit"),
        (runner, "forward", "build"),
        (engine.outputs, "process", "text"),
    ):
        setattr(owner, name, clock.timed(part, getattr(owner, name)))
    warm = OUTPUT_TOKENS[0]
    window = _Window(warm, steps, clock, runner)
    with Runtime(parts=parts) as runtime:
        thread = runtime._thread
        thread._deliver = clock.timed("deliver", thread._deliver)  # type: ignore[method-assign]
        mean = sum(OUTPUT_TOKENS) // 2
        _submit(runtime, reader, running + running * (warm + steps + 50) // mean + 2, seed)
        engine.scheduler.observer = window
        if not window.done.wait(timeout=60 + 4 * (warm + steps) * step_seconds + (warm + steps) * running * 2e-5):
            raise RuntimeError(f"{running} running: {steps} steps were not done in time")
    return {
        "running": running,
        "reader": reader,
        "steps": steps,
        "step_us": round(step_seconds * 1e6, 1),
        **window.columns(),
        "seed": seed,
        **common.environment(cpu_name(), packages=()),
    }


def run(
    *,
    running: Sequence[int] = RUNNING,
    readers: Sequence[str] = READERS,
    steps: int = 500,
    step_seconds: float = 5e-3,
    seed: int = 0,
    tokenizer: Any = None,
    progress: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """One row for each number of running requests and kind of reader."""
    rows = []
    for number in running:
        for reader in readers:
            row = measure(number, reader, steps=steps, step_seconds=step_seconds, seed=seed, tokenizer=tokenizer)
            progress(f"{number:5,} running, {reader}: {row['cpu_us']:.0f} us of CPU per step")
            rows.append(row)
    return rows


def tables(rows: Rows) -> dict[str, Cells]:
    """One table per kind of reader."""
    made: dict[str, Cells] = {}
    columns = ["running", "CPU, us: median", "p99", "mean", *PARTS, "other", "of a step", "device idle"]
    for reader in dict.fromkeys(row["reader"] for row in rows):
        lines = []
        for row in rows:
            if row["reader"] == reader:
                names = ("cpu_us", "cpu_p99_us", "cpu_mean_us", *(f"{part}_us" for part in (*PARTS, "other")))
                shares = (float(row["cpu_us"]) / float(row["step_us"]), float(row["idle_share"]))
                lines.append(
                    [row["running"], *(f"{float(row[name]):.0f}" for name in names), *(f"{s:.1%}" for s in shares)]
                )
        row = rows[0]
        what = f"steps of {float(row['step_us']) / 1e3:g} ms, {row['steps']} of them"
        made[f"CPU of the engine's thread per step, reader: {reader} ({what}; {provenance(rows)})"] = (columns, lines)
    return made


def draw(rows: Rows, path: Path) -> None:
    """Median CPU time per step by running requests, one curve per kind of reader."""
    figure, axes = drawing.pyplot().subplots(figsize=(6.4, 4.2))
    running = sorted({int(row["running"]) for row in rows})
    for number, reader in enumerate(dict.fromkeys(row["reader"] for row in rows)):
        mine = [row for row in rows if row["reader"] == reader]
        times = [float(row["cpu_us"]) for row in mine]
        axes.plot(
            [int(row["running"]) for row in mine], times, marker="o", ms=4, color=drawing.PALETTE[number], label=reader
        )
    drawing.ticks(axes, running, "running requests")
    drawing.log_y(axes)
    drawing.grid(axes, "CPU of the engine's thread", "microseconds per step (median)")
    drawing.save(figure, path, provenance(rows))


def figures(rows: Rows) -> list[Figure]:
    """Median CPU time of each row."""
    return [
        Figure(f"{row['running']} running, {row['reader']}", float(row["cpu_us"]), "us", "lower", 0.0) for row in rows
    ]


PROGRAM = Program(
    name="engine",
    title="CPU cost of a step of the whole engine",
    about="The engine's thread, scheduler, output processing with a tokenizer of 151,936 tokens, futures and streams "
    "around a device that takes a fixed time per step. Times are CPU time of the thread: `build` flattens the plan, "
    "`text` is detokenising and stop strings, `deliver` hands over to the readers. The device is idle where the next "
    "plan came after the end of the last one.",
    tables=tables,
    plots={"": draw},
    figures=figures,
    settings=lambda rows: f"steps of {rows[0]['step_us']} us",
)
