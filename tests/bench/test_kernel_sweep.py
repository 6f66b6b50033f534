"""The kernels' correctness sweep: what it draws, that right kernels pass, and that planted mistakes are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minillm.attention.reference import paged_attention_reference
from minillm.bench.kernel_cases import (
    BLOCK_SIZES,
    MAX_SCORES,
    UNUSED,
    KernelCase,
    KernelInputs,
    build,
    draw_cases,
    long_cases,
    sanitizer_cases,
)
from minillm.bench.kernel_sweep import Attend, TorchKernels, run_case, summary_cells

CPU = torch.device("cpu")
DECODE = KernelCase(
    kind="decode",
    dtype="bfloat16",
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    query_lens=(1, 1, 1, 1),
    context_lens=(1, 33, 0, 700),
    seed=3,
)
PREFILL = replace(DECODE, kind="prefill", query_lens=(40, 7), context_lens=(40, 300))


class Planted(TorchKernels):
    """Right kernels whose inputs or results are tampered with on the way."""

    def __init__(self, tamper) -> None:
        self.tamper = tamper

    def attention(self, case: KernelCase, inputs: KernelInputs) -> tuple[str, Attend]:
        _, right = super().attention(case, inputs)
        return "planted", lambda x, out: self.tamper(right, x, out)


def shorter(right, x: KernelInputs, out: Tensor) -> None:
    """The last key of every sequence is not seen."""
    masked = [length - 1 if length > 1 else length for length in x.context_lens]
    start = 0
    for i, (query_len, length) in enumerate(zip(x.query_lens, masked, strict=True)):
        for row in range(query_len):
            one = replace(
                x, q=x.q[start + row : start + row + 1], tables=[x.tables[i]], query_lens=[1],
                context_lens=[max(min(length, 1), length - query_len + 1 + row)],
            )  # fmt: skip
            right(one, out[start + row : start + row + 1])
        start += query_len


def looks_ahead(right, x: KernelInputs, out: Tensor) -> None:
    """Every query but a chunk's last sees the key behind its own."""
    start = 0
    for i, (query_len, length) in enumerate(zip(x.query_lens, x.context_lens, strict=True)):
        for row in range(query_len):
            seen = min(length, length - query_len + row + 2)
            one = replace(
                x, q=x.q[start + row : start + row + 1], tables=[x.tables[i]], query_lens=[1], context_lens=[seen]
            )  # fmt: skip
            right(one, out[start + row : start + row + 1])
        start += query_len


def wider_window(right, x: KernelInputs, out: Tensor) -> None:
    right(replace(x, params=replace(x.params, sliding_window=x.params.sliding_window + 1)), out)


def wrong_head(right, x: KernelInputs, out: Tensor) -> None:
    right(x, out)
    out[-1, -1] = out[-1, 0]


def unwritten_row(right, x: KernelInputs, out: Tensor) -> None:
    right(x, out)
    out[0, 0, 0] = float("nan")


def batch_dependent(right, x: KernelInputs, out: Tensor) -> None:
    right(x, out)
    if len(x.query_lens) > 1:
        out[:] = torch.nextafter(out, torch.tensor(9.0, dtype=out.dtype))


class Unsteady:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, right, x: KernelInputs, out: Tensor) -> None:
        right(x, out)
        self.calls += 1
        if self.calls == 2:
            out[0, 0, 0] = torch.nextafter(out[0, 0, 0], torch.tensor(9.0, dtype=out.dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("window", [None, 17])
def test_right_kernels_pass(case: KernelCase, dtype: str, window: int | None) -> None:
    case = replace(case, kind="simple" if dtype == "float32" else case.kind, dtype=dtype, window=window, soft_cap=30.0)
    result = run_case(case, TorchKernels(), CPU)
    assert result.failure == "" and result.relative <= result.bound


@pytest.mark.parametrize(
    ("tamper", "case", "message"),
    [
        (shorter, DECODE, "error"),
        (shorter, PREFILL, "error"),
        (looks_ahead, PREFILL, "error"),
        (wider_window, replace(DECODE, window=17), "error"),
        (wider_window, replace(PREFILL, window=17), "error"),
        (wrong_head, DECODE, "error"),
        (unwritten_row, DECODE, "error nan"),
        (batch_dependent, DECODE, " alone gives other bits"),
        (Unsteady(), DECODE, "a second run gives other bits"),
    ],
)
def test_planted_mistakes_are_found(tamper, case: KernelCase, message: str) -> None:
    result = run_case(case, Planted(tamper), CPU)
    assert message in result.failure


def test_an_exception_is_a_failure_of_its_case_alone() -> None:
    def broken(right, x: KernelInputs, out: Tensor) -> None:
        raise ValueError("no such block size")

    assert run_case(DECODE, Planted(broken), CPU).failure == "ValueError: no such block size"


@pytest.mark.parametrize("kind", ["write", "copy", "swap"])
def test_moving_cases_pass_and_find_planted_mistakes(kind: str) -> None:
    class Forgetful(TorchKernels):
        def write(self, k, v, k_cache, v_cache, slots) -> None:
            super().write(k[:-1], v[:-1], k_cache, v_cache, slots[:-1])

        def copy(self, store, pairs) -> None:
            super().copy(store, pairs.flip(1))

    case = replace(DECODE, kind=kind, query_lens=(9,) * 5, context_lens=(9,) * 5, seed=1)
    assert run_case(case, TorchKernels(), CPU).failure == ""
    if kind != "swap":
        assert "differs" in run_case(case, Forgetful(), CPU).failure


def test_drawn_cases_repeat_and_cover_the_ranges() -> None:
    cases = draw_cases(480, seed=0)
    assert cases == draw_cases(500, seed=0)[:480]
    attention = [case for case in cases if case.kind in ("decode", "prefill", "simple")]
    assert len(attention) >= 400
    assert {case.block_size for case in attention} == set(BLOCK_SIZES)
    assert {64, 80, 96, 128, 256} <= {case.head_dim for case in attention}
    assert any(case.head_dim % 16 == 8 for case in attention)
    assert {case.num_heads // case.num_kv_heads for case in attention} >= {1, 2, 3, 4, 5, 7, 8, 16, 32}
    for name in ("window", "soft_cap"):
        assert {getattr(case, name) is None for case in attention} == {True, False}
    for name in ("strided_q", "strided_blocks", "shared_prefix"):
        assert {getattr(case, name) for case in attention} == {True, False}
    assert any(0 in case.context_lens for case in attention)
    for case in attention:
        for query, context in zip(case.query_lens, case.context_lens, strict=True):
            assert query <= context or context == 0
            assert case.num_heads * query * context <= max(MAX_SCORES, case.num_heads * query * query)


def test_long_cases_reach_131072_tokens_and_pools_over_two_to_the_31() -> None:
    cases = long_cases(0)
    assert {case.kind for case in cases if 131_072 in case.context_lens} == {"decode", "prefill", "simple"}
    large = [case for case in cases if case.pool_blocks]
    assert {case.kind for case in large} == {"decode", "prefill", "simple", "write", "copy"}
    for case in large:
        assert case.pool_blocks * case.num_kv_heads * case.block_size * case.head_dim > 1 << 31


def test_sanitizer_cases_are_small_and_of_every_kind() -> None:
    cases = sanitizer_cases(0)
    assert {case.kind for case in cases} == {"decode", "prefill", "simple", "write", "copy", "swap"}
    assert max(max(case.context_lens) for case in cases) <= 1024


def test_inputs_keep_what_no_sequence_owns_away_from_the_data() -> None:
    inputs = build(replace(DECODE, strided_q=True, strided_blocks=True), CPU)
    assert not inputs.q.is_contiguous() and not inputs.k_cache.is_contiguous()
    owned = {block for table in inputs.tables for block in table}
    rest = [block for block in range(len(inputs.k_cache)) if block not in owned]
    assert rest and bool((inputs.k_cache[rest] == UNUSED).all())
    last = inputs.tables[1][-1]
    assert bool((inputs.v_cache[last][:, 33 % 16 :] == UNUSED).all())
    assert int(inputs.block_tables[0, 1]) in rest


def test_the_reference_of_inputs_is_the_oracle_with_padding_rows_zero() -> None:
    inputs = build(DECODE, CPU)
    out = inputs.reference()
    assert not out[2].any()
    tables, lens = [inputs.tables[i] for i in (0, 1, 3)], [1, 33, 700]
    caches = inputs.k_cache, inputs.v_cache
    right = paged_attention_reference(inputs.q[[0, 1, 3]].float(), *caches, tables, [1, 1, 1], lens, inputs.params)
    assert torch.equal(out[[0, 1, 3]], right)


def test_summary_counts_failures_and_shows_the_worst_error_of_what_passed() -> None:
    rows = [run_case(replace(DECODE, seed=seed), TorchKernels(), CPU).columns(seed) for seed in range(2)]
    rows[1] |= {"status": "wrong", "relative_error": "9.0"}
    _, cells = summary_cells([{key: str(value) for key, value in row.items()} for row in rows])
    assert cells[0][:5] == ["decode", "torch", "bfloat16", "2", "1"]
    assert float(cells[0][5]) < float(cells[0][6])
