"""What the launch wrappers of the decoder's operations share: launches kept by layout, checks, sizes of the device.

A layout of arguments is checked the first time it is seen, and its launch kept by thread.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minillm.attention.cuda_checks import FLOAT_DTYPES
from minillm.attention.cuda_launch import Dim, Kernel, PreparedLaunch

Key = tuple[object, ...]
_MOST_LAUNCHES = 1 << 14


class Target(Enum):
    """Where a product goes; the kernels' `target`."""

    OUT = 0
    """Rounded to the weight's dtype."""
    FLOAT = 1
    """As float32."""
    RESIDUAL = 2
    """Added to float32 that is there."""


class _ThreadLaunches(threading.local):
    """Launches that a thread has prepared, by all that was checked about their arguments."""

    def __init__(self) -> None:
        self.prepared: dict[Key, PreparedLaunch] = {}


launches = _ThreadLaunches()


_numbers = itertools.count()
_layouts: dict[object, int] = {}
_known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
_MOST_KNOWN = 1 << 16


def fixed_layout(tensor: Tensor | None) -> int:
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


def prepare(
    key: Key, kernel: Kernel, grid: tuple[int, int], threads: int, pointers: int, scalars: tuple[object, ...],
    shared_bytes: int = 0, cluster: Dim | None = None,
) -> PreparedLaunch:  # fmt: skip
    """Make a launch as a dependent and keep it under `key`."""
    launch = PreparedLaunch(
        kernel, grid, threads, pointers, scalars, shared_bytes=shared_bytes, cluster=cluster, dependent=True
    )
    prepared = launches.prepared
    if len(prepared) >= _MOST_LAUNCHES:  # prompts of every length
        prepared.clear()
    prepared[key] = launch
    return launch


def misaligned(**tensors: Tensor | None) -> ValueError:
    """What to raise where one of these does not begin at a multiple of 16 bytes."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % 16:
            return ValueError(f"{name} begins at address {tensor.data_ptr():#x}, it must be a multiple of 16")
    raise AssertionError("all are aligned")


def check_rows(name: str, size: int, dtype: torch.dtype, *strides: int) -> None:
    """Rows of `size` elements, `strides` elements apart, must consist of 16-byte vectors."""
    vector = 16 // dtype.itemsize
    for value in (size, *strides):
        if value % vector:
            raise ValueError(f"{name}: rows of {size} elements at strides {strides} must be multiples of {vector}")


def float_name(name: str, dtype: torch.dtype) -> str:
    """The C++ type of a dtype; ValueError for another one."""
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} has dtype {dtype}, it must be one of {', '.join(map(str, FLOAT_DTYPES))}")
    return FLOAT_DTYPES[dtype]


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_limit(device: torch.device) -> int:
    """Bytes of dynamic shared memory that a thread block may have, beside `small_linear`'s few static ones."""
    properties: Any = torch.cuda.get_device_properties(device)  # its stub lacks the field
    return int(properties.shared_memory_per_block_optin) - 256


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def whole_warps(wanted: int, most: int) -> int:
    """`wanted` threads, rounded up to warps, at most `most`."""
    return min(most, -(-wanted // 32) * 32)
