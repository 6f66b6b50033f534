"""What every benchmark needs: where and when it ran, fair timing, child processes, CSV files and tables."""

from __future__ import annotations

import csv
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.core.errors import MiniLLMError

if TYPE_CHECKING:
    from rich.table import Table

CPU_TIME = "CPU time"
RESULTS = Path("benchmarks/results")
"""Where results go, relative to the working directory."""


def commit() -> str:
    """Short commit of the source tree, with `-dirty` if the package's own files differ (results and documents do not
    count: one program's results are there when the next begins); the package's version outside a checkout.

    `MINILLM_COMMIT` overrides it, for machines that get the sources without their history.
    """
    if "MINILLM_COMMIT" in os.environ:
        return os.environ["MINILLM_COMMIT"]
    try:
        return describe(Path(__file__).resolve().parents[1])
    except (OSError, subprocess.SubprocessError):
        return package_version("minillm-runtime")


def describe(folder: Path) -> str:
    """Short commit of the checkout that `folder` is in, with `-dirty` if tracked files in the folder differ from it."""

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
    return git("describe", "--always", "--exclude", "*") + ("-dirty" if changed else "")


def clock_name(cpu_time: bool) -> str:
    """What the column `clock` says."""
    return CPU_TIME if cpu_time else "wall"


def package_version(name: str) -> str:
    """Version of an installed package, or 'none'."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def environment(device: str, packages: Sequence[str] = ("torch", "transformers")) -> dict[str, str]:
    """The columns that say where a figure is from; equal in all rows of one run."""
    columns = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "device": device,
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    columns.update({name: package_version(name) for name in packages})
    return columns


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed run: wall-clock `seconds` for `tokens` generated tokens."""

    seconds: float
    tokens: int


def timed(work: Callable[[], int]) -> Sample:
    """Run `work`, which returns the number of tokens that it made."""
    start = time.perf_counter()
    tokens = work()
    return Sample(time.perf_counter() - start, tokens)


def interleaved(
    contenders: Mapping[str, Callable[[], int]], repeats: int, progress: Callable[[int, str], None] | None = None
) -> dict[str, list[Sample]]:
    """Time every contender `repeats` times, in rounds: each round runs all, starting one further than the last.

    A machine that slows down or speeds up during the run then does so for all of them. One untimed round comes first.
    """
    names = list(contenders)
    for name in names:
        if progress:
            progress(0, name)
        contenders[name]()
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for round_number in range(repeats):
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            if progress:
                progress(round_number + 1, name)
            samples[name].append(timed(contenders[name]))
    return samples


@dataclass(frozen=True, slots=True)
class Summary:
    """Median, least and greatest of a list of figures."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @property
    def spread(self) -> float:
        """Greatest less least."""
        return self.greatest - self.least

    def text(self, form: str = ".1f") -> str:
        """'median (least-greatest)'."""
        return f"{self.median:{form}} ({self.least:{form}}-{self.greatest:{form}})"


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive values; NaN if there are none or one is NaN."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


@dataclass(frozen=True, slots=True)
class Verdict:
    """One requirement on a table, what was found, and whether it is met."""

    requirement: str
    found: str
    met: bool


@dataclass(frozen=True, slots=True)
class ChildResult:
    """How a child process ended: wall-clock `seconds`, `peak_bytes` of resident memory, and what it printed."""

    seconds: float
    peak_bytes: int
    stdout: str


_REPORT_PEAK = """
with open("/proc/self/status") as _status, open(__import__("os").environ["MINILLM_PEAK_FILE"], "w") as _out:
    _out.write(next(line.split()[1] for line in _status if line.startswith("VmHWM")))
"""


def run_child(code: str, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None) -> ChildResult:
    """Run Python `code` in a fresh process of this interpreter; raises RuntimeError with its stderr if it fails.

    The peak is the kernel's own mark at the end of `code`, so short spikes are in it. (`ru_maxrss` will not do: a
    child inherits its parent's.)
    """
    with tempfile.NamedTemporaryFile("r") as peak:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code + _REPORT_PEAK, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, **(env or {}), "MINILLM_PEAK_FILE": peak.name},
            check=False,
        )
        seconds = time.perf_counter() - start
        if done.returncode != 0:
            raise RuntimeError(f"child process ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        return ChildResult(seconds, int(peak.read()) * 1024, done.stdout)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `rows`, which share their columns, as one file that replaces the old one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


class ResultsError(MiniLLMError, ValueError):
    """A file of results cannot be read, or is not one."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a file that :func:`write_csv` wrote; :class:`ResultsError` if it cannot be read as one."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, strict=True))
    except OSError as error:
        raise ResultsError(path, f"cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ResultsError(path, f"is not a CSV file of results: {error}") from error
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise ResultsError(path, f"row {number} does not have the columns of the first line")
    return rows


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are figures."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same cells as a Markdown table, for the pages under docs/."""
    lines = [" | ".join(columns), " | ".join("---" for _ in columns), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)
