"""Counter-based random numbers: Philox4x32-10 in torch integer arithmetic.

Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; checked
against the known-answer vectors of its authors' library, Random123.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ROUNDS = 10
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """One Philox4x32-10 block per column.

    ``counter`` int64 [4, R] and ``key`` int64 [2, R] hold 32-bit words as values 0 .. 2^32 - 1; so does the
    result, int64 [4, R]. About 70 small tensor operations, whatever R.
    """
    device = counter.device
    # Words 0 and 2 are multiplied, words 1 and 3 are mixed in; both pairs are kept as [2, R] so that one operation
    # serves both. A round crosses the two products over, hence the flip.
    multipliers = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=device)[:, None]
    weyl = torch.tensor(_WEYL, dtype=torch.int64, device=device)[:, None]
    rounds = torch.arange(_ROUNDS, device=device)[:, None, None]
    even, odd = counter[0::2], counter[1::2]
    for round_key in key.add(rounds * weyl).bitwise_and_(_MASK).unbind():
        # The product of two 32-bit words wraps around int64's sign, but its 64 bits are right.
        crossed = (even * multipliers).flip(0)
        even = (crossed >> 32).bitwise_xor_(odd).bitwise_xor_(round_key).bitwise_and_(_MASK)
        odd = crossed.bitwise_and_(_MASK)
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seeds: Tensor, choices: Tensor, indices: Tensor) -> Tensor:
    """A number in the open interval (0, 1) per row, a pure function of (seed, choice, index).

    All arguments int64 [R]; ``seeds`` may use all 64 bits (two's complement), ``choices`` and ``indices`` are
    below 2^32. The key is the seed, the counter (choice, index, 0, 0). Returns float64 [R] with 52 random bits,
    (m + 1/2) / 2^52, which is exact and never 0 or 1.
    """
    zero = torch.zeros_like(seeds)
    counter = torch.stack((choices, indices, zero, zero))
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK))
    words = philox4x32(counter, key)
    mantissa = (words[0] << 20) | (words[1] >> 12)
    return mantissa.double().add_(0.5).mul_(2.0**-52)


class UniformRows:
    """The uniform numbers of a set of rows, computed a window of output indices ahead.

    A Philox call costs the same for one number as for thousands, so each row that leaves its window gets the next
    ``window`` numbers at once. This is a cache of a pure function: its state never changes a number.
    """

    def __init__(self, num_rows: int, window: int = 64) -> None:
        self._window = window
        self._seeds = np.zeros(num_rows, dtype=np.int64)
        self._choices = np.zeros(num_rows, dtype=np.int64)
        self._base = np.full(num_rows, -1, dtype=np.int64)
        self._values = np.zeros((num_rows, window), dtype=np.float64)

    def assign(self, row: int, seed: int, choice: int) -> None:
        """Give the row its seed (any integer that fits 64 bits, signed or not) and choice."""
        seed &= 2**64 - 1
        self._seeds[row] = seed - 2**64 if seed >= 2**63 else seed
        self._choices[row] = choice
        self._base[row] = -1

    def take(self, rows: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Numbers of ``rows`` at output ``indices`` (both int64 [R]) as float64 [R]."""
        base = indices - indices % self._window
        stale = self._base[rows] != base
        if stale.any():
            self._fill(rows[stale], base[stale])
        # A row may be asked at two indices of different windows in one call: then the cache holds only one of them.
        if (self._base[rows] != base).any():
            return self._compute(rows, indices[:, None])[:, 0]
        return self._values[rows, indices - base]

    def _fill(self, rows: np.ndarray, base: np.ndarray) -> None:
        self._values[rows] = self._compute(rows, base[:, None] + np.arange(self._window))
        self._base[rows] = base

    def _compute(self, rows: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Numbers at ``indices`` int64 [R, W] of each of the rows."""
        seeds, choices, flat = np.broadcast_arrays(self._seeds[rows, None], self._choices[rows, None], indices)
        columns = [torch.from_numpy(np.ascontiguousarray(part).reshape(-1)) for part in (seeds, choices, flat)]
        return uniform(*columns).numpy().reshape(indices.shape)
