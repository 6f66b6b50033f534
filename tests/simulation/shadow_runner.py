"""A scripted model on a shadow KV memory: it notices every wrong block, not only every wrong token.

The model is a pure function. The KV of a position is a hash of all tokens up to it (and of the cache salt), so a
position read from the wrong block, an old copy or another user's prefix never looks right:

    kv[p] = hash(kv[p - 1], token[p])        kv[-1] = hash of the salt
    output i of choice c = f(seed, c, i, kv of the last position)

`Sequence` is the oracle: what a request yields alone, with no pool, batch or scheduler. `ShadowRunner` executes plans
as a device would: it keeps block tables per row from `assignments` and `table_updates`, really moves block contents
for swaps and copies, writes one value per computed position, and reads each row's whole context back through its table
before it computes. What it reads is compared with the oracle; the first difference raises `SimulationFailure`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from minillm.core.plan import PrefillChunk, StepOutcome, StepPlan, TokenLogprobs

POISON = -1
"""What a failed row or copy leaves in memory; `hash` of a tuple is never -1, so it equals no real content."""
GARBAGE_TOKEN = 1 << 20
"""Token of a row whose result means nothing; outside every vocabulary used here."""


def root_kv(salt: str | None) -> int:
    """What precedes the first position: it differs by salt, so that content shared across salts looks wrong."""
    return zlib.crc32(salt.encode()) if salt else 0


class SimulationFailure(AssertionError):
    """The scheduler did something that no runner or client may see."""


class Sequence:
    """What one sequence yields when it runs alone: tokens (prompt, then outputs) and the KV of each position."""

    __slots__ = ("choice", "kv", "masked", "min_tokens", "prompt_len", "seed", "tokens", "vocab_size")

    def __init__(
        self,
        prompt: list[int],
        *,
        seed: int,
        choice: int,
        salt: str | None,
        vocab_size: int,
        min_tokens: int = 0,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.seed = seed
        self.choice = choice
        self.prompt_len = len(prompt)
        self.vocab_size = vocab_size
        self.min_tokens = min_tokens
        self.masked = stop_ids
        """The sampler's min_tokens mask: none of these in the first `min_tokens` outputs."""
        self.tokens = list(prompt)
        value = root_kv(salt)
        self.kv: list[int] = []
        for token in prompt:
            value = hash((value, token))
            self.kv.append(value)

    def grow_to(self, length: int) -> None:
        """Have at least `length` tokens and the KV of as many positions."""
        tokens, kv = self.tokens, self.kv
        while len(tokens) < length:
            index = len(tokens) - self.prompt_len
            draw = hash((self.seed, self.choice, index, kv[-1]))
            token = draw % self.vocab_size
            if index < self.min_tokens:
                while token in self.masked:
                    token = (token + 1) % self.vocab_size
            tokens.append(token)
            kv.append(hash((kv[-1], token)))

    def output(self, index: int) -> int:
        """Output token `index`."""
        self.grow_to(self.prompt_len + index + 1)
        return self.tokens[self.prompt_len + index]


@dataclass(slots=True)
class Faults:
    """What goes wrong in one step."""

    nan_requests: set[str] = field(default_factory=set)
    """Their rows fail and the KV that they wrote is garbage."""
    sampler_rows: set[int] = field(default_factory=set)
    """Rows (sequence slots) whose sampling fails; their KV is right."""
    swap_requests: set[str] = field(default_factory=set)
    """Their copies to or from the host do not happen."""


class _Row:
    """State of one sequence slot, as a device keeps it."""

    __slots__ = ("last_step", "last_token", "request_id", "sequence", "table")

    def __init__(self, request_id: str, sequence: Sequence) -> None:
        self.request_id = request_id
        self.sequence = sequence
        self.table: list[int] = []
        self.last_token = GARBAGE_TOKEN
        self.last_step = -1


class ShadowRunner:
    """Executes plans on shadow memory. `sequences` maps a request id to its oracle (the caller fills it)."""

    def __init__(self, num_blocks: int, block_size: int, num_swap_slots: int, max_num_seqs: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.memory = [0] * (num_blocks * block_size)
        self.swap: list[list[int]] = [[0] * block_size for _ in range(num_swap_slots)]
        self.rows: list[_Row | None] = [None] * max_num_seqs
        self.sequences: dict[str, Sequence] = {}
        self.poisoned: set[str] = set()
        """Requests whose device state is garbage after a fault, until an assignment rebuilds them."""
        self.step = -1
        self.rows_computed = 0
        self.tokens_computed = 0

    def forward(self, plan: StepPlan, faults: Faults, in_flight: tuple[int, ...]) -> StepOutcome:
        """Execute `plan`; `in_flight` are the steps of plans that are issued and not committed."""
        if plan.step <= self.step:
            raise SimulationFailure(f"step {plan.step} after step {self.step}: steps must grow")
        self.step = plan.step
        self._move_blocks(plan, faults)
        self._assign_rows(plan)
        if faults.swap_requests:
            self.poisoned.update(swap.request_id for swap in plan.swap_ins if swap.request_id in faults.swap_requests)
        outcome = StepOutcome(plan.step, [])
        self._decode(plan, faults, in_flight, outcome)
        for chunk in plan.prefills:
            self._prefill(plan, chunk, faults, outcome)
        if faults.swap_requests:
            moved = [swap.request_id for swap in (*plan.swap_outs, *plan.swap_ins)]
            outcome.failed_swaps = [request_id for request_id in moved if request_id in faults.swap_requests]
        return outcome

    def _move_blocks(self, plan: StepPlan, faults: Faults) -> None:
        size, memory = self.block_size, self.memory
        for out in plan.swap_outs:
            if len(out.blocks) != len(out.swap_slots):
                raise SimulationFailure(f"swap-out of {out.request_id}: {out.blocks} to {out.swap_slots}")
            failed = out.request_id in faults.swap_requests
            for block, slot in zip(out.blocks, out.swap_slots, strict=True):
                self.swap[slot] = [POISON] * size if failed else memory[block * size : block * size + size]
        for back in plan.swap_ins:
            if len(back.blocks) != len(back.swap_slots):
                raise SimulationFailure(f"swap-in of {back.request_id}: {back.swap_slots} to {back.blocks}")
            failed = back.request_id in faults.swap_requests
            for slot, block in zip(back.swap_slots, back.blocks, strict=True):
                memory[block * size : block * size + size] = [POISON] * size if failed else self.swap[slot]
        for source, destination in plan.copies:
            memory[destination * size : destination * size + size] = memory[source * size : source * size + size]

    def _assign_rows(self, plan: StepPlan) -> None:
        for given in plan.assignments:
            sequence = self.sequences.get(given.request_id)
            if sequence is None:
                raise SimulationFailure(f"row {given.row} is given to {given.request_id}, which is unknown")
            prompt, outputs = given.input_ids, given.output_ids
            if prompt != sequence.tokens[: sequence.prompt_len] or len(prompt) != sequence.prompt_len:
                raise SimulationFailure(f"row {given.row}: prompt of {given.request_id} is {prompt}")
            sequence.grow_to(len(prompt) + len(outputs))
            if outputs != sequence.tokens[len(prompt) : len(prompt) + len(outputs)]:
                raise SimulationFailure(f"row {given.row}: outputs of {given.request_id} are {outputs}")
            if given.seed != sequence.seed or given.choice != sequence.choice:
                raise SimulationFailure(f"row {given.row}: {given.request_id} has another seed or choice")
            self.rows[given.row] = _Row(given.request_id, sequence)
            self.poisoned.discard(given.request_id)
        for update in plan.table_updates:
            row = self.rows[update.row]
            if row is None:
                raise SimulationFailure(f"table update of row {update.row}, which belongs to nobody")
            if update.start > len(row.table):
                raise SimulationFailure(f"table of row {update.row} ({row.request_id}) has a gap at {len(row.table)}")
            row.table[update.start : update.start + len(update.blocks)] = update.blocks

    def _owned_row(self, index: int, request_id: str) -> _Row:
        row = self.rows[index] if 0 <= index < len(self.rows) else None
        if row is None or row.request_id != request_id:
            raise SimulationFailure(f"row {index} is used by {request_id} but belongs to {row and row.request_id}")
        return row

    def check_context(self, row: _Row, length: int) -> None:
        """Compare positions [0, length), read through the row's table, with the oracle."""
        size, memory, kv = self.block_size, self.memory, row.sequence.kv
        table = row.table
        if length > len(table) * size:
            raise SimulationFailure(f"{row.request_id}: {length} positions are read from a table of {len(table)}")
        position = 0
        for block in table:
            end = position + size
            if end >= length:
                start = block * size
                if memory[start : start + length - position] != kv[position:length]:
                    self._report_content(row, position, length, block)
                return
            if memory[block * size : block * size + size] != kv[position:end]:
                self._report_content(row, position, end, block)
            position = end

    def _report_content(self, row: _Row, start: int, end: int, block: int) -> None:
        offset = block * self.block_size - start
        for position in range(start, end):
            found = self.memory[offset + position]
            if found != row.sequence.kv[position]:
                kind = {POISON: "garbage of a failed row or copy", 0: "nothing written"}.get(found, "another content")
                raise SimulationFailure(
                    f"step {self.step}: {row.request_id} reads position {position} from block {block} "
                    f"(table {row.table}) and finds {kind}"
                )
        raise AssertionError("unreachable: no difference")

    def _decode(self, plan: StepPlan, faults: Faults, in_flight: tuple[int, ...], outcome: StepOutcome) -> None:
        batch, size, memory = plan.decodes, self.block_size, self.memory
        columns = zip(
            batch.request_ids,
            batch.rows,
            batch.token_ids,
            batch.positions,
            batch.kv_slots,
            batch.output_indices,
            strict=True,
        )
        results = outcome.token_ids
        for request_id, index, token, position, slot, output_index in columns:
            row = self._owned_row(index, request_id)
            sequence = row.sequence
            if position != sequence.prompt_len + output_index - 1:
                raise SimulationFailure(f"{request_id}: position {position} samples output {output_index}")
            table = row.table
            if position // size >= len(table) or slot != table[position // size] * size + position % size:
                raise SimulationFailure(f"{request_id}: position {position} goes to slot {slot}, table {table}")
            if request_id in self.poisoned or request_id in faults.nan_requests:
                memory[slot] = POISON
                self.poisoned.add(request_id)
                if request_id in faults.nan_requests:
                    outcome.failures[len(results)] = "NaN in the logits"
                results.append([GARBAGE_TOKEN])
                continue
            if token == -1:
                if row.last_step not in in_flight:
                    raise SimulationFailure(f"{request_id}: takes a token of step {row.last_step}, not in flight")
                token = row.last_token
            sequence.grow_to(position + 2)
            if token != sequence.tokens[position]:
                raise SimulationFailure(
                    f"step {plan.step}: {request_id} is fed token {token} at position {position}, "
                    f"alone it is {sequence.tokens[position]}"
                )
            self.check_context(row, position)
            memory[slot] = sequence.kv[position]
            sampled = sequence.tokens[position + 1]
            if index in faults.sampler_rows:
                outcome.failures[len(results)] = "the sampler failed"
                self.poisoned.add(request_id)
                results.append([])
                continue
            row.last_token = sampled
            row.last_step = plan.step
            results.append([sampled])
        self.rows_computed += len(batch.rows)
        self.tokens_computed += len(batch.rows)

    def _prefill(self, plan: StepPlan, chunk: PrefillChunk, faults: Faults, outcome: StepOutcome) -> None:
        row = self._owned_row(chunk.row, chunk.request_id)
        sequence, size, memory = row.sequence, self.block_size, self.memory
        start, end = chunk.start, chunk.end
        sequence.grow_to(end + 1)
        broken = chunk.request_id in self.poisoned or chunk.request_id in faults.nan_requests
        if not 0 <= start < end:
            raise SimulationFailure(f"{chunk.request_id}: chunk [{start}, {end})")
        blocks = -(-end // size)
        if chunk.block_table[:blocks] != row.table[:blocks] or len(row.table) < blocks:
            raise SimulationFailure(f"{chunk.request_id}: chunk's table {chunk.block_table}, row's {row.table}")
        if not broken:
            if chunk.token_ids != sequence.tokens[start:end]:
                raise SimulationFailure(f"{chunk.request_id}: chunk [{start}, {end}) computes {chunk.token_ids}")
            self.check_context(row, start)
        values = [POISON] * (end - start) if broken else sequence.kv[start:end]
        for position in range(start, end):
            memory[row.table[position // size] * size + position % size] = values[position - start]
        self.rows_computed += len(chunk.sample_rows)
        self.tokens_computed += end - start
        if broken:
            self.poisoned.add(chunk.request_id)
            if chunk.request_id in faults.nan_requests and not chunk.sample_rows:
                outcome.failed_requests[chunk.request_id] = "the chunk failed"
        elif chunk.prompt_logprobs:
            last = min(end, sequence.prompt_len - 1)
            entries = [TokenLogprobs(t, -1.0, 1, [], []) for t in sequence.tokens[start + 1 : last + 1]]
            outcome.prompt_logprobs[chunk.request_id] = (start + 1, entries)
        self._sample_chunk(plan, chunk, broken, faults, outcome)

    def _sample_chunk(
        self, plan: StepPlan, chunk: PrefillChunk, broken: bool, faults: Faults, outcome: StepOutcome
    ) -> None:
        results = outcome.token_ids
        for index in chunk.sample_rows:
            row = self.rows[index]
            if row is None:
                raise SimulationFailure(f"{chunk.request_id}: samples into row {index}, which belongs to nobody")
            if broken:
                if chunk.request_id in faults.nan_requests:
                    outcome.failures[len(results)] = "NaN in the logits"
                self.poisoned.add(row.request_id)
                results.append([GARBAGE_TOKEN])
                continue
            sequence = row.sequence
            if chunk.end != sequence.prompt_len + chunk.output_index:
                raise SimulationFailure(
                    f"{row.request_id}: output {chunk.output_index} is sampled at the end of [.., {chunk.end}) "
                    f"with a prompt of {sequence.prompt_len}"
                )
            if index in faults.sampler_rows:
                outcome.failures[len(results)] = "the sampler failed"
                self.poisoned.add(row.request_id)
                results.append([])
                continue
            row.last_token = sequence.output(chunk.output_index)
            row.last_step = plan.step
            results.append([row.last_token])
