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
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from minillm.core.errors import ConfigError
from minillm.server.config import ServerConfig
from minillm.server.http_protocol import BoundedHttpProtocol
from minillm.server.state import ServerState

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger("minillm.server")

KEEP_ALIVE = 75
"""Seconds that a connection is kept without a request. Longer than clients keep theirs (httpx 5, aiohttp 15): where
both end one at the same time, a request that is just going out fails."""
POLL_INTERVAL = 0.05
BACKLOG = 2048
ANSWER_TIME = 0.4
"""Seconds that cancelled calls have to be told so, and the engine's thread to end."""
SWITCH_INTERVAL = 0.001
"""Seconds after which a thread that computes gives the interpreter to one that waits for it: the engine and the event
loop share it, and Python's default of 5 ms is half a decode step."""


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
        try:
            # Told off the loop: it waits for the step that runs. The cancelled calls' ends come back through the loop.
            await asyncio.to_thread(self._state.runtime.close, 0.0, ANSWER_TIME)
            end = time.monotonic() + ANSWER_TIME
            while self._state.num_calls and time.monotonic() < end:
                await asyncio.sleep(POLL_INTERVAL)
        except Exception:
            logger.exception("the runtime could not be closed; leaving all the same")
        self.should_exit = True


def make_server(app: FastAPI, on_ready: Callable[[], None] | None = None) -> Server:
    """A server for an application of :func:`minillm.server.app.create_app`."""
    state: ServerState = app.state.server
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=partial(BoundedHttpProtocol, header_timeout=state.config.header_timeout),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=KEEP_ALIVE,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return Server(config, state, on_ready)


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises :class:`ConfigError` where the address cannot be used."""
    try:
        if config.uds is not None:
            _remove_dead_socket(Path(config.uds))
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(config.uds)
            listener.listen(BACKLOG)
            return listener
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        where = f"uds={config.uds!r}" if config.uds is not None else f"host={config.host!r}, port={config.port}"
        raise ConfigError(f"{where} cannot be listened on: {error.strerror or error}") from None


def _remove_dead_socket(path: Path) -> None:
    """Make place where a server has left its socket; one that is in use, or another file, is not ours to remove."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


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
