"""`minillm bench report`: all saved results of a folder as one Markdown page, with tables, plots and the history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.bench import common, drawing, history
from minillm.bench.history import Change, Entry
from minillm.bench.program import PROGRAMS, Program, Shown, command, get_program
from minillm.core.errors import ConfigError

METHOD = """\
Every program warms up first, repeats, and gives medians with their range; contenders take turns in rounds, so that a
machine that changes its speed does so for all. Where results can be wrong, they are checked before anything is timed.
Times on a GPU are taken by events and by the synchronised wall clock, times on a CPU by the wall clock or, where a
table says so, as CPU time. Every figure comes from a CSV file beside this page, and `minillm bench NAME --from-csv
FILE` shows it again.
"""
_MACHINE = ("device", "cores", "python")
_RAN = ("torch", "transformers", "commit", "programs")


@dataclass(frozen=True, slots=True)
class Results:
    """One file of results."""

    program: Program
    path: Path
    shown: Shown

    @property
    def title(self) -> str:
        """Of its section: the program's, with the file's label."""
        label = self.program.label(self.path)
        return f"{self.program.title}: {label}" if label else self.program.title


def saved(folder: Path) -> list[Results]:
    """All results in `folder`, in the order of the report; ConfigError if it is no folder."""
    if not folder.is_dir():
        raise ConfigError(f"results={str(folder)!r} is not a folder")
    found = []
    for name in PROGRAMS:
        program = get_program(name)
        found += [Results(program, path, program.show(path)) for path in program.saved(folder)]
    return found


def write(folder: Path, output: Path) -> list[str]:
    """Draw all plots anew and write the page; returns the titles of its sections."""
    found = saved(folder)
    entries = history.read(folder / "history.csv")
    parts = ["# Benchmark report", METHOD, _environments(found), _headlines(found)]
    titles = []
    explained: set[str] = set()
    for results in found:
        parts.append(_section(results, output.parent, explain=results.program.name not in explained))
        explained.add(results.program.name)
        titles.append(results.title)
    if entries:
        parts.append(_history(entries, folder, output.parent))
        titles.append("History")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n\n".join(part.strip() for part in parts if part) + "\n", encoding="utf-8")
    return titles


def _environments(found: Sequence[Results]) -> str:
    """Where the figures are from: one line per machine and Python, with the versions and commits that ran there."""
    machines: dict[tuple[str, ...], dict[str, dict[str, None]]] = {}
    for results in found:
        for row in results.shown.rows:
            line = machines.setdefault(tuple(row[name] for name in _MACHINE), {name: {} for name in _RAN})
            for name in _RAN:
                value = results.program.name if name == "programs" else row.get(name)
                if value:
                    line[name][value] = None
    if not machines:
        return "No results were found."
    lines = [[*key, *(", ".join(line[name]) or "-" for name in _RAN)] for key, line in machines.items()]
    return "## Tested environments\n\n" + common.markdown_table([*_MACHINE, *_RAN], _escaped(lines))


def _headlines(found: Sequence[Results]) -> str:
    """The headline figures of every program, best looked at first."""
    lines = []
    for results in found:
        figures = [figure for figure in results.shown.figures if math.isfinite(figure.value)]
        for number, figure in enumerate(figures):
            name = f"[{results.title}](#{_anchor(results.title)})" if number == 0 else ""
            lines.append([name, figure.name, f"{figure.value:,.4g}", figure.unit, f"{figure.better} is better"])
    if not lines:
        return ""
    return "## Headline figures\n\n" + common.markdown_table(["program", "figure", "value", "unit", ""], lines)


def _section(results: Results, beside: Path, *, explain: bool) -> str:
    """One file's section; `explain` puts what the program measures in front."""
    program, shown = results.program, results.shown
    about = [program.about] if explain else []
    parts = [f"## {results.title}", *about, f"`{command(shown.rows, program.name)}`, {shown.rows[0]['date']}."]
    for title, (columns, cells) in shown.tables.items():
        first, *more = title.splitlines()
        parts.append(f"**{first}**" + "".join(f"  \n{line}" for line in more))
        parts.append(common.markdown_table(columns, _escaped(cells)))
    parts += [
        f"- {'met' if verdict.met else '**not met**'}: {verdict.requirement}: {verdict.found}"
        for verdict in shown.verdicts
    ]
    if drawing.has_matplotlib():
        parts += [_image(results.title, picture, beside) for picture in program.draw(shown.rows, results.path)]
    return "\n\n".join(parts)


def _history(entries: Sequence[Entry], folder: Path, beside: Path) -> str:
    found = history.changes(entries)
    parts = ["## History", " ".join((history.__doc__ or "").partition("**When a change is flagged.**")[2].split())]
    parts.append(summary(found))
    columns, cells = history.table_cells([change for change in found if change.before] or found)
    parts.append(common.markdown_table(columns, _escaped(cells)))
    if drawing.has_matplotlib() and any(change.before for change in found):
        picture = folder / "history.png"
        draw_history(found, picture)
        parts.append(_image("History", picture, beside))
    return "\n\n".join(parts)


def summary(found: Sequence[Change]) -> str:
    """One line: how many figures changed, and which got worse."""
    counts = {name: sum(change.verdict == name for change in found) for name in ("first", "same", "better")}
    worse = [f"{c.last.program}: {c.last.figure.name}" for c in found if c.verdict == "REGRESSION"]
    text = f"{len(found)} figures: {counts['first']} new, {counts['same']} unchanged, {counts['better']} better, "
    return text + (f"{len(worse)} worse than the noise allows: {'; '.join(worse)}." if worse else "0 worse.")


def draw_history(found: Sequence[Change], path: Path) -> None:
    """Every figure over its runs, relative to its median: one panel per program; up is better."""
    compared = [change for change in found if change.before]
    programs = list(dict.fromkeys(change.last.program for change in compared))
    columns = min(3, len(programs))
    rows = -(-len(programs) // columns)
    figure, panels = drawing.pyplot().subplots(rows, columns, figsize=(4.6 * columns, 3.2 * rows), squeeze=False)
    for place, program in enumerate(programs):
        axes = panels[place // columns][place % columns]
        _history_panel(axes, [change for change in compared if change.last.program == program])
        axes.set_title(program, fontsize=10)
    for place in range(len(programs), rows * columns):
        panels[place // columns][place % columns].axis("off")
    figure.tight_layout()
    drawing.save(figure, path)


def _history_panel(axes: Any, found: Sequence[Change]) -> None:
    longest = 0
    for number, change in enumerate(found):
        values = [*change.earlier, change.last.figure.value]
        longest = max(longest, len(values))
        gain = 1 if change.last.figure.better == "higher" else -1
        relative = [100 * ((value / change.median) ** gain - 1) if change.median and value else 0 for value in values]
        worse = change.verdict == "REGRESSION"
        colour = drawing.PALETTE[3] if worse else drawing.PALETTE[number % len(drawing.PALETTE)]
        label = change.last.figure.name if worse or number < 5 else None
        axes.plot(
            range(1, len(values) + 1), relative, marker="o", ms=3, lw=2 if worse else 1, color=colour, label=label
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlabel("run")
    drawing.grid(axes, "", "% better than the median before")
    axes.legend(fontsize=6)


def _image(title: str, picture: Path, beside: Path) -> str:
    try:
        place = picture.resolve().relative_to(beside.resolve())
    except ValueError:
        place = picture.resolve()
    return f"![{title}]({place.as_posix()})"


def _anchor(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _escaped(cells: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[cell.replace("|", "\\|") for cell in line] for line in cells]
