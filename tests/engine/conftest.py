"""Runtimes whose steps a test controls, and both ways of stepping an engine."""

from __future__ import annotations

import threading

import pytest
from engine_fakes import ScriptedRunner, Valve, make_runtime


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def gated():
    """A runtime whose steps wait for a gate, and the gate; opened and closed at the end."""
    gate = threading.Event()
    runner = ScriptedRunner(gate=gate)
    runtime = make_runtime(runner)
    yield runtime, runner, gate
    gate.set()
    runtime.close()


@pytest.fixture
def valved():
    """A runtime that lets 20 steps through, and its valve: a request of 200 tokens lives until the test ends it."""
    valve = Valve(20)
    runtime = make_runtime(ScriptedRunner(gate=valve))
    yield runtime, valve
    valve.open()
    runtime.close()
