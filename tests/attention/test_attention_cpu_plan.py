"""How batches are cut into calls: everything covered once, bounds kept, padding worth its price."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minillm.attention.cpu_plan import group_spans, split_by_length, tile_spans, visible_range
from minillm.attention.metadata import PrefillSpan


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=80),
    cost=st.integers(0, 2000),
    area=st.integers(1, 50_000),
)
def test_split_covers_every_row_once_within_the_area(lengths, cost, area):
    groups = split_by_length(np.array(lengths), cost, area)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[row] for row in group)
        assert len(group) == 1 or len(group) * longest <= area


def test_split_keeps_like_lengths_together_and_sets_one_long_row_apart():
    assert len(split_by_length(np.full(64, 100), 200, 1e9)) == 1
    assert len(split_by_length(np.arange(90, 106), 200, 1e9)) == 1
    groups = split_by_length(np.array([60] * 31 + [4000]), 200, 1e9)
    assert [len(group) for group in groups] == [1, 31]
    assert groups[0][0] == 31


@given(lengths=st.lists(st.integers(1, 3000), min_size=2, max_size=60))
def test_no_further_split_of_a_group_would_pay(lengths):
    array = np.array(lengths)
    for group in split_by_length(array, 300, 1e12):
        longest = array[group[0]]
        assert all((longest - array[group[i]]) * (len(group) - i) <= 300 for i in range(len(group)))


@given(
    spans=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=12),
    limit=st.integers(1, 20_000),
)
def test_tiles_cover_each_chunk_and_keep_contexts(spans, limit):
    made = [PrefillSpan(1000 * i, q, q + before, [i]) for i, (q, before) in enumerate(spans)]
    tiles = tile_spans(made, limit)
    for span in made:
        own = [tile for tile in tiles if tile.block_table is span.block_table]
        position = span.query_start
        for tile in own:
            assert tile.query_start == position
            position += tile.query_len
            end = span.context_len - (span.query_start + span.query_len - position)
            assert tile.context_len == end
            assert tile.query_len == 1 or tile.query_len * tile.context_len <= limit
        assert position == span.query_start + span.query_len


@given(
    spans=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000)), min_size=1, max_size=20),
    cost=st.integers(0, 10**6),
)
def test_groups_hold_every_chunk_once_within_the_area(spans, cost):
    made = [PrefillSpan(i, q, q + before, []) for i, (q, before) in enumerate(spans)]
    groups = group_spans(made, cost, 10**6)
    assert sorted(span.query_start for group in groups for span in group) == list(range(len(made)))
    for group in groups:
        padded = max(s.query_len for s in group) * max(s.context_len for s in group) * len(group)
        assert len(group) == 1 or padded <= 10**6


def test_like_chunks_share_a_call_and_unlike_ones_do_not():
    like = [PrefillSpan(i, 40 + i % 3, 40 + i % 3, []) for i in range(16)]
    assert len(group_spans(like, 6000, 10**7)) == 1
    unlike = [PrefillSpan(0, 1000, 1000, []), PrefillSpan(1, 10, 10, []), PrefillSpan(2, 12, 12, [])]
    assert [len(group) for group in group_spans(unlike, 6000, 10**7)] == [1, 2]


def test_visible_range_starts_at_the_windows_first_block():
    lens = np.array([1, 16, 17, 40, 64])
    whole = visible_range(lens, lens, None, 16)
    assert whole.num_blocks.tolist() == [1, 1, 2, 3, 4]
    assert whole.low.tolist() == [0] * 5
    assert whole.high.tolist() == lens.tolist()
    windowed = visible_range(lens, lens, 20, 16)
    assert windowed.first_block.tolist() == [0, 0, 0, 1, 2]
    assert windowed.num_blocks.tolist() == [1, 1, 2, 2, 2]
    assert (windowed.first_block * 16 + windowed.low).tolist() == [0, 0, 0, 20, 44]
    assert (windowed.high - windowed.low).tolist() == [1, 16, 17, 20, 20]
