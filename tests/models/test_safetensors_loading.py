"""Safetensors folders: shards, ties, dtypes, and every way in which a folder can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_oracles import make_reference, prompt, reference_logits, run, save
from safetensors.torch import load_file, save_file

from minillm.core.errors import ConfigError, ModelLoadError
from minillm.models.loader import load_model


def edit(folder: Path, change: Any) -> Path:
    """Rewrite model.safetensors after ``change(tensors)``."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(make_reference("llama"), tmp_path / "model")


def test_sharded_folder_equals_the_single_file(tmp_path) -> None:
    reference = make_reference("qwen2")
    sharded = save(reference, tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    ids = prompt(20)
    ours = run(load_model(sharded, dtype="float32").decoder, ids)
    torch.testing.assert_close(ours, reference_logits(reference, ids), atol=1e-4, rtol=1e-4)


def test_every_weight_arrives_in_its_place(tmp_path) -> None:
    reference = make_reference("qwen3", attention_bias=True)
    views = load_model(save(reference, tmp_path), dtype="float32").decoder.weight_views()
    state = reference.state_dict()
    assert set(views) == set(state)
    assert all(torch.equal(views[name], state[name]) for name in state)


def test_views_cover_every_parameter_once(folder: Path) -> None:
    """No byte of a weight is outside the views, so "all views written" is "all parameters written"."""
    decoder = load_model(folder, dtype="float32").decoder
    for view in decoder.weight_views().values():
        view.fill_(1.0)
    parameters = [decoder.embedding, decoder.norm.weight, decoder.head.weight]
    for layer in decoder.layers:
        parameters += [layer.input_norm.weight, layer.post_attention_norm.weight]
        parameters += [getattr(layer, name).weight for name in ("qkv", "output", "gate_up", "down")]
    assert all(bool((parameter == 1.0).all()) for parameter in parameters)
    assert sum(view.numel() for view in decoder.weight_views().values()) == sum(p.numel() for p in parameters)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_file_is_widened_exactly(stored: torch.dtype, tmp_path) -> None:
    reference = make_reference("llama").to(stored)
    views = load_model(save(reference, tmp_path), dtype="float32").decoder.weight_views()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(views[name], tensor.float()), name


class TestTiedEmbeddings:
    def test_tied_and_absent_shares_the_embedding(self, tmp_path) -> None:
        reference = make_reference("llama", tie_word_embeddings=True)
        folder = save(reference, tmp_path)
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")
        decoder = load_model(folder, dtype="float32").decoder
        assert decoder.head.weight.data_ptr() == decoder.embedding.data_ptr()
        ids = prompt(20)
        torch.testing.assert_close(run(decoder, ids), reference_logits(reference, ids), atol=1e-4, rtol=1e-4)

    def test_tied_and_present_shares_the_embedding(self, tmp_path) -> None:
        reference = make_reference("llama", tie_word_embeddings=True)

        def add_head(tensors: dict) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

        decoder = load_model(edit(save(reference, tmp_path), add_head), dtype="float32").decoder
        assert decoder.head.weight.data_ptr() == decoder.embedding.data_ptr()
        ids = prompt(20)
        torch.testing.assert_close(run(decoder, ids), reference_logits(reference, ids), atol=1e-4, rtol=1e-4)

    def test_tied_but_different_follows_transformers(self, tmp_path) -> None:
        """A flag that contradicts the file: Transformers 5 keeps the head that is there; so do we."""
        import transformers

        def add_head(tensors: dict) -> None:
            torch.manual_seed(3)
            tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])

        folder = edit(save(make_reference("llama", tie_word_embeddings=True), tmp_path), add_head)
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        ids = prompt(20)
        ours = run(load_model(folder, dtype="float32").decoder, ids)
        torch.testing.assert_close(ours, reference_logits(reference, ids), atol=1e-4, rtol=1e-4)

    def test_tied_with_only_the_head_present_uses_it(self, tmp_path) -> None:
        reference = make_reference("llama", tie_word_embeddings=True)

        def rename(tensors: dict) -> None:
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

        decoder = load_model(edit(save(reference, tmp_path), rename), dtype="float32").decoder
        ids = prompt(20)
        torch.testing.assert_close(run(decoder, ids), reference_logits(reference, ids), atol=1e-4, rtol=1e-4)

    def test_untied_and_absent_is_an_error_that_names_the_tensor(self, folder: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"1 tensor is missing: 'lm_head\.weight'"):
            load_model(edit(folder, lambda tensors: tensors.pop("lm_head.weight")))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.1.input_layernorm.weight",
    ],
)
def test_missing_tensor_is_named(name: str, folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"missing: '{name}'"):
        load_model(edit(folder, lambda tensors: tensors.pop(name)))


def test_left_over_tensor_is_named(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"not known to this model: 'model\.layers\.0\.self_attn\.sinks'"):
        load_model(edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.ones(4)})))


def test_stored_rope_tables_of_old_checkpoints_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load_model(edit(folder, lambda tensors: tensors.update({name: torch.ones(8)})))


@pytest.mark.parametrize("shape", [(96, 63), (95, 64), (96,), (64, 96)])
def test_wrong_shape_is_named_with_both_shapes(shape: tuple[int, ...], folder: Path) -> None:
    name = "model.layers.1.mlp.gate_proj.weight"
    with pytest.raises(ModelLoadError, match=name) as caught:
        load_model(edit(folder, lambda tensors: tensors.update({name: torch.ones(shape)})))
    assert str(list(shape)) in str(caught.value)
    assert "[96, 64]" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32])
def test_quantised_safetensors_are_refused(dtype: torch.dtype, folder: Path) -> None:
    name = "model.layers.1.mlp.gate_proj.weight"
    with pytest.raises(ModelLoadError, match=name):
        load_model(edit(folder, lambda tensors: tensors.update({name: torch.ones(96, 64).to(dtype)})))


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, -1])
def test_truncated_file_is_refused(keep: float, folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int(len(data) * keep) if isinstance(keep, float) else keep if keep >= 0 else len(data) + keep
    path.write_bytes(data[:length])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: not a usable safetensors file"):
        load_model(folder)


def test_bytes_that_are_no_safetensors_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x80\x04pickle" * 100)
    with pytest.raises(ModelLoadError, match="not a usable safetensors file"):
        load_model(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "consolidated.00.pt"])
def test_pickles_are_refused_with_the_reason(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelLoadError, match=f"{name} is a pickle"):
        load_model(folder)


class TestIndex:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        return save(make_reference("llama"), tmp_path / "sharded", max_shard_size="40KB")

    def edit_index(self, folder: Path, change: Any) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    def test_missing_shard_is_named(self, sharded: Path) -> None:
        victim = sorted(sharded.glob("model-*.safetensors"))[1]
        victim.unlink()
        with pytest.raises(ModelLoadError, match=victim.name):
            load_model(sharded)

    def test_truncated_shard_is_named(self, sharded: Path) -> None:
        victim = sorted(sharded.glob("model-*.safetensors"))[1]
        victim.write_bytes(victim.read_bytes()[:-10])
        with pytest.raises(ModelLoadError, match=victim.name):
            load_model(sharded)

    def test_tensor_that_its_shard_does_not_hold_is_named(self, sharded: Path) -> None:
        first, second = (path.name for path in sorted(sharded.glob("model-*.safetensors"))[:2])

        def move(weight_map: dict) -> None:
            weight_map["model.norm.weight"] = first if weight_map["model.norm.weight"] != first else second

        self.edit_index(sharded, move)
        with pytest.raises(ModelLoadError, match=r"model\.norm\.weight"):
            load_model(sharded)

    @pytest.mark.parametrize("shard", ["../other/model.safetensors", "/etc/passwd", 3])
    def test_a_shard_outside_the_folder_is_refused(self, sharded: Path, shard: object) -> None:
        self.edit_index(sharded, lambda weight_map: weight_map.update({"model.norm.weight": shard}))
        with pytest.raises(ModelLoadError, match="plain file name"):
            load_model(sharded)

    def test_shards_without_an_index_are_refused(self, sharded: Path) -> None:
        (sharded / "model.safetensors.index.json").unlink()
        with pytest.raises(ModelLoadError, match=r"no model\.safetensors\.index\.json"):
            load_model(sharded)


@pytest.mark.parametrize(("content", "message"), [("{", "cannot be read"), ("[1]", "not a JSON object")])
def test_broken_config_is_refused(content: str, message: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"vocab_size": 10**15}, "no memory for the weights"), ({"num_hidden_layers": 10**12}, "limit of 4096 layers")],
)
def test_a_config_that_promises_more_than_any_memory_holds_is_refused(changes, message: str, folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(edit_config(folder, **changes), dtype="float32")
    assert "\n" not in str(caught.value)


def test_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        load_model(folder)


def test_generation_config_is_returned_and_its_end_ids_are_added(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9], "temperature": 0.7}))
    model = load_model(edit_config(folder, eos_token_id=5))
    assert model.generation_config["temperature"] == 0.7
    assert model.config.eos_token_ids == (5, 2, 9)


def test_loaded_model_says_where_it_is_from(folder: Path) -> None:
    model = load_model(str(folder), dtype="float32")
    assert (model.path, model.kind, model.dtype, model.name) == (folder, "safetensors", "float32", "model")
    assert model.generation_config.get("eos_token_id") == 2  # written by save_pretrained


@pytest.mark.parametrize("dtype", ["int8", "fp32", "", "bf16"])
def test_unknown_dtype_is_refused(dtype: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype="):
        load_model(folder, dtype=dtype)


def test_a_device_that_is_not_here_is_refused(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='cuda:0'"):
        load_model(folder, device="cuda:0")
