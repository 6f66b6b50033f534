"""StepPlan and StepOutcome: all that passes between the scheduler and a runner, as plain data.

A plan says everything the device does in one step, in this order:

1. ``swap_outs`` (device blocks -> swap slots), 2. ``swap_ins`` (swap slots -> device blocks), 3. ``copies``
   (block -> block, for copy-on-write), 4. ``assignments`` (which request now owns which row),
5. ``table_updates`` (new entries of rows' block tables), 6. the forward pass over the flattened batch: one token of
   each decode row, then each prefill chunk; 7. sampling of the *sampling rows*.

A *row* is a sequence slot, 0 <= row < max_num_seqs: the runner keeps a block-table row, the last sampled token, the
sampling parameters and penalty counts for each. A row keeps its meaning until an assignment names it again.

Sampling rows, in this order: every decode row; then, for each prefill chunk, its ``sample_rows`` in order (a group
parent's last chunk is sampled once per choice, into the row of each choice). ``StepOutcome.token_ids`` is aligned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, repeat
from typing import NamedTuple

from minillm.core.sampling_params import SamplingParams

SCHEMA_VERSION = 1


class NoPlan(Enum):
    """Why `schedule` made no plan."""

    IDLE = "idle"
    """Nothing can be scheduled now: no work, or all of it waits for a plan in flight."""
    DRAIN = "drain"
    """The next plan needs a preemption, swap-in or fork: commit the plan in flight first."""


class SwapOut(NamedTuple):
    """Copy device `blocks` to `swap_slots` (same length, position by position) before anything is written."""

    request_id: str
    blocks: list[int]
    swap_slots: list[int]


class SwapIn(NamedTuple):
    """Copy `swap_slots` to device `blocks`, after the swap-outs."""

    request_id: str
    swap_slots: list[int]
    blocks: list[int]


class BlockCopy(NamedTuple):
    """Copy one whole block on the device (copy-on-write)."""

    source: int
    destination: int


class RowAssignment(NamedTuple):
    """Row `row` now belongs to this request (admitted, resumed or forked): (re)build its state.

    `output_ids` are the tokens generated so far (they count for penalties and give the next output index);
    `input_ids` the prompt. Block table entries come in `table_updates`. The lists are the request's own: read only.
    """

    row: int
    request_id: str
    sampling_params: SamplingParams
    seed: int
    choice: int
    input_ids: list[int]
    output_ids: list[int]


class TableUpdate(NamedTuple):
    """Entries [start, start + len(blocks)) of the row's block table."""

    row: int
    start: int
    blocks: list[int]


class PrefillChunk(NamedTuple):
    """Compute positions [start, end) of a request; positions below `start` have KV already."""

    request_id: str
    row: int
    token_ids: list[int]
    start: int
    end: int
    block_table: list[int]
    sample_rows: tuple[int, ...]
    """Rows that sample from this chunk's last position; empty unless the chunk ends at the prefill target."""
    output_index: int
    """Index of the output token that is sampled (0 on a first prefill, more on a rebuild)."""
    prompt_logprobs: bool
    """Whether the head scores this chunk's prompt positions (never again on a rebuild)."""


@dataclass(slots=True)
class DecodeBatch:
    """The decode rows as parallel columns: row i computes one token at `positions[i]` and samples.

    `token_ids[i]` is the input token, or -1: the token that the plan in flight samples for this row (the runner fills
    it in on the device). `kv_slots[i]` = block * block_size + offset is where its K and V go.
    Treat every column as read-only.
    """

    request_ids: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    kv_slots: list[int] = field(default_factory=list)
    output_indices: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class StepPlan:
    """Everything that the device does in one step (see the module's text for the order)."""

    step: int
    decodes: DecodeBatch
    prefills: list[PrefillChunk]
    swap_outs: list[SwapOut] = field(default_factory=list)
    swap_ins: list[SwapIn] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    assignments: list[RowAssignment] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return len(self.decodes.rows) + sum(chunk.end - chunk.start for chunk in self.prefills)

    @property
    def num_sampling_rows(self) -> int:
        """Length of the aligned columns of the outcome."""
        return len(self.decodes.rows) + sum(len(chunk.sample_rows) for chunk in self.prefills)

    def sampling_request_ids(self) -> list[str]:
        """Request id of each sampling row of a decode, then the id of the chunk's request for each of its rows."""
        ids = list(self.decodes.request_ids)
        for chunk in self.prefills:
            ids.extend(chunk.request_id for _ in chunk.sample_rows)
        return ids


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one position: of the token itself, its rank (1 = most likely), and of the k most likely.

    `top_ids` and `top_logprobs` have exactly k entries, most likely first. Natural log, before temperature.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class StepTimings:
    """Measured seconds of a step's parts; None where not measured. The cost model learns from them."""

    forward: float | None = None
    sample: float | None = None
    swap_out: float | None = None
    swap_in: float | None = None


@dataclass(slots=True)
class StepOutcome:
    """What the runner reports for one plan.

    ``token_ids[i]`` is the list of ids sampled by sampling row i (one id today); ``logprobs`` is aligned, or None when
    no row asked. ``prompt_logprobs`` maps a request id to (first prompt position scored, entries). ``failures`` maps
    the index of a sampling row to its error; ``failed_requests`` names requests whose chunk failed without sampling;
    ``failed_swaps`` names requests of this plan whose swap copy (either way) did not happen.
    """

    step: int
    token_ids: list[list[int]]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    failed_requests: dict[str, str] = field(default_factory=dict)
    failed_swaps: list[str] = field(default_factory=list)
    timings: StepTimings = field(default_factory=StepTimings)
    schema_version: int = SCHEMA_VERSION


class TokenEvent(NamedTuple):
    """One output token, delivered once and in order of `index`."""

    request_id: str
    index: int  # type: ignore[assignment]
    token_id: int
    logprobs: TokenLogprobs | None = None


class FinishEvent(NamedTuple):
    """A request ended. `reason` is stop, length, cancelled or error; `error` says which."""

    request_id: str
    reason: str
    error: str | None = None


class PromptLogprobsEvent(NamedTuple):
    """Scores of prompt positions [start, start + len(entries)); position 0 has none and comes as start = 1."""

    request_id: str
    start: int
    entries: list[TokenLogprobs]


@dataclass(slots=True)
class TokenColumns:
    """Token events as parallel columns: a step of a thousand rows makes no object per token.

    Iterating gives :class:`TokenEvent`. `logprobs` is aligned, or shorter where the rest has none.
    """

    request_ids: list[str] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[TokenEvent]:
        return map(
            TokenEvent,
            self.request_ids,
            self.indices,
            self.token_ids,
            chain(self.logprobs, repeat(None)),
        )

    def append(self, request_id: str, index: int, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Add one event."""
        if logprobs is not None:
            self.logprobs.extend(repeat(None, len(self.request_ids) - len(self.logprobs)))
            self.logprobs.append(logprobs)
        self.request_ids.append(request_id)
        self.indices.append(index)
        self.token_ids.append(token_id)

    def extend(self, request_ids: list[str], indices: list[int], token_ids: list[int]) -> None:
        """Add a batch of events without logprobs."""
        self.request_ids.extend(request_ids)
        self.indices.extend(indices)
        self.token_ids.extend(token_ids)


@dataclass(slots=True)
class StepEvents:
    """What a commit (or a cancel, or an expiry found while scheduling) brought about."""

    tokens: TokenColumns = field(default_factory=TokenColumns)
    finished: list[FinishEvent] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobsEvent] = field(default_factory=list)
    discarded_rows: int = 0
