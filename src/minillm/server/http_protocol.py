"""HTTP on one connection: uvicorn's protocol with bounds on what a client may send and on how long it may take.

```
a connection, or the first byte behind an answer ──► headers ──► body ──► answer ──► uvicorn's own keep-alive time
                                        `header_timeout`    the handler's bound
```
No byte starts a time anew, so a client that sends one now and then is gone by the same moment as one that sends none.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minillm.server.errors import ApiError

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEADER_BYTES = 64 << 10


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on the size and the time of headers, errors as JSON, and an end for pipelined
    requests too: of those uvicorn would tell only the last one that the client has gone."""

    _header_bytes = 0
    _in_headers = True
    _running: RequestResponseCycle | None = None
    _timer: asyncio.TimerHandle | None = None
    """Runs while the client owes a request's headers."""

    def __init__(self, *arguments: Any, header_timeout: float, **options: Any) -> None:
        """`header_timeout` in seconds; the rest is uvicorn's."""
        super().__init__(*arguments, **options)
        self._header_timeout = header_timeout

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or was told to."""
        self._stop_timer()
        self._abandon()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """The next request in line is served."""
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _abandon(self) -> None:
        """Nobody reads what handlers still write."""
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    # -- from the parser -------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_headers, self._header_bytes = True, 0
        self._start_timer()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers, which nobody reads and nothing bounds, are dropped."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its headers are over."""
        self._in_headers = False
        self._stop_timer()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Parse; give up on headers that do not end."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(ApiError(431, f"the headers exceed {MAX_HEADER_BYTES} bytes", code="headers_too_large"))
        elif self._timer is None and self.cycle.response_complete:
            # Neither a request nor silence (empty lines, the rest of a body that nobody waits for): uvicorn has
            # stopped its keep-alive time for it.
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets an error object too."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    # -- time --------------------------------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._header_timeout, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._in_headers and self._header_bytes:
            message = f"the headers did not come in within {self._header_timeout:g} s"
            self._refuse(ApiError(408, message, code="header_timeout"))
        else:
            self.transport.close()  # no request has begun: nobody waits for an answer

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        """Answer and close. A whole request before has its answer first, and then the connection ends without this."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                cycle.keep_alive = False
                return
            self._abandon()  # the error is in its body, for which its handler waits
            if cycle.response_started or self.pipeline:
                self.transport.close()
                return
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
