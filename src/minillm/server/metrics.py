"""What the engine's steps and requests add up to: an observer of plain counters and histograms.

The observer runs in the engine's thread, inside its step, so it works per step and per end of a request, never per
token: decoding requests get a token in every step, and so one interval serves all of them. Turning the sums into
Prometheus text is the business of :mod:`minillm.server.exposition`, in another thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minillm.core.observer import Observer
from minillm.core.plan import StepPlan

if TYPE_CHECKING:
    from minillm.core.plan import NoPlan, StepEvents, StepOutcome
    from minillm.core.request import Request

ONE_TWO_FIVE = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
"""vLLM's bounds for counts of tokens; what is shown ends at `max_model_len`."""
TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
CHOICES = (1, 2, 5, 10, 20)

FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Finish reasons of the core, and the label that vLLM gives them."""

KEEP_LATENCIES = 512
"""Latest latencies of each kind that percentiles are taken from."""
KEEP_SECONDS = 300
"""Seconds of throughput that are kept."""


class Histogram:
    """Counts per bucket, and the sum. Bucket i has values in (bounds[i - 1], bounds[i]]; the last is open."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` as often as it occurred."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Histogram:
        """The same numbers, which change no more."""
        copied = Histogram(self.bounds)
        copied.counts, copied.total = list(self.counts), self.total
        return copied


@dataclass(slots=True)
class Sums:
    """Everything that is summed. Times in seconds; one sequence is one choice of a request, as in vLLM."""

    prompt_tokens: int = 0
    """Of prompts whose prefill is done, cached tokens included, each prompt once."""
    ended: Counter[str] = field(default_factory=Counter)
    """Sequences by vLLM's finished_reason."""
    waits: Counter[str] = field(default_factory=Counter)
    """How often the head of the queue had to wait, by kind of reason."""
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    step_seconds: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    choices: Histogram = field(default_factory=lambda: Histogram(CHOICES))
    max_tokens: Histogram = field(default_factory=lambda: Histogram(ONE_TWO_FIVE))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(TTFT_SECONDS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    mean_inter_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    """Per sequence: the mean time per output token after the first (TPOT)."""
    latency: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    inference_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    prefill_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    decode_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(ONE_TWO_FIVE))
    output_lengths: Histogram = field(default_factory=lambda: Histogram(ONE_TWO_FIVE))

    def copy(self) -> Sums:
        """The same numbers, which change no more."""
        values = {name: getattr(self, name) for name in Sums.__slots__}
        return Sums(**{name: v.copy() if hasattr(v, "copy") else v for name, v in values.items()})


@dataclass(slots=True)
class Second:
    """One second's tokens: sampled ones, and prefill tokens computed. `second` is a whole number of the clock."""

    second: int
    generated: int = 0
    prefilled: int = 0


class EngineMetrics(Observer):
    """Hang it on an engine (``Runtime(config, observer=metrics)``) and read it under the engine's lock
    (``runtime.inspect(lambda scheduler: metrics.sums.copy())``)."""

    def __init__(self) -> None:
        self.sums = Sums()
        self.first_token_times: deque[float] = deque(maxlen=KEEP_LATENCIES)
        """The latest times to first token (TTFT)."""
        self.token_times: deque[float] = deque(maxlen=KEEP_LATENCIES)
        """The latest sequences' mean times per output token (TPOT)."""
        self.throughput: deque[Second] = deque([Second(0)], maxlen=KEEP_SECONDS)
        """The latest seconds in which a step ended."""
        self._live: dict[str, Request] = {}
        self._groups: dict[str, tuple[Request, ...]] = {}
        """Sequences of each live request with n > 1, by its id."""
        self._scheduled_at: dict[int, float] = {}
        self._last_commit = 0.0
        self._broken_off: dict[str, float] = {}
        """Sequences that were preempted between two tokens, and when the last one came."""

    # -- from the scheduler ------------------------------------------------------------------------------------------

    def on_submit(self, request: Request, now: float) -> None:
        """Follow the request's sequences to their ends."""
        members = (request, *request.children)
        for member in members:
            self._live[member.request_id] = member
        if request.children:
            self._groups[request.request_id] = members
        self.sums.choices.observe(len(members))
        if request.sampling_params.max_tokens is not None:
            self.sums.max_tokens.observe(request.sampling_params.max_tokens)

    def on_schedule(self, plan: StepPlan | NoPlan, now: float) -> None:
        """Remember when the plan was made."""
        if isinstance(plan, StepPlan):
            self._scheduled_at[plan.step] = now

    def on_commit(self, plan: StepPlan, outcome: StepOutcome, events: StepEvents, now: float) -> None:
        """Take over a step."""
        sums, tokens, last = self.sums, events.tokens, self._last_commit
        computed = plan.num_tokens
        sums.step_tokens.observe(computed)
        # A plan that was made while the one before it ran has had the device since that one's commit.
        sums.step_seconds.observe(now - max(last, self._scheduled_at.pop(plan.step, now)))
        later = len(tokens)
        if plan.prefills:
            later -= self._on_first_tokens(plan, events, now)
        if self._broken_off:
            later -= self._on_resumed(tokens.request_ids, now)
        if later > 0:
            sums.inter_token.observe(now - last, later)
        self._last_commit = now
        second = self.throughput[-1]
        if second.second != int(now):
            second = Second(int(now))
            self.throughput.append(second)
        second.generated += len(tokens)
        second.prefilled += computed - len(plan.decodes)
        for finish in events.finished:
            self._end(finish.request_id, finish.reason)

    def on_preempt(self, request: Request, kind: str, reason: str, step: int) -> None:
        """Its next token does not come with the next step. All its tokens are committed: the last one just now."""
        if request.generated_ids:
            self._broken_off.setdefault(request.request_id, self._last_commit)

    def on_wait(self, request: Request, kind: str, reason: str, step: int) -> None:
        """Count what the head of the queue waits for."""
        self.sums.waits[kind] += 1

    def on_finish(self, request_id: str, output_index: int, now: float, reason: str) -> None:
        """A stop string was found."""
        self._end(request_id, reason)

    def on_cancel(self, request_id: str, now: float, reason: str) -> None:
        """A request, or what is left of a group, was cancelled."""
        request = self._live.get(request_id)
        for member in self._groups.get(request_id) or ((request,) if request is not None else ()):
            if member.finish_reason == "cancelled":
                self._end(member.request_id, "cancelled")

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _on_first_tokens(self, plan: StepPlan, events: StepEvents, now: float) -> int:
        """First tokens come from prefill chunks, whose rows are behind the decodes'. Returns how many there are."""
        rows = min(plan.num_sampling_rows - len(plan.decodes), len(events.tokens))
        tokens, sums, count = events.tokens, self.sums, 0
        if not rows:
            return 0
        for request_id, index in zip(tokens.request_ids[-rows:], tokens.indices[-rows:], strict=True):
            if index:  # a rebuild's, or a decode's where the chunk's own row was discarded
                continue
            count += 1
            request = self._live.get(request_id)
            if request is None:
                continue
            seconds = now - request.arrival_time
            sums.time_to_first_token.observe(seconds)
            self.first_token_times.append(seconds)
            if request.choice == 0:
                sums.prompt_tokens += request.prompt_len
        return count

    def _on_resumed(self, request_ids: list[str], now: float) -> int:
        """Sequences that have a token again after a preemption; returns how many."""
        resumed = self._broken_off.keys() & set(request_ids)
        for request_id in resumed:
            self.sums.inter_token.observe(now - self._broken_off.pop(request_id))
        return len(resumed)

    def _end(self, request_id: str, reason: str) -> None:
        request = self._live.pop(request_id, None)
        if request is None:
            return
        self._broken_off.pop(request_id, None)
        parent = request.child_of or request
        group = self._groups.get(parent.request_id)
        if group is not None and not any(member.request_id in self._live for member in group):
            del self._groups[parent.request_id]
        self.sums.ended[FINISHED_REASONS.get(reason, reason)] += 1
        if reason in ("stop", "length"):
            self._note_latencies(request)

    def _note_latencies(self, request: Request) -> None:
        """Of a sequence that came to its own end; what was cut short would make the figures look better."""
        sums, count = self.sums, len(request.generated_ids)
        scheduled, first, end = request.first_scheduled_time, request.first_token_time, request.finish_time
        assert end is not None
        sums.latency.observe(end - request.arrival_time)
        sums.prompt_lengths.observe(request.prompt_len)
        sums.output_lengths.observe(count)
        if scheduled is not None:
            sums.queue_time.observe(scheduled - request.arrival_time)
            sums.inference_time.observe(end - scheduled)
            sums.prefill_time.observe((first if first is not None else end) - scheduled)
        if first is None:  # max_tokens=0: scored only
            sums.prompt_tokens += request.prompt_len
            return
        sums.decode_time.observe(end - first)
        if count > 1:
            seconds = (end - first) / (count - 1)
            sums.mean_inter_token.observe(seconds)
            self.token_times.append(seconds)
