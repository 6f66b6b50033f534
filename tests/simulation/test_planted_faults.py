"""The simulation notices every planted fault within a bounded number of short runs, and none where none is."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from minillm.core.errors import BlockAllocationError, IllegalTransitionError, InvariantViolation
from simulation.harness import run_seed
from simulation.planted_faults import FAULTS
from simulation.shadow_runner import SimulationFailure
from simulation.workload import random_settings

NOTICED = (SimulationFailure, InvariantViolation, BlockAllocationError, IllegalTransitionError)
MAX_SEEDS = 120
STEPS = 80
NEEDS_COLLISIONS = frozenset({"token_comparison_skipped"})


def first_noticed(name: str) -> tuple[int, BaseException] | None:
    """The first seed whose run fails, and how."""
    for seed in range(MAX_SEEDS):
        settings = random_settings(Random(seed))
        if name in NEEDS_COLLISIONS:
            settings = replace(settings, constant_hash=True)
        try:
            run_seed(seed, STEPS, settings)
        except NOTICED as error:
            return seed, error
    return None


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_planted_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    noticed = first_noticed(name)
    assert noticed is not None, f"{name} went unnoticed in {MAX_SEEDS} seeds"


def test_at_least_twelve_faults_are_planted() -> None:
    assert len(FAULTS) >= 12


def test_the_same_seeds_pass_without_a_fault() -> None:
    assert first_noticed("nothing is planted") is None
