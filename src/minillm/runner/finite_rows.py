"""Which tokens' hidden states are not finite, found out on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_build import KernelSpec, get_kernel
from minillm.attention.cuda_checks import FLOAT_DTYPES

_THREADS = 256
_SPECS = {dtype: KernelSpec("finite_rows.cu", f"flag_not_finite<{name}>") for dtype, name in FLOAT_DTYPES.items()}


def specs(arch: str) -> list[KernelSpec]:
    """Every instance that may be launched; the same on all architectures."""
    return list(_SPECS.values())


def flag_not_finite(rows: Tensor, flags: Tensor) -> Tensor:
    """rows [T, width], dense -> flags bool [T], whether a row has a NaN or an infinity; returns `flags`.

    On a GPU one launch on the current stream (capturable), torch's operations take three.
    """
    if rows.device.type != "cuda":
        return torch.logical_not(rows.isfinite().all(-1), out=flags)
    if len(rows):
        get_kernel(_SPECS[rows.dtype], rows.device).launch(
            len(rows), _THREADS, (flags, rows, np.int64(rows.stride(0)), np.int32(rows.shape[1]))
        )
    return flags
