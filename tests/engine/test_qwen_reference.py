"""The reference model of the original work, Qwen/Qwen2.5-0.5B-Instruct, against transformers' own `generate`.

`MINILLM_QWEN` may name a folder with the weights; else they come from the Hugging Face hub or its cache. The same check
runs on a tiny random Qwen2 model, so that it is known to work where the weights are not to be had.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.core.errors import ModelLoadError
from minillm.models.default_model import resolve_model
from minillm.models.loader import load_model
from model_folders import save_tiny_model

NAME = "Qwen/Qwen2.5-0.5B-Instruct"
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def qwen() -> Path:
    """Folder of the weights; skips where they are not to be had."""
    try:
        return Path(resolve_model(os.environ.get("MINILLM_QWEN", NAME)).path)
    except ModelLoadError as error:
        pytest.skip(f"the weights of {NAME} are not to be had here ({error}); MINILLM_QWEN may name a folder with them")


def greedy_of_transformers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    outputs = []
    for prompt in prompts:
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        with torch.inference_mode():
            made = model.generate(torch.tensor([prompt]), repetition_penalty=1.0, pad_token_id=0, **options)
        outputs.append(made[0, len(prompt) :].tolist())
    return outputs


def check_greedy_tokens(folder: Path, prompts: list[list[int]]) -> None:
    """Batched together in float32, every prompt gets the tokens that transformers gives it alone."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    with LLM(str(folder), dtype="float32", device="cpu", max_model_len=256, max_num_seqs=4, swap_space=0.0) as llm:
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert outputs == greedy_of_transformers(folder, prompts)


def test_the_check_itself_on_a_tiny_qwen2(tmp_path):
    folder = save_tiny_model(tmp_path, "qwen2")
    check_greedy_tokens(folder, [[5, 9, 17, 33], [7] * 20, [100, 3, 64, 12, 90, 41, 8]])


@pytest.mark.integration
def test_greedy_tokens_are_those_of_transformers(qwen):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(qwen)
    texts = ["The capital of France is", "def fibonacci(n):\n", "Why is the sky blue?", "一二三四五"]
    check_greedy_tokens(qwen, [tokenizer(text)["input_ids"] for text in texts])


@pytest.mark.integration
def test_shape_and_chat(qwen):
    config = load_model(str(qwen), "float32").config
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == ("qwen2", 24, 14, 2)
    assert config.qkv_bias and config.tie_word_embeddings and config.head_dim == 64
    with LLM(str(qwen), device="cpu", max_model_len=512, max_num_seqs=2, swap_space=0.0) as llm:
        (answer,) = llm.chat(
            [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
            SamplingParams(temperature=0, max_tokens=16),
        )
    assert "Paris" in answer.outputs[0].text and answer.outputs[0].finish_reason == "stop"
