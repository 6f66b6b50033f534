"""What one step's attention needs to know about its flattened batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One prefill chunk of the flattened batch: rows [query_start, query_start + query_len) of q.

    `context_len` counts the sequence's tokens up to and including this chunk, all of which have (or now get) KV in
    `block_table`; the chunk's queries are the last `query_len` of them.
    """

    query_start: int
    query_len: int
    context_len: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A step's batch in its flattened order: D decode rows with one token each, then the prefill chunks.

    - ``slot_mapping`` int64 [T]: KV slot of each token; negative is padding.
    - ``decode_block_tables`` int64 [D, max_blocks]: entries behind a row's last block are ignored.
    - ``decode_seq_lens`` int64 [D]: tokens of each row including the one computed now, at least 1.

    Host tensors: the CPU path plans its gathers from them; a device backend copies what it needs.
    """

    slot_mapping: Tensor
    decode_block_tables: Tensor = field(default_factory=lambda: torch.zeros(0, 1, dtype=torch.int64))
    decode_seq_lens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    prefills: Sequence[PrefillSpan] = ()

    @property
    def num_decodes(self) -> int:
        """Number of decode rows D."""
        return len(self.decode_seq_lens)
