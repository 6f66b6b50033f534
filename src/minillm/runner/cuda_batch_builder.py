"""From a StepPlan to tensors on a GPU: one packed transfer a step, and one for changes of block tables."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from torch import Tensor

from minillm.attention.cuda import CudaAttention, CudaMetadata
from minillm.core.plan import StepPlan, TableUpdate
from minillm.memory.staging import Upload, packed_bytes
from minillm.runner.batch_builder import BatchColumns, StepBatch, batch_columns


@dataclass(frozen=True, slots=True)
class Padding:
    """Numbers of tokens and sequences to pad a step to, and memory for it (:meth:`CudaBatchBuilder.message_bytes`).

    Steps that are padded alike, and alike have decode rows or not, find what their launches read in the same places.
    """

    tokens: int
    sequences: int
    target: Tensor


@dataclass(frozen=True, slots=True)
class _Sequences:
    """The columns of a step's sequences, as in :class:`minillm.attention.cuda.CudaMetadata`; int32 but `rows`."""

    rows: np.ndarray
    decode_lens: np.ndarray
    prefill_lens: np.ndarray
    prefill_start: np.ndarray


class CudaBatchBuilder:
    """As :class:`minillm.runner.batch_builder.BatchBuilder`, with the rows' block tables on the device.

    A batch's tensors are valid until the next one is built.
    """

    def __init__(self, attention: CudaAttention, block_size: int, upload: Upload) -> None:
        self.block_size = block_size
        self._attention = attention
        self._upload = upload
        self._updates: list[TableUpdate] = []

    def update_tables(self, updates: list[TableUpdate]) -> None:
        """Note a plan's table updates; they travel with the next batch."""
        self._updates.extend(updates)

    def build(self, plan: StepPlan, padding: Padding | None = None) -> StepBatch:
        """The plan's flattened batch, on its way to the device."""
        self.apply(self.take_updates())
        tokens, count = plan.num_tokens, len(plan.decodes)
        columns = batch_columns(plan, self.block_size, padding.tokens if padding is not None else 0)
        sequences = _sequences(plan, columns) if padding is None else _padded_sequences(plan, columns, padding)
        device = self._upload.together(_message(columns, sequences), padding.target if padding is not None else None)
        input_ids, positions, slots, rows, decode_lens, prefill_lens, prefill_start = device[:7]
        unknown, unknown_rows, logit_tokens, logit_rows, sampling_index, drawn_rows, drawn_indices = device[7:]
        if padding is None:
            longest = max(sequences.decode_lens.max(initial=1), sequences.prefill_lens.max(initial=1))
            max_blocks = -(-int(longest) // self.block_size)
        else:
            max_blocks = self._attention.table_width
        metadata = CudaMetadata(
            num_decodes=len(decode_lens),
            first_prefill=count if padding is None else 0,
            slot_mapping=slots,
            rows=rows,
            max_blocks=max_blocks,
            decode_lens=decode_lens,
            prefill_lens=prefill_lens,
            prefill_query_start=prefill_start,
            host_query_start=sequences.prefill_start,
            host_context_lens=sequences.prefill_lens,
        )
        return StepBatch(
            input_ids=input_ids[:tokens],
            positions=positions[:tokens],
            slots=columns.slots[:tokens],
            metadata=metadata,
            placeholders=(unknown, unknown_rows) if len(columns.unknown) else None,
            logit_tokens=logit_tokens,
            logit_rows=logit_rows if columns.logit_rows is not None else None,
            sampling_index=sampling_index,
            sampling_rows=columns.sampling_rows,
            output_indices=columns.output_indices,
            draws=(drawn_rows, drawn_indices),
            padded=(input_ids, positions) if padding is not None else None,
        )

    @staticmethod
    def message_bytes(tokens: int, max_num_seqs: int) -> int:
        """Memory that steps of so many tokens and sequences need at most, padding included."""
        long, ints = np.empty(max_num_seqs, dtype=np.int64), np.empty(max_num_seqs + 1, dtype=np.int32)
        return packed_bytes([np.empty(tokens, dtype=np.int64)] * 3 + [long] * 6 + [ints] * 5)

    def apply(self, updates: dict[int, int]) -> None:
        """Have the device change its block tables, before anything that is enqueued later reads them."""
        if updates:
            self._attention.update_tables(*self._upload.together(self._update_arrays(updates)))

    def take_updates(self) -> dict[int, int]:
        """What was noted and not built yet: flat position in the block tables [rows, table_width] -> last block id."""
        width, found = self._attention.table_width, {}
        for row, start, blocks in self._updates:
            at = row * width + start
            if len(blocks) == 1:  # a decode row's next block
                found[at] = blocks[0]
            else:
                found.update(zip(range(at, at + len(blocks)), blocks, strict=True))
        self._updates.clear()
        return found

    @staticmethod
    def _update_arrays(updates: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Their positions int64 [U] and block ids int32 [U]."""
        count = len(updates)
        return np.fromiter(updates.keys(), np.int64, count), np.fromiter(updates.values(), np.int32, count)


def _message(columns: BatchColumns, sequences: _Sequences) -> list[np.ndarray]:
    """What travels, those columns first whose sizes a padding fixes."""
    logit_rows = columns.logit_rows
    return [
        columns.input_ids,
        columns.positions,
        columns.slots,
        sequences.rows,
        sequences.decode_lens,
        sequences.prefill_lens,
        sequences.prefill_start,
        columns.unknown,
        columns.unknown_rows,
        np.array(columns.logit_tokens, dtype=np.int64),
        np.array(logit_rows if logit_rows is not None else (), dtype=np.int64),
        np.array(columns.sampling_rows, dtype=np.int64),
        np.array(columns.sampling_rows, dtype=np.int32),
        np.array(columns.output_indices, dtype=np.int32),
    ]


def _sequences(plan: StepPlan, columns: BatchColumns) -> _Sequences:
    """Decode rows and chunks apart."""
    chunks, count = plan.prefills, len(plan.decodes)
    return _Sequences(
        rows=np.array([*plan.decodes.rows, *(chunk.row for chunk in chunks)], dtype=np.int64),
        decode_lens=(columns.positions[:count] + 1).astype(np.int32),
        prefill_lens=np.array([chunk.end for chunk in chunks], dtype=np.int32),
        prefill_start=np.array([0, *accumulate(chunk.end - chunk.start for chunk in chunks)], dtype=np.int32),
    )


def _padded_sequences(plan: StepPlan, columns: BatchColumns, padding: Padding) -> _Sequences:
    """Both kernels see all sequences of the step; the decode kernel none where there is no decode row."""
    chunks, count, sequences = plan.prefills, len(plan.decodes), padding.sequences
    total, end = count + len(chunks), plan.num_tokens
    rows, prefill_lens = np.zeros(sequences, dtype=np.int64), np.zeros(sequences, dtype=np.int32)
    rows[:total] = [*plan.decodes.rows, *(chunk.row for chunk in chunks)]
    prefill_lens[:count] = columns.positions[:count] + 1
    prefill_lens[count:total] = [chunk.end for chunk in chunks]
    start = np.full(sequences + 1, end, dtype=np.int32)
    start[: count + 1] = count
    start[count : total + 1] = [*accumulate((chunk.end - chunk.start for chunk in chunks), initial=count)]
    decode_lens = np.full(sequences if count else 0, -1, dtype=np.int32)
    decode_lens[:count] = prefill_lens[:count]
    return _Sequences(rows, decode_lens, prefill_lens, start)
