"""Paged attention on a GPU: what a step needs on the device, and which kernel serves which part of it.

```
plan's table updates ──► tables [rows, blocks]           persistent, int32, only changes are sent
a step's rows        ──► step tables [S, blocks] ─┐      one gather on the device
lengths, slots       ──► (one packed transfer)  ──┼──► write_kv, decode rows, prefill chunks: per layer
                         plans of the kernels   ──┘      made once a step
```
Everything is enqueued on the current stream and nothing waits for it. Sequences are in the batch's order, decode rows
before prefill chunks, so that both kernels read slices of the same arrays.

float16 and bfloat16 with the usual head and block sizes go through the tuned kernels
(:mod:`minillm.attention.cuda_decode`, :mod:`minillm.attention.cuda_prefill`); all else goes through the simple one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_prepare import DecodeBuffers
from minillm.attention.interface import LayerAttention
from minillm.memory.paged_kv_cache import PagedKVCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CudaMetadata:
    """One step's batch of T tokens in S sequences: decode rows, one token each, then prefill chunks.

    Each of attention's two kernels has its part of the batch: decode the first D tokens and sequences, prefill what is
    behind the first F, where its sequence s has the queries prefill_query_start[s] up to prefill_query_start[s + 1]. As
    the batch comes, D = F is the number of decode rows. In a padded step (:meth:`CudaAttention.begin_padded`) F is 0
    and D is 0 or S, so that sizes follow from T and S alone: sequences that are not a kernel's own have a negative
    length for decode, and no queries for prefill.

    Tensors are on the device; `host_query_start` and `host_context_lens` are prefill's again, for plans that are made
    on the host.
    """

    num_decodes: int
    """D."""
    first_prefill: int
    """F."""
    slot_mapping: Tensor
    """int64 [T]: KV slot of each token; negative is padding."""
    rows: Tensor
    """int64 [S]: row of each sequence in the block tables."""
    max_blocks: int
    """Blocks of the longest sequence of the step."""
    decode_lens: Tensor
    """int32 [D]: tokens of each decode row with this step's; 0 is padding, less not a decode row."""
    prefill_lens: Tensor
    """int32 [P]: tokens of each of prefill's sequences with those of this step."""
    prefill_query_start: Tensor
    """int32 [P + 1], counted from token F on."""
    host_query_start: np.ndarray
    host_context_lens: np.ndarray

    @property
    def has_prefills(self) -> bool:
        """Whether there are chunks."""
        return len(self.host_context_lens) > 0


class AttentionKernels(Protocol):
    """The operations on the device. K and V caches are one layer's, [num_blocks, Hkv, block_size, d]."""

    def plan(self, meta: CudaMetadata) -> None:
        """Prepare what depends on the step alone; called once a step, before any layer."""
        ...

    @property
    def prefill_layout(self) -> object | None:
        """Equal for two planned steps whose launches for equally many rows differ in nothing; None if there may be
        none that is equal."""
        ...

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """k, v [T, Hkv, d] to the slots int64 [T]; negative slots are skipped."""
        ...

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, params: LayerAttention, out: Tensor
    ) -> None:
        """q [D, Hq, d] of the planned step's decode rows, block tables int32 [D, W] -> out [D, Hq, d].

        Rows of negative length are not written, or with anything: prefill comes behind.
        """
        ...

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, params: LayerAttention, out: Tensor
    ) -> None:
        """q [T - F, Hq, d], block tables int32 [P, W] -> out, shaped as q; other tokens than chunks' are left alone."""
        ...

    def prepare_decode(
        self, num_rows: int, buffers: DecodeBuffers, tables: Tensor, last_tokens: Tensor, block_size: int
    ) -> None:
        """The message in the buffers -> what a decode step of `num_rows` rows reads (see cuda_prepare)."""
        ...


class CudaAttention:
    """The attention context of a GPU (`AttentionContext`). One for a runner: its buffers live as long as that.

    `layers[i]` are layer i's parameters; `kernels` None takes this package's own.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        layers: Sequence[LayerAttention],
        *,
        num_heads: int,
        max_num_seqs: int,
        max_model_len: int,
        kernels: AttentionKernels | None = None,
    ) -> None:
        spec = cache.spec
        self.layers = layers
        self.table_width = spec.blocks_for_tokens(max_model_len)
        self.dtype = spec.dtype
        self._block_size = spec.block_size
        self.caches = [(cache.k(layer), cache.v(layer)) for layer in range(spec.num_layers)]
        """K and V of each layer, [num_blocks, num_kv_heads, block_size, head_dim]."""
        self._tables = torch.zeros((max_num_seqs, self.table_width), dtype=torch.int32, device=cache.device)
        self._kernels = kernels or CudaKernels(
            cache, layers, num_heads=num_heads, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        self._meta: CudaMetadata | None = None
        self._step_tables = self._tables[:0]

    def update_tables(self, positions: Tensor, blocks: Tensor) -> None:
        """Set entries of the block tables [rows, table_width], flat: int64 [U] positions, each once, int32 [U] ids."""
        self._tables.view(-1).index_copy_(0, positions, blocks)

    def begin(self, meta: CudaMetadata) -> CudaAttention:
        """Take up a step; its table updates must have been applied. The context is the same object for every step."""
        self._meta = meta
        self._step_tables = self._tables[:, : meta.max_blocks].index_select(0, meta.rows)
        self._kernels.plan(meta)
        return self

    def begin_decode(self, num_rows: int, buffers: DecodeBuffers, last_tokens: Tensor) -> CudaAttention:
        """Take up a decode step of `num_rows` rows, padding included, whose message is in the buffers."""
        self._kernels.prepare_decode(num_rows, buffers, self._tables, last_tokens, self._block_size)
        nobody = np.zeros(0, dtype=np.int32)
        meta = CudaMetadata(
            num_decodes=num_rows,
            first_prefill=num_rows,
            slot_mapping=buffers.slot_mapping[:num_rows],
            rows=buffers.rows[:num_rows],
            max_blocks=self.table_width,
            decode_lens=buffers.context_lens[:num_rows],
            prefill_lens=buffers.context_lens[:0],
            prefill_query_start=buffers.context_lens[:0],
            host_query_start=nobody,
            host_context_lens=nobody,
        )
        self._meta = meta
        self._step_tables = buffers.tables[:num_rows]
        self._kernels.plan(meta)
        return self

    def begin_padded(self, meta: CudaMetadata, tables: Tensor) -> None:
        """Take up a padded step whose tensors stay where they are, to be launched or replayed; the launches begin with
        :meth:`gather_tables`, which fills `tables`, int32 [at least S, table_width]."""
        self._meta = meta
        self._step_tables = tables[: len(meta.rows)]
        self._kernels.plan(meta)

    def gather_tables(self) -> None:
        """The block tables of a padded step's sequences, in full width. Runs on the current stream; capturable."""
        assert self._meta is not None
        torch.index_select(self._tables, 0, self._meta.rows, out=self._step_tables)

    @property
    def prefill_layout(self) -> object | None:
        """What launches of the step's prefill depend on beside its rows, once begun; None: on more than a graph can
        hold. Before any step, None if that is so of every step."""
        return self._kernels.prefill_layout

    @property
    def slot_mapping(self) -> Tensor:
        """int64 [T]: KV slots of the step's tokens."""
        assert self._meta is not None
        return self._meta.slot_mapping

    def attend_written(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attention of q [T, Hq, d] into out [T, Hq, d], both in the cache's dtype; this step's K and V are there."""
        meta, kernels, tables = self._meta, self._kernels, self._step_tables
        assert meta is not None
        params = self.layers[layer]
        k_cache, v_cache = self.caches[layer]
        decodes, first = meta.num_decodes, meta.first_prefill
        if decodes:
            kernels.decode(q[:decodes], k_cache, v_cache, tables[:decodes], params, out[:decodes])
        if meta.has_prefills:
            kernels.prefill(q[first:], k_cache, v_cache, tables[first:], params, out[first:])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [T, Hkv, d] and return attention of q [T, Hq, d], in q's dtype."""
        meta, kernels = self._meta, self._kernels
        assert meta is not None
        dtype = q.dtype
        if dtype != self.dtype:
            q, k, v = q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)
        kernels.write_kv(k, v, *self.caches[layer], meta.slot_mapping)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.attend_written(layer, q, out)
        return out if dtype == self.dtype else out.to(dtype)


class CudaKernels:
    """This package's kernels: the tuned ones for what they support, the simple one for the rest."""

    def __init__(
        self,
        cache: PagedKVCache,
        layers: Sequence[LayerAttention],
        *,
        num_heads: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """Compiles kernels that are not in the disk cache yet, now or with the first step."""
        from minillm.attention import cuda_decode, cuda_prefill, cuda_prepare, cuda_simple
        from minillm.attention.cuda_build import arch_of
        from minillm.memory import cuda_kv_ops

        spec = cache.spec
        arch = arch_of(torch.cuda.get_device_capability(cache.device))
        fits = (spec.dtype, spec.head_dim, spec.block_size, arch)
        shape = (num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size, spec.dtype)
        self.write_kv = cuda_kv_ops.write_kv
        self.prepare_decode = cuda_prepare.prepare_decode
        self._simple = cuda_simple.paged_attention_simple
        self._paged_decode, self._paged_prefill = cuda_decode.paged_decode, cuda_prefill.paged_prefill
        self._decode_plan = self._prefill_plan = None
        if cuda_decode.supports(*fits):
            windows = list(dict.fromkeys(params.sliding_window for params in layers))
            self._decode_plan = cuda_decode.DecodePlan(
                cache.device, max_num_seqs, max_model_len, *shape, sliding_windows=windows
            )
        if cuda_prefill.supports(*fits):
            self._prefill_plan = cuda_prefill.PrefillPlan(cache.device, max_num_seqs, *shape)
        # Where the simple kernel finds the queries of decode rows.
        self._one_each = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=cache.device)
        if spec.dtype != torch.float32 and not (self.decode_is_tuned and self.prefill_is_tuned):
            message = "head_dim=%d, block_size=%d, %s on %s: attention goes through the simple kernel, which is slow"
            logger.warning(message, spec.head_dim, spec.block_size, spec.dtype, arch)
        self._meta: CudaMetadata | None = None

    @property
    def decode_is_tuned(self) -> bool:
        """Whether decode rows go through the tuned kernel."""
        return self._decode_plan is not None

    @property
    def prefill_is_tuned(self) -> bool:
        """Whether prefill chunks go through the tuned kernel."""
        return self._prefill_plan is not None

    @property
    def prefill_layout(self) -> object | None:
        """The place of the prefill plan's lists; the simple kernel and pieces of long contexts depend on lengths."""
        plan = self._prefill_plan
        return None if plan is None or plan.num_splits else plan.version

    def plan(self, meta: CudaMetadata) -> None:
        """Let the tuned kernels plan the step."""
        self._meta = meta
        if self._decode_plan is not None and meta.num_decodes:
            self._decode_plan.update(meta.decode_lens)
        if self._prefill_plan is not None and meta.has_prefills:
            self._prefill_plan.update(meta.host_query_start, meta.host_context_lens)

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, params: LayerAttention, out: Tensor
    ) -> None:
        """Decode rows; the shapes are in :class:`AttentionKernels`."""
        meta = self._meta
        assert meta is not None
        lens = meta.decode_lens
        if self._decode_plan is not None:
            plan = self._decode_plan
            self._paged_decode(q, k_cache, v_cache, tables, lens, params, plan, out, history_ready=True)
        else:
            self._simple(q, k_cache, v_cache, tables, self._one_each[: len(q) + 1], lens, params, out)

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, params: LayerAttention, out: Tensor
    ) -> None:
        """Prefill chunks; the shapes are in :class:`AttentionKernels`."""
        meta = self._meta
        assert meta is not None
        start, lens = meta.prefill_query_start, meta.prefill_lens
        if self._prefill_plan is not None:
            self._paged_prefill(q, k_cache, v_cache, tables, start, lens, params, self._prefill_plan, out)
        else:
            self._simple(q, k_cache, v_cache, tables, start, lens, params, out)
