import pytest
from core_driver import Driver, make_request

from minillm.core.config import SchedulerConfig
from minillm.core.static_scheduler import StaticScheduler


def static(overlap=False, **config):
    return Driver(StaticScheduler(SchedulerConfig(**{"num_blocks": 64, "block_size": 4, **config})), overlap=overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_runs_to_its_last_member_before_the_next_is_formed(overlap):
    d = static(overlap, max_num_seqs=2)
    lengths = {"a": 3, "b": 12, "c": 2, "d": 2}
    d.submit(*[make_request(n, 4, k) for n, k in lengths.items()])
    d.run()
    assert list(d.finished) == ["a", "b", "c", "d"] or list(d.finished)[:2] == ["a", "b"]
    last_of_first = max(i for i, p in enumerate(d.plans) if "b" in p.decodes.request_ids)
    first_of_second = min(i for i, p in enumerate(d.plans) for c in p.prefills if c.request_id == "c")
    assert first_of_second > last_of_first
    assert {n: len(t) for n, t in d.tokens.items()} == lengths
    d.assert_idle_and_clean()


def test_late_arrivals_wait_for_the_next_batch():
    d = static(max_num_seqs=8)
    d.submit(make_request("a", 4, 10))
    d.step()
    d.submit(make_request("late", 4, 2))
    d.run()
    assert list(d.finished) == ["a", "late"]
    assert "the running batch" in d.scheduler.explain("late")


def test_batch_is_limited_by_full_length_so_nothing_is_preempted():
    d = static(num_blocks=10, max_num_seqs=8)
    d.submit(*[make_request(f"r{i}", 6, 13) for i in range(5)])
    d.run()
    assert max(len(p.decodes) for p in d.plans) == 2, "each needs 5 of 10 blocks at its end"
    counters = d.scheduler.counters
    assert counters.preemptions_swap == counters.preemptions_recompute == 0
    assert all(len(t) == 13 for t in d.tokens.values())


def test_prompts_longer_than_the_budget_join_the_same_batch():
    d = static(max_num_batched_tokens=8, max_num_seqs=4)
    d.submit(*[make_request(f"r{i}", 10, 20) for i in range(3)])
    d.run()
    assert max(len(p.decodes) for p in d.plans) == 3


def test_a_group_that_outgrows_the_pool_still_ends():
    d = static(num_blocks=8, max_num_seqs=4)
    d.submit(make_request("g", 6, 20, n=4), make_request("r", 4, 4))
    d.run()
    assert all(len(d.tokens[n]) == 20 for n in ("g", "g#1", "g#2", "g#3")) and len(d.tokens["r"]) == 4


def test_continuous_needs_fewer_steps_than_static_on_mixed_lengths():
    from minillm.core.scheduler import ContinuousScheduler

    steps = {}
    for cls in (StaticScheduler, ContinuousScheduler):
        d = Driver(cls(SchedulerConfig(num_blocks=400, block_size=4, max_num_seqs=4)))
        d.submit(*[make_request(f"r{i}", 4, 4 + 20 * (i % 4 == 0)) for i in range(16)])
        d.run()
        steps[cls] = len(d.plans)
    assert steps[ContinuousScheduler] < steps[StaticScheduler]
