"""The machine's speed while a run goes on, for machines that do not keep theirs.

Every few steps of a run, a *pulse*: one small run, always the same, on an engine of its own with the same weights. The
clock of the run stands still meanwhile. The mean time of a run's pulses says how fast the machine was during that run,
which a probe before and after it cannot.
"""

from __future__ import annotations

import statistics

from minillm.bench.runs import Target, drive
from minillm.bench.workloads import fixed

EVERY = 12
"""Steps of the run from one pulse to the next."""
WORK = fixed(2, 16, 4, seed=2)
"""A prefill step and three decode steps."""


class Pulse:
    """Pulses on the engine of `probe`; pass it as `after_step` to :func:`minillm.bench.runs.drive`."""

    def __init__(self, probe: Target) -> None:
        self._probe = probe
        self._paused = 0.0
        self._steps = 0
        self._times: list[float] = []

    def attach(self, target: Target) -> None:
        """Let the clock of the target's engine stand still during pulses."""
        clock = target.engine.clock
        target.engine.clock = lambda: clock() - self._paused

    def begin(self) -> None:
        """Before a run: forget the last one, and pulse once."""
        self._steps = 0
        self._times = []
        self._beat()

    def __call__(self) -> None:
        """After a step of the run."""
        self._steps += 1
        if self._steps % EVERY == 0:
            self._beat()

    def _beat(self) -> None:
        clock = self._probe.engine.clock
        start = clock()
        self._times.append(drive(self._probe, WORK).seconds)
        self._paused += clock() - start

    @property
    def seconds(self) -> float:
        """Mean time of the last run's pulses."""
        return statistics.fmean(self._times)
