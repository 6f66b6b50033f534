"""Helpers that drive a scheduler with a scripted model: no device, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minillm.core.config import SchedulerConfig
from minillm.core.plan import NoPlan, StepEvents, StepOutcome, StepPlan
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.core.scheduler import ContinuousScheduler

STEP_SECONDS = 0.01


def make_request(request_id: str, prompt: int | Sequence[int], max_tokens: int = 8, **kwargs: Any) -> Request:
    """A request with `prompt` tokens (a count gives ids unlike those of other requests) and plain parameters."""
    fields = {k: kwargs.pop(k) for k in list(kwargs) if k in SamplingParams.__dataclass_fields__}
    if isinstance(prompt, int):
        base = 1000 * (1 + sum(map(ord, request_id)) % 97)
        prompt = [base + i for i in range(prompt)]
    return Request(request_id, prompt, SamplingParams(max_tokens=max_tokens, **fields), **kwargs)


def scripted_token(request_id: str, index: int) -> int:
    """The default model: a token that tells its index."""
    return 100 + index


class Driver:
    """Runs a scheduler to completion, token by token, with `model(request_id, output_index) -> token id`."""

    def __init__(
        self,
        scheduler: ContinuousScheduler | None = None,
        *,
        overlap: bool = False,
        model: Callable[[str, int], int] = scripted_token,
        **config: Any,
    ) -> None:
        merged = {"num_blocks": 64, "block_size": 4, **config}
        self.scheduler = scheduler or ContinuousScheduler(SchedulerConfig(**merged))
        self.overlap = overlap
        self.model = model
        self.now = 0.0
        self.in_flight: list[StepPlan] = []
        self.plans: list[StepPlan] = []
        self.rows: dict[int, str] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.order_of_admission: list[str] = []

    def submit(self, *requests: Request) -> None:
        """Submit at the present time."""
        for request in requests:
            self.scheduler.submit(request, self.now)

    def schedule(self) -> StepPlan | NoPlan:
        """One schedule call; a plan is kept in flight."""
        plan = self.scheduler.schedule(self.now)
        if isinstance(plan, StepPlan):
            self.in_flight.append(plan)
            self.plans.append(plan)
            self.order_of_admission += [a.request_id for a in plan.assignments]
        return plan

    def outcome(self, plan: StepPlan) -> StepOutcome:
        """What the scripted model samples for a plan."""
        self.rows.update({a.row: a.request_id for a in plan.assignments})
        names, indices = list(plan.decodes.request_ids), list(plan.decodes.output_indices)
        for chunk in plan.prefills:
            names += [self.rows[row] for row in chunk.sample_rows]
            indices += [chunk.output_index for _ in chunk.sample_rows]
        return StepOutcome(plan.step, [[self.model(n, i)] for n, i in zip(names, indices, strict=True)])

    def commit(self, **changes: Any) -> StepEvents:
        """Commit the oldest plan in flight; `changes` overwrite fields of its outcome."""
        plan = self.in_flight.pop(0)
        outcome = self.outcome(plan)
        for name, value in changes.items():
            setattr(outcome, name, value)
        self.now += STEP_SECONDS
        events = self.scheduler.commit(plan, outcome, self.now)
        self.collect(events)
        return events

    def collect(self, events: StepEvents) -> None:
        """Keep the tokens and ends, checking that each comes once and in order."""
        for event in events.tokens:
            stream = self.tokens.setdefault(event.request_id, [])
            assert event.index == len(stream), "tokens come once and in order"
            stream.append(event.token_id)
        for end in events.finished:
            assert end.request_id not in self.finished, "a request ends once"
            self.finished[end.request_id] = end.reason

    def step(self) -> StepPlan | NoPlan:
        """Schedule and commit once (with overlap: schedule, then commit the plan before)."""
        plan = self.schedule()
        depth = 1 if self.overlap and isinstance(plan, StepPlan) else 0
        while len(self.in_flight) > depth:
            self.commit()
        self.collect(self.scheduler.take_events())
        return plan

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is live; fails if that takes more than `max_steps`."""
        for _ in range(max_steps):
            if not self.scheduler.has_live_requests and not self.in_flight:
                self.collect(self.scheduler.take_events())
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.live_requests}")

    def assert_idle_and_clean(self) -> None:
        """Nothing is held by anybody."""
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.swapped, stats.plans_in_flight) == (0, 0, 0, 0)
        assert (stats.blocks_referenced, stats.blocks_quarantined, stats.swap_slots_used) == (0, 0, 0)
        assert stats.blocks_free + stats.blocks_evictable == stats.blocks_total
