"""EngineConfig, the generation defaults, chat template files and the package's public names."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from engine_fakes import make_parts

import minillm
from minillm.core.errors import ConfigError, ModelLoadError, UnknownPolicyError
from minillm.core.sampling_params import SamplingParams
from minillm.engine.config import EngineConfig
from minillm.engine.factory import build_engine, default_sampling_params


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_model_length", "max_model_len"),
        ("num_gpu_block_override", "num_gpu_blocks_override"),
        ("enable_prefix_cache", "enable_prefix_caching"),
        ("swapspace", "swap_space"),
    ],
)
def test_unknown_keyword_is_named_with_near_matches(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not a known option; did you mean .*{near}"):
        EngineConfig(**{name: 1})


def test_unknown_keyword_without_near_match() -> None:
    with pytest.raises(ConfigError, match=r"trust_remote_code is not a known option$"):
        EngineConfig(trust_remote_code=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "int4"),
        ("kv_cache_dtype", "fp8"),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("model", ""),
        ("model", None),
        ("seed", "0"),
        ("max_model_len", 0),
        ("max_model_len", 1.5),
        ("block_size", 0),
        ("block_size", True),
        ("num_gpu_blocks_override", 0),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", float("nan")),
        ("enable_prefix_caching", "yes"),
        ("swap_space", -1),
        ("swap_space", float("nan")),
        ("max_swapped_requests", -1),
        ("max_num_seqs", 0),
        ("max_num_seqs", "8"),
        ("max_num_batched_tokens", 8),
        ("max_prefill_tokens_per_step", 0),
        ("scheduler", "eager"),
        ("preemption_mode", "never"),
        ("ageing_interval", 0),
        ("max_waiting", 0),
        ("watermark_blocks", -1),
        ("user_weights", ["a"]),
        ("overlap", 1),
    ],
)
def test_value_that_is_not_allowed_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("name", ["scheduling_policy", "victim_policy", "chat_template"])
def test_unknown_name_is_refused_before_the_model_is_loaded(name: str) -> None:
    error = ConfigError if name == "chat_template" else UnknownPolicyError
    with pytest.raises(error, match="no-such-thing"):
        build_engine(EngineConfig("no-such-model", **{name: "no-such-thing"}))


def test_config_is_immutable_and_replaceable() -> None:
    config = EngineConfig("m", dtype="half", swap_space=1)
    assert (config.model, config.dtype) == ("m", "float16")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dtype = "float32"  # type: ignore[misc]
    assert dataclasses.replace(config, max_num_seqs=3).max_num_seqs == 3
    with pytest.raises(ConfigError, match="max_num_seqs"):
        dataclasses.replace(config, max_num_seqs=0)


def test_every_scheduling_option_reaches_the_scheduler() -> None:
    options = {
        "block_size": 8,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 99,
        "max_prefill_tokens_per_step": 33,
        "max_swapped_requests": 2,
        "preemption_mode": "recompute",
        "victim_policy": "largest",
        "enable_prefix_caching": False,
        "watermark_blocks": 3,
        "ageing_interval": 2.5,
        "max_preemptions": 4,
        "user_weights": {"a": 2.0},
    }
    config = EngineConfig("m", scheduling_policy="fair", **options)
    made = config.scheduler_config(num_blocks=10, num_swap_blocks=7, max_model_len=60)
    assert {name: getattr(made, name) for name in options} == options
    assert made.queue_policy == "fair"
    assert (made.num_blocks, made.num_swap_blocks, made.max_model_len) == (10, 7, 60)


@pytest.mark.parametrize(
    ("device", "seqs", "given", "expected"),
    [("cpu", 64, None, 512), ("cuda", 64, None, 8192), ("cpu", 600, None, 600), ("cpu", 64, 100, 100)],
)
def test_token_budget_of_a_step(device: str, seqs: int, given: int | None, expected: int) -> None:
    config = EngineConfig("m", max_num_seqs=seqs, max_num_batched_tokens=given)
    made = config.scheduler_config(num_blocks=9, num_swap_blocks=0, max_model_len=9, device=device)
    assert made.max_num_batched_tokens == expected


def test_static_scheduler_can_be_chosen() -> None:
    from minillm.core.scheduler import ContinuousScheduler
    from minillm.core.static_scheduler import StaticScheduler

    assert type(make_parts(scheduler="static").engine.scheduler) is StaticScheduler
    assert type(make_parts().engine.scheduler) is ContinuousScheduler


@pytest.mark.parametrize(
    ("overlap", "asynchronous", "expected"),
    [(None, False, False), (None, True, True), (True, False, True), (False, True, False)],
)
def test_overlap_follows_the_device_unless_it_is_given(
    overlap: bool | None, asynchronous: bool, expected: bool
) -> None:
    assert make_parts(overlap=overlap, asynchronous=asynchronous).engine.overlap is expected


class TestSamplingDefaults:
    MODEL = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True, "eos_token_id": [1, 2], "min_p": None}

    def test_auto_takes_the_model_s(self) -> None:
        assert default_sampling_params("auto", self.MODEL) == SamplingParams(temperature=0.6, top_p=0.9, top_k=20)
        assert default_sampling_params("auto", {}) == SamplingParams()

    def test_max_new_tokens_is_max_tokens(self) -> None:
        assert default_sampling_params("auto", {"max_new_tokens": 7}).max_tokens == 7

    def test_vllm_takes_the_neutral_ones(self) -> None:
        assert default_sampling_params("vllm", self.MODEL) == SamplingParams()

    def test_a_folder_takes_its_file(self, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.1}))
        assert default_sampling_params(str(tmp_path), self.MODEL) == SamplingParams(temperature=0.1)
        with pytest.raises(ConfigError, match="generation_config"):
            default_sampling_params(str(tmp_path / "nowhere"), self.MODEL)
        (tmp_path / "generation_config.json").write_text("{")
        with pytest.raises(ConfigError, match="cannot be read"):
            default_sampling_params(str(tmp_path), self.MODEL)

    def test_a_value_out_of_range_is_named(self) -> None:
        with pytest.raises(ModelLoadError, match=r"top_p=1.5"):
            default_sampling_params("auto", {"top_p": 1.5})


@pytest.mark.parametrize("as_file", [False, True])
def test_configured_chat_template_is_used(as_file: bool, tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    if as_file:
        (tmp_path / "template.jinja").write_text(template)
        template = str(tmp_path / "template.jinja")
    parts = make_parts(chat_template=template)
    ids = parts.inputs.encode_chat([{"role": "user", "content": "hi"}])
    assert parts.inputs.tokenizer.decode(ids) == "[hi]"


def test_public_names_are_there() -> None:
    for name in minillm.__all__:
        assert getattr(minillm, name) is not None
        assert name in dir(minillm)
    with pytest.raises(AttributeError, match="no_such_name"):
        minillm.no_such_name  # noqa: B018


def test_import_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, minillm; from minillm import SamplingParams, EngineConfig, LLM, Runtime, TokenEvent\n"
        "print(sorted({'torch', 'transformers', 'gguf', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
