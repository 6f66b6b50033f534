"""The prefill kernels against the fp32 oracle, and what needs no GPU: how steps are cut into tiles, argument checks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from minillm.attention.cuda_prefill import (
    PrefillKernel,
    PrefillPlan,
    build_work,
    paged_prefill,
    pieces_of,
    portable_kernel,
    rows_per_tile,
    sm90_kernel,
    specs,
    supports,
)
from minillm.attention.interface import LayerAttention
from minillm.attention.reference import paged_attention_reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RELATIVE_ERROR = {torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
"""Of a whole result in the 2-norm: the weights and the results are rounded to the dtype."""


# ---- Without a GPU ---------------------------------------------------------------------------------------------------


def work_of(
    lens: list[tuple[int, int]], kernel: PrefillKernel, group: int, kv_heads: int
) -> tuple[np.ndarray, np.ndarray, int]:
    starts = np.cumsum([0, *(queries for queries, _ in lens)])
    return build_work(starts, np.array([context for _, context in lens]), kernel, group, kv_heads)


@pytest.mark.parametrize("kernel", [portable_kernel(64), sm90_kernel(64), sm90_kernel(128)], ids=["mma", "d64", "d128"])
@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_every_packed_row_sees_every_key_once(kernel: PrefillKernel, group: int) -> None:
    lens = [(1, 1), (0, 0), (100, 100), (17, 40_000), (513, 8_200), (0, 7), (129, 130)]
    work, splits, slots = work_of(lens, kernel, group, kv_heads=2)
    step = rows_per_tile(kernel, group)
    seen = {s: np.zeros((queries * group, context), dtype=np.int8) for s, (queries, context) in enumerate(lens)}
    for sequence, token0, row0, rows, pos0, begin, end, _ in work:
        queries, context = lens[sequence]
        assert (rows, pos0) == (queries * group, context - queries)
        assert token0 == sum(q for q, _ in lens[:sequence])
        assert begin % kernel.key_tile == 0
        assert end > begin
        seen[sequence][row0 : min(row0 + step, rows), begin:end] += 1
    for sequence, (queries, context) in enumerate(lens):
        for row in range(queries * group):
            visible = context - queries + row // group + 1
            assert (seen[sequence][row, :visible] == 1).all()
    used = sorted(slot for slot in work[:, 7] if slot >= 0)
    assert used == list(range(slots))
    assert sum(split[4] for split in splits) == slots
    lengths = work[:, 6] - work[:, 5]
    assert (np.diff(lengths) <= 0).all(), "longest first"


def test_cuts_of_a_sequence_do_not_depend_on_its_batch_mates() -> None:
    kernel = sm90_kernel(64)

    def cuts(work: np.ndarray, sequence: int) -> set[tuple[int, ...]]:
        mine = work[work[:, 0] == sequence]
        return {(row0, begin, end, slot >= 0) for row0, begin, end, slot in mine[:, [2, 5, 6, 7]].tolist()}

    alone, *_ = work_of([(512, 8192)], kernel, 7, 2)
    among, *_ = work_of([(4096, 4096), (3, 3), (512, 8192), (512, 20_000)], kernel, 7, 2)
    assert cuts(among, 2) == cuts(alone, 0)


def test_keys_are_cut_only_where_it_fills_the_gpu() -> None:
    def pieces(queries: int, context: int) -> int:
        return pieces_of(queries, context, step=128, group=4, copies=4, wave=132)

    assert pieces(queries=1_056, context=32_768) == 1, "one full wave"
    assert pieces(queries=1_088, context=32_768) > 1, "1.03 waves take the time of 2"
    assert pieces(queries=32, context=4_095) == 1
    assert pieces(queries=1, context=1 << 20) == 8
    assert pieces(queries=31_680, context=1 << 20) == 1, "30 full waves"
    assert pieces(queries=8_192, context=8_192) == 1, "tiles of all lengths fill the last wave"


def test_hopper_tiles_hold_whole_queries() -> None:
    assert [rows_per_tile(sm90_kernel(64), group) for group in (1, 3, 7, 64)] == [192, 192, 189, 192]
    assert [rows_per_tile(sm90_kernel(128), group) for group in (1, 3, 7, 64)] == [128, 126, 126, 128]
    assert rows_per_tile(portable_kernel(64), 7) == 64


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_shared_memory_fits(head_dim: int) -> None:
    assert sm90_kernel(head_dim).shared_bytes <= 227 << 10
    assert portable_kernel(head_dim).shared_bytes <= 99 << 10, "the limit of sm_86 and sm_89"


def test_supports() -> None:
    assert all(supports(torch.bfloat16, d, 16, "sm_90a") for d in (16, 64, 80, 96, 112, 128, 256))
    assert all(supports(torch.float16, 64, size, "sm_80") for size in (8, 16, 32, 64, 128))
    assert supports(torch.float16, 64, 16, "sm_100")
    assert not supports(torch.float32, 64, 16, "sm_90a")
    assert not supports(torch.float16, 72, 16, "sm_90a")
    assert not supports(torch.float16, 272, 16, "sm_90a")
    assert not supports(torch.float16, 64, 24, "sm_90a")
    assert not supports(torch.float16, 64, 4, "sm_90a")
    assert not supports(torch.float16, 64, 256, "sm_90a")
    assert not supports(torch.float16, 64, 16, "sm_75")


def test_specs_name_each_instance_once() -> None:
    for arch in ("sm_80", "sm_90a", "sm_100"):
        symbols = [spec.symbol for spec in specs(arch)]
        assert len(symbols) == len(set(symbols))
        assert any("sm90" in symbol for symbol in symbols) == (arch == "sm_90a")


@pytest.mark.parametrize(
    ("starts", "contexts", "message"),
    [
        ([0, 4], [4, 4], "must have one more"),
        ([0, 4, 2], [4, 4], "must not decrease"),
        ([0, 4, 9], [4, 4], "sequence 1 has 5 queries"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(starts: list[int], contexts: list[int], message: str) -> None:
    plan = PrefillPlan.__new__(PrefillPlan)
    with pytest.raises(ValueError, match=message):
        plan.update(starts, contexts)


def test_a_plan_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="CUDA device"):
        PrefillPlan(torch.device("cpu"), 4, 8, 2, 64, 16, torch.float16)


# ---- On a GPU --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One step: chunks (queries, context) over a pool with scrambled blocks."""

    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (14, 2)
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    soft_cap: float | None = None
    packed_q: bool = False
    """q is a view of a wider product, as of a packed QKV projection."""

    @property
    def params(self) -> LayerAttention:
        return LayerAttention(self.head_dim**-0.5 * 1.5, self.window, self.soft_cap)


@dataclass
class Step:
    """Tensors of a case."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: list[list[int]]

    def run(self, kernel: PrefillKernel | None, members: list[int] | None = None) -> torch.Tensor:
        """Results of some members of the batch, computed in one call."""
        case, device = self.case, self.q.device
        members = list(range(len(case.lens))) if members is None else members
        lens = [case.lens[i] for i in members]
        first = np.cumsum([0, *(queries for queries, _ in case.lens)])
        q = torch.cat([self.q[first[i] : first[i] + case.lens[i][0]] for i in members]) if members else self.q
        if case.packed_q and len(members) == len(case.lens):
            q = self.q
        width = max([1, *(len(self.tables[i]) for i in members)])
        tables = torch.full((len(members), width + 3), 1 << 30, dtype=torch.int32)  # one that is read too far fails
        for row, i in enumerate(members):
            tables[row, : len(self.tables[i])] = torch.tensor(self.tables[i], dtype=torch.int32)
        starts = np.cumsum([0, *(queries for queries, _ in lens)])
        contexts = [context for _, context in lens]
        plan = PrefillPlan(device, 4, *case.heads, case.head_dim, case.block_size, case.dtype, kernel=kernel)
        plan.update(starts, contexts)
        out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
        result = paged_prefill(
            q,
            self.k,
            self.v,
            tables.to(device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(contexts, dtype=torch.int32, device=device),
            case.params,
            plan,
            out,
        )
        assert result is out
        return out

    def reference(self) -> torch.Tensor:
        return paged_attention_reference(
            self.q.float(),
            self.k,
            self.v,
            self.tables,
            [queries for queries, _ in self.case.lens],
            [context for _, context in self.case.lens],
            self.case.params,
        )


def make_step(case: Case, seed: int = 0) -> Step:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    heads, kv_heads = case.heads
    counts = [-(-context // case.block_size) for _, context in case.lens]
    blocks = sum(counts) + 2
    store = torch.empty(2, blocks, kv_heads, case.block_size, case.head_dim, dtype=case.dtype, device="cuda")
    store.normal_(generator=generator)
    tokens, width = sum(queries for queries, _ in case.lens), heads * case.head_dim
    q = torch.empty(tokens, width + (64 if case.packed_q else 0), dtype=case.dtype, device="cuda")
    q.normal_(generator=generator)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    return Step(case, q[:, :width].unflatten(1, (heads, case.head_dim)), store[0], store[1], tables)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def kernels_of(head_dim: int) -> list[PrefillKernel]:
    kernels = [portable_kernel(head_dim)]
    if torch.cuda.get_device_capability() == (9, 0) and head_dim in (64, 80, 96, 128, 256):
        kernels.append(sm90_kernel(head_dim))
    return kernels


MIXED = ((100, 100), (1, 257), (64, 64), (129, 129), (0, 0), (33, 700), (128, 1024), (1, 1), (300, 2_500), (127, 383))
CASES = {
    "mixed": Case(MIXED),
    "fp16": Case(MIXED, dtype=torch.float16),
    "head dim 80": Case(MIXED, (12, 12), 80),
    "head dim 96": Case(MIXED, (12, 12), 96),
    "head dim 128": Case(MIXED, (32, 8), 128),
    "head dim 256": Case(MIXED, (16, 8), 256),
    "head dim 48": Case(MIXED, (4, 2), 48),
    "9/3 heads": Case(MIXED, (9, 3)),
    "64/8 heads": Case(MIXED, (64, 8), 128),
    "one KV head for 40": Case(MIXED, (40, 1)),
    "one KV head for 71": Case(MIXED, (71, 1)),
    "blocks of 8": Case(MIXED, (32, 8), 128, block_size=8),
    "blocks of 32": Case(MIXED, (32, 8), 128, block_size=32),
    "blocks of 64": Case(MIXED, block_size=64),
    "blocks of 128": Case(MIXED, (16, 8), 128, block_size=128),
    "blocks of 128, head dim 256": Case(MIXED, (16, 8), 256, block_size=128),
    "window 1": Case(MIXED, window=1),
    "window 100": Case(MIXED, (32, 8), 128, window=100),
    "window 700": Case(MIXED, window=700),
    "soft cap": Case(MIXED, (32, 8), 128, soft_cap=3.0),
    "soft cap, window, head dim 256": Case(MIXED, (16, 8), 256, soft_cap=20.0, window=300),
    "packed q": Case(MIXED, (32, 8), 128, packed_q=True),
    "pieces": Case(((200, 9_000), (70, 17_000), (5, 5), (2_000, 6_000))),
    "pieces, head dim 128, window": Case(((200, 9_000), (16, 30_000)), (32, 8), 128, window=3_000),
    "padding only": Case(((0, 0), (0, 5))),
}


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str) -> None:
    case = CASES[name]
    step = make_step(case)
    want = step.reference()
    for kernel in kernels_of(case.head_dim) if case.heads[0] // case.heads[1] <= 64 else [portable_kernel(64)]:
        got = step.run(kernel)
        assert got.isfinite().all(), kernel.source
        if got.numel():
            assert relative_error(got, want) < RELATIVE_ERROR[case.dtype], kernel.source


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_lengths_around_tiles_and_blocks(length: int) -> None:
    case = Case(((length, length), (length, length + 1), (1, length), (length, 3 * length), (length, length + 128)))
    step = make_step(case, seed=length)
    want = step.reference()
    for kernel in kernels_of(64):
        assert relative_error(step.run(kernel), want) < RELATIVE_ERROR[case.dtype], kernel.source


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_request_is_bitwise_the_same_alone_and_in_any_batch(head_dim: int) -> None:
    step = make_step(Case(((200, 9_000), (5, 5), (512, 512), (77, 3_000), (1, 8_192)), (14, 2), head_dim))
    for kernel in kernels_of(head_dim):
        together = step.run(kernel)
        assert torch.equal(together, step.run(kernel)), "run to run"
        at = 0
        for member, (queries, _) in enumerate(step.case.lens):
            assert torch.equal(together[at : at + queries], step.run(kernel, [member])), (kernel.source, member)
            at += queries
        backwards = step.run(kernel, [4, 3, 2, 1, 0])
        assert torch.equal(backwards[-200:], together[:200])


@pytest.mark.cuda
@needs_gpu
def test_chunks_give_the_whole_prompts_result_up_to_rounding() -> None:
    step = make_step(Case(((1_000, 1_000),), (32, 8), 128))
    for kernel in kernels_of(128):
        whole = step.run(kernel)
        for begin, end in ((0, 300), (300, 301), (301, 812), (812, 1_000)):
            chunk = Step(replace(step.case, lens=((end - begin, end),)), step.q[begin:end], step.k, step.v, step.tables)
            assert relative_error(chunk.run(kernel), whole[begin:end].float()) < RELATIVE_ERROR[torch.bfloat16]


@pytest.mark.cuda
@needs_gpu
def test_large_scores_do_not_overflow() -> None:
    step = make_step(Case(MIXED, (32, 8), 128, dtype=torch.float16))
    step.q.mul_(30)
    want = step.reference()
    for kernel in kernels_of(128):
        assert relative_error(step.run(kernel), want) < 3e-3, kernel.source


def grow_towards_the_start(step: Step) -> None:
    """Scale the keys so that scores grow from the last position to the first, the order that tiles are taken in."""
    for table, (_, context) in zip(step.tables, step.case.lens, strict=True):
        factor = torch.linspace(40.0, 0.5, max(1, len(table)), device="cuda")[:, None, None, None]
        blocks = torch.tensor(table, dtype=torch.int64, device="cuda")
        if context:
            step.k[blocks] = (step.k[blocks].float() * factor).to(step.k.dtype)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 500])
def test_scores_that_grow_from_tile_to_tile(dtype: torch.dtype, window: int | None) -> None:
    step = make_step(Case(MIXED, (32, 8), 128, dtype=dtype, window=window))
    grow_towards_the_start(step)
    want = step.reference()
    for kernel in kernels_of(128):
        assert relative_error(step.run(kernel), want) < RELATIVE_ERROR[dtype], kernel.source


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("grow", [False, True])
def test_a_row_does_not_depend_on_the_rows_of_its_tile(grow: bool) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernel has tiles of two sizes")
    step = make_step(Case(MIXED))
    if grow:
        grow_towards_the_start(step)
    assert torch.equal(step.run(sm90_kernel(64, warpgroups=2)), step.run(sm90_kernel(64, warpgroups=3)))


@pytest.mark.cuda
@needs_gpu
def test_a_captured_graph_follows_the_plan() -> None:
    case = Case(((100, 300), (50, 50)))
    step, device = make_step(case), torch.device("cuda", torch.cuda.current_device())
    tables = torch.zeros(2, 64, dtype=torch.int32, device=device)
    for row, table in enumerate(step.tables):
        tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
    for kernel in kernels_of(64):
        plan = PrefillPlan(device, 4, *case.heads, 64, 16, case.dtype, kernel=kernel)
        starts, lens = (torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 2))
        out = torch.zeros_like(step.q)

        def call(plan: PrefillPlan = plan, args: tuple = (starts, lens), out: torch.Tensor = out) -> None:
            paged_prefill(step.q, step.k, step.v, tables, *args, case.params, plan, out)

        plan.update([0, 100, 150], [300, 50])
        call()
        want = out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        plan.update([0, 100, 150], [200, 50])
        graph.replay()
        assert not torch.equal(out, want)
        plan.update([0, 100, 150], [300, 50])
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda s: s.q.float()}, "q has dtype"),
        ({"q": lambda s: s.q[:, :7]}, "q has shape"),
        ({"q": lambda s: s.q[:10]}, "q has 10 rows"),
        ({"q": lambda s: s.q.transpose(1, 2).contiguous().transpose(1, 2)}, "contiguous"),
        ({"k": lambda s: s.k.cpu()}, "CUDA device"),
        ({"k": lambda s: s.k[:, :, :8]}, "contiguous|what the plan"),
        ({"tables": lambda s: torch.zeros(1, 8, dtype=torch.int64, device="cuda")}, "block_tables has dtype"),
        ({"lens": lambda s: torch.zeros(2, dtype=torch.int32, device="cuda")}, "context_lens has shape"),
        ({"params": lambda s: LayerAttention(0.0)}, "scale"),
        ({"out": lambda s: torch.zeros_like(s.q)[:, :, :32]}, "out has shape"),
    ],
)
def test_bad_arguments_are_refused(change: dict, message: str) -> None:
    step = make_step(Case(((20, 30),)))
    device = torch.device("cuda", torch.cuda.current_device())
    plan = PrefillPlan(device, 4, 14, 2, 64, 16, torch.bfloat16)
    plan.update([0, 20], [30])
    args = {
        "q": step.q,
        "k": step.k,
        "v": step.v,
        "tables": torch.tensor(step.tables, dtype=torch.int32, device=device),
        "starts": torch.tensor([0, 20], dtype=torch.int32, device=device),
        "lens": torch.tensor([30], dtype=torch.int32, device=device),
        "params": step.case.params,
        "out": None,
    } | {name: make(step) for name, make in change.items()}
    with pytest.raises(ValueError, match=message):
        paged_prefill(
            *(args[name] for name in ("q", "k", "v", "tables", "starts", "lens", "params")), plan, args["out"]
        )
