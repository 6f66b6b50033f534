"""A million randomised scheduler steps, every one checked (see docs/testing.md).

python tests/simulation/run_million.py                      # a million steps over 2,000 seeds, one core
python tests/simulation/run_million.py --seed 17            # one seed again
python tests/simulation/run_million.py --first-seed 5000 --seeds 1000 --steps 200
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "src")]

from simulation.harness import run_seed  # noqa: E402

SEEDS = 2000
STEPS_PER_SEED = 440

REQUIRED = (
    "swap-outs",
    "swap-ins",
    "preempted: swap",
    "preempted: recompute",
    "preempted in prefill",
    "copies on write",
    "forks",
    "prefix hits",
    "evictions",
    "cancel in waiting",
    "cancel in prefilling",
    "cancel in decoding",
    "cancel in swapped",
    "cancel in preempted",
    "discarded rows",
    "rows failed",
    "chunks failed",
    "swaps failed",
    "engine failures",
    "no plan: drain",
    "deadlines expired",
    "string stops",
    "tokens dropped by string stops",
    "ended: stop",
    "ended: length",
    "ended: cancelled",
    "ended: error",
    "refused: PromptTooLongError",
    "refused: EmptyPromptError",
    "refused: QueueFullError",
    "refused: InvalidParameterError",
    "prompts scored",
    "ids used again",
    "steps with a crowd",
    "steps overlapped",
    "static steps",
    "constant-hash steps",
)
"""What a run of this size must have met, or the simulation does not test what it claims to."""


def run_many(first_seed: int, seeds: int, steps: int, *, progress: bool = False) -> Counter[str]:
    """Simulate seeds [first_seed, first_seed + seeds) with `steps` plans each; returns the coverage counts."""
    coverage: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + seeds):
        simulation = run_seed(seed, steps)
        coverage.update(simulation.coverage)
        coverage["seeds"] += 1
        coverage["seeds overlapped"] += simulation.settings.overlap
        most = simulation.most_preemptions
        coverage["most preemptions of a request"] = max(coverage["most preemptions of a request"], most)
        if progress and (seed - first_seed + 1) % 100 == 0:
            print(f"  {seed - first_seed + 1} seeds, {coverage['steps']:,} steps", file=sys.stderr, flush=True)
    return coverage


def main() -> int:
    """Run, print counts and time; exit 1 if something was not covered. A failure prints its seed and is raised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS_PER_SEED, help="plans per seed")
    parser.add_argument("--seed", type=int, help="run this one seed only")
    arguments = parser.parse_args()
    first, seeds = arguments.first_seed, arguments.seeds
    if arguments.seed is not None:
        first, seeds = arguments.seed, 1
    begin, cpu = time.perf_counter(), time.process_time()
    coverage = run_many(first, seeds, arguments.steps, progress=seeds > 100)
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    for name, number in sorted(coverage.items()):
        print(f"{name:40} {number:>12,}")
    steps = coverage["steps"]
    print(
        f"{steps:,} steps over seeds {first}..{first + seeds - 1}, invariants checked after every one, no violation: "
        f"{wall:.0f} s ({cpu:.0f} s of one core, {cpu / max(steps, 1) * 1e6:.0f} us a step)"
    )
    missing = [name for name in REQUIRED if not coverage[name]] if seeds >= 100 else []
    if missing:
        print(f"never happened: {', '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
