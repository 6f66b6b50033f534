"""The decoder's logits against Transformers' on tiny random models of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_oracles import make_reference, prompt, reference_logits, run, save

from minillm.models.loader import load_model

SMOLLM = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_OPTIONS = {**YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3, "truncate": False}
YARN_MSCALE = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.4}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 9/3 heads of 64, tied": ("llama", {**SMOLLM, "tie_word_embeddings": True}),
    "llama 9/3 heads of 64, untied": ("llama", SMOLLM),
    "llama with all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with head_dim 40 of hidden 64": ("llama", {"head_dim": 40}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, as many kv heads as heads": ("llama", {"num_key_value_heads": 4}),
    "llama, llama3 rope beyond its original length": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope beyond its original length": ("llama", {"rope_parameters": YARN}),
    "llama, yarn rope with its options": ("llama", {"rope_parameters": YARN_OPTIONS}),
    "llama, yarn rope with mscale": ("llama", {"rope_parameters": YARN_MSCALE}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama, rms_norm_eps 0.1": ("llama", {"rms_norm_eps": 0.1}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "mistral with head_dim 32": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2 14/2 heads with biases, tied": (
        "qwen2",
        {"hidden_size": 112, "num_attention_heads": 14, "tie_word_embeddings": True},
    ),
    "qwen2 14/2 heads with biases, untied": ("qwen2", {"hidden_size": 112, "num_attention_heads": 14}),
    "qwen2, yarn rope": ("qwen2", {"rope_parameters": YARN}),
    "qwen3 16/8 heads of 16, hidden 128": (
        "qwen3",
        {"hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16},
    ),
    "qwen3 4/2 heads of 48, hidden 64, tied": ("qwen3", {"head_dim": 48, "tie_word_embeddings": True}),
    "qwen3 with attention biases": ("qwen3", {"head_dim": 32, "attention_bias": True}),
}


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path) -> None:
    family, options = CASES[case]
    reference = make_reference(family, **options)
    decoder = load_model(save(reference, tmp_path), dtype="float32").decoder
    ids = prompt(150)
    assert_same_logits(run(decoder, ids), reference_logits(reference, ids))


@pytest.mark.parametrize(
    "chunks", [[1] * 40, [17, 1, 1, 21], [39, 1]], ids=["token by token", "mixed", "prefill, decode"]
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_chunked_forward_equals_the_whole(family: str, chunks: list[int], tmp_path) -> None:
    options = {"head_dim": 24} if family == "qwen3" else {}
    reference = make_reference(family, **options)
    decoder = load_model(save(reference, tmp_path), dtype="float32").decoder
    ids = prompt(40)
    assert_same_logits(run(decoder, ids, chunks), reference_logits(reference, ids))


@pytest.mark.parametrize("length", [7, 8, 9, 30], ids=["W-1", "W", "W+1", "far beyond"])
def test_mistral_window_equals_transformers(length: int, tmp_path) -> None:
    reference = make_reference("mistral", sliding_window=8)
    decoder = load_model(save(reference, tmp_path), dtype="float32").decoder
    assert [layer.sliding_window for layer in decoder.layer_attention] == [8, 8, 8]
    ids = prompt(length)
    assert_same_logits(run(decoder, ids), reference_logits(reference, ids))


def test_the_window_matters_one_token_beyond_it(tmp_path) -> None:
    """Guards the test above: at W the first token still counts for the last one, at W+1 it does not."""
    decoder = load_model(save(make_reference("mistral", sliding_window=8, num_hidden_layers=1), tmp_path)).decoder
    for length, counts in ((8, True), (9, False)):
        ids = prompt(length)
        changed = [(ids[0] + 1) % 100, *ids[1:]]
        same = torch.equal(run(decoder, ids)[-1], run(decoder, changed)[-1])
        assert same != counts


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windowed_layers_follow_max_window_layers(family: str, tmp_path) -> None:
    reference = make_reference(family, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    decoder = load_model(save(reference, tmp_path), dtype="float32").decoder
    assert [layer.sliding_window for layer in decoder.layer_attention] == [None, 8, 8]
    ids = prompt(30)
    assert_same_logits(run(decoder, ids), reference_logits(reference, ids))


def test_qwen_layer_types_alternate(tmp_path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    reference = make_reference("qwen3", use_sliding_window=True, sliding_window=8, layer_types=types)
    decoder = load_model(save(reference, tmp_path), dtype="float32").decoder
    assert [layer.sliding_window for layer in decoder.layer_attention] == [8, None, 8]
    ids = prompt(30)
    assert_same_logits(run(decoder, ids), reference_logits(reference, ids))


def test_attention_scale_is_of_the_configured_head_dim(tmp_path) -> None:
    decoder = load_model(save(make_reference("qwen3", head_dim=48), tmp_path), dtype="float32").decoder
    assert all(layer.scale == 48**-0.5 for layer in decoder.layer_attention)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(dtype: str, tmp_path) -> None:
    reference = make_reference("llama")
    folder = save(reference, tmp_path)
    model = load_model(folder, dtype=dtype)
    assert model.dtype == dtype
    ids = prompt(32)
    ours, theirs = run(model.decoder, ids), reference_logits(reference, ids)
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()
