"""A plan between its issue and its commit, and which of its rows no longer count."""

from __future__ import annotations

from dataclasses import dataclass, field

from minillm.core.plan import StepPlan
from minillm.core.request import Request


@dataclass(slots=True)
class InFlight:
    """A plan that was issued and has not committed, with the requests behind its rows."""

    plan: StepPlan
    decodes: list[Request]
    chunks: list[tuple[Request, list[Request]]]
    """Per prefill chunk: its request, and the requests that its sample rows belong to."""
    outputs: list[list[int]] = field(default_factory=list)
    """Output list of each decode row; a throw-away list where the row was discarded."""
    last_rows: list[Request] = field(default_factory=list)
    """Decode rows that sample their request's last token."""
    fills: list[tuple[Request, int]] = field(default_factory=list)
    """(request, index of a block that this plan fills to its last slot)."""
    discarded: set[str] = field(default_factory=set)
    """Requests that ended, or lost their KV, after the plan was issued: their rows count for nothing."""
    discarded_rows: list[int] = field(default_factory=list)
    """Indices of their decode rows."""

    def discard(self, request: Request, *, may_decode: bool = True) -> None:
        """The request's rows in this plan count for nothing. `may_decode=False`: it has no decode row here."""
        if request.request_id in self.discarded:
            return
        self.discarded.add(request.request_id)
        if not may_decode:
            return
        row = request.decode_index
        if not (0 <= row < len(self.decodes) and self.decodes[row] is request):
            try:
                row = self.decodes.index(request)  # it has moved in the decode set since
            except ValueError:
                return
        self.discarded_rows.append(row)
        self.outputs[row] = []
