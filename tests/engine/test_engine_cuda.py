"""Whole engines on a GPU, on tiny random models: the CPU's tokens, overlap, memory, failure, cancellation."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fakes import idle_state

from minillm import LLM, EngineConfig, Runtime, SamplingParams
from minillm.core.errors import ConfigError, EngineDeadError
from minillm.engine.factory import build_engine
from model_folders import save_tiny_model

pytestmark = pytest.mark.cuda

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % 97 + 4 for j in range(length)] for i, length in enumerate((1, 5, 16, 17, 33, 60))]


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral"])
def folder(request, tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("one"), "llama")


def make(folder: Path, device: str = "cuda", **options: Any) -> LLM:
    common = {"dtype": "float32", "max_num_seqs": 8, "num_gpu_blocks_override": 128, "swap_space": 0.05, "seed": 0}
    return LLM(str(folder), device=device, check_invariants=True, **{**common, **options})


def tokens(llm: LLM, params: Any = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params)
    assert llm.runtime._engine.num_invariant_violations == 0
    return [output.outputs[0].token_ids for output in outputs]


def test_every_family_and_way_gives_the_cpus_tokens(folder: Path) -> None:
    with make(folder, "cpu") as llm:
        wanted = tokens(llm)
    small = {"num_gpu_blocks_override": 12, "block_size": 8, "enable_prefix_caching": False}
    for options, proof in (
        ({}, "prefilled_tokens"),
        ({"overlap": False}, "prefilled_tokens"),
        ({"enforce_eager": True}, "prefilled_tokens"),
        ({"max_num_batched_tokens": 16}, "prefilled_tokens"),
        ({**small, "preemption_mode": "swap"}, "preemptions_swap"),
        ({**small, "preemption_mode": "recompute", "swap_space": 0}, "preemptions_recompute"),
    ):
        with make(folder, **options) as llm:
            assert llm.runtime.model_info.device == "cuda:0"
            assert llm.runtime._engine.overlap == options.get("overlap", True)
            assert tokens(llm) == wanted, options
            assert getattr(llm.stats().counters, proof) > 0
            captured = llm.runtime._engine.runner.cuda_forward.graphs.captured
            assert bool(captured) != bool(options.get("enforce_eager")), options


def test_cached_prefixes_and_seeds_change_nothing(llama: Path) -> None:
    seeded = [SamplingParams(seed=i, temperature=0.9, top_p=0.9, max_tokens=16, ignore_eos=True) for i in range(6)]
    with make(llama, "cpu") as llm:
        wanted, drawn = tokens(llm), tokens(llm, seeded)
    with make(llama) as llm:
        assert tokens(llm) == wanted
        assert tokens(llm) == wanted
        assert llm.stats().counters.cached_tokens > 0
        assert tokens(llm, seeded) == drawn


def test_auto_takes_the_gpu_in_bfloat16_and_sizes_the_pool_from_its_memory(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, head_dim=128, num_key_value_heads=4)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    block = 2 * 3 * 4 * 128 * 2 * 128  # bytes of 128 tokens in 3 layers
    with LLM(str(folder), block_size=128, gpu_memory_utilization=0.5, swap_space=0.05) as llm:
        info = llm.runtime.model_info
        assert (info.device, info.dtype) == ("cuda:0", "bfloat16")
        used = torch.cuda.mem_get_info()[0]
        taken = info.num_blocks * block
        assert taken == pytest.approx(0.5 * total - (total - free), rel=0.1)
        assert free - used == pytest.approx(taken, rel=0.1)
        assert len(llm.generate([PROMPTS[3]], GREEDY)[0].outputs[0].token_ids) == 24
    assert torch.cuda.mem_get_info()[0] == pytest.approx(free, rel=0.05)


def test_too_small_a_share_and_too_many_blocks_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.0001"):
        make(llama, num_gpu_blocks_override=None, gpu_memory_utilization=0.0001)
    with pytest.raises(ConfigError, match="num_blocks=1000000000"):
        make(llama, num_gpu_blocks_override=10**9)
    with pytest.raises(ConfigError, match="cuda:99"):
        make(llama, "cuda:99")


def test_cancelling_mid_stream_frees_everything(llama: Path) -> None:
    with make(llama) as llm:
        runtime = llm.runtime
        tokens(llm)
        idle = idle_state(runtime._engine)
        streams = [runtime.stream(p, dataclasses.replace(GREEDY, max_tokens=400)) for p in PROMPTS]
        for stream in streams:
            next(stream)
        assert runtime.cancel(streams[0].request_id)
        del stream, streams
        assert [o.outputs[0].finish_reason for o in llm.generate(PROMPTS, GREEDY)] == ["length"] * len(PROMPTS)
        assert idle_state(runtime._engine) == idle


def test_a_failure_of_the_device_fails_every_request_with_the_cause_and_hangs_nobody(llama: Path, monkeypatch) -> None:
    llm = make(llama)
    runner = llm.runtime._engine.runner
    collect, count = runner.collect, 0

    def failing(handle):
        nonlocal count
        count += 1
        if count > 4:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return collect(handle)

    monkeypatch.setattr(runner, "collect", failing)
    futures = [llm.runtime.submit(prompt, dataclasses.replace(GREEDY, max_tokens=100)) for prompt in PROMPTS]
    for future in futures:
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            future.result(timeout=60)
    with pytest.raises(EngineDeadError):
        llm.generate([[1, 2]], GREEDY)
    llm.close()


REAL_FAULT = """
import sys, torch
from minillm import LLM, SamplingParams
from minillm.core.errors import EngineDeadError

llm = LLM(sys.argv[1], device="cuda", dtype="float32", num_gpu_blocks_override=64, swap_space=0.05)
runner = llm.runtime._engine.runner
forward, steps = runner.forward, 0

def failing(plan):
    global steps
    steps += 1
    if steps == 5:
        torch._assert_async(torch.zeros((), device="cuda"))  # a kernel that stops with an assertion
    return forward(plan)

runner.forward = failing
params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
for future in [llm.runtime.submit([3 + i, 4], params) for i in range(4)]:
    try:
        future.result(timeout=60)
    except EngineDeadError as error:
        print("dead:", error)
llm.close()
print("closed", flush=True)
"""


def test_a_kernel_that_faults_ends_the_engine_and_hangs_nobody(llama: Path) -> None:
    """In a process of its own: after a fault no CUDA call works in it any more."""
    done = subprocess.run(
        [sys.executable, "-c", REAL_FAULT, str(llama)], capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("dead:") and "CUDA error" in line]) == 4, done.stderr[-2000:]
    assert lines[-1] == "closed"


def test_closing_with_a_step_in_flight_ends_at_once_and_frees_the_memory(llama: Path) -> None:
    with make(llama) as llm:
        tokens(llm)  # cuBLAS keeps a workspace for good
    before = torch.cuda.memory_allocated()
    llm = make(llama)
    assert torch.cuda.memory_allocated() > before
    futures = [llm.runtime.submit(prompt, dataclasses.replace(GREEDY, max_tokens=400)) for prompt in PROMPTS]
    llm.close()
    assert all(future.result(timeout=30).outputs[0].finish_reason in ("cancelled", "length") for future in futures)
    del llm
    assert torch.cuda.memory_allocated() == pytest.approx(before, abs=1 << 20)


def test_a_model_on_the_cpu_does_not_go_with_a_gpu(llama: Path) -> None:
    from minillm.models.loader import load_model

    model = load_model(llama, "float32")
    with pytest.raises(ConfigError, match=r"device='cuda', but the model given is on cpu"):
        build_engine(EngineConfig(str(llama), device="cuda"), model=model)
    with Runtime(parts=build_engine(EngineConfig(str(llama), num_gpu_blocks_override=64), model=model)) as runtime:
        assert runtime.model_info.device == "cpu"
