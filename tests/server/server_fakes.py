"""Servers around scripted engines: real sockets, real uvicorn, milliseconds per request."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
from engine_fakes import WAIT, ScriptedRunner, make_runtime

from minillm.engine.runtime import Runtime
from minillm.server.app import create_app
from minillm.server.config import ServerConfig
from minillm.server.lifecycle import SWITCH_INTERVAL, Server, address, listen, make_server
from minillm.server.metrics import EngineMetrics


class RunningServer:
    """A server in a thread of its own, and clients for it."""

    def __init__(self, runtime: Runtime, config: ServerConfig, metrics: EngineMetrics | None = None) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)  # as `serve` does
        self.runtime = runtime
        self.app = create_app(runtime, config, metrics)
        self.state = self.app.state.server
        listener = listen(config)
        self.url = address(listener)
        ready = threading.Event()
        self.server: Server = make_server(self.app, ready.set)
        self._thread = threading.Thread(target=lambda: self.server.run([listener]), daemon=True)
        self._thread.start()
        assert ready.wait(WAIT)
        self.http = httpx.Client(base_url=self.url, timeout=WAIT)

    def openai(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        options = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": WAIT, **options}
        return openai.OpenAI(**options)

    def call_in_loop(self, function: Any) -> None:
        """Run `function` in the server's event loop, as a signal handler would."""
        done = threading.Event()

        async def run() -> None:
            function()
            done.set()

        asyncio.run_coroutine_threadsafe(run(), self.state.mailbox._loop)
        assert done.wait(WAIT)

    def join(self) -> None:
        """Wait until the server has ended."""
        self._thread.join(WAIT)
        assert not self._thread.is_alive()

    def close(self) -> None:
        """End at once."""
        self.http.close()
        self.server.should_exit = True
        self.join()


@contextmanager
def serving(
    runner: ScriptedRunner | None = None, config: dict[str, Any] | None = None, **options: Any
) -> Iterator[RunningServer]:
    """A server around a scripted engine; `options` are those of `make_runtime`."""
    metrics = EngineMetrics()
    runtime = make_runtime(runner, observer=metrics, **options)
    server = RunningServer(runtime, ServerConfig(port=0, **(config or {})), metrics)
    try:
        yield server
    finally:
        server.close()
        runtime.close()


def raw_events(server: RunningServer, path: str, **fields: Any) -> list[str]:
    """The events of a stream as they came."""
    with server.http.stream("POST", path, json=fields) as answer:
        text = answer.read().decode()
        assert answer.status_code == 200, text
        assert answer.headers["content-type"].startswith("text/event-stream")
    assert text.endswith("\n\n")
    return text[:-2].split("\n\n")


def events_of(server: RunningServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    *frames, last = raw_events(server, path, **fields)
    assert last == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]
