"""The invariants of docs/design.md, recounted from the requests themselves.

`check` looks at a scheduler from outside: it counts references from block tables, swap slots and rows from requests,
and compares with what the managers believe. It changes nothing and costs time linear in blocks and block tables, so it
can run after every step of a test or, with ``--check-invariants``, of a server.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING, NoReturn

from minillm.core.errors import InvariantViolation
from minillm.core.request import QUEUED, RUNNING, Request, RequestState

if TYPE_CHECKING:
    from minillm.core.base_scheduler import BaseScheduler
    from minillm.core.prefix_cache import CachedBlock


def check(scheduler: BaseScheduler) -> None:
    """Raise :class:`InvariantViolation` that says what is wrong; numbers are those of docs/design.md.

    1 every block in one place and reference counts right; 2 nothing in flight writes a shared block; 3 table lengths,
    swap slots, rows and lists agree with the requests; 4 plans in flight within their limits; 8 clean when idle.
    """
    requests = scheduler.live_requests
    counts = _count_references(scheduler, requests)
    _check_blocks(scheduler, counts)
    _check_cache(scheduler, counts)
    for request in requests:
        _check_request(scheduler, request)
    _check_rows_and_lists(scheduler, requests)
    _check_swap_slots(scheduler, requests)
    _check_in_flight(scheduler, counts)
    if not requests and not scheduler.num_in_flight:
        _check_idle(scheduler)


def _fail(number: int, text: str) -> NoReturn:
    raise InvariantViolation(f"invariant {number}: {text}")


def _count_references(scheduler: BaseScheduler, requests: list[Request]) -> list[int]:
    counts = [0] * scheduler.blocks.num_blocks
    for request in requests:
        table = request.block_table
        for block in table:
            counts[block] += 1
        if len(set(table)) != len(table):
            _fail(1, f"a block is twice in the table of {request.request_id}: {table}")
    if counts != scheduler.blocks.ref_counts:
        for block, (found, believed) in enumerate(zip(counts, scheduler.blocks.ref_counts, strict=True)):
            if found != believed:
                _fail(1, f"block {block} is in {found} block tables, its reference count is {believed}")
    return counts


def _check_blocks(scheduler: BaseScheduler, counts: list[int]) -> None:
    """Each block is exactly one of free, evictable, quarantined, referenced."""
    blocks = scheduler.blocks
    places = [1 if count else 0 for count in counts]
    for block in blocks.free_blocks:
        places[block] += 1
    for waiting in blocks.quarantine.values():
        for block in waiting:
            places[block] += 1
    evictable = 0
    for block, entry in scheduler.prefix_cache.entries().items():
        if entry.evictable:
            places[block] += 1
            evictable += 1
    if places.count(1) != len(places):
        block = next(i for i, number in enumerate(places) if number != 1)
        _fail(1, f"block {block} is in {places[block]} places: {_where(scheduler, counts, block) or 'nowhere'}")
    if evictable != scheduler.prefix_cache.num_evictable:
        _fail(1, f"{evictable} blocks are evictable, the cache counts {scheduler.prefix_cache.num_evictable}")
    for step in blocks.quarantine:
        if all(record.plan.step != step for record in scheduler._in_flight):
            _fail(1, f"blocks {blocks.quarantine[step]} wait for step {step}, which is not in flight")


def _where(scheduler: BaseScheduler, counts: list[int], block: int) -> str:
    found = [f"referenced {counts[block]} times"] if counts[block] else []
    found += ["free"] * scheduler.blocks.free_blocks.count(block)
    for step, waiting in scheduler.blocks.quarantine.items():
        found += [f"quarantined until step {step}"] * waiting.count(block)
    entry = scheduler.prefix_cache.entry_of(block)
    if entry is not None and entry.evictable:
        found.append("evictable")
    return ", ".join(found)


def _check_cache(scheduler: BaseScheduler, counts: list[int]) -> None:
    """Cached entries: flags agree with the references, and each hangs on a live parent."""
    quarantined = {block for waiting in scheduler.blocks.quarantine.values() for block in waiting}
    children: dict[CachedBlock, int] = {}
    entries = scheduler.prefix_cache.entries()
    for block, entry in entries.items():
        if entry.block != block or entry.dead:
            _fail(1, f"block {block} is cached by an entry of block {entry.block}, dead={entry.dead}")
        if entry.referenced != (counts[block] > 0) or entry.quarantined != (block in quarantined):
            _fail(
                1,
                f"cached block {block} has {counts[block]} references, quarantined={block in quarantined}; its entry "
                f"says referenced={entry.referenced}, quarantined={entry.quarantined}",
            )
        parent = entry.parent
        if parent is None or parent.dead:
            _fail(1, f"cached block {block} does not hang on a live parent")
        children[parent] = children.get(parent, 0) + 1
    for block, entry in entries.items():
        if entry.num_children != children.get(entry, 0):
            _fail(1, f"cached block {block} has {children.get(entry, 0)} extensions and counts {entry.num_children}")


def _check_request(scheduler: BaseScheduler, request: Request) -> None:
    """3: table length is exactly ceil(kv_tokens / block size); what is not running holds no device block."""
    size = scheduler.config.block_size
    held = -(-request.kv_tokens // size)
    state = request.state
    if state in RUNNING:
        if len(request.block_table) != held:
            _fail(3, f"{request} runs with {len(request.block_table)} blocks for {request.kv_tokens} tokens")
        if request.swap_slots:
            _fail(3, f"{request} runs and holds swap slots {request.swap_slots}")
        if request.row < 0:
            _fail(3, f"{request} runs without a row")
        _check_chain(request, size)
        return
    if request.is_ended:
        _fail(3, f"{request} has ended and is still live")
    if request.block_table:
        _fail(3, f"{request} does not run and holds blocks {request.block_table}")
    if state is RequestState.SWAPPED:
        if len(request.swap_slots) != held or not held:
            _fail(3, f"{request} is swapped out with {len(request.swap_slots)} slots for {request.kv_tokens} tokens")
    elif request.swap_slots or request.kv_tokens:
        _fail(3, f"{request} holds slots {request.swap_slots} and {request.kv_tokens} tokens of KV")
    if request.row >= 0 and request.child_of is None:
        _fail(3, f"{request} does not run and owns row {request.row}")


def _check_chain(request: Request, size: int) -> None:
    """The chain of cache entries is of this sequence: linked, no longer than its KV, its last entry's tokens equal."""
    chain: list[CachedBlock] = request.published
    if not chain:
        return
    if len(chain) * size > request.kv_tokens:
        _fail(6, f"{request} has {len(chain)} published blocks of {size} for {request.kv_tokens} tokens")
    if len(chain) > 1 and chain[-1].parent is not chain[-2]:
        _fail(6, f"{request}: its published blocks {[entry.block for entry in chain]} are not one chain")
    tokens = request.token_ids((len(chain) - 1) * size, len(chain) * size)
    if len(tokens) == size and not chain[-1].key.startswith(array("i", tokens).tobytes()):
        _fail(6, f"{request}: the entry of its block {len(chain) - 1} is of other tokens than {tokens}")


def _check_rows_and_lists(scheduler: BaseScheduler, requests: list[Request]) -> None:
    owners = [request for request in requests if request.row >= 0]
    rows = sorted([request.row for request in owners] + scheduler._free_rows)
    if rows != list(range(scheduler.config.max_num_seqs)):
        taken = {request.request_id: request.row for request in owners}
        _fail(3, f"rows are not each owned once or free: owned {taken}, free {scheduler._free_rows}")
    if len(scheduler.running) != len(owners) or any(request.row < 0 for request in scheduler.running):
        _fail(3, f"running is {list(scheduler.running)}, rows are owned by {owners}")
    if scheduler.running_priorities != Counter(request.priority for request in owners):
        _fail(3, f"priorities of running requests are counted as {dict(scheduler.running_priorities)}")
    _check_decode_columns(scheduler)
    for request in scheduler.prefilling:
        if request.state is not RequestState.PREFILLING or request.row < 0:
            _fail(3, f"{request} is in the prefill list")
    queued = sum(1 for r in requests if r.state in QUEUED and (r.child_of is None or r.started))
    if queued != len(scheduler.waiting) or any(request.state not in QUEUED for request in scheduler.waiting):
        _fail(3, f"{queued} requests are queued, the waiting queue holds {list(scheduler.waiting)}")


def _check_decode_columns(scheduler: BaseScheduler) -> None:
    """The columns of the decode set say of each member what the member says of itself."""
    members, size = scheduler.decoding, scheduler.config.block_size
    columns = zip(
        members.requests, members.ids, members.rows, members.positions, members.indices, members.slots, strict=True
    )
    for i, (request, request_id, row, position, index, slot) in enumerate(columns):
        if request.state is not RequestState.DECODING or request.row < 0:
            _fail(3, f"{request} is in the decode set")
        if request.decode_set is not members or request.decode_index != i:
            _fail(3, f"{request} is member {i} of the decode set and believes to be {request.decode_index}")
        if request_id != request.request_id or row != request.row or index != position - request.prompt_len + 1:
            _fail(3, f"{request}: decode columns say {request_id}, row {row}, position {position}, output {index}")
        if position % size and slot != request.block_table[-1] * size + position % size:
            _fail(3, f"{request} would write position {position} at slot {slot}, its table is {request.block_table}")
        if members.outputs[i] is not request.generated_ids:
            _fail(6, f"{request}: the decode set appends to another list than its output")


def _check_swap_slots(scheduler: BaseScheduler, requests: list[Request]) -> None:
    pool = scheduler.swap_pool
    if not pool.num_slots:
        return
    slots = list(pool.free_slots)
    swapped = 0
    for request in requests:
        slots += request.swap_slots
        swapped += bool(request.swap_slots)
    if len(slots) != pool.num_slots or len(set(slots)) != len(slots):
        numbers = Counter(slots)
        wrong = [slot for slot in range(pool.num_slots) if numbers[slot] != 1]
        _fail(3, f"swap slots {wrong} are not each free or held once")
    limit = scheduler.config.max_swapped_requests
    if limit is not None and swapped > limit:
        _fail(4, f"{swapped} requests are swapped out, the limit max_swapped_requests={limit}")


def _check_in_flight(scheduler: BaseScheduler, counts: list[int]) -> None:
    """2 and 4: limits of the plans in flight; a block that they write is neither shared nor up for reuse."""
    if not scheduler.num_in_flight:
        return
    size, config = scheduler.config.block_size, scheduler.config
    reusable = set(scheduler.blocks.free_blocks)
    reusable.update(block for block, entry in scheduler.prefix_cache.entries().items() if entry.evictable)
    for record in scheduler._in_flight:
        plan = record.plan
        if plan.num_tokens > config.max_num_batched_tokens:
            _fail(4, f"step {plan.step} has {plan.num_tokens} tokens, the budget {config.max_num_batched_tokens}")
        ids = plan.decodes.request_ids + [chunk.request_id for chunk in plan.prefills]
        if len(set(ids)) != len(ids):
            _fail(4, f"a request is twice in step {plan.step}: {ids}")
        written = {slot // size for slot in plan.decodes.kv_slots}
        for chunk in plan.prefills:
            written.update(chunk.block_table[chunk.start // size : -(-chunk.end // size)])
        for block in written:
            if counts[block] > 1:
                _fail(2, f"step {plan.step} writes block {block}, which {counts[block]} block tables hold")
        if written & reusable:
            _fail(1, f"step {plan.step} in flight writes blocks {sorted(written & reusable)}, which may be reused")


def _check_idle(scheduler: BaseScheduler) -> None:
    """8: nothing is held when nothing is live and nothing in flight."""
    blocks = scheduler.blocks
    if blocks.num_referenced or blocks.num_quarantined:
        _fail(8, f"idle with {blocks.num_referenced} blocks referenced, {blocks.num_quarantined} quarantined")
    if scheduler.swap_pool.num_used:
        _fail(8, f"idle with {scheduler.swap_pool.num_used} swap slots held")
    for name in ("running", "prefilling", "decoding", "waiting"):
        if len(getattr(scheduler, name)):
            _fail(8, f"idle, but {name} is {list(getattr(scheduler, name))}")
