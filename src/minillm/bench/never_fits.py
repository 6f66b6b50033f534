"""What a serving loop does with a request that can never fit its pool: a reconstruction, in virtual time.

The experiment that `minillm bench stress` repeats was published with a pool of 8 blocks of 16 tokens and requests of
64 + 80 tokens, which need 9. This package refuses such a request when it is submitted. A loop that does not ask
beforehand runs it until the pool is full, and then has to do something: this module is such a loop, as plain as can
be, to see what its tokens per second depend on. Assumed, since it was not published:

- a waiting request is admitted when its prompt (and what it has generated) fits the free blocks; one that does not
  fit is passed over; one that was swapped out comes first;
- every active request makes one token per step; one that needs a block when none is free has a victim chosen by the
  policy among all active requests, itself included;
- the victim's blocks are copied out while the swap pool holds fewer than its limit of requests, else they are dropped,
  to be recomputed with the prompt;
- the loop ends when everything has ended, when a step finds nothing at all to do, or at a limit of steps.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.bench.step_cost import StepCost
from minillm.core.block_manager import blocks_for
from minillm.core.policies import Victim, get_victim_policy
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams

POOL_BLOCKS = 8
BLOCK_SIZE = 16
MAX_ACTIVE = 6
MAX_SWAPPED = 2

NOMINAL_COST = StepCost(
    {
        "steps": 5e-4,
        "prefill_steps": 1e-4,
        "decode_rows": 2e-5,
        "prefill_tokens": 5e-6,
        "swaps": 1e-4,
        "swapped_blocks": 5e-5,
    }
)
"""Of a toy model, where none was measured: the order of magnitude is what matters."""


@dataclass(slots=True)
class Live:
    """A request of the loop; `kv_tokens` have KV, on the device or in the swap pool."""

    request: Request
    max_tokens: int
    kv_tokens: int = 0
    generated: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self.request.prompt_len + self.generated


@dataclass(slots=True)
class Totals:
    """What a run did. `end` is finished, stalled (live requests, but nothing to do) or limit."""

    end: str = "limit"
    finished: int = 0
    output_tokens: int = 0
    counts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("steps", "prefill_steps", "decode_rows", "prefill_tokens", "swaps", "swapped_blocks"), 0.0
        )
    )
    last_token_step: int = 0
    """The step that made the last token: all later ones were for nothing."""


class UncheckedLoop:
    """A serving loop without a rule for requests that never fit; see the module's text."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        victim_policy: str,
        *,
        pool_blocks: int = POOL_BLOCKS,
        block_size: int = BLOCK_SIZE,
        max_active: int = MAX_ACTIVE,
        max_swapped: int = MAX_SWAPPED,
        cost: StepCost = NOMINAL_COST,
    ) -> None:
        """`shapes` are (prompt tokens, output tokens) in order of arrival."""
        self.policy = get_victim_policy(victim_policy)
        self.cost = cost
        self.block_size = block_size
        self.free = pool_blocks
        self.max_active, self.max_swapped = max_active, max_swapped
        self.waiting: list[Live] = []
        for number, (prompt, output) in enumerate(shapes):
            request = Request(f"r{number}", [0] * prompt, SamplingParams(max_tokens=output))
            request.arrival_seq = number
            self.waiting.append(Live(request, output))
        self.active: list[Live] = []
        self.swapped: list[Live] = []
        self.totals = Totals()

    def run(self, max_steps: int) -> Totals:
        """Run until everything has ended, nothing can be done, or so many steps were made."""
        counts = self.totals.counts
        while self.waiting or self.active or self.swapped:
            if counts["steps"] >= max_steps:
                return self.totals
            before = dict(counts)
            tokens = self.totals.output_tokens
            self._resume()
            self._admit()
            self._decode()
            if counts == before:
                self.totals.end = "stalled"
                return self.totals
            counts["steps"] += 1
            counts["prefill_steps"] += counts["prefill_tokens"] > before["prefill_tokens"]
            if self.totals.output_tokens > tokens:
                self.totals.last_token_step = int(counts["steps"])
        self.totals.end = "finished"
        return self.totals

    def seconds(self) -> float:
        """Virtual seconds of the run so far."""
        return self.cost.predict(self.totals.counts)

    def _blocks(self, tokens: int) -> int:
        return blocks_for(tokens, self.block_size)

    def _resume(self) -> None:
        for one in list(self.swapped):
            if len(self.active) < self.max_active and self._blocks(one.kv_tokens) <= self.free:
                self.swapped.remove(one)
                self._copy(one)
                self.free -= self._blocks(one.kv_tokens)
                self.active.append(one)

    def _admit(self) -> None:
        for one in list(self.waiting):
            if len(self.active) < self.max_active and self._blocks(one.num_tokens) <= self.free:
                self.waiting.remove(one)
                self.free -= self._blocks(one.num_tokens)
                one.kv_tokens = one.num_tokens
                self.totals.counts["prefill_tokens"] += one.num_tokens
                self.active.append(one)
                self._token(one)

    def _decode(self) -> None:
        for one in list(self.active):
            if one not in self.active or one.num_tokens == one.kv_tokens:
                continue  # ended, preempted for somebody before it
            while one in self.active and one.kv_tokens % self.block_size == 0 and not self.free:
                self._preempt()
            if one in self.active:
                self.free -= one.kv_tokens % self.block_size == 0
                one.kv_tokens += 1
                self.totals.counts["decode_rows"] += 1
                self._token(one)

    def _token(self, one: Live) -> None:
        one.generated += 1
        self.totals.output_tokens += 1
        if one.generated == one.max_tokens:
            self.active.remove(one)
            self.free += self._blocks(one.kv_tokens)
            self.totals.finished += 1

    def _preempt(self) -> None:
        victim = min(self.active, key=self._key)
        self.active.remove(victim)
        self.free += self._blocks(victim.kv_tokens)
        if len(self.swapped) < self.max_swapped:
            self._copy(victim)
            self.swapped.append(victim)
        else:
            victim.kv_tokens = 0
            self.waiting.append(victim)
            self.waiting.sort(key=lambda one: one.request.arrival_seq)

    def _key(self, one: Live) -> tuple[float, ...]:
        blocks = self._blocks(one.kv_tokens)
        swap = 2 * blocks * self.cost.seconds["swapped_blocks"] + 2 * self.cost.seconds["swaps"]
        recompute = one.kv_tokens * self.cost.seconds["prefill_tokens"] + self.cost.seconds["prefill_steps"]
        restore = swap if len(self.swapped) < self.max_swapped else recompute
        return self.policy(Victim(one.request, blocks, restore))

    def _copy(self, one: Live) -> None:
        self.totals.counts["swaps"] += 1
        self.totals.counts["swapped_blocks"] += self._blocks(one.kv_tokens)


LIMITS = (500, 2000)
POOLS = (8, 9, 10, 12, 16)
ORDERS = 100
_LARGE, _SMALL = (64, 80), (8, 10)


@dataclass(frozen=True, slots=True)
class PoolOutcome:
    """What `orders` random mixes of large and small requests came to in one pool, with one limit of steps.

    Ratios are tokens per second of cost_based over those of fifo: least, median, greatest. Shares: of the runs of
    either policy that stalled or were cut off by the limit; `seven` of the mixes with a ratio of at least 7, either
    way round.
    """

    pool_blocks: int
    max_steps: int
    least: float
    median: float
    greatest: float
    stalled: float
    cut_off: float
    seven: float


def random_mix(seed: int) -> list[tuple[int, int]]:
    """8 to 32 requests in a random order, at least one of them large."""
    rng = random.Random(f"{seed} never fits")
    share = rng.choice((0.25, 0.5))
    shapes = [_LARGE if rng.random() < share else _SMALL for _ in range(rng.choice((8, 12, 16, 24, 32)))]
    shapes[rng.randrange(len(shapes))] = _LARGE
    return shapes


def reconstruct(
    cost: StepCost = NOMINAL_COST,
    pools: Sequence[int] = POOLS,
    limits: Sequence[int] = LIMITS,
    orders: int = ORDERS,
) -> list[PoolOutcome]:
    """The loop on random mixes, in pools in which the large request does not fit (8 blocks) and in which it does."""
    found = []
    for pool_blocks in pools:
        for limit in limits:
            ratios, ends = [], []
            for seed in range(orders):
                speeds = {}
                for policy in ("fifo", "cost_based"):
                    loop = UncheckedLoop(random_mix(seed), policy, pool_blocks=pool_blocks, cost=cost)
                    totals = loop.run(limit)
                    speeds[policy] = totals.output_tokens / loop.seconds()
                    ends.append(totals.end)
                ratios.append(speeds["cost_based"] / speeds["fifo"])
            found.append(
                PoolOutcome(
                    pool_blocks,
                    limit,
                    min(ratios),
                    statistics.median(ratios),
                    max(ratios),
                    ends.count("stalled") / len(ends),
                    ends.count("limit") / len(ends),
                    sum(ratio >= 7 or ratio <= 1 / 7 for ratio in ratios) / len(ratios),
                )
            )
    return found
