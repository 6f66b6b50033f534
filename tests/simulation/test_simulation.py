"""A slice of the million-step simulation, and tests of the harness's own promises."""

from __future__ import annotations

import pytest

from simulation.harness import run_seed
from simulation.run_million import REQUIRED, run_many

RARE = frozenset({"engine failures", "cancel in swapped", "cancel in preempted", "chunks failed"})
SLICES = 4
SEEDS_PER_SLICE = 50
STEPS_PER_SEED = 150


@pytest.mark.parametrize("part", range(SLICES))
def test_random_steps_break_no_rule(part: int) -> None:
    coverage = run_many(1_000_000 + part * SEEDS_PER_SLICE, SEEDS_PER_SLICE, STEPS_PER_SEED)
    assert coverage["steps"] >= SEEDS_PER_SLICE * STEPS_PER_SEED
    assert coverage["seeds overlapped"] >= SEEDS_PER_SLICE // 4
    missing = [name for name in REQUIRED if name not in RARE and not coverage[name]]
    assert not missing, f"the slice never met: {missing}"


def test_a_seed_is_a_whole_run() -> None:
    first, second = run_seed(11, 200), run_seed(11, 200)
    assert first.coverage == second.coverage
    assert first.runner.memory == second.runner.memory
    assert first.now == second.now
