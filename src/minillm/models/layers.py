"""Building blocks of the decoder: RMS norm, rotary embeddings, gated activation.

Rounding follows Transformers' modelling code, so that float32 logits agree to their last few bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.models.config import RopeConfig

# Methods, since x.bfloat16() dispatches in half the time of x.to(torch.bfloat16).
_ROUND = {torch.float32: Tensor.float, torch.bfloat16: Tensor.bfloat16, torch.float16: Tensor.half}


class RMSNorm:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension (https://arxiv.org/abs/1910.07467).

    Computed in float32 and rounded once, to the model's dtype; the weight is kept in float32.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=torch.float32, device=device)
        self._round = _ROUND[dtype]
        self._eps = torch.tensor(eps, dtype=torch.float32, device=device)
        self._inverse_size = 1.0 / size

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size], any floating dtype -> the same shape in the model's dtype."""
        wide = x.float()
        # norm^2 / size + eps in two small operations; square, mean, add would be four, and dispatch is what costs.
        norm = torch.linalg.vector_norm(wide, 2, -1, True)
        scale = torch.addcmul(self._eps, norm, norm, value=self._inverse_size).rsqrt_()
        return self._round((wide * scale).mul_(self.weight))

    def add_and_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to `residual` in place, and return its norm: the two always come together between layers."""
        residual.add_(x)
        return self(residual)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angular frequency of each rotated pair, float32 [head_dim / 2], scaling included.

    default: theta^(-2i / head_dim) (https://arxiv.org/abs/2104.09864); linear: https://arxiv.org/abs/2306.15595;
    yarn: https://arxiv.org/abs/2309.00071; llama3: ``apply_scaling`` of Meta's Llama 3.1 reference code.
    """
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    inv_freq = 1.0 / powers
    if rope.kind == "default":
        return inv_freq
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "divisors":
        return inv_freq / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, inv_freq)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, powers, head_dim)
    raise ValueError(f"rope kind {rope.kind!r}")


def _llama3_frequencies(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    wavelength = 2 * math.pi / inv_freq
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    scaled = torch.where(wavelength > longest, inv_freq / rope.factor, inv_freq)
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * scaled / rope.factor + blend * scaled
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, scaled)


def _yarn_frequencies(rope: RopeConfig, powers: Tensor, head_dim: int) -> Tensor:
    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


class RotaryEmbedding:
    """Rotates q and k by position, first half of a head paired with its second half (Transformers' order).

    cos and sin are made from the positions once a step: 32 to 64 values a token are cheaper than a table to keep,
    and no position is out of range.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.half = head_dim // 2
        self.inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self.attention_factor = rope.attention_factor
        self.dtype = dtype

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [T] -> cos and signed sin, each [T, 1, head_dim] in the model's dtype.

        The sine of the first half is negated: x * cos + swap_halves(x) * signed_sin is then the rotation.
        """
        angles = positions[:, None, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype)

    def rotate(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """x [T, heads, head_dim] -> a new tensor, rotated."""
        return torch.addcmul(x * cos, x.roll(self.half, -1), signed_sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * I], gate first -> silu(gate) * up, [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate).mul_(up)
