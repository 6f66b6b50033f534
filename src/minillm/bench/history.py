"""The history: one line per program run, and what has become of each figure since.

`benchmarks/results/history.csv` has one row per run of a program: when, commit, device, versions, the program, its
settings and seed, and its headline figures as JSON (name, value, unit, which way is better, range of the repeats). Rows
are only ever appended.

**When a change is flagged.** A figure is compared with the earlier runs of the same program, settings, seed and figure
on the same device and number of cores (at most the last ten). It is a regression if it is worse than their median by
more than the noise seen, which is the greatest of: 5 % of the median (20 % while there are fewer than three earlier
runs); three standard deviations of those runs, estimated as 1.4826 times their median absolute deviation; and the range
of the repeats within a run, in the last one or, by the median, in the earlier ones. Likewise for improvements.
"""

from __future__ import annotations

import csv
import fcntl
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from minillm.bench import common
from minillm.core.errors import ConfigError

HISTORY = common.RESULTS / "history.csv"
WINDOW = 10
"""Earlier runs that count."""
LEAST_NOISE = 0.05
FEW_RUNS = 3
NOISE_OF_FEW = 0.20
MAD_TO_SIGMA = 1.4826
"""Median absolute deviation -> standard deviation of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A headline figure of a program: `better` is "higher" or "lower".

    `spread` is the range (greatest less least) of the repeats behind it, in the same unit; 0 where there are none.
    """

    name: str
    value: float
    unit: str
    better: str
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.value, int | float) or not isinstance(self.spread, int | float):
            raise ConfigError(f"{self.name}: value={self.value!r} and spread={self.spread!r} must be numbers")
        if self.better not in ("higher", "lower"):
            raise ConfigError(f"better={self.better!r} must be higher or lower")


@dataclass(frozen=True, slots=True)
class Entry:
    """One figure of one run; `settings` says in one text what else it depends on."""

    date: str
    commit: str
    device: str
    cores: str
    python: str
    torch: str
    transformers: str
    program: str
    settings: str
    seed: str
    figure: Figure

    @property
    def key(self) -> tuple[str, ...]:
        """What must be equal for two figures to be comparable."""
        return self.program, self.settings, self.device, self.cores, self.seed, self.figure.name


_WHERE = ("date", "commit", "device", "cores", "python", "torch", "transformers")
_COLUMNS = [*_WHERE, "program", "settings", "seed", "figures"]


def append(
    program: str,
    settings: str,
    figures: Iterable[Figure],
    where: Mapping[str, str],
    *,
    seed: int = 0,
    path: Path = HISTORY,
) -> list[Entry]:
    """Add a run; `where` has the columns of :func:`common.environment`. Figures that are not finite are left out."""
    known = {name: where.get(name, "none") for name in _WHERE}
    told = [
        asdict(replace(figure, spread=figure.spread if math.isfinite(figure.spread) else 0.0))
        for figure in figures
        if math.isfinite(figure.value)
    ]
    row = {**known, "program": program, "settings": settings, "seed": str(seed), "figures": json.dumps(told)}
    if not told:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0, 2)
        writer = csv.DictWriter(file, fieldnames=_COLUMNS)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(row)
    return _entries(row)


def _entries(row: Mapping[str, str]) -> list[Entry]:
    """The figures of one row."""
    shared = {name: row[name] for name in _COLUMNS if name != "figures"}
    return [Entry(**shared, figure=Figure(**figure)) for figure in json.loads(row["figures"])]


def read(path: Path = HISTORY) -> list[Entry]:
    """All figures, oldest first; an absent file has none. Raises :class:`ConfigError` for a file of another kind."""
    if not path.is_file():
        return []
    entries: list[Entry] = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != _COLUMNS:
            raise ConfigError(f"{path} is not a history: its columns must be {','.join(_COLUMNS)}")
        for number, row in enumerate(reader, start=2):
            try:
                entries += _entries(row)
            except (AttributeError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
    return entries


@dataclass(frozen=True, slots=True)
class Change:
    """The last value of a figure against the runs before it."""

    last: Entry
    before: tuple[Entry, ...]
    """At most the last ten entries before it, oldest first."""

    @property
    def earlier(self) -> list[float]:
        """Their values."""
        return [entry.figure.value for entry in self.before]

    @property
    def median(self) -> float:
        """Of the earlier values; NaN if there are none."""
        return statistics.median(self.earlier) if self.earlier else math.nan

    @property
    def noise(self) -> float:
        """Greatest difference from the median that says nothing (see the module's text); there are earlier runs."""
        least = NOISE_OF_FEW if len(self.before) < FEW_RUNS else LEAST_NOISE
        deviation = statistics.median(abs(value - self.median) for value in self.earlier)
        repeats = max(self.last.figure.spread, statistics.median(entry.figure.spread for entry in self.before))
        return max(least * abs(self.median), 3 * MAD_TO_SIGMA * deviation, repeats)

    @property
    def verdict(self) -> str:
        """first, same, better or REGRESSION."""
        if not self.before:
            return "first"
        gain = self.last.figure.value - self.median
        if self.last.figure.better == "lower":
            gain = -gain
        if abs(gain) <= self.noise:
            return "same"
        return "better" if gain > 0 else "REGRESSION"


def changes(entries: Sequence[Entry]) -> list[Change]:
    """The last value of every figure with the earlier ones, grouped by program in order of first appearance."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.key, []).append(entry)
    made = [Change(group[-1], tuple(group[-WINDOW - 1 : -1])) for group in groups.values()]
    order = list(dict.fromkeys(entry.program for entry in entries))
    return sorted(made, key=lambda change: order.index(change.last.program))


def table_cells(found: Sequence[Change]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of changes."""
    columns = ["figure", "last", "unit", "earlier runs", "their median", "change", "noise", "verdict"]
    rows = []
    for change in found:
        entry, figure, median = change.last, change.last.figure, change.median
        relative = (figure.value / median - 1) * 100 if median else math.nan
        compared = bool(change.before)
        rows.append(
            [
                f"{entry.program} ({entry.settings}): {figure.name}"
                if entry.settings
                else f"{entry.program}: {figure.name}",
                f"{figure.value:.4g}",
                figure.unit,
                str(len(change.before)),
                f"{median:.4g}" if compared else "",
                f"{relative:+.1f} %" if compared else "",
                f"{change.noise / abs(median) * 100:.1f} %" if compared and median else "",
                change.verdict,
            ]
        )
    return columns, rows
