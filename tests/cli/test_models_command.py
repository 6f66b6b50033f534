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


def test_a_dangling_link_in_the_cache_is_not_a_model(cli, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "gone.gguf").symlink_to(tmp_path / "nowhere")
    done = cli("models")
    assert done.code == 0 and "gone.gguf" not in done.out


def test_a_cache_folder_of_an_unknown_user_is_a_usage_error(cli, monkeypatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", "~no-such-user-here/cache")
    done = cli("models")
    assert done.code == 2 and len(done.errors) == 1 and "MINILLM_CACHE" in done.errors[0]
