"""Swapping blocks to host memory and back."""

from __future__ import annotations

import pytest
import torch

from minillm.core.errors import ConfigError
from minillm.memory.paged_kv_cache import KVCacheSpec, PagedKVCache
from minillm.memory.swap_space import SwapSpace, _runs


def make(dtype=torch.float32, num_blocks=8, num_slots=6, block_size=4) -> tuple[PagedKVCache, SwapSpace]:
    spec = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=block_size, dtype=dtype)
    cache = PagedKVCache(spec, num_blocks)
    cache.store.copy_(torch.randn(cache.store.shape).to(dtype))
    return cache, SwapSpace(cache, num_slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_round_trip_is_bitwise_and_touches_nothing_else(dtype, block_size):
    cache, swap = make(dtype, block_size=block_size)
    original = cache.store.clone()
    swap.swap_out([6, 1, 3], [4, 0, 5])
    assert torch.equal(cache.store, original)
    cache.store[:, :, [6, 1, 3]] = 7
    swap.swap_in([5, 4, 0], [2, 7, 0])
    expected = original.clone()
    expected[:, :, [6, 1, 3]] = 7
    expected[:, :, [2, 7, 0]] = original[:, :, [3, 6, 1]]
    assert torch.equal(cache.store, expected)


def test_slots_keep_their_content_until_they_are_overwritten():
    cache, swap = make()
    first = cache.store[:, :, 2].clone()
    swap.swap_out([2], [1])
    cache.store.zero_()
    swap.swap_out([5], [2])
    assert torch.equal(swap.slot(1), first)
    assert not swap.slot(2).any()


def test_a_copy_reports_blocks_bytes_and_seconds():
    cache, swap = make()
    copy = swap.swap_out([0, 1], [0, 1])
    assert copy.done()
    assert copy.num_blocks == 2
    assert copy.num_bytes == 2 * cache.spec.bytes_per_block
    assert 0 < copy.seconds() < 10
    back = swap.swap_in([0, 1], [3, 4])
    assert back.num_bytes == copy.num_bytes
    assert 0 < back.seconds() < 10


def test_an_empty_copy_is_free():
    cache, swap = make()
    before = cache.store.clone()
    assert swap.swap_out([], []).num_bytes == 0
    assert swap.swap_in([], []).seconds() == 0
    assert torch.equal(cache.store, before)


@pytest.mark.parametrize(("blocks", "slots"), [([8], [0]), ([-1], [0]), ([0], [6]), ([0], [-1])])
def test_ids_outside_either_pool_are_refused_both_ways(blocks, slots):
    cache, swap = make()
    before = cache.store.clone()
    with pytest.raises(IndexError):
        swap.swap_out(blocks, slots)
    with pytest.raises(IndexError):
        swap.swap_in(slots, blocks)
    assert torch.equal(cache.store, before)


def test_lists_of_unlike_length_are_refused():
    _, swap = make()
    with pytest.raises(ValueError, match="do not match"):
        swap.swap_out([0, 1], [0])


def test_size_from_gib():
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=64, block_size=16)
    assert SwapSpace.slots_within(spec, 1.0) == (1 << 30) // spec.bytes_per_block
    assert SwapSpace.slots_within(spec, 0) == 0
    for bad in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="swap_space"):
            SwapSpace.slots_within(spec, bad)


def test_no_slots_is_refused_and_cpu_memory_is_not_pinned():
    cache, swap = make()
    assert not swap.pinned
    with pytest.raises(ConfigError, match="num_slots=0"):
        SwapSpace(cache, 0)


def test_runs_of_consecutive_slots_become_one_transfer_each():
    assert list(_runs([3, 4, 5, 9, 2, 3])) == [(0, 3, 3), (3, 9, 1), (4, 2, 2)]
    assert list(_runs([7])) == [(0, 7, 1)]
    assert list(_runs([])) == []
    assert list(_runs([5, 4])) == [(0, 5, 1), (1, 4, 1)]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def make_on_gpu(
    num_blocks: int, num_slots: int, *, pin_memory: bool = True, layers=3
) -> tuple[PagedKVCache, SwapSpace]:
    spec = KVCacheSpec(num_layers=layers, num_kv_heads=8, head_dim=64, block_size=16, dtype=torch.bfloat16)
    cache = PagedKVCache(spec, num_blocks, "cuda")
    cache.store.normal_()
    return cache, SwapSpace(cache, num_slots, pin_memory=pin_memory)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("staged_blocks", [1, 5, 1000])
def test_round_trip_on_a_gpu_is_bitwise_and_touches_nothing_else(pin_memory, staged_blocks, monkeypatch):
    cache, swap = make_on_gpu(64, 32, pin_memory=pin_memory)
    assert swap.pinned == pin_memory
    monkeypatch.setattr(swap, "_staging_blocks", staged_blocks)
    blocks, slots = list(range(0, 64, 2)), list(range(31, -1, -1))
    original = cache.store.clone()
    out = swap.swap_out(blocks, slots)
    cache.store[:, :, blocks] = 0  # queued behind the gather, not behind the transfer
    back = swap.swap_in(slots[:7], blocks[1:8])
    expected = original.clone()
    expected[:, :, blocks] = 0
    expected[:, :, blocks[1:8]] = original[:, :, blocks[:7]]
    assert torch.equal(cache.store, expected)
    assert out.seconds() > 0
    assert back.seconds() > 0
    assert back.done()
    for block, slot in zip(blocks, slots, strict=True):
        assert torch.equal(swap.slot(slot).cuda(), original[:, :, block])


@pytest.mark.cuda
@needs_gpu
def test_compute_goes_on_while_blocks_are_still_on_their_way_out():
    cache, swap = make_on_gpu(512, 512, layers=16)  # 256 MiB: some 5 ms on the bus
    blocks = list(range(512))
    swap.swap_out(blocks, blocks).seconds()
    cache.store[:, :, 0] = 2  # all kernels are loaded now (loading one may wait for the device), memory is there
    torch.cuda.synchronize()
    copy = swap.swap_out(blocks, blocks)
    cache.store[:, :, 0] = 1
    overwritten = torch.cuda.current_stream().record_event()
    overwritten.synchronize()
    assert not copy.done()
    assert copy.seconds() > 0
    assert not (swap.slot(0) == 1).all()
