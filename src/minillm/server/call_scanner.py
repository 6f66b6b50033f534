"""One tool call's JSON object, read as it comes."""

from __future__ import annotations

import json
from enum import Enum, auto

WHITESPACE = " \t\r\n"
_SCALAR = frozenset("-+.0123456789abcdefghijklmnopqrstuvwxyzE")
_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = frozenset(("name", "id", "type", *_ARGUMENT_KEYS))


class _State(Enum):
    START = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    SCALAR = auto()
    NEXT = auto()


class ObjectScanner:
    """Reads one JSON object character by character, as far as it is well-formed.

    `name` is set once it has been read. The object is `done` at its closing brace, `broken` at the first character
    that cannot belong to it, and `foreign` with a key that no call has. Reading stops wherever one of these, or the
    beginning of the arguments, can decide about the object: so it is decided alike however the text was cut.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self.foreign = False
        self._stop = False
        self._raw: list[str] = []
        self._state = _State.START
        self._brackets: list[str] = []
        self._in_string = False
        self._escaped = False
        self._is_key = False
        self._may_end = False
        self._key = ""
        self._token: list[str] = []
        self._arguments: list[str] | None = None
        self._seen: set[str] = set()

    @property
    def raw(self) -> str:
        """All text read."""
        return "".join(self._raw)

    @property
    def has_object_arguments(self) -> bool:
        """Whether the arguments have begun, as an object."""
        return bool(self._arguments) and self._arguments[0] == "{"  # type: ignore[index]

    def arguments_from(self, start: int) -> str:
        """The text of the arguments so far, from character `start` on."""
        return "".join((self._arguments or [])[start:])

    def feed(self, text: str, start: int) -> int:
        """Read `text` from `start` on; the position behind what was read."""
        at = start
        self._stop = False
        while at < len(text) and not self._stop:
            self._step(text[at])
            if self.broken:
                break
            self._stop = self._stop or self.done
            at += 1
        self._raw.append(text[start:at])
        return at

    def whole_arguments(self) -> str | None:
        """The arguments of a finished object as JSON text of an object; None if the object is not a valid call."""
        try:
            call = json.loads(self.raw)
            found = [call[key] for key in _ARGUMENT_KEYS if key in call]
            if not isinstance(call.get("name"), str) or len(found) > 1:
                return None
            if not found or found[0] is None:
                return "{}"
            if isinstance(found[0], dict):
                return self.arguments_from(0)
            return found[0] if isinstance(found[0], str) and isinstance(json.loads(found[0]), dict) else None
        except (ValueError, RecursionError):
            return None

    def _step(self, c: str) -> None:
        if self._in_string:
            self._step_in_string(c)
        elif len(self._brackets) > 1:
            self._step_in_container(c)
        elif self._state is _State.SCALAR and c in _SCALAR:
            self._take(c)
        else:
            if self._state is _State.SCALAR:
                self._end_value()
            if c not in WHITESPACE:
                self._step_at_top(c)

    def _take(self, c: str) -> None:
        self._token.append(c)

    def _step_in_string(self, c: str) -> None:
        self._take(c)
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            self._in_string = False
            if len(self._brackets) == 1:
                self._end_string()
        elif c < " ":
            self.broken = True

    def _end_string(self) -> None:
        if not self._is_key:
            self._end_value()
            return
        try:
            self._key = json.loads("".join(self._token))
        except ValueError:
            self.broken = True
        self._state = _State.COLON
        if self._key not in _CALL_KEYS:
            self.foreign = self._stop = True

    def _step_in_container(self, c: str) -> None:
        self._take(c)
        if c == '"':
            self._in_string = True
        elif c in "{[":
            self._brackets.append(c)
        elif c in "}]":
            if self._brackets.pop() != ("{" if c == "}" else "["):
                self.broken = True
            elif len(self._brackets) == 1:
                self._end_value()

    def _step_at_top(self, c: str) -> None:
        match self._state, c:
            case _State.START, "{":
                self._brackets.append(c)
                self._state, self._may_end = _State.KEY, True
            case _State.KEY, '"':
                self._token, self._is_key, self._in_string = [c], True, True
            case (_State.KEY, "}") if self._may_end:
                self.done = True
            case _State.COLON, ":":
                self._state = _State.VALUE
            case _State.VALUE, _:
                self._begin_value(c)
            case _State.NEXT, ",":
                self._state, self._may_end = _State.KEY, False
            case _State.NEXT, "}":
                self.done = True
            case _:
                self.broken = True

    def _begin_value(self, c: str) -> None:
        self._token, self._is_key = [c], False
        if self._key in self._seen:
            self.broken = True
        self._seen.add(self._key)
        if self._key in _ARGUMENT_KEYS:
            self.broken = self.broken or self._arguments is not None
            self._arguments, self._stop = self._token, True
        if c == '"':
            self._in_string = True
        elif c in "{[":
            self._brackets.append(c)
        elif c in _SCALAR:
            self._state = _State.SCALAR
        else:
            self.broken = True

    def _end_value(self) -> None:
        self._state = _State.NEXT
        if self._key == "name":
            try:
                name = json.loads("".join(self._token))
            except (ValueError, RecursionError):
                name = None
            self.name = name if isinstance(name, str) else None
            self.broken = self.broken or self.name is None
            self._stop = True
