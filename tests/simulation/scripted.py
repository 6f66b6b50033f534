"""A simulation without chance: chosen requests, no faults, every check of the harness still on."""

from __future__ import annotations

from random import Random

from minillm.core.config import SchedulerConfig
from minillm.core.plan import NoPlan, StepEvents, StepPlan
from minillm.core.sampling_params import SamplingParams
from simulation.harness import Simulation, SimulationFailure, Tracked
from simulation.workload import RequestSpec, SimSettings


class Scripted(Simulation):
    """Runs chosen requests; keeps the plans, the delivered tokens and the finish reasons."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        overlap: bool = False,
        static: bool = False,
        constant_hash: bool = False,
        vocab_size: int = 1000,
    ) -> None:
        settings = SimSettings(
            config=config, overlap=overlap, static=static, constant_hash=constant_hash, vocab_size=vocab_size
        )
        super().__init__(settings, Random(0))
        self.plans: list[StepPlan] = []
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    def add(
        self,
        prompt: list[int],
        *,
        max_tokens: int | None = 16,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
        seed: int = 0,
        stop_ids: tuple[int, ...] = (),
        n: int = 1,
        prompt_logprobs: int | None = None,
    ) -> Tracked:
        """Submit a request that must be accepted."""
        params = SamplingParams(max_tokens=max_tokens, n=n, prompt_logprobs=prompt_logprobs, stop_token_ids=stop_ids)
        spec = RequestSpec(prompt=prompt, params=params, priority=priority, user=user, cache_salt=cache_salt, seed=seed)
        tracked = self.submit(spec)
        assert tracked is not None, "the request was refused"
        return tracked

    def deliver(self, events: StepEvents) -> None:
        super().deliver(events)
        for event in events.tokens:
            self.tokens.setdefault(event.request_id, []).append(event.token_id)
        for end in events.finished:
            self.reasons[end.request_id] = end.reason

    def step(self) -> StepPlan | NoPlan:
        """One turn of the engine's loop: schedule, then commit what is due (with overlap, the plan before)."""
        self.now += 0.01
        plan = self.schedule(faults_rate=False)
        self.check()
        if isinstance(plan, StepPlan):
            self.plans.append(plan)
        if self.flights and (len(self.flights) > 1 or not self.settings.overlap or isinstance(plan, NoPlan)):
            self.commit()
            self.check()
        return plan

    def run(self, max_steps: int = 5000) -> None:
        """Step until nothing is live; then everything must be released."""
        for _ in range(max_steps):
            if not self.scheduler.has_live_requests and not self.flights:
                self.deliver(self.scheduler.take_events())
                self._check_idle()
                return
            self.step()
        raise SimulationFailure(f"not done after {max_steps} steps; live: {self._live_text()}")

    def run_until_decoding(self, *requests: Tracked) -> None:
        """Step until each of the requests has delivered a token."""
        for _ in range(1000):
            if all(tracked.delivered for tracked in requests):
                return
            self.step()
        raise SimulationFailure("some request never delivered a token")
