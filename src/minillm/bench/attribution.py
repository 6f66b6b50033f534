"""Attribution of a difference between two set-ups to the factors in which they differ.

The two set-ups differ in up to four factors; every combination is measured, so with n factors there are 2**n values
v(S), S being the factors that are switched. Which factor made the difference depends on the order in which they are
switched; the Shapley value of a factor is its mean effect over all orders (Shapley, "A value for n-person games",
1953). The values add up to v(all) - v(none). What two factors do together beyond what each does alone is their Shapley
interaction index (Grabisch and Roubens, Int. J. of Game Theory 28, 1999), here for pairs.

Intervals come from resampling whole rounds: a round measures every combination once, so what slows the machine down for
a round does so for all of them, in the resample too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial
from typing import TypeVar

from minillm.core.errors import ConfigError

MAX_FACTORS = 4
"""More would need more than 16 combinations, and interactions that nobody can read."""

Coalition = frozenset[str]
K = TypeVar("K", bound=Hashable)
R = TypeVar("R", bound=Hashable)


def coalitions(factors: Sequence[str]) -> list[Coalition]:
    """All subsets of the factors, the empty one first. ConfigError for none, too many or a repeated one."""
    if not 1 <= len(factors) <= MAX_FACTORS or len(set(factors)) != len(factors):
        raise ConfigError(f"factors={list(factors)} must be 1 to {MAX_FACTORS} different names")
    return [frozenset(chosen) for size in range(len(factors) + 1) for chosen in combinations(factors, size)]


def shapley_values(values: Mapping[Coalition, float], factors: Sequence[str]) -> dict[str, float]:
    """Each factor's mean effect over all orders of switching; they add up to v(all) - v(none)."""
    n = len(factors)
    shares = {}
    for factor in factors:
        others = [other for other in factors if other != factor]
        shares[factor] = sum(
            factorial(len(rest))
            * factorial(n - len(rest) - 1)
            / factorial(n)
            * (values[rest | {factor}] - values[rest])
            for rest in _subsets(others)
        )
    return shares


def interactions(values: Mapping[Coalition, float], factors: Sequence[str]) -> dict[tuple[str, str], float]:
    """Shapley interaction index of every pair: above 0 they help each other, below 0 one replaces the other."""
    n = len(factors)
    found = {}
    for first, second in combinations(factors, 2):
        pair = frozenset((first, second))
        others = [other for other in factors if other not in pair]
        found[first, second] = sum(
            factorial(len(rest))
            * factorial(n - len(rest) - 2)
            / factorial(n - 1)
            * (values[rest | pair] - values[rest | {first}] - values[rest | {second}] + values[rest])
            for rest in _subsets(others)
        )
    return found


def _subsets(names: Sequence[str]) -> Iterator[Coalition]:
    for size in range(len(names) + 1):
        yield from map(frozenset, combinations(names, size))


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign of the figure is beyond the noise."""
        return self.low > 0 or self.high < 0

    def text(self, form: str = ".1f") -> str:
        """'value [low, high]'."""
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


def bootstrap(
    samples: Mapping[K, Sequence[float]],
    statistic: Callable[[Mapping[K, float]], Mapping[R, float]],
    *,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[R, Interval]:
    """Percentile intervals of what `statistic` makes of the medians.

    `samples` has one value per round for each key, all in the same order of rounds. A resample draws rounds with
    replacement, the same for every key (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13).
    """
    import numpy as np

    keys = list(samples)
    rounds = {len(samples[key]) for key in keys}
    if len(rounds) != 1 or not min(rounds):
        raise ValueError(f"every key needs the same number of rounds, at least 1; there are {sorted(rounds)}")
    table = np.asarray([samples[key] for key in keys], dtype=float)
    draws = np.random.default_rng(seed).integers(0, table.shape[1], (resamples, table.shape[1]))
    medians = np.median(table[:, draws], axis=2)
    value = statistic(dict(zip(keys, np.median(table, axis=1).tolist(), strict=True)))
    resampled = [statistic(dict(zip(keys, column, strict=True))) for column in medians.T.tolist()]
    tail = (1 - confidence) / 2
    intervals = {}
    for name, figure in value.items():
        low, high = np.quantile([one[name] for one in resampled], (tail, 1 - tail))
        intervals[name] = Interval(figure, float(low), float(high))
    return intervals
