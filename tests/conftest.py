"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("minillm", deadline=None)
settings.load_profile("minillm")


def find_shared_data() -> Path | None:
    """The folder of public data beside the checkout (`../shared/data`), or None."""
    if "MINILLM_SHARED" in os.environ:
        path = Path(os.environ["MINILLM_SHARED"])
        return path if path.is_dir() else None
    for parent in Path(__file__).resolve().parents:
        path = parent / "shared" / "data"
        if path.is_dir():
            return path
    return None


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Path of the public data folder; skips where it is absent."""
    path = find_shared_data()
    if path is None:
        pytest.skip("public data folder (../shared/data) is not there; set MINILLM_SHARED to use another place")
    return path
