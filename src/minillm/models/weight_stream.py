"""Weights from safetensors files straight to their place on a GPU.

```
file (page cache) ──pread──► page-locked buffer ──copy engine──► rows of a fused weight      two buffers per thread,
                             one being filled ....... the other on its way                   several threads
```
Reading through the file's memory map would fault in every page and copy it a second time inside the driver, on one
thread. Here a thread copies once, out of the page cache, and the bus works meanwhile. Nothing of a checkpoint is ever
held in memory but the buffers. A tensor of another dtype is sent as it is and converted on the device.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minillm.core.errors import ModelLoadError

BUFFER_BYTES = 8 << 20
MAX_THREADS = 6
"""A thread copies 5 to 8 GB/s out of the page cache, so these keep a bus of 50 GB/s busy most of the time."""

MAX_HEADER_BYTES = 100 << 20
"""The format's own limit."""

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredTensor(NamedTuple):
    """Where a tensor's bytes are: row-major, without gaps, from `offset` of the file on."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Floating-point tensors of a safetensors file, by name. Others (quantised, integers) are left out.

    The file is one that the safetensors library has opened: its header was checked there, ranges included.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ModelLoadError(f"{path}: a header of {length} bytes is not a safetensors file's")
        header: Mapping[str, Any] = json.loads(file.read(length))
    return {
        name: StoredTensor(path, 8 + length + entry["data_offsets"][0], _DTYPES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in _DTYPES
    }


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements [start, start + count) of a flat target, and where their bytes are."""

    target: Tensor
    start: int
    count: int
    path: Path
    offset: int
    dtype: torch.dtype


def _pieces(copies: Sequence[tuple[Tensor, StoredTensor]], buffer_bytes: int) -> Iterator[_Piece]:
    for view, stored in copies:
        size, step = stored.dtype.itemsize, buffer_bytes // stored.dtype.itemsize
        target = view.view(-1)
        for start in range(0, len(target), step):
            count = min(step, len(target) - start)
            yield _Piece(target, start, count, stored.path, stored.offset + start * size, stored.dtype)


def stream_weights(
    copies: Sequence[tuple[Tensor, StoredTensor]],
    *,
    threads: int | None = None,
    buffer_bytes: int = BUFFER_BYTES,
) -> None:
    """Fill every view (contiguous, of its stored tensor's shape, all on one device) from its file.

    Raises :class:`ModelLoadError` for a file that ends early or cannot be read; views are then partly written.
    """
    if not copies:
        return
    device = copies[0][0].device
    work: SimpleQueue[_Piece] = SimpleQueue()
    for piece in _pieces(copies, buffer_bytes):
        work.put(piece)
    files = {path: os.open(path, os.O_RDONLY) for path in dict.fromkeys(stored.path for _, stored in copies)}
    errors: list[Exception] = []
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what used the views' memory before may still run, on another stream
        count = min(work.qsize(), threads or min(MAX_THREADS, os.cpu_count() or 1))
        lanes = [_Lane(device, files, work, buffer_bytes, errors) for _ in range(count)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    finally:
        for file in files.values():
            os.close(file)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if errors:
        raise errors[0]


class _Lane(threading.Thread):
    """Takes pieces from the queue until it is empty, or until another lane has failed."""

    def __init__(
        self,
        device: torch.device,
        files: Mapping[Path, int],
        work: SimpleQueue[_Piece],
        buffer_bytes: int,
        errors: list[Exception],
    ) -> None:
        super().__init__(name="minillm-weights", daemon=True)
        self._device = device
        self._files = files
        self._work = work
        self._buffer_bytes = buffer_bytes
        self._errors = errors

    def run(self) -> None:
        """Move pieces; an error ends all lanes."""
        try:
            with torch.inference_mode():
                self._move_all()
        except Exception as error:
            self._errors.append(error)

    def _move_all(self) -> None:
        on_gpu = self._device.type == "cuda"
        buffers = [torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        stream = torch.cuda.Stream(self._device) if on_gpu else None
        sent: list[torch.cuda.Event | None] = [None, None]
        turn = 0
        while not self._errors:
            try:
                piece = self._work.get_nowait()
            except Empty:
                break
            event = sent[turn]
            if event is not None:
                event.synchronize()
            data = buffers[turn][: piece.count * piece.dtype.itemsize]
            self._read(piece, data)
            with torch.cuda.stream(stream):
                self._send(piece, data.view(piece.dtype))
                if stream is not None:
                    sent[turn] = stream.record_event()
            turn = 1 - turn
        if stream is not None:
            stream.synchronize()

    def _read(self, piece: _Piece, data: Tensor) -> None:
        place, done = data.numpy().data, 0
        while done < len(place):
            try:
                count = os.preadv(self._files[piece.path], [place[done:]], piece.offset + done)
            except OSError as error:
                raise ModelLoadError(f"{piece.path}: cannot be read: {error}") from error
            if not count:
                raise ModelLoadError(f"{piece.path}: truncated: it ends at byte {piece.offset + done}")
            done += count

    def _send(self, piece: _Piece, data: Tensor) -> None:
        target = piece.target[piece.start : piece.start + piece.count]
        if data.dtype != target.dtype:
            data = data.to(self._device, non_blocking=True)  # a copy that converts as well would convert on the host
        target.copy_(data, non_blocking=True)
