"""Writing, copying and swapping KV blocks on a GPU, bit by bit against plain indexing."""

from __future__ import annotations

import pytest
import torch

from minillm.memory import cuda_kv_ops
from minillm.memory.paged_kv_cache import KVCacheSpec, PagedKVCache

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_cache(dtype=torch.bfloat16, num_blocks=12, num_kv_heads=3, head_dim=64, block_size=16, num_layers=2):
    spec = KVCacheSpec(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    cache = PagedKVCache(spec, num_blocks, "cuda")
    cache.store.normal_()
    return cache


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 1), (24, 5), (64, 16), (128, 128)])
def test_write_equals_indexing_for_views_of_a_packed_product(dtype, head_dim, block_size):
    cache = make_cache(dtype, head_dim=head_dim, block_size=block_size)
    heads, tokens = cache.spec.num_kv_heads, 11
    packed = torch.randn((tokens, 5 + 2 * heads, head_dim), device="cuda").to(dtype)
    k, v = packed[:, 5 : 5 + heads], packed[:, 5 + heads :]
    slots = torch.randperm(cache.num_slots)[:tokens]
    slots[3] = -1
    expected = cache.store.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            expected[1, 0, block, :, offset] = k[token]
            expected[1, 1, block, :, offset] = v[token]
    cache.write(1, k, v, slots.cuda())
    assert torch.equal(cache.store, expected)


def test_write_of_unaligned_views():
    cache = make_cache(torch.float16, head_dim=8)
    storage = torch.randn(4 * 50, device="cuda").half()
    k = torch.as_strided(storage, (4, 3, 8), (50, 8, 1), 1)
    v = torch.as_strided(storage, (4, 3, 8), (50, 8, 1), 25)
    cache.write(0, k, v, torch.tensor([0, 17, 33, 191], device="cuda"))
    for token, slot in enumerate((0, 17, 33, 191)):
        assert torch.equal(cache.k(0)[slot // 16, :, slot % 16], k[token])
        assert torch.equal(cache.v(0)[slot // 16, :, slot % 16], v[token])


def test_slots_outside_the_pool_change_nothing():
    cache = make_cache()
    before = cache.store.clone()
    k = torch.randn((3, 3, 64), device="cuda").bfloat16()
    cache.write(0, k, k, torch.tensor([-1, cache.num_slots, 1 << 40], device="cuda"))
    assert torch.equal(cache.store, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 1), (3, 64, 16), (8, 128, 128)])
def test_copy_blocks_equals_indexing(dtype, shape):
    heads, head_dim, block_size = shape
    cache = make_cache(dtype, num_kv_heads=heads, head_dim=head_dim, block_size=block_size)
    expected = cache.store.clone()
    pairs = [(0, 7), (0, 3), (11, 4), (5, 10)]
    for source, destination in pairs:
        expected[:, :, destination] = expected[:, :, source]
    cache.copy_blocks(pairs)
    assert torch.equal(cache.store, expected)


def test_a_chain_of_copies_reads_before_it_writes():
    cache = make_cache()
    before = cache.store.clone()
    cache.copy_blocks([(0, 3), (3, 1)])
    assert torch.equal(cache.store[:, :, 3], before[:, :, 0])
    assert torch.equal(cache.store[:, :, 1], before[:, :, 3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["device", "page-locked"])
@pytest.mark.parametrize("limit", [None, 3])
def test_gather_and_scatter_are_bitwise_and_touch_nothing_else(dtype, where, limit):
    cache = make_cache(dtype)
    shape = (6, *cache.store.shape[:2], *cache.store.shape[3:])
    pages = torch.zeros(shape, dtype=dtype, device="cuda" if where == "device" else "cpu")
    pages = pages if where == "device" else pages.pin_memory()
    original = cache.store.clone()
    pairs = torch.tensor([[2, 5], [9, 0], [11, 3]], dtype=torch.int32, device="cuda")
    cuda_kv_ops.gather_blocks(cache.store, pages, pairs, max_thread_blocks=limit)
    torch.cuda.synchronize()
    for block, page in pairs.tolist():
        assert torch.equal(pages[page].cuda(), original[:, :, block])
    assert not pages[[1, 2, 4]].any()
    assert torch.equal(cache.store, original)
    back = torch.tensor([[5, 1], [3, 10]], dtype=torch.int32, device="cuda")
    cuda_kv_ops.scatter_blocks(pages, cache.store, back, max_thread_blocks=limit)
    expected = original.clone()
    expected[:, :, 1], expected[:, :, 10] = original[:, :, 2], original[:, :, 11]
    assert torch.equal(cache.store, expected)


def test_write_copy_and_swap_beyond_two_to_the_31_elements():
    """B26: the last blocks of a pool in which a layer's K alone has more than 2^31 elements."""
    num_blocks = (1 << 31) // (8 * 16 * 128) + 8
    cache = make_cache(torch.float16, num_blocks, num_kv_heads=8, head_dim=128, num_layers=1)
    cache.store.zero_()
    k, v = torch.randn((2, 16, 8, 128), device="cuda").half()
    last = num_blocks - 1
    cache.write(0, k, v, torch.arange(last * 16, last * 16 + 16, device="cuda"))
    assert torch.equal(cache.k(0)[last].transpose(0, 1), k)
    assert torch.equal(cache.v(0)[last].transpose(0, 1), v)
    cache.copy_blocks([(last, last - 5)])
    assert torch.equal(cache.store[:, :, last - 5], cache.store[:, :, last])
    pages = torch.empty((2, *cache.store.shape[:2], *cache.store.shape[3:]), dtype=torch.float16, pin_memory=True)
    cuda_kv_ops.gather_blocks(cache.store, pages, torch.tensor([[last, 1]], dtype=torch.int32, device="cuda"))
    cuda_kv_ops.scatter_blocks(pages, cache.store, torch.tensor([[1, last - 1]], dtype=torch.int32, device="cuda"))
    assert torch.equal(cache.store[:, :, last - 1], cache.store[:, :, last])
    others = cache.store.view(2, num_blocks + 1, -1)
    touched = [last - 5, last - 1, last]
    assert all(not others[:, start : min(start + 4096, last - 5)].any() for start in range(0, last - 5, 4096))
    assert all(others[:, block].any() for block in touched)


def test_write_and_copy_run_in_a_captured_graph():
    cache = make_cache()
    k, v = torch.randn((2, 4, 3, 64), device="cuda").bfloat16()
    slots = torch.tensor([0, 1, 2, 3], device="cuda")
    pairs = torch.tensor([[0, 5]], dtype=torch.int32, device="cuda")

    def step() -> None:
        cache.write(0, k, v, slots)
        cuda_kv_ops.copy_blocks(cache.store, pairs)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    k.normal_()
    slots.add_(4)
    graph.replay()
    assert torch.equal(cache.k(0)[0, :, 4:8].transpose(0, 1), k)
    assert torch.equal(cache.store[:, :, 5], cache.store[:, :, 0])


def test_arguments_that_do_not_fit_are_refused():
    cache = make_cache()
    k = torch.randn((3, 3, 64), device="cuda").bfloat16()
    slots = torch.arange(3, device="cuda")
    with pytest.raises(ValueError, match="slot_mapping has dtype"):
        cuda_kv_ops.write_kv(k, k, cache.k(0), cache.v(0), slots.int())
    with pytest.raises(ValueError, match="v has shape"):
        cuda_kv_ops.write_kv(k, k[:2], cache.k(0), cache.v(0), slots)
    with pytest.raises(ValueError, match="pairs has dtype"):
        cuda_kv_ops.copy_blocks(cache.store, torch.zeros((1, 2), device="cuda", dtype=torch.int64))
    pairs = torch.zeros((1, 2), dtype=torch.int32, device="cuda")
    pages = torch.zeros((1, *cache.store.shape[:2], *cache.store.shape[3:]), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="page-locked"):
        cuda_kv_ops.gather_blocks(cache.store, pages, pairs)
    with pytest.raises(ValueError, match="pages of shape"):
        cuda_kv_ops.gather_blocks(cache.store, pages[:, :1], pairs)
    with pytest.raises(IndexError, match="block ids"):
        cache.copy_blocks([(0, cache.num_blocks)])
