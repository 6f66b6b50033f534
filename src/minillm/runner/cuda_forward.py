"""The forward pass on a GPU: decode steps over buffers that stay, replayed as graphs; all other steps launch by launch.

```
decode rows only   pack rows, tokens, positions, table changes ──one copy──► device
                   graph of the padded size: prepare_decode, decoder, output head, largest values
anything else      batch as built by CudaBatchBuilder ──► the same decoder, launched from here
```
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda import CudaAttention
from minillm.attention.cuda_prepare import UPDATE_INTS, DecodeBuffers, pack_step
from minillm.core.plan import StepPlan
from minillm.models.cuda_decoder import CudaDecoder, DecoderOps, why_not
from minillm.runner.batch_builder import StepBatch
from minillm.runner.cuda_batch_builder import CudaBatchBuilder
from minillm.runner.cuda_graphs import StepGraphs, cuda_capture, padded_sizes
from minillm.runner.device import StepDevice
from minillm.runner.step_handle import StepHandle

logger = logging.getLogger(__name__)


def fused_decoder(model: Any, attention: CudaAttention, ops: DecoderOps | None) -> CudaDecoder | None:
    """The model's fused forward pass, or None (and a line in the log) where its own has to do."""
    reason = why_not(model, attention.dtype)
    if reason is not None:
        logger.info("the forward pass is launched operation by operation, without CUDA graphs: %s", reason)
        return None
    return CudaDecoder(model, ops)


class CudaForward:
    """Forward passes of a decoder whose keys and values go to `attention`'s cache.

    `last_tokens` int64 [max_num_seqs]: the last token that each row sampled, where placeholders are looked up.
    """

    def __init__(
        self,
        decoder: CudaDecoder,
        attention: CudaAttention,
        builder: CudaBatchBuilder,
        device: StepDevice,
        last_tokens: Tensor,
        *,
        max_num_batched_tokens: int,
        graphs: bool,
    ) -> None:
        where, max_num_seqs = last_tokens.device, len(last_tokens)
        self._decoder, self._attention, self._builder, self._device = decoder, attention, builder, device
        self._last_tokens = last_tokens
        self.graphs = StepGraphs(padded_sizes(max_num_seqs), cuda_capture(where) if graphs else None)
        capacity = self.graphs.sizes[-1]
        self.buffers = DecodeBuffers(capacity, attention.table_width, where)
        self._workspace = decoder.workspace(max(max_num_batched_tokens, 1))
        # The graphs hold its address, while the other one may be replaced by a larger one.
        self._decode_workspace = decoder.workspace(capacity)
        config = decoder.model.config
        self._logits = torch.empty((capacity, config.vocab_size), dtype=torch.float32, device=where)
        self._largest = torch.empty(capacity, dtype=decoder.model.dtype, device=where)
        self._every_row = torch.arange(capacity, device=where)

    def run(self, batch: StepBatch) -> Tensor:
        """Hidden states [T, hidden_size] of a built batch, valid until the next call of this or `decode`."""
        if batch.num_tokens > self._workspace.capacity:
            self._workspace = self._decoder.workspace(batch.num_tokens)
        context = self._attention.begin(batch.metadata)
        return self._decoder.forward(batch.input_ids, batch.positions, context, self._workspace)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> float32 [R, vocab_size]."""
        return self._decoder.compute_logits(hidden)

    @staticmethod
    def takes(plan: StepPlan) -> bool:
        """Whether :meth:`decode` serves the plan: decode rows and nothing else."""
        return not plan.prefills and len(plan.decodes) > 0

    def prepare(self, plan: StepPlan) -> StepBatch:
        """Send what a decode step needs; its batch is on the device once :meth:`decode` has made it."""
        columns, buffers = plan.decodes, self.buffers
        count, rows = len(columns), columns.rows
        message = pack_step(rows, columns.token_ids, columns.positions, self._updates(rows), buffers.capacity)
        self._device.upload.into(buffers.step, message)
        return StepBatch(
            input_ids=buffers.input_ids[:count],
            positions=buffers.positions[:count],
            slots=np.array(columns.kv_slots, dtype=np.int64),
            metadata=None,
            placeholders=None,
            logit_tokens=self._every_row[:count],
            logit_rows=None,
            sampling_index=buffers.rows[:count],
            sampling_rows=rows,
            output_indices=columns.output_indices,
        )

    def decode(self, handle: StepHandle) -> None:
        """The prepared step up to its logits; the device's results are valid until the next call."""
        count = handle.batch.num_tokens
        self.graphs.run(self.graphs.size_for(count), self._decode_rows)
        handle.hidden = self._decode_workspace.hidden[:count]
        handle.logits = self._logits[:count]
        handle.largest = self._device.to_host(self._largest[:count])

    def close(self) -> None:
        """Drop the graphs."""
        self.graphs.close()

    def _updates(self, rows: list[int]) -> np.ndarray:
        """Table changes to travel with the step: int32 [U, 3] (row, index, block). Others are applied apart."""
        positions, blocks = self._builder.take_updates()
        nothing = np.zeros((0, UPDATE_INTS), dtype=np.int32)
        if not len(positions):
            return nothing
        changed, index = np.divmod(positions, self._attention.table_width)
        # Each row's own thread block applies its changes, so a row without one needs another way.
        if len(positions) > self.buffers.max_updates or not np.isin(changed, rows).all():
            self._attention.update_tables(*self._device.upload.together([positions, blocks]))
            return nothing
        return np.stack((changed, index, blocks), axis=1).astype(np.int32)

    def _decode_rows(self, size: int) -> None:
        """The launches of a step of `size` rows; the only host state that they follow is the size."""
        buffers = self.buffers
        context = self._attention.begin_decode(size, buffers, self._last_tokens)
        hidden = self._decoder.forward(
            buffers.input_ids[:size], buffers.positions[:size], context, self._decode_workspace
        )
        self._decoder.compute_logits(hidden, self._logits[:size])
        torch.linalg.vector_norm(hidden, torch.inf, -1, out=self._largest[:size])
