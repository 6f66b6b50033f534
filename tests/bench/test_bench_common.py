"""Fair timing, child processes and CSV files of the benchmarks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from minillm.bench import common


def test_interleaved_rotates_the_order_and_drops_the_warm_up() -> None:
    calls: list[str] = []

    def contender(name: str):
        def work() -> int:
            calls.append(name)
            return len(calls)

        return work

    samples = common.interleaved({name: contender(name) for name in "abc"}, repeats=4)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert [sample.tokens for sample in samples["b"]] == [5, 7, 12, 14]
    assert all(sample.seconds >= 0 for runs in samples.values() for sample in runs)


def test_summary_is_median_and_range() -> None:
    summary = common.Summary.of([3.0, 1.0, 10.0])
    assert (summary.median, summary.least, summary.greatest) == (3.0, 1.0, 10.0)
    assert summary.text(".0f") == "3 (1-10)"


def test_child_reports_its_own_peak_memory_and_output() -> None:
    code = "import sys; block = bytearray({}); block[::4096] = b'x' * len(block[::4096]); print(sys.argv[1])"
    small = common.run_child(code.format(1), ["hello"])
    large = common.run_child(code.format(200 << 20), ["hello"])
    assert small.stdout == large.stdout == "hello\n"
    assert 190 << 20 < large.peak_bytes - small.peak_bytes < 230 << 20


def test_child_with_much_output_on_both_streams_does_not_hang() -> None:
    code = "import sys; sys.stderr.write('e' * 1_000_000); sys.stdout.write('o' * 1_000_000)"
    assert len(common.run_child(code).stdout) == 1_000_000


def test_failing_child_raises_with_its_error() -> None:
    with pytest.raises(RuntimeError, match="ended with 3: too bad"):
        common.run_child("import sys; print('too bad', file=sys.stderr); sys.exit(3)")


def test_csv_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.csv"
    common.write_csv(path, [{"a": 1, "b": "x,y"}, {"a": 2.5, "b": ""}])
    assert common.read_csv(path) == [{"a": "1", "b": "x,y"}, {"a": "2.5", "b": ""}]


def test_environment_says_where_and_when() -> None:
    columns = common.environment("some cpu")
    assert columns["device"] == "some cpu"
    assert set(columns) == {"date", "commit", "device", "cores", "python", "torch", "transformers"}
    assert all(columns.values())


def test_only_changes_of_the_package_make_a_commit_dirty(tmp_path: Path) -> None:
    package, results = tmp_path / "src", tmp_path / "results"
    for folder in (package, results):
        folder.mkdir()
        (folder / "file").write_text("first\n")
    who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    clean = common.describe(package)
    assert len(clean) >= 7 and "-" not in clean
    (results / "file").write_text("second\n")
    (package / "new").write_text("not tracked\n")
    assert common.describe(package) == clean
    (package / "file").write_text("second\n")
    assert common.describe(package) == f"{clean}-dirty"
    with pytest.raises(subprocess.CalledProcessError):
        common.describe(Path("/"))
