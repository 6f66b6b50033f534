"""The sampling kernels on a CPU: `sampling.cu` compiled by the host's C++ compiler over a small emulation of CUDA."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_build import KERNEL_DIR
from minillm.runner.cuda_sampling import SamplingKernels

HERE = Path(__file__).with_name("cuda_emulation")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there is no C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    folder = Path(mkdtemp(prefix="minillm-emulation-"))
    try:
        # Beside each other, so that #include "common.cuh" finds the emulation.
        for path in (*HERE.iterdir(), *KERNEL_DIR.glob("sampling.cu*"), KERNEL_DIR / "dependent_launch.cuh"):
            shutil.copy(path, folder)
        command = [compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"]
        target = folder / "sampling.so"
        subprocess.run([*command, "-o", target, folder / "launch.cpp"], check=True, timeout=120)
        loaded = ctypes.CDLL(str(target))
    finally:
        shutil.rmtree(folder)
    loaded.uniform_number.restype = ctypes.c_double
    return loaded


class EmulatedKernels(SamplingKernels):
    """In the place of the kernels, on CPU tensors."""

    launches: list[tuple[int, bool, bool]]

    def __init__(self, max_rows: int, end: int, invalid: Tensor | None, device: torch.device) -> None:
        super().__init__(max_rows, end, invalid, device)
        self.launches = []
        self.force_tiles: int | None = None

    def split(self, rows: int) -> tuple[int, int]:
        """As on a device, unless a test wants other splits."""
        tiles = self.force_tiles or super().split(rows)[0]
        return tiles, -(-self._tiles_of_row // tiles)

    def sample(self, logits, slots, indices, params, tokens, failed, *, random, filtered) -> None:
        """The same launches."""
        rows = len(logits)
        if rows > self.max_rows:
            self.reserve(rows)
        tiles, splits = self.split(rows)
        call = self._pack(logits, slots, indices, params, tokens, failed, tiles)
        self.launches.append((rows, random, filtered))
        found = library()
        assert found is not None
        found.sample_rows(call, splits, rows, ctypes.c_bool(random), ctypes.c_bool(filtered))


def emulated_weights(logits: np.ndarray, maximum: float, temperature: float, min_p: float) -> np.ndarray:
    """int64 weights of float32 logits by the kernels' arithmetic (with the host's exponential)."""
    found = library()
    assert found is not None
    values = np.ascontiguousarray(logits, dtype=np.float32)
    out = np.zeros(len(values), dtype=np.int64)
    found.weights(
        values.ctypes.data_as(ctypes.c_void_p),
        out.ctypes.data_as(ctypes.c_void_p),
        len(values),
        *(ctypes.c_float(value) for value in (maximum, temperature, min_p)),
    )
    return out


def emulated_uniform(seed: int, choice: int, index: int) -> float:
    """The kernels' uniform number."""
    found = library()
    assert found is not None
    return found.uniform_number(ctypes.c_ulonglong(seed & (2**64 - 1)), ctypes.c_uint(choice), ctypes.c_uint(index))
