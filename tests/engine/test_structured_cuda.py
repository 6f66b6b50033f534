"""Structured output on a GPU, on a tiny random model: the CPU's tokens, with and without overlap, beside other rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_fakes import wait_idle

from minillm import EngineConfig, Runtime, SamplingParams
from minillm.engine.factory import build_engine
from minillm.models.loader import load_model
from model_folders import save_tiny_model
from tiny_tokenizers import byte_level_tokenizer

pytestmark = pytest.mark.cuda
pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "maximum": 999, "minimum": 0}, "kind": {"enum": ["a", "b c"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}
PROMPTS = [f"prompt number {i}" for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=480))


def params(seed: int) -> list[SamplingParams]:
    """Alternately under the schema and free; greedy and seeded."""
    form: dict[str, Any] = {} if seed % 2 else {"structured_outputs": {"json": SCHEMA}}
    return [
        SamplingParams(max_tokens=120, temperature=0, ignore_eos=bool(seed % 2), **form),
        SamplingParams(max_tokens=120, temperature=1.5, seed=seed, logprobs=1, **form),
    ]


def outputs(folder: str, device: str, **options: Any) -> Iterator[list[tuple[str, list[int], str]]]:
    settings = {"dtype": "float32", "max_num_seqs": 16, "num_gpu_blocks_override": 128, "max_model_len": 256}
    config = EngineConfig("tiny", device=device, check_invariants=True, **{**settings, **options})
    parts = build_engine(config, model=load_model(folder, "float32", device), tokenizer=byte_level_tokenizer())
    with Runtime(parts=parts) as runtime:
        futures = [[runtime.submit(prompt, one) for one in params(i)] for i, prompt in enumerate(PROMPTS)]
        for group in futures:
            choices = [future.result(120).outputs[0] for future in group]
            yield [(choice.text, choice.token_ids, choice.finish_reason) for choice in choices]
        wait_idle(runtime)
        assert parts.engine.num_invariant_violations == 0


@pytest.mark.parametrize(
    "options", [{}, {"overlap": False}, {"enforce_eager": True}], ids=["overlap", "plain", "eager"]
)
def test_the_tokens_are_the_cpus_and_the_json_is_whole(folder: str, options: dict[str, Any]) -> None:
    wanted = list(outputs(folder, "cpu"))
    found = list(outputs(folder, "cuda", **options))
    assert found == wanted
    for i, group in enumerate(found):
        for text, _, reason in group if i % 2 == 0 else ():
            assert reason == "stop" and list(json.loads(text)) == ["id", "kind"]
