"""From a StepPlan to tensors on a GPU: one packed transfer a step, table changes included."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from minillm.attention.cuda import CudaAttention, CudaMetadata
from minillm.core.plan import StepPlan, TableUpdate
from minillm.memory.staging import Upload
from minillm.runner.batch_builder import StepBatch, batch_columns


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

    def build(self, plan: StepPlan) -> StepBatch:
        """The plan's flattened batch, on its way to the device."""
        columns = batch_columns(plan, self.block_size)
        chunks, count = plan.prefills, len(plan.decodes)
        rows = np.array([*plan.decodes.rows, *(chunk.row for chunk in chunks)], dtype=np.int64)
        context_lens = np.empty(len(rows), dtype=np.int32)
        context_lens[:count] = columns.positions[:count] + 1
        context_lens[count:] = [chunk.end for chunk in chunks]
        prefill_start = np.array([0, *accumulate(chunk.end - chunk.start for chunk in chunks)], dtype=np.int32)
        query_start = np.concatenate((np.arange(count, dtype=np.int32), prefill_start + np.int32(count)))
        update_positions, update_blocks = self.update_arrays(self.take_updates())
        logit_rows = columns.logit_rows
        device = self._upload.together(
            [
                columns.input_ids,
                columns.positions,
                columns.slots,
                rows,
                columns.unknown,
                columns.unknown_rows,
                np.array(columns.logit_tokens, dtype=np.int64),
                np.array(logit_rows if logit_rows is not None else (), dtype=np.int64),
                np.array(columns.sampling_rows, dtype=np.int64),
                update_positions,
                context_lens,
                query_start,
                prefill_start,
                update_blocks,
            ]
        )
        if len(update_positions):
            self._attention.update_tables(device[9], device[13])
        metadata = CudaMetadata(
            num_decodes=count,
            max_blocks=-(-int(context_lens.max(initial=1)) // self.block_size),
            slot_mapping=device[2],
            rows=device[3],
            context_lens=device[10],
            query_start=device[11],
            prefill_query_start=device[12],
            host_query_start=prefill_start,
            host_context_lens=context_lens[count:],
        )
        return StepBatch(
            input_ids=device[0],
            positions=device[1],
            slots=columns.slots,
            metadata=metadata,
            placeholders=(device[4], device[5]) if len(columns.unknown) else None,
            logit_tokens=device[6],
            logit_rows=device[7] if logit_rows is not None else None,
            sampling_index=device[8],
            sampling_rows=columns.sampling_rows,
            output_indices=columns.output_indices,
        )

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
    def update_arrays(updates: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Their positions int64 [U] and block ids int32 [U]."""
        count = len(updates)
        return np.fromiter(updates.keys(), np.int64, count), np.fromiter(updates.values(), np.int32, count)
