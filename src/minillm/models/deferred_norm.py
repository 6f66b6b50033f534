"""An RMS norm that is applied behind the product of what it normalises.

A row's norm is one factor, 1 / rms, for the whole row: ``norm(r) @ W = (r * weight) @ W / rms(r)``. So what adds to the
residual stream also stores ``r * weight`` and sums of squares, and what reads the next product's result applies the
factor. It saves the launch in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

SQUARES_COLUMNS = 64
"""Columns of a row that a sum of squares is of."""


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """Rows of which the norm is still to be applied.

    `x` [T, H] = residual * weight, rounded to the model's dtype. `squares` float32 [ceil(H / 64), T]: sums of the
    residual's squares over each 64 columns; its rows at any stride.
    """

    x: Tensor
    squares: Tensor
    eps: float

    @property
    def hidden(self) -> int:
        """H."""
        return self.x.shape[1]
