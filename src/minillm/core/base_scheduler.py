"""What every scheduler shares: the life of a request (submit, cancel, finish, commit, fail) and its bookkeeping.

A concrete scheduler adds :meth:`BaseScheduler.schedule`. The state machine reads no clock, no random source and no
device: `now` (seconds, monotonic) and outcomes are passed in, so the same inputs give the same decisions, always.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from itertools import islice
from operator import itemgetter

from minillm.core.block_manager import KVBlockManager, SwapPool, blocks_for
from minillm.core.config import SchedulerConfig
from minillm.core.costs import MeasuredCosts
from minillm.core.decode_set import DecodeSet
from minillm.core.errors import (
    DuplicateRequestError,
    EmptyPromptError,
    InvalidParameterError,
    InvariantViolation,
    PromptTooLongError,
    QueueFullError,
)
from minillm.core.in_flight import InFlight
from minillm.core.observer import Observer
from minillm.core.plan import (
    FinishEvent,
    NoPlan,
    PromptLogprobsEvent,
    StepEvents,
    StepOutcome,
    StepPlan,
)
from minillm.core.policies import QueueContext, get_queue_policy, get_victim_policy
from minillm.core.prefix_cache import HashFunction, PrefixCache, chain_digest
from minillm.core.request import RUNNING, EndedRequest, Request, RequestState, Transition
from minillm.core.stats import Counters, SchedulerStats
from minillm.core.waiting_queue import WaitingQueue

KEEP_ENDED = 1024
"""Ended requests that `explain` still knows."""


class BaseScheduler(ABC):
    """Common state and lifecycle; see the module's text."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        observer: Observer | None = None,
        hash_fn: HashFunction = chain_digest,
    ) -> None:
        self.config = config
        self.observer = observer if observer is not None else Observer()
        self.prefix_cache = PrefixCache(config.block_size, enabled=config.enable_prefix_caching, hash_fn=hash_fn)
        self.blocks = KVBlockManager(config.num_blocks, config.block_size, self.prefix_cache)
        self.swap_pool = SwapPool(config.num_swap_blocks)
        self.costs = MeasuredCosts()
        self.queue_context = QueueContext(config.ageing_interval, dict(config.user_weights))
        self.waiting = WaitingQueue(get_queue_policy(config.queue_policy), self.queue_context)
        self.victim_policy = get_victim_policy(config.victim_policy)
        self.counters = Counters()
        self.running: dict[Request, None] = {}
        """Ordered set of requests that own a row; a group's children own theirs from the parent's admission on."""
        self.running_priorities: Counter[int] = Counter()
        """How many of them have each priority."""
        self.prefilling: list[Request] = []
        """Those whose KV is not complete yet (no children: they prefill through their parent)."""
        self.decoding = DecodeSet(config.block_size)
        """Those that get a decode row in the next plan."""
        self.unshared_tails: list[Request] = []
        """Freshly forked requests, whose last block may still be shared: copy before the first write."""
        self.step = 0
        self.max_model_len = config.effective_max_model_len
        self._requests: dict[str, Request] = {}
        self._groups: dict[str, list[Request]] = {}
        """Members of every group (n > 1) of which at least one lives, by the parent's id: a parent may end first."""
        self._ended: OrderedDict[str, EndedRequest] = OrderedDict()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[InFlight] = deque()
        self._events = StepEvents()
        self._deadlines: list[tuple[float, int, str]] = []
        """Heap of (deadline, arrival number, id); entries of ended requests are dropped when they come up."""
        self._arrivals = 0
        self.num_swapped = 0
        self._head_wait: tuple[str, set[str]] | None = None
        """The head of the queue that last had to wait, and the kinds of reasons recorded for it."""
        self._stop_ids: Counter[int] = Counter()
        """Stop ids of all live requests, with the number of requests that have them."""

    # -- inputs ---------------------------------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Raise the :class:`RequestError` that :meth:`submit` would; nothing is changed."""
        if request.prompt_len == 0:
            raise EmptyPromptError
        limit, given = self.max_model_len, request.sampling_params.max_tokens
        if request.prompt_len > limit or (given is not None and request.prompt_len + given > limit):
            raise PromptTooLongError(request.prompt_len, given, limit, self.config.max_model_len_reduced)
        if request.group_size > self.config.max_num_seqs:
            rule = f"a group needs all its slots at once and max_num_seqs={self.config.max_num_seqs}"
            raise InvalidParameterError("n", request.group_size, rule)
        if request.deadline is not None and math.isnan(request.deadline):
            raise InvalidParameterError("deadline", request.deadline, "it must be a time in seconds, or None")
        self._check_unused_id(request)
        if request.state is not RequestState.WAITING or request.arrival_seq >= 0:
            raise InvalidParameterError("request", request.request_id, "this Request was submitted before")
        if self.config.max_waiting is not None and len(self.waiting) >= self.config.max_waiting:
            raise QueueFullError(len(self.waiting), self.config.max_waiting)

    def _check_unused_id(self, request: Request) -> None:
        """The id, and those that its children will get, must not be live; nor may an earlier group of this id be."""
        for used in (request.request_id, *(f"{request.request_id}#{i}" for i in range(1, request.group_size))):
            if used in self._requests:
                raise DuplicateRequestError(used)
        if request.request_id in self._groups:
            raise DuplicateRequestError(request.request_id)

    def prepare(self, request: Request) -> None:
        """Work on the request alone that `submit` leaves for later: its prompt's prefix-cache keys.

        Touches nothing of the scheduler, so a caller's thread can do it and spare the step loop the hashing.
        """
        if self.config.enable_prefix_caching:
            self.prefix_cache.extend_keys(request, request.prompt_len // self.config.block_size)

    def submit(self, request: Request, now: float) -> None:
        """Check a request and queue it. For n > 1 its children (``id#1`` ...) are made here."""
        self.validate(request)
        request.arrival_seq = self._arrivals
        self._arrivals += 1
        if request.sampling_params.max_tokens is None:
            left = max(1, self.max_model_len - request.prompt_len)
            request.max_tokens = left if request.max_tokens is None else min(request.max_tokens, left)
        assert request.max_tokens is not None
        request.last_position = request.prompt_len + request.max_tokens - 2
        self.waiting.push(request)  # first: a queue policy is the user's, and may raise
        if request.pending_fork:
            request.children = [request.fork(choice) for choice in range(1, request.group_size)]
            self._groups[request.request_id] = [request, *request.children]
        for member in (request, *request.children):
            self._requests[member.request_id] = member
            self._stop_ids.update(member.stop_ids)
        self.counters.submitted += 1
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.arrival_seq, request.request_id))
            if len(self._deadlines) > 2 * len(self._requests) + 64:
                live = {r.arrival_seq for r in self._requests.values()}
                self._deadlines = [entry for entry in self._deadlines if entry[1] in live]
                heapq.heapify(self._deadlines)
        self.observer.on_submit(request, now)

    def cancel(self, request_id: str, now: float, reason: str = "cancelled") -> bool:
        """End a request (for a group's id: all its members) in whatever state it is. False if it is not live."""
        members = self._group_members(request_id)
        for member in members:
            self._end(member, RequestState.CANCELLED, "cancelled", now, reason)
        if members:
            self.observer.on_cancel(request_id, now, reason)
        return bool(members)

    def _group_members(self, request_id: str) -> list[Request]:
        """Live members that a cancel of this id means. A parent may have ended while its children live on."""
        if request_id in self._groups:
            return [member for member in self._groups[request_id] if not member.is_ended]
        return [self._requests[request_id]] if request_id in self._requests else []

    def finish(
        self, request_id: str, output_index: int, now: float, reason: str = "stop", why: str = "stop string"
    ) -> bool:
        """A stop string, or the end of its grammar, ended the request with output token `output_index`; later tokens
        are dropped.

        False if the request is not live, so a stop that is found after the end by length changes nothing here.
        """
        request = self._requests.get(request_id)
        if request is None or not 0 <= output_index < len(request.generated_ids):
            return False
        dropped = len(request.generated_ids) - output_index - 1
        del request.generated_ids[output_index + 1 :]
        self.counters.dropped_tokens += dropped
        self._end(request, RequestState.FINISHED, reason, now, why)
        self.observer.on_finish(request_id, output_index, now, reason)
        return True

    def fail_all(self, error: str, now: float) -> None:
        """The engine failed: every live request fails with `error`, and the core is idle again."""
        self._in_flight.clear()
        for request in list(self._requests.values()):
            self._end(request, RequestState.FAILED, "error", now, "engine failure", error)
        self.blocks.quarantine_step = None
        for step in list(self.blocks.quarantine):
            self.blocks.lift_quarantine(step)
        self.blocks.reset_prefix_cache()  # what the failed step wrote is not known

    @abstractmethod
    def schedule(self, now: float) -> StepPlan | NoPlan:
        """The next step's plan (see the concrete scheduler)."""

    # -- commit ---------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> StepEvents:
        """Take over what the oldest plan in flight brought. Returns all events since the last ones were taken."""
        if not self._in_flight or self._in_flight[0].plan is not plan or outcome.step != plan.step:
            raise InvariantViolation(f"commit of step {plan.step} (outcome {outcome.step}) is out of order")
        if len(outcome.token_ids) != plan.num_sampling_rows:
            raise InvariantViolation(
                f"step {plan.step} has {plan.num_sampling_rows} sampling rows, the outcome {len(outcome.token_ids)}"
            )
        record = self._in_flight.popleft()
        self.blocks.quarantine_step = self._in_flight[-1].plan.step if self._in_flight else None
        for request_id in outcome.failed_swaps:
            self._on_failed_swap(request_id, record, now)
        for request_id, error in outcome.failed_requests.items():
            self._fail_members(request_id, error, record, now)
        self._publish_filled(record, outcome)
        if outcome.failures or outcome.logprobs is not None:
            self._commit_rows(record, record.decodes, outcome, 0, now)
        else:
            self._commit_plain_decodes(record, outcome.token_ids, now)
        row = len(record.decodes)
        for (request, members), chunk in zip(record.chunks, plan.prefills, strict=True):
            self._commit_prompt_scores(request, record, outcome)
            if chunk.sample_rows:
                if request.pending_fork and request.request_id not in record.discarded:
                    self._fork(request, now)
                self._commit_rows(record, members, outcome, row, now)
                row += len(members)
            elif request.max_tokens == 0 and chunk.end == request.prompt_len and not self._is_void(request, record):
                self._end(request, RequestState.FINISHED, "length", now, "max_tokens=0: scored only")
        self.costs.observe(plan, outcome)
        self.blocks.lift_quarantine(plan.step)
        self.counters.steps += 1
        events = self.take_events()
        self.observer.on_commit(plan, outcome, events, now)
        return events

    def take_events(self) -> StepEvents:
        """Events that no commit has returned yet (of cancels, stop strings, deadlines)."""
        events, self._events = self._events, StepEvents()
        return events

    def _commit_plain_decodes(self, record: InFlight, token_ids: list[list[int]], now: float) -> None:
        """Decode rows in the usual case: no failure, no logprobs. The hot path: the loops over rows run in C."""
        batch = record.plan.decodes
        requests, ids, indices = record.decodes, batch.request_ids, batch.output_indices
        tokens = list(map(itemgetter(0), token_ids[: len(requests)]))
        deque(map(list.append, record.outputs, tokens), maxlen=0)
        if record.discarded_rows:
            requests, ids, indices = list(requests), list(ids), list(indices)
            for row in sorted(record.discarded_rows, reverse=True):
                del requests[row], ids[row], indices[row], tokens[row]
            self._count_discarded(len(record.discarded_rows))
        self._events.tokens.extend(ids, indices, tokens)
        self.counters.generated_tokens += len(tokens)
        stop_ids = self._stop_ids
        for row in [row for row, token in enumerate(tokens) if token in stop_ids]:
            if tokens[row] in requests[row].stop_ids:
                self._end_by_token(requests[row], now)
        for request in record.last_rows:
            if not self._is_void(request, record):
                self._end_by_token(request, now)

    def _count_discarded(self, rows: int) -> None:
        self._events.discarded_rows += rows
        self.counters.discarded_rows += rows

    def _commit_rows(
        self, record: InFlight, requests: Iterable[Request], outcome: StepOutcome, first_row: int, now: float
    ) -> None:
        """Take over sampling rows `first_row`, `first_row + 1`, ... which belong to `requests`."""
        for row, request in enumerate(requests, first_row):
            if self._is_void(request, record):
                self._count_discarded(1)
                continue
            if row in outcome.failures:
                self._end(request, RequestState.FAILED, "error", now, "row failed", outcome.failures[row])
                continue
            (token,) = outcome.token_ids[row]
            index = len(request.generated_ids)
            request.generated_ids.append(token)
            self.counters.generated_tokens += 1
            if request.first_token_time is None:
                request.first_token_time = now
            entry = outcome.logprobs[row] if outcome.logprobs is not None else None
            self._events.tokens.append(request.request_id, index, token, entry)
            if token in request.stop_ids or index + 1 == request.max_tokens:
                self._end_by_token(request, now)

    def _end_by_token(self, request: Request, now: float) -> None:
        """The last token is a stop token or the last that is allowed. A stop below `min_tokens` does not count."""
        count = len(request.generated_ids)
        if request.generated_ids[-1] in request.stop_ids and count > request.sampling_params.min_tokens:
            self._end(request, RequestState.FINISHED, "stop", now, "stop token")
        elif count == request.max_tokens:
            self._end(request, RequestState.FINISHED, "length", now, "max_tokens")

    def _publish_filled(self, record: InFlight, outcome: StepOutcome) -> None:
        """Publish the blocks that this plan filled: from committed ids, and never from a failed row."""
        if not self.config.enable_prefix_caching:
            return
        bad = record.discarded
        if outcome.failures:
            owners = record.plan.sampling_request_ids()
            bad = bad | {owners[row] for row in outcome.failures}
        for request, index in record.fills:
            if request.request_id not in bad and not request.is_ended:
                self.prefix_cache.publish(request, index, request.block_table[index])

    @staticmethod
    def _is_void(request: Request, record: InFlight) -> bool:
        """Whether the request's rows in this plan count for nothing."""
        return request.is_ended or request.request_id in record.discarded

    def _commit_prompt_scores(self, request: Request, record: InFlight, outcome: StepOutcome) -> None:
        """Deliver the scores of prompt positions that were not delivered before (a rebuild scores nothing twice)."""
        scores = outcome.prompt_logprobs.get(request.request_id)
        if scores is None or request.request_id in record.discarded:
            return
        start, entries = scores
        fresh = entries[max(0, request.prompt_scored - start) :]
        if fresh:
            start += len(entries) - len(fresh)
            self._events.prompt_logprobs.append(PromptLogprobsEvent(request.request_id, start, fresh))
            request.prompt_scored = start + len(fresh)

    def _fork(self, parent: Request, now: float) -> None:
        """The parent's prefill is done: the children share its blocks and decode on their own."""
        members = parent.members
        parent.pending_fork = False
        for child in members[1:]:
            self.blocks.fork_table(parent, child)
            child.prefill_target = parent.prefill_target
            child.started = True
            child.cached_tokens = parent.cached_tokens
            child.first_scheduled_time = parent.first_scheduled_time
            child.transition(RequestState.DECODING, now, self.step, f"forked from {parent.request_id}")
            self.counters.forks += 1
        self.unshared_tails.extend(members)
        if parent.kv_tokens <= parent.last_position:
            for member in members:
                self.decoding.add(member)
        parent.transition(RequestState.DECODING, now, self.step, "prefill done")

    # -- failures of a part -----------------------------------------------------------------------------------------

    def _fail_members(self, request_id: str, error: str, record: InFlight, now: float) -> None:
        request = self._requests.get(request_id)
        if request is None or request_id in record.discarded:
            return
        for member in request.members:
            self._end(member, RequestState.FAILED, "error", now, "chunk failed", error)

    def _on_failed_swap(self, request_id: str, record: InFlight, now: float) -> None:
        """A swap copy of this plan did not happen: what it should have brought is lost, so recompute."""
        request = self._requests.get(request_id)
        if request is None or request_id in record.discarded:
            return
        self.counters.failed_swaps += 1
        if request.state is RequestState.SWAPPED:
            self.waiting.remove(request)
            self.drop_swap_slots(request)
        elif request.state in RUNNING:
            record.discard(request)
            self.leave_running(request)
        else:
            return
        self.to_recompute(request, now, "swap copy failed")
        self.waiting.push(request)

    def to_recompute(self, request: Request, now: float, reason: str) -> None:
        """PREEMPTED: no KV; the rebuild covers the prompt and all generated tokens and then samples once."""
        request.recomputed_tokens += request.kv_tokens
        self.counters.recomputed_tokens += request.kv_tokens
        request.kv_tokens = 0
        request.published = []
        request.transition(RequestState.PREEMPTED, now, self.step, reason)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _end(
        self, request: Request, state: RequestState, finish_reason: str, now: float, why: str, error: str | None = None
    ) -> None:
        """The request ends: everything that it holds is released, and its finish event is made."""
        if request.request_id not in self._requests:
            return
        self._discard_rows_in_flight(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if request.row >= 0:
            self.leave_running(request)
        if request.swap_slots:
            self.drop_swap_slots(request)
        if request.pending_fork:
            request.pending_fork = False
            for child in request.children:
                self._end(child, state, finish_reason, now, why, error)
        request.transition(state, now, self.step, why if error is None else f"{why}: {error}")
        request.finish_reason = finish_reason
        request.finish_time = now
        request.error = error
        del self._requests[request.request_id]
        parent = request.child_of or request
        if all(member.is_ended for member in self._groups.get(parent.request_id, ())):
            self._groups.pop(parent.request_id, None)
        for token_id in request.stop_ids:
            self._stop_ids[token_id] -= 1
            if not self._stop_ids[token_id]:
                del self._stop_ids[token_id]
        request.published, request.block_keys = [], []
        self._ended[request.request_id] = request.ended()
        self._ended.move_to_end(request.request_id)
        while len(self._ended) > KEEP_ENDED:
            self._ended.popitem(last=False)
        self.counters.count_end(state)
        self._events.finished.append(FinishEvent(request.request_id, finish_reason, error))

    def _discard_rows_in_flight(self, request: Request) -> None:
        # Whoever ends by length left the decode set with its last row; once that has committed, none is in flight.
        may_decode = request.decode_index >= 0 or any(request in record.last_rows for record in self._in_flight)
        for record in self._in_flight:
            record.discard(request, may_decode=may_decode)

    def leave_running(self, request: Request) -> None:
        """Give up row and blocks. Rows of plans in flight that belong to the request count for nothing."""
        self._discard_rows_in_flight(request)
        del self.running[request]
        self.running_priorities[request.priority] -= 1
        if not self.running_priorities[request.priority]:
            del self.running_priorities[request.priority]
        if request in self.decoding:
            self.decoding.remove(request)
        elif request in self.prefilling:
            self.prefilling.remove(request)
        if request in self.unshared_tails:
            self.unshared_tails.remove(request)
        self._free_rows.append(request.row)
        request.row = -1
        self.blocks.release_table(request)

    def drop_swap_slots(self, request: Request) -> None:
        self.swap_pool.release(request.swap_slots)
        request.swap_slots = []
        self.num_swapped -= 1

    def _expire_deadlines(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival_seq, request_id = heapq.heappop(self._deadlines)
            members = self._group_members(request_id)
            if members and members[0].arrival_seq == arrival_seq:  # not a later request of the same id
                self.counters.expired += 1
                self.cancel(request_id, now, "deadline passed")

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests in the queue: new, swapped out or preempted."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests that own a row."""
        return len(self.running)

    @property
    def num_in_flight(self) -> int:
        """Plans that were issued and have not committed."""
        return len(self._in_flight)

    @property
    def has_live_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    @property
    def live_requests(self) -> list[Request]:
        """All requests that have not ended, group children included."""
        return list(self._requests.values())

    def get(self, request_id: str) -> Request | None:
        """The live request of this id."""
        return self._requests.get(request_id)

    def get_ended(self, request_id: str) -> EndedRequest | None:
        """What is kept of an ended request; None if it is not known (any more)."""
        return self._ended.get(request_id)

    def last_ended(self, count: int) -> list[EndedRequest]:
        """The `count` requests that ended last, latest first."""
        return list(islice(reversed(self._ended.values()), count))

    def stats(self) -> SchedulerStats:
        """Gauges and counters of this moment."""
        return SchedulerStats.of(self)

    def explain(self, request_id: str) -> str:
        """In words: what the request waits for, or what happened to it. KeyError if it is not known (any more)."""
        from minillm.core.explain import explain

        return explain(self, self._requests.get(request_id) or self._ended[request_id])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests keep their blocks. Always True."""
        self.blocks.reset_prefix_cache()
        return True

    # -- helpers for concrete schedulers ----------------------------------------------------------------------------

    def _note_wait(self, request: Request, kind: str, reason: str, now: float) -> None:
        """Keep why the head of the queue waits. Each kind is recorded once per wait: histories stay short."""
        if self._head_wait is None or self._head_wait[0] != request.request_id:
            self._head_wait = (request.request_id, set())
        if kind in self._head_wait[1]:
            return
        self._head_wait[1].add(kind)
        request.history.append(Transition(now, self.step, request.state, f"waits: {reason}"))
        self.observer.on_wait(request, kind, reason, self.step)

    def _blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.config.block_size)
