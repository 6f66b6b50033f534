"""The peers that the CUDA kernels are timed against: FlashInfer's paged wrappers and torch's fused attention.

FlashInfer is an optional peer of the benchmark, never a dependency: it is imported where it is used, and a machine
without it times the others. Every variant that its documentation offers for this case is a contender of its own, and
tables compare with the best one by shape:

- decode: with CUDA cores and with tensor cores (``use_tensor_cores``), planned for fixed lengths and for CUDA graphs
  (``use_cuda_graph``), over both page layouts (HND, ours, and NHD);
- prefill: the ``fa2`` and ``fa3`` backends over both layouts.

Its ``plan()`` runs on the host once per step and is outside of the timing, as our own per-step plan kernel is; both
are timed by themselves.

torch's attention reads K and V that are contiguous already. Its variants are the backend that it chooses by itself,
each of the fused ones, and the query heads of a group passed either as heads (``enable_gqa``) or, in decode, as query
rows of their KV head ("packed").
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minillm.bench.attention_batch import AttentionBatch
from minillm.bench.attention_paths import AttentionPath

WORKSPACE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Contender:
    """One entry of a table: whose it is, which variant, and how it is made (which may fail)."""

    family: str
    variant: str
    make: Callable[[], AttentionPath]


def has_flashinfer() -> bool:
    """Whether FlashInfer is installed."""
    return importlib.util.find_spec("flashinfer") is not None


class PeerStore:
    """What the peers of one batch share: copies of K and V in other layouts, page indices, FlashInfer's workspace."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.batch = batch
        device = batch.device
        self.indices = torch.tensor([b for table in batch.tables for b in table], dtype=torch.int32, device=device)
        starts = torch.tensor([0, *batch.counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        size = batch.shape.block_size
        # On the host, where FlashInfer's plan() reads them: as device tensors they would be copied back first.
        self.page_start = starts
        self.last_page_len = torch.tensor([(n - 1) % size + 1 for n in batch.context_lens], dtype=torch.int32)
        self.query_start = batch.query_start.cpu()
        self._layouts: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._workspace: Tensor | None = None

    @property
    def workspace(self) -> Tensor:
        """FlashInfer's scratch memory, one for all its wrappers: they never run at the same time."""
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.batch.device)
        return self._workspace

    def kv(self, layout: str) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer: pages as 'HND' or 'NHD', or 'contiguous' [S, num_kv_heads, context, head_dim]."""
        if layout not in self._layouts:
            batch = self.batch
            layers = range(batch.layers)
            if layout == "HND":
                pairs = [(batch.k(i), batch.v(i)) for i in layers]
            elif layout == "NHD":
                pages = [(batch.k(i), batch.v(i)) for i in layers]
                pairs = [(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()) for k, v in pages]
            else:
                pairs = [batch.contiguous_kv(i) for i in layers]
            self._layouts[layout] = pairs
        return self._layouts[layout]


class _FlashInfer(ABC):
    """What FlashInfer's two wrappers have in common."""

    @abstractmethod
    def plan(self) -> None:
        """FlashInfer's division of the step, on the host."""

    def prepare(self) -> None:
        """See :class:`~minillm.bench.attention_paths.AttentionPath`."""
        self.plan()

    def __init__(self, store: PeerStore, layout: str) -> None:
        self.store = store
        self.out = store.batch.new_output()
        self.layout = layout
        self.kv = store.kv(layout)
        self.wrapper: Any = None

    def run(self, layer: int) -> Tensor:
        """See :class:`~minillm.bench.attention_paths.AttentionPath`."""
        result: Tensor = self.wrapper.run(self.store.batch.q[layer], self.kv[layer], out=self.out)
        return result


class FlashInferDecode(_FlashInfer):
    """``BatchDecodeWithPagedKVCacheWrapper``."""

    name = "flashinfer"

    def __init__(self, store: PeerStore, layout: str, *, tensor_cores: bool, graph_plan: bool) -> None:
        import flashinfer

        super().__init__(store, layout)
        device = store.batch.device
        buffers: dict[str, Tensor] = {}
        if graph_plan:
            buffers = {
                "paged_kv_indptr_buffer": torch.empty_like(store.page_start, device=device),
                "paged_kv_indices_buffer": torch.empty_like(store.indices),
                "paged_kv_last_page_len_buffer": torch.empty_like(store.last_page_len, device=device),
            }
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            store.workspace, layout, use_cuda_graph=graph_plan, use_tensor_cores=tensor_cores, **buffers
        )
        self.plan()

    def plan(self) -> None:
        """FlashInfer's division of the step, on the host."""
        store, shape = self.store, self.store.batch.shape
        self.wrapper.plan(
            store.page_start,
            store.indices,
            store.last_page_len,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            sm_scale=shape.scale,
        )


class FlashInferPrefill(_FlashInfer):
    """``BatchPrefillWithPagedKVCacheWrapper``."""

    name = "flashinfer"

    def __init__(self, store: PeerStore, layout: str, *, backend: str) -> None:
        import flashinfer

        super().__init__(store, layout)
        self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(store.workspace, layout, backend=backend)
        self.plan()

    def plan(self) -> None:
        """FlashInfer's division of the step, on the host."""
        store, shape = self.store, self.store.batch.shape
        self.wrapper.plan(
            store.query_start,
            store.page_start,
            store.indices,
            store.last_page_len,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            causal=True,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            sm_scale=shape.scale,
        )


class TorchAttention:
    """``scaled_dot_product_attention`` with one backend, over contiguous K and V."""

    name = "torch"

    def __init__(self, store: PeerStore, backend: SDPBackend | None, *, packed: bool) -> None:
        """With `backend` None torch chooses."""
        batch = store.batch
        self.batch = batch
        self.backend = backend
        self.packed = packed
        self.kv = store.kv("contiguous")
        sequences, shape = len(batch.tables), batch.shape
        rows = batch.q[0].shape[0] // sequences
        group = shape.num_heads // shape.num_kv_heads
        if packed:
            self.q = [q.view(sequences, shape.num_kv_heads, group, shape.head_dim) for q in batch.q]
        else:
            self.q = [q.view(sequences, rows, shape.num_heads, shape.head_dim).transpose(1, 2) for q in batch.q]
        self.options: dict[str, Any] = {"scale": batch.params.scale, "is_causal": rows > 1}
        if not packed and group > 1:
            self.options["enable_gqa"] = True

    def plan(self) -> None:
        """Nothing."""

    def prepare(self) -> None:
        """Nothing."""

    def run(self, layer: int) -> Tensor:
        """See :class:`~minillm.bench.attention_paths.AttentionPath`."""
        keys, values = self.kv[layer]
        with nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            out = F.scaled_dot_product_attention(self.q[layer], keys, values, **self.options)
        return out if self.packed else out.transpose(1, 2)  # views that the gate reshapes: no copy in the timed part


def decode_contenders(batch: AttentionBatch) -> Iterator[Contender]:
    """All peers of a decode batch with equal context lengths."""
    store = PeerStore(batch)
    if has_flashinfer():
        for layout in ("HND", "NHD"):
            for cores in (False, True):
                for graph in (False, True):
                    yield Contender(
                        "flashinfer",
                        f"{'tensor' if cores else 'cuda'} cores {layout}{' graph plan' if graph else ''}",
                        lambda layout=layout, cores=cores, graph=graph: FlashInferDecode(  # type: ignore[misc]
                            store, layout, tensor_cores=cores, graph_plan=graph
                        ),
                    )
    yield _torch_contender(store, None, packed=False)
    for packed in (False, True):
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            yield _torch_contender(store, backend, packed)


def prefill_contenders(batch: AttentionBatch) -> Iterator[Contender]:
    """All peers of a prefill batch; torch's only where the queries are the whole context, which all its backends do."""
    store = PeerStore(batch)
    if has_flashinfer():
        for backend in ("fa3", "fa2"):
            for layout in ("HND", "NHD"):
                yield Contender(
                    "flashinfer",
                    f"{backend} {layout}",
                    lambda layout=layout, backend=backend: FlashInferPrefill(store, layout, backend=backend),  # type: ignore[misc]
                )
    if batch.query_lens == batch.context_lens:
        for kernel in (None, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            yield _torch_contender(store, kernel, packed=False)


def _torch_contender(store: PeerStore, backend: SDPBackend | None, packed: bool) -> Contender:
    kernel = "its choice" if backend is None else backend.name.removesuffix("_ATTENTION").lower()
    return Contender(
        "torch", f"{kernel}{' packed' if packed else ''}", lambda: TorchAttention(store, backend, packed=packed)
    )
