"""How to sample a request: the validated, immutable parameters."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from minillm.core.errors import InvalidParameterError
from minillm.core.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_N = 128
MAX_MAX_TOKENS = 2**63 - 1
GREEDY_TEMPERATURE = 1e-4
"""At or below this temperature sampling is greedy: softmax(x / 1e-4) is one-hot for any two logits
that differ by more than 0.002, and the division can no longer overflow half precision."""


def _number(name: str, value: Any, low: float, high: float, rule: str) -> float:
    """The value as a float, if it is a real number (numpy's included) in [low, high]; NaN and infinities are not."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise InvalidParameterError(name, value, f"it must be a number; {rule}")
    try:
        number = float(value)
    except OverflowError:
        raise InvalidParameterError(name, value, rule) from None
    if not low <= number <= high:
        raise InvalidParameterError(name, value, rule)
    return number


def _integer(name: str, value: Any, low: int, rule: str, high: float = math.inf) -> int:
    """The value as an int, if it is one of any integer type and in [low, high]."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise InvalidParameterError(name, value, f"it must be an integer; {rule}")
    if number < low:
        raise InvalidParameterError(name, value, rule)
    if number > high:
        raise InvalidParameterError(name, value, f"it must be at most {high}")
    return number


def _items(name: str, value: Any, rule: str) -> tuple[Any, ...]:
    """The members of a list, tuple or other sequence; None has none."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise InvalidParameterError(name, value, rule)
    return tuple(value)


def _token_id_key(key: Any) -> int:
    """A token id that is the key of a mapping: an integer, or, as JSON has it, its decimal digits as a string."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 18:
        return int(key)
    return _integer("logit_bias", key, 0, "each key must be a token id >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, named and defaulted as in vLLM.

    Order of application to the logits: logit_bias, min_tokens mask, penalties (repetition, then presence and
    frequency), temperature, min_p, top_k, top_p. Every violation raises :class:`InvalidParameterError`. Numbers of any
    real type (numpy's too) are stored as plain int and float, the stop lists as tuples.

    - ``n``: number of choices; they share the prompt's KV blocks.
    - ``temperature``: 0 (and anything up to 1e-4) is greedy.
    - ``top_k``: -1 and 0 are off. ``top_p``: in [0, 1]; the most likely token is always kept, so 0 keeps that one.
    - ``repetition_penalty`` counts prompt and output; ``presence_penalty`` and ``frequency_penalty`` the output only.
    - ``seed``: None draws one at submit. Output i of choice c is a function of (seed, c, i) alone.
    - ``stop``: a string or several; None is none, as for ``stop_token_ids`` and ``logit_bias``.
    - ``stop_token_ids`` stop also under ``ignore_eos``; ``min_tokens`` masks them and the EOS ids, and a stop
      string counts only if it ends after the first ``min_tokens`` tokens.
    - ``max_tokens``: None takes the API's default (16 for completions, the rest of the context for chat).
      0 is allowed only with ``prompt_logprobs`` (scoring a prompt).
    - ``logit_bias``: from token id (or its digits as a string, as JSON has it) to a number added to the logit.
    - ``logprobs``: None is off; k gives the sampled token and the k most likely ones. Same for ``prompt_logprobs``.
      Scores are those of the model's own logits, before any mask, as in vLLM.
    - ``structured_outputs``: the form that the output must have (a mapping of its fields will do). An EOS is allowed
      only where the output is complete, and a complete output that nothing can follow ends with it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        self._check_integer("n", 1, "it must be at least 1", MAX_N)
        self._check_number("temperature", 0.0, 1e6, "it must be a finite number >= 0")
        self._check_number("top_p", 0.0, 1.0, "it must be between 0 and 1")
        self._check_integer("top_k", -1, "it must be -1 or 0 (off) or a positive count")
        self._check_number("min_p", 0.0, 1.0, "it must be between 0 and 1")
        self._check_number("presence_penalty", -2.0, 2.0, "it must be between -2 and 2")
        self._check_number("frequency_penalty", -2.0, 2.0, "it must be between -2 and 2")
        self._check_number("repetition_penalty", 0.0, 100.0, "it must be in (0, 100]")
        if self.repetition_penalty == 0.0:
            raise InvalidParameterError("repetition_penalty", self.repetition_penalty, "it must be in (0, 100]")
        if self.seed is not None:
            self._check_integer("seed", -(2**63), "it must fit 64 bits", 2**64 - 1)
        self._check_lengths()
        self._check_stops()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_integer(name, 0, "it must be at least 0", MAX_LOGPROBS)
        self._check_logit_bias()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(name, getattr(self, name), "it must be true or false")
        if self.structured_outputs is not None:
            self._store("structured_outputs", StructuredOutputs.of(self.structured_outputs))

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_number(self, name: str, low: float, high: float, rule: str) -> None:
        self._store(name, _number(name, getattr(self, name), low, high, rule))

    def _check_integer(self, name: str, low: int, rule: str, high: float = math.inf) -> None:
        self._store(name, _integer(name, getattr(self, name), low, rule, high))

    def _check_lengths(self) -> None:
        self._check_integer("min_tokens", 0, "it must be at least 0")
        if self.max_tokens is None:
            return
        scoring = self.prompt_logprobs is not None
        rule = "it must be at least 1 (0 to score a prompt only)"
        self._check_integer("max_tokens", 0 if scoring else 1, rule, MAX_MAX_TOKENS)
        if self.min_tokens > self.max_tokens:
            raise InvalidParameterError("min_tokens", self.min_tokens, f"it exceeds max_tokens={self.max_tokens}")

    def _check_stops(self) -> None:
        rule = "it must be a string or a list of strings"
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop, rule)
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidParameterError("stop", len(stop), f"at most {MAX_STOP_STRINGS} stop strings are allowed")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidParameterError("stop", text, "each stop string must be a non-empty string")
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise InvalidParameterError("stop", text, "a stop string must not hold lone surrogates")
        self._store("stop", stop)
        ids = _items("stop_token_ids", self.stop_token_ids, "it must be a list of token ids")
        rule = "each id must be at least 0"
        self._store("stop_token_ids", tuple(_integer("stop_token_ids", token_id, 0, rule) for token_id in ids))

    def _check_logit_bias(self) -> None:
        given = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(given, Mapping):
            raise InvalidParameterError("logit_bias", given, "it must map token ids to numbers")
        bias: dict[int, float] = {}
        for key, value in given.items():
            token_id = _token_id_key(key)
            if token_id in bias:
                raise InvalidParameterError("logit_bias", key, "the token id is given twice")
            bias[token_id] = _number("logit_bias", value, -100.0, 100.0, "each bias must be between -100 and 100")
        self._store("logit_bias", bias)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature <= GREEDY_TEMPERATURE

    def check_token_ids(self, vocab_size: int) -> None:
        """Refuse ids of `logit_bias` and `stop_token_ids` that are not below `vocab_size`, the width of the logits."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise InvalidParameterError(name, token_id, f"the vocabulary has {vocab_size} entries")
