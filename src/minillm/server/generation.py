"""What completions and chats have in common: from a call to requests of the engine, and back to an answer.

```
body ──► intake (threads): fields, token ids ──► plan: one engine request per prompt ──► attach, all or none
                                                                     │
      whole answer or stream of events ◄── collector ◄── mailbox ◄── engine thread
```
The response's status is sent with the first news of a request, so that whatever fails before is an HTTP error.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from minillm.core.errors import DuplicateRequestError, EngineDeadError, InvalidParameterError, PromptTooLongError
from minillm.core.sampling_params import SamplingParams
from minillm.engine.engine_thread import Ticket
from minillm.engine.outputs import RequestOutput, TokenEvent
from minillm.server import sse
from minillm.server.delivery import Collector, StreamSink
from minillm.server.errors import ApiError, ClientGone, as_api_error, deadline_passed, draining
from minillm.server.exchange import Exchange, Receive, Scope, Send
from minillm.server.gate import CLIENT_ID_RULE, is_client_id
from minillm.server.intake import ReadBody, ReadPrompt
from minillm.server.protocol import GenerationRequest
from minillm.server.state import ServerState

MAX_BODY_ON_LOOP = 8 << 10
MAX_PROMPTS_ON_LOOP = 8
MAX_ENTRIES_ON_LOOP = 2000
"""What is done at once on the event loop; more goes to a thread. Bytes of a body whose parameters are checked and whose
prompt is submitted (schemas are walked through, a prompt is hashed for the prefix cache), prompts of a list, and tokens
with their alternatives to write out, echoed prompts included."""


@dataclass(slots=True)
class Call:
    """One HTTP call of a client, read and checked."""

    id: str
    created: int
    model: str
    read: ReadBody
    params: SamplingParams
    is_large: bool
    """Whether its body is."""

    @property
    def request(self) -> Any:
        """The body's fields (a :class:`CompletionRequest` or a :class:`ChatRequest`)."""
        return self.read.request

    @property
    def prompts(self) -> list[ReadPrompt]:
        """The call's prompts; each is one request of the engine."""
        return self.read.prompts

    def is_heavy(self, num_tokens: int) -> bool:
        """Whether to write out an answer of so many tokens takes long: log-probabilities are many small objects."""
        shown = sum(len(prompt.ids) for prompt in self.prompts) if getattr(self.request, "echo", False) else 0
        return (num_tokens + shown) * (1 + (self.params.logprobs or 0)) > MAX_ENTRIES_ON_LOOP


class ChunkWriter(Protocol):
    """Makes a call's stream out of events. `index` is the number of the prompt."""

    def on_events(self, index: int, events: Sequence[TokenEvent], sink: StreamSink, frames: list[bytes]) -> None:
        """Append the frames of these events."""


class Endpoint(ABC):
    """An ASGI application for one kind of generation; subclasses say what is theirs."""

    prefix: str
    """First part of the answer's id."""
    kind: str
    """What the intake reads the body as."""
    chunk_kind: str
    """The `object` of a stream's chunks."""

    def __init__(self, state: ServerState) -> None:
        self.state = state

    @abstractmethod
    def params(self, request: Any, defaults: SamplingParams) -> SamplingParams:
        """Sampling parameters of a call, `max_tokens` None where the call does not say. Raises a RequestError."""

    @abstractmethod
    def default_max_tokens(self, room: int) -> int:
        """Tokens to generate where neither the call nor the model says, `room` being what the context has left."""

    @abstractmethod
    def answer(self, call: Call, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of a whole answer."""

    @abstractmethod
    def writer(self, call: Call, frame: sse.ChunkFrame) -> ChunkWriter:
        """The writer of a stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call. Whatever goes wrong becomes an error object; a client that has gone gets nothing."""
        exchange = Exchange(scope, receive, send)
        self.state.num_calls += 1
        try:
            await self._serve(exchange)
        except ClientGone:
            return
        except Exception as error:
            failure = as_api_error(error, self.state.retry_after())
            if self.state.draining and isinstance(error, EngineDeadError):
                failure = draining()  # it did not die: it was closed
            if exchange.started:
                await exchange.write(failure.frame() + sse.DONE, more=False)
            else:
                await exchange.answer_error(failure)
        finally:
            self.state.num_calls -= 1

    async def _serve(self, exchange: Exchange) -> None:
        state = self.state
        state.check_open()
        body = await exchange.read_json_body(state.config.max_body_size, state.config.body_timeout)
        collector = Collector()
        async with exchange.watch_hang_up(collector):
            read = await state.intake.read(self.kind, body, lambda: not collector.hung_up)
            is_large = len(body) > MAX_BODY_ON_LOOP
            del body
            if collector.hung_up:
                raise ClientGone
            state.check_open()
            make = partial(self._call, exchange, read, is_large)
            call = await asyncio.to_thread(make) if is_large else make()
            sinks, tickets = await self._attach(exchange, call, collector)
            try:
                if call.request.stream:
                    await self._stream(exchange, call, collector, sinks)
                else:
                    await self._whole(exchange, call, collector)
            finally:
                for ticket in tickets:
                    state.runtime.cancel_ticket(ticket)

    def _call(self, exchange: Exchange, read: ReadBody, is_large: bool) -> Call:
        request = read.request
        own = exchange.scope["request_id"]
        if request.request_id is not None:
            if not is_client_id(request.request_id):
                raise InvalidParameterError("request_id", request.request_id, CLIENT_ID_RULE)
            own = request.request_id
        params = self.params(request, self.state.runtime.default_sampling_params())
        model = request.model or self.state.model_names[0]
        return Call(f"{self.prefix}-{own}", int(time.time()), model, read, params, is_large)

    async def _attach(
        self, exchange: Exchange, call: Call, collector: Collector
    ) -> tuple[list[StreamSink], list[Ticket]]:
        """Queue the call's requests. A live request of the same id gives this one another."""
        self._check_number(call)
        runtime, mailbox = self.state.runtime, self.state.mailbox
        streams = bool(call.request.stream)
        sinks = [StreamSink(mailbox, collector, index, streams) for index in range(len(call.prompts))]
        timeout = self._timeout(exchange, call.request)
        while True:
            arguments = [self._arguments(call, index, timeout) for index in range(len(call.prompts))]
            attach = partial(runtime.attach, list(zip(arguments, sinks, strict=True)))
            try:
                if not runtime.submits_at_once(call.params):
                    return sinks, await self.state.intake.compile(attach, lambda: not collector.hung_up)
                if call.is_large or len(arguments) > MAX_PROMPTS_ON_LOOP:
                    return sinks, await asyncio.to_thread(attach)
                return sinks, attach()
            except DuplicateRequestError:
                call.id = f"{call.id}-{uuid.uuid4().hex[:8]}"

    def _check_number(self, call: Call) -> None:
        """Refuse a list that the queue could never take: to come again later would not help."""
        config = self.state.runtime.config
        if config.max_waiting is not None and len(call.prompts) > config.max_waiting + config.max_num_seqs:
            rule = f"at most max_waiting={config.max_waiting} + max_num_seqs={config.max_num_seqs} are taken at once"
            raise InvalidParameterError("prompt", f"{len(call.prompts)} prompts", rule)

    def _arguments(self, call: Call, index: int, timeout: float | None) -> dict[str, Any]:
        request: GenerationRequest = call.request
        prompt = call.prompts[index]
        return {
            "prompt": prompt.ids,
            "sampling_params": self._with_max_tokens(call.params, len(prompt.ids)),
            "priority": self.state.clamp_priority(request.priority),
            "user": request.fair_share_user,
            "cache_salt": request.cache_salt,
            "timeout": timeout,
            "request_id": call.id if len(call.prompts) == 1 else f"{call.id}-{index}",
        }

    def _with_max_tokens(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """A limit that was given must fit; the model's own and the API's default are cut to what the context has."""
        if params.max_tokens is not None:
            return params
        runtime = self.state.runtime
        room = runtime.max_model_len - prompt_len
        if room < 1:
            raise PromptTooLongError(prompt_len, 1, runtime.max_model_len, runtime.model_info.max_model_len_reduced)
        limit = runtime.default_sampling_params().max_tokens or self.default_max_tokens(room)
        return replace(params, max_tokens=min(limit, room))

    @staticmethod
    def _timeout(exchange: Exchange, request: GenerationRequest) -> float | None:
        """Seconds from now, from the body or the header; the body's counts if both are given."""
        if request.timeout is not None:
            return request.timeout
        value = exchange.header(b"x-request-timeout")
        if value is None:
            return None
        try:
            return float(value)
        except ValueError:
            raise InvalidParameterError("x-request-timeout", value, "it must be a number of seconds") from None

    async def _whole(self, exchange: Exchange, call: Call, collector: Collector) -> None:
        outputs: dict[int, RequestOutput] = {}
        while len(outputs) < len(call.prompts):
            for index, item in await collector.take():
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, RequestOutput):
                    self._check_end(item)
                    outputs[index] = item
        ordered = [outputs[index] for index in range(len(call.prompts))]
        tokens = sum(len(choice.token_ids) for output in ordered for choice in output.outputs)
        build = partial(self._encoded, call, ordered)
        await exchange.answer_json(await asyncio.to_thread(build) if call.is_heavy(tokens) else build())

    def _encoded(self, call: Call, outputs: Sequence[RequestOutput]) -> bytes:
        return sse.encode(self.answer(call, outputs))

    async def _stream(self, exchange: Exchange, call: Call, collector: Collector, sinks: Sequence[StreamSink]) -> None:
        frame = sse.ChunkFrame(call.id, self.chunk_kind, call.created, call.model, call.request.wants_usage)
        writer = self.writer(call, frame)
        has_long_echo = call.is_heavy(0)
        outputs: list[RequestOutput] = []
        while len(outputs) < len(call.prompts):
            frames: list[bytes] = []
            failure: Exception | None = None
            for index, item in await collector.take():
                if isinstance(item, Exception):
                    failure = item
                elif isinstance(item, RequestOutput):
                    outputs.append(item)
                    failure = failure or self._end_error(item)
                elif has_long_echo:
                    await asyncio.to_thread(writer.on_events, index, item, sinks[index], frames)
                else:
                    writer.on_events(index, item, sinks[index], frames)
            if failure is not None and not (exchange.started or frames):
                raise failure
            if not exchange.started:
                await exchange.start_stream(sse.HEADERS)
            if frames:
                await exchange.write(b"".join(frames))
            if failure is not None:
                raise failure
        end = frame.usage(usage_of(outputs)) if call.request.wants_usage else b""
        await exchange.write(end + sse.DONE, more=False)

    def _check_end(self, output: RequestOutput) -> None:
        error = self._end_error(output)
        if error is not None:
            raise error

    def _end_error(self, output: RequestOutput) -> Exception | None:
        """What a client is told of a request that did not end by itself."""
        if output.metrics.latency is not None:
            self.state.note_latency(output.metrics.latency)
        for choice in output.outputs:
            if choice.finish_reason == "error":
                return choice.error
            if choice.finish_reason == "cancelled":
                if choice.stop_reason == "deadline passed":
                    return deadline_passed()
                if self.state.draining:
                    return draining()
                return ApiError(503, "the request was cancelled by the server", code="cancelled")
        return None


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Token counts of a call; a prompt counts once, however many choices it has."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class ReaderEndpoint:
    """An ASGI application that answers with what the intake makes of the body (/tokenize, /detokenize)."""

    def __init__(self, state: ServerState, kind: str) -> None:
        self.state = state
        self.kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        exchange = Exchange(scope, receive, send)
        config = self.state.config
        collector = Collector()
        try:
            body = await exchange.read_json_body(config.max_body_size, config.body_timeout)
            async with exchange.watch_hang_up(collector):
                answer = await self.state.intake.read(self.kind, body, lambda: not collector.hung_up)
            await exchange.answer_json(answer)
        except ClientGone:
            return
        except Exception as error:
            await exchange.answer_error(as_api_error(error))
