"""The waiting queue: requests that are new, swapped out or preempted, in one total order."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from minillm.core.policies import QueueContext, QueuePolicy
from minillm.core.request import Request

MAX_IDLE_USERS = 16_384
"""Service counters that are kept for users without waiting requests; beyond it they are forgotten."""


class WaitingQueue:
    """A heap with lazy deletion and lazy re-evaluation of keys.

    The stored key is a lower bound of the present one (keys only grow, see :mod:`minillm.core.policies`), so when the
    smallest stored key proves to be current, it is the smallest of all.
    """

    def __init__(self, policy: QueuePolicy, context: QueueContext) -> None:
        self.context = context
        self._policy = policy
        self._heap: list[tuple[tuple, Request]] = []
        self._members: dict[str, Request] = {}
        self._users: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._members

    def __iter__(self) -> Iterator[Request]:
        """The requests, in no particular order."""
        return iter(self._members.values())

    def in_order(self) -> list[Request]:
        """The requests in the order in which they would run now."""
        return sorted(self._members.values(), key=self.key)

    def key(self, request: Request) -> tuple:
        """The request's place in the total order; smaller runs first. Also defined for running requests."""
        level, *rest = self._policy(request, self.context)
        return (level, not request.started, *rest, request.arrival_seq, request.choice)

    def push(self, request: Request) -> None:
        """Add a request. A policy that raises leaves the queue as it was."""
        self._lift_user(request.user)
        request.order_key = self.key(request)
        self._members[request.request_id] = request
        self._users[request.user] += 1
        heapq.heappush(self._heap, (request.order_key, request))

    def _lift_user(self, user: str) -> None:
        # A user who was idle must not spend the credit of that time: start at the least counter of those who wait.
        served = self.context.served_tokens
        if len(served) > MAX_IDLE_USERS + len(self._users):
            for idle in [other for other in served if other not in self._users]:
                del served[idle]
        if self._users and user not in self._users:
            floor = min(served.get(other, 0.0) for other in self._users)
            served[user] = max(served.get(user, 0.0), floor)

    def head(self) -> Request | None:
        """The first request in the total order, or None."""
        heap = self._heap
        while heap:
            stored, request = heap[0]
            if self._members.get(request.request_id) is not request or request.order_key is not stored:
                heapq.heappop(heap)
                continue
            current = self.key(request)
            if current == stored:
                return request
            request.order_key = current
            heapq.heapreplace(heap, (current, request))
        return None

    def remove(self, request: Request) -> None:
        """Take a request out; its heap entry goes when it comes to the top."""
        del self._members[request.request_id]
        self._users[request.user] -= 1
        if not self._users[request.user]:
            del self._users[request.user]
        if len(self._heap) > 2 * len(self._members) + 64:
            live = self._members
            self._heap = [
                item for item in self._heap if live.get(item[1].request_id) is item[1] and item[1].order_key is item[0]
            ]
            heapq.heapify(self._heap)
