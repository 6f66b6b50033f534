"""KV blocks: a fixed pool, reference counts, copy-on-write.

Who holds a block (see docs/architecture.md for the ownership map). Every block is exactly one of

- *free*: on the free list;
- *referenced*: ``ref_counts[block]`` block tables hold it;
- *evictable*: nobody holds it, the prefix cache knows its content; allocation takes it when the free list is empty;
- *quarantined*: nobody holds it, but a plan in flight may still read or write it; it moves on when that plan commits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from minillm.core.errors import BlockAllocationError
from minillm.core.plan import BlockCopy
from minillm.core.prefix_cache import CachedBlock, PrefixCache
from minillm.core.request import Request


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: ceil(num_tokens / block_size)."""
    return -(-num_tokens // block_size)


class KVBlockManager:
    """Allocates and counts references of `num_blocks` blocks of `block_size` tokens. All of it is O(1) per block,
    except that making a cached block evictable or evicting it costs the cache O(log blocks)."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.ref_counts = [0] * num_blocks
        self.free_blocks = list(range(num_blocks - 1, -1, -1))
        self.quarantine: dict[int, list[int]] = {}
        """Plan number -> blocks that wait for its commit."""
        self.quarantine_step: int | None = None
        """Number of the latest plan in flight: blocks released now are quarantined under it. None: none in flight."""

    # -- figures ------------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can get: free and evictable ones."""
        return len(self.free_blocks) + self.prefix_cache.num_evictable

    @property
    def num_quarantined(self) -> int:
        """Blocks that wait for the commit of a plan in flight."""
        return sum(len(blocks) for blocks in self.quarantine.values())

    @property
    def num_referenced(self) -> int:
        """Blocks that at least one block table holds, each counted once."""
        return self.num_blocks - self.num_available - self.num_quarantined

    @property
    def num_shared(self) -> int:
        """Referenced blocks that more than one block table holds."""
        # Counted in C: a pool of 100,000 blocks is read by a metrics scrape while the scheduler waits.
        return self.num_blocks - self.ref_counts.count(0) - self.ref_counts.count(1)

    @property
    def utilisation(self) -> float:
        """Share of the pool that is referenced, 0 to 1."""
        return self.num_referenced / self.num_blocks

    def internal_fragmentation(self, requests: Iterable[Request]) -> float:
        """Share of the slots in the requests' blocks that hold no token (unused slots of last blocks), 0 to 1."""
        slots = tokens = 0
        for request in requests:
            slots += len(request.block_table) * self.block_size
            tokens += request.kv_tokens if request.block_table else 0
        return 1.0 - tokens / slots if slots else 0.0

    # -- allocate, retain, release --------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, or :class:`BlockAllocationError` and no change."""
        free = self.free_blocks
        if count > len(free):
            if count > self.num_available:
                raise BlockAllocationError(count, self.num_available, self.num_blocks)
            free.extend(self.prefix_cache.evict(count - len(free)))
        blocks = [free.pop() for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def retain(self, block: int) -> None:
        """One more block table holds the block, which is referenced or evictable."""
        if self.ref_counts[block] == 0:
            entry = self.prefix_cache.entry_of(block)
            if entry is None or not entry.evictable:
                raise BlockAllocationError(1, 0, self.num_blocks)
            self.prefix_cache.on_referenced(entry)
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """One block table lets go of the block. The last one frees it (to quarantine if a plan is in flight)."""
        self._release_all((block,))

    def _release_all(self, blocks: Iterable[int]) -> None:
        counts = self.ref_counts
        unheld = []
        for block in blocks:
            count = counts[block]
            if count < 1:
                raise BlockAllocationError(1, 0, self.num_blocks)
            counts[block] = count - 1
            if count == 1:
                unheld.append(block)
        if self.quarantine_step is None:
            self.free_blocks.extend(self.prefix_cache.on_unreferenced(unheld))
        elif unheld:
            self.quarantine.setdefault(self.quarantine_step, []).extend(unheld)
            self.prefix_cache.on_quarantined(unheld)

    def lift_quarantine(self, step: int) -> None:
        """Plan `step` has committed: its quarantined blocks become free or evictable."""
        self.free_blocks.extend(self.prefix_cache.on_unreferenced(self.quarantine.pop(step, ())))

    # -- block tables -----------------------------------------------------------------------------------------------

    def blocks_needed(self, request: Request, num_tokens: int) -> int:
        """Blocks that the request's table lacks for `num_tokens` tokens."""
        return max(0, blocks_for(num_tokens, self.block_size) - len(request.block_table))

    def ensure_capacity(self, request: Request, num_tokens: int) -> list[int]:
        """Grow the request's table to hold `num_tokens` tokens; returns the new blocks. All or nothing."""
        return self.ensure_capacity_batch([(request, num_tokens)])[0]

    def ensure_capacity_batch(self, demands: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """Grow several tables at once, or raise :class:`BlockAllocationError` with no table changed."""
        counts = [self.blocks_needed(request, num_tokens) for request, num_tokens in demands]
        blocks = self.allocate(sum(counts))
        grown = []
        taken = 0
        for (request, _), count in zip(demands, counts, strict=True):
            new = blocks[taken : taken + count]
            taken += count
            request.block_table.extend(new)
            grown.append(new)
        return grown

    def adopt_cached(self, request: Request, entries: Sequence[CachedBlock]) -> None:
        """Give a request without blocks the cached `entries` as its first blocks, retained."""
        for entry in entries:
            self.retain(entry.block)
        request.block_table = [entry.block for entry in entries]
        request.published = list(entries)

    def fork_table(self, parent: Request, child: Request) -> None:
        """The child shares every block of its parent, the partly filled last one too."""
        for block in parent.block_table:
            self.retain(block)
        child.block_table = list(parent.block_table)
        child.published = list(parent.published)
        child.block_keys = list(parent.block_keys[: len(parent.published)])
        child.kv_tokens = parent.kv_tokens

    def copy_on_write(self, request: Request) -> BlockCopy | None:
        """Before the request writes into its last block: if others hold it too, replace it by a copy of its own."""
        old = request.block_table[-1]
        if self.ref_counts[old] == 1:
            return None
        (new,) = self.allocate(1)
        # A new list: the runner may still read the old one for a plan in flight.
        request.block_table = [*request.block_table[:-1], new]
        self.release(old)
        return BlockCopy(old, new)

    def release_table(self, request: Request) -> None:
        """Release all of the request's blocks, last first, so that a prefix is younger than what extends it."""
        table = request.block_table
        request.block_table = []
        self._release_all(reversed(table))

    def exclusive_blocks(self, request: Request, but_for: Collection[int] = ()) -> int:
        """How many blocks releasing the request would give back: those that nobody else holds and not in `but_for`."""
        counts = self.ref_counts
        return sum(1 for block in request.block_table if counts[block] == 1 and block not in but_for)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; evictable blocks become free."""
        self.free_blocks.extend(self.prefix_cache.reset())


class SwapPool:
    """Host block slots for swapped-out requests: a free list."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def num_used(self) -> int:
        """Slots that swapped requests hold."""
        return self.num_slots - len(self.free_slots)

    def allocate(self, count: int) -> list[int]:
        """`count` slots, or :class:`BlockAllocationError` and no change."""
        if count > len(self.free_slots):
            raise BlockAllocationError(count, len(self.free_slots), self.num_slots)
        return [self.free_slots.pop() for _ in range(count)]

    def release(self, slots: Iterable[int]) -> None:
        """Give slots back: the next allocation gets them in the order in which these were (one transfer for a run)."""
        self.free_slots.extend(reversed(list(slots)))
