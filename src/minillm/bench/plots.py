"""Plots of the kernel benchmarks, drawn from saved rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.bench import drawing, materialize, paged_attention, peers
from minillm.bench.timing import PathTime

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, str]]

COLOURS = {
    "direct": "#0b6e4f",
    "minillm": "#0b6e4f",
    "simple": "#7fb685",
    "contiguous": "#426a8c",
    "torch": "#426a8c",
    "gather": "#d08c1d",
    "flashinfer": "#d08c1d",
    "one_layer": "#d08c1d",
    "all_layers": "#8c5a00",
    "token_loop": "#a8324a",
}
LABELS = {
    "direct": "direct from the pages",
    "simple": "direct, simple kernel",
    "contiguous": "torch on contiguous K/V",
    "gather": "gather of blocks, then attend",
    "token_loop": "token loop, then attend",
    "one_layer": "gather, 1 layer",
}


def _length_axis(axes: Axes, lengths: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    drawing.log_y(axes)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=45, ha="right")
    axes.set_xlabel("tokens in the sequence")
    axes.set_ylabel(label)
    axes.grid(True, which="major", alpha=0.3)


def _curve(axes: Axes, rows: Rows, path: str, label: str) -> None:
    points = [(int(row["context_len"]), timed) for row in rows if (timed := PathTime.from_columns(path, row))]
    if points:
        x, times = zip(*points, strict=True)
        axes.plot(x, [t.median_ms for t in times], marker="o", ms=4, color=COLOURS[path], label=label)
        low, high = [t.min_ms for t in times], [t.max_ms for t in times]
        axes.fill_between(x, low, high, color=COLOURS[path], alpha=0.12, linewidth=0)


def draw_paged_attention(rows: Rows, path: Path) -> None:
    """Time of each path by length, and the direct path's speed-up over the others, as one PNG."""
    pyplot = drawing.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8))
    lengths = [int(row["context_len"]) for row in rows]
    for name in paged_attention.PATHS:
        _curve(left, rows, name, LABELS[name])
    _length_axis(left, lengths, "ms per call (median; band: least to greatest)")
    left.legend(fontsize=8)
    left.set_title("One decode step, one layer")
    for name in ("token_loop", "gather", "contiguous"):
        points = [(int(r["context_len"]), float(r[f"speedup_over_{name}"])) for r in rows if r[f"speedup_over_{name}"]]
        if points:
            right.plot(*zip(*points, strict=True), marker="o", ms=4, color=COLOURS[name], label=f"over {LABELS[name]}")
    right.axhline(1.0, color="black", linewidth=0.8)
    _length_axis(right, lengths, "times as fast")
    right.legend(fontsize=8)
    right.set_title("Direct against the others")
    figure.suptitle(paged_attention.provenance(rows), fontsize=8)
    drawing.save(figure, path)


def draw_materialize(rows: Rows, path: Path) -> None:
    """Time and bandwidth of each copy by length, as one PNG."""
    pyplot = drawing.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8))
    lengths = [int(row["context_len"]) for row in rows]
    labels = {**LABELS, "token_loop": "token loop, 1 layer", "all_layers": f"gather, {rows[0]['layers']} layers"}
    for name in materialize.PATHS:
        _curve(left, rows, name, labels[name])
        points = [(int(row["context_len"]), float(row[f"{name}_gbps"])) for row in rows if row[f"{name}_gbps"]]
        if points:
            right.plot(*zip(*points, strict=True), marker="o", ms=4, color=COLOURS[name], label=labels[name])
    _length_axis(left, lengths, "ms per call (median; band: least to greatest)")
    _length_axis(right, lengths, "GB/s, read plus written")
    left.legend(fontsize=8)
    left.set_title("Copying K and V out of the pages")
    right.set_title("Bandwidth")
    row = rows[0]
    where = f"{row['device']}, {row['dtype']}, block size {row['block_size']}, commit {row['commit']}, {row['date']}"
    figure.suptitle(where, fontsize=8)
    drawing.save(figure, path)


def draw_peers(rows: Rows, path: Path) -> None:
    """Best peer's time over ours, per shape and family of peers, as one PNG."""
    pyplot = drawing.pyplot()
    items = [item for item in peers.comparisons(rows) if peers.OURS in item.best]
    families = [name for name in ("flashinfer", "torch") if any(name in item.best for item in items)]
    figure, axes = pyplot.subplots(figsize=(10, 0.42 * len(items) + 1.6))
    height = 0.8 / max(1, len(families))
    for number, family in enumerate(families):
        ratios = [item.us(family) / item.us(peers.OURS) for item in items]
        at = [index + (number - (len(families) - 1) / 2) * height for index in range(len(items))]
        axes.barh(at, ratios, height=height * 0.9, color=COLOURS[family], label=f"{family}, its best variant")
    axes.axvline(1.0, color="black", linewidth=0.8)
    names = [f"{item.shape.heads}: {item.shape.name}" for item in items]
    axes.set_yticks(range(len(items)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("peer's time / our time (above 1: ours is faster)")
    axes.grid(True, axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    table = rows[0]["table"]
    axes.set_title(f"Paged {table} attention\n{peers.provenance(rows)}", fontsize=8)
    drawing.save(figure, path)
