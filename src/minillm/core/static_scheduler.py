"""Static batching, the classic baseline: a batch is formed, runs to its last member, then the next is formed."""

from __future__ import annotations

from minillm.core.request import Request, RequestState
from minillm.core.scheduler import ContinuousScheduler, Draft


class StaticScheduler(ContinuousScheduler):
    """The same machine with another admission rule.

    A batch takes requests from the head of the queue while there is a row for each and the pool can hold all of them
    at their full length (prompt + max_tokens), so nothing is preempted (but in one case: a group of n > 1 that
    alone outgrows the pool). Once a step has budget left and no further member was added, the batch is closed;
    nobody joins until its last member has ended.
    """

    _forming = False

    def _make_room(self, draft: Draft, now: float) -> bool:
        return self._make_room_for_decodes(draft, now)

    def _admit(self, draft: Draft, now: float) -> None:
        if self.blocks.num_quarantined:
            return  # the last batch's blocks come back with the plan in flight
        if not self.running:
            self._forming = True
        while self._forming and (head := self.waiting.head()) is not None:
            if draft.budget <= 0:
                self._note_wait(head, "budget", "the step's token budget is spent", now)
                return
            if head.state is RequestState.SWAPPED or len(head.members) > len(self._free_rows):
                break
            if self.running and not self._fits_at_full_length(head):
                break
            self._admit_one(head, self._match(head), draft, now)
        self._forming = False
        if head := self.waiting.head():
            self._note_wait(head, "batch", "the running batch to end", now)

    def _fits_at_full_length(self, head: Request) -> bool:
        return sum(map(self._full_blocks, [*self.running, head])) <= self.config.num_blocks

    def _full_blocks(self, request: Request) -> int:
        """Blocks that the request holds at its end (all members of a group that has not forked)."""
        assert request.max_tokens is not None
        if request.child_of is not None and request.child_of.pending_fork:
            return 0  # counted with its parent
        full = self._blocks_for(request.prompt_len + max(request.max_tokens - 1, 0))
        return full * len(request.members)
