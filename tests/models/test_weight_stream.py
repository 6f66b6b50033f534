"""Streaming of safetensors into fused weights, with small buffers, on a CPU; and on a GPU where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minillm.core.errors import ModelLoadError
from minillm.models import loader
from minillm.models.loader import SafetensorsFolder, load_model
from minillm.models.weight_stream import stored_tensors, stream_weights
from model_folders import save_tiny_model

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (37, 16), "b": (5,), "c": (64, 33), "d": (1, 1)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_every_tensor_arrives_in_its_rows_converted_as_torch_does(
    tmp_path: Path, tensors, stored: torch.dtype, wanted: torch.dtype, threads: int
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in tensors.items()}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    places = stored_tensors(path)
    assert set(places) == set(tensors)
    fused = torch.zeros(74, 16, dtype=wanted)
    views = {"a": fused[37:], **{name: torch.zeros(tensors[name].shape, dtype=wanted) for name in "bcd"}}
    stream_weights([(views[name], places[name]) for name in tensors], threads=threads, buffer_bytes=256)
    for name, tensor in tensors.items():
        assert torch.equal(views[name], tensor.to(wanted)), name
    assert not fused[:37].any()


def test_a_file_that_ends_early_is_an_error_that_names_it(tmp_path: Path, tensors) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    places = stored_tensors(path)
    path.write_bytes(path.read_bytes()[:-40])
    views = [(torch.zeros(place.shape), place) for place in places.values()]
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: truncated"):
        stream_weights(views, threads=2, buffer_bytes=256)


def test_integers_and_quantised_tensors_are_left_to_the_loader_that_refuses_them(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(4), "w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert set(stored_tensors(tmp_path / "model.safetensors")) == {"w"}
    stream_weights([])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_streamed_is_the_folder_read(tmp_path: Path, monkeypatch, dtype: str) -> None:
    """The GPU's way through the loader, on a CPU."""
    folder = save_tiny_model(tmp_path, "qwen3")
    wanted = load_model(folder, dtype)
    built: list[int] = []
    fill = loader.fill

    def streamed_fill(decoder, source, where) -> None:
        views = decoder.weight_views()
        stored = source.stored()
        copies = [(view, stored[name]) for name, view in views.items()]
        stream_weights(copies, buffer_bytes=4096)
        built.append(len(copies))

    monkeypatch.setattr(loader, "fill", streamed_fill)
    found = load_model(folder, dtype)
    monkeypatch.setattr(loader, "fill", fill)
    assert built and built[0] > 20
    assert found.packed == wanted.packed
    if not wanted.packed:
        for name, view in wanted.decoder.weight_views().items():
            assert torch.equal(view, found.decoder.weight_views()[name]), name


def test_shards_name_their_own_files(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    with SafetensorsFolder(folder) as source:
        stored = source.stored()
        assert set(stored) == source.names()
        assert all(place.path.parent == folder for place in stored.values())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_on_a_gpu_has_the_weights_of_the_same_on_a_cpu(tmp_path: Path, dtype: str) -> None:
    folder = save_tiny_model(tmp_path, "qwen3")
    wanted = load_model(folder, "float32").decoder.weight_views()
    found = load_model(folder, dtype, "cuda").decoder.weight_views()
    assert found.keys() == wanted.keys()
    for name, view in wanted.items():
        assert torch.equal(found[name].cpu(), view.to(getattr(torch, dtype))), name
