"""The built-in model itself: its weights in Transformers' Llama class as the oracle, packed products, start-up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import gguf_name
from model_oracles import ContiguousAttention, run

from minillm.models.default_model import BUILTIN_MODELS, builtin_path, list_cached_models
from minillm.models.linear import RowSwitchLinear, cpu_packs_bfloat16
from minillm.models.loader import LoadedModel, load_model

pytestmark = pytest.mark.integration

# "The capital of France is Paris. The capital of Germany is" as the model's own ids.
CAPITALS = [504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 5943, 314]


@pytest.fixture(scope="module")
def model_file() -> Path:
    path = builtin_path(BUILTIN_MODELS["smollm2-135m"])
    if not path.is_file():
        pytest.skip("the built-in model is not cached; run `minillm generate hi` once")
    return path


@pytest.fixture(scope="module")
def exact(model_file: Path) -> LoadedModel:
    return load_model("smollm2-135m", dtype="float32")


@pytest.fixture(scope="module")
def packed(model_file: Path) -> LoadedModel:
    if not cpu_packs_bfloat16():
        pytest.skip("this CPU has no bfloat16 instructions")
    return load_model("smollm2-135m", dtype="auto")


def unpermuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order, written apart from the loader: a head's row 2i is i, its row 2i + 1 is half + i."""
    size = weights.shape[0] // heads
    order = [head * size + 2 * (i % (size // 2)) + i // (size // 2) for head in range(heads) for i in range(size)]
    return weights[order]


@pytest.fixture(scope="module")
def reference(model_file: Path):
    """Transformers' model, filled through the gguf package's own reader."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(model_file).tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = tensors[gguf_name(name)]
            weights = gguf.quants.dequantize(stored.data, stored.tensor_type).copy()
            if "q_proj" in name or "k_proj" in name:
                weights = unpermuted(weights, 9 if "q_proj" in name else 3)
            parameter.copy_(torch.from_numpy(weights))
    return model


def test_configuration(exact: LoadedModel) -> None:
    config = exact.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.hidden_size, config.max_position_embeddings) == (49152, 576, 8192)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert (exact.name, exact.kind, exact.dtype) == ("smollm2-135m", "gguf", "float32")


def test_float32_logits_and_greedy_tokens_equal_transformers(exact: LoadedModel, reference) -> None:
    with torch.no_grad():
        theirs = reference(torch.tensor([CAPITALS])).logits[0]
        generated = reference.generate(torch.tensor([CAPITALS]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    ours = run(exact.decoder, CAPITALS)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    ids = list(CAPITALS)
    attention = ContiguousAttention(exact.decoder.layer_attention)
    step, first = CAPITALS, 0
    with torch.inference_mode():
        for _ in range(24):
            positions = torch.arange(first, first + len(step))
            hidden = exact.decoder.forward(torch.tensor(step), positions, attention)
            first += len(step)
            step = [int(exact.decoder.compute_logits(hidden[-1:]).argmax())]
            ids += step
    assert ids == generated[0].tolist()


@pytest.mark.parametrize("chunk", [1, 4, 12], ids=["one row", "four rows", "all rows"])
def test_packed_products_stay_near_float32(exact: LoadedModel, packed: LoadedModel, chunk: int) -> None:
    assert packed.packed
    assert all(isinstance(layer.qkv, RowSwitchLinear) for layer in packed.decoder.layers)
    theirs = run(exact.decoder, CAPITALS).log_softmax(-1)
    ours = run(packed.decoder, CAPITALS, [chunk] * (len(CAPITALS) // chunk)).log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    assert divergence.max() < 0.02
    assert ours[-1].argmax() == theirs[-1].argmax()


def test_loading_needs_neither_transformers_nor_gguf_and_little_time() -> None:
    """A fresh process, import of torch included; CPU seconds, since wall time depends on the neighbours."""
    program = (
        "import sys, time\n"
        "from minillm.models.loader import load_model\n"
        "load_model('smollm2-135m')\n"
        "print(time.process_time(), sorted({'transformers', 'gguf', 'safetensors', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, _, modules = done.stdout.strip().partition(" ")
    assert modules == "[]"
    assert float(seconds) < 10


def test_the_cached_file_is_listed(model_file: Path) -> None:
    entry = list_cached_models()[0]
    assert (entry.name, entry.cached, entry.path) == ("smollm2-135m", True, model_file)
