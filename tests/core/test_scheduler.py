import pytest
from core_driver import Driver, make_request

from minillm.core.config import SchedulerConfig
from minillm.core.errors import (
    DuplicateRequestError,
    EmptyPromptError,
    InvalidParameterError,
    InvariantViolation,
    PromptTooLongError,
    QueueFullError,
)
from minillm.core.plan import NoPlan, StepPlan
from minillm.core.request import RequestState
from minillm.core.scheduler import ContinuousScheduler

both_modes = pytest.mark.parametrize("overlap", [False, True], ids=["no-overlap", "overlap"])


# -- joining and leaving -------------------------------------------------------------------------------------


@both_modes
def test_requests_join_and_leave_between_steps(overlap):
    d = Driver(overlap=overlap)
    d.submit(make_request("a", 5, 10))
    for _ in range(3):
        d.step()
    d.submit(make_request("b", 3, 2))
    d.run()
    assert d.finished == {"a": "length", "b": "length"}
    assert d.tokens == {"a": list(range(100, 110)), "b": [100, 101]}
    batches = [len(p.decodes) for p in d.plans]
    assert max(batches) == 2, "b decodes beside a"
    d.assert_idle_and_clean()


@both_modes
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_length_is_exact(overlap, max_tokens):
    d = Driver(overlap=overlap)
    d.submit(make_request("a", 6, max_tokens))
    d.run()
    assert len(d.tokens["a"]) == max_tokens
    assert d.scheduler.counters.discarded_rows == 0, "an end by length is known when scheduling"


@both_modes
def test_stop_token_ends_and_costs_at_most_one_discarded_row(overlap):
    d = Driver(overlap=overlap)
    d.submit(make_request("a", 6, 50, eos_token_ids=[104]))
    d.run()
    assert d.tokens["a"] == [100, 101, 102, 103, 104] and d.finished["a"] == "stop"
    assert d.scheduler.counters.discarded_rows == (1 if overlap else 0)
    d.assert_idle_and_clean()


def test_stop_token_below_min_tokens_does_not_end():
    d = Driver(model=lambda name, i: 7)
    d.submit(make_request("a", 4, 20, min_tokens=5, eos_token_ids=[7]))
    d.run()
    assert len(d.tokens["a"]) == 6, "the first stop token after min_tokens tokens ends it"


def test_overlap_schedules_one_step_ahead_with_placeholders():
    d = Driver()
    d.submit(make_request("a", 4, 6))
    first, second = d.schedule(), d.schedule()
    assert second.decodes.token_ids == [-1] and second.decodes.positions == [4]
    with pytest.raises(InvariantViolation, match="two plans are in flight"):
        d.schedule()
    d.commit()
    third = d.schedule()
    assert (first.step, second.step, third.step) == (0, 1, 2) and third.decodes.token_ids == [-1]
    d.commit()
    d.commit()
    assert d.schedule().decodes.token_ids == [102]


@both_modes
def test_placeholder_and_plain_tokens_tell_the_same_stream(overlap):
    d = Driver(overlap=overlap)
    d.submit(*[make_request(f"r{i}", 3 + i, 5 + i) for i in range(5)])
    d.run()
    known: dict[str, list[int]] = {}
    for plan in d.plans:
        for name, token, index in zip(
            plan.decodes.request_ids, plan.decodes.token_ids, plan.decodes.output_indices, strict=True
        ):
            assert token in (-1, 100 + index - 1)
            known.setdefault(name, []).append(index)
    assert all(indices == list(range(1, len(indices) + 1)) for indices in known.values())


# -- budgets and chunks --------------------------------------------------------------------------------------


@both_modes
def test_one_token_budget_is_shared_by_decodes_and_chunks(overlap):
    d = Driver(overlap=overlap, num_blocks=400, max_num_seqs=8, max_num_batched_tokens=10)
    d.submit(*[make_request(f"r{i}", 23, 30) for i in range(8)])
    d.run()
    assert max(plan.num_tokens for plan in d.plans) <= 10
    mixed = [p for p in d.plans if p.prefills and len(p.decodes)]
    assert mixed and all(p.num_tokens <= 10 for p in mixed)
    assert all(len(tokens) == 30 for tokens in d.tokens.values())


def test_prefill_throttle_keeps_running_decodes_at_pace():
    d = Driver(num_blocks=5000, block_size=16, max_num_batched_tokens=2048, max_prefill_tokens_per_step=256)
    d.submit(*[make_request(f"s{i}", 8, 200) for i in range(3)])
    d.step()
    d.submit(make_request("long", 16_000, 2))
    d.run()
    chunks = [
        sum(c.end - c.start for c in p.prefills) for p in d.plans if any(c.request_id == "long" for c in p.prefills)
    ]
    assert max(chunks) <= 256 and sum(chunks) == 16_000
    while_long = [p for p in d.plans if any(c.request_id == "long" for c in p.prefills)]
    assert all(len(p.decodes) == 3 for p in while_long[1:]), "every stream decodes in each of those steps"


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16])
def test_chunks_cover_the_prompt_once_and_sample_at_its_end(budget):
    d = Driver(max_num_seqs=1, max_num_batched_tokens=budget)
    r = make_request("a", 16, 2)
    d.submit(r)
    d.run()
    chunks = [c for p in d.plans for c in p.prefills]
    assert [t for c in chunks for t in c.token_ids] == r.input_ids
    assert [c.start for c in chunks] == [0, *[c.end for c in chunks[:-1]]]
    assert [bool(c.sample_rows) for c in chunks] == [False] * (len(chunks) - 1) + [True]


@both_modes
@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 32])
def test_block_table_covers_exactly_the_tokens_with_kv(overlap, block_size, prompt):
    d = Driver(overlap=overlap, num_blocks=128, block_size=block_size)
    r = make_request("a", prompt, 40)
    d.submit(r)
    while d.scheduler.has_live_requests:
        plan = d.schedule()
        if r.row >= 0:
            assert len(r.block_table) == -(-r.kv_tokens // block_size)
        if isinstance(plan, StepPlan):
            for position, slot in zip(plan.decodes.positions, plan.decodes.kv_slots, strict=True):
                assert slot == r.block_table[position // block_size] * block_size + position % block_size
        while len(d.in_flight) > int(overlap and isinstance(plan, StepPlan)):
            d.commit()
    assert len(d.tokens["a"]) == 40


# -- limits --------------------------------------------------------------------------------------------------


def test_refusals_name_field_limit_and_value_and_queue_nothing():
    s = ContinuousScheduler(
        SchedulerConfig(num_blocks=10, block_size=16, max_num_seqs=4, max_model_len=1000, max_waiting=2)
    )
    with pytest.raises(EmptyPromptError):
        s.submit(make_request("a", []), 0.0)
    with pytest.raises(PromptTooLongError, match=r"300 tokens.*max_model_len=160.*KV pool"):
        s.submit(make_request("a", 300), 0.0)
    with pytest.raises(PromptTooLongError, match=r"100 tokens and max_tokens=61, 161 in all"):
        s.submit(make_request("a", 100, 61), 0.0)
    with pytest.raises(InvalidParameterError, match=r"n=5.*max_num_seqs=4"):
        s.submit(make_request("a", 10, n=5), 0.0)
    assert not s.has_live_requests and s.num_waiting == 0
    s.submit(make_request("a", 100, 60), 0.0)
    with pytest.raises(DuplicateRequestError, match="'a'"):
        s.submit(make_request("a", 5), 0.0)
    s.submit(make_request("b", 5), 0.0)
    with pytest.raises(QueueFullError, match="max_waiting=2"):
        s.submit(make_request("c", 5), 0.0)


@pytest.mark.parametrize("prompt", [39, 40])
def test_without_max_tokens_a_request_ends_with_length_at_capacity(prompt):
    d = Driver(num_blocks=10, block_size=4, max_model_len=1000)
    r = make_request("a", prompt, None)
    d.submit(r)
    d.run()
    assert d.finished["a"] == "length" and len(d.tokens["a"]) == 1
    d.assert_idle_and_clean()


def test_group_children_ids_are_reserved():
    d = Driver()
    d.submit(make_request("a", 5, n=3))
    for used in ("a", "a#1", "a#2"):
        with pytest.raises(DuplicateRequestError):
            d.submit(make_request(used, 5))
    d.submit(make_request("a#3", 5))


# -- priority and preemption ---------------------------------------------------------------------------------


@both_modes
def test_head_is_never_overtaken(overlap):
    d = Driver(overlap=overlap, num_blocks=12, block_size=4, max_num_seqs=4)
    d.submit(make_request("big", 24, 8), make_request("big2", 40, 4), make_request("small", 1, 2))
    d.run()
    firsts = list(dict.fromkeys(d.order_of_admission))
    assert firsts == ["big", "big2", "small"]


@both_modes
def test_waiting_higher_priority_takes_a_sequence_slot(overlap):
    d = Driver(overlap=overlap, max_num_seqs=2, num_swap_blocks=20)
    d.submit(make_request("low1", 4, 30, priority=5), make_request("low2", 4, 30, priority=5))
    for _ in range(4):
        d.step()
    d.submit(make_request("high", 4, 3, priority=0))
    d.run()
    assert next(iter(d.finished)) == "high"
    assert d.scheduler.counters.preemptions_swap == 1
    assert all(d.tokens[name] == list(range(100, 130)) for name in ("low1", "low2"))


@both_modes
def test_waiting_higher_priority_takes_blocks(overlap):
    d = Driver(overlap=overlap, num_blocks=10, block_size=4)
    d.submit(make_request("low", 30, 10, priority=5))
    for _ in range(3):
        d.step()
    d.submit(make_request("high", 20, 4, priority=1))
    d.run()
    assert list(d.finished) == ["high", "low"]
    assert d.tokens["low"] == list(range(100, 110))
    assert d.scheduler.counters.preemptions_recompute == 1
    d.assert_idle_and_clean()


def test_equal_priority_never_preempts_for_admission():
    d = Driver(max_num_seqs=1)
    d.submit(make_request("a", 4, 20), make_request("b", 4, 2))
    d.run()
    assert list(d.finished) == ["a", "b"] and d.scheduler.counters.preemptions_recompute == 0


def test_victim_is_out_of_the_batch_of_its_step():
    """Low priority is visited first, both need a block, there is none: it must not be in the plan."""
    d = Driver(num_blocks=4, block_size=4, watermark_blocks=0)
    a, b = make_request("a", 8, 8, priority=5), make_request("b", 8, 8, priority=0)
    d.submit(a)
    d.step()
    d.submit(b)
    while a.state is not RequestState.PREEMPTED:
        plan = d.schedule()
        assert isinstance(plan, StepPlan)
        if a.state is RequestState.PREEMPTED:
            assert "a" not in plan.decodes.request_ids and "b" in {
                *plan.decodes.request_ids,
                *[c.request_id for c in plan.prefills],
            }
            assert a.row == -1 and a.block_table == []
        d.commit()
    d.run()
    assert len(d.tokens["a"]) == len(d.tokens["b"]) == 8


@both_modes
@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("victim_policy", ["fifo", "lifo", "largest", "cost_based"])
def test_pressure_never_loses_or_changes_a_token(overlap, mode, victim_policy):
    d = Driver(
        overlap=overlap,
        num_blocks=14,
        block_size=4,
        num_swap_blocks=0 if mode == "recompute" else 30,
        preemption_mode=mode,
        victim_policy=victim_policy,
        watermark_blocks=0,
    )
    d.submit(*[make_request(f"r{i}", 5 + 3 * i, 20) for i in range(5)])
    d.run()
    assert all(d.tokens[f"r{i}"] == list(range(100, 120)) for i in range(5))
    counters = d.scheduler.counters
    assert (counters.preemptions_recompute if mode == "recompute" else counters.preemptions_swap) > 0
    d.assert_idle_and_clean()


def test_full_swap_pool_falls_back_to_recompute():
    d = Driver(num_blocks=10, block_size=4, num_swap_blocks=1, watermark_blocks=0)
    d.submit(*[make_request(f"r{i}", 9, 15) for i in range(3)])
    d.run()
    assert d.scheduler.counters.preemptions_recompute > 0 and d.scheduler.counters.preemptions_swap == 0
    assert len(d.finished) == 3


def test_max_swapped_requests_bounds_the_swapped():
    d = Driver(num_blocks=10, block_size=4, num_swap_blocks=100, max_swapped_requests=1, watermark_blocks=0)
    d.submit(*[make_request(f"r{i}", 5, 25) for i in range(4)])
    while d.scheduler.has_live_requests:
        d.step()
        assert d.scheduler.num_swapped <= 1
    assert d.scheduler.counters.preemptions_swap > 0 and d.scheduler.counters.preemptions_recompute > 0


def test_auto_mode_takes_the_way_that_measured_cheaper():
    for swap_seconds, kind in ((1e-9, "swap"), (10.0, "recompute")):
        d = Driver(num_blocks=10, block_size=4, num_swap_blocks=50, watermark_blocks=0)
        d.scheduler.costs.swap_seconds_per_block = swap_seconds
        d.submit(*[make_request(f"r{i}", 9, 15) for i in range(3)])
        d.run()
        counters = d.scheduler.counters
        assert (counters.preemptions_swap > 0) == (kind == "swap")
        assert (counters.preemptions_recompute > 0) == (kind == "recompute")


def test_rebuild_covers_prompt_and_generated_tokens_and_samples_once():
    d = Driver(num_blocks=9, block_size=4, enable_prefix_caching=False, watermark_blocks=0)
    d.submit(make_request("a", 12, 20), make_request("b", 12, 20))
    d.run()
    rebuilds = [c for p in d.plans for c in p.prefills if c.output_index > 0]
    assert rebuilds
    for chunk in rebuilds:
        assert chunk.end == 12 + chunk.output_index and len(chunk.sample_rows) == 1
    assert all(d.tokens[n] == list(range(100, 120)) for n in "ab")


def test_swapped_requests_resume_before_new_ones_of_equal_priority():
    d = Driver(num_blocks=10, block_size=4, num_swap_blocks=50, watermark_blocks=0)
    d.submit(make_request("a", 8, 24), make_request("b", 8, 24))
    while not d.scheduler.num_swapped:
        d.step()
    d.submit(make_request("new", 4, 2))
    swapped = next(r.request_id for r in d.scheduler.waiting if r.started)
    before = len(d.order_of_admission)
    d.run()
    resumed = d.order_of_admission[before:]
    assert resumed.index(swapped) < resumed.index("new")


def test_swap_in_takes_blocks_that_are_still_cached_without_a_copy():
    d = Driver(num_blocks=12, block_size=4, num_swap_blocks=50, max_num_seqs=1)
    low = make_request("low", 16, 10, priority=1)
    d.submit(low)
    d.step()
    d.step()
    d.submit(make_request("high", 4, 1, priority=0))
    d.run()
    swapped_in = [s for p in d.plans for s in p.swap_ins]
    assert len(swapped_in) == 1 and len(swapped_in[0].blocks) == 1, "4 of 5 blocks were full and still cached"
    assert d.scheduler.counters.swapped_out_blocks == 5
    assert d.tokens["low"] == list(range(100, 110))


def test_preemptions_per_request_are_bounded_by_choosing_the_bound_ones_last():
    d = Driver(num_blocks=16, block_size=4, num_swap_blocks=100, max_preemptions=2, watermark_blocks=0)
    requests = [make_request(f"r{i}", 6, 30) for i in range(6)]
    d.submit(*requests)
    d.run()
    assert max(r.num_preemptions for r in requests) <= 3
    assert sum(r.num_preemptions for r in requests) > 2


def test_drain_changes_nothing_until_the_commit():
    d = Driver(num_blocks=4, block_size=4, watermark_blocks=0)
    d.submit(make_request("a", 7, 8), make_request("b", 7, 8))
    while (plan := d.schedule()) is not NoPlan.DRAIN:
        if len(d.in_flight) == 2:
            d.commit()
        assert plan is not NoPlan.IDLE
    before = {r.request_id: (r.kv_tokens, list(r.block_table), r.state) for r in d.scheduler.live_requests}
    assert d.schedule() is NoPlan.DRAIN
    assert before == {r.request_id: (r.kv_tokens, list(r.block_table), r.state) for r in d.scheduler.live_requests}
    d.commit()
    assert isinstance(d.schedule(), StepPlan)
