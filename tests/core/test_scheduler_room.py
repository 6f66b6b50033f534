"""What a preemption brings, and what a request that comes back needs: nobody loses its place for nothing."""

from core_driver import Driver, make_request

from minillm.core.plan import StepPlan
from minillm.core.request import RequestState


def test_a_request_is_not_preempted_for_blocks_that_the_head_would_share_with_it():
    d = Driver(num_blocks=10, max_num_seqs=4, preemption_mode="recompute")
    prefix = list(range(16))
    d.submit(make_request("low", prefix, 4, priority=2))
    d.submit(make_request("equal", 15, 6, priority=1))
    d.step()
    d.step()
    assert d.scheduler.stats().blocks_referenced == 9
    # The head needs 6 blocks and may share 4 of low's 5. Without low there are only 2 others: itself and the watermark
    # need 3.
    d.submit(make_request("head", [*prefix, *range(50, 58)], 2, priority=1))
    for _ in range(2):
        d.step()
        assert d.scheduler.get("head").state is RequestState.WAITING
        assert d.scheduler.counters.preemptions_recompute == 0, "low would lose its place, and the head gain nothing"
    d.run()
    assert d.finished == {"low": "length", "equal": "length", "head": "length"}


def test_what_a_prefill_was_promised_is_part_of_what_its_preemption_brings():
    d = Driver(num_blocks=6, max_num_seqs=2, max_num_batched_tokens=8)
    d.submit(make_request("low", 16, 2, priority=1))
    d.step()
    d.submit(make_request("high", 16, 2, priority=0))
    d.step()
    assert d.scheduler.get("low").state is RequestState.PREEMPTED
    assert d.scheduler.get("high").state is RequestState.PREFILLING
    d.run()
    assert d.finished == {"low": "length", "high": "length"}


def test_a_higher_priority_gets_the_whole_pool_if_it_needs_it():
    d = Driver(num_blocks=6, max_num_seqs=2)
    d.submit(make_request("low", 4, 12, priority=1))
    d.step()
    d.submit(make_request("high", 20, 4, priority=0))
    d.step()
    assert d.scheduler.get("high").state is RequestState.DECODING, "no headroom is needed where nobody else runs"
    d.run()
    assert d.finished == {"low": "length", "high": "length"}


def test_half_a_prompt_is_swapped_in_only_when_the_whole_prompt_fits():
    d = Driver(num_blocks=12, num_swap_blocks=12, max_num_seqs=2, max_num_batched_tokens=8, preemption_mode="swap")
    d.submit(make_request("low", 40, 2, priority=1))
    d.step()
    d.step()
    low = d.scheduler.get("low")
    d.submit(make_request("high", 24, 20, priority=0))
    while "low" not in d.finished:
        plan = d.step()
        if isinstance(plan, StepPlan) and plan.swap_ins:
            assert "high" in d.finished, "until then it would only be thrown out again"
    assert low.num_preemptions == 1
    d.run()
    d.assert_idle_and_clean()


def test_a_request_at_its_preemption_bound_keeps_its_row_from_waiting_ones():
    d = Driver(max_num_seqs=1, max_preemptions=1)
    d.submit(make_request("low", 4, 6, priority=1))
    d.step()
    d.submit(make_request("first", 4, 2, priority=0))
    d.step()
    low = d.scheduler.get("low")
    assert low.state is RequestState.PREEMPTED and low.num_preemptions == 1
    while "first" not in d.finished or low.row < 0:
        d.step()
    d.submit(make_request("second", 4, 2, priority=0))
    d.run()
    assert list(d.finished) == ["first", "low", "second"]
    assert low.num_preemptions == 1
