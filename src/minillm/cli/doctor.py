"""`minillm doctor`: what this machine has, what is wrong, and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from minillm.cli import console
from minillm.cli.options import with_options

_STYLES = {"ok": "green", "note": "yellow", "broken": "red"}


@with_options()
def doctor(
    self_check: Annotated[
        bool, typer.Option("--self-check", help="Also compare every way of running a prompt on the built-in model.")
    ] = False,
    device: Annotated[
        str, typer.Option("--device", help="Where --self-check runs: cpu, cuda, cuda:N, or auto.")
    ] = "auto",
) -> None:
    """Check device, driver, versions, memory and caches; exit 1 if something is broken."""
    from minillm.doctor import run_checks

    with console.working("Checking this machine"):
        checks = run_checks()
    output = console.answer_console()
    width = max(len(check.name) for check in checks)
    for check in checks:
        style = _STYLES[check.status]
        output.print(f"[{style}]{check.status:6}[/] [bold]{check.name:{width}}[/]  {escape(check.detail)}")
        if check.advice:
            output.print(f"{'':{width + 7}}  -> {escape(check.advice)}", style=style)
    broken = [check.name for check in checks if check.status == "broken"]
    if self_check and not broken:
        broken += _self_check(device)
    if broken:
        console.print_error(f"broken: {', '.join(broken)}")
        raise typer.Exit(console.FAILURE)


def _self_check(device: str) -> list[str]:
    """Run the self-check and print its table; the names of the ways that failed."""
    from rich.table import Table

    from minillm.self_check import run_self_check

    results = list(run_self_check(lambda name: console.info(f"self-check: {name}"), device))
    table = Table(title="Greedy tokens of the built-in model, float32", title_justify="left")
    table.add_column("way")
    for column in ("same tokens", "preempted by swap", "by recompute", "cached tokens", "seconds"):
        table.add_column(column, justify="right")
    for result in results:
        same = f"{result.prompts - result.differing} of {result.prompts}"
        table.add_row(
            result.name,
            f"[green]{same}[/]" if result.passed else f"[red]{same} {result.problem}[/]",
            str(result.swap_preemptions),
            str(result.recompute_preemptions),
            str(result.cached_tokens),
            f"{result.seconds:.1f}",
        )
    console.answer_console().print(table)
    return [result.name for result in results if not result.passed]
