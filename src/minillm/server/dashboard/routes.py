"""Routes: the page, its frames, the list of requests, and the story of one."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.params import Depends
from starlette.responses import JSONResponse, Response, StreamingResponse

from minillm.core.errors import InvalidParameterError
from minillm.server.dashboard.capture import capture, first_queued, view
from minillm.server.dashboard.explanation import explanation
from minillm.server.dashboard.frame import encode_event, frame, request_row
from minillm.server.dashboard.hub import FrameHub
from minillm.server.errors import ApiError, draining

if TYPE_CHECKING:
    from minillm.core.base_scheduler import BaseScheduler
    from minillm.engine.runtime import Runtime
    from minillm.server.dashboard.capture import RequestView
    from minillm.server.metrics import EngineMetrics

MAX_LISTED = 1000


class Dashboard:
    """What the operator sees of one engine. `metrics` is the runtime's observer; `clock` the engine's."""

    def __init__(
        self,
        runtime: Runtime,
        metrics: EngineMetrics,
        *,
        model_name: str | None = None,
        show_text: bool = False,
        interval: float = 0.25,
        max_watchers: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model_name` is what the chat box asks for; None takes the model's own name. `show_text`: explanations
        of live requests show their prompts and outputs."""
        self._runtime = runtime
        self._metrics = metrics
        self._clock = clock
        self._show_text = show_text
        self._model_name = model_name if model_name is not None else runtime.model_info.name
        self._page, self._policy = load_page()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minillm-explain")
        self.hub = FrameHub(self._frame, interval=interval, max_watchers=max_watchers)

    def router(self, dependencies: Sequence[Depends] = ()) -> APIRouter:
        """The routes. `dependencies` guard all but the page itself, which holds no data."""
        router = APIRouter()
        guarded: dict[str, Any] = {"methods": ["GET"], "dependencies": list(dependencies), "response_class": Response}
        router.add_api_route("/dashboard", self.page, methods=["GET"], include_in_schema=False, response_class=Response)
        router.add_api_route("/dashboard/events", self.events, include_in_schema=False, **guarded)
        router.add_api_route("/v1/requests", self.requests, **guarded)
        router.add_api_route("/v1/requests/{request_id:path}/explain", self.explain, **guarded)
        return router

    async def page(self) -> Response:
        """The live page."""
        return Response(
            self._page,
            media_type="text/html",
            headers={
                "Content-Security-Policy": self._policy,
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cache-Control": "no-store",
            },
        )

    async def events(self) -> Response:
        """Frames as server-sent events: `hello` once, then `frame` a few times a second."""
        if self.hub.closed:
            raise draining()
        if self.hub.is_full:
            raise ApiError(503, f"{self.hub.max_watchers} viewers watch the dashboard", headers={"Retry-After": "10"})
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=headers)

    async def requests(self) -> Response:
        """Live requests: running ones, then the queue in order; at most 1,000, `total` says of how many."""
        loop = asyncio.get_running_loop()
        total, rows = await loop.run_in_executor(self._thread, self._runtime.inspect, list_requests)
        now = self._clock()
        return JSONResponse({"object": "list", "total": total, "data": [request_row(row, now) for row in rows]})

    async def explain(self, request_id: str) -> Response:
        """Why a request waits, or what happened to it: in words, and as a timeline."""
        loop = asyncio.get_running_loop()
        arguments = (self._runtime, request_id, self._clock(), self._show_text)
        try:
            return JSONResponse(await loop.run_in_executor(self._thread, explanation, *arguments))
        except InvalidParameterError as error:
            raise ApiError(404, str(error), param="request_id", code="request_not_found") from error

    def end_streams(self) -> None:
        """End every stream of frames: they have no end of their own, and would hold up a server that drains. The rest
        goes on answering."""
        self.hub.close()

    def close(self) -> None:
        """End the streams and the thread that looks up requests."""
        self.end_streams()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _stream(self) -> AsyncIterator[bytes]:
        async with aclosing(self.hub.watch(encode_event("hello", self._hello()))) as watched:
            async for data in watched:
                yield data

    def _hello(self) -> dict[str, Any]:
        config, info = self._runtime.config, self._runtime.model_info
        return {
            "model": self._model_name,
            "device": info.device,
            "dtype": info.dtype,
            "block_size": info.block_size,
            "num_blocks": info.num_blocks,
            "max_model_len": info.max_model_len,
            "max_model_len_reduced": info.max_model_len_reduced,
            "max_num_seqs": config.max_num_seqs,
            "scheduler": config.scheduler,
            "queue_policy": config.scheduling_policy,
            "victim_policy": config.victim_policy,
            "preemption_mode": config.preemption_mode,
            "interval": self.hub.interval,
        }

    def _frame(self) -> bytes:
        captured = self._runtime.inspect(lambda scheduler: capture(scheduler, self._metrics))
        return encode_event("frame", {"alive": self._runtime.is_alive, **frame(captured, self._clock())})


def list_requests(scheduler: BaseScheduler) -> tuple[int, list[RequestView]]:
    """How many sequences are live, and the first of them: running, then queued."""
    running = list(scheduler.running)[:MAX_LISTED]
    queued = first_queued(scheduler.waiting, MAX_LISTED - len(running)) if len(running) < MAX_LISTED else []
    return scheduler.num_running + scheduler.num_waiting, [view(request, 1) for request in (*running, *queued)]


def load_page() -> tuple[bytes, str]:
    """The page with its style and scripts inlined, and the content security policy that allows exactly those."""
    folder = files("minillm.server.dashboard") / "page"
    style = (folder / "style.css").read_text(encoding="utf-8")
    script = "".join((folder / name).read_text(encoding="utf-8") for name in ("draw.js", "chat.js", "app.js"))
    page = (folder / "page.html").read_text(encoding="utf-8").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)

    def digest(text: str) -> str:
        return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy
