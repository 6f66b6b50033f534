"""Inputs of the attention benchmarks: one step's batch over paged caches, its reference, and the correctness gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from minillm.attention.interface import LayerAttention
from minillm.attention.reference import paged_attention_reference
from minillm.core.errors import MiniLLMError
from minillm.memory.paged_kv_cache import KVCacheSpec, PagedKVCache

ERROR_BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Greatest ||out - ref|| / ||ref|| of a correct path, by the dtype of q, K and V; the reference is float32 on the same
inputs. Rounding the result alone costs 2^-11.8 (float16) or 2^-8.8 (bfloat16) in this measure, rounding the softmax
weights as much again; float32 paths differ by the order of summation and the exponential's last bits."""

WORST_ROW_FACTOR = 4.0
"""A single (token, head) row may err by this many times the bound of the whole."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class WrongResultError(MiniLLMError):
    """A path's result is outside the bound of its dtype, so it is not timed."""


def dtype_name(dtype: torch.dtype) -> str:
    """'float16' for torch.float16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads and storage of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        """1 / sqrt(head_dim)."""
        return 1.0 / math.sqrt(self.head_dim)

    def kv_bytes(self, context_lens: Sequence[int]) -> int:
        """Bytes of K and V of all sequences, each read once."""
        return 2 * sum(context_lens) * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def flops(self, query_lens: Sequence[int], context_lens: Sequence[int]) -> int:
        """Floating-point operations of both products over the visible (query, key) pairs of causal attention."""
        pairs = sum(q * c - q * (q - 1) // 2 for q, c in zip(query_lens, context_lens, strict=True))
        return 4 * pairs * self.num_heads * self.head_dim

    def columns(self) -> dict[str, str]:
        """The CSV columns that say what was computed."""
        return {
            "num_heads": str(self.num_heads),
            "num_kv_heads": str(self.num_kv_heads),
            "head_dim": str(self.head_dim),
            "block_size": str(self.block_size),
            "dtype": dtype_name(self.dtype),
        }


class AttentionBatch:
    """One step's attention inputs: `layers` paged caches of random K and V behind one scrambled block table.

    As in a model, all layers share the block table and the lengths, so a plan made for the step serves every layer,
    and a replay over the layers finds each layer's K and V cold if together they exceed the cache.

    ``q`` is [layers, T, num_heads, head_dim]; ``block_tables`` int32 [S, W], ``seq_lens`` int32 [S] (tokens of each
    sequence with its queries, which stand at its end) and ``query_start`` int32 [S + 1] are on `device`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        device: torch.device,
        layers: int = 1,
        seed: int = 0,
    ) -> None:
        self.shape = shape
        self.query_lens = list(query_lens)
        self.context_lens = list(context_lens)
        self.device = device
        self.layers = layers
        self.params = LayerAttention(scale=shape.scale)
        self.counts = [-(-length // shape.block_size) for length in context_lens]
        spec = KVCacheSpec(
            num_layers=layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            dtype=shape.dtype,
        )
        self.cache = PagedKVCache(spec, sum(self.counts), device)
        generator = torch.Generator(device).manual_seed(seed)
        self.cache.store.normal_(generator=generator)
        order = torch.randperm(sum(self.counts), generator=torch.Generator().manual_seed(seed))
        self.tables = [part.tolist() for part in order.split(self.counts)]
        tables = torch.zeros(len(self.counts), max(self.counts), dtype=torch.int32)
        for row, table in enumerate(self.tables):
            tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        self.block_tables = tables.to(device)
        self.seq_lens = torch.tensor(self.context_lens, dtype=torch.int32, device=device)
        starts = torch.tensor([0, *self.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.query_start = starts.to(device)
        tokens = sum(self.query_lens)
        self.q = torch.empty(layers, tokens, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device)
        self.q.normal_(generator=generator)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one query."""
        return all(length == 1 for length in self.query_lens)

    def k(self, layer: int) -> Tensor:
        """Keys of `layer` [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.cache.k(layer)

    def v(self, layer: int) -> Tensor:
        """Values of `layer`, as :meth:`k`."""
        return self.cache.v(layer)

    def new_output(self) -> Tensor:
        """An output [T, num_heads, head_dim] full of NaN: what a path leaves unwritten fails the gate."""
        return torch.full_like(self.q[0], float("nan"))

    def contiguous_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [S, num_kv_heads, context, head_dim] without pages; all contexts must be equal."""
        length = self.context_lens[0]
        if any(other != length for other in self.context_lens):
            raise ValueError(f"context_lens={self.context_lens} must be equal to be stacked")
        tables = self.block_tables.long()
        shape = (len(self.tables), self.shape.num_kv_heads, -1, self.shape.head_dim)
        keys, values = (
            pages[tables].transpose(1, 2).reshape(shape)[:, :, :length].contiguous()
            for pages in (self.k(layer), self.v(layer))
        )
        return keys, values

    def reference(self, layer: int) -> Tensor:
        """The result of `layer` in float32 [T, num_heads, head_dim]."""
        return self._references[layer] if layer in self._references else self._compute(layer)

    @cached_property
    def _references(self) -> dict[int, Tensor]:
        return {}

    def _compute(self, layer: int) -> Tensor:
        self._references[layer] = paged_attention_reference(
            self.q[layer].float(),
            self.k(layer),
            self.v(layer),
            self.tables,
            self.query_lens,
            self.context_lens,
            self.params,
        )
        return self._references[layer]


@dataclass(frozen=True, slots=True)
class Error:
    """Distance of a result from the reference: of the whole, of the worst (token, head) row, greatest absolute."""

    relative: float
    worst_row: float
    absolute: float

    def within(self, bound: float) -> bool:
        """Whether the whole and each row are in bounds; NaN never is."""
        return self.relative <= bound and self.worst_row <= bound * WORST_ROW_FACTOR


def error_of(out: Tensor, reference: Tensor) -> Error:
    """Compare `out`, of the same shape but for splits of its leading dimensions, with a float32 `reference`."""
    if out.numel() == reference.numel() and out.shape[-1] == reference.shape[-1]:
        out = out.reshape(reference.shape)
    else:
        raise ValueError(f"result of shape {tuple(out.shape)} against a reference of {tuple(reference.shape)}")
    if not out.numel():
        return Error(0.0, 0.0, 0.0)
    difference = out.float() - reference
    rows = difference.norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-30)
    whole = difference.norm() / reference.norm().clamp_min(1e-30)
    # .max() of a tensor with NaN is NaN, so unwritten rows show in all three.
    return Error(*torch.stack([whole, rows.max(), difference.abs().max()]).tolist())


def gate(name: str, out: Tensor, reference: Tensor, dtype: torch.dtype) -> Error:
    """The error of a path's result; :class:`WrongResultError` if it is outside the bound of `dtype`."""
    error = error_of(out, reference)
    bound = ERROR_BOUNDS[dtype]
    if not error.within(bound):
        raise WrongResultError(
            f"{name} is wrong and was not timed: relative error {error.relative:.3g} (limit {bound:.3g}), worst row "
            f"{error.worst_row:.3g} (limit {bound * WORST_ROW_FACTOR:.3g}) for {dtype_name(dtype)}"
        )
    return error


def worst(errors: Sequence[Error]) -> Error:
    """The greatest of each kind of error."""
    result = errors[0]
    for error in errors[1:]:
        result = replace(
            result,
            relative=max(result.relative, error.relative),
            worst_row=max(result.worst_row, error.worst_row),
            absolute=max(result.absolute, error.absolute),
        )
    return result
