"""What a decode step reads, kept on the device: one small message from the host a step, all else is made there.

```
host: rows, tokens (or -1), positions, table updates ──one int32 message──► prepare_decode
                                                                               │
      input ids, positions, context lengths, slots, the step's block tables ◄──┘   at fixed addresses
```
Fixed addresses and a fixed number of rows let a captured graph hold the whole step (``kernels/prepare_decode.cu`` has
the message's layout). Rows of the batch that no sequence has are padding: they have no context and write nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_build import KernelSpec, get_kernel
from minillm.attention.cuda_checks import CheckedLayouts, check_tensor

HEADER_INTS = 4
COLUMNS = 4
UPDATE_INTS = 3
"""As in the kernel: ints before the columns, columns, ints of a table update (row, index, block)."""

_THREADS = 128

_SPEC = KernelSpec("prepare_decode.cu", "prepare_decode")

_checked = CheckedLayouts()


def specs(arch: str) -> list[KernelSpec]:
    """Every instance that may be launched; the same on all architectures."""
    return [_SPEC]


class DecodeBuffers:
    """The device's side of a decode step of up to `capacity` rows; a step of n rows uses the first n of everything.

    - ``step`` int32: the host's message; ``max_updates`` table updates fit into it. ``sent_rows`` and
      ``output_indices`` int32 [capacity] are two of its columns.
    - ``input_ids``, ``positions``, ``slot_mapping``, ``rows`` int64 [capacity]; ``context_lens`` int32 [capacity].
    - ``tables`` int32 [capacity, table_width]: block tables of the step's rows, entries in use.
    """

    def __init__(self, capacity: int, table_width: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.capacity = capacity
        self.max_updates = 2 * capacity
        self.step = zeros(HEADER_INTS + COLUMNS * capacity + UPDATE_INTS * self.max_updates, dtype=torch.int32)
        columns = self.step[HEADER_INTS : HEADER_INTS + COLUMNS * capacity].view(COLUMNS, capacity)
        self.sent_rows, self.output_indices = columns[0], columns[3]
        self.input_ids, self.positions, self.slot_mapping, self.rows = (zeros(capacity) for _ in range(4))
        self.context_lens = zeros(capacity, dtype=torch.int32)
        self.tables = zeros(capacity, table_width, dtype=torch.int32)


def pack_step(
    rows: Sequence[int],
    token_ids: Sequence[int],
    positions: Sequence[int],
    output_indices: Sequence[int],
    updates: Sequence[int],
    capacity: int,
) -> np.ndarray:
    """The host's message: columns of at most `capacity` entries; `updates` are (row, index, block), flat."""
    count, end = len(rows), HEADER_INTS + COLUMNS * capacity
    message = np.zeros(end + len(updates), dtype=np.int32)
    message[0], message[1] = count, len(updates) // UPDATE_INTS
    for i, column in enumerate((rows, token_ids, positions, output_indices)):
        first = HEADER_INTS + i * capacity
        message[first : first + count] = column
    message[end:] = updates
    return message


def prepare_decode(num_rows: int, buffers: DecodeBuffers, tables: Tensor, last_tokens: Tensor, block_size: int) -> None:
    """Fill the first `num_rows` rows of the buffers from the message in ``buffers.step``.

    ``tables`` int32 [max_num_seqs, table_width]: block tables by row, changed by the message's updates;
    ``last_tokens`` int64 [max_num_seqs] stand in for input tokens of -1. Runs on the current stream; capturable.
    Raises ValueError for shapes, dtypes and devices that don't fit.
    """
    layout = CheckedLayouts.of(tables, last_tokens, buffers.tables)
    if layout not in _checked:
        device = buffers.step.device
        check_tensor("tables", tables, (None, buffers.tables.shape[1]), torch.int32, device)
        check_tensor("last_tokens", last_tokens, (len(tables),), torch.int64, device)
        _checked.add(layout)
    if not 1 <= num_rows <= buffers.capacity:
        raise ValueError(f"num_rows={num_rows} must be between 1 and {buffers.capacity}")
    get_kernel(_SPEC, tables.device).launch(
        num_rows,
        _THREADS,
        (
            buffers.input_ids,
            buffers.positions,
            buffers.context_lens,
            buffers.slot_mapping,
            buffers.rows,
            buffers.tables,
            tables,
            buffers.step,
            last_tokens,
            np.int32(buffers.capacity),
            np.int32(tables.shape[1]),
            np.int32(block_size),
        ),
    )
