"""Typed errors. Every refusal names the field or limit and the value, before anything is queued.

Classes under :class:`RequestError` are the client's fault (a 4xx over HTTP); the others are not.
"""

from __future__ import annotations


def shorten(value: object, limit: int = 80) -> str:
    """`repr` of a value that a client sent, cut to `limit` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        text = f"<{type(value).__name__} of more digits than can be shown>"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class MiniLLMError(Exception):
    """Base of every error that this package raises on purpose."""


class RequestError(MiniLLMError, ValueError):
    """A request was refused; nothing of it was queued."""

    http_status = 400


class InvalidParameterError(RequestError):
    """A field of a request has a value that is not allowed."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field}={shorten(value)} is not allowed: {rule}")
        self.field = field
        self.value = value
        self.rule = rule


class EmptyPromptError(RequestError):
    """The prompt has no tokens."""

    def __init__(self) -> None:
        super().__init__("prompt has 0 tokens; at least 1 is needed")


class PromptTooLongError(RequestError):
    """Prompt (and `max_tokens`, if given) do not fit `max_model_len`."""

    def __init__(
        self, prompt_tokens: int, max_tokens: int | None, max_model_len: int, pool_limited: bool = False
    ) -> None:
        asked = f"prompt has {prompt_tokens} tokens"
        if max_tokens is not None:
            asked += f" and max_tokens={max_tokens}, {prompt_tokens + max_tokens} in all"
        why = " (reduced to the KV pool's capacity)" if pool_limited else ""
        super().__init__(f"{asked}; the limit max_model_len={max_model_len}{why} is exceeded")
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len


class ChatTemplateError(RequestError):
    """A chat could not be rendered: no template, a template that fails, or one that refuses the messages."""


class StructuredOutputsUnavailableError(RequestError):
    """Structured output was asked for, and what it needs is not here."""


class DuplicateRequestError(RequestError):
    """A live request already has this id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request_id={shorten(request_id)} is already in use by a live request")
        self.request_id = request_id


class QueueFullError(RequestError):
    """The bounded waiting queue is full."""

    http_status = 429

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(f"{waiting} requests are waiting; the limit max_waiting={limit} is reached")
        self.limit = limit


class ConfigError(MiniLLMError, ValueError):
    """A configuration value is not allowed, or a name (policy, model, dtype) is unknown."""


class UnknownPolicyError(ConfigError):
    """No policy is registered under this name."""

    def __init__(self, kind: str, name: str, known: list[str]) -> None:
        super().__init__(f"{kind}={name!r} is not known; known: {', '.join(known)}")


class TraceError(MiniLLMError, ValueError):
    """A trace file is not in its format, or cannot be read; `line` is 0 where the file as a whole is meant."""

    def __init__(self, path: object, line: int, reason: str, *, unit: str = "line") -> None:
        super().__init__(f"{path}{f', {unit} {line}' if line else ''}: {reason}")
        self.line = line


class ModelLoadError(MiniLLMError):
    """A model could not be loaded: unknown name, corrupt or truncated file, missing tensor."""


class UnsupportedModelError(ModelLoadError):
    """The architecture is one that this runtime refuses, with the reason."""


class KernelBuildError(MiniLLMError):
    """A CUDA kernel could not be compiled or loaded; `log` is the compiler's whole output, if it ran."""

    def __init__(self, kernel: str, reason: str, advice: str, log: str = "") -> None:
        super().__init__(f"CUDA kernel {kernel}: {reason}. {advice}")
        self.kernel = kernel
        self.log = log
        if log:
            self.add_note(log)


class KernelLaunchError(MiniLLMError, RuntimeError):
    """The driver refused to launch a kernel."""


class BlockAllocationError(MiniLLMError):
    """The block pool cannot serve an allocation; nothing was changed."""

    def __init__(self, needed: int, available: int, total: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {available} available of {total}")
        self.needed = needed
        self.available = available
        self.total = total


class IllegalTransitionError(MiniLLMError):
    """A request was asked to change into a state that its present state does not lead to."""


class InvariantViolation(MiniLLMError):
    """The invariants checker found the core in a state that must not be."""


class RequestFailedError(MiniLLMError):
    """A request ended with an error of its own (NaN logits, an exception in its row)."""


class WouldDeadlockError(MiniLLMError, RuntimeError):
    """The engine's own thread (it runs the callbacks of futures) was about to wait for the engine."""

    def __init__(self) -> None:
        super().__init__(
            "a future's callback runs in the engine's thread and must not wait for another request there; "
            "submit it and add a callback, or wait in a thread of your own"
        )


class EngineDeadError(MiniLLMError):
    """The engine failed or was shut down; the cause is chained."""
