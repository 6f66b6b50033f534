"""The tables of `minillm bench cpu`, drawn from saved rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm.bench import common, cpu_bench

WHERE = {
    "device": "a cpu",
    "cores": "2",
    "date": "2030-01-01",
    "commit": "abc",
    "torch": "2.13",
    "transformers": "5.17",
}


def rows(workload: str, contender: str, figures: list[dict[str, float]]) -> list[dict[str, object]]:
    return [{**cpu_bench._row(workload, contender, i, **figure), **WHERE} for i, figure in enumerate(figures)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    table = [
        *rows("load", "minillm", [{"seconds": 2.0}, {"seconds": 4.0}, {"seconds": 3.0}]),
        *rows("load", "transformers", [{"seconds": 26.0}]),
        *rows("memory, 64 requests", "minillm", [{"seconds": 9.0, "tokens": 90, "peak_bytes": 3 << 29}]),
        *rows("1 stream", "minillm", [{"seconds": 1.0, "tokens": 60}, {"seconds": 2.0, "tokens": 60}]),
        *rows("1 stream", "transformers float32", [{"seconds": 3.0, "tokens": 60}, {"seconds": 3.0, "tokens": 60}]),
    ]
    path = tmp_path / "cpu.csv"
    common.write_csv(path, table)
    return path


def test_from_csv_prints_medians_ratios_and_where_they_are_from(cli, saved: Path) -> None:
    done = cli("bench", "cpu", "--from-csv", str(saved))
    assert done.code == 0, done.err
    assert "3.00 (2.00-4.00)" in done.out and "26.00" in done.out
    assert "45.0 (30.0-60.0)" in done.out and "2.25" in done.out
    assert "1.50 GiB" in done.out
    assert "a cpu, 2 cores, 2030-01-01, commit abc" in done.out


def test_a_missing_csv_is_one_line_and_exit_1(cli, tmp_path: Path) -> None:
    done = cli("bench", "cpu", "--from-csv", str(tmp_path / "none.csv"))
    assert done.code == 1 and len(done.err.splitlines()) == 1 and "none.csv" in done.err


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--streams", "1"], ["--new-tokens", "x"]])
def test_bad_options_are_usage_errors(cli, arguments: list[str]) -> None:
    done = cli("bench", "cpu", *arguments)
    assert done.code == 2 and len(done.errors) == 1 and arguments[0] in done.errors[0]


def test_scheduler_bench_measures_writes_and_prints_again(cli, tmp_path: Path) -> None:
    path = tmp_path / "scheduler.csv"
    done = cli("bench", "scheduler", "--running", "2", "--running", "4", "--steps", "20", "--output", str(path))
    assert done.code == 0, done.err
    assert [row["running"] for row in common.read_csv(path)] == ["2", "4"]
    assert all(float(row["median_us"]) > 0 for row in common.read_csv(path))
    assert cli("bench", "scheduler", "--from-csv", str(path)).code == 0
