"""Large page-locked host memory: exactly as much as asked for, there quickly, and given back.

torch's pinned allocator rounds a size up to a power of two, keeps the memory for good, and has the driver fault in page
after page on one thread (seconds for a swap pool of some GiB). Here the pages come from the operating system, as huge
ones where it has them, are touched by several threads, and are then registered with the driver as they are.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_THREADS = 8
_POPULATE_WRITE = 23
"""madvise's MADV_POPULATE_WRITE (Linux 5.14): fault in writable pages."""
_PART_BYTES = 64 << 20

Register = Callable[[int, int], None]
"""(address, bytes): page-locks; raises RuntimeError. The other way round: (address)."""


def _cuda_register(address: int, num_bytes: int) -> None:
    error = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
    if int(error) != 0:
        raise RuntimeError(f"cudaHostRegister of {num_bytes} bytes: {error}")


def _cuda_unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


class PinnedMemory:
    """`num_bytes` zero bytes of page-locked memory as `tensor` (uint8); unlocked when this object is gone.

    The tensor must not be used after that by anything that takes it to be page-locked. Raises RuntimeError if the
    memory cannot be had or locked.
    """

    def __init__(
        self,
        num_bytes: int,
        register: Register = _cuda_register,
        unregister: Callable[[int], None] = _cuda_unregister,
    ) -> None:
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise RuntimeError(f"{num_bytes} bytes of host memory: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:  # a kernel without them
                logger.debug("no huge pages: %s", error)
        self.tensor: Tensor = torch.frombuffer(pages, dtype=torch.uint8)
        address = self.tensor.data_ptr()
        _touch(address, num_bytes)
        register(address, num_bytes)
        # Holds the pages: they must not be unmapped while they are registered.
        self._release = weakref.finalize(self, _unlock, pages, address, unregister)
        self._release.atexit = False  # the driver may be gone by then, and the process's memory goes anyway


def _unlock(pages: mmap.mmap, address: int, unregister: Callable[[int], None]) -> None:
    try:
        unregister(address)
    except Exception as error:  # a device that has failed
        logger.debug("page-locked memory could not be unlocked: %s", error)


def _touch(address: int, num_bytes: int) -> None:
    """Fault in all pages, by several threads. Where the kernel has no call for it, registering will do it."""
    libc = ctypes.CDLL(None, use_errno=True)
    starts = iter(range(address, address + num_bytes, _PART_BYTES))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            size = min(_PART_BYTES, address + num_bytes - start)
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _POPULATE_WRITE):
                return

    threads = [
        threading.Thread(target=work, daemon=True)
        for _ in range(min(MAX_THREADS, os.cpu_count() or 1, -(-num_bytes // _PART_BYTES)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
