"""The modes program: bounds by lengths alone, the raw loop's plans, and what the rows come to."""

from __future__ import annotations

import pytest

from minillm.bench import common, modes
from minillm.bench.raw_loop import list_schedule, make_plans
from minillm.bench.workloads import fixed
from minillm.core.errors import ConfigError


def test_equal_lengths_leave_nothing_to_gain():
    assert modes.step_bound([40] * 32, 8) == modes.StepBound(160, 160)


def test_the_bound_is_static_by_the_longest_of_each_batch_and_continuous_by_list_scheduling():
    assert modes.step_bound([10, 1, 10, 1], 2) == modes.StepBound(20, 11)
    assert modes.step_bound([8, 1, 1, 1], 2).bound == pytest.approx(9 / 8)


def test_list_scheduling_takes_the_row_that_is_free_first():
    assert list_schedule([5, 2, 2, 2], 2) == [(0, 0), (1, 0), (1, 2), (1, 4)]


def test_uniform_lengths_allow_about_1_6_times_and_lognormal_ones_more():
    def mean_bound(kind):
        bounds = []
        for seed in range(20):
            load = modes.make_workload(kind, 64, 16, 40, seed)
            bounds.append(modes.step_bound([r.max_tokens for r in load.requests], 8).bound)
        return sum(bounds) / len(bounds)

    assert 1.5 < mean_bound("uniform") < 1.75 < mean_bound("lognormal")


def test_the_raw_loop_computes_every_token_of_every_request_once():
    load = fixed(5, 7, 4)
    plans = make_plans(load, rows=2, block_size=4, num_blocks=6, vocab_size=100)
    computed = sorted(
        [(c.request_id, p) for plan in plans for c in plan.prefills for p in range(c.start, c.end)]
        + [pair for plan in plans for pair in zip(plan.decodes.request_ids, plan.decodes.positions, strict=True)]
    )
    assert computed == [(f"w{i}", position) for i in range(5) for position in range(7 + 4 - 1)]
    assert len(plans) == 12 and sum(plan.num_sampling_rows for plan in plans) == 20
    for plan in plans:
        assert len(set(plan.decodes.kv_slots)) == len(plan.decodes)
    with pytest.raises(ConfigError, match="2 rows of 3 blocks; the pool has 5"):
        make_plans(load, rows=2, block_size=4, num_blocks=5, vocab_size=100)


def test_auto_is_as_good_as_the_better_way_over_a_fast_and_over_a_slow_link():
    options = modes.Options()
    like = dict.fromkeys(("date", "commit", "device", "cores", "python", "torch", "transformers"), "")
    rows = modes._measure_links(options, modes.make_workload("uniform", 128, 16, 40), like)
    speeds = {(row["model"].rpartition("link ")[2], row["mode"]): float(row["output_tok_per_s"]) for row in rows}
    better = {}
    for link in modes.LINKS:
        ways = {mode: speeds[link, mode] for mode in ("swap", "recompute")}
        better[link] = max(ways, key=ways.__getitem__)
        assert speeds[link, "auto"] >= (1 - modes.NOISE) * max(ways.values())
    assert better["50 GB/s"] == "swap" and better["0.5 GB/s"] == "recompute"
    assert speeds["0.5 GB/s", "swap"] < 0.9 * speeds["0.5 GB/s", "auto"]


def test_all_modes_make_all_tokens_and_the_tables_say_so(tmp_path):
    options = modes.Options(
        model="random:toy", lengths=("uniform",), requests=6, prompt=8, mean_output=12, batch=3, repeats=1, links=False
    )
    rows = modes.measure(options, lambda text: None)
    assert [row["mode"] for row in rows] == list(modes.MODES)
    assert len({row["output_tokens"] for row in rows}) == 1 and all(row["completed"] == 6 for row in rows)
    by_mode = {row["mode"]: row for row in rows}
    assert by_mode["static"]["steps"] == by_mode["static"]["static_steps"]
    assert by_mode["continuous"]["steps"] == by_mode["raw"]["steps"] == by_mode["raw"]["continuous_steps"]
    assert by_mode["swap"]["preemptions_recompute"] == 0 and by_mode["recompute"]["preemptions_swap"] == 0
    path = tmp_path / "modes.csv"
    common.write_csv(path, rows)
    saved = common.read_csv(path)
    ((title, (columns, lines)),) = modes.tables(saved).items()
    assert "bound" in title and len(lines) == 6 and all(len(line) == len(columns) for line in lines)
    assert {verdict.met for verdict in modes.verdicts(saved)} <= {True, False}


@pytest.mark.parametrize(
    ("ratios", "met"),
    [
        ((0.98, 0.98, 0.98, 0.98, 0.98), True),
        ((0.70, 0.80, 0.98, 1.05, 1.20), True),  # by the median of the rounds
        ((0.95, 0.95, 0.95, 0.95, 0.95), False),
        ((0.91, 0.95, 0.96, 0.98, 1.02), False),  # however far the rounds reach
    ],
)
def test_auto_is_judged_by_the_median_over_rounds_and_the_interval_stands_beside_it(ratios, met) -> None:
    def rows(mode, rates):
        return [
            {"model": "m", "lengths": "uniform", "mode": mode, "repeat": str(i), "output_tok_per_s": str(rate)}
            for i, rate in enumerate(rates)
        ]

    saved = [*rows("swap", [200.0] * 5), *rows("recompute", [100.0] * 5), *rows("auto", [200 * r for r in ratios])]
    (verdict,) = modes.verdicts(saved)
    assert verdict.met is met, verdict
    assert f"{sorted(ratios)[2]:.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}] times swap" in verdict.found


def test_the_default_dtype_has_steps_that_cost_the_same(monkeypatch) -> None:
    for packs, dtype in ((True, "bfloat16"), (False, "auto")):
        monkeypatch.setattr("minillm.models.linear.cpu_packs_bfloat16", lambda packs=packs: packs)
        assert modes.default_dtype("cpu") == dtype and modes.default_dtype("cuda") == "auto"
