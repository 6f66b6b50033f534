"""Public names of the typed errors (defined in :mod:`minillm.core.errors`)."""

from minillm.core.errors import *  # noqa: F403
