"""The tuned decode kernel: against the oracle, and bit for bit against itself under other divisions of its work."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from minillm.attention import cuda_decode
from minillm.attention.cuda_decode import DecodePlan, paged_decode
from minillm.attention.interface import LayerAttention
from minillm.attention.reference import attention_reference
from minillm.memory.cuda_kv_ops import write_kv

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""Bound of |out - reference| / |reference| over a batch; P and the output are rounded to the dtype."""


# ---- Without a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("head_dim", cuda_decode.HEAD_DIMS)
def test_every_tuned_head_dim_fits_the_shared_memory_of_data_centre_gpus(head_dim, arch):
    stages = cuda_decode._stages(head_dim, arch)
    assert stages >= 2
    limit = {"sm_80": 163, "sm_90a": 227, "sm_100": 227}[arch] << 10
    assert cuda_decode.shared_bytes(head_dim, stages) <= limit
    assert cuda_decode.supports(torch.bfloat16, head_dim, 16, arch)


def test_what_is_not_tuned_is_not_supported():
    assert not cuda_decode.supports(torch.float32, 128, 16, "sm_90a")
    assert not cuda_decode.supports(torch.float16, 72, 16, "sm_90a")
    assert not cuda_decode.supports(torch.float16, 128, 24, "sm_90a")
    assert not cuda_decode.supports(torch.float16, 128, 4, "sm_90a")
    assert not cuda_decode.supports(torch.float16, 128, 16, "sm_75")
    assert not cuda_decode.supports(torch.float16, 256, 16, "sm_86")  # 100 KiB of shared memory: two tiles don't fit


def test_specs_name_an_instance_per_dtype_and_head_dim_and_the_plan():
    symbols = {spec.symbol for spec in cuda_decode.specs("sm_90a")}
    assert len(symbols) == 2 * len(cuda_decode.HEAD_DIMS) + 1
    assert "paged_decode<__nv_bfloat16, 128, 2>" in symbols


@pytest.mark.parametrize("tokens", [0, 32, 96, 1 << 22])
def test_item_tokens_must_be_a_power_of_two_from_64(tokens):
    with pytest.raises(ValueError, match="item_tokens"):
        cuda_decode._item_shift(tokens)


def test_a_plan_on_the_cpu_is_refused():
    with pytest.raises(ValueError, match="device"):
        DecodePlan("cpu", 4, 128, 8, 2, 64, 16, torch.float16)


# ---- On a GPU --------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    lens: list[int]

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lens, dtype=torch.int32, device="cuda")

    def plan(self, **options) -> DecodePlan:
        num_kv_heads, block_size, head_dim = self.k_cache.shape[1:]
        plan = DecodePlan(
            "cuda",
            len(self.lens),
            max(*self.lens, 1),
            self.q.shape[1],
            num_kv_heads,
            head_dim,
            block_size,
            self.q.dtype,
            **options,
        )
        plan.update(self.seq_lens)
        return plan

    def run(self, params: LayerAttention, plan: DecodePlan | None = None) -> torch.Tensor:
        out = torch.full_like(self.q, float("nan"), memory_format=torch.contiguous_format)
        plan = self.plan() if plan is None else plan
        return paged_decode(self.q, self.k_cache, self.v_cache, self.tables, self.seq_lens, params, plan, out)

    def row(self, index: int) -> Batch:
        at = slice(index, index + 1)
        return Batch(self.q[at], self.k_cache, self.v_cache, self.tables[at], self.lens[at.start : at.stop])

    def reference(self, params: LayerAttention) -> torch.Tensor:
        """In fp32; rows of padding are zeros."""
        out = torch.zeros(self.q.shape, dtype=torch.float32, device=self.q.device)
        block_size, num_kv_heads, head_dim = self.k_cache.shape[2], self.k_cache.shape[1], self.k_cache.shape[3]
        for row, length in enumerate(self.lens):
            if length:
                blocks = self.tables[row, : -(-length // block_size)].long()
                k, v = (
                    cache[blocks].transpose(1, 2).reshape(-1, num_kv_heads, head_dim)[:length].float()
                    for cache in (self.k_cache, self.v_cache)
                )
                out[row] = attention_reference(self.q[row : row + 1].float(), k, v, params)[0]
        return out


def make_batch(
    lens: list[int],
    *,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    num_blocks: int = 0,
) -> Batch:
    """Scrambled tables; slots that no sequence uses hold NaN, and entries that it does not use name no block."""
    generator = torch.Generator("cuda").manual_seed(seed)
    counts = [-(-length // block_size) for length in lens]
    num_blocks = num_blocks or sum(counts) + 2
    shape = (2, num_blocks, heads[1], block_size, head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    order = torch.randperm(num_blocks, generator=generator, device="cuda").int()
    tables = torch.full((len(lens), max([*counts, 1]) + 3), 2**30, dtype=torch.int32, device="cuda")
    start = 0
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        blocks = order[start : start + count]
        tables[row, :count], start = blocks, start + count
        for index in range(0, count, 4096):
            chosen = blocks[index : index + 4096].long()
            pool[:, chosen] = torch.randn(2, len(chosen), *shape[2:], generator=generator, device="cuda").to(dtype)
        if length % block_size:
            pool[:, blocks[-1].long(), :, length % block_size :] = float("nan")
    q = torch.randn(len(lens), heads[0], head_dim, generator=generator, device="cuda").to(dtype)
    return Batch(q, pool[0], pool[1], tables, lens)


def params_for(batch: Batch, window: int | None = None, cap: float | None = None) -> LayerAttention:
    return LayerAttention(batch.q.shape[2] ** -0.5, window, cap)


def check(batch: Batch, params: LayerAttention, plan: DecodePlan | None = None) -> torch.Tensor:
    out = batch.run(params, plan)
    expected = batch.reference(params)
    assert not out.isnan().any()
    error = (out.float() - expected).norm() / expected.norm().clamp_min(1e-9)
    assert error < TOLERANCE[out.dtype], f"relative error {error:.2e}"
    return out


BOUNDARIES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025]


@pytest.mark.cuda
@needs_gpu
class TestAgainstReference:
    @pytest.mark.parametrize("dtype", cuda_decode.DTYPES)
    @pytest.mark.parametrize("head_dim", cuda_decode.HEAD_DIMS)
    def test_lengths_around_tile_block_and_item_boundaries(self, head_dim, dtype):
        batch = make_batch(BOUNDARIES, head_dim=head_dim, dtype=dtype)
        check(batch, params_for(batch))

    @pytest.mark.parametrize("block_size", cuda_decode.BLOCK_SIZES)
    def test_block_sizes(self, block_size):
        batch = make_batch([1, 7, 8, 9, 100, 777, 3000], block_size=block_size, head_dim=64)
        check(batch, params_for(batch))

    @pytest.mark.parametrize("heads", [(1, 1), (2, 2), (12, 12), (16, 8), (9, 3), (14, 2), (8, 1), (18, 2), (71, 1)])
    def test_group_sizes(self, heads):
        batch = make_batch([5, 64, 300, 2049], heads=heads, head_dim=64)
        check(batch, params_for(batch))

    @pytest.mark.parametrize("block_size", [8, 16, 64])
    @pytest.mark.parametrize("window", [1, 16, 100, 1024])
    @pytest.mark.parametrize("planned", [True, False])
    def test_sliding_window(self, window, block_size, planned):
        batch = make_batch([1, 99, 100, 101, 1500, 4097], block_size=block_size, head_dim=64)
        plan = batch.plan(sliding_windows=(None, window) if planned else (None,))
        check(batch, params_for(batch, window=window), plan)

    def test_blocks_before_the_window_are_not_read(self):
        batch = make_batch([1000], block_size=16)
        params = params_for(batch, window=100)
        expected = batch.run(params)
        batch.tables[0, : (1000 - 100) // 16] = 2**30
        assert torch.equal(batch.run(params), expected)

    def test_soft_cap(self):
        batch = make_batch([1, 70, 1000])
        batch.q *= 8  # scores that the cap bends
        check(batch, params_for(batch, cap=5.0))
        check(batch, params_for(batch, window=64, cap=30.0))

    def test_rows_of_length_zero_are_zeros(self):
        batch = make_batch([0, 40, 0, 700, 0])
        out = check(batch, params_for(batch))
        assert (out[[0, 2, 4]] == 0).all()

    def test_rows_of_negative_length_are_left_alone(self):
        lens = [-1, 40, -1, 700, 0, -1] + [-1] * 300 + [9000]
        owned = [i for i, length in enumerate(lens) if length >= 0]
        batch = make_batch([max(length, 0) for length in lens])
        params = params_for(batch)
        wanted = check(batch, params)[owned]
        for window in (None, 64):
            batch.lens = lens
            params = params_for(batch, window=window)
            plan = batch.plan(sliding_windows=(None, window))
            out = batch.run(params, plan)
            assert out.isnan().flatten(1).all(1).sum() == len(lens) - len(owned)
            assert window or torch.equal(out[owned], wanted)
            batch.lens = [max(length, 0) for length in lens]
            assert torch.equal(out[owned], batch.run(params)[owned])
        batch.lens = [-1] * len(lens)  # not one of its own
        assert batch.run(params).isnan().all()

    def test_query_rows_of_a_packed_product(self):
        batch = make_batch([33, 400])
        packed = torch.randn(2, 8 * 128 + 512, device="cuda").to(batch.q.dtype)
        packed[:, : 8 * 128] = batch.q.flatten(1)
        batch.q = packed[:, : 8 * 128].view(2, 8, 128)
        check(batch, params_for(batch))

    def test_large_scores_do_not_overflow(self):
        batch = make_batch([100, 1000], dtype=torch.float16)
        batch.q *= 100
        check(batch, params_for(batch))

    def test_a_sequence_of_131072_tokens(self):
        batch = make_batch([131072, 5], heads=(8, 1))
        check(batch, params_for(batch))

    def test_a_pool_of_more_than_2_to_31_elements_at_its_end(self):
        block_elements = 8 * 16 * 128
        num_blocks = 2**31 // block_elements + 40
        batch = make_batch([300], heads=(8, 8), num_blocks=num_blocks)
        last = torch.arange(num_blocks - 19, num_blocks, device="cuda")
        for cache in (batch.k_cache, batch.v_cache):
            cache[last] = cache[batch.tables[0, :19].long()]
        batch.tables[0, :19] = last.int()
        check(batch, params_for(batch))


@pytest.mark.cuda
@needs_gpu
class TestSameBits:
    def test_every_division_of_the_work_gives_the_same_bits(self):
        lens = [1, 63, 64, 65, 128, 129, 1000, 5000, 20000]
        for head_dim in (64, 256):
            batch = make_batch(lens, head_dim=head_dim)
            params = params_for(batch)
            expected = batch.run(params)
            for tokens in (64, 128, 256, 1024, 4096, 32768):
                assert torch.equal(batch.run(params, batch.plan(item_tokens=tokens)), expected), (head_dim, tokens)

    @pytest.mark.parametrize("window", [None, 200])
    def test_a_row_alone_and_in_a_batch(self, window):
        batch = make_batch([17, 4000, 333, 64, 9000, 1] + [256] * 40)
        params = params_for(batch, window=window)
        together = batch.run(params, batch.plan(sliding_windows=(None, window)))
        for index in range(7):
            assert torch.equal(batch.row(index).run(params), together[index : index + 1]), batch.lens[index]

    def test_run_to_run(self):
        batch = make_batch([3000, 77, 12000, 900] * 8)
        params, plan = params_for(batch), batch.plan()
        first = batch.run(params, plan)
        assert all(torch.equal(batch.run(params, plan), first) for _ in range(20))


@pytest.mark.cuda
@needs_gpu
class TestUse:
    def test_a_captured_graph_follows_lengths_that_changed_on_the_device(self):
        batch = make_batch([1000, 64, 2000, 500])
        params, plan, lens = params_for(batch), batch.plan(), batch.seq_lens
        out = torch.empty_like(batch.q)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.update(lens)
            for _ in range(2):  # two layers
                paged_decode(batch.q, batch.k_cache, batch.v_cache, batch.tables, lens, params, plan, out)
        for new in ([1000, 64, 2000, 500], [3, 64, 1999, 0], [0, 0, 0, 1], [999, 1, 130, 499]):
            lens.copy_(torch.tensor(new))
            out.fill_(float("nan"))
            graph.replay()
            changed = Batch(batch.q, batch.k_cache, batch.v_cache, batch.tables, new)
            assert torch.equal(out, changed.run(params)), new

    @pytest.mark.parametrize("lens", [[1, 2, 15, 16, 17, 33, 64, 65], [700] * 300, [40000], [5, 3000, 0, 129]], ids=str)
    @pytest.mark.parametrize("window", [None, 100])
    def test_history_is_read_while_the_last_tokens_are_still_being_written(self, lens, window):
        """Bit for bit what comes out when every launch waits for the one in front of it."""
        batch = make_batch(lens)
        block_size, (num_kv_heads, head_dim) = batch.k_cache.shape[2], (batch.k_cache.shape[1], batch.k_cache.shape[3])
        last = [max(length - 1, 0) for length in lens]
        blocks = [int(batch.tables[row, at // block_size]) for row, at in enumerate(last)]
        slots = [
            block * block_size + at % block_size if length else -1
            for block, at, length in zip(blocks, last, lens, strict=True)
        ]
        slot_mapping = torch.tensor(slots, device="cuda")
        new = torch.empty(2, len(lens), num_kv_heads, head_dim, dtype=batch.q.dtype, device="cuda")
        params, plan, seq_lens = params_for(batch, window), batch.plan(), batch.seq_lens
        outs = torch.empty(3, *batch.q.shape, dtype=batch.q.dtype, device="cuda")

        def layers(history_ready: bool) -> None:
            plan.update(seq_lens)
            for out in outs:  # what a layer writes is what the next one reads
                write_kv(new[0], new[1], batch.k_cache, batch.v_cache, slot_mapping)
                given = (batch.q, batch.k_cache, batch.v_cache, batch.tables, seq_lens, params, plan, out)
                paged_decode(*given, history_ready=history_ready)
                new.mul_(0.5)

        layers(True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers(True)
        for seed in range(20):
            generator = torch.Generator("cuda").manual_seed(seed)
            start = torch.randn(new.shape, generator=generator, device="cuda").to(new.dtype)
            new.copy_(start)
            layers(False)
            expected = outs.clone()
            new.copy_(start)
            graph.replay()
            assert torch.equal(outs, expected)

    def test_work_counters_are_back_at_zero(self):
        batch = make_batch([700] * 500, heads=(2, 2), head_dim=64)
        plan = batch.plan(item_tokens=64)
        check(batch, params_for(batch), plan)
        assert not plan.arrivals.any() and not plan.counters.any()

    def test_nothing_is_allocated_once_out_is_given(self):
        batch = make_batch([100, 200])
        params, plan, lens = params_for(batch), batch.plan(), batch.seq_lens
        out = torch.empty_like(batch.q)
        paged_decode(batch.q, batch.k_cache, batch.v_cache, batch.tables, lens, params, plan, out)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        plan.update(lens)
        paged_decode(batch.q, batch.k_cache, batch.v_cache, batch.tables, lens, params, plan, out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before

    def test_it_runs_on_the_current_stream(self):
        batch = make_batch([5000] * 8)
        params, plan = params_for(batch), batch.plan()
        expected = batch.run(params, plan)
        batch.q.zero_()
        stream = torch.cuda.Stream()
        original = make_batch([5000] * 8).q
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            batch.q.copy_(original)
            out = batch.run(params, plan)
        stream.synchronize()
        assert torch.equal(out, expected)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"q": lambda b: b.q.float()}, "q"),
            ({"q": lambda b: b.q[:, :4]}, "q"),
            ({"q": lambda b: b.q[:1]}, "q"),
            ({"q": lambda b: b.q.transpose(1, 2).contiguous().transpose(1, 2)}, "q"),
            ({"block_tables": lambda b: b.tables.long()}, "block_tables"),
            ({"block_tables": lambda b: b.tables.cpu()}, "block_tables"),
            ({"seq_lens": lambda b: b.seq_lens[:1]}, "seq_lens"),
            ({"k_cache": lambda b: b.k_cache.half()}, "cache"),
            ({"k_cache": lambda b: b.k_cache[:, :1]}, "cache"),
            ({"out": lambda b: torch.empty_like(b.q[:, :4])}, "out"),
            ({"params": lambda b: LayerAttention(1.0, 77)}, "sliding_window"),
        ],
    )
    def test_bad_arguments_are_named(self, change, named):
        batch = make_batch([40, 50])
        plan = batch.plan(sliding_windows=(64,))
        arguments = {
            "q": batch.q,
            "k_cache": batch.k_cache,
            "v_cache": batch.v_cache,
            "block_tables": batch.tables,
            "seq_lens": batch.seq_lens,
            "params": LayerAttention(1.0, 64),
        }
        paged_decode(**arguments, plan=plan)
        arguments |= {name: make(batch) for name, make in change.items()}
        with pytest.raises(ValueError, match=named):
            paged_decode(**arguments, plan=plan)

    def test_more_sequences_than_the_plan_has_room_for(self):
        plan = make_batch([40, 50]).plan()
        with pytest.raises(ValueError, match="seq_lens"):
            plan.update(torch.ones(3, dtype=torch.int32, device="cuda"))
