"""The GPU's attention operations in plain PyTorch: they let the GPU's way through a runner be tested on any device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

import reference_ops
from minillm.attention.cuda import CudaMetadata
from minillm.attention.cuda_prepare import COLUMNS, HEADER_INTS, UPDATE_INTS, DecodeBuffers
from minillm.attention.interface import LayerAttention
from minillm.attention.reference import paged_attention_reference


class ReferenceKernels:
    """`AttentionKernels` by the oracle. Checks what a kernel would take on trust."""

    def __init__(self) -> None:
        self.plans = 0
        self.calls: list[tuple[str, int]] = []
        self.prepared: list[int] = []
        self.layout: object | None = "fixed"
        self._meta: CudaMetadata | None = None

    def plan(self, meta: CudaMetadata) -> None:
        self._meta = meta
        self.plans += 1
        assert meta.decode_lens.dtype == meta.prefill_lens.dtype == meta.prefill_query_start.dtype == torch.int32
        assert len(meta.decode_lens) == meta.num_decodes
        assert meta.first_prefill in (0, meta.num_decodes)
        assert meta.host_query_start.tolist() == meta.prefill_query_start.tolist()
        assert meta.host_context_lens.tolist() == meta.prefill_lens.tolist()

    @property
    def prefill_layout(self) -> object | None:
        return self.layout

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
        lens = self._meta.decode_lens.tolist()
        own = [i for i, length in enumerate(lens) if length >= 0]
        self.calls.append(("decode", len(own)))
        used = [i for i in own if lens[i]]
        out[own] = 0  # rows of padding have no context: a kernel gives zeros
        self._attend(q, k_cache, v_cache, tables, [slice(i, i + 1) for i in used], used, lens, params, out)

    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, params: LayerAttention, out: Tensor
    ) -> None:
        assert self._meta is not None
        start = self._meta.prefill_query_start.tolist()
        used = [i for i in range(len(start) - 1) if start[i] < start[i + 1]]
        self.calls.append(("prefill", len(used)))
        lens = self._meta.prefill_lens.tolist()
        spans = [slice(start[i], start[i + 1]) for i in used]
        self._attend(q, k_cache, v_cache, tables, spans, used, lens, params, out)

    @staticmethod
    def _attend(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tables: Tensor,
        spans: list[slice],
        sequences: list[int],
        lens: list[int],
        params: LayerAttention,
        out: Tensor,
    ) -> None:
        """Attention of some sequences, whose queries are at `spans`; all other rows of `out` are left alone."""
        assert tables.dtype == torch.int32
        assert out.shape == q.shape
        if not sequences:
            return
        rows = [row for span in spans for row in range(span.start, span.stop)]
        queries = [span.stop - span.start for span in spans]
        contexts = [lens[i] for i in sequences]
        assert all(0 < count <= context for count, context in zip(queries, contexts, strict=True))
        out[rows] = paged_attention_reference(
            q[rows], k_cache, v_cache, tables[sequences].tolist(), queries, contexts, params
        )

    def prepare_decode(
        self, num_rows: int, buffers: DecodeBuffers, tables: Tensor, last_tokens: Tensor, block_size: int
    ) -> None:
        self.prepared.append(num_rows)
        step, stride = buffers.step.tolist(), buffers.capacity
        count, num_updates = step[:2]
        assert count <= num_rows <= stride
        rows, tokens, positions = (step[HEADER_INTS + i * stride :][:count] for i in range(3))
        updates = torch.tensor(step[HEADER_INTS + COLUMNS * stride :][: UPDATE_INTS * num_updates]).view(
            -1, UPDATE_INTS
        )
        seen = set()
        for row, index, block in updates.tolist():
            assert row in rows and (row, index) not in seen  # the row's own thread block applies it; in any order
            seen.add((row, index))
            tables[row, index] = block
        for i in range(num_rows):
            if i >= count:
                buffers.input_ids[i] = buffers.positions[i] = buffers.context_lens[i] = buffers.rows[i] = 0
                buffers.slot_mapping[i] = -1
                continue
            row, last = rows[i], positions[i] // block_size
            buffers.tables[i, : last + 1] = tables[row, : last + 1]
            buffers.input_ids[i] = tokens[i] if tokens[i] >= 0 else last_tokens[row]
            buffers.positions[i] = positions[i]
            buffers.context_lens[i] = positions[i] + 1
            buffers.slot_mapping[i] = tables[row, last] * block_size + positions[i] % block_size
            buffers.rows[i] = row


class ReferenceOps:
    """`DecoderOps` by :mod:`reference_ops`, counted, in any dtype.

    `few` is how many rows the small products take, `some` how many those of a batch do, and `rest` how many those of
    them that go into the residual do.
    """

    def __init__(self, few: int = 0, some: int = 0, rest: int = 0) -> None:
        self.few, self.some, self.rest = few, some, max(some, rest)
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        self.calls[name] += 1
        return getattr(reference_ops, name)

    def supports_small_linear(self, rows: int, *_: object, **__: object) -> bool:
        return rows <= self.few

    def supports_batch_linear(self, rows: int, *_: object, gated: bool = False, to_residual: bool = False) -> bool:
        return rows <= (self.rest if to_residual else self.some)
