"""Random paged batches for attention tests: scrambled block tables, filled caches, and a step's metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minillm.attention.cpu import GatherWorkspace, PagedAttentionContext
from minillm.attention.interface import LayerAttention
from minillm.attention.metadata import AttentionMetadata, PrefillSpan
from minillm.attention.reference import paged_attention_reference
from minillm.memory.paged_kv_cache import KVCacheSpec, PagedKVCache


@dataclass
class PagedBatch:
    """A cache with random history in every slot, and one step's queries and new K and V."""

    cache: PagedKVCache
    metadata: AttentionMetadata
    tables: list[list[int]]
    query_lens: list[int]
    context_lens: list[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def run(self, params: LayerAttention, workspace: GatherWorkspace | None = None, layer: int = 0) -> torch.Tensor:
        """Attention through the CPU path."""
        layers = [params] * self.cache.spec.num_layers
        return PagedAttentionContext(self.cache, layers, self.metadata, workspace).attend(layer, self.q, self.k, self.v)

    def reference(self, params: LayerAttention, layer: int = 0) -> torch.Tensor:
        """The same through the oracle (the new K and V must have been written)."""
        return paged_attention_reference(
            self.q,
            self.cache.k(layer),
            self.cache.v(layer),
            self.tables,
            self.query_lens,
            self.context_lens,
            params,
        )


def make_batch(
    decodes: Sequence[int],
    prefills: Sequence[tuple[int, int]] = (),
    *,
    heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    num_layers: int = 1,
) -> PagedBatch:
    """`decodes`: context lengths; `prefills`: (query_len, context_len)."""
    generator = torch.Generator().manual_seed(seed)
    context_lens = [*decodes, *(context for _, context in prefills)]
    query_lens = [1] * len(decodes) + [query for query, _ in prefills]
    counts = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(counts) + 3
    spec = KVCacheSpec(
        num_layers=num_layers, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    cache = PagedKVCache(spec, num_blocks)
    cache.store.copy_(torch.randn(cache.store.shape, generator=generator))
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]

    slots, spans, start = [], [], 0
    for table, query_len, context_len in zip(tables, query_lens, context_lens, strict=True):
        positions = range(context_len - query_len, context_len)
        slots.extend(table[at // block_size] * block_size + at % block_size for at in positions)
        if start >= len(decodes):
            spans.append(PrefillSpan(start, query_len, context_len, table))
        start += query_len
    widest = max(counts[: len(decodes)], default=1) + 2
    decode_tables = torch.full((len(decodes), widest), 10**9, dtype=torch.int64)  # a used entry of the rest would fail
    for row in range(len(decodes)):
        decode_tables[row, : counts[row]] = torch.tensor(tables[row])
    metadata = AttentionMetadata(
        torch.tensor(slots), decode_tables, torch.tensor(list(decodes), dtype=torch.int64), spans
    )
    tokens = len(slots)
    q = torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)
    k, v = (torch.randn(tokens, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
    return PagedBatch(cache, metadata, tables, query_lens, context_lens, q, k, v)
