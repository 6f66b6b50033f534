"""Stop strings: where an output's text ends.

The match that is complete first ends the output; of several that end at the same character, the longest. This does
not depend on how the text is cut into tokens, so streaming and not streaming give the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minillm.core.sampling_params import SamplingParams
from minillm.engine.detokenizer import make_detokenizer
from minillm.models.tokenizer import Tokenizer


class StopResult(NamedTuple):
    """What a token's text leads to.

    ``text`` may go out now. ``stop_index`` is the index of the output token that completes a stop string, else None;
    ``stop`` is that string.
    """

    text: str
    stop_index: int | None = None
    stop: str | None = None


class StopChecker:
    """Looks for stop strings in the text of one sequence, across tokens.

    Text that could become a stop string (a suffix that is a proper prefix of one) is held back until the following
    text decides. A match whose last character comes from one of the first ``min_tokens`` tokens does not count.
    """

    __slots__ = ("_firsts", "_held", "_include", "_min_tokens", "_stops")

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False, min_tokens: int = 0) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._held = ""

    def add(self, delta: str, index: int) -> StopResult:
        """Take in the text that output token `index` (0-based) added. Not to be called again after a match."""
        if not self._held and self._firsts.isdisjoint(delta):
            return StopResult(delta)
        text = self._held + delta
        match = self._first_match(text, len(self._held)) if index >= self._min_tokens else None
        if match is not None:
            start, stop = match
            self._held = ""
            return StopResult(text[: start + len(stop) if self._include else start], index, stop)
        cut = len(text) - self._num_to_hold(text)
        self._held = text[cut:]
        return StopResult(text[:cut])

    def finish(self) -> str:
        """What was held back, once no text will follow."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str, num_old: int) -> tuple[int, str] | None:
        """(start, stop string) of the first match to be complete; only matches that end behind `num_old` characters
        count: the others were judged when their last token came."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])

    def _num_to_hold(self, text: str) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < len(text) - longest:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(stop[0], at + 1)
        return longest


def special_stop_ids(tokenizer: Tokenizer, stops: Sequence[str]) -> dict[int, str]:
    """Ids of the stop strings that name a special token, with the string.

    Such a token never shows in the text while special tokens are skipped, so its string could not match. Add these
    ids to a request's stop ids at submit; the string remains a stop string too, for the case that it is spelled out
    in ordinary tokens.
    """
    ids = {}
    for stop in stops:
        token_id = tokenizer.piece_to_id(stop)
        if token_id is not None and token_id in tokenizer.special_ids:
            ids[token_id] = stop
    return ids


class TextStream:
    """The text of one output: detokenises its tokens and ends it at a stop string."""

    __slots__ = ("_checker", "_detokenizer", "_index")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._detokenizer = make_detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._checker = (
            StopChecker(params.stop, params.include_stop_str_in_output, params.min_tokens) if params.stop else None
        )
        self._index = 0

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that may go out now, and the stop string that ends the output with this token (or None)."""
        delta = self._detokenizer.add(token_id)
        if self._checker is None:
            return delta, None
        text, _, stop = self._checker.add(delta, self._index)
        self._index += 1
        return text, stop

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The text of several tokens at once; for outputs without stop strings."""
        return self._detokenizer.add_all(token_ids)

    def flush(self) -> str:
        """The rest of the text; once, at the end of an output that no stop string ended."""
        tail = self._detokenizer.finish()
        if self._checker is None:
            return tail
        return self._checker.finish() + tail
