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

import itertools
import threading
import weakref
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
from minillm.attention.cuda_launch import Kernel, PreparedLaunch

MAX_SMALL_ROWS = 8
"""Rows of x that `small_linear` takes."""

_MAX_HIDDEN_VECTORS = 4096
_NORM_VECTORS = (1, 2, 4)
"""16-byte vectors of a row that a thread of `add_rms_norm` may hold."""


_Key = tuple[object, ...]
_MOST_LAUNCHES = 8192

_FEW_TOKENS = 64
"""Up to so many, kernels are shorter than the gaps between them: then they share the multiprocessors with their
neighbours. More tokens want L1 for the loads that are under way (embedding of 8,192 tokens: 15.5 against 20.6 us)."""


class _ThreadLaunches(threading.local):
    """Launches that a thread has prepared, by all that was checked about their arguments."""

    def __init__(self) -> None:
        self.prepared: dict[_Key, PreparedLaunch] = {}


_launches = _ThreadLaunches()


_numbers = itertools.count()
_layouts: dict[object, int] = {}
_known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
_MOST_KNOWN = 1 << 16


def _fixed(tensor: Tensor | None) -> int:
    """A number for the layout of a tensor that lives long, such as a weight: quick where the object is known.

    Its attributes take a microsecond to read, and a launch has up to nine tensors. Changing the layout of a tensor in
    place (``resize_``, ``set_``) after its first launch goes unnoticed.
    """
    if tensor is None:
        return -1
    found = _known.get(id(tensor))
    if found is not None and found[0]() is tensor:
        return found[1]
    layout = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    number = _layouts.get(layout)
    if number is None:
        number = _layouts.setdefault(layout, next(_numbers))
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[id(tensor)] = weakref.ref(tensor), number
    return number


def _prepare(
    key: _Key, kernel: Kernel, grid: tuple[int, int], threads: int, pointers: int, scalars: tuple[object, ...],
    shared_bytes: int = 0,
) -> PreparedLaunch:  # fmt: skip
    launch = PreparedLaunch(kernel, grid, threads, pointers, scalars, shared_bytes=shared_bytes, dependent=True)
    prepared = _launches.prepared
    if len(prepared) >= _MOST_LAUNCHES:  # prompts of every length
        prepared.clear()
    prepared[key] = launch
    return launch


def _misaligned(**tensors: Tensor | None) -> ValueError:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % 16:
            return ValueError(f"{name} begins at address {tensor.data_ptr():#x}, it must be a multiple of 16")
    raise AssertionError("all are aligned")


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
    key = (
        "embed",
        *(input_ids.shape, input_ids.stride(), input_ids.dtype, input_ids.device),
        _fixed(embedding),
        *(residual.shape, residual.stride(), residual.dtype, residual.device),
    )
    launch = _launches.prepared.get(key)
    if launch is None:
        tokens, (vocab, hidden), device = len(input_ids), embedding.shape, embedding.device
        name = _float_name("embedding", embedding.dtype)
        check_tensor("embedding", embedding, (None, None), embedding.dtype, device)
        check_tensor("input_ids", input_ids, (None,), torch.int64, device)
        check_tensor("residual", residual, (tokens, hidden), torch.float32, device)
        _check_rows("embedding", hidden, embedding.dtype)
        threads = _threads(hidden * embedding.element_size() // 16, 256)
        kernel = get_kernel(KernelSpec("decoder_ops.cu", f"embed<{name}>"), device, overlapping=tokens <= _FEW_TOKENS)
        if not tokens:
            return residual
        launch = _prepare(key, kernel, (tokens, 1), threads, 3, (np.int64(vocab), np.int32(hidden)))
    to, table = residual.data_ptr(), embedding.data_ptr()
    if (to | table) & 15:
        raise _misaligned(embedding=embedding, residual=residual)
    launch(to, input_ids.data_ptr(), table)
    return residual


def add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """``residual += x`` in place, then ``out = weight * residual / sqrt(mean(residual^2) + eps)``; returns `out`.

    `x` [T, H] in `out`'s dtype, its rows at any stride, or None to add nothing; `residual` float32 [T, H], `weight`
    float32 [H], `out` [T, H]. Computed in float32 and rounded once.
    """
    key = (
        "norm",
        *((None,) if x is None else (x.shape, x.stride(), x.dtype, x.device)),
        *(residual.shape, residual.stride(), residual.dtype, residual.device),
        _fixed(weight),
        *(out.shape, out.stride(), out.dtype, out.device),
        eps,
    )
    launch = _launches.prepared.get(key)
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
        kernel = get_kernel(
            KernelSpec("decoder_ops.cu", f"add_rms_norm<{name}, {held}>"), device, overlapping=tokens <= _FEW_TOKENS
        )
        if not tokens:
            return out
        scalars = (np.int64(stride), np.int32(hidden), np.float32(eps))
        launch = _prepare(key, kernel, (tokens, 1), _threads(_ceil_div(vectors, held), 1024), 4, scalars)
    addresses = out.data_ptr(), residual.data_ptr(), 0 if x is None else x.data_ptr(), weight.data_ptr()
    if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & 15:
        raise _misaligned(x=x, residual=residual, weight=weight, out=out)
    launch(*addresses)
    return out


def silu_and_mul(gate_up: Tensor, out: Tensor) -> Tensor:
    """``silu(gate) * up`` of `gate_up` [T, 2 * I], gate first, rows at any stride -> `out` [T, I]; returns `out`.

    Computed in float32 and rounded once.
    """
    key = (
        "silu",
        *(gate_up.shape, gate_up.stride(), gate_up.dtype, gate_up.device),
        *(out.shape, out.stride(), out.dtype, out.device),
    )
    launch = _launches.prepared.get(key)
    if launch is None:
        (tokens, inner), device, dtype = out.shape, out.device, out.dtype
        name = _float_name("out", dtype)
        check_tensor("out", out, (None, None), dtype, device)
        check_tensor("gate_up", gate_up, (tokens, 2 * inner), dtype, device, contiguous_from=1)
        stride = gate_up.stride(0)
        _check_rows("gate_up", inner, dtype, stride)
        vectors = inner * dtype.itemsize // 16
        threads = _threads(vectors, 256)
        kernel = get_kernel(
            KernelSpec("decoder_ops.cu", f"silu_and_mul<{name}>"), device, overlapping=tokens <= _FEW_TOKENS
        )
        if not tokens:
            return out
        scalars = (np.int64(tokens), np.int64(stride), np.int32(inner))
        launch = _prepare(key, kernel, (_ceil_div(vectors, threads), min(tokens, 65535)), threads, 2, scalars)
    to, source = out.data_ptr(), gate_up.data_ptr()
    if (to | source) & 15:
        raise _misaligned(gate_up=gate_up, out=out)
    launch(to, source)
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
        "rope",
        *(qkv.shape, qkv.stride(), qkv.dtype, qkv.device),
        _fixed(q_weight),
        _fixed(k_weight),
        *(positions.shape, positions.stride(), positions.dtype, positions.device),
        _fixed(inv_freq),
        _fixed(k_cache),
        _fixed(v_cache),
        *(slot_mapping.shape, slot_mapping.stride(), slot_mapping.dtype, slot_mapping.device),
        *(q_out.shape, q_out.stride(), q_out.dtype, q_out.device),
        eps,
        attention_factor,
    )
    launch = _launches.prepared.get(key)
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
        if not tokens:
            return q_out
        kernel = get_kernel(_rope_spec(name, cache_name), device, overlapping=tokens <= _FEW_TOKENS)
        launch = _prepare(key, kernel, (tokens, parts), _ROPE_THREADS, 9, scalars)
    to, keys, values, source = q_out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), qkv.data_ptr()
    q_norm = 0 if q_weight is None else q_weight.data_ptr()
    k_norm = 0 if k_weight is None else k_weight.data_ptr()
    if (to | keys | values | source | q_norm | k_norm) & 15:
        raise _misaligned(qkv=qkv, q_weight=q_weight, k_weight=k_weight, k_cache=k_cache, v_cache=v_cache, q_out=q_out)
    rest = positions.data_ptr(), inv_freq.data_ptr(), slot_mapping.data_ptr()
    launch(to, keys, values, source, q_norm, k_norm, *rest)
    return q_out


# ---- Products of a few rows ------------------------------------------------------------------------------------------

_WARPS = 8
_RINGS = (96 << 10, 64 << 10)
"""Bytes of weights under way in a thread block, the first that fits beside x."""

_FEW_COLUMNS, _MOST_SHORT_PASSES = 768, 4
"""A head of 49,152 rows of 576 columns, 12 passes, took 22 us where torch's product takes 17."""
_MOST_COLUMNS_OF_SIX = 1024
"""Columns of a pass of six tiles that the ring holds."""

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
        passes = _ceil_div(n, outputs)
        load = _ceil_div(passes, multiprocessors) * outputs
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


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_limit(device: torch.device) -> int:
    """Bytes of dynamic shared memory that a thread block may have, beside `small_linear`'s few static ones."""
    properties: Any = torch.cuda.get_device_properties(device)  # its stub lacks the field
    return int(properties.shared_memory_per_block_optin) - 256


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
    return k >= _FEW_COLUMNS or _ceil_div(n, config.outputs) <= _MOST_SHORT_PASSES * _multiprocessors(device)


@cache
def config_for(rows: int, n: int, k: int, gated: bool, norm: bool, device: torch.device) -> SmallLinearConfig | None:
    """:func:`choose_config` for a device."""
    limits = {"multiprocessors": _multiprocessors(device), "shared_limit": shared_limit(device)}
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
        _fixed(weight),
        *(target.shape, target.stride(), target.dtype, target.device),
        _fixed(bias),
        _fixed(norm_weight),
    )
    launch = _launches.prepared.get(key)
    if launch is None:
        launch = _small_linear_launch(
            key, x, weight, target, bias, norm_weight, eps, residual is not None, gated, config
        )
    source, matrix, norm = x.data_ptr(), weight.data_ptr(), 0 if norm_weight is None else norm_weight.data_ptr()
    if (source | matrix | norm) & 15:
        raise _misaligned(x=x, weight=weight, norm_weight=norm_weight)
    launch(matrix, source, norm, 0 if bias is None else bias.data_ptr(), target.data_ptr())
    return target


def _small_linear_launch(
    key: _Key,
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
    _check_rows("x", k, dtype)
    _check_rows("x", k, x_dtype, x.stride(0) if rows > 1 else 0)
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, (k,), torch.float32, device)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), dtype, device)
    name = "residual" if to_residual else "out"
    kind = _TO_RESIDUAL if to_residual else _TO_OUT if target.dtype == dtype else _TO_FLOAT
    check_tensor(name, target, (rows, n), dtype if kind == _TO_OUT else torch.float32, device, contiguous_from=1)
    config = config or config_for(rows, n, k, gated, norm_weight is not None, device)
    if config is None:
        raise ValueError(f"x of {rows} rows of {k} elements does not fit in shared memory; normalise it before")
    scalars = (
        *map(np.int64, (x.stride(0), target.stride(0))),
        *map(np.int32, (rows, n, k, kind)),
        np.float32(eps),
    )
    kernel = get_kernel(config.spec(FLOAT_DTYPES[dtype]), device, overlapping=True)
    grid = min(_ceil_div(n, config.outputs), _multiprocessors(device))
    return _prepare(key, kernel, (grid, 1), 32 * _WARPS, 5, scalars, config.shared_bytes(rows, k))
