"""Text to token ids and back.

Wraps the Rust library `tokenizers`; :func:`load_tokenizer` builds one from a GGUF file or a Hugging Face folder.

Decoding joins the tokens' own bytes and reads them as UTF-8, each maximal invalid run as U+FFFD. For valid text that
is what Hugging Face and llama.cpp give. It differs from Hugging Face in one case: their byte-fallback decoder turns a
whole run of byte tokens into U+FFFD if any part of it is invalid, which no streaming decoder could follow.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend

from minillm.core.errors import InvalidParameterError, ModelLoadError
from minillm.models.chat_template import ControlTextGuard, render_chat, select_template
from minillm.models.untrusted import reading

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTROL_SHAPE = re.compile(r"<\|.+\|>|<｜.+｜>|<(start|end)_of_\w+>|</?s>|\[/?INST\]")


class TextMode(Enum):
    """How tokens become text."""

    BYTES = "bytes"
    """A token is a byte string of its own (byte-level BPE, SentencePiece with or without byte fallback)."""
    BACKEND = "backend"
    """Only the `tokenizers` decoder knows (word pieces, suffix markers)."""


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a `.gguf` file or of a folder with `tokenizer.json`. Raises :class:`ModelLoadError`."""
    path = Path(path)
    with reading(path):
        if path.is_dir():
            from minillm.models.hf_tokenizer import load_hf_tokenizer

            return load_hf_tokenizer(path)
        if path.suffix == ".gguf":
            from minillm.models.gguf_tokenizer import load_gguf_tokenizer

            return load_gguf_tokenizer(path)
    raise ModelLoadError(f"{path}: no tokenizer here; a .gguf file or a folder with tokenizer.json is needed")


class Tokenizer:
    """A vocabulary, how to split text into it, and the model's chat template.

    ``prefix_ids`` / ``suffix_ids`` are what `add_special_tokens` puts around a text (usually BOS / nothing).
    ``control_ids`` are the ids that only the program may write: special tokens, and added tokens that look like
    turn markers though their file does not flag them. ``bos_before_chat``: a chat whose template prints no BOS gets
    one if the tokenizer adds BOS (llama.cpp's rule for GGUF files; Hugging Face never adds one to a chat).

    Thread-safe: encoding and decoding change nothing.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        unk_token_id: int | None = None,
        pad_token_id: int | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
        prefix_ids: Sequence[int] | None = None,
        suffix_ids: Sequence[int] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        bos_before_chat: bool = False,
        source: str = "tokenizer",
    ) -> None:
        self.source = source
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.unk_token_id = unk_token_id
        self.pad_token_id = pad_token_id
        eos_ids = {*eos_token_ids, *([] if eos_token_id is None else [eos_token_id])}
        self.eos_token_ids = frozenset(eos_ids)
        self.chat_templates = dict(chat_templates or {})
        self._backend = backend
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self._pieces = _pieces_by_id(backend)
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        control_shaped = {i for i, token in self._added.items() if _CONTROL_SHAPE.fullmatch(token.content)}
        self.control_ids = self.special_ids | control_shaped | (self.eos_token_ids & self._added.keys())
        self._guard = ControlTextGuard(self._added[i].content for i in self.control_ids)
        self._literal_lock = threading.Lock()
        self._literal_cache: dict[bool, tuple[Backend, dict[int, int]]] = {}

        if prefix_ids is None:
            prefix_ids = [bos_token_id] if add_bos and bos_token_id is not None else []
        if suffix_ids is None:
            suffix_ids = [eos_token_id] if add_eos and eos_token_id is not None else []
        self.prefix_ids = tuple(prefix_ids)
        self.suffix_ids = tuple(suffix_ids)
        self._bos_before_chat = bos_before_chat and bos_token_id is not None and bos_token_id in self.prefix_ids
        self._template_variables = {
            name: self._pieces[i]
            for name, i in (
                ("bos_token", bos_token_id),
                ("eos_token", eos_token_id),
                ("unk_token", unk_token_id),
                ("pad_token", pad_token_id),
            )
            if i is not None
        }
        self._template_variables |= template_variables or {}

        decoder = _component_state(backend.decoder)
        self.text_mode, byte_level, self.strips_first_space = _decoding_rule(decoder)
        self._byte_level = byte_level
        self._bytes_cache: dict[bool, list[bytes]] = {}
        self._texts_cache: dict[bool, list[str | None]] = {}

    # Vocabulary

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. Ids below may have no token, and a model's logits may be wider."""
        return len(self._pieces)

    @property
    def bos_token(self) -> str | None:
        """Text of the BOS token."""
        return None if self.bos_token_id is None else self._pieces[self.bos_token_id]

    @property
    def eos_token(self) -> str | None:
        """Text of the main EOS token."""
        return None if self.eos_token_id is None else self._pieces[self.eos_token_id]

    def has_token(self, token_id: int) -> bool:
        """Whether the id has a token. One without (padded logits, gaps) decodes to empty text."""
        return 0 <= token_id < len(self._pieces) and self._pieces[token_id] is not None

    def id_to_piece(self, token_id: int) -> str:
        """The token as the vocabulary spells it (`Ġthe`, `▁the`, `<0x0A>`); empty for an id without a token."""
        return (self._pieces[token_id] or "") if self.has_token(token_id) else ""

    def piece_to_id(self, piece: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        token_id = self._backend.token_to_id(piece)
        return None if token_id is None else int(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for; empty for an id without a token.

        Where decoding is not a concatenation of bytes (`text_mode` is BACKEND) these are the bytes of the piece.
        """
        table = self.bytes_table(skip_special_tokens=False)
        return table[token_id] if 0 <= token_id < len(table) else b""

    def bytes_table(self, skip_special_tokens: bool) -> list[bytes]:
        """Bytes by id, special tokens empty if they are skipped. Shared: do not change it."""
        if skip_special_tokens not in self._bytes_cache:
            table = [self._bytes_of(i) for i in range(len(self._pieces))]
            if skip_special_tokens:
                for i in self.special_ids:
                    table[i] = b""
            self._bytes_cache[skip_special_tokens] = table
        return self._bytes_cache[skip_special_tokens]

    def text_table(self, skip_special_tokens: bool) -> list[str | None]:
        """Text by id, None where the token's bytes are not whole UTF-8 characters. Shared: do not change it."""
        if skip_special_tokens not in self._texts_cache:
            self._texts_cache[skip_special_tokens] = [
                _text_or_none(data) for data in self.bytes_table(skip_special_tokens)
            ]
        return self._texts_cache[skip_special_tokens]

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        if piece is None:
            return b""
        if self.text_mode is TextMode.BACKEND:
            return piece.encode()
        if self._byte_level:
            return piece.encode() if token_id in self._added else _byte_level_bytes(piece)
        match = _BYTE_TOKEN.fullmatch(piece)
        if match and token_id not in self._added:
            return bytes([int(match[1], 16)])
        return piece.replace(_SPACE_MARK, " ").encode()

    # Encoding

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        ``add_special_tokens``: put BOS (and what else the tokenizer adds) around it, never a second time where the
        text already spells it. ``parse_special``: a control token spelled in the text becomes that token; off, it is
        ordinary text. Raises :class:`InvalidParameterError` for text that is not valid Unicode.
        """
        ids = self._encode_parsed(text) if parse_special else self._encode_literal(text)
        return self._with_special_tokens(ids) if add_special_tokens else ids

    def _with_special_tokens(self, ids: list[int]) -> list[int]:
        prefix, suffix = list(self.prefix_ids), list(self.suffix_ids)
        if ids[: len(prefix)] != prefix:
            ids = prefix + ids
        if suffix and ids[-len(suffix) :] != suffix:
            ids = ids + suffix
        return ids

    def _encode_parsed(self, text: str) -> list[int]:
        _check_text(text)
        return self._backend.encode(text, add_special_tokens=False).ids

    def _encode_literal(self, text: str, starts_text: bool = True) -> list[int]:
        """Encode with control tokens as ordinary text. `starts_text`: nothing precedes it (matters to tokenizers
        that put a space before the first word only)."""
        _check_text(text)
        backend, renumbered = self._literal_backend(starts_text)
        ids = backend.encode(text, add_special_tokens=False).ids
        if not self.control_ids.isdisjoint(ids):
            # The vocabulary spells a control token as an ordinary entry: keep its first character apart.
            cuts = self._guard.cuts(text)
            if cuts:
                pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
                inner, _ = self._literal_backend(starts_text=False)
                ids = backend.encode(pieces[0], add_special_tokens=False).ids
                for piece in pieces[1:]:
                    ids += inner.encode(piece, add_special_tokens=False).ids
        return [renumbered.get(i, i) for i in ids] if renumbered else ids

    def _literal_backend(self, starts_text: bool) -> tuple[Backend, dict[int, int]]:
        """A backend on the same vocabulary that does not know the control tokens, and the ids it renumbers."""
        with self._literal_lock:
            if starts_text not in self._literal_cache:
                backend = Backend(self._backend.model)
                if self._backend.normalizer is not None:
                    backend.normalizer = self._backend.normalizer
                splitter = self._backend.pre_tokenizer
                if splitter is not None:
                    backend.pre_tokenizer = splitter if starts_text else _without_first_space(splitter)
                kept = {i: token for i, token in self._added.items() if i not in self.control_ids}
                backend.add_tokens(list(kept.values()))
                renumbered = {}
                for token_id, token in kept.items():
                    new_id = backend.token_to_id(token.content)
                    if new_id is not None and new_id != token_id:
                        renumbered[new_id] = token_id
                self._literal_cache[starts_text] = backend, renumbered
            return self._literal_cache[starts_text]

    # Decoding

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids. Ids without a token give no text; a SentencePiece text loses the one leading space
        that encoding put there."""
        if self.text_mode is TextMode.BACKEND:
            return self._backend.decode([i for i in ids if self.has_token(i)], skip_special_tokens=skip_special_tokens)
        table = self.bytes_table(skip_special_tokens)
        size = len(table)
        text = b"".join([table[i] for i in ids if 0 <= i < size]).decode("utf-8", "replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, its leading space kept; bytes of an unfinished character are U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    # Chat

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        tokenize: bool = True,
        parse_special_in_content: bool = False,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_kwargs: Any,
    ) -> list[int] | str:
        """Render messages with the chat template; token ids, or the text with `tokenize=False`.

        Control tokens spelled in the messages, tools or template arguments stay ordinary text, so nobody can forge a
        turn; `parse_special_in_content=True` turns them into control tokens as Hugging Face does. Without such text
        the ids are those of Hugging Face's `apply_chat_template(tokenize=True)`. The rendered text does not say which
        control tokens were the template's own: send ids, not text, to keep the protection.

        Exactly one BOS: the template's; the tokenizer adds none to it. A GGUF file whose template prints no BOS but
        whose tokenizer adds one gets that one.

        `chat_template` replaces the model's own. `chat_template_kwargs` (and further keywords) are variables for it;
        what a client sends belongs into the former, which cannot reach the parameters above. Raises
        :class:`ChatTemplateError` or :class:`InvalidParameterError`.
        """
        template = chat_template or select_template(self.chat_templates, tools is not None, self.source)
        guard = None if parse_special_in_content else self._guard
        rendered, mark = render_chat(
            template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self._template_variables,
            arguments={**template_kwargs, **(chat_template_kwargs or {})},
            guard=guard,
        )
        if not tokenize:
            return rendered if mark is None else rendered.replace(mark, "")
        ids = self._encode_parsed(rendered) if mark is None else self._encode_marked(rendered, mark)
        if self._bos_before_chat and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids = [self.bos_token_id, *ids]
        return ids

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """Encode a rendered chat in which `mark` breaks up every control text that is not the template's own.

        Only the stretches between two control tokens that hold a mark are encoded apart, as ordinary text.
        """
        flags = {token.content: token for i, token in self._added.items() if i in self.control_ids}
        ids: list[int] = []
        run = start = 0
        left: AddedToken | None = None
        bounds = [(m.start(), m.end(), flags[m[0]]) for m in self._guard.pattern.finditer(text)]
        for begin, end, right in [*bounds, (len(text), len(text), None)]:
            stretch = text[start:begin]
            if mark in stretch:
                ids += self._encode_parsed(text[run:start])
                stretch = stretch.replace(mark, "")
                stretch = stretch.lstrip() if left is not None and left.rstrip else stretch
                stretch = stretch.rstrip() if right is not None and right.lstrip else stretch
                ids += self._encode_literal(stretch, starts_text=start == 0)
                run = begin
            left, start = right, end
        return ids + self._encode_parsed(text[run:])


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidParameterError("prompt", type(text).__name__, "text must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameterError("prompt", text[error.start], "text must not hold lone surrogates") from None


def _text_or_none(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _pieces_by_id(backend: Backend) -> list[str | None]:
    vocab = backend.get_vocab(with_added_tokens=True)
    pieces: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for piece, token_id in vocab.items():
        pieces[token_id] = piece
    return pieces


def _component_state(component: Any) -> dict[str, Any]:
    """The JSON description of a `tokenizers` component; empty for None."""
    return {} if component is None else json.loads(component.__getstate__())


def _decoding_rule(decoder: Mapping[str, Any]) -> tuple[TextMode, bool, bool]:
    """(text mode, whether it is byte-level, whether one leading space is dropped) of a decoder description."""
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TextMode.BYTES, True, False
    if kinds == ["Metaspace"]:
        return TextMode.BYTES, False, steps[0].get("prepend_scheme", "always") != "never"
    if kinds[:1] == ["Replace"] and set(kinds[1:]) <= {"ByteFallback", "Fuse", "Strip"}:
        replace = steps[0]
        strips = [step for step in steps if step["type"] == "Strip"]
        known = all((step["content"], step["start"], step["stop"]) == (" ", 1, 0) for step in strips)
        if replace["pattern"] == {"String": _SPACE_MARK} and replace["content"] == " " and known and len(strips) < 2:
            return TextMode.BYTES, False, bool(strips)
    return TextMode.BACKEND, False, False


def _without_first_space(splitter: Any) -> Any:
    """The same pre-tokenizer for text that something precedes: `prepend_scheme: first` becomes `never`."""
    state = _component_state(splitter)
    text = json.dumps(state)
    changed = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    if changed == text:
        return splitter
    clone = pre_tokenizers.Sequence([]) if state["type"] == "Sequence" else pre_tokenizers.Metaspace()
    clone.__setstate__(changed.encode())
    return clone


def _byte_level_alphabet() -> dict[int, int]:
    """GPT-2's printable stand-ins: character -> byte (`bytes_to_unicode` of openai/gpt-2, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: byte for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    # Characters below 0x100 that stand for nothing are sent out of Latin-1, so that they are noticed.
    strangers = {byte: 0xFFFD for byte in range(256) if byte not in table}
    return table | strangers | {0x100 + n: byte for n, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def byte_level_pieces() -> list[str]:
    """The character that stands for each byte, 0 to 255, in a byte-level vocabulary."""
    characters = {byte: chr(code) for code, byte in _ALPHABET.items() if byte < 0x100}
    return [characters[byte] for byte in range(0x100)]


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()
