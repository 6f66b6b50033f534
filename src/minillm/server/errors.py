"""Errors in the form of the OpenAI API, and which status each has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from minillm.core.errors import (
    DuplicateRequestError,
    EmptyPromptError,
    EngineDeadError,
    InvalidParameterError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestFailedError,
)

logger = logging.getLogger("minillm.server")

_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request's error as its client sees it. `param` is the field of the body that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def as_dict(self) -> dict[str, Any]:
        """The OpenAI error object."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        """The JSON of a response's body."""
        return msgspec.json.encode(self.as_dict())

    def frame(self) -> bytes:
        """The error as an event of a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"


class ClientGone(Exception):
    """The client closed its connection; nobody is there to be answered."""


class BodyTooLarge(ApiError):
    """The body exceeds the operator's limit; the connection is closed, so that the rest need not be read."""

    def __init__(self, limit: int, size: int | None = None) -> None:
        found = f"the body has {size} bytes" if size is not None else "the body is larger"
        message = f"{found}; the limit max_body_size={limit} is exceeded"
        super().__init__(413, message, code="request_too_large", headers={"connection": "close"})


def draining() -> ApiError:
    """The server takes no more requests."""
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "5"})


def deadline_passed() -> ApiError:
    """The client's own `timeout` is over; its library should not try the same again by itself."""
    message = "the request's timeout passed before it was complete"
    return ApiError(408, message, param="timeout", code="timeout", headers={"x-should-retry": "false"})


def as_api_error(error: Exception, retry_after: int = 1) -> ApiError:
    """What a client is told about an exception. What is nobody's known fault is logged, and told without details."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", headers={"retry-after": str(retry_after)})
        case InvalidParameterError():
            return ApiError(400, str(error), param=error.field, code="invalid_value")
        case PromptTooLongError():
            return ApiError(400, str(error), param="prompt", code="context_length_exceeded")
        case EmptyPromptError():
            return ApiError(400, str(error), param="prompt", code="empty_prompt")
        case DuplicateRequestError():
            return ApiError(400, str(error), param="request_id", code="duplicate_request_id")
        case RequestError():
            return ApiError(400, str(error), code="invalid_request")
        case EngineDeadError():
            return ApiError(503, str(error), code="engine_dead")
        case RequestFailedError():
            return ApiError(500, str(error), code="request_failed")
    logger.error("internal error", exc_info=error)
    return ApiError(500, "internal error", code="internal_error")


def header_pairs(headers: Mapping[str, str]) -> Iterable[tuple[bytes, bytes]]:
    """Headers as ASGI has them."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
