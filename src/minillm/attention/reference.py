"""Paged attention in plain PyTorch float32: the oracle that every other path is compared with.

Slow and short on purpose. It reads one sequence at a time through its block table, on any device, and follows the
definition: query i of a chunk stands at position ``context_len - query_len + i`` and sees the positions up to its own,
at most ``sliding_window`` of them; query head h reads KV head ``h // (num_heads / num_kv_heads)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.attention.interface import LayerAttention


def attention_reference(q: Tensor, k: Tensor, v: Tensor, params: LayerAttention) -> Tensor:
    """Attention of one sequence whose last `query_len` positions are the queries, in float32.

    q [query_len, num_heads, head_dim]; k, v [context_len, num_kv_heads, head_dim]; returns q's shape and dtype.
    """
    query_len, num_heads, head_dim = q.shape
    context_len, num_kv_heads, _ = k.shape
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    if query_len > context_len:
        raise ValueError(f"query_len={query_len} exceeds context_len={context_len}")
    group = num_heads // num_kv_heads
    queries = q.float().view(query_len, num_kv_heads, group, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", queries, k.float()) * params.scale
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    at = torch.arange(context_len - query_len, context_len, device=q.device)[:, None]
    key = torch.arange(context_len, device=q.device)[None, :]
    visible = key <= at
    if params.sliding_window is not None:
        visible &= key > at - params.sliding_window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    out = torch.einsum("hgqk,khd->qhgd", weights, v.float())
    return out.reshape(query_len, num_heads, head_dim).to(q.dtype)


def paged_attention_reference(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    params: LayerAttention,
) -> Tensor:
    """Attention of a flattened batch over one layer's paged cache; the new tokens' K and V are already in it.

    q [T, num_heads, head_dim] with T = sum(query_lens), sequence after sequence; key_cache and value_cache
    [num_blocks, num_kv_heads, block_size, head_dim]; `context_lens[i]` counts sequence i's tokens including its
    queries. A decode row is a sequence with query_len 1. Returns q's shape and dtype.
    """
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    out = torch.empty_like(q)
    start = 0
    for table, query_len, context_len in zip(block_tables, query_lens, context_lens, strict=True):
        count = -(-context_len // block_size)
        if len(table) < count:
            raise ValueError(f"block table of {len(table)} entries is too short for context_len={context_len}")
        blocks = torch.as_tensor(list(table[:count]), dtype=torch.int64, device=q.device)
        k, v = (
            cache[blocks].transpose(1, 2).reshape(-1, num_kv_heads, head_dim)[:context_len]
            for cache in (key_cache, value_cache)
        )
        out[start : start + query_len] = attention_reference(q[start : start + query_len], k, v, params)
        start += query_len
    if start != len(q):
        raise ValueError(f"query_lens sum to {start}, but q has {len(q)} rows")
    return out
