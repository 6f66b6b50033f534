"""From what users pass to a validated core request. Runs in the caller's thread; nothing is queued here."""

from __future__ import annotations

import operator
import random
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from minillm.core.errors import EmptyPromptError, InvalidParameterError
from minillm.core.request import Request, RequestState, Transition
from minillm.core.sampling_params import SamplingParams
from minillm.engine.grammar import GrammarCompiler

if TYPE_CHECKING:
    from minillm.models.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Mapping[str, Any] | Request
"""Text, token ids, chat messages, vLLM's {"prompt": ...} / {"prompt_token_ids": ...}, or a prepared request."""

DEFAULT_MAX_TOKENS = 16
"""Of completions, as in vLLM and the OpenAI API; a chat gets the rest of the context."""

MAX_LABEL = 512
"""Characters of `user` and `cache_salt`: they are kept for users who come no more, and hashed with every block."""

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class InputProcessor:
    """Tokenises prompts, fills in defaults and refuses what is not allowed, with a typed error. Thread-safe.

    `vocab_size` is the model's (rows of its embedding); `eos_token_ids` the union of what the model's files name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] | frozenset[int],
        default_params: SamplingParams | None = None,
        chat_template: str | None = None,
        seed: int | None = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.default_params = default_params if default_params is not None else SamplingParams()
        self.chat_template = chat_template
        self.grammars = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_token_ids=self.eos_token_ids)
        self._random = random.Random(seed)
        self._random_lock = threading.Lock()

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        *,
        request_id: str,
        now: float,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
        timeout: float | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> tuple[Request, str | None]:
        """The request and the prompt's text (None unless text was given).

        Raises a :class:`RequestError` for anything wrong with the prompt, the parameters or the other fields, but for
        what only the scheduler knows (lengths, the queue). `chat_options` go to the chat template.
        """
        params, default_limit = self._params(sampling_params)
        text, is_chat = None, False
        if isinstance(prompt, Mapping):
            prompt, cache_salt = _unwrap(prompt, cache_salt)
        _check_fields(request_id, priority, user, cache_salt, timeout)
        if isinstance(prompt, str):
            text = prompt
            ids = self.tokenizer.encode(prompt)
        elif is_messages(prompt):
            is_chat = True
            ids = self.encode_chat(prompt, **_checked_chat_options(chat_options))
        else:
            ids = _token_ids(prompt)
        if chat_options and not is_chat:
            raise InvalidParameterError("chat_options", chat_options, "they are for chat messages only")
        self._check_ids(ids)
        request = Request(
            request_id,
            ids,
            self._with_special_stops(params),
            priority=priority,
            arrival_time=now,
            user=user,
            cache_salt=cache_salt,
            deadline=None if timeout is None else now + timeout,
            seed=self._seed(params),
            eos_token_ids=tuple(self.eos_token_ids),
        )
        self._compile_grammar(request)
        if default_limit is not None:
            request.max_tokens = default_limit
        elif params.max_tokens is None and not is_chat:
            request.max_tokens = DEFAULT_MAX_TOKENS
            if params.min_tokens > DEFAULT_MAX_TOKENS:
                rule = f"it exceeds the default max_tokens={DEFAULT_MAX_TOKENS} of completions; give max_tokens too"
                raise InvalidParameterError("min_tokens", params.min_tokens, rule)
        return request, text

    def adopt(self, request: Request, now: float) -> Request:
        """Check a request that the caller built; it is taken as it is, but for its arrival, which is now."""
        if request.state is not RequestState.WAITING or request.generated_ids or request.arrival_seq >= 0:
            raise InvalidParameterError("prompt", request.request_id, "this Request was submitted before")
        request.sampling_params.check_token_ids(self.vocab_size)
        _check_fields(request.request_id, request.priority, request.user, request.cache_salt, None)
        deadline, seed = request.deadline, request.seed
        if deadline is not None and (not isinstance(deadline, int | float) or deadline != deadline):
            raise InvalidParameterError("deadline", deadline, "it must be a time in seconds, or None")
        if not _is_int(seed) or not 0 <= seed < 1 << 64:
            raise InvalidParameterError("seed", seed, "it must be an integer of 64 bits, not negative")
        request.input_ids[:] = _token_ids(request.input_ids)
        self._check_ids(request.input_ids)
        self._compile_grammar(request)
        request.arrival_time = now
        request.history[:] = [Transition(now, -1, RequestState.WAITING, "submitted")]
        return request

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation through the chat template. Raises :class:`ChatTemplateError`."""
        options.setdefault("chat_template", self.chat_template)
        if options.get("continue_final_message"):
            options.setdefault("add_generation_prompt", False)
        ids = self.tokenizer.apply_chat_template(messages, **options)
        assert not isinstance(ids, str)
        return ids

    def _params(self, params: SamplingParams | None) -> tuple[SamplingParams, int | None]:
        """The parameters that hold, and the model's own output limit where nobody gave one: the context cuts that
        short, while a limit that was given must fit."""
        if params is None:
            return replace(self.default_params, max_tokens=None), self.default_params.max_tokens
        if not isinstance(params, SamplingParams):
            raise InvalidParameterError("sampling_params", type(params).__name__, "it must be SamplingParams or None")
        params.check_token_ids(self.vocab_size)
        return params, None

    def _compile_grammar(self, request: Request) -> None:
        """Compile the form that the output must have, unless the request brings it (it was prepared here)."""
        spec = request.sampling_params.structured_outputs
        if spec is None:
            request.grammar = None
        elif request.grammar is None or not self.grammars.has_made(request.grammar):
            request.grammar = self.grammars.compile(spec)
        min_tokens = request.sampling_params.min_tokens
        if min_tokens and request.grammar is not None and request.grammar.only_empty:
            rule = "structured_outputs allows the empty output only"
            raise InvalidParameterError("min_tokens", min_tokens, rule)

    def _with_special_stops(self, params: SamplingParams) -> SamplingParams:
        """A stop string that spells a special token never shows up in text that skips those: stop by its id."""
        if not params.stop or not params.skip_special_tokens:
            return params
        from minillm.engine.stop_checker import special_stop_ids

        special = special_stop_ids(self.tokenizer, params.stop)
        if not special:
            return params
        return replace(params, stop_token_ids=tuple(dict.fromkeys([*params.stop_token_ids, *special])))

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise EmptyPromptError
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise InvalidParameterError("prompt", bad, f"a token id must be in [0, {self.vocab_size})")

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed % (1 << 64)
        with self._random_lock:
            return self._random.getrandbits(64)


def is_messages(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Whether this is a conversation: a non-empty list of mappings."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def is_token_ids(prompt: object) -> bool:
    """Whether this is one prompt as token ids: a non-empty list of integers."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0 and _is_int(prompt[0])


def _is_int(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _token_ids(prompt: object) -> list[int]:
    if hasattr(prompt, "tolist"):  # an array or a tensor
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | str):
        rule = "it must be text, a list of token ids, chat messages or a Request"
        raise InvalidParameterError("prompt", type(prompt).__name__, rule)
    for value in prompt:
        if not _is_int(value):
            raise InvalidParameterError("prompt", value, "a token id must be an integer")
    return [operator.index(value) for value in prompt]


def _checked_chat_options(options: object) -> dict[str, Any]:
    """Keywords for :meth:`InputProcessor.encode_chat`, as a caller gave them."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise InvalidParameterError("chat_options", options, "it must map names to values")
    for name in ("self", "messages", "tokenize"):
        if name in options:
            raise InvalidParameterError("chat_options", name, "it cannot be given here")
    for name, kind in (("chat_template", str), ("chat_template_kwargs", Mapping)):
        if not isinstance(options.get(name), kind | None):
            raise InvalidParameterError(name, options[name], f"it must be of type {kind.__name__}, or None")
    return dict(options)


def _unwrap(prompt: Mapping[str, Any], cache_salt: str | None) -> tuple[Any, str | None]:
    """vLLM's dictionary form of a prompt: exactly one of `prompt` and `prompt_token_ids`, and maybe `cache_salt`."""
    unknown = sorted(str(key) for key in set(prompt) - _PROMPT_KEYS)
    if unknown or len({"prompt", "prompt_token_ids"} & set(prompt)) != 1:
        rule = "a mapping needs exactly one of prompt and prompt_token_ids, and may have cache_salt"
        raise InvalidParameterError("prompt", ", ".join(unknown or map(str, prompt)), rule)
    inner = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
    if isinstance(inner, str) is not ("prompt" in prompt):
        raise InvalidParameterError("prompt", type(inner).__name__, "prompt is text, prompt_token_ids a list of ids")
    return inner, prompt.get("cache_salt", cache_salt)


def _check_fields(request_id: str, priority: int, user: str, cache_salt: str | None, timeout: float | None) -> None:
    if not isinstance(request_id, str) or not request_id:
        raise InvalidParameterError("request_id", request_id, "it must be a non-empty string")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidParameterError("priority", priority, "it must be an integer")
    if not -(2**63) <= priority < 2**63:
        raise InvalidParameterError("priority", priority, "it must fit 64 bits")
    if not isinstance(user, str):
        raise InvalidParameterError("user", user, "it must be a string")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidParameterError("cache_salt", cache_salt, "it must be a string or None")
    for name, text in (("user", user), ("cache_salt", cache_salt or "")):
        if len(text) > MAX_LABEL:
            raise InvalidParameterError(name, f"{len(text)} characters", f"at most {MAX_LABEL} are allowed")
    if timeout is not None:
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not is_number or not 0 < timeout <= sys.float_info.max:
            raise InvalidParameterError("timeout", timeout, "it must be a finite number of seconds > 0, or None")
