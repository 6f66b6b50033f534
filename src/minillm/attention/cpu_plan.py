"""How the CPU path cuts a step's batch into few, nearly rectangular pieces. Numpy on lengths only; no torch.

Sequences of unlike length share one padded call only where the padding costs less than another call would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minillm.attention.metadata import PrefillSpan

IntArray = NDArray[np.int64]

CALL_COST_KV_ELEMENTS = 120_000
"""Fixed cost of one decode call (about 60 us inside a step on two threads, a third of that alone and hot) in K elements
gathered and attended (about 0.5 ns each, bf16)."""
CALL_COST_SCORE_ELEMENTS = 3_500_000
"""Fixed cost of one prefill call (about 60 us) in score x head_dim products over all heads."""
MAX_GATHER_ELEMENTS = 4 << 20
"""K elements gathered for one call: bounds the workspace (16 MiB each for K and V in fp32) and stays near the cache."""
MAX_SCORE_ELEMENTS = 4 << 20
"""Score positions (query x key, one head) of one masked prefill call: bounds its mask."""


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Which part of each row's context a call reads, in whole blocks.

    Row i reads blocks [first_block[i], first_block[i] + num_blocks[i]) of its table, and may see positions
    [low[i], high[i]) of those, counted from the start of its first block.
    """

    first_block: IntArray
    num_blocks: IntArray
    low: IntArray
    high: IntArray


def visible_range(last_len: IntArray, first_len: IntArray, window: int | None, block_size: int) -> KeyRange:
    """Key range of rows whose queries stand at lengths first_len..last_len (a decode row has both equal)."""
    begin = np.zeros_like(last_len) if window is None else np.maximum(first_len - window, 0)
    first_block = begin // block_size
    return KeyRange(
        first_block=first_block,
        num_blocks=-(-last_len // block_size) - first_block,
        low=begin - first_block * block_size,
        high=last_len - first_block * block_size,
    )


def split_by_length(lengths: IntArray, call_cost: float, max_area: float) -> list[IntArray]:
    """Row numbers in groups of like length, longest first, each group padded to its longest row.

    Splits wherever the padding saved exceeds `call_cost` (in the unit of `lengths`), then cuts groups so that
    rows x longest stays within `max_area` (a group has at least one row).
    """
    order = np.argsort(-lengths, kind="stable")
    groups: list[IntArray] = []
    pending = [order]
    while pending:
        rows = pending.pop()
        saved = (lengths[rows[0]] - lengths[rows]) * np.arange(len(rows), 0, -1)
        at = int(saved.argmax())
        if saved[at] > call_cost:
            pending.extend((rows[at:], rows[:at]))
            continue
        step = max(1, int(max_area // max(int(lengths[rows[0]]), 1)))
        groups.extend(rows[begin : begin + step] for begin in range(0, len(rows), step))
    return groups


def tile_spans(spans: Sequence[PrefillSpan], max_scores: int) -> list[PrefillSpan]:
    """Cut chunks whose query x context area exceeds `max_scores` into shorter ones with shorter contexts."""
    tiles: list[PrefillSpan] = []
    for span in spans:
        before = span.context_len - span.query_len
        step = max(1, max_scores // span.context_len)
        for begin in range(0, span.query_len, step):
            count = min(step, span.query_len - begin)
            tiles.append(PrefillSpan(span.query_start + begin, count, before + begin + count, span.block_table))
    return tiles


def group_spans(spans: Sequence[PrefillSpan], call_cost: float, max_area: float) -> list[list[PrefillSpan]]:
    """Group chunks for padded calls: one joins while the padding it causes costs less than a call of its own."""
    groups: list[list[PrefillSpan]] = []
    queries = contexts = area = 0
    for span in sorted(spans, key=lambda s: (s.context_len, s.query_len), reverse=True):
        own = span.query_len * span.context_len
        if groups:
            wider = max(queries, span.query_len)
            padded = wider * contexts * (len(groups[-1]) + 1)
            if padded - area - own <= call_cost and padded <= max_area:
                groups[-1].append(span)
                queries, area = wider, padded
                continue
        groups.append([span])
        queries, contexts, area = span.query_len, span.context_len, own
    return groups
