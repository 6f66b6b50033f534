"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minillm.core.errors import InvalidParameterError
from minillm.core.sampling_params import SamplingParams
from minillm.engine.outputs import CompletionOutput, RequestOutput, TokenEvent
from minillm.server import sse
from minillm.server.delivery import StreamSink
from minillm.server.generation import Call, ChunkWriter, Endpoint, usage_of
from minillm.server.intake import read_chat
from minillm.server.logprobs import TokenSpeller, chat_entry, of_entry, of_event
from minillm.server.protocol import ChatRequest


class Chat(Endpoint):
    """A conversation in, the assistant's next message out."""

    prefix = "chatcmpl"
    reader = staticmethod(read_chat)
    chunk_kind = "chat.completion.chunk"

    def params(self, request: ChatRequest, defaults: SamplingParams) -> SamplingParams:
        """`logprobs: true` alone reports the tokens themselves, without alternatives."""
        fields = {"max_tokens": None, **request.sampling_fields()}
        if request.max_completion_tokens is not None:
            if request.max_tokens not in (None, request.max_completion_tokens):
                rule = f"it differs from max_tokens={request.max_tokens}; give one of them"
                raise InvalidParameterError("max_completion_tokens", request.max_completion_tokens, rule)
            fields["max_tokens"] = request.max_completion_tokens
        if request.logprobs:
            fields["logprobs"] = request.top_logprobs or 0
        elif request.top_logprobs:
            raise InvalidParameterError("top_logprobs", request.top_logprobs, "it needs logprobs=true")
        try:
            return replace(defaults, **fields)
        except InvalidParameterError as error:
            if error.field == "logprobs":
                raise InvalidParameterError("top_logprobs", error.value, error.rule) from None
            raise

    def default_max_tokens(self, room: int) -> int:
        """What is left of the context."""
        return room

    def answer(self, call: Call, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """One message per choice."""
        speller = self._speller(call)
        choices = [self._choice(call, choice, speller) for choice in outputs[0].outputs]
        return {
            "id": call.id,
            "object": "chat.completion",
            "created": call.created,
            "model": call.model,
            "choices": choices,
            "usage": usage_of(outputs),
        }

    def _choice(self, call: Call, choice: CompletionOutput, speller: TokenSpeller) -> dict[str, Any]:
        logprobs = None
        if choice.logprobs is not None:
            count = call.params.logprobs or 0
            tokens = zip(choice.token_ids, choice.logprobs, strict=True)
            content = [chat_entry(of_entry(token_id, entry, count), speller) for token_id, entry in tokens]
            logprobs = {"content": content, "refusal": None}
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _speller(self, call: Call) -> TokenSpeller:
        return TokenSpeller(self.state.runtime.tokenizer, bool(call.request.return_tokens_as_token_ids))

    def writer(self, call: Call, frame: sse.ChunkFrame) -> ChunkWriter:
        """A stream of deltas."""
        return ChatWriter(call, frame, self._speller(call))


class ChatWriter:
    """Per choice: the role first, then content, then the finish reason with an empty delta."""

    def __init__(self, call: Call, frame: sse.ChunkFrame, speller: TokenSpeller) -> None:
        self._frame = frame
        self._speller = speller
        self._begun: set[int] = set()
        self._parts = [
            frame.text_parts(index, b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null')
            for index in range(call.params.n)
        ]

    def on_events(self, index: int, events: Sequence[TokenEvent], sink: StreamSink, frames: list[bytes]) -> None:
        """Frames of the events; all belong to the call's one prompt."""
        for event in events:
            if event.finish_reason in ("cancelled", "error") and not event.text:
                continue
            if event.choice not in self._begun:
                self._begun.add(event.choice)
                frames.append(self._chunk(event.choice, {"role": "assistant", "content": ""}))
            if event.logprobs is not None:
                content = [chat_entry(of_event(event.logprobs), self._speller)]
                logprobs = {"content": content, "refusal": None}
                frames.append(self._chunk(event.choice, {"content": event.text}, logprobs))
            elif event.text:
                before, after = self._parts[event.choice]
                frames.append(before + sse.encode(event.text) + after)
            if event.finish_reason in ("stop", "length"):
                frames.append(self._chunk(event.choice, {}, None, event.finish_reason))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        return self._frame.choice(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        )
