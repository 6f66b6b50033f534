import random

import pytest
from core_driver import make_request

from minillm.core.errors import UnknownPolicyError
from minillm.core.policies import (
    QUEUE_POLICIES,
    VICTIM_POLICIES,
    QueueContext,
    Victim,
    get_queue_policy,
    get_victim_policy,
    register_queue_policy,
    register_victim_policy,
)
from minillm.core.waiting_queue import WaitingQueue


def queue(policy, **context):
    return WaitingQueue(get_queue_policy(policy), QueueContext(**context))


def fill(q, requests):
    for seq, request in enumerate(requests):
        request.arrival_seq = seq
        q.push(request)


def drain(q):
    order = []
    while (head := q.head()) is not None:
        order.append(head.request_id)
        q.remove(head)
    return order


def test_priority_then_first_arrival():
    q = queue("priority")
    fill(q, [make_request(n, 1, priority=p) for n, p in (("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0))])
    assert drain(q) == ["d", "b", "e", "a", "c"]


def test_a_preempted_request_keeps_its_place_by_first_arrival():
    q = queue("priority")
    requests = [make_request(n, 1) for n in "abc"]
    fill(q, requests)
    first = q.head()
    q.remove(first)
    first.started = True
    q.push(make_request("late", 1, arrival_time=9.0))
    q.push(first)
    assert drain(q)[0] == "a"


def test_fcfs_ignores_priority():
    q = queue("fcfs")
    fill(q, [make_request("a", 1, priority=5), make_request("b", 1, priority=0)])
    assert drain(q) == ["a", "b"]


def test_shortest_prompt_inside_a_priority():
    q = queue("shortest_prompt")
    fill(q, [make_request("a", 9), make_request("b", 3), make_request("c", 5), make_request("d", 1, priority=1)])
    assert drain(q) == ["b", "c", "a", "d"]


def test_requests_that_ran_before_come_first_inside_a_level():
    q = queue("shortest_prompt")
    long = make_request("resumed", 50)
    long.started = True
    fill(q, [make_request("a", 1), long, make_request("b", 2)])
    assert drain(q) == ["resumed", "a", "b"]


def test_ageing_keeps_its_stated_bound():
    """One of priority p is overtaken by one of priority q < p only if that came less than (p - q) * T later."""
    for gap, first in ((19.9, "high"), (20.1, "low")):
        q = queue("priority", ageing_interval=10.0)
        fill(
            q,
            [
                make_request("low", 1, priority=2, arrival_time=100.0),
                make_request("high", 1, priority=0, arrival_time=100.0 + gap),
            ],
        )
        assert drain(q)[0] == first


def test_fair_serves_the_user_with_least_service_per_weight():
    q = queue("fair", user_weights={"b": 2.0})
    fill(q, [make_request(f"{u}{i}", 1, user=u) for i in range(2) for u in "ab"])
    q.context.served_tokens.update(a=100.0, b=50.0)
    assert q.head().user == "b"
    q.context.served_tokens["b"] = 101.0
    assert q.head().user == "a", "keys that grew since the push are seen"


def test_a_user_who_was_idle_gets_no_credit_for_it():
    q = queue("fair")
    q.context.served_tokens.update(busy=1000.0)
    fill(q, [make_request("x", 1, user="busy")])
    q.push(make_request("y", 1, user="newcomer"))
    assert q.context.served_tokens["newcomer"] == 1000.0


@pytest.mark.parametrize("policy", sorted(QUEUE_POLICIES))
def test_lazy_heap_gives_the_same_order_as_sorting(policy):
    rng = random.Random(policy)
    q = queue(policy, ageing_interval=5.0 if policy == "priority" else None)
    live = []
    for seq in range(300):
        r = make_request(f"r{seq}", rng.randrange(1, 20), priority=rng.randrange(3), user=rng.choice("uvw"))
        r.arrival_seq, r.arrival_time = seq, float(seq)
        q.push(r)
        live.append(r)
        if rng.random() < 0.4:
            user = rng.choice("uvw")
            served = q.context.served_tokens
            served[user] = served.get(user, 0.0) + rng.randrange(50)
        if rng.random() < 0.6:
            gone = q.head() if rng.random() < 0.5 else rng.choice(live)
            live.remove(gone)
            q.remove(gone)
        if live:
            assert q.head() is min(live, key=q.key)
            assert q.in_order() == sorted(live, key=q.key)
            some = rng.choice(live)
            ahead = q.ahead_of(some)
            assert sorted(ahead, key=q.key) == q.in_order()[: q.in_order().index(some)]
    assert len(q) == len(live)


@pytest.mark.parametrize("users", [2, 500])
def test_fair_evaluates_few_keys_however_long_the_queue_is(users):
    evaluated = 0

    @register_queue_policy("counted_test", per_user=True)
    def counted(request, context):
        nonlocal evaluated
        evaluated += 1
        return QUEUE_POLICIES["fair"](request, context)

    try:
        q = queue("counted_test")
        fill(q, [make_request(f"r{i}", 1, user=f"u{i % users}") for i in range(2000)])
        evaluated, served = 0, 0
        tokens = q.context.served_tokens
        while (head := q.head()) is not None and served < 1000:
            assert tokens.get(head.user, 0.0) == min(tokens.get(f"u{user}", 0.0) for user in range(users))
            tokens[head.user] = tokens.get(head.user, 0.0) + 10.0
            q.remove(head)
            served += 1
        assert served == 1000 and evaluated < 6 * served
    finally:
        del QUEUE_POLICIES["counted_test"]


def test_unknown_policies_are_refused_with_the_known_names():
    with pytest.raises(UnknownPolicyError, match=r"scheduling_policy='nope'.*fcfs.*priority"):
        get_queue_policy("nope")
    with pytest.raises(UnknownPolicyError, match=r"victim_policy='nope'.*cost_based.*lifo"):
        get_victim_policy("nope")


def test_own_policies_are_registered_by_name():
    try:

        @register_queue_policy("longest_test")
        def longest(request, context):
            return (0, -request.prompt_len)

        @register_victim_policy("shortest_test")
        def shortest(victim):
            return (len(victim.request.generated_ids),)

        q = queue("longest_test")
        fill(q, [make_request("a", 1), make_request("b", 5)])
        assert drain(q) == ["b", "a"]
        assert get_victim_policy("shortest_test") is shortest
    finally:
        del QUEUE_POLICIES["longest_test"], VICTIM_POLICIES["shortest_test"]


def victims():
    result = []
    for seq, (blocks, seconds) in enumerate([(4, 8.0), (10, 5.0), (2, 2.0)]):
        r = make_request(f"v{seq}", 4)
        r.arrival_seq = seq
        result.append(Victim(r, blocks, seconds))
    return result


@pytest.mark.parametrize(("policy", "first"), [("fifo", "v0"), ("lifo", "v2"), ("largest", "v1"), ("cost_based", "v1")])
def test_victim_policies(policy, first):
    assert min(victims(), key=get_victim_policy(policy)).request.request_id == first


def test_cost_based_never_prefers_a_victim_that_frees_nothing():
    r = make_request("shared", 4)
    r.arrival_seq = 9
    chosen = min([*victims(), Victim(r, 0, 0.0)], key=get_victim_policy("cost_based"))
    assert chosen.request.request_id != "shared"


@pytest.mark.parametrize("policy", ["priority", "fcfs", "shortest_prompt", "fair"])
def test_the_first_few_are_found_without_sorting_the_queue(policy):
    rng = random.Random(7)
    q = queue(policy)
    requests = [
        make_request(f"r{i}", rng.randint(1, 50), priority=rng.randint(0, 3), user=rng.choice("abc"))
        for i in range(500)
    ]
    fill(q, requests)
    for request in rng.sample(requests, 200):  # their entries stay in the heap for a while
        q.remove(request)
    for request in rng.sample([r for r in requests if r not in q], 50):
        q.push(request)
    for count in (0, 1, 7, 64, 350, 1000):
        assert q.first(count) == q.in_order()[:count]
    assert queue(policy).first(3) == []
