"""Grammars of the running requests: which sampling row follows which, and the masks of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minillm.core.plan import StepEvents, StepPlan
from minillm.core.request import Request
from minillm.engine.grammar import GrammarError, GrammarMatcher, mask_words

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class GrammarEnds:
    """Sequences that the engine has to end: (id, index of the last token), and (id, what went wrong)."""

    complete: list[tuple[str, int]] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Follower:
    """A live sequence, and where it stands in its grammar once it has begun."""

    request: Request
    _matcher: GrammarMatcher | None = None

    @property
    def matcher(self) -> GrammarMatcher:
        if self._matcher is None:
            request = self.request
            may_end = not request.sampling_params.ignore_eos
            self._matcher = request.grammar.matcher(request.generated_ids, may_end=may_end)
        return self._matcher


class GrammarRows:
    """The matchers of all live sequences that have a grammar. For the engine's thread.

    Rows change hands by the plans' assignments, as in the runner; a sequence's matcher follows its committed tokens,
    wherever the sequence is.
    """

    def __init__(self) -> None:
        self._followers: dict[str, _Follower] = {}
        self._owners: dict[int, str] = {}
        """Sequence id by row, for rows of sequences that have a grammar."""
        self._ends = GrammarEnds()
        """What was found while making masks."""

    @property
    def num_live(self) -> int:
        """Live sequences with a grammar."""
        return len(self._followers)

    def add(self, sequences: Iterable[Request]) -> None:
        """Follow these sequences (of one request, with a compiled grammar) from their first token on."""
        self._followers.update((request.request_id, _Follower(request)) for request in sequences)

    def clear(self) -> None:
        """Forget all of them."""
        self._followers.clear()
        self._owners.clear()
        self._ends = GrammarEnds()

    @property
    def has_ends(self) -> bool:
        """Whether making masks found sequences that have to end."""
        return bool(self._ends.complete or self._ends.broken)

    def take_events(self, events: StepEvents) -> GrammarEnds:
        """Follow the tokens of a commit, and forget the sequences that ended. Returns all ends found since the last."""
        ends, self._ends = self._ends, GrammarEnds()
        if not self._followers:
            return ends
        for finish in events.finished:
            self._followers.pop(finish.request_id, None)
        for sequence_id in events.tokens.request_ids:
            follower = self._followers.get(sequence_id)
            if follower is not None:
                self._advance(sequence_id, follower, ends)
        if not self._followers:
            self._owners.clear()
        return ends

    def _advance(self, sequence_id: str, follower: _Follower, ends: GrammarEnds) -> None:
        try:
            if follower.matcher.advance():
                ends.complete.append((sequence_id, len(follower.request.generated_ids) - 1))
        except GrammarError as error:
            ends.broken.append((sequence_id, f"its grammar failed: {error}"))

    def take_plan(self, plan: StepPlan) -> bool:
        """Note who owns which row from this plan on; whether a sequence with a grammar is sampled in it."""
        if not self._followers:
            return False
        for assignment in plan.assignments:
            if assignment.request_id in self._followers:
                self._owners[assignment.row] = assignment.request_id
            else:
                self._owners.pop(assignment.row, None)
        return not self._owners.keys().isdisjoint(_sampling_rows(plan))

    def masks(self, plan: StepPlan) -> np.ndarray | None:
        """Which tokens each sampling row may take: int32 [R, ceil(V / 32)], bit i of word w is token 32 w + i.

        All plans before this one must have committed. Rows without a grammar, and those of sequences that have ended,
        may take any. None if that goes for all of them. :meth:`take_events` returns what ends with this.
        """
        rows = _sampling_rows(plan)
        masks: np.ndarray | None = None
        for position, row in enumerate(rows):
            sequence_id = self._owners.get(row)
            follower = None if sequence_id is None else self._followers.get(sequence_id)
            if sequence_id is None or follower is None or follower.request.is_ended:
                continue
            if masks is None:
                import numpy as np

                masks = np.full((len(rows), mask_words(follower.request.grammar.vocab_size)), -1, dtype=np.int32)
            try:
                if follower.matcher.fill(masks[position]):
                    continue
                self._ends.complete.append((sequence_id, len(follower.request.generated_ids) - 1))
            except GrammarError as error:
                self._ends.broken.append((sequence_id, f"its grammar failed: {error}"))
            masks[position] = -1  # the row will be discarded
        return masks


def _sampling_rows(plan: StepPlan) -> list[int]:
    """Row of each sampling row, in the order of the outcome."""
    return [*plan.decodes.rows, *(row for chunk in plan.prefills for row in chunk.sample_rows)]
