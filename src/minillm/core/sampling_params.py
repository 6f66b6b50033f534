"""How to sample a request: the validated, immutable parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minillm.core.errors import InvalidParameterError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_N = 128
GREEDY_TEMPERATURE = 1e-4
"""At or below this temperature sampling is greedy: softmax(x / 1e-4) is one-hot for any two logits
that differ by more than 0.002, and the division can no longer overflow half precision."""


def _number(field_name: str, value: object, low: float, high: float, rule: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise InvalidParameterError(field_name, value, "it must be a number")
    if not low <= value <= high:
        raise InvalidParameterError(field_name, value, rule)
    return float(value)


def _integer(field_name: str, value: object, low: int, rule: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameterError(field_name, value, "it must be an integer")
    if value < low:
        raise InvalidParameterError(field_name, value, rule)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, named and defaulted as in vLLM.

    Order of application to the logits: logit_bias, min_tokens mask, penalties (repetition, then presence and
    frequency), temperature, min_p, top_k, top_p. Every violation raises :class:`InvalidParameterError`.

    - ``n``: number of choices; they share the prompt's KV blocks.
    - ``temperature``: 0 (and anything up to 1e-4) is greedy.
    - ``top_k``: -1 and 0 are off. ``top_p``: in [0, 1]; the most likely token is always kept, so 0 keeps that one.
    - ``repetition_penalty`` counts prompt and output; ``presence_penalty`` and ``frequency_penalty`` the output only.
    - ``seed``: None draws one at submit. Output i of choice c is a function of (seed, c, i) alone.
    - ``stop_token_ids`` stop also under ``ignore_eos``; ``min_tokens`` masks them and the EOS ids, and a stop
      string counts only if it ends after the first ``min_tokens`` tokens.
    - ``max_tokens``: None takes the API's default (16 for completions, the rest of the context for chat).
      0 is allowed only with ``prompt_logprobs`` (scoring a prompt).
    - ``logprobs``: None is off; k gives the sampled token and the k most likely ones. Same for ``prompt_logprobs``.
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

    def __post_init__(self) -> None:
        if not 1 <= _integer("n", self.n, 1, "it must be at least 1") <= MAX_N:
            raise InvalidParameterError("n", self.n, f"it must be at most {MAX_N}")
        _number("temperature", self.temperature, 0.0, 1e6, "it must be a finite number >= 0")
        _number("top_p", self.top_p, 0.0, 1.0, "it must be between 0 and 1")
        _integer("top_k", self.top_k, -1, "it must be -1 or 0 (off) or a positive count")
        _number("min_p", self.min_p, 0.0, 1.0, "it must be between 0 and 1")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "it must be between -2 and 2")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "it must be between -2 and 2")
        if _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, "it must be in (0, 100]") == 0.0:
            raise InvalidParameterError("repetition_penalty", self.repetition_penalty, "it must be in (0, 100]")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), "it must fit 64 bits")
            if self.seed >= 2**64:
                raise InvalidParameterError("seed", self.seed, "it must fit 64 bits")
        self._check_lengths()
        self._check_stops()
        self._check_logprobs()
        self._check_logit_bias()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(name, getattr(self, name), "it must be true or false")

    def _check_lengths(self) -> None:
        _integer("min_tokens", self.min_tokens, 0, "it must be at least 0")
        if self.max_tokens is None:
            return
        scoring = self.prompt_logprobs is not None
        _integer("max_tokens", self.max_tokens, 0 if scoring else 1, "it must be at least 1 (0 to score a prompt only)")
        if self.min_tokens > self.max_tokens:
            raise InvalidParameterError("min_tokens", self.min_tokens, f"it exceeds max_tokens={self.max_tokens}")

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidParameterError("stop", len(stop), f"at most {MAX_STOP_STRINGS} stop strings are allowed")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidParameterError("stop", text, "each stop string must be a non-empty string")
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids)
        for token_id in ids:
            _integer("stop_token_ids", token_id, 0, "each id must be at least 0")
        object.__setattr__(self, "stop_token_ids", ids)

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and _integer(name, value, 0, "it must be at least 0") > MAX_LOGPROBS:
                raise InvalidParameterError(name, value, f"it must be at most {MAX_LOGPROBS}")

    def _check_logit_bias(self) -> None:
        bias: dict[int, float] = {}
        for key, value in dict(self.logit_bias).items():
            try:
                token_id = int(key)
            except (TypeError, ValueError):
                raise InvalidParameterError("logit_bias", key, "each key must be a token id") from None
            if token_id < 0:
                raise InvalidParameterError("logit_bias", key, "each key must be a token id >= 0")
            bias[token_id] = _number("logit_bias", value, -100.0, 100.0, "each bias must be between -100 and 100")
        object.__setattr__(self, "logit_bias", bias)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature <= GREEDY_TEMPERATURE

    def check_token_ids(self, vocab_size: int) -> None:
        """Refuse ids outside the vocabulary in `logit_bias` and `stop_token_ids`."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise InvalidParameterError(name, token_id, f"the vocabulary has {vocab_size} entries")
