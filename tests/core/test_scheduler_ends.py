"""How requests end, and what a group, a cached prefix and an explanation look like."""

import pytest
from core_driver import Driver, make_request

from minillm.core.errors import (
    DuplicateRequestError,
    InvariantViolation,
)
from minillm.core.plan import StepPlan
from minillm.core.request import RequestState

both_modes = pytest.mark.parametrize("overlap", [False, True], ids=["no-overlap", "overlap"])


# -- cancel, stop strings, deadlines, failures ---------------------------------------------------------------


def reach(d, request, state):
    """Step until the request is in `state`."""
    for _ in range(200):
        if request.state is state:
            return
        d.step()
    raise AssertionError(f"{request} never became {state}")


@both_modes
@pytest.mark.parametrize(
    "state",
    [
        RequestState.WAITING,
        RequestState.PREFILLING,
        RequestState.DECODING,
        RequestState.SWAPPED,
        RequestState.PREEMPTED,
    ],
)
def test_cancel_in_every_state_frees_everything(overlap, state):
    mode = "recompute" if state is RequestState.PREEMPTED else "swap"
    d = Driver(
        overlap=overlap, num_blocks=8, block_size=4, num_swap_blocks=20, max_num_batched_tokens=4, max_num_seqs=2,
        preemption_mode=mode, watermark_blocks=0,
    )  # fmt: skip
    victim = make_request("victim", 9, 12, priority=1)
    d.submit(victim)
    if state in (RequestState.SWAPPED, RequestState.PREEMPTED):
        reach(d, victim, RequestState.DECODING)
        d.submit(make_request("other", 20, 4, priority=0))
    if state is not RequestState.WAITING:
        reach(d, victim, state)
    d.submit(make_request("next", 3, 2, priority=2))
    assert d.scheduler.cancel("victim", d.now)
    assert victim.state is RequestState.CANCELLED and victim.block_table == [] and victim.swap_slots == []
    assert not d.scheduler.cancel("victim", d.now), "idempotent"
    at = len(d.plans)
    d.run()
    assert d.finished["victim"] == "cancelled" and d.finished["next"] == "length"
    assert not any("victim" in p.decodes.request_ids for p in d.plans[at:])
    assert not any(c.request_id == "victim" for p in d.plans[at:] for c in p.prefills)
    d.assert_idle_and_clean()


def test_cancel_of_an_unknown_id_is_false():
    assert Driver().scheduler.cancel("nobody", 0.0) is False


def test_cancel_and_retry_with_the_same_id_gets_only_its_own_tokens():
    d = Driver(overlap=True)
    d.submit(make_request("a", 5, 20))
    for _ in range(4):
        d.step()
    assert d.in_flight
    d.scheduler.cancel("a", d.now)
    d.collect(d.scheduler.take_events())
    d.tokens.clear()
    d.finished.clear()
    d.submit(make_request("a", 7, 5))
    d.run()
    assert d.tokens["a"] == [100, 101, 102, 103, 104] and d.finished["a"] == "length"


@both_modes
def test_stop_string_found_late_drops_later_tokens(overlap):
    d = Driver(overlap=overlap)
    r = make_request("a", 5, 50)
    d.submit(r)
    for _ in range(8):
        d.step()
    assert len(r.generated_ids) > 4
    assert d.scheduler.finish("a", 3, d.now)
    assert r.generated_ids == [100, 101, 102, 103] and r.finish_reason == "stop"
    assert not d.scheduler.finish("a", 3, d.now)
    d.run()
    assert d.scheduler.counters.dropped_tokens > 0
    d.assert_idle_and_clean()


def test_deadline_ends_a_request_wherever_it_is():
    d = Driver(max_num_seqs=1)
    running, waiting = make_request("run", 4, 200, deadline=0.05), make_request("wait", 4, 5, deadline=0.03)
    d.submit(running, waiting, make_request("after", 4, 3))
    d.run()
    assert d.finished == {"wait": "cancelled", "run": "cancelled", "after": "length"}
    assert 0 < len(d.tokens["run"]) < 10 and "wait" not in d.tokens
    assert "deadline" in d.scheduler.explain("wait")


@both_modes
def test_a_failed_row_fails_its_request_alone_and_publishes_nothing_of_that_step(overlap):
    d = Driver(overlap=overlap, block_size=4)
    d.submit(*[make_request(f"r{i}", 4, 12) for i in range(4)])
    for _ in range(3):
        d.step()
    plan = d.in_flight[0] if d.in_flight else d.schedule()
    row = plan.decodes.request_ids.index("r2")
    while d.in_flight[0] is not plan:
        d.commit()
    published = d.scheduler.prefix_cache.counters.published
    fills = sum(1 for p in plan.decodes.positions if p % 4 == 3)
    d.commit(failures={row: "NaN logits"})
    assert d.scheduler.prefix_cache.counters.published - published == max(0, fills - 1)
    d.run()
    assert d.finished["r2"] == "error" and {d.finished[f"r{i}"] for i in (0, 1, 3)} == {"length"}
    assert all(len(d.tokens[f"r{i}"]) == 12 for i in (0, 1, 3))
    assert "NaN logits" in d.scheduler.explain("r2")
    d.assert_idle_and_clean()


def test_a_failed_chunk_fails_its_request_alone():
    d = Driver(max_num_batched_tokens=4, max_num_seqs=2)
    d.submit(make_request("a", 10, 3), make_request("b", 3, 3))
    d.schedule()
    d.commit(failed_requests={"a": "boom"})
    d.run()
    assert d.finished == {"a": "error", "b": "length"}
    d.assert_idle_and_clean()


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_failed_swap_copy_is_recomputed(direction):
    d = Driver(num_blocks=10, block_size=4, num_swap_blocks=50, watermark_blocks=0, enable_prefix_caching=False)
    d.submit(*[make_request(f"r{i}", 8, 20) for i in range(3)])
    failed = 0
    while d.scheduler.has_live_requests or d.in_flight:
        plan = d.schedule()
        swaps = (plan.swap_outs if direction == "out" else plan.swap_ins) if isinstance(plan, StepPlan) else []
        if swaps and not failed:
            failed += len(swaps)
            d.commit(failed_swaps=[s.request_id for s in swaps])
        elif d.in_flight:
            d.commit()
    assert failed and d.scheduler.counters.failed_swaps == failed
    assert all(d.tokens[f"r{i}"] == list(range(100, 120)) for i in range(3))
    d.assert_idle_and_clean()


@both_modes
def test_engine_failure_fails_everything_and_leaves_the_core_usable(overlap):
    d = Driver(overlap=overlap, num_blocks=10, num_swap_blocks=20, watermark_blocks=0)
    d.submit(*[make_request(f"r{i}", 8, 20, n=2 if i == 0 else 1) for i in range(4)])
    for _ in range(12):
        d.step()
    d.scheduler.fail_all("device lost", d.now)
    d.in_flight.clear()
    d.collect(d.scheduler.take_events())
    assert set(d.finished.values()) == {"error"} and len(d.finished) == 5
    d.assert_idle_and_clean()
    d.submit(make_request("again", 8, 3))
    d.run()
    assert d.finished["again"] == "length"


def test_a_deadline_does_not_outlive_its_request():
    d = Driver()
    d.submit(make_request("a", 4, 2, deadline=1.0))
    d.run()
    d.tokens.clear()
    d.finished.clear()
    d.submit(make_request("a", 4, 200))
    d.now = 2.0
    d.run()
    assert len(d.tokens["a"]) == 200 and d.finished["a"] == "length"


def test_deadline_bookkeeping_does_not_grow_with_requests_that_ended():
    d = Driver()
    for i in range(500):
        d.submit(make_request(f"r{i}", 3, 1, deadline=1e9))
        d.run()
    assert len(d.scheduler._deadlines) <= 70


# -- groups --------------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("prompt", [20, 32])
def test_group_shares_the_prompt_and_copies_on_the_first_write(overlap, prompt):
    d = Driver(overlap=overlap, block_size=16, model=lambda name, i: 100 + i + 1000 * len(name))
    d.submit(make_request("g", prompt, 6, n=3))
    d.run()
    assert set(d.tokens) == {"g", "g#1", "g#2"} and all(len(t) == 6 for t in d.tokens.values())
    copies = [c for p in d.plans for c in p.copies]
    assert len(copies) == (2 if prompt % 16 else 0), "a partly filled block is copied for all but its last holder"
    assert sum(c.end - c.start for p in d.plans for c in p.prefills) == prompt, "the prompt is computed once"
    d.assert_idle_and_clean()


def test_group_is_admitted_together_or_not_at_all():
    d = Driver(max_num_seqs=3)
    d.submit(make_request("a", 4, 6), make_request("g", 4, 4, n=3), make_request("b", 4, 2))
    d.step()
    assert d.scheduler.num_running == 1, "two free slots are not enough for the group, and nobody overtakes it"
    d.run()
    assert len(d.finished) == 5


@both_modes
def test_group_members_end_each_for_itself(overlap):
    ends = {"g": 3, "g#1": 5, "g#2": 99}
    d = Driver(overlap=overlap, model=lambda name, i: 7 if i == ends[name] else 100)
    d.submit(make_request("g", 6, 8, n=3, eos_token_ids=[7]))
    d.run()
    assert {n: len(t) for n, t in d.tokens.items()} == {"g": 4, "g#1": 6, "g#2": 8}
    assert d.finished == {"g": "stop", "g#1": "stop", "g#2": "length"}


@both_modes
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancel_of_a_group_ends_all_members(overlap, steps):
    d = Driver(overlap=overlap, max_num_batched_tokens=4, max_num_seqs=4)
    d.submit(make_request("g", 6, 20, n=3))
    for _ in range(steps):
        d.step()
    assert d.scheduler.cancel("g", d.now)
    d.run()
    assert d.finished == {"g": "cancelled", "g#1": "cancelled", "g#2": "cancelled"}
    d.assert_idle_and_clean()


def test_cancel_by_parent_id_reaches_children_that_outlive_the_parent():
    d = Driver(model=lambda name, i: 7 if name == "g" else 100)
    d.submit(make_request("g", 6, 40, n=2, eos_token_ids=[7]))
    for _ in range(4):
        d.step()
    assert d.finished == {"g": "stop"}
    with pytest.raises(DuplicateRequestError):
        d.submit(make_request("g", 3))
    assert d.scheduler.cancel("g", d.now)
    d.run()
    assert d.finished["g#1"] == "cancelled"


@both_modes
def test_group_under_pressure_keeps_every_stream(overlap):
    d = Driver(overlap=overlap, num_blocks=9, block_size=4, num_swap_blocks=6, watermark_blocks=0)
    d.submit(make_request("g", 10, 14, n=3), make_request("r", 6, 14))
    d.run()
    assert all(t == list(range(100, 114)) for t in d.tokens.values()) and len(d.tokens) == 4
    d.assert_idle_and_clean()


# -- prefix cache in the scheduler ---------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [15, 16, 17, 31, 32, 33, 48])
def test_second_pass_hits_at_most_all_blocks_but_the_last_token(prompt):
    d = Driver(block_size=16)
    ids = list(range(prompt))
    for name in ("first", "second"):
        d.submit(make_request(name, ids, 4))
        d.run()
    second = d.scheduler._ended["second"]
    assert second.cached_tokens == (prompt - 1) // 16 * 16
    assert d.tokens["first"] == d.tokens["second"]
    assert sum(c.end - c.start for p in d.plans for c in p.prefills) == prompt + prompt - second.cached_tokens


def test_blocks_are_published_while_decoding():
    d = Driver(block_size=4)
    d.submit(make_request("a", [1, 2, 3], 30))
    while len(d.tokens.get("a", [])) < 10:
        d.step()
    follow_up = make_request("b", [1, 2, 3, *d.tokens["a"][:6]], 2)
    d.submit(follow_up)
    d.run()
    assert follow_up.cached_tokens == 8


def test_prompt_logprobs_skip_the_lookup_and_are_never_scored_twice():
    d = Driver(block_size=4, num_blocks=64)
    d.submit(make_request("a", list(range(12)), 2))
    d.run()
    scored = make_request("b", list(range(12)), 4, prompt_logprobs=1)
    d.submit(scored)
    d.run()
    chunks = [c for p in d.plans for c in p.prefills if c.request_id == "b"]
    assert scored.cached_tokens == 0 and all(c.prompt_logprobs for c in chunks)


def test_max_tokens_zero_scores_and_ends_without_a_sample():
    d = Driver(max_num_batched_tokens=2, max_num_seqs=1)
    d.submit(make_request("a", 5, 0, prompt_logprobs=1))
    d.run()
    assert d.finished == {"a": "length"} and "a" not in d.tokens
    assert all(not c.sample_rows for p in d.plans for c in p.prefills)


def test_cached_run_uses_the_pool_less():
    d = Driver(block_size=4, num_blocks=12, watermark_blocks=0)
    shared = list(range(16))
    d.submit(make_request("a", [*shared, 90], 20))
    d.step()
    d.submit(make_request("b", [*shared, 91], 4))
    d.step()
    assert d.scheduler.stats().blocks_shared == 4
    d.run()
    assert len(d.finished) == 2 and d.scheduler.counters.preemptions_recompute == 0


# -- explain, stats, determinism -----------------------------------------------------------------------------


def test_explain_tells_what_a_request_waits_for_and_its_story():
    d = Driver(num_blocks=8, block_size=4, watermark_blocks=0)
    d.submit(make_request("hog", 20, 12), make_request("head", 16, 2), make_request("tail", 2, 2, priority=3))
    d.step()
    text = d.scheduler.explain("tail")
    assert "behind 1 of 2 requests" in text and "1 of priority 0" in text and "hog (5)" in text
    head = d.scheduler.explain("head")
    assert "next to run" in head and "more KV blocks" in head
    assert "decoding in row" in d.scheduler.explain("hog")
    d.run()
    story = d.scheduler.explain("head")
    for part in ("finished (length)", "submitted", "waits: ", "admitted, 0 of 16 tokens cached", "max_tokens"):
        assert part in story
    with pytest.raises(KeyError):
        d.scheduler.explain("nobody")


def test_history_stays_short_however_long_a_request_waits():
    d = Driver(max_num_seqs=1)
    waiting = make_request("w", 4, 2)
    d.submit(make_request("a", 4, 200), waiting)
    for _ in range(150):
        d.step()
    assert len(waiting.history) <= 3


def test_block_gauges_add_up_at_every_step():
    d = Driver(overlap=True, num_blocks=20, block_size=4, num_swap_blocks=10)
    d.submit(*[make_request(f"r{i}", 7, 25) for i in range(6)])
    while d.scheduler.has_live_requests:
        d.step()
        s = d.scheduler.stats()
        assert s.blocks_free + s.blocks_evictable + s.blocks_quarantined + s.blocks_referenced == 20
        assert 0.0 <= s.internal_fragmentation < 1.0 and s.utilisation == s.blocks_referenced / 20


def test_same_inputs_give_the_same_plans():
    def run():
        d = Driver(overlap=True, num_blocks=14, block_size=4, num_swap_blocks=12, queue_policy="fair")
        for i in range(12):
            d.submit(make_request(f"r{i}", 5 + i % 7, 9 + i % 5, user="ab"[i % 2], cache_salt=["", "x"][i % 2]))
            d.step()
        d.scheduler.cancel("r3", d.now)
        d.run()
        return d.plans

    assert run() == run()


def test_commit_out_of_order_is_refused():
    d = Driver()
    d.submit(make_request("a", 4, 5))
    first, second = d.schedule(), d.schedule()
    with pytest.raises(InvariantViolation, match="out of order"):
        d.scheduler.commit(second, d.outcome(second), 0.1)
    short = d.outcome(first)
    short.token_ids.clear()
    with pytest.raises(InvariantViolation, match="1 sampling rows"):
        d.scheduler.commit(first, short, 0.1)
