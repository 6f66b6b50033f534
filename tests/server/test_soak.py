"""A slice of the soak (`run_soak.py`): clients that hang up leave the others' answers and the engine's state alone."""

from __future__ import annotations

import pytest
from run_soak import soak


@pytest.mark.timeout(240)
def test_a_third_hangs_up_and_nothing_is_left_behind() -> None:
    outcome = soak(requests=120, clients=24, seed=3, kinds=20, quiet=True)
    assert outcome.faults == []
    assert outcome.answered > 60 and len(outcome.hung_up) >= 4
    assert outcome.preemptions > 0
