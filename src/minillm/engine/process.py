"""Settings of a process that does nothing but run an engine: the command line's and the server's, not a library's.

Python's garbage collector looks through all objects whenever a quarter has been added to them, and every thread stands
still meanwhile. After torch and a model are loaded these are 190,000, and the look took 0.33 s of CPU (a slow, shared
core, 2026-11-29): many decode steps. None of them will ever be garbage, so they are taken out of its sight; and the
young ones, which a step makes and drops by the hundred, are looked at less often. Reference counting frees almost
everything as before.

An application that embeds :class:`Runtime` decides for itself: :func:`own_process` before the engine is built does the
same there.
"""

from __future__ import annotations

import gc

THRESHOLDS = (10_000, 20, 50)
"""Of the collector's generations; Python's own are (700, 10, 10)."""

_owned = False


def own_process() -> None:
    """Tune this process for an engine, now and after it has been loaded. Idempotent."""
    global _owned
    _owned = True
    gc.set_threshold(*THRESHOLDS)


def after_loading() -> None:
    """Take what is loaded out of the collector's sight, in a process that is owned."""
    if _owned:
        gc.collect()
        gc.freeze()
