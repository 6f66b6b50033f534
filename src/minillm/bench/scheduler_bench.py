"""`minillm bench scheduler`: what one step costs on the CPU, schedule + commit, by the number of running requests.

The real scheduler is driven as the engine drives it, one plan in flight: ``schedule(n + 1)``, then ``commit(n)``. The
device is replaced by ready-made outcomes, made outside the timed parts. Everything that a step does is included:
prefix lookups and publications, growth of block tables, evictions, appended tokens, stop checks, events.

The load is a steady state. Prompts are mixed (32 to 512 tokens; a quarter start with one shared prefix of 256), outputs
are 64 to 448 tokens long, half of them ended by the length limit, half by a stop token. Whoever ends is replaced at
once, so with R running requests about R / 256 leave and join per step, each join with its prefill. The pool holds the
running requests with a tenth to spare; the rest is filled with cached prefixes, so every allocation evicts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count
from random import Random
from time import perf_counter_ns, thread_time_ns
from typing import Any

from minillm.bench import common
from minillm.core.config import SchedulerConfig
from minillm.core.plan import NoPlan, StepOutcome, StepPlan
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.core.scheduler import ContinuousScheduler

RUNNING = (1, 16, 64, 256, 1024)
BLOCK_SIZE = 16
PROMPT_TOKENS = (32, 512)
OUTPUT_TOKENS = (64, 448)
SHARED_PREFIX_TOKENS = 256
VOCAB_SIZE = 32_000
EOS_TOKEN_ID = 2
STEP_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class SchedulerCost:
    """Cost of a step with `running` requests; times in microseconds of the wall clock unless they say otherwise."""

    running: int
    steps: int
    median_us: float
    p99_us: float
    mean_us: float
    cpu_median_us: float
    """The same by the thread's CPU time: on a machine that others use too, the wall clock counts their slices."""
    schedule_median_us: float
    commit_median_us: float
    joins_per_step: float
    tokens_per_step: float
    hit_blocks_per_step: float
    evictions_per_step: float
    date: str
    commit: str
    device: str
    cores: str
    python: str

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> SchedulerCost:
        """From a row of the CSV file."""
        kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
        return cls(**{column.name: kinds[str(column.type)](row[column.name]) for column in fields(cls)})


class _Load:
    """Requests and ready-made outcomes of a steady state with `running` requests."""

    def __init__(self, running: int, seed: int) -> None:
        self.rng = Random(seed)
        self.running = running
        self.numbers = count()
        self.now = 0.0
        self.joins = 0
        self.stop_at: dict[str, int] = {}
        """Output index at which a request's stop token comes."""
        self.shared = [self.rng.randrange(3, VOCAB_SIZE) for _ in range(SHARED_PREFIX_TOKENS)]
        # Random tokens are drawn once: the outcome must not be what the benchmark spends its time on.
        self.tokens = [[self.rng.randrange(3, VOCAB_SIZE)] for _ in range(4096)]
        self.longest = PROMPT_TOKENS[1] + OUTPUT_TOKENS[1]
        mean_tokens = sum(PROMPT_TOKENS) // 2 + sum(OUTPUT_TOKENS) // 2
        blocks = int(running * mean_tokens / BLOCK_SIZE * 1.1) + 2 * self.longest // BLOCK_SIZE
        self.scheduler = ContinuousScheduler(
            SchedulerConfig(
                num_blocks=blocks,
                block_size=BLOCK_SIZE,
                max_num_seqs=running,
                max_num_batched_tokens=max(8192, running),
                max_prefill_tokens_per_step=2048,
                max_model_len=self.longest,
            )
        )

    def join(self, already_generated: int = 0) -> None:
        """Submit one request; `already_generated` shortens its output, so that the first ones end at all times."""
        rng = self.rng
        request_id = f"bench-{next(self.numbers)}"
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(*PROMPT_TOKENS))]
        if rng.random() < 0.25:
            prompt = (self.shared + prompt)[: max(len(prompt), SHARED_PREFIX_TOKENS + 16)]
        length = max(1, rng.randint(*OUTPUT_TOKENS) - already_generated)
        if rng.random() < 0.5:
            self.stop_at[request_id] = length - 1
            length = OUTPUT_TOKENS[1]
        params = SamplingParams(max_tokens=min(length, self.longest - len(prompt)))
        request = Request(request_id, prompt, params, arrival_time=self.now, eos_token_ids=(EOS_TOKEN_ID,))
        self.scheduler.prepare(request)  # in the caller's thread, as the engine does it
        self.scheduler.submit(request, self.now)
        self.joins += 1

    def outcome(self, plan: StepPlan) -> StepOutcome:
        """The outcome of a plan: drawn tokens, and the stop token where a request's time has come."""
        base = self.rng.randrange(2048)
        batch = plan.decodes
        tokens = self.tokens[base : base + len(batch.rows)]
        stop_at = self.stop_at
        for i, request_id in enumerate(batch.request_ids):
            if stop_at.get(request_id) == batch.output_indices[i]:
                tokens[i] = [EOS_TOKEN_ID]
        for chunk in plan.prefills:
            tokens.extend(self.tokens[0] for _ in chunk.sample_rows)
        return StepOutcome(plan.step, tokens)


def _steps(load: _Load) -> Iterator[tuple[int, int, int, StepPlan]]:
    """Run the load step by step; yields (nanoseconds of schedule, of commit, of CPU in both, the plan committed)."""
    scheduler = load.scheduler
    in_flight: StepPlan | None = None
    while True:
        load.now += STEP_SECONDS
        cpu_begin, begin = thread_time_ns(), perf_counter_ns()
        plan = scheduler.schedule(load.now)
        scheduled = perf_counter_ns() - begin
        cpu = thread_time_ns() - cpu_begin
        if in_flight is None:
            if isinstance(plan, NoPlan):
                raise RuntimeError(f"the scheduler made no plan ({plan.value}) though requests are live")
            in_flight = plan
            continue
        outcome = load.outcome(in_flight)
        cpu_begin, begin = thread_time_ns(), perf_counter_ns()
        events = scheduler.commit(in_flight, outcome, load.now)
        committed = perf_counter_ns() - begin
        cpu += thread_time_ns() - cpu_begin
        for event in events.finished:
            load.stop_at.pop(event.request_id, None)
            load.join()
        yield scheduled, committed, cpu, in_flight
        in_flight = None if isinstance(plan, NoPlan) else plan


def measure(running: int, *, steps: int = 1000, seed: int = 0) -> SchedulerCost:
    """Measure `steps` steps in the steady state of `running` requests."""
    from minillm.doctor import cpu_name

    load = _Load(running, seed)
    for _ in range(running):
        load.join(already_generated=load.rng.randrange(OUTPUT_TOKENS[1]))
    stream = _steps(load)
    warm = 0
    while warm < 50 or len(load.scheduler.prefix_cache) < load.scheduler.blocks.num_blocks * 0.7:
        next(stream)
        warm += 1
        if warm >= 20 * OUTPUT_TOKENS[1]:
            break
    joins, before = load.joins, load.scheduler.prefix_cache.counters
    hits, evictions = before.hits, before.evictions
    scheduled, committed, cpu_times, tokens = [], [], [], 0
    for _ in range(steps):
        schedule_ns, commit_ns, cpu_ns, plan = next(stream)
        cpu_times.append(cpu_ns / 1000)
        scheduled.append(schedule_ns / 1000)
        committed.append(commit_ns / 1000)
        tokens += plan.num_tokens
    total = sorted(a + b for a, b in zip(scheduled, committed, strict=True))
    counters = load.scheduler.prefix_cache.counters
    return SchedulerCost(
        running=running,
        steps=steps,
        median_us=round(statistics.median(total), 1),
        p99_us=round(total[min(len(total) - 1, int(len(total) * 0.99))], 1),
        mean_us=round(statistics.fmean(total), 1),
        cpu_median_us=round(statistics.median(cpu_times), 1),
        schedule_median_us=round(statistics.median(scheduled), 1),
        commit_median_us=round(statistics.median(committed), 1),
        joins_per_step=round((load.joins - joins) / steps, 3),
        tokens_per_step=round(tokens / steps, 1),
        hit_blocks_per_step=round((counters.hits - hits) / steps, 3),
        evictions_per_step=round((counters.evictions - evictions) / steps, 3),
        **common.environment(cpu_name(), packages=()),
    )


def table_cells(rows: Sequence[Mapping[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells of saved rows: microseconds per step (medians but for p99), and what a step does."""
    columns = ["running", "median, us", "p99", "CPU", "schedule", "commit", "joins", "tokens", "evicted blocks"]
    cells = []
    for cost in map(SchedulerCost.from_row, rows):
        times = (cost.median_us, cost.p99_us, cost.cpu_median_us, cost.schedule_median_us, cost.commit_median_us)
        load = (f"{cost.joins_per_step:.2f}", f"{cost.tokens_per_step:.0f}", f"{cost.evictions_per_step:.1f}")
        cells.append([str(cost.running), *(f"{time:.0f}" for time in times), *load])
    return columns, cells


def run(
    *, running: Sequence[int] = RUNNING, steps: int = 1000, seed: int = 0, progress: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Measure each number of running requests; one row each."""
    rows = []
    for number in running:
        cost = measure(number, steps=steps, seed=seed)
        progress(f"{number:5,} running: {cost.median_us:.0f} us per step (p99 {cost.p99_us:.0f})")
        rows.append({**asdict(cost), "seed": seed})
    return rows
