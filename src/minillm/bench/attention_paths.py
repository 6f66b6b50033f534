"""The ways to compute one step's attention that are compared with each other, all over the same paged batch.

From slow to fast, for a decode step:

- :class:`TokenLoop`: K and V are copied out of the pages token by token in Python, then attended to. What a first
  version of paging does, and what the original experiment compared with.
- :class:`Gather`: the same with one gather of whole blocks per tensor (``materialize_request_kv``): the fair baseline.
- :class:`Contiguous`: attention over K and V that were never paged, as if there were no pool to share.
- :class:`Simple`, :class:`Tuned`: our kernels, which read the pages where they are. On a CPU, :class:`CPUPath`.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.bench.attention_batch import AttentionBatch


class AttentionPath(Protocol):
    """One way to compute a batch's attention."""

    name: str

    def plan(self) -> None:
        """What is done once per step, whatever the number of layers."""
        ...

    def prepare(self) -> None:
        """Plan, and read the block table: leaves both in the cache, as the start of a step does."""
        ...

    def run(self, layer: int) -> Tensor:
        """The result of `layer`: [T, num_heads, head_dim], in a buffer that the next call overwrites."""
        ...


def attend_contiguous(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """torch's fused attention of q [T, num_heads, d], T / S queries at the end of each sequence.

    keys, values: [S, num_kv_heads, context, d]. With more than one query per sequence, query_len must equal context.
    """
    sequences = len(keys)
    queries = q.view(sequences, -1, *q.shape[1:]).transpose(1, 2)
    query_len = queries.shape[2]
    if query_len not in (1, keys.shape[2]):
        raise ValueError(f"query_len={query_len} must be 1 or context={keys.shape[2]}")
    out = F.scaled_dot_product_attention(
        queries, keys, values, is_causal=query_len > 1, scale=scale, enable_gqa=queries.shape[1] != keys.shape[1]
    )
    return out.transpose(1, 2).reshape(q.shape)


class _Path:
    """A path over a batch; planning is nothing unless a class says otherwise."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.batch = batch

    def plan(self) -> None:
        """Nothing."""

    def prepare(self) -> None:
        """See :class:`AttentionPath`."""
        self.plan()
        self.batch.block_tables.sum()


class TokenLoop(_Path):
    """Materialise token by token, then attend; one sequence."""

    name = "token_loop"

    def materialize(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [context, num_kv_heads, head_dim], copied one token at a time."""
        return copy_tokens(self.batch, layer)

    def run(self, layer: int) -> Tensor:
        """See :class:`AttentionPath`."""
        return _attend_tokens(self.batch, layer, *self.materialize(layer))


class Gather(_Path):
    """Materialise by one gather of blocks each for K and V, then attend; one sequence."""

    name = "gather"

    def __init__(self, batch: AttentionBatch) -> None:
        super().__init__(batch)
        # A device index: the benchmark is of the gather, not of copying a list to the device.
        self._table = torch.tensor(batch.tables[0], dtype=torch.int64, device=batch.device)

    def prepare(self) -> None:
        """See :class:`AttentionPath`."""
        self._table.sum()

    def materialize(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [context, num_kv_heads, head_dim]."""
        return self.batch.cache.materialize_request_kv(self._table, self.batch.context_lens[0], layer)

    def run(self, layer: int) -> Tensor:
        """See :class:`AttentionPath`."""
        return _attend_tokens(self.batch, layer, *self.materialize(layer))


class Contiguous(_Path):
    """Attention over contiguous K and V of all layers, laid out beforehand as torch's fused attention likes it."""

    name = "contiguous"

    def __init__(self, batch: AttentionBatch) -> None:
        super().__init__(batch)
        self._kv = [batch.contiguous_kv(layer) for layer in range(batch.layers)]

    def run(self, layer: int) -> Tensor:
        """See :class:`AttentionPath`."""
        return attend_contiguous(self.batch.q[layer], *self._kv[layer], self.batch.params.scale)


class CPUPath(_Path):
    """The CPU path of the runner (its gather and fused attention), which also writes the step's K and V."""

    name = "cpu"

    def __init__(self, batch: AttentionBatch) -> None:
        from minillm.attention.cpu import GatherWorkspace, PagedAttentionContext
        from minillm.attention.metadata import AttentionMetadata

        super().__init__(batch)
        size = batch.shape.block_size
        ends = [(table, length - 1) for table, length in zip(batch.tables, batch.context_lens, strict=True)]
        slots = torch.tensor([table[at // size] * size + at % size for table, at in ends])
        # What is written is what is there already, so the reference holds before and after.
        block, offset = slots // size, slots % size
        self._kv = [
            (batch.k(layer)[block, :, offset].clone(), batch.v(layer)[block, :, offset].clone())
            for layer in range(batch.layers)
        ]
        metadata = AttentionMetadata(slots, batch.block_tables.long(), batch.seq_lens.long())
        workspace = GatherWorkspace()
        params = [batch.params] * batch.layers
        self._context = lambda: PagedAttentionContext(batch.cache, params, metadata, workspace)
        self._current = self._context()

    def plan(self) -> None:
        """Gather indices and masks of the step."""
        self._current = self._context()

    def run(self, layer: int) -> Tensor:
        """See :class:`AttentionPath`."""
        return self._current.attend(layer, self.batch.q[layer], *self._kv[layer])


class Simple(_Path):
    """The simple CUDA kernel: any head dim, one launch, no plan."""

    name = "simple"

    def __init__(self, batch: AttentionBatch) -> None:
        from minillm.attention.cuda_simple import paged_attention_simple

        super().__init__(batch)
        self._attend = paged_attention_simple
        self.out = batch.new_output()

    def run(self, layer: int) -> Tensor:
        """See :class:`AttentionPath`."""
        batch = self.batch
        return self._attend(
            batch.q[layer],
            batch.k(layer),
            batch.v(layer),
            batch.block_tables,
            batch.query_start,
            batch.seq_lens,
            batch.params,
            out=self.out,
        )


class TunedDecode(_Path):
    """The tuned CUDA decode kernel."""

    name = "direct"

    def __init__(self, batch: AttentionBatch) -> None:
        from minillm.attention.cuda_decode import DecodePlan, paged_decode

        shape = batch.shape
        super().__init__(batch)
        self._attend = paged_decode
        self._plan = DecodePlan(
            batch.device,
            len(batch.tables),
            max(batch.context_lens),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            shape.dtype,
        )
        self.out = batch.new_output()
        self.plan()

    def plan(self) -> None:
        """Divide the step's KV among the CTAs: one small kernel."""
        self._plan.update(self.batch.seq_lens)

    def run(self, layer: int) -> Tensor:
        """See :class:`AttentionPath`."""
        batch = self.batch
        return self._attend(
            batch.q[layer],
            batch.k(layer),
            batch.v(layer),
            batch.block_tables,
            batch.seq_lens,
            batch.params,
            self._plan,
            out=self.out,
        )


class TunedPrefill(_Path):
    """The tuned CUDA prefill kernel."""

    name = "direct"

    def __init__(self, batch: AttentionBatch) -> None:
        from minillm.attention.cuda_prefill import PrefillPlan, paged_prefill

        super().__init__(batch)
        self._attend = paged_prefill
        shape = batch.shape
        self._plan = PrefillPlan(
            batch.device,
            len(batch.tables),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            shape.dtype,
        )
        self._starts = batch.query_start.tolist()
        self.out = batch.new_output()
        self.plan()

    def plan(self) -> None:
        """Divide the step's query rows among the CTAs."""
        self._plan.update(self._starts, self.batch.context_lens)

    def run(self, layer: int) -> Tensor:
        """See :class:`AttentionPath`."""
        batch = self.batch
        return self._attend(
            batch.q[layer],
            batch.k(layer),
            batch.v(layer),
            batch.block_tables,
            batch.query_start,
            batch.seq_lens,
            batch.params,
            self._plan,
            out=self.out,
        )


def direct_path(batch: AttentionBatch) -> AttentionPath:
    """The path that the runner takes for this batch on its device."""
    if batch.device.type == "cpu":
        return CPUPath(batch)
    shape = batch.shape
    if batch.is_decode:
        from minillm.attention import cuda_decode

        if cuda_decode.supports(shape.dtype, shape.head_dim, shape.block_size, device_arch(batch.device)):
            return TunedDecode(batch)
        return Simple(batch)
    from minillm.attention import cuda_prefill

    if cuda_prefill.supports(shape.dtype, shape.head_dim, shape.block_size, device_arch(batch.device)):
        return TunedPrefill(batch)
    return Simple(batch)


def device_arch(device: torch.device) -> str:
    """The architecture that kernels are compiled for on `device`, as in 'sm_90a'."""
    from minillm.attention.cuda_build import arch_of

    return arch_of(torch.cuda.get_device_capability(device))


def copy_tokens(batch: AttentionBatch, layer: int) -> tuple[Tensor, Tensor]:
    """Materialise the first sequence's K and V [context, num_kv_heads, head_dim] one token at a time."""
    size, table, length = batch.shape.block_size, batch.tables[0], batch.context_lens[0]
    keys, values = batch.k(layer), batch.v(layer)
    k = torch.empty(
        length, batch.shape.num_kv_heads, batch.shape.head_dim, dtype=batch.shape.dtype, device=batch.device
    )
    v = torch.empty_like(k)
    for token in range(length):
        block, offset = table[token // size], token % size
        k[token] = keys[block, :, offset]
        v[token] = values[block, :, offset]
    return k, v


def _attend_tokens(batch: AttentionBatch, layer: int, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last token over k, v [context, num_kv_heads, head_dim]."""
    return attend_contiguous(
        batch.q[layer], k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0), batch.params.scale
    )
