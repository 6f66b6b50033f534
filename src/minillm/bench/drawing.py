"""What all plots share: matplotlib (of the `benchmark` extra) without a screen, one palette, saving."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#0b6e4f", "#d08c1d", "#426a8c", "#a8324a", "#7fb685", "#8c5a00", "#6b4f9e", "#5c5c5c")
"""Colours in the order in which a plot takes them."""


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files only; ConfigError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'minillm-runtime[benchmark]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as module

    return module


def has_matplotlib() -> bool:
    """Whether plots can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def save(figure: Any, path: Path, where: str = "") -> None:
    """Write a figure as a PNG, with where its data are from below the title, and forget it."""
    if where:
        figure.suptitle(where, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot().close(figure)


def ticks(axes: Axes, values: Sequence[float], label: str) -> None:
    """A logarithmic x axis (base 2) with exactly these values on it."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [f"{value:,g}" for value in values])
    axes.minorticks_off()
    axes.set_xlabel(label)


def log_y(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers (60, not 6 x 10^1), few enough to read."""
    from matplotlib.ticker import LogFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.4)))


def grid(axes: Axes, title: str = "", y: str = "", legend: bool = True) -> None:
    """Grid, title, y label and legend in the common style."""
    axes.grid(True, which="major", alpha=0.3)
    if title:
        axes.set_title(title, fontsize=10)
    if y:
        axes.set_ylabel(y)
    if legend:
        axes.legend(fontsize=8)


def band(
    axes: Axes, x: Sequence[float], low: Sequence[float], mid: Sequence[float], high: Sequence[float], **style: Any
) -> None:
    """A curve of medians with its range as a band; `style` has `color` and `label`."""
    axes.plot(x, mid, marker="o", ms=4, **style)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
