"""The commands of the original works: thin scripts that are the same as a command of `minillm bench`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import minillm.cli

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"

COMMANDS = {
    "static_batch_benchmark": ["static"],
    "benchmark_materialize": ["materialize"],
    "benchmark_paged_attention": ["paged-attention"],
    "analyze_materialize": ["materialize", "--from-csv", "benchmarks/results/materialize.csv"],
    "compare_serving_modes": ["modes"],
    "plot_compare": ["modes", "--from-csv", "benchmarks/results/modes.csv"],
    "aggregate_history": ["history"],
    "generate_report": ["report"],
    "stress_runtime": ["stress"],
    "sla_priority_workload": ["sla"],
}


def called(monkeypatch, name: str, *arguments: str) -> list[str]:
    seen: list[list[str]] = []
    monkeypatch.setattr(minillm.cli, "main", lambda: seen.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    (command,) = seen
    return command


def test_there_are_no_other_scripts():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_script_is_a_command_with_its_options(monkeypatch, name):
    assert called(monkeypatch, name) == ["bench", *COMMANDS[name]]
    if "--from-csv" not in COMMANDS[name]:
        assert called(monkeypatch, name, "--help") == ["bench", *COMMANDS[name], "--help"]
    else:
        assert called(monkeypatch, name, "mine.csv") == ["bench", COMMANDS[name][0], "--from-csv", "mine.csv"]
