"""The paged cache against plain indexing: writes, padding, copies, clearing, sizing."""

from __future__ import annotations

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.core.errors import ConfigError
from minillm.memory.paged_kv_cache import KVCacheSpec, PagedKVCache, available_memory, default_num_blocks


def make_cache(num_blocks=6, block_size=4, layers=2, heads=3, dim=8, dtype=torch.float32) -> PagedKVCache:
    spec = KVCacheSpec(num_layers=layers, num_kv_heads=heads, head_dim=dim, block_size=block_size, dtype=dtype)
    cache = PagedKVCache(spec, num_blocks)
    cache.store.copy_(torch.randn(cache.store.shape).to(dtype))
    return cache


def new_kv(cache: PagedKVCache, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (tokens, cache.spec.num_kv_heads, cache.spec.head_dim)
    return torch.randn(shape).to(cache.spec.dtype), torch.randn(shape).to(cache.spec.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32, 64, 128])
def test_materialise_gives_back_what_was_written_through_a_scrambled_table(dtype, block_size):
    cache = make_cache(num_blocks=7, block_size=block_size, dtype=dtype)
    for length in {1, block_size, block_size + 1, 3 * block_size - 1, 4 * block_size}:
        table = torch.randperm(7)[: -(-length // block_size)]
        position = torch.arange(length)
        slots = table[position // block_size] * block_size + position % block_size
        written = [new_kv(cache, length) for _ in range(2)]
        for layer, (k, v) in enumerate(written):
            cache.write(layer, k, v, slots)
        keys, values = cache.materialize_request_kv(table.tolist(), length)
        for layer, (k, v) in enumerate(written):
            assert torch.equal(keys[layer], k)
            assert torch.equal(values[layer], v)
            one_key, one_value = cache.materialize_request_kv(table, length, layer)
            assert torch.equal(one_key, k)
            assert torch.equal(one_value, v)
            assert one_key.is_contiguous()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_write_changes_exactly_its_slots(data):
    block_size = data.draw(st.integers(1, 9))
    cache = make_cache(num_blocks=5, block_size=block_size)
    chosen = data.draw(st.lists(st.integers(0, cache.num_slots - 1), unique=True, min_size=1, max_size=12))
    padding = data.draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
    slots = [-1 if pad else slot for slot, pad in zip(chosen, padding, strict=True)]
    before = cache.store.clone()
    k, v = new_kv(cache, len(slots))
    cache.write(1, k, v, torch.tensor(slots))
    expected = before.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[1, 0, slot // block_size, :, slot % block_size] = k[token]
            expected[1, 1, slot // block_size, :, slot % block_size] = v[token]
    pool = slice(0, cache.num_blocks)
    assert torch.equal(cache.store[:, :, pool], expected[:, :, pool])


def test_padding_does_not_wrap_to_the_last_slot():
    cache = make_cache(num_blocks=2, block_size=2)
    before = cache.k(0).clone(), cache.v(0).clone()
    cache.write(0, *new_kv(cache, 3), torch.tensor([-1, -1, -5]))
    assert torch.equal(cache.k(0), before[0])
    assert torch.equal(cache.v(0), before[1])


def test_write_takes_views_and_other_dtypes():
    cache = make_cache(dtype=torch.bfloat16)
    packed = torch.randn(5, 6, 8)
    slots = torch.tensor([3, 0, 9, 23, 12])
    cache.write(0, packed[:, :3], packed[:, 3:], slots)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(cache.k(0)[slot // 4, :, slot % 4], packed[token, :3].bfloat16())
        assert torch.equal(cache.v(0)[slot // 4, :, slot % 4], packed[token, 3:].bfloat16())


def test_a_slot_far_behind_the_pool_is_an_error_and_changes_nothing():
    cache = make_cache()
    before = cache.store.clone()
    with pytest.raises(IndexError):
        cache.write(0, *new_kv(cache, 1), torch.tensor([10_000]))
    assert torch.equal(cache.store, before)


def test_copy_blocks_copies_all_layers_and_reads_before_it_writes():
    cache = make_cache(num_blocks=6)
    before = cache.store.clone()
    cache.copy_blocks([(0, 3), (3, 1), (2, 5)])
    expected = before.clone()
    for source, destination in ((0, 3), (3, 1), (2, 5)):
        expected[:, :, destination] = before[:, :, source]
    assert torch.equal(cache.store, expected)
    cache.copy_blocks([])
    assert torch.equal(cache.store, expected)


@pytest.mark.parametrize("pair", [(0, 6), (6, 0), (-1, 0)])
def test_copy_refuses_blocks_outside_the_pool(pair):
    cache = make_cache(num_blocks=6)
    before = cache.store.clone()
    with pytest.raises(IndexError):
        cache.copy_blocks([pair])
    assert torch.equal(cache.store, before)


def test_clear_slots_zeroes_exactly_those():
    cache = make_cache(num_blocks=3, block_size=4)
    cache.store[:, :, 1, :, 2] = float("nan")
    expected = cache.store.clone()
    for slot in (6, 11, 0):
        expected[:, :, slot // 4, :, slot % 4] = 0
    cache.clear_slots(torch.tensor([6, -1, 11, 0]))
    assert torch.equal(cache.store, expected)
    assert cache.store.isfinite().all()


def test_materialise_refuses_a_short_table_and_blocks_outside_the_pool():
    cache = make_cache(num_blocks=4, block_size=4)
    with pytest.raises(ValueError, match="too short"):
        cache.materialize_request_kv([0, 1], 9)
    with pytest.raises(IndexError):
        cache.materialize_request_kv([0, 4], 8)


def test_bytes_per_block_counts_k_and_v_of_all_layers():
    spec = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16)
    assert spec.bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert spec.bytes_per_block == 16 * spec.bytes_per_token
    cache = PagedKVCache(spec, 5)
    assert cache.store[:, :, :5].numel() * 2 == 5 * spec.bytes_per_block


def test_default_size_is_the_smaller_of_memory_share_and_demand():
    spec = KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16)
    block = spec.bytes_per_block
    assert default_num_blocks(spec, max_num_seqs=4, max_model_len=100, free_bytes=10**9) == 4 * 7
    assert default_num_blocks(spec, max_num_seqs=400, max_model_len=10**6, free_bytes=400 * block) == 100
    assert default_num_blocks(spec, max_num_seqs=1, max_model_len=1, free_bytes=4 * block) == 1
    with pytest.raises(ConfigError, match="block_size=16"):
        default_num_blocks(spec, max_num_seqs=1, max_model_len=1, free_bytes=4 * block - 1)
    assert default_num_blocks(spec, max_num_seqs=1, max_model_len=32) == 2


def test_available_memory_is_positive_and_within_the_machine():
    assert 0 < available_memory() <= psutil.virtual_memory().total


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_sizes_below_one_are_refused(field):
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "block_size": 4, field: 0}
    with pytest.raises(ConfigError, match=f"{field}=0"):
        KVCacheSpec(**sizes)


def test_a_dtype_that_is_no_float_and_an_empty_pool_are_refused():
    with pytest.raises(ConfigError, match=r"torch\.int8"):
        KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype=torch.int8)
    with pytest.raises(ConfigError, match="num_blocks=0"):
        PagedKVCache(KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4), 0)


def test_a_pool_starts_as_zeros_and_takes_memory_only_when_written():
    spec = KVCacheSpec(num_layers=4, num_kv_heads=8, head_dim=128, block_size=16)
    before = psutil.Process().memory_info().rss
    cache = PagedKVCache(spec, 1 << 10)  # 512 MiB
    cache.write(3, torch.ones(1, 8, 128), torch.ones(1, 8, 128), torch.tensor([777]))
    assert psutil.Process().memory_info().rss - before < 64 << 20
    keys, values = cache.materialize_request_kv([777 // 16], 16, 3)
    assert keys[777 % 16].eq(1).all()
    assert keys.sum() == values.sum() == 8 * 128
