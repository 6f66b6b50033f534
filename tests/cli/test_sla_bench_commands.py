"""`bench sla` and `bench prefix` as commands: they measure, write, and show again from the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm.bench import common


@pytest.mark.parametrize("name", ["sla", "prefix", "sla-model", "prefix-model"])
def test_quick_runs_write_results_and_history_and_show_them_again(cli, tmp_path: Path, name: str) -> None:
    path = tmp_path / "saved.csv"
    done = cli("bench", name, "--quick", "--output", str(path))
    assert done.code == 0, done
    assert common.read_csv(path)
    history = common.read_csv(tmp_path / "history.csv")
    assert {row["program"] for row in history} == {name}
    again = cli("bench", name, "--from-csv", str(path))
    assert again.code == 0
    assert len(common.read_csv(tmp_path / "history.csv")) == len(history)
    other = cli("bench", "prefix" if "sla" in name else "sla", "--from-csv", str(path))
    assert other.code == 1 and "is not a result of" in other.errors[0], "a file of another program is refused"


def test_a_trace_that_is_not_there_is_named(cli, tmp_path: Path) -> None:
    done = cli("bench", "prefix", "--trace", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "x.csv"))
    assert done.code == 1
    assert "none.jsonl: it cannot be read" in done.err
