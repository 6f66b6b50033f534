"""Random cases for the attention kernels, and inputs that make mistakes loud.

A case is drawn from a seed alone and says everything about its inputs, so a failing line of the report can be run
again by itself. Inputs are built so that a mistake at an edge is not lost among thousands of keys:

- keys at the first and last visible position of the last query, just outside of its window, and at one more place point
  along that query, so that each carries a large share of its softmax;
- in a chunk every even query's own key points along it, and every odd position's key along the query *before* it,
  which must not see it;
- slots behind a sequence's end, in its last block and in unused blocks, hold a value far from the data's;
- entries behind a row's last block name such an unused block (or, for a memory checker, no block at all);
- the result is full of NaN before the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from minillm.attention.interface import LayerAttention
from minillm.attention.reference import paged_attention_reference
from minillm.bench.attention_batch import DTYPES

HEADS = (
    (9, 3),
    (14, 2),
    (16, 8),
    (32, 8),
    (64, 8),
    (12, 12),
    (2, 2),
    (1, 1),
    (8, 1),
    (16, 1),
    (28, 4),
    (24, 3),
    (20, 4),
    (48, 3),
    (32, 1),
    (4, 4),
)
"""(query heads, KV heads); ratios 1 to 32."""
TUNED_DIMS = (64, 80, 96, 128, 256)
OTHER_DIMS = (8, 16, 24, 32, 40, 48, 56, 72, 88, 104, 112, 120, 136, 160, 168, 192, 200, 248)
BLOCK_SIZES = (8, 16, 32, 64, 128)
EDGES = (1, 2, 8, 16, 31, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Lengths around which (one below, itself, one above) block, tile and split boundaries fall."""
WINDOWS = (1, 7, 16, 17, 64, 129, 512, 1000, 4096)
SOFT_CAPS = (5.0, 30.0, 50.0)
MAX_SCORES = 60_000_000
"""Query heads x queries x keys of one sequence: bounds the reference's memory and time."""

UNUSED = 100.0
"""In every slot that no sequence owns: finite, as the cache promises, and far from the data."""
LOUD_SCORE, LOUD_DIAGONAL = 8.0, 6.0
NO_BLOCK = 1 << 30
"""A block id outside any pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One call of one kernel; lists are per sequence, `context_lens` count the queries at their end.

    `kind`: 'decode' and 'prefill' go to the tuned kernel where there is one, 'simple' to the simple one; 'write' writes
    sum(query_lens) tokens, 'copy' and 'swap' move len(context_lens) blocks. A context of 0 is a padding row.
    """

    kind: str
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    window: int | None = None
    soft_cap: float | None = None
    strided_q: bool = False
    strided_blocks: bool = False
    shared_prefix: bool = False
    pool_blocks: int = 0
    """Blocks of the pool at least; the sequences then lie at its end. 0: as many as are needed."""
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, K and V."""
        return DTYPES[self.dtype]

    @property
    def params(self) -> LayerAttention:
        """Scale, window and soft cap."""
        return LayerAttention(self.head_dim**-0.5, self.window, self.soft_cap)


def draw_cases(count: int, seed: int) -> list[KernelCase]:
    """`count` cases; the first of them are the same whatever `count` is."""
    rng = Random(seed)
    return [_draw(rng, seed * 1_000_003 + number) for number in range(count)]


def _draw(rng: Random, seed: int) -> KernelCase:
    kind = rng.choices(("decode", "prefill", "simple", "write", "copy", "swap"), (40, 32, 16, 6, 4, 2))[0]
    heads, kv_heads = rng.choice(HEADS)
    dtypes = ("float32", "float16", "bfloat16") if kind in ("simple", "write", "copy") else ("float16", "bfloat16")
    tuned = kind in ("decode", "prefill") and rng.random() < 0.85
    head_dim = rng.choice(TUNED_DIMS if tuned else TUNED_DIMS + OTHER_DIMS)
    block_size = rng.choice(BLOCK_SIZES)
    decode = kind == "decode" or (kind == "simple" and rng.random() < 0.5)
    query_lens, context_lens = _draw_lengths(rng, decode, heads, block_size)
    return KernelCase(
        kind=kind,
        dtype=rng.choice(dtypes),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        query_lens=query_lens,
        context_lens=context_lens,
        window=rng.choice(WINDOWS) if rng.random() < 0.3 else None,
        soft_cap=rng.choice(SOFT_CAPS) if rng.random() < 0.2 else None,
        strided_q=rng.random() < 0.5,
        strided_blocks=rng.random() < 0.25,
        shared_prefix=rng.random() < 0.25,
        seed=seed,
    )


def _draw_lengths(rng: Random, decode: bool, heads: int, block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    def length(limit: int) -> int:
        if rng.random() < 0.3:
            return rng.randint(1, limit)
        edge = rng.choice([n for n in (*EDGES, block_size, 2 * block_size, 5 * block_size) if n <= limit])
        return min(limit, max(1, edge + rng.choice((-1, 0, 0, 1))))

    if decode:
        batch = rng.choice((1, 1, 2, 3, 5, 8, 17, 33))
        contexts = [length(6000 if batch < 8 else 1500) for _ in range(batch)]
        if batch > 1 and rng.random() < 0.25:
            contexts[rng.randrange(batch)] = 0
        return (1,) * batch, tuple(contexts)
    batch = rng.choice((1, 1, 2, 3, 6))
    queries = [length(1200 if batch < 3 else 300) for _ in range(batch)]
    contexts = []
    for query in queries:
        cached = 0 if rng.random() < 0.4 else length(4000)
        contexts.append(query + min(cached, max(0, MAX_SCORES // (heads * query) - query)))
    return tuple(queries), tuple(contexts)


def long_cases(seed: int) -> list[KernelCase]:
    """One sequence of 131,072 tokens, decoded and prefilled; and pools over 2^31 elements, used at their end."""
    common = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "block_size": 16, "dtype": "bfloat16", "seed": seed}
    long_decode = KernelCase(kind="decode", query_lens=(1, 1), context_lens=(131_072, 17), **common)  # type: ignore[arg-type]
    long_prefill = replace(long_decode, kind="prefill", query_lens=(33,), context_lens=(131_072,))
    end = replace(long_decode, pool_blocks=140_000, query_lens=(1, 1, 1), context_lens=(1500, 16, 1))
    chunks = replace(end, kind="prefill", query_lens=(100, 16), context_lens=(700, 16))
    return [
        long_decode,
        replace(long_decode, kind="simple"),
        long_prefill,
        end,
        chunks,
        replace(end, kind="simple"),
        replace(chunks, kind="simple"),
        replace(end, kind="write"),
        replace(end, kind="copy"),
    ]


def sanitizer_cases(seed: int) -> list[KernelCase]:
    """A few small cases of every kind and tuned head dim, for the memory and race checkers, which are slow."""
    rng = Random(seed)
    cases = []
    for number, head_dim in enumerate((*TUNED_DIMS, 72)):
        for kind in ("decode", "prefill", "simple"):
            heads, kv_heads = rng.choice(((9, 3), (14, 2), (8, 1), (4, 4)))
            decode = kind == "decode" or (kind == "simple" and number % 2 == 0)
            size = BLOCK_SIZES[number % len(BLOCK_SIZES)]
            cases.append(
                KernelCase(
                    kind=kind,
                    dtype=rng.choice(("float16", "bfloat16")),
                    num_heads=heads,
                    num_kv_heads=kv_heads,
                    head_dim=head_dim,
                    block_size=size,
                    query_lens=(1, 1, 1, 1) if decode else (37, 1),
                    context_lens=(1, size + 1, 0, 700) if decode else (37, 211),
                    window=rng.choice((None, 50)),
                    soft_cap=rng.choice((None, 30.0)),
                    strided_q=True,
                    seed=seed + number,
                )
            )
    return cases + [replace(cases[0], kind=kind) for kind in ("write", "copy", "swap")]


@dataclass(slots=True)
class KernelInputs:
    """Tensors of one call, in the layout of the kernels' interface, and the same lengths on the host."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    tables: list[list[int]]
    query_lens: list[int]
    context_lens: list[int]
    params: LayerAttention

    def only(self, index: int) -> KernelInputs:
        """The same inputs with sequence `index` alone."""
        start, count = sum(self.query_lens[:index]), self.query_lens[index]
        return KernelInputs(
            self.q[start : start + count],
            self.k_cache,
            self.v_cache,
            self.block_tables[index : index + 1],
            torch.tensor([0, count], dtype=torch.int32, device=self.q.device),
            self.seq_lens[index : index + 1],
            self.tables[index : index + 1],
            [count],
            self.context_lens[index : index + 1],
            self.params,
        )

    def reference(self) -> Tensor:
        """The right result in float32 [T, num_heads, head_dim]; padding rows are zero."""
        real = [i for i, length in enumerate(self.context_lens) if length]
        starts = [sum(self.query_lens[:i]) for i in range(len(self.query_lens))]
        rows = [row for i in real for row in range(starts[i], starts[i] + self.query_lens[i])]
        out = torch.zeros(self.q.shape, dtype=torch.float32, device=self.q.device)
        if rows:
            index = torch.tensor(rows, device=self.q.device)
            out[index] = paged_attention_reference(
                self.q[index].float(),
                self.k_cache,
                self.v_cache,
                [self.tables[i] for i in real],
                [self.query_lens[i] for i in real],
                [self.context_lens[i] for i in real],
                self.params,
            )
        return out


def new_pool(case: KernelCase, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """K and V [blocks, num_kv_heads, block_size, head_dim] with no sequence in them yet."""
    tile = (case.num_kv_heads, case.block_size, case.head_dim)
    if case.pool_blocks:  # only what is used is filled: the rest would take seconds
        return tuple(torch.zeros(blocks, *tile, dtype=case.torch_dtype, device=device) for _ in range(2))  # type: ignore[return-value]
    if case.strided_blocks:
        both = torch.full((blocks, 2, *tile), UNUSED, dtype=case.torch_dtype, device=device)
        return both[:, 0], both[:, 1]
    both = torch.full((2, blocks, *tile), UNUSED, dtype=case.torch_dtype, device=device)
    return both[0], both[1]


def build(case: KernelCase, device: torch.device, *, no_block: bool = False) -> KernelInputs:
    """Inputs of an attention case. `no_block`: unused table entries are ids outside the pool."""
    generator = torch.Generator(device).manual_seed(case.seed)
    counts = [-(-length // case.block_size) for length in case.context_lens]
    blocks = max(sum(counts) + 3, case.pool_blocks)
    k_cache, v_cache = new_pool(case, blocks, device)
    used = sum(counts)
    free = list(range(blocks - used, blocks)) if case.pool_blocks else list(range(blocks))
    Random(case.seed).shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    unused = NO_BLOCK if no_block else (free.pop() if free else 0)
    q = _queries(case, device, generator)
    start = 0
    for table, query_len, context_len in zip(tables, case.query_lens, case.context_lens, strict=True):
        if context_len:
            keys = _keys(case, q[start : start + query_len], context_len, generator)
            values = torch.empty_like(keys).normal_(generator=generator)
            _store(k_cache, table, keys)
            _store(v_cache, table, values)
        start += query_len
    if case.shared_prefix:
        _share_first_blocks(tables, case)
    width = max(1, *counts) + 2
    block_tables = torch.full((len(tables), width), unused, dtype=torch.int32)
    for row, table in enumerate(tables):
        block_tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
    starts = torch.tensor([0, *case.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return KernelInputs(
        q,
        k_cache,
        v_cache,
        block_tables.to(device),
        starts.to(device),
        torch.tensor(case.context_lens, dtype=torch.int32, device=device),
        tables,
        list(case.query_lens),
        list(case.context_lens),
        case.params,
    )


def _queries(case: KernelCase, device: torch.device, generator: torch.Generator) -> Tensor:
    """q [T, num_heads, head_dim], as a slice of a packed qkv product if the case says so."""
    tokens, heads = sum(case.query_lens), case.num_heads
    width = heads + 2 * case.num_kv_heads if case.strided_q else heads
    packed = torch.empty(tokens, width, case.head_dim, dtype=case.torch_dtype, device=device)
    return packed.normal_(generator=generator)[:, :heads]


def _keys(case: KernelCase, q: Tensor, context_len: int, generator: torch.Generator) -> Tensor:
    """Keys [context_len, num_kv_heads, head_dim] of one sequence with queries q [n, num_heads, head_dim] at its end."""
    group = case.num_heads // case.num_kv_heads
    shape = (context_len, case.num_kv_heads, case.head_dim)
    keys = torch.empty(shape, dtype=case.torch_dtype, device=q.device).normal_(generator=generator)
    along = q.float().reshape(len(q), case.num_kv_heads, group, case.head_dim).sum(2)
    along = along / along.norm(dim=-1, keepdim=True).clamp_min(1e-6) * group**0.5
    first = context_len - len(q)
    even = torch.arange(0, len(q), 2, device=q.device)
    keys[first + even] = (along[even] * LOUD_DIAGONAL).to(keys.dtype)
    odd = torch.arange(1, len(q), 2, device=q.device)
    keys[first + odd] = (along[odd - 1] * LOUD_DIAGONAL).to(keys.dtype)
    low = max(0, context_len - (case.window or context_len))
    somewhere = int(torch.randint(context_len, (1,), generator=generator, device=q.device))
    for at in {0, low, max(0, low - 1), min(somewhere, first), context_len - 1}:
        keys[at] = (along[-1] * LOUD_SCORE).to(keys.dtype)
    return keys


def _store(cache: Tensor, table: Sequence[int], tokens: Tensor) -> None:
    """Put tokens [n, num_kv_heads, head_dim] into the blocks of `table`; the rest of the last block is unused."""
    heads, size, dim = cache.shape[1:]
    padded = torch.full((len(table) * size, heads, dim), UNUSED, dtype=cache.dtype, device=cache.device)
    padded[: len(tokens)] = tokens
    cache[torch.tensor(table, device=cache.device)] = padded.view(len(table), size, heads, dim).transpose(1, 2)


def _share_first_blocks(tables: list[list[int]], case: KernelCase) -> None:
    """Let the other sequences begin with the first one's full blocks, as cached prefixes do."""
    cached = [(c - q) // case.block_size for q, c in zip(case.query_lens, case.context_lens, strict=True)]
    for row in range(1, len(tables)):
        count = max(0, min(cached[0], cached[row], len(tables[row]) // 2))
        tables[row][:count] = tables[0][:count]
