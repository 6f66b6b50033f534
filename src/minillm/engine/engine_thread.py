"""The thread that drives an engine, and the queue through which everyone else reaches it.

```
callers' threads                     engine thread
  submit ──► lock: ids, bound ──┐
  cancel ──► lock: free the id ─┼──► inbox ──► take all inputs ──► a step ──► sinks (futures, stream buffers)
  dropped stream ───────────────┘              (waits here, without polling, while there is nothing to do)
```
While any request lives, the loop steps without a pause, and every step expires deadlines: so it never has to wait
for one. The inbox is a `SimpleQueue`, whose `put` is safe in destructors.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from minillm.core.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidParameterError,
    QueueFullError,
    WouldDeadlockError,
)
from minillm.core.request import Request
from minillm.engine.llm_engine import LLMEngine
from minillm.engine.output_processor import RequestUpdate, sequence_ids
from minillm.engine.streams import Sink

logger = logging.getLogger("minillm.engine")

EXIT_TIMEOUT = 10.0
"""Seconds that an interpreter which exits without `close` waits for the step that is running."""

T = TypeVar("T")


class Ticket:
    """One submitted request, from submit to its end."""

    __slots__ = ("ended", "ids", "prompt", "request", "sink")

    def __init__(self, request: Request, prompt: str | None, sink: Sink) -> None:
        self.request = request
        self.prompt = prompt
        self.sink = sink
        self.ids = tuple(sequence_ids(request.request_id, request.sampling_params.n))
        self.ended = False
        """Whether the sink was told the end. Engine thread only."""

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id


@dataclass(slots=True)
class _Submit:
    ticket: Ticket


@dataclass(slots=True)
class _Cancel:
    ticket: Ticket


@dataclass(slots=True)
class _Call:
    function: Callable[[], Any]
    reply: Future[Any]


@dataclass(slots=True)
class _Close:
    deadline: float


_Input = _Submit | _Cancel | _Call | _Close


class LoaderThread(threading.Thread):
    """A thread that first loads, and then becomes the engine's thread.

    OpenMP keeps workers for every thread that has called torch. Those of a thread that only loaded would stay, and
    with more workers than cores all of them go to sleep between products: a decode step then takes a tenth longer.
    """

    def __init__(self, load: Callable[[], T]) -> None:
        super().__init__(name="minillm-engine", daemon=True)
        self._load = load
        self._loaded: Future[Any] = Future()
        self._next: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        """Load; then do what comes next."""
        try:
            self._loaded.set_result(self._load())
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        following = self._next.get()
        if following is not None:
            following()

    def result(self) -> Any:
        """What was loaded, or what loading raised. If the wait is interrupted, the thread ends after loading."""
        try:
            return self._loaded.result()
        except BaseException:
            self._next.put(None)
            raise

    def go_on(self, following: Callable[[], None]) -> None:
        """Run `following` in this thread."""
        self._next.put(following)


class EngineThread:
    """Owns an engine and the thread that steps it. Every public method may be called from any thread.

    `loader` is the thread that loaded the engine; without it a new thread is started.
    """

    def __init__(self, engine: LLMEngine, max_waiting: int | None = None, loader: LoaderThread | None = None) -> None:
        self.engine = engine
        self._max_waiting = max_waiting
        self._inbox: SimpleQueue[_Input] = SimpleQueue()
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._by_id: dict[str, Ticket] = {}
        self._open: set[Ticket] = set()
        self._num_handed = 0
        self._refusal: EngineDeadError | None = None
        # Engine thread only:
        self._close_at: float | None = None
        self.after_delivery: Callable[[], None] | None = None
        """Called in the engine thread when the sinks have been told all that a step brought."""
        self._thread = loader or threading.Thread(target=self._run, name="minillm-engine", daemon=True)
        _running.add(self)
        if loader is not None:
            loader.go_on(self._run)
        else:
            self._thread.start()

    # -- called from any thread ----------------------------------------------------------------------------------

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue all of them or none. Raises :class:`DuplicateRequestError`, :class:`QueueFullError` or
        :class:`EngineDeadError`."""
        with self._lock:
            self.check_open()
            seen: set[str] = set()
            for ticket in tickets:
                for sequence_id in ticket.ids:
                    if sequence_id in self._by_id or sequence_id in seen:
                        raise DuplicateRequestError(sequence_id)
                    seen.add(sequence_id)
            self._check_queue(len(tickets))
            for ticket in tickets:
                self._by_id.update(dict.fromkeys(ticket.ids, ticket))
                self._open.add(ticket)
                self._num_handed += 1
                self._inbox.put(_Submit(ticket))

    def cancel(self, request_id: str) -> bool:
        """Cancel a live request; its id is free at once. False if there is none of this id."""
        with self._lock:
            ticket = self._by_id.get(request_id)
            if ticket is None or ticket.request_id != request_id:
                return False
            self._release_ids(ticket)
            self._inbox.put(_Cancel(ticket))  # under the lock: before any request that takes over the id
        return True

    def cancel_ticket(self, ticket: Ticket) -> None:
        """Cancel by handle; does nothing to a request that has ended."""
        with self._lock:
            if ticket not in self._open:
                return
            self._release_ids(ticket)
            self._inbox.put(_Cancel(ticket))

    def drop_ticket(self, ticket: Ticket) -> None:
        """The same without a lock, for destructors; the id is free when the engine thread has seen it."""
        if not ticket.ended:
            self._inbox.put(_Cancel(ticket))

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the engine thread between two steps and return its result."""
        if self.is_current:
            return function()
        reply: Future[T] = Future()
        with self._lock:
            self.check_open()
            self._inbox.put(_Call(function, reply))
        return reply.result()

    def is_live(self, request_id: str) -> bool:
        """Whether a request of this id is queued or running."""
        with self._lock:
            return request_id in self._by_id

    @property
    def num_live(self) -> int:
        """Requests whose callers have not been told the end."""
        with self._lock:
            return len(self._open)

    def request_close(self, grace: float = 0.0) -> None:
        """Begin to close, as :meth:`close` does, without a lock and without waiting."""
        self._inbox.put(_Close(time.monotonic() + grace))

    def close(self, grace: float = 0.0, timeout: float | None = None) -> None:
        """Refuse new requests, let the live ones run for up to `grace` seconds, cancel the rest, end the thread.

        Idempotent; a second call may shorten the grace. `timeout` bounds the wait for the thread (seconds). Called
        from the engine thread itself (a future's callback) it does not wait.
        """
        if not isinstance(grace, int | float) or grace != grace:
            raise InvalidParameterError("grace", grace, "it must be a number of seconds")
        with self._lock:
            if self._refusal is None:
                self._refusal = EngineDeadError("the engine was closed")
        self.request_close(min(grace, threading.TIMEOUT_MAX))
        if not self.is_current:
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in the engine thread."""
        return threading.current_thread() is self._thread

    def check_may_wait(self) -> None:
        """Raise :class:`WouldDeadlockError` in the engine thread: what it waits for there would never come."""
        if self.is_current:
            raise WouldDeadlockError

    def abandon_after_fork(self) -> None:
        """In a forked child: the thread lives in the parent alone, and a lock that it held would never be freed."""
        self._lock = threading.Lock()
        self._inbox = SimpleQueue()
        self.engine.lock = threading.Lock()
        self._refusal = EngineDeadError("the engine runs in the process that this one was forked from; start one here")

    def check_open(self) -> None:
        """Raise :class:`EngineDeadError` (with the cause) if no more requests are taken."""
        if self._refusal is not None:
            raise EngineDeadError(str(self._refusal)) from self._refusal.__cause__

    def _check_queue(self, count: int) -> None:
        """Refuse `count` more requests if the queue would exceed its bound.

        What was handed over and the scheduler has not seen counts as waiting, except for as many as it has free
        sequence slots for.
        """
        if self._max_waiting is None:
            return
        scheduler = self.engine.scheduler
        waiting = scheduler.num_waiting
        free = 0 if waiting else max(0, scheduler.config.max_num_seqs - scheduler.num_running)
        waiting += max(0, self._num_handed + count - free)
        if waiting > self._max_waiting:
            raise QueueFullError(waiting - count, self._max_waiting)

    def _release_ids(self, ticket: Ticket) -> None:
        for sequence_id in ticket.ids:
            if self._by_id.get(sequence_id) is ticket:
                del self._by_id[sequence_id]

    # -- engine thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while not self._may_stop():
                self._take_inputs(wait=not self.engine.has_work and self._close_at is None)
                if self.engine.has_work:
                    self._step()
            self._cancel_all()
        except BaseException as error:
            cause = error
        self._shut_down(cause)

    def _step(self) -> None:
        """One turn of the engine; what its readers do with their updates is done before the device is waited for."""
        self._deliver(self.engine.issue_step())
        self.engine.commit_step()
        self._deliver(self.engine.take_updates())

    def _may_stop(self) -> bool:
        if self._close_at is None:
            return False
        return time.monotonic() >= self._close_at or not (self._open or self.engine.has_work)

    def _take_inputs(self, wait: bool) -> None:
        """Handle what is in the inbox now (not what comes meanwhile: steps go on under any flood of inputs)."""
        try:
            self._handle(self._inbox.get(block=wait))
        except Empty:
            return
        for _ in range(self._inbox.qsize()):
            self._handle(self._inbox.get_nowait())

    def _handle(self, item: _Input) -> None:
        match item:
            case _Submit(ticket):
                self._enter(ticket)
            case _Cancel(ticket):
                self._withdraw(ticket)
            case _Call(function, reply):
                try:
                    reply.set_result(function())
                except BaseException as error:
                    reply.set_exception(error)  # first: whoever called waits for it, also where the engine ends by it
                    if not isinstance(error, Exception):
                        raise
            case _Close(deadline):
                self._close_at = deadline if self._close_at is None else min(self._close_at, deadline)
                with self._lock:
                    if self._refusal is None:
                        self._refusal = EngineDeadError("the engine was closed")

    def _enter(self, ticket: Ticket) -> None:
        error = None
        with self._lock:  # the count and the scheduler's queue change together, for `_check_queue`
            try:
                self.engine.add_request(ticket.request, ticket.prompt, ticket, ticket.sink.wants_events)
            except EngineDeadError:
                raise
            except Exception as refusal:  # validation was before: whatever this is concerns the request alone
                error = refusal
            finally:
                self._num_handed -= 1
        if error is not None:
            self._refuse(ticket, error)

    def _withdraw(self, ticket: Ticket) -> None:
        """Cancel for the caller. Its update goes out here, before a request that takes over the id can come in."""
        if ticket.ended:
            return
        self.engine.cancel(ticket.request_id)
        self._deliver(self.engine.take_updates())

    def _deliver(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            ticket: Ticket = update.tag
            if update.output is not None:
                self._mark_ended(ticket)
            try:
                if update.events:
                    ticket.sink.on_events(update.events, update.tracked.prompt_scores)
                if update.output is not None:
                    ticket.sink.on_output(update.output)
            except BaseException as error:
                # A reader's fault (say, a broken event loop, a callback that calls sys.exit) is no reason to stop
                # serving the others.
                logger.error("request %s: its reader could not be told", ticket.request_id, exc_info=error)
        if updates:
            self._end_of_delivery()

    def _end_of_delivery(self) -> None:
        if self.after_delivery is not None:
            try:
                self.after_delivery()
            except BaseException as error:
                logger.error("readers could not be woken", exc_info=error)

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        self._mark_ended(ticket)
        try:
            ticket.sink.on_error(error)
        except BaseException as fault:
            logger.error("request %s: its reader could not be told", ticket.request_id, exc_info=fault)
        self._end_of_delivery()

    def _mark_ended(self, ticket: Ticket) -> None:
        """Free the request's ids. Comes before its sink is told: whoever hears of the end may use the id again."""
        ticket.ended = True
        with self._lock:
            self._open.discard(ticket)
            self._release_ids(ticket)

    def _cancel_all(self) -> None:
        """The end of `close`: what still lives gets its partial output and `cancelled`; plans in flight commit."""
        self._take_inputs(wait=False)
        with self._lock:
            tickets = list(self._open)
        for ticket in sorted(tickets, key=lambda ticket: ticket.request.arrival_seq):
            self._withdraw(ticket)
        while self.engine.has_work:
            self._step()

    def _shut_down(self, cause: BaseException | None) -> None:
        """Nobody may be left waiting: neither for a request nor for a call."""
        with self._lock:
            if cause is not None:
                self._refusal = _death(cause)
            elif self._refusal is None:
                self._refusal = EngineDeadError("the engine was closed")
            refusal = self._refusal
            left = list(self._open)
        self._deliver_last()
        for ticket in left:
            if not ticket.ended:
                self._refuse(ticket, _copy(refusal))
        while True:
            try:
                item = self._inbox.get_nowait()
            except Empty:
                break
            if isinstance(item, _Call):
                item.reply.set_exception(_copy(refusal))
        try:
            self.engine.close()
        except Exception as error:
            logger.error("the runner could not be closed", exc_info=error)
        _running.discard(self)

    def _deliver_last(self) -> None:
        try:
            self._deliver(self.engine.take_updates())
            self.engine.abandon()
        except Exception as error:
            logger.error("last updates could not be delivered", exc_info=error)


def _death(cause: BaseException) -> EngineDeadError:
    if isinstance(cause, EngineDeadError):
        return cause
    error = EngineDeadError(f"the engine failed: {cause!r}")
    error.__cause__ = cause
    return error


def _copy(error: EngineDeadError) -> EngineDeadError:
    """One exception per receiver: raising adds a traceback to it."""
    copy = EngineDeadError(str(error))
    copy.__cause__ = error.__cause__
    return copy


_running: set[EngineThread] = set()
"""Engines whose threads run. Copied before it is looked through: a thread that ends takes itself out."""


def _abandon_all() -> None:
    for thread in list(_running):
        thread.abandon_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


@atexit.register
def _close_all() -> None:
    """At interpreter exit: the threads are daemons, so an open runtime does not hang it, but end them in order."""
    threads = list(_running)
    for thread in threads:
        thread.request_close()
    for thread in threads:
        thread.close(timeout=EXIT_TIMEOUT)
