"""The forward pass on a GPU: decode steps and steps with short prefills replayed as graphs, all else launch by launch.

```
decode rows only     pack rows, tokens, positions, table changes ──one copy──► device
                     graph of the padded size: prepare_decode, decoder, output head, flags of what is not finite
with short prefills  batch as built by CudaBatchBuilder, padded, in its place ──► graph of the padded size: decoder
anything else        batch as built by CudaBatchBuilder ──► the same decoder, launched from here
```
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda import CudaAttention
from minillm.attention.cuda_prepare import DecodeBuffers, pack_step
from minillm.core.plan import StepPlan
from minillm.models.cuda_decoder import CudaDecoder, DecoderOps, why_not
from minillm.runner.batch_builder import StepBatch
from minillm.runner.cuda_batch_builder import CudaBatchBuilder
from minillm.runner.cuda_graphs import StepGraphs, cuda_capture, padded_sizes
from minillm.runner.device import StepDevice
from minillm.runner.finite_rows import flag_not_finite
from minillm.runner.sampler import Sampler
from minillm.runner.short_steps import ShortSteps, sizes_for
from minillm.runner.step_handle import StepHandle

logger = logging.getLogger(__name__)


def _report_columns(report: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a step's report, uint8: sampled tokens int64 [rows], rows without one bool [rows], and in what is left,
    bool, tokens of the batch whose hidden state is not finite."""
    tokens, failed, not_finite = report.split((8 * rows, rows, len(report) - 9 * rows))
    return tokens.view(torch.int64), failed.view(torch.bool), not_finite.view(torch.bool)


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
        capture = cuda_capture(where) if graphs else None
        self.graphs = StepGraphs(padded_sizes(max_num_seqs), capture)
        capacity = self.graphs.sizes[-1]
        self.buffers = DecodeBuffers(capacity, attention.table_width, where)
        self._workspace = decoder.workspace(max(max_num_batched_tokens, 1))
        # The graphs hold its address, while the other one may be replaced by a larger one.
        self._decode_workspace = decoder.workspace(capacity)
        config = decoder.model.config
        self._logits = torch.empty((capacity, config.vocab_size), dtype=torch.float32, device=where)
        # What the host wants to know of a step, for one copy: tokens, then flags.
        most_tokens = max(capacity, sizes_for(decoder)[-1])
        self._report = torch.zeros(9 * capacity + most_tokens, dtype=torch.uint8, device=where)
        self._tokens, self._failed, self._not_finite = _report_columns(self._report, capacity)
        self.short = ShortSteps(decoder, attention, max_num_seqs, capture, self._not_finite)
        self._every_row = torch.arange(capacity, device=where)

    def run(self, batch: StepBatch) -> Tensor:
        """Hidden states [T, hidden_size] of a built batch, valid until the next call of this or `decode`."""
        if batch.padded is not None:
            return self.short.run(batch)
        context = self._attention.begin(batch.metadata)
        if batch.num_tokens > self._workspace.capacity:
            self._workspace = self._decoder.workspace(batch.num_tokens)
        return self._decoder.forward(batch.input_ids, batch.positions, context, self._workspace)

    def flags(self, batch: StepBatch) -> Tensor:
        """bool [T], on the device: what :meth:`run` found not finite of the padded batch; until the next call."""
        return self._not_finite[: batch.num_tokens]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> float32 [R, vocab_size]."""
        return self._decoder.compute_logits(hidden)

    @staticmethod
    def takes(plan: StepPlan) -> bool:
        """Whether :meth:`decode` serves the plan: decode rows and nothing else."""
        return not plan.prefills and len(plan.decodes) > 0

    def prepare(self, plan: StepPlan) -> StepBatch:
        """Send what the step needs."""
        if self.takes(plan):
            return self._prepare_decode(plan)
        return self._builder.build(plan, self.short.padding(plan))

    def _prepare_decode(self, plan: StepPlan) -> StepBatch:
        """A batch that is on the device once :meth:`decode` has made it."""
        columns, buffers = plan.decodes, self.buffers
        count, rows = len(columns), columns.rows
        message = pack_step(
            rows,
            columns.token_ids,
            columns.positions,
            columns.output_indices,
            self._updates(rows),
            buffers.capacity,
        )
        self._device.upload.into(buffers.step, message)
        return StepBatch(
            input_ids=buffers.input_ids[:count],
            positions=buffers.positions[:count],
            slots=columns.kv_slots,
            metadata=None,
            placeholders=None,
            logit_tokens=self._every_row[:count],
            logit_rows=None,
            sampling_index=buffers.rows[:count],
            sampling_rows=rows,
            output_indices=columns.output_indices,
            draws=(buffers.sent_rows[:count], buffers.output_indices[:count]),
        )

    def decode(self, handle: StepHandle) -> None:
        """The prepared step up to its logits; the device's results are valid until the next call."""
        count = handle.batch.num_tokens
        self.graphs.run(self.graphs.size_for(count), self._decode_rows)
        handle.hidden = self._decode_workspace.hidden[:count]
        handle.logits = self._logits[:count]
        handle.not_finite = self._not_finite[:count]  # to travel to the host with the tokens

    def sample(self, handle: StepHandle, sampler: Sampler) -> bool:
        """Sample a step whose rows ask for nothing but a draw, with what is on the device already.

        False, with nothing done, where there is more to it: edits of the logits, scores, no kernels for it.
        """
        batch, kernels = handle.batch, sampler.kernels
        assert handle.logits is not None
        if kernels is None or sampler.state.slot_params is None or batch.draws is None:
            return False
        rows = np.array(batch.sampling_rows, dtype=np.int64)
        if not sampler.state.assigned[rows].all():
            return False
        kinds = sampler.kinds(rows)
        if len(kinds.scored) or kinds.may_edit(np.array(batch.output_indices, dtype=np.int64)):
            return False
        count = len(rows)
        tokens = self._tokens[:count]
        kernels.sample(
            handle.logits,
            *batch.draws,
            sampler.state.slot_params.on_device(),
            tokens,
            self._failed[:count],
            random=kinds.random,
            filtered=kinds.filtered,
        )
        self._last_tokens.index_copy_(0, batch.sampling_index, tokens)
        tokens, failed, not_finite = _report_columns(self._device.to_host(self._report), len(self._tokens))
        handle.tokens, handle.unsampled = tokens[:count], failed[:count]
        handle.not_finite = not_finite[: batch.num_tokens]
        return True

    def warm_up(self) -> None:
        """Capture decode steps of all sizes ahead of their use. Writes slot 0, and row 0's part of the block tables."""
        message = pack_step([0], [0], [0], [0], [0, 0, 0], self.buffers.capacity)
        self._device.upload.into(self.buffers.step, message)
        self.graphs.warm_up(self._decode_rows)

    def close(self) -> None:
        """Drop the graphs."""
        self.graphs.close()
        self.short.close()

    @property
    def graph_bytes(self) -> int:
        """Device memory, beside torch's own, that graphs may come to take."""
        return self.graphs.reserved_bytes + self.short.reserved_bytes

    def _updates(self, rows: list[int]) -> list[int]:
        """Table changes to travel with the step: (row, index, block) one after the other. Others are applied apart."""
        updates = self._builder.take_updates()
        if not updates:
            return []
        width = self._attention.table_width
        changes = [(*divmod(position, width), block) for position, block in updates.items()]
        # Each row's own thread block applies its changes, so a row without one needs another way.
        if len(changes) <= self.buffers.max_updates and {change[0] for change in changes} <= set(rows):
            return [number for change in changes for number in change]
        self._builder.apply(updates)
        return []

    def _decode_rows(self, size: int) -> None:
        """The launches of a step of `size` rows; the only host state that they follow is the size."""
        buffers = self.buffers
        context = self._attention.begin_decode(size, buffers, self._last_tokens)
        hidden = self._decoder.forward(
            buffers.input_ids[:size], buffers.positions[:size], context, self._decode_workspace
        )
        self._decoder.compute_logits(hidden, self._logits[:size])
        flag_not_finite(hidden, self._not_finite[:size])
