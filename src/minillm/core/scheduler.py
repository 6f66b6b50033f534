"""Continuous batching: requests join and leave between steps; prefill chunks and decodes share one token budget.

A step is planned in this order, so that whoever is preempted was never put into the batch:

1. *make room*: preempt for running decodes, for a stuck prefill, for a waiting request of higher priority;
2. swap in the head of the queue while it is a swapped-out request;
3. decodes: one token of every decoding request;
4. prefill chunks of running requests, in the total order;
5. admissions from the head of the queue, strictly: nobody overtakes the head.

With a plan in flight nothing is preempted or swapped in: if step 1 or 2 would, the answer is DRAIN and nothing has
been changed. A fork changes reference counts only and happens at the commit that ends the parent's prefill; its
copies-on-write go into the next plan, in front of the writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minillm.core.base_scheduler import BaseScheduler
from minillm.core.errors import InvariantViolation
from minillm.core.in_flight import InFlight
from minillm.core.plan import (
    BlockCopy,
    DecodeBatch,
    NoPlan,
    PrefillChunk,
    RowAssignment,
    StepPlan,
    SwapIn,
    SwapOut,
    TableUpdate,
)
from minillm.core.preemption import preempt, victims_in_order
from minillm.core.prefix_cache import CachedBlock
from minillm.core.request import Request, RequestState


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    decodes: DecodeBatch = field(default_factory=DecodeBatch)
    decode_requests: list[Request] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    last_rows: list[Request] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    chunk_requests: list[tuple[Request, list[Request]]] = field(default_factory=list)
    fills: list[tuple[Request, int]] = field(default_factory=list)
    swap_outs: list[SwapOut] = field(default_factory=list)
    swap_ins: list[SwapIn] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    assignments: list[RowAssignment] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    room_made_for: Request | None = None
    """The head of the queue that others were preempted for."""
    budget: int = 0
    """Prefill tokens that this step may still compute."""

    @property
    def is_empty(self) -> bool:
        """Whether the plan would do nothing."""
        return not (self.decode_requests or self.prefills or self.swap_outs or self.swap_ins or self.copies)


class ContinuousScheduler(BaseScheduler):
    """Iteration-level scheduling; see the module's text."""

    def schedule(self, now: float) -> StepPlan | NoPlan:
        """Plan the next step. May be called with one plan in flight.

        Returns a plan (which must be executed and committed, in order), ``NoPlan.DRAIN`` if the plan in flight has to
        commit first, or ``NoPlan.IDLE`` if nothing can be done before something else happens.
        """
        if len(self._in_flight) > 1:
            raise InvariantViolation("two plans are in flight; commit the oldest first")
        self._expire_deadlines(now)
        draft = Draft()
        if not self._make_room(draft, now):
            self.counters.drains += 1
            self.observer.on_schedule(NoPlan.DRAIN, now)
            return NoPlan.DRAIN
        self._plan_swap_ins(draft, now)
        self._plan_decodes(draft)
        self._plan_prefills(draft, now)
        self._admit(draft, now)
        result = NoPlan.IDLE if draft.is_empty else self._issue(draft)
        self.observer.on_schedule(result, now)
        return result

    def _issue(self, draft: Draft) -> StepPlan:
        plan = StepPlan(
            step=self.step,
            decodes=draft.decodes,
            prefills=draft.prefills,
            swap_outs=draft.swap_outs,
            swap_ins=draft.swap_ins,
            copies=draft.copies,
            assignments=draft.assignments,
            table_updates=draft.table_updates,
        )
        self._in_flight.append(
            InFlight(plan, draft.decode_requests, draft.chunk_requests, draft.outputs, draft.last_rows, draft.fills)
        )
        self.blocks.quarantine_step = plan.step
        self.step += 1
        return plan

    # -- 1. room ------------------------------------------------------------------------------------------------------

    def _make_room(self, draft: Draft, now: float) -> bool:
        """Preempt whom the step cannot carry. False, with nothing changed, if that has to wait for a commit."""
        return (
            self._make_room_for_decodes(draft, now)
            and self._make_room_for_prefills(draft, now)
            and self._make_room_for_head(draft, now)
        )

    def _decode_demand(self) -> int:
        """Blocks that the next step's decodes need: new last blocks, and copies of shared ones before a write."""
        demand = self.decoding.num_starting_block
        if self.unshared_tails:
            tails = {r.block_table[-1] for r in self.unshared_tails if r.kv_tokens % self.config.block_size}
            demand += sum(self.blocks.ref_counts[tail] - 1 for tail in tails)
        return demand

    def _make_room_for_decodes(self, draft: Draft, now: float) -> bool:
        while self._decode_demand() > self.blocks.num_available:
            if self._in_flight:
                return False
            head = min(self.running, key=self.waiting.key)
            candidates = [r for r in self._preemptible() if r is not head]
            if not candidates:
                raise InvariantViolation(f"{head!r} alone does not fit the pool")
            preempt(self, victims_in_order(self, candidates)[0], "a running request needs a block", draft, now)
        return True

    def _preemptible(self) -> list[Request]:
        """Running requests, without children that have nothing of their own yet."""
        return [r for r in self.running if r.child_of is None or not r.child_of.pending_fork]

    def _make_room_for_prefills(self, draft: Draft, now: float) -> bool:
        """The first prefill in the total order must not be held up by lower priorities, nor prefills by each other."""
        while self.prefilling:
            first = min(self.prefilling, key=self.waiting.key)
            room = self.blocks.num_available - self._decode_demand()
            if self.blocks.blocks_needed(first, first.kv_tokens + 1) <= room:
                return True
            key = self.waiting.key(first)
            candidates = [r for r in self._preemptible() if r.priority > first.priority and self.waiting.key(r) > key]
            if not candidates and not self.decoding:
                candidates = [r for r in self.prefilling if r is not first]
            if not candidates:
                return True
            if self._in_flight:
                return False
            preempt(self, victims_in_order(self, candidates)[0], f"{first.request_id} prefills", draft, now)
        return True

    def _make_room_for_head(self, draft: Draft, now: float) -> bool:
        """A waiting request of higher priority takes blocks and rows from lower ones, if that lets it run now."""
        head = self.waiting.head()
        if head is None or head.request_id in draft.preempted:
            return True
        swapped = head.state is RequestState.SWAPPED
        outranks = any(priority > head.priority for priority in self.running_priorities)
        if not (swapped or outranks):
            return True
        rows_short = self._rows_short(head)
        blocks_short = self._blocks_short(head, self._reusable(head), self._decode_demand())
        if rows_short <= 0 and blocks_short <= 0:
            return not (self._in_flight and swapped)
        victims = self._victims_for(head, rows_short, blocks_short) if outranks else []
        if not victims:
            return True
        if self._in_flight:
            return False
        for victim in victims:
            preempt(self, victim, f"{head.request_id} has priority {head.priority}", draft, now)
        draft.room_made_for = head
        return True

    def _victims_for(self, head: Request, rows_short: int, blocks_short: int) -> list[Request]:
        """Lower-priority requests whose preemption lets the head run; empty if even all of them would not do.

        A victim gives back the blocks that nobody else holds (but for those that the head is to share: they are
        counted already) and those that its prefill was promised. If nobody is left running, no headroom is needed.
        A request at its preemption bound keeps its place: it makes room for running requests only.
        """
        key = self.waiting.key(head)
        shared = {entry.block for entry in self._reusable(head)}
        left = len(self.running)
        candidates = [
            request
            for request in self._preemptible()
            if request.priority > head.priority
            and request.num_preemptions < self.config.max_preemptions
            and self.waiting.key(request) > key
        ]
        victims = []
        for request in victims_in_order(self, candidates):
            if rows_short <= 0 and blocks_short <= 0:
                break
            victims.append(request)
            rows_short -= len(request.members)
            blocks_short -= self.blocks.exclusive_blocks(request, shared)
            if request in self.prefilling:
                blocks_short -= self.blocks.blocks_needed(request, request.prefill_target)
            left -= len(request.members)
            if not left:
                blocks_short -= self._headroom(head)
        return victims if rows_short <= 0 and blocks_short <= 0 else []

    # -- what an admission needs ------------------------------------------------------------------------------------

    def _rows_short(self, request: Request) -> int:
        """Rows that are missing for the request to be admitted or resumed now; <= 0 is enough."""
        return len(request.members) - len(self._free_rows)

    def _blocks_short(
        self, request: Request, entries: list[CachedBlock], demand: int, *, watermark: bool = True
    ) -> int:
        """Blocks that are missing for the request to be admitted or resumed now; <= 0 is enough.

        Counted are all its committed tokens, also where only a part of them was swapped out: what comes back must be
        able to go on. `entries`: what it can take over (:meth:`_reusable`); `demand`: blocks that this step's decodes
        have still to take.
        """
        needed = self._blocks_for(request.num_tokens) - len(entries)
        revived = sum(1 for entry in entries if not entry.referenced)
        room = self.blocks.num_available - revived - demand - self._reserved()
        if watermark:
            room -= self._headroom(request)
        return needed - room

    def _reusable(self, request: Request) -> list[CachedBlock]:
        """Cached blocks that an admission or a swap-in of the request takes over as they are."""
        if request.state is RequestState.SWAPPED:
            return list(self._cached_on_device(request).values())
        return self._match(request)

    def _match(self, request: Request) -> list[CachedBlock]:
        """Cached blocks that the request can start from: at least its last token is left to compute.

        `prompt_logprobs` need every prompt position computed, so those requests skip the lookup.
        """
        if not self.config.enable_prefix_caching:
            return []
        if request.sampling_params.prompt_logprobs is not None and request.prompt_scored < request.prompt_len:
            return []
        return self.prefix_cache.match(request, (request.num_tokens - 1) // self.config.block_size)

    def _cached_on_device(self, request: Request) -> dict[int, CachedBlock]:
        """Blocks of a swapped-out request that are still cached, by index: they need no copy."""
        return {
            index: entry
            for index, entry in enumerate(request.published)
            if not entry.dead and not entry.quarantined and index < len(request.swap_slots)
        }

    def _reserved(self) -> int:
        """Blocks that running prefills were promised at their admission and have not taken yet."""
        return sum(self.blocks.blocks_needed(request, request.prefill_target) for request in self.prefilling)

    def _headroom(self, request: Request) -> int:
        """Blocks that an admission leaves for running decodes. None if nothing runs: the request fits alone.

        One that comes back after a preemption leaves more, so that it is not thrown out again at once.
        """
        if not self.running:
            return 0
        again = len(self.decoding) // 4 if request.started else 0
        return self.config.watermark_blocks + again + len(request.members) - 1

    # -- 2. swap-ins --------------------------------------------------------------------------------------------------

    def _plan_swap_ins(self, draft: Draft, now: float) -> None:
        while not self._in_flight:
            head = self.waiting.head()
            if head is None or head.state is not RequestState.SWAPPED or head.request_id in draft.preempted:
                return
            watermark = draft.room_made_for is not head
            entries = self._reusable(head)
            blocks_short = self._blocks_short(head, entries, self._decode_demand(), watermark=watermark)
            if self._rows_short(head) > 0 or blocks_short > 0:
                return
            self._swap_in(head, draft, now)

    def _swap_in(self, request: Request, draft: Draft, now: float) -> None:
        cached = self._cached_on_device(request)
        for entry in cached.values():
            self.blocks.retain(entry.block)
        missing = [index for index in range(len(request.swap_slots)) if index not in cached]
        fresh = dict(zip(missing, self.blocks.allocate(len(missing)), strict=True))
        request.block_table = [
            cached[index].block if index in cached else fresh[index] for index in range(len(request.swap_slots))
        ]
        if fresh:
            slots = [request.swap_slots[index] for index in missing]
            draft.swap_ins.append(SwapIn(request.request_id, slots, list(fresh.values())))
        self.counters.swapped_in_blocks += len(fresh)
        self.drop_swap_slots(request)
        self._start(request, draft)
        if request.kv_tokens >= request.prefill_target:
            request.transition(RequestState.DECODING, now, self.step, "swapped in")
            self.decoding.add(request)
        else:
            request.transition(RequestState.PREFILLING, now, self.step, "swapped in")
            self.prefilling.append(request)

    def _start(self, request: Request, draft: Draft) -> None:
        """Take the request out of the queue and give it a row (and each child of a group that has not forked one)."""
        self.waiting.remove(request)
        self._head_wait = None
        request.started = True
        for member in request.members:
            member.row = self._free_rows.pop()
            self.running[member] = None
            self.running_priorities[member.priority] += 1
            draft.assignments.append(
                RowAssignment(
                    row=member.row,
                    request_id=member.request_id,
                    sampling_params=member.sampling_params,
                    seed=member.seed,
                    choice=member.choice,
                    input_ids=member.input_ids,
                    output_ids=list(member.generated_ids),
                )
            )
        if request.block_table:
            draft.table_updates.append(TableUpdate(request.row, 0, list(request.block_table)))

    # -- 3. decodes ---------------------------------------------------------------------------------------------------

    def _plan_decodes(self, draft: Draft) -> None:
        """One token of every decoding request. The hot path: see :mod:`minillm.core.decode_set`."""
        members = self.decoding
        draft.budget = self.config.max_num_batched_tokens - len(members)
        if self.config.max_prefill_tokens_per_step is not None:
            draft.budget = min(draft.budget, self.config.max_prefill_tokens_per_step)
        if not members:
            return
        if self._in_flight:
            # What the plan in flight samples is not known yet; only freshly forked members were not in it.
            token_ids = [-1] * len(members)
            for request in self.unshared_tails:
                if request in members:
                    token_ids[request.decode_index] = request.generated_ids[-1]
        else:
            token_ids = [output[-1] for output in members.outputs]
        self._copy_shared_tails(draft)
        self._extend_tables(members.starting_block(), draft)
        size, positions = self.config.block_size, members.positions
        draft.fills = [(r, positions[r.decode_index] // size) for r in members.filling_block()]
        draft.decode_requests = list(members.requests)
        draft.outputs = list(members.outputs)
        draft.decodes, draft.last_rows = members.advance(token_ids)

    def _extend_tables(self, requests: list[Request], draft: Draft) -> None:
        """One more block for each of these decoding requests."""
        for request, block in zip(requests, self.blocks.allocate(len(requests)), strict=True):
            draft.table_updates.append(TableUpdate(request.row, len(request.block_table), [block]))
            request.block_table.append(block)
            self.decoding.set_last_block(request, block)
            self._charge(request, self.config.block_size)

    def _charge(self, request: Request, tokens: int) -> None:
        """Account tokens to the user, for the `fair` policy. Decode tokens are charged a block at a time."""
        weight = self.config.user_weights.get(request.user, 1.0)
        served = self.queue_context.served_tokens
        served[request.user] = served.get(request.user, 0.0) + tokens / weight

    def _copy_shared_tails(self, draft: Draft) -> None:
        """Copy-on-write for freshly forked requests: all but the last holder of a partly filled block get a copy."""
        for request in self.unshared_tails:
            if request not in self.decoding:
                continue
            forked = request.child_of is not None
            if request.kv_tokens % self.config.block_size:
                copy = self.blocks.copy_on_write(request)
                if copy is not None:
                    draft.copies.append(copy)
                    self.decoding.set_last_block(request, copy.destination)
                    self.counters.copies_on_write += 1
                    if not forked:
                        draft.table_updates.append(
                            TableUpdate(request.row, len(request.block_table) - 1, [copy.destination])
                        )
            if forked:
                draft.table_updates.append(TableUpdate(request.row, 0, list(request.block_table)))
        self.unshared_tails = []

    # -- 4. prefill chunks --------------------------------------------------------------------------------------------

    def _plan_prefills(self, draft: Draft, now: float) -> None:
        for request in sorted(self.prefilling, key=self.waiting.key):
            if draft.budget <= 0:
                return
            room = (len(request.block_table) + self.blocks.num_available) * self.config.block_size
            end = min(request.prefill_target, request.kv_tokens + draft.budget, room)
            if end > request.kv_tokens:
                self._add_chunk(request, end, draft, now)

    def _add_chunk(self, request: Request, end: int, draft: Draft, now: float) -> None:
        """Plan positions [kv_tokens, end) of a running request; at the prefill target it samples."""
        start = request.kv_tokens
        size = self.config.block_size
        new = self.blocks.ensure_capacity(request, end)
        if new:
            draft.table_updates.append(TableUpdate(request.row, len(request.block_table) - len(new), new))
        request.kv_tokens = end
        draft.budget -= end - start
        self.counters.prefilled_tokens += end - start
        self._charge(request, end - start)
        draft.fills.extend((request, index) for index in range(start // size, end // size))
        done = end == request.prefill_target
        samples = done and request.max_tokens != 0
        members = request.members if samples else []
        scores = request.sampling_params.prompt_logprobs is not None and request.prompt_scored < request.prompt_len
        draft.prefills.append(
            PrefillChunk(
                request_id=request.request_id,
                row=request.row,
                token_ids=request.token_ids(start, end),
                start=start,
                end=end,
                block_table=list(request.block_table),
                sample_rows=tuple(member.row for member in members),
                output_index=end - request.prompt_len if samples else 0,
                prompt_logprobs=scores,
            )
        )
        draft.chunk_requests.append((request, members))
        if not done:
            return
        self.prefilling.remove(request)
        if samples and not request.pending_fork:
            request.transition(RequestState.DECODING, now, self.step, "prefill planned to its end")
            if end <= request.last_position:
                self.decoding.add(request)

    # -- 5. admissions --------------------------------------------------------------------------------------------

    def _admit(self, draft: Draft, now: float) -> None:
        while (head := self.waiting.head()) is not None:
            if head.request_id in draft.preempted:
                return
            if draft.budget <= 0:
                self._note_wait(head, "budget", "the step's token budget is spent", now)
                return
            if self._rows_short(head) > 0:
                reason = f"{len(head.members)} sequence slots, {len(self._free_rows)} free"
                self._note_wait(head, "slots", reason, now)
                return
            entries = self._reusable(head)
            blocks_short = self._blocks_short(head, entries, 0, watermark=draft.room_made_for is not head)
            if blocks_short > 0:
                reason = f"{blocks_short} more KV blocks, {self.blocks.num_available} available"
                self._note_wait(head, "blocks", reason, now)
                return
            if head.state is RequestState.SWAPPED:
                self._note_wait(head, "drain", "the step in flight, to be swapped in after it", now)
                return
            self._admit_one(head, entries, draft, now)

    def _admit_one(self, request: Request, entries: list[CachedBlock], draft: Draft, now: float) -> None:
        again = request.started
        self.blocks.adopt_cached(request, entries)
        request.kv_tokens = len(entries) * self.config.block_size
        request.prefill_target = request.num_tokens
        self._start(request, draft)
        counters = self.prefix_cache.counters
        counters.hits += len(entries)
        counters.misses += (request.num_tokens - 1) // self.config.block_size - len(entries)
        self.counters.cached_tokens += request.kv_tokens
        self.counters.admissions += 1
        if not again:
            request.cached_tokens = request.kv_tokens
            request.first_scheduled_time = now
        why = f"{'rebuild' if again else 'admitted'}, {request.kv_tokens} of {request.num_tokens} tokens cached"
        for member in request.members:
            member.transition(RequestState.PREFILLING, now, self.step, why)
        self.prefilling.append(request)
        self._add_chunk(request, min(request.prefill_target, request.kv_tokens + draft.budget), draft, now)
