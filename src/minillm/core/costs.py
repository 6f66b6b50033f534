"""Measured costs of swapping and prefilling, learnt from step outcomes: what preemption decisions weigh."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.core.plan import StepOutcome, StepPlan

_WEIGHT = 0.2
"""Weight of a new measurement in the moving averages: about the last ten count."""

_MIN_PREFILL_TOKENS = 8
"""Steps that prefill fewer tokens say more about fixed costs than about a token."""


@dataclass(slots=True)
class MeasuredCosts:
    """Moving averages. Before anything was measured, the defaults prefer swapping, as the spec asks."""

    prefill_seconds_per_token: float = 1e-3
    swap_seconds_per_block: float = 1e-5
    """One way."""

    def observe(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Learn from one committed step."""
        timings = outcome.timings
        if timings.forward is not None and plan.prefills:
            prefill_tokens = sum(chunk.end - chunk.start for chunk in plan.prefills)
            if prefill_tokens >= _MIN_PREFILL_TOKENS:
                per_token = timings.forward / (prefill_tokens + len(plan.decodes.rows))
                self.prefill_seconds_per_token += _WEIGHT * (per_token - self.prefill_seconds_per_token)
        for seconds, swaps in ((timings.swap_out, plan.swap_outs), (timings.swap_in, plan.swap_ins)):
            blocks = sum(len(swap.blocks) for swap in swaps) if seconds is not None else 0
            if seconds is not None and blocks:
                self.swap_seconds_per_block += _WEIGHT * (seconds / blocks - self.swap_seconds_per_block)

    def recompute_seconds(self, num_tokens: int) -> float:
        """Time to rebuild the KV of so many tokens."""
        return num_tokens * self.prefill_seconds_per_token

    def swap_seconds(self, num_blocks: int) -> float:
        """Time to copy so many blocks out and back in."""
        return 2 * num_blocks * self.swap_seconds_per_block
