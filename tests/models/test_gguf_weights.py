"""GGUF files: q/k row order, quantised types, configuration, round trips against Transformers."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from model_oracles import make_reference, prompt, reference_logits, run

from minillm.core.errors import ModelLoadError, UnsupportedModelError
from minillm.models.config import RopeConfig
from minillm.models.gguf import GGUFFile, dequantize
from minillm.models.loader import load_model

HEADS = {
    "32/4": {"hidden_size": 256, "num_attention_heads": 32, "num_key_value_heads": 4},
    "9/3": {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3},
    "14/2": {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2},
    "64/8": {"hidden_size": 512, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 1},
}


def loaded_views(path) -> tuple[Any, dict[str, torch.Tensor]]:
    decoder = load_model(path, dtype="float32").decoder
    return decoder, decoder.weight_views()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("heads", HEADS)
def test_every_weight_is_bitwise_that_of_the_checkpoint(family: str, heads: str, tmp_path) -> None:
    reference = make_reference(family, **HEADS[heads])
    decoder, views = loaded_views(write_gguf(reference, tmp_path / "model.gguf"))
    state = reference.state_dict()
    assert set(views) == set(state)
    for name, view in views.items():
        assert torch.equal(view, state[name]), name
    ids = prompt(24)
    torch.testing.assert_close(run(decoder, ids), reference_logits(reference, ids), atol=1e-4, rtol=1e-4)


def test_llama_biases_follow_their_rows(tmp_path) -> None:
    """The converter permutes q and k biases with their rows; v and o biases stay."""
    reference = make_reference("llama", attention_bias=True, **HEADS["9/3"])
    _, views = loaded_views(write_gguf(reference, tmp_path / "model.gguf"))
    for name, tensor in reference.state_dict().items():
        assert torch.equal(views[name], tensor), name


def test_mistral_is_stored_as_llama(tmp_path) -> None:
    reference = make_reference("mistral", sliding_window=8, head_dim=24)
    fields = {"attention.sliding_window": 8}
    decoder, _ = loaded_views(write_gguf(reference, tmp_path / "model.gguf", extra_fields=fields))
    ids = prompt(24)
    assert [layer.sliding_window for layer in decoder.layer_attention] == [8, 8, 8]
    torch.testing.assert_close(run(decoder, ids), reference_logits(reference, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_output_weight_decides_whether_the_head_is_tied(tied: bool, tmp_path) -> None:
    reference = make_reference("qwen2", tie_word_embeddings=tied)
    path = write_gguf(reference, tmp_path / "model.gguf")
    with GGUFFile(path) as file:
        assert ("output.weight" in file.tensors) == (not tied)
    model = load_model(path, dtype="float32")
    assert model.config.tie_word_embeddings == tied
    ids = prompt(24)
    torch.testing.assert_close(run(model.decoder, ids), reference_logits(reference, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("qtype", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_model_equals_its_dequantised_twin(qtype: str, tmp_path) -> None:
    """What gguf.quants makes of the same bytes, run by Transformers, is what the loaded file must compute."""
    reference = make_reference("llama", **{**HEADS["9/3"], "hidden_size": 288})
    kind = gguf.GGMLQuantizationType[qtype]
    path = write_gguf(reference, tmp_path / "model.gguf", qtype)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim == 2:
                parameter.copy_(
                    torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind))
                )
    _, views = loaded_views(path)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(views[name], tensor), name
    ids = prompt(24)
    decoder = load_model(path, dtype="float32").decoder
    torch.testing.assert_close(run(decoder, ids), reference_logits(reference, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("qtype", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ2_0", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 3, 130])
def test_dequantize_equals_gguf_quants_on_random_blocks(qtype: str, rows: int) -> None:
    kind = gguf.GGMLQuantizationType[qtype]
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(rows)
    # Bytes below 0x78 keep every float16 field finite, whatever its place in the block.
    raw = generator.integers(0, 0x78, (rows, 2 * type_size), dtype=np.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind)).flatten()
    assert expected.isfinite().all()
    found = dequantize(torch.from_numpy(raw), qtype)
    assert found.dtype == torch.float32
    assert found.numel() == rows * 2 * block_size
    assert torch.equal(found, expected)


def test_unknown_quantised_type_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="Q8_1"):
        dequantize(torch.zeros(40, dtype=torch.uint8), "Q8_1")


def test_llama3_rope_divisors_equal_the_rope_scaling_they_were_made_from(tmp_path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    reference = make_reference("llama", rope_parameters=rope)
    plain = 1.0 / (500000.0 ** (np.arange(0, 16, 2) / 16))
    divisors = (plain / reference.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    path = write_gguf(reference, tmp_path / "model.gguf", extra_tensors={"rope_freqs.weight": divisors})
    model = load_model(path, dtype="float32")
    assert model.config.rope.kind == "divisors"
    ids = prompt(120)
    torch.testing.assert_close(run(model.decoder, ids), reference_logits(reference, ids), atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_fields_equal_transformers(kind: str, tmp_path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    fields: dict[str, Any] = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 32
        fields["rope.scaling.original_context_length"] = 32
    reference = make_reference("qwen2", rope_parameters=rope)
    model = load_model(write_gguf(reference, tmp_path / "model.gguf", extra_fields=fields), dtype="float32")
    assert model.config.rope.kind == kind
    ids = prompt(120)
    torch.testing.assert_close(run(model.decoder, ids), reference_logits(reference, ids), atol=1e-4, rtol=1e-4)


def test_no_rope_scaling_is_the_default(tmp_path) -> None:
    fields = {"rope.scaling.type": "none"}
    path = write_gguf(make_reference("qwen2"), tmp_path / "model.gguf", extra_fields=fields)
    assert load_model(path).config.rope == RopeConfig(theta=10000.0)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen2", {"rope.scaling.type": "longrope"}, "longrope"),
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("qwen2", {"attention.sliding_window": 16}, "sliding_window=16"),
        ("llama", {"rope.dimension_count": 8}, "rope.dimension_count=8"),
        ("llama", {"attention.kv_lora_rank": 16}, "MLA"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(family: str, fields: dict, message: str, tmp_path) -> None:
    path = write_gguf(make_reference(family), tmp_path / "model.gguf", extra_fields=fields)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(path)


@pytest.mark.parametrize("arch", ["mamba", "deepseek2", "bloom", "qwen3moe", "gpt-oss", "qwen2vl", "phi9"])
def test_other_architectures_are_refused_by_name(arch: str, tmp_path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", arch)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=arch):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["blk.1.attn_k.weight", "output_norm.weight", "blk.2.ffn_down.weight"])
def test_missing_tensor_is_named(name: str, tmp_path) -> None:
    path = write_gguf(make_reference("llama"), tmp_path / "model.gguf", drop=(name,))
    with pytest.raises(ModelLoadError, match="missing") as caught:
        load_model(path)
    assert "blk" not in str(caught.value) or name in str(caught.value)


def test_left_over_tensor_is_named(tmp_path) -> None:
    path = write_gguf(
        make_reference("llama"),
        tmp_path / "model.gguf",
        extra_tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)},
    )
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_sinks\.weight"):
        load_model(path)


def test_wrong_shape_is_named(tmp_path) -> None:
    path = write_gguf(
        make_reference("llama"),
        tmp_path / "model.gguf",
        drop=("blk.1.attn_norm.weight",),
        extra_tensors={"blk.1.attn_norm.weight": np.ones(63, np.float32)},
    )
    with pytest.raises(ModelLoadError, match=r"input_layernorm.*\[63\].*\[64\]"):
        load_model(path)
