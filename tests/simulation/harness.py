"""Drives a scheduler through random work and checks everything that it says and does.

`Simulation` holds one scheduler, the shadow runner and an independent record of every request (`Tracked`). Its methods
are the operations of an engine: submit, cancel, finish (a stop string was found), schedule, commit, take_events,
fail_all. `run_seed` drives them at random; a hypothesis test drives them from operation lists.

Checked after each operation: `invariants.check`; on each plan: limits, rows, tables, writes to shared blocks, blocks
named by the plan in flight, strict admission order, progress; on each event: order, content, one end per request with
the reason that the request has when it runs alone.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

from minillm.core import invariants
from minillm.core.errors import InvariantViolation, RequestError
from minillm.core.observer import Observer
from minillm.core.plan import NoPlan, StepEvents, StepOutcome, StepPlan, StepTimings, TokenLogprobs
from minillm.core.prefix_cache import CachedBlock, chain_digest, extra_keys
from minillm.core.request import QUEUED, RUNNING, Request, RequestState
from minillm.core.scheduler import ContinuousScheduler
from minillm.core.static_scheduler import StaticScheduler
from simulation.shadow_runner import Faults, Sequence, ShadowRunner, SimulationFailure, root_kv
from simulation.workload import RequestSpec, SimSettings, Workload, random_settings

ORDERED_POLICIES = ("priority", "fcfs", "shortest_prompt")
"""Policies whose order does not depend on what was served so far."""


@dataclass(slots=True, eq=False)
class Tracked:
    """The driver's own record of one sequence."""

    request: Request
    sequence: Sequence
    spec: RequestSpec
    number: int
    """Order of submission."""
    expected_tokens: int = 0
    expected_reason: str = ""
    ran: bool = False
    """Whether it was ever admitted: of one level, those that ran come first."""
    delivered: int = 0
    closed: bool = False
    """No token may come any more (cancelled, finished, failed)."""
    end_reason: str | None = None
    cancelled: bool = False
    injected_failure: bool = False
    string_stopped: int | None = None
    next_prompt_logprob: int = 1

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def order_key(self, settings: SimSettings) -> tuple[float, bool, int, int]:
        """Place in the total order, worked out without the queue (for `ORDERED_POLICIES`)."""
        config, request = settings.config, self.request
        level = 0.0
        if config.queue_policy == "priority":
            level = float(request.priority)
            if config.ageing_interval is not None:
                level += request.arrival_time / config.ageing_interval
        if config.queue_policy == "shortest_prompt":
            return (float(request.priority), not self.ran, request.prompt_len, self.number)
        return (level, not self.ran, 0, self.number)


@dataclass(slots=True)
class Flight:
    """An issued plan that is not committed."""

    plan: StepPlan
    outcome: StepOutcome
    owners: list[str]
    """Request of each sampling row."""
    request_ids: set[str]
    """Requests that the plan computes."""
    holders: dict[int, set[str]]
    """Requests by block that the plan names for them."""
    void: set[str] = field(default_factory=set)
    """Requests whose rows mean nothing: the swap copy that they build on did not happen."""


class _Preemptions(Observer):
    """Collects the preemptions of the schedule call that is running; beyond the bound only when nobody else is left."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.seen: list[tuple[Request, str]] = []
        self.scheduler: ContinuousScheduler | None = None

    def on_preempt(self, request: Request, kind: str, reason: str, step: int) -> None:
        self.seen.append((request, kind))
        if request.num_preemptions <= self.bound or "needs a block" not in reason:
            return
        assert self.scheduler is not None
        if self.scheduler.config.queue_policy not in ORDERED_POLICIES:
            return  # queueing the victim has changed the order already
        rest = sorted(self.scheduler.running, key=self.scheduler.waiting.key)
        spared = [other for other in rest[1:] if other.num_preemptions < self.bound and other.block_table]
        if spared:
            raise SimulationFailure(f"{request} is at its preemption bound and is preempted before {spared}")


def constant_hash(_parent: bytes, _token_bytes: bytes) -> bytes:
    """A prefix hash that always collides."""
    return b"collision"


class Simulation:
    """One scheduler, one shadow runner, and the record of all that was asked and delivered."""

    def __init__(self, settings: SimSettings, rng: Random) -> None:
        self.settings = settings
        self.rng = rng
        config = settings.config
        self.observer = _Preemptions(config.max_preemptions)
        scheduler_class = StaticScheduler if settings.static else ContinuousScheduler
        hash_fn = constant_hash if settings.constant_hash else chain_digest
        self.scheduler = scheduler_class(config, observer=self.observer, hash_fn=hash_fn)
        self.observer.scheduler = self.scheduler
        self.runner = ShadowRunner(config.num_blocks, config.block_size, config.num_swap_blocks, config.max_num_seqs)
        self.live: dict[str, Tracked] = {}
        self.flights: deque[Flight] = deque()
        self.coverage: Counter[str] = Counter()
        self.now = 0.0
        self.submitted = 0
        self.checks = 0
        self.roots: dict[bytes, int] = {}
        """By the extra keys of a salt: the KV before the first position under it."""
        self.empty_plans = 0
        self.head_missed = 0
        self.most_preemptions = 0
        self.ended: list[str] = []
        self.string_stops: list[tuple[Tracked, int]] = []
        self.on_end = lambda tracked: None

    # -- operations ---------------------------------------------------------------------------------------------

    def submit(self, spec: RequestSpec) -> Tracked | None:
        """Submit a request; None if the scheduler refused it (then nothing may have changed)."""
        request_id = self._new_id()
        deadline = None if spec.deadline_in is None else self.now + spec.deadline_in
        request = Request(
            request_id,
            spec.prompt,
            spec.params,
            priority=spec.priority,
            arrival_time=self.now,
            user=spec.user,
            cache_salt=spec.cache_salt,
            deadline=deadline,
            seed=spec.seed,
            eos_token_ids=spec.eos_token_ids,
        )
        before = (self.scheduler.num_waiting, self.scheduler.num_running)
        try:
            self.scheduler.submit(request, self.now)
        except RequestError as error:
            self.coverage[f"refused: {type(error).__name__}"] += 1
            if before != (self.scheduler.num_waiting, self.scheduler.num_running) or self.scheduler.get(request_id):
                raise SimulationFailure(f"{request_id} was refused but something of it was queued") from error
            return None
        self.submitted += 1
        self.roots[extra_keys(request)] = root_kv(spec.cache_salt)
        for member in (request, *request.children):
            self._track(member, spec)
        self.coverage["submitted"] += 1
        self.coverage["groups"] += spec.params.n > 1
        return self.live[request_id]

    def _new_id(self) -> str:
        """Sometimes the id of a request that has ended, even if the plan in flight still names that one."""
        if self.ended and self.rng.random() < self.settings.id_reuse_rate:
            request_id = self.rng.choice(self.ended)
            if request_id not in self.live and "#" not in request_id:
                for flight in self.flights:
                    flight.void.add(request_id)
                self.coverage["ids used again"] += 1
                return request_id
        return f"r{self.submitted}"

    def _track(self, request: Request, spec: RequestSpec) -> None:
        sequence = Sequence(
            spec.prompt,
            seed=spec.seed,
            choice=request.choice,
            salt=spec.cache_salt,
            vocab_size=self.settings.vocab_size,
            min_tokens=spec.params.min_tokens,
            stop_ids=request.stop_ids,
        )
        tracked = Tracked(request, sequence, spec, self.submitted)
        limit = self.settings.config.effective_max_model_len
        asked = spec.params.max_tokens
        allowed = max(1, limit - len(spec.prompt)) if asked is None else asked
        tracked.expected_tokens, tracked.expected_reason = allowed, "length"
        for index in range(allowed):
            if sequence.output(index) in request.stop_ids:
                tracked.expected_tokens, tracked.expected_reason = index + 1, "stop"
                break
        self.live[request.request_id] = tracked
        self.runner.sequences[request.request_id] = sequence

    def cancel(self, request_id: str) -> None:
        """Cancel a request (with a parent's id: its group), check the answer, and that a second cancel is False."""
        members = [t for t in self.live.values() if t.request_id == request_id or self._parent_id(t) == request_id]
        open_members = [tracked for tracked in members if not tracked.closed]
        states = [tracked.request.state for tracked in open_members]
        answer = self.scheduler.cancel(request_id, self.now)
        if answer != bool(open_members):
            raise SimulationFailure(f"cancel({request_id}) said {answer} with {len(open_members)} open sequences")
        for tracked, state in zip(open_members, states, strict=True):
            self.coverage[f"cancel in {state.value}"] += 1
            tracked.cancelled = tracked.closed = True
            if not tracked.request.is_ended:
                raise SimulationFailure(f"{tracked.request_id} is {tracked.request.state} after its cancel")
        if answer and self.scheduler.cancel(request_id, self.now):
            raise SimulationFailure(f"the second cancel({request_id}) is not False")

    @staticmethod
    def _parent_id(tracked: Tracked) -> str | None:
        parent = tracked.request.child_of
        return None if parent is None else parent.request_id

    def finish(self, tracked: Tracked, output_index: int) -> None:
        """A stop string was found at the end of output `output_index`."""
        answer = self.scheduler.finish(tracked.request_id, output_index, self.now)
        if answer == tracked.closed:
            raise SimulationFailure(f"finish({tracked.request_id}) said {answer}, closed={tracked.closed}")
        if answer:
            self.coverage["string stops"] += 1
            self.coverage["tokens dropped by string stops"] += max(0, tracked.delivered - output_index - 1)
            tracked.closed = True
            tracked.string_stopped = output_index
            wanted = tracked.sequence.tokens[len(tracked.spec.prompt) :][: output_index + 1]
            if tracked.request.generated_ids != wanted:
                raise SimulationFailure(
                    f"{tracked.request_id} stopped at output {output_index} holds {tracked.request.generated_ids}"
                )

    def fail_all(self) -> None:
        """The engine fails: everything live fails, plans in flight are lost."""
        self.coverage["engine failures"] += bool(self.live)
        self.scheduler.fail_all("the device is lost", self.now)
        self.flights.clear()
        for tracked in self.live.values():
            if not tracked.closed:
                tracked.injected_failure = tracked.closed = True
        self.deliver(self.scheduler.take_events())
        self._check_idle()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that nobody refers to (the scheduler may refuse while requests run)."""
        self.coverage["cache resets"] += bool(self.scheduler.reset_prefix_cache())

    def schedule(self, faults_rate: bool = True) -> StepPlan | NoPlan:
        """Schedule one step; a plan is checked and executed at once, its outcome kept for `commit`."""
        queued = [t for t in self.live.values() if t.request.state in QUEUED and t.request.row < 0]
        self.observer.seen.clear()
        before = self._holdings() if self.flights else None
        plan = self.scheduler.schedule(self.now)
        ended = False
        for tracked in self.live.values():
            if not tracked.closed and tracked.request.is_ended:
                deadline = tracked.request.deadline
                if deadline is None or deadline > self.now:
                    raise SimulationFailure(f"{tracked.request_id} ended while scheduling, before its deadline")
                self.coverage["deadlines expired"] += 1
                tracked.cancelled = tracked.closed = ended = True
        if isinstance(plan, NoPlan):
            if before is not None and not ended and before != self._holdings():
                raise SimulationFailure(f"schedule answered {plan.value} and changed what is held")
            self._check_no_plan(plan)
            return plan
        self._check_plan(plan, queued)
        holders = self._named_blocks(plan)
        faults = self._draw_faults(plan) if faults_rate else Faults()
        steps = tuple(flight.plan.step for flight in self.flights)
        outcome = self.runner.forward(plan, faults, steps)
        ids = {*plan.decodes.request_ids, *(chunk.request_id for chunk in plan.prefills)}
        self._measure(outcome)
        self.flights.append(Flight(plan, outcome, self._row_owners(plan), ids, holders))
        for request_id in ids:
            for member in self._unforked_group(request_id):
                self.live[member].ran = True
        self.coverage["steps"] += 1
        self.coverage["steps with a crowd"] += len(self.live) > 64
        self.coverage["steps overlapped"] += len(self.flights) > 1
        self.coverage["static steps"] += self.settings.static
        self.coverage["constant-hash steps"] += self.settings.constant_hash
        return plan

    def _holdings(self) -> tuple[list[int], list[int], list[Request], int, int]:
        scheduler = self.scheduler
        blocks = scheduler.blocks
        return (
            list(blocks.ref_counts),
            list(blocks.free_blocks),
            list(scheduler.running),
            scheduler.num_waiting,
            scheduler.swap_pool.num_used,
        )

    def _measure(self, outcome: StepOutcome) -> None:
        """Timings and logprobs, as some runners and requests have them."""
        settings, rng = self.settings, self.rng
        if settings.timing_rate and rng.random() < settings.timing_rate:
            outcome.timings = StepTimings(
                forward=rng.uniform(0.001, 0.1), swap_out=rng.uniform(1e-5, 0.1), swap_in=rng.uniform(1e-5, 0.1)
            )
        if settings.logprobs_rate and rng.random() < settings.logprobs_rate:
            outcome.logprobs = [TokenLogprobs(ids[0] if ids else -1, -1.0, 1, [], []) for ids in outcome.token_ids]

    def commit(self) -> None:
        """Commit the oldest plan in flight."""
        flight = self.flights.popleft()
        outcome = flight.outcome
        for other in (flight, *self.flights):
            other.void.update(outcome.failed_swaps)
        for index in outcome.failures:
            if flight.owners[index] not in flight.void:
                self._injected(flight.owners[index])
        for request_id in outcome.failed_requests:
            for member in self._unforked_group(request_id):
                if request_id not in flight.void:
                    self._injected(member)
        self.coverage["chunks failed"] += len(outcome.failed_requests)
        self.coverage["swaps failed"] += len(outcome.failed_swaps)
        events = self.scheduler.commit(flight.plan, outcome, self.now)
        self.coverage["discarded rows"] += events.discarded_rows
        self.deliver(events)

    def deliver(self, events: StepEvents) -> None:
        """Check events as a client would see them."""
        for request_id, index, token, logprobs in events.tokens:
            tracked = self.live.get(request_id)
            if tracked is None or (tracked.closed and tracked.string_stopped is None and not tracked.cancelled):
                raise SimulationFailure(f"output {index} of {request_id} comes after its end")
            if tracked.closed:
                raise SimulationFailure(f"output {index} of {request_id} comes after it was stopped or cancelled")
            if index != tracked.delivered:
                raise SimulationFailure(f"{request_id}: output {index} comes after {tracked.delivered} outputs")
            if token != tracked.sequence.output(index):
                raise SimulationFailure(
                    f"{request_id}: output {index} is {token}, alone it is {tracked.sequence.output(index)}"
                )
            if logprobs is not None and logprobs.token_id != token:
                raise SimulationFailure(f"{request_id}: output {index} has the logprobs of token {logprobs.token_id}")
            tracked.delivered += 1
            if index == 0 and tracked.request.cached_tokens:
                self.coverage["prefix hits"] += 1
            self._note_string_stop(tracked)
        self.coverage["tokens"] += len(events.tokens)
        for request_id, start, entries in events.prompt_logprobs:
            self._check_prompt_logprobs(request_id, start, [entry.token_id for entry in entries])
        for request_id, reason, _ in events.finished:
            self._check_end(request_id, reason)
        for request_id, _, _ in events.finished:
            self._forget(self.live[request_id])

    # -- checks of events ---------------------------------------------------------------------------------------

    def _note_string_stop(self, tracked: Tracked) -> None:
        stop = tracked.spec.string_stop
        if stop is not None and tracked.delivered - 1 == stop[0] + stop[1] and tracked.delivered > stop[0]:
            self.string_stops.append((tracked, stop[0]))

    def _check_prompt_logprobs(self, request_id: str, start: int, token_ids: list[int]) -> None:
        tracked = self.live[request_id]
        if start != tracked.next_prompt_logprob:
            raise SimulationFailure(f"{request_id}: prompt scores from {start}, due {tracked.next_prompt_logprob}")
        if token_ids != tracked.spec.prompt[start : start + len(token_ids)]:
            raise SimulationFailure(f"{request_id}: prompt scores at {start} are of {token_ids}")
        tracked.next_prompt_logprob += len(token_ids)
        self.coverage["prompts scored"] += tracked.next_prompt_logprob == len(tracked.spec.prompt)

    def _check_end(self, request_id: str, reason: str) -> None:
        tracked = self.live.get(request_id)
        if tracked is None or tracked.end_reason is not None:
            raise SimulationFailure(f"{request_id} ends twice or was never submitted ({reason})")
        request = tracked.request
        tracked.end_reason = reason
        if not request.is_ended or request.finish_reason != reason:
            raise SimulationFailure(f"{request_id} ended with {reason} but is {request}, {request.finish_reason}")
        if tracked.injected_failure or reason == "error":
            if reason != "error" or not tracked.injected_failure or request.state is not RequestState.FAILED:
                raise SimulationFailure(f"{request_id} ends with {reason}, injected={tracked.injected_failure}")
        elif tracked.cancelled or reason == "cancelled":
            if reason != "cancelled" or not tracked.cancelled or request.state is not RequestState.CANCELLED:
                raise SimulationFailure(f"{request_id} ends with {reason}, cancelled={tracked.cancelled}")
        elif tracked.string_stopped is None:
            if (tracked.delivered, reason) != (tracked.expected_tokens, tracked.expected_reason):
                raise SimulationFailure(
                    f"{request_id} ends with {reason} after {tracked.delivered} outputs; "
                    f"alone: {tracked.expected_reason} after {tracked.expected_tokens}"
                )
        elif reason != "stop":
            raise SimulationFailure(f"{request_id} was stopped by a string and ends with {reason}")
        wanted = tracked.spec.params.prompt_logprobs is not None and request.choice == 0
        if wanted and reason in ("stop", "length") and tracked.next_prompt_logprob != max(1, len(tracked.spec.prompt)):
            raise SimulationFailure(f"{request_id}: prompt scored up to {tracked.next_prompt_logprob}")
        if request.block_table or request.swap_slots or request.row >= 0:
            raise SimulationFailure(f"{request_id} has ended and holds {request}")
        self.coverage[f"ended: {reason}"] += 1
        self.most_preemptions = max(self.most_preemptions, request.num_preemptions)
        tracked.closed = True

    def _unforked_group(self, request_id: str) -> list[str]:
        """The request, and the children that wait for the end of its prefill: its chunk is theirs too."""
        tracked = self.live.get(request_id)
        children = (
            []
            if tracked is None
            else [c for c in tracked.request.children if c.request_id in self.live and not c.generated_ids]
        )
        return [request_id, *(child.request_id for child in children)]

    def _injected(self, request_id: str) -> None:
        tracked = self.live.get(request_id)
        if tracked is not None and not tracked.closed:
            tracked.injected_failure = tracked.closed = True
            self.coverage["rows failed"] += 1

    def _forget(self, tracked: Tracked) -> None:
        del self.live[tracked.request_id]
        self.ended.append(tracked.request_id)
        if len(self.ended) > 8:
            self.ended.pop(0)
        self.on_end(tracked)

    # -- checks of plans ----------------------------------------------------------------------------------------

    def _row_owners(self, plan: StepPlan) -> list[str]:
        owners = list(plan.decodes.request_ids)
        for chunk in plan.prefills:
            for row in chunk.sample_rows:
                state = self.runner.rows[row]
                assert state is not None
                owners.append(state.request_id)
        return owners

    def _check_no_plan(self, reason: NoPlan) -> None:
        self.coverage[f"no plan: {reason.value}"] += 1
        if self.flights:
            return
        if reason is NoPlan.DRAIN:
            raise SimulationFailure("drain is asked for with nothing in flight")
        if any(not tracked.closed for tracked in self.live.values()):
            raise SimulationFailure(f"nothing is scheduled and nothing in flight, but live: {self._live_text()}")

    def _live_text(self) -> str:
        return ", ".join(str(t.request) for t in self.live.values() if not t.closed)

    def _check_plan(self, plan: StepPlan, queued: list[Tracked]) -> None:
        config = self.settings.config
        ids = list(plan.decodes.request_ids)
        rows = list(plan.decodes.rows)
        prefill_tokens = 0
        for chunk in plan.prefills:
            ids.append(chunk.request_id)
            rows.append(chunk.row)
            prefill_tokens += chunk.end - chunk.start
        total = len(plan.decodes.rows) + prefill_tokens
        if total > config.max_num_batched_tokens:
            raise SimulationFailure(f"{total} tokens in a step, the budget is {config.max_num_batched_tokens}")
        throttle = config.max_prefill_tokens_per_step
        if throttle is not None and prefill_tokens > throttle:
            raise SimulationFailure(f"{prefill_tokens} prefill tokens in a step, the throttle is {throttle}")
        if len(set(ids)) != len(ids) or len(set(rows)) != len(rows):
            raise SimulationFailure(f"twice in one plan: {ids}, rows {rows}")
        for request_id in ids:
            tracked = self.live.get(request_id)
            if tracked is None or tracked.closed or tracked.request.state not in RUNNING:
                raise SimulationFailure(f"{request_id} is in the plan and {tracked and tracked.request.state}")
        if not ids and not plan.swap_outs and not plan.swap_ins:
            self.empty_plans += 1
            self.coverage["empty plans"] += 1
            if self.empty_plans >= 2 and not self.flights:
                raise SimulationFailure(f"two empty plans in a row; live: {self._live_text()}")
        else:
            self.empty_plans = 0
        self._check_writes(plan)
        self._check_order(queued)
        self._check_head(set(ids))
        self._count_plan(plan)

    def _check_writes(self, plan: StepPlan) -> None:
        """No written block is in two tables, and none is named by a plan in flight for somebody else."""
        size = self.settings.config.block_size
        writes: list[tuple[int, str]] = [
            (slot // size, request_id)
            for request_id, slot in zip(plan.decodes.request_ids, plan.decodes.kv_slots, strict=True)
        ]
        for chunk in plan.prefills:
            written = chunk.block_table[chunk.start // size : -(-chunk.end // size)]
            writes.extend((block, chunk.request_id) for block in written)
        for back in plan.swap_ins:
            writes.extend((block, back.request_id) for block in back.blocks)
        held: Counter[int] = Counter()
        for tracked in self.live.values():
            held.update(tracked.request.block_table)
        for block, request_id in writes:
            if held[block] != 1:
                raise SimulationFailure(f"{request_id} writes block {block}, which is in {held[block]} tables")
        for _, destination in plan.copies:
            if held[destination] != 1:
                raise SimulationFailure(f"a copy fills block {destination}, which is in {held[destination]} tables")
        for flight in self.flights:
            for block, request_id in writes:
                names = flight.holders.get(block)
                if names is not None and request_id not in names:
                    raise SimulationFailure(
                        f"step {plan.step} writes block {block} for {request_id} while step "
                        f"{flight.plan.step} in flight names it for {sorted(names)}"
                    )

    def _named_blocks(self, plan: StepPlan) -> dict[int, set[str]]:
        named: dict[int, set[str]] = {}
        if not self.settings.overlap:
            return named
        for request_id in plan.decodes.request_ids:
            for block in self.live[request_id].request.block_table:
                named.setdefault(block, set()).add(request_id)
        for chunk in plan.prefills:
            for block in chunk.block_table[: -(-chunk.end // self.settings.config.block_size)]:
                named.setdefault(block, set()).add(chunk.request_id)
        for move in plan.swap_ins:
            for block in move.blocks:
                named.setdefault(block, set()).add(move.request_id)
        return named

    def _check_order(self, queued: list[Tracked]) -> None:
        """Whoever was admitted precedes all who still wait."""
        if self.settings.config.queue_policy not in ORDERED_POLICIES:
            return
        admitted = [t for t in queued if t.request.state in RUNNING]
        if not admitted:
            return
        waiting = [t for t in self.live.values() if t.request.state in QUEUED and not self._is_unforked(t)]
        if not waiting:
            return
        last = max(admitted, key=lambda t: t.order_key(self.settings))
        first = min(waiting, key=lambda t: t.order_key(self.settings))
        if first.order_key(self.settings) < last.order_key(self.settings):
            raise SimulationFailure(f"{last.request} was admitted before {first.request}")

    @staticmethod
    def _is_unforked(tracked: Tracked) -> bool:
        return tracked.request.child_of is not None and tracked.request.state is RequestState.WAITING

    def _check_head(self, planned: set[str]) -> None:
        """The head of the total order, once it runs, moves on with every step; it is never a victim."""
        settings = self.settings
        if settings.config.queue_policy not in ORDERED_POLICIES or settings.static:
            return
        candidates = [t for t in self.live.values() if not t.closed and not self._is_unforked(t)]
        if not candidates:
            return
        head = min(candidates, key=lambda t: t.order_key(settings))
        if any(request is head.request for request, _ in self.observer.seen):
            raise SimulationFailure(f"the head {head.request} was preempted")
        in_flight = any(head.request_id in flight.request_ids for flight in self.flights)
        moving = head.request_id in planned or in_flight or head.request.state in QUEUED
        self.head_missed = 0 if moving else self.head_missed + 1
        # A prefill may wait for a block until somebody who decodes needs one too (or ends) and is preempted for it.
        patience = settings.config.block_size + 2 if head.request.state is RequestState.PREFILLING else 2
        if self.head_missed > patience:
            raise SimulationFailure(f"the head {head.request} was left out of {self.head_missed} steps in a row")

    def _count_plan(self, plan: StepPlan) -> None:
        coverage = self.coverage
        coverage["swap-outs"] += len(plan.swap_outs)
        coverage["swap-ins"] += len(plan.swap_ins)
        coverage["copies on write"] += len(plan.copies)
        coverage["chunks"] += len(plan.prefills)
        for request, kind in self.observer.seen:
            coverage[f"preempted: {kind}"] += 1
            coverage["preempted in prefill"] += not request.generated_ids

    def _draw_faults(self, plan: StepPlan) -> Faults:
        settings, rng, faults = self.settings, self.rng, Faults()
        if settings.fault_rate and rng.random() < settings.fault_rate:
            ids = [*plan.decodes.request_ids, *(chunk.request_id for chunk in plan.prefills)]
            if ids and rng.random() < 0.6:
                faults.nan_requests.add(rng.choice(ids))
            rows = [*plan.decodes.rows, *(row for chunk in plan.prefills for row in chunk.sample_rows)]
            if rows and rng.random() < 0.6:
                faults.sampler_rows.add(rng.choice(rows))
        if settings.swap_fault_rate and (plan.swap_outs or plan.swap_ins):
            for move in (*plan.swap_outs, *plan.swap_ins):
                if rng.random() < settings.swap_fault_rate:
                    faults.swap_requests.add(move.request_id)
        return faults

    def check(self) -> None:
        """The invariants of the core; now and then also the content of every cached block."""
        invariants.check(self.scheduler)
        self.checks += 1
        if self.checks % 32 == 0:
            self.check_cached_content()

    def check_gauges(self) -> None:
        """What `stats` and `explain` say can be said at any time and adds up."""
        stats = self.scheduler.stats()
        held = stats.blocks_free + stats.blocks_evictable + stats.blocks_quarantined + stats.blocks_referenced
        if held != stats.blocks_total or not 0.0 <= stats.internal_fragmentation < 1.0:
            raise SimulationFailure(f"the gauges do not add up: {stats}")
        for request_id in (*self.live, *self.ended):
            if request_id not in self.scheduler.explain(request_id):
                raise SimulationFailure(f"explain({request_id}) does not name the request")

    def check_cached_content(self) -> None:
        """Every cached block holds what its chain of entries says: a failed row's KV must never be published."""
        size, memory = self.settings.config.block_size, self.runner.memory
        known: dict[CachedBlock, int] = {}
        for block, entry in self.scheduler.prefix_cache.entries().items():
            chain = []
            node = entry
            while node.parent is not None and node not in known:
                chain.append(node)
                node = node.parent
            value = known[node] if node in known else self._root_kv(node)
            for node in reversed(chain):
                for token in self.scheduler.prefix_cache.token_ids(node):
                    value = hash((value, token))
                known[node] = value
            if memory[block * size + size - 1] != known[entry]:
                raise SimulationFailure(f"cached block {block} does not hold the KV of its tokens")

    def _root_kv(self, root: CachedBlock) -> int:
        if root.key not in self.roots:
            raise SimulationFailure(f"a cached chain hangs on unknown extra keys {root.key!r}")
        return self.roots[root.key]

    def _check_idle(self) -> None:
        self.check()
        if self.scheduler.has_live_requests or self.scheduler.num_running or self.scheduler.num_waiting:
            raise SimulationFailure("the scheduler has live requests after everything ended")
        for tracked in self.live.values():
            raise SimulationFailure(f"{tracked.request_id} never ended: {tracked.request}")

    def drain(self) -> None:
        """Run without new work until nothing is live, within a bound, then check that nothing is held."""
        remaining = sum(t.request.prompt_len + t.expected_tokens for t in self.live.values() if not t.closed)
        bound = self.coverage["steps"] + 20 * (remaining + 10)
        while True:
            self.now += 0.01
            plan = self.schedule(faults_rate=False)
            if self.flights:
                self.commit()
            self.check()
            if isinstance(plan, NoPlan) and not self.flights and not self.scheduler.has_live_requests:
                break
            if self.coverage["steps"] > bound:
                raise SimulationFailure(f"not drained in {bound} steps; live: {self._live_text()}")
        self.deliver(self.scheduler.take_events())
        self._check_idle()


def run_seed(seed: int, steps: int, settings: SimSettings | None = None) -> Simulation:
    """Simulate `steps` plans of one seed, drain, and return the simulation; raises on the first fault found."""
    rng = Random(seed)
    settings = settings or random_settings(rng)
    simulation = Simulation(settings, rng)
    workload = Workload(settings, rng)
    simulation.on_end = lambda tracked: workload.remember(
        tracked.sequence.tokens[: tracked.request.prompt_len + tracked.delivered]
    )
    try:
        for _ in range(20 * steps):
            random_step(simulation, workload)
            if simulation.coverage["steps"] >= steps:
                break
        simulation.drain()
        simulation.coverage["evictions"] = simulation.scheduler.prefix_cache.counters.evictions
        simulation.coverage["forks"] = simulation.scheduler.counters.forks
    except (SimulationFailure, InvariantViolation) as error:
        step = simulation.coverage["steps"]
        error.add_note(f"seed {seed}, step {step}; again: python tests/simulation/run_million.py --seed {seed}")
        raise
    return simulation


def random_step(simulation: Simulation, workload: Workload) -> None:
    """One turn of an engine's loop under random input."""
    rng, settings = simulation.rng, simulation.settings
    draw = rng.random
    simulation.now += draw() * 0.02
    if draw() < settings.arrival_rate or not simulation.live:
        for _ in range(rng.choice((1, 1, 1, 2, 4)) * settings.burst):
            if len(simulation.live) < settings.max_live:
                simulation.submit(workload.request())
        if draw() < settings.bad_request_rate and simulation.submit(workload.bad_request()) is not None:
            raise SimulationFailure("a request that can never fit was accepted")
    random_inputs(simulation)
    depth = 2 if settings.overlap and draw() < 0.9 else 1
    plan: StepPlan | NoPlan = NoPlan.IDLE
    if len(simulation.flights) < depth:
        plan = simulation.schedule()
        simulation.check()
        random_inputs(simulation)
    if simulation.flights and (len(simulation.flights) >= depth or isinstance(plan, NoPlan)):
        simulation.commit()
        simulation.check()


def random_inputs(simulation: Simulation) -> None:
    """Cancels, stop strings, cache resets and engine failures, at any point of the loop."""
    rng, settings = simulation.rng, simulation.settings
    if simulation.string_stops and rng.random() < 0.7:
        tracked, output_index = simulation.string_stops.pop()
        if simulation.live.get(tracked.request_id, tracked) is tracked:  # its id may be in use again
            simulation.finish(tracked, output_index)
            simulation.check()
    if settings.cancel_rate and rng.random() < settings.cancel_rate:
        if simulation.live and rng.random() < 0.95:
            simulation.cancel(rng.choice(list(simulation.live)))
        else:
            simulation.cancel(rng.choice(simulation.ended or ["nobody"]))
        simulation.check()
    if settings.reset_rate and rng.random() < settings.reset_rate:
        simulation.reset_prefix_cache()
    if settings.engine_failure_rate and rng.random() < settings.engine_failure_rate:
        simulation.fail_all()
        simulation.check()
    if rng.random() < 0.05:
        simulation.deliver(simulation.scheduler.take_events())
    if rng.random() < 0.005:
        simulation.check_gauges()
