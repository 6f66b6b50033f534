"""The sampler in plain Python: one row, one token at a time, no tensors but for exp. The oracle of its tests.

It follows the text of the specification (order of steps, ties to the lowest id, inverse of the cumulative distribution
in the order of ids) with the rounding that the implementation states: float32 logits, integer weights of 2^-40.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch

from minillm.core.sampling_params import SamplingParams

F32 = np.float32


def philox_uniform(seed: int, choice: int, index: int) -> float:
    mask = 0xFFFFFFFF
    c0, c1, c2, c3, k0, k1 = choice, index, 0, 0, seed & mask, (seed >> 32) & mask
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return (((c0 << 32 | c1) >> 12) + 0.5) / 2**52


def edited_logits(
    row: Sequence[float],
    params: SamplingParams,
    index: int,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    eos_ids: Collection[int] = (),
    invalid_ids: Collection[int] = (),
    allowed: Sequence[bool] | None = None,
) -> list[np.float32]:
    """The row after every step that comes before temperature."""
    logits = [F32(value) for value in row]
    counts = Counter(output_ids)
    with np.errstate(over="ignore"):
        for i, value in enumerate(logits):
            if i in params.logit_bias:
                value = F32(value + F32(params.logit_bias[i]))
            forbidden = index < params.min_tokens and (i in eos_ids or i in params.stop_token_ids)
            if forbidden or i in invalid_ids or (allowed is not None and not allowed[i]):
                value = F32(-math.inf)
            if i in counts or i in set(prompt_ids):
                repetition = F32(params.repetition_penalty)
                value = F32(value / repetition) if value > 0 else F32(value * repetition)
                value = min(value, np.finfo(F32).max)  # a tiny repetition penalty must not make it infinite
            if counts[i]:
                value = F32(value - F32(F32(params.frequency_penalty) * F32(counts[i])))
                value = F32(value - F32(params.presence_penalty))
            logits[i] = value
    return logits


def choose(logits: Sequence[np.float32], params: SamplingParams, seed: int, choice: int, index: int) -> int:
    """The token for edited logits with a finite maximum."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.is_greedy:
        return order[0]
    top = logits[order[0]]
    with np.errstate(over="ignore"):
        scaled = [F32(F32(value - top) / F32(params.temperature)) for value in logits]
    relative = torch.tensor(scaled).exp().tolist()
    weights = [int(value * 2.0**40) if value >= F32(params.min_p) else 0 for value in relative]
    kept = order if params.top_k <= 0 else order[: params.top_k]
    total = sum(weights[i] for i in kept)
    limit = total if params.top_p >= 1.0 else max(1, math.ceil(params.top_p * float(total)))
    nucleus, before = [], 0
    for i in kept:
        if before < limit:
            nucleus.append(i)
        before += weights[i]
    total = sum(weights[i] for i in nucleus)
    target = min(int(philox_uniform(seed, choice, index) * float(total)), total - 1)
    cumulative = 0
    for i in sorted(nucleus):
        cumulative += weights[i]
        if cumulative > target:
            return i
    raise AssertionError("the cumulative weight ends at the total")
