"""The interface between the engine's step loop and a device."""

from __future__ import annotations

from typing import Any, Protocol

from minillm.core.plan import StepOutcome, StepPlan


class ModelRunner(Protocol):
    """Executes plans in the order in which they are given; at most two are uncollected at a time.

    The engine calls ``forward(n+1)`` while step n may still run, then ``sample(n+1)`` and ``collect(n)``, in either
    order; so nothing of plan n may be read from host memory that ``forward(n+1)`` changes. ``forward`` and ``sample``
    do not wait for the device.

    An exception out of any of the three is an engine failure: all requests fail with it. What concerns one row
    (NaN logits, a failing mask) is reported in the outcome instead.
    """

    def forward(self, plan: StepPlan) -> Any:
        """Start the step's copies and forward pass; returns a handle."""
        ...

    def sample(self, handle: Any, masks: Any | None = None) -> None:
        """Start sampling of the step's sampling rows.

        `masks`: which tokens each may take, as a numpy array; bool [rows, V], or int32 [rows, ceil(V / 32)] whose bit
        i of word w is token 32 w + i. None: any.
        """
        ...

    def collect(self, handle: Any) -> StepOutcome:
        """Wait for the step and report what it brought."""
        ...

    def close(self) -> None:
        """Free device memory and threads; further calls are errors."""
        ...
