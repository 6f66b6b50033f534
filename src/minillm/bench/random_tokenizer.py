"""A tokenizer for models with random weights: a byte-level BPE of any size, made from a seed.

Text work costs what pieces cost, so the pieces are like those of a real vocabulary. Qwen3's 151,643: a piece has 6.4
bytes on average, 38 % are not ASCII, 1 % end inside a character, 35 % begin with a space. The 151,936 made here: 6.2
bytes, 31 %, 0.1 %, 40 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from minillm.models.tokenizer import Tokenizer

SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|endoftext|>")
"""Ids 0, 1 and 2; the last one ends a text."""

_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
_CYRILLIC = "".join(map(chr, range(0x430, 0x450)))
_HAN = "".join(map(chr, range(0x4E00, 0x5600)))


@lru_cache(maxsize=4)
def random_tokenizer(vocab_size: int) -> Tokenizer:
    """The tokenizer of `vocab_size` tokens, all of them with a text."""
    from minillm.models.tokenizer import Tokenizer

    return Tokenizer(random_backend(vocab_size), eos_token_id=2, source="random tokenizer")


def random_backend(vocab_size: int) -> Backend:
    """The same as the Rust library's object."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    from minillm.models.tokenizer import byte_level_pieces

    pieces = byte_level_pieces()
    vocab = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    for byte in (*range(0x20, 0x7F), *range(0x20), *range(0x7F, 0x100)):  # a tiny vocabulary has printable ones
        if len(vocab) < vocab_size:
            vocab[pieces[byte]] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in _words(Random(0)):
        if len(vocab) >= vocab_size:
            break
        piece = ""
        for character in word:
            part = ""
            for byte in character.encode():
                part = _join(part, pieces[byte], vocab, merges, vocab_size)
            piece = _join(piece, part, vocab, merges, vocab_size)
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return backend


def _join(left: str, right: str, vocab: dict[str, int], merges: list[tuple[str, str]], vocab_size: int) -> str:
    """The piece of both, made a token if there is room; else the left one alone, so that a word ends there."""
    if not left or not right:
        return left or right
    piece = left + right
    if piece not in vocab:
        if len(vocab) >= vocab_size or left not in vocab or right not in vocab:
            return left
        vocab[piece] = len(vocab)
        merges.append((left, right))
    return piece


def _words(rng: Random) -> Iterator[str]:
    """Made-up words without end: Latin letters as frequent as in English, most with a space in front, and others."""
    weights = [1 / (rank + 2) for rank in range(len(_LETTERS))]
    while True:
        kind = rng.random()
        if kind < 0.5:
            word = "".join(rng.choices(_LETTERS, weights, k=rng.randint(3, 9)))
            yield " " + word if rng.random() < 0.6 else word.capitalize() if rng.random() < 0.3 else word
        elif kind < 0.7:
            yield "".join(rng.choices(_CYRILLIC, k=rng.randint(2, 5)))
        else:
            yield "".join(rng.choices(_HAN, k=rng.randint(2, 3)))
