"""Preemption: who has to go, and whether by swap or by recompute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from minillm.core.plan import SwapOut
from minillm.core.policies import Victim
from minillm.core.request import Request, RequestState

if TYPE_CHECKING:
    from minillm.core.base_scheduler import BaseScheduler
    from minillm.core.scheduler import Draft


def can_swap(scheduler: BaseScheduler, request: Request) -> bool:
    """Whether the swap pool and its limits take the request. A group that has not forked is always recomputed."""
    limit = scheduler.config.max_swapped_requests
    return (
        scheduler.config.preemption_mode != "recompute"
        and bool(request.block_table)
        and not request.pending_fork
        and len(request.block_table) <= len(scheduler.swap_pool.free_slots)
        and (limit is None or scheduler.num_swapped < limit)
    )


def restore_costs(scheduler: BaseScheduler, request: Request) -> tuple[float, float]:
    """Estimated seconds to bring the request back by (swap, recompute); swap is infinite where it is not open."""
    swap = float("inf")
    if can_swap(scheduler, request):
        swap = scheduler.costs.swap_seconds(len(request.block_table))
    return swap, scheduler.costs.recompute_seconds(request.kv_tokens)


def victims_in_order(scheduler: BaseScheduler, candidates: Iterable[Request]) -> list[Request]:
    """Candidates, first to go first: below the preemption bound, then lower priority, then by the victim policy."""
    bound = scheduler.config.max_preemptions

    def key(request: Request) -> tuple:
        swap, recompute = restore_costs(scheduler, request)
        seconds = swap if scheduler.config.preemption_mode == "swap" and swap < float("inf") else min(swap, recompute)
        victim = Victim(request, scheduler.blocks.exclusive_blocks(request), seconds)
        return (
            request.num_preemptions >= bound,
            -request.priority,
            *scheduler.victim_policy(victim),
            -request.arrival_seq,
            -request.choice,
        )

    return sorted(candidates, key=key)


def preempt(scheduler: BaseScheduler, victim: Request, reason: str, draft: Draft, now: float) -> None:
    """Take row and blocks from a running request and queue it again. Swap first, recompute as the fallback.

    Only without a plan in flight: then all its tokens are committed, and the blocks may be used again in this very
    plan, since a plan's swap-outs come before everything that writes.
    """
    swap, recompute = restore_costs(scheduler, victim)
    by_swap = can_swap(scheduler, victim) and (scheduler.config.preemption_mode == "swap" or swap <= recompute)
    blocks = victim.block_table
    scheduler.leave_running(victim)
    victim.num_preemptions += 1
    draft.preempted.add(victim.request_id)
    if by_swap:
        victim.swap_slots = scheduler.swap_pool.allocate(len(blocks))
        scheduler.num_swapped += 1
        scheduler.counters.preemptions_swap += 1
        scheduler.counters.swapped_out_blocks += len(blocks)
        draft.swap_outs.append(SwapOut(victim.request_id, blocks, list(victim.swap_slots)))
        victim.transition(RequestState.SWAPPED, now, scheduler.step, f"swapped out: {reason}")
    else:
        scheduler.counters.preemptions_recompute += 1
        scheduler.to_recompute(victim, now, f"to be recomputed: {reason}")
        for child in victim.members[1:]:
            scheduler.leave_running(child)
            child.transition(RequestState.PREEMPTED, now, scheduler.step, f"with its parent {victim.request_id}")
    scheduler.waiting.push(victim)
    scheduler.observer.on_preempt(victim, "swap" if by_swap else "recompute", reason, scheduler.step)
