"""Small vocabularies for tests, made on the spot: byte-level BPE and SentencePiece BPE, as GGUF metadata."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

from minillm.models.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    tokenizer_from_gguf_metadata,
)
from minillm.models.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "def add(a, b):\n    return a + b\n",
    "Съешь ещё этих мягких французских булок",
    "我能吞下玻璃而不伤身体 한글 글자 이야기 日本語の文章",
    "👩🏽‍🌾 👨‍👩‍👧‍👦 emoji 🚀🚀 and text, 12 345 6789",
    "    indented code    with spaces",
]
CONTROL_TEXTS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def byte_level_metadata() -> dict[str, Any]:
    """GGUF metadata of a byte-level BPE of about 450 tokens; control tokens come first, as in SmolLM2."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=CONTROL_TEXTS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 2, trainer)
    import json

    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*tokens, "<tool_call>"],
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3) + [USER_DEFINED],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


def byte_level_tokenizer(**changes: Any) -> Tokenizer:
    """The byte-level BPE, with some metadata changed (`__` stands for the dots after `tokenizer`)."""
    return tokenizer_from_gguf_metadata(changed(byte_level_metadata(), changes))


@functools.cache
def sentencepiece_model() -> bytes:
    """A trained SentencePiece BPE model with byte fallback, about 500 tokens."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 2),
        model_writer=model,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<tool_call>"],
        control_symbols=["<|user|>", "<|end|>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


def metadata_of_sentencepiece(model: bytes) -> dict[str, Any]:
    """GGUF metadata as llama.cpp's converter writes it for a SentencePiece model."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = processor.get_piece_size()
    pieces = [processor.id_to_piece(i) for i in range(size)]

    def kind(i: int) -> int:
        checks = [(processor.is_unknown, UNKNOWN), (processor.is_control, CONTROL), (processor.is_unused, UNUSED)]
        special = next((value for check, value in checks if check(i)), None)
        if special is not None:
            return special
        if processor.is_byte(i):
            return BYTE
        return USER_DEFINED if pieces[i] == "<tool_call>" else NORMAL

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [processor.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": [kind(i) for i in range(size)],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
    }


@functools.cache
def sentencepiece_metadata() -> dict[str, Any]:
    """GGUF metadata of :func:`sentencepiece_model`."""
    return metadata_of_sentencepiece(sentencepiece_model())


def sentencepiece_tokenizer(**changes: Any) -> Tokenizer:
    """The SentencePiece BPE, with some metadata changed."""
    return tokenizer_from_gguf_metadata(changed(sentencepiece_metadata(), changes))


def changed(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Metadata with `tokenizer.ggml.NAME` replaced (removed for None); `chat_template` is spelled as such."""
    result = dict(metadata)
    for name, value in changes.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        result[key] = value
        if value is None:
            del result[key]
    return result


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file of metadata only, by the `gguf` package's own writer."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, arch="llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
