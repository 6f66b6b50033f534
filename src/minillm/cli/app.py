"""The commands and how their errors become exit codes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from minillm.cli import bench as _bench  # noqa: F401  (its commands)
from minillm.cli import bench_pressure as _bench_pressure  # noqa: F401
from minillm.cli import bench_serve as _bench_serve  # noqa: F401
from minillm.cli import bench_sla as _bench_sla  # noqa: F401
from minillm.cli import bench_suite as _bench_suite  # noqa: F401
from minillm.cli import console
from minillm.cli.bench_frame import bench_app
from minillm.cli.chat import chat
from minillm.cli.doctor import doctor
from minillm.cli.generate import generate
from minillm.cli.kernels import kernels_app
from minillm.cli.models import models
from minillm.cli.serve import serve
from minillm.core.errors import ConfigError, MiniLLMError, RequestError

app = typer.Typer(
    name="minillm",
    help="LLM inference with a scheduler that explains itself.",
    no_args_is_help=True,
    # Rich's boxes cut off the names of long options.
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# typer 0.2x carries its own copy of click and earlier ones import click, so the base class is found, not imported.
_CLIError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _print_version(value: bool) -> None:
    if value:
        from minillm import __version__

        print(f"minillm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


# The commands' modules import what is heavy when they run, not here.
app.command("generate")(generate)
app.command("chat")(chat)
app.command("serve")(serve)
app.command("models")(models)
app.command("doctor")(doctor)
app.add_typer(bench_app, name="bench")
app.add_typer(kernels_app, name="kernels")


def exit_code_of(error: BaseException) -> int:
    """2 for what the caller can put right on the command line, else 1."""
    return console.USAGE_ERROR if isinstance(error, RequestError | ConfigError) else console.FAILURE


class _OneLine(logging.Formatter):
    """Log records as single lines; tracebacks only under --debug."""

    def format(self, record: logging.LogRecord) -> str:
        if console.debug:
            return super().format(record)
        return console.one_line(f"minillm: {record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def _logging_to_stderr() -> Iterator[None]:
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logger = logging.getLogger("minillm")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. Errors are one line on stderr, with a traceback only under --debug."""
    console.debug = False
    console.arguments = tuple(arguments)
    with _logging_to_stderr():
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    try:
        code = app(list(arguments), prog_name="minillm", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return console.INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout at exit and must not meet the closed pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return console.FAILURE
    except typer.Abort:
        return console.INTERRUPTED
    except _CLIError as error:
        return _report(error, error.format_message(), error.exit_code)  # type: ignore[attr-defined]
    except MiniLLMError as error:
        return _report(error, str(error), exit_code_of(error))
    except Exception as error:
        return _report(error, f"{type(error).__name__}: {error} (--debug shows where)", console.FAILURE)


def _report(error: BaseException, message: str, code: int) -> int:
    if console.debug:
        import traceback

        traceback.print_exception(error)
    console.print_error(message)
    return code
