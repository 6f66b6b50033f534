"""The server's process: its event loop, its signals, and an orderly end.

```
first SIGTERM (or Ctrl-C)   /health and new calls: 503. Running and queued calls have `grace` seconds.
grace over, or a second     what is left is cancelled; each stream gets an error frame and [DONE], each other call a 503
then                        connections close, the engine's thread ends, exit code 0
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minillm.core.errors import ConfigError
from minillm.server.config import ServerConfig
from minillm.server.errors import ApiError
from minillm.server.state import ServerState

if TYPE_CHECKING:
    from fastapi import FastAPI
    from uvicorn._types import ASGI3Application

logger = logging.getLogger("minillm.server")

MAX_HEADER_BYTES = 64 << 10
POLL_INTERVAL = 0.05
BACKLOG = 2048
ANSWER_TIME = 0.4
"""Seconds that cancelled calls have to be told so, and the engine's thread to end."""
SWITCH_INTERVAL = 0.001
"""Seconds after which a thread that computes gives the interpreter to one that waits for it: the engine and the event
loop share it, and Python's default of 5 ms is half a decode step."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a bound on the size of headers, errors as JSON, and an end for pipelined requests too:
    of those uvicorn would tell only the last one that the client has gone."""

    _header_bytes = 0
    _in_headers = True
    _running: RequestResponseCycle | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """The next request in line is served."""
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or was told to."""
        self._abandon()
        super().connection_lost(exc)

    def _abandon(self) -> None:
        """Nobody reads what handlers still write."""
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_headers, self._header_bytes = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers, which nobody reads and nothing bounds, are dropped."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its headers are over."""
        self._in_headers = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Parse; give up on headers that do not end."""
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(ApiError(431, f"the headers exceed {MAX_HEADER_BYTES} bytes", code="headers_too_large"))

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets an error object too."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

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
            f"HTTP/1.1 {error.status} {'Bad Request' if error.status == 400 else 'Request Header Fields Too Large'}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server, whose signals drain it. `on_ready` is called when it listens."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(config)
        self._state = state
        self._on_ready = on_ready
        self._num_signals = 0
        self._drain: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT drain while the block runs; the handlers that were there come back. Only the main thread
        has signals: elsewhere the owner calls :meth:`stop`."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        handled = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.getsignal(number) for number in handled}
        for number in handled:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()

    def stop(self) -> None:
        """Begin to drain; called again, give up the grace."""
        self._num_signals += 1
        if self._drain is None:
            logger.warning("draining: %d calls, up to %g s", self._state.num_calls, self._state.config.grace)
            self._state.draining = True
            self._drain = asyncio.get_running_loop().create_task(self._stop())
            for close in self._state.on_drain:
                close()

    async def _stop(self) -> None:
        end = time.monotonic() + self._state.config.grace
        while self._state.num_calls and self._num_signals < 2 and time.monotonic() < end:
            await asyncio.sleep(POLL_INTERVAL)
        # Told off the loop: it waits for the step that runs. The cancelled calls' ends come back through the loop.
        await asyncio.to_thread(self._state.runtime.close, 0.0, ANSWER_TIME)
        end = time.monotonic() + ANSWER_TIME
        while self._state.num_calls and time.monotonic() < end:
            await asyncio.sleep(POLL_INTERVAL)
        self.should_exit = True


def make_server(app: FastAPI, on_ready: Callable[[], None] | None = None) -> Server:
    """A server for an application of :func:`minillm.server.app.create_app`."""
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedHttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return Server(config, app.state.server, on_ready)


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises :class:`ConfigError` where the address cannot be used."""
    try:
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(config.uds)
            listener.listen(BACKLOG)
            return listener
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        where = f"uds={config.uds!r}" if config.uds is not None else f"host={config.host!r}, port={config.port}"
        raise ConfigError(f"{where} cannot be listened on: {error.strerror or error}") from None


def address(listener: socket.socket) -> str:
    """Where clients find the server."""
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    return f"http://[{name[0]}]:{name[1]}" if ":" in name[0] else f"http://{name[0]}:{name[1]}"


def serve(app: FastAPI, listener: socket.socket, on_ready: Callable[[], None] | None = None) -> None:
    """Serve until a signal; then the runtime is closed too.

    A device that does not come back from a step cannot hold up the end: then the process ends without it.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    runtime = app.state.server.runtime
    try:
        make_server(app, on_ready).run(sockets=[listener])
    finally:
        runtime.close(timeout=ANSWER_TIME)
    if runtime.is_alive:
        logger.error("the engine did not end in time; leaving without it")
        logging.shutdown()
        os._exit(0)
