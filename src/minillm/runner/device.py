"""How a runner talks to its device: copies either way, points in time, waiting.

The runner's code is the same for every device. On a GPU nothing here waits but :meth:`StepDevice.wait`; on a CPU
everything has happened when the call returns.
"""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from minillm.attention.cuda_launch import current_device, current_raw_stream
from minillm.core.errors import KernelBuildError, KernelLaunchError
from minillm.memory.staging import HostUpload, PinnedUpload, Upload, to_pinned

Mark = Any
"""A point in the device's work."""


class StepDevice(Protocol):
    """What the runner asks of a device."""

    upload: Upload

    def active(self) -> AbstractContextManager[Any]:
        """Makes it the current device of this thread."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """A host copy, valid after :meth:`wait` for a later mark."""
        ...

    def mark(self) -> Mark:
        """The point behind all work enqueued so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """Return when the device has passed the mark; raises what went wrong on the device until then."""
        ...

    def seconds(self, start: Mark, end: Mark) -> float:
        """Time between two marks that were waited for."""
        ...

    def release(self) -> None:
        """Give cached memory back."""
        ...


class CpuDevice:
    """The host itself."""

    def __init__(self) -> None:
        self.upload: Upload = HostUpload()

    def active(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.clone()  # as on a GPU, where the next step may overwrite the tensor

    def mark(self) -> Mark:
        return time.perf_counter()

    def wait(self, mark: Mark) -> None:
        pass

    def seconds(self, start: Mark, end: Mark) -> float:
        return end - start

    def release(self) -> None:
        pass


class CudaDevice:
    """A GPU; marks are events of its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.upload: Upload = PinnedUpload(device)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.current_stream(device)
        self._is_active = contextlib.nullcontext()

    def active(self) -> AbstractContextManager[Any]:
        return self._is_active if current_device() == self._index else torch.cuda.device(self.device)

    def to_host(self, tensor: Tensor) -> Tensor:
        return to_pinned(tensor)

    def mark(self) -> Mark:
        # Waiting gives the core away: with a step in flight behind this one, waking up late costs nothing.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        if current_raw_stream(self._index) != self._stream.cuda_stream:
            self._stream = torch.cuda.current_stream(self.device)
        event.record(self._stream)  # looking the stream up costs more than recording
        return event

    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    def seconds(self, start: Mark, end: Mark) -> float:
        return start.elapsed_time(end) / 1e3

    def release(self) -> None:
        torch.cuda.empty_cache()


def step_device(device: torch.device) -> StepDevice:
    """The device to run steps on."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


def is_device_failure(error: BaseException) -> bool:
    """Whether the error is the device's, not one row's: it would come again for every row.

    After a kernel's fault nothing on the device can be relied on; whichever call comes next reports it, and all that
    follow do. A kernel that cannot be built is missing to every row.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError | KernelBuildError | KernelLaunchError) or "CUDA error" in str(
        error
    )
