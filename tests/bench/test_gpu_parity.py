"""The GPU parity program: what it takes for a difference, and how it measures one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def program():
    path = Path(__file__).resolve().parents[2] / "tools" / "gpu_parity.py"
    if not path.is_file():
        pytest.skip("tools/ is not part of this checkout")
    spec = importlib.util.spec_from_file_location("gpu_parity", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_parity"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_parity"]


@pytest.fixture
def parity(program):
    """One prompt whose float32 answer is 1 2 3, with the likely tokens at each place."""
    made = object.__new__(program.Parity)
    places = [{1: -0.1, 4: -2.5}, {2: -0.7, 5: -1.0}, {3: -0.2, 6: -1.9}]
    made.prompts, made.wanted, made.failed, made.rows = [[9]], [[1, 2, 3]], [], []
    made.scores = [[{token: SimpleNamespace(logprob=value) for token, value in place.items()} for place in places]]
    return made


def test_a_gap_is_that_of_the_first_token_that_differs(parity):
    assert parity.gap(0, [1, 2, 3]) is None
    assert parity.gap(0, [1, 5, 6]) == pytest.approx(0.3)
    assert parity.gap(0, [4, 2, 3]) == pytest.approx(2.4)
    assert parity.gap(0, [1, 8, 3]) == float("inf")


@pytest.mark.parametrize(
    ("dtype", "tokens", "taken", "passed"),
    [
        ("float32", [1, 2, 3], 1, True),
        ("float32", [1, 5, 3], 1, False),
        ("bfloat16", [1, 5, 3], 1, True),
        ("bfloat16", [4, 2, 3], 1, False),
        ("float32", [1, 2, 3], 0, False),
    ],
)
def test_float32_may_not_differ_bfloat16_within_the_bound_and_the_way_must_be_taken(
    program, parity, monkeypatch, dtype, tokens, taken, passed
):
    counters = SimpleNamespace(preemptions_swap=taken, preemptions_recompute=0, cached_tokens=0)
    output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)])
    monkeypatch.setattr(program.Parity, "generate", lambda *_: ([output], counters, 1.0))
    parity.compare(SimpleNamespace(dtype=dtype), program.Way("swap", {}, "preemptions_swap"), 0.1)
    assert parity.rows[0]["passed"] == passed
    assert parity.failed == ([] if passed else [f"{dtype} swap"])
