"""The decoding requests as columns that advance in lockstep.

Every decoding request gets one row in every plan, so all positions grow by one per plan. That is what makes a step
cheap: a plan's columns are copies of these with one added, and who needs a new block, who fills one and who reaches
its length limit is known from buckets, without looking at the others:

- ``position - advances`` is constant for a member, so its residue modulo the block size (its *phase*) names the
  bucket that starts a block at advance t: the phase -t mod block_size;
- a member's last advance is known when it joins, and so is kept in a wheel.

Python work per plan is then O(members / block_size), plus a few list copies that run in C.
"""

from __future__ import annotations

from collections.abc import Iterator

from minillm.core.plan import DecodeBatch
from minillm.core.request import Request


class DecodeSet:
    """Members in columns: `positions[i]` is the position that member i computes next, `slots[i]` where its K and V go
    (valid once the block is there), `indices[i]` the output index that it samples, `outputs[i]` its output list."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.requests: list[Request] = []
        self.ids: list[str] = []
        self.rows: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.indices: list[int] = []
        self.outputs: list[list[int]] = []
        self._advances = 0
        self._phases: list[dict[Request, None]] = [{} for _ in range(block_size)]
        self._last_advance: dict[int, list[Request]] = {}
        """The wheel: advance -> who ends there, if still a member then (one that left and came back is in it twice)."""

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __contains__(self, request: Request) -> bool:
        return request.decode_set is self

    def add(self, request: Request) -> None:
        """A request whose next step is to compute position `kv_tokens` and sample. It must be below its limit."""
        position = request.kv_tokens
        request.decode_index = len(self.requests)
        request.decode_set = self
        self.requests.append(request)
        self.ids.append(request.request_id)
        self.rows.append(request.row)
        self.positions.append(position)
        self.slots.append(request.block_table[-1] * self.block_size + position % self.block_size)
        self.indices.append(position - request.prompt_len + 1)
        self.outputs.append(request.generated_ids)
        self._phase(position)[request] = None
        last = self._advances + request.last_position - position
        self._last_advance.setdefault(last, []).append(request)

    def remove(self, request: Request) -> None:
        """Take a member out; the last member moves to its place."""
        i = request.decode_index
        position = self.positions[i]
        del self._phase(position)[request]
        request.decode_index = -1
        request.decode_set = None
        request.kv_tokens = position
        last = self.requests[-1]
        columns: tuple[list, ...] = (
            self.requests,
            self.ids,
            self.rows,
            self.positions,
            self.slots,
            self.indices,
            self.outputs,
        )
        for column in columns:
            column[i] = column[-1]
            column.pop()
        if last is not request:
            last.decode_index = i

    def _phase(self, position: int) -> dict[Request, None]:
        return self._phases[(position - self._advances) % self.block_size]

    def starting_block(self) -> list[Request]:
        """Members whose next position is the first of a block."""
        return list(self._phase(0))

    def filling_block(self) -> list[Request]:
        """Members whose next position is the last of a block."""
        return list(self._phase(self.block_size - 1))

    @property
    def num_starting_block(self) -> int:
        """How many members' next positions are the first of a block."""
        return len(self._phase(0))

    def set_last_block(self, request: Request, block: int) -> None:
        """The block that holds the member's next position is now `block`."""
        i = request.decode_index
        self.slots[i] = block * self.block_size + self.positions[i] % self.block_size

    def advance(self, token_ids: list[int]) -> tuple[DecodeBatch, list[Request]]:
        """One row for every member, with these input tokens; then all move on by one position.

        Returns the batch and the members that sample their last token in it: they are members no more.
        """
        batch = DecodeBatch(list(self.ids), list(self.rows), token_ids, self.positions, self.slots, list(self.indices))
        # The plan keeps the old lists; the set goes on with new ones.
        self.positions = [position + 1 for position in self.positions]
        self.slots = [slot + 1 for slot in self.slots]
        self.indices = [index + 1 for index in self.indices]
        ended = [
            request
            for request in dict.fromkeys(self._last_advance.pop(self._advances, ()))
            if request.decode_set is self and self.positions[request.decode_index] == request.last_position + 1
        ]
        self._advances += 1
        for request in ended:
            self.remove(request)
        return batch, ended
