"""The command `minillm`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, 1 (failure), 2 (usage), 130 (interrupted)."""
    from minillm.cli.app import run
    from minillm.engine.process import own_process

    own_process()
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))
