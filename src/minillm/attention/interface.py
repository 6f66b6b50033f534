"""What a model layer needs from attention, whatever the device and the cache behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention parameters of one decoder layer.

    ``scale`` multiplies q.k; ``sliding_window`` W lets a token see W positions including itself (None: all);
    ``soft_cap`` c replaces a score s by c * tanh(s / c) (None: off).
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None


class AttentionContext(Protocol):
    """Attention over one step's flattened batch (decode rows first, then prefill chunks)."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v of the step's T tokens into the cache, attend, and return the result.

        Shapes: q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] with rope already applied;
        returns [T, num_heads, head_dim] in q's dtype.
        """
        ...
