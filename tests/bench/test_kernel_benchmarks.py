"""What the kernel benchmarks are made of, on the CPU; the peers' tables from made-up rows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from minillm.bench import common, materialize, paged_attention, peers, plots, swap
from minillm.bench.attention_batch import (
    AttentionBatch,
    AttentionShape,
    WrongResultError,
    error_of,
    gate,
)
from minillm.bench.attention_paths import Contiguous, CPUPath, Gather, TokenLoop, attend_contiguous
from minillm.bench.timing import PathTime, PathTimer
from minillm.memory.paged_kv_cache import KVCacheSpec
from peer_rows import decode_rows, peer_row

CPU = torch.device("cpu")
GQA = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, block_size=8, dtype=torch.float32)


def quiet(_: str) -> None:
    pass


# ---- The batch and the gate


@pytest.mark.parametrize("path", [CPUPath, Contiguous, Gather, TokenLoop])
@pytest.mark.parametrize("length", [1, 8, 9, 61])
def test_every_path_gives_the_references_result_in_every_layer(path, length: int) -> None:
    batch = AttentionBatch(GQA, [1], [length], device=CPU, layers=2, seed=5)
    made = path(batch)
    made.plan()
    for layer in range(2):
        gate(made.name, made.run(layer), batch.reference(layer), torch.float32)


def test_layers_differ_and_block_tables_are_scrambled() -> None:
    batch = AttentionBatch(GQA, [1, 1], [64, 40], device=CPU, layers=2)
    assert not torch.equal(batch.k(0), batch.k(1))
    assert batch.tables[0] != sorted(batch.tables[0])
    assert sorted(batch.tables[0] + batch.tables[1]) == list(range(13))


def test_contiguous_kv_of_a_batch_is_what_the_pages_hold() -> None:
    batch = AttentionBatch(GQA, [20, 20], [20, 20], device=CPU)
    keys, values = batch.contiguous_kv(0)
    out = attend_contiguous(batch.q[0], keys, values, GQA.scale)
    assert error_of(out, batch.reference(0)).within(1e-5)


def test_the_gate_lets_no_wrong_or_unwritten_result_through() -> None:
    batch = AttentionBatch(GQA, [1], [40], device=CPU)
    right = batch.reference(0)
    with pytest.raises(WrongResultError, match="planted is wrong and was not timed"):
        gate("planted", right * 1.001, right, torch.float32)
    assert gate("planted", right * 1.001, right, torch.bfloat16).relative == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(WrongResultError, match="nan"):
        gate("unwritten", batch.new_output(), right, torch.bfloat16)
    many = torch.randn(400, 6, 16)
    one_head = many.clone()
    one_head[7, 3] *= 1.03
    assert error_of(one_head, many).relative < 5e-3  # within the bound of the whole, not of the row
    with pytest.raises(WrongResultError, match=r"worst row 0\.03"):
        gate("one head", one_head, many, torch.bfloat16)


def test_bytes_and_operations_are_counted_by_hand() -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    assert shape.kv_bytes([3, 5]) == 2 * 8 * 2 * 8 * 2
    # Queries at positions 3, 4 of 5 see 4 and 5 keys; a decode row of 3 sees 3.
    assert shape.flops([2, 1], [5, 3]) == 4 * (4 + 5 + 3) * 4 * 8


def test_peer_prefill_operations_match_the_published_rates() -> None:
    """852 us at 645 TFLOP/s and 421 us at 632 TFLOP/s, as recorded for FlashAttention-3."""
    shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128)
    assert shape.flops([8192], [8192]) / 852e-6 / 1e12 == pytest.approx(645, rel=0.002)
    assert shape.flops([512] * 4, [8192] * 4) / 421e-6 / 1e12 == pytest.approx(632, rel=0.002)


# ---- Timing


def test_path_time_columns_are_read_back() -> None:
    time = PathTime.of([3.0, 1.0, 2.0, 10.0], wall_ms=4.5)
    assert (time.iterations, time.median_ms, time.mean_ms, time.min_ms, time.max_ms) == (4, 2.5, 4.0, 1.0, 10.0)
    row = time.columns("x")
    assert PathTime.from_columns("x", row) == time
    assert PathTime.from_columns("x", dict.fromkeys(row, "")) is None


def test_slow_calls_are_repeated_less_often() -> None:
    calls = []
    timer = PathTimer(CPU)
    time = timer.time(lambda: calls.append(torch.randn(200_000).sum()), 1000, max_seconds=0.02)
    assert 3 <= time.iterations < 1000
    assert len(calls) == 3 + 1 + 2 * time.iterations
    assert 0 < time.min_ms <= time.median_ms <= time.max_ms


# ---- The programs


def test_a_wrong_copy_is_not_timed(monkeypatch) -> None:
    batch = AttentionBatch(GQA, [1], [20], device=CPU, layers=2)
    materialize.check(batch, token_loop=True)
    right = batch.cache.materialize_request_kv

    def off_by_one(table, length, layer=None):
        k, v = right(table, length, layer)
        return k, v.roll(1, -3)

    monkeypatch.setattr(batch.cache, "materialize_request_kv", off_by_one)
    with pytest.raises(WrongResultError, match="20 tokens"):
        materialize.check(batch, token_loop=False)


def test_analysis_finds_the_line_through_the_medians() -> None:
    def row(tokens: int) -> dict[str, str]:
        time = PathTime(3, 0.5 + tokens * 0.01, 0, 0, 0, 0)
        blank = dict.fromkeys(time.columns("one_layer"), "")
        return {"context_len": str(tokens), **time.columns("token_loop"), **blank, "all_layers_median_ms": ""}

    (cost,) = materialize.analyze([row(100), row(200), row(400)])
    assert cost.path == "token_loop" and cost.r_squared == pytest.approx(1)
    assert cost.fixed_ms == pytest.approx(0.5) and cost.us_per_token == pytest.approx(10)


def test_swap_measures_both_directions_after_a_round_trip(monkeypatch) -> None:
    spec = KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=16, block_size=8)
    options = swap.Options(device=CPU, spec=spec, blocks=(4,), repeats=2)
    rows = [{key: str(value) for key, value in row.items()} for row in swap.measure(options, quiet)]
    assert [(row["blocks"], row["direction"]) for row in rows] == [("4", "out"), ("4", "in")]
    assert all(float(row["swap_gbps"]) > 0 and row["hidden_share"] == "" for row in rows)
    assert swap.verdicts(rows) == [] and len(swap.table_cells(rows)[1]) == 2
    at = {"blocks": "256", "direction": "out"}
    assert swap.verdicts([{**at, "swap_gbps": "39", "share_of_plain": "0.81"}])[0].met
    assert not swap.verdicts([{**at, "swap_gbps": "39", "share_of_plain": "0.79"}])[0].met
    monkeypatch.setattr(swap.SwapSpace, "swap_in", lambda self, slots, blocks: None)
    with pytest.raises(WrongResultError, match="round trip"):
        swap.measure(options, quiet)


# ---- The peers' tables


def test_the_tables_hold_the_shapes_that_are_asked_for() -> None:
    assert len(peers.DECODE_SHAPES) == len(set(peers.DECODE_SHAPES)) == 18
    assert len(peers.PREFILL_SHAPES) == len(set(peers.PREFILL_SHAPES)) == 8
    assert set(peers.DECODE_RATES) <= set(peers.DECODE_SHAPES)
    assert peers.DECODE_SHAPES[5].name == "64 x 4,096" and peers.PREFILL_SHAPES[2].name == "4 x 512 on 8,192"
    assert peers.PREFILL_SHAPES[1].name == "8 x 1,024"


def test_comparisons_take_each_familys_best_variant() -> None:
    items = list(peers.comparisons(decode_rows(0.5)))
    assert [item.shape for item in items] == list(peers.DECODE_SHAPES)
    for item in items:
        assert item.best["flashinfer"]["variant"] == "quick" and "torch" not in item.best
        assert item.ratio == pytest.approx(2.0, rel=1e-3) and math.isnan(item.us("torch"))


def test_family_means_are_over_the_shapes_that_both_have() -> None:
    assert peers.family_means(decode_rows(0.5)) == {"flashinfer": pytest.approx(2.0, rel=1e-3)}


def test_verdicts_follow_the_rows() -> None:
    fast = peers.verdicts("decode", decode_rows(0.8))
    assert [verdict.met for verdict in fast] == [True] * 5
    slow = peers.verdicts("decode", decode_rows(1.06))
    assert [verdict.met for verdict in slow[:2]] == [False, False]
    assert peers.verdicts("decode", [row for row in decode_rows(1.0) if row["family"] == "minillm"]) == []
    prefill = [
        row
        for shape in peers.PREFILL_SHAPES
        for row in (
            peer_row(shape, "minillm", "direct", 12.0, "prefill"),
            peer_row(shape, "flashinfer", "fa3 HND", 10.0, "prefill"),
        )
    ]
    (verdict,) = peers.verdicts("prefill", prefill)
    assert verdict.met and verdict.found == "0.833"


def test_a_contender_that_cannot_be_made_gets_a_dash() -> None:
    columns, cells = peers.table_cells("decode", decode_rows(0.8))
    assert cells[0][columns.index("torch, us")] == "-"
    assert common.markdown_table(columns, cells).splitlines()[1].startswith("| --- | ---")


def test_without_matplotlib_the_message_names_the_extra(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Exception, match=r"minillm-runtime\[benchmark\]"):
        plots.draw_peers(decode_rows(0.8), Path("never.png"))


def test_geometric_mean() -> None:
    assert common.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(common.geometric_mean([]))


def test_paged_attention_verdicts_follow_the_rows() -> None:
    row = {"direct_path": "direct", "context_len": "4096", "speedup_over_token_loop": "170"}
    replay = {"direct_replay_us": "8.0", "contiguous_replay_us": "8.1"}
    found = paged_attention.verdicts([{**row, **replay, "speedup_over_contiguous": "0.99"}])
    assert [verdict.met for verdict in found] == [True, False, True]
    assert paged_attention.verdicts([{**row, "direct_path": "cpu", "speedup_over_contiguous": "0.5"}]) == []
