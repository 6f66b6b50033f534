"""Handles that callers hold on a running request: a future, a stream, an asynchronous stream.

A stream buffers without bound: a reader that is slow, or that has not begun, never holds up the engine. The buffer is
bounded by the request itself (one event per token). The engine refers to the buffer alone, never to the handle: so a
handle that is dropped is collected at once, and cancels its request.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol
from weakref import WeakKeyDictionary, ref

from minillm.engine.outputs import Logprob, RequestOutput, TokenEvent

if TYPE_CHECKING:
    from minillm.engine.engine_thread import Ticket
    from minillm.engine.runtime import Runtime


class Sink(Protocol):
    """Where the engine thread puts what happens to one request; `on_output` or `on_error` comes once, at the end."""

    wants_events: bool
    """Whether `on_events` is called at all."""

    def on_events(self, events: Sequence[TokenEvent], prompt_scores: list[dict[int, Logprob] | None] | None) -> None:
        """New events, in order, and the prompt's logprobs as far as known."""

    def on_output(self, output: RequestOutput) -> None:
        """The request has ended."""

    def on_error(self, error: Exception) -> None:
        """The request was refused late, or the engine failed."""


class RequestFuture(Future[RequestOutput]):
    """A `concurrent.futures.Future` of a request's output. `cancel()` cancels the request too.

    A request that fails alone, or that `Runtime.cancel` ends, still has an output: look at its `finish_reason`, or
    call `raise_for_error()`.
    """

    wants_events = False

    def __init__(self, runtime: Runtime, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id
        self._runtime = runtime  # keeps the engine alive while the caller waits for this
        self._ticket: Ticket | None = None

    def cancel(self) -> bool:
        """Cancel the request and this future. False if it has ended already."""
        if not super().cancel():
            return False
        if self._ticket is not None:
            self._runtime.cancel_ticket(self._ticket)
        return True

    def result(self, timeout: float | None = None) -> RequestOutput:
        """As of any future; :class:`WouldDeadlockError` in the callback of another one if it would have to wait."""
        if not self.done():
            self._runtime.check_may_wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The same for the error."""
        if not self.done():
            self._runtime.check_may_wait()
        return super().exception(timeout)

    def on_events(self, events: Sequence[TokenEvent], prompt_scores: list[dict[int, Logprob] | None] | None) -> None:
        """A future has no use for single tokens."""

    def on_output(self, output: RequestOutput) -> None:
        """Resolve, unless the caller cancelled."""
        if self.set_running_or_notify_cancel():
            self.set_result(output)

    def on_error(self, error: Exception) -> None:
        """Resolve with an error, unless the caller cancelled."""
        if self.set_running_or_notify_cancel():
            self.set_exception(error)


class EventBuffer:
    """Unbounded buffer between the engine thread and its readers, who may wait in threads or in an event loop."""

    wants_events = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[TokenEvent] = deque()
        self._wakes: list[Callable[[], None]] = []
        self._ended = False
        self._error: Exception | None = None
        self.output: RequestOutput | None = None
        self.prompt_scores: list[dict[int, Logprob] | None] | None = None

    def on_events(self, events: Sequence[TokenEvent], prompt_scores: list[dict[int, Logprob] | None] | None) -> None:
        """Append events and wake the reader."""
        self.prompt_scores = prompt_scores
        self._put(events)

    def on_output(self, output: RequestOutput) -> None:
        """Mark the end."""
        self.output = output
        self._put((), ended=True)

    def on_error(self, error: Exception) -> None:
        """Mark the end; the reader gets `error` after what came before it."""
        self._put((), ended=True, error=error)

    def _put(self, events: Sequence[TokenEvent], ended: bool = False, error: Exception | None = None) -> None:
        with self._lock:
            self._events.extend(events)
            self._ended = self._ended or ended
            self._error = error if error is not None else self._error
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def wake_readers(self) -> None:
        """Let everyone who waits look again."""
        self._put(())

    def poll(self, wake: Callable[[], None]) -> TokenEvent | None:
        """The next event; None if there is none yet, and then `wake` is called once when that changes.

        Raises StopIteration at the end, or (once) the error that ended the request.
        """
        with self._lock:
            if self._events:
                return self._events.popleft()
            if not self._ended:
                self._wakes.append(wake)
                return None
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration


class _StreamHandle:
    """What both kinds of stream share. Dropping the handle cancels the request."""

    def __init__(self, runtime: Runtime, ticket: Ticket, buffer: EventBuffer) -> None:
        self.request_id = ticket.request_id
        self._runtime = runtime
        self._ticket = ticket
        self._buffer = buffer
        self._closed = False

    @property
    def output(self) -> RequestOutput | None:
        """The whole output with its metrics, once the request has ended."""
        return self._buffer.output

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Scores of the prompt if they were asked for; complete from the first token event on."""
        return self._buffer.prompt_scores

    def _cancel(self) -> None:
        self._closed = True
        self._runtime.cancel_ticket(self._ticket)

    def __del__(self) -> None:
        # May run anywhere, even in a thread that holds the runtime's lock: so this way takes none.
        self._runtime.drop_ticket(self._ticket)


class RequestStream(_StreamHandle, Iterator[TokenEvent]):
    """Iterator over a request's token events; ends after the last one. Also a context manager.

    `close()`, leaving a `with` block or dropping it cancels the request. Raises :class:`EngineDeadError` where the
    engine failed.
    """

    def __next__(self) -> TokenEvent:
        while not self._closed:
            ready = threading.Event()
            event = self._buffer.poll(ready.set)
            if event is not None:
                return event
            self._runtime.check_may_wait()
            ready.wait()
        raise StopIteration

    def close(self) -> None:
        """Cancel the request and end the iteration, also for a reader that waits in another thread. Idempotent."""
        self._cancel()
        self._buffer.wake_readers()

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class AsyncRequestStream(_StreamHandle, AsyncIterator[TokenEvent]):
    """The same for asyncio: belongs to the event loop that first iterates it. `aclose()` cancels the request."""

    async def __anext__(self) -> TokenEvent:
        while not self._closed:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            try:
                event = self._buffer.poll(partial(LoopWaker.of(loop).wake, waiter))
            except StopIteration:
                break
            if event is not None:
                return event
            await waiter
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request and end the iteration. Idempotent."""
        self._cancel()
        self._buffer.wake_readers()

    async def __aenter__(self) -> AsyncRequestStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class LoopWaker:
    """Wakes readers of one event loop from other threads: all that a step wakes with one call into the loop.

    A call costs a system call, and there is a reader per stream.
    """

    _of_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._ready: deque[asyncio.Future[None]] = deque()
        self._called = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> LoopWaker:
        """The loop's own; called in its thread."""
        waker = cls._of_loop.get(loop)
        if waker is None:
            waker = cls._of_loop[loop] = cls(loop)
        return waker

    def wake(self, waiter: asyncio.Future[None]) -> None:
        """Resolve the waiter soon. Its loop may be gone; then nobody waits."""
        self._ready.append(waiter)
        if self._called:
            return
        self._called = True
        loop = self._loop()
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:
            if not loop.is_closed():
                raise

    def _resolve(self) -> None:
        self._called = False  # before the look at what is ready: whoever comes later calls again
        while self._ready:
            waiter = self._ready.popleft()
            if not waiter.done():
                waiter.set_result(None)
