"""Where this package keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path

from minillm.core.errors import ConfigError


def cache_dir() -> Path:
    """``MINILLM_CACHE``, else ``$XDG_CACHE_HOME/minillm``, else ``~/.cache/minillm``.

    Raises :class:`ConfigError` where they start at the home of a user who has none.
    """
    try:
        if os.environ.get("MINILLM_CACHE"):
            return Path(os.environ["MINILLM_CACHE"]).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base).expanduser() if base else Path.home() / ".cache") / "minillm"
    except RuntimeError as error:
        raise ConfigError(f"the cache folder is unknown: {error} Set MINILLM_CACHE to a folder.") from error
