"""Driving an engine through a workload: real models on any device, tiny random ones, and virtual time, all alike.

```python
target = open_target("smollm2-135m", max_num_seqs=16)          # or "random:tiny", or virtual_target(H200_8B, ...)
with target:
    warm_up(target)
    result = drive(target, lognormal("azure-conv", 64), concurrency=None)   # open loop; a number: closed loop
```
The engine's step loop is driven by this thread, without the runtime's thread and futures between: a run measures the
engine, not the hand-over. Every request generates all its tokens (end-of-sequence ids are ignored).
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from minillm.bench.models import open_model
from minillm.bench.random_tokenizer import random_tokenizer
from minillm.bench.recording import Recorder, RequestRecord, RunResult
from minillm.bench.virtual import CostRunner, NoOutputs, StepCosts, VirtualClock
from minillm.bench.workloads import Workload, WorkloadRequest, fixed
from minillm.core.config import SchedulerConfig
from minillm.core.errors import ConfigError, MiniLLMError
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.core.stats import Counters
from minillm.engine.config import EngineConfig
from minillm.engine.llm_engine import LLMEngine
from minillm.engine.output_processor import RequestUpdate

LONGEST_NAP = 0.05
"""Seconds; an open loop sleeps in naps, so that a clock that is set never makes it miss an arrival by much."""


Progress = Callable[[int, int], None]
"""Told (requests ended, requests in all) whenever one ends."""


class FailedRunError(MiniLLMError):
    """Requests of a run did not end with their tokens: the run has no figures."""


@dataclass(slots=True)
class Target:
    """An engine to drive, with the recorder that observes it."""

    engine: LLMEngine
    recorder: Recorder
    name: str
    device: str
    dtype: str
    vocab_size: int
    num_layers: int
    bytes_per_block: int
    """KV of one block in all layers."""
    wait_until: Callable[[float], None]
    """Let the clock get to a moment (or somewhat towards it)."""
    virtual: bool = False

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.engine.close()

    @property
    def device_name(self) -> str:
        """Name of the GPU or CPU; in virtual time that of the cost model."""
        if self.virtual:
            return self.name
        import torch

        from minillm.bench.timing import device_name

        return device_name(torch.device(self.device))

    @property
    def config(self) -> SchedulerConfig:
        """The scheduler's configuration."""
        return self.engine.scheduler.config


def open_target(
    model: str | Any, *, tokenizer: Any = None, progress: Any = None, cpu_time: bool = False, **options: Any
) -> Target:
    """An engine for `model`: a name as `minillm generate` takes it, `random:NAME`, or a model loaded before.

    `options` are fields of :class:`EngineConfig`. A loaded model is shared, not copied: pass the same one to several
    targets to compare settings without loading it again. With `cpu_time` the clock is the CPU time of this process: for
    a machine that others use, and closed loops (nothing else may be waited for), with one thread.
    """
    from minillm.engine.devices import resolve_device
    from minillm.engine.factory import build_engine
    from minillm.runner.pytorch_model_runner import PyTorchModelRunner

    if isinstance(model, str):
        config = EngineConfig(model, **options)
        loaded = None
        if model.startswith("random:"):
            loaded = open_model(model, config.dtype, resolve_device(config.device))
    else:
        loaded, config = model, EngineConfig(model.name, **options)
    if loaded is not None and loaded.kind == "random" and tokenizer is None:
        tokenizer = random_tokenizer(loaded.config.vocab_size)
    recorder = Recorder()
    parts = build_engine(config, observer=recorder, progress=progress, model=loaded, tokenizer=tokenizer)
    recorder.scheduler, recorder.engine = parts.engine.scheduler, parts.engine
    runner = parts.engine.runner
    assert isinstance(runner, PyTorchModelRunner)
    if cpu_time:
        parts.engine.clock = time.process_time
    clock = parts.engine.clock
    info = parts.model_info
    spec = runner.cache.spec
    return Target(
        engine=parts.engine,
        recorder=recorder,
        name=info.name,
        device=info.device,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        num_layers=spec.num_layers,
        bytes_per_block=spec.bytes_per_block,
        wait_until=lambda moment: time.sleep(min(max(0.0, moment - clock()), LONGEST_NAP)),
    )


def virtual_target(
    costs: StepCosts,
    config: SchedulerConfig,
    *,
    static: bool = False,
    overlap: bool = True,
    vocab_size: int = 32_000,
    num_layers: int = 32,
    bytes_per_block: int = 2 << 20,
    check_invariants: bool = False,
) -> Target:
    """The real scheduler and step loop in virtual time, each step charged by `costs`."""
    from minillm.core.scheduler import ContinuousScheduler
    from minillm.core.static_scheduler import StaticScheduler

    recorder, clock = Recorder(), VirtualClock()
    scheduler = (StaticScheduler if static else ContinuousScheduler)(config, observer=recorder)
    recorder.scheduler = scheduler
    engine = LLMEngine(
        scheduler,
        CostRunner(clock, costs, vocab_size),
        NoOutputs(),
        overlap=overlap,
        check_invariants=check_invariants,
        clock=clock,
    )
    recorder.engine = engine
    return Target(
        engine=engine,
        recorder=recorder,
        name="cost model",
        device="virtual",
        dtype="none",
        vocab_size=vocab_size,
        num_layers=num_layers,
        bytes_per_block=bytes_per_block,
        wait_until=clock.advance_to,
        virtual=True,
    )


def drive(
    target: Target,
    workload: Workload,
    *,
    concurrency: int | None = None,
    temperature: float = 0.0,
    keep_cache: bool = False,
    progress: Progress | None = None,
    after_step: Callable[[], None] | None = None,
) -> RunResult:
    """Run a workload to its end and return what was recorded.

    Open loop (`concurrency` None): requests come at their arrival times, whatever the engine manages. Closed loop:
    so many are live at a time, arrival times are ignored, and a request is due when a place is free. The prefix cache
    starts empty unless `keep_cache`. With the workload in place, nothing is made in the timed part but the prompts of
    later turns (and, in virtual time, all prompts: time stands still for them). `after_step` is called after every
    step; what it takes is part of the run unless the engine's clock leaves it out.

    Raises :class:`FailedRunError` if a request ended in any way but with its tokens: such a run has no figures.
    """
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"concurrency={concurrency} must be at least 1, or None for an open loop")
    return _Drive(target, workload, concurrency, temperature, keep_cache, progress, after_step).run()


def warm_up(target: Target, requests: int = 4, prompt: int = 32, output: int = 8) -> RunResult:
    """A small run that is not counted: kernels get built, memory touched, caches filled. Cut to what fits."""
    longest = target.engine.scheduler.max_model_len
    prompt = max(1, min(prompt, longest - output))
    return drive(target, fixed(requests, prompt, max(1, min(output, longest - prompt)), seed=1), concurrency=requests)


class _Drive:
    """One run: which requests are due when, and which are on their way."""

    def __init__(
        self,
        target: Target,
        workload: Workload,
        concurrency: int | None,
        temperature: float,
        keep_cache: bool,
        progress: Progress | None,
        after_step: Callable[[], None] | None,
    ) -> None:
        self.target = target
        self.workload = workload
        self.concurrency = concurrency
        self.temperature = temperature
        self.progress = progress
        self.after_step = after_step
        self.engine = target.engine
        self.scheduler = target.engine.scheduler
        if self.engine.has_work:
            raise ConfigError("the engine has work already: one run at a time")
        if not keep_cache:
            self.engine.reset_prefix_cache()
        self.records: list[RequestRecord] = []
        self.due: list[tuple[float, int]] = []
        """Open loop: heap of (time due from the start, index) of requests that may come once their time has."""
        self.queue: deque[int] = deque()
        """Closed loop: requests that may come as soon as there is a place."""
        self.followers: dict[int, list[int]] = {}
        self.made: dict[int, Request] = {}
        self.outputs: list[list[int]] = [[] for _ in workload.requests]
        self.characters = 0
        self.live = 0
        self.done = 0
        self.start = 0.0

    def run(self) -> RunResult:
        target, recorder = self.target, self.target.recorder
        self._set_up()
        before = replace(self.scheduler.counters)
        self.start = self.engine.clock()
        ids = {self._id(index): record for index, record in enumerate(self.records)}
        recorder.begin(ids, self.start)
        while self.done < len(self.records):
            self._submit_due()
            if self.engine.has_work:
                self._take_text(self.engine.step())
                if self.after_step is not None:
                    self.after_step()
            elif self.due:
                target.wait_until(self.start + self.due[0][0])
            self._take_ended()
        seconds = self.engine.clock() - self.start
        while self.engine.has_work:  # with overlap, what was computed beyond the last tokens
            self._take_text(self.engine.step())
        self._refuse_failures()
        after = self.scheduler.counters
        counters = Counters(**{f.name: getattr(after, f.name) - getattr(before, f.name) for f in fields(Counters)})
        return RunResult(
            self.records,
            recorder.steps,
            counters,
            seconds,
            target.num_layers,
            target.bytes_per_block,
            self.outputs,
            self.characters,
        )

    def _refuse_failures(self) -> None:
        failed = [record for record in self.records if record.finish_reason not in ("length", "stop")]
        if failed:
            reasons = ", ".join(sorted({record.finish_reason for record in failed}))
            raise FailedRunError(
                f"workload {self.workload.name}: {len(failed)} of {len(self.records)} requests did not end with their "
                f"tokens ({reasons}); the run has no figures"
            )

    def _take_text(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            if update.output is not None:
                self.characters += sum(len(output.text) for output in update.output.outputs)

    def _set_up(self) -> None:
        if self.workload.longest > self.scheduler.max_model_len:
            raise ConfigError(
                f"workload {self.workload.name}: a request of {self.workload.longest} tokens does not fit "
                f"max_model_len={self.scheduler.max_model_len}"
            )
        for index, entry in enumerate(self.workload.requests):
            self.records.append(RequestRecord(index, entry.label, entry.user, entry.priority, entry.arrival))
            if entry.follows is not None:
                self.followers.setdefault(entry.follows, []).append(index)
                continue
            if self.concurrency is None:
                self.due.append((entry.arrival, index))
            else:
                self.queue.append(index)
            if not self.target.virtual:
                self.made[index] = self._make(index, entry, [])
        heapq.heapify(self.due)

    @staticmethod
    def _id(index: int) -> str:
        return f"w{index}"

    def _make(self, index: int, entry: WorkloadRequest, before: list[int]) -> Request:
        """The request, with the tokens of the conversation before it in front."""
        params = SamplingParams(temperature=self.temperature, max_tokens=entry.max_tokens, ignore_eos=True)
        request = Request(
            self._id(index),
            before + self.workload.token_ids(index, self.target.vocab_size),
            params,
            priority=entry.priority,
            user=entry.user,
            cache_salt=entry.salt,
            seed=((self.workload.seed << 32) + index) % (1 << 63),
        )
        self.scheduler.prepare(request)
        return request

    def _submit_due(self) -> None:
        now = self.engine.clock()
        # The same sum as the one that is waited for: rounded otherwise, its moment might never come.
        while self.due and self.start + self.due[0][0] <= now:
            due, index = heapq.heappop(self.due)
            self._submit(index, due)
        while self.queue and self.live < (self.concurrency or 0):
            self._submit(self.queue.popleft(), now - self.start)

    def _submit(self, index: int, due: float) -> None:
        request = self.made.pop(index, None) or self._make(index, self.workload.requests[index], [])
        self.records[index].arrival = due
        request.arrival_time = self.start + due
        self.live += 1
        self.engine.add_request(request, wants_events=False)

    def _take_ended(self) -> None:
        """Requests that ended since the last call; their next turns become due."""
        ended, self.target.recorder.ended = self.target.recorder.ended, []
        for request in ended:
            self.live -= 1
            self.done += 1
            index = int(request.request_id[1:])
            self.outputs[index] = request.generated_ids
            for follower in self.followers.pop(index, ()):
                entry = self.workload.requests[follower]
                self.made[follower] = self._make(follower, entry, request.input_ids + self.outputs[index])
                if self.concurrency is None:
                    heapq.heappush(self.due, (max(entry.arrival, self.records[index].finish + entry.think), follower))
                else:
                    self.queue.append(follower)
        if ended and self.progress is not None:
            self.progress(self.done, len(self.records))
