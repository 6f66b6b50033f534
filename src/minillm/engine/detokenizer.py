"""Token ids to text, one token at a time.

The rule for the text of an output: ``decode(prompt + output)`` without the ``decode(prompt)`` in front. So the space
that a SentencePiece tokenizer puts before the first word of a text is dropped only where the output is that first
word. Where the prompt stops inside a character, the character that the output completes counts to the output.

No delta ends inside a character: bytes that can still become one (at most three) wait for the next token, and
:meth:`finish` gives out what is left as U+FFFD, as decoding at once does. Bytes that cannot become a character are
U+FFFD at once. A token without text (an id that no token has, a skipped special token) gives an empty delta.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from minillm.models.tokenizer import TextMode, Tokenizer

_MAX_PENDING = 3
_REPLACEMENT = "�"


class Detokenizer(Protocol):
    """Text of one sequence so far."""

    def add(self, token_id: int) -> str:
        """The text that this token adds."""
        ...

    def add_all(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add: the join of what `add` would give."""
        ...

    def finish(self) -> str:
        """The rest, once no token will follow."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
) -> Detokenizer:
    """A detokenizer for what follows `prompt_ids`; tokens are looked up in tables that all of them share."""
    if tokenizer.text_mode is TextMode.BYTES:
        return ByteDetokenizer(tokenizer, prompt_ids, skip_special_tokens)
    return WindowDetokenizer(tokenizer, prompt_ids, skip_special_tokens)


class ByteDetokenizer:
    """For tokenizers whose tokens are byte strings: a table look-up, or UTF-8 decoding across tokens.

    ``"".join(deltas) + finish()`` equals the text of the whole output, for any ids.
    """

    __slots__ = ("_bytes", "_drop_space", "_pending", "_texts")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._bytes = tokenizer.bytes_table(skip_special_tokens)
        self._texts = tokenizer.text_table(skip_special_tokens)
        self._pending = self._unfinished_character(prompt_ids)
        self._drop_space = tokenizer.strips_first_space and not any(self._bytes_of(i) for i in prompt_ids)

    def add(self, token_id: int) -> str:
        """The text that this token adds, whole characters only."""
        if not 0 <= token_id < len(self._texts):
            return ""
        if self._pending:
            return self._decode(self._bytes[token_id])
        text = self._texts[token_id]
        if text is None:
            return self._decode(self._bytes[token_id])
        return self._first(text) if self._drop_space else text

    def add_all(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add, whole characters only."""
        table = self._bytes
        size = len(table)
        return self._decode(b"".join([table[token_id] for token_id in token_ids if 0 <= token_id < size]))

    def finish(self) -> str:
        """An unfinished character as U+FFFD."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def _decode(self, data: bytes) -> str:
        data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._first(text) if self._drop_space else text

    def _first(self, text: str) -> str:
        if not text and not self._pending:
            return text
        self._drop_space = False
        return text.removeprefix(" ")

    def _bytes_of(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def _unfinished_character(self, prompt_ids: Sequence[int]) -> bytes:
        """The first bytes of a character that the prompt leaves unfinished."""
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes_of(token_id) + tail
            if len(tail) >= _MAX_PENDING:
                break
        for length in range(1, min(_MAX_PENDING, len(tail)) + 1):
            start = tail[-length:]
            if start[0] >= 0xC0:  # a lead byte: whatever stands before it is decoded apart from it
                _, used = utf_8_decode(start, "replace", False)
                return start if used == 0 else b""
        return b""


class WindowDetokenizer:
    """For tokenizers that only their own decoder can turn into text (word pieces, suffix markers).

    Each token is decoded together with the few before it, and the text that it adds is what the decoder prints more.
    The window is bounded, so the cost of a token does not grow with the length of the output.
    """

    __slots__ = ("_ids", "_num_read", "_skip", "_tokenizer")

    WINDOW = 6
    MAX_HELD = 4

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._ids: list[int] = []
        for token_id in reversed(prompt_ids):
            if self._has_text(token_id):
                self._ids.insert(0, token_id)
                if len(self._ids) == self.WINDOW:
                    break
        self._num_read = len(self._ids)

    def add(self, token_id: int) -> str:
        """The text that this token adds; empty while it may still change with the next token."""
        if not self._has_text(token_id):
            return ""
        self._ids.append(token_id)
        return self._read(final=len(self._ids) - self._num_read > self.MAX_HELD)

    def add_all(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add."""
        return "".join(map(self.add, token_ids))

    def finish(self) -> str:
        """What was held back."""
        return self._read(final=True)

    def _has_text(self, token_id: int) -> bool:
        return self._tokenizer.has_token(token_id) and token_id not in self._skip

    def _read(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[: self._num_read], skip_special_tokens=False)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        if text.endswith(_REPLACEMENT) and not final:
            return ""
        self._ids = self._ids[-self.WINDOW :]
        self._num_read = len(self._ids)
        return text[len(before) :]
