"""One sampler for any number of watchers: frames are made while somebody looks, and never faster than is useful."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor

logger = logging.getLogger("minillm.server")

MAX_SHARE = 0.05
"""Share of the time of one CPU core that making frames may take."""


class FrameHub:
    """Makes a frame every `interval` seconds in its own thread, and hands the latest one to every watcher. A watcher
    that is slow misses frames; nothing is queued for it. Belongs to one event loop."""

    def __init__(self, make: Callable[[], bytes], *, interval: float = 0.25, max_watchers: int = 16) -> None:
        self.interval = interval
        self.max_watchers = max_watchers
        self.num_watchers = 0
        self.num_frames = 0
        """Frames made since the start."""
        self._make = make
        self._frame = b""
        self._changed = asyncio.Event()
        self._sampler: asyncio.Task[None] | None = None
        self.closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minillm-dashboard")

    @property
    def is_full(self) -> bool:
        """Whether no more watchers are taken."""
        return self.closed or self.num_watchers >= self.max_watchers

    async def watch(self, greeting: bytes = b"") -> AsyncGenerator[bytes, None]:
        """The greeting, then frames until the hub closes, or a frame cannot be made. Nothing if the hub is full."""
        if self.is_full:
            return
        self.num_watchers += 1
        try:
            if greeting:
                yield greeting
            if self._sampler is None or self._sampler.done():
                self._changed = asyncio.Event()
                self._sampler = asyncio.create_task(self._sample())
            sampler = self._sampler
            while not self.closed and not sampler.done():
                await self._changed.wait()
                if self.closed or sampler.done():
                    return
                yield self._frame
        finally:
            self.num_watchers -= 1
            if self.num_watchers == 0 and self._sampler is not None:
                self._sampler.cancel()
                self._sampler = None

    def close(self) -> None:
        """End every watcher's stream and the thread. Idempotent; called in the event loop."""
        self.closed = True
        self._changed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self.closed:
                begin = loop.time()
                self._frame, cpu = await loop.run_in_executor(self._thread, self._timed)
                self.num_frames += 1
                self._wake()
                # Frames share the interpreter with the engine's thread: they get MAX_SHARE of it at most.
                await asyncio.sleep(max(begin + self.interval - loop.time(), cpu / MAX_SHARE))
        except Exception as error:
            if not self.closed:
                logger.error("the dashboard's frame could not be made", exc_info=error)
        finally:
            loop.call_soon(self._changed.set)  # once this task has ended: then its watchers leave

    def _timed(self) -> tuple[bytes, float]:
        """A frame, and the seconds of CPU that it took."""
        begin = time.thread_time()
        return self._make(), time.thread_time() - begin

    def _wake(self) -> None:
        """Let all watchers that wait look, and make later ones wait for the next frame."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
