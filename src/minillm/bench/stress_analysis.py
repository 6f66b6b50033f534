"""What the rounds of `minillm bench stress` say: comparisons with intervals, attribution, where the time went.

All functions take the rows of the CSV file (:func:`minillm.bench.stress.read`), so a saved study can be read again.

**The machine's speed.** On a machine that others use, a run may take a third longer than the same run a minute before.
Each run has a probe, the mean time of one small fixed run that is repeated within it (:mod:`minillm.bench.pulse`), and
:func:`steadied` puts all runs at the median speed: times are divided by ``(probe / median probe) ** response``. What
slows a machine down (another process in the caches, a full memory bus) does not slow every program down alike, so the
`response` of the runs to the probe is fitted, within the settings (:func:`response`). The probe knows nothing of the
run's own time, and a prediction takes costs and response from the runs of other settings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from minillm.bench import never_fits, step_cost
from minillm.bench.attribution import Coalition, Interval, bootstrap, coalitions, interactions, shapley_values
from minillm.bench.runs import drive, virtual_target
from minillm.bench.step_cost import StepCost
from minillm.bench.stress import (
    BATCHED_TOKENS,
    BLOCK_SIZE,
    FACTORS,
    LARGE,
    MAX_MODEL_LEN,
    MAX_SWAPPED,
    Setting,
    workload,
)
from minillm.bench.virtual import StepCosts
from minillm.core.config import SchedulerConfig
from minillm.core.plan import StepPlan

Rows = Sequence[Mapping[str, str]]
TOLERANCE = 0.1
SWEEP_ORDERS = 12


_TIMES = ("seconds", "ttft_small_p50", "ttft_large_p50")
_RATES = ("output_tok_per_s",)


def response(rows: Rows) -> float:
    """Per cent that runs take longer where the probe takes one per cent longer.

    Least squares of the logarithms, each less its setting's mean, so that no difference between settings counts. 1 if
    the probe never changed; kept within 0 and 2.
    """
    probes: list[float] = []
    seconds: list[float] = []
    for mine in by_setting(rows).values():
        for name, values in (("probe_seconds", probes), ("seconds", seconds)):
            logs = [math.log(number) for number in column(mine, name)]
            values += [number - statistics.fmean(logs) for number in logs]
    spread = sum(probe * probe for probe in probes)
    if spread < 1e-9:
        return 1.0
    slope = sum(probe * time for probe, time in zip(probes, seconds, strict=True)) / spread
    return min(2.0, max(0.0, slope))


def steadied(rows: Rows) -> list[dict[str, str]]:
    """The rows with times and rates at the median speed of the machine; as they are if there was no probe.

    What was timed stays in `timed_seconds` and `timed_tok_per_s`, the probe over its median in `slowness`.
    """
    probed = bool(rows) and bool(rows[0].get("probe_seconds"))
    probes = column(rows, "probe_seconds") if probed else [1.0] * len(rows)
    usual = statistics.median(probes) if probes else 1.0
    exponent = response(rows) if probed else 1.0
    made = []
    for row, probe in zip(rows, probes, strict=True):
        slowness = (probe / usual) ** exponent
        times = {name: repr(float(row[name]) / slowness) for name in _TIMES if name in row}
        rates = {name: repr(float(row[name]) * slowness) for name in _RATES}
        kept = {"timed_seconds": row["seconds"], "timed_tok_per_s": row["output_tok_per_s"]}
        made.append({**row, **times, **rates, **kept, "slowness": repr(probe / usual)})
    return made


def by_setting(rows: Rows) -> dict[Setting, list[Mapping[str, str]]]:
    """Rows of each setting in order of rounds."""
    found: dict[Setting, list[Mapping[str, str]]] = {}
    for row in sorted(rows, key=lambda row: int(row["round"])):
        found.setdefault(Setting.from_row(row), []).append(row)
    return found


def column(rows: Rows, name: str) -> list[float]:
    """A column as numbers."""
    return [float(row[name]) for row in rows]


def median(rows: Rows, name: str) -> float:
    """Median of a column."""
    return statistics.median(column(rows, name))


def throughput(rows: Rows) -> Interval:
    """Median output tokens per second."""
    return bootstrap({"it": column(rows, "output_tok_per_s")}, lambda medians: medians)["it"]


def ratio(numerator: Rows, denominator: Rows, name: str = "output_tok_per_s") -> Interval:
    """Median over rounds of one over the other in the same round, which has the same order of requests for both.

    The order changes a setting's rate by more than most policies do, so rates of different rounds are not compared.
    """
    theirs = dict(zip(column(denominator, "round"), column(denominator, name), strict=True))
    ratios = [
        mine / theirs[number] for number, mine in zip(column(numerator, "round"), column(numerator, name), strict=True)
    ]
    return bootstrap({"ratio": ratios}, lambda medians: medians)["ratio"]


def base_setting(rows: Rows) -> Setting:
    """The setting that the others are compared with: the first in the file."""
    return Setting.from_row(rows[0])


@dataclass(frozen=True, slots=True)
class Attribution:
    """A difference in tokens per second, shared out among factors.

    `shares` add up to `total`. `as_factor` are the same shares of the logarithm, as factors: their product is
    `total_factor`.
    """

    base: Setting
    switched: Setting
    factors: tuple[str, ...]
    speeds: dict[Coalition, Interval]
    total: Interval
    shares: dict[str, Interval]
    total_factor: Interval
    as_factor: dict[str, Interval]
    pairs: dict[tuple[str, str], Interval]


def attribute(rows: Rows) -> Attribution | None:
    """The attribution, if the rows have every combination of two levels of some factors; else None."""
    settings = by_setting(rows)
    base = base_setting(rows)
    for size in range(len(FACTORS), 0, -1):
        for factors in combinations(FACTORS, size):
            for other in reversed(list(settings)):
                if any(getattr(other, name) == getattr(base, name) for name in factors):
                    continue
                cells = {which: base.switched(which, other) for which in coalitions(factors)}
                if all(cell in settings for cell in cells.values()):
                    samples = {w: column(settings[c], "output_tok_per_s") for w, c in cells.items()}
                    return _attribute(base, cells[frozenset(factors)], factors, samples)
    return None


def _attribute(
    base: Setting, switched: Setting, factors: tuple[str, ...], samples: Mapping[Coalition, Sequence[float]]
) -> Attribution:
    nothing, everything = frozenset[str](), frozenset(factors)

    def shares(speeds: Mapping[Coalition, float]) -> dict:
        logs = {which: math.log(speed) for which, speed in speeds.items()}
        return {
            **{("speed", which): speed for which, speed in speeds.items()},
            **{("share", name): value for name, value in shapley_values(speeds, factors).items()},
            **{("factor", name): math.exp(value) for name, value in shapley_values(logs, factors).items()},
            **{("pair", pair): value for pair, value in interactions(speeds, factors).items()},
            "total": speeds[everything] - speeds[nothing],
            "total factor": speeds[everything] / speeds[nothing],
        }

    found: dict = bootstrap(samples, shares)
    return Attribution(
        base=base,
        switched=switched,
        factors=factors,
        speeds={which: found["speed", which] for which in samples},
        total=found["total"],
        shares={name: found["share", name] for name in factors},
        total_factor=found["total factor"],
        as_factor={name: found["factor", name] for name in factors},
        pairs={pair: found["pair", pair] for pair in combinations(factors, 2)},
    )


@dataclass(frozen=True, slots=True)
class CostFit:
    """The step-cost regression, and how well it predicts settings that it was not fitted to."""

    cost: StepCost
    runs_within: float
    """Share of the runs predicted within 10 %."""
    settings_within: float
    """The same of the settings' median times."""
    worst_setting: float
    """Greatest relative error of a setting's median time."""
    median_error: float
    """Of the runs; likewise `worst_run`."""
    worst_run: float


def fit_cost(rows: Rows) -> CostFit:
    """Fit all runs of :func:`steadied` rows; predict each setting's timed runs from the other settings."""
    seconds = column(rows, "seconds")
    groups = [Setting.from_row(row) for row in rows]
    numbers = [{term: float(row[term]) for term in step_cost.TERMS} for row in rows]
    errors, of_settings = [], []
    for setting in dict.fromkeys(groups):
        mine = [index for index, group in enumerate(groups) if group == setting]
        others = [index for index, group in enumerate(groups) if group != setting]
        measured, predicted = _predicted(rows, numbers, others, mine)
        errors += [abs(p - m) / m for p, m in zip(predicted, measured, strict=True)]
        of_settings.append(abs(statistics.median(predicted) / statistics.median(measured) - 1))
    return CostFit(
        cost=step_cost.fit(numbers, seconds),
        runs_within=sum(error <= TOLERANCE for error in errors) / len(errors),
        settings_within=sum(error <= TOLERANCE for error in of_settings) / len(of_settings),
        worst_setting=max(of_settings),
        median_error=statistics.median(errors),
        worst_run=max(errors),
    )


def _predicted(
    rows: Rows, numbers: Sequence[Mapping[str, float]], others: Sequence[int], mine: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Seconds of the runs `mine`, measured and as predicted from the runs `others`, at the median speed."""
    timed, slowness = column(rows, "timed_seconds"), column(rows, "slowness")
    theirs = [{**rows[i], "seconds": rows[i]["timed_seconds"], "probe_seconds": rows[i]["slowness"]} for i in others]
    exponent = response(theirs)
    steady = [time / slow**exponent for time, slow in zip(timed, slowness, strict=True)]
    cost = step_cost.fit([numbers[i] for i in others], [steady[i] for i in others])
    return [steady[i] for i in mine], [cost.predict(numbers[i]) for i in mine]


def time_parts(cost: StepCost, rows: Rows) -> dict[str, float]:
    """Where a run's seconds went, by the regression: means over the rounds."""
    parts = [cost.parts({term: float(row[term]) for term in step_cost.TERMS}) for row in rows]
    return {term: statistics.fmean(part[term] for part in parts) for term in step_cost.TERMS}


@dataclass(frozen=True, slots=True)
class FittedCosts(StepCosts):
    """The regression as the cost of steps in virtual time."""

    prefill_step: float = 0.0
    """What a step with a prefill costs besides; likewise `swap`, for a step that copies out, and for one that copies
    in."""
    swap: float = 0.0

    @classmethod
    def of(cls, cost: StepCost) -> FittedCosts:
        """From the coefficients."""
        seconds = cost.seconds
        return cls(
            step=seconds["steps"],
            decode_row=seconds["decode_rows"],
            context_token=0.0,
            prefill_token=seconds["prefill_tokens"],
            prefill_pair=0.0,
            swap_block=seconds["swapped_blocks"],
            prefill_step=seconds["prefill_steps"],
            swap=seconds["swaps"],
        )

    def forward_seconds(self, plan: StepPlan) -> float:
        """Of the step with what it costs besides."""
        swaps = bool(plan.swap_outs) + bool(plan.swap_ins)
        more = (self.prefill_step if plan.prefills else 0.0) + swaps * self.swap
        return StepCosts.forward_seconds(self, plan) + more


@dataclass(frozen=True, slots=True)
class PoolPoint:
    """Tokens per second over those of `fifo` in one pool: median over orders, and how many orders favour it."""

    num_blocks: int
    policy: str
    median: float
    ahead: int
    behind: int
    orders: int


def sweep_pools(
    cost: StepCost,
    *,
    large: int,
    small: int,
    preemption: str,
    policies: Sequence[str] = ("lifo", "largest", "cost_based"),
    pools: Sequence[int] | None = None,
    orders: int = SWEEP_ORDERS,
) -> list[PoolPoint]:
    """The victim policies in every pool from the least to one where all large requests fit, in virtual time."""
    least = -(-sum(LARGE) // BLOCK_SIZE)
    pools = pools or range(least, least * large + 1)
    points = []
    for num_blocks in pools:
        speeds: dict[str, list[float]] = {}
        for policy in ("fifo", *policies):
            config = SchedulerConfig(
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                max_num_seqs=6,
                max_num_batched_tokens=BATCHED_TOKENS,
                max_model_len=MAX_MODEL_LEN,
                num_swap_blocks=64,
                max_swapped_requests=MAX_SWAPPED,
                queue_policy="fcfs",
                victim_policy=policy,
                preemption_mode=preemption,
                enable_prefix_caching=False,
            )
            with virtual_target(FittedCosts.of(cost), config, overlap=False) as target:
                speeds[policy] = [drive(target, workload(large, small, order)).throughput for order in range(orders)]
        for policy in policies:
            ratios = [mine / fifo for mine, fifo in zip(speeds[policy], speeds["fifo"], strict=True)]
            points.append(
                PoolPoint(
                    num_blocks,
                    policy,
                    statistics.median(ratios),
                    sum(ratio > 1.005 for ratio in ratios),
                    sum(ratio < 0.995 for ratio in ratios),
                    orders,
                )
            )
    return points


@lru_cache(maxsize=4)
def _cached_reconstruction(seconds: tuple[tuple[str, float], ...]) -> list[never_fits.PoolOutcome]:
    return never_fits.reconstruct(StepCost(dict(seconds)))


def reconstruction(cost: StepCost) -> list[never_fits.PoolOutcome]:
    """The set-up in which a request never fits, at these step costs (made once per cost: it takes a few seconds)."""
    return _cached_reconstruction(tuple(cost.seconds.items()))
