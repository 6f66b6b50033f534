"""What form an output must have: the checked request, not yet compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.core.errors import InvalidParameterError

MAX_TEXT = 256 * 1024
"""Longest schema, regular expression or grammar, in characters."""
MAX_DEPTH = 64
"""Deepest nesting of a JSON schema."""
MAX_CHOICES = 4096
MAX_WHITESPACE_PATTERN = 256
MAX_EXPANDED = 100_000
"""Most parts of a regular expression once its counted repetitions are written out."""
MAX_EXPANDED_WHITESPACE = 1_000

KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalls:
    """Calls of tools, as a chat template teaches its model to write them: JSON objects that fit the schema.

    - ``schema``: of one call; a mapping or its text, kept as canonical text.
    - ``tags``: what stands in front of each call and behind it; None where calls have no tags.
    - ``bare``: calls may stand without tags, behind ``prefix`` or nothing, with one of ``separators`` between two.
    - ``max_calls``: most calls of one output.
    - ``ignore_unsupported``: as in :class:`StructuredOutputs`.
    """

    schema: str | Mapping[str, Any]
    tags: tuple[str, str] | None = None
    bare: bool = False
    prefix: str = ""
    separators: str = ""
    max_calls: int = 1
    ignore_unsupported: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", _schema_text(self.schema))


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form of an output, named as in vLLM. Exactly one of the first five is given.

    - ``json``: a JSON schema, as its text, a mapping, or true (any JSON). Kept as canonical text.
    - ``json_object``: any JSON object.
    - ``regex``: a regular expression that the whole output matches (Rust's syntax: no look-around, no references).
    - ``choice``: the output is one of these texts.
    - ``grammar``: a context-free grammar in Lark's or llama.cpp's (GBNF) notation; its start rule is `start` or `root`.

    For the JSON kinds: ``disable_any_whitespace`` allows none between the parts; ``whitespace_pattern`` is a regular
    expression for what may stand there; ``ignore_unsupported`` takes keywords of a schema that cannot be enforced
    (`uniqueItems`, an unknown `format`) as if they were not there, rather than refusing the schema.

    ``or_calls``: calls of tools may come in place of the form.

    Checked here is the shape alone; :class:`minillm.engine.grammar.GrammarCompiler` compiles. Violations raise
    :class:`InvalidParameterError`. Hashable, so that what was compiled can be found again.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    ignore_unsupported: bool = False
    or_calls: ToolCalls | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.or_calls, ToolCalls | None):
            raise _refusal("or_calls", self.or_calls, "it must be ToolCalls or None")
        for name in ("json_object", "disable_any_whitespace", "ignore_unsupported"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, False)  # vLLM's default
            elif not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "it must be true or false")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            raise _refusal("json", False, "nothing fits this schema")
        if len(given) != 1:
            rule = f"exactly one of {', '.join(KINDS)} must be given"
            raise InvalidParameterError("structured_outputs", ", ".join(given) or None, rule)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name), MAX_TEXT)
        if self.regex is not None:
            _check_expanded("regex", self.regex, MAX_EXPANDED)
        self._check_whitespace()

    def _check_whitespace(self) -> None:
        is_json = self.json is not None or self.json_object
        for name in ("disable_any_whitespace", "whitespace_pattern", "ignore_unsupported"):
            if getattr(self, name) and not is_json:
                raise _refusal(name, getattr(self, name), "it is for json and json_object only")
        if self.whitespace_pattern is None:
            return
        _check_text("whitespace_pattern", self.whitespace_pattern, MAX_WHITESPACE_PATTERN)
        _check_expanded("whitespace_pattern", self.whitespace_pattern, MAX_EXPANDED_WHITESPACE)
        if self.disable_any_whitespace:
            raise _refusal("whitespace_pattern", self.whitespace_pattern, "disable_any_whitespace is set")

    @property
    def kind(self) -> str:
        """Which of the five is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @classmethod
    def of(cls, value: object) -> StructuredOutputs:
        """The same, from an instance or from a mapping of its fields."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            rule = f"it must be a mapping with one of {', '.join(KINDS)}"
            raise InvalidParameterError("structured_outputs", value, rule)
        unknown = sorted(str(key) for key in value if key not in cls.__dataclass_fields__)
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise _refusal(unknown[0], value.get(unknown[0]), f"it is not known; known are {known}")
        return cls(**value)


def _refusal(name: str, value: object, rule: str) -> InvalidParameterError:
    return InvalidParameterError(f"structured_outputs.{name}", value, rule)


def _check_text(name: str, value: object, limit: int) -> None:
    if not isinstance(value, str) or not value:
        raise _refusal(name, value, "it must be a non-empty string")
    if len(value) > limit:
        raise _refusal(name, f"{len(value)} characters", f"at most {limit} are allowed")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise _refusal(name, value, "it must not hold lone surrogates")


def _check_expanded(name: str, pattern: str, limit: int) -> None:
    """A few characters can stand for any number of states, which are made when the output comes to them."""
    size = expanded_size(pattern)
    if size > max(limit, len(pattern)):  # what is written out itself is bounded by its text
        rule = f"its repetitions stand for {size} parts; at most {limit} are allowed"
        raise _refusal(name, pattern, rule)


_MANY = 10**18
_REGEX_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d{1,18})(?:,(\d{0,18}))?\}|.", re.DOTALL)


def expanded_size(pattern: str) -> int:
    """Parts of a regular expression with its counted repetitions written out: neighbours add, nested counts multiply.

    Reads any text; what is no regular expression is for the compiler to say.
    """
    sizes, last = [0], 0
    for part in _REGEX_PARTS.finditer(pattern):
        if part[1] is not None:
            count = max(int(part[1]), int(part[2] or 0), 1)
            sizes[-1] += last * (count - 1)
            last = min(last * count, _MANY)
        elif part[0] == "(":
            sizes.append(0)
            last = 0
        elif part[0] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        else:
            last = 1
            sizes[-1] += 1
    return min(sum(sizes), _MANY)


def _schema_text(schema: object) -> str:
    """The schema as canonical JSON. Key order stays: it is the order of an object's properties in the output."""
    try:
        if isinstance(schema, str):
            if len(schema) > MAX_TEXT:
                raise _refusal("json", f"{len(schema)} characters", f"at most {MAX_TEXT} are allowed")
            schema = json.loads(schema)
        if not isinstance(schema, Mapping | bool):
            raise _refusal("json", schema, "a JSON schema is an object or true")
        if schema is False:
            raise _refusal("json", schema, "nothing fits this schema")
        text = json.dumps(schema, allow_nan=False)
        _check_depth(schema)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, InvalidParameterError):
            raise
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise _refusal("json", schema, f"it is not a JSON schema: {why}") from None
    if len(text) > MAX_TEXT:
        raise _refusal("json", f"{len(text)} characters", f"at most {MAX_TEXT} are allowed")
    return text


def _check_depth(schema: object) -> None:
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        level = [inner for value in level for inner in _members(value)]
        if not level:
            return
    raise _refusal("json", "...", f"it is nested more than {MAX_DEPTH} levels deep")


def _members(value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list | tuple) else ()


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str | bytes) or not isinstance(choices, Sequence) or not choices:
        raise _refusal("choice", choices, "it must be a non-empty list of strings")
    if len(choices) > MAX_CHOICES:
        raise _refusal("choice", f"{len(choices)} texts", f"at most {MAX_CHOICES} are allowed")
    for text in choices:
        _check_text("choice", text, MAX_TEXT)
    if sum(map(len, choices)) > MAX_TEXT:
        raise _refusal("choice", f"{sum(map(len, choices))} characters", f"at most {MAX_TEXT} are allowed")
    return tuple(dict.fromkeys(choices))
