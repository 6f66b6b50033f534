"""`minillm kernels build|list|clear`: the cache of compiled CUDA kernels."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from minillm.cli import console
from minillm.cli.options import with_options
from minillm.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from minillm.attention.cuda_build import CacheEntry

kernels_app = typer.Typer(
    help="Compiled CUDA kernels: build them ahead of time, list or remove them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@kernels_app.command("build")
@with_options()
def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Architecture such as sm_90a; may be repeated. Default: this GPU's.", show_default=False),
    ] = None,
    all_archs: Annotated[
        bool, typer.Option("--all", help="The architectures that this package is tested for.")
    ] = False,
) -> None:
    """Compile every kernel that is not in the cache yet; needs no GPU if architectures are named."""
    from minillm.attention import cuda_build

    archs = list(dict.fromkeys([*(arch or ()), *(cuda_build.DEFAULT_ARCHS if all_archs else ())])) or [_arch_here()]
    wanted = [(spec, name) for name in archs for spec in cuda_build.registered_specs(name)]
    start = time.perf_counter()
    compiled = spilling = 0
    with _progress(len(wanted)) as advance:
        for kernel, is_new in cuda_build.build_many(wanted):
            compiled += is_new
            spilling += kernel.spill_bytes > 0
            advance(f"{kernel.arch} {kernel.symbol}")
    console.info(
        f"{len(wanted)} kernels for {', '.join(archs)}: {compiled} compiled, {len(wanted) - compiled} were cached, "
        f"{spilling} spill registers; {time.perf_counter() - start:.1f} s; {cuda_build.kernel_cache_dir()}"
    )


def _arch_here() -> str:
    import torch

    from minillm.attention.cuda_build import arch_of

    if not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here: name the architecture, such as --arch sm_90a, or --all")
    return arch_of(torch.cuda.get_device_capability())


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, nothing elsewhere (the summary says it all); called with the name of what is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("Compiling"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[name]}"))
    status = console.status_console()
    with Progress(*columns, console=status, transient=True, disable=not status.is_terminal) as bar:
        task = bar.add_task("", total=total, name="")
        yield lambda name: bar.update(task, advance=1, name=name)


@kernels_app.command("list")
@with_options()
def list_kernels(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List the compiled kernels in the cache."""
    from minillm.attention import cuda_build

    entries = cuda_build.cached_kernels()
    now = time.time()
    if as_json:
        fields = [
            {
                "kernel": entry.kernel.symbol,
                "source": entry.kernel.source,
                "arch": entry.kernel.arch,
                "nvrtc": entry.kernel.nvrtc,
                "registers": entry.kernel.registers,
                "spill_bytes": entry.kernel.spill_bytes,
                "size_bytes": entry.size_bytes,
                "age_seconds": round(now - entry.modified, 1),
                "path": str(entry.path),
            }
            for entry in entries
        ]
        print(json.dumps(fields))
        return
    if entries:
        console.answer_console().print(_table(entries, now))
    size = sum(entry.size_bytes for entry in entries)
    console.info(f"{len(entries)} compiled kernels, {size / 1e6:.1f} MB; {cuda_build.kernel_cache_dir()}")


def _table(entries: list[CacheEntry], now: float) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("kernel", "arch", "nvrtc"):
        table.add_column(name)
    for name in ("registers", "spill bytes", "kB", "age"):
        table.add_column(name, justify="right")
    for entry in entries:
        kernel = entry.kernel
        numbers = (kernel.registers, kernel.spill_bytes, f"{entry.size_bytes / 1e3:.0f}", _age(now - entry.modified))
        table.add_row(kernel.symbol, kernel.arch, kernel.nvrtc, *map(str, numbers))
    return table


def _age(seconds: float) -> str:
    """A duration in the largest unit that it fills: s, min, h or d."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(max(seconds, 0))} s"


@kernels_app.command("clear")
@with_options()
def clear() -> None:
    """Remove the compiled kernels from the cache; they are compiled again when they are needed."""
    from minillm.attention import cuda_build

    folder = cuda_build.kernel_cache_dir()
    console.info(f"{cuda_build.clear_cache()} compiled kernels removed from {folder}")
