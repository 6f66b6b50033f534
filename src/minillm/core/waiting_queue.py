"""The waiting queue: requests that are new, swapped out or preempted, in one total order."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from minillm.core.policies import QueueContext, QueuePolicy, is_per_user
from minillm.core.request import Request

MAX_IDLE_USERS = 16_384
"""Service counters that are kept for users without waiting requests; beyond it they are forgotten."""


class WaitingQueue:
    """Heaps of requests below a heap of their heads, with lazy deletion and lazy re-evaluation of keys.

    A stored key is a lower bound of the present one (keys only grow, see :mod:`minillm.core.policies`), so when the
    smallest stored key proves to be current, it is the smallest of all. A policy that is *per user* has a heap for each
    user, whose order never changes: when a user is served, one key changes and not those of all that the user has
    waiting. Other policies have one heap.
    """

    def __init__(self, policy: QueuePolicy, context: QueueContext) -> None:
        self.context = context
        self._policy = policy
        self._per_user = is_per_user(policy)
        # Inside a per-user heap what users were served must not count: it would differ with the time of the push.
        self._inside = replace(context, served_tokens={}) if self._per_user else context
        self._heaps: dict[str, list[tuple[tuple, Request]]] = {}
        self._live: Counter[str] = Counter()
        """Requests of each heap, those that are only entries still left out."""
        self._heads: list[tuple[tuple, str]] = []
        """Heap of (key of a heap's first request, name of the heap)."""
        self._head_keys: dict[str, tuple] = {}
        """The one entry of `_heads` that counts, for each heap."""
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

    def ahead_of(self, request: Request) -> list[Request]:
        """The requests that would run before this one, in no particular order: O(n), without sorting the queue."""
        mine = self.key(request)
        return [other for other in self._members.values() if self.key(other) < mine]

    def first(self, count: int) -> list[Request]:
        """About the first `count` requests, without sorting a long queue: O(count log count), and a key per user.

        For displays: where ageing has changed the order since the keys were stored, it lags behind :meth:`in_order`.
        """
        found: list[Request] = []
        frontier = [(self.key(heap[0][1]), name, 0) for name, heap in self._heaps.items() if heap]
        heapq.heapify(frontier)
        while frontier and len(found) < count:
            _, name, at = heapq.heappop(frontier)
            heap = self._heaps[name]
            if self._is_live(*heap[at]):
                found.append(heap[at][1])
            for below in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heapq.heappush(frontier, (self.key(heap[below][1]), name, below))
        return found

    def key(self, request: Request) -> tuple:
        """The request's place in the total order; smaller runs first. Also defined for running requests."""
        return self._key(request, self.context)

    def _key(self, request: Request, context: QueueContext) -> tuple:
        level, *rest = self._policy(request, context)
        return (level, not request.started, *rest, request.arrival_seq, request.choice)

    def _heap_of(self, request: Request) -> str:
        return request.user if self._per_user else ""

    def push(self, request: Request) -> None:
        """Add a request. A policy that raises leaves the queue as it was."""
        self._lift_user(request.user)
        inside, key = self._key(request, self._inside), self.key(request)
        request.order_key = inside
        self._members[request.request_id] = request
        self._users[request.user] += 1
        name = self._heap_of(request)
        self._live[name] += 1
        heap = self._heaps.setdefault(name, [])
        heapq.heappush(heap, (inside, request))
        if heap[0][1] is request:
            self._put_head(name, key)

    def _put_head(self, name: str, key: tuple) -> None:
        self._head_keys[name] = key
        heapq.heappush(self._heads, (key, name))
        if len(self._heads) > 2 * len(self._head_keys) + 64:
            self._heads = [(key, name) for name, key in self._head_keys.items()]
            heapq.heapify(self._heads)

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
        heads = self._heads
        while heads:
            stored, name = heads[0]
            if self._head_keys.get(name) is not stored:
                heapq.heappop(heads)
                continue
            request = self._first_of(name)
            current = self.key(request)
            if current == stored:
                return request
            self._head_keys[name] = current
            heapq.heapreplace(heads, (current, name))
        return None

    def _first_of(self, name: str) -> Request:
        """The first request of a heap that has one."""
        heap = self._heaps[name]
        while True:
            stored, request = heap[0]
            if not self._is_live(stored, request):
                heapq.heappop(heap)
                continue
            current = self._key(request, self._inside)
            if current == stored:
                return request
            request.order_key = current
            heapq.heapreplace(heap, (current, request))

    def _is_live(self, stored: tuple, request: Request) -> bool:
        return self._members.get(request.request_id) is request and request.order_key is stored

    def remove(self, request: Request) -> None:
        """Take a request out; its heap entry goes when it comes to the top."""
        del self._members[request.request_id]
        self._users[request.user] -= 1
        if not self._users[request.user]:
            del self._users[request.user]
        name = self._heap_of(request)
        self._live[name] -= 1
        if not self._live[name]:
            del self._live[name], self._heaps[name], self._head_keys[name]
        elif len(self._heaps[name]) > 2 * self._live[name] + 64:
            self._heaps[name] = [entry for entry in self._heaps[name] if self._is_live(*entry)]
            heapq.heapify(self._heaps[name])
