"""The core under operation lists that hypothesis makes and shrinks: a failure is a short, readable story."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minillm.core.config import SchedulerConfig
from minillm.core.plan import NoPlan
from minillm.core.sampling_params import SamplingParams
from simulation.harness import Simulation
from simulation.workload import RequestSpec, SimSettings

BASES = ([1, 2, 3, 4] * 8, [1, 2, 3, 5] * 8, [7] * 32)


@dataclass(frozen=True)
class Submit:
    base: int
    prompt_len: int
    max_tokens: int
    n: int
    priority: int
    salt: str | None
    stop_id: int | None


@dataclass(frozen=True)
class Cancel:
    which: int


@dataclass(frozen=True)
class StopString:
    which: int
    back: int


@dataclass(frozen=True)
class Schedule:
    pass


@dataclass(frozen=True)
class Commit:
    pass


@dataclass(frozen=True)
class TakeEvents:
    pass


@dataclass(frozen=True)
class ResetCache:
    pass


@dataclass(frozen=True)
class FailAll:
    pass


submits = st.builds(
    Submit,
    base=st.integers(0, len(BASES) - 1),
    prompt_len=st.integers(1, 24),
    max_tokens=st.integers(1, 12),
    n=st.sampled_from((1, 1, 1, 2, 3)),
    priority=st.integers(-1, 1),
    salt=st.sampled_from((None, None, "a")),
    stop_id=st.sampled_from((None, None, 0, 3)),
)
operations = st.lists(
    st.one_of(
        submits,
        submits,
        st.builds(Schedule),
        st.builds(Schedule),
        st.builds(Commit),
        st.builds(Commit),
        st.builds(Cancel, which=st.integers(0, 5)),
        st.builds(StopString, which=st.integers(0, 5), back=st.integers(0, 2)),
        st.builds(TakeEvents),
        st.builds(ResetCache),
        st.builds(FailAll),
    ),
    min_size=1,
    max_size=60,
)


@st.composite
def configs(draw: st.DrawFn) -> SimSettings:
    max_num_seqs = draw(st.integers(1, 4))
    config = SchedulerConfig(
        num_blocks=draw(st.integers(2, 12)),
        block_size=draw(st.integers(1, 4)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from((0, 1, 4, 32))),
        max_prefill_tokens_per_step=draw(st.sampled_from((None, 1, 3))),
        num_swap_blocks=draw(st.sampled_from((0, 1, 4, 24))),
        max_swapped_requests=draw(st.sampled_from((None, 1))),
        preemption_mode=draw(st.sampled_from(("auto", "swap", "recompute"))),
        queue_policy=draw(st.sampled_from(("priority", "fcfs", "shortest_prompt", "fair"))),
        victim_policy=draw(st.sampled_from(("lifo", "fifo", "largest", "cost_based"))),
        enable_prefix_caching=draw(st.booleans()),
        watermark_blocks=draw(st.integers(0, 2)),
        max_preemptions=draw(st.sampled_from((0, 2, 8))),
    )
    return SimSettings(
        config=config,
        static=draw(st.sampled_from((False, False, False, True))),
        overlap=draw(st.booleans()),
        constant_hash=draw(st.sampled_from((False, False, True))),
    )


def apply(simulation: Simulation, operation: object) -> None:
    """Do one operation; those that make no sense now do nothing."""
    simulation.now += 0.01
    depth = 2 if simulation.settings.overlap else 1
    if isinstance(operation, Submit):
        stops = () if operation.stop_id is None else (operation.stop_id,)
        params = SamplingParams(max_tokens=operation.max_tokens, n=operation.n, stop_token_ids=stops)
        spec = RequestSpec(
            prompt=BASES[operation.base][: operation.prompt_len],
            params=params,
            priority=operation.priority,
            cache_salt=operation.salt,
            seed=operation.base,
        )
        simulation.submit(spec)
    elif isinstance(operation, Schedule) and len(simulation.flights) < depth:
        if isinstance(simulation.schedule(faults_rate=False), NoPlan) and simulation.flights:
            simulation.commit()
    elif isinstance(operation, Commit) and simulation.flights:
        simulation.commit()
    elif isinstance(operation, Cancel) and simulation.live:
        simulation.cancel(sorted(simulation.live)[operation.which % len(simulation.live)])
    elif isinstance(operation, StopString):
        speaking = [t for t in simulation.live.values() if t.delivered and not t.closed]
        if speaking:
            tracked = speaking[operation.which % len(speaking)]
            simulation.finish(tracked, max(0, tracked.delivered - 1 - operation.back))
    elif isinstance(operation, TakeEvents):
        simulation.deliver(simulation.scheduler.take_events())
    elif isinstance(operation, ResetCache):
        simulation.reset_prefix_cache()
    elif isinstance(operation, FailAll):
        simulation.fail_all()
    simulation.check()


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(configs(), operations)
def test_any_list_of_operations_keeps_the_rules(config: SimSettings, story: list[object]) -> None:
    simulation = Simulation(config, Random(0))
    for operation in story:
        apply(simulation, operation)
    while simulation.flights:
        simulation.commit()
    simulation.drain()
    simulation.check_cached_content()
