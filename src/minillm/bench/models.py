"""Models with random weights, made at run time: a tiny one for quick runs, and the shapes of the peers' tables.

Speed does not depend on what the weights say. Products have order one, so that greedy choices are no ties.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.core.errors import ConfigError

if TYPE_CHECKING:
    from minillm.models.config import ModelConfig
    from minillm.models.loader import LoadedModel

TINY = "tiny"
_SHAPES: dict[str, dict[str, Any]] = {
    TINY: {
        "architecture": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
    },
    # The toy of the original work: 4 heads of 8 elements.
    "toy": {
        "architecture": "llama",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 4096,
    },
    "qwen3-0.6b": {
        "architecture": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "qk_norm": True,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "architecture": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_layers": 24,
        "num_heads": 14,
        "num_kv_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 32_768,
        "qkv_bias": True,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "architecture": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
    },
}
RANDOM_MODELS = tuple(f"random:{name}" for name in _SHAPES)
"""Names of models with random weights, as the programs' --model takes them."""


def model_shape(name: str) -> ModelConfig:
    """The shape behind `random:NAME`."""
    from minillm.models.config import ModelConfig, RopeConfig

    if name not in _SHAPES:
        raise ConfigError(f"model='random:{name}' is not known; known: {', '.join(RANDOM_MODELS)}")
    shape = {"tie_word_embeddings": False, **_SHAPES[name]}
    windows = (None,) * shape["num_layers"]
    return ModelConfig(**shape, rms_norm_eps=1e-5, rope=RopeConfig(), sliding_windows=windows, eos_token_ids=(2,))


def random_model(
    name: str = TINY, *, dtype: str = "auto", device: str = "cpu", seed: int = 0, **changes: Any
) -> LoadedModel:
    """The named shape (with `changes` to it) with random weights; `auto` is float32 on a CPU and bfloat16 on a GPU."""
    import torch

    from minillm.models.decoder import Decoder
    from minillm.models.loader import LoadedModel

    config = replace(model_shape(name), **changes)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    decoder = Decoder(config, getattr(torch, dtype), device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for weight_name, view in decoder.weight_views().items():
        if view.dim() == 1:
            view.fill_(1.0)
        else:
            fan_in = view.shape[1] if weight_name != "model.embed_tokens.weight" else 1
            view.normal_(0.0, fan_in**-0.5, generator=generator)
    return LoadedModel(f"random:{name}", decoder, config, Path(f"random:{name}"), "random", dtype, False, {})


def open_model(name: str, dtype: str = "auto", device: str = "cpu") -> LoadedModel:
    """A model by the name that the programs' --model takes: `random:NAME`, or as `minillm generate` knows it."""
    if name.startswith("random:"):
        return random_model(name.partition(":")[2], dtype=dtype, device=device)
    from minillm.models.loader import load_model

    return load_model(name, dtype, device)
