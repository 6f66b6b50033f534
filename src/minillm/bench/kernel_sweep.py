"""Runs kernel cases against the float32 reference and reports one line each.

An attention case passes if its result is within the error bound of its dtype
(:data:`minillm.bench.attention_batch.ERROR_BOUNDS`), a second run gives the same bits, and so does each of two of its
sequences alone. Moving cases (write, copy, swap) must be exact, and must leave everything else as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor

from minillm.attention.reference import paged_attention_reference
from minillm.bench.attention_batch import ERROR_BOUNDS, WORST_ROW_FACTOR, error_of
from minillm.bench.attention_paths import device_arch
from minillm.bench.kernel_cases import KernelCase, KernelInputs, build, new_pool
from minillm.memory.paged_kv_cache import KVCacheSpec, PagedKVCache
from minillm.memory.swap_space import SwapSpace

Attend = Callable[[KernelInputs, Tensor], object]
"""Writes the attention of the inputs, or of one sequence of them, to the tensor."""

MOVED_LAYERS = 3


class Kernels(Protocol):
    """What is checked."""

    def attention(self, case: KernelCase, inputs: KernelInputs) -> tuple[str, Attend]:
        """Name of the path that serves the case, and the call, with plans large enough for the whole batch."""
        ...

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Write k, v [T, num_kv_heads, head_dim] to slots int64 [T]; negative ones are skipped."""
        ...

    def copy(self, store: Tensor, pairs: Tensor) -> None:
        """Copy blocks of `store` [layers, 2, blocks, ...] by (source, destination) pairs int32 [P, 2]."""
        ...


class CUDAKernels:
    """The package's own kernels."""

    def attention(self, case: KernelCase, inputs: KernelInputs) -> tuple[str, Attend]:
        """See :class:`Kernels`."""
        from minillm.attention.cuda_simple import paged_attention_simple

        arch = device_arch(inputs.q.device)
        if case.kind == "decode":
            from minillm.attention import cuda_decode

            if cuda_decode.supports(case.torch_dtype, case.head_dim, case.block_size, arch):
                return "tuned", self._decode(case, inputs)
        elif case.kind == "prefill":
            from minillm.attention import cuda_prefill

            if cuda_prefill.supports(case.torch_dtype, case.head_dim, case.block_size, arch):
                return "tuned", self._prefill(case, inputs)

        def simple(x: KernelInputs, out: Tensor) -> None:
            caches = x.k_cache, x.v_cache
            paged_attention_simple(x.q, *caches, x.block_tables, x.query_start, x.seq_lens, x.params, out=out)

        return "simple", simple

    @staticmethod
    def _decode(case: KernelCase, inputs: KernelInputs) -> Attend:
        from minillm.attention.cuda_decode import DecodePlan, paged_decode

        longest = inputs.block_tables.shape[1] * case.block_size
        heads = case.num_heads, case.num_kv_heads, case.head_dim
        plan = DecodePlan(
            inputs.q.device,
            len(case.query_lens),
            longest,
            *heads,
            case.block_size,
            case.torch_dtype,
            sliding_windows=(case.window,),
        )

        def run(x: KernelInputs, out: Tensor) -> None:
            plan.update(x.seq_lens)
            paged_decode(x.q, x.k_cache, x.v_cache, x.block_tables, x.seq_lens, x.params, plan, out=out)

        return run

    @staticmethod
    def _prefill(case: KernelCase, inputs: KernelInputs) -> Attend:
        from minillm.attention.cuda_prefill import PrefillPlan, paged_prefill

        heads = case.num_heads, case.num_kv_heads, case.head_dim
        plan = PrefillPlan(inputs.q.device, len(case.query_lens), *heads, case.block_size, case.torch_dtype)

        def run(x: KernelInputs, out: Tensor) -> None:
            plan.update([sum(x.query_lens[:i]) for i in range(len(x.query_lens) + 1)], x.context_lens)
            caches = x.k_cache, x.v_cache
            paged_prefill(x.q, *caches, x.block_tables, x.query_start, x.seq_lens, x.params, plan, out=out)

        return run

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """See :class:`Kernels`."""
        from minillm.memory.cuda_kv_ops import write_kv

        write_kv(k, v, k_cache, v_cache, slots)

    def copy(self, store: Tensor, pairs: Tensor) -> None:
        """See :class:`Kernels`."""
        from minillm.memory.cuda_kv_ops import copy_blocks

        copy_blocks(store, pairs)


class TorchKernels:
    """The same in plain torch: what the sweep itself is tested with, on any device."""

    def attention(self, case: KernelCase, inputs: KernelInputs) -> tuple[str, Attend]:
        """See :class:`Kernels`."""

        def run(x: KernelInputs, out: Tensor) -> None:
            start = 0
            for table, query_len, context_len in zip(x.tables, x.query_lens, x.context_lens, strict=True):
                rows = slice(start, start + query_len)
                start += query_len
                if not context_len:
                    out[rows] = 0
                    continue
                caches, lens = (x.k_cache, x.v_cache), ([query_len], [context_len])
                out[rows] = paged_attention_reference(x.q[rows], *caches, [table], *lens, x.params)

        return "torch", run

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """See :class:`Kernels`."""
        _write(k, v, k_cache, v_cache, slots)

    def copy(self, store: Tensor, pairs: Tensor) -> None:
        """See :class:`Kernels`."""
        store[:, :, pairs[:, 1].long()] = store[:, :, pairs[:, 0].long()]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How a case went; `failure` is empty if it passed."""

    case: KernelCase
    path: str
    relative: float
    worst_row: float
    bound: float
    seconds: float
    failure: str

    def columns(self, number: int) -> dict[str, Any]:
        """The line of the CSV file."""
        case = self.case
        return {
            "case": number,
            "kind": case.kind,
            "path": self.path,
            "dtype": case.dtype,
            "num_heads": case.num_heads,
            "num_kv_heads": case.num_kv_heads,
            "head_dim": case.head_dim,
            "block_size": case.block_size,
            "query_lens": " ".join(map(str, case.query_lens)),
            "context_lens": " ".join(map(str, case.context_lens)),
            "window": case.window or "",
            "soft_cap": case.soft_cap or "",
            "strided_q": int(case.strided_q),
            "strided_blocks": int(case.strided_blocks),
            "shared_prefix": int(case.shared_prefix),
            "pool_blocks": case.pool_blocks,
            "seed": case.seed,
            "relative_error": f"{self.relative:.3e}",
            "worst_row_error": f"{self.worst_row:.3e}",
            "bound": f"{self.bound:.1e}",
            "seconds": f"{self.seconds:.4f}",
            "status": self.failure or "ok",
        }


def run_case(case: KernelCase, kernels: Kernels, device: torch.device, *, no_block: bool = False) -> CaseResult:
    """Run one case; exceptions become its failure."""
    start = time.perf_counter()
    path, relative, worst_row = "-", 0.0, 0.0
    bound = ERROR_BOUNDS[case.torch_dtype] if case.kind in ("decode", "prefill", "simple") else 0.0
    try:
        if bound:
            path, relative, worst_row, failure = _run_attention(case, kernels, device, bound, no_block)
        else:
            path, failure = case.kind, _MOVERS[case.kind](case, kernels, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return CaseResult(case, path, relative, worst_row, bound, time.perf_counter() - start, failure)


def _run_attention(
    case: KernelCase, kernels: Kernels, device: torch.device, bound: float, no_block: bool
) -> tuple[str, float, float, str]:
    inputs = build(case, device, no_block=no_block)
    path, attend = kernels.attention(case, inputs)
    out, again = (torch.full_like(inputs.q, float("nan"), memory_format=torch.contiguous_format) for _ in range(2))
    attend(inputs, out)
    attend(inputs, again)
    error = error_of(out, inputs.reference())
    failures = []
    if not error.within(bound):
        limits = f"{bound:.1e}, row {bound * WORST_ROW_FACTOR:.1e}"
        failures.append(f"error {error.relative:.2e}, row {error.worst_row:.2e} over {limits}")
    if not _same_bits(out, again):
        failures.append("a second run gives other bits")
    rng = Random(case.seed)
    for index in sorted(rng.sample(range(len(case.query_lens)), min(2, len(case.query_lens)))):
        alone = inputs.only(index)
        solo = torch.full_like(alone.q, float("nan"), memory_format=torch.contiguous_format)
        attend(alone, solo)
        start = sum(case.query_lens[:index])
        if not _same_bits(solo, out[start : start + len(solo)]):
            failures.append(f"sequence {index} alone gives other bits")
    return path, error.relative, error.worst_row, "; ".join(failures)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def _write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    keep = slots >= 0
    block, offset = slots[keep] // k_cache.shape[2], slots[keep] % k_cache.shape[2]
    k_cache[block, :, offset] = k[keep]
    v_cache[block, :, offset] = v[keep]


def _check_write(case: KernelCase, kernels: Kernels, device: torch.device) -> str:
    generator = torch.Generator(device).manual_seed(case.seed)
    tokens = sum(case.query_lens)
    blocks = max(-(-2 * tokens // case.block_size) + 1, case.pool_blocks)
    caches = new_pool(case, blocks, device)
    slots = blocks * case.block_size - 1 - torch.randperm(2 * tokens, generator=generator, device=device)[:tokens]
    slots[torch.rand(tokens, generator=generator, device=device) < 0.2] = -1
    packed = torch.empty(tokens, case.num_heads + 2 * case.num_kv_heads, case.head_dim, device=device)
    packed = packed.normal_(generator=generator).to(case.torch_dtype)
    k, v = packed[:, case.num_heads :].split(case.num_kv_heads, dim=1)
    expected = caches[0].clone(), caches[1].clone()
    _write(k, v, expected[0], expected[1], slots)
    kernels.write(k, v, caches[0], caches[1], slots)
    wrong = [name for name, mine, right in zip("kv", caches, expected, strict=True) if not torch.equal(mine, right)]
    return f"cache of {' and '.join(wrong)} differs" if wrong else ""


def _check_copy(case: KernelCase, kernels: Kernels, device: torch.device) -> str:
    generator = torch.Generator(device).manual_seed(case.seed)
    count = len(case.context_lens)
    blocks = max(3 * count + 1, case.pool_blocks)
    layers = 1 if case.pool_blocks else MOVED_LAYERS
    tile = (case.num_kv_heads, case.block_size, case.head_dim)
    store = torch.zeros(layers, 2, blocks, *tile, dtype=case.torch_dtype, device=device)
    ends = blocks - 1 - torch.randperm(3 * count, generator=generator, device=device)
    store[:, :, ends] = torch.randn(layers, 2, 3 * count, *tile, generator=generator, device=device).to(store.dtype)
    pairs = ends[: 2 * count].view(count, 2).to(torch.int32)
    expected = store.clone()
    TorchKernels().copy(expected, pairs)
    kernels.copy(store, pairs)
    return "" if torch.equal(store, expected) else "the pool differs"


def _check_swap(case: KernelCase, kernels: Kernels, device: torch.device) -> str:
    """Blocks out, overwritten, and in to other blocks, through the class that the runtime uses."""
    count = 4 * len(case.context_lens)
    spec = KVCacheSpec(
        num_layers=MOVED_LAYERS,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        dtype=case.torch_dtype,
    )
    cache = PagedKVCache(spec, 3 * count, device)
    cache.store.normal_(generator=torch.Generator(device).manual_seed(case.seed))
    ids = Random(case.seed).sample(range(3 * count), 2 * count)
    source, target, slots = ids[:count], ids[count:], Random(case.seed).sample(range(count), count)
    expected = cache.store.clone()
    expected[:, :, torch.tensor(target, device=device)] = expected[:, :, torch.tensor(source, device=device)]
    expected[:, :, torch.tensor(source, device=device)] = 7
    space = SwapSpace(cache, count)
    space.swap_out(source, slots)
    cache.store[:, :, torch.tensor(source, device=device)] = 7  # allowed at once: the copy must have been ordered first
    space.swap_in(slots, target)
    return "" if torch.equal(cache.store, expected) else "the pool differs"


_MOVERS: Mapping[str, Callable[[KernelCase, Kernels, torch.device], str]] = {
    "write": _check_write,
    "copy": _check_copy,
    "swap": _check_swap,
}


def summary_cells(rows: Sequence[Mapping[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Per kind, path and dtype of saved lines: cases, failures, and the worst errors of those that passed."""
    groups: dict[tuple[str, str, str], list[Mapping[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["path"], row["dtype"]), []).append(row)
    cells = []
    for key, group in sorted(groups.items()):
        passed = [row for row in group if row["status"] == "ok"]
        relative = max((float(row["relative_error"]) for row in passed), default=0.0)
        worst_row = max((float(row["worst_row_error"]) for row in passed), default=0.0)
        bound = float(group[0]["bound"])
        figures = [f"{relative:.1e}", f"{bound:.1e}", f"{worst_row:.1e}", f"{bound * WORST_ROW_FACTOR:.1e}"]
        cells.append(
            [*key, str(len(group)), str(len(group) - len(passed)), *(figures if bound else ["exact"] + ["-"] * 3)]
        )
    return ["kind", "path", "dtype", "cases", "failed", "worst error", "bound", "worst row", "row bound"], cells
