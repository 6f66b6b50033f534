"""The history: appending, what is compared with what, and when a change is flagged."""

from __future__ import annotations

import math

import pytest

from minillm.bench import history
from minillm.bench.history import Figure
from minillm.core.errors import ConfigError

WHERE = {"date": "2030-01-01", "commit": "abc", "device": "gpu", "cores": "2", "python": "3.11", "torch": "2.13"}


def series(tmp_path, values, better="higher", spread=0.0, **changes):
    path = tmp_path / "results" / "history.csv"
    for value in values:
        history.append(
            "static", "m", [Figure("speed", value, "tok/s", better, spread)], {**WHERE, **changes}, path=path
        )
    return path


def verdict(path):
    (change,) = history.changes(history.read(path))
    return change.verdict


def test_rows_are_appended_and_read_back(tmp_path):
    path = series(tmp_path, [10.0, 11.5])
    assert [line.count("2030-01-01") for line in path.read_text().splitlines()] == [0, 1, 1]
    entries = history.read(path)
    assert [entry.figure.value for entry in entries] == [10.0, 11.5]
    assert (entries[0].program, entries[0].settings, entries[0].transformers) == ("static", "m", "none")


@pytest.mark.parametrize(
    ("values", "better", "expected"),
    [
        ([10], "higher", "first"),
        ([10, 8.1], "higher", "same"),  # of one run the noise is not known
        ([10, 7.9], "higher", "REGRESSION"),
        ([10, 12.1], "higher", "better"),
        ([10, 12.1], "lower", "REGRESSION"),
        ([10, 7.9], "lower", "better"),
        ([10, 10, 8.1], "higher", "same"),
        ([10, 10, 10, 9.6], "higher", "same"),  # 5 % at least
        ([10, 10, 10, 9.4], "higher", "REGRESSION"),
        ([10, 9, 11, 10, 9, 11, 6], "higher", "same"),  # as noisy as it always was: 3 x 1.4826 x 1
        ([10, 9, 11, 10, 9, 11, 5], "higher", "REGRESSION"),
        ([1] * 20 + [10] * 11, "higher", "same"),  # only the last ten count
    ],
)
def test_a_change_is_flagged_beyond_the_noise_seen(tmp_path, values, better, expected):
    assert verdict(series(tmp_path, values, better)) == expected


@pytest.mark.parametrize(("spread", "expected"), [(2.9, "REGRESSION"), (3.1, "same")])
def test_a_change_within_the_range_of_the_repeats_is_none(tmp_path, spread, expected):
    assert verdict(series(tmp_path, [10, 10, 10, 10, 7.0], spread=spread)) == expected


def test_a_noisy_last_run_is_believed_no_more_than_its_own_repeats(tmp_path):
    path = series(tmp_path, [10, 10, 10, 10])
    assert verdict(series(tmp_path, [7.0], spread=4.0)) == "same" and len(history.read(path)) == 5


def test_only_equal_settings_devices_and_figures_are_compared(tmp_path):
    path = series(tmp_path, [10.0])
    series(tmp_path, [1.0], device="cpu")
    series(tmp_path, [1.0], cores="4")
    history.append("static", "other", [Figure("speed", 1.0, "tok/s", "higher")], WHERE, path=path)
    history.append("static", "m", [Figure("speed", 1.0, "tok/s", "higher")], WHERE, seed=1, path=path)
    history.append("static", "m", [Figure("latency", 1.0, "s", "lower")], WHERE, path=path)
    assert {change.verdict for change in history.changes(history.read(path))} == {"first"}


def test_the_table_shows_the_change_and_the_noise(tmp_path):
    found = history.changes(history.read(series(tmp_path, [100.0, 100.0, 100.0, 80.0])))
    columns, (row,) = history.table_cells(found)
    assert len(columns) == len(row)
    assert row[0] == "static (m): speed" and "-20.0 %" in row and "5.0 %" in row and row[-1] == "REGRESSION"


def test_figures_that_are_not_finite_are_left_out_and_an_absent_file_is_empty(tmp_path):
    path = tmp_path / "history.csv"
    assert history.read(path) == []
    assert history.append("p", "", [Figure("x", math.nan, "s", "lower")], WHERE, path=path) == []
    assert history.read(path) == []


@pytest.mark.parametrize(("text", "message"), [("a,b\n1,2\n", "not a history"), (None, "line 2")])
def test_a_file_of_another_kind_is_refused(tmp_path, text, message):
    path = series(tmp_path, [1.0])
    path.write_text(text if text is not None else path.read_text().replace(": 1.0,", ": fast,"))
    with pytest.raises(ConfigError, match=message):
        history.read(path)


def test_a_figure_is_better_one_way_or_the_other():
    with pytest.raises(ConfigError, match="better='more'"):
        Figure("x", 1.0, "s", "more")
