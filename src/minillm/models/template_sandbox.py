"""The Jinja sandbox of chat templates: Hugging Face's (transformers/utils/chat_template_utils.py), with bounds.

A template is a program from outside. The sandbox keeps it away from Python's internals; the bounds end loops and
recursions that would never end, and keep a few characters of template from becoming gigabytes: of time
(`MAX_SECONDS`, looked at in every round of a loop and every call), of output (`MAX_CHARACTERS`), and of the operators
`*` and `**`, whose one step may take hours.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import Environment, Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SECONDS = 10.0
MAX_CHARACTERS = 1 << 26
_MAX_PRODUCT = 1 << 20
"""Characters, list members or bits that `*` and `**` may make."""

_deadline: ContextVar[float] = ContextVar("_deadline")


def render_bounded(template: Template, context: Mapping[str, Any]) -> str:
    """The template's output. Raises :class:`jinja2.TemplateError` (:class:`SecurityError` over a bound)."""
    token = _deadline.set(time.monotonic() + MAX_SECONDS)
    try:
        parts, length = [], 0
        for part in template.generate(context):
            length += len(part)
            if length > MAX_CHARACTERS:
                raise SecurityError(f"its output is over {MAX_CHARACTERS} characters")
            parts.append(part)
        return "".join(parts)
    finally:
        _deadline.reset(token)


def check_time() -> None:
    """Raise :class:`SecurityError` if the rendering that is going on has used up its time."""
    if time.monotonic() > _deadline.get():
        raise SecurityError(f"it runs for more than {MAX_SECONDS:g} seconds")


class GenerationBlock(Extension):
    """`{% generation %}` marks what a model wrote, for training; here its body is simply printed."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class SafeNamespace(Namespace):
    """A namespace without underscored names, through which templates could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        Namespace.__setitem__(self, name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not have an attribute {name!r}")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The sandbox that looks at the clock in every call and every round of a loop."""

    intercepted_binops = frozenset(("*", "**"))
    check_time = staticmethod(check_time)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(check).set_lineno(loop.lineno).set_environment(self))
        return tree

    def call(*args: Any, **kwargs: Any) -> Any:
        """As in the base class, where a name among `kwargs` may be any."""
        check_time()
        return ImmutableSandboxedEnvironment.call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`*` and `**`, unless the result is too large."""
        if _size_of_result(operator, left, right) > _MAX_PRODUCT:
            raise SecurityError(f"{operator!r} would make more than {_MAX_PRODUCT} characters, members or bits")
        return super().call_binop(context, operator, left, right)


def _size_of_result(operator: str, left: Any, right: Any) -> int:
    if operator == "**":
        return left.bit_length() * max(right, 0) if isinstance(left, int) and isinstance(right, int) else 0
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            return len(sequence) * max(count, 0)
    return left.bit_length() + right.bit_length() if isinstance(left, int) and isinstance(right, int) else 0


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def sandbox() -> Environment:
    """The environment that all chat templates share."""
    environment = BoundedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = SafeNamespace
    return environment
