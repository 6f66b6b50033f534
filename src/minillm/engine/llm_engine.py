"""The step loop: schedule, run, deliver, commit. Free of threads; :mod:`minillm.engine.engine_thread` drives it.

```
              add_request / cancel
                      │
  issue_step():  schedule ──► forward, sample      plan n+1 goes to the runner while n still runs (overlap)
                 text, stop strings, logprobs ──►  updates for the callers, of plan n-1
                      └── finish(sequence, index) back to the scheduler
 commit_step():  collect ──► commit                of plan n; the only place that waits for the device, but for plans
                                                   with rows under a grammar: these commit n before they sample n+1
```
So with overlap the text work of a plan, and whatever its readers do with it, runs while the device has a plan to work
on and another one queued: it can be as long as a step before the device ever waits. Without overlap (nothing would run
meanwhile) a plan's text is made as soon as it is committed.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from minillm.core.errors import EngineDeadError, InvalidParameterError
from minillm.core.plan import NoPlan, StepEvents, StepPlan
from minillm.core.request import Request
from minillm.engine.grammar_rows import GrammarRows
from minillm.engine.output_processor import OutputProcessor, RequestUpdate, TrackedRequest
from minillm.runner.interface import ModelRunner

if TYPE_CHECKING:
    from minillm.core.base_scheduler import BaseScheduler
    from minillm.core.stats import SchedulerStats

logger = logging.getLogger("minillm.engine")

T = TypeVar("T")


def _device_failed(error: Exception) -> bool:
    if "torch" not in sys.modules:  # a runner without a device
        return False
    from minillm.runner.device import is_device_failure

    return is_device_failure(error)


class LLMEngine:
    """One model's engine. All methods are for one thread, but for :meth:`validate`, :meth:`inspect`, :meth:`stats` and
    :meth:`explain`.

    Those read under `lock`, which the engine holds only while the scheduler works, never during a forward
    pass: so they answer at once however long a step takes.
    """

    def __init__(
        self,
        scheduler: BaseScheduler,
        runner: ModelRunner,
        outputs: OutputProcessor,
        *,
        overlap: bool = False,
        check_invariants: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.outputs = outputs
        self.grammars = GrammarRows()
        self.overlap = overlap
        self.clock = clock
        self.lock = threading.Lock()
        self.num_steps = 0
        self.num_invariant_violations = 0
        self._check_invariants = check_invariants
        self.wait_seconds = 0.0
        """Seconds spent in waiting for the device, of all steps: the rest of the time is the host's own work."""
        self._in_flight: deque[tuple[StepPlan, Any]] = deque()
        self._committed: list[tuple[StepEvents, float]] = []
        """Events of commits whose text is still to be made, with their time."""
        self._idle_plans = 0
        self._failure: EngineDeadError | None = None
        self._issued = False
        self._closed = False
        self._device_lost = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._in_flight) or bool(self._committed) or self.scheduler.has_live_requests

    @property
    def failure(self) -> EngineDeadError | None:
        """Why the engine is dead, or None."""
        return self._failure

    def validate(self, request: Request) -> None:
        """Raise what :meth:`add_request` would refuse the request with; callable from any thread."""
        with self.lock:
            self.scheduler.validate(request)

    def add_request(
        self, request: Request, prompt: str | None = None, tag: Any = None, wants_events: bool = True
    ) -> TrackedRequest:
        """Hand a request to the scheduler; raises a :class:`RequestError` with nothing changed if it is refused.

        Updates carry `tag`. Without `wants_events` they bring the output at the end and nothing before.
        """
        self._check_alive()
        constrained = request.sampling_params.structured_outputs is not None
        if constrained and request.grammar is None:
            raise InvalidParameterError("grammar", None, "structured_outputs must be compiled before (Runtime.prepare)")
        with self.lock:
            self.scheduler.submit(request, self.clock())
        try:
            tracked = self.outputs.add(request, prompt, tag, wants_events)
        except Exception:
            with self.lock:
                self.scheduler.cancel(request.request_id, self.clock(), "its output could not be set up")
                self.scheduler.take_events()
            raise
        if constrained:
            self.grammars.add([request, *request.children])
        return tracked

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        """Cancel a request in any state; its update (partial output, `cancelled`) is ready at once.

        Idempotent: False for an unknown or ended request.
        """
        self._make_text()
        tracked = self.outputs.get(request_id)
        if tracked is None or self._failure is not None:
            return False
        now = self.clock()
        with self.lock:
            self.scheduler.cancel(request_id, now, reason)
            events = self.scheduler.take_events()
        self._process(events, now)
        self.outputs.end_open_choices(tracked, "cancelled", now)
        return True

    def take_updates(self) -> list[RequestUpdate]:
        """What happened since the last look (also returned by :meth:`step`)."""
        return self.outputs.take_updates()

    def step(self) -> list[RequestUpdate]:
        """One turn of the loop: :meth:`issue_step` and :meth:`commit_step`. Returns the updates of both.

        Raises :class:`EngineDeadError` (cause chained) when the runner or the scheduler fails: then no request is
        live any more in the core, and :meth:`abandon` names those whose callers are still to be told.
        """
        updates = self.issue_step()
        self.commit_step()
        return updates + self.outputs.take_updates()

    def issue_step(self) -> list[RequestUpdate]:
        """Issue the next plan if there is one, then make the text of what was committed before.

        Never waits, unless the plan samples under a grammar: then the plan before it commits here.
        Returns updates to deliver before :meth:`commit_step`, which has to follow. Raises as :meth:`step`.
        """
        self._check_alive()
        try:
            self._issue()
            self._make_text()
        except Exception as error:
            raise self._die(error) from error
        return self.outputs.take_updates()

    def commit_step(self) -> None:
        """Wait for the oldest plan in flight and commit it, unless it may go on running. Raises as :meth:`step`."""
        self._check_alive()
        try:
            if self._in_flight and not (self._issued and self.overlap and len(self._in_flight) == 1):
                self._commit_oldest()
            if not self.overlap or not self.scheduler.has_live_requests:
                self._make_text()  # nothing will be issued that it could hide behind
            if self._check_invariants:
                self._run_invariants()
        except Exception as error:
            raise self._die(error) from error

    def _issue(self) -> None:
        now = self.clock()
        with self.lock:
            plan = self.scheduler.schedule(now)
        self._issued = isinstance(plan, StepPlan)
        if isinstance(plan, StepPlan):
            self.num_steps += 1
            self._idle_plans = 0
            handle = self.runner.forward(plan)
            self._in_flight.append((plan, handle))
            self.runner.sample(handle, self._masks(plan) if self.grammars.take_plan(plan) else None)
        elif not self._in_flight:
            self._deliver_expired(plan, now)

    def _masks(self, plan: StepPlan) -> Any:
        """Which tokens the sampling rows of the plan just issued may take.

        They follow from the tokens of the plan before, which is committed here, while this one's forward pass runs.
        What the grammars found out about ends waits until this plan is sampled, like the text.
        """
        while len(self._in_flight) > 1:
            self._commit_oldest()
        return self.grammars.masks(plan)

    def _commit_oldest(self) -> None:
        plan, handle = self._in_flight.popleft()
        begin = time.perf_counter()
        outcome = self.runner.collect(handle)
        self.wait_seconds += time.perf_counter() - begin
        now = self.clock()
        with self.lock:
            events = self.scheduler.commit(plan, outcome, now)
        self._committed.append((events, now))

    def _make_text(self) -> None:
        """Text work of what was committed, in order."""
        committed, self._committed = self._committed, []
        for events, now in committed:
            self._process(events, now)
        if self.grammars.has_ends:
            self._process(StepEvents(), self.clock())

    def _deliver_expired(self, reason: StepPlan | NoPlan, now: float) -> None:
        """Nothing is in flight and nothing was scheduled: only deadlines can have done something."""
        self._make_text()
        with self.lock:
            events = self.scheduler.take_events()
            live = self.scheduler.has_live_requests
        self._process(events, now)
        if not live or events.finished:
            self._idle_plans = 0
            return
        # The core promises progress whenever something is pending. Waiting for it without end would be a hang.
        self._idle_plans += 1
        if self._idle_plans > 1:
            raise RuntimeError(f"the scheduler has live requests, and nothing in flight, but no plan ({reason})")

    def _process(self, events: StepEvents, now: float) -> None:
        """Text work on events; what it found (stop strings, failed outputs) goes back to the scheduler."""
        stops, failed = self.outputs.process(events, now)
        ends = self.grammars.take_events(events)
        found = [self.outputs.fail(sequence_id, error, now) for sequence_id, error in ends.broken]
        failed += [request_id for request_id in found if request_id is not None]
        if not stops and not ends.complete and not failed:
            return
        with self.lock:
            for sequence_id, index in stops:
                self.scheduler.finish(sequence_id, index, now)
            for sequence_id, index in ends.complete:
                self.scheduler.finish(sequence_id, index, now, why="its grammar is complete")
            for request_id in failed:
                self.scheduler.cancel(request_id, now, "its output failed")
            events = self.scheduler.take_events()
        # What ended by a stop string is known already; anything else in there is news.
        self.outputs.process(events, now)
        self.grammars.take_events(events)

    def _run_invariants(self) -> None:
        from minillm.core import invariants

        try:
            with self.lock:
                invariants.check(self.scheduler)
        except Exception as violation:
            # A failed check reports; it does not end live traffic.
            self.num_invariant_violations += 1
            logger.error("invariant violated after step %d: %r", self.num_steps, violation)

    def inspect(self, look: Callable[[BaseScheduler], T]) -> T:
        """What `look` returns of the scheduler, between two of its decisions; callable from any thread.

        The step loop waits meanwhile: `look` copies what it needs, changes nothing, and works on the copy later.
        """
        with self.lock:
            return look(self.scheduler)

    def stats(self) -> SchedulerStats:
        """Counters and gauges of the scheduler; callable from any thread."""
        with self.lock:
            return self.scheduler.stats()

    def explain(self, request_id: str) -> str:
        """What happened to a request and what it waits for, in words; callable from any thread."""
        with self.lock:
            return self.scheduler.explain(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests keep their blocks. Always True."""
        with self.lock:
            return self.scheduler.reset_prefix_cache()

    def abandon(self) -> list[TrackedRequest]:
        """Live requests whose callers have not been told the end, after a failure; they are forgotten here."""
        live = self.outputs.live()
        self.outputs.discard_all()
        return live

    def close(self) -> None:
        """Free the runner's memory and threads; idempotent. Live requests must have been cancelled before.

        After a failure of the device its memory is left to the end of the process.
        """
        if self._closed:
            return
        self._closed = True
        self._drop_in_flight()
        if self._failure is None:
            self._failure = EngineDeadError("the engine is closed")
        if not self._device_lost:
            self.runner.close()

    def _keep_forever(self, error: Exception) -> None:
        """Never free what the failed device works on: freeing page-locked memory asks the device whether copies out of
        it are done, and where that fails torch ends the whole process."""
        self._device_lost = True
        held = (self.runner, tuple(self._in_flight), error)  # the error's traceback has frames with tensors
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))

    def _drop_in_flight(self) -> None:
        """Wait for the device before memory goes; what the plans in flight bring no longer matters."""
        while self._in_flight:
            _, handle = self._in_flight.popleft()
            try:
                self.runner.collect(handle)
            except Exception as error:
                logger.debug("collect while closing: %r", error)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(str(self._failure)) from self._failure.__cause__

    def _die(self, error: Exception) -> EngineDeadError:
        logger.error("the engine failed at step %d", self.num_steps, exc_info=error)
        self._failure = EngineDeadError(f"the engine failed at step {self.num_steps}: {error!r}")
        self._failure.__cause__ = error
        if _device_failed(error):
            self._keep_forever(error)
        self._drop_in_flight()
        self.grammars.clear()
        try:
            for events, now in self._committed:  # what came before the failure still reaches its reader
                self.outputs.process(events, now)
            self._committed.clear()
        except Exception as further:
            logger.error("the last outputs could not be processed", exc_info=further)
        try:
            with self.lock:
                self.scheduler.fail_all(repr(error), self.clock())
                self.scheduler.take_events()
        except Exception as further:
            logger.error("the scheduler could not be reset after the failure", exc_info=further)
        return self._failure
