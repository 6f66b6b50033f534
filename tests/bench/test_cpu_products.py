"""The product benchmark: every contender computes, and the table marks the quickest."""

from __future__ import annotations

import torch

from minillm.bench import cpu_products
from minillm.bench.cpu_products import SHAPES, Timing, contenders, random_blocks, table, time_shape
from minillm.models.gguf import dequantize


def test_random_blocks_are_finite_weights_of_the_asked_shape() -> None:
    for kind in ("Q4_1", "Q8_0"):
        weight = dequantize(random_blocks(kind, 32, 64), kind)
        assert weight.numel() == 32 * 64
        assert weight.isfinite().all()
        assert weight.std() > 0


def test_every_contender_multiplies() -> None:
    for product, dtype in contenders(64, 32, "Q4_1").values():
        out = product(torch.ones(3, 64, dtype=dtype))
        assert out.shape == (3, 32)
        assert out.isfinite().all()


def test_timings_cover_every_row_count(monkeypatch) -> None:
    monkeypatch.setitem(SHAPES, "small", (64, 32, 2, "Q4_1"))
    monkeypatch.setattr(cpu_products, "ROUNDS", 1)
    timings = time_shape("small", [1, 3], threads=1)
    assert [(timing.shape, timing.rows) for timing in timings] == [("small", 1), ("small", 3)]
    assert all(us > 0 for timing in timings for us in timing.microseconds.values())


def test_table_marks_the_quickest() -> None:
    text = table([Timing("qkv", 4, {"a": 20.4, "b": 10.2})])
    assert text.splitlines()[-1] == "| qkv | 4 | 20 | **10** |"
