"""`minillm models`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    return tmp_path


def test_the_builtin_model_is_listed_before_it_is_fetched(cli) -> None:
    done = cli("models")
    assert done.code == 0
    assert "smollm2-135m" in done.out and "not cached" in done.out


def test_json_lists_sizes_and_paths(cli, own_cache: Path) -> None:
    other = own_cache / "models" / "mine" / "tiny.gguf"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"GGUF1234")
    builtin, mine = json.loads(cli("models", "--json").out)
    assert (builtin["name"], builtin["cached"], builtin["size_bytes"]) == ("smollm2-135m", False, 0)
    assert (mine["path"], mine["cached"], mine["size_bytes"]) == (str(other), True, 8)
