"""Inputs that must neither be forgotten nor leave the scheduler in a state that it cannot go on from."""

import pytest
from core_driver import Driver, make_request

from minillm.core import base_scheduler, invariants
from minillm.core.errors import DuplicateRequestError


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
