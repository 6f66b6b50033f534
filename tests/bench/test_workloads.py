"""Workloads: what a seed makes, that sharing is real, limits and scaling."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.bench import workloads
from minillm.bench.workloads import Segment, Workload, WorkloadRequest
from minillm.core.errors import ConfigError

VOCAB = 1000


def test_offline_is_the_public_workload_to_the_token():
    made = workloads.offline()
    assert (len(made), made.output_tokens) == (256, 133_966)
    rng = Random(0)
    length = rng.randint(100, 1024)
    assert made.token_ids(0, 151_936) == [rng.randint(0, 10000) for _ in range(length)]
    assert all(100 <= tokens <= 1024 for tokens in made.prompt_tokens())
    assert max(made.token_ids(0, 128)) < 128


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: workloads.fixed(5, 7, 3, seed=seed),
        lambda seed: workloads.uniform(9, (2, 30), (1, 8), seed=seed),
        lambda seed: workloads.shared_prefix(9, groups=2, prefix=16, suffix=(1, 9), output=(2, 4), seed=seed),
        lambda seed: workloads.multi_turn(3, turns=3, system=5, message=(2, 6), output=(1, 4), rate=2.0, seed=seed),
        lambda seed: workloads.lognormal("azure-code", 20, seed=seed),
    ],
)
def test_a_seed_gives_the_same_workload_always_and_another_seed_another(make):
    one, same, other = make(3), make(3), make(4)
    assert one == same
    tokens = [one.token_ids(i, VOCAB) for i in range(len(one))]
    assert tokens == [same.token_ids(i, VOCAB) for i in range(len(one))]
    assert tokens != [other.token_ids(i, VOCAB) for i in range(len(other))]
    assert all(0 <= token < VOCAB for ids in tokens for token in ids)
    assert [len(ids) for ids in tokens] == [request.own_tokens for request in one.requests]


def test_equal_segments_are_equal_tokens_and_a_shorter_one_is_a_prefix():
    requests = [
        WorkloadRequest(segments=(Segment("a", 100), Segment(key, length)), max_tokens=1)
        for key, length in (("b", 50), ("b", 20), ("c", 50))
    ]
    made = Workload("w", tuple(requests), seed=5)
    long, short, other = (made.token_ids(i, VOCAB) for i in range(3))
    assert short == long[:120]
    assert other[:100] == long[:100]
    assert other[100:] != long[100:]


def test_shared_prefix_has_as_many_beginnings_as_groups():
    made = workloads.shared_prefix(40, groups=3, prefix=12, suffix=(4, 8), output=(1, 1))
    beginnings = {tuple(made.token_ids(i, VOCAB)[:12]) for i in range(40)}
    whole = {tuple(made.token_ids(i, VOCAB)) for i in range(40)}
    assert (len(beginnings), len(whole)) == (3, 40)


def test_a_conversation_grows_by_answer_and_message():
    made = workloads.multi_turn(2, turns=3, system=8, message=(4, 4), output=(5, 5))
    assert sorted(made.prompt_tokens()) == [12, 12, 21, 21, 30, 30]
    assert made.longest == 35
    for index, request in enumerate(made.requests):
        if request.follows is not None:
            assert request.follows < index
            assert made.requests[request.follows].user == request.user


def test_limits_cut_prompts_at_their_end_and_make_room_for_the_output():
    made = workloads.shared_prefix(10, groups=1, prefix=20, suffix=(10, 10), output=(16, 16))
    cut = made.limited(rows=4, max_prompt=25, max_output=8)
    assert (len(cut), cut.prompt_tokens(), cut.output_tokens) == (4, [25] * 4, 32)
    assert cut.token_ids(0, VOCAB) == made.token_ids(0, VOCAB)[:25]
    assert "prompt <= 25" in cut.source
    total = made.limited(max_total=20)
    assert (total.prompt_tokens()[0], total.requests[0].max_tokens) == (4, 16)
    assert made.limited(max_total=3).longest == 3


def test_limits_cut_given_ids_too_and_stop_at_a_time():
    requests = tuple(WorkloadRequest(arrival=float(i), ids=(1, 2, 3, 4), max_tokens=2) for i in range(5))
    cut = Workload("w", requests).limited(until=3.0, max_prompt=2)
    assert [request.ids for request in cut.requests] == [(1, 2)] * 3


def test_scaling_time_scales_the_rate():
    made = workloads.lognormal("azure-conv", 50)
    assert made.scaled(0.25).duration == pytest.approx(made.duration / 4)
    assert workloads.at_once(made).duration == 0
    with pytest.raises(ConfigError, match="time scale"):
        made.scaled(math.nan)


@given(st.floats(0.1, 50), st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 99))
def test_arrivals_keep_their_rate(rate, cv, seed):
    times = workloads.arrivals(400, rate, cv, Random(seed))
    assert times == sorted(times)
    assert times[-1] * rate == pytest.approx(400, rel=0.05 + cv / 3)


def test_arrivals_at_an_infinite_rate_come_at_once_and_bad_rates_are_refused():
    assert workloads.arrivals(3, math.inf, 1.0, Random(0)) == [0, 0, 0]
    for rate, cv in ((0, 1), (-1, 1), (1, -1), (math.nan, 1)):
        with pytest.raises(ConfigError, match="rate"):
            workloads.arrivals(1, rate, cv, Random(0))


@pytest.mark.parametrize("name", sorted(workloads.LAWS))
def test_lognormal_lengths_meet_the_published_percentiles(name):
    law = workloads.LAWS[name]
    rng = Random(1)
    for lengths in (law.prompt, law.output):
        drawn = sorted(lengths.draw(rng) for _ in range(20_000))
        assert drawn[10_000] == pytest.approx(lengths.p50, rel=0.06)
        assert drawn[18_000] == pytest.approx(min(lengths.p90, lengths.most), rel=0.08)
        assert drawn[-1] <= lengths.most


def test_an_unknown_law_names_the_known_ones():
    with pytest.raises(ConfigError, match="azure-conv"):
        workloads.lognormal("nope", 1)


def test_merging_keeps_order_classes_tokens_and_conversations_apart():
    chat = workloads.multi_turn(2, turns=2, system=0, message=(3, 3), output=(2, 2), rate=1.0).labelled("chat")
    code = workloads.lognormal("azure-code", 10).labelled("code", priority=1, user="ci")
    both = workloads.merged("both", chat, code)
    assert len(both) == len(chat) + len(code)
    assert workloads.labels(both.requests) and set(workloads.labels(both.requests)) == {"chat", "code"}
    times = [request.arrival for request in both.requests]
    assert times == sorted(times)
    for index, request in enumerate(both.requests):
        if request.follows is not None:
            assert request.follows < index
            assert both.requests[request.follows].user == request.user
    assert {request.priority for request in both.requests if request.label == "code"} == {1}


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ((WorkloadRequest(max_tokens=1),), "0 prompt tokens"),
        ((WorkloadRequest(ids=(1,), max_tokens=0),), "max_tokens=0"),
        ((WorkloadRequest(ids=(1,), max_tokens=1, arrival=math.inf),), "arrives"),
        ((WorkloadRequest(ids=(1,), max_tokens=1, follows=0),), "follows 0"),
    ],
)
def test_impossible_requests_are_refused(requests, message):
    with pytest.raises(ConfigError, match=message):
        Workload("w", requests)
