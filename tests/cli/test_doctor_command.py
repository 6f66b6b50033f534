"""`minillm doctor`: findings, advice and exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minillm import doctor, self_check
from minillm.doctor import Check
from minillm.engine import devices
from minillm.self_check import Result


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def status_of(checks: list[Check], name: str) -> str:
    return next(check.status for check in checks if check.name == name)


def test_this_machine_has_nothing_broken(cli) -> None:
    done = cli("doctor")
    assert done.code == 0, done.out
    for name in ("python", "torch", "transformers", "cpu features", "memory", "device", "cache", "model smollm2-135m"):
        assert name in done.out


def test_broken_findings_exit_1_and_are_named_in_one_line(cli, monkeypatch) -> None:
    findings = [Check("cpu", "ok", "fine"), Check("cache", "broken", "/x: Permission denied", "set MINILLM_CACHE")]
    monkeypatch.setattr(doctor, "run_checks", lambda: findings)
    done = cli("doctor")
    assert (done.code, done.errors) == (1, ["minillm: error: broken: cache"])
    assert "set MINILLM_CACHE" in done.out


def test_a_cache_folder_that_cannot_be_made_is_broken_with_advice(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file" / "cache"))
    (check,) = doctor.check_cache()
    assert check.status == "broken" and "MINILLM_CACHE" in check.advice


def test_a_truncated_cached_model_is_noticed(own_cache: Path) -> None:
    from minillm.models.default_model import SMOLLM2_135M, builtin_path

    path = builtin_path(SMOLLM2_135M)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    (check,) = doctor.check_default_model()
    assert check.status == "note" and "has 4 bytes" in check.detail and "fetched again" in check.advice


def test_missing_and_old_packages_are_broken(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "MIN_VERSIONS", {"torch": "99.1", "no-such-package-here": None})
    old, missing = doctor.check_packages()
    assert (old.status, missing.status) == ("broken", "broken")
    assert "torch>=99.1" in old.advice and "no-such-package-here" in missing.advice


def test_more_threads_than_cores_gets_advice(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    (check,) = doctor.check_threads()
    assert check.status == "note" and "OMP_NUM_THREADS=2" in check.advice


@pytest.fixture
def one_gpu(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: ("NVIDIA H100", "580.1"))
    for name, value in (
        ("is_available", True),
        ("device_count", 1),
        ("get_device_capability", (9, 0)),
        ("get_device_name", "NVIDIA H100"),
        ("mem_get_info", (60 << 30, 80 << 30)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_is_shown_with_its_driver_and_is_the_device(monkeypatch) -> None:
    monkeypatch.setattr(devices, "kernels_problem", lambda: None)
    driver, gpu, device = doctor.check_gpu()
    assert driver.detail == "580.1 (NVIDIA H100)"
    assert gpu == Check("cuda:0", "ok", "NVIDIA H100, sm_90, 60.0 GiB free of 80.0 GiB")
    assert device == Check("device", "ok", "cuda:0 (torch built for CUDA 13.0)")


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_that_cannot_be_used_comes_with_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr(devices, "kernels_problem", lambda: "NVRTC is missing; pip install 'minillm-runtime[cuda]'")
    *_, device = doctor.check_gpu()
    assert (device.status, device.advice[:5]) == ("note", "NVRTC")
    assert device.detail.startswith("cpu") and "the GPU is not used" in device.detail


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_whose_memory_others_hold_gets_advice(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (10 << 30, 80 << 30))
    check = next(check for check in doctor.check_gpu() if check.name == "cuda:0")
    assert check.status == "note" and "nvidia-smi" in check.advice


@pytest.mark.usefixtures("one_gpu")
def test_the_kernels_compiler_and_cache_are_shown(monkeypatch) -> None:
    from minillm.attention import cuda_build

    monkeypatch.setattr(cuda_build, "nvrtc_version", lambda: None)
    compiler, cache = doctor.check_kernels()
    assert compiler.status == "note" and "minillm-runtime[cuda]" in compiler.advice
    assert cache.detail.startswith("0 compiled kernels") and "minillm kernels build" in cache.detail
    monkeypatch.setattr(cuda_build, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(cuda_build, "include_dir", lambda: Path("/inc"))
    compiler, _ = doctor.check_kernels()
    assert compiler == Check("NVRTC", "ok", "13.0 (headers: /inc)")


def test_driver_is_read_from_nvidia_smi(monkeypatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100, 80GB, 580.1'\necho 'NVIDIA L4, 580.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor.nvidia_driver() == ("NVIDIA H100, 80GB, NVIDIA L4", "580.1")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert doctor.nvidia_driver() is None


def test_a_check_that_raises_is_a_finding(monkeypatch) -> None:
    def check_memory() -> Iterator[Check]:
        raise OSError("no /proc")
        yield

    monkeypatch.setattr(doctor, "check_memory", check_memory)
    checks = doctor.run_checks()
    assert status_of(checks, "memory") == "broken"
    assert len(checks) > 8


@pytest.mark.parametrize(
    ("version", "release"), [("2.13.0+cpu", (2, 13, 0)), ("5.17.0.dev0", (5, 17, 0)), ("2.11.0rc1", (2, 11, 0))]
)
def test_release_numbers_of_versions(version: str, release: tuple[int, ...]) -> None:
    assert doctor._release(version) == release


def results(*, differing: int = 0, problem: str = "") -> list[Result]:
    return [Result("one at a time", 8, 0, 0, 0, 0, 1.0), Result("swap", 8, differing, 12, 0, 0, 2.0, problem)]


@pytest.mark.parametrize(
    ("found", "code"),
    [(results(), 0), (results(differing=1), 1), (results(problem="preemptions_swap is 0: nothing was checked"), 1)],
)
def test_self_check_prints_every_way_and_fails_on_a_difference(cli, monkeypatch, found, code: int) -> None:
    monkeypatch.setattr(doctor, "run_checks", lambda: [Check("cpu", "ok", "fine")])
    monkeypatch.setattr(self_check, "run_self_check", lambda status, device: iter(found))
    done = cli("doctor", "--self-check")
    assert done.code == code
    assert "one at a time" in done.out and "swap" in done.out and "12" in done.out
    assert done.errors == ([] if code == 0 else ["minillm: error: broken: swap"])
