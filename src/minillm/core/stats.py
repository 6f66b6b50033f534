"""Counters that the scheduler keeps, and a snapshot of its gauges."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from minillm.core.request import RequestState

if TYPE_CHECKING:
    from minillm.core.base_scheduler import BaseScheduler


@dataclass(slots=True)
class Counters:
    """Totals since the start. Tokens are tokens, blocks are blocks, the rest are events."""

    steps: int = 0
    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    expired: int = 0
    admissions: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    failed_swaps: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    dropped_tokens: int = 0
    discarded_rows: int = 0
    forks: int = 0
    copies_on_write: int = 0
    drains: int = 0

    def count_end(self, state: RequestState) -> None:
        """One request ended in this state."""
        if state is RequestState.FINISHED:
            self.finished += 1
        elif state is RequestState.CANCELLED:
            self.cancelled += 1
        else:
            self.failed += 1


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges of one moment and all counters.

    Blocks: ``free + evictable + quarantined + referenced == total``; ``shared`` are the referenced ones that more
    than one block table holds. ``internal_fragmentation`` is the share of slots in running requests' blocks that hold
    no token; ``utilisation`` the share of the pool that is referenced.
    """

    waiting: int
    running: int
    prefilling: int
    decoding: int
    swapped: int
    plans_in_flight: int
    blocks_total: int
    blocks_free: int
    blocks_evictable: int
    blocks_quarantined: int
    blocks_referenced: int
    blocks_shared: int
    swap_slots_total: int
    swap_slots_used: int
    utilisation: float
    internal_fragmentation: float
    prefix_hits: int
    prefix_misses: int
    prefix_published: int
    prefix_evictions: int
    max_model_len: int
    max_model_len_reduced: bool
    counters: Counters

    @classmethod
    def of(cls, scheduler: BaseScheduler) -> SchedulerStats:
        """The snapshot of a scheduler."""
        blocks, cache = scheduler.blocks, scheduler.prefix_cache
        counters = Counters(**{f.name: getattr(scheduler.counters, f.name) for f in fields(Counters)})
        return cls(
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            prefilling=len(scheduler.prefilling),
            decoding=len(scheduler.decoding),
            swapped=scheduler.num_swapped,
            plans_in_flight=scheduler.num_in_flight,
            blocks_total=blocks.num_blocks,
            blocks_free=len(blocks.free_blocks),
            blocks_evictable=cache.num_evictable,
            blocks_quarantined=blocks.num_quarantined,
            blocks_referenced=blocks.num_referenced,
            blocks_shared=blocks.num_shared,
            swap_slots_total=scheduler.swap_pool.num_slots,
            swap_slots_used=scheduler.swap_pool.num_used,
            utilisation=blocks.utilisation,
            internal_fragmentation=blocks.internal_fragmentation(scheduler.running),
            prefix_hits=cache.counters.hits,
            prefix_misses=cache.counters.misses,
            prefix_published=cache.counters.published,
            prefix_evictions=cache.counters.evictions,
            max_model_len=scheduler.max_model_len,
            max_model_len_reduced=scheduler.config.max_model_len_reduced,
            counters=counters,
        )
