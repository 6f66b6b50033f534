"""The decoder's operations on a GPU, each in one kernel: launch wrappers.

```
embed ─► residual (float32) ─► norm ─► qkv product ─► qk_norm_rope_write ─► attention ─► output product ─► + residual
                               norm ─► gate-up product ─► silu(gate) * up ─► down product ─► + residual
```
A step of many tokens runs `add_rms_norm`, `qk_norm_rope_write` and `silu_and_mul` between torch's products. A step of
up to :data:`MAX_SMALL_ROWS` tokens runs `small_linear` for its products, with the norm in front of it and the
activation or the addition behind it in the same kernel.

Every wrapper launches on the current stream, waits for nothing, allocates nothing where `out` is given, and may be
captured in a CUDA graph once it has run with that kernel before (loading one is not capturable). Raises ValueError for
shapes, dtypes, strides and devices that don't fit. A layout of arguments is checked the first time it is seen, and its
launch kept. All kernels are launched as dependents (``attention/kernels/dependent_launch.cuh``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_build import KernelSpec, get_kernel
from minillm.attention.cuda_checks import FLOAT_DTYPES, check_paged_cache, check_tensor
from minillm.attention.cuda_launch import Kernel

MAX_SMALL_ROWS = 8
"""Rows of x that `small_linear` takes."""

_MAX_HIDDEN_VECTORS = 4096
_NORM_VECTORS = (1, 2, 4)
"""16-byte vectors of a row that a thread of `add_rms_norm` may hold."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """What a launch needs beside its pointers."""

    kernel: Kernel
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    scalars: tuple[object, ...]

    def __call__(self, *pointers: Tensor | None) -> None:
        self.kernel.launch(
            self.grid, self.threads, (*pointers, *self.scalars), shared_bytes=self.shared_bytes, dependent=True
        )


_Key = tuple[object, ...]
_launches: dict[_Key, _Launch] = {}
_MOST_LAUNCHES = 8192


def _layout(tensor: Tensor | None) -> object:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _remember(key: _Key, launch: _Launch) -> _Launch:
    if len(_launches) >= _MOST_LAUNCHES:  # prompts of every length
        _launches.clear()
    _launches[key] = launch
    return launch


def _check_aligned(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % 16:
            raise ValueError(f"{name} begins at address {tensor.data_ptr():#x}, it must be a multiple of 16")


def _check_rows(name: str, size: int, dtype: torch.dtype, *strides: int) -> None:
    """Rows of `size` elements, `strides` elements apart, must consist of 16-byte vectors."""
    vector = 16 // dtype.itemsize
    for value in (size, *strides):
        if value % vector:
            raise ValueError(f"{name}: rows of {size} elements at strides {strides} must be multiples of {vector}")


def _float_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} has dtype {dtype}, it must be one of {', '.join(map(str, FLOAT_DTYPES))}")
    return FLOAT_DTYPES[dtype]


def specs(arch: str) -> list[KernelSpec]:
    """Every kernel that may be launched on `arch`."""
    types = tuple(FLOAT_DTYPES.values())
    return [
        *(KernelSpec("decoder_ops.cu", f"embed<{t}>") for t in types),
        *(KernelSpec("decoder_ops.cu", f"add_rms_norm<{t}, {n}>") for t in types for n in _NORM_VECTORS),
        *(KernelSpec("decoder_ops.cu", f"silu_and_mul<{t}>") for t in types),
        *(_rope_spec(t, cache_type) for t in types for cache_type in types),
        *(config.spec(t) for t in types[1:] for config in _all_configs(arch)),
    ]


# ---- Row-wise operations ---------------------------------------------------------------------------------------------


def embed(input_ids: Tensor, embedding: Tensor, residual: Tensor) -> Tensor:
    """``residual[t] = float(embedding[input_ids[t]])``; returns `residual`.

    `input_ids` int64 [T], `embedding` [V, H] in any float dtype, `residual` float32 [T, H]. An id outside [0, V) gives
    a row of NaN.
    """
    key = ("embed", _layout(input_ids), _layout(embedding), _layout(residual))
    launch = _launches.get(key)
    if launch is None:
        tokens, (vocab, hidden), device = len(input_ids), embedding.shape, embedding.device
        name = _float_name("embedding", embedding.dtype)
        check_tensor("embedding", embedding, (None, None), embedding.dtype, device)
        check_tensor("input_ids", input_ids, (None,), torch.int64, device)
        check_tensor("residual", residual, (tokens, hidden), torch.float32, device)
        _check_rows("embedding", hidden, embedding.dtype)
        threads = _threads(hidden * embedding.element_size() // 16, 256)
        kernel = get_kernel(KernelSpec("decoder_ops.cu", f"embed<{name}>"), device)
        launch = _remember(key, _Launch(kernel, (tokens, 1), threads, 0, (np.int64(vocab), np.int32(hidden))))
    if launch.grid[0]:
        _check_aligned(embedding=embedding, residual=residual)
        launch(residual, input_ids, embedding)
    return residual


def add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """``residual += x`` in place, then ``out = weight * residual / sqrt(mean(residual^2) + eps)``; returns `out`.

    `x` [T, H] in `out`'s dtype, its rows at any stride, or None to add nothing; `residual` float32 [T, H], `weight`
    float32 [H], `out` [T, H]. Computed in float32 and rounded once.
    """
    key = ("norm", _layout(x), _layout(residual), _layout(weight), _layout(out), eps)
    launch = _launches.get(key)
    if launch is None:
        (tokens, hidden), device, dtype = residual.shape, residual.device, out.dtype
        name = _float_name("out", dtype)
        check_tensor("residual", residual, (None, None), torch.float32, device)
        check_tensor("weight", weight, (hidden,), torch.float32, device)
        check_tensor("out", out, (tokens, hidden), dtype, device)
        if x is not None:
            check_tensor("x", x, (tokens, hidden), dtype, device, contiguous_from=1)
        stride = 0 if x is None else x.stride(0)
        _check_rows("x", hidden, dtype, stride)
        vectors = hidden * dtype.itemsize // 16
        if vectors > _MAX_HIDDEN_VECTORS:
            raise ValueError(f"rows of {hidden} elements are longer than {_MAX_HIDDEN_VECTORS * 16 // dtype.itemsize}")
        held = 1 if vectors <= 512 else 2 if vectors <= 1024 else 4
        kernel = get_kernel(KernelSpec("decoder_ops.cu", f"add_rms_norm<{name}, {held}>"), device)
        scalars = (np.int64(stride), np.int32(hidden), np.float32(eps))
        launch = _remember(key, _Launch(kernel, (tokens, 1), _threads(-(-vectors // held), 1024), 0, scalars))
    if launch.grid[0]:
        _check_aligned(x=x, residual=residual, weight=weight, out=out)
        launch(out, residual, x, weight)
    return out


def silu_and_mul(gate_up: Tensor, out: Tensor) -> Tensor:
    """``silu(gate) * up`` of `gate_up` [T, 2 * I], gate first, rows at any stride -> `out` [T, I]; returns `out`.

    Computed in float32 and rounded once.
    """
    key = ("silu", _layout(gate_up), _layout(out))
    launch = _launches.get(key)
    if launch is None:
        (tokens, inner), device, dtype = out.shape, out.device, out.dtype
        name = _float_name("out", dtype)
        check_tensor("out", out, (None, None), dtype, device)
        check_tensor("gate_up", gate_up, (tokens, 2 * inner), dtype, device, contiguous_from=1)
        stride = gate_up.stride(0)
        _check_rows("gate_up", inner, dtype, stride)
        vectors = inner * dtype.itemsize // 16
        threads = _threads(vectors, 256)
        kernel = get_kernel(KernelSpec("decoder_ops.cu", f"silu_and_mul<{name}>"), device)
        scalars = (np.int64(tokens), np.int64(stride), np.int32(inner))
        launch = _remember(key, _Launch(kernel, (-(-vectors // threads), min(tokens, 65535)), threads, 0, scalars))
    if launch.grid[1]:
        _check_aligned(gate_up=gate_up, out=out)
        launch(out, gate_up)
    return out


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _threads(wanted: int, most: int) -> int:
    return min(most, -(-wanted // 32) * 32)


# ---- From the packed product to attention ----------------------------------------------------------------------------

_ROPE_THREADS = 256


def _rope_spec(name: str, cache_name: str) -> KernelSpec:
    return KernelSpec("qk_norm_rope_write.cu", f"qk_norm_rope_write<{name}, {cache_name}>")


def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    inv_freq: Tensor,
    attention_factor: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_out: Tensor,
) -> Tensor:
    """q and k norm, rotary embedding, k and v into the cache, q to `q_out`; returns `q_out`.

    Args:
        qkv: the packed product [T, (Hq + 2 * Hkv) * d], rows at any stride; d a multiple of 8 up to 256.
        q_weight, k_weight: float32 [d], or both None for a model without these norms.
        eps: of the norms.
        positions: int64 or int32 [T].
        inv_freq: float32 [d / 2]; angles are its float32 products with the positions.
        attention_factor: cos and sin are multiplied by it.
        k_cache, v_cache: one layer's, [num_blocks, Hkv, block_size, d]; any float dtype, not only qkv's.
        slot_mapping: int64 [T]; the K and V of a token whose slot is outside the pool (negative: padding) are dropped.
        q_out: [T, Hq, d] in the cache's dtype, which attention takes.

    Rounds where :mod:`minillm.models.layers` does.
    """
    key = (
        *map(_layout, (qkv, q_weight, k_weight, positions, inv_freq, k_cache, v_cache, slot_mapping, q_out)),
        eps,
        attention_factor,
    )
    launch = _launches.get(key)
    if launch is None:
        check_paged_cache(k_cache, v_cache)
        num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
        tokens, num_heads, device = len(qkv), q_out.shape[1], k_cache.device
        name, cache_name = _float_name("qkv", qkv.dtype), _float_name("k_cache", k_cache.dtype)
        width = (num_heads + 2 * num_kv_heads) * head_dim
        check_tensor("qkv", qkv, (None, width), qkv.dtype, device, contiguous_from=1)
        check_tensor("q_out", q_out, (tokens, num_heads, head_dim), k_cache.dtype, device)
        check_tensor("inv_freq", inv_freq, (head_dim // 2,), torch.float32, device)
        check_tensor("slot_mapping", slot_mapping, (tokens,), torch.int64, device)
        if (q_weight is None) != (k_weight is None):
            raise ValueError("q_weight and k_weight must be given both or neither")
        for weight_name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            if weight is not None:
                check_tensor(weight_name, weight, (head_dim,), torch.float32, device)
        if positions.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"positions has dtype {positions.dtype}, it must be torch.int32 or torch.int64")
        check_tensor("positions", positions, (tokens,), positions.dtype, device)
        _check_rows("qkv", head_dim, qkv.dtype, qkv.stride(0))
        _check_rows("k_cache", head_dim, k_cache.dtype, k_cache.stride(0))
        lanes = 8 if head_dim <= 64 else 16 if head_dim <= 128 else 32
        rounds = -(-(num_heads + 2 * num_kv_heads) * lanes // _ROPE_THREADS)
        parts = rounds if tokens * rounds <= 2 * _multiprocessors(device) else 1
        scalars = (
            np.int64(num_blocks * block_size),
            np.int64(qkv.stride(0)),
            np.int64(k_cache.stride(0)),
            np.int32(positions.dtype == torch.int64),
            *map(np.int32, (num_heads, num_kv_heads, head_dim, block_size, lanes)),
            np.float32(attention_factor),
            np.float32(eps),
        )
        kernel = get_kernel(_rope_spec(name, cache_name), device)
        launch = _remember(key, _Launch(kernel, (tokens, parts), _ROPE_THREADS, 0, scalars))
    if launch.grid[0]:
        _check_aligned(qkv=qkv, q_weight=q_weight, k_weight=k_weight, k_cache=k_cache, v_cache=v_cache, q_out=q_out)
        launch(q_out, k_cache, v_cache, qkv, q_weight, k_weight, positions, inv_freq, slot_mapping)
    return q_out


# ---- Products of a few rows ------------------------------------------------------------------------------------------

_WARPS = 8
_RINGS = (96 << 10, 64 << 10)
"""Bytes of weights under way in a thread block, the first that fits beside x."""

_TO_OUT, _TO_FLOAT, _TO_RESIDUAL = 0, 1, 2


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
        return 64 if self.tiles == 4 else 128

    @property
    def outputs(self) -> int:
        """Outputs of a pass."""
        return 8 * self.tiles // (2 if self.gated else 1)

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


def _all_configs(arch: str) -> Iterator[SmallLinearConfig]:
    """What :func:`choose_config` may return on `arch`."""
    for tiles, gated, shared_x, ring in product((1, 2, 4), (False, True), (True, False), _RINGS):
        if gated and (tiles == 1 or not shared_x):
            continue
        if not shared_x and ring != _RINGS[0] and arch not in _SMALL_SHARED_ARCHS:
            continue
        yield SmallLinearConfig(tiles, gated, shared_x, ring)


def choose_config(
    rows: int, n: int, k: int, *, gated: bool, norm: bool, multiprocessors: int, shared_limit: int
) -> SmallLinearConfig | None:
    """The instance for x [rows, k] and n outputs; None if x does not fit in shared memory where it must.

    The tiles of a pass are as many as leave the most loaded multiprocessor with the fewest weight rows; x goes through
    shared memory if it is normalised, or used in several passes.
    """
    best, best_load = 0, 0
    for tiles in (2, 4) if gated else (1, 2, 4):
        outputs = 8 * tiles // (2 if gated else 1)
        load = _ceil_div(_ceil_div(n, outputs), multiprocessors) * outputs
        if not best or load <= best_load:
            best, best_load = tiles, load
    outputs = 8 * best // (2 if gated else 1)
    several = -(-n // outputs) > multiprocessors
    for shared_x, ring in product((True, False) if several or norm or gated else (False,), _RINGS):
        config = SmallLinearConfig(best, gated, shared_x, ring)
        if not shared_x and (norm or gated):
            break
        if config.shared_bytes(rows, k) <= shared_limit:
            return config
    return None


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _shared_limit(device: torch.device) -> int:
    """Bytes of dynamic shared memory that a thread block may have, beside `small_linear`'s few static ones."""
    properties: Any = torch.cuda.get_device_properties(device)  # its stub lacks the field
    return int(properties.shared_memory_per_block_optin) - 256


def supports_small_linear(
    rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, *, gated: bool = False, norm: bool = False
) -> bool:
    """Whether `small_linear` takes x [rows, k] with `n` outputs (of a gated product: n pairs of weight rows)."""
    if dtype not in (torch.float16, torch.bfloat16) or not 1 <= rows <= MAX_SMALL_ROWS or k % 8 or n < 1 or k < 8:
        return False
    return _config(rows, n, k, gated, norm, device) is not None


@cache
def _config(rows: int, n: int, k: int, gated: bool, norm: bool, device: torch.device) -> SmallLinearConfig | None:
    limits = {"multiprocessors": _multiprocessors(device), "shared_limit": _shared_limit(device)}
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
    dtype, device = weight.dtype, weight.device
    rows, n = len(x), weight.shape[0] // 2 if gated else weight.shape[0]
    if residual is None and out is None:
        out = torch.empty(rows, n, dtype=dtype, device=device)
    target = residual if residual is not None else out
    assert target is not None
    key = (*map(_layout, (x, weight, target, bias, norm_weight)), eps, residual is None, gated, config)
    launch = _launches.get(key)
    if launch is None:
        if residual is not None and out is not None:
            raise ValueError("out and residual exclude each other")
        launch = _remember(
            key, _small_linear_launch(x, weight, target, bias, norm_weight, eps, residual, gated, config)
        )
    _check_aligned(x=x, weight=weight, norm_weight=norm_weight)
    launch(weight, x, norm_weight, bias, target)
    return target


def _small_linear_launch(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    config: SmallLinearConfig | None,
) -> _Launch:
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
    _check_rows("x", k, dtype)
    _check_rows("x", k, x_dtype, x.stride(0) if rows > 1 else 0)
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, (k,), torch.float32, device)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), dtype, device)
    if residual is None and target.dtype == dtype:
        kind = _TO_OUT
    else:
        kind = _TO_FLOAT if residual is None else _TO_RESIDUAL
        check_tensor("residual" if residual is not None else "out", target, (rows, n), torch.float32, device,
                     contiguous_from=1)  # fmt: skip
    check_tensor("out", target, (rows, n), target.dtype, device, contiguous_from=1)
    config = config or _config(rows, n, k, gated, norm_weight is not None, device)
    if config is None:
        raise ValueError(f"x of {rows} rows of {k} elements does not fit in shared memory; normalise it before")
    scalars = (
        np.int64(x.stride(0)),
        np.int64(target.stride(0)),
        *map(np.int32, (rows, n, k, kind)),
        np.float32(eps),
    )
    kernel = get_kernel(config.spec(FLOAT_DTYPES[dtype]), device)
    grid = min(-(-n // config.outputs), _multiprocessors(device))
    return _Launch(kernel, (grid, 1), 32 * _WARPS, config.shared_bytes(rows, k), scalars)
