"""What every call passes first: its id, and the API key."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Sequence

from minillm.server.errors import ApiError
from minillm.server.exchange import Exchange, Message, Receive, Scope, Send

CLIENT_ID_RULE = "it must be 1 to 128 letters, digits or . _ : -"
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

OPEN_PATHS = frozenset({"/health", "/dashboard"})
"""Served without a key: whether the server lives, and a page that holds no data."""


def is_client_id(text: str) -> bool:
    """Whether a client may name its call so."""
    return _CLIENT_ID.fullmatch(text) is not None


class Gate:
    """ASGI middleware. Each call gets an id (the client's `X-Request-Id` if it is a usable one), which comes back as a
    header; a call without a right key ends here.
    """

    def __init__(self, app: object, api_keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let HTTP calls through with their id; others (the server's start and end) as they are."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # type: ignore[operator]
            return
        exchange = Exchange(scope, receive, send)
        given = exchange.header(b"x-request-id") or ""
        request_id = given if is_client_id(given) else uuid.uuid4().hex
        scope["request_id"] = request_id
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        if (
            self._keys
            and scope["path"] not in OPEN_PATHS
            and scope["method"] != "OPTIONS"
            and not self._admits(exchange)
        ):
            error = ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await Exchange(scope, receive, send_with_id).answer_error(error)
            return
        await self._app(scope, receive, send_with_id)  # type: ignore[operator]

    def _admits(self, exchange: Exchange) -> bool:
        """Whether the key is one of ours; the time does not tell how much of it is right."""
        kind, _, key = (exchange.header(b"authorization") or "").partition(" ")
        given = key.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return any(matches)
