"""What a run records: every request's times, every step's batch, and what was wasted on the way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from minillm.core.observer import Observer
from minillm.core.plan import StepEvents, StepOutcome, StepPlan
from minillm.core.request import Request
from minillm.core.stats import Counters


@dataclass(slots=True)
class RequestRecord:
    """One request's story; times in seconds from the start of the run, NaN for what never came.

    `arrival` is when the workload says that it was due, not when the loop got round to it: so the time it waited for
    a long step counts.
    """

    index: int
    label: str
    user: str
    priority: int
    arrival: float
    first_scheduled: float = math.nan
    first_token: float = math.nan
    finish: float = math.nan
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    finish_reason: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; NaN for an output of one."""
        return (self.finish - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan

    @property
    def wait(self) -> float:
        """Seconds from arrival to the first step that had the request."""
        return self.first_scheduled - self.arrival

    @property
    def latency(self) -> float:
        """Seconds from arrival to the end."""
        return self.finish - self.arrival


@dataclass(slots=True)
class StepLog:
    """One entry per committed step, as parallel columns."""

    time: list[float] = field(default_factory=list)
    """Seconds from the start of the run at the step's commit."""
    seconds: list[float] = field(default_factory=list)
    """Of the forward pass as the runner measured it; else from the commit before (or the schedule, if later)."""
    decode_rows: list[int] = field(default_factory=list)
    prefill_chunks: list[int] = field(default_factory=list)
    prefill_tokens: list[int] = field(default_factory=list)
    context_tokens: list[int] = field(default_factory=list)
    """Cached tokens that the decode rows read."""
    prefill_pairs: list[int] = field(default_factory=list)
    """(query, key) pairs of the prefill chunks."""
    swapped_out: list[int] = field(default_factory=list)
    """Blocks; likewise `swapped_in`."""
    swapped_in: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    """Requests that hold a sequence slot after the commit; likewise `waiting` and `swapped`."""
    waiting: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)
    blocks_used: list[int] = field(default_factory=list)
    """Referenced blocks after the commit."""
    waited: list[float] = field(default_factory=list)
    """Seconds that the step loop has waited for the device, of all steps so far."""

    def __len__(self) -> int:
        return len(self.time)

    def rows(self) -> list[dict[str, Any]]:
        """As rows of a CSV file."""
        names = [column.name for column in fields(self)]
        return [
            dict(zip(names, values, strict=True))
            for values in zip(*(getattr(self, name) for name in names), strict=True)
        ]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the finite `values` lie, interpolated; NaN if there are none."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(slots=True)
class RunResult:
    """One run of a workload through an engine."""

    requests: list[RequestRecord]
    steps: StepLog
    counters: Counters
    """Of this run alone."""
    seconds: float
    """From the start to the last commit."""
    num_layers: int
    bytes_per_block: int
    outputs: list[list[int]] = field(default_factory=list)
    """Token ids of each request's output."""
    characters: int = 0
    """Of the outputs' texts."""

    @property
    def output_tokens(self) -> int:
        """Delivered tokens."""
        return sum(request.output_tokens for request in self.requests)

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds if self.seconds else math.nan

    @property
    def total_throughput(self) -> float:
        """Prompt + output tokens per second."""
        tokens = self.output_tokens + sum(request.prompt_tokens for request in self.requests)
        return tokens / self.seconds if self.seconds else math.nan

    @property
    def attention_calls(self) -> int:
        """Attention launches: per step and layer one for the decode rows and one for the prefill chunks."""
        log = self.steps
        per_layer = sum(map(bool, log.decode_rows)) + sum(map(bool, log.prefill_chunks))
        return per_layer * self.num_layers

    @property
    def mean_batch(self) -> float:
        """Mean number of requests in a step (decode rows + prefill chunks)."""
        if not len(self.steps):
            return math.nan
        return (sum(self.steps.decode_rows) + sum(self.steps.prefill_chunks)) / len(self.steps)

    @property
    def wasted_tokens(self) -> int:
        """Tokens computed for nothing: KV rebuilt after a preemption, and rows whose token was thrown away."""
        return self.counters.recomputed_tokens + self.counters.discarded_rows

    @property
    def swapped_bytes(self) -> int:
        """Copied to host memory and back."""
        return (self.counters.swapped_out_blocks + self.counters.swapped_in_blocks) * self.bytes_per_block

    def of_label(self, label: str) -> list[RequestRecord]:
        """The requests of one class."""
        return [request for request in self.requests if request.label == label]

    def figures(self, digits: int = 6) -> dict[str, Any]:
        """The run as columns of a CSV file: seconds, tokens per second, counts."""
        columns: dict[str, Any] = {
            "requests": len(self.requests),
            "completed": sum(request.finish_reason in ("length", "stop") for request in self.requests),
            "output_tokens": self.output_tokens,
            "seconds": round(self.seconds, digits),
            "output_tok_per_s": round(self.throughput, 2),
            "total_tok_per_s": round(self.total_throughput, 2),
            **latency_columns(self.requests, digits),
            "steps": len(self.steps),
            "attention_calls": self.attention_calls,
            "mean_batch": round(self.mean_batch, 3),
            "cached_tokens": self.counters.cached_tokens,
            "prefilled_tokens": self.counters.prefilled_tokens,
            "preemptions_swap": self.counters.preemptions_swap,
            "preemptions_recompute": self.counters.preemptions_recompute,
            "recomputed_tokens": self.counters.recomputed_tokens,
            "discarded_rows": self.counters.discarded_rows,
            "wasted_tokens": self.wasted_tokens,
            "swapped_bytes": self.swapped_bytes,
        }
        return columns


def latency_columns(requests: Sequence[RequestRecord], digits: int = 6) -> dict[str, float]:
    """Mean, p50, p90 and p99 of TTFT, TPOT and latency in seconds, and the longest wait for a first step."""
    columns: dict[str, float] = {}
    measures: dict[str, Callable[[RequestRecord], float]] = {
        "ttft": lambda r: r.ttft,
        "tpot": lambda r: r.tpot,
        "latency": lambda r: r.latency,
    }
    for name, measure in measures.items():
        values = [value for value in map(measure, requests) if math.isfinite(value)]
        columns[f"{name}_mean"] = round(statistics.fmean(values), digits) if values else math.nan
        for share in (50, 90, 99):
            columns[f"{name}_p{share}"] = round(percentile(values, share / 100), digits)
    columns["wait_max"] = round(max((r.wait for r in requests if math.isfinite(r.wait)), default=math.nan), digits)
    return columns


class Recorder(Observer):
    """Fills a :class:`StepLog` and the request records of one run at a time."""

    def __init__(self) -> None:
        self.scheduler: Any = None
        """Of the engine that it observes; set once it exists. Likewise `engine`."""
        self.engine: Any = None
        self.begin({}, 0.0)

    def begin(self, records: Mapping[str, RequestRecord], start: float) -> None:
        """Start a run: `records` by request id get filled in; `start` is the clock's time."""
        self.records = records
        self.start = start
        self.steps = StepLog()
        self.ended: list[Request] = []
        """Requests that ended since the driver last looked."""
        self._live: dict[str, Request] = {}
        self._scheduled_at: dict[int, float] = {}
        self._last_commit = start

    def on_submit(self, request: Request, now: float) -> None:
        """Follow the request to its end."""
        self._live[request.request_id] = request

    def on_schedule(self, plan: Any, now: float) -> None:
        """Remember when the plan was made."""
        if isinstance(plan, StepPlan):
            self._scheduled_at[plan.step] = now

    def on_commit(self, plan: StepPlan, outcome: StepOutcome, events: StepEvents, now: float) -> None:
        """Log the step and the requests that it ended."""
        log, scheduler = self.steps, self.scheduler
        since = max(self._last_commit, self._scheduled_at.pop(plan.step, self._last_commit))
        forward = outcome.timings.forward
        log.time.append(now - self.start)
        log.seconds.append(forward if forward is not None else now - since)
        log.decode_rows.append(len(plan.decodes.rows))
        log.prefill_chunks.append(len(plan.prefills))
        log.prefill_tokens.append(sum(chunk.end - chunk.start for chunk in plan.prefills))
        log.context_tokens.append(sum(plan.decodes.positions) + len(plan.decodes.rows))
        log.prefill_pairs.append(
            sum((chunk.end - chunk.start) * (chunk.start + chunk.end + 1) // 2 for chunk in plan.prefills)
        )
        log.swapped_out.append(sum(len(swap.blocks) for swap in plan.swap_outs))
        log.swapped_in.append(sum(len(swap.blocks) for swap in plan.swap_ins))
        log.running.append(scheduler.num_running)
        log.waiting.append(scheduler.num_waiting)
        log.swapped.append(scheduler.num_swapped)
        log.blocks_used.append(scheduler.blocks.num_referenced)
        log.waited.append(self.engine.wait_seconds)
        self._last_commit = now
        for event in events.finished:
            self._end(event.request_id, event.reason, now)

    def on_cancel(self, request_id: str, now: float, reason: str) -> None:
        """The driver cancels nobody; a deadline or a failed output may."""
        self._end(request_id, reason, now)

    def _end(self, request_id: str, reason: str, now: float) -> None:
        request, record = self._live.pop(request_id, None), self.records.get(request_id)
        if request is None or record is None:
            return
        if request.first_scheduled_time is not None:
            record.first_scheduled = request.first_scheduled_time - self.start
        if request.first_token_time is not None:
            record.first_token = request.first_token_time - self.start
        record.finish = now - self.start
        record.prompt_tokens = request.prompt_len
        record.output_tokens = len(request.generated_ids)
        record.cached_tokens = request.cached_tokens
        record.recomputed_tokens = request.recomputed_tokens
        record.preemptions = request.num_preemptions
        record.finish_reason = reason
        self.ended.append(request)
