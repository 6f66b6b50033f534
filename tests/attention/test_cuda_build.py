"""Compiling kernels and keeping them: no GPU needed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.attention import cuda_build
from minillm.attention.cuda_build import DEFAULT_ARCHS, KERNEL_MODULES, KernelSpec
from minillm.core.errors import ConfigError, KernelBuildError

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="NVRTC is not installed (pip install -e '.[cuda]')"
)

SOURCE = """
#include "twice.cuh"
template <int N> __global__ void scale(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]) * N; }
"""
SPEC = KernelSpec("scale.cu", "scale<3>")


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A kernel folder with one small kernel, and an empty cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "scale.cu").write_text(SOURCE)
    (folder / "twice.cuh").write_text("__device__ float twice(float x) { return x + x; }\n")
    monkeypatch.setattr(cuda_build, "KERNEL_DIR", folder)
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    cuda_build._source_digest.cache_clear()
    yield folder
    cuda_build._source_digest.cache_clear()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled (not taken from the cache)."""
    done: list[str] = []
    compile_kernel = cuda_build.compile_kernel

    def counted(spec, arch):
        done.append(f"{spec} {arch}")
        return compile_kernel(spec, arch)

    monkeypatch.setattr(cuda_build, "compile_kernel", counted)
    return done


HOPPER_MODULES = ("minillm.models.cuda_batch_linear",)
"""Whose kernels are for that architecture alone."""


@needs_nvrtc
@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
@pytest.mark.parametrize("module", KERNEL_MODULES)
def test_every_registered_kernel_compiles(arch, module):
    """With the user's cache: a second run compiles only what changed."""
    specs = importlib.import_module(module).specs(arch)
    assert bool(specs) == (module not in HOPPER_MODULES or arch == "sm_90a")
    assert len(set(specs)) == len(specs)
    for kernel, _ in cuda_build.build_many([(spec, arch) for spec in specs], threads=1):
        assert kernel.cubin.startswith(b"\x7fELF")
        assert 0 < kernel.registers <= 255
        assert kernel.arch == arch


def test_all_kernel_files_are_compiled_by_some_module():
    sources = {spec.source for arch in DEFAULT_ARCHS for spec in cuda_build.registered_specs(arch)}
    assert sources == {path.name for path in cuda_build.KERNEL_DIR.glob("*.cu")}


def test_the_key_depends_on_all_that_the_code_depends_on(own_kernels: Path):
    def key(spec=SPEC, arch="sm_90a"):
        cuda_build._source_digest.cache_clear()
        return cuda_build.kernel_key(spec, arch)

    first = key()
    assert key() == first
    others = [
        key(arch="sm_80"),
        key(KernelSpec("scale.cu", "scale<4>")),
        key(KernelSpec("scale.cu", "scale<3>", ("--use_fast_math",))),
    ]
    (own_kernels / "twice.cuh").write_text("__device__ float twice(float x) { return 2 * x; }\n")
    others.append(key())
    (own_kernels / "scale.cu").write_text(SOURCE + "// a remark\n")
    others.append(key())
    assert len({first, *others}) == 6


def test_includes_are_found_through_includes_and_once(own_kernels: Path):
    (own_kernels / "twice.cuh").write_text('#include "base.cuh"\n#include <cuda_fp16.h>\n')
    (own_kernels / "base.cuh").write_text('#pragma once\n#include "twice.cuh"\n')
    assert [path.name for path in cuda_build.source_files("scale.cu")] == ["scale.cu", "twice.cuh", "base.cuh"]


@needs_nvrtc
def test_a_second_build_comes_from_the_cache(own_kernels: Path, compilations: list[str]):
    built = cuda_build.build(SPEC, "sm_90a")
    assert compilations == ["scale.cu:scale<3> sm_90a"]
    assert cuda_build.build(SPEC, "sm_90a") == built
    assert len(compilations) == 1
    (entry,) = cuda_build.cached_kernels()
    assert entry.kernel == built
    assert entry.size_bytes == entry.path.stat().st_size > len(built.cubin)
    assert built.lowered_name in built.cubin.decode(errors="replace")


@needs_nvrtc
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"not json\n" + data.split(b"\n", 1)[1],
        lambda data: b"[1, 2]\n" + data.split(b"\n", 1)[1],
        lambda data: data.replace(b'"lowered_name"', b'"renamed_name"', 1),
        lambda data: data.replace(b"minillm-kernel-", b"another-format-", 1),
    ],
    ids=["empty", "cut", "bit", "header", "list", "field", "format"],
)
def test_a_damaged_cache_file_is_built_again(own_kernels: Path, compilations: list[str], damage):
    built = cuda_build.build(SPEC, "sm_90a")
    (entry,) = cuda_build.cached_kernels()
    sound = entry.path.read_bytes()
    entry.path.write_bytes(damage(sound))
    assert cuda_build.cached_kernels() == []
    assert cuda_build.build(SPEC, "sm_90a") == built
    assert len(compilations) == 2
    assert entry.path.read_bytes() == sound


@needs_nvrtc
def test_processes_that_build_at_once_compile_once(own_kernels: Path, tmp_path: Path):
    log = tmp_path / "log"
    code = f"""
import time
from pathlib import Path
from minillm.attention import cuda_build
cuda_build.KERNEL_DIR = Path({str(own_kernels)!r})
compile_kernel = cuda_build.compile_kernel
def slow(spec, arch):
    with open({str(log)!r}, "a") as file:
        file.write("compiled\\n")
    time.sleep(1)
    return compile_kernel(spec, arch)
cuda_build.compile_kernel = slow
print("ready", flush=True)
input()
print(len(cuda_build.build(cuda_build.KernelSpec("scale.cu", "scale<3>"), "sm_90a").cubin))
"""
    start = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(start, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    sizes = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sizes[0] == sizes[1]
    assert log.read_text() == "compiled\n"
    assert len(cuda_build.cached_kernels()) == 1
    assert not list(cuda_build.kernel_cache_dir().glob("*/.*"))


def without_nvrtc() -> None:
    raise ImportError("NVRTC is not there (test)")


def test_without_nvrtc_the_error_says_what_to_install(own_kernels: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_build, "_load_nvrtc", without_nvrtc)
    with pytest.raises(
        KernelBuildError, match=r"scale<3>.*NVRTC is not there.*pip install \"minillm-runtime\[cuda\]\""
    ):
        cuda_build.build(SPEC, "sm_90a")
    assert cuda_build.nvrtc_version() is None


@needs_nvrtc
def test_without_nvrtc_a_cache_that_was_filled_elsewhere_serves(own_kernels: Path, monkeypatch: pytest.MonkeyPatch):
    built = cuda_build.build(SPEC, "sm_90a")
    monkeypatch.setattr(cuda_build, "_load_nvrtc", without_nvrtc)
    assert cuda_build.build(SPEC, "sm_90a") == built
    with pytest.raises(KernelBuildError):
        cuda_build.build(SPEC, "sm_80")


def test_nvrtc_that_cannot_be_loaded_is_reported_as_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    cuda_build._load_nvrtc.cache_clear()
    try:
        with pytest.raises(ImportError, match="NVRTC is not there"):
            cuda_build._load_nvrtc()
    finally:
        cuda_build._load_nvrtc.cache_clear()


@needs_nvrtc
def test_a_source_that_does_not_compile_shows_the_first_error_and_keeps_the_log(own_kernels: Path):
    (own_kernels / "twice.cuh").write_text("__device__ float twice(float x) { return y; }\n")
    with pytest.raises(KernelBuildError, match='identifier "y" is undefined') as caught:
        cuda_build.build(SPEC, "sm_90a")
    assert "1 error detected" in caught.value.log
    assert caught.value.log in caught.value.__notes__
    assert cuda_build.cached_kernels() == []


@needs_nvrtc
def test_an_architecture_that_nvrtc_does_not_know_is_an_error(own_kernels: Path):
    with pytest.raises(KernelBuildError, match="refuses the options"):
        cuda_build.build(SPEC, "sm_12")


@needs_nvrtc
def test_a_cache_that_cannot_be_written_is_no_error(own_kernels: Path, tmp_path: Path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file"))
    assert cuda_build.build(SPEC, "sm_90a").registers > 0
    assert "cannot be kept" in caplog.text


@needs_nvrtc
def test_the_first_compilation_is_announced_once(own_kernels: Path, caplog):
    cuda_build._announce.cache_clear()
    for number in (1, 2, 3):
        cuda_build.build(KernelSpec("scale.cu", f"scale<{number}>"), "sm_90a")
    assert caplog.text.count("compiling CUDA kernels for sm_90a") == 1
    assert str(cuda_build.kernel_cache_dir()) in caplog.text


def test_headers_of_an_installed_toolkit_serve_where_there_are_no_wheels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setattr(cuda_build.sysconfig, "get_path", lambda name: str(tmp_path / "no-wheels"))
    (tmp_path / "toolkit" / "include").mkdir(parents=True)
    (tmp_path / "toolkit" / "include" / "cuda_fp16.h").write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    cuda_build.include_dir.cache_clear()
    try:
        assert cuda_build.include_dir() == tmp_path / "toolkit" / "include"
    finally:
        cuda_build.include_dir.cache_clear()


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100")]
)
def test_architecture_of_a_capability(capability, arch):
    assert cuda_build.arch_of(capability) == arch


def test_a_kernel_for_another_device_than_cuda_is_refused():
    import torch

    with pytest.raises(ConfigError, match="device=cpu"):
        cuda_build.get_kernel(SPEC, torch.device("cpu"))


def test_importing_builds_nothing_and_loads_no_compiler(tmp_path: Path):
    code = """
import sys
import minillm.attention.cuda_simple, minillm.memory.paged_kv_cache
print("cuda.bindings.nvrtc" in sys.modules)  # torch itself imports the other bindings where they are
"""
    environment = {"MINILLM_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
    assert list(tmp_path.iterdir()) == []
