"""Which device an engine runs on, and how large its pool is on a GPU."""

from __future__ import annotations

import logging

import pytest
import torch

from minillm.core.errors import ConfigError
from minillm.engine import devices
from minillm.engine.devices import gpu_problem, resolve_device
from minillm.engine.gpu_memory import MAX_POOL_BLOCKS, pool_blocks

GIB = 1 << 30


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch report GPUs of one capability, and the kernels' needs as met."""

    def report(count: int = 2, capability: tuple[int, int] = (9, 0), kernels: str | None = None) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for name, value in (
            ("is_available", count > 0),
            ("device_count", count),
            ("get_device_capability", capability),
            ("get_device_name", "NVIDIA Test"),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        monkeypatch.setattr(devices, "kernels_problem", lambda: kernels)

    return report


def test_auto_takes_the_first_gpu_that_can_be_used(gpus) -> None:
    gpus()
    assert resolve_device("auto") == "cuda:0"
    assert resolve_device("cuda") == "cuda:0"
    assert resolve_device("cuda:1") == "cuda:1"
    assert resolve_device("cpu") == "cpu"


def test_auto_is_the_cpu_where_there_is_no_gpu(gpus, caplog) -> None:
    gpus(0)
    with caplog.at_level(logging.WARNING):
        assert resolve_device("auto") == "cpu"
    assert not caplog.records


def test_auto_says_why_a_gpu_that_is_there_is_not_used(gpus, caplog) -> None:
    gpus(kernels="NVRTC is missing")
    with caplog.at_level(logging.WARNING, logger="minillm.engine"):
        assert resolve_device("auto") == "cpu"
    assert "NVRTC is missing" in caplog.text
    with pytest.raises(ConfigError, match=r"device='cuda' cannot be used: NVRTC is missing"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("setup", "device", "match"),
    [
        ({"count": 2}, "cuda:2", r"device='cuda:2' cannot be used: there are 2 GPUs, numbered from 0"),
        ({"count": 1}, "cuda:1", "there is 1 GPU,"),
        ({"count": 0}, "cuda", "no NVIDIA GPU"),
        ({"capability": (7, 5)}, "cuda", r"NVIDIA Test has compute capability 7\.5; 8\.0 or newer"),
        ({}, "cuda:x", "auto, cpu, cuda or cuda:N"),
        ({}, "tpu", "auto, cpu, cuda or cuda:N"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(gpus, setup, device, match) -> None:
    gpus(**setup)
    with pytest.raises(ConfigError, match=match):
        resolve_device(device)


def test_a_torch_without_cuda_is_named(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in str(gpu_problem(0))


def test_the_pool_takes_what_is_left_of_the_share() -> None:
    sizes = {"total": 100 * GIB, "in_use": 20 * GIB, "peak": 5 * GIB, "bytes_per_block": GIB // 2}
    assert pool_blocks(utilization=0.9, **sizes) == 2 * 65 - 1  # one block is scratch
    assert pool_blocks(utilization=1.0, **sizes) == 2 * 75 - 1
    assert pool_blocks(**{**sizes, "bytes_per_block": 1024, "utilization": 0.9}) == MAX_POOL_BLOCKS


@pytest.mark.parametrize("utilization", [0.1, 0.25, 0.259])
def test_a_share_that_leaves_no_room_is_refused_with_what_takes_it(utilization: float) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.\d+ of 100\.00 GiB.*20\.00 GiB.*5\.00 GiB"):
        pool_blocks(total=100 * GIB, in_use=20 * GIB, peak=5 * GIB, utilization=utilization, bytes_per_block=GIB // 2)
