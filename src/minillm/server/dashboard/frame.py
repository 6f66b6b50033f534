"""From a capture to what the page draws: JSON of bounded size, made off the engine's thread and lock."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from typing import Any

import numpy as np

from minillm.core.request import ENDED, RequestState
from minillm.server.dashboard.capture import Capture, RequestView

MAX_CELLS = 8192
"""Blocks that the map shows one by one; of a larger pool every k-th is shown."""
MAX_SPANS = 32
CHART_SECONDS = 120

FREE, CACHED, QUARANTINED, HELD, SHARED = range(5)
"""States of a block in the map."""


def frame(captured: Capture, now: float) -> dict[str, Any]:
    """One frame. `now`: seconds on the engine's clock; all times in it are seconds before it."""
    stats = captured.stats
    shown = [*captured.running, *captured.queued, *captured.ended]
    return {
        "stats": _gauges(captured),
        "running": [request_row(row, now) for row in captured.running],
        "queue": [
            {**request_row(row, now), "reason": queue_reason(place, row, captured.head_wait)}
            for place, row in enumerate(captured.queued)
        ],
        "hidden": {
            "running": stats.running - len(captured.running),
            "queue": stats.waiting - len(captured.queued),
        },
        "blocks": block_map(captured),
        "swap": {"total": stats.swap_slots_total, "used": stats.swap_slots_used, "owners": captured.swapped},
        "latency": {"ttft": percentiles(captured.ttft), "tpot": percentiles(captured.tpot)},
        "throughput": throughput(captured.seconds, now),
        "timelines": [timeline(row, now) for row in shown],
    }


def encode_event(name: str, value: Any) -> bytes:
    """One server-sent event. JSON has no newlines, so the data is one line."""
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def _gauges(captured: Capture) -> dict[str, Any]:
    stats = captured.stats
    counters = stats.counters
    looked_up = stats.prefix_hits + stats.prefix_misses
    return {
        "running": stats.running,
        "prefilling": stats.prefilling,
        "waiting": stats.waiting - stats.swapped,
        "swapped": stats.swapped,
        "steps": counters.steps,
        "blocks": {
            "total": stats.blocks_total,
            "free": stats.blocks_free,
            "cached": stats.blocks_evictable,
            "quarantined": stats.blocks_quarantined,
            "held": stats.blocks_referenced,
            "shared": stats.blocks_shared,
        },
        "fragmentation": round(stats.internal_fragmentation, 4),
        "hit_rate": round(stats.prefix_hits / looked_up, 4) if looked_up else None,
        "preemptions": {"swap": counters.preemptions_swap, "recompute": counters.preemptions_recompute},
        "swapped_blocks": {"out": counters.swapped_out_blocks, "in": counters.swapped_in_blocks},
        "ended": {"finished": counters.finished, "cancelled": counters.cancelled, "failed": counters.failed},
        "generated_tokens": counters.generated_tokens,
    }


def request_row(row: RequestView, now: float) -> dict[str, Any]:
    """What lists say of a request; nothing of its text."""
    return {
        "id": row.request_id,
        "state": row.state.value,
        "colour": row.colour,
        "priority": row.priority,
        "user": row.user,
        "age": round(max(0.0, now - row.arrival_time), 3),
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "output_tokens": row.output_tokens,
        "max_tokens": row.max_tokens,
        "blocks": row.blocks,
        "swap_slots": row.swap_slots,
        "preemptions": row.preemptions,
        "finish_reason": row.finish_reason,
    }


def queue_reason(place: int, row: RequestView, head_wait: str | None) -> str:
    """Why a queued request is where it is."""
    parts = []
    if row.state in (RequestState.SWAPPED, RequestState.PREEMPTED):
        out = next((e.reason for e in reversed(row.history) if not e.reason.startswith("waits: ")), None)
        parts += [out] if out else []
    if place:
        parts.append(f"behind {place} other{'s' if place > 1 else ''}")
    else:
        parts.append(f"waits for {head_wait}" if head_wait else "next to run")
    return "; ".join(parts)


def block_map(captured: Capture) -> dict[str, Any]:
    """Two bytes per cell, base64: the colour of a block's owner (0: none), and its state."""
    counts = np.asarray(captured.ref_counts, dtype=np.int32)
    owners = np.zeros(len(counts), dtype=np.uint8)
    states = np.full(len(counts), FREE, dtype=np.uint8)
    states[captured.cached] = CACHED
    states[captured.quarantined] = QUARANTINED
    states[counts == 1] = HELD
    states[counts > 1] = SHARED
    for colour, table in captured.tables:
        owners[table] = colour
    stride = max(1, math.ceil(len(counts) / MAX_CELLS))
    return {
        "total": len(counts),
        "stride": stride,
        "owners": b64encode(owners[::stride].tobytes()).decode(),
        "states": b64encode(states[::stride].tobytes()).decode(),
    }


def percentiles(values: list[float]) -> dict[str, float | int | None]:
    """p50, p90 and p99 (nearest rank) in seconds, and of how many."""
    ordered = sorted(values)
    found: dict[str, float | int | None] = {"count": len(ordered)}
    for share in (50, 90, 99):
        rank = max(0, math.ceil(len(ordered) * share / 100) - 1)
        found[f"p{share}"] = round(ordered[rank], 6) if ordered else None
    return found


def throughput(seconds: list[tuple[int, int, int]], now: float) -> list[list[int]]:
    """[seconds ago, generated tokens, prefill tokens] of the latest seconds with steps, oldest first. 0 is the
    second that still runs."""
    present = int(now)
    return [
        [present - second, generated, prefilled]
        for second, generated, prefilled in seconds
        if 0 <= present - second <= CHART_SECONDS and (generated or prefilled)
    ]


def timeline(row: RequestView, now: float) -> dict[str, Any]:
    """A request's states as spans [state, seconds ago at its begin, at its end]; an open one ends now."""
    spans: list[list[Any]] = []
    for entry in row.history:
        ago = round(max(0.0, now - entry.time), 3)
        if spans and spans[-1][0] == entry.state.value:
            continue
        if spans:
            spans[-1][2] = ago
        if entry.state not in ENDED:
            spans.append([entry.state.value, ago, 0.0])
    return {
        "id": row.request_id,
        "colour": row.colour,
        "state": row.state.value,
        "finish_reason": row.finish_reason,
        "spans": spans[-MAX_SPANS:],
    }
