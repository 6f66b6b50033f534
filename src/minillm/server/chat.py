"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

from minillm.core.errors import InvalidParameterError
from minillm.core.sampling_params import SamplingParams
from minillm.engine.outputs import CompletionOutput, RequestOutput, TokenEvent
from minillm.models.chat_template import select_template
from minillm.server import sse
from minillm.server.delivery import StreamSink
from minillm.server.generation import Call, ChunkWriter, Endpoint, usage_of
from minillm.server.logprobs import TokenSpeller, chat_entry, of_entry, of_event
from minillm.server.protocol import ChatRequest
from minillm.server.tool_parsers import Delta, NamedCallParser, ToolCallParser, ToolFormat, format_of
from minillm.server.tools import ToolPlan, plan_tools

ToolParser: TypeAlias = ToolCallParser | NamedCallParser


class Chat(Endpoint):
    """A conversation in, the assistant's next message out."""

    prefix = "chatcmpl"
    kind = "chat"
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
        plan = tool_plan(request)
        try:
            params = replace(defaults, **fields)
            return params if plan is None else plan.apply(params, self._tool_format)
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
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        finish_reason = choice.finish_reason
        parser = self._parser(call, stream=False)
        if parser is not None:
            read = parser.message(choice.text)
            message["content"] = read.content
            if read.tool_calls:
                message["tool_calls"] = [
                    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                    for c in read.tool_calls
                ]
            finish_reason = parser.finish_reason(choice.finish_reason or "stop")
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": choice.stop_reason,
        }

    @cached_property
    def _tool_format(self) -> ToolFormat:
        """How the model writes calls, as its chat template with tools tells."""
        runtime = self.state.runtime
        template = runtime.chat_template
        if template is None:
            template = select_template(runtime.tokenizer.chat_templates, True, runtime.tokenizer.source)
        return format_of(template)

    def _parser(self, call: Call, stream: bool) -> ToolParser | None:
        """The reader of one choice's tool calls."""
        plan = tool_plan(call.request)
        return None if plan is None else plan.parser(self._tool_format, stream)

    def _speller(self, call: Call) -> TokenSpeller:
        return TokenSpeller(self.state.runtime.tokenizer, bool(call.request.return_tokens_as_token_ids))

    def writer(self, call: Call, frame: sse.ChunkFrame) -> ChunkWriter:
        """A stream of deltas."""
        return ChatWriter(call, frame, self._speller(call), [self._parser(call, True) for _ in range(call.params.n)])


def tool_plan(request: ChatRequest) -> ToolPlan | None:
    """What the call's tools mean; None without tools."""
    return plan_tools(request.tools, request.tool_choice, request.parallel_tool_calls)


class ChatWriter:
    """Per choice: the role first, then content and tool calls, then the finish reason with an empty delta."""

    def __init__(
        self, call: Call, frame: sse.ChunkFrame, speller: TokenSpeller, parsers: Sequence[ToolParser | None]
    ) -> None:
        self._frame = frame
        self._speller = speller
        self._parsers = parsers
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
            choice = event.choice
            if choice not in self._begun:
                self._begun.add(choice)
                frames.append(self._chunk(choice, {"role": "assistant", "content": ""}))
            parser = self._parsers[choice]
            if parser is not None or event.logprobs is not None:
                self._on_special_event(event, parser, frames)
            elif event.text:
                before, after = self._parts[choice]
                frames.append(before + sse.encode(event.text) + after)
            if event.finish_reason in ("stop", "length"):
                reason = event.finish_reason if parser is None else parser.finish_reason(event.finish_reason)
                frames.append(self._chunk(choice, {}, None, reason))

    def _on_special_event(self, event: TokenEvent, parser: ToolParser | None, frames: list[bytes]) -> None:
        """A token with logprobs, or one whose text may belong to a tool call."""
        deltas: list[dict[str, Any]] = []
        if parser is None:
            deltas.append({"content": event.text})
        else:
            deltas += deltas_of(parser.feed(event.text))
            if event.finish_reason is not None:
                deltas += deltas_of(parser.finish())
        logprobs = None
        if event.logprobs is not None:
            logprobs = {"content": [chat_entry(of_event(event.logprobs), self._speller)], "refusal": None}
            deltas = deltas or [{}]
        for delta in deltas:
            frames.append(self._chunk(event.choice, delta, logprobs))
            logprobs = None

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


def deltas_of(delta: Delta) -> list[dict[str, Any]]:
    """What a parser read, as deltas of the API: content and calls apart, as the official client puts them together."""
    deltas: list[dict[str, Any]] = [{"content": delta.content}] if delta.content else []
    calls = []
    for call in delta.calls:
        function = (
            {"arguments": call.arguments} if call.name is None else {"name": call.name, "arguments": call.arguments}
        )
        head = {} if call.id is None else {"id": call.id, "type": "function"}
        calls.append({"index": call.index, **head, "function": function})
    return [*deltas, {"tool_calls": calls}] if calls else deltas
