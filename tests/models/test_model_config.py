"""ModelConfig from config.json: head size, windows, rope forms, end ids, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from minillm.core.errors import ModelLoadError, UnsupportedModelError
from minillm.models.config import ModelConfig, RopeConfig


def hf(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    config = {
        "model_type": model_type,
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize(
    ("model_type", "shape", "head_dim"),
    [
        ("qwen3", {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}, 128),
        ("qwen3", {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}, 128),
        ("qwen3", {"hidden_size": 1024, "num_attention_heads": 16}, 128),  # Transformers' default for the family
        ("mistral", {"hidden_size": 5120, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}, 128),
        ("llama", {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}, 64),
        ("llama", {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": None}, 64),
        ("qwen2", {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}, 64),
    ],
)
def test_head_dim_of_the_config_wins_over_the_quotient(model_type: str, shape: dict, head_dim: int) -> None:
    config = ModelConfig.from_hf(hf(model_type, **shape))
    assert config.head_dim == head_dim
    assert config.attention_scale == head_dim**-0.5


def test_as_many_kv_heads_as_heads_unless_told() -> None:
    assert ModelConfig.from_hf(hf(num_key_value_heads=...)).num_kv_heads == 8
    assert ModelConfig.from_hf(hf(num_key_value_heads=None)).num_kv_heads == 8


FULL = (None,) * 4
SLIDING = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("model_type", "options", "windows"),
    [
        ("llama", {}, FULL),
        ("llama", {"sliding_window": 512}, FULL),  # the reference has no windows at all
        ("mistral", {"sliding_window": 512}, (512,) * 4),
        ("mistral", {"sliding_window": None}, FULL),
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": 512, "layer_types": ["full_attention"] * 4}, FULL),
        ("mistral", {"sliding_window": 512, "layer_types": SLIDING}, (None, 512, 512, None)),
        ("qwen2", {"sliding_window": 32768, "use_sliding_window": False}, FULL),
        ("qwen2", {"sliding_window": 32768}, FULL),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 16)),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, (16,) * 4),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True}, FULL),  # max_window_layers is 28
        ("qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, FULL),
        (
            "qwen3",
            {"sliding_window": 512, "use_sliding_window": True, "layer_types": ["full_attention"] * 4},
            FULL,
        ),
        ("qwen3", {"sliding_window": 9, "use_sliding_window": True, "layer_types": SLIDING}, (None, 9, 9, None)),
        ("qwen3", {"sliding_window": 9, "use_sliding_window": False, "layer_types": SLIDING}, FULL),
    ],
)
def test_sliding_windows(model_type: str, options: dict, windows: tuple) -> None:
    assert ModelConfig.from_hf(hf(model_type, **options)).sliding_windows == windows


@pytest.mark.parametrize(
    ("model_type", "options", "error", "message"),
    [
        ("mistral", {"sliding_window": None, "layer_types": SLIDING}, ModelLoadError, "sliding_window is not given"),
        ("mistral", {"sliding_window": 0}, ModelLoadError, "sliding_window=0"),
        ("mistral", {"layer_types": SLIDING[:3]}, ModelLoadError, "num_layers=4"),
        ("mistral", {"layer_types": ["chunked_attention"] * 4}, UnsupportedModelError, "chunked_attention"),
        ("llama", {"sliding_window": 9, "layer_types": SLIDING}, UnsupportedModelError, "sliding_attention"),
    ],
)
def test_bad_windows_are_refused(model_type: str, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ModelConfig.from_hf(hf(model_type, **options))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("options", "rope"),
    [
        ({}, RopeConfig(theta=10_000.0)),
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(kind="linear", factor=2.0)),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}},
            RopeConfig(kind="linear", factor=2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=1024),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=1024),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
            RopeConfig(kind="yarn", factor=4.0, original_max_position=4096, attention_factor=1.5),
        ),
        (
            {
                "layer_types": ["full_attention"] * 4,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 7.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
                },
            },
            RopeConfig(theta=7.0),
        ),
    ],
)
def test_rope_forms_of_both_transformers_generations(options: dict, rope: RopeConfig) -> None:
    assert ModelConfig.from_hf(hf(**options)).rope == rope


def test_yarn_attention_factor_is_derived_from_the_factor() -> None:
    rope = ModelConfig.from_hf(hf(rope_scaling={"rope_type": "yarn", "factor": 4.0})).rope
    assert rope.attention_factor == pytest.approx(1.1386294, abs=1e-6)  # 0.1 ln 4 + 1


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mrope", "proportional", "su", "ntk", "axial", "nonsense"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_other_rope_types_are_refused(field: str, kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=kind):
        ModelConfig.from_hf(hf(**{field: {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}}))


def test_different_rope_per_layer_type_is_refused() -> None:
    per_type = {
        name: {"rope_type": "default", "rope_theta": theta} for name, theta in (("full", 1e4), ("sliding", 1e6))
    }
    with pytest.raises(UnsupportedModelError, match="differ"):
        ModelConfig.from_hf(hf(rope_parameters=per_type))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "state-space"),
        ("mamba2", "state-space"),
        ("rwkv", "recurrent"),
        ("jamba", "state-space"),
        ("deepseek_v3", "MLA"),
        ("minicpm3", "MLA"),
        ("bloom", "ALiBi"),
        ("mpt", "ALiBi"),
        ("mixtral", "mixture of experts"),
        ("qwen2_moe", "mixture of experts"),
        ("qwen3_moe", "mixture of experts"),
        ("gpt_oss", "attention-sink"),
        ("qwen2_vl", "multimodal"),
        ("llava", "multimodal"),
        ("mllama", "multimodal"),
        ("t5", "encoder"),
        ("bert", "encoder"),
        ("gpt2", "not known"),
        ("gemma2", "not known"),
        (None, "not known"),
    ],
)
def test_unsupported_model_types_are_refused_with_the_reason(model_type: str | None, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        ModelConfig.from_hf(hf(model_type))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"vision_config": {"hidden_size": 3}}, "multimodal"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"alibi": True}, "ALiBi"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"final_logit_softcapping": 30.0}, "soft capping"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ],
)
def test_options_that_are_not_computed_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(hf(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers='four'"),
        ({"hidden_size": 0.5}, "hidden_size=0.5"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"head_dim": 33}, "head_dim=33"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    ],
)
def test_missing_or_inconsistent_fields_are_named(options: dict, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.from_hf(hf(**options))


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (2, (2,)), ([2, 7], (2, 7)), (0, (0,))])
def test_end_ids(eos: Any, expected: tuple) -> None:
    assert ModelConfig.from_hf(hf(eos_token_id=eos)).eos_token_ids == expected


def test_biases_and_norms_by_family() -> None:
    qwen2 = ModelConfig.from_hf(hf("qwen2"))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = ModelConfig.from_hf(hf("qwen3"))
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    llama = ModelConfig.from_hf(hf("llama", attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    assert not ModelConfig.from_hf(hf("mistral", attention_bias=True)).qkv_bias


def test_checkpoint_dtype_under_either_name() -> None:
    assert ModelConfig.from_hf(hf(torch_dtype="bfloat16")).checkpoint_dtype == "bfloat16"
    assert ModelConfig.from_hf(hf(dtype="float16")).checkpoint_dtype == "float16"
    assert ModelConfig.from_hf(hf()).checkpoint_dtype is None
