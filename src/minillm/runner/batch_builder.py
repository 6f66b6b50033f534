"""From a StepPlan to the flattened tensors of one forward pass.

A builder keeps each row's block table and writes only what a plan changes. Decode rows come
first, one token each, then the prefill chunks in plan order; nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minillm.attention.metadata import AttentionMetadata, PrefillSpan
from minillm.core.plan import PrefillChunk, StepPlan, TableUpdate


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's flattened batch of T tokens and its R sampling rows, in the order that `StepPlan` states.

    Tensors are on the runner's device, lists and ``slots`` on the host.

    - ``input_ids``, ``positions``: int64 [T]. Placeholders hold 0 until the runner fills them in.
    - ``slots``: [T], the KV slot of each token.
    - ``metadata``: what the device's attention needs to know.
    - ``placeholders``: (index into the T tokens, row whose last sampled token goes there), or None.
    - ``logit_tokens``: the tokens, in order and each once, whose hidden state goes through the output head; of those,
      sampling row i reads number ``logit_rows[i]``, or number i where ``logit_rows`` is None.
    - ``sampling_index``: ``sampling_rows`` as int64 [R].
    - ``draws``: ``sampling_rows`` and ``output_indices`` as int32 [R], for sampling kernels; None: not sent along.
    - ``padded``: for a padded step ids and positions with the padding behind them; then ``metadata`` is the padded
      step's too.
    """

    input_ids: Tensor
    positions: Tensor
    slots: np.ndarray | list[int]
    metadata: Any
    placeholders: tuple[Tensor, Tensor] | None
    logit_tokens: Tensor
    logit_rows: Tensor | None
    sampling_index: Tensor
    sampling_rows: list[int]
    output_indices: list[int]
    draws: tuple[Tensor, Tensor] | None = None
    padded: tuple[Tensor, Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return len(self.input_ids)


class BatchColumns(NamedTuple):
    """A step's batch on the host, whichever device it is for. Arrays are int64."""

    input_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    spans: list[PrefillSpan]
    unknown: np.ndarray
    """Decode rows (as positions in the batch) whose token the plan in flight samples."""
    unknown_rows: np.ndarray
    logit_tokens: list[int]
    logit_rows: list[int] | None
    sampling_rows: list[int]
    output_indices: list[int]


def batch_columns(plan: StepPlan, block_size: int, padded_to: int = 0) -> BatchColumns:
    """The arithmetic from a plan to its flattened batch. Columns of tokens get `padded_to` entries if they have fewer:
    token 0 at position 0, slot -1."""
    decodes, chunks = plan.decodes, plan.prefills
    count = len(decodes)
    input_ids, positions, slots, spans = _prefill_columns(chunks, count, block_size, padded_to)
    input_ids[:count] = decodes.token_ids
    positions[:count] = decodes.positions
    slots[:count] = decodes.kv_slots
    unknown = np.flatnonzero(input_ids[:count] < 0)
    unknown_rows = unknown
    if len(unknown):
        unknown_rows = np.array(decodes.rows, dtype=np.int64)[unknown]
        input_ids[unknown] = 0

    sampling_rows, output_indices = decodes.rows, decodes.output_indices
    logit_tokens = list(range(count))
    logit_rows = list(logit_tokens)
    if any(chunk.sample_rows for chunk in chunks):
        sampling_rows, output_indices = list(sampling_rows), list(output_indices)
        for chunk, span in zip(chunks, spans, strict=True):
            if chunk.sample_rows:
                logit_rows.extend([len(logit_tokens)] * len(chunk.sample_rows))
                logit_tokens.append(span.query_start + span.query_len - 1)
                sampling_rows.extend(chunk.sample_rows)
                output_indices.extend([chunk.output_index] * len(chunk.sample_rows))
    shared = len(logit_rows) != len(logit_tokens)
    return BatchColumns(
        input_ids=input_ids,
        positions=positions,
        slots=slots,
        spans=spans,
        unknown=unknown,
        unknown_rows=unknown_rows,
        logit_tokens=logit_tokens,
        logit_rows=logit_rows if shared else None,
        sampling_rows=sampling_rows,
        output_indices=output_indices,
    )


def _prefill_columns(
    chunks: list[PrefillChunk], first_token: int, block_size: int, padded_to: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[PrefillSpan]]:
    """Ids, positions and slots [T] with the chunks' parts and padding filled in, and the chunks' spans."""
    total = first_token + sum(chunk.end - chunk.start for chunk in chunks)
    input_ids, positions, slots = (np.empty(max(total, padded_to), dtype=np.int64) for _ in range(3))
    input_ids[total:], positions[total:], slots[total:] = 0, 0, -1
    spans = []
    begin = first_token
    for chunk in chunks:
        length = chunk.end - chunk.start
        own = slice(begin, begin + length)
        at = np.arange(chunk.start, chunk.end)
        first_block = chunk.start // block_size
        table = np.array(chunk.block_table[first_block : -(-chunk.end // block_size)], dtype=np.int64)
        input_ids[own] = chunk.token_ids
        positions[own] = at
        slots[own] = table[at // block_size - first_block] * block_size + at % block_size
        spans.append(PrefillSpan(begin, length, chunk.end, chunk.block_table))
        begin += length
    return input_ids, positions, slots, spans


class BatchBuilder:
    """Block tables of the rows on the host, and batches for the CPU's attention."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int64)
        """int64 [max_num_seqs, blocks of a longest sequence]; entries behind a row's last block are stale."""

    def update_tables(self, updates: list[TableUpdate]) -> None:
        """Apply a plan's table updates."""
        for row, start, blocks in updates:
            self.block_tables[row, start : start + len(blocks)] = blocks

    def build(self, plan: StepPlan) -> StepBatch:
        """The plan's flattened batch; its table updates must have been applied."""
        columns = batch_columns(plan, self.block_size)
        metadata = AttentionMetadata(torch.from_numpy(columns.slots), *self._decode_tables(plan), columns.spans)
        placeholders = None
        if len(columns.unknown):
            placeholders = torch.from_numpy(columns.unknown), torch.from_numpy(columns.unknown_rows)
        logit_rows = columns.logit_rows
        return StepBatch(
            input_ids=torch.from_numpy(columns.input_ids),
            positions=torch.from_numpy(columns.positions),
            slots=columns.slots,
            metadata=metadata,
            placeholders=placeholders,
            logit_tokens=torch.tensor(columns.logit_tokens, dtype=torch.int64),
            logit_rows=None if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int64),
            sampling_index=torch.tensor(columns.sampling_rows, dtype=torch.int64),
            sampling_rows=columns.sampling_rows,
            output_indices=columns.output_indices,
        )

    def _decode_tables(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Block tables [D, blocks of the longest row] and lengths [D] of the decode rows."""
        lens = np.array(plan.decodes.positions, dtype=np.int64) + 1
        width = -(-int(lens.max(initial=1)) // self.block_size)
        tables = self.block_tables[plan.decodes.rows, :width] if len(lens) else np.zeros((0, 1), dtype=np.int64)
        return torch.from_numpy(tables), torch.from_numpy(lens)
