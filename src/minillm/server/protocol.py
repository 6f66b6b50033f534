"""The bodies of requests: the OpenAI API's fields, vLLM's additions, and what each unsupported one means.

A field that is not known at all is refused with near names, as in the OpenAI API: a misspelt parameter would
otherwise change nothing and nobody would notice. Known fields that cannot change the answer are accepted and ignored
(`Ignored`); known fields that would change it and are not supported are refused unless they have their neutral value
(`REFUSED`).
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Any, TypeVar

import msgspec

from minillm.core.errors import shorten
from minillm.core.sampling_params import SamplingParams
from minillm.server.errors import ApiError
from minillm.server.response_format import structured_outputs_of

T = TypeVar("T")


class Ignored(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of the OpenAI API that cannot change the answer here."""

    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    guided_decoding_backend: Any = None


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": ((None, ""), "insertion is not supported"),
    "audio": ((None,), "only text is supported"),
    "modalities": ((None, ["text"]), "only text is supported"),
    "functions": ((None, []), "it is deprecated; use tools"),
    "function_call": ((None, "none"), "it is deprecated; use tool_choice"),
    "web_search_options": ((None,), "web search is not supported"),
    "verbosity": ((None, "medium"), "it is not supported"),
    "use_beam_search": ((None, False), "beam search is not supported"),
    "length_penalty": ((None, 1), "beam search is not supported"),
    "early_stopping": ((None, False), "beam search is not supported"),
    "bad_words": ((None, []), "it is not supported; use logit_bias"),
    "allowed_token_ids": ((None,), "it is not supported; use logit_bias"),
    "truncate_prompt_tokens": ((None,), "prompts are not truncated"),
    "spaces_between_special_tokens": ((None, True), "it cannot be turned off"),
    "chat_template": ((None,), "clients cannot give a template; the operator does, with --chat-template"),
    "documents": ((None, []), "give them in the messages, or in chat_template_kwargs"),
}
"""Field -> the values that mean nothing, and why others are refused."""


class Unsupported(Ignored, kw_only=True):
    """The fields of `REFUSED`, so that their neutral values pass."""

    suffix: Any = None
    audio: Any = None
    modalities: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    verbosity: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    spaces_between_special_tokens: Any = None
    chat_template: Any = None
    documents: Any = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`include_usage` adds a chunk with the usage before the end."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class GenerationRequest(Unsupported, kw_only=True):
    """What completions and chats have in common. None is the model's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    safety_identifier: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def fair_share_user(self) -> str:
        """Whose share of the machine the request takes under the `fair` policy."""
        return self.user or self.safety_identifier or ""

    def sampling_fields(self) -> dict[str, Any]:
        """The given fields that :class:`SamplingParams` has under the same name, and the form of the output."""
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        values["structured_outputs"] = structured_outputs_of(**{name: getattr(self, name) for name in FORM_FIELDS})
        return {name: value for name, value in values.items() if value is not None}


SAMPLING_FIELDS = tuple(
    name
    for name in GenerationRequest.__struct_fields__
    if name in SamplingParams.__dataclass_fields__ and name != "structured_outputs"
)


FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
)
"""Fields that ask for a form of the output."""


class CompletionRequest(GenerationRequest, kw_only=True):
    """`prompt`: text, token ids, or a list of either. `logprobs`: number of alternatives at each position."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """`messages` as the chat template wants them; tool calls as in the OpenAI API."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt` or `messages` (with the chat's own fields), as in vLLM."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`tokens` to text; special tokens are shown."""

    tokens: list[int]
    model: str | None = None


def decode(body: bytes, kind: type[T]) -> T:
    """The body as this kind of request. Raises :class:`ApiError` (400) that names the field or the position."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), body, kind) from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {_syntax_error(body, error)}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is not valid JSON: it is nested too deeply", code="invalid_json") from None
    for name, (neutral, reason) in REFUSED.items():
        value = getattr(request, name, None)
        if value not in neutral:
            message = f"{name}={shorten(value)} is not allowed: {reason}"
            raise ApiError(400, message, param=name, code="unsupported_value")
    return request


def _syntax_error(body: bytes, error: Exception) -> str:
    """Line and column where there is a syntax error; the standard library's parser knows them."""
    if not body.strip():
        return "it is empty"
    try:
        json.loads(body)
    except json.JSONDecodeError as found:
        return str(found)
    except (ValueError, RecursionError) as found:
        return shorten(str(found), 200)
    if re.search(rb"\\u[dD][89a-fA-F]", body):
        return "a string holds a lone surrogate"
    return str(error)


_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)


def _invalid_field(message: str, body: bytes, kind: type) -> ApiError:
    match = _PATH.match(message)
    assert match is not None
    what, path = match["what"], (match["path"] or "").lstrip(".")
    if unknown := re.match(r"Object contains unknown field `(.*)`$", what, re.DOTALL):
        name = unknown[1]
        where = f" in {path}" if path else ""
        near = [] if path else difflib.get_close_matches(name, kind.__struct_fields__, n=2)  # type: ignore[attr-defined]
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        text = f"{shorten(name)} is not a known field{where}{hint}"
        return ApiError(400, text, param=shorten(name)[1:-1], code="unknown_field")
    if missing := re.match(r"Object missing required field `(.*)`$", what):
        name = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, f"{name} is missing", param=name, code="missing_field")
    path = path.partition("[...]")[0]  # the value of a mapping, whose key is not told
    value = _value_at(body, path)
    shown = f"{path}={shorten(value)} is not allowed: " if path else "the body: "
    return ApiError(400, f"{shown}{what.replace('`', '')}", param=path or None, code="invalid_type")


def _value_at(body: bytes, path: str) -> Any:
    """The value that a path such as `stop[2]` leads to; only for messages."""
    try:
        value = json.loads(body)
        for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            value = value[name] if name else value[int(index)]
    except (ValueError, LookupError, TypeError, RecursionError):
        return "..."
    return value
