"""How many KV blocks a GPU has room for: found by running the largest step that the limits allow.

```
 |<------------------------ total memory ------------------------>|
 |<-------- gpu_memory_utilization of it ----------->|            |
 | in use: weights,     | largest step, CUDA graphs, | KV |  left to others
 | context, others      | staging of swaps           | pool
```
The share is a limit on the whole card: what other programs hold counts as in use, so a second engine on the same card
needs the sum of both shares.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from minillm.core.config import GIB
from minillm.core.errors import ConfigError

if TYPE_CHECKING:
    from minillm.memory.paged_kv_cache import KVCacheSpec
    from minillm.runner.pytorch_model_runner import PyTorchModelRunner

logger = logging.getLogger("minillm.engine")

MAX_POOL_BLOCKS = 1 << 20
"""A pool for more tokens than anybody's requests have; the block manager's lists stay within tens of MB."""


def pool_blocks(*, total: int, in_use: int, peak: int, utilization: float, bytes_per_block: int) -> int:
    """KV blocks that fit; all sizes in bytes. One more block, the scratch block, is accounted for.

    Raises :class:`ConfigError` where not even one block fits, saying what takes the memory.
    """
    room = int(total * utilization) - in_use - peak
    blocks = room // bytes_per_block - 1
    if blocks < 1:
        raise ConfigError(
            f"gpu_memory_utilization={utilization} of {total / GIB:.2f} GiB leaves no room for KV blocks: "
            f"{in_use / GIB:.2f} GiB are in use (weights, other programs), a step needs up to {peak / GIB:.2f} GiB, a "
            f"block {bytes_per_block / GIB:.4f} GiB. Raise it, or lower max_num_batched_tokens or max_num_seqs"
        )
    return min(blocks, MAX_POOL_BLOCKS)


def profiled_num_blocks(
    make_runner: Callable[[], PyTorchModelRunner],
    run_largest_step: Callable[[PyTorchModelRunner], None],
    *,
    device: str,
    utilization: float,
    spec: KVCacheSpec,
    num_swap_blocks: int,
) -> int:
    """Build a runner with a tiny pool, run the largest step on it, drop it, and size the real pool from the peak."""
    import torch

    from minillm.memory.swap_space import SwapSpace

    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner = make_runner()
    try:
        run_largest_step(runner)
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before + runner.graph_bytes
    finally:
        runner.close()
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    staging = min(num_swap_blocks, SwapSpace.staging_blocks(spec, total)) * spec.bytes_per_block
    blocks = pool_blocks(
        total=total,
        in_use=total - free,
        peak=peak + staging,
        utilization=utilization,
        bytes_per_block=spec.bytes_per_block,
    )
    logger.info(
        "%s: %.1f GiB, %.2f in use, %.2f for steps, graphs and swaps, %d KV blocks (%.2f GiB)",
        device,
        total / GIB,
        (total - free) / GIB,
        (peak + staging) / GIB,
        blocks,
        blocks * spec.bytes_per_block / GIB,
    )
    return blocks
