"""Every kind of bad input is one typed error of one line, and the engine goes on."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minillm import EngineConfig, Runtime, SamplingParams
from minillm.errors import (
    ConfigError,
    EmptyPromptError,
    InvalidParameterError,
    MiniLLMError,
    ModelLoadError,
    PromptTooLongError,
    UnknownPolicyError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

POOL_TOKENS = 12 * 16
CONTEXT = 128
GREEDY = SamplingParams(temperature=0, max_tokens=4)

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """The built-in model with a context of 128 tokens and a pool that holds more."""
    with Runtime(EngineConfig(num_gpu_blocks_override=12, max_model_len=CONTEXT, max_num_seqs=4)) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def small_pool() -> Iterator[Runtime]:
    """The built-in model with a pool that is smaller than its context."""
    with Runtime(EngineConfig(num_gpu_blocks_override=12, max_num_seqs=4)) as runtime:
        yield runtime


def still_answers(runtime: Runtime) -> bool:
    return len(runtime.submit("The sea is", GREEDY).result(timeout=60).outputs[0].token_ids) == 4


@pytest.mark.integration
@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ("", EmptyPromptError, ["0 tokens"]),
        ([], EmptyPromptError, ["0 tokens"]),
        ([5, 49152], InvalidParameterError, ["49152"]),
        ([-1], InvalidParameterError, ["-1"]),
        (["text", 3], InvalidParameterError, ["text"]),
        ([7] * (CONTEXT + 1), PromptTooLongError, [str(CONTEXT + 1), f"max_model_len={CONTEXT}"]),
    ],
    ids=["empty text", "no ids", "id over the vocabulary", "negative id", "not an id", "over the context"],
)
def test_bad_prompts_are_refused_at_submit(
    runtime: Runtime, prompt: Any, error: type[MiniLLMError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        runtime.submit(prompt, GREEDY)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words)
    assert still_answers(runtime)


@pytest.mark.integration
def test_a_prompt_over_the_pool_names_both_sizes_and_why(small_pool: Runtime) -> None:
    assert small_pool.max_model_len == POOL_TOKENS
    with pytest.raises(PromptTooLongError) as caught:
        small_pool.submit([7] * (POOL_TOKENS + 1), GREEDY)
    assert str(POOL_TOKENS) in str(caught.value) and str(POOL_TOKENS + 1) in str(caught.value)
    assert "pool" in str(caught.value)
    assert still_answers(small_pool)


@pytest.mark.integration
def test_cancel_of_an_unknown_id_is_false_and_harmless(runtime: Runtime) -> None:
    assert runtime.cancel("no-such-request") is False
    assert still_answers(runtime)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", float("nan")),
        ("temperature", -0.1),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_k", -2),
        ("n", 0),
    ],
)
def test_bad_sampling_values_name_field_and_value(field: str, value: float) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{field: value})
    assert f"{field}={value}" in str(caught.value) and "\n" not in str(caught.value)


def corrupt_gguf(folder: Path) -> str:
    path = folder / "corrupt.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 5, 1 << 40) + b"\xff" * 64)
    return str(path)


def not_a_gguf(folder: Path) -> str:
    path = folder / "text.gguf"
    path.write_text("this is not a model")
    return str(path)


def truncated_safetensors(folder: Path) -> str:
    import torch
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    path = folder / "model.safetensors"
    save_file({"model.embed_tokens.weight": torch.zeros(64, 32)}, path)
    path.write_bytes(path.read_bytes()[:-1000])
    return str(folder)


def unknown_model(folder: Path) -> str:
    return "no-such-model"


MODELS = [corrupt_gguf, not_a_gguf, truncated_safetensors, unknown_model]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_bad_models_fail_in_one_line_through_the_command_line(cli, tmp_path: Path, make: Callable[[Path], str]) -> None:
    model = make(tmp_path)
    done = cli("generate", "Hi", "--model", model)
    assert done.code == 1 and done.out == ""
    assert len(done.errors) == 1 and model in done.errors[0]
    assert "Traceback" not in done.err


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_bad_models_are_typed_errors_in_python(tmp_path: Path, make: Callable[[Path], str]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        Runtime(EngineConfig(model=make(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((""), ["0 tokens"]),
        (("Hi", "--scheduling-policy", "random"), ["random", "fcfs"]),
        (("Hi", "--victim-policy", "nobody"), ["nobody", "lifo"]),
        (("Hi", "--max-model-len", "100000"), ["max_model_len=100000"]),
        (("Hi", "--max-model-len", "8"), ["max_model_len=8"]),
    ],
    ids=["empty prompt", "queue policy", "victim policy", "context over the model's", "prompt over the context"],
)
def test_bad_input_is_one_line_and_exit_2_through_the_command_line(cli, arguments: tuple[str, ...], words) -> None:
    done = cli("generate", *([arguments, "--raw"] if isinstance(arguments, str) else arguments))
    assert done.code == 2 and done.out == ""
    assert len(done.errors) == 1 and all(word in done.errors[0] for word in words)
    assert "Traceback" not in done.err


@pytest.mark.integration
@pytest.mark.parametrize("field", ["scheduling_policy", "victim_policy"])
def test_unknown_policies_name_the_known_ones(field: str) -> None:
    with pytest.raises(UnknownPolicyError, match="known: "):
        Runtime(EngineConfig(**{field: "nobody"}))


def test_unknown_options_name_the_near_ones() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        EngineConfig(max_num_seq=3)  # type: ignore[call-arg]
