"""`minillm bench fused` without a GPU: its cases on the reference operations, its tables on made-up rows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import reference_ops
from minillm.bench import common, fused, fused_cases
from minillm.bench.fused_cases import LIBRARY, NORM_APART, OURS, QWEN3, QWEN25, Case, DecodeStep, contenders
from minillm.bench.program import get_program
from minillm.bench.timing import Ceilings, ReplayTime
from minillm.models import cuda_ops
from minillm.models.cuda_small_linear import choose_config

CPU = torch.device("cpu")
TINY = {"hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "inner": 96, "vocab": 80}
NORMED, BIASED = replace(QWEN3, **TINY), replace(QWEN25, **TINY)


class Operations:
    """`cuda_ops` with the reference's operations."""

    def __getattr__(self, name: str):
        return getattr(reference_ops if hasattr(reference_ops, name) else cuda_ops, name)

    @staticmethod
    def supports_batch_linear(rows, n, k, dtype, device, **kind):
        return rows >= 9

    @staticmethod
    def small_linear(*args, config=None, **kwargs):
        return reference_ops.small_linear(*args, **kwargs)


class SmallLinear:
    """`cuda_small_linear`'s choice for an H200."""

    @staticmethod
    def config_for(rows, n, k, gated, norm, device):
        return choose_config(rows, n, k, gated=gated, norm=norm, multiprocessors=132, shared_limit=232192)

    @staticmethod
    def shared_limit(device):
        return 232192


def write_kv(k, v, k_cache, v_cache, slots) -> None:
    size = k_cache.shape[2]
    k_cache[slots // size, :, slots % size], v_cache[slots // size, :, slots % size] = k, v


@pytest.fixture(autouse=True)
def reference(monkeypatch) -> None:
    monkeypatch.setattr(fused_cases, "cuda_ops", Operations())
    monkeypatch.setattr(fused_cases, "cuda_small_linear", SmallLinear)
    monkeypatch.setattr(fused_cases.cuda_kv_ops, "write_kv", write_kv)


@pytest.mark.parametrize("op", ["embed", "add_rms_norm", "qk_norm_rope_write", "silu_and_mul"])
@pytest.mark.parametrize("model", [NORMED, BIASED], ids=["norm", "bias"])
def test_contenders_of_row_wise_operations_agree(op: str, model) -> None:
    found = contenders(Case(op=op, model=model, rows=5), 3, CPU, variants=True)
    assert set(found) == {OURS, "torch"}
    for ours, torchs in zip(found[OURS], found["torch"], strict=True):
        a, b = ours().clone(), torchs()
        if op == "add_rms_norm":  # the second has added x twice
            continue
        assert (a.float() - b.float()).norm() <= 0.01 * b.float().norm()


@pytest.mark.parametrize("model", [NORMED, BIASED], ids=["norm", "bias"])
def test_contenders_of_products_are_checked_and_have_variants(model) -> None:
    for case in fused_cases.products(model, 2):
        found = contenders(case, 3, CPU, variants=True)
        assert {OURS, LIBRARY} <= set(found)
        assert (NORM_APART in found) == case.norm
        assert len(found) > 5
        assert all(len(calls) == 3 for calls in found.values())


@pytest.mark.parametrize("model", [NORMED, BIASED], ids=["norm", "bias"])
def test_products_of_a_batch_are_the_batch_kernels(monkeypatch, model) -> None:
    monkeypatch.setattr(Operations, "small_linear", None)
    for case in fused_cases.batch_products(model, 16):
        found = contenders(case, 3, CPU, variants=False)
        assert set(found) == {OURS, LIBRARY} and all(len(calls) == 3 for calls in found.values())
    assert {case.rows for case in fused_cases.all_cases() if case.n} >= {1, 8, 16, 128}


def test_a_wrong_product_is_not_timed(monkeypatch) -> None:
    monkeypatch.setattr(Operations, "small_linear", staticmethod(lambda *a, out, **k: out))
    with pytest.raises(fused.WrongResultError, match="qkv 128x64, 2 rows"):
        contenders(fused_cases.products(NORMED, 2)[0], 3, CPU, variants=False)


@pytest.mark.parametrize("model", [NORMED, BIASED], ids=["norm", "bias"])
def test_the_three_forms_of_a_step_agree(monkeypatch, model) -> None:
    monkeypatch.setitem(fused_cases.LAYERS, model.name, 3)
    step = DecodeStep(model, 2, CPU)
    fused._check_step(step)
    assert step.set_bytes == 2 * (3 * (model.qkv * 64 + 64 * 64 + 3 * 96 * 64) + 80 * 64)


def test_bytes_of_a_case_count_everything_once() -> None:
    by_op = {case.op: case for case in fused_cases.products(QWEN3, 2)}
    assert by_op["gate_up"].set_bytes == 2 * 3072 * 1024 * 2 + 2 * 1024 * 4 + 2 * 3072 * 2
    assert by_op["down"].set_bytes == 1024 * 3072 * 2 + 2 * 3072 * 2 + 2 * 1024 * 8
    assert Case(op="qk_norm_rope_write", model=QWEN3, rows=3).set_bytes == 3 * 4096 * 4


class Graph:
    def __init__(self, calls) -> None:
        for call in calls:
            call()


def made_rows(monkeypatch) -> list[dict[str, str]]:
    """What a run saves, with made-up times: ours 10 us, everything else 20."""
    models = {"QWEN3": NORMED, "QWEN25": BIASED, "SMOL": replace(NORMED, name="SmolLM2-135M"),
              "LLAMA8B": replace(BIASED, name="Llama-3.1-8B")}  # fmt: skip
    for name, model in models.items():
        monkeypatch.setattr(fused_cases, name, model)
        monkeypatch.setattr(fused, name, model)
        monkeypatch.setitem(fused_cases.LAYERS, model.name, 2)
    cases = [*fused_cases.products(NORMED, 1), Case(op="add_rms_norm", model=NORMED, rows=1)]
    monkeypatch.setattr(fused, "all_cases", lambda: iter(cases))
    monkeypatch.setattr(fused, "StepGraph", Graph)
    monkeypatch.setattr(fused, "STEP_ROWS", (1,))
    monkeypatch.setattr(fused, "step_layers", lambda size, device: 3)
    monkeypatch.setattr(fused, "measure_ceilings", lambda device: Ceilings(4000.0, 700.0))
    monkeypatch.setattr(fused, "_build_variants", lambda device: None)
    monkeypatch.setattr(torch, "device", lambda *a: CPU)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(
        fused,
        "time_graphs",
        lambda graphs, rounds: {
            name: ReplayTime(rounds, 10.0 if name == OURS else 20.0, 9.0, 25.0, 12.0) for name in graphs
        },
    )
    lines: list[str] = []
    rows = [row for part in fused.measure(3, lines.append, variants=True) for row in part]
    assert len(lines) == 1 + len(cases) + 4
    return rows


def test_a_run_becomes_tables_a_plot_and_history(monkeypatch, tmp_path) -> None:
    with monkeypatch.context() as patch, nullcontext():
        common.write_csv(tmp_path / "fused.csv", made_rows(patch))
    rows = common.read_csv(tmp_path / "fused.csv")
    program = get_program("fused")
    tables = list(program.tables(rows).values())
    assert [len(cells) for _, cells in tables] == [1, 5, 4]
    for heads, cells in tables:
        assert all(len(line) == len(heads) for line in cells)
        assert all(line[-1] == "2.00" for line in cells)
    assert len(program.figures(rows)) == 4
    assert program.verdicts(rows) == []
    (picture,) = program.draw(rows, tmp_path / "fused.csv")
    assert picture.stat().st_size > 1000


def test_large_weights_are_judged_by_their_rate() -> None:
    row = {"op": "down", "model": "m", "shape": "s", "rows": "1", "bytes": "4e7", "gbps": "3900.0"}
    (verdict,) = fused.verdicts([{**row, "contender": OURS}, {**row, "contender": LIBRARY, "gbps": "4500"}])
    assert not verdict.met and verdict.found == "3,900 GB/s (m down)"
