"""From plans to flattened tensors."""

from __future__ import annotations

import torch

from minillm.core.plan import DecodeBatch, PrefillChunk, StepPlan, TableUpdate
from minillm.runner.batch_builder import BatchBuilder


def chunk(row, ids, start, table, sample_rows=(), output_index=0) -> PrefillChunk:
    return PrefillChunk(f"p{row}", row, ids, start, start + len(ids), table, sample_rows, output_index, False)


def mixed_plan() -> StepPlan:
    decodes = DecodeBatch(["a", "b", "c"], [2, 0, 5], [11, -1, -1], [4, 9, 0], [7 * 4 + 0, 3 * 4 + 1, 40], [1, 6, 3])
    prefills = [
        chunk(1, [21, 22, 23], 3, [8, 2], sample_rows=(1,)),
        chunk(3, [31], 0, [5]),
        chunk(4, [41, 42, 43, 44, 45], 6, [9, 1, 6], sample_rows=(4, 6, 7), output_index=2),
    ]
    updates = [TableUpdate(2, 0, [4, 7]), TableUpdate(0, 0, [1, 2]), TableUpdate(0, 2, [3]), TableUpdate(5, 0, [10])]
    return StepPlan(3, decodes, prefills, table_updates=updates)


def build(plan: StepPlan, builder: BatchBuilder | None = None):
    builder = builder or BatchBuilder(8, 32, 4)
    builder.update_tables(plan.table_updates)
    return builder.build(plan)


def test_tokens_positions_and_slots_are_flattened_decodes_first():
    batch = build(mixed_plan())
    assert batch.num_tokens == mixed_plan().num_tokens == 12
    assert batch.input_ids.tolist() == [11, 0, 0, 21, 22, 23, 31, 41, 42, 43, 44, 45]
    assert batch.positions.tolist() == [4, 9, 0, 3, 4, 5, 0, 6, 7, 8, 9, 10]
    chunks = [8 * 4 + 3, 2 * 4, 2 * 4 + 1, 5 * 4, 1 * 4 + 2, 1 * 4 + 3, 6 * 4, 6 * 4 + 1, 6 * 4 + 2]
    assert batch.metadata.slot_mapping.tolist() == [28, 13, 40, *chunks]
    assert batch.input_ids.dtype == batch.positions.dtype == batch.metadata.slot_mapping.dtype == torch.int64


def test_decode_rows_have_their_tables_and_lengths():
    meta = build(mixed_plan()).metadata
    assert meta.decode_seq_lens.tolist() == [5, 10, 1]
    assert meta.decode_block_tables.shape == (3, 3)
    assert meta.decode_block_tables[0, :2].tolist() == [4, 7]
    assert meta.decode_block_tables[1].tolist() == [1, 2, 3]
    assert meta.decode_block_tables[2, 0].item() == 10


def test_placeholders_name_the_row_whose_last_token_is_wanted():
    batch = build(mixed_plan())
    assert batch.placeholders is not None
    tokens, rows = batch.placeholders
    assert tokens.tolist() == [1, 2]
    assert rows.tolist() == [0, 5]
    plan = mixed_plan()
    plan.decodes.token_ids = [11, 12, 13]
    assert build(plan).placeholders is None


def test_spans_end_at_their_chunks():
    spans = build(mixed_plan()).metadata.prefills
    assert [(s.query_start, s.query_len, s.context_len) for s in spans] == [(3, 3, 6), (6, 1, 1), (7, 5, 11)]
    assert list(spans[2].block_table) == [9, 1, 6]


def test_sampling_rows_follow_the_plan_and_a_groups_token_goes_through_the_head_once():
    batch = build(mixed_plan())
    assert batch.sampling_rows == [2, 0, 5, 1, 4, 6, 7]
    assert batch.output_indices == [1, 6, 3, 0, 2, 2, 2]
    assert batch.logit_tokens.tolist() == [0, 1, 2, 5, 11]
    assert batch.logit_rows is not None
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4, 4, 4]
    assert len(batch.sampling_rows) == mixed_plan().num_sampling_rows


def test_only_decodes_or_only_prefills_or_nothing():
    plan = mixed_plan()
    decodes = build(StepPlan(1, plan.decodes, [], table_updates=plan.table_updates))
    assert decodes.num_tokens == 3
    assert decodes.logit_rows is None
    assert not decodes.metadata.prefills
    prefills = build(StepPlan(1, DecodeBatch(), plan.prefills[:2]))
    assert prefills.metadata.num_decodes == 0
    assert prefills.sampling_rows == [1]
    assert prefills.logit_tokens.tolist() == [2]
    nothing = build(StepPlan(1, DecodeBatch(), []))
    assert nothing.num_tokens == 0
    assert nothing.sampling_rows == []


def test_a_plans_own_lists_are_left_alone():
    plan = mixed_plan()
    rows, indices = list(plan.decodes.rows), list(plan.decodes.output_indices)
    build(plan)
    assert plan.decodes.rows == rows
    assert plan.decodes.output_indices == indices
    assert plan.decodes.token_ids == [11, -1, -1]


def test_tables_keep_earlier_entries_and_rows_can_be_given_away():
    builder = BatchBuilder(4, 32, 4)
    builder.update_tables([TableUpdate(1, 0, [5, 6, 7])])
    builder.update_tables([TableUpdate(1, 3, [8]), TableUpdate(2, 0, [1])])
    assert builder.block_tables[1, :4].tolist() == [5, 6, 7, 8]
    builder.update_tables([TableUpdate(1, 0, [9])])
    assert builder.block_tables[1, 0] == 9
    assert builder.block_tables[2, 0] == 1


def test_a_longest_sequence_has_its_table_entries():
    assert BatchBuilder(2, 33, 16).block_tables.shape == (2, 3)
    assert BatchBuilder(2, 32, 16).block_tables.shape == (2, 2)
