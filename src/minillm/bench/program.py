"""What every benchmark program has besides its measuring: how its saved rows become tables, plots and history.

A program's module defines ``PROGRAM``; the commands, `bench all`, `bench report` and `--from-csv` work from that and
from the CSV file, so that a figure looks the same wherever it is shown.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minillm.bench import common, history
from minillm.bench.common import Verdict
from minillm.bench.history import Entry, Figure

Rows = list[dict[str, str]]
Cells = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Column names and rows of a table."""
Draw = Callable[[Rows, Path], None]


@dataclass(frozen=True, slots=True)
class Shown:
    """Saved rows, and what a program makes of them."""

    rows: Rows
    tables: Mapping[str, Cells]
    verdicts: Sequence[Verdict]
    figures: Sequence[Figure]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A benchmark program, as a description of what it saved. All functions take the rows of its CSV file.

    - ``name``: of the command; ``title``: of its section in the report.
    - ``about``: what is measured and how, in a few sentences; first in the section.
    - ``tables``: by title. ``plots``: from file name to the function that draws it (rows, path of the PNG); the name
      "" stands for the CSV file's own, with .png.
    - ``figures``: the headline figures, for the history. ``settings``: what else they depend on, in one short text
      (model, dtype, sizes): only runs with equal settings are compared.
    - ``verdicts``: requirements, and whether they are met.
    """

    name: str
    title: str
    about: str
    tables: Callable[[Rows], Mapping[str, Cells]]
    plots: Mapping[str, Draw]
    figures: Callable[[Rows], Sequence[Figure]]
    settings: Callable[[Rows], str]
    verdicts: Callable[[Rows], Sequence[Verdict]] = field(default=lambda rows: ())
    csv_name: str = ""

    @property
    def csv(self) -> str:
        """File name of its results."""
        return self.csv_name or f"{self.name.replace('-', '_')}.csv"

    def label(self, csv: Path) -> str:
        """What tells `NAME-LABEL.csv` from the program's own `NAME.csv`, such as a device; "" for another name."""
        head, _, label = csv.stem.partition("-")
        return label if head == Path(self.csv).stem else ""

    def saved(self, folder: Path) -> list[Path]:
        """Its results in a folder: `NAME.csv` first, then every `NAME-LABEL.csv`."""
        stem = Path(self.csv).stem
        return [path for path in (folder / self.csv, *sorted(folder.glob(f"{stem}-*.csv"))) if path.is_file()]

    def draw(self, rows: Rows, csv: Path) -> list[Path]:
        """Draw all plots beside the CSV file `csv`, with its label in their names; returns their paths."""
        paths = []
        label = self.label(csv)
        for name, plot in self.plots.items():
            path = csv.with_name(name) if name else csv.with_suffix(".png")
            if name and label:
                path = path.with_stem(f"{path.stem}-{label}")
            plot(rows, path)
            paths.append(path)
        return paths

    def show(self, path: Path) -> Shown:
        """The saved results of `path` as tables and verdicts; :class:`ResultsError` if it does not hold any."""
        rows = common.read_csv(path)
        if not rows:
            raise common.ResultsError(path, "has no rows")
        try:
            return Shown(rows, self.tables(rows), self.verdicts(rows), self.figures(rows))
        except KeyError as error:
            raise common.ResultsError(path, f"is not a result of `bench {self.name}`: there is no {error}") from error
        except (ValueError, ArithmeticError) as error:
            raise common.ResultsError(path, f"is not a result of `bench {self.name}`: {error}") from error

    def remember(self, rows: Rows, path: Path = history.HISTORY) -> list[Entry]:
        """Append the headline figures to the history."""
        seed = int(rows[0].get("seed") or 0)
        settings = self.settings(rows)
        if rows[0].get("clock") == common.CPU_TIME:
            settings = f"{settings}, {common.CPU_TIME}"
        return history.append(self.name, settings, self.figures(rows), rows[0], seed=seed, path=path)


PROGRAMS = {
    "static": "static_batching:PROGRAM",
    "offline": "offline:PROGRAM",
    "latency": "latency:PROGRAM",
    "gpu-table": "gpu_table:PROGRAM",
    "startup": "startup:PROGRAM",
    "modes": "modes:PROGRAM",
    "pressure": "pressure:PROGRAM",
    "stress": "stress_report:PROGRAM",
    "sla": "sla_program:PROGRAM",
    "sla-model": "sla_program:MODEL_PROGRAM",
    "prefix": "prefix_program:PROGRAM",
    "prefix-model": "prefix_program:MODEL_PROGRAM",
    "serve": "serve:PROGRAM",
    "cpu": "saved_programs:CPU",
    "scheduler": "saved_programs:SCHEDULER",
    "engine": "engine_bench:PROGRAM",
    "materialize": "saved_programs:MATERIALIZE",
    "paged-attention": "saved_programs:PAGED_ATTENTION",
    "decode-peers": "saved_programs:DECODE_PEERS",
    "prefill-peers": "saved_programs:PREFILL_PEERS",
    "swap": "saved_programs:SWAP",
    "fused": "fused:PROGRAM",
    "sampling": "saved_programs:SAMPLING",
}
"""Program -> module of this package and name in it, in the order of the report."""


def get_program(name: str) -> Program:
    """The description of a program."""
    module, _, attribute = PROGRAMS[name].partition(":")
    program = getattr(importlib.import_module(f"minillm.bench.{module}"), attribute)
    assert isinstance(program, Program)
    return program


def command(rows: Sequence[Mapping[str, str]], program: str) -> str:
    """The command that measured the rows, as saved with them; of older files the program's name alone."""
    return rows[0].get("command") or f"minillm bench {program}"


def provenance(rows: Sequence[Mapping[str, str]], *more: str) -> str:
    """'device (N cores), commit, date', with what else is given and the clock if it is CPU time, for under a title."""
    row = rows[0]
    clock = [common.CPU_TIME] if row.get("clock") == common.CPU_TIME else []
    where = f"{row['device']} ({row['cores']} core{'s' if row['cores'] != '1' else ''})"
    return ", ".join([where, *more, *clock, f"commit {row['commit']}", row["date"]])


def source(rows: Sequence[Mapping[str, str]]) -> str:
    """The workload of the rows, without the scaling that gave it its load."""
    return rows[0]["workload"].partition(", times x")[0]
