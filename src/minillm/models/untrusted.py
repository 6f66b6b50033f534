"""Model files come from anywhere: whatever they make the code that reads them stumble over is their fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minillm.core.errors import MiniLLMError, ModelLoadError

_MAX_REASON = 200


@contextmanager
def reading(source: str | Path) -> Iterator[None]:
    """Turn any error inside into a :class:`ModelLoadError` of one line that names `source`, its cause chained.

    The checks inside say what is wrong with a file; this is for the values that nobody thought of: wrong types, sizes
    that cannot be allocated, panics of the Rust libraries (which are no :class:`Exception`).
    """
    try:
        yield
    except MiniLLMError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        reason = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
        raise ModelLoadError(f"{source}: cannot be loaded: {type(error).__name__}: {reason}") from error
