"""One HTTP call on the level of ASGI: reading its body within bounds, noticing a hang-up, answering."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeAlias

from minillm.server.delivery import Collector
from minillm.server.errors import ApiError, BodyTooLarge, ClientGone, header_pairs

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]


class Exchange:
    """A request and the channel to its client."""

    __slots__ = ("_receive", "_send", "scope", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.started = False
        """Whether the response's status has gone out."""
        self._receive = receive
        self._send = send

    def header(self, name: bytes) -> str | None:
        """The first header of this (lower-case) name."""
        for key, value in self.scope["headers"]:
            if key == name:
                return value.decode("latin-1")
        return None

    async def read_json_body(self, limit: int, timeout: float) -> bytes:
        """The whole body. Raises :class:`ApiError` for another type, more than `limit` bytes, or `timeout` seconds."""
        kind = (self.header(b"content-type") or "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, f"content-type={kind[:80]!r} is not supported; send application/json")
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise BodyTooLarge(limit, int(length))
        try:
            async with asyncio.timeout(timeout):
                return await self._read(limit)
        except TimeoutError:
            message = f"the body did not come in within {timeout:g} s"
            raise ApiError(408, message, code="body_timeout", headers={"connection": "close"}) from None

    async def _read(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise BodyTooLarge(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    @contextlib.asynccontextmanager
    async def watch_hang_up(self, collector: Collector) -> AsyncIterator[None]:
        """Tell the collector when the client goes while the block runs."""

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            collector.hang_up()

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def start_stream(self, headers: Headers) -> None:
        """Status 200 and headers of a body that follows in parts."""
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, part: bytes, more: bool = True) -> None:
        """A part of the body; waits while the client reads too slowly."""
        await self._send({"type": "http.response.body", "body": part, "more_body": more})

    async def answer_json(self, body: bytes, status: int = 200, headers: Headers = ()) -> None:
        """A whole response."""
        length = str(len(body)).encode()
        fixed = [(b"content-type", b"application/json"), (b"content-length", length)]
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def answer_error(self, error: ApiError) -> None:
        """The error object, with its status."""
        await self.answer_json(error.body(), error.status, list(header_pairs(error.headers)))
