#!/usr/bin/env python3
"""Write the tables of docs/kernels.md from the CSV files under benchmarks/results, each between its two markers.

    python tools/fill_kernel_tables.py                 # all tables whose CSV file is there; redraws the plots
    python tools/fill_kernel_tables.py --check         # exit code 1 if the page does not show what the files hold

A table goes between `<!-- table: NAME -->` and `<!-- end -->`; NAME is the CSV file's name without its ending.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from minillm.bench import common, drawing, fused, kernel_sweep, materialize, paged_attention, peers, plots, swap  # noqa: E402
from minillm.bench.common import Verdict, markdown_table  # noqa: E402

Rows = Sequence[Mapping[str, str]]
PAGE, RESULTS = ROOT / "docs/kernels.md", ROOT / "benchmarks/results"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

PLOTS: Mapping[str, Callable[[Rows, Path], None]] = {
    "materialize": plots.draw_materialize,
    "paged_attention": plots.draw_paged_attention,
    "decode_peers": plots.draw_peers,
    "prefill_peers": plots.draw_peers,
    "fused": fused.draw,
}


def _verdict_lines(verdicts: Sequence[Verdict]) -> str:
    return "\n".join(f"- {'met' if v.met else '**not met**'}: {v.requirement}: {v.found}" for v in verdicts)


def _peers(rows: Rows, table: str) -> str:
    failed: dict[str, set[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            heads = f"{row['num_heads']}/{row['num_kv_heads']}"
            failed.setdefault(f"{row['family']} {row['variant']}", set()).add(heads)
    parts = [
        f"`minillm bench paged-attention --peers {table}`; {peers.provenance(rows)}.",
        markdown_table(*peers.table_cells(table, rows)),
        _verdict_lines(peers.verdicts(table, rows)),
        "Best variant's time over ours, geometric mean over the shapes that it takes: "
        + ", ".join(f"{family} {mean:.2f}" for family, mean in peers.family_means(rows).items())
        + ".",
        f"![{table} against peers](../benchmarks/results/{table}_peers.png)",
    ]
    if failed:
        names = [f"{name} ({', '.join(sorted(heads))})" for name, heads in sorted(failed.items())]
        parts.append(f"Variants that do not take some shapes (the reason is in the CSV file): {'; '.join(names)}.")
    return "\n\n".join(parts)


def _kernel_check(rows: Rows) -> str:
    row, failed = rows[0], sum(row["status"] != "ok" for row in rows)
    return "\n\n".join(
        [
            f"`python tools/gpu_check.py`; {len(rows)} cases, {failed} failed; {row['device']}, torch {row['torch']}, "
            f"commit {row['commit']}, {row['date']}.",
            markdown_table(*kernel_sweep.summary_cells(rows)),
        ]
    )


def _paged_attention(rows: Rows) -> str:
    return "\n\n".join(
        [
            f"`minillm bench paged-attention`; {paged_attention.provenance(rows)}.",
            markdown_table(*paged_attention.table_cells(rows)),
            _verdict_lines(paged_attention.verdicts(rows)),
            "![paged attention](../benchmarks/results/paged_attention.png)",
        ]
    )


def _materialize(rows: Rows) -> str:
    row = rows[0]
    return "\n\n".join(
        [
            f"`minillm bench materialize`; {row['layers']} layers, {row['num_kv_heads']} KV heads, head_dim "
            f"{row['head_dim']}, block size {row['block_size']}, {row['dtype']}; {row['device']}, torch "
            f"{row['torch']}, commit {row['commit']}, {row['date']}.",
            markdown_table(*materialize.table_cells(rows)),
            markdown_table(*materialize.analysis_cells(rows)),
            "![materialize](../benchmarks/results/materialize.png)",
        ]
    )


def _swap(rows: Rows) -> str:
    return "\n\n".join(
        [
            f"`minillm bench swap`; {swap.provenance(rows)}.",
            markdown_table(*swap.table_cells(rows)),
            _verdict_lines(swap.verdicts(rows)),
        ]
    )


def _fused(rows: Rows) -> str:
    parts = [f"`minillm bench fused`; {fused.provenance(rows)}."]
    for kind, title in (("steps", "A decode step without attention"), ("products", "Products"), ("rows", "The rest")):
        parts += [f"{title}:", markdown_table(*fused.table_cells(rows, kind))]
    return "\n\n".join([*parts, _verdict_lines(fused.verdicts(rows)), "![fused](../benchmarks/results/fused.png)"])


SECTIONS: Mapping[str, Callable[[Rows], str]] = {
    "kernel_check": _kernel_check,
    "decode_peers": lambda rows: _peers(rows, "decode"),
    "prefill_peers": lambda rows: _peers(rows, "prefill"),
    "paged_attention": _paged_attention,
    "materialize": _materialize,
    "swap": _swap,
    "fused": _fused,
}


def filled(page: str, results: Path) -> str:
    """The page with every table whose CSV file is in `results`; others stay as they are."""

    def replace(match: re.Match[str]) -> str:
        path = results / f"{match[2]}.csv"
        if match[2] not in SECTIONS:
            raise SystemExit(f"{PAGE}: no table is named {match[2]!r}")
        if not path.exists():
            return match[0]
        return f"{match[1]}\n{SECTIONS[match[2]](common.read_csv(path))}\n\n{match[3]}"

    return MARKED.sub(replace, page)


def main() -> int:
    """Fill or check the page; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    page = PAGE.read_text()
    new = filled(page, RESULTS)
    if check:
        return int(new != page)
    PAGE.write_text(new)
    for name, draw in PLOTS.items():
        path = RESULTS / f"{name}.csv"
        if path.exists() and drawing.has_matplotlib():
            draw(common.read_csv(path), path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
