"""transformers' own model with the very weights that this runtime loaded, and its `generate` as the thing to match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minillm.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from minillm.models.decoder import Decoder


def build_llama(decoder: Decoder, dtype: torch.dtype) -> Any:
    """A `LlamaForCausalLM` in `dtype` with the weights of a float32 `decoder` (a Llama model with plain rope).

    Dequantising once and giving both sides the same numbers takes a second; `from_pretrained(gguf_file=...)` takes
    half a minute and gives the same model.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = decoder.config
    if config.architecture != "llama" or config.rope.kind != "default":
        raise UnsupportedModelError(f"no baseline for {config.architecture} with {config.rope.kind} rope")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        )
    )
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, weight in decoder.weight_views().items():
            parameters.pop(name).copy_(weight)
    if parameters:
        raise UnsupportedModelError(f"the baseline has parameters without a weight: {', '.join(sorted(parameters))}")
    model.generation_config.eos_token_id = None
    return model.eval().to(dtype)


def greedy(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, pad_id: int = 0) -> list[list[int]]:
    """`generate` on a static batch, left padded as transformers wants it: exactly `new_tokens` ids per prompt.

    End-of-sequence ids are ordinary tokens here, as under `ignore_eos`.
    """
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=pad_id)
    rows: list[list[int]] = out[:, width:].tolist()
    return rows
