"""The GGUF reader itself: values, and corrupt or truncated files at every length."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_oracles import make_reference

from minillm.core.errors import ModelLoadError
from minillm.models import gguf as gguf_reader
from minillm.models.gguf import GGUFFile
from minillm.models.loader import load_model


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<s>", "né", "日本"])
    writer.add_token_types([3, 1, 1])
    writer.add_bool("test.flag", True)
    writer.add_tensor("a.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.add_tensor("b.weight", np.arange(96, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def opened(data: bytes, folder: Path) -> GGUFFile:
    path = folder / "file.gguf"
    path.write_bytes(data)
    return GGUFFile(path)


def read_everything(data: bytes, folder: Path) -> None:
    with opened(data, folder) as file:
        for name in file:
            file.load(name)


def test_metadata_and_tensors_as_written(small_file: bytes, tmp_path) -> None:
    with opened(small_file, tmp_path) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["llama.context_length"] == 512
        assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
        assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "né", "日本"]
        assert file.metadata["tokenizer.ggml.token_type"] == [3, 1, 1]
        assert file.metadata["test.flag"] is True
        assert file.tensors["a.weight"].shape == (2, 32)
        assert torch.equal(file.load("a.weight"), torch.arange(64.0).view(2, 32))
        assert torch.equal(file.load("b.weight"), torch.arange(96.0))
        kept = file.load("a.weight")
    assert kept[1, 31] == 63  # tensors outlive the file


def test_a_missing_tensor_is_named(small_file: bytes, tmp_path) -> None:
    with opened(small_file, tmp_path) as file, pytest.raises(ModelLoadError, match=r"c\.weight"):
        file.load("c.weight")


def test_truncation_at_any_length_is_refused(small_file: bytes, tmp_path) -> None:
    used = len(small_file.rstrip(b"\0"))  # what follows the last value is padding
    for length in range(0, used, 7):
        with pytest.raises(ModelLoadError):
            read_everything(small_file[:length], tmp_path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 500), value=st.integers(0, 255), width=st.sampled_from([1, 4, 8]))
def test_corruption_anywhere_is_refused_or_read(
    small_file: bytes, tmp_path, position: int, value: int, width: int
) -> None:
    """No byte, wherever it changes, may crash the reader or make it allocate what the file does not hold."""
    data = bytearray(small_file)
    position = min(position, len(data) - width)
    data[position : position + width] = bytes([value]) * width
    try:
        read_everything(bytes(data), tmp_path)
    except ModelLoadError as error:
        assert "file.gguf" in str(error)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"GGML" + bytes(60), "GGML"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + b"key", "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IQ", 8, 2**40), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**50), "array"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "type 99"),
    ],
)
def test_headers_that_are_wrong_say_how(data: bytes, message: str, tmp_path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        opened(data, tmp_path)


def tensor_entry(name: str = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    packed = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
    return packed + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def with_entries(*entries: bytes, data: int = 4096) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, len(entries), 0) + b"".join(entries) + bytes(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (with_entries(tensor_entry(dims=(32,) * 5)), "5 dimensions"),
        (with_entries(tensor_entry(dims=())), "0 dimensions"),
        (with_entries(tensor_entry(dims=(32, 0))), "dimension of 0"),
        (with_entries(tensor_entry(kind=777)), "type number 777"),
        (with_entries(tensor_entry(kind=3, dims=(33,))), "no whole number of Q4_1 blocks"),
        (with_entries(tensor_entry(offset=7)), "offset 7"),
        (with_entries(tensor_entry(dims=(2**40, 2**40))), "truncated"),
        (with_entries(tensor_entry(offset=2**62)), "truncated"),
        (with_entries(tensor_entry(), tensor_entry()), "twice"),
    ],
)
def test_tensor_tables_that_are_wrong_say_how(content: bytes, message: str, tmp_path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        opened(content, tmp_path)


def test_a_model_file_cut_in_its_data_is_refused(tmp_path) -> None:
    path = write_gguf(make_reference("llama"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(ModelLoadError, match="truncated"):
        load_model(path)


def test_a_folder_or_missing_path_is_refused(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(ModelLoadError, match="cannot be read"):
            GGUFFile(path)


def test_an_array_that_would_fill_the_memory_is_refused(small_file: bytes, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gguf_reader, "_MAX_ARRAY", 2)
    with pytest.raises(ModelLoadError, match="an array of 3 entries"):
        opened(small_file, tmp_path)
