"""The GPU's attention operations in plain PyTorch: they let the GPU's way through a runner be tested on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.attention.cuda import CudaMetadata
from minillm.attention.interface import LayerAttention
from minillm.attention.reference import paged_attention_reference


class ReferenceKernels:
    """`AttentionKernels` by the oracle. Checks what a kernel would take on trust."""

    def __init__(self) -> None:
        self.plans = 0
        self.calls: list[tuple[str, int]] = []
        self._meta: CudaMetadata | None = None

    def plan(self, meta: CudaMetadata) -> None:
        self._meta = meta
        self.plans += 1
        assert meta.context_lens.dtype == meta.query_start.dtype == meta.prefill_query_start.dtype == torch.int32
        assert meta.query_start.tolist()[meta.num_decodes :] == [
            start + meta.num_decodes for start in meta.prefill_query_start.tolist()
        ]
        assert meta.host_query_start.tolist() == meta.prefill_query_start.tolist()
        assert meta.host_context_lens.tolist() == meta.context_lens.tolist()[meta.num_decodes :]

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        block_size = k_cache.shape[2]
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                k_cache[slot // block_size, :, slot % block_size] = k[token]
                v_cache[slot // block_size, :, slot % block_size] = v[token]

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, params: LayerAttention, out: Tensor
    ) -> None:
        assert self._meta is not None
        assert len(q) == self._meta.num_decodes
        lens = self._meta.context_lens[: len(q)].tolist()
        self._attend("decode", q, k_cache, v_cache, tables, [1] * len(q), lens, params, out)

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, params: LayerAttention, out: Tensor
    ) -> None:
        assert self._meta is not None
        queries = self._meta.prefill_query_start.diff().tolist()
        lens = self._meta.context_lens[self._meta.num_decodes :].tolist()
        self._attend("prefill", q, k_cache, v_cache, tables, queries, lens, params, out)

    def _attend(
        self,
        kind: str,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tables: Tensor,
        queries: list[int],
        lens: list[int],
        params: LayerAttention,
        out: Tensor,
    ) -> None:
        self.calls.append((kind, len(queries)))
        assert tables.dtype == torch.int32
        assert out.shape == q.shape
        out.copy_(paged_attention_reference(q, k_cache, v_cache, tables.tolist(), queries, lens, params))
