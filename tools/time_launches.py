#!/usr/bin/env python3
"""Host time of the decoder's launch wrappers on a GPU, microseconds a call: python tools/time_launches.py

Calls are enqueued faster than small kernels run, so a few hundred at a time, with a wait between the samples.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from minillm.bench.fused_cases import OURS, QWEN3, Case, contenders, products

CALLS, SAMPLES = 200, 30


def main() -> int:
    """Print one line per wrapper."""
    device = torch.device("cuda", torch.cuda.current_device())
    ops = ("embed", "add_rms_norm", "qk_norm_rope_write", "silu_and_mul")
    row_wise = [Case(op=op, model=QWEN3, rows=1) for op in ops]
    for case in [*row_wise, *products(QWEN3, 1)]:
        call = contenders(case, 1, device, variants=False)[OURS][0]
        samples = []
        for _ in range(SAMPLES):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            samples.append((time.perf_counter() - start) * 1e6 / CALLS)
        print(f"{case.op:20} {statistics.median(samples):6.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
