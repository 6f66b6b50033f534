"""Small arrays between host and device, without waiting for the device.

```
host array ──copy──► slab 0 ──cudaMemcpyAsync──► device tensor
                     slab 1   (event: copies out of it are done)
                     slab 2   (event)
```
A copy out of pageable memory may wait for the device, one out of page-locked memory does not; but then the source must
stay as it is until the copy has run. So arrays are staged in page-locked slabs that are filled one after the other.
Leaving a slab records an event behind its copies, and coming back to it waits for that event: which is over long before
as long as the slabs together hold more than the steps in flight send.

On a CPU there is nothing to move: arrays become tensors over the same memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

SLAB_BYTES = 1 << 20
"""A decode step of 256 rows sends about 20 KB, a prefill step of 8,192 tokens about 200 KB."""

NUM_SLABS = 4

_ALIGNMENT = 16

_TORCH_DTYPES = {
    np.dtype(name): getattr(torch, name) for name in ("bool", "uint8", "int32", "int64", "float32", "float64")
}

Event = Any
"""What `torch.cuda.Event` offers: record(), synchronize()."""


class Upload(Protocol):
    """Host arrays to tensors on one device."""

    def __call__(self, array: np.ndarray) -> Tensor:
        """One array. It may be changed afterwards, except on a CPU."""
        ...

    def together(self, arrays: Sequence[np.ndarray], target: Tensor | None = None) -> list[Tensor]:
        """Several arrays in one transfer. The tensors are valid until the next call of `together`.

        With `target`, uint8, dense, a multiple of 16 bytes, large enough (:func:`packed_bytes`): there, and valid until
        it is written again; arrays of the same sizes get the same places.
        """
        ...

    def into(self, target: Tensor, array: np.ndarray) -> None:
        """One flat array to the beginning of `target`, of its dtype, behind what still reads it there."""
        ...


def _offsets(arrays: Sequence[np.ndarray]) -> list[int]:
    """Where each of them begins when they are sent together, and where the last one ends."""
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def packed_bytes(arrays: Sequence[np.ndarray]) -> int:
    """What :meth:`Upload.together` takes for these arrays."""
    return _offsets(arrays)[-1]


def upload_to(device: torch.device | str) -> Upload:
    """The upload for `device`."""
    device = torch.device(device)
    return PinnedUpload(device) if device.type == "cuda" else HostUpload()


class HostUpload:
    """On a CPU: the arrays' own memory."""

    def __call__(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def together(self, arrays: Sequence[np.ndarray], target: Tensor | None = None) -> list[Tensor]:
        tensors = [torch.from_numpy(array) for array in arrays]
        if target is None:
            return tensors
        views = _views(target, arrays, _offsets(arrays))
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
        return views

    def into(self, target: Tensor, array: np.ndarray) -> None:
        target[: len(array)].copy_(torch.from_numpy(array))


def _views(target: Tensor, arrays: Sequence[np.ndarray], offsets: Sequence[int]) -> list[Tensor]:
    """Tensors like the arrays in `target`, uint8, which has them at these offsets."""
    if offsets[-1] > len(target):
        raise ValueError(f"the arrays take {offsets[-1]} bytes, the target has {len(target)}")
    typed: dict[np.dtype[Any], Tensor] = {}
    views = []
    for array, offset in zip(arrays, offsets, strict=False):
        dtype = array.dtype
        whole = typed.get(dtype)
        if whole is None:
            whole = typed[dtype] = target.view(_TORCH_DTYPES[dtype])
        start = offset // dtype.itemsize
        view = whole[start : start + array.size]
        views.append(view if array.ndim == 1 else view.view(array.shape))
    return views


def _address(array: np.ndarray) -> int:
    """Of a contiguous array; four times faster than `array.ctypes.data`."""
    address: int = array.__array_interface__["data"][0]
    return address


def _pinned_bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


class StagingRing:
    """Page-locked memory for copies that are under way, handed out from slabs in turn."""

    def __init__(
        self,
        slab_bytes: int = SLAB_BYTES,
        num_slabs: int = NUM_SLABS,
        *,
        allocate: Callable[[int], Tensor] = _pinned_bytes,
        make_event: Callable[[], Event] = torch.cuda.Event,
    ) -> None:
        """`allocate` gives uint8 memory and `make_event` an event of the stream that the copies run on."""
        if num_slabs < 2:
            raise ValueError(f"num_slabs={num_slabs} must be at least 2")
        self.slab_bytes = slab_bytes
        self._allocate = allocate
        self._make_event = make_event
        self._slabs = [allocate(slab_bytes) for _ in range(num_slabs)]
        self._events: list[Event | None] = [None] * num_slabs
        self._current = 0
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], page-locked, to be filled and copied from before the next call.

        More than a slab holds is allocated apart; torch keeps such memory until the copies out of it are done.
        """
        slab = self._slabs[self._current]
        if num_bytes > len(slab):
            return self._allocate(num_bytes)
        if self._used + num_bytes > len(slab):
            slab = self._next_slab()
        start = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return slab[start : start + num_bytes]

    def _next_slab(self) -> Tensor:
        event = self._make_event()
        event.record()
        self._events[self._current] = event
        self._current = (self._current + 1) % len(self._slabs)
        self._used = 0
        pending = self._events[self._current]
        if pending is not None:
            pending.synchronize()
        return self._slabs[self._current]


class PinnedUpload:
    """To a GPU, on its current stream, through a :class:`StagingRing`. For one thread and one stream."""

    def __init__(self, device: torch.device, ring: StagingRing | None = None) -> None:
        self._device = device
        self._ring = ring if ring is not None else StagingRing()
        self._target = torch.empty(0, dtype=torch.uint8, device=device)

    def __call__(self, array: np.ndarray) -> Tensor:
        """A tensor of its own."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        staged = self._ring.take(array.nbytes)
        staged.view(source.dtype).view(source.shape).copy_(source)
        self._send(target, staged)
        return target

    def together(self, arrays: Sequence[np.ndarray], target: Tensor | None = None) -> list[Tensor]:
        """Views of one buffer that keeps its place on the device; each call overwrites it, in stream order."""
        dense = [np.ascontiguousarray(array) for array in arrays]
        offsets = _offsets(dense)
        end = offsets[-1]
        if target is None:
            if len(self._target) < end:
                self._target = torch.empty(1 << max(16, end.bit_length()), dtype=torch.uint8, device=self._device)
            target = self._target
        views = _views(target, dense, offsets)
        staged = self._ring.take(end)
        flat = staged.numpy()
        for array, offset in zip(dense, offsets, strict=False):
            if array.size:
                flat[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._send(target, staged)
        return views

    def into(self, target: Tensor, array: np.ndarray) -> None:
        """The target keeps its place; in stream order. On a GPU no tensor is made but the staging slice."""
        staged = self._ring.take(array.nbytes)
        ctypes.memmove(staged.data_ptr(), _address(array), array.nbytes)
        self._send(target, staged)

    def _send(self, target: Tensor, staged: Tensor) -> None:
        """Copy the staged bytes to the beginning of the target, which is dense."""
        from minillm.attention.cuda_launch import current_raw_stream, memcpy_async

        count = len(staged)
        if not count:
            return
        if target.is_cuda and count <= self._ring.slab_bytes:
            memcpy_async(target.data_ptr(), staged.data_ptr(), count, current_raw_stream(target.get_device()))
        else:  # torch keeps memory of its own until its copies are done
            target.view(-1).view(torch.uint8)[:count].copy_(staged, non_blocking=True)


def to_pinned(tensor: Tensor) -> Tensor:
    """A page-locked host copy whose content is valid once an event recorded after this call has passed.

    Whoever has it keeps it until then. torch is not told of the copy: it would record an event when the memory is
    freed, and ends the process where the device has failed meanwhile.
    """
    from minillm.attention.cuda_launch import current_raw_stream, memcpy_async

    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    if not host.numel():
        return host
    tensor = tensor.contiguous()
    memcpy_async(host.data_ptr(), tensor.data_ptr(), host.nbytes, current_raw_stream(tensor.get_device()))
    return host
