"""A slice of the million-step simulation, and tests of the harness's own promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_a_seed_is_the_same_run_in_any_process() -> None:
    program = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from simulation.harness import run_seed\n"
        "for seed in range(8):\n"
        "    run = run_seed(seed, 80)\n"
        "    print(sorted(run.coverage.items()), run.runner.memory, run.now)"
    )
    root = Path(__file__).resolve().parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program, str(root / "tests"), str(root / "src")],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1")
    }
    assert len(outputs) == 1


def test_a_seed_is_a_whole_run() -> None:
    first, second = run_seed(11, 200), run_seed(11, 200)
    assert first.coverage == second.coverage
    assert first.runner.memory == second.runner.memory
    assert first.now == second.now
