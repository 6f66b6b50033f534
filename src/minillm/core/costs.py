"""Measured costs of swapping and prefilling, learnt from step outcomes: what preemption decisions weigh."""

from __future__ import annotations

from dataclasses import dataclass, field

from minillm.core.plan import StepOutcome, StepPlan

_WEIGHT = 0.2
"""Least weight of a new measurement in the moving averages: about the last ten count."""

_MIN_PREFILL_TOKENS = 8
"""Steps that prefill fewer tokens say more about fixed costs than about a token."""


@dataclass(slots=True)
class MeasuredCosts:
    """Moving averages. Before anything was measured, the defaults prefer swapping, as the spec asks.

    The first measurement replaces the default and the next ones count for a half, a third, a quarter: one swap over a
    slow link is enough to know that it is slow.
    """

    prefill_seconds_per_token: float = 1e-3
    """What a prefilled token adds to a step; where decodes share the step, what they take alone is not counted."""
    swap_seconds_per_block: float = 1e-5
    """One way."""
    decode_step_seconds: float = 0.0
    """Of a step without prefill; 0 until there was one."""
    _measured: dict[str, int] = field(default_factory=dict)
    """Measurements behind each of the averages."""

    def observe(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Learn from one committed step."""
        timings = outcome.timings
        if timings.forward is not None:
            prefill_tokens = sum(chunk.end - chunk.start for chunk in plan.prefills)
            if not prefill_tokens:
                self._learn("decode_step_seconds", timings.forward)
            elif prefill_tokens >= _MIN_PREFILL_TOKENS:
                shared = self.decode_step_seconds if plan.decodes.rows else 0.0
                self._learn("prefill_seconds_per_token", max(0.0, timings.forward - shared) / prefill_tokens)
        for seconds, swaps in ((timings.swap_out, plan.swap_outs), (timings.swap_in, plan.swap_ins)):
            blocks = sum(len(swap.blocks) for swap in swaps) if seconds is not None else 0
            if seconds is not None and blocks:
                self._learn("swap_seconds_per_block", seconds / blocks)

    def _learn(self, average: str, measured: float) -> None:
        count = self._measured[average] = self._measured.get(average, 0) + 1
        weight = max(_WEIGHT, 1 / count)
        setattr(self, average, getattr(self, average) + weight * (measured - getattr(self, average)))

    def recompute_seconds(self, num_tokens: int) -> float:
        """Time to rebuild the KV of so many tokens."""
        return num_tokens * self.prefill_seconds_per_token

    def swap_seconds(self, num_blocks: int) -> float:
        """Time to copy so many blocks out and back in."""
        return 2 * num_blocks * self.swap_seconds_per_block
