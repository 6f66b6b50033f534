"""The profile of a decode step: the arithmetic on traces, and a run on a tiny model."""

from __future__ import annotations

import csv
from contextlib import contextmanager

import pytest

from minillm.bench import decode_profile
from minillm.bench.decode_profile import Span, kernel_rows
from minillm.core.errors import ConfigError


def test_overlapping_kernels_are_busy_once_and_gaps_are_what_is_left():
    spans = [Span("b", 12.0, 20.0), Span("a", 0.0, 10.0), Span("a", 30.0, 40.0), Span("c", 18.0, 24.0)]
    rows = {row["name"]: row for row in kernel_rows(spans, 2)}
    assert [row["name"] for row in kernel_rows(spans, 2)] == ["a", "b", "c", "busy", "gaps"]
    assert (rows["a"]["calls"], rows["a"]["us"]) == (1.0, 10.0)
    assert (rows["b"]["calls"], rows["b"]["us"]) == (0.5, 4.0)
    assert [rows[name]["gap_us"] for name in "abc"] == [(0 + 6) / 2, 2 / 2, 0.0]
    assert rows["busy"]["us"] == (10 + 8 + 4 + 10) / 2
    assert rows["gaps"]["us"] == (2 + 6) / 2
    assert rows["busy"]["us"] + rows["gaps"]["us"] == 40.0 / 2


def test_a_kernel_within_another_adds_nothing():
    rows = {row["name"]: row["us"] for row in kernel_rows([Span("a", 0.0, 10.0), Span("b", 2.0, 4.0)], 1)}
    assert (rows["busy"], rows["gaps"]) == (10.0, 0.0)
    assert kernel_rows([], 3) == []


def test_a_run_reports_the_step_its_parts_and_the_floor(tmp_path, monkeypatch, capsys):
    for name in ("SETTLE", "TIMED", "TRACED"):
        monkeypatch.setattr(decode_profile, name, 3)
    path = tmp_path / "profile.csv"
    command = ["--model", "random:tiny", "--device", "cpu", "--batches", "1", "3", "--context", "20"]
    assert decode_profile.main([*command, "--output", str(path)]) == 0
    rows = list(csv.DictReader(path.open()))
    for batch in ("1", "3"):
        us = {row["name"]: float(row["us"]) for row in rows if row["batch"] == batch}
        parts = [us[f"{holder}.{name}"] for holder, name in decode_profile.HOST_PARTS]
        assert all(part > 0 for part in parts)
        assert sum(parts) + us["engine and output"] == pytest.approx(us["mean"], abs=0.1)
        assert 0 < us["floor"] < us["median"]
    assert "batch 3:" in capsys.readouterr().out


def test_with_arrivals_every_step_has_a_chunk_beside_the_rows_that_decode(tmp_path, monkeypatch):
    for name in ("SETTLE", "TIMED", "TRACED"):
        monkeypatch.setattr(decode_profile, name, 5)
    steps = []
    opened = decode_profile.open_target

    @contextmanager
    def recorded(*args, **kwargs):
        with opened(*args, **kwargs) as target:
            yield target
            log = target.recorder.steps
            steps.extend(zip(log.decode_rows, log.prefill_tokens, strict=True))

    monkeypatch.setattr(decode_profile, "open_target", recorded)
    path = tmp_path / "profile.csv"
    command = ["--model", "random:tiny", "--device", "cpu", "--batches", "3", "--context", "20", "--arrivals", "30"]
    assert decode_profile.main([*command, "--output", str(path)]) == 0
    assert steps.count((3, 30)) >= 9
    assert {row["arrivals"] for row in csv.DictReader(path.open())} == {"30"}
    with pytest.raises(ConfigError, match="launch_mixed=True is for a GPU"):
        decode_profile.main([*command, "--launch-mixed"])
