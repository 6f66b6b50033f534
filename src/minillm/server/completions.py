"""/v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minillm.core.errors import InvalidParameterError
from minillm.core.sampling_params import MAX_N, SamplingParams
from minillm.engine.inputs import DEFAULT_MAX_TOKENS
from minillm.engine.outputs import CompletionOutput, RequestOutput, TokenEvent
from minillm.server import sse
from minillm.server.delivery import PromptScores, StreamSink
from minillm.server.generation import Call, ChunkWriter, Endpoint, usage_of
from minillm.server.logprobs import CompletionLogprobs, Scored, TokenSpeller, of_entry, of_event
from minillm.server.protocol import CompletionRequest


class Completions(Endpoint):
    """Text in, text out."""

    prefix = "cmpl"
    kind = "completion"
    chunk_kind = "text_completion"

    def params(self, request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
        """`best_of` samples that many choices and needs their log-probabilities; `echo` with `logprobs` needs the
        prompt's; `max_tokens=0` scores the prompt and is for `echo` only."""
        fields = {"max_tokens": None, **request.sampling_fields()}
        if request.logprobs is not None:
            fields["logprobs"] = request.logprobs
        if request.echo and (request.logprobs is not None or fields["max_tokens"] == 0):
            fields["prompt_logprobs"] = request.logprobs or 0
        if request.best_of is not None:
            fields |= self._best_of(request)
        return replace(defaults, **fields)

    @staticmethod
    def _best_of(request: CompletionRequest) -> dict[str, Any]:
        n, best_of = request.n if request.n is not None else 1, request.best_of
        assert best_of is not None
        if not 1 <= n <= best_of <= MAX_N:
            raise InvalidParameterError("best_of", best_of, f"it must be at least n={n} and at most {MAX_N}")
        if request.stream and best_of > n:
            raise InvalidParameterError("best_of", best_of, "the best are known at the end only: not with stream")
        return {"n": best_of, "logprobs": request.logprobs or 0}

    def default_max_tokens(self, room: int) -> int:
        """As in the OpenAI API."""
        return DEFAULT_MAX_TOKENS

    def answer(self, call: Call, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """All prompts' choices in order: choice c of prompt p has index p * n + c."""
        speller = self._speller(call)
        n = call.request.n or 1
        choices = []
        for number, output in enumerate(outputs):
            for position, choice in enumerate(best_choices(output.outputs, n)):
                body = self._choice(call, number, output, choice, speller)
                choices.append({"index": number * n + position, **body})
        return {
            "id": call.id,
            "object": "text_completion",
            "created": call.created,
            "model": call.model,
            "choices": choices,
            "usage": usage_of(outputs),
        }

    def _choice(
        self, call: Call, number: int, output: RequestOutput, choice: CompletionOutput, speller: TokenSpeller
    ) -> dict[str, Any]:
        echo = self.prompt_text(call, number) if call.request.echo else ""
        logprobs = None
        count = call.request.logprobs
        if count is not None:
            tokens = scored_prompt(output.prompt_token_ids, output.prompt_logprobs, count) if call.request.echo else []
            entries = choice.logprobs or []
            tokens += [(i, of_entry(i, entry, count)) for i, entry in zip(choice.token_ids, entries, strict=True)]
            logprobs = CompletionLogprobs(speller, count).build(tokens)
        return {
            "text": echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def prompt_text(self, call: Call, number: int) -> str:
        """A prompt as `echo` shows it: the text that was given, or the text of the ids."""
        prompt = call.prompts[number]
        if prompt.text is not None:
            return prompt.text
        return self.state.runtime.tokenizer.decode(prompt.ids, skip_special_tokens=False)

    def _speller(self, call: Call) -> TokenSpeller:
        return TokenSpeller(self.state.runtime.tokenizer, bool(call.request.return_tokens_as_token_ids))

    def writer(self, call: Call, frame: sse.ChunkFrame) -> ChunkWriter:
        """A stream of text."""
        return CompletionWriter(self, call, frame, self._speller(call))


def best_choices(choices: Sequence[CompletionOutput], n: int) -> Sequence[CompletionOutput]:
    """The n choices of the highest mean log-probability per token, best first; all of them in order if there are n."""
    if len(choices) <= n:
        return choices
    return sorted(choices, key=lambda c: -(c.cumulative_logprob or 0.0) / max(1, len(c.token_ids)))[:n]


def scored_prompt(ids: Sequence[int], scores: PromptScores | None, count: int) -> list[tuple[int, Scored | None]]:
    """A prompt's tokens with their scores; the first has none."""
    entries = scores or []
    return [(i, None if entry is None else of_entry(i, entry, count)) for i, entry in zip(ids, entries, strict=True)]


class CompletionWriter:
    """Chunks of text: each token's as it comes, the finish reason in a chunk of its own."""

    def __init__(self, endpoint: Completions, call: Call, frame: sse.ChunkFrame, speller: TokenSpeller) -> None:
        self._endpoint = endpoint
        self._call = call
        self._frame = frame
        self._speller = speller
        self._n = call.params.n
        self._count: int | None = call.request.logprobs
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()
        self._parts = [
            frame.text_parts(index, b'"text":', b',"logprobs":null,"finish_reason":null')
            for index in range(len(call.prompts) * self._n)
        ]

    def on_events(self, index: int, events: Sequence[TokenEvent], sink: StreamSink, frames: list[bytes]) -> None:
        """Frames of one prompt's events."""
        for event in events:
            if event.finish_reason in ("cancelled", "error") and not event.text:
                continue
            number = index * self._n + event.choice
            if self._call.request.echo and number not in self._begun:
                self._begun.add(number)
                frames.append(self._echo(index, number, sink))
            if self._count is not None and event.logprobs is not None:
                scored = of_event(event.logprobs)
                frames.append(self._chunk(number, event.text, [(scored.token_id, scored)]))
            elif event.text:
                before, after = self._parts[number]
                frames.append(before + sse.encode(event.text) + after)
            if event.finish_reason in ("stop", "length"):
                frames.append(self._chunk(number, "", None, event.finish_reason))

    def _echo(self, index: int, number: int, sink: StreamSink) -> bytes:
        tokens = None
        if self._count is not None:
            tokens = scored_prompt(self._call.prompts[index].ids, sink.prompt_scores, self._count)
        return self._chunk(number, self._endpoint.prompt_text(self._call, index), tokens)

    def _chunk(
        self,
        number: int,
        text: str,
        tokens: Sequence[tuple[int, Scored | None]] | None,
        finish_reason: str | None = None,
    ) -> bytes:
        logprobs = None
        if tokens is not None and self._count is not None:
            builder = self._logprobs.setdefault(number, CompletionLogprobs(self._speller, self._count))
            logprobs = builder.build(tokens)
        return self._frame.choice({"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason})
