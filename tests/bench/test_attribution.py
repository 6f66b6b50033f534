"""Shapley values, interactions, bootstrap intervals and the step-cost regression, on cases with known answers."""

from __future__ import annotations

import random

import pytest

from minillm.bench import step_cost
from minillm.bench.attribution import bootstrap, coalitions, interactions, shapley_values
from minillm.core.errors import ConfigError

FACTORS = ("a", "b", "c", "d")


def additive(which):
    return 100 + sum({"a": 10, "b": -5, "c": 0, "d": 3}[name] for name in which)


def test_shares_of_an_additive_effect_are_the_effects_and_nothing_interacts():
    values = {which: additive(which) for which in coalitions(FACTORS)}
    assert shapley_values(values, FACTORS) == pytest.approx({"a": 10, "b": -5, "c": 0, "d": 3})
    assert all(abs(value) < 1e-9 for value in interactions(values, FACTORS).values())


@pytest.mark.parametrize("seed", range(20))
def test_shares_add_up_to_the_total_difference(seed):
    rng = random.Random(seed)
    factors = FACTORS[: 1 + seed % 4]
    values = {which: rng.uniform(-100, 100) for which in coalitions(factors)}
    total = values[frozenset(factors)] - values[frozenset()]
    assert sum(shapley_values(values, factors).values()) == pytest.approx(total)


def test_a_planted_interaction_is_found_between_the_two_and_shared_evenly():
    values = {which: 20.0 * ({"a", "b"} <= which) for which in coalitions(FACTORS)}
    assert shapley_values(values, FACTORS) == pytest.approx({"a": 10, "b": 10, "c": 0, "d": 0})
    pairs = interactions(values, FACTORS)
    assert pairs["a", "b"] == pytest.approx(20)
    assert pairs["a", "c"] == pytest.approx(0) and pairs["c", "d"] == pytest.approx(0)


def test_more_than_four_factors_or_a_repeated_one_are_refused():
    for factors in (("a", "b", "c", "d", "e"), ("a", "a"), ()):
        with pytest.raises(ConfigError, match="factors"):
            coalitions(factors)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng, covered = random.Random(1), 0
    for seed in range(60):
        samples = {"x": [rng.gauss(5, 1) for _ in range(25)]}
        interval = bootstrap(samples, lambda medians: medians, resamples=300, seed=seed)["x"]
        covered += interval.low <= 5 <= interval.high
    assert 51 <= covered <= 60


def test_rounds_are_resampled_together():
    slow_rounds = [1.0, 1.0, 4.0, 4.0, 9.0]
    samples = {"one": slow_rounds, "twice": [2 * value for value in slow_rounds]}
    ratio = bootstrap(samples, lambda medians: {"ratio": medians["twice"] / medians["one"]})["ratio"]
    assert (ratio.low, ratio.value, ratio.high) == (2, 2, 2)


def test_keys_with_different_numbers_of_rounds_are_refused():
    with pytest.raises(ValueError, match="same number of rounds"):
        bootstrap({"a": [1.0], "b": [1.0, 2.0]}, lambda medians: medians)


COSTS = dict(zip(step_cost.TERMS, (8e-4, 2e-3, 1e-4, 5e-6, 9e-4, 7e-5), strict=True))


def planted_runs(noise: float, count: int = 60):
    rng = random.Random(3)
    runs = [{term: rng.randint(1, 400) for term in step_cost.TERMS} for _ in range(count)]
    exact = step_cost.StepCost(COSTS)
    return runs, [exact.predict(run) * rng.uniform(1 - noise, 1 + noise) for run in runs]


def test_the_regression_recovers_known_costs():
    runs, seconds = planted_runs(0.0)
    assert step_cost.fit(runs, seconds).seconds == pytest.approx(COSTS, rel=1e-6)


def test_a_cost_that_is_zero_does_not_come_out_negative():
    rng = random.Random(5)
    runs = [{term: rng.randint(1, 400) for term in step_cost.TERMS} for _ in range(40)]
    exact = step_cost.StepCost({**COSTS, "swaps": 0.0, "swapped_blocks": 0.0})
    fitted = step_cost.fit(runs, [exact.predict(run) * rng.uniform(0.9, 1.1) for run in runs])
    assert all(cost >= 0 for cost in fitted.seconds.values())
    assert fitted.seconds["swaps"] < 1e-4


def test_terms_that_no_run_has_cost_nothing():
    runs = [{**dict.fromkeys(step_cost.TERMS, 0), "steps": n} for n in (10, 20, 30)]
    assert step_cost.fit(runs, [0.1, 0.2, 0.3]).seconds["steps"] == pytest.approx(0.01)
    assert step_cost.fit(runs, [0.1, 0.2, 0.3]).seconds["swaps"] == 0.0
