"""Faults of the kinds that real engines had, planted into the real scheduler: the simulation must notice each.

Each function breaks one thing by monkeypatching and says in its docstring what a user would have seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pytest import MonkeyPatch

from minillm.core import prefix_cache
from minillm.core.base_scheduler import BaseScheduler
from minillm.core.block_manager import KVBlockManager
from minillm.core.in_flight import InFlight
from minillm.core.plan import StepEvents, SwapIn
from minillm.core.prefix_cache import CachedBlock, PrefixCache
from minillm.core.request import Request, RequestState
from minillm.core.scheduler import ContinuousScheduler, Draft
from minillm.core.waiting_queue import WaitingQueue

FAULTS: dict[str, Callable[[MonkeyPatch], None]] = {}


def fault(plant: Callable[[MonkeyPatch], None]) -> Callable[[MonkeyPatch], None]:
    """Register a fault under its function's name."""
    FAULTS[plant.__name__] = plant
    return plant


@fault
def lost_release(patch: MonkeyPatch) -> None:
    """Capacity shrinks for ever: a table's last block is never given back."""
    original = KVBlockManager.release_table

    def release_table(self: KVBlockManager, request: Request) -> None:
        request.block_table = request.block_table[:-1] if len(request.block_table) > 1 else request.block_table
        original(self, request)

    patch.setattr(KVBlockManager, "release_table", release_table)


@fault
def double_free(patch: MonkeyPatch) -> None:
    """Two requests get the same block: it is on the free list twice."""
    original = KVBlockManager.release_table

    def release_table(self: KVBlockManager, request: Request) -> None:
        last = request.block_table[-1:]
        original(self, request)
        self.free_blocks.extend(block for block in last if block in self.free_blocks)

    patch.setattr(KVBlockManager, "release_table", release_table)


@fault
def published_failed_row(patch: MonkeyPatch) -> None:
    """Everybody with this prefix reads NaN: the block of a failed row goes into the prefix cache."""
    original = BaseScheduler._publish_filled

    def publish(self: BaseScheduler, record: InFlight, outcome: Any) -> None:
        original(self, record, replace(outcome, failures={}))

    patch.setattr(BaseScheduler, "_publish_filled", publish)


@fault
def overtaken_head(patch: MonkeyPatch) -> None:
    """A large request starves: whoever fits is admitted before it."""
    patch.setattr(WaitingQueue, "head", lambda self: self.in_order()[-1] if len(self) else None)


@fault
def retained_on_cancel(patch: MonkeyPatch) -> None:
    """Each client that hangs up takes a block along: an extra reference is never released."""
    original = BaseScheduler.cancel

    def cancel(self: BaseScheduler, request_id: str, now: float, reason: str = "cancelled") -> bool:
        request = self.get(request_id)
        if request is not None and request.block_table:
            self.blocks.retain(request.block_table[0])
        return original(self, request_id, now, reason)

    patch.setattr(BaseScheduler, "cancel", cancel)


@fault
def copy_on_write_skipped(patch: MonkeyPatch) -> None:
    """Choices overwrite each other's KV in the shared last block."""
    patch.setattr(KVBlockManager, "copy_on_write", lambda self, request: None)


@fault
def copy_on_write_without_copy(patch: MonkeyPatch) -> None:
    """A forked choice has its own block, but nobody copied the prompt's tail into it."""
    original = ContinuousScheduler._copy_shared_tails

    def copy_tails(self: ContinuousScheduler, draft: Draft) -> None:
        original(self, draft)
        draft.copies.clear()

    patch.setattr(ContinuousScheduler, "_copy_shared_tails", copy_tails)


@fault
def swap_slot_leaked(patch: MonkeyPatch) -> None:
    """The swap pool runs dry: one slot of each swapped request is lost."""
    original = BaseScheduler.drop_swap_slots

    def drop(self: BaseScheduler, request: Request) -> None:
        request.swap_slots = request.swap_slots[1:]
        original(self, request)

    patch.setattr(BaseScheduler, "drop_swap_slots", drop)


@fault
def swap_out_without_copy(patch: MonkeyPatch) -> None:
    """A swapped request comes back with what lay in the swap slots before."""
    original = ContinuousScheduler._issue

    def issue(self: ContinuousScheduler, draft: Draft) -> Any:
        draft.swap_outs.clear()
        return original(self, draft)

    patch.setattr(ContinuousScheduler, "_issue", issue)


@fault
def swap_in_blocks_in_wrong_order(patch: MonkeyPatch) -> None:
    """A swapped request comes back with its blocks permuted."""
    original = ContinuousScheduler._swap_in

    def swap_in(self: ContinuousScheduler, request: Request, draft: Draft, now: float) -> None:
        original(self, request, draft, now)
        draft.swap_ins = [SwapIn(move.request_id, move.swap_slots[::-1], move.blocks) for move in draft.swap_ins]

    patch.setattr(ContinuousScheduler, "_swap_in", swap_in)


@fault
def failed_swap_ignored(patch: MonkeyPatch) -> None:
    """After a failed copy the request goes on with garbage."""
    patch.setattr(BaseScheduler, "_on_failed_swap", lambda self, request_id, record, now: None)


@fault
def quarantine_skipped(patch: MonkeyPatch) -> None:
    """A block that the step in flight still reads is given to somebody else."""
    original = KVBlockManager.release_table

    def release_table(self: KVBlockManager, request: Request) -> None:
        step, self.quarantine_step = self.quarantine_step, None
        original(self, request)
        self.quarantine_step = step

    patch.setattr(KVBlockManager, "release_table", release_table)


@fault
def budget_exceeded_by_one(patch: MonkeyPatch) -> None:
    """The runner's buffers overflow by one token."""
    original = ContinuousScheduler._plan_decodes

    def plan_decodes(self: ContinuousScheduler, draft: Draft) -> None:
        original(self, draft)
        draft.budget += 1

    patch.setattr(ContinuousScheduler, "_plan_decodes", plan_decodes)


@fault
def duplicate_delivery(patch: MonkeyPatch) -> None:
    """A client sees a token twice."""
    original = BaseScheduler.take_events

    def take_events(self: BaseScheduler) -> StepEvents:
        events = original(self)
        if len(events.tokens) > 2:
            tokens = events.tokens
            tokens.append(tokens.request_ids[-1], tokens.indices[-1], tokens.token_ids[-1])
        return events

    patch.setattr(BaseScheduler, "take_events", take_events)


@fault
def discarded_row_delivered(patch: MonkeyPatch) -> None:
    """Tokens come after the end of a request: rows in flight of ended requests count."""
    patch.setattr(InFlight, "discard", lambda self, request, may_decode=True: None)


@fault
def rebuild_of_the_prompt_only(patch: MonkeyPatch) -> None:
    """After a recompute the answer has lost its middle: generated tokens were not rebuilt."""

    def num_tokens(self: Request) -> int:
        lost = self.state is RequestState.PREEMPTED
        return self.prompt_len + (0 if lost else len(self.generated_ids))

    patch.setattr(Request, "num_tokens", property(num_tokens))


@fault
def hit_of_the_whole_prompt(patch: MonkeyPatch) -> None:
    """A prompt that is cached to its end leaves nothing to compute and no row to sample."""
    original = ContinuousScheduler._match

    def match(self: ContinuousScheduler, request: Request) -> list[CachedBlock]:
        found = original(self, request)
        if found:
            return self.prefix_cache.match(request, request.num_tokens // self.config.block_size)
        return found

    patch.setattr(ContinuousScheduler, "_match", match)


@fault
def salt_ignored(patch: MonkeyPatch) -> None:
    """Users with different salts share cached prefixes."""
    patch.setattr(prefix_cache, "extra_keys", lambda request: b"()")


@fault
def token_comparison_skipped(patch: MonkeyPatch) -> None:
    """A hash collision gives one user another's KV (with a hash that always collides)."""

    def match(self: PrefixCache, request: Request, max_blocks: int) -> list[CachedBlock]:
        found: list[CachedBlock] = []
        for i in range(max_blocks):
            entry = self._index.get(self.extend_keys(request, i + 1)[i])
            if entry is None or entry.quarantined:
                break
            found.append(entry)
        return found

    patch.setattr(PrefixCache, "match", match)


@fault
def hit_not_retained(patch: MonkeyPatch) -> None:
    """A cached block is evicted while a request that hit it still reads it."""

    def adopt(self: KVBlockManager, request: Request, entries: list[CachedBlock]) -> None:
        request.block_table = [entry.block for entry in entries]
        request.published = list(entries)

    patch.setattr(KVBlockManager, "adopt_cached", adopt)


@fault
def evicted_entry_still_found(patch: MonkeyPatch) -> None:
    """A prefix is found in a block that holds something else by now."""
    original = PrefixCache._forget

    def forget(self: PrefixCache, entry: CachedBlock) -> None:
        original(self, entry)
        entry.dead = False
        self._index[entry.key] = entry

    patch.setattr(PrefixCache, "_forget", forget)


@fault
def published_one_step_early(patch: MonkeyPatch) -> None:
    """A block is shared before the step that fills it has run."""
    original = ContinuousScheduler._issue

    def issue(self: ContinuousScheduler, draft: Draft) -> Any:
        plan = original(self, draft)
        for request, index in draft.fills:
            if (index + 1) * self.config.block_size <= request.num_tokens:
                self.prefix_cache.publish(request, index, request.block_table[index])
        return plan

    patch.setattr(ContinuousScheduler, "_issue", issue)


@fault
def row_freed_twice(patch: MonkeyPatch) -> None:
    """Two requests share a sequence slot."""
    original = BaseScheduler.leave_running

    def leave(self: BaseScheduler, request: Request) -> None:
        row = request.row
        original(self, request)
        self._free_rows.append(row)

    patch.setattr(BaseScheduler, "leave_running", leave)


@fault
def one_token_too_many(patch: MonkeyPatch) -> None:
    """The length limit is off by one."""
    original = BaseScheduler.submit

    def submit(self: BaseScheduler, request: Request, now: float) -> None:
        original(self, request, now)
        request.last_position += 1
        if request.max_tokens:
            request.max_tokens += 1

    patch.setattr(BaseScheduler, "submit", submit)


@fault
def dropped_tokens_kept(patch: MonkeyPatch) -> None:
    """Text after a stop string stays in the result."""
    original = BaseScheduler.finish

    def finish(self: BaseScheduler, request_id: str, output_index: int, now: float, reason: str = "stop") -> bool:
        request = self.get(request_id)
        last = len(request.generated_ids) - 1 if request is not None else output_index
        return original(self, request_id, max(last, output_index), now, reason)

    patch.setattr(BaseScheduler, "finish", finish)


@fault
def table_update_forgotten(patch: MonkeyPatch) -> None:
    """The device's block table misses a new block and writes somewhere else."""
    original = ContinuousScheduler._issue

    def issue(self: ContinuousScheduler, draft: Draft) -> Any:
        if len(draft.table_updates) > 1:
            draft.table_updates.pop()
        return original(self, draft)

    patch.setattr(ContinuousScheduler, "_issue", issue)


@fault
def head_is_a_victim(patch: MonkeyPatch) -> None:
    """Two large requests preempt each other for ever: the first of all is not protected."""
    from minillm.core import scheduler as module

    original = module.victims_in_order

    def victims(self: BaseScheduler, candidates: Any) -> list[Request]:
        everyone = list(candidates)
        if len(everyone) + 1 == len(self.running) and not self.prefilling:
            everyone = list(self.running)
        return sorted(original(self, everyone), key=self.waiting.key)

    patch.setattr(module, "victims_in_order", victims)
