"""Inputs that must neither be forgotten nor leave the scheduler in a state that it cannot go on from."""

import math

import pytest
from core_driver import Driver, make_request

from minillm.core import base_scheduler, invariants
from minillm.core.errors import DuplicateRequestError, InvalidParameterError
from minillm.core.request import RequestState


def group_whose_parent_ended_long_ago(monkeypatch: pytest.MonkeyPatch, **options) -> Driver:
    """A group of two: the parent has stopped, and `explain` has forgotten it; its child decodes on."""
    monkeypatch.setattr(base_scheduler, "KEEP_ENDED", 4)
    d = Driver(model=lambda name, index: 9 if name == "g" else 5)
    d.submit(make_request("g", 3, 40, n=2, eos_token_ids=(9,), **options))
    d.step()
    d.submit(*(make_request(f"r{i}", 1, 1) for i in range(6)))
    d.step()
    assert d.finished["g"] == "stop" and len(d.finished) == 7
    with pytest.raises(KeyError):
        d.scheduler.explain("g")
    assert [request.request_id for request in d.scheduler.live_requests] == ["g#1"]
    return d


def test_a_group_is_cancelled_by_its_id_however_long_ago_its_parent_ended(monkeypatch):
    d = group_whose_parent_ended_long_ago(monkeypatch)
    assert d.scheduler.cancel("g", d.now)
    assert not d.scheduler.cancel("g", d.now)
    d.collect(d.scheduler.take_events())
    assert d.finished["g#1"] == "cancelled"
    d.assert_idle_and_clean()
    invariants.check(d.scheduler)


def test_a_groups_deadline_holds_for_the_members_that_its_parent_left_behind(monkeypatch):
    d = group_whose_parent_ended_long_ago(monkeypatch, deadline=50.0)
    d.now = 51.0
    d.schedule()
    d.collect(d.scheduler.take_events())
    assert d.finished["g#1"] == "cancelled"
    d.assert_idle_and_clean()


def test_the_id_of_a_group_is_in_use_until_its_last_member_ends(monkeypatch):
    d = group_whose_parent_ended_long_ago(monkeypatch)
    with pytest.raises(DuplicateRequestError, match="'g' is already in use"):
        d.submit(make_request("g", 3, 2))
    d.run()
    d.scheduler.submit(make_request("g", 3, 2), d.now)
    assert d.scheduler.get("g") is not None


def test_a_request_that_has_ended_is_not_taken_again():
    d = Driver()
    request = make_request("a", 3, 2)
    d.submit(request)
    with pytest.raises(DuplicateRequestError):
        d.submit(request)
    d.scheduler.cancel("a", d.now)
    with pytest.raises(InvalidParameterError, match="submitted before"):
        d.submit(request)
    d.submit(make_request("b", 3, 2))
    d.run()
    assert d.finished == {"a": "cancelled", "b": "length"}


@pytest.mark.parametrize("n", [1, 3])
def test_a_queue_policy_that_raises_leaves_nothing_behind(n):
    d = Driver(ageing_interval=1.0)
    with pytest.raises(OverflowError):
        d.submit(make_request("a", 3, 2, n=n, priority=10**400))  # no float holds priority + arrival / interval
    d.assert_idle_and_clean()
    invariants.check(d.scheduler)
    assert not d.scheduler.has_live_requests
    d.submit(make_request("a", 3, 2, n=n))
    d.run()
    assert set(d.finished.values()) == {"length"} and len(d.finished) == n


def test_a_deadline_without_order_is_refused_and_others_still_expire():
    d = Driver()
    d.submit(make_request("a", 3, 50, deadline=1.0))
    with pytest.raises(InvalidParameterError, match="deadline=nan"):
        d.submit(make_request("b", 3, 50, deadline=math.nan))
    d.now = 2.0
    d.step()
    assert d.finished == {"a": "cancelled"}


def test_a_scored_prompt_whose_last_chunk_lost_its_kv_is_computed_again():
    """The swap-in fails in the very step that would have finished the scoring."""
    d = Driver(num_blocks=6, num_swap_blocks=6, max_num_seqs=2, max_num_batched_tokens=8, preemption_mode="swap")
    d.submit(make_request("scored", 24, 0, prompt_logprobs=0, priority=1))
    d.step()
    d.step()
    d.submit(make_request("urgent", 8, 2, priority=0))
    while "urgent" not in d.finished:
        d.step()
        assert "scored" not in d.finished
    assert d.scheduler.get("scored").state is RequestState.SWAPPED
    plan = d.schedule()
    assert plan.swap_ins and plan.prefills[-1].end == 24
    d.commit(failed_swaps=["scored"])
    assert "scored" not in d.finished, "its KV was not there: nothing was scored"
    d.run()
    assert d.finished["scored"] == "length"
    d.assert_idle_and_clean()
