"""Paged attention as the runtime uses it on a GPU, against the float32 oracle: mixed steps, every path, B26 and B27."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from minillm.attention.cuda import CudaAttention, CudaKernels, CudaMetadata
from minillm.attention.interface import LayerAttention
from minillm.attention.reference import paged_attention_reference
from minillm.memory.paged_kv_cache import KVCacheSpec, PagedKVCache
from minillm.memory.staging import upload_to
from minillm.memory.swap_space import SwapSpace

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of the largest value: a few roundings of the dtype (float32: of the order of summation)."""


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@dataclass
class Step:
    """A cache with random history, and one step's batch on the device."""

    cache: PagedKVCache
    attention: CudaAttention
    meta: CudaMetadata
    tables: list[list[int]]
    query_lens: list[int]
    context_lens: list[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def run(self, layer: int = 0) -> torch.Tensor:
        return self.attention.begin(self.meta).attend(layer, self.q, self.k, self.v)

    def reference(self, params: LayerAttention, layer: int = 0) -> torch.Tensor:
        """By the oracle in float32; the step's K and V must have been written."""
        keys, values = self.cache.k(layer), self.cache.v(layer)
        return paged_attention_reference(
            self.q.float(), keys, values, self.tables, self.query_lens, self.context_lens, params
        )


def make_step(
    decodes: list[int],
    prefills: list[tuple[int, int]] = (),
    *,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    params: LayerAttention | None = None,
    num_layers: int = 1,
    cache: PagedKVCache | None = None,
    blocks: list[int] | None = None,
    seed: int = 0,
) -> Step:
    """`decodes`: context lengths; `prefills`: (query_len, context_len); `blocks` are given out from the end."""
    generator = torch.Generator().manual_seed(seed)
    contexts = [*decodes, *(context for _, context in prefills)]
    queries = [1] * len(decodes) + [query for query, _ in prefills]
    counts = [-(-length // block_size) for length in contexts]
    if cache is None:
        spec = KVCacheSpec(
            num_layers=num_layers, num_kv_heads=heads[1], head_dim=head_dim, block_size=block_size, dtype=dtype
        )
        cache = PagedKVCache(spec, sum(counts) + 3, DEVICE)
        cache.store.normal_(generator=torch.Generator(DEVICE).manual_seed(seed))
    free = list(blocks) if blocks is not None else torch.randperm(cache.num_blocks, generator=generator).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    params = params if params is not None else LayerAttention(head_dim**-0.5)
    rows = torch.randperm(len(contexts) + 2, generator=generator)[: len(contexts)].numpy()
    attention = CudaAttention(
        cache,
        [params] * num_layers,
        num_heads=heads[0],
        max_num_seqs=len(contexts) + 2,
        max_model_len=max(contexts) + 1,
    )
    positions = np.concatenate(
        [np.arange(len(t), dtype=np.int64) + row * attention.table_width for row, t in zip(rows, tables, strict=True)]
    )
    upload = upload_to(DEVICE)
    attention.update_tables(upload(positions), upload(np.array([block for t in tables for block in t], dtype=np.int32)))
    slots = [
        table[at // block_size] * block_size + at % block_size
        for table, query, context in zip(tables, queries, contexts, strict=True)
        for at in range(context - query, context)
    ]
    start = np.array([0, *np.cumsum(queries)], dtype=np.int32)
    chunk_start = start[len(decodes) :] - start[len(decodes)]
    lens = np.array(contexts, dtype=np.int32)
    meta = CudaMetadata(
        num_decodes=len(decodes),
        first_prefill=len(decodes),
        max_blocks=max(counts),
        slot_mapping=upload(np.array(slots, dtype=np.int64)),
        rows=upload(rows),
        decode_lens=upload(lens[: len(decodes)]),
        prefill_lens=upload(lens[len(decodes) :]),
        prefill_query_start=upload(chunk_start),
        host_query_start=chunk_start,
        host_context_lens=lens[len(decodes) :],
    )
    packed = torch.randn(len(slots), heads[0] + 2 * heads[1], head_dim, generator=generator).to(DEVICE, dtype)
    q, k, v = packed.split((heads[0], heads[1], heads[1]), dim=1)  # views of one product, as in the decoder
    return Step(cache, attention, meta, tables, queries, contexts, q, k, v)


def check(step: Step, params: LayerAttention, layer: int = 0) -> torch.Tensor:
    out = step.run(layer)
    wanted = step.reference(params, layer)
    error = (out.float() - wanted).abs().max() / wanted.abs().max()
    assert out.isfinite().all()
    assert error < TOLERANCE[step.q.dtype]
    return out


MIXED = {"decodes": [1, 15, 16, 17, 300, 1025], "prefills": [(1, 1), (16, 16), (33, 33), (5, 70), (100, 612)]}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_mixed_steps_equal_the_oracle(dtype, block_size, head_dim):
    params = LayerAttention(head_dim**-0.5)
    check(make_step(**MIXED, dtype=dtype, block_size=block_size, head_dim=head_dim, heads=(6, 2)), params)


def padded(step: Step, tokens: int, sequences: int) -> Step:
    """The same step padded to so many tokens and sequences, both kernels reading all of it."""
    meta, count, total = step.meta, step.meta.num_decodes, len(step.query_lens)

    def filled(size: int, value: float, column: torch.Tensor) -> torch.Tensor:
        full = torch.full((size, *column.shape[1:]), value, dtype=column.dtype, device=DEVICE)
        full[: len(column)] = column
        return full

    lens = filled(sequences, 0, torch.tensor(step.context_lens, dtype=torch.int32))
    start = np.array([count] * count + [*(meta.host_query_start + count)], dtype=np.int32)
    start = np.pad(start, (0, sequences - total), mode="edge")
    wide = CudaMetadata(
        num_decodes=sequences if count else 0,
        first_prefill=0,
        slot_mapping=filled(tokens, -1, meta.slot_mapping),
        rows=filled(sequences, 0, meta.rows),
        max_blocks=step.attention.table_width,
        decode_lens=filled(sequences, -1, meta.decode_lens) if count else lens[:0],
        prefill_lens=lens,
        prefill_query_start=torch.from_numpy(start).to(DEVICE),
        host_query_start=start,
        host_context_lens=lens.cpu().numpy(),
    )
    q, k, v = (filled(tokens, 1.0, x) for x in (step.q, step.k, step.v))
    return Step(step.cache, step.attention, wide, step.tables, step.query_lens, step.context_lens, q, k, v)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("decodes", "prefills", "heads", "head_dim"),
    [
        (MIXED["decodes"], MIXED["prefills"], (9, 3), 64),
        ([700], [(5, 70)], (16, 8), 128),
        ([1, 64, 65], [(130, 130), (1, 900)], (8, 8), 80),
        ([], MIXED["prefills"], (14, 2), 64),
        ([40, 3], [(20, 5000)], (4, 2), 128),  # keys in pieces
        ([9, 90], [(20, 33)], (4, 2), 32),  # decode by the simple kernel
    ],
    ids=["many", "one and one", "head_dim 80", "chunks alone", "long context", "head_dim 32"],
)
@pytest.mark.parametrize("window", [None, 16])
def test_padded_steps_have_the_bits_of_steps_as_they_come(dtype, decodes, prefills, heads, head_dim, window):
    params = LayerAttention(head_dim**-0.5, window)
    step = make_step(decodes, prefills, heads=heads, head_dim=head_dim, dtype=dtype, params=params)
    wanted = check(step, params)
    tokens = len(step.q)
    wide = padded(step, tokens + 21, len(step.query_lens) + 2)
    tables = torch.full((len(step.query_lens) + 2, step.attention.table_width), 2**30, dtype=torch.int32, device=DEVICE)
    attention = wide.attention
    attention.begin_padded(wide.meta, tables)
    attention.gather_tables()
    torch.cuda.synchronize()  # in a step, the embedding waits for it
    out = torch.full_like(wide.q, 7.0)
    attention.attend_written(0, wide.q, out)
    assert torch.equal(out[:tokens], wanted)
    if dtype != torch.float32 and head_dim != 32:
        assert (out[tokens:] == 7.0).all()  # nobody's


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 1, 16, 100])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_windows_and_caps_equal_the_oracle(dtype, window, soft_cap):
    params = LayerAttention(0.2, window, soft_cap)
    check(make_step(**MIXED, dtype=dtype, params=params), params)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "heads",
    [(9, 3), (14, 2), (24, 8), (24, 4), (64, 4), (4, 4), (6, 3), (10, 2), (16, 2), (32, 1)],
    ids=lambda heads: f"{heads[0]} over {heads[1]}",
)
def test_b27_every_ratio_of_query_to_kv_heads(dtype, heads):
    """B27: query head h reads KV head h // ratio, in decode and in prefill, for ratios 1, 2, 3, 5, 6, 7, 8, 16, 32."""
    params = LayerAttention(0.125)
    check(make_step(**MIXED, heads=heads, dtype=dtype), params)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_toy_shape_of_four_heads_of_size_eight(dtype):
    params = LayerAttention(8**-0.5)
    check(make_step(**MIXED, heads=(4, 4), head_dim=8, dtype=dtype), params)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "tuned"),
    [
        (torch.bfloat16, 64, 16, True),
        (torch.float16, 128, 8, True),
        (torch.float32, 64, 16, False),
        (torch.bfloat16, 8, 16, False),
    ],
    ids=str,
)
def test_the_tuned_kernels_serve_what_they_are_for(dtype, head_dim, block_size, tuned):
    spec = KVCacheSpec(num_layers=1, num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype)
    layers = [LayerAttention(1.0)]
    kernels = CudaKernels(PagedKVCache(spec, 4, DEVICE), layers, num_heads=6, max_num_seqs=4, max_model_len=64)
    assert (kernels.decode_is_tuned, kernels.prefill_is_tuned) == (tuned, tuned)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_sequence_has_the_same_numbers_alone_as_in_a_batch(dtype):
    """Bitwise, for decode rows and for chunks: the order of reduction is the sequence's own."""
    mixed = make_step(**MIXED, dtype=dtype)
    together = mixed.run()
    start = 0
    for i, (query, context) in enumerate(zip(mixed.query_lens, mixed.context_lens, strict=True)):
        alone = make_step(
            [context] if i < mixed.meta.num_decodes else [],
            [(query, context)] if i >= mixed.meta.num_decodes else [],
            dtype=dtype,
            cache=mixed.cache,
            blocks=mixed.tables[i][::-1],
        )
        own = slice(start, start + query)
        alone.q, alone.k, alone.v = mixed.q[own], mixed.k[own], mixed.v[own]
        assert torch.equal(alone.run(), together[own])
        start += query


@pytest.fixture(scope="module")
def huge() -> PagedKVCache:
    """One layer whose K alone has more than 2^31 elements: 8.6 GiB in bfloat16 with V."""
    spec = KVCacheSpec(num_layers=1, num_kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16)
    num_blocks = 2**31 // (8 * 128 * 16) + 200
    if torch.cuda.mem_get_info()[0] < 1.2 * num_blocks * spec.bytes_per_block:
        pytest.skip("not enough GPU memory")
    return PagedKVCache(spec, num_blocks, DEVICE)


@pytest.mark.parametrize(("decodes", "prefills"), [([1000], []), ([], [(300, 1000)])], ids=["decode", "prefill"])
def test_b26_the_highest_blocks_give_what_low_blocks_give(huge, decodes, prefills):
    """B26: write and attention address K and V by 64 bits; element offsets here are past 2^31, in bytes past 2^32."""
    params = LayerAttention(128**-0.5)
    results = []
    for blocks in (list(range(100, 163)), list(range(huge.num_blocks - 63, huge.num_blocks))):
        assert (blocks[0] * 8 * 128 * 16 > 2**31) == (blocks[0] > 1000)
        history = torch.randn(2, 63, 8, 16, 128, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
        huge.store[0, :, torch.tensor(blocks, device=DEVICE)] = history.to(torch.bfloat16).flip(1)
        step = make_step(decodes, prefills, heads=(32, 8), head_dim=128, cache=huge, blocks=blocks, seed=5)
        results.append(check(step, params))
    assert torch.equal(results[0], results[1])


def test_b26_block_copies_and_swaps_reach_the_highest_blocks(huge):
    last = huge.num_blocks - 1
    huge.store[0, :, [3, 4]] = torch.randn(2, 2, 8, 16, 128, device=DEVICE).to(torch.bfloat16)
    wanted = huge.store[0, :, [3, 4]].clone()
    huge.copy_blocks([(3, last), (4, last - 1)])
    assert torch.equal(huge.store[0, :, [last, last - 1]], wanted)
    swap = SwapSpace(huge, 8)
    out = swap.swap_out([last, last - 1], [0, 5])
    huge.store[0, :, [last, last - 1, last - 2, last - 3]] = 0
    back = swap.swap_in([0, 5], [last - 2, last - 3])
    torch.cuda.synchronize()
    assert out.done() and back.done()
    assert torch.equal(huge.store[0, :, [last - 2, last - 3]], wanted)
    assert not huge.store[0, :, [last, last - 1]].any()
    huge.clear_slots(torch.tensor([(last - 2) * 16 + 7]))
    assert not huge.store[0, :, last - 2, :, 7].any()
    assert huge.store[0, :, last - 2, :, 6].any()


def test_padding_writes_nothing():
    """B25: a negative slot changes no byte of the pool, its last block included."""
    step = make_step([5, 40], dtype=torch.bfloat16)
    before = step.cache.store.clone()
    step.meta.slot_mapping.fill_(-1)
    step.run()
    assert torch.equal(step.cache.store, before)
