"""The Llama-family decoder: Llama, SmolLM2, Mistral, Qwen2, Qwen3.

One flattened batch of T tokens goes through every layer; where a token's keys and values live is the attention
context's business, so the same code serves prefill, decode and mixed steps on any device.

    hidden -> norm -> qkv product -> (q/k norm) -> rope -> attend -> output product -> + residual
           -> norm -> gate-up product -> silu(gate) * up -> down product -> + residual
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.attention.interface import AttentionContext, LayerAttention
from minillm.models.config import ModelConfig
from minillm.models.layers import RMSNorm, RotaryEmbedding, silu_and_mul
from minillm.models.linear import DenseLinear, Linear

# A layer's products, and the checkpoint's projections whose rows are stacked in each.
LAYER_LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


class DecoderLayer:
    """One transformer block. q, k and v share one product, and so do gate and up."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.index = index
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps, dtype, device)
        self.post_attention_norm = RMSNorm(hidden, config.rms_norm_eps, dtype, device)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype, device) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype, device) if config.qk_norm else None
        self.qkv: Linear = DenseLinear.empty(hidden, q_size + 2 * kv_size, config.qkv_bias, dtype, device)
        self.output: Linear = DenseLinear.empty(q_size, hidden, config.output_bias, dtype, device)
        self.gate_up: Linear = DenseLinear.empty(hidden, 2 * inner, config.mlp_bias, dtype, device)
        self.down: Linear = DenseLinear.empty(inner, hidden, config.mlp_bias, dtype, device)

    def attention(
        self, hidden: Tensor, rope: RotaryEmbedding, cos: Tensor, sin: Tensor, attn: AttentionContext
    ) -> Tensor:
        """Normalised hidden [T, H] -> attention output [T, H]."""
        num_q, num_kv = self.num_heads, self.num_kv_heads
        heads = self.qkv(hidden).view(-1, num_q + 2 * num_kv, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q = rope.rotate(self.q_norm(heads[:, :num_q]), cos, sin)
            k = rope.rotate(self.k_norm(heads[:, num_q : num_q + num_kv]), cos, sin)
        else:
            rotated = rope.rotate(heads[:, : num_q + num_kv], cos, sin)
            q, k = rotated[:, :num_q], rotated[:, num_q:]
        out = attn.attend(self.index, q, k, heads[:, num_q + num_kv :])
        return self.output(out.reshape(-1, num_q * self.head_dim))

    def mlp(self, hidden: Tensor) -> Tensor:
        """Normalised hidden [T, H] -> [T, H]."""
        return self.down(silu_and_mul(self.gate_up(hidden)))


class Decoder:
    """A whole model. Weights are uninitialised until a loader has written every view of :meth:`weight_views`.

    Attributes:
        config: the model's :class:`ModelConfig`.
        dtype: of weights, activations, and of the keys and values given to attention.
        device: where the weights are.
        layer_attention: per layer, the scale and window that the attention backend is built with.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=self.device)
        self.layers = [DecoderLayer(config, index, dtype, self.device) for index in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, self.device)
        self.rope = RotaryEmbedding(config.rope, config.head_dim, dtype, self.device)
        head_weight = self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        self.head: Linear = DenseLinear(head_weight)
        self.layer_attention = [
            LayerAttention(scale=config.attention_scale, sliding_window=window) for window in config.sliding_windows
        ]

    def forward(self, input_ids: Tensor, positions: Tensor, attn: AttentionContext) -> Tensor:
        """One step over T tokens.

        Args:
            input_ids: int64 [T].
            positions: int64 [T], each token's place in its own sequence.
            attn: stores this step's keys and values, and attends.

        Returns:
            Normalised hidden states [T, hidden_size] in ``dtype``.
        """
        # The residual stream stays in float32 whatever the dtype: it sums up every layer's rounding otherwise, and
        # the norms read it in float32 anyway.
        residual = torch.nn.functional.embedding(input_ids, self.embedding).float()
        cos, sin = self.rope.tables(positions)
        hidden = None
        for layer in self.layers:
            hidden = layer.input_norm(residual) if hidden is None else layer.input_norm.add_and_norm(hidden, residual)
            hidden = layer.attention(hidden, self.rope, cos, sin, attn)
            hidden = layer.post_attention_norm.add_and_norm(hidden, residual)
            hidden = layer.mlp(hidden)
        assert hidden is not None  # num_layers >= 1
        return self.norm.add_and_norm(hidden, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Rows [R, hidden_size] of :meth:`forward`'s result -> float32 logits [R, vocab_size]."""
        return self.head(hidden).float()

    def untie(self, head_weight: Tensor) -> None:
        """Give the output head a weight [vocab_size, hidden_size] of its own."""
        self.head = DenseLinear(head_weight)

    def transform_linears(self, transform: Callable[[tuple[str, ...], Linear], Linear]) -> None:
        """Replace every linear layer by ``transform(names, layer)``; names are the checkpoint tensors stacked in it."""
        for layer in self.layers:
            prefix = f"model.layers.{layer.index}."
            for attribute, projections in LAYER_LINEARS.items():
                names = tuple(f"{prefix}{projection}.weight" for projection in projections)
                setattr(layer, attribute, transform(names, getattr(layer, attribute)))
        tied = isinstance(self.head, DenseLinear) and self.head.weight is self.embedding
        self.head = transform(("model.embed_tokens.weight" if tied else "lm_head.weight",), self.head)

    def weight_views(self) -> dict[str, Tensor]:
        """Checkpoint name (Transformers' naming) -> the tensor, or the rows of a fused one, that it fills."""
        views = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tie_word_embeddings:
            views["lm_head.weight"] = _dense(self.head).weight
        config = self.config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        for layer in self.layers:
            prefix = f"model.layers.{layer.index}."
            views[prefix + "input_layernorm.weight"] = layer.input_norm.weight
            views[prefix + "post_attention_layernorm.weight"] = layer.post_attention_norm.weight
            if layer.q_norm is not None and layer.k_norm is not None:
                views[prefix + "self_attn.q_norm.weight"] = layer.q_norm.weight
                views[prefix + "self_attn.k_norm.weight"] = layer.k_norm.weight
            inner = config.intermediate_size
            sizes = {"qkv": (q_size, kv_size, kv_size), "gate_up": (inner, inner)}
            for attribute, projections in LAYER_LINEARS.items():
                linear = _dense(getattr(layer, attribute))
                _add_rows(views, prefix, projections, sizes.get(attribute, (config.hidden_size,)), linear)
        return views


def _dense(linear: Linear) -> DenseLinear:
    if not isinstance(linear, DenseLinear):
        raise TypeError("weights are packed already; they cannot be loaded again")
    return linear


def _add_rows(
    views: dict[str, Tensor], prefix: str, names: tuple[str, ...], sizes: tuple[int, ...], linear: DenseLinear
) -> None:
    for name, weight in zip(names, linear.weight.split(sizes), strict=True):
        views[f"{prefix}{name}.weight"] = weight
    if linear.bias is not None:
        for name, bias in zip(names, linear.bias.split(sizes), strict=True):
            views[f"{prefix}{name}.bias"] = bias
