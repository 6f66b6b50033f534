"""The hook on which recorder, metrics and timeline hang: every input and every decision passes here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minillm.core.plan import NoPlan, StepEvents, StepOutcome, StepPlan
    from minillm.core.request import Request


class Observer:
    """Override what you need. Calls come in order, from the scheduler's own thread; do not change anything."""

    def on_submit(self, request: Request, now: float) -> None:
        """The request was accepted and queued."""

    def on_cancel(self, request_id: str, now: float, reason: str) -> None:
        """A live request (or group) was cancelled."""

    def on_finish(self, request_id: str, output_index: int, now: float, reason: str) -> None:
        """A stop string ended the request after this output token."""

    def on_schedule(self, plan: StepPlan | NoPlan, now: float) -> None:
        """`schedule` returned this."""

    def on_commit(self, plan: StepPlan, outcome: StepOutcome, events: StepEvents, now: float) -> None:
        """A plan committed with this outcome and these events."""

    def on_preempt(self, request: Request, kind: str, reason: str, step: int) -> None:
        """The request loses its place; `kind` is swap or recompute."""

    def on_wait(self, request: Request, kind: str, reason: str, step: int) -> None:
        """The head of the queue waits for this; told once per kind (blocks, slots, budget, drain, batch) and wait."""
