"""Driving engines: what a run records, open and closed loop, conversations, virtual time and a tiny random model."""

from __future__ import annotations

import math

import pytest

from minillm.bench import recording, runs, workloads
from minillm.bench.models import model_shape, random_model
from minillm.bench.virtual import H200_8B, StepCosts
from minillm.bench.workloads import Segment, Workload, WorkloadRequest
from minillm.core.config import SchedulerConfig
from minillm.core.errors import ConfigError

SECOND = StepCosts(step=1.0, decode_row=0, context_token=0, prefill_token=0, prefill_pair=0, swap_block=0)


def virtual(costs=SECOND, *, num_blocks=1000, overlap=False, **options):
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 4096, **options}
    static = settings.pop("static", False)
    config = SchedulerConfig(num_blocks=num_blocks, **settings)
    return runs.virtual_target(costs, config, overlap=overlap, check_invariants=True, static=static)


def request(at=0.0, prompt=4, output=3, **options):
    return WorkloadRequest(arrival=at, segments=(Segment(f"{at}-{options}", prompt),), max_tokens=output, **options)


def test_a_single_request_takes_one_step_per_token():
    result = runs.drive(virtual(), Workload("w", (request(at=2.5),)))
    (record,) = result.requests
    assert (record.arrival, record.first_token, record.finish) == (2.5, 3.5, 5.5)
    assert (record.ttft, record.tpot, record.wait, record.latency) == (1.0, 1.0, 0.0, 3.0)
    assert (record.prompt_tokens, record.output_tokens, record.finish_reason) == (4, 3, "length")
    assert result.steps.time == [3.5, 4.5, 5.5]
    assert result.steps.decode_rows == [0, 1, 1] and result.steps.prefill_tokens == [4, 0, 0]
    assert result.steps.context_tokens == [0, 5, 6] and result.steps.prefill_pairs == [10, 0, 0]
    assert result.attention_calls == 3 * 32
    assert result.throughput == pytest.approx(3 / 5.5)


def test_open_loop_counts_the_wait_for_a_long_step():
    result = runs.drive(virtual(), Workload("w", (request(), request(at=0.25, output=1))))
    assert result.requests[1].arrival == 0.25
    assert result.requests[1].wait == 0.75  # the step that ran when it came
    assert result.requests[1].ttft == 1.75


def test_closed_loop_keeps_so_many_live_and_ignores_arrival_times():
    made = workloads.fixed(6, 4, 3)
    result = runs.drive(virtual(), made, concurrency=2)
    assert max(result.steps.running) == 2
    assert result.seconds == 9.0
    assert [record.arrival for record in result.requests] == [0, 0, 3, 3, 6, 6]
    assert runs.drive(virtual(), made.with_arrivals(0.001), concurrency=6).seconds == 3.0
    with pytest.raises(ConfigError, match="concurrency=0"):
        runs.drive(virtual(), made, concurrency=0)


@pytest.mark.parametrize("concurrency", [None, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_conversation_goes_on_from_its_real_answers_and_hits_their_blocks(concurrency, overlap):
    made = workloads.multi_turn(2, turns=3, system=16, message=(16, 16), output=(17, 17), think=4.0)
    result = runs.drive(virtual(overlap=overlap), made, concurrency=concurrency)
    assert [record.prompt_tokens for record in result.requests] == made.prompt_tokens()
    for index, entry in enumerate(made.requests):
        if entry.follows is not None:
            before, record = result.requests[entry.follows], result.requests[index]
            assert record.arrival >= before.finish + (4.0 if concurrency is None else 0.0)
            # Everything but the last token of the answer before is in full blocks.
            assert record.cached_tokens == (before.prompt_tokens + before.output_tokens - 1) // 16 * 16


def test_the_same_run_gives_the_same_figures_and_the_cache_starts_empty():
    target = virtual(H200_8B, overlap=True)
    made = workloads.shared_prefix(30, groups=2, prefix=64, suffix=(4, 40), output=(2, 20)).with_arrivals(50)
    first, again = (runs.drive(target, made).figures() for _ in range(2))
    for name in ("seconds", "output_tok_per_s", "total_tok_per_s"):
        assert again[name] == pytest.approx(first.pop(name), rel=1e-4)
        del again[name]
    assert {k: pytest.approx(v, abs=2e-6) for k, v in first.items()} == again
    assert first["cached_tokens"] > 0
    kept = runs.drive(target, made, keep_cache=True).figures()
    assert kept["cached_tokens"] > first["cached_tokens"]


@pytest.mark.parametrize(("swap_blocks", "mode"), [(0, "recompute"), (200, "swap")])
def test_memory_pressure_shows_as_waste(swap_blocks, mode):
    target = virtual(H200_8B, num_blocks=40, num_swap_blocks=swap_blocks, preemption_mode=mode)
    result = runs.drive(target, workloads.fixed(12, 60, 60), concurrency=8)
    figures = result.figures()
    assert figures["completed"] == 12 and figures["output_tokens"] == 720
    if mode == "swap":
        assert figures["preemptions_swap"] > 0 and figures["swapped_bytes"] > 0
        moved = sum(result.steps.swapped_out) + sum(result.steps.swapped_in)
        assert figures["swapped_bytes"] == moved * target.bytes_per_block
    else:
        assert figures["preemptions_recompute"] > 0 and figures["swapped_bytes"] == 0
        recomputed = sum(record.recomputed_tokens for record in result.requests)
        assert figures["recomputed_tokens"] == recomputed > 0
    assert sum(record.preemptions for record in result.requests) == (
        figures["preemptions_swap"] + figures["preemptions_recompute"]
    )


def test_static_batching_runs_each_batch_to_its_last_member():
    made = Workload("w", tuple(request(output=n) for n in (2, 8, 2, 8)))
    result = runs.drive(virtual(static=True, max_num_seqs=2), made)
    assert result.seconds == 16.0
    assert [record.first_token for record in result.requests] == [1, 1, 9, 9]


def test_costs_are_charged_by_part():
    costs = StepCosts(step=100, decode_row=10, context_token=1, prefill_token=1000, prefill_pair=0, swap_block=0)
    result = runs.drive(virtual(costs), Workload("w", (request(prompt=3, output=2),)))
    assert result.steps.time == [100 + 3000, 3100 + 100 + 10 + 4]
    assert result.steps.seconds == [3100, 114]


def test_a_request_that_cannot_fit_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="does not fit max_model_len=64"):
        runs.drive(virtual(num_blocks=4), Workload("w", (request(), request(prompt=60, output=9))))


def test_a_run_with_a_request_that_failed_has_no_figures():
    target = virtual()

    def fail_one(done: int, total: int) -> None:
        target.engine.scheduler.cancel("w1", target.engine.clock(), "its output failed")

    made = Workload("w", (request(output=2), request(output=20)))
    with pytest.raises(runs.FailedRunError, match=r"workload w: 1 of 2 requests .*\(its output failed\)"):
        runs.drive(target, made, progress=fail_one)


def test_classes_priorities_users_and_salts_reach_the_scheduler():
    one = Workload("w", (request(prompt=40, label="a", priority=2, user="u", salt="s"),))
    two = one.labelled("b", priority=1)
    target = virtual()
    result = runs.drive(target, workloads.merged("m", one, two))
    assert [(r.label, r.priority, r.user) for r in result.requests] == [("a", 2, "u"), ("b", 1, "")]
    assert [r.label for r in result.of_label("b")] == ["b"]


def test_a_random_model_runs_on_the_cpu_and_progress_is_told():
    told = []
    with runs.open_target("random:tiny", device="cpu", max_num_seqs=4, num_gpu_blocks_override=64) as target:
        assert (target.name, target.device, target.dtype) == ("random:tiny", "cpu", "float32")
        assert target.num_layers == model_shape("tiny").num_layers
        assert target.bytes_per_block == 2 * 2 * 2 * 16 * 16 * 4  # k and v, layers, heads, head_dim, tokens, bytes
        runs.warm_up(target)
        result = runs.drive(
            target, workloads.fixed(5, 20, 6), concurrency=4, progress=lambda done, total: told.append((done, total))
        )
    assert result.figures()["completed"] == 5 and told[-1] == (5, 5)
    assert all(len(ids) == 6 for ids in result.outputs)
    assert all(0 < seconds < 5 for seconds in result.steps.seconds)
    assert 0 < result.requests[0].ttft < result.requests[0].latency < 5


def test_outputs_do_not_depend_on_the_batch():
    model = random_model("toy")
    outputs = []
    for concurrency in (1, 6):
        with runs.open_target(model, device="cpu", max_num_seqs=8, num_gpu_blocks_override=64) as target:
            outputs.append(runs.drive(target, workloads.fixed(6, 9, 12), concurrency=concurrency).outputs)
    assert outputs[0] == outputs[1]


def test_an_unknown_random_model_names_the_known_ones():
    with pytest.raises(ConfigError, match="random:tiny"):
        model_shape("huge")


def test_percentiles_interpolate_and_leave_out_what_is_not_finite():
    assert recording.percentile([3, 1, 2, math.nan], 0.5) == 2
    assert recording.percentile([0, 10], 0.9) == 9
    assert math.isnan(recording.percentile([], 0.5))
