"""Compiling the CUDA kernels on first use, and the disk cache of compiled ones.

The sources in ``attention/kernels`` are compiled by NVRTC (a shared library in a pip wheel), so a user needs neither
nvcc nor a C++ compiler. The result is a cubin, machine code for one architecture, never PTX: a driver runs cubins of
every toolkit of its own major version, but compiles PTX of its own version or older only.

Cache: ``MINILLM_CACHE/kernels/ARCH/STEM-KEY-nvrtcVERSION.cubin``. KEY is a digest of everything the machine code
depends on: the source and what it includes, the template instance, the architecture and the compiler's options. A file
is one line of JSON (what is in it, with a checksum) and the cubin; it is written beside its place and renamed, under a
lock, so processes that build at the same time neither see half a file nor do the work twice. What does not check out
is built again. Where NVRTC is not installed, a cached file of any NVRTC version is used, so a machine can be served by
a cache that `minillm kernels build --arch` filled elsewhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from minillm.attention.cuda_launch import Kernel, tensor_map
from minillm.core.errors import ConfigError, KernelBuildError, KernelLaunchError
from minillm.core.paths import cache_dir

__all__ = [
    "CacheEntry",
    "CompiledKernel",
    "Kernel",
    "KernelSpec",
    "arch_of",
    "build",
    "build_many",
    "cached_kernels",
    "clear_cache",
    "get_kernel",
    "registered_specs",
    "tensor_map",
]

logger = logging.getLogger(__name__)

KERNEL_DIR = Path(__file__).with_name("kernels")

KERNEL_MODULES = (
    "minillm.attention.cuda_simple",
    "minillm.attention.cuda_decode",
    "minillm.attention.cuda_prefill",
    "minillm.attention.cuda_prepare",
    "minillm.memory.cuda_kv_ops",
    "minillm.runner.cuda_sampling",
    "minillm.models.cuda_ops",
    "minillm.models.cuda_small_linear",
    "minillm.models.cuda_batch_linear",
    "minillm.runner.finite_rows",
)
"""Modules that launch kernels; each has ``specs(arch) -> list[KernelSpec]``."""

DEFAULT_ARCHS = ("sm_80", "sm_90a", "sm_100")
"""What `minillm kernels build --all` compiles for."""

OPTIONS = ("-std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v")
"""Of every compilation; line information costs nothing at run time and lets ncu show source lines."""

INSTALL_ADVICE = 'pip install "minillm-runtime[cuda]" brings the compiler (NVRTC) and its headers'

_FORMAT = "minillm-kernel-1"


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One template instance of one kernel.

    `source` is a file in ``attention/kernels``; `symbol` a C++ name expression, such as ``f<__nv_bfloat16, 128>``;
    `options` are added to the compiler's.
    """

    source: str
    symbol: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.source}:{self.symbol}"


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A compiled kernel: machine code for one architecture and what the compiler said about it."""

    source: str
    symbol: str
    arch: str
    nvrtc: str
    lowered_name: str
    registers: int
    spill_bytes: int
    cubin: bytes


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A cached file; `modified` is in seconds since the epoch."""

    path: Path
    kernel: CompiledKernel
    size_bytes: int
    modified: float


def arch_of(capability: tuple[int, int]) -> str:
    """The NVRTC architecture for a compute capability; 9.0 gets sm_90a, which has wgmma and setmaxnreg."""
    major, minor = capability
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def registered_specs(arch: str) -> list[KernelSpec]:
    """Every kernel that this package may launch on `arch`; ConfigError for what is no architecture."""
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise ConfigError(f"arch={arch!r} is not an architecture such as {', '.join(DEFAULT_ARCHS)}")
    return [spec for name in KERNEL_MODULES for spec in importlib.import_module(name).specs(arch)]


# ---- Key -------------------------------------------------------------------------------------------------------------

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def source_files(source: str) -> list[Path]:
    """`source` and the files of ``attention/kernels`` that it includes, each once, in the order of inclusion."""
    found: dict[Path, None] = {}
    pending = [KERNEL_DIR / source]
    while pending:
        path = pending.pop()
        if path not in found:
            found[path] = None
            pending += [KERNEL_DIR / name for name in reversed(_INCLUDE.findall(path.read_text()))]
    return list(found)


@lru_cache(maxsize=64)
def _source_digest(source: str) -> str:
    digest = hashlib.sha256()
    for path in source_files(source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def kernel_key(spec: KernelSpec, arch: str) -> str:
    """Digest of all that the machine code depends on, but for the compiler's version."""
    parts = [_FORMAT, _source_digest(spec.source), spec.symbol, arch, *OPTIONS, *spec.options]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


# ---- Compiler --------------------------------------------------------------------------------------------------------


@cache
def _load_nvrtc() -> tuple[ModuleType, str]:
    """cuda.bindings.nvrtc and its version; ImportError with the reason if either the bindings or NVRTC are missing."""
    try:
        from cuda.bindings import nvrtc

        code, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings raise RuntimeError, their own types or ImportError, by version
        reason = str(error).strip().splitlines()
        raise ImportError(f"NVRTC is not there ({type(error).__name__}: {reason[0] if reason else ''})") from error
    if code:
        raise ImportError(f"NVRTC does not work ({code.name})")
    return nvrtc, f"{major}.{minor}"


def nvrtc_version() -> str | None:
    """Version of the NVRTC that would compile, such as "13.0"; None where there is none."""
    try:
        return _load_nvrtc()[1]
    except ImportError:
        return None


@cache
def include_dir() -> Path | None:
    """The CUDA runtime's headers: those of the nvidia wheels, else of an installed toolkit."""
    candidates: list[Path] = []
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        found = find_nvidia_header_directory("cudart")
        candidates += [Path(found)] if found else []
    except Exception as error:  # an older pathfinder without it, or one that finds a broken installation
        logger.debug("cuda.pathfinder finds no headers: %s", error)
    nvidia = Path(sysconfig.get_path("purelib")) / "nvidia"
    candidates += [*sorted(nvidia.glob("cu[0-9]*/include"), reverse=True), nvidia / "cuda_runtime" / "include"]
    candidates += [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    candidates += [Path(nvcc).resolve().parent.parent / "include"] if nvcc else []
    candidates += [Path("/usr/local/cuda/include"), Path("/usr/include")]
    return next((path for path in candidates if (path / "cuda_fp16.h").is_file()), None)


def compile_kernel(spec: KernelSpec, arch: str) -> CompiledKernel:
    """Compile with NVRTC, without looking at the cache; raises :class:`KernelBuildError`."""
    name = f"{spec} for {arch}"
    try:
        nvrtc, version = _load_nvrtc()
    except ImportError as error:
        raise KernelBuildError(name, str(error), INSTALL_ADVICE) from error
    headers = include_dir()
    if headers is None:
        raise KernelBuildError(name, "the CUDA headers (cuda_fp16.h) are not there", INSTALL_ADVICE)

    def call(result: tuple[Any, ...], what: str) -> Any:
        code, *values = result
        if code:
            raise KernelBuildError(name, f"{what}: {code.name}", "Report it with `minillm doctor`'s output")
        return values[0] if values else None

    path = KERNEL_DIR / spec.source
    program = call(nvrtc.nvrtcCreateProgram(path.read_bytes(), str(path).encode(), 0, [], []), "nvrtcCreateProgram")
    try:
        expression = spec.symbol.encode()
        call(nvrtc.nvrtcAddNameExpression(program, expression), "nvrtcAddNameExpression")
        options = [f"--gpu-architecture={arch}", f"-I{KERNEL_DIR}", f"-I{headers}", *OPTIONS, *spec.options]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytes(call(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize"))
        call(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        text = log.rstrip(b"\0").decode(errors="replace").strip()
        if code:
            raise _compilation_failed(nvrtc, name, version, headers, code, text)
        cubin = bytes(call(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize"))
        call(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        lowered = call(nvrtc.nvrtcGetLoweredName(program, expression), "nvrtcGetLoweredName").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    registers, spills = _resource_usage(text)
    return CompiledKernel(spec.source, spec.symbol, arch, version, lowered, registers, spills, cubin)


def _compilation_failed(
    nvrtc: ModuleType, name: str, version: str, headers: Path, code: Any, log: str
) -> KernelBuildError:
    if code == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
        reason = f"NVRTC {version} refuses the options: {log or code.name}"
        return KernelBuildError(name, reason, "It may be too old for this GPU: upgrade the NVRTC package", log)
    first = next((line for line in log.splitlines() if "error" in line), code.name)
    advice = f"NVRTC {version}, headers {headers}; the whole log is in the exception's `log`"
    return KernelBuildError(name, f"does not compile: {first}", advice, log)


def _resource_usage(log: str) -> tuple[int, int]:
    """(registers, bytes of spill stores and loads) of the ptxas report; the kernel's own, not its callees'."""
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    return max(map(int, registers), default=0), sum(map(int, spills))


# ---- Disk cache ------------------------------------------------------------------------------------------------------


def kernel_cache_dir() -> Path:
    """Where compiled kernels are kept."""
    return cache_dir() / "kernels"


def _entry_path(spec: KernelSpec, arch: str, version: str) -> Path:
    stem = spec.source.rpartition(".")[0]
    return kernel_cache_dir() / arch / f"{stem}-{kernel_key(spec, arch)}-nvrtc{version}.cubin"


def _read_header(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """The header and the cubin of a cached file; None if it is missing, cut short or changed."""
    try:
        line, _, cubin = path.read_bytes().partition(b"\n")
        header = json.loads(line)
        if header["format"] != _FORMAT or header["sha256"] != hashlib.sha256(cubin).hexdigest():
            return None
        return header, cubin
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _load_entry(path: Path) -> CompiledKernel | None:
    found = _read_header(path)
    if found is None:
        return None
    header, cubin = found
    try:
        fields = {name: header[name] for name in CompiledKernel.__dataclass_fields__ if name != "cubin"}
    except KeyError:
        return None
    return CompiledKernel(**fields, cubin=cubin)


def _store_entry(path: Path, kernel: CompiledKernel) -> None:
    header = asdict(kernel)
    cubin = header.pop("cubin")
    header |= {"format": _FORMAT, "sha256": hashlib.sha256(cubin).hexdigest()}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(header).encode() + b"\n" + cubin)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Exclusive among processes; the file stays, since removing a lock file races with those who wait for it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _find_cached(spec: KernelSpec, arch: str) -> CompiledKernel | None:
    version = nvrtc_version()
    if version is not None:
        return _load_entry(_entry_path(spec, arch, version))
    pattern = _entry_path(spec, arch, "*")
    for path in sorted(pattern.parent.glob(pattern.name), reverse=True):
        if (kernel := _load_entry(path)) is not None:
            return kernel
    return None


def build(spec: KernelSpec, arch: str, *, announce: bool = True) -> CompiledKernel:
    """`spec` compiled for `arch`, from the cache if it is there. Raises :class:`KernelBuildError`.

    Needs no GPU. A cache folder that cannot be written is not an error: the kernel is compiled for this process.
    The first compilation of a process is announced in the log unless `announce` is false.
    """
    kernel = _find_cached(spec, arch)
    if kernel is not None:
        return kernel
    path = _entry_path(spec, arch, nvrtc_version() or "")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _file_lock(path.with_suffix(".lock")):
            kernel = _find_cached(spec, arch)  # another process may have built it meanwhile
            if kernel is None:
                if announce:
                    _announce(arch)
                start = time.perf_counter()
                kernel = compile_kernel(spec, arch)
                logger.debug("compiled %s for %s in %.2f s", spec, arch, time.perf_counter() - start)
                _store_entry(path, kernel)
    except OSError as error:
        logger.warning("compiled kernels cannot be kept in %s: %s", path.parent, error.strerror or error)
        kernel = kernel or compile_kernel(spec, arch)
    return kernel


def build_many(
    wanted: Sequence[tuple[KernelSpec, str]], threads: int | None = None
) -> Iterator[tuple[CompiledKernel, bool]]:
    """Build kernels for architectures side by side; yields each with whether it was compiled now, as they are done.

    NVRTC compiles in as many threads as call it; `threads` defaults to the cores that this process may use. The first
    failure is raised, and what was not begun by then is left out.
    """

    def one(item: tuple[KernelSpec, str]) -> tuple[CompiledKernel, bool]:
        cached = _find_cached(*item)
        return (cached, False) if cached is not None else (build(*item, announce=False), True)

    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        futures = [pool.submit(one, item) for item in wanted]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


@cache
def _announce(arch: str) -> None:
    """Say once per process why something takes time."""
    logger.warning("compiling CUDA kernels for %s (once; kept in %s)", arch, kernel_cache_dir())


def cached_kernels() -> list[CacheEntry]:
    """All readable entries of the cache, sorted by architecture, source and symbol."""
    entries = []
    for path in kernel_cache_dir().glob("*/*.cubin"):
        kernel = _load_entry(path)
        if kernel is not None:
            stat = path.stat()
            entries.append(CacheEntry(path, kernel, stat.st_size, stat.st_mtime))
    return sorted(entries, key=lambda entry: (entry.kernel.arch, entry.kernel.source, entry.kernel.symbol))


def clear_cache() -> int:
    """Remove the whole cache; the number of compiled kernels that were in it."""
    folder = kernel_cache_dir()
    count = len(list(folder.glob("*/*.cubin")))
    if folder.exists():
        shutil.rmtree(folder)
    return count


# ---- Loading ---------------------------------------------------------------------------------------------------------

_loaded: dict[tuple[KernelSpec, int, bool], Kernel] = {}
_load_lock = threading.Lock()


def get_kernel(spec: KernelSpec, device: torch.device | int, *, overlapping: bool = False) -> Kernel:
    """`spec`, ready to launch on a CUDA `device`: from this process, the disk cache, or compiled now.

    `overlapping` gives a copy with a division of L1 of its own (:meth:`Kernel.prefer_shared_memory`). Raises
    :class:`KernelBuildError`. Call it before capturing a graph: loading is not capturable.
    """
    index = device if isinstance(device, int) else device.index
    kernel = _loaded.get((spec, index, overlapping)) if index is not None else None
    if kernel is not None:
        return kernel
    return _load(spec, torch.device("cuda", index) if index is not None else device, overlapping)


def _load(spec: KernelSpec, device: torch.device | int, overlapping: bool) -> Kernel:
    device = torch.device(device)
    if device.type != "cuda":
        raise ConfigError(f"device={device}: CUDA kernels run on a CUDA device only")
    index = torch.cuda.current_device() if device.index is None else device.index
    arch = arch_of(torch.cuda.get_device_capability(index))
    with _load_lock:
        kernel = _loaded.get((spec, index, overlapping))
        if kernel is None:
            compiled = build(spec, arch)
            try:
                kernel = Kernel(str(spec), compiled.cubin, compiled.lowered_name, index)
            except KernelLaunchError as error:
                advice = (
                    "The driver is too old for this NVRTC: update the driver, or install an NVRTC of the driver's "
                    "CUDA version (nvidia-smi shows it), then `minillm kernels clear`"
                )
                raise KernelBuildError(f"{spec} for {arch}", str(error), advice) from error
            if overlapping:
                kernel.prefer_shared_memory()
            _loaded[spec, index, overlapping] = kernel
    return kernel
