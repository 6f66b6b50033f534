"""Measured costs: what one outcome teaches, and how fast."""

from __future__ import annotations

import pytest

from minillm.core.costs import MeasuredCosts
from minillm.core.plan import DecodeBatch, PrefillChunk, StepOutcome, StepPlan, StepTimings, SwapIn, SwapOut


def plan_of(*, decodes: int = 0, prefill: int = 0, out: int = 0, back: int = 0) -> StepPlan:
    rows = list(range(decodes))
    plan = StepPlan(0, DecodeBatch([""] * decodes, rows, rows, rows, rows, rows), [])
    if prefill:
        plan.prefills = [PrefillChunk("p", 60, [0] * prefill, 0, prefill, [], (60,), 0, False)]
    if out:
        plan.swap_outs = [SwapOut("a", list(range(out)), list(range(out)))]
    if back:
        plan.swap_ins = [SwapIn("b", list(range(back)), list(range(back)))]
    return plan


def learn(costs: MeasuredCosts, plan: StepPlan, **seconds: float) -> None:
    costs.observe(plan, StepOutcome(0, [], timings=StepTimings(**seconds)))


def test_before_anything_was_measured_swapping_is_preferred():
    costs = MeasuredCosts()
    assert costs.swap_seconds(4) < costs.recompute_seconds(4 * 16)


def test_the_first_swap_replaces_the_default_and_later_ones_are_averaged():
    costs = MeasuredCosts()
    learn(costs, plan_of(out=4), swap_out=0.4)
    assert costs.swap_seconds_per_block == pytest.approx(0.1)
    learn(costs, plan_of(back=2), swap_in=0.4)
    assert costs.swap_seconds_per_block == pytest.approx(0.15)
    for _ in range(60):
        learn(costs, plan_of(out=1), swap_out=0.01)
    assert costs.swap_seconds_per_block == pytest.approx(0.01, rel=0.01)


def test_a_prefill_beside_decodes_costs_what_it_adds_to_their_step():
    costs = MeasuredCosts()
    learn(costs, plan_of(decodes=8), forward=0.010)
    learn(costs, plan_of(decodes=8, prefill=100), forward=0.012)
    assert costs.prefill_seconds_per_token == pytest.approx(2e-5)


def test_a_prefill_alone_costs_its_whole_step():
    costs = MeasuredCosts()
    learn(costs, plan_of(decodes=8), forward=0.010)
    learn(costs, plan_of(prefill=100), forward=0.012)
    assert costs.prefill_seconds_per_token == pytest.approx(1.2e-4)


def test_short_chunks_and_steps_without_times_teach_nothing():
    costs = MeasuredCosts()
    before = costs.prefill_seconds_per_token, costs.swap_seconds_per_block
    learn(costs, plan_of(prefill=7), forward=1.0)
    learn(costs, plan_of(prefill=100, out=3))
    assert (costs.prefill_seconds_per_token, costs.swap_seconds_per_block) == before


def test_a_prefill_that_was_quicker_than_a_decode_step_is_free_and_never_negative():
    costs = MeasuredCosts()
    learn(costs, plan_of(decodes=8), forward=0.010)
    learn(costs, plan_of(decodes=1, prefill=8), forward=0.005)
    assert costs.prefill_seconds_per_token == 0.0
