"""Writes GGUF files from tiny Transformers models, by the rules of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def llama_cpp_permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, *middle, last = name.split(".")
    return f"blk.{layer}.{_NAMES['.'.join(middle)]}.{last}"


def write_gguf(
    model: Any,
    path: Path,
    qtype: str = "F32",
    drop: tuple[str, ...] = (),
    extra_fields: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """`model` as a GGUF file; matrices in `qtype`, vectors in F32, tensors named in `drop` (GGUF names) left out."""
    config = model.config
    arch = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for key, value in (extra_fields or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        (writer.add_uint32 if isinstance(value, int) else add)(f"{arch}.{key}", value)
    kind = gguf.GGMLQuantizationType[qtype]
    for name, tensor in model.state_dict().items():
        target = gguf_name(name)
        if target in drop or (target == "output.weight" and config.tie_word_embeddings):
            continue
        data = tensor.float().numpy()
        if arch == "llama" and ".q_proj." in name:
            data = llama_cpp_permute(data, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            data = llama_cpp_permute(data, config.num_key_value_heads)
        if data.ndim == 1 or qtype == "F32":
            writer.add_tensor(target, data)
        else:
            writer.add_tensor(target, gguf.quants.quantize(data, kind), raw_dtype=kind)
    for name, data in (extra_tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
