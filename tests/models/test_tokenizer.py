"""Tokenizers built from GGUF metadata and Hugging Face folders (cases B32, B36, B37, B52)."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from minillm.core.errors import InvalidParameterError, ModelLoadError
from minillm.models.gguf_tokenizer import CONTROL, NORMAL, tokenizer_from_gguf_metadata
from minillm.models.pre_tokenizers import PRE_TOKENIZERS
from minillm.models.tokenizer import TextMode, Tokenizer, load_tokenizer
from tiny_tokenizers import (
    byte_level_metadata,
    byte_level_tokenizer,
    changed,
    metadata_of_sentencepiece,
    sentencepiece_metadata,
    sentencepiece_model,
    sentencepiece_tokenizer,
    write_gguf,
)

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
TEXT = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("  \n\tthequickab12é한글日👩🏽‍🌾�②")),
    max_size=60,
)


# Encoding and decoding


@given(TEXT, st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]))
@settings(max_examples=400, deadline=None)
def test_text_survives_encode_and_decode(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, parse_special=False)
    if "▁" in text and tokenizer is SENTENCEPIECE:
        text = text.replace("▁", " ")  # SentencePiece spells a space so, and cannot tell the two apart
    assert tokenizer.decode(ids) == text


@given(TEXT, st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]), st.booleans())
@settings(max_examples=300, deadline=None)
def test_valid_text_decodes_as_in_hugging_face(text: str, tokenizer: Tokenizer, skip: bool) -> None:
    ids = [0, *tokenizer.encode(text), 2, *tokenizer.encode(text)]
    assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_invalid_bytes_spoil_only_themselves() -> None:
    """Where this differs from Hugging Face, whose byte-fallback decoder replaces the whole run of byte tokens."""
    run = [SENTENCEPIECE.piece_to_id(f"<0x{byte:02X}>") or 0 for byte in "中".encode() + b"\xff"]
    assert SENTENCEPIECE.decode(run) == "中\ufffd"
    assert SENTENCEPIECE._backend.decode(run) == "\ufffd" * 4


@given(TEXT)
@settings(max_examples=400, deadline=None)
def test_sentencepiece_ids_equal_the_sentencepiece_library(text: str) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    assert SENTENCEPIECE.encode(text, add_special_tokens=False, parse_special=False) == processor.encode(text)


def test_sentencepiece_ids_equal_the_library_for_published_vocabularies(shared_data: Path) -> None:
    """Mistral's two vocabularies, on texts in many languages."""
    texts = [
        file.read_text(encoding="utf-8")[:1500]
        for file in sorted((shared_data / "prompts" / "multilingual").rglob("*.t[xs][tv]"))
    ]
    for name in ("mistral_tokenizer.model.v1", "mistral_mistral_instruct_tokenizer_240323.model.v3"):
        model = (shared_data / "tokenizers" / name).read_bytes()
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        tokenizer = tokenizer_from_gguf_metadata(metadata_of_sentencepiece(model))
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
            assert ids == processor.encode(text), (name, text[:40])
            assert tokenizer.decode(ids) == text


@BOTH
def test_control_tokens_in_text_are_parsed_or_not(tokenizer: Tokenizer) -> None:
    eos, text = tokenizer.eos_token_id, tokenizer.eos_token
    assert text is not None
    parsed = tokenizer.encode(f"a{text}b", add_special_tokens=False)
    assert parsed.count(eos or -1) == 1
    literal = tokenizer.encode(f"a{text}b", add_special_tokens=False, parse_special=False)
    assert tokenizer.control_ids.isdisjoint(literal)
    assert tokenizer.decode(literal) == f"a{text}b"
    tool_call = tokenizer.piece_to_id("<tool_call>")
    assert tool_call in tokenizer.encode("a<tool_call>", parse_special=False)


def test_control_token_that_the_vocabulary_spells_as_an_entry_stays_text() -> None:
    """With ignore_merges a whole piece is looked up in the vocabulary, control tokens included."""
    metadata = byte_level_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"], "<|>"]
    types = [*metadata["tokenizer.ggml.token_type"], CONTROL]
    tokenizer = byte_level_tokenizer(tokens=tokens, token_type=types, pre="llama-bpe", add_bos_token=False)
    control = len(tokens) - 1
    assert tokenizer.encode("a <|>")[-1] == control
    for text in ("<|>", "<|><|>", "x<|>y"):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert control not in ids
        assert tokenizer.decode(ids) == text


@BOTH
def test_bos_and_eos_flags(tokenizer: Tokenizer) -> None:
    make = byte_level_tokenizer if tokenizer is BYTE_LEVEL else sentencepiece_tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    both = make(add_bos_token=True, add_eos_token=True)
    bare = both.encode("the dog", add_special_tokens=False)
    assert both.encode("the dog") == [bos, *bare, eos]
    assert both.encode("") == [bos, eos]
    neither = make(add_bos_token=False)
    assert neither.encode("the dog") == bare
    assert neither.encode("") == []
    assert both.encode(f"{both.bos_token}the dog") == [bos, *bare, eos]  # never a second BOS


def test_llama_vocabularies_add_bos_unless_the_file_says_otherwise() -> None:
    assert sentencepiece_tokenizer().encode("")[:1] == [SENTENCEPIECE.bos_token_id]
    assert byte_level_tokenizer(add_bos_token=None).encode("") == []
    assert byte_level_tokenizer(add_bos_token=None, pre="llama-bpe").encode("") == [1]


def test_space_prefix_flag() -> None:
    without = sentencepiece_tokenizer(add_space_prefix=False)
    assert SENTENCEPIECE.id_to_piece(SENTENCEPIECE.encode("the", False)[0]).startswith("▁")
    assert not without.id_to_piece(without.encode("the", False)[0]).startswith("▁")
    assert without.decode(without.encode(" the")) == " the"
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode(" the")) == " the"


@pytest.mark.parametrize("bad", [None, 3, b"bytes", ["a"]])
def test_text_that_is_no_string_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidParameterError, match="prompt"):
        BYTE_LEVEL.encode(bad)


@BOTH
@pytest.mark.parametrize("parse_special", [True, False])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, parse_special: bool) -> None:
    with pytest.raises(InvalidParameterError, match="surrogate"):
        tokenizer.encode("ok \ud83d", parse_special=parse_special)


# Vocabulary


@BOTH
def test_every_id_has_bytes_and_a_piece_or_is_without_token(tokenizer: Tokenizer) -> None:
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.has_token(token_id)
        assert tokenizer.piece_to_id(tokenizer.id_to_piece(token_id)) == token_id
        if token_id not in tokenizer.special_ids:
            assert tokenizer.decode([token_id, token_id]).encode() != b"" or tokenizer.token_bytes(token_id) == b""
    singles = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= singles


@BOTH
@pytest.mark.parametrize("beyond", [0, 1, 271, 10**6, 2**40])
def test_ids_without_a_token_decode_to_nothing(tokenizer: Tokenizer, beyond: int) -> None:
    token_id = tokenizer.vocab_size + beyond
    assert not tokenizer.has_token(token_id)
    assert tokenizer.id_to_piece(token_id) == ""
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.decode([token_id]) == ""
    assert tokenizer.decode([*tokenizer.encode("ok"), token_id]) == "ok"
    assert not tokenizer.has_token(-1)
    assert tokenizer.decode([-1]) == ""


def test_sparse_vocabulary_has_gaps_within() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    tokenizer = Tokenizer(backend)
    assert tokenizer.vocab_size == 8
    assert [tokenizer.has_token(i) for i in range(9)] == [True, *[False] * 6, True, False]
    assert tokenizer.decode([0, 3, 7, 8]) == "a b"


def test_decoding_skips_special_tokens_on_request() -> None:
    ids = [1, *BYTE_LEVEL.encode("hi"), 2]
    assert BYTE_LEVEL.decode(ids) == "hi"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_text_of_one_token_keeps_its_space() -> None:
    (token_id,) = SENTENCEPIECE.encode("the", add_special_tokens=False)
    assert SENTENCEPIECE.token_text(token_id) == " the"
    assert SENTENCEPIECE.token_text(SENTENCEPIECE.piece_to_id("<0xE4>") or 0) == "\ufffd"
    assert BYTE_LEVEL.token_text(2) == "<|im_end|>"
    assert BYTE_LEVEL.token_text(10**9) == ""


def test_end_of_generation_ids_are_those_declared_and_those_known() -> None:
    assert BYTE_LEVEL.eos_token_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"], "<|eot_id|>", "<stop>"]
    types = [*byte_level_metadata()["tokenizer.ggml.token_type"], NORMAL, CONTROL]
    size = len(tokens)
    tokenizer = byte_level_tokenizer(tokens=tokens, token_type=types, eot_token_id=size - 1)
    assert tokenizer.eos_token_ids == {0, 2, size - 2, size - 1}
    assert size - 2 in tokenizer.special_ids  # a control token, whatever its type says


# GGUF: files and refusals


def test_gguf_file_gives_the_same_tokenizer_as_its_metadata(tmp_path: Path) -> None:
    for metadata, twin in [(byte_level_metadata(), BYTE_LEVEL), (sentencepiece_metadata(), SENTENCEPIECE)]:
        tokenizer = load_tokenizer(write_gguf(tmp_path / "vocab.gguf", metadata))
        text = "the quick 한글 12"
        assert tokenizer.encode(text) == twin.encode(text)
        assert tokenizer.chat_templates == twin.chat_templates


def test_unknown_pre_tokenizer_is_refused_with_the_known_names() -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre='nobody'.*smollm"):
        byte_level_tokenizer(pre="nobody")


def test_missing_pre_tokenizer_takes_default_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = byte_level_tokenizer(pre=None)
    assert "tokenizer.ggml.pre is missing" in caplog.text
    assert tokenizer.encode("a=1234") == byte_level_tokenizer(pre="default").encode("a=1234")


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_compiles_and_loses_nothing(name: str) -> None:
    tokenizer = byte_level_tokenizer(pre=name)
    for text in ["it's 12345 ②③", "  \n\n x\t\ty \r\n", "Ünïcode ДОМ 한글 日本語 กขค", "a.b,c!?…。(x) 'LL <|x|> `~"]:
        assert tokenizer.decode(tokenizer.encode(text, False), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "a 12 ②", ["a", " 12", " ②"]),
        ("smollm", "a 12 ②", ["a", " ", "1", "2", " ", "②"]),
        ("llama-bpe", "1234567", ["123", "456", "7"]),
        ("llama-bpe", "I'LL go\n\n  x", ["I", "'LL", " go", "\n\n", " ", " x"]),
        ("qwen2", "12 a", ["1", "2", " a"]),
        ("falcon", "1234 $5", ["123", "4", " ", "$", "5"]),
        ("default", "12345", ["123", "45"]),
        ("deepseek-coder", "ab\ncd 12", ["ab", "\n", "cd", " ", "1", "2"]),
        ("deepseek-llm", "ab 12 日本", ["ab", " ", "12", " ", "日本"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-4o", "don't STOP1234", ["don't", " STOP", "123", "4"]),
    ],
)
def test_pre_tokenizer_splits(name: str, text: str, pieces: list[str]) -> None:
    splitters = [pre_tokenizers.Split(pattern, "isolated") for pattern in _regexes(PRE_TOKENIZERS[name].patterns)]
    split = pre_tokenizers.Sequence(splitters).pre_tokenize_str(text)
    assert [piece for piece, _ in split] == pieces


def _regexes(patterns: tuple[str, ...]) -> list[Any]:
    from tokenizers import Regex

    return [Regex(pattern) for pattern in patterns]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model='bert'"),
        ({"model": None}, "tokenizer.ggml.model=None"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": 3}, "tokenizer.ggml.tokens is of a wrong type"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"token_type": [1]}, "1 entries in tokenizer.ggml.token_type"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"model": "llama", "scores": [0.0]}, "1 entries in tokenizer.ggml.scores"),
        ({"tokens": ["a"] * 3, "token_type": [1] * 3}, "2 duplicate entries"),
    ],
)
def test_unusable_metadata_is_refused_naming_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        tokenizer_from_gguf_metadata(changed(byte_level_metadata(), changes))
    assert message in str(caught.value)


def test_merges_of_unknown_tokens_and_bad_ids_are_passed_over() -> None:
    merges = ["zz qq", *byte_level_metadata()["tokenizer.ggml.merges"]]
    tokenizer = byte_level_tokenizer(merges=merges, bos_token_id=10**6, padding_token_id=-1)
    assert tokenizer.encode("the dog") == BYTE_LEVEL.encode("the dog")
    assert tokenizer.bos_token_id is None
    assert tokenizer.pad_token_id is None


def test_phi3_control_tokens_swallow_white_space_behind_them() -> None:
    metadata = {**sentencepiece_metadata(), "general.name": "Phi3"}
    tokenizer = tokenizer_from_gguf_metadata(metadata)
    assert tokenizer.encode("<|user|> \n the") == tokenizer.encode("<|user|>the")
    assert SENTENCEPIECE.encode("<|user|> \n the") != SENTENCEPIECE.encode("<|user|>the")


# Hugging Face folders


def llama3_like(folder: Path, **config: Any) -> Path:
    """A folder with a byte-level tokenizer.json whose post-processor adds BOS."""
    metadata = byte_level_metadata()
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", 1)]
    )
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    base = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(base | config), encoding="utf-8")
    return folder


def test_folder_bos_follows_the_post_processor_or_the_explicit_flag(tmp_path: Path) -> None:
    bare = BYTE_LEVEL.encode("hello")
    assert load_tokenizer(llama3_like(tmp_path / "a")).encode("hello") == [1, *bare]
    assert load_tokenizer(llama3_like(tmp_path / "b", add_bos_token=False)).encode("hello") == bare
    both = load_tokenizer(llama3_like(tmp_path / "c", add_bos_token=True, add_eos_token=True))
    assert both.encode("hello") == [1, *bare, 2]
    assert both.encode("hello", add_special_tokens=False) == bare


def test_folder_eos_ids_come_from_generation_config_too(tmp_path: Path) -> None:
    folder = llama3_like(tmp_path / "m")
    assert load_tokenizer(folder).eos_token_ids == {2}
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert load_tokenizer(folder).eos_token_ids == {2, 5}
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert load_tokenizer(folder).eos_token_ids == {2, 7}
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ModelLoadError, match="eos_token_id='x'"):
        load_tokenizer(folder)


def test_folder_templates_and_their_precedence(tmp_path: Path) -> None:
    folder = llama3_like(tmp_path / "m", chat_template="from config")
    assert load_tokenizer(folder).chat_templates == {"default": "from config"}
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    llama3_like(folder, chat_template=named)
    assert load_tokenizer(folder).chat_templates == {"default": "d", "tool_use": "t"}
    (folder / "chat_template.jinja").write_text("from file {{ eos_token }}")
    assert load_tokenizer(folder).chat_templates == {"default": "from file {{ eos_token }}", "tool_use": "t"}
    text = load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert text == "from file <|im_end|>"


def test_folder_tokens_declared_only_in_the_configuration_are_added(tmp_path: Path) -> None:
    size = len(byte_level_metadata()["tokenizer.ggml.tokens"])
    declared = {str(size): {"content": "<extra>", "special": True}, "0": {"content": "<|endoftext|>", "special": True}}
    tokenizer = load_tokenizer(llama3_like(tmp_path / "m", added_tokens_decoder=declared))
    assert tokenizer.piece_to_id("<extra>") == size
    assert size in tokenizer.special_ids
    assert tokenizer.encode("<extra>", add_special_tokens=False) == [size]


def test_literal_encoding_keeps_the_ids_of_added_tokens(tmp_path: Path) -> None:
    """Added tokens beyond the model's vocabulary: leaving out the control ones must not renumber the others."""
    folder = llama3_like(tmp_path / "m")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken("<|control|>", special=True), AddedToken("<think>", special=False)])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    think, control = tokenizer.piece_to_id("<think>"), tokenizer.piece_to_id("<|control|>")
    ids = tokenizer.encode("<think><|control|>", add_special_tokens=False, parse_special=False)
    assert ids[0] == think
    assert control not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think><|control|>"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]", '{"model": 1}'])
def test_corrupt_folder_files_are_typed_errors(tmp_path: Path, name: str, content: str) -> None:
    folder = llama3_like(tmp_path / "m")
    (folder / name).write_text(content)
    if content == '{"model": 1}' and name != "tokenizer.json":
        load_tokenizer(folder)  # a harmless unknown field
        return
    with pytest.raises(ModelLoadError, match=name):
        load_tokenizer(folder)


def test_missing_tokenizers_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="SentencePiece"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelLoadError, match="no tokenizer here"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ModelLoadError, match=r"absent\.gguf"):
        load_tokenizer(tmp_path / "absent.gguf")


@pytest.mark.parametrize("prepend_scheme", ["always", "first", "never"])
def test_metaspace_tokenizers_decode_by_bytes_and_guard_content(tmp_path: Path, prepend_scheme: str) -> None:
    """Llama-like tokenizer.json: the space before the first word only (`first`), before every stretch, or never."""
    metadata = sentencepiece_metadata()
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    twin = Backend.from_str(SENTENCEPIECE._backend.to_str())
    twin.normalizer = normalizers.Sequence([])
    twin.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    twin.decoder = decoders.Sequence([*steps, *([] if prepend_scheme == "never" else [decoders.Strip(" ", 1, 0)])])
    tokenizer = Tokenizer(twin, eos_token_id=vocab["<|end|>"])
    assert tokenizer.text_mode is TextMode.BYTES
    template = "<|user|>{{ messages[0].content }}<|end|>"
    for content in ("the dog", "> the dog"):  # the second is guarded
        message = [{"role": "user", "content": content}]
        ids = tokenizer.apply_chat_template(message, chat_template=template)
        assert ids == twin.encode(f"<|user|>{content}<|end|>", add_special_tokens=False).ids
    message = [{"role": "user", "content": "<|end|>"}]
    guarded = tokenizer.apply_chat_template(message, chat_template=template)
    assert [i for i in guarded if i in tokenizer.control_ids] == [vocab["<|user|>"], vocab["<|end|>"]]
    for text in ("the dog", " a  b", "한글 \n"):
        ids = tokenizer.encode(text)
        # Metaspace puts no space before a text that begins with one, so that one is lost, as in Hugging Face.
        lost = prepend_scheme != "never" and text.startswith(" ")
        assert tokenizer.decode(ids) == text[lost:] == twin.decode(ids)


def test_tokenizer_can_be_used_from_several_threads() -> None:
    tokenizer = byte_level_tokenizer()
    texts = [f"text {i} <|im_end|> 한글" for i in range(40)]
    want = [byte_level_tokenizer().encode(text, parse_special=False) for text in texts]
    results: list[list[list[int]]] = []

    def work() -> None:
        results.append([tokenizer.encode(text, parse_special=False) for text in texts])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [want] * 8
