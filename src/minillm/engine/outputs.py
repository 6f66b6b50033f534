"""What users get: token events while a request runs, and its output at the end (vLLM's field names)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from minillm.core.errors import RequestFailedError
from minillm.core.plan import TokenLogprobs


class TokenEvent(NamedTuple):
    """One output token of one choice, or the end of a choice that came without a token.

    `index` counts the choice's tokens from 0. `text` is what this token adds to the text: it may be empty (a part
    of a character, text that may become a stop string) and the last event brings what was held back, so that the
    join of a choice's texts is its `CompletionOutput.text`. `finish_reason` is set on the last event of a choice,
    and only there: stop, length, cancelled or error. A choice that ends without a further token (cancelled, failed)
    has a last event whose `token_id` is None and whose `index` is its number of tokens.

    `logprob` is the token's own natural-log probability if `SamplingParams.logprobs` was given; `logprobs` has its
    rank and the k most likely ones beside it. `error` is set with the finish reason `error`.
    """

    request_id: str
    choice: int
    index: int  # type: ignore[assignment]  # hides tuple.index
    token_id: int | None
    text: str
    logprob: float | None = None
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None
    error: RequestFailedError | None = None


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural-log probability, its rank in the vocabulary (1 = most likely; None: unknown) and its text."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `token_ids` has every generated token, also the stop token that `text` leaves out.

    `logprobs` has one entry per token: token id -> :class:`Logprob`. The k most likely ones come first, most likely
    first; a token outside them is the (k+1)th entry. `stop_reason` is the stop string or the stop token id that ended
    the choice (None for the model's EOS), or why it was cancelled if not by its caller ("deadline passed"). `error`
    is set with the finish reason `error`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: RequestFailedError | None = None

    @property
    def finished(self) -> bool:
        """Whether the choice has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request in seconds on the engine's monotonic clock; None where the moment never came.

    `num_preemptions` and `recomputed_tokens` sum over the choices.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    recomputed_tokens: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step that had the request."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token (TTFT)."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first token to the end: over (tokens - 1) it is the time per output token (TPOT)."""
        if self.first_token_time is None or self.finished_time is None:
            return None
        return self.finished_time - self.first_token_time

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request's result. `outputs` has one entry per choice, by index.

    `prompt` is the text that was given (None for token ids and for chat messages). `prompt_logprobs`, if asked for,
    has one entry per prompt token; the first is None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV came from the prefix cache."""
        return self.metrics.num_cached_tokens

    @property
    def error(self) -> RequestFailedError | None:
        """The error of the first choice that failed, or None."""
        return next((output.error for output in self.outputs if output.error is not None), None)

    def raise_for_error(self) -> RequestOutput:
        """Raise the request's own error, if a choice ended with `error`; return self otherwise."""
        if self.error is not None:
            raise self.error
        return self
