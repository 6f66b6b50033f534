"""Paged attention on the CPU: a vectorised gather of blocks, then PyTorch's fused attention on contiguous K and V.

Per layer a decode step costs two writes, two gathers and one attention call, whatever the number of requests; all
that depends on the step alone (gather indices, masks, views of the workspace) is made once and shared by the layers.

Measured on one core of a Sapphire Rapids machine, torch 2.13, SmolLM2-135M shapes (9/3 heads, head_dim 64, block 16),
K and V cold in the first cache, microseconds per layer (minimum of 200 runs over 8 layers):

=============================================  ============  ============  =============  =============
attention over gathered K and V                1 x 112 fp32  1 x 112 bf16  16 x 112 fp32  16 x 112 bf16
=============================================  ============  ============  =============  =============
fused, KV heads outside the tokens (here)      13            14            240            166
fused, token-major operand                     17            17            243            181
bmm + softmax + bmm                            17            65            229            254
matmul + softmax + matmul, token-major views   22            86            550            438
gather of K and V                              3             3             263            120
=============================================  ============  ============  =============  =============

The gather costs as much as the attention, because it is what brings K and V out of memory. Tried against it: a
contiguous copy of the decode rows that is kept between steps and only grows by the new token saved nothing at 16 x 80
tokens and 11 % of the step without its matrix products at 16 x 300 (the fused call then reads from memory itself), so
it was left out. Reading blocks in place through a batched product per block, which torch can do without a copy, was
faster by a third in fp32 only, and needs blocks that no two rows share, so prefix sharing rules it out. Cutting a
batch so that the gathered part fits the second-level cache changed nothing beyond noise.

bmm would also round bf16 scores to bf16; the fused call keeps them in fp32. The grouped queries of one KV head are
passed as its query rows ("folded") in fp32 and from ratio 3 on; below that in half precision the fused call's own
grouping is faster (16 x 100, bf16, two threads, own grouping / folded: 220 / 263 us at 16/8 heads, 146 / 101 at 14/2).
At 9/3 heads the two are even by themselves, but inside a decode step of 16 rows on two threads folding takes 97 us
instead of 152.

In the gathered pages the K and V of one sequence lie together, so that the thread that gathers them is mostly the one
that attends to them: 7 to 10 % of the fused call on two threads, against all of K in front of all of V.

Rows of unlike length are sorted into a few calls (:mod:`minillm.attention.cpu_plan`), so one long context does not
make every row pay for its length. A fresh prompt attends to its own k and v directly, without reading the cache back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention import cpu_plan
from minillm.attention.cpu_plan import IntArray
from minillm.attention.interface import LayerAttention
from minillm.attention.metadata import AttentionMetadata, PrefillSpan
from minillm.memory.paged_kv_cache import PagedKVCache

FOLD_FROM_RATIO = 3
"""In half precision, query heads per KV head from which they are passed as query rows."""


class GatherWorkspace:
    """Buffers for gathered K and V, kept between steps (fresh large allocations cost page faults on every call)."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def take(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised [rows, width] tensor; the next call may return the same memory."""
        needed = rows * width
        if self._buffer.numel() < needed or self._buffer.dtype != dtype:
            self._buffer = torch.empty(needed * 5 // 4, dtype=dtype)
        return self._buffer[:needed].view(rows, width)


@dataclass(slots=True)
class _Gather:
    """K and V of B sequences, padded to one length: where they come from and the views that attention reads."""

    index: Tensor
    """int64 [B * 2 * num_kv_heads * blocks]: rows of ``cache.page_rows[layer]``, each sequence's K, then its V."""
    pages: Tensor
    """[len(index), block_size * head_dim]: the gathered rows."""
    keys: Tensor
    """[B, num_kv_heads, length, head_dim], a view of `pages`; likewise `values`."""
    values: Tensor

    def run(self, cache: PagedKVCache, layer: int) -> None:
        torch.index_select(cache.page_rows[layer], 0, self.index, out=self.pages)


@dataclass(slots=True)
class _DecodeCall:
    """Decode rows of like length: `rows` int64 [B] of the batch (None: all of its decode rows, in order)."""

    rows: Tensor | None
    gather: _Gather
    mask: Tensor | None
    """Additive [B, 1, 1, length], or None where every row sees all of it."""


@dataclass(slots=True)
class _PrefillCall:
    """Prefill chunks of like shape. A single chunk is the slice [start, stop); several are padded by index."""

    start: int
    stop: int
    token_index: Tensor | None
    """int64 [B * max_query]: rows of q (padding repeats a chunk's first token), or None for a single chunk."""
    valid: Tensor | None
    """int64: which of those are no padding, in the order of `target`."""
    target: Tensor | None
    """int64: rows of the result that the valid ones go to."""
    batch: int
    gather: _Gather | None
    """None: the chunks are whole prompts so far, and attend causally to their own k and v."""
    mask: Tensor | None


@dataclass(slots=True)
class _StepPlan:
    """The calls of one step for one sliding window."""

    decodes: list[_DecodeCall]
    prefills: list[_PrefillCall]


class PagedAttentionContext:
    """Attention of one step over the paged cache; built once per step, used by every layer.

    `layers[i]` are layer i's parameters. `workspace` may be kept from step to step; two contexts that share one must
    not be used at the same time.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        layers: Sequence[LayerAttention],
        metadata: AttentionMetadata,
        workspace: GatherWorkspace | None = None,
    ) -> None:
        self.cache = cache
        self.layers = layers
        self.metadata = metadata
        self._workspace = workspace if workspace is not None else GatherWorkspace()
        self._slot_rows = cache.slot_rows(metadata.slot_mapping)
        self._plans: dict[tuple[int | None, int], _StepPlan] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [T, num_kv_heads, head_dim] and return attention of q [T, num_heads, head_dim], in q's dtype."""
        cache, params = self.cache, self.layers[layer]
        cache.write_rows(layer, k, v, self._slot_rows)
        key = (params.sliding_window, q.shape[1])
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._build(*key)
        dtype = q.dtype
        if dtype != cache.spec.dtype:
            q, k, v = q.to(cache.spec.dtype), k.to(cache.spec.dtype), v.to(cache.spec.dtype)
        if not plan.prefills and len(plan.decodes) == 1:
            out = self._decode(plan.decodes[0], layer, params, q)
            return out if out.dtype == dtype else out.to(dtype)
        decodes = self.metadata.num_decodes
        out = torch.empty(q.shape, dtype=q.dtype)
        for call in plan.decodes:
            if call.rows is None:
                out[:decodes] = self._decode(call, layer, params, q[:decodes])
            else:
                out.index_copy_(0, call.rows, self._decode(call, layer, params, q.index_select(0, call.rows)))
        for prefill in plan.prefills:
            self._prefill(prefill, layer, params, q, k, v, out)
        return out.to(dtype)

    def _decode(self, call: _DecodeCall, layer: int, params: LayerAttention, q: Tensor) -> Tensor:
        """Attention of B single-token rows q [B, num_heads, head_dim]; the same shape back."""
        gather = call.gather
        gather.run(self.cache, layer)
        batch, num_heads, head_dim = q.shape
        num_kv_heads = self.cache.spec.num_kv_heads
        ratio = num_heads // num_kv_heads
        if params.soft_cap is not None:
            folded = q.reshape(batch, num_kv_heads, ratio, head_dim)
            out = _capped_attention(folded, gather.keys, gather.values, call.mask, params)
        elif ratio >= FOLD_FROM_RATIO or q.dtype == torch.float32:
            folded = q.reshape(batch, num_kv_heads, ratio, head_dim)
            out = F.scaled_dot_product_attention(
                folded, gather.keys, gather.values, attn_mask=call.mask, scale=params.scale
            )
        else:
            out = F.scaled_dot_product_attention(
                q.unsqueeze(2), gather.keys, gather.values, attn_mask=call.mask, scale=params.scale, enable_gqa=True
            )
        return out.reshape(batch, num_heads, head_dim)

    def _prefill(
        self, call: _PrefillCall, layer: int, params: LayerAttention, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        """Attention of the call's chunks, written to their rows of `out` [T, num_heads, head_dim]."""

        def batched(x: Tensor) -> Tensor:  # [T, heads, dim] -> [batch, heads, query, dim]
            x = x[call.start : call.stop] if call.token_index is None else x.index_select(0, call.token_index)
            return x.reshape(call.batch, -1, *x.shape[1:]).transpose(1, 2)

        queries = batched(q)
        if call.gather is None:
            keys, values = batched(k), batched(v)
        else:
            call.gather.run(self.cache, layer)
            keys, values = call.gather.keys, call.gather.values
        causal = call.gather is None
        if params.soft_cap is not None:
            ratio = queries.shape[1] // keys.shape[1]
            mask = call.mask
            if causal:
                mask = torch.full((queries.shape[2], keys.shape[2]), float("-inf")).triu_(1)
            keys, values = keys.repeat_interleave(ratio, 1), values.repeat_interleave(ratio, 1)
            result = _capped_attention(queries, keys, values, mask, params)
        else:
            result = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=call.mask, is_causal=causal, scale=params.scale, enable_gqa=True
            )
        result = result.transpose(1, 2)
        if call.token_index is None:
            out[call.start : call.stop] = result[0]
        else:
            assert call.valid is not None and call.target is not None
            out.index_copy_(0, call.target, result.reshape(-1, *q.shape[1:]).index_select(0, call.valid))

    def _build(self, window: int | None, num_heads: int) -> _StepPlan:
        return _StepPlan(self._build_decodes(window), self._build_prefills(window, num_heads))

    def _build_decodes(self, window: int | None) -> list[_DecodeCall]:
        meta, spec = self.metadata, self.cache.spec
        if not meta.num_decodes:
            return []
        lens = meta.decode_seq_lens.numpy()
        tables = meta.decode_block_tables.numpy()
        ranges = cpu_plan.visible_range(lens, lens, window, spec.block_size)
        width = spec.num_kv_heads * spec.head_dim
        groups = cpu_plan.split_by_length(
            ranges.num_blocks * spec.block_size,
            cpu_plan.CALL_COST_KV_ELEMENTS / width,
            cpu_plan.MAX_GATHER_ELEMENTS / width,
        )
        calls = []
        for group in groups:
            rows = None if len(groups) == 1 else torch.from_numpy(group)
            if rows is None:
                group = np.arange(len(lens))
            first, count = ranges.first_block[group], ranges.num_blocks[group]
            low, high = ranges.low[group], ranges.high[group]
            uniform = not low.any() and (high == high[0]).all()
            length = int(high.max())
            gather = self._gather(tables, group, first, count, length)
            mask = None
            if not uniform:
                at = np.arange(length)
                visible = (at >= low[:, None]) & (at < high[:, None])
                mask = self._additive(visible)[:, None, None, :]
            calls.append(_DecodeCall(rows, gather, mask))
        return calls

    def _build_prefills(self, window: int | None, num_heads: int) -> list[_PrefillCall]:
        spec = self.cache.spec
        fresh: list[PrefillSpan] = []
        cached: list[PrefillSpan] = []
        for span in self.metadata.prefills:
            whole = span.query_len == span.context_len and (window is None or window >= span.context_len)
            (fresh if whole else cached).append(span)
        cost = cpu_plan.CALL_COST_SCORE_ELEMENTS / (num_heads * spec.head_dim)
        calls = [
            self._prefill_call(group, None, None)
            for group in cpu_plan.group_spans(fresh, cost, cpu_plan.MAX_SCORE_ELEMENTS)
        ]
        tiles = cpu_plan.tile_spans(cached, cpu_plan.MAX_SCORE_ELEMENTS)
        for group in cpu_plan.group_spans(tiles, cost, cpu_plan.MAX_SCORE_ELEMENTS):
            last = np.array([span.context_len for span in group])
            queries = np.array([span.query_len for span in group])
            ranges = cpu_plan.visible_range(last, last - queries + 1, window, spec.block_size)
            length = int(ranges.high.max())
            tables = np.zeros((len(group), int((ranges.first_block + ranges.num_blocks).max())), dtype=np.int64)
            for row, span in enumerate(group):
                used = int(ranges.first_block[row] + ranges.num_blocks[row])
                tables[row, :used] = span.block_table[:used]
            gather = self._gather(tables, np.arange(len(group)), ranges.first_block, ranges.num_blocks, length)
            # Position (counted from the first gathered block) up to which query i of each chunk sees; padding
            # queries stand at the chunk's end.
            ends = ranges.high[:, None] - np.maximum(queries[:, None] - 1 - np.arange(queries.max()), 0)
            at = np.arange(length)
            visible = at < ends[:, :, None]
            if window is not None:
                visible &= at >= ends[:, :, None] - window
            calls.append(self._prefill_call(group, gather, self._additive(visible)[:, None]))
        return calls

    def _prefill_call(self, group: list[PrefillSpan], gather: _Gather | None, mask: Tensor | None) -> _PrefillCall:
        if len(group) == 1:
            start, stop = group[0].query_start, group[0].query_start + group[0].query_len
            return _PrefillCall(start, stop, None, None, None, 1, gather, mask)
        starts = np.array([span.query_start for span in group])
        queries = np.array([span.query_len for span in group])
        offset = np.arange(queries.max())
        inside = offset < queries[:, None]
        token = starts[:, None] + np.where(inside, offset, 0)
        return _PrefillCall(
            0,
            0,
            torch.from_numpy(token.reshape(-1)),
            torch.from_numpy(np.flatnonzero(inside)),
            torch.from_numpy(token[inside]),
            len(group),
            gather,
            mask,
        )

    def _gather(self, tables: IntArray, rows: IntArray, first: IntArray, count: IntArray, length: int) -> _Gather:
        """Gather of blocks [first, first + count) of the given rows of `tables`, cut to `length` positions.

        Blocks behind a row's last one repeat its first: what is masked must still be finite and the row's own.
        """
        cache, spec = self.cache, self.cache.spec
        step = np.arange(-(-length // spec.block_size))
        column = first[:, None] + np.where(step < count[:, None], step, 0)
        blocks = tables[rows[:, None], column]
        index = blocks[:, None, :] * spec.num_kv_heads + np.arange(spec.num_kv_heads)[:, None]
        # A sequence's K and V lie together: the thread that gathers them is the one that attends to them, mostly.
        index = np.stack((index, index + cache.value_row_offset), axis=1).reshape(-1)
        pages = self._workspace.take(index.size, spec.block_size * spec.head_dim, spec.dtype)
        both = pages.view(len(rows), 2, spec.num_kv_heads, -1, spec.head_dim)[:, :, :, :length]
        return _Gather(torch.from_numpy(index), pages, both[:, 0], both[:, 1])

    def _additive(self, visible: np.ndarray) -> Tensor:
        """0 where visible and -inf elsewhere, in the cache's dtype (the fused call takes it as it is)."""
        mask = torch.zeros(visible.shape, dtype=self.cache.spec.dtype)
        return mask.masked_fill_(torch.from_numpy(~visible), float("-inf"))


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: LayerAttention) -> Tensor:
    """Attention with a logit soft cap (the fused call has none), in float32: [B, H, Q, D] x [B, H, L, D]."""
    assert params.soft_cap is not None
    scores = torch.matmul(q.float() * (params.scale / params.soft_cap), k.float().transpose(2, 3))
    scores = scores.tanh_().mul_(params.soft_cap)
    if mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)
