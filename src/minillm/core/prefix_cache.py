"""Prefix cache: full KV blocks, found again by the tokens that lead up to them.

A block's key is its token ids in fixed width followed by a digest chain: BLAKE2b-128 over the parent's digest and
those ids; the chain starts from tagged extra keys (the cache salt today), so equal tokens under different salts never
meet. The digest only finds the candidate: looking up the key compares the tokens, and a hit also needs the *same
parent entry*, so by induction the whole prefix is compared and not even a constant hash function can mix up two
prefixes. (Tokens and digest are one bytes object since a step touches thousands of keys that lie cold in memory.)

Entries form a forest. An entry whose block nobody references is *evictable*; eviction takes the least recently used
leaf, so a prefix outlives its extensions. The cache never owns a reference: :class:`KVBlockManager` counts them and
tells the cache when a block's count falls to zero or rises from it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minillm.core.request import Request

ExtraKeys = tuple[tuple[str, str], ...]
"""Tagged keys that must be equal for two prefixes to be shared, e.g. (("salt", "a"),)."""

HashFunction = Callable[[bytes, bytes], bytes]
"""(parent digest, the block's token ids as little-endian int32) -> digest."""


def chain_digest(parent: bytes, token_bytes: bytes) -> bytes:
    """The default hash function: 128 bits of BLAKE2b over parent digest and token ids."""
    return blake2b(parent + token_bytes, digest_size=16).digest()


def extra_keys(request: Request) -> bytes:
    """The tagged extra keys of a request, as bytes: the salt today. An empty salt is the same as none."""
    tagged: ExtraKeys = (("salt", request.cache_salt),) if request.cache_salt else ()
    return repr(tagged).encode()


class CachedBlock:
    """One cached full block, or the root of a salt's forest (block -1)."""

    __slots__ = (
        "block",
        "dead",
        "first_child",
        "key",
        "last_used",
        "next_sibling",
        "num_children",
        "parent",
        "previous_sibling",
        "quarantined",
        "referenced",
    )

    def __init__(self, key: bytes, parent: CachedBlock | None, block: int) -> None:
        self.key = key
        """Token ids as little-endian int32, then the digest; of a root its extra keys."""
        self.parent = parent
        self.block = block
        self.num_children = 0
        self.first_child: CachedBlock | None = None
        self.next_sibling: CachedBlock | None = None
        self.previous_sibling: CachedBlock | None = None
        self.last_used = 0
        self.referenced = True
        self.quarantined = False
        self.dead = False

    @property
    def evictable(self) -> bool:
        """Cached, and nobody holds the block."""
        return not (self.referenced or self.quarantined or self.dead)

    def unlink(self) -> None:
        """Be a child of the parent no more."""
        assert self.parent is not None
        if self.previous_sibling is not None:
            self.previous_sibling.next_sibling = self.next_sibling
        else:
            self.parent.first_child = self.next_sibling
        if self.next_sibling is not None:
            self.next_sibling.previous_sibling = self.previous_sibling
        self.next_sibling = self.previous_sibling = None
        self.parent.num_children -= 1


@dataclass(slots=True)
class PrefixCacheCounters:
    """Block counts since the start: looked up and found, looked up and missed, published, evicted."""

    hits: int = 0
    misses: int = 0
    published: int = 0
    evictions: int = 0


class PrefixCache:
    """Index of full blocks by prefix (see the module's text)."""

    def __init__(self, block_size: int, *, enabled: bool = True, hash_fn: HashFunction = chain_digest) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self.counters = PrefixCacheCounters()
        self._hash_fn = hash_fn
        self._token_struct = Struct(f"<{block_size}i")
        self._index: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._roots: dict[bytes, CachedBlock] = {}
        self._leaves: list[tuple[int, int, CachedBlock]] = []
        """Heap of (last_used, tie, entry); an entry that is no longer an evictable leaf of that age is stale."""
        self._bared: CachedBlock | None = None
        """A leaf that is not in the heap: the parent of one evicted before. A chain's blocks were released together, so
        this is nearly always the next to go, and the heap is not asked."""
        self._inner: list[tuple[int, CachedBlock]] = []
        """Evictable entries with extensions, youngest first, as the last look through the index found them."""
        self._clock = 0
        self.num_evictable = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def entries(self) -> dict[int, CachedBlock]:
        """Cached entries by block id (read only; for checks and displays)."""
        return self._by_block

    def entry_of(self, block: int) -> CachedBlock | None:
        """The entry that is cached in this block."""
        return self._by_block.get(block)

    # -- keys ---------------------------------------------------------------------------------------------------

    def token_ids(self, entry: CachedBlock) -> tuple[int, ...]:
        """The token ids of an entry's block (no root has any)."""
        return self._token_struct.unpack_from(entry.key)

    def extend_keys(self, request: Request, num_blocks: int) -> list[bytes]:
        """The request's keys, computed once and kept, for at least its first `num_blocks` full blocks."""
        keys = request.block_keys
        if len(keys) >= num_blocks:
            return keys
        # All full blocks that are known by now, in one go: a prompt's keys are wanted sooner or later.
        size = self.block_size
        end = max(num_blocks, request.num_tokens // size) * size
        ids = request.token_ids(len(keys) * size, end)
        hash_fn, pack, width = self._hash_fn, self._token_struct.pack, self._token_struct.size
        digest = keys[-1][width:] if keys else self._root_digest(extra_keys(request))
        for start in range(0, len(ids), size):
            token_bytes = pack(*ids[start : start + size])
            digest = hash_fn(digest, token_bytes)
            keys.append(token_bytes + digest)
        return keys

    @staticmethod
    def _root_digest(extra: bytes) -> bytes:
        return blake2b(extra, digest_size=16).digest()

    # -- match and publish --------------------------------------------------------------------------------------

    def match(self, request: Request, max_blocks: int) -> list[CachedBlock]:
        """The longest run of cached entries that are this request's first blocks, at most `max_blocks`.

        Nothing is retained: the caller retains the blocks before it allocates anything.
        """
        found: list[CachedBlock] = []
        parent = self._roots.get(extra_keys(request))
        if parent is None:
            return found
        index = self._index
        for key in self.extend_keys(request, max_blocks)[:max_blocks]:
            entry = index.get(key)
            if entry is None or entry.parent is not parent or entry.quarantined:
                break
            found.append(entry)
            parent = entry
        return found

    def publish(self, request: Request, block_index: int, block: int) -> None:
        """Make the request's full block known. `request.published` is its chain so far, extended by the entry.

        If the same prefix is cached in another block already, that entry joins the chain and this block stays
        private. On a digest collision, or after the chain was broken by an eviction, nothing is published.
        """
        chain = request.published
        if not self.enabled or len(chain) != block_index:
            return
        parent = chain[-1] if chain else self._root(extra_keys(request))
        if parent.dead:
            return
        keys = request.block_keys
        start = block_index * self.block_size - request.prompt_len
        if block_index < len(keys):
            key = keys[block_index]
        elif start >= 0 and chain:  # filled by decoding, the hot path: the chain has the parent's digest
            tokens = self._token_struct
            token_bytes = tokens.pack(*request.generated_ids[start : start + self.block_size])
            key = token_bytes + self._hash_fn(parent.key[tokens.size :], token_bytes)
        else:
            key = self.extend_keys(request, block_index + 1)[block_index]
        entry = self._index.get(key)
        if entry is not None:
            if entry.parent is parent:
                chain.append(entry)
            return
        entry = CachedBlock(key, parent, block)
        sibling = entry.next_sibling = parent.first_child
        if sibling is not None:
            sibling.previous_sibling = entry
        parent.first_child = entry
        parent.num_children += 1
        self._index[key] = entry
        self._by_block[block] = entry
        chain.append(entry)
        self.counters.published += 1

    def _root(self, extra: bytes) -> CachedBlock:
        root = self._roots.get(extra)
        if root is None:
            root = self._roots[extra] = CachedBlock(extra, None, -1)
        return root

    # -- references come and go (called by KVBlockManager) ------------------------------------------------------

    def on_referenced(self, entry: CachedBlock) -> None:
        """The block's count rose from zero."""
        entry.referenced = True
        self.num_evictable -= 1

    def on_quarantined(self, blocks: Iterable[int]) -> None:
        """Their counts fell to zero while an issued plan names them: not evictable and not to be hit yet."""
        by_block = self._by_block
        for block in blocks:
            entry = by_block.get(block)
            if entry is not None:
                entry.referenced = False
                entry.quarantined = True

    def on_unreferenced(self, blocks: Iterable[int]) -> list[int]:
        """Nobody holds the blocks any more: cached ones are evictable from now on. Returns the others."""
        by_block = self._by_block
        plain = []
        for block in blocks:
            entry = by_block.get(block)
            if entry is None:
                plain.append(block)
                continue
            entry.referenced = False
            entry.quarantined = False
            self._clock += 1
            entry.last_used = self._clock
            self.num_evictable += 1
            if not entry.num_children:
                self._push_leaf(entry)
        return plain

    def _push_leaf(self, entry: CachedBlock) -> None:
        if len(self._leaves) > 2 * len(self._by_block) + 64:
            self._leaves = [item for item in self._leaves if self._is_current(item)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (entry.last_used, entry.block, entry))

    @staticmethod
    def _is_current(item: tuple[int, int, CachedBlock]) -> bool:
        entry = item[2]
        return entry.last_used == item[0] and not entry.num_children and entry.evictable

    # -- eviction -----------------------------------------------------------------------------------------------

    def evict(self, count: int) -> list[int]:
        """Drop the least recently used evictable leaves until `count` blocks came free (or more); returns them.

        If every evictable entry has cached extensions that are in use (possible when two requests computed the same
        prefix at the same time), the least recently used inner entry goes, with all that extends it; extensions
        nobody holds come back as blocks too. The caller makes sure that so many are evictable.
        """
        freed: list[int] = []
        while len(freed) < count:
            leaf = self._take_oldest_leaf()
            if leaf is not None:
                self._forget(leaf)
                freed.append(leaf.block)
            else:
                freed.extend(self._evict_subtree(self._take_oldest_inner()))
        return freed

    def _take_oldest_leaf(self) -> CachedBlock | None:
        leaves, bared = self._leaves, self._bared
        if bared is not None and (bared.num_children or not bared.evictable):
            bared = self._bared = None
        while True:
            # Also a stale item bounds the age of all behind it: so mostly the heap is not touched.
            if bared is not None and (not leaves or bared.last_used < leaves[0][0]):
                self._bared = None
                return bared
            if not leaves:
                return None
            item = heapq.heappop(leaves)
            if self._is_current(item):
                return item[2]

    def _take_oldest_inner(self) -> CachedBlock:
        """The least recently used evictable entry, where none is a leaf.

        What becomes evictable after a look through the index is younger than all that was found: so one look serves
        until it is used up.
        """
        while True:
            if not self._inner:
                found = [(entry.last_used, entry) for entry in self._by_block.values() if entry.evictable]
                self._inner = sorted(found, key=lambda item: -item[0])
            last_used, entry = self._inner.pop()
            if entry.evictable and entry.last_used == last_used:
                return entry

    def _forget(self, entry: CachedBlock) -> None:
        """Take an entry without children out of the index."""
        if not (entry.referenced or entry.quarantined):
            self.num_evictable -= 1
            self.counters.evictions += 1
        entry.dead = True
        del self._index[entry.key]
        del self._by_block[entry.block]
        parent = entry.parent
        assert parent is not None
        entry.unlink()
        if parent.num_children:
            return
        if parent.parent is None:
            parent.dead = True
            del self._roots[parent.key]
        elif parent.evictable:
            if self._bared is None:
                self._bared = parent
            else:
                self._push_leaf(parent)

    def _evict_subtree(self, top: CachedBlock) -> list[int]:
        """Forget an inner entry and all that extends it."""
        doomed = [top]
        for entry in doomed:  # grows while it is read
            child = entry.first_child
            while child is not None:
                doomed.append(child)
                child = child.next_sibling
        freed = [entry.block for entry in doomed if entry.evictable]
        for entry in reversed(doomed):
            self._forget(entry)
        return sorted(freed)

    def reset(self) -> list[int]:
        """Forget everything; returns the blocks that were evictable. Blocks in use stay with their holders."""
        freed = [entry.block for entry in self._by_block.values() if entry.evictable]
        for entry in self._by_block.values():
            entry.dead = True
            entry.first_child = entry.next_sibling = entry.previous_sibling = None
        for root in self._roots.values():
            root.dead = True
        self._index.clear()
        self._by_block.clear()
        self._roots.clear()
        self._leaves.clear()
        self._bared = None
        self._inner.clear()
        self.num_evictable = 0
        return freed
