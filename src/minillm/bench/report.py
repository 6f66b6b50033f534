"""`minillm bench report`: all saved results of a folder as one Markdown page, with tables, plots and the history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minillm.bench import common, drawing, history
from minillm.bench.history import Change, Entry
from minillm.bench.program import PROGRAMS, Program, Rows, get_program

METHOD = """\
Every program warms up first, repeats, and gives medians with their range; contenders take turns in rounds, so that a
machine that changes its speed does so for all. Where results can be wrong, they are checked before anything is timed.
Times on a GPU are taken by events and by the synchronised wall clock, times on a CPU by the wall clock. Every figure
comes from a CSV file beside this page, and `minillm bench NAME --from-csv FILE` shows it again.
"""
_MACHINE = ("device", "cores", "python")
_RAN = ("torch", "transformers", "commit", "programs")


def saved(folder: Path) -> list[tuple[Program, Path, Rows]]:
    """The programs that have results in `folder`, in the order of the report."""
    found = []
    for name in PROGRAMS:
        program = get_program(name)
        path = folder / program.csv
        if path.is_file() and (rows := common.read_csv(path)):
            found.append((program, path, rows))
    return found


def write(folder: Path, output: Path) -> list[str]:
    """Draw all plots anew and write the page; returns the titles of its sections."""
    programs = saved(folder)
    entries = history.read(folder / "history.csv")
    parts = ["# Benchmark report", METHOD, _environments(programs), _headlines(programs)]
    titles = []
    for program, path, rows in programs:
        parts.append(_section(program, path, rows, output.parent))
        titles.append(program.title)
    if entries:
        parts.append(_history(entries, folder, output.parent))
        titles.append("History")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n\n".join(part.strip() for part in parts if part) + "\n", encoding="utf-8")
    return titles


def _environments(programs: Sequence[tuple[Program, Path, Rows]]) -> str:
    """Where the figures are from: one line per machine and Python, with the versions and commits that ran there."""
    found: dict[tuple[str, ...], dict[str, dict[str, None]]] = {}
    for program, _, rows in programs:
        for row in rows:
            line = found.setdefault(tuple(row[name] for name in _MACHINE), {name: {} for name in _RAN})
            for name in _RAN:
                value = program.name if name == "programs" else row.get(name)
                if value:
                    line[name][value] = None
    if not found:
        return "No results were found."
    lines = [[*key, *(", ".join(line[name]) or "-" for name in _RAN)] for key, line in found.items()]
    return "## Tested environments\n\n" + common.markdown_table([*_MACHINE, *_RAN], _escaped(lines))


def _headlines(programs: Sequence[tuple[Program, Path, Rows]]) -> str:
    """The headline figures of every program, best looked at first."""
    lines = []
    for program, _, rows in programs:
        figures = [figure for figure in program.figures(rows) if math.isfinite(figure.value)]
        for number, figure in enumerate(figures):
            name = f"[{program.title}](#{_anchor(program.title)})" if number == 0 else ""
            lines.append([name, figure.name, f"{figure.value:,.4g}", figure.unit, f"{figure.better} is better"])
    if not lines:
        return ""
    return "## Headline figures\n\n" + common.markdown_table(["program", "figure", "value", "unit", ""], lines)


def _section(program: Program, path: Path, rows: Rows, beside: Path) -> str:
    parts = [f"## {program.title}", program.about, f"`minillm bench {program.name}`, {rows[0]['date']}."]
    for title, (columns, cells) in program.tables(rows).items():
        first, *more = title.splitlines()
        parts.append(f"**{first}**" + "".join(f"  \n{line}" for line in more))
        parts.append(common.markdown_table(columns, _escaped(cells)))
    parts += [
        f"- {'met' if verdict.met else '**not met**'}: {verdict.requirement}: {verdict.found}"
        for verdict in program.verdicts(rows)
    ]
    if drawing.has_matplotlib():
        parts += [_image(program.title, picture, beside) for picture in program.draw(rows, path)]
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
