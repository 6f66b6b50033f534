"""`minillm models`: what is on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from minillm.cli.options import with_options


@with_options()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the built-in models and the GGUF files in the cache, with sizes and paths."""
    from minillm.models.default_model import list_cached_models

    entries = list_cached_models()
    if as_json:
        fields = [
            {
                "name": entry.name,
                "description": entry.description,
                "cached": entry.cached,
                "size_bytes": entry.size_bytes,
                "path": str(entry.path),
            }
            for entry in entries
        ]
        print(json.dumps(fields, ensure_ascii=False))
        return
    for entry in entries:
        state = f"{entry.size_bytes / 1e6:.0f} MB" if entry.cached else "not cached; fetched on first use"
        print(f"{entry.name}\n  {entry.description}\n  {entry.path} ({state})")
