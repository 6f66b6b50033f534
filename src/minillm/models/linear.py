"""Linear layers behind one call: plain, and packed for the CPU.

On a CPU a decode step is bound by the bytes of the weights, a prefill by multiplications. So a weight may be kept in
two forms (:class:`RowSwitchLinear`): a quantised file's own codes for a few rows, and for more of them bfloat16 blocked
for oneDNN where the CPU multiplies bfloat16, or else plain float32. docs/cpu.md has the measurements behind the choice
and the command that makes them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from minillm.models.gguf import half_column, nibbles

# Up to this many rows the product of codes is the quicker one. One thread, microseconds of CPU time for SmolLM2-135M:
# - against oneDNN's bfloat16 (Xeon with AMX), 4-bit codes / bfloat16 at 1, 4, 8, 12, 16 rows: gate-up 576->3072
#   156/467, 235/445, 463/481, 633/517, 826/534; down 1536->576 76/206, 112/214, 199/203, 284/220, 370/231; the others
#   alike. 8-bit codes, head 576->49152, ms at 1 and 4 rows: 4.2/5.5, 7.0/5.4.
# - against float32 (the same machine limited to AVX2) at 1, 8, 16 rows: gate-up 249/713, 806/1606, 1670/2589;
#   8-bit codes, head, ms: 6.7/12.8, 26/36, 50/45.
# torch 2.13, 2026-11-29: python -m minillm.bench.cpu_products.
INT4_MAX_ROWS = 8
INT8_MAX_ROWS = 2
INT4_MAX_ROWS_BESIDE_FLOAT32 = 16
INT8_MAX_ROWS_BESIDE_FLOAT32 = 8

GROUP_SIZE = 32
"""Weights that share a scale in Q4_0, Q4_1 and Q8_0."""

_ROW_MULTIPLE = 16  # torch's 4-bit kernel wants whole tiles of outputs
_BATCH_HINT = 64  # rows that oneDNN lays the weight out for; 1, 16 and 256 gave the same times
_ROWS_AT_ONCE = 4096  # packed per call: codes pass through int32


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


class CodesLinear:
    """A product with GGUF codes in torch's 4-bit CPU layout: ``w = (code - 8) * scale + zero`` per group of 32 inputs.

    That form holds Q4_0 (zero = 0) and Q4_1 (zero = min + 8 * scale) with their own codes, not quantised again. Q8_0
    is the sum of two such products: ``q + 128 = 16 * high + low``, so q * d is ``(high - 8) * 16 d`` plus
    ``(low - 8) * d + 8 d``, done as one product over the inputs twice. Accumulation is float32, but inputs, scales and
    zeros are bfloat16, the one dtype in which torch has a fast kernel: a weight changes about as much as by being
    rounded to bfloat16 itself.
    """

    def __init__(self, codes: Tensor, scales: Tensor, zeros: Tensor, inputs_twice: bool = False) -> None:
        """codes uint8 [N, K] of 0..15, scales and zeros float32 [N, K / 32]; N a multiple of 16.

        With `inputs_twice`, K is twice the layer's inputs.
        """
        packed = [torch._convert_weight_to_int4pack_for_cpu(part.int(), 1) for part in codes.split(_ROWS_AT_ONCE)]
        self.codes = torch.cat(packed)
        self.scales_and_zeros = torch.stack((scales, zeros), -1).transpose(0, 1).to(torch.bfloat16).contiguous()
        self.inputs_twice = inputs_twice
        self.out_features = codes.shape[0]
        self.in_features = codes.shape[1] // 2 if inputs_twice else codes.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """x bfloat16 [T, in_features] -> bfloat16 [T, out_features]."""
        if self.inputs_twice:
            x = torch.cat((x, x), -1)
        return torch._weight_int4pack_mm_for_cpu(x.contiguous(), self.codes, GROUP_SIZE, self.scales_and_zeros)

    @classmethod
    def from_blocks(cls, parts: list[tuple[str, Tensor]]) -> CodesLinear | None:
        """Stack GGUF tensors by rows: (type name, uint8 [rows, bytes per row]) each. None where they do not fit."""
        kinds = {kind for kind, _ in parts}
        if not (kinds <= {"Q4_0", "Q4_1"} or kinds == {"Q8_0"}) or sum(len(raw) for _, raw in parts) % _ROW_MULTIPLE:
            return None
        columns = zip(*(_unpack(kind, raw) for kind, raw in parts), strict=True)
        codes, scales, zeros = (torch.cat(column) for column in columns)
        return cls(codes, scales, zeros, inputs_twice=kinds == {"Q8_0"})


def _unpack(kind: str, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One GGUF tensor's rows -> 4-bit codes uint8 [N, K], scales and zeros float32 [N, K / 32]."""
    rows = raw.shape[0]
    if kind == "Q8_0":
        blocks = raw.reshape(-1, 34)
        scale = half_column(blocks, 0).view(rows, -1)
        shifted = blocks[:, 2:].reshape(rows, -1) ^ 128  # two's complement -> q + 128
        codes = torch.cat((shifted >> 4, shifted & 15), -1)
        return codes, torch.cat((16 * scale, scale), -1), torch.cat((torch.zeros_like(scale), 8 * scale), -1)
    blocks = raw.reshape(-1, 18 if kind == "Q4_0" else 20)
    scale = half_column(blocks, 0).view(rows, -1)
    if kind == "Q4_0":
        return nibbles(blocks[:, 2:]).view(rows, -1), scale, torch.zeros_like(scale)
    return nibbles(blocks[:, 4:]).view(rows, -1), scale, half_column(blocks, 2).view(rows, -1) + 8 * scale


def cpu_packs_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX) and torch's oneDNN may use it.

    oneDNN is asked as well: an environment can limit its instruction set (ONEDNN_MAX_CPU_ISA).
    """
    return (
        torch.backends.mkldnn.is_available()
        and torch.cpu._is_avx512_bf16_supported()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def cpu_multiplies_codes() -> bool:
    """Whether torch has vectorised 4-bit products for this CPU."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class OneDnnLinear:
    """A bfloat16 linear layer whose weight is laid out for oneDNN once, not at each call."""

    def __init__(self, dense: DenseLinear) -> None:
        self.in_features, self.out_features = dense.in_features, dense.out_features
        self.bias = dense.bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight.default(dense.weight, _BATCH_HINT)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """x bfloat16 [T, in_features] -> bfloat16 [T, out_features]."""
        return self._product(x, self._weight, self.bias, "none", [], "")


class RowSwitchLinear:
    """One weight in two forms: codes for a few rows, `many` for more, in the dtype of `many`.

    The two differ by rounding, as products of different batch sizes do anyway.
    """

    def __init__(self, codes: CodesLinear, many: DenseLinear | OneDnnLinear) -> None:
        self.in_features, self.out_features = many.in_features, many.out_features
        self.codes = codes
        self.many = many
        self.bias = many.bias
        self._float32 = isinstance(many, DenseLinear)
        if self._float32:
            self.max_rows = INT8_MAX_ROWS_BESIDE_FLOAT32 if codes.inputs_twice else INT4_MAX_ROWS_BESIDE_FLOAT32
        else:
            self.max_rows = INT8_MAX_ROWS if codes.inputs_twice else INT4_MAX_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features], both in the dtype of `many`."""
        if x.shape[0] > self.max_rows:
            return self.many(x)
        out = self.codes(x.bfloat16()).float() if self._float32 else self.codes(x)
        return out if self.bias is None else out.add_(self.bias)


def pack(dense: DenseLinear, stored: list[tuple[str, Tensor]]) -> Linear:
    """The quickest form of a CPU weight.

    Args:
        dense: loaded already; float32, or bfloat16 where the CPU multiplies it.
        stored: the GGUF tensors stacked in it, (type name, uint8 rows) each; empty to leave their codes unused.
    """
    many = OneDnnLinear(dense) if dense.weight.dtype == torch.bfloat16 else dense
    codes = CodesLinear.from_blocks(stored) if stored else None
    return many if codes is None else RowSwitchLinear(codes, many)
