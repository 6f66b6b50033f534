"""A copy of what the scheduler holds, made under the engine's lock: plain tuples and lists, bounded, and cheap.

What can be copied in C is copied whole (block tables, reference counts); what takes Python per item is cut to the
limits here. Everything else happens on the copy, in another thread (:mod:`minillm.server.dashboard.frame`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from minillm.core.request import RUNNING, RequestState, Transition

if TYPE_CHECKING:
    from minillm.core.base_scheduler import BaseScheduler
    from minillm.core.request import EndedRequest, Request
    from minillm.core.stats import SchedulerStats
    from minillm.core.waiting_queue import WaitingQueue
    from minillm.server.metrics import EngineMetrics

MAX_RUNNING = 64
MAX_QUEUED = 64
MAX_ENDED = 24
MAX_HISTORY = 48
"""Entries of a request's history that a live frame shows."""
EXACT_QUEUE = 256
"""Queues up to this length are shown in the exact order of this moment."""
NUM_COLOURS = 255
MAX_ID = 200
"""Characters of a request id that are shown."""


class RequestView(NamedTuple):
    """One request at one moment. Times in seconds on the engine's clock."""

    request_id: str
    state: RequestState
    colour: int
    priority: int
    user: str
    arrival_time: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int | None
    blocks: int
    swap_slots: int
    preemptions: int
    finish_reason: str | None
    history: list[Transition]


@dataclass(frozen=True, slots=True)
class Capture:
    """All that a frame is made of."""

    stats: SchedulerStats
    running: list[RequestView]
    queued: list[RequestView]
    """The first of the queue, in order."""
    ended: list[RequestView]
    """Latest first."""
    head_wait: str | None
    """What the head of the queue waits for, in words."""
    tables: list[tuple[int, list[int]]]
    """Of every running request: its colour and its block table."""
    ref_counts: list[int]
    cached: list[int]
    """Blocks that the prefix cache knows, held or not."""
    quarantined: list[int]
    swapped: list[tuple[int, int]]
    """Colour and swap slots of the swapped requests among the queued ones."""
    ttft: list[float]
    tpot: list[float]
    seconds: list[tuple[int, int, int]]
    """(second, generated tokens, prefill tokens computed), oldest first."""


def colour_of(arrival_seq: int) -> int:
    """The number, 1 to 255, that a request keeps as its colour: in lists, in the block map and in the swap pool."""
    return arrival_seq % NUM_COLOURS + 1


def capture(scheduler: BaseScheduler, metrics: EngineMetrics) -> Capture:
    """Copy; call it under the engine's lock (``runtime.inspect``)."""
    blocks, cache = scheduler.blocks, scheduler.prefix_cache
    queued = first_queued(scheduler.waiting, MAX_QUEUED)
    return Capture(
        stats=scheduler.stats(),
        running=[view(request) for request in _first_running(scheduler)],
        queued=[view(request) for request in queued],
        ended=[view_ended(request) for request in scheduler.last_ended(MAX_ENDED)],
        head_wait=wait_reason(queued[0].history) if queued else None,
        tables=[(colour_of(request.arrival_seq), list(request.block_table)) for request in scheduler.running],
        ref_counts=list(blocks.ref_counts),
        cached=list(cache.entries()),
        quarantined=[block for held in blocks.quarantine.values() for block in held],
        swapped=[(colour_of(r.arrival_seq), len(r.swap_slots)) for r in queued if r.swap_slots],
        ttft=list(metrics.first_token_times),
        tpot=list(metrics.token_times),
        seconds=[(s.second, s.generated, s.prefilled) for s in metrics.throughput],
    )


def first_queued(queue: WaitingQueue, count: int) -> list[Request]:
    """The first `count` requests of the queue, in order."""
    if len(queue) <= EXACT_QUEUE:
        return queue.in_order()[:count]
    return queue.first(count)


def _first_running(scheduler: BaseScheduler) -> list[Request]:
    return [request for request, _ in zip(scheduler.running, range(MAX_RUNNING), strict=False)]


def wait_reason(history: list[Transition]) -> str | None:
    """What a queued request was last found to wait for since it came into its present state; None: nothing yet."""
    for entry in reversed(history):
        if entry.reason.startswith("waits: "):
            return entry.reason.removeprefix("waits: ")
        if entry.state is not history[-1].state or entry.reason.startswith(("swapped out", "to be recomputed")):
            return None
    return None


def view(request: Request, max_history: int = MAX_HISTORY) -> RequestView:
    """A live request's row."""
    return RequestView(
        request_id=request.request_id[:MAX_ID],
        state=request.state,
        colour=colour_of(request.arrival_seq),
        priority=request.priority,
        user=request.user[:MAX_ID],
        arrival_time=request.arrival_time,
        prompt_tokens=request.prompt_len,
        cached_tokens=request.cached_tokens,
        output_tokens=len(request.generated_ids),
        max_tokens=request.max_tokens,
        blocks=len(request.block_table) if request.state in RUNNING else 0,
        swap_slots=len(request.swap_slots),
        preemptions=request.num_preemptions,
        finish_reason=None,
        history=request.history[-max_history:],
    )


def view_ended(request: EndedRequest, max_history: int = MAX_HISTORY) -> RequestView:
    """The row of a request that has ended: its tokens, user and priority are not kept."""
    return RequestView(
        request_id=request.request_id[:MAX_ID],
        state=request.state,
        colour=0,
        priority=0,
        user="",
        arrival_time=request.arrival_time,
        prompt_tokens=request.prompt_len,
        cached_tokens=request.cached_tokens,
        output_tokens=request.num_generated,
        max_tokens=None,
        blocks=0,
        swap_slots=0,
        preemptions=request.num_preemptions,
        finish_reason=request.finish_reason,
        history=request.history[-max_history:],
    )
