"""Queue and victim policies: small pure functions, registered by name.

A **queue policy** maps a waiting request to a key; the smallest key runs first. The first element is the *level*;
inside one level a request that ran before (swapped out or preempted) comes first, then the rest of the key, then the
order of first arrival. A key may only grow while the request waits (so that a heap with late re-evaluation is exact).

A **victim policy** maps a :class:`Victim` to a key; the smallest key is preempted first. It decides only among equals:
requests at their preemption bound come last, lower priority goes first, whatever the policy.

    @register_victim_policy("shortest_output")
    def shortest_output(victim):
        return (len(victim.request.generated_ids),)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from minillm.core.errors import UnknownPolicyError
from minillm.core.request import Request

Key = tuple[float, ...]


@dataclass(slots=True)
class QueueContext:
    """What a queue policy may know besides the request."""

    ageing_interval: float | None = None
    user_weights: Mapping[str, float] = field(default_factory=dict)
    served_tokens: dict[str, float] = field(default_factory=dict)
    """Tokens computed for each user so far, divided by the user's weight."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A running request that could be preempted, and what that would bring and cost."""

    request: Request
    blocks_freed: int
    """Blocks that nobody else holds."""
    restore_seconds: float
    """Estimated time to bring it back, by the cheaper way that is open to it (swap both ways, or recompute)."""


QueuePolicy = Callable[[Request, QueueContext], Key]
VictimPolicy = Callable[[Victim], Key]

QUEUE_POLICIES: dict[str, QueuePolicy] = {}
VICTIM_POLICIES: dict[str, VictimPolicy] = {}

P = TypeVar("P", bound=Callable)


_PER_USER: set[QueuePolicy] = set()


def register_queue_policy(name: str, *, per_user: bool = False) -> Callable[[P], P]:
    """Decorator: make a queue policy known under `name`.

    `per_user` promises that the order of one user's requests among themselves does not depend on `served_tokens`: then
    serving a user costs the queue one key, however many requests the user has waiting.
    """

    def register(policy: P) -> P:
        QUEUE_POLICIES[name] = policy
        if per_user:
            _PER_USER.add(policy)
        return policy

    return register


def register_victim_policy(name: str) -> Callable[[P], P]:
    """Decorator: make a victim policy known under `name`."""

    def register(policy: P) -> P:
        VICTIM_POLICIES[name] = policy
        return policy

    return register


def get_queue_policy(name: str) -> QueuePolicy:
    """The queue policy of this name, or :class:`UnknownPolicyError`."""
    if name not in QUEUE_POLICIES:
        raise UnknownPolicyError("scheduling_policy", name, sorted(QUEUE_POLICIES))
    return QUEUE_POLICIES[name]


def is_per_user(policy: QueuePolicy) -> bool:
    """Whether the policy was registered as one."""
    return policy in _PER_USER


def get_victim_policy(name: str) -> VictimPolicy:
    """The victim policy of this name, or :class:`UnknownPolicyError`."""
    if name not in VICTIM_POLICIES:
        raise UnknownPolicyError("victim_policy", name, sorted(VICTIM_POLICIES))
    return VICTIM_POLICIES[name]


# -- queue policies ----------------------------------------------------------------------------------------------------


@register_queue_policy("priority")
def priority(request: Request, context: QueueContext) -> Key:
    """Lower priority value first, first come first served inside it; optional ageing.

    With ageing a request's level falls by one per `ageing_interval` seconds of waiting. Since all levels fall at the
    same pace, comparing ``priority + arrival / interval`` once gives the same order at any time.
    """
    if context.ageing_interval is None:
        return (request.priority,)
    return (request.priority + request.arrival_time / context.ageing_interval,)


@register_queue_policy("fcfs")
def fcfs(request: Request, context: QueueContext) -> Key:
    """First come, first served; priorities do not matter for admission."""
    return (0,)


@register_queue_policy("shortest_prompt")
def shortest_prompt(request: Request, context: QueueContext) -> Key:
    """Inside a priority the shortest prompt first. Long prompts may starve: combine it with priorities."""
    return (request.priority, request.prompt_len)


@register_queue_policy("fair", per_user=True)
def fair(request: Request, context: QueueContext) -> Key:
    """Inside a priority the user with the fewest tokens served per weight first.

    The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): counters only
    grow, and a user who comes back from idleness is lifted to the least counter of those who wait.
    """
    return (request.priority, context.served_tokens.get(request.user, 0.0))


# -- victim policies ---------------------------------------------------------------------------------------------------


@register_victim_policy("fifo")
def fifo(victim: Victim) -> Key:
    """The oldest first."""
    return (victim.request.arrival_seq,)


@register_victim_policy("lifo")
def lifo(victim: Victim) -> Key:
    """The newest first: it has lost the least."""
    return (-victim.request.arrival_seq,)


@register_victim_policy("largest")
def largest(victim: Victim) -> Key:
    """The one that frees the most blocks first; the newest of equals."""
    return (-victim.blocks_freed, -victim.request.arrival_seq)


@register_victim_policy("cost_based")
def cost_based(victim: Victim) -> Key:
    """The one that is cheapest to bring back per block that it frees; the newest of equals."""
    per_block = victim.restore_seconds / victim.blocks_freed if victim.blocks_freed else float("inf")
    return (per_block, -victim.request.arrival_seq)
