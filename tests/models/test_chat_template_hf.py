"""Chat prompts against Hugging Face's `apply_chat_template(tokenize=True)`, template by template."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from minillm.core.errors import RequestError
from minillm.models.gguf_tokenizer import build_byte_level_bpe
from minillm.models.hf_tokenizer import load_hf_tokenizer
from minillm.models.pre_tokenizers import PRE_TOKENIZERS
from minillm.models.tokenizer import Tokenizer
from tiny_tokenizers import CHATML, byte_level_metadata, byte_level_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <b>&'é",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris é"}}}


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([message("user", "hi")], None),
    (
        [
            message("system", "  be nice \n"),
            message("user", "> quoted <b>"),
            message("assistant", "ok <"),
            message("user", "  a\n b  "),
        ],
        None,
    ),
    (
        [
            message("user", "x"),
            message("assistant", "<think>\nhm\n</think>\n\nanswer", reasoning_content="hm"),
            message("user", ""),
        ],
        None,
    ),
    (
        [
            message("user", "weather?"),
            message("assistant", "", tool_calls=[CALL]),
            message("tool", "22", tool_call_id="abcdefghi", name="get_weather"),
            message("user", "ok"),
        ],
        TOOLS,
    ),
]
SMALL_TEMPLATES = [
    CHATML,
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}\n{% endfor %}",
    "{%- for m in messages %}\n    {%- if m.content %}\n{{ m.content }}\n    {%- endif %}\n{%- endfor %}\n"
    "{{ tools | tojson }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if m.role == 'system' %}"
    "{% continue %}{% endif %}{{ ns.n ~ m.content }}{% endfor %}",
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages | length }}",
]


def hf_twin(tokenizer_file: Path, **tokens: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), **tokens)


def compare(tokenizer: Tokenizer, twin: Any, template: str) -> int:
    """Number of conversations that gave equal ids; a template that refuses must refuse in both."""
    equal = 0
    for messages, tools in CONVERSATIONS:
        for prompt in (True, False):
            options = {"tools": tools, "chat_template": template, "add_generation_prompt": prompt}
            try:
                want = twin.apply_chat_template(messages, tokenize=True, **options)["input_ids"]
            except Exception:
                with pytest.raises(RequestError):
                    tokenizer.apply_chat_template(messages, **options)
                continue
            assert tokenizer.apply_chat_template(messages, **options) == want
            assert tokenizer.apply_chat_template(messages, parse_special_in_content=True, **options) == want
            equal += 1
    return equal


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """The same tiny vocabulary read from GGUF metadata, and from a tokenizer.json by transformers."""
    metadata = byte_level_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    backend = build_byte_level_bpe(
        {token: i for i, token in enumerate(tokens)}, metadata["tokenizer.ggml.merges"], PRE_TOKENIZERS["smollm"]
    )
    backend.add_special_tokens(tokens[:3])
    backend.add_tokens(["<tool_call>"])
    file = tmp_path_factory.mktemp("small") / "tokenizer.json"
    backend.save(str(file))
    return byte_level_tokenizer(), hf_twin(file, bos_token=tokens[1], eos_token=tokens[2])


@pytest.mark.parametrize("template", SMALL_TEMPLATES)
def test_ids_equal_hugging_face(small: tuple[Tokenizer, Any], template: str) -> None:
    tokenizer, twin = small
    assert compare(tokenizer, twin, template) >= 2


def test_ids_equal_hugging_face_for_published_templates(shared_data: Path, tmp_path: Path) -> None:
    data = gzip.decompress((shared_data / "tokenizers" / "qwen3_tokenizer.json.gz").read_bytes())
    (tmp_path / "tokenizer.json").write_bytes(data)
    config = json.loads((shared_data / "tokenizers" / "qwen3_tokenizer_config.json").read_text(encoding="utf-8"))
    # A BOS for the templates that print one.
    config["bos_token"] = "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_hf_tokenizer(tmp_path)
    names = ("bos_token", "eos_token", "pad_token")
    twin = hf_twin(tmp_path / "tokenizer.json", **{name: config[name] for name in names})
    twin.add_special_tokens({"additional_special_tokens": config["additional_special_tokens"]})
    files = sorted((shared_data / "templates").rglob("*.jinja"))
    assert len(files) >= 75
    equal = {file.name: compare(tokenizer, twin, file.read_text(encoding="utf-8")) for file in files}
    assert sum(equal.values()) > 500
    assert sum(count > 0 for count in equal.values()) >= 70  # some want messages of a form of their own
