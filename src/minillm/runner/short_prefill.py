"""Prefill of a few tokens as CUDA graphs: a short prompt, or what a cached prefix leaves of one.

Up to some hundred tokens a GPU is done with a layer's kernels before Python has launched the next ones. So these steps
are padded to a few sizes and captured, as decode steps are. The chunks may be any: kernels in a graph read their number
and lengths from the prefill plan's lists on the device, which stay in their place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.attention.cuda import CudaAttention
from minillm.models.cuda_decoder import CudaDecoder
from minillm.runner.batch_builder import StepBatch
from minillm.runner.cuda_graphs import Capture, StepGraphs

SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
"""Tokens to pad to; padding costs what its share of a step does."""

_LAUNCH_SECONDS = 2e-4
_OPERATIONS_PER_SECOND = 5e14
"""What a layer's launches take from Python, and what a GPU computes in that time (H200, bfloat16): roughly how many
tokens there are below which launching is the slower. It decides on speed only."""


def sizes_for(decoder: CudaDecoder) -> list[int]:
    """The sizes at which launching takes longer than computing."""
    layer = decoder.model.layers[0]
    operations = 2 * sum(x.in_features * x.out_features for x in (layer.qkv, layer.output, layer.gate_up, layer.down))
    most = _LAUNCH_SECONDS * _OPERATIONS_PER_SECOND / operations
    return [size for size in SIZES if size <= most] or [SIZES[0]]


class ShortPrefill:
    """Steps of prefill chunks alone, of at most as many tokens as the largest size."""

    def __init__(
        self, decoder: CudaDecoder, attention: CudaAttention, max_num_seqs: int, capture: Capture | None
    ) -> None:
        self.graphs = StepGraphs(sizes_for(decoder), capture)
        self._decoder, self._attention = decoder, attention
        most, device = self.graphs.sizes[-1], decoder.model.device
        self._workspace = decoder.workspace(most)
        self._input_ids, self._positions, self._slot_mapping = (
            torch.zeros(most, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._tables = torch.zeros((max_num_seqs, attention.table_width), dtype=torch.int32, device=device)
        self._layout: object = None

    def takes(self, batch: StepBatch) -> bool:
        """Whether the step is short, and without decode rows."""
        return not batch.metadata.num_decodes and batch.num_tokens <= self.graphs.sizes[-1]

    def run(self, batch: StepBatch) -> Tensor | None:
        """Hidden states [T, hidden_size], valid until the next call. None: the step's attention is not such that a
        graph could hold it; it has been begun."""
        tokens = batch.num_tokens
        size = self.graphs.size_for(tokens)
        attention = self._attention
        attention.begin(batch.metadata)
        layout = attention.prefill_layout
        if layout is None:
            return None
        if layout != self._layout:  # lists have moved since
            self.graphs.forget()
            self._layout = layout
        self._input_ids[:tokens].copy_(batch.input_ids)
        self._positions[:tokens].copy_(batch.positions)
        self._slot_mapping[:tokens].copy_(batch.metadata.slot_mapping)
        if tokens < size:
            self._slot_mapping[tokens:size].fill_(-1)
        attention.settle(self._slot_mapping[:size], self._tables)
        self.graphs.run(size, self._step)
        return self._workspace.hidden[:tokens]

    def _step(self, size: int) -> None:
        """The launches of a step padded to `size` tokens."""
        self._decoder.forward(self._input_ids[:size], self._positions[:size], self._attention, self._workspace)
