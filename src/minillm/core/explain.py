"""A request's story in words, from its history and the scheduler's present state."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from minillm.core.request import QUEUED, RUNNING, EndedRequest, Request, RequestState

if TYPE_CHECKING:
    from minillm.core.base_scheduler import BaseScheduler


def explain(scheduler: BaseScheduler, request: Request | EndedRequest) -> str:
    """One paragraph of where the request stands now, then its history, a line per event."""
    present = _past(request) if isinstance(request, EndedRequest) else _present(scheduler, request)
    lines = [f"request {request.request_id}: {present}"]
    start = request.arrival_time
    for time, step, _, reason in request.history:
        where = f"step {step}" if step >= 0 else "submit"
        lines.append(f"  +{max(0.0, time - start):.3f} s, {where}: {reason}")
    return "\n".join(lines)


def _past(request: EndedRequest) -> str:
    text = (
        f"{request.state.value} ({request.finish_reason}); {request.prompt_len} prompt tokens "
        f"({request.cached_tokens} cached), {request.num_generated} output, preempted {request.num_preemptions} times"
    )
    return text + (f"; error: {request.error}" if request.error else "")


def _present(scheduler: BaseScheduler, request: Request) -> str:
    tokens = f"{request.prompt_len} prompt tokens ({request.cached_tokens} cached), {len(request.generated_ids)} output"
    if request.state in RUNNING:
        if request.child_of is not None and request.child_of.pending_fork:
            return f"prefilling through its parent {request.child_of.request_id}; {tokens}"
        shared = sum(1 for block in request.block_table if scheduler.blocks.ref_counts[block] > 1)
        return (
            f"{request.state.value} in row {request.row}, {len(request.block_table)} KV blocks ({shared} shared); "
            f"{tokens}, preempted {request.num_preemptions} times"
        )
    if request.child_of is not None and request.child_of.pending_fork:
        return f"waiting with its parent {request.child_of.request_id}; {tokens}"
    return f"{request.state.value}; {_waits_for(scheduler, request)}; {tokens}"


def _waits_for(scheduler: BaseScheduler, request: Request) -> str:
    queue = scheduler.waiting
    ahead = queue.ahead_of(request)
    head = min(ahead, key=queue.key, default=request)
    text = f"behind {len(ahead)} of {len(queue)} requests in the queue{_by_priority(ahead)}" if ahead else "next to run"
    reason = next((t.reason for t in reversed(head.history) if t.reason.startswith("waits: ")), None)
    if reason is not None and head.state in QUEUED:
        who = "it" if head is request else f"the first, {head.request_id},"
        text += f"; {who} {reason}"
    return text + _holders(scheduler)


def _by_priority(ahead: list[Request]) -> str:
    counts = Counter(request.priority for request in ahead)
    parts = [f"{counts[level]} of priority {level}" for level in sorted(counts)]
    return f" ({', '.join(parts)})"


def _holders(scheduler: BaseScheduler, most: int = 4) -> str:
    holders = sorted(scheduler.running, key=lambda r: -len(r.block_table))
    named = [f"{r.request_id} ({len(r.block_table)})" for r in holders[:most] if r.block_table]
    if not named:
        return ""
    rest = f" and {len(holders) - most} more" if len(holders) > most else ""
    state = RequestState.SWAPPED.value
    swapped = f"; {scheduler.num_swapped} {state}" if scheduler.num_swapped else ""
    return f"; KV blocks are held by {', '.join(named)}{rest}{swapped}"
