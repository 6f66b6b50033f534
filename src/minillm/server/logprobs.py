"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from minillm.core.plan import TokenLogprobs
from minillm.engine.outputs import Logprob
from minillm.models.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""JSON has no infinities; vLLM's stand-in."""


class Scored(NamedTuple):
    """A token with its log-probability and the k most likely ones at its position, most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def of_event(scores: TokenLogprobs) -> Scored:
    """From a token event."""
    return Scored(scores.token_id, scores.logprob, list(zip(scores.top_ids, scores.top_logprobs, strict=True)))


def of_entry(token_id: int, entry: Mapping[int, Logprob], count: int) -> Scored:
    """From an output's entry: its first `count` members are the most likely tokens."""
    members = [(other, scored.logprob) for other, scored in entry.items()]
    return Scored(token_id, entry[token_id].logprob, members[:count])


class TokenSpeller:
    """How a token is written in logprobs."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def bytes(self, token_id: int) -> bytes:
        """The token's own bytes."""
        return self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        """Its text; a part of a character as OpenAI writes it (`bytes:\\xf0`), since all parts would look alike."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self.bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_entry(scored: Scored, speller: TokenSpeller) -> dict[str, Any]:
    """One entry of a chat's `logprobs.content`; `top_logprobs` has exactly the asked number of entries."""

    def spelled(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": speller.text(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(speller.bytes(token_id)),
        }

    return {
        **spelled(scored.token_id, scored.logprob),
        "top_logprobs": [spelled(token_id, logprob) for token_id, logprob in scored.top],
    }


class CompletionLogprobs:
    """Builds a completion's `logprobs`; offsets count characters of the returned text, echo included.

    With `count` alternatives a position's map has those, and the token itself if it is not among them; with 0 there
    is no map at all.
    """

    def __init__(self, speller: TokenSpeller, count: int) -> None:
        self._speller = speller
        self._count = count
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def build(self, tokens: Iterable[tuple[int, Scored | None]]) -> dict[str, Any]:
        """The object for the next tokens. The first token of a prompt has no score: (id, None)."""
        texts, logprobs, tops, offsets = [], [], [], []
        for token_id, scored in tokens:
            texts.append(self._speller.text(token_id))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._speller.bytes(token_id)))
            logprobs.append(None if scored is None else max(scored.logprob, MIN_LOGPROB))
            tops.append(None if scored is None else self._top(scored))
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": tops if self._count else None,
            "text_offset": offsets,
        }

    def _top(self, scored: Scored) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in [*scored.top, (scored.token_id, scored.logprob)]:
            top.setdefault(self._speller.text(token_id), max(logprob, MIN_LOGPROB))
        return top
