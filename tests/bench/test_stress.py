"""The stress study: its settings, its loop without a never-fits rule, planted results, the user's own policies."""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from minillm.bench import common, never_fits, pulse, stress, stress_report
from minillm.bench import stress_analysis as analysis
from minillm.bench.runs import drive, open_target
from minillm.bench.stress import BASE, SWITCHED, Options, Setting
from minillm.bench.workloads import fixed
from minillm.core.errors import ConfigError
from minillm.core.policies import QUEUE_POLICIES, VICTIM_POLICIES
from minillm.core.policy_file import load_policy_file

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def registries():
    """What a test registers is forgotten after it."""
    kept = dict(QUEUE_POLICIES), dict(VICTIM_POLICIES)
    yield
    for registry, before in zip((QUEUE_POLICIES, VICTIM_POLICIES), kept, strict=True):
        registry.clear()
        registry.update(before)


def planted_rows(speeds, rounds: int = 5):
    """Rows as of the CSV file, with tokens/s from `speeds(setting)` and equal counts."""
    rows = []
    for number in range(rounds):
        for setting in stress.settings(Options(design="all")):
            speed = speeds(setting) * (1 + 0.01 * number)
            steps = 100 + 10 * len(setting.victim)
            counts = {"steps": steps, "prefill_steps": 4, "decode_rows": 300, "prefill_tokens": 500}
            row = {
                "date": "d",
                "commit": "c",
                "device": "cpu",
                "cores": 2,
                "model": "m",
                "dtype": "float32",
                "seed": 0,
                "round": number,
                "num_blocks": 16,
                "large": 4,
                "small": 4,
                "admission": setting.admission,
                "victim": setting.victim,
                "preemption": setting.preemption,
                "cap": setting.cap,
                "output_tok_per_s": speed,
                "seconds": 360 / speed,
                "mean_batch": 2,
                "attention_calls": steps,
                "preemptions_swap": 1,
                "preemptions_recompute": 1,
                "ttft_small_p50": 0.1,
                "recomputed_tokens": 1,
                "swapped_bytes": 1024,
                "swaps": 2,
                "swapped_blocks": 9,
                **counts,
                "active": "1;2;3",
            }
            rows.append({name: str(value) for name, value in row.items()})
    return rows


def test_the_design_has_every_victim_policy_both_ways_and_every_combination_once():
    settings = stress.settings(Options(design="all"))
    assert len(settings) == len(set(settings)) == 2 * len(VICTIM_POLICIES) + 16 - 4
    assert {s.victim for s in settings} == set(VICTIM_POLICIES)
    assert settings[0] == BASE and SWITCHED in settings
    assert len(stress.settings(Options(design="factorial", factors=("victim", "cap")))) == 4


def test_a_pool_in_which_the_large_request_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="needs 9 blocks"):
        Options(num_blocks=8)
    Options(num_blocks=9)


def test_every_round_has_the_same_requests_in_another_order():
    loads = [stress.workload(4, 8, seed) for seed in range(4)]
    assert len({tuple(r.label for r in load.requests) for load in loads}) == 4
    assert all(sorted(r.max_tokens for r in load.requests) == [10] * 8 + [80] * 4 for load in loads)


def test_a_planted_effect_of_one_factor_is_attributed_to_it_alone():
    rows = planted_rows(lambda s: 1000 + 250 * (s.victim == SWITCHED.victim))
    found = analysis.attribute(rows)
    assert found is not None and (found.base, found.switched) == (BASE, SWITCHED)
    assert found.shares["victim"].value == pytest.approx(255) and found.shares["victim"].excludes_zero
    for name in ("admission", "preemption", "cap"):
        assert found.shares[name].value == pytest.approx(0)
    assert sum(share.value for share in found.shares.values()) == pytest.approx(found.total.value)
    product = 1.0
    for share in found.as_factor.values():
        product *= share.value
    assert product == pytest.approx(found.total_factor.value)


def test_a_machine_that_changes_its_speed_is_taken_out_by_the_probe():
    def slowness(row) -> float:
        return 1 + 0.4 * (int(row["round"]) % 2) + 0.1 * (row["victim"] == "fifo")

    steady = planted_rows(lambda s: 1000 + 250 * (s.victim == SWITCHED.victim))
    disturbed = [
        {
            **row,
            "seconds": str(float(row["seconds"]) * slowness(row)),
            "output_tok_per_s": str(float(row["output_tok_per_s"]) / slowness(row)),
            "probe_seconds": str(0.3 * slowness(row)),
        }
        for row in steady
    ]
    assert analysis.response(disturbed) == pytest.approx(1.0, abs=0.02)
    found = analysis.steadied(disturbed)
    usual = statistics.median(map(slowness, disturbed))
    for before, after, timed in zip(steady, found, disturbed, strict=True):
        assert float(after["seconds"]) == pytest.approx(usual * float(before["seconds"]), rel=0.02)
        assert after["timed_seconds"] == timed["seconds"]
    assert analysis.attribute(found).shares["victim"].value == pytest.approx(255 / usual, rel=0.05)
    without = [{name: value for name, value in row.items() if name != "probe_seconds"} for row in disturbed]
    as_timed = analysis.steadied(without)
    assert [row["seconds"] for row in as_timed] == [repr(float(row["seconds"])) for row in disturbed]
    assert analysis.fit_cost(found).worst_run < analysis.fit_cost(as_timed).worst_run / 2
    assert stress_report.probe_text(disturbed).startswith("A probe, one small run")
    assert stress_report.probe_text(without) == ""


def test_policies_are_compared_within_a_round() -> None:
    base = [{"round": str(number), "output_tok_per_s": str(100.0 * (number + 1))} for number in range(6)]
    other = [{**row, "output_tok_per_s": repr(1.1 * float(row["output_tok_per_s"]))} for row in reversed(base)]
    found = analysis.ratio(other, base)
    assert (found.low, found.value, found.high) == pytest.approx((1.1, 1.1, 1.1))


def test_runs_that_feel_less_of_what_slows_the_probe_are_put_right():
    rng = random.Random(3)
    slow = [math.exp(rng.uniform(0, 1)) for _ in range(400)]
    rows = [
        {**row, "seconds": repr(float(row["seconds"]) * by**0.6), "probe_seconds": repr(by)}
        for row, by in zip(planted_rows(lambda s: 1000.0, rounds=12), slow, strict=False)
    ]
    assert analysis.response(rows) == pytest.approx(0.6, abs=0.02)
    fitted = analysis.fit_cost(analysis.steadied(rows))
    assert fitted.runs_within == 1.0
    steady = [{**row, "probe_seconds": "1.0"} for row in rows]
    assert analysis.response(steady) == 1.0


def test_a_setting_is_predicted_from_the_others_alone():
    rows = planted_rows(lambda s: 1000.0)
    spoiled = [
        {**row, "seconds": repr(5 * float(row["seconds"]))} if Setting.from_row(row) == BASE else row for row in rows
    ]
    clean, found = (analysis.fit_cost(analysis.steadied(some)) for some in (rows, spoiled))
    share = 1 / len(stress.settings(Options(design="all")))
    # Its own runs, five times as long as the others say, are predicted as if they were not.
    assert clean.settings_within == 1.0 and clean.worst_setting < 0.1
    assert found.worst_setting == pytest.approx(0.8, abs=0.02)
    assert found.settings_within < 1 - share / 2


def test_pulses_within_a_run_are_no_part_of_its_time():
    ticks = itertools.count()

    def clock() -> float:
        return float(next(ticks))

    options = {"max_num_seqs": 2, "max_model_len": 64, "num_gpu_blocks_override": 8, "block_size": 16}
    with (
        open_target("random:tiny", device="cpu", **options) as target,
        open_target("random:tiny", device="cpu", **options) as probe,
    ):
        target.engine.clock = probe.engine.clock = clock
        load = fixed(2, 16, 40)
        alone = drive(target, load)
        beat = pulse.Pulse(probe)
        beat.attach(target)
        beat.begin()
        watched = drive(target, load, after_step=beat)
    beats = len(watched.steps) // pulse.EVERY
    assert watched.outputs == alone.outputs and beats == 3
    assert watched.seconds == alone.seconds + beats  # each reads the clock once more
    assert beat.seconds > 0 and len(beat._times) == beats + 1


def test_rows_without_all_combinations_have_no_attribution():
    rows = planted_rows(lambda s: 1000.0)
    assert analysis.attribute([row for row in rows if Setting.from_row(row).cap == 6]) is not None
    assert analysis.attribute([row for row in rows if Setting.from_row(row) == BASE]) is None


def test_the_page_says_what_the_figures_say():
    page = stress_report.markdown(planted_rows(lambda s: 1000 + 250 * (s.victim == "cost_based")), "stress.png")
    assert "cost_based makes 1.250 [1.250, 1.250] times the tokens per second of fifo (beyond the noise)" in page
    assert "victim +255.0" in page and "Interactions beyond the noise: none." in page
    assert "| victim: fifo -> cost_based | +255.0" in page and "![" in page


def test_measured_rounds_resume_and_refuse_another_study(tmp_path):
    options = Options(model="random:toy", design="factorial", factors=("victim",), repeats=1, large=2, small=2)
    rows = [row for part in stress.measure(options, lambda text: None) for row in part]
    assert [Setting.from_row(row).victim for row in rows] == ["fifo", "cost_based"]
    assert all(row["completed"] == 4 and row["output_tokens"] == 180 for row in rows)
    path = tmp_path / "stress.csv"
    common.write_csv(path, rows)
    saved = stress.read(path)
    more = [r for part in stress.measure(replace(options, repeats=2), lambda text: None, saved) for r in part]
    assert {row["round"] for row in more} == {1}
    with pytest.raises(ConfigError, match="other settings"):
        next(stress.measure(replace(options, factors=("cap",)), lambda text: None, saved))
    with pytest.raises(ConfigError, match="small=2, not 3"):
        next(stress.measure(replace(options, small=3, repeats=2), lambda text: None, saved))


# -- what never fits ---------------------------------------------------------------------------------------------------


def test_without_a_rule_for_what_never_fits_the_loop_never_finishes_and_with_room_it_does():
    shapes = [(64, 80), (8, 10), (8, 10)]
    for policy in ("fifo", "cost_based"):
        stuck = never_fits.UncheckedLoop(shapes, policy, pool_blocks=8).run(1000)
        assert stuck.end in ("stalled", "limit") and stuck.finished == 2
        assert stuck.output_tokens < 100
        fits = never_fits.UncheckedLoop(shapes, policy, pool_blocks=9).run(1000)
        assert (fits.end, fits.finished, fits.output_tokens) == ("finished", 3, 100)


def test_the_ratio_of_two_policies_is_arbitrary_where_a_request_never_fits_and_bounded_where_all_fit():
    small, large = never_fits.reconstruct(pools=(8, 16), limits=(500,), orders=30)
    assert small.greatest > 7 and small.least < 1 / 3 and small.stalled + small.cut_off == 1
    assert large.least > 0.7 and large.greatest < 2 and large.stalled == 0
    assert large.seven == 0 < small.seven


def test_a_longer_limit_makes_a_run_that_swaps_for_ever_look_slower():
    seeds = [never_fits.random_mix(seed) for seed in range(20)]
    loops = [never_fits.UncheckedLoop(shapes, "fifo") for shapes in seeds]
    cut_off = [loop for loop in loops if loop.run(300).end == "limit"]
    assert cut_off
    for loop in cut_off:
        before = loop.totals.output_tokens / loop.seconds()
        loop.run(3000)
        assert loop.totals.output_tokens / loop.seconds() < before


# -- policies of the user's own ----------------------------------------------------------------------------------------


def documented_policy_file() -> str:
    """The worked example of docs/scheduling.md."""
    text = (DOCS / "scheduling.md").read_text()
    section = text.split("## A policy of your own", 1)[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_documented_policy_file_is_short_and_takes_part_in_the_study(tmp_path, registries):
    text = documented_policy_file()
    assert len(text.splitlines()) < 15
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert load_policy_file(path) == ["longest_first", "least_left"]
    options = Options(
        model="random:toy",
        design="victims",
        repeats=1,
        large=2,
        small=1,
        extra_victims=("least_left",),
        extra_queues=("longest_first",),
    )
    rows = [row for part in stress.measure(options, lambda text: None) for row in part]
    names = {Setting.from_row(row).name for row in rows}
    assert {"fcfs/least_left/swap/6", "longest_first/fifo/recompute/6"} <= names
    assert all(row["completed"] == 3 for row in rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "registers no policy"),
        ("raise RuntimeError('no')", "RuntimeError"),
        ("def f(:", "SyntaxError"),
        (
            "from minillm.core.policies import register_victim_policy\n"
            "@register_victim_policy('fifo')\ndef f(victim): return (0,)\n",
            "'fifo' is in use",
        ),
    ],
)
def test_a_bad_policy_file_is_one_error_and_registers_nothing(tmp_path, registries, text, said):
    path = tmp_path / "mine.py"
    path.write_text(text)
    before = dict(VICTIM_POLICIES)
    with pytest.raises(ConfigError, match=said):
        load_policy_file(path)
    assert before == VICTIM_POLICIES
    with pytest.raises(ConfigError, match="No such file"):
        load_policy_file(tmp_path / "absent.py")
