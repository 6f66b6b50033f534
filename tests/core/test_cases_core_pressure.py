"""Faults that users of comparable engines reported (cases B07, B10, B12, B14, B16, B17): memory and order.

Every run has the harness's checks on: contents through the block table, tokens and ends as alone, invariants.
"""

from __future__ import annotations

from random import Random

import pytest

from minillm.core.config import SchedulerConfig
from minillm.core.plan import StepPlan
from minillm.core.request import RUNNING, RequestState
from simulation.scripted import Scripted


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


def chunk_tokens(sim: Scripted, request_id: str) -> int:
    return sum(c.end - c.start for plan in sim.plans for c in plan.prefills if c.request_id == request_id)


# -- B07: preempted, re-admitted for its first chunk, preempted again -------------------------------------------------


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("low_blocks", "high_blocks"), [(70, 60), (55, 60), (85, 25)])
def test_b07_a_preempted_request_comes_back_only_when_its_whole_rebuild_fits(caching, overlap, low_blocks, high_blocks):
    config = SchedulerConfig(
        num_blocks=100,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        preemption_mode="recompute",
        enable_prefix_caching=caching,
    )
    sim = Scripted(config, overlap=overlap)
    low = sim.add(tokens(low_blocks * 4 - 2, 1), max_tokens=30, priority=1)
    sim.run_until_decoding(low)
    high = sim.add(tokens(high_blocks * 4 - 40, 2), max_tokens=40, priority=0)
    sim.run()
    assert low.request.num_preemptions == 1 and high.request.num_preemptions == 0
    prompt = low.request.prompt_len
    assert chunk_tokens(sim, "r0") <= prompt + prompt + len(sim.tokens["r0"]), "more than one rebuild"
    assert chunk_tokens(sim, "r1") <= high.request.prompt_len, "the preempting one computed something twice"


# -- B10: recompute loses generated tokens ----------------------------------------------------------------------------


def test_b10_recompute_rebuilds_prompt_and_generated_tokens_wherever_it_strikes():
    struck = {"on a block border": 0, "inside a block": 0, "before the first token": 0}
    for num_blocks in range(32, 60, 3):
        for victim_policy in ("lifo", "fifo", "largest"):
            config = SchedulerConfig(
                num_blocks=num_blocks,
                block_size=4,
                max_num_seqs=3,
                max_num_batched_tokens=8,
                preemption_mode="recompute",
                enable_prefix_caching=False,
                victim_policy=victim_policy,
                watermark_blocks=0,
                max_preemptions=100,
            )
            sim = Scripted(config, overlap=num_blocks % 2 == 0)
            requests = [sim.add(tokens(9 + i, i), max_tokens=100) for i in range(3)]
            for _ in range(2000):
                if not sim.scheduler.has_live_requests:
                    break
                sim.step()
                for request, _ in sim.observer.seen:
                    total = request.prompt_len + len(request.generated_ids)
                    if not request.generated_ids:
                        struck["before the first token"] += 1
                    else:
                        struck["on a block border" if (total - 1) % 4 == 0 else "inside a block"] += 1
                sim.observer.seen.clear()
            assert [len(sim.tokens[f"r{i}"]) for i in range(3)] == [100] * 3
            assert all(tracked.request.swap_slots == [] for tracked in requests)
            assert sum(tracked.request.num_preemptions for tracked in requests) > 0 or num_blocks > 54
    assert struck["on a block border"] and struck["inside a block"], struck


def test_b10_a_request_preempted_before_its_first_token_still_gives_all_of_them():
    config = SchedulerConfig(
        num_blocks=20, block_size=4, max_num_seqs=2, max_num_batched_tokens=4, preemption_mode="recompute"
    )
    sim = Scripted(config)
    low = sim.add(tokens(60), max_tokens=10, priority=1)
    for _ in range(6):
        sim.step()
    assert low.request.state is RequestState.PREFILLING and not low.request.generated_ids
    sim.add(tokens(40, 1), max_tokens=10, priority=0)
    sim.run()
    assert low.request.num_preemptions == 1
    assert len(sim.tokens["r0"]) == len(sim.tokens["r1"]) == 10


# -- B12: swap exhausted ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap_blocks", [0, 1, 3, 200])
@pytest.mark.parametrize("max_swapped_requests", [None, 1])
@pytest.mark.parametrize("mode", ["auto", "swap"])
@pytest.mark.parametrize("overlap", [False, True])
def test_b12_with_no_little_or_ample_swap_space_every_request_ends(swap_blocks, max_swapped_requests, mode, overlap):
    config = SchedulerConfig(
        num_blocks=40,
        block_size=4,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        num_swap_blocks=swap_blocks,
        max_swapped_requests=max_swapped_requests,
        preemption_mode=mode,
    )
    sim = Scripted(config, overlap=overlap)
    for i in range(3):
        sim.add(tokens(10, i), max_tokens=30, n=8)
    for _ in range(40):
        sim.step()
    sim.add(tokens(10, 9), max_tokens=5)  # a new prompt while others are swapped out or to be recomputed
    sim.run()
    assert len(sim.tokens) == 25
    assert sum(len(out) for out in sim.tokens.values()) == 24 * 30 + 5
    counters = sim.scheduler.counters
    assert counters.preemptions_swap + counters.preemptions_recompute > 0
    if swap_blocks == 0:
        assert counters.preemptions_swap == 0
    if swap_blocks == 200 and max_swapped_requests is None:
        # Only groups that have not forked are recomputed: they have not computed anything but a prompt.
        assert counters.preemptions_swap > 0
    if swap_blocks in (1, 3):
        assert counters.preemptions_recompute > 0, "the fallback"
    assert sim.scheduler.swap_pool.num_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_b12_swapped_requests_come_back_before_new_ones_of_equal_priority(overlap):
    config = SchedulerConfig(num_blocks=10, block_size=4, max_num_seqs=4, num_swap_blocks=20, watermark_blocks=0)
    sim = Scripted(config, overlap=overlap)
    sim.add(tokens(12), max_tokens=20)
    second = sim.add(tokens(12, 1), max_tokens=20)
    for _ in range(60):
        if second.request.state is RequestState.SWAPPED:
            break
        sim.step()
    assert second.request.state is RequestState.SWAPPED
    late = sim.add(tokens(2, 2), max_tokens=2)
    while second.request.state is RequestState.SWAPPED:
        sim.step()
        assert late.request.state is RequestState.WAITING or second.request.state in RUNNING
    sim.run()


# -- B14: evicted after it was put into the batch ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("low_first", [True, False])
def test_b14_whoever_is_preempted_is_not_in_the_batch_of_that_step(mode, overlap, low_first):
    config = SchedulerConfig(
        num_blocks=4, block_size=4, max_num_seqs=2, num_swap_blocks=8, preemption_mode=mode, watermark_blocks=0
    )
    sim = Scripted(config, overlap=overlap)
    priorities = (5, 0) if low_first else (0, 5)
    both = [sim.add(tokens(7, i), max_tokens=9, priority=priority) for i, priority in enumerate(priorities)]
    low = both[priorities.index(5)]
    high = both[priorities.index(0)]
    seen = 0
    while sim.scheduler.has_live_requests:
        plan = sim.step()
        if not isinstance(plan, StepPlan):
            continue
        batch = [*plan.decodes.request_ids, *(chunk.request_id for chunk in plan.prefills)]
        for request, _ in sim.observer.seen:
            seen += 1
            assert request is low.request and request.request_id not in batch
            assert batch == [high.request_id]
        assert len(batch) <= sim.scheduler.num_running + sum(t.request.is_ended for t in both)
        sim.observer.seen.clear()
    assert seen == 1
    assert {name: len(out) for name, out in sim.tokens.items()} == {"r0": 9, "r1": 9}


# -- B16: the order after a preemption --------------------------------------------------------------------------------


@pytest.mark.parametrize("victim_policy", ["lifo", "fifo", "largest", "cost_based"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("overlap", [False, True])
def test_b16_equal_priorities_under_steady_pressure_all_end_in_bounded_time(victim_policy, mode, overlap):
    config = SchedulerConfig(
        num_blocks=24,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        num_swap_blocks=24,
        preemption_mode=mode,
        victim_policy=victim_policy,
        watermark_blocks=0,
        max_preemptions=2,
    )
    sim = Scripted(config, overlap=overlap)
    rng = Random(3)
    tracked = []
    while sim.now < 60.0:
        if rng.random() < 0.02:
            tracked.append(sim.add(tokens(rng.randint(1, 30), len(tracked)), max_tokens=rng.randint(10, 40)))
        sim.step()
        sim.now += 0.04
    sim.run()
    first_starts = [t.request.first_scheduled_time for t in tracked]
    assert first_starts == sorted(first_starts), "first admissions follow the order of arrival"
    assert sum(t.request.num_preemptions for t in tracked) > 0
    assert max(t.request.num_preemptions for t in tracked) <= config.max_preemptions + config.max_num_seqs
    for t in tracked:
        service = t.request.finish_time - t.request.first_scheduled_time
        assert service < 12.0, f"{t.request_id} took {service} s after its start"


@pytest.mark.parametrize("interval", [0.2, 1.0])
@pytest.mark.parametrize("priority", [1, 3])
def test_b16_ageing_bounds_how_long_later_arrivals_of_higher_priority_may_overtake(interval, priority):
    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=1, ageing_interval=interval)
    sim = Scripted(config)
    sim.add(tokens(2), max_tokens=4, priority=0)
    low = sim.add(tokens(2, 1), max_tokens=4, priority=priority)
    bound = priority * interval
    stream = []
    while low.request.first_scheduled_time is None:
        if sim.scheduler.num_waiting < 3:
            stream.append(sim.add(tokens(2, 2 + len(stream)), max_tokens=4, priority=0))
        sim.step()
        assert sim.now < bound + 2.0, "starved"
    started = low.request.first_scheduled_time
    overtakers = [
        t for t in stream if t.request.first_scheduled_time is not None and t.request.first_scheduled_time <= started
    ]
    assert overtakers, "without load the bound means nothing"
    assert all(t.request.arrival_time - low.request.arrival_time < bound for t in overtakers)
    waiting = [t for t in stream if t.request.first_scheduled_time is None]
    assert all(t.request.arrival_time - low.request.arrival_time >= bound - 1e-9 for t in waiting)
    sim.run()


def test_b16_without_ageing_the_lower_priority_waits_as_documented():
    sim = Scripted(SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=1))
    sim.add(tokens(2), max_tokens=4, priority=0)
    low = sim.add(tokens(2, 1), max_tokens=4, priority=1)
    for i in range(50):
        sim.add(tokens(2, i), max_tokens=4, priority=0)
    while sim.scheduler.num_waiting > 1:
        sim.step()
    assert low.request.first_scheduled_time is None
    sim.run()


# -- B17: a long prompt stops all streams -----------------------------------------------------------------------------


@pytest.mark.parametrize("throttle", [None, 64, 1])
@pytest.mark.parametrize("overlap", [False, True])
def test_b17_running_streams_get_a_token_in_every_step_while_a_long_prompt_is_prefilled(throttle, overlap):
    long_prompt = 16_384 if throttle != 1 else 300
    config = SchedulerConfig(
        num_blocks=1200,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_prefill_tokens_per_step=throttle,
        enable_prefix_caching=False,
    )
    sim = Scripted(config, overlap=overlap)
    streams = [sim.add(tokens(8, i), max_tokens=500) for i in range(3)]
    sim.run_until_decoding(*streams)
    start = len(sim.plans)
    late = sim.add(tokens(long_prompt, 9), max_tokens=4)
    while not late.delivered:
        plan = sim.step()
        if isinstance(plan, StepPlan):
            assert plan.num_tokens <= 256
    meanwhile = sim.plans[start:]
    assert all(set(plan.decodes.request_ids) >= {"r0", "r1", "r2"} for plan in meanwhile)
    per_step = min(253, throttle or 253)
    assert len(meanwhile) <= -(-long_prompt // per_step) + 3, "the long prompt moves on with every step"
    for tracked in streams:
        sim.cancel(tracked.request_id)
    sim.run()
    assert len(sim.tokens["r3"]) == 4
