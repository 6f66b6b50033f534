"""What the commands print where: answers and JSON to stdout, everything else to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

USAGE_ERROR = 2
FAILURE = 1
INTERRUPTED = 130
"""Exit code of a process that SIGINT ended (128 + 2)."""

debug = False
"""Whether --debug was given."""

arguments: Sequence[str] = ()
"""Of the command that is running."""

_PIPE_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""

_console: Console | None = None


def status_console() -> Console:
    """The console of stderr (made on first use: importing rich costs more than `--version`)."""
    global _console
    if _console is None:
        from rich.console import Console

        _console = Console(stderr=True, highlight=False)
    return _console


def answer_console() -> Console:
    """A console of stdout for tables and coloured lines; wide where stdout is no terminal, so that no cell wraps."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def info(text: str) -> None:
    """One line of status."""
    status_console().print(text, style="dim", markup=False, soft_wrap=True)


def one_line(text: str) -> str:
    """`text` on a single line, control characters spelled out: a model's file may have written it."""
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def print_error(text: str) -> None:
    """One line, whatever the message holds."""
    print(f"minillm: error: {one_line(text)}", file=sys.stderr, flush=True)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show that `text` is going on, and the time that it took: a spinner on a terminal, plain lines elsewhere."""
    console = status_console()
    start = time.perf_counter()
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        info(f"{text} ...")
        yield
    info(f"{text}: {time.perf_counter() - start:.1f} s")
