"""GGUF files: header and metadata, tensor table, dequantisation.

An own reader because it is quick (the built-in model's header, 98,000 strings, in about a tenth of a second; the
`gguf` package's reader takes two) and because it checks every length against the file before using it, so a
corrupt or truncated file is a :class:`ModelLoadError` and never a wrong weight. Tensor bytes stay in the memory map
until they are asked for. The layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.core.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4
_MAX_NESTING = 4
_MAX_ARRAY = 1 << 24
"""Entries of a metadata array: 16 times the largest vocabularies. A Python object each, they take more memory than the
file says."""

# Weights decoded here with torch: name -> (weights per block, bytes per block). All others go through gguf.quants.
_OWN_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor table. ``shape`` is in torch order (rows first); offsets are bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    block_size: int
    type_size: int
    offset: int

    @property
    def num_elements(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count

    @property
    def num_bytes(self) -> int:
        return self.num_elements // self.block_size * self.type_size


class _Cursor:
    """Reads little-endian values from a buffer; every read is checked against its end."""

    def __init__(self, buffer: mmap.mmap | bytes, path: Path) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.path = path
        self.position = 0

    def fail(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: not a usable GGUF file: {what} (at byte {self.position} of {self.size})")

    def claim(self, count: int) -> int:
        start = self.position
        if count > self.size - start:
            raise self.fail(f"{count} more bytes are needed; the file is truncated or a length is corrupt")
        self.position = start + count
        return start

    def scalar(self, code: str) -> Any:
        start = self.claim(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.buffer, start)[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.claim(length)
        return self.buffer[start : start + length].decode("utf-8", "surrogateescape")

    def strings(self, count: int) -> list[str]:
        """`count` strings: a tight loop, since a vocabulary has hundreds of thousands."""
        buffer, size, position = self.buffer, self.size, self.position
        unpack = struct.Struct("<Q").unpack_from
        out = []
        try:
            for _ in range(count):
                (length,) = unpack(buffer, position)
                position += 8
                if length > size - position:
                    self.position = position
                    raise self.fail(f"a string of {length} bytes; the file is truncated or a length is corrupt")
                out.append(buffer[position : position + length].decode("utf-8", "surrogateescape"))
                position += length
        except struct.error:
            raise self.fail("it ends inside an array of strings") from None
        self.position = position
        return out

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(depth)
        code = _SCALARS.get(kind)
        if code is None:
            raise self.fail(f"metadata type {kind} is unknown")
        return self.scalar(code)

    def array(self, depth: int) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > min(_MAX_ARRAY, self.size - self.position):
            raise self.fail(f"an array of {count} entries; the file is truncated or a length is corrupt")
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            if depth >= _MAX_NESTING:
                raise self.fail("arrays are nested too deeply")
            return [self.array(depth + 1) for _ in range(count)]
        code = _SCALARS.get(kind)
        if code is None:
            raise self.fail(f"metadata array type {kind} is unknown")
        start = self.claim(count * struct.calcsize("<" + code))
        return list(struct.unpack_from(f"<{count}{code}", self.buffer, start))


class GGUFFile:
    """An open GGUF file: ``metadata`` (key -> value) and ``tensors`` (name -> :class:`GGUFTensor`).

    Strings that are not UTF-8 keep their bytes as surrogate escapes.

    Use as a context manager, or call :meth:`close`; the memory map lives until then.

    Raises:
        ModelLoadError: the file is missing, is no GGUF of version 2 or 3, is truncated or inconsistent.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelLoadError(f"{self.path}: not a usable GGUF file: it is empty") from None
        except OSError as error:
            raise ModelLoadError(f"{self.path}: cannot be read: {error.strerror}") from None
        try:
            self._parse(_Cursor(self._map, self.path))
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the memory map. Tensors already returned stay valid (they are copies)."""
        self._map.close()

    def _parse(self, cursor: _Cursor) -> None:
        if cursor.buffer[:4] != _MAGIC:
            raise cursor.fail(f"it starts with {bytes(cursor.buffer[:4])!r}, not {_MAGIC!r}")
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            hint = "; the byte order is big-endian" if version in (2 << 24, 3 << 24) else ""
            raise cursor.fail(f"version {version} is not supported (2 and 3 are){hint}")
        num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = cursor.string()
            if key in self.metadata:
                raise cursor.fail(f"metadata key {key!r} occurs twice")
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        entries = [self._tensor_entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise cursor.fail(f"general.alignment={alignment!r} is not a power of two")
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_name, block_size, type_size, offset in entries:
            tensor = GGUFTensor(name, shape, type_name, block_size, type_size, data_start + offset)
            if name in self.tensors:
                raise cursor.fail(f"tensor {name!r} occurs twice")
            if offset % alignment:
                raise cursor.fail(f"tensor {name!r}: offset {offset} is not a multiple of {alignment}")
            if shape[-1] % block_size:
                raise cursor.fail(f"tensor {name!r}: rows of {shape[-1]} are no whole number of {type_name} blocks")
            if tensor.offset + tensor.num_bytes > cursor.size:
                raise cursor.fail(
                    f"tensor {name!r} ends at byte {tensor.offset + tensor.num_bytes}; the file is truncated"
                )
            self.tensors[name] = tensor

    @staticmethod
    def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int, int]:
        name = cursor.string()
        num_dims = cursor.scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are allowed")
        shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
        if 0 in shape:
            raise cursor.fail(f"tensor {name!r} has a dimension of 0")
        type_name, block_size, type_size = _type_layout(cursor.scalar("I"), name, cursor)
        return name, shape, type_name, block_size, type_size, cursor.scalar("Q")

    def raw(self, name: str) -> torch.Tensor:
        """The stored bytes of a tensor as uint8 [rows, bytes per row] (one row for a vector); a copy."""
        import torch

        entry = self._entry(name)
        data = bytearray(self._map[entry.offset : entry.offset + entry.num_bytes])
        return torch.frombuffer(data, dtype=torch.uint8).view(entry.num_elements // entry.shape[-1], -1)

    def load(self, name: str) -> torch.Tensor:
        """A tensor as float32 of its logical shape, whatever its stored type."""
        entry = self._entry(name)
        return dequantize(self.raw(name), entry.type_name).view(entry.shape)

    def _entry(self, name: str) -> GGUFTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelLoadError(f"{self.path}: tensor {name!r} is missing") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)


def _type_layout(code: int, tensor: str, cursor: _Cursor) -> tuple[str, int, int]:
    """(type name, weights per block, bytes per block) of a GGML type number."""
    if code in _OWN_TYPES:
        return _OWN_TYPES[code]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise cursor.fail(f"tensor {tensor!r} has type number {code}, which is unknown") from None
    block_size, type_size = GGML_QUANT_SIZES[kind]
    return kind.name, block_size, type_size


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """4-bit codes of Q4_0/Q4_1 blocks: uint8 [..., 16] -> uint8 [..., 32]; the low halves are the first 16."""
    import torch

    return torch.cat((packed & 15, packed >> 4), dim=-1)


def half_column(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The little-endian float16 at byte `start` of each block: uint8 [n, bytes] -> float32 [n, 1]."""
    import torch

    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def dequantize(raw: torch.Tensor, type_name: str) -> torch.Tensor:
    """Stored bytes -> float32, flat in storage order.

    Args:
        raw: uint8, any shape, contiguous.
        type_name: GGML type name, such as "Q4_1".

    Raises:
        ModelLoadError: nothing here or in gguf.quants decodes that type.
    """
    import torch

    data = raw.reshape(-1)
    if type_name == "F32":
        return data.view(torch.float32)
    if type_name == "F16":
        return data.view(torch.float16).float()
    if type_name == "BF16":
        return data.view(torch.bfloat16).float()
    if type_name == "Q8_0":
        blocks = data.view(-1, 34)
        return (blocks[:, 2:].view(torch.int8).float().mul_(half_column(blocks, 0))).view(-1)
    if type_name == "Q4_0":
        blocks = data.view(-1, 18)
        return nibbles(blocks[:, 2:]).float().sub_(8).mul_(half_column(blocks, 0)).view(-1)
    if type_name == "Q4_1":
        blocks = data.view(-1, 20)
        return nibbles(blocks[:, 4:]).float().mul_(half_column(blocks, 0)).add_(half_column(blocks, 2)).view(-1)
    return _dequantize_with_gguf(data, type_name)


def _dequantize_with_gguf(data: torch.Tensor, type_name: str) -> torch.Tensor:
    import gguf.quants
    import torch
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType[type_name]
    try:
        # One row per 16 blocks: gguf.quants works through a matrix 16 rows at a time.
        type_size = GGML_QUANT_SIZES[kind][1]
        rows = data.view(-1, type_size) if data.numel() % (64 * type_size) else data.view(-1, 64 * type_size)
        return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind)).reshape(-1)
    except NotImplementedError:
        raise ModelLoadError(f"GGUF type {type_name} cannot be dequantised") from None
