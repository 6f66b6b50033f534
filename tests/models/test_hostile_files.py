"""Malformed model files: each is a typed error of one line, whatever it makes the readers stumble over."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from model_oracles import make_reference, save

from minillm import EngineConfig
from minillm.core.errors import ConfigError, ModelLoadError
from minillm.engine.factory import build_engine, default_sampling_params
from minillm.models.chat_template import load_chat_template
from minillm.models.default_model import resolve_model
from minillm.models.gguf import GGUFFile
from minillm.models.loader import load_model
from minillm.models.tokenizer import load_tokenizer
from minillm.models.untrusted import reading
from tiny_tokenizers import byte_level_metadata, changed
from tiny_tokenizers import write_gguf as write_tokenizer_gguf

DEEP = "[" * 100_000
LONG = "a" * 5000
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(make_reference("llama"), tmp_path / "model")


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def is_refused(model: Path) -> bool:
    with pytest.raises(ModelLoadError) as caught:
        load_model(model, dtype="float32")
    return "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5},
        {"architectures": [["x"]]},
        {"num_hidden_layers": 10**15},
        {"num_hidden_layers": 10**5},
        {"hidden_size": 10**15},
        {"vocab_size": 10**30},
        {"layer_types": 5},
        {"rms_norm_eps": NAN},
        {"rms_norm_eps": -1},
        {"eos_token_id": "x"},
        {"eos_token_id": [None, 1.5]},
        {"eos_token_id": {}},
        {"bos_token_id": [1]},
        {"model_type": "mistral", "architectures": [], "sliding_window": "x"},
        {"rope_parameters": None, "rope_scaling": "linear"},
        {"rope_parameters": {"rope_theta": 0}},
        {"rope_parameters": {"rope_theta": "x"}},
        {"rope_parameters": {"rope_theta": NAN}},
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": INF}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=str,
)
def test_config_values_of_a_wrong_type_or_size(folder: Path, changes: dict[str, Any]) -> None:
    assert is_refused(change_config(folder, **changes))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", [DEEP, "[]", "5", "{", '{"eos_token_id": {}, "weight_map": {"a": "\\ud800"}}'])
def test_json_files_of_a_wrong_form(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    assert is_refused(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_tokenizer_files_that_nest_without_end(folder: Path, name: str) -> None:
    from tiny_tokenizers import byte_level_tokenizer

    byte_level_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode("hi")
    (folder / name).write_text(DEEP)
    with pytest.raises(ModelLoadError):
        load_tokenizer(folder)


def test_eos_ids_outside_of_the_logits_are_not_used(folder: Path) -> None:
    from tiny_tokenizers import byte_level_tokenizer

    byte_level_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    change_config(folder, eos_token_id=[3, 10**6, -1])
    parts = build_engine(EngineConfig(str(folder), dtype="float32", num_gpu_blocks_override=8, swap_space=0))
    assert parts.inputs.eos_token_ids == {2, 3}  # 2 is what generation_config.json names
    parts.engine.close()


@pytest.mark.parametrize(
    "sizes",
    [{"num_gpu_blocks_override": 10**30}, {"max_num_seqs": 10**12}, {"block_size": 10**30}],
    ids=str,
)
def test_sizes_that_no_machine_has_are_config_errors(folder: Path, sizes: dict[str, int]) -> None:
    from tiny_tokenizers import byte_level_tokenizer

    byte_level_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"num_gpu_blocks_override": 8, "swap_space": 0, **sizes}
    with pytest.raises(ConfigError) as caught:
        build_engine(EngineConfig(str(folder), dtype="float32", **settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.freq_base", "x"),
        ("block_count", 2**32 - 1),
        ("feed_forward_length", 2**32 - 1),
        ("attention.sliding_window", "x"),
    ],
)
def test_gguf_fields_of_a_wrong_type_or_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    path = write_gguf(make_reference("llama"), tmp_path / "model.gguf")
    parse = GGUFFile._parse

    def parse_and_change(self: GGUFFile, cursor: Any) -> None:
        parse(self, cursor)
        self.metadata[f"llama.{key}"] = value

    monkeypatch.setattr(GGUFFile, "_parse", parse_and_change)
    assert is_refused(path)


def test_a_gguf_header_with_flipped_bits_loads_or_is_refused(tmp_path: Path) -> None:
    path = write_gguf(make_reference("llama"), tmp_path / "model.gguf")
    data = path.read_bytes()
    with GGUFFile(path) as file:
        header = min(tensor.offset for tensor in file.tensors.values())
    source = random.Random(3)
    refused = 0
    for _ in range(60):
        corrupt = bytearray(data)
        at = source.randrange(header)
        corrupt[at] = source.choice([corrupt[at] ^ 1 << source.randrange(8), 0xFF, 0])
        path.write_bytes(corrupt)
        try:
            load_model(path, dtype="float32")
        except ModelLoadError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 30


@pytest.mark.parametrize("count", [2**63, 2**40])
def test_a_safetensors_header_length_over_the_file(folder: Path, count: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", count) + path.read_bytes()[8:])
    assert is_refused(folder)


def test_a_gguf_vocabulary_of_bytes_that_are_no_text(tmp_path: Path) -> None:
    metadata = byte_level_metadata()
    tokens = ["\udcff", *metadata["tokenizer.ggml.tokens"][1:]]
    path = tmp_path / "tokenizer.gguf"
    write_tokenizer_gguf(path, changed(metadata, {}))
    data = path.read_bytes()
    first = metadata["tokenizer.ggml.tokens"][0].encode()
    at = data.index(struct.pack("<Q", len(first)) + first) + 8
    path.write_bytes(data[:at] + b"\xff" * len(first) + data[at + len(first) :])
    assert tokens[0] == "\udcff"
    with pytest.raises(ModelLoadError):
        load_tokenizer(path)


@pytest.mark.parametrize(
    "name", [LONG, "~no-such-user-here/x", "\0", "\ud800"], ids=["long", "user", "nul", "surrogate"]
)
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    with pytest.raises(ConfigError):
        load_chat_template(name)
    with pytest.raises(ConfigError):
        default_sampling_params(name, {})


def test_a_chat_template_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="chat_template"):
        load_chat_template(str(path))


@pytest.mark.parametrize("text", ["[]", "null", "5", DEEP], ids=["list", "null", "number", "deep"])
def test_a_generation_config_of_a_wrong_form(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match="generation_config"):
        default_sampling_params(str(tmp_path), {})


def test_reading_turns_panics_into_errors_and_lets_interrupts_through() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(ModelLoadError, match="PanicException: a b"), reading("file"):
        raise panic("a\nb")
    with pytest.raises(KeyboardInterrupt), reading("file"):
        raise KeyboardInterrupt
