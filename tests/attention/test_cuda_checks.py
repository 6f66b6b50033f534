"""What the launch wrappers refuse before anything is launched (no GPU needed)."""

from __future__ import annotations

import pytest
import torch

from minillm.attention import cuda_checks
from minillm.attention.cuda_checks import (
    CheckedLayouts,
    check_heads,
    check_paged_cache,
    check_tensor,
    debug_check_tables,
)

CPU = torch.device("cpu")


def check(tensor: torch.Tensor, *, contiguous_from: int = 1) -> None:
    check_tensor("q", tensor, (None, 4, 8), torch.float16, CPU, contiguous_from=contiguous_from)


def test_any_row_stride_passes_if_the_rows_are_dense():
    packed = torch.zeros((5, 10, 8), dtype=torch.float16)
    check(packed[:, 2:6])
    check(packed[::2, 2:6])
    check(packed[:1, 2:6])
    check(torch.zeros((0, 4, 8), dtype=torch.float16))
    check(torch.zeros((5, 4, 8), dtype=torch.float16), contiguous_from=0)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros((5, 4, 8)), r"q has dtype torch.float32, it must be torch.float16"),
        (torch.zeros((5, 4, 8), dtype=torch.float16, device="meta"), r"q is on meta, it must be on cpu"),
        (torch.zeros((5, 4, 9), dtype=torch.float16), r"q has shape \(5, 4, 9\), it must be \(any, 4, 8\)"),
        (torch.zeros((5, 4), dtype=torch.float16), r"q has shape \(5, 4\)"),
        (torch.zeros((5, 4, 8, 1), dtype=torch.float16), r"q has shape \(5, 4, 8, 1\)"),
        (torch.zeros((5, 8, 4), dtype=torch.float16).transpose(1, 2), r"strides \(32, 1, 4\)"),
        (torch.zeros((5, 8, 8), dtype=torch.float16)[:, ::2], r"strides \(64, 16, 1\)"),
    ],
    ids=["dtype", "device", "size", "too few", "too many", "transposed", "stepped"],
)
def test_what_does_not_fit_is_named(tensor, message):
    with pytest.raises(ValueError, match=message):
        check(tensor)


def test_a_row_stride_is_refused_where_all_must_be_dense():
    with pytest.raises(ValueError, match="dimensions from 0 on"):
        check(torch.zeros((5, 10, 8), dtype=torch.float16)[:, 2:6], contiguous_from=0)


def test_heads_must_divide():
    check_heads(9, 3)
    with pytest.raises(ValueError, match="num_q_heads=9 is not a multiple of num_kv_heads=2"):
        check_heads(9, 2)


def test_a_cache_on_the_cpu_is_refused():
    cache = torch.zeros((2, 1, 4, 8))
    with pytest.raises(ValueError, match="k_cache is on cpu"):
        check_paged_cache(cache, cache)


def test_tables_are_checked_in_debug_mode_only(monkeypatch):
    tables = torch.tensor([[3, 1, 99], [0, 7, 2]], dtype=torch.int32)
    lens = torch.tensor([8, 0], dtype=torch.int32)
    debug_check_tables(tables, torch.tensor([100, 100]), 4, 4)
    monkeypatch.setattr(cuda_checks, "DEBUG_KERNELS", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    debug_check_tables(tables, lens, 4, 4)
    with pytest.raises(ValueError, match=r"block_tables\[0\] names blocks outside \[0, 4\): \[3, 1, 99\]"):
        debug_check_tables(tables, lens + 1, 4, 4)
    with pytest.raises(ValueError, match=r"context_lens\[1\]=13 needs 4 blocks, the table has 3"):
        debug_check_tables(tables, torch.tensor([8, 13]), 4, 4)


def test_layouts_differ_in_all_that_is_checked():
    base = torch.zeros((4, 6))
    same = CheckedLayouts.of(base, torch.zeros((4, 6)))
    layouts = CheckedLayouts()
    layouts.add(same)
    assert CheckedLayouts.of(torch.zeros((4, 6)), base) in layouts
    for other in (base.half(), base.t(), base[:3], base[:, ::2], base.to("meta")):
        assert CheckedLayouts.of(base, other) not in layouts
        assert CheckedLayouts.of(other) not in layouts


def test_layouts_are_bounded(monkeypatch):
    monkeypatch.setattr(cuda_checks, "_MOST_LAYOUTS", 3)
    layouts = CheckedLayouts()
    for length in range(5):
        layouts.add(CheckedLayouts.of(torch.zeros(length)))
        assert CheckedLayouts.of(torch.zeros(length)) in layouts
    assert CheckedLayouts.of(torch.zeros(0)) not in layouts
