"""`minillm bench stress`: memory pressure, and what the choice of a victim has to do with throughput.

Large (64 + 80 tokens) and small (8 + 10) requests share a pool that holds any of them, but not all at once; at most
six are active, and the swap pool takes two. A *round* runs every setting once, on one random order of the same
requests, and starts with another setting each time, so that a machine that changes its speed does so for all. Rounds
are saved as they end, and a later call goes on where an earlier one stopped. A *probe*, always the same small run on
an engine of its own, is timed every few steps of each run, whose clock stands still meanwhile: it says how fast the
machine was during that run (:mod:`minillm.bench.pulse`).

Settings differ in four things: in which order requests are admitted, whom memory pressure preempts, whether the victim
is swapped out or recomputed, and how many may be active. `victims` compares the victim policies, both ways of
preempting; `factorial` measures every combination of two levels of each, so that a difference can be attributed
(:mod:`minillm.bench.attribution`).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minillm.bench import common
from minillm.bench.attribution import coalitions
from minillm.bench.models import open_model
from minillm.bench.pulse import Pulse
from minillm.bench.random_tokenizer import random_tokenizer
from minillm.bench.recording import RunResult
from minillm.bench.runs import Target, drive, open_target, warm_up
from minillm.bench.workloads import Segment, Workload, WorkloadRequest
from minillm.core.block_manager import blocks_for
from minillm.core.errors import ConfigError
from minillm.core.policies import VICTIM_POLICIES, get_queue_policy, get_victim_policy

DEFAULT_CSV = common.RESULTS / "stress.csv"
LARGE = (64, 80)
SMALL = (8, 10)
BLOCK_SIZE = 16
MAX_SWAPPED = 2
MAX_MODEL_LEN = 160
SWAP_GIB = 0.02
"""Room for far more than the two requests that may be in it."""
BATCHED_TOKENS = 512
FACTORS = ("admission", "victim", "preemption", "cap")
DESIGNS = ("victims", "factorial", "all")
CURVE_POINTS = 60


@dataclass(frozen=True, slots=True)
class Setting:
    """What is varied."""

    admission: str = "fcfs"
    victim: str = "fifo"
    preemption: str = "recompute"
    cap: int = 6

    @property
    def name(self) -> str:
        """`fcfs/fifo/recompute/6`."""
        return f"{self.admission}/{self.victim}/{self.preemption}/{self.cap}"

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> Setting:
        """Of a row of the CSV file."""
        return cls(row["admission"], row["victim"], row["preemption"], int(row["cap"]))

    def switched(self, factors: frozenset[str], other: Setting) -> Setting:
        """This setting with these factors as in `other`."""
        return replace(self, **{factor: getattr(other, factor) for factor in factors})


BASE = Setting()
"""First come, first served; the oldest is preempted and recomputed; six at a time."""
SWITCHED = Setting("shortest_prompt", "cost_based", "swap", 3)


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, and on what."""

    model: str = "smollm2-135m"
    design: str = "all"
    repeats: int = 20
    large: int = 4
    small: int = 4
    num_blocks: int = 16
    base: Setting = BASE
    switched: Setting = SWITCHED
    factors: tuple[str, ...] = FACTORS
    """Those that `factorial` switches; n of them make 2**n settings."""
    device: str = "cpu"
    dtype: str = "auto"
    seed: int = 0
    cpu_time: bool = False
    """Take this process's CPU time for the clock: for a machine that others use, with one thread."""
    time_limit: float | None = None
    """Seconds after which no further round is begun."""
    extra_victims: tuple[str, ...] = field(default=())
    """Registered by the user."""
    extra_queues: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.design not in DESIGNS:
            raise ConfigError(f"design={self.design!r} must be one of {', '.join(DESIGNS)}")
        if self.repeats < 1 or self.large + self.small < 1:
            raise ConfigError(f"repeats={self.repeats} and large + small={self.large + self.small} must be at least 1")
        if unknown := set(self.factors) - set(FACTORS):
            raise ConfigError(f"factors={sorted(unknown)} must be among {', '.join(FACTORS)}")
        coalitions(self.factors)
        needed = blocks_for(sum(LARGE if self.large else SMALL), BLOCK_SIZE)
        if self.num_blocks < needed:
            raise ConfigError(f"num_blocks={self.num_blocks}: the longest request alone needs {needed} blocks")
        for setting in (self.base, self.switched):
            get_queue_policy(setting.admission)
            get_victim_policy(setting.victim)


def settings(options: Options) -> list[Setting]:
    """The settings of a design, each once."""
    base, chosen = options.base, []
    if options.design in ("victims", "all"):
        victims = [name for name in VICTIM_POLICIES if name not in options.extra_victims] + list(options.extra_victims)
        chosen += [replace(base, victim=victim, preemption=how) for how in ("recompute", "swap") for victim in victims]
        chosen += [replace(base, admission=admission) for admission in options.extra_queues]
    if options.design in ("factorial", "all"):
        chosen += [base.switched(which, options.switched) for which in coalitions(options.factors)]
    return list(dict.fromkeys(chosen))


def workload(large: int, small: int, seed: int) -> Workload:
    """The mixed requests in a random order, all there from the start."""
    shapes = [("large", LARGE, i) for i in range(large)] + [("small", SMALL, i) for i in range(small)]
    random.Random(f"{seed} stress").shuffle(shapes)
    requests = tuple(
        WorkloadRequest(segments=(Segment(f"{label}{i}", prompt),), max_tokens=output, label=label)
        for label, (prompt, output), i in shapes
    )
    source = f"{large} of {LARGE[0]} + {LARGE[1]} and {small} of {SMALL[0]} + {SMALL[1]} tokens, order {seed}"
    return Workload("stress", requests, seed, source)


def engine_options(setting: Setting, num_blocks: int) -> dict[str, Any]:
    """Of the engine (fields of EngineConfig)."""
    return {
        "num_gpu_blocks_override": num_blocks,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": setting.cap,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "max_model_len": min(MAX_MODEL_LEN, num_blocks * BLOCK_SIZE),
        "scheduling_policy": setting.admission,
        "victim_policy": setting.victim,
        "preemption_mode": setting.preemption,
        "max_swapped_requests": MAX_SWAPPED,
        "swap_space": SWAP_GIB,
        "enable_prefix_caching": False,
    }


def step_counts(result: RunResult) -> dict[str, int]:
    """What a run did, as the terms of :mod:`minillm.bench.step_cost`."""
    log = result.steps
    return {
        "steps": len(log),
        "prefill_steps": sum(map(bool, log.prefill_tokens)),
        "decode_rows": sum(log.decode_rows),
        "context_tokens": sum(log.context_tokens),
        "prefill_tokens": sum(log.prefill_tokens),
        "swaps": sum(map(bool, log.swapped_out)) + sum(map(bool, log.swapped_in)),
        "swapped_blocks": sum(log.swapped_out) + sum(log.swapped_in),
    }


def active_curve(result: RunResult, points: int = CURVE_POINTS) -> list[int]:
    """Requests in the batch at `points` equally spaced moments of the run."""
    log, moment, curve = result.steps, 0, []
    for point in range(points):
        at = (point + 0.5) / points * result.seconds
        while moment + 1 < len(log) and log.time[moment] < at:
            moment += 1
        curve.append(log.decode_rows[moment] + log.prefill_chunks[moment] if len(log) else 0)
    return curve


def run_row(setting: Setting, round_number: int, options: Options, result: RunResult) -> dict[str, Any]:
    """One run as a row of the CSV file, without the columns that say where it ran."""
    return {
        "round": round_number,
        **{factor: getattr(setting, factor) for factor in FACTORS},
        "num_blocks": options.num_blocks,
        "large": options.large,
        "small": options.small,
        **result.figures(),
        "ttft_small_p50": _median_ttft(result, "small"),
        "ttft_large_p50": _median_ttft(result, "large"),
        **step_counts(result),
        "active": ";".join(map(str, active_curve(result))),
    }


def _median_ttft(result: RunResult, label: str) -> float:
    times = [request.ttft for request in result.of_label(label)]
    return round(statistics.median(times), 6) if times else float("nan")


def open_targets(options: Options) -> tuple[dict[Setting, Target], Target]:
    """One engine for each setting, and one for the probe, all on the same weights, warmed up."""
    from minillm.models.tokenizer import load_tokenizer

    model = open_model(options.model, options.dtype, options.device)
    random_weights = model.kind == "random"
    tokenizer = random_tokenizer(model.config.vocab_size) if random_weights else load_tokenizer(model.path)

    def warm(setting: Setting, num_blocks: int) -> Target:
        changes = engine_options(setting, num_blocks)
        target = open_target(model, tokenizer=tokenizer, device=options.device, cpu_time=options.cpu_time, **changes)
        warm_up(target)
        return target

    targets = {setting: warm(setting, options.num_blocks) for setting in settings(options)}
    return targets, warm(BASE, options.num_blocks)


def measure(
    options: Options, progress: Callable[[str], None], done: Sequence[Mapping[str, Any]] = ()
) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of one round after the other, up to `options.repeats` rounds, those of `done` counted.

    ConfigError if `done` is of another study: other settings, workload or pool.
    """
    first = _rounds_done(options, done)
    if first >= options.repeats:
        return
    begin = time.perf_counter()
    targets, probe = open_targets(options)
    try:
        pulse = Pulse(probe)
        for target in targets.values():
            pulse.attach(target)
        order = list(targets)
        target = targets[order[0]]
        where = common.environment(target.device_name)
        where |= {"model": target.name, "dtype": target.dtype, "seed": str(options.seed)}
        where |= {"clock": common.clock_name(options.cpu_time)}
        for name in ("model", "dtype", "clock", "device", "cores", "torch") if done else ():
            if str(done[0][name]) != str(where[name]):
                raise ConfigError(f"the saved rounds have {name}={done[0][name]}, not {where[name]}")
        for round_number in range(first, options.repeats):
            if options.time_limit is not None and time.perf_counter() - begin > options.time_limit:
                progress(f"time limit: {round_number} of {options.repeats} rounds are done; --resume goes on")
                return
            progress(f"round {round_number + 1} of {options.repeats}, {len(order)} settings")
            load = workload(options.large, options.small, options.seed + round_number)
            shift = round_number % len(order)
            rows = {}
            for position, setting in enumerate(order[shift:] + order[:shift]):
                pulse.begin()
                row = run_row(setting, round_number, options, drive(targets[setting], load, after_step=pulse))
                rows[setting] = {**where, **row, "position": position, "probe_seconds": round(pulse.seconds, 6)}
            yield [rows[setting] for setting in order]
    finally:
        for target in (*targets.values(), probe):
            target.engine.close()


def _rounds_done(options: Options, done: Sequence[Mapping[str, Any]]) -> int:
    if not done:
        return 0
    expected = {setting.name for setting in settings(options)}
    found = {Setting.from_row(row).name for row in done}
    if found != expected:
        raise ConfigError(f"the saved rounds have other settings: {', '.join(sorted(found ^ expected))}")
    for column in ("num_blocks", "large", "small", "seed"):
        if str(done[0][column]) != str(getattr(options, column)):
            raise ConfigError(f"the saved rounds have {column}={done[0][column]}, not {getattr(options, column)}")
    return 1 + max(int(row["round"]) for row in done)


def read(path: Path) -> list[dict[str, str]]:
    """Saved rows; those of a round that is not complete are dropped."""
    rows = common.read_csv(path)
    size = len({Setting.from_row(row).name for row in rows})
    rounds: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        rounds.setdefault(row["round"], []).append(row)
    return [row for one in rounds.values() if len(one) == size for row in one]
