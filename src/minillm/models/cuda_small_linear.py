"""Products of a few rows on a GPU: matrix-vector kernels at the speed of memory (``small_linear.cu``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_build import KernelSpec, get_kernel
from minillm.attention.cuda_checks import FLOAT_DTYPES, check_tensor
from minillm.attention.cuda_launch import PreparedLaunch
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

MAX_SMALL_ROWS = 8
"""Rows of x that `small_linear` takes."""

_WARPS = 8
_RINGS = (96 << 10, 64 << 10)
"""Bytes of weights under way in a thread block, the first that fits beside x."""

_FEW_COLUMNS, _MOST_SHORT_PASSES = 768, 4
"""A head of 49,152 rows of 576 columns, 12 passes, took 22 us where torch's product takes 17."""
_MOST_COLUMNS_OF_SIX = 1024
"""Columns of a pass of six tiles that the ring holds."""


@dataclass(frozen=True, slots=True)
class SmallLinearConfig:
    """One instance of ``small_linear.cu``; the terms are those of its header comment."""

    tiles: int
    gated: bool
    shared_x: bool
    ring_bytes: int = _RINGS[0]
    row_tiles: int = 1

    @property
    def chunk(self) -> int:
        """Columns of a stage."""
        return 64 if self.tiles >= 4 else 128

    @property
    def outputs(self) -> int:
        """Outputs of a pass."""
        return 8 * self.tiles // (2 if self.gated else 1)

    @property
    def x_place(self) -> str:
        """Where a block reads x."""
        return "shared" if self.shared_x else "global"

    @property
    def stages(self) -> int:
        """Stages of a warp's ring."""
        return self.ring_bytes // (_WARPS * 8 * self.tiles * self.chunk * 2)

    def shared_bytes(self, rows: int, k: int) -> int:
        """Dynamic shared memory of a thread block."""
        x = rows * (-(-k // self.chunk) * self.chunk + 32) * 2 if self.shared_x else 0
        return _WARPS * self.stages * 8 * self.tiles * self.chunk * 2 + x + 2 * _WARPS * self.tiles * rows * 8 * 4

    def spec(self, type_name: str) -> KernelSpec:
        """The kernel for a C++ type."""
        flags = ", ".join("true" if flag else "false" for flag in (self.gated, self.shared_x))
        symbol = f"small_linear<{type_name}, {self.tiles}, {flags}, {self.row_tiles}, {self.stages}>"
        return KernelSpec("small_linear.cu", symbol)


_SMALL_SHARED_ARCHS = ("sm_86", "sm_87", "sm_89", "sm_120", "sm_121")
"""Where a thread block has 99 KiB of shared memory at most."""


def specs(arch: str) -> list[KernelSpec]:
    """Every kernel that may be launched on `arch`."""
    types = [FLOAT_DTYPES[dtype] for dtype in (torch.float16, torch.bfloat16)]
    return [config.spec(name) for name in types for config in _all_configs(arch)]


def _all_configs(arch: str) -> Iterator[SmallLinearConfig]:
    """What :func:`choose_config` may return on `arch`."""
    for tiles, gated, shared_x, ring in product((1, 2, 4, 6), (False, True), (True, False), _RINGS):
        if gated and (tiles == 1 or not shared_x):
            continue
        if not shared_x and ring != _RINGS[0] and arch not in _SMALL_SHARED_ARCHS:
            continue
        yield SmallLinearConfig(tiles, gated, shared_x, ring)


def choose_config(
    rows: int, n: int, k: int, *, gated: bool, norm: bool, multiprocessors: int, shared_limit: int
) -> SmallLinearConfig | None:
    """The instance for x [rows, k] and n outputs; None if x does not fit in shared memory where it must.

    The tiles of a pass are those that leave the most loaded multiprocessor with the fewest weight rows, of such the
    most (6 only for one pass that the ring holds as a whole: it has few stages). x goes through shared memory if it is
    normalised or used in several passes, or if the block of another kernel still fits beside it.
    """
    best, best_load, several = 0, 0, False
    for tiles in (2, 4, 6) if gated else (1, 2, 4, 6):
        outputs = 8 * tiles // (2 if gated else 1)
        passes = ceil_div(n, outputs)
        load = ceil_div(passes, multiprocessors) * outputs
        if tiles == 6 and (passes > multiprocessors or k > _MOST_COLUMNS_OF_SIX):
            continue
        if not best or load <= best_load:
            best, best_load, several = tiles, load, passes > multiprocessors
    for shared_x, ring in product((True, False), _RINGS):
        config = SmallLinearConfig(best, gated, shared_x, ring)
        if config.shared_bytes(rows, k) > shared_limit or (not shared_x and (norm or gated)):
            continue
        beside_another = 2 * (config.shared_bytes(rows, k) + 1024) <= shared_limit and ring == _RINGS[0]
        if norm or gated or several or not shared_x or beside_another:
            return config
    return None


def supports_small_linear(
    rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, *, gated: bool = False, norm: bool = False
) -> bool:
    """Whether `small_linear` is for x [rows, k] with `n` outputs (of a gated product: n pairs of weight rows).

    It takes many passes over few columns too, but the sum at the end of a pass takes longer than its bytes then.
    """
    if dtype not in (torch.float16, torch.bfloat16) or not 1 <= rows <= MAX_SMALL_ROWS or k % 8 or n < 1 or k < 8:
        return False
    config = config_for(rows, n, k, gated, norm, device)
    if config is None:
        return False
    return k >= _FEW_COLUMNS or ceil_div(n, config.outputs) <= _MOST_SHORT_PASSES * multiprocessors(device)


@cache
def config_for(rows: int, n: int, k: int, gated: bool, norm: bool, device: torch.device) -> SmallLinearConfig | None:
    """:func:`choose_config` for a device."""
    limits = {"multiprocessors": multiprocessors(device), "shared_limit": shared_limit(device)}
    return choose_config(rows, n, k, gated=gated, norm=norm, **limits)


def small_linear(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    config: SmallLinearConfig | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` for up to :data:`MAX_SMALL_ROWS` rows, with what surrounds it in a decoder.

    Args:
        x: [M, K] in the weight's dtype, rows at any stride; with `norm_weight` the float32 residual stream.
        weight: [N, K], float16 or bfloat16, contiguous, K a multiple of 8. Gated: [2 * N, K], gate rows first.
        out: [M, N], in the weight's dtype or float32, rows at any stride; None to allocate it, in the weight's dtype.
        bias: [N] (gated [2 * N]) in the weight's dtype.
        norm_weight: float32 [K]; x is replaced by its RMS norm with `eps`, rounded to the weight's dtype.
        residual: float32 [M, N], rows at any stride: the product is added to it in place, unrounded; no `out` then.
        gated: the result is ``silu(gate) * up``.
        config: for measurements; None takes :func:`choose_config`'s.

    Returns `out` or `residual`. Sums are float32. A row's result depends on that row alone, not on M, and is the same
    bit for bit in every run.
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
        residual is None,
        gated,
        eps,
        config,
        *(x.shape, x.stride(), x.dtype, x.device),
        fixed_layout(weight),
        *(target.shape, target.stride(), target.dtype, target.device),
        fixed_layout(bias),
        fixed_layout(norm_weight),
    )
    launch = launches.prepared.get(key)
    if launch is None:
        launch = _small_linear_launch(
            key, x, weight, target, bias, norm_weight, eps, residual is not None, gated, config
        )
    source, matrix, norm = x.data_ptr(), weight.data_ptr(), 0 if norm_weight is None else norm_weight.data_ptr()
    if (source | matrix | norm) & 15:
        raise misaligned(x=x, weight=weight, norm_weight=norm_weight)
    launch(matrix, source, norm, 0 if bias is None else bias.data_ptr(), target.data_ptr())
    return target


def _small_linear_launch(
    key: Key,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    to_residual: bool,
    gated: bool,
    config: SmallLinearConfig | None,
) -> PreparedLaunch:
    (rows, k), device, dtype = x.shape, weight.device, weight.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"weight has dtype {dtype}, it must be torch.float16 or torch.bfloat16")
    check_tensor("weight", weight, (None, k), dtype, device)
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows, a gated product needs an even number")
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    limit = MAX_SMALL_ROWS if config is None else 8 * config.row_tiles
    if not 1 <= rows <= limit:
        raise ValueError(f"x has {rows} rows, it must have 1 to {limit}")
    x_dtype = dtype if norm_weight is None else torch.float32
    check_tensor("x", x, (rows, k), x_dtype, device, contiguous_from=1)
    check_rows("x", k, dtype)
    check_rows("x", k, x_dtype, x.stride(0) if rows > 1 else 0)
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, (k,), torch.float32, device)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), dtype, device)
    name = "residual" if to_residual else "out"
    kind = Target.RESIDUAL if to_residual else Target.OUT if target.dtype == dtype else Target.FLOAT
    check_tensor(name, target, (rows, n), dtype if kind == Target.OUT else torch.float32, device, contiguous_from=1)
    config = config or config_for(rows, n, k, gated, norm_weight is not None, device)
    if config is None:
        raise ValueError(f"x of {rows} rows of {k} elements does not fit in shared memory; normalise it before")
    scalars = (
        *map(np.int64, (x.stride(0), target.stride(0))),
        *map(np.int32, (rows, n, k, kind.value)),
        np.float32(eps),
    )
    kernel = get_kernel(config.spec(FLOAT_DTYPES[dtype]), device, overlapping=True)
    grid = min(ceil_div(n, config.outputs), multiprocessors(device))
    return prepare(key, kernel, (grid, 1), 32 * _WARPS, 5, scalars, config.shared_bytes(rows, k))
