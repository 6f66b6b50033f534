"""`minillm kernels build|list|clear`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minillm.attention import cuda_build
from minillm.attention.cuda_build import CompiledKernel, KernelSpec
from minillm.core.errors import KernelBuildError

SPECS = [KernelSpec("paged_simple.cu", f"paged_simple<float, {chunks}>") for chunks in (2, 4)]


@pytest.fixture(autouse=True)
def scripted_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two kernels, a compiler that takes no time, and an empty cache."""

    def compile_kernel(spec: KernelSpec, arch: str) -> CompiledKernel:
        return CompiledKernel(spec.source, spec.symbol, arch, "13.0", "_Z1f", 40, 8, b"\x7fELF machine code")

    monkeypatch.setattr(cuda_build, "_load_nvrtc", lambda: (None, "13.0"))
    monkeypatch.setattr(cuda_build, "compile_kernel", compile_kernel)
    monkeypatch.setattr(cuda_build, "registered_specs", lambda arch: SPECS)
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))


def test_build_compiles_what_is_missing_and_says_so(cli) -> None:
    done = cli("kernels", "build", "--arch", "sm_90a")
    assert done.code == 0
    assert "2 kernels for sm_90a: 2 compiled, 0 were cached, 2 spill" in done.err
    again = cli("kernels", "build", "--arch", "sm_90a", "--arch", "sm_80", "--arch", "sm_80")
    assert "4 kernels for sm_90a, sm_80: 2 compiled, 2 were cached" in again.err
    assert again.out == ""


def test_build_all_takes_every_tested_architecture(cli) -> None:
    cli("kernels", "build", "--all")
    archs = {entry.kernel.arch for entry in cuda_build.cached_kernels()}
    assert archs == set(cuda_build.DEFAULT_ARCHS)


def test_build_without_a_gpu_asks_for_the_architecture(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = cli("kernels", "build")
    assert done.code == 2 and len(done.errors) == 1 and "--arch sm_90a" in done.errors[0]


def test_build_on_a_gpu_takes_its_architecture(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 9))
    assert "2 kernels for sm_89: 2 compiled" in cli("kernels", "build").err


def test_a_failed_build_is_one_line_and_exit_1(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: KernelSpec, arch: str) -> CompiledKernel:
        raise KernelBuildError(f"{spec} for {arch}", "does not compile: line 1", "Advice", log="a\nb")

    monkeypatch.setattr(cuda_build, "compile_kernel", fail)
    done = cli("kernels", "build", "--arch", "sm_90a")
    assert done.code == 1 and len(done.errors) == 1 and "does not compile: line 1. Advice" in done.errors[0]


def test_list_shows_a_table_and_json(cli, tmp_path: Path) -> None:
    assert "0 compiled kernels" in cli("kernels", "list").err
    assert cli("kernels", "list", "--json").out == "[]\n"
    cli("kernels", "build", "--arch", "sm_90a")
    lines = cli("kernels", "list").out.splitlines()
    assert lines[0].split() == ["kernel", "arch", "nvrtc", "registers", "spill", "bytes", "kB", "age"]
    assert [line.split()[-6:-3] for line in lines[1:]] == [["13.0", "40", "8"]] * 2
    entries = json.loads(cli("kernels", "list", "--json").out)
    assert [entry["kernel"] for entry in entries] == [spec.symbol for spec in SPECS]
    first = entries[0]
    assert (first["source"], first["arch"], first["registers"]) == ("paged_simple.cu", "sm_90a", 40)
    assert Path(first["path"]).is_relative_to(tmp_path / "kernels") and 0 <= first["age_seconds"] < 60


def test_clear_removes_the_cache(cli, tmp_path: Path) -> None:
    cli("kernels", "build", "--arch", "sm_90a")
    assert "2 compiled kernels removed" in cli("kernels", "clear").err
    assert not (tmp_path / "kernels").exists()
    assert "0 compiled kernels removed" in cli("kernels", "clear").err
