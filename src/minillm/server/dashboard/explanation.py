"""One request's story as data: what it waits for or what happened to it, and every change with its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minillm.core.request import QUEUED, Request
from minillm.server.dashboard.capture import RequestView, view, view_ended, wait_reason
from minillm.server.dashboard.frame import request_row

if TYPE_CHECKING:
    from minillm.core.base_scheduler import BaseScheduler
    from minillm.engine.runtime import Runtime

MAX_TIMELINE = 256
"""Latest entries of a history that are shown."""
MAX_TEXT_TOKENS = 512
"""Tokens of a prompt and of an output that are shown where the operator allows it."""

Tokens = tuple[list[int], list[int]]


def explanation(runtime: Runtime, request_id: str, now: float, show_text: bool = False) -> dict[str, Any]:
    """What GET /v1/requests/{id}/explain answers.

    Raises :class:`InvalidParameterError` for an id that is not known (any more). With `show_text` a live request's
    prompt and output are in it, each cut to its first 512 tokens; of ended ones no tokens are kept.
    """

    def look(scheduler: BaseScheduler) -> tuple[str, RequestView, int | None, Tokens | None] | None:
        request = scheduler.get(request_id)
        ended = scheduler.get_ended(request_id) if request is None else None
        if request is not None:
            tokens = (request.input_ids[:MAX_TEXT_TOKENS], request.generated_ids[:MAX_TEXT_TOKENS])
            text = scheduler.explain(request_id)
            return text, view(request, MAX_TIMELINE), _place(scheduler, request), tokens if show_text else None
        if ended is not None:
            return scheduler.explain(request_id), view_ended(ended, MAX_TIMELINE), None, None
        return None

    found = runtime.inspect(look)
    if found is None:  # not known, or handed over and not in the scheduler yet
        return {"object": "request.explanation", "id": request_id, "story": runtime.explain(request_id)}
    story, row, place, tokens = found
    answer = {
        "object": "request.explanation",
        **request_row(row, now),
        "id": request_id,
        "place": place,
        "waits_for": wait_reason(row.history) if place == 0 else None,
        "story": story,
        "timeline": [
            {
                "seconds": round(max(0.0, entry.time - row.arrival_time), 6),
                "step": entry.step if entry.step >= 0 else None,
                "state": entry.state.value,
                "reason": entry.reason,
            }
            for entry in row.history
        ],
    }
    if tokens is not None:
        decode: Callable[[list[int]], str] = runtime.tokenizer.decode
        answer["prompt"], answer["output"] = decode(tokens[0]), decode(tokens[1])
    return answer


def _place(scheduler: BaseScheduler, request: Request) -> int | None:
    """How many requests are before it in the queue; None if it is not queued (or waits with its parent)."""
    if request.state not in QUEUED or request not in scheduler.waiting:
        return None
    return len(scheduler.waiting.ahead_of(request))
