"""`bench sampling`: what it makes of saved rows; measuring needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minillm.bench import common, sampling
from minillm.bench.program import get_program
from minillm.cli.app import app
from minillm.core.errors import ConfigError


def saved_rows(slow: float = 1.0) -> list[dict[str, str]]:
    where = {"torch": "2.11.0", **common.environment("a GPU", ("torch",))}
    return [
        {
            "batch": str(batch),
            "mode": mode,
            "vocab": str(sampling.VOCAB),
            "rounds": "30",
            "kernel_us": str(10.0 * slow),
            "kernel_min_us": "9",
            "kernel_max_us": "12",
            "gbps": "1234.5",
            "host_us": str(40 + batch / 10),
            "tensor_us": "500",
            "over_tensors": "50",
            "calls": "3",
            "checked": "8",
            "differing": "0",
            "seed": "0",
            **where,
        }
        for batch in sampling.BATCHES
        for mode in sampling.MODES
    ]


def test_saved_rows_become_a_table_verdicts_figures_and_a_plot(tmp_path: Path) -> None:
    program = get_program("sampling")
    rows = saved_rows()
    ((title, (heads, cells)),) = program.tables(rows).items()
    assert "a GPU" in title and len(cells) == len(rows) and {len(line) for line in cells} == {len(heads)}
    assert cells[0][:3] == ["1", "greedy", "10.0"]
    verdicts = program.verdicts(rows)
    assert len(verdicts) == len(sampling.LIMITS_US) + 1
    assert [v.met for v in verdicts[:-1]] == [True] * len(sampling.LIMITS_US)
    assert not verdicts[-1].met and verdicts[-1].found == "66 us"
    assert [v.met for v in program.verdicts(saved_rows(2.0))[:2]] == [False, False]
    assert not program.verdicts([{**row, "vocab": "1000", "batch": "2"} for row in rows])
    assert len(program.figures(rows)) == len(rows)
    (picture,) = program.draw(rows, tmp_path / "sampling.csv")
    assert picture.stat().st_size > 10_000


def test_measuring_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="CUDA"):
        app(["bench", "sampling", "--output", str(tmp_path / "sampling.csv")], standalone_mode=False)
    assert not list(tmp_path.iterdir())
