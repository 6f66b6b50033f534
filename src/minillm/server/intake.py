"""From a body's bytes to a checked request with token ids: parsing, the chat template, tokenising, compiling forms.

All of it is CPU work that grows with the body, so none of it runs on the event loop. Small bodies are read in threads.
A large one would hold Python's global lock there for as long as one regular expression or one copy of it takes, up to
seconds, and stop every stream: it goes to a process of its own (:mod:`minillm.server.intake_process`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from minillm.core.errors import EmptyPromptError, InvalidParameterError, PromptTooLongError
from minillm.models.tokenizer import Tokenizer
from minillm.server.errors import ApiError, ClientGone
from minillm.server.intake_process import IntakeProcesses
from minillm.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    decode,
)
from minillm.server.tools import plan_tools

NUM_THREADS = 2
NUM_COMPILERS = 2
MAX_COMPILING = 64
"""Calls that may wait for the form of their output to be compiled; one takes up to some seconds."""
LARGE_BODY = 64 << 10
"""Bytes from which a body is read in another process."""

R = TypeVar("R", CompletionRequest, ChatRequest)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextTools:
    """What turns text into ids: the tokenizer, the operator's chat template, the limits and names that are checked."""

    tokenizer: Tokenizer
    chat_template: str | None
    max_model_len: int
    max_model_len_reduced: bool
    model_names: tuple[str, ...]

    def check_model(self, name: str | None) -> None:
        """Raise a 404 for a name that is not served; None is the only model there is."""
        if name is not None and name not in self.model_names:
            known = ", ".join(self.model_names)
            message = f"model={name[:200]!r} does not exist; served here: {known}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_length(self, ids: Sequence[int]) -> None:
        """Refuse a prompt that can never run, before its ids go anywhere."""
        if not ids:
            raise EmptyPromptError
        if len(ids) >= self.max_model_len + 1:
            raise PromptTooLongError(len(ids), None, self.max_model_len, self.max_model_len_reduced)


class ReadPrompt(msgspec.Struct):
    """One prompt's ids, and its text where it came as text."""

    ids: list[int]
    text: str | None = None


class ReadBody(msgspec.Struct, Generic[R]):
    """A checked request, without what is long in it (prompt, messages), and its prompts."""

    request: R
    prompts: list[ReadPrompt]


def read_completion(body: bytes, tools: TextTools) -> ReadBody[CompletionRequest]:
    """Parse and tokenise a body of /v1/completions."""
    request = _decode_generation(body, tools, CompletionRequest)
    add_special = request.add_special_tokens is not False
    prompts = [_read_prompt(prompt, tools, add_special) for prompt in prompts_of(request.prompt)]
    request.prompt = ""
    return ReadBody(request, prompts)


def read_chat(body: bytes, tools: TextTools) -> ReadBody[ChatRequest]:
    """Parse, render and tokenise a body of /v1/chat/completions."""
    request = _decode_generation(body, tools, ChatRequest)
    arguments = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", request.reasoning_effort)
    plan = plan_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    ids = encode_chat(request, tools, arguments, None if plan is None else plan.template_tools)
    tools.check_length(ids)
    request.messages = []
    request.chat_template_kwargs = None
    return ReadBody(request, [ReadPrompt(ids)])


def _decode_generation(body: bytes, tools: TextTools, kind: type) -> Any:
    request: GenerationRequest = decode(body, kind)
    tools.check_model(request.model)
    if request.stream_options is not None and not request.stream:
        message = "stream_options is only allowed when stream is true"
        raise ApiError(400, message, param="stream_options", code="invalid_value")
    return request


def encode_chat(
    request: ChatRequest | TokenizeRequest,
    text: TextTools,
    arguments: dict[str, Any],
    tools: list[dict[str, Any]] | None,
) -> list[int]:
    """Token ids of a conversation through the chat template."""
    goes_on = bool(request.continue_final_message)
    prompted = request.add_generation_prompt
    ids = text.tokenizer.apply_chat_template(
        request.messages or [],
        add_generation_prompt=not goes_on if prompted is None else prompted,
        tools=tools,
        chat_template=text.chat_template,
        continue_final_message=goes_on,
        chat_template_kwargs=arguments,
    )
    assert not isinstance(ids, str)
    return ids


def prompts_of(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts that the OpenAI API's four forms stand for."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise EmptyPromptError
    for kind in (str, list):
        if all(isinstance(item, kind) for item in prompt):
            return prompt
    if all(isinstance(item, int) for item in prompt):
        return [prompt]
    rule = "it must be text, token ids, a list of texts, or a list of lists of token ids"
    raise InvalidParameterError("prompt", prompt[:4], rule)


def _read_prompt(prompt: str | list[int], tools: TextTools, add_special_tokens: bool) -> ReadPrompt:
    if isinstance(prompt, str):
        read = ReadPrompt(tools.tokenizer.encode(prompt, add_special_tokens=add_special_tokens), prompt)
    else:
        read = ReadPrompt(prompt)
    tools.check_length(read.ids)
    return read


def tokenize(body: bytes, tools: TextTools) -> bytes:
    """The answer of /tokenize, as JSON."""
    request = decode(body, TokenizeRequest)
    tools.check_model(request.model)
    if (request.prompt is None) is (request.messages is None):
        raise ApiError(400, "exactly one of prompt and messages is needed", param="prompt", code="missing_field")
    if request.messages is not None:
        ids = encode_chat(request, tools, dict(request.chat_template_kwargs or {}), request.tools or None)
    else:
        ids = tools.tokenizer.encode(request.prompt or "", add_special_tokens=request.add_special_tokens is not False)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": tools.max_model_len, "tokens": ids}
    if request.return_token_strs:
        answer["token_strs"] = [tools.tokenizer.id_to_piece(token_id) for token_id in ids]
    return msgspec.json.encode(answer)


def detokenize(body: bytes, tools: TextTools) -> bytes:
    """The answer of /detokenize, as JSON."""
    request = decode(body, DetokenizeRequest)
    tools.check_model(request.model)
    size = tools.tokenizer.vocab_size
    for token_id in request.tokens:
        if not 0 <= token_id < size:
            raise InvalidParameterError("tokens", token_id, f"a token id must be in [0, {size})")
    text = tools.tokenizer.decode(request.tokens, skip_special_tokens=False)
    return msgspec.json.encode({"prompt": text})


READERS: dict[str, Callable[[bytes, TextTools], Any]] = {
    "completion": read_completion,
    "chat": read_chat,
    "tokenize": tokenize,
    "detokenize": detokenize,
}
"""What a body can be read as. The first two give a :class:`ReadBody`, the others the JSON of an answer."""

RESULT_TYPES: dict[str, Any] = {
    "completion": ReadBody[CompletionRequest],
    "chat": ReadBody[ChatRequest],
    "tokenize": bytes,
    "detokenize": bytes,
}


class Intake:
    """Runs the readers of this module for the event loop."""

    def __init__(self, tools: TextTools) -> None:
        self.tools = tools
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="minillm-intake")
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="minillm-compile")
        self._num_compiling = 0
        self._processes = IntakeProcesses(tools) if Path(tools.tokenizer.source).exists() else None

    async def read(self, kind: str, body: bytes, is_wanted: Callable[[], bool]) -> Any:
        """The body as `kind` (see `READERS`), unless `is_wanted` says when its turn comes that nobody waits for it any
        more."""
        if self._processes is not None and len(body) >= LARGE_BODY:
            result = await self._processes.read(kind, body, is_wanted)
            return msgspec.msgpack.decode(result, type=RESULT_TYPES[kind])

        return await self._run(self._threads, partial(READERS[kind], body, self.tools), is_wanted)

    async def compile(self, work: Callable[[], T], is_wanted: Callable[[], bool]) -> T:
        """Work that compiles a form of an output first: in threads of its own, since a few forms made for the purpose
        could hold up everything else that runs in threads. Raises a 429 when too many wait."""
        if self._num_compiling >= MAX_COMPILING:
            message = (
                f"{self._num_compiling} calls wait until the form of their output is compiled; no more are taken now"
            )
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "5"})
        self._num_compiling += 1
        try:
            return await self._run(self._compilers, work, is_wanted)
        finally:
            self._num_compiling -= 1

    @staticmethod
    async def _run(pool: ThreadPoolExecutor, work: Callable[[], T], is_wanted: Callable[[], bool]) -> T:
        def run() -> T:
            if not is_wanted():
                raise ClientGone
            return work()

        return await asyncio.get_running_loop().run_in_executor(pool, run)

    async def close(self) -> None:
        """Wait for nothing; drop what has not begun."""
        for pool in (self._threads, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            await self._processes.close()
