"""Linear layers behind one call: plain, and packed for this CPU."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Linear(Protocol):
    """x [T, in_features] -> [T, out_features], both in the model's dtype."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """``x @ weight.T + bias`` with weight [out_features, in_features] and bias [out_features] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias

    @classmethod
    def empty(
        cls, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> DenseLinear:
        """Uninitialised; a loader fills it."""
        return cls(
            torch.empty(out_features, in_features, dtype=dtype, device=device),
            torch.empty(out_features, dtype=dtype, device=device) if bias else None,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)
