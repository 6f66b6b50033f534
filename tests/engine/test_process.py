"""A process that is owned by an engine: what is set, and that others are left alone."""

from __future__ import annotations

import gc
import subprocess
import sys

from minillm.engine import process

OWNED = """
import gc
from minillm.engine import process
before = gc.get_threshold()
process.after_loading()
assert gc.get_freeze_count() == 0 and gc.get_threshold() == before, "not owned: nothing is touched"
process.own_process()
process.own_process()
kept = [[] for _ in range(100)]
process.after_loading()
assert gc.get_threshold() == process.THRESHOLDS and gc.get_freeze_count() > 100
cycle = []
cycle.append(cycle)
del cycle
assert gc.collect() >= 1, "garbage that comes later is still found"
print("fine")
"""


def test_an_owned_process_is_tuned_when_it_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", OWNED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "fine", done.stderr


def test_this_process_is_a_librarys() -> None:
    assert not process._owned
    process.after_loading()
    assert gc.get_freeze_count() == 0
