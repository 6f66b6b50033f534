"""Launching the sampling kernels (``attention/kernels/sampling.cu``): from logits to tokens without leaving the device.

What the kernels need to know of a sequence slot lies on the device from its assignment on (:class:`SlotParams`); a call
brings the slots and output indices of its rows, and nothing else. The launches are the same for any mixture of rows of
one kind: greedy only (one launch), some random (two), some with top_k or top_p (four). They can be captured in a CUDA
graph.

The tokens are those of :mod:`minillm.runner.sampling_ops` on the same device: weights, sums, cuts and uniform numbers
have one definition, in integers but for (l - max) / temperature and its exponential. The quotient is correctly rounded
in both, and both exponentials are the CUDA math library's; were they of different releases, a weight might differ in
the exponential's last bit and a token with it, once in about 10^6 draws.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cuda_build import KernelSpec, get_kernel
from minillm.memory.staging import Upload

THREADS, SEARCH_THREADS = 256, 1024
TILE = 2048
"""Ids of a row that a thread block looks at together (kTile)."""
MAX_TILES = 8
MAX_VOCAB = 1 << 20
"""Orders of tokens have 20 bits for the id (kIdBits)."""
BINS, MAX_LIST, ROW_BYTES = 1024, 2048, 80
_FULL_DEVICE = 4096
"""Tiles of a call from which on a thread block takes more than one."""

PARAMS_DTYPE = np.dtype(
    [
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("seed", np.int64),
        ("choice", np.uint32),
        ("greedy", np.uint32),
    ]
)
"""Of one slot, as struct SlotParams; off: top_k at least V, top_p 1, min_p 0."""

_TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16"}
_SPECS = {
    dtype: {part: KernelSpec("sampling.cu", f"sample_{part}<{name}>") for part in ("best", "mass", "cut", "search")}
    for dtype, name in _TYPES.items()
}

_CALL = struct.Struct("17Q2i")
"""struct Call."""


def specs(arch: str) -> list[KernelSpec]:
    """Every instance that may be launched; the same on all architectures."""
    return [spec for parts in _SPECS.values() for spec in parts.values()]


class SlotParams:
    """Parameters of all sequence slots, on the host and, when asked for, on the device.

    Only slots that changed since are sent. The device's copy keeps its place. A slot that was never assigned is greedy,
    so that a row of padding may name it.
    """

    def __init__(self, num_slots: int, device: torch.device, upload: Upload) -> None:
        self.host = np.zeros(num_slots, dtype=PARAMS_DTYPE)
        """Whoever changes an element calls :meth:`changed`."""
        self.host["greedy"] = 1
        self._upload = upload
        self._words = self.host.view(np.int64).reshape(num_slots, -1)
        self._device = torch.from_numpy(self._words.copy()).to(device)
        self._changed: set[int] = set()

    def changed(self, slot: int) -> None:
        """The slot's parameters are others now."""
        self._changed.add(slot)

    def on_device(self) -> Tensor:
        """int64 [slots, 5], each row a struct SlotParams."""
        if self._changed:
            slots = np.array(sorted(self._changed), dtype=np.int64)
            self._changed.clear()
            count = len(slots)
            sent = self._upload(np.concatenate((slots, self._words[slots].reshape(-1))))
            self._device.index_copy_(0, sent[:count], sent[count:].view(count, -1))
        return self._device


def invalid_bitmap(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """int32 [ceil(V / 32)]: bit i % 32 of word i / 32 is set for each of the ids."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class SamplingKernels:
    """The kernels with what they keep between launches: 33 KB per row of logits at V = 151,936.

    For one stream at a time: calls share the memory. ``end`` is the first id of the vocabulary's padding, and
    ``invalid`` (int32 [ceil(V / 32)], or None) the bitmap of other ids without a token.
    """

    def __init__(self, max_rows: int, end: int, invalid: Tensor | None, device: torch.device) -> None:
        if not 0 < end <= MAX_VOCAB:
            raise ValueError(f"the vocabulary of {end} tokens must have at least one and at most {MAX_VOCAB}")
        self.end = end
        self._invalid = invalid
        self._tiles_of_row = -(-end // TILE)
        self.device = torch.empty(0, device=device).device  # with its index
        self.reserve(max_rows)

    def reserve(self, rows: int) -> None:
        """Make room for calls of up to `rows` rows. Graphs captured before that hold on to the memory of then."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=self.device)

        self.max_rows = rows
        self._memory = {
            "rows": zeros(ROW_BYTES // 8),
            "best": zeros(self._tiles_of_row),
            "least": zeros(self._tiles_of_row, dtype=torch.float32),
            "sums": zeros(self._tiles_of_row),
            "counts": zeros(BINS, dtype=torch.int32),
            "masses": zeros(BINS),
            "list": zeros(MAX_LIST),
            "listed": zeros(dtype=torch.int32),
            "arrivals": zeros(dtype=torch.int32),
        }
        self._addresses = [tensor.data_ptr() for tensor in self._memory.values()]

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        indices: Tensor,
        params: Tensor,
        tokens: Tensor,
        failed: Tensor,
        *,
        random: bool,
        filtered: bool,
    ) -> None:
        """Write the token (int64) and the failure (bool) of each of R rows, on the current stream; capturable.

        ``logits`` float32 or bfloat16 [R, V], any row stride, not changed; ``slots`` and ``indices`` int32 [R], the
        parameters' slot and the output index of each row; ``params`` int64 [slots, 5] (:class:`SlotParams`).
        `random`: whether a slot in use is not greedy; `filtered`: whether one of those has top_k or top_p. Both may be
        true without need. A row without a finite maximum fails, and its token is 0.
        """
        rows = len(logits)
        if rows > self.max_rows:
            self.reserve(1 << (rows - 1).bit_length())
        tiles, splits = self.split(rows)
        call = self._pack(logits, slots, indices, params, tokens, failed, tiles)
        kernels = _SPECS[logits.dtype]
        get_kernel(kernels["best"], self.device).launch((splits, rows), THREADS, (call,), dependent=True)
        if random:
            get_kernel(kernels["mass"], self.device).launch((splits, rows), THREADS, (call,), dependent=True)
        if filtered:
            get_kernel(kernels["cut"], self.device).launch((splits, rows), THREADS, (call,), dependent=True)
            get_kernel(kernels["search"], self.device).launch(
                rows, SEARCH_THREADS, (call, np.int32(splits)), dependent=True
            )

    def split(self, rows: int) -> tuple[int, int]:
        """(tiles of a split, splits of a row) for a call of so many rows. No token depends on it."""
        tiles = min(MAX_TILES, max(1, rows * self._tiles_of_row // _FULL_DEVICE))
        return tiles, -(-self._tiles_of_row // tiles)

    def _pack(
        self,
        logits: Tensor,
        slots: Tensor,
        indices: Tensor,
        params: Tensor,
        tokens: Tensor,
        failed: Tensor,
        tiles: int,
    ) -> bytes:
        """struct Call."""
        if logits.stride(1) != 1 or logits.shape[1] < self.end:
            raise ValueError(f"logits {tuple(logits.shape)} of strides {logits.stride()} for {self.end} tokens")
        return _CALL.pack(
            logits.data_ptr(),
            logits.stride(0),
            0 if self._invalid is None else self._invalid.data_ptr(),
            slots.data_ptr(),
            indices.data_ptr(),
            params.data_ptr(),
            *self._addresses,
            tokens.data_ptr(),
            failed.data_ptr(),
            self.end,
            tiles,
        )
