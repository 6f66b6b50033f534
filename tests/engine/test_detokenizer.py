"""The incremental detokenizer against decoding at once (cases B32, B38, B39, B42)."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from minillm.engine.detokenizer import ByteDetokenizer, WindowDetokenizer, make_detokenizer
from minillm.models.tokenizer import TextMode, Tokenizer
from tiny_tokenizers import CORPUS, byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    ids = []
    for byte in data:
        found = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte])]
        ids.append(found[0])
    return ids


def deltas(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, prompt or [], skip)
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids at all: with special tokens, invalid bytes, and ids beyond the vocabulary."""
    return st.lists(st.integers(0, tokenizer.vocab_size + 20), max_size=60)


TEXT = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n▁é한글日👩🏽‍🌾�")), max_size=60)


@given(st.data(), st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]), st.booleans())
@settings(max_examples=400, deadline=None)
def test_deltas_join_to_decode_for_any_ids(data: st.DataObject, tokenizer: Tokenizer, skip: bool) -> None:
    ids = data.draw(ids_of(tokenizer))
    assert "".join(deltas(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.data(), st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]), st.booleans())
@settings(max_examples=400, deadline=None)
def test_output_text_is_decode_of_all_minus_decode_of_prompt(
    data: st.DataObject, tokenizer: Tokenizer, skip: bool
) -> None:
    """For prompts that end with a whole character, which every encoded text does."""
    prompt = tokenizer.encode(data.draw(TEXT))
    output = data.draw(ids_of(tokenizer))
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    assert whole.startswith(before)
    assert "".join(deltas(tokenizer, output, prompt, skip)) == whole[len(before) :]


@given(TEXT, st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]), st.data())
@settings(max_examples=300, deadline=None)
def test_valid_text_cut_anywhere_into_tokens_streams_whole_characters(
    text: str, tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Random split: some stretches as the tokenizer cuts them, some byte by byte. No delta ends inside a character:
    U+FFFD appears only where the text has it."""
    ids: list[int] = []
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        head, rest = rest[:size], rest[size:]
        by_bytes = data.draw(st.booleans())
        ids += byte_ids(tokenizer, head.encode()) if by_bytes else tokenizer.encode(head, False, parse_special=False)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    pieces = deltas(tokenizer, ids, skip=False)
    assert "".join(pieces) == whole
    assert whole.count("�") == text.count("�")
    assert pieces[-1] == ""


@BOTH
@pytest.mark.parametrize("text", ["👩🏽‍🌾👨‍👩‍👧‍👦", "한" * 50, "日本語", "a�b", "é", "\U0010ffff"])
def test_characters_of_several_tokens_come_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = byte_ids(tokenizer, text.encode())
    pieces = deltas(tokenizer, ids, skip=False)
    assert "".join(pieces) == text
    assert all(piece in ("", char) for piece, char in zip([p for p in pieces if p], text, strict=True))


@BOTH
def test_truncated_tail_is_given_out_once_at_the_end(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "ab🚀".encode()[:-1])
    detokenizer = make_detokenizer(tokenizer)
    assert "".join(detokenizer.add(i) for i in ids) == "ab"
    assert detokenizer.finish() == "�"
    assert detokenizer.finish() == ""
    assert tokenizer.decode(ids) == "ab�"


@BOTH
def test_real_replacement_character_is_not_held_back(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "a�b".encode())
    assert deltas(tokenizer, ids) == ["a", "", "", "�", "b", ""]


@BOTH
@pytest.mark.parametrize("bad", [b"\xff", b"\x80", b"\xc0", b"\xe4", b"\xf0\x9f", b"\xed\xa0\x80"])
def test_invalid_bytes_do_not_hold_back_the_stream(tokenizer: Tokenizer, bad: bytes) -> None:
    ids = byte_ids(tokenizer, bad * 50 + b"ok")
    detokenizer = make_detokenizer(tokenizer)
    out, waiting = "", 0
    for token_id in ids:
        delta = detokenizer.add(token_id)
        waiting = 0 if delta else waiting + 1
        assert waiting <= 3
        out += delta
    assert out == (bad * 50 + b"ok").decode("utf-8", "replace")


def test_prompt_that_stops_inside_a_character_gives_it_to_the_output() -> None:
    for char in "é한🚀":
        ids = byte_ids(BYTE_LEVEL, char.encode())
        for cut in range(1, len(ids)):
            prompt = BYTE_LEVEL.encode("go ") + ids[:cut]
            assert "".join(deltas(BYTE_LEVEL, ids[cut:], prompt)) == char
            assert "".join(deltas(BYTE_LEVEL, BYTE_LEVEL.encode("x"), prompt)) == "�x"


def test_sentencepiece_spaces_survive_streaming() -> None:
    for text in ["the quick brown fox", " leading space", "def f():\n    return 1", "  two"]:
        ids = SENTENCEPIECE.encode(text)
        assert "".join(deltas(SENTENCEPIECE, ids)) == text == SENTENCEPIECE.decode(ids)
    spaces = SENTENCEPIECE.piece_to_id("▁▁")
    assert spaces is not None
    assert deltas(SENTENCEPIECE, [spaces, spaces]) == [" ", "  ", ""]  # one space is the tokenizer's, no more
    prompt = SENTENCEPIECE.encode("the quick")
    space_fox = SENTENCEPIECE.encode("fox", add_special_tokens=False)
    assert SENTENCEPIECE.id_to_piece(space_fox[0]).startswith("▁")
    assert "".join(deltas(SENTENCEPIECE, space_fox, prompt)) == " fox"
    assert "".join(deltas(SENTENCEPIECE, space_fox, [SENTENCEPIECE.bos_token_id or 0])) == "fox"
    assert "".join(deltas(SENTENCEPIECE, space_fox, [SENTENCEPIECE.bos_token_id or 0], skip=False)) == " fox"


@BOTH
def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_id
    assert eos is not None
    hello = byte_ids(tokenizer, b"hi")
    assert deltas(tokenizer, [*hello, eos, *hello]) == ["h", "i", "", "h", "i", ""]
    assert "".join(deltas(tokenizer, [*hello, eos], skip=False)) == "hi" + (tokenizer.eos_token or "?")


@BOTH
def test_ids_without_a_token_give_no_text_and_break_nothing(tokenizer: Tokenizer) -> None:
    """Logits padded beyond the vocabulary can yield such ids (B32)."""
    euro = byte_ids(tokenizer, "€".encode())
    beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 271, 151_935, 2**31]
    assert not any(tokenizer.has_token(i) for i in beyond)
    ids = [beyond[0], *euro[:1], *beyond[1:], *euro[1:]]
    assert "".join(deltas(tokenizer, ids)) == "€" == tokenizer.decode(ids)


def word_piece_tokenizer() -> Tokenizer:
    """A tokenizer that only its own decoder can read: word pieces."""
    vocab = {"[UNK]": 0, "un": 1, "##happ": 2, "##y": 3, "dog": 4, "##s": 5, "bark": 6}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend)


@given(st.lists(st.integers(0, 8), max_size=40), st.lists(st.integers(1, 6), max_size=12))
@settings(max_examples=150, deadline=None)
def test_tokenizers_with_a_decoder_of_their_own_stream_too(ids: list[int], prompt: list[int]) -> None:
    tokenizer = word_piece_tokenizer()
    assert tokenizer.text_mode is TextMode.BACKEND
    assert isinstance(make_detokenizer(tokenizer), WindowDetokenizer)
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    assert "".join(deltas(tokenizer, ids, prompt)) == whole[len(before) :]


@BOTH
def test_cost_of_a_token_does_not_grow_with_the_output(tokenizer: Tokenizer) -> None:
    ids = [i for text in CORPUS for i in tokenizer.encode(text)] * 40
    detokenizer = make_detokenizer(tokenizer)
    assert isinstance(detokenizer, ByteDetokenizer)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        for token_id in ids:
            detokenizer.add(token_id)
        times.append((time.perf_counter() - start) / len(ids))
    assert min(times[4:]) < 3 * min(times[:4])
    assert min(times) < 5e-6


def test_multilingual_texts_stream_as_they_decode(shared_data: Path) -> None:
    files = sorted((shared_data / "prompts" / "multilingual").rglob("*.t[xs][tv]"))
    assert len(files) >= 30
    for file in files:
        text = file.read_text(encoding="utf-8")[:3000]
        for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
            ids = tokenizer.encode(text)
            pieces = deltas(tokenizer, ids)
            assert "".join(pieces) == tokenizer.decode(ids) == text, file.name
            assert not re.search("�", "".join(pieces))
