"""The CPU path against the oracle, over shapes, lengths and batch mixtures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import PagedBatch, make_batch

from minillm.attention.cpu import GatherWorkspace, PagedAttentionContext
from minillm.attention.interface import LayerAttention
from minillm.attention.metadata import AttentionMetadata, PrefillSpan
from minillm.core.errors import ConfigError
from minillm.memory.paged_kv_cache import KVCacheSpec, PagedKVCache
from minillm.memory.swap_space import SwapSpace

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def check(batch: PagedBatch, params: LayerAttention, workspace: GatherWorkspace | None = None) -> torch.Tensor:
    out = batch.run(params, workspace)
    expected = batch.reference(params)
    assert out.shape == batch.q.shape
    assert out.dtype == batch.q.dtype
    error = (out.float() - expected.float()).abs().max().item()
    assert error <= TOLERANCE[batch.cache.spec.dtype] * max(1.0, expected.float().abs().max().item()), error
    return out


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_gqa_ratio(ratio, dtype):
    batch = make_batch(
        [1, 17, 40], [(9, 9), (5, 30)], heads=2 * ratio, kv_heads=2, head_dim=32, dtype=dtype, seed=ratio
    )
    check(batch, LayerAttention(32**-0.5))


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (24, 8), (24, 4), (64, 4), (16, 8)])
def test_head_counts_of_real_models(heads, kv_heads):
    check(make_batch([33, 5], [(20, 20)], heads=heads, kv_heads=kv_heads), LayerAttention(0.125))


@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 72, 80, 96, 128, 192, 256])
def test_head_dims(head_dim):
    batch = make_batch([3, 31], [(7, 7), (4, 21)], heads=4, kv_heads=2, head_dim=head_dim)
    check(batch, LayerAttention(head_dim**-0.5))


@pytest.mark.parametrize("block_size", [1, 2, 7, 8, 16, 32, 100, 128])
def test_lengths_around_block_boundaries(block_size):
    lens = sorted({max(1, n * block_size + d) for n in (1, 2, 3) for d in (-1, 0, 1)} | {1})
    chunks = [(min(3, n), n) for n in lens] + [(n, n) for n in lens]
    check(make_batch(lens, chunks, heads=4, kv_heads=2, head_dim=16, block_size=block_size), LayerAttention(0.25))


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 30, 31, 32, 33])
def test_sliding_window_sees_exactly_its_width(window, soft_cap):
    lens = sorted({max(1, window + d) for d in (-1, 0, 1, 16, 40)})
    chunks = [(n, n) for n in lens] + [(min(n, 6), n) for n in lens]
    batch = make_batch(lens, chunks, heads=6, kv_heads=2, head_dim=16, seed=window)
    params = LayerAttention(0.25, window, soft_cap)
    out = check(batch, params)
    wider = batch.reference(LayerAttention(0.25, window + 1, soft_cap))
    row = lens.index(window + 1)  # there one position more would be seen
    assert (out[row] - wider[row]).abs().max() > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_cap(dtype):
    batch = make_batch([4, 50], [(12, 12), (7, 7), (9, 40)], heads=8, kv_heads=4, head_dim=32, dtype=dtype)
    capped = check(batch, LayerAttention(1.0, None, 3.0))
    assert (capped.float() - batch.reference(LayerAttention(1.0)).float()).abs().max() > 0.05


@settings(max_examples=80, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 90), max_size=9),
    prefills=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), max_size=5),
    kv_heads=st.integers(1, 3),
    ratio=st.integers(1, 5),
    head_dim=st.sampled_from([16, 24, 64]),
    block_size=st.sampled_from([1, 3, 8, 16, 33]),
    window=st.none() | st.integers(1, 70),
    soft_cap=st.none() | st.floats(0.5, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_any_mixed_batch(decodes, prefills, kv_heads, ratio, head_dim, block_size, window, soft_cap, dtype, seed):
    if not decodes and not prefills:
        return
    batch = make_batch(
        decodes,
        [(query, query + before) for query, before in prefills],
        heads=kv_heads * ratio,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        seed=seed,
    )
    check(batch, LayerAttention(head_dim**-0.5, window, soft_cap))


@pytest.mark.parametrize("window", [None, 300])
def test_lengths_that_need_several_calls(window, monkeypatch):
    monkeypatch.setattr("minillm.attention.cpu_plan.CALL_COST_KV_ELEMENTS", 40_000)
    generator = torch.Generator().manual_seed(5)
    lens = torch.randint(1, 1500, (40,), generator=generator).tolist()
    chunks = [(600, 2000), (30, 700), (1, 900), (700, 700), (40, 40), (500, 900)]
    batch = make_batch(lens, chunks, heads=4, kv_heads=2, head_dim=128)
    params = LayerAttention(0.1, window)
    context = PagedAttentionContext(batch.cache, [params], batch.metadata)
    out = context.attend(0, batch.q, batch.k, batch.v)
    plan = context._plans[window, 4]
    assert len(plan.decodes) > 2
    assert len(plan.prefills) > 3
    assert (out - batch.reference(params)).abs().max() < 5e-6


def test_a_large_cached_chunk_is_tiled(monkeypatch):
    monkeypatch.setattr("minillm.attention.cpu_plan.MAX_SCORE_ELEMENTS", 500)
    batch = make_batch([], [(50, 90), (20, 20)], heads=4, kv_heads=2, head_dim=16)
    for params in (LayerAttention(0.25), LayerAttention(0.25, 12)):
        check(batch, params)


def test_layers_share_a_plan_but_not_their_window_cap_or_cache():
    batch = make_batch([40, 5], [(30, 30), (4, 25)], heads=4, kv_heads=2, head_dim=16, num_layers=4)
    layers = [LayerAttention(0.25), LayerAttention(0.25, 8), LayerAttention(0.5, None, 2.0), LayerAttention(0.25, 8)]
    context = PagedAttentionContext(batch.cache, layers, batch.metadata)
    for layer, params in enumerate(layers):
        q = torch.randn(batch.q.shape, generator=torch.Generator().manual_seed(layer))
        batch.q = q
        out = context.attend(layer, q, batch.k, batch.v)
        assert (out - batch.reference(params, layer)).abs().max() < 5e-6
    assert len(context._plans) == 2


def test_only_the_steps_own_slots_are_written():
    batch = make_batch([20, 7, 16], [(6, 6), (3, 19)])
    padded = batch.metadata.slot_mapping.clone()
    padded[1] = -1
    meta = AttentionMetadata(
        padded, batch.metadata.decode_block_tables, batch.metadata.decode_seq_lens, batch.metadata.prefills
    )
    before = batch.cache.store.clone()
    PagedAttentionContext(batch.cache, [LayerAttention(0.125)], meta).attend(0, batch.q, batch.k, batch.v)
    size = batch.cache.spec.block_size
    for token, slot in enumerate(padded.tolist()):
        if slot >= 0:
            before[0, 0, slot // size, :, slot % size] = batch.k[token]
            before[0, 1, slot // size, :, slot % size] = batch.v[token]
    pool = slice(0, batch.cache.num_blocks)
    assert torch.equal(batch.cache.store[:, :, pool], before[:, :, pool])


def test_a_row_of_nan_stays_alone():
    """Batch mates see nothing of a row whose q, k and v are NaN, whether it decodes or prefills."""
    for bad_row in ("decode", "fresh", "cached"):
        batch = make_batch([20, 7, 31], [(6, 6), (5, 5), (3, 19), (4, 30)])
        start, stop = {"decode": (0, 1), "fresh": (3, 9), "cached": (14, 17)}[bad_row]
        good = torch.ones(len(batch.q), dtype=torch.bool)
        good[start:stop] = False
        expected = batch.run(LayerAttention(0.125))[good]
        for tensor in (batch.q, batch.k, batch.v):
            tensor[start:stop] = float("nan")
        out = batch.run(LayerAttention(0.125))
        assert out[start:stop].isnan().all()
        assert torch.equal(out[good], expected)


def test_highest_blocks_give_the_same_bits_as_low_ones():
    low, high = (make_batch([40, 18], [(12, 12), (6, 30)], seed=3) for _ in range(2))
    total = high.cache.num_blocks
    shift = torch.arange(total - 1, -1, -1)
    high.cache.store[:, :, :total] = high.cache.store[:, :, shift]
    tables = total - 1 - high.metadata.decode_block_tables.clamp(max=total - 1)
    size = high.cache.spec.block_size
    slots = high.metadata.slot_mapping
    spans = [
        PrefillSpan(s.query_start, s.query_len, s.context_len, [total - 1 - b for b in s.block_table])
        for s in high.metadata.prefills
    ]
    high.metadata = AttentionMetadata(
        (total - 1 - slots // size) * size + slots % size, tables, high.metadata.decode_seq_lens, spans
    )
    params = LayerAttention(0.125)
    assert torch.equal(low.run(params), high.run(params))


def test_a_workspace_is_reused_and_grows():
    workspace = GatherWorkspace()
    for lens in ([5], [300, 200, 100], [8, 9], [400]):
        check(make_batch(lens, [(4, 60)]), LayerAttention(0.125), workspace)
    check(make_batch([50], dtype=torch.bfloat16), LayerAttention(0.125), workspace)


def test_queries_of_another_dtype_than_the_cache():
    batch = make_batch([9, 30], [(8, 8), (3, 20)], dtype=torch.bfloat16)
    batch.q, batch.k, batch.v = batch.q.float(), batch.k.float(), batch.v.float()
    out = batch.run(LayerAttention(0.125))
    assert out.dtype == torch.float32
    assert (out - batch.reference(LayerAttention(0.125))).abs().max() < 2e-2


def test_views_of_a_packed_projection_are_taken_as_they_are():
    batch = make_batch([9, 30], [(8, 8), (8, 8), (3, 20)])
    packed = torch.cat((batch.q, batch.k, batch.v), dim=1)
    expected = batch.run(LayerAttention(0.125))
    batch.q, batch.k, batch.v = packed[:, :9], packed[:, 9:12], packed[:, 12:]
    assert not batch.q.is_contiguous()
    assert torch.equal(batch.run(LayerAttention(0.125)), expected)


def test_solo_and_batched_rows_agree():
    lens = [3, 16, 17, 64, 100, 5]
    batch = make_batch(lens)
    together = batch.run(LayerAttention(0.125))
    for row in range(len(lens)):
        meta = AttentionMetadata(
            batch.metadata.slot_mapping[row : row + 1],
            batch.metadata.decode_block_tables[row : row + 1],
            batch.metadata.decode_seq_lens[row : row + 1],
        )
        context = PagedAttentionContext(batch.cache, [LayerAttention(0.125)], meta)
        alone = context.attend(0, *(x[row : row + 1] for x in (batch.q, batch.k, batch.v)))
        assert (alone[0] - together[row]).abs().max() < 2e-6


def test_offsets_beyond_32_bits():
    """B26: a pool of more than 2^31 elements of K; writes, copies, swaps and attention in its highest blocks."""
    spec = KVCacheSpec(num_layers=1, num_kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16)
    num_blocks = (1 << 31) // (8 * 128 * 16) + 4
    try:
        cache = PagedKVCache(spec, num_blocks)  # 8 GiB of address space; only the pages written become resident
    except ConfigError as error:
        pytest.skip(f"no address space for the pool: {error}")
    assert cache.k(0).numel() > 1 << 31
    params = LayerAttention(128**-0.5)
    small = make_batch([40], [(20, 20)], heads=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    small.cache.store.zero_()
    expected = small.run(params)
    low_to_high = [num_blocks - small.cache.num_blocks + block for block in range(small.cache.num_blocks)]
    shift = low_to_high[0]
    meta = small.metadata
    spans = [
        PrefillSpan(s.query_start, s.query_len, s.context_len, [b + shift for b in s.block_table])
        for s in meta.prefills
    ]
    moved = AttentionMetadata(
        meta.slot_mapping + shift * 16, meta.decode_block_tables + shift, meta.decode_seq_lens, spans
    )
    out = PagedAttentionContext(cache, [params], moved).attend(0, small.q, small.k, small.v)
    assert torch.equal(out, expected)
    for block, high in enumerate(low_to_high):
        assert torch.equal(cache.store[:, :, high], small.cache.store[:, :, block])
    cache.copy_blocks([(small.tables[0][0] + shift, 0)])
    assert torch.equal(cache.store[:, :, 0], small.cache.store[:, :, small.tables[0][0]])
    swap = SwapSpace(cache, 2)
    written = small.tables[1][0]
    swap.swap_out([written + shift], [1])
    swap.swap_in([1], [1])
    assert torch.equal(cache.store[:, :, 1], small.cache.store[:, :, written])
    assert cache.store[:, :, 1].any()
