"""A server for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_fakes import RunningServer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server that the tests of a module share; each leaves it idle."""
    with serving() as running:
        yield running
