"""Products of a decode batch on a Hopper GPU: some ten to some hundred rows (``batch_linear_sm90.cu``).

In between, neither of the others is good: a matrix-vector kernel reads a weight once per eight rows, and a library's
product is three times as long as its bytes take where a weight is a few megabytes, starts only when the kernel in front
has ended, and leaves the sum over its parts, the activation and the addition to kernels of their own. Up to
:data:`MAX_BATCH_ROWS` rows all products of a layer are ours. Above, the library's tiles of two blocks that share their
operands win where a weight is large, but for products into the residual stream, whose addition is free here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_build import KernelSpec, get_kernel
from minillm.attention.cuda_checks import FLOAT_DTYPES, check_tensor
from minillm.attention.cuda_launch import PreparedLaunch, tensor_map
from minillm.models.cuda_op_launches import (
    Key,
    Target,
    ceil_div,
    check_rows,
    fixed_layout,
    launches,
    misaligned,
    multiprocessors,
    prepare,
    shared_limit,
)
from minillm.models.deferred_norm import SQUARES_COLUMNS, DeferredNorm

MIN_BATCH_ROWS = 9
MAX_BATCH_ROWS = 128
"""Rows of x up to which every product is taken."""
MAX_ROWS = 256
"""Rows of x up to which products of small weights are taken, and those into the residual stream."""
_SMALL_WEIGHT = 10_000_000
_MOST_RESIDUAL_OUTPUTS = 4096
"""Elements of a small weight; outputs of a product into the residual stream."""

_STEP = 64
_GROUP_ROWS = 64
_TOKENS = (16, 32, 48, 64, 80, 96, 112, 128)
_WIDE_TOKENS = (160, 192, 224, 256)
"""Tokens of a tile; the wide ones of a plain weight, in one warpgroup."""
_GROUPS = {False: (1, 2), True: (1, 2, 4)}
"""Warpgroups of a thread block, for plain and for gated weights."""
_LEAST_SHARE = 0.45
"""Of the multiprocessors: so many blocks there are at least, if sharing k among up to four gives them."""
_MOST_SPLITS = 4
"""A cluster of eight blocks rarely fits beside others in a part of the GPU (GPC)."""
_LONG_COLUMNS = 2048
"""Columns of k beyond which a tile is divided further while there are multiprocessors for it."""


@dataclass(frozen=True, slots=True)
class BatchLinearConfig:
    """An instance of ``batch_linear_sm90.cu`` and its launch; the terms are those of its header comment."""

    tokens: int
    groups: int
    gated: bool
    splits: int

    @property
    def tile_rows(self) -> int:
        """Weight rows of a tile."""
        return self.groups * _GROUP_ROWS

    def stages(self, k: int, limit: int) -> int:
        """Stages of the ring: a block's whole share of k if shared memory holds it."""
        fitting = (limit - 1024 - 4 * self.tokens) // (self._stage_bytes + 16)
        return min(ceil_div(ceil_div(k, _STEP), self.splits), fitting)

    def shared_bytes(self, k: int, limit: int) -> int:
        """Dynamic shared memory of a thread block; beside it there are four static bytes a token."""
        stages, sums = self.stages(k, limit), self.tokens * (self.tile_rows + 4) * 4
        return 1024 + max(stages * self._stage_bytes, sums) + 16 * stages

    def spec(self, type_name: str) -> KernelSpec:
        """The kernel for a C++ type."""
        gated = "true" if self.gated else "false"
        return KernelSpec(
            "batch_linear_sm90.cu", f"batch_linear_sm90<{type_name}, {self.tokens}, {self.groups}, {gated}>"
        )

    @property
    def _stage_bytes(self) -> int:
        return (self.tile_rows + self.tokens) * _STEP * 2


def specs(arch: str) -> list[KernelSpec]:
    """Every kernel that may be launched on `arch`."""
    if arch != "sm_90a":
        return []
    types = [FLOAT_DTYPES[dtype] for dtype in (torch.float16, torch.bfloat16)]
    return [config.spec(name) for name in types for config in _all_instances()]


def _all_instances() -> Iterator[BatchLinearConfig]:
    for gated, groups in _GROUPS.items():
        for count in groups:
            for tokens in _TOKENS if gated or count > 1 else _TOKENS + _WIDE_TOKENS:
                yield BatchLinearConfig(tokens, count, gated, 1)


def choose_batch_config(rows: int, n: int, k: int, *, gated: bool, multiprocessors: int) -> BatchLinearConfig:
    """The instance for x [rows, k] and n outputs.

    The order in which a row's sums are taken depends on `splits` alone, hence up to :data:`MAX_BATCH_ROWS` rows on the
    weight alone.
    """
    weight_rows = n * (2 if gated else 1)
    tiles = ceil_div(weight_rows, _GROUP_ROWS)
    # Reading a small weight a second time, from the cache, costs less than idle multiprocessors.
    token_tiles = 2 if rows > MAX_BATCH_ROWS and weight_rows * k <= _SMALL_WEIGHT else 1
    tokens = next(size for size in _TOKENS + _WIDE_TOKENS if size >= ceil_div(rows, token_tiles))
    groups = _GROUPS[gated] if tokens <= _TOKENS[-1] else (1,)
    fitting = (count for count in groups if ceil_div(tiles, count) * token_tiles <= multiprocessors)
    group = next(fitting, groups[-1])
    blocks, splits, steps = ceil_div(tiles, group) * token_tiles, 1, ceil_div(k, _STEP)
    while splits < min(_MOST_SPLITS, steps // 2) and (
        blocks * splits < _LEAST_SHARE * multiprocessors
        or (2 * blocks * splits <= multiprocessors and k >= 2 * splits * _LONG_COLUMNS)
    ):
        splits *= 2
    return BatchLinearConfig(tokens, group, gated, splits)


@cache
def _config_for(rows: int, n: int, k: int, gated: bool, device: torch.device) -> BatchLinearConfig:
    return choose_batch_config(rows, n, k, gated=gated, multiprocessors=multiprocessors(device))


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def supports_batch_linear(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    gated: bool = False,
    to_residual: bool = False,
) -> bool:
    """Whether `batch_linear` is for x [rows, k] with `n` outputs (of a gated product: n pairs of weight rows)."""
    if dtype not in (torch.float16, torch.bfloat16) or n % 8 or k % 8 or min(n, k) < 1 or not _is_hopper(device):
        return False
    return MIN_BATCH_ROWS <= rows <= _most_rows(n, k, gated, to_residual)


def _most_rows(n: int, k: int, gated: bool, to_residual: bool) -> int:
    small = n * k * (2 if gated else 1) <= _SMALL_WEIGHT
    return MAX_ROWS if small or (to_residual and n <= _MOST_RESIDUAL_OUTPUTS) else MAX_BATCH_ROWS


def batch_linear(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    deferred: DeferredNorm | None = None,
    next_norm: Tensor | None = None,
    next_deferred: DeferredNorm | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, with what follows it in a decoder; for what :func:`supports_batch_linear` says.

    Args:
        x: [M, K] in the weight's dtype, rows at any stride.
        weight: [N, K], float16 or bfloat16, contiguous, N and K multiples of 8. Gated: [2 * N, K], gate rows first.
        out: [M, N], in the weight's dtype or float32, rows at any stride; None to allocate it, in the weight's dtype.
        bias: [N] (gated [2 * N]) in the weight's dtype.
        residual: float32 [M, N], rows at any stride: the product is added to it in place, unrounded; no `out` then.
        gated: the result is ``silu(gate) * up``.
        deferred: x is its `x`; the norm is applied to the product, before the bias.
        next_norm, next_deferred: with a residual: the norm of it, with weight float32 [N], is deferred to there.

    Returns `out` or `residual`. Sums are float32. Up to :data:`MAX_BATCH_ROWS` rows a row's result depends on that row
    alone, not on M; all results are the same bit for bit in every run.
    """
    if residual is not None:
        if out is not None:
            raise ValueError("out and residual exclude each other")
        target = residual
    elif out is not None:
        target = out
    else:
        n = weight.shape[0] // 2 if gated else weight.shape[0]
        target = torch.empty(len(x), n, dtype=weight.dtype, device=weight.device)
    key = (
        "batch",
        residual is None,
        gated,
        x.data_ptr(),
        *(x.shape, x.stride(), x.dtype, x.device),
        weight.data_ptr(),
        fixed_layout(weight),
        *(target.shape, target.stride(), target.dtype, target.device),
        fixed_layout(bias),
        *deferred_key(deferred),
        *deferred_key(next_deferred),
        next_norm is None,
    )
    launch = launches.prepared.get(key)
    if launch is None:
        _check_next_norm(target, weight.dtype, residual is not None, next_norm, next_deferred)
        launch = _prepare_launch(key, x, weight, target, bias, residual is not None, gated, deferred, next_deferred)
    to, offset = target.data_ptr(), 0 if bias is None else bias.data_ptr()
    squares = 0 if deferred is None else deferred.squares.data_ptr()
    next_x = by = next_squares = 0
    if next_deferred is not None and next_norm is not None:
        next_x, by = next_deferred.x.data_ptr(), next_norm.data_ptr()
        next_squares = next_deferred.squares.data_ptr()
    if (to | offset | next_x | by) & 15:
        raise misaligned(target=target, bias=bias, next_norm=next_norm)
    launch(to, offset, squares, next_x, by, next_squares)
    return target


def deferred_key(deferred: DeferredNorm | None) -> tuple[object, ...]:
    """Of a launch's key: what :func:`check_deferred` looks at, and what the kernels take beside addresses."""
    if deferred is None:
        return (None,)
    squares = deferred.squares
    return squares.shape, squares.stride(), squares.dtype, squares.device, deferred.x.shape, deferred.eps


def check_deferred(deferred: DeferredNorm, rows: int, hidden: int, dtype: torch.dtype) -> None:
    """ValueError for shapes and dtypes that are not those of rows [rows, hidden]."""
    check_tensor("deferred.x", deferred.x, (rows, hidden), dtype, deferred.x.device)
    sums = ceil_div(hidden, SQUARES_COLUMNS)
    check_tensor("squares", deferred.squares, (sums, rows), torch.float32, deferred.x.device, contiguous_from=1)


def _check_next_norm(
    target: Tensor, dtype: torch.dtype, to_residual: bool, norm: Tensor | None, deferred: DeferredNorm | None
) -> None:
    if norm is None and deferred is None:
        return
    if norm is None or deferred is None or not to_residual:
        raise ValueError("a deferred norm behind a product takes next_norm, next_deferred and residual")
    rows, n = target.shape
    check_tensor("next_norm", norm, (n,), torch.float32, target.device)
    check_deferred(deferred, rows, n, dtype)


def _prepare_launch(
    key: Key,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    to_residual: bool,
    gated: bool,
    deferred: DeferredNorm | None,
    next_deferred: DeferredNorm | None,
) -> PreparedLaunch:
    (rows, k), device, dtype = x.shape, weight.device, weight.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"weight has dtype {dtype}, it must be torch.float16 or torch.bfloat16")
    check_tensor("weight", weight, (None, k), dtype, device)
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows, a gated product needs an even number")
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if n % 8:
        raise ValueError(f"weight has {weight.shape[0]} rows, {n} outputs must be a multiple of 8")
    limit = _most_rows(n, k, gated, to_residual)
    if not 1 <= rows <= limit:
        raise ValueError(f"x has {rows} rows, it must have 1 to {limit}")
    check_tensor("x", x, (rows, k), dtype, device, contiguous_from=1)
    check_rows("x", k, dtype, x.stride(0) if rows > 1 else 0)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), dtype, device)
    kind = Target.RESIDUAL if to_residual else Target.OUT if target.dtype == dtype else Target.FLOAT
    wanted = dtype if kind == Target.OUT else torch.float32
    check_tensor("residual" if to_residual else "out", target, (rows, n), wanted, device, contiguous_from=1)
    check_rows("residual" if to_residual else "out", n, wanted, target.stride(0) if rows > 1 else 0)
    if deferred is not None:
        check_deferred(deferred, rows, k, dtype)
    if (x.data_ptr() | weight.data_ptr()) & 15:
        raise misaligned(x=x, weight=weight)
    norm = deferred or next_deferred
    squares_stride = 0 if norm is None else norm.squares.stride(0)
    if next_deferred is not None and next_deferred.squares.stride(0) != squares_stride:
        raise ValueError("squares of both deferred norms must have rows at one stride")
    config, shared = _config_for(rows, n, k, gated, device), shared_limit(device)
    kernel = get_kernel(config.spec(FLOAT_DTYPES[dtype]), device, overlapping=True)
    stages = config.stages(k, shared)
    # A copy of more rows than there are fills the others with zeros.
    x_map = tensor_map(x, (rows, k), (x.stride(0) if rows > 1 else k, 1), (config.tokens, _STEP), swizzle_bytes=128)
    scalars = (
        _weight_map(weight, gated),
        x_map,
        np.int64(target.stride(0)),
        *map(np.int32, (rows, n, k, config.splits, stages, kind.value, squares_stride)),
        np.float32(0.0 if deferred is None else deferred.eps),
    )
    tiles = ceil_div(weight.shape[0], config.tile_rows)
    grid = tiles * config.splits, ceil_div(rows, config.tokens)
    cluster = (config.splits, 1, 1) if config.splits > 1 else None
    threads = 128 * config.groups + 32
    return prepare(key, kernel, grid, threads, 6, scalars, config.shared_bytes(k, shared), cluster=cluster)


def _weight_map(weight: Tensor, gated: bool) -> bytes:
    """Tensor map over [N, K] in boxes of 64 rows; gated: of 8 rows of gate and 8 of up by turns."""
    rows, k = weight.shape
    if not gated:
        return tensor_map(weight, (rows, k), (k, 1), (_GROUP_ROWS, _STEP), swizzle_bytes=128)
    shape, strides = (rows // 16, 2, 8, k), (8 * k, rows // 2 * k, k, 1)
    return tensor_map(weight, shape, strides, (_GROUP_ROWS // 16, 2, 8, _STEP), swizzle_bytes=128)
