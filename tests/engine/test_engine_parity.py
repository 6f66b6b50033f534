"""Greedy tokens of the built-in model in float32 are those of transformers' own `generate`, however they are run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minillm import EngineConfig, Runtime, SamplingParams
from minillm.bench import transformers_baseline
from minillm.bench.cpu_bench import QUESTIONS
from minillm.core.stats import Counters
from minillm.engine.factory import build_engine
from minillm.models.loader import LoadedModel, load_model
from minillm.models.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.integration

NEW_TOKENS = 48
CONFIG = EngineConfig(
    "smollm2-135m", dtype="float32", max_model_len=256, max_num_seqs=16, swap_space=0.25, check_invariants=True
)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("smollm2-135m", "float32")


@pytest.fixture(scope="module")
def tokenizer(model: LoadedModel) -> Tokenizer:
    return load_tokenizer(model.path)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """16 prompts: every other one as a chat, the others as plain text."""
    assert len(set(QUESTIONS)) == 16
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    return [list(chats[i]) if i % 2 else tokenizer.encode(text) for i, text in enumerate(QUESTIONS)]


@pytest.fixture(scope="module")
def expected(model: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Transformers, in one left-padded batch: one prompt at a time gave the same, and takes five times as long."""
    baseline = transformers_baseline.build_llama(model.decoder, torch.float32)
    return transformers_baseline.greedy(baseline, prompts, NEW_TOKENS)


def generate(
    model: LoadedModel, tokenizer: Tokenizer, prompts: list[list[int]], passes: int = 1, **options
) -> tuple[list[list[int]], Counters]:
    """Tokens of the last of `passes` passes over all prompts at once, and the scheduler's counters."""
    parts = build_engine(replace(CONFIG, **options), model=model, tokenizer=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with Runtime(parts=parts) as runtime:
        for _ in range(passes):
            futures = [runtime.submit(prompt, params) for prompt in prompts]
            tokens = [future.result(timeout=250).outputs[0].token_ids for future in futures]
        counters = runtime.stats().counters
    assert parts.engine.num_invariant_violations == 0
    return tokens, counters


def test_sixteen_prompts_at_once(model, tokenizer, prompts, expected) -> None:
    assert all(len(tokens) == NEW_TOKENS for tokens in expected)
    assert generate(model, tokenizer, prompts)[0] == expected


def test_prompts_in_chunks_under_a_budget_of_64_tokens(model, tokenizer, prompts, expected) -> None:
    tokens, counters = generate(
        model, tokenizer, prompts, max_num_batched_tokens=64, overlap=True, enable_prefix_caching=False
    )
    assert tokens == expected
    assert counters.prefilled_tokens == sum(map(len, prompts)) > 64


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_ten_preemptions_and_more(model, tokenizer, prompts, expected, mode: str) -> None:
    tokens, counters = generate(
        model, tokenizer, prompts, preemption_mode=mode, num_gpu_blocks_override=30, enable_prefix_caching=False
    )
    assert tokens == expected
    assert (counters.preemptions_swap if mode == "swap" else counters.preemptions_recompute) >= 10


def test_a_second_pass_over_the_prefix_cache(model, tokenizer, prompts, expected) -> None:
    tokens, counters = generate(model, tokenizer, prompts, passes=2)
    assert tokens == expected
    whole_blocks = sum((len(prompt) - 1) // CONFIG.block_size for prompt in prompts)
    assert counters.cached_tokens >= whole_blocks * CONFIG.block_size > 0
