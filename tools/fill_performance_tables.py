#!/usr/bin/env python3
"""Write the tables of docs/performance.md from benchmarks/results/NAME-h200.csv, each between its two markers.

    python tools/fill_performance_tables.py            # all tables whose CSV file is there; redraws the plots
    python tools/fill_performance_tables.py --check    # exit code 1 if the page does not show what the files hold

A table goes between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from minillm.bench import common  # noqa: E402
from minillm.bench.program import get_program  # noqa: E402

PAGE, RESULTS = ROOT / "docs/performance.md", ROOT / "benchmarks/results"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def content(name: str, draw: bool) -> str:
    """What stands between the markers of a table."""
    path = RESULTS / f"{name}-h200.csv"
    if not path.is_file():
        return "Not measured yet.\n"
    rows = common.read_csv(path)
    program = get_program(name.replace("_", "-"))
    if draw:
        program.draw(rows, path)
    tables = [f"{title}:\n\n{common.markdown_table(*cells)}" for title, cells in program.tables(rows).items()]
    verdicts = [f"- {'met' if v.met else '**not met**'}: {v.requirement}: {v.found}" for v in program.verdicts(rows)]
    return "\n\n".join(tables + (["\n".join(verdicts)] if verdicts else [])) + "\n"


def main() -> int:
    """Fill the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page differs")
    check = parser.parse_args().check
    page = PAGE.read_text()
    filled = MARKED.sub(lambda match: match[1] + content(match[2], draw=not check) + match[3], page)
    if check:
        return int(filled != page)
    PAGE.write_text(filled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
