"""How long a request can wait for its first step: a bound that is known before the run.

It follows from two rules of the scheduler, for `fcfs` and for `priority` with ageing, where the pool holds all that the
sequence slots can (so only slots and the prefill budget are scarce) and nobody is preempted.

**Who can go first.** With ageing the order is by ``priority + arrival / interval``. A request of priority p that came
at time a is overtaken by a later one of priority q < p only if that came before a + (p - q) * interval, and by no
other. Under `fcfs` nobody overtakes.

**How fast the queue drains.** Let a request's *work* be the seconds that it adds to the steps it is part of, plus its
share of what a step costs whatever it does: the step's fixed seconds times (slot-steps / slots + prompt tokens /
prefill budget). While anybody waits, a step is held up either by the slots (all are taken, and each moves on by one
token) or by the prefill budget (all of it is spent), since nobody overtakes the head of the queue. Either way the
shares add up to at least one: so each second that somebody waits takes at least one second of work out of the system.

Let s be the last moment up to a when nobody waited. What runs until the request starts was in a slot at s (at most the
`slots` largest requests: V0), came in (s, a], or overtook. So the wait is at most

    V0 + max over s <= a of [work that came in (s, a] - (a - s)]
       + sum over q < p of [work of priority q that comes in (a, a + (p - q) * interval)]

and a few steps: an arrival is seen by the step after, and one plan is in flight. The middle term is the backlog of a
queue that is served at rate one. The last term is at most the higher classes' load times the time that ageing gives
them, so a shorter interval protects the low classes, and a longer one the high ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from minillm.bench.virtual import StepCosts
from minillm.bench.workloads import Workload

STEPS_OF_DELAY = 3
"""Steps between an arrival and its plan that are nobody's work: the one that runs, the one in flight, its own."""


@dataclass(frozen=True, slots=True)
class Server:
    """What serves the requests: step costs, sequence slots, and prompt tokens that a step computes at most."""

    costs: StepCosts
    slots: int
    prefill_tokens: int

    def work(self, prompt: int, output: int) -> float:
        """Seconds of work of a request (see the module's text).

        Its slot is taken for `output` steps after all but the last of its prefill, and for one more until the plan
        that ended it has committed.
        """
        costs, decodes = self.costs, output - 1
        shares = (output + 1) / self.slots + prompt / self.prefill_tokens
        seconds = costs.step * shares + prompt * costs.prefill_token + prompt * prompt / 2 * costs.prefill_pair
        return seconds + decodes * costs.decode_row + decodes * (prompt + output / 2) * costs.context_token

    def longest_step(self, longest: int) -> float:
        """Seconds of a step in which all is full and every sequence has `longest` tokens."""
        costs = self.costs
        decodes = self.slots * (costs.decode_row + longest * costs.context_token)
        return costs.step + decodes + self.prefill_tokens * (costs.prefill_token + longest * costs.prefill_pair)


def works(workload: Workload, server: Server) -> list[float]:
    """Work of each request in seconds. Only workloads without conversations: their lengths are known beforehand."""
    return [server.work(request.own_tokens, request.max_tokens) for request in workload.requests]


def offered_load(workload: Workload, server: Server) -> float:
    """Work per second of the workload's duration: up to 1 the engine is sure to keep up in the long run.

    It manages somewhat more, since a step can have all slots taken and spend all its prefill budget.
    """
    return sum(works(workload, server)) / workload.duration


def backlogs(arrivals: Sequence[float], work: Sequence[float]) -> list[float]:
    """Work left at each arrival, itself included, in a queue that is served at rate one."""
    left, before, found = 0.0, 0.0, []
    for at, seconds in zip(arrivals, work, strict=True):
        left = max(0.0, left - (at - before)) + seconds
        before = at
        found.append(left)
    return found


def wait_bounds(workload: Workload, server: Server, ageing_interval: float | None) -> list[float]:
    """Longest wait of each request in seconds, under `priority` with ageing; with None under `fcfs`."""
    work = works(workload, server)
    arrivals = [request.arrival for request in workload.requests]
    in_slots = sum(sorted(work)[-server.slots :])
    delay = STEPS_OF_DELAY * server.longest_step(workload.longest)
    bounds = [in_slots + backlog + delay for backlog in _last_of_equals(arrivals, backlogs(arrivals, work))]
    if ageing_interval is None:
        return bounds
    for priority in {request.priority for request in workload.requests}:
        members = [i for i, request in enumerate(workload.requests) if request.priority == priority]
        times = [arrivals[i] for i in members]
        sums = [0.0, *accumulate(work[i] for i in members)]
        for index, request in enumerate(workload.requests):
            if request.priority > priority:
                until = request.arrival + (request.priority - priority) * ageing_interval
                bounds[index] += sums[bisect_left(times, until)] - sums[bisect_right(times, request.arrival)]
    return bounds


def _last_of_equals(arrivals: Sequence[float], values: Sequence[float]) -> list[float]:
    """Each value replaced by that of the last request with the same arrival: who came together may all go first."""
    return [values[bisect_right(arrivals, at) - 1] for at in arrivals]
