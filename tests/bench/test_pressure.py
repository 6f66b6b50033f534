"""The benchmark of a quarter of the pool, in small."""

from __future__ import annotations

import pytest

from minillm.bench import common, pressure
from minillm.bench.program import get_program
from minillm.bench.runs import drive, virtual_target
from minillm.bench.virtual import StepCosts
from minillm.bench.workloads import uniform
from minillm.core.block_manager import blocks_for
from minillm.core.config import SchedulerConfig


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_quarter_of_the_pool_preempts_both_ways_and_changes_no_token(tmp_path, device: str) -> None:
    if device == "cuda" and not _has_gpu():
        pytest.skip("no CUDA device")
    options = pressure.Options(
        model="random:tiny", device=device, dtype="float32", requests=8, prompt=(24, 48), output=(30, 50), runs=1
    )
    rows = pressure.measure(options, lambda text: None)
    assert [row["way"] for row in rows] == [pressure.ROOMY, pressure.SWAP, pressure.RECOMPUTE]
    roomy, swap, recompute = rows
    assert roomy["preemptions_swap"] == roomy["preemptions_recompute"] == 0
    assert swap["preemptions_swap"] > 0 and swap["swapped_bytes"] > 0
    assert recompute["preemptions_recompute"] > 0 and recompute["recomputed_tokens"] > 0
    assert all(row["same_tokens"] == 1 and row["output_tokens"] == roomy["output_tokens"] for row in rows)
    path = tmp_path / "pressure.csv"
    common.write_csv(path, rows)
    program, saved = get_program("pressure"), common.read_csv(path)
    assert len(program.verdicts(saved)) == 4
    assert [verdict.met for verdict in program.verdicts(saved)][1::2] == [True, True]
    assert len(next(iter(program.tables(saved).values()))[1]) == 3 and program.draw(saved, path)[0].is_file()


def test_the_default_workload_preempts_in_a_quarter_of_its_blocks() -> None:
    options = pressure.Options(model="virtual", device="virtual")
    work = uniform(options.requests, options.prompt, options.output, seed=options.seed)
    assert sum(request.max_tokens for request in work.requests) <= 45_000
    need = sum(blocks_for(request.own_tokens + request.max_tokens, 16) for request in work.requests)
    # A step of Qwen3-0.6B in bfloat16 on an H200: fitted to two runs of this program there.
    costs = StepCosts(
        step=1.85e-3, decode_row=0, context_token=2.7e-8, prefill_token=3.3e-6, prefill_pair=0, swap_block=3.7e-5
    )
    rates = {}
    for mode, blocks in (("room", need), ("swap", need // 4), ("recompute", need // 4)):
        config = SchedulerConfig(
            num_blocks=blocks,
            max_num_seqs=options.requests,
            max_num_batched_tokens=8192,
            max_model_len=work.longest,
            num_swap_blocks=blocks if mode == "swap" else 0,
            preemption_mode="recompute" if mode == "recompute" else "swap",
            enable_prefix_caching=False,
        )
        with virtual_target(costs, config) as target:
            figures = drive(target, work).figures()
        rates[mode] = figures["output_tok_per_s"]
        preempted = figures["preemptions_swap"], figures["preemptions_recompute"]
        assert preempted == (0, 0) if mode == "room" else preempted[mode == "recompute"] >= 10
    assert min(rates["swap"], rates["recompute"]) > pressure.LEAST_RATIO * rates["room"]


def test_the_first_difference_ends_what_counts_as_the_same() -> None:
    assert pressure._agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)
    assert pressure._agreement([[1, 2]], [[1]]) == 0.5


def test_other_tokens_in_float32_are_an_error(monkeypatch) -> None:
    monkeypatch.setattr(pressure, "_agreement", lambda expected, found: 0.99)
    options = pressure.Options(
        model="random:tiny", device="cpu", dtype="float32", requests=4, prompt=(8, 9), output=(4, 5), runs=1
    )
    with pytest.raises(pressure.TokensDiffer, match="room for all"):
        pressure.measure(options, lambda text: None)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
