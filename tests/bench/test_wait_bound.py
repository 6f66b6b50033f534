"""The bound on waiting times: its parts by hand, and that no run of the real scheduler exceeds it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from minillm.bench.runs import drive, virtual_target
from minillm.bench.virtual import H200_8B, StepCosts
from minillm.bench.wait_bound import STEPS_OF_DELAY, Server, backlogs, offered_load, wait_bounds
from minillm.bench.workloads import Segment, Workload, WorkloadRequest
from minillm.core.config import SchedulerConfig

ONE_A_STEP = StepCosts(step=1.0, decode_row=0.0, context_token=0.0, prefill_token=0.0, prefill_pair=0.0, swap_block=0.0)


def workload_of(*requests: tuple[float, int, int, int]) -> Workload:
    """From (arrival, priority, prompt tokens, output tokens)."""
    made = tuple(
        WorkloadRequest(arrival=at, segments=(Segment(f"r{i}", prompt),), max_tokens=output, priority=priority)
        for i, (at, priority, prompt, output) in enumerate(requests)
    )
    return Workload("test", made)


def run(workload: Workload, server: Server, *, ageing: float | None, policy: str = "priority", overlap: bool = True):
    config = SchedulerConfig(
        num_blocks=4096,
        block_size=16,
        max_num_seqs=server.slots,
        max_num_batched_tokens=server.prefill_tokens + server.slots,
        max_prefill_tokens_per_step=server.prefill_tokens,
        queue_policy=policy,
        ageing_interval=ageing,
        max_preemptions=0,
        enable_prefix_caching=False,
    )
    with virtual_target(server.costs, config, overlap=overlap) as target:
        return drive(target, workload)


def test_work_is_the_request_s_own_seconds_and_its_share_of_the_fixed_ones():
    costs = StepCosts(
        step=2.0, decode_row=0.5, context_token=0.01, prefill_token=0.1, prefill_pair=0.001, swap_block=9.0
    )
    server = Server(costs, slots=4, prefill_tokens=50)
    # 10 prompt tokens, 3 outputs: the prefill step, 2 decode steps over 11 and 12 keys, a step until the last commit.
    fixed = 2.0 * (4 / 4 + 10 / 50)
    own = 10 * 0.1 + 50 * 0.001 + 2 * 0.5 + (11 + 12) * 0.01
    assert server.work(10, 3) == pytest.approx(fixed + own)


def test_backlog_is_that_of_a_queue_served_at_rate_one():
    assert backlogs([0.0, 1.0, 1.0, 10.0], [3.0, 2.0, 4.0, 1.0]) == [3.0, 4.0, 8.0, 1.0]


def test_the_bound_is_the_sum_of_its_three_terms():
    server = Server(ONE_A_STEP, slots=1, prefill_tokens=100)
    workload = workload_of((0.0, 1, 100, 1), (5.0, 0, 100, 1), (9.0, 0, 100, 1), (30.0, 0, 100, 1))
    work = server.work(100, 1)
    assert work == 3.0
    low, high, *_ = wait_bounds(workload, server, ageing_interval=8.0)
    own_backlog, largest_in_slots, delay = work, work, STEPS_OF_DELAY * 1.0
    overtakes_before_8 = work  # the one at 5, not that at 9
    assert low == own_backlog + largest_in_slots + delay + overtakes_before_8
    assert high == own_backlog + largest_in_slots + delay
    assert wait_bounds(workload, server, None)[0] == low - overtakes_before_8


requests = st.lists(
    st.tuples(
        st.floats(0, 4).map(lambda gap: round(gap**3 / 16, 3)),
        st.integers(0, 2),
        st.integers(1, 300),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=40,
)
COSTS = (
    H200_8B,
    ONE_A_STEP,
    StepCosts(step=0.01, decode_row=0.02, context_token=1e-4, prefill_token=1e-3, prefill_pair=1e-6, swap_block=0.0),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=requests,
    costs=st.sampled_from(COSTS),
    slots=st.integers(1, 6),
    prefill_tokens=st.sampled_from([1, 16, 100, 512]),
    ageing=st.sampled_from([None, 0.05, 1.0, 20.0]),
    overlap=st.booleans(),
)
@example([(0.0, 2, 300, 40)] * 12 + [(0.0, 0, 300, 1)] * 28, ONE_A_STEP, 1, 1, 20.0, True)
@example([(0.0, 2, 300, 40)] * 12 + [(1.0, 0, 300, 1)] * 28, ONE_A_STEP, 6, 512, 1.0, True)
def test_no_request_waits_longer_than_its_bound(requests, costs, slots, prefill_tokens, ageing, overlap):
    arrival, made = 0.0, []
    for gap, priority, prompt, output in requests:
        arrival += gap
        made.append((arrival, priority if ageing else 0, prompt, output))
    workload, server = workload_of(*made), Server(costs, slots, prefill_tokens)
    policy = "priority" if ageing else "fcfs"
    result = run(workload, server, ageing=ageing, policy=policy, overlap=overlap)
    for record, bound in zip(result.requests, wait_bounds(workload, server, ageing), strict=True):
        assert record.wait <= bound + 1e-9


def flood(high_per_second: float, seconds: int, server: Server) -> Workload:
    """One low-priority request behind a stream of high ones that takes `high_per_second` of the engine's work."""
    share = server.work(256, 16)
    gap = share / high_per_second
    highs = [(i * gap, 0, 256, 16) for i in range(int(seconds / gap))]
    return workload_of(*sorted([*highs, (1.0, 1, 256, 16)]))


def test_ageing_ends_a_starvation_that_plain_priority_allows():
    server = Server(H200_8B, slots=4, prefill_tokens=256)
    workload = flood(1.3, 30, server)
    (low,) = (index for index, request in enumerate(workload.requests) if request.priority == 1)
    starved = run(workload, server, ageing=None).requests[low].wait
    aged = run(workload, server, ageing=3.0).requests[low].wait
    bound = wait_bounds(workload, server, 3.0)[low]
    assert starved > 25
    assert aged <= bound < 10
    assert aged > 2  # the interval is what it waits: 1.3 times 3 s of work overtakes


def test_a_busy_engine_is_done_in_the_time_that_the_load_says_and_not_much_before():
    server = Server(H200_8B, slots=8, prefill_tokens=512)
    workload = workload_of(*((i * 0.01, 0, 700 + 13 * (i % 7), 30 + i % 11) for i in range(400)))
    work = offered_load(workload, server) * workload.duration
    assert work > 1.5 * workload.duration
    # Not equal: a step can have all slots taken and all its prefill budget spent, and do two shares at once.
    assert 0.8 * work < run(workload, server, ageing=None, policy="fcfs").seconds <= work
    assert offered_load(workload.scaled(2.0), server) == pytest.approx(work / workload.duration / 2)
