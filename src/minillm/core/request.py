"""A request: one sequence with its states, its tokens and its KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from minillm.core.errors import IllegalTransitionError
from minillm.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minillm.core.decode_set import DecodeSet
    from minillm.core.prefix_cache import CachedBlock


class RequestState(Enum):
    """States of a request; :data:`LEGAL_TRANSITIONS` says which may follow which."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SWAPPED = "swapped"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


_END = (RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED)

LEGAL_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PREFILLING, *_END}),
    RequestState.PREFILLING: frozenset({RequestState.DECODING, RequestState.SWAPPED, RequestState.PREEMPTED, *_END}),
    RequestState.DECODING: frozenset({RequestState.SWAPPED, RequestState.PREEMPTED, *_END}),
    RequestState.SWAPPED: frozenset({RequestState.PREFILLING, RequestState.DECODING, RequestState.PREEMPTED, *_END}),
    RequestState.PREEMPTED: frozenset({RequestState.PREFILLING, *_END}),
    RequestState.FINISHED: frozenset(),
    RequestState.CANCELLED: frozenset(),
    RequestState.FAILED: frozenset(),
}

ENDED = frozenset(_END)
RUNNING = frozenset({RequestState.PREFILLING, RequestState.DECODING})
QUEUED = frozenset({RequestState.WAITING, RequestState.SWAPPED, RequestState.PREEMPTED})


class Transition(NamedTuple):
    """One entry of a request's history: when it came into a state, at which step, and why."""

    time: float
    step: int
    state: RequestState
    reason: str


class EndedRequest(NamedTuple):
    """What is kept of an ended request, so that it can still be explained: its tokens are not."""

    request_id: str
    state: RequestState
    finish_reason: str | None
    error: str | None
    arrival_time: float
    prompt_len: int
    cached_tokens: int
    num_generated: int
    num_preemptions: int
    history: list[Transition]


class Request:
    """One sequence. ``n > 1`` is a group: a parent and ``n - 1`` children that fork from it after its prefill.

    Identity and input: ``request_id, input_ids, sampling_params, priority, arrival_time, user, cache_salt, deadline``
    (seconds on the caller's clock; None: none), ``seed`` (64 bit) and ``choice``.

    Progress: ``generated_ids`` are the committed output tokens; ``kv_tokens`` counts the tokens that have KV after
    all issued plans; ``row`` is the sequence slot while running (-1 otherwise).
    ``len(block_table) == ceil(kv_tokens / block_size)`` while running.

    Positions and output indices: the row that computes position p samples output p - prompt_len + 1, so nothing
    else needs counting to know what is in flight.
    """

    __slots__ = (
        "_kv_tokens",
        "arrival_seq",
        "arrival_time",
        "block_keys",
        "block_table",
        "cache_salt",
        "cached_tokens",
        "child_of",
        "children",
        "choice",
        "deadline",
        "decode_index",
        "decode_set",
        "error",
        "finish_reason",
        "finish_time",
        "first_scheduled_time",
        "first_token_time",
        "generated_ids",
        "grammar",
        "group_size",
        "history",
        "input_ids",
        "last_position",
        "max_tokens",
        "num_preemptions",
        "order_key",
        "pending_fork",
        "prefill_target",
        "priority",
        "prompt_len",
        "prompt_scored",
        "published",
        "recomputed_tokens",
        "request_id",
        "row",
        "sampling_params",
        "seed",
        "started",
        "state",
        "stop_ids",
        "swap_slots",
        "user",
    )

    def __init__(
        self,
        request_id: str,
        input_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        user: str = "",
        cache_salt: str | None = None,
        deadline: float | None = None,
        seed: int = 0,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        params = sampling_params if sampling_params is not None else SamplingParams()
        self.request_id = request_id
        self.input_ids = list(input_ids)
        self.prompt_len = len(self.input_ids)
        self.sampling_params = params
        self.priority = priority
        self.arrival_time = arrival_time
        self.arrival_seq = -1
        """Number in the order of first arrival; given by the scheduler at submit, kept through preemptions."""
        self.user = user
        self.cache_salt = cache_salt or None
        self.deadline = deadline
        self.seed = seed
        self.choice = 0
        self.stop_ids: frozenset[int] = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )

        self.grammar: Any = None
        """The compiled form of `sampling_params.structured_outputs`, for the engine; the core does not look at it."""

        self.state = RequestState.WAITING
        self.generated_ids: list[int] = []
        """Changed in place only: the decode set and plans in flight append to this very list."""
        self.block_table: list[int] = []
        self.swap_slots: list[int] = []
        self._kv_tokens = 0
        self.decode_set: DecodeSet | None = None
        self.decode_index = -1
        """Place in the columns of `decode_set` while decoding."""
        self.max_tokens = params.max_tokens
        """Output limit; None until the scheduler sets it at submit to what is left of the context."""
        self.last_position = 0
        """The position whose sample is the last one under `max_tokens`; set at submit."""
        self.prefill_target = self.prompt_len
        """Tokens to have in KV before the next sample: the prompt, or on a rebuild prompt + generated."""
        self.row = -1
        self.published: list[CachedBlock] = []
        """The chain of prefix-cache entries for this sequence's first full blocks (hits and own publications)."""
        self.block_keys: list[bytes] = []
        """Prefix-cache keys of the first full blocks, computed once."""
        self.prompt_scored = 0
        """Prompt positions whose logprobs were delivered (position 0 has none and counts)."""
        self.group_size = params.n
        self.pending_fork = params.n > 1
        """Whether this is a group parent whose children have not forked yet."""
        self.children: list[Request] = []
        self.child_of: Request | None = None

        self.order_key: tuple = ()
        """Place in the total order (smaller runs first); maintained by the waiting queue's policy."""
        self.started = False
        self.cached_tokens = 0
        self.recomputed_tokens = 0
        self.num_preemptions = 0
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.history: list[Transition] = [Transition(arrival_time, -1, RequestState.WAITING, "submitted")]

    @property
    def kv_tokens(self) -> int:
        """Tokens that have KV after all issued plans. While decoding it lives in the decode set's columns."""
        return self._kv_tokens if self.decode_set is None else self.decode_set.positions[self.decode_index]

    @kv_tokens.setter
    def kv_tokens(self, value: int) -> None:
        assert self.decode_set is None, "a decoding request advances with its decode set"
        self._kv_tokens = value

    @property
    def num_tokens(self) -> int:
        """Committed tokens: prompt and output."""
        return self.prompt_len + len(self.generated_ids)

    @property
    def members(self) -> list[Request]:
        """The sequences that this one's prefill serves: itself and, until they fork, its live children."""
        if not self.pending_fork:
            return [self]
        return [self, *(child for child in self.children if not child.is_ended)]

    @property
    def is_ended(self) -> bool:
        """Whether the request is finished, cancelled or failed."""
        return self.finish_reason is not None

    def token_ids(self, start: int, end: int) -> list[int]:
        """Committed token ids of positions [start, end)."""
        n = self.prompt_len
        if end <= n:
            return self.input_ids[start:end]
        if start >= n:
            return self.generated_ids[start - n : end - n]
        return self.input_ids[start:] + self.generated_ids[: end - n]

    def transition(self, state: RequestState, now: float, step: int, reason: str) -> None:
        """Change into `state`; raises :class:`IllegalTransitionError` if it may not follow the present one."""
        if state not in LEGAL_TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"request {self.request_id}: {self.state.value} -> {state.value} ({reason})")
        self.state = state
        self.history.append(Transition(now, step, state, reason))

    def fork(self, choice: int) -> Request:
        """A child of this group parent for choice `choice`, without KV; the scheduler gives it row and blocks."""
        child = Request(
            f"{self.request_id}#{choice}",
            self.input_ids,
            self.sampling_params,
            priority=self.priority,
            arrival_time=self.arrival_time,
            user=self.user,
            cache_salt=self.cache_salt,
            deadline=self.deadline,
            seed=self.seed,
        )
        child.input_ids = self.input_ids
        child.choice = choice
        child.stop_ids = self.stop_ids
        child.grammar = self.grammar
        child.arrival_seq = self.arrival_seq
        child.max_tokens = self.max_tokens
        child.last_position = self.last_position
        child.prompt_scored = self.prompt_len  # the parent has the prompt's logprobs
        child.child_of = self
        child.group_size = 1
        child.pending_fork = False
        return child

    def ended(self) -> EndedRequest:
        """The record that outlives the request."""
        return EndedRequest(
            request_id=self.request_id,
            state=self.state,
            finish_reason=self.finish_reason,
            error=self.error,
            arrival_time=self.arrival_time,
            prompt_len=self.prompt_len,
            cached_tokens=self.cached_tokens,
            num_generated=len(self.generated_ids),
            num_preemptions=self.num_preemptions,
            history=self.history,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, prompt={self.prompt_len}, "
            f"generated={len(self.generated_ids)}, kv={self.kv_tokens}, blocks={len(self.block_table)})"
        )
