"""Tiny random models made with Transformers' own classes, and an attention context to run them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.attention.interface import LayerAttention

VOCAB = 131


class ContiguousAttention:
    """One sequence, keys and values in plain growing tensors; the masked softmax written out."""

    def __init__(self, layers: list[LayerAttention]) -> None:
        self.layers = layers
        self.keys: list[Tensor | None] = [None] * len(layers)
        self.values: list[Tensor | None] = [None] * len(layers)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past_k, past_v = self.keys[layer], self.values[layer]
        keys = k.clone() if past_k is None else torch.cat((past_k, k))
        values = v.clone() if past_v is None else torch.cat((past_v, v))
        self.keys[layer], self.values[layer] = keys, values
        options = self.layers[layer]
        repeat = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(repeat, 1)) * options.scale
        if options.soft_cap is not None:
            scores = options.soft_cap * (scores / options.soft_cap).tanh()
        position = torch.arange(keys.shape[0])
        query_position = position[keys.shape[0] - q.shape[0] :, None]
        visible = position <= query_position
        if options.sliding_window is not None:
            visible &= position > query_position - options.sliding_window
        scores = scores.float().masked_fill(~visible, float("-inf"))
        weights = scores.softmax(-1).to(q.dtype)
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(repeat, 1))


def run(decoder: Any, ids: list[int], chunks: list[int] | None = None) -> Tensor:
    """Logits [len(ids), vocab] of one sequence, in one go or in chunks of the given lengths."""
    attn = ContiguousAttention(decoder.layer_attention)
    tokens = torch.tensor(ids)
    positions = torch.arange(len(ids))
    rows = []
    with torch.inference_mode():
        for ids_part, position_part in zip(
            tokens.split(chunks or len(ids)), positions.split(chunks or len(ids)), strict=True
        ):
            rows.append(decoder.compute_logits(decoder.forward(ids_part, position_part, attn)))
    return torch.cat(rows)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def make_reference(family: str, **options: Any) -> Any:
    """A tiny causal LM of Transformers with random weights (norms and biases random too), eager attention, float32."""
    import transformers

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = classes[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "attn_implementation": "eager",
    }
    hidden = options.get("hidden_size", settings["hidden_size"])
    settings["initializer_range"] = 1.2 / hidden**0.5  # products of order one, whatever the width
    torch.manual_seed(7)
    model = model_class(config_class(**{**settings, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(0, 0.3)
    return model


def reference_logits(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder
