"""Virtual time: the real scheduler and step loop over a runner that computes nothing and charges each step's cost.

Hours of traffic take seconds, and the same inputs give the same figures on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minillm.core.plan import StepEvents, StepOutcome, StepPlan, StepTimings
from minillm.core.request import Request
from minillm.engine.output_processor import OutputProcessor, RequestUpdate, TrackedRequest


class VirtualClock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, moment: float) -> None:
        """Set it to `moment` seconds, unless that is past."""
        self.now = max(self.now, moment)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step as a sum: what a step costs whatever it does, then per row, token, key and block.

    A step that decodes D rows over K cached tokens and prefills P tokens with A (query, key) pairs takes
    ``step + D * decode_row + K * context_token + P * prefill_token + A * prefill_pair``; each swapped block adds
    ``swap_block`` (either way).
    """

    step: float
    decode_row: float
    context_token: float
    prefill_token: float
    prefill_pair: float
    swap_block: float

    def forward_seconds(self, plan: StepPlan) -> float:
        """Of the forward pass and sampling."""
        decodes, seconds = plan.decodes, self.step
        seconds += len(decodes.rows) * self.decode_row
        seconds += (sum(decodes.positions) + len(decodes.rows)) * self.context_token
        for chunk in plan.prefills:
            tokens = chunk.end - chunk.start
            seconds += tokens * self.prefill_token + tokens * (chunk.start + chunk.end) / 2 * self.prefill_pair
        return seconds

    def swap_seconds(self, swaps: Sequence[Any]) -> float:
        """Of copies one way."""
        return self.swap_block * sum(len(swap.blocks) for swap in swaps)


H200_8B = StepCosts(
    step=4.8e-3,
    decode_row=1.9e-5,
    context_token=3.05e-8,
    prefill_token=2.1e-5,
    prefill_pair=2e-10,
    swap_block=4.2e-5,
)
"""An 8B model (Llama 3.1 shape, bf16, blocks of 16 tokens = 2 MiB) on one H200, after vLLM 0.25.1's figures there: 4.95
ms at batch 1, 13.8 ms at batch 256 x 512, 38,400 prompt tokens/s in prompts of 8,192; keys and values are read at 4.3
TB/s, blocks swapped at 50 GB/s."""


class CostRunner:
    """A :class:`ModelRunner` whose tokens follow from request and index alone, and whose steps cost virtual time.

    The device works through plans one after the other: with one plan in flight, scheduling is free, as it is on a GPU
    that is never late.
    """

    def __init__(self, clock: VirtualClock, costs: StepCosts, vocab_size: int = 32_000) -> None:
        self.clock = clock
        self.costs = costs
        self.vocab_size = vocab_size
        self._free_at = 0.0
        self._bases: dict[int, int] = {}
        """Per row, what its request's tokens count up from."""

    def forward(self, plan: StepPlan) -> tuple[StepPlan, StepTimings, float]:
        """Charge the step; returns (plan, its times, when it is done)."""
        for assignment in plan.assignments:
            self._bases[assignment.row] = (assignment.seed * 2_654_435_761 + assignment.choice * 40_503) % (1 << 32)
        forward = self.costs.forward_seconds(plan)
        swap_out, swap_in = self.costs.swap_seconds(plan.swap_outs), self.costs.swap_seconds(plan.swap_ins)
        self._free_at = max(self._free_at, self.clock.now) + forward + swap_out + swap_in
        timings = StepTimings(forward, None, swap_out or None, swap_in or None)
        return plan, timings, self._free_at

    def sample(self, handle: Any, masks: Any | None = None) -> None:
        """Part of the step's cost."""

    def collect(self, handle: tuple[StepPlan, StepTimings, float]) -> StepOutcome:
        """Move the clock to the end of the step; ids are 3 or more, so no end-of-sequence id comes."""
        plan, timings, done = handle
        self.clock.advance_to(done)
        bases, size, decodes = self._bases, self.vocab_size - 3, plan.decodes
        tokens = [
            [3 + (bases[row] + index) % size] for row, index in zip(decodes.rows, decodes.output_indices, strict=True)
        ]
        for chunk in plan.prefills:
            tokens += [[3 + (bases[row] + chunk.output_index) % size] for row in chunk.sample_rows]
        return StepOutcome(plan.step, tokens, timings=timings)

    def close(self) -> None:
        """Nothing is held."""


class NoOutputs(OutputProcessor):
    """The output side of an engine whose outputs nobody reads: no text, no updates."""

    def __init__(self) -> None:
        super().__init__(lambda params, prompt_ids: None, str)  # type: ignore[arg-type, return-value]

    def add(
        self, request: Request, prompt: str | None = None, tag: Any = None, wants_events: bool = True
    ) -> TrackedRequest:
        """Keep nothing."""
        return TrackedRequest(request, prompt, tag, wants_events)

    def process(self, events: StepEvents, now: float) -> tuple[list[tuple[str, int]], list[str]]:
        """No stop strings, no failed outputs."""
        return [], []

    def take_updates(self) -> list[RequestUpdate]:
        """There are none."""
        return []
