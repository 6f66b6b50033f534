import pytest
from core_driver import make_request

from minillm.core.block_manager import KVBlockManager, SwapPool, blocks_for
from minillm.core.errors import BlockAllocationError
from minillm.core.prefix_cache import PrefixCache


def manager(num_blocks=8, block_size=4):
    return KVBlockManager(num_blocks, block_size, PrefixCache(block_size))


@pytest.mark.parametrize(
    ("tokens", "size", "blocks"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (7, 1, 7), (16, 16, 1)]
)
def test_blocks_for_is_the_ceiling(tokens, size, blocks):
    assert blocks_for(tokens, size) == blocks


def test_allocate_gives_distinct_blocks_with_one_reference():
    m = manager()
    blocks = m.allocate(8)
    assert sorted(blocks) == list(range(8))
    assert m.ref_counts == [1] * 8
    assert m.num_available == 0 and m.num_referenced == 8 and m.utilisation == 1.0


def test_allocate_is_all_or_nothing():
    m = manager()
    m.allocate(5)
    with pytest.raises(BlockAllocationError) as caught:
        m.allocate(4)
    assert (caught.value.needed, caught.value.available, caught.value.total) == (4, 3, 8)
    assert m.num_available == 3


def test_release_frees_with_the_last_reference():
    m = manager()
    (block,) = m.allocate(1)
    m.retain(block)
    m.release(block)
    assert m.num_available == 7
    m.release(block)
    assert m.num_available == 8


def test_double_release_is_refused():
    m = manager()
    (block,) = m.allocate(1)
    m.release(block)
    with pytest.raises(BlockAllocationError):
        m.release(block)
    assert m.num_available == 8


def test_retain_of_a_free_block_is_refused():
    m = manager()
    with pytest.raises(BlockAllocationError):
        m.retain(3)


def test_ensure_capacity_grows_only_by_what_is_missing():
    m = manager()
    r = make_request("a", 3)
    assert len(m.ensure_capacity(r, 3)) == 1
    assert m.ensure_capacity(r, 4) == []
    assert len(m.ensure_capacity(r, 9)) == 2
    assert len(r.block_table) == 3


def test_ensure_capacity_batch_changes_no_table_when_one_does_not_fit():
    m = manager(num_blocks=4)
    a, b = make_request("a", 3), make_request("b", 3)
    m.ensure_capacity(a, 4)
    with pytest.raises(BlockAllocationError):
        m.ensure_capacity_batch([(a, 12), (b, 8)])
    assert len(a.block_table) == 1 and b.block_table == [] and m.num_available == 3
    m.ensure_capacity_batch([(a, 8), (b, 8)])
    assert len(a.block_table) == 2 and len(b.block_table) == 2
    assert not set(a.block_table) & set(b.block_table)


def test_copy_on_write_replaces_only_a_shared_last_block():
    m = manager()
    parent, child = make_request("p", 6), make_request("c", 6)
    m.ensure_capacity(parent, 6)
    parent.kv_tokens = 6
    m.fork_table(parent, child)
    assert child.block_table == parent.block_table
    before = list(parent.block_table)
    copy = m.copy_on_write(child)
    assert copy is not None and copy.source == before[1] and copy.destination == child.block_table[1]
    assert child.block_table[0] == parent.block_table[0], "full blocks stay shared"
    assert parent.block_table == before
    assert m.copy_on_write(parent) is None, "the last holder writes in place"
    assert m.ref_counts[before[0]] == 2 and m.ref_counts[before[1]] == 1


def test_quarantined_blocks_come_back_with_their_plan():
    m = manager(num_blocks=4)
    r = make_request("a", 8)
    m.ensure_capacity(r, 8)
    m.quarantine_step = 7
    m.release_table(r)
    assert m.num_available == 2 and m.num_quarantined == 2 and m.num_referenced == 0
    with pytest.raises(BlockAllocationError):
        m.allocate(3)
    m.lift_quarantine(6)
    assert m.num_available == 2
    m.lift_quarantine(7)
    assert m.num_available == 4 and m.num_quarantined == 0


def test_internal_fragmentation_counts_unused_slots_of_last_blocks():
    m = manager()
    r = make_request("a", 5)
    m.ensure_capacity(r, 5)
    r.kv_tokens = 5
    assert m.internal_fragmentation([r]) == pytest.approx(3 / 8)
    assert m.internal_fragmentation([]) == 0.0


def test_exclusive_blocks_are_those_that_a_release_gives_back():
    m = manager()
    parent, child = make_request("p", 8), make_request("c", 8)
    m.ensure_capacity(parent, 8)
    m.fork_table(parent, child)
    m.ensure_capacity(child, 12)
    assert m.exclusive_blocks(parent) == 0 and m.exclusive_blocks(child) == 1
    available = m.num_available
    m.release_table(child)
    assert m.num_available == available + 1


def test_swap_pool_is_all_or_nothing():
    pool = SwapPool(3)
    slots = pool.allocate(2)
    assert pool.num_used == 2
    with pytest.raises(BlockAllocationError):
        pool.allocate(2)
    pool.release(slots)
    assert pool.num_used == 0 and sorted(pool.allocate(3)) == [0, 1, 2]
