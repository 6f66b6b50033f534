"""A slice of the million-step simulation, and tests of the harness's own promises."""

from __future__ import annotations

from simulation.harness import run_seed
from simulation.run_million import REQUIRED, run_many

FIRST_SEED = 1_000_000
SEEDS = 200
STEPS_PER_SEED = 150
RARE = frozenset({"engine failures", "cancel in swapped", "chunks failed"})
"""What so few steps may miss; the million-step run must meet it."""


def test_thirty_thousand_random_steps_break_no_rule() -> None:
    coverage = run_many(FIRST_SEED, SEEDS, STEPS_PER_SEED)
    assert coverage["steps"] >= SEEDS * STEPS_PER_SEED
    assert coverage["seeds overlapped"] >= SEEDS // 3
    missing = [name for name in REQUIRED if name not in RARE and not coverage[name]]
    assert not missing, f"never met: {missing}"


def test_a_seed_is_a_whole_run() -> None:
    first, second = run_seed(11, 200), run_seed(11, 200)
    assert first.coverage == second.coverage
    assert first.runner.memory == second.runner.memory
    assert first.now == second.now
