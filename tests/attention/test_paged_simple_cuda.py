"""The simple paged attention kernel against the reference, on a GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from minillm.attention.cuda_simple import paged_attention_simple
from minillm.attention.interface import LayerAttention
from minillm.attention.reference import paged_attention_reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest relative error (Frobenius norm) against the fp32 reference: the rounding of the output, a few ulp in fp32."""


@dataclass
class Batch:
    """A scrambled paged batch on the GPU; unused table entries point far outside the pool."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: list[list[int]]
    query_lens: list[int]
    context_lens: list[int]

    def run(self, params: LayerAttention, out: torch.Tensor | None = None) -> torch.Tensor:
        width = max(1, *(len(table) for table in self.tables))
        tables = torch.tensor([table + [1 << 30] * (width - len(table)) for table in self.tables])
        starts = torch.tensor([0, *self.query_lens]).cumsum(0)
        return paged_attention_simple(
            self.q,
            self.k_cache,
            self.v_cache,
            tables.int().cuda(),
            starts.int().cuda(),
            torch.tensor(self.context_lens).int().cuda(),
            params,
            out,
        )

    def reference(self, params: LayerAttention) -> torch.Tensor:
        caches = self.k_cache.float(), self.v_cache.float()
        return paged_attention_reference(
            self.q.float(), *caches, self.tables, self.query_lens, self.context_lens, params
        )

    def only(self, index: int) -> Batch:
        start = sum(self.query_lens[:index])
        rows = self.q[start : start + self.query_lens[index]]
        one = slice(index, index + 1)
        return Batch(rows, self.k_cache, self.v_cache, self.tables[one], self.query_lens[one], self.context_lens[one])


def make_batch(query_lens, context_lens, *, heads=(4, 2), head_dim=64, block_size=16, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    counts = [-(-length // block_size) for length in context_lens]
    pool = list(range(sum(counts) + 3))
    random.Random(seed).shuffle(pool)
    tables = [[pool.pop() for _ in range(count)] for count in counts]
    num_q_heads, num_kv_heads = heads
    shape = (2, sum(counts) + 3, num_kv_heads, block_size, head_dim)
    caches = torch.randn(shape, device="cuda", generator=generator).to(dtype)
    packed = torch.randn(
        (sum(query_lens), num_q_heads + 2 * num_kv_heads, head_dim), device="cuda", generator=generator
    ).to(dtype)
    return Batch(packed[:, :num_q_heads], caches[0], caches[1], tables, list(query_lens), list(context_lens))


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (14, 2), (24, 4), (20, 1)], ids=str)
def test_equals_the_reference(dtype, head_dim, heads):
    for seed, block_size in enumerate((1, 5, 16, 128)):
        window, soft_cap = [(None, None), (1, None), (40, 20.0), (None, 5.0)][seed]
        params = LayerAttention(head_dim**-0.5, window, soft_cap)
        query_lens, context_lens = [1, 1, 1, 33, 7, 64], [1, 31, 200, 33, 107, 96]
        batch = make_batch(
            query_lens, context_lens, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, seed=seed
        )
        out = torch.full(batch.q.shape, float("nan"), dtype=dtype, device="cuda")
        assert batch.run(params, out) is out
        assert relative_error(out, batch.reference(params)) < TOLERANCE[dtype], (block_size, params)


def test_the_toy_shape_of_the_original_runs():
    batch = make_batch([1] * 32, range(1, 33), heads=(4, 4), head_dim=8, block_size=16, dtype=torch.float16)
    params = LayerAttention(8**-0.5)
    assert relative_error(batch.run(params), batch.reference(params)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("num_seqs", [1, 31, 33, 100])
def test_any_number_of_sequences(num_seqs):
    query_lens = [1 + (7 * i) % 5 for i in range(num_seqs)]
    batch = make_batch(query_lens, [length + (13 * i) % 70 for i, length in enumerate(query_lens)], heads=(3, 1))
    params = LayerAttention(0.125)
    assert relative_error(batch.run(params), batch.reference(params)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [None, 50])
def test_a_row_is_bitwise_the_same_alone_in_a_batch_and_in_any_chunk(window):
    params = LayerAttention(0.125, window)
    batch = make_batch([70, 1, 40], [170, 90, 40], heads=(6, 2))
    whole = batch.run(params)
    start = 0
    for index, length in enumerate(batch.query_lens):
        assert torch.equal(batch.only(index).run(params), whole[start : start + length])
        start += length
    for position in (0, 1, 15, 69):  # as a decode step of the first sequence
        token = batch.only(0)
        token.q = token.q[position : position + 1]
        token.query_lens, token.context_lens = [1], [101 + position]
        assert torch.equal(token.run(params)[0], whole[position])


def test_padding_of_a_captured_graph_gives_zeros_and_reads_nothing():
    batch = make_batch([1, 1, 1], [20, 0, 35], heads=(4, 2))
    out = batch.run(LayerAttention(0.125))
    assert not out[1].any()
    assert out[0].any()
    assert out.isfinite().all()


def test_runs_in_a_captured_graph_on_changed_data():
    batch = make_batch([1] * 5, [9, 33, 64, 100, 17], heads=(9, 3), dtype=torch.bfloat16)
    params = LayerAttention(0.125)
    width = max(map(len, batch.tables))
    tables = torch.tensor([table + [0] * (width - len(table)) for table in batch.tables]).int().cuda()
    starts, lens = torch.arange(6).int().cuda(), torch.tensor(batch.context_lens).int().cuda()
    q, out = batch.q.clone(), torch.empty_like(batch.q)
    args = (q, batch.k_cache, batch.v_cache, tables, starts, lens, params, out)
    paged_attention_simple(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention_simple(*args)
    q.normal_()
    lens.sub_(1)
    graph.replay()
    batch.q, batch.context_lens = q, [length - 1 for length in batch.context_lens]
    assert relative_error(out, batch.reference(params)) < TOLERANCE[torch.bfloat16]


def test_runs_on_the_current_stream_behind_what_is_queued_there():
    batch = make_batch([64], [4000], heads=(8, 2))
    params = LayerAttention(0.125)
    expected = batch.run(params)
    q = batch.q.clone()
    batch.q = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        batch.q.copy_(q)
        out = batch.run(params)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_blocks_beyond_two_to_the_31_elements():
    """B26: a sequence in the highest blocks of a pool of more than 2^31 elements equals the same one in low blocks."""
    block_elements = 8 * 16 * 128
    num_blocks = (1 << 31) // block_elements + 64
    low = make_batch([3, 1], [100, 70], heads=(8, 8), head_dim=128, dtype=torch.float16)
    params = LayerAttention(128**-0.5)
    expected = low.run(params)
    caches = [torch.empty((num_blocks, 8, 16, 128), dtype=torch.float16, device="cuda") for _ in range(2)]
    shift = num_blocks - len(low.k_cache)
    for cache, source in zip(caches, (low.k_cache, low.v_cache), strict=True):
        cache[shift:] = source
    tables = [[block + shift for block in table] for table in low.tables]
    high = Batch(low.q, caches[0], caches[1], tables, low.query_lens, low.context_lens)
    assert torch.equal(high.run(params), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda q: q.half()}, "q has dtype"),
        ({"q": lambda q: q[:, :3]}, "num_q_heads=3 is not a multiple"),
        ({"q": lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)}, "strides"),
        ({"q": lambda q: q.cpu()}, "q is on cpu"),
        ({"context_lens": lambda lens: lens.long()}, "context_lens has dtype"),
        ({"query_start": lambda starts: starts[:-1]}, "query_start has shape"),
        ({"block_tables": lambda tables: tables[:1]}, "block_tables has shape"),
        ({"v_cache": lambda cache: cache[:, :, :8]}, "v_cache has shape"),
    ],
    ids=["dtype", "heads", "strides", "device", "lens", "starts", "tables", "cache"],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    batch = make_batch([1, 2], [10, 20])
    args = {
        "q": batch.q,
        "k_cache": batch.k_cache,
        "v_cache": batch.v_cache,
        "block_tables": torch.zeros((2, 2), dtype=torch.int32, device="cuda"),
        "query_start": torch.tensor([0, 1, 3], dtype=torch.int32, device="cuda"),
        "context_lens": torch.tensor([10, 20], dtype=torch.int32, device="cuda"),
    }
    for name, function in change.items():
        args[name] = function(args[name])
    with pytest.raises(ValueError, match=message):
        paged_attention_simple(**args, params=LayerAttention(0.125))
