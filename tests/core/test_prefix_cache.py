from core_driver import make_request
from hypothesis import given
from hypothesis import strategies as st

from minillm.core.block_manager import KVBlockManager
from minillm.core.prefix_cache import PrefixCache, chain_digest

SIZE = 4


def setup(num_blocks=16, **kwargs):
    cache = PrefixCache(SIZE, **kwargs)
    return cache, KVBlockManager(num_blocks, SIZE, cache)


def compute(blocks, cache, request):
    """Give the request KV for its whole prompt and publish its full blocks, as a scheduler does. Returns the hits."""
    hits = cache.match(request, (request.prompt_len - 1) // SIZE)
    blocks.adopt_cached(request, hits)
    blocks.ensure_capacity(request, request.prompt_len)
    request.kv_tokens = request.prompt_len
    for index in range(len(request.published), request.prompt_len // SIZE):
        cache.publish(request, index, request.block_table[index])
    return len(hits)


def test_longest_prefix_is_found_and_shared():
    cache, blocks = setup()
    a = make_request("a", list(range(12)))
    compute(blocks, cache, a)
    b = make_request("b", [*range(8), 99, 98, 97, 96, 95])
    assert compute(blocks, cache, b) == 2
    assert b.block_table[:2] == a.block_table[:2] and b.block_table[2] != a.block_table[2]
    assert blocks.ref_counts[a.block_table[0]] == 2


def test_same_block_under_another_prefix_is_no_hit():
    cache, blocks = setup()
    compute(blocks, cache, make_request("a", [1, 2, 3, 4, 5, 6, 7, 8]))
    assert cache.match(make_request("b", [5, 6, 7, 8, 0]), 1) == []
    assert cache.match(make_request("c", [9, 9, 9, 9, 5, 6, 7, 8, 0]), 2) == []
    assert cache.match(make_request("d", [4, 3, 2, 1, 0]), 1) == []


def test_cached_blocks_survive_their_request_and_are_revived():
    cache, blocks = setup()
    a = make_request("a", list(range(8)))
    compute(blocks, cache, a)
    table = list(a.block_table)
    blocks.release_table(a)
    assert cache.num_evictable == 2 and blocks.num_available == 16 and blocks.num_referenced == 0
    b = make_request("b", [*range(8), 50])
    assert compute(blocks, cache, b) == 2
    assert b.block_table[:2] == table and cache.num_evictable == 0


def test_hit_blocks_are_retained_before_anything_is_evicted():
    cache, blocks = setup(num_blocks=4)
    a = make_request("a", list(range(8)))
    compute(blocks, cache, a)
    blocks.release_table(a)
    b = make_request("b", [*range(8), *range(50, 58)])
    assert compute(blocks, cache, b) == 2, "needs all four blocks, two of them hits"
    assert len(set(b.block_table)) == 4


def test_eviction_is_least_recently_used_and_leaf_first():
    cache, blocks = setup(num_blocks=6)
    old = make_request("old", list(range(12)))
    compute(blocks, cache, old)
    old_table = list(old.block_table)
    blocks.release_table(old)
    new = make_request("new", list(range(100, 112)))
    compute(blocks, cache, new)
    new_table = list(new.block_table)
    blocks.release_table(new)
    taken = [blocks.allocate(1)[0] for _ in range(6)]
    assert taken == [*reversed(old_table), *reversed(new_table)]
    assert cache.counters.evictions == 6 and len(cache) == 0


def test_use_makes_a_prefix_younger():
    cache, blocks = setup(num_blocks=4)
    for name, base in (("a", 0), ("b", 100)):
        r = make_request(name, list(range(base, base + 4)))
        compute(blocks, cache, r)
        blocks.release_table(r)
    again = make_request("c", [0, 1, 2, 3, 7])
    assert compute(blocks, cache, again) == 1
    blocks.release_table(again)
    blocks.allocate(3)
    assert cache.match(make_request("d", [0, 1, 2, 3, 7]), 1) != []
    assert cache.match(make_request("e", [100, 101, 102, 103, 7]), 1) == []


def test_salts_share_nothing_and_an_empty_salt_is_none():
    cache, blocks = setup()
    ids = list(range(9))
    compute(blocks, cache, make_request("plain", ids))
    assert compute(blocks, cache, make_request("a", ids, cache_salt="a")) == 0
    assert compute(blocks, cache, make_request("b", ids, cache_salt="b")) == 0
    assert compute(blocks, cache, make_request("a2", ids, cache_salt="a")) == 2
    assert compute(blocks, cache, make_request("empty", ids, cache_salt="")) == 2


def test_constant_hash_gives_misses_never_wrong_hits():
    cache, blocks = setup(hash_fn=lambda parent, tokens: b"same")
    a = make_request("a", [1, 2, 3, 4, 5, 6, 7, 8])
    compute(blocks, cache, a)
    first, second = (cache.entry_of(block) for block in a.block_table)
    assert cache.match(make_request("b", [1, 2, 3, 4, 9, 9, 9, 9, 0]), 2) == [first]
    assert cache.match(make_request("c", [4, 3, 2, 1, 0]), 1) == []
    assert cache.match(make_request("d", [1, 2, 3, 4, 5, 6, 7, 8, 0]), 2) == [first, second]
    # Equal tokens behind another prefix have the same key here: it is found, and refused for its parent.
    e = make_request("e", [9, 9, 9, 9, 5, 6, 7, 8, 0])
    assert cache.match(e, 2) == []
    compute(blocks, cache, e)
    assert len(cache) == 3, "the second block collides with that of another prefix and stays private"
    assert cache.match(make_request("f", [9, 9, 9, 9, 5, 6, 7, 8, 0]), 2) == [cache.entry_of(e.block_table[0])]


def test_digest_depends_on_parent_order_and_block_split():
    def ids(*values):
        return b"".join(v.to_bytes(4, "little") for v in values)

    assert chain_digest(b"p", ids(1, 2)) != chain_digest(b"p", ids(2, 1))
    assert chain_digest(b"p", ids(1)) != chain_digest(b"q", ids(1))
    one_then_two = chain_digest(chain_digest(b"p", ids(1)), ids(2, 3))
    assert one_then_two != chain_digest(chain_digest(b"p", ids(1, 2)), ids(3))
    assert len(chain_digest(b"", b"")) == 16


def test_two_requests_that_compute_the_same_prefix_at_once_keep_private_blocks():
    cache, blocks = setup()
    a, b = make_request("a", list(range(8))), make_request("b", list(range(8)))
    for r in (a, b):
        blocks.ensure_capacity(r, 8)
        r.kv_tokens = 8
    for r in (a, b):
        for i in range(2):
            cache.publish(r, i, r.block_table[i])
    assert len(cache) == 2 and not set(a.block_table) & set(b.block_table)
    assert b.published == a.published
    blocks.release_table(b)
    assert len(blocks.free_blocks) == 14, "b's private blocks are free at once"


def test_inner_entries_can_be_evicted_when_only_private_copies_are_in_use():
    cache, blocks = setup(num_blocks=5)
    a, b = make_request("a", list(range(8))), make_request("b", list(range(12)))
    blocks.ensure_capacity(a, 4)
    blocks.ensure_capacity(b, 12)
    cache.publish(a, 0, a.block_table[0])
    for i in range(3):
        cache.publish(b, i, b.block_table[i])
    blocks.release_table(a)
    assert blocks.num_available == 2
    assert len(blocks.allocate(2)) == 2, "an evictable entry below which others are in use still counts and can go"
    assert all(entry.dead for entry in b.published)
    blocks.release_table(b)
    assert blocks.num_available == 3 and cache.num_evictable == 0


def test_inner_entries_go_least_recently_used_first_also_when_used_in_between():
    cache, blocks = setup(num_blocks=16)
    pairs = []
    for i in range(4):
        prefix = [100 * i + j for j in range(4)]
        first, other = make_request(f"a{i}", prefix), make_request(f"b{i}", [*prefix, 1, 2, 3, 4])
        blocks.ensure_capacity(first, 4)
        blocks.ensure_capacity(other, 8)
        cache.publish(first, 0, first.block_table[0])
        cache.publish(other, 0, other.block_table[0])
        cache.publish(other, 1, other.block_table[1])
        pairs.append((first, first.block_table[0]))
    blocks.allocate(len(blocks.free_blocks))
    for i in (2, 0, 3, 1):
        blocks.release_table(pairs[i][0])
    assert blocks.allocate(1) == [pairs[2][1]]
    user = make_request("user", [*range(4), 9])
    blocks.adopt_cached(user, cache.match(user, 1))
    assert user.block_table == [pairs[0][1]]
    blocks.release_table(user)
    assert [blocks.allocate(1)[0] for _ in range(3)] == [pairs[i][1] for i in (3, 1, 0)]
    assert cache.num_evictable == 0 and len(cache) == 0


def test_nothing_is_published_after_the_chain_broke():
    cache, blocks = setup()
    r = make_request("a", list(range(12)))
    blocks.ensure_capacity(r, 12)
    cache.publish(r, 1, r.block_table[1])
    assert len(cache) == 0, "block 1 cannot come before block 0"


def test_disabled_cache_publishes_nothing():
    cache, blocks = setup(enabled=False)
    compute(blocks, cache, make_request("a", list(range(8))))
    assert len(cache) == 0


def test_reset_frees_evictable_blocks_and_leaves_running_ones_alone():
    cache, blocks = setup()
    done, running = make_request("a", list(range(8))), make_request("b", list(range(50, 58)))
    compute(blocks, cache, done)
    compute(blocks, cache, running)
    blocks.release_table(done)
    blocks.reset_prefix_cache()
    assert len(cache) == 0 and len(blocks.free_blocks) == 14 and blocks.num_referenced == 2
    assert cache.match(make_request("c", list(range(9))), 2) == []
    blocks.release_table(running)
    assert len(blocks.free_blocks) == 16


def test_quarantined_entries_are_not_hit():
    cache, blocks = setup()
    a = make_request("a", list(range(8)))
    compute(blocks, cache, a)
    blocks.quarantine_step = 3
    blocks.release_table(a)
    assert cache.match(make_request("b", list(range(9))), 2) == []
    blocks.lift_quarantine(3)
    assert len(cache.match(make_request("b", list(range(9))), 2)) == 2


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=12), st.integers(0, 10**6))
def test_hits_are_exactly_the_longest_cached_prefix(prompts, released):
    """Against a plain model: the set of all published prefixes (no eviction in a large pool)."""
    cache, blocks = setup(num_blocks=200)
    known: set[tuple[int, ...]] = set()
    for i, ids in enumerate(prompts):
        expected = 0
        while (expected + 1) * SIZE <= len(ids) - 1 and tuple(ids[: (expected + 1) * SIZE]) in known:
            expected += 1
        request = make_request(f"r{i}", ids)
        assert compute(blocks, cache, request) == expected
        known |= {tuple(ids[: n * SIZE]) for n in range(1, len(ids) // SIZE + 1)}
        if (released >> i) & 1:
            blocks.release_table(request)
        assert blocks.num_available + blocks.num_referenced == 200


def test_keys_computed_before_submit_are_those_that_the_scheduler_uses():
    from minillm.core.config import SchedulerConfig
    from minillm.core.scheduler import ContinuousScheduler

    scheduler = ContinuousScheduler(SchedulerConfig(num_blocks=8, block_size=SIZE))
    early, late = make_request("a", list(range(10)), cache_salt="s"), make_request("b", list(range(10)), cache_salt="s")
    scheduler.prepare(early)
    assert len(early.block_keys) == 2 and scheduler.num_waiting == 0
    assert early.block_keys == scheduler.prefix_cache.extend_keys(late, 2)
