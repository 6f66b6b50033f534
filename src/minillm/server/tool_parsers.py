"""Tool calls out of a model's text, as it comes: which parts are content, which are calls.

```
TEXT ──opener──► OPENED ──{──► CALL ──}──► AFTER ──{ or opener──► CALL
  ▲                 │            │           │
  └── anything else ┴─ malformed ┴───────────┘
```
The forms are those of :class:`ToolFormat`. Text can be cut anywhere, also inside a tag: what may still become one is
held back. A call whose name is not one of the request's tools, or that is not valid JSON, is content, just as it was
written.

While streaming, a call is announced once its name is known and its arguments have begun, and the arguments are passed
on as they come. Should they turn out to be malformed after that, what was delivered stands. Without streaming
(`incremental=False`) a call is delivered when it is complete and valid, or not at all.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from minillm.server.call_scanner import WHITESPACE, ObjectScanner


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call number `index`. The first piece has `id` and `name`; `arguments` is JSON text to be joined."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    """What a piece of text brought. Content and calls in one delta are in this order unless text follows a call."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.calls)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolMessage:
    """An assistant's message: its text, None where there is none beside calls, and its calls."""

    content: str | None
    tool_calls: list[ToolCall]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls. Every call is a JSON object with `name` and `arguments` or `parameters`.

    `openers` introduce calls anywhere in a text; `closer` ends what an opener began; `bare`: an object that starts the
    output may be a call without an opener; `separators` may stand between two calls, besides white space.
    """

    openers: tuple[str, ...]
    closer: str = ""
    bare: bool = False
    separators: str = ""
    arguments_key: str = "arguments"
    """How templates of the family name a call's arguments; both names are read."""

    @property
    def tags(self) -> tuple[str, str] | None:
        """The tags around each call; None where calls have none."""
        return (self.openers[0], self.closer) if self.closer else None

    @property
    def prefix(self) -> str:
        """The opener of calls that stand without tags otherwise."""
        return self.openers[-1] if self.bare else ""


HERMES = ToolFormat(("<tool_call>",), "</tool_call>")
"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, with text around it."""

LLAMA3 = ToolFormat(("<|python_tag|>",), bare=True, separators=";,", arguments_key="parameters")
"""Llama 3: ``{"name": ..., "parameters": {...}}``, maybe behind ``<|python_tag|>``; several with `;` between."""

EITHER = ToolFormat(("<tool_call>", "<|python_tag|>"), "</tool_call>", bare=True, separators=";,")
"""Where the model's template does not tell."""

ARRAY = ToolFormat(("[",), "]", separators=",")
"""What the grammar of `tool_choice: required` makes."""


def format_of(template: str | None) -> ToolFormat:
    """The form that a chat template teaches its model."""
    if template and "<tool_call>" in template:
        return HERMES
    if template and ("<|python_tag|>" in template or "ipython" in template):
        return LLAMA3
    return EITHER


class _Place(Enum):
    TEXT = auto()
    OPENED = auto()
    CALL = auto()
    AFTER = auto()


class ToolCallParser:
    """Reads one choice's text. `names` are the tools that may be called; `max_calls` bounds how many are delivered
    (more are dropped, as in vLLM); `with_content=False` drops what is no call."""

    def __init__(
        self,
        form: ToolFormat,
        names: Iterable[str],
        *,
        incremental: bool = True,
        max_calls: int | None = None,
        with_content: bool = True,
    ) -> None:
        self._form = form
        self._names = frozenset(names)
        self._incremental = incremental
        self._max_calls = max_calls
        self._with_content = with_content
        self._place = _Place.TEXT
        self._fresh = form.bare
        """Whether nothing but white space has come: an object may be a call without an opener."""
        self._is_open = False
        """Whether an opener has not been closed."""
        self._held = ""
        """Text whose meaning depends on what follows."""
        self._prefix = ""
        """What comes before the object under way, for the case that it is none."""
        self._space = ""
        """White space behind the content so far; a call swallows it."""
        self._after_call = False
        self._scanner = ObjectScanner()
        self._announced = False
        self._dropped = False
        self._sent = 0
        self.num_calls = 0
        """Calls delivered so far, one under way included."""

    def feed(self, text: str) -> Delta:
        """Take in a piece of text."""
        delta = Delta()
        text = self._held + text
        self._held = ""
        at = 0
        while at < len(text):
            at = self._advance(text, at, delta)
        return delta

    def finish(self) -> Delta:
        """The text has ended: what is held back is content, or the rest of a call that was announced."""
        delta = Delta()
        if self._place is _Place.CALL:
            if not self._announced and not self._dropped:
                self._content(self._prefix + self._scanner.raw, delta)
        elif self._place is _Place.OPENED:
            self._content(self._prefix + self._held, delta)
        elif self._place is _Place.TEXT:
            self._content(self._held, delta)
        elif rest := self._held.strip(WHITESPACE + self._form.separators):
            # A closing tag that was cut off belongs to the call.
            self._content("" if self._form.closer.startswith(rest) else self._held, delta)
        if self._space and not self._after_call and self._with_content:
            delta.content += self._space
        self._place, self._held, self._space = _Place.AFTER, "", ""
        return delta

    def message(self, text: str) -> ToolMessage:
        """The whole text of a choice as a message."""
        return join([self.feed(text), self.finish()])

    def finish_reason(self, reason: str) -> str:
        """The choice's finish reason for the client: `tool_calls` where the model stopped after calls."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason

    # -- places ---------------------------------------------------------------------------------------------------

    def _advance(self, text: str, at: int, delta: Delta) -> int:
        if self._place is _Place.CALL:
            return self._in_call(text, at, delta)
        if self._place is _Place.OPENED:
            return self._in_opened(text, at, delta)
        if self._place is _Place.AFTER:
            return self._in_after(text, at)
        return self._in_text(text, at, delta)

    def _in_text(self, text: str, at: int, delta: Delta) -> int:
        if self._fresh:
            start = _skip(text, at, WHITESPACE)
            if start == len(text):
                self._held = text[at:]
                return start
            self._fresh = False
            if text[start] == "{":
                self._prefix = text[at:start]
                self._begin_call()
                return start
        found = [(text.find(opener, at), opener) for opener in self._form.openers]
        first, opener = min(((i, opener) for i, opener in found if i >= 0), default=(-1, ""))
        if first >= 0:
            self._content(text[at:first], delta)
            self._prefix, self._space = self._space + opener, ""
            self._place, self._is_open = _Place.OPENED, True
            return first + len(opener)
        end = len(text) - _overlap(text[at:], self._form.openers)
        self._content(text[at:end], delta)
        self._held = text[end:]
        return len(text)

    def _in_opened(self, text: str, at: int, delta: Delta) -> int:
        start = _skip(text, at, WHITESPACE)
        self._prefix += text[at:start]
        if start == len(text):
            return start
        if text[start] == "{":
            self._begin_call()
        else:
            self._to_text(self._prefix, delta)
        return start

    def _in_call(self, text: str, at: int, delta: Delta) -> int:
        at = self._scanner.feed(text, at)
        scanner = self._scanner
        if self._incremental and scanner.has_object_arguments and scanner.name in self._names:
            self._announce(delta)
            self._send_arguments(delta)
        if self._is_other_object():
            self._to_text(self._prefix + scanner.raw, delta)
        elif scanner.broken:
            if self._announced or self._dropped:
                self._after_call = True
                self._to_text("", delta)
            else:
                self._to_text(self._prefix + scanner.raw, delta)
        elif scanner.done:
            self._end_call(delta)
        return at

    def _is_other_object(self) -> bool:
        """Whether an object without an opener turns out to be just that: need not be held back to its end."""
        if self._is_open or self._announced or self._dropped:
            return False
        name = self._scanner.name
        return self._scanner.foreign or (name is not None and name not in self._names)

    def _in_after(self, text: str, at: int) -> int:
        form = self._form
        start = _skip(text, at, WHITESPACE + form.separators)
        rest = text[start:]
        if not rest:
            self._held = text[at:]
            return len(text)
        if form.closer and rest.startswith(form.closer):
            self._is_open = False
            return start + len(form.closer)
        for opener in form.openers:
            if rest.startswith(opener):
                self._prefix = text[at:start] + opener
                self._place, self._is_open = _Place.OPENED, True
                return start + len(opener)
        if rest[0] == "{" and (form.bare or self._is_open):
            self._prefix = text[at:start]
            self._begin_call()
            return start
        tags = (*form.openers, form.closer)
        if _overlap(rest, tags) == len(rest):
            self._held = text[at:]
            return len(text)
        self._place, self._is_open = _Place.TEXT, False
        return at

    # -- calls ----------------------------------------------------------------------------------------------------

    def _begin_call(self) -> None:
        self._place, self._scanner = _Place.CALL, ObjectScanner()
        self._announced = self._dropped = False
        self._sent = 0

    def _announce(self, delta: Delta) -> None:
        if self._announced or self._dropped:
            return
        if self._max_calls is not None and self.num_calls >= self._max_calls:
            self._dropped = True
            return
        self._announced = True
        delta.calls.append(CallDelta(self.num_calls, new_call_id(), self._scanner.name))
        self.num_calls += 1

    def _send_arguments(self, delta: Delta) -> None:
        piece = self._scanner.arguments_from(self._sent)
        if piece and self._announced:
            self._add_arguments(piece, delta)
            self._sent += len(piece)

    def _add_arguments(self, piece: str, delta: Delta) -> None:
        """One piece per delta and call, behind its announcement."""
        index, last = self.num_calls - 1, delta.calls[-1] if delta.calls else None
        if last is not None and last.index == index and last.id is None:
            delta.calls[-1] = CallDelta(index, arguments=last.arguments + piece)
        else:
            delta.calls.append(CallDelta(index, arguments=piece))

    def _end_call(self, delta: Delta) -> None:
        if not self._announced and not self._dropped:
            arguments = self._scanner.whole_arguments()
            if arguments is None or self._scanner.name not in self._names:
                self._to_text(self._prefix + self._scanner.raw, delta)
                return
            self._announce(delta)
            if self._announced:
                self._add_arguments(arguments, delta)
        self._place, self._after_call = _Place.AFTER, True

    # -- content --------------------------------------------------------------------------------------------------

    def _to_text(self, text: str, delta: Delta) -> None:
        self._place, self._is_open = _Place.TEXT, False
        self._content(text, delta)

    def _content(self, text: str, delta: Delta) -> None:
        """Deliver text but for the white space at its end, which waits; and none directly behind a call."""
        if self._after_call:
            text = text.lstrip()
        if not text or not self._with_content:
            return
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._after_call = False
            delta.content += shown


class NamedCallParser:
    """For a named function: the whole text is its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0

    def feed(self, text: str) -> Delta:
        """Take in a piece of text."""
        delta = Delta()
        if not self.num_calls:
            self.num_calls = 1
            delta.calls.append(CallDelta(0, new_call_id(), self._name))
        if text:
            delta.calls.append(CallDelta(0, arguments=text))
        return delta

    def finish(self) -> Delta:
        """The text has ended; a call without any is announced here."""
        return Delta() if self.num_calls else self.feed("")

    def message(self, text: str) -> ToolMessage:
        """The whole text of a choice as a message."""
        return join([self.feed(text), self.finish()])

    def finish_reason(self, reason: str) -> str:
        """As it is: OpenAI ends a named call with `stop`."""
        return reason


def join(deltas: Iterable[Delta]) -> ToolMessage:
    """The message that a stream of deltas adds up to."""
    content: list[str] = []
    names: list[tuple[str, str]] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        content.append(delta.content)
        for call in delta.calls:
            if call.id is not None and call.name is not None:
                names.append((call.id, call.name))
                arguments.append([])
            arguments[call.index].append(call.arguments)
    calls = [ToolCall(i, name, "".join(parts)) for (i, name), parts in zip(names, arguments, strict=True)]
    text = "".join(content)
    return ToolMessage(text if text or not calls else None, calls)


def new_call_id() -> str:
    """An id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def _skip(text: str, at: int, characters: str) -> int:
    return len(text) - len(text[at:].lstrip(characters))


def _overlap(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a beginning, but not the whole, of one of the tags."""
    longest = max(map(len, tags)) - 1
    for length in range(min(len(text), longest), 0, -1):
        if any(len(tag) > length and tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0
