"""Chat templates: rendering messages to a prompt, and keeping control tokens in them apart.

The Jinja environment is set up as Hugging Face's, so a template prints here what it prints there.

A message can spell a control token ("<|im_end|>"). If that text were parsed, whoever wrote it could forge a turn. So
before rendering, a *mark* (a private-use character that occurs nowhere in the input) is put behind the first character
of every control text in messages, tools and template arguments: the template still sees nearly the same text, may
trim, split or serialise it, and every control text in the result that holds no mark is the template's own. Marks are
removed after the result has been cut at those.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.core.errors import ChatTemplateError, ConfigError, InvalidParameterError, shorten

if TYPE_CHECKING:
    from jinja2 import Template

_MARKS = [chr(code) for code in range(0xE000, 0xF900)]
_MAX_MESSAGE_IN_ERROR = 300
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
# Names under which clients send a message's reasoning; templates read the first, gpt-oss's the second.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ControlTextGuard:
    """Puts marks into text so that no control text of a given set can be read out of it."""

    def __init__(self, control_texts: Iterable[str]) -> None:
        # A control text of one character cannot be broken up.
        texts = sorted({text for text in control_texts if len(text) > 1}, key=lambda text: (-len(text), text))
        alternatives = "|".join(map(re.escape, texts)) or "(?!)"
        self.pattern = re.compile(alternatives)
        self._anywhere = re.compile(f"(?={alternatives})")
        self._heads = {text[:n] for text in texts for n in range(1, len(text))}
        self._tails = {text[-n:] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def cuts(self, text: str) -> list[int]:
        """Positions behind the first character of every control text, overlapping ones too."""
        return [m.start() + 1 for m in self._anywhere.finditer(text)] if self.pattern.search(text) else []

    def protect(self, value: Any, mark: str) -> Any:
        """The value with every string in it, however deep, marked."""
        if isinstance(value, str):
            return self._protect_text(value, mark)
        if isinstance(value, Mapping):
            return {self._protect_text(str(key), mark): self.protect(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item, mark) for item in value]
        return value

    def _protect_text(self, text: str, mark: str) -> str:
        cuts = set(self.cuts(text))
        # The text's ends could complete a control text together with what the template prints around it.
        end, start = len(text.rstrip()), len(text) - len(text.lstrip())
        if any(text[max(0, end - n) : end] in self._heads for n in range(1, self._longest)):
            cuts.add(end)
        if any(text[start : start + n] in self._tails for n in range(1, self._longest)):
            cuts.add(start)
        if not cuts:
            return text
        bounds = [0, *sorted(cuts), len(text)]
        return mark.join(text[a:b] for a, b in itertools.pairwise(bounds))


def load_chat_template(value: str) -> str:
    """The template text for a `--chat-template` value: the path of a file, or the template itself.

    Raises :class:`ConfigError` if it is neither.
    """
    if "{" in value or "\n" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"chat_template={shorten(value)} is neither a template nor a readable file: {why}") from None


def select_template(templates: Mapping[str, str], has_tools: bool, source: str) -> str:
    """The model's template: `tool_use` for chats with tools where there is one, else `default`."""
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if len(templates) == 1:
        return next(iter(templates.values()))
    named = f" (it has templates named {', '.join(templates)}, none of them default)" if templates else ""
    raise ChatTemplateError(
        f"{source} has no chat template{named}; pass one with chat_template= or --chat-template FILE, "
        "or send a plain prompt"
    )


def validate_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of the messages in the form that templates expect.

    Each must be a mapping with a string `role` and a `content` that is a string or a list of text parts (joined by
    newlines, as vLLM does); null only where there are `tool_calls`. Keys whose value is None are dropped, as in
    Hugging Face. Raises :class:`InvalidParameterError` naming the message and field.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidParameterError("messages", type(messages).__name__, "it must be a list of messages")
    if not messages:
        raise InvalidParameterError("messages", [], "at least 1 message is needed")
    return [
        _validate_message(_plain(message, f"messages[{i}]"), f"messages[{i}]") for i, message in enumerate(messages)
    ]


def _plain(value: Any, name: str) -> Any:
    """A copy made of JSON types alone: templates are programs from outside and get no other objects.

    Pydantic models (what the OpenAI client returns) are dumped first.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump(), name)
    raise InvalidParameterError(name, type(value).__name__, "only JSON types are allowed in it")


def _validate_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidParameterError(name, type(message).__name__, "it must be an object with role and content")
    result = {key: value for key, value in message.items() if value is not None}
    reasoning = next((result[key] for key in _REASONING_KEYS if key in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    role = result.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidParameterError(f"{name}.role", role, "it must be a non-empty string")
    content = result.get("content")
    if isinstance(content, list | tuple):
        result["content"] = "\n".join(_text_of_part(part, f"{name}.content[{i}]") for i, part in enumerate(content))
    elif content is None:
        if not result.get("tool_calls"):
            raise InvalidParameterError(f"{name}.content", None, "it must be a string (null only with tool_calls)")
    elif not isinstance(content, str):
        raise InvalidParameterError(f"{name}.content", type(content).__name__, "it must be a string or text parts")
    return result


def _text_of_part(part: object, name: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidParameterError(name, kind, "only parts of type 'text' are supported")


def _with_argument_objects(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Tool-call arguments as objects: OpenAI sends them as JSON strings, most templates serialise an object.

    Templates that handle strings themselves get what was sent.
    """
    if "arguments is string" in template:
        return messages
    return [
        {**message, "tool_calls": [_with_argument_object(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _with_argument_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def render_chat(
    template: str,
    messages: object,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    guard: ControlTextGuard | None = None,
) -> tuple[str, str | None]:
    """Render a chat; (text, mark), where mark is None if nothing had to be marked.

    ``variables``: what the template may name besides (`bos_token` ...); ``arguments``: the request's own additions,
    which take precedence. ``continue_final_message`` ends the text with the last message's content, so that the
    model goes on with it. Raises :class:`ChatTemplateError` or :class:`InvalidParameterError`.
    """
    arguments = arguments or {}
    for name in _RESERVED & arguments.keys():
        raise InvalidParameterError("chat_template_kwargs", name, "it is a parameter of the request itself")
    try:
        chat = _with_argument_objects(validate_messages(messages), template)
        given = {"messages": chat, "tools": _plain(tools, "tools"), **_plain(arguments, "chat_template_kwargs")}
    except RecursionError:
        raise InvalidParameterError("messages", "...", "messages or tools are nested too deeply") from None
    if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InvalidParameterError("tools", type(tools).__name__, "it must be a list of objects")
    if continue_final_message and (add_generation_prompt or "content" not in chat[-1]):
        rule = "it needs add_generation_prompt=False and a last message with content"
        raise InvalidParameterError("continue_final_message", True, rule)
    mark, end = _unused_characters(given, template)
    marked = given if guard is None else guard.protect(given, mark)
    if continue_final_message:
        *before, last = marked["messages"]
        marked = {**marked, "messages": [*before, {**last, "content": f"{last['content']}{end} "}]}
    text = _render(template, {**(variables or {}), "add_generation_prompt": add_generation_prompt, **marked})
    text = text.replace(_ascii_escape(mark), mark)  # a template may serialise to ASCII
    if continue_final_message:
        text = _cut_at(text, end)
    return text, (mark if mark in text else None)


def _ascii_escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _unused_characters(given: dict[str, Any], template: str) -> tuple[str, str]:
    """Two private-use characters that occur nowhere in what is rendered."""
    seen = json.dumps(given, ensure_ascii=False) + template
    unused = (c for c in _MARKS if c not in seen and _ascii_escape(c) not in seen)
    found = tuple(itertools.islice(unused, 2))
    if len(found) < 2:
        raise InvalidParameterError("messages", "...", "they leave no private-use character (U+E000-U+F8FF) unused")
    return found[0], found[1]


def _cut_at(text: str, end: str) -> str:
    """The text before the `end` character, without the white space that a template strips behind content."""
    at = text.rfind(end)
    if at < 0:
        raise ChatTemplateError("continue_final_message: the chat template does not print the last message's content")
    return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()


def _render(template: str, context: dict[str, Any]) -> str:
    from jinja2.exceptions import TemplateError, UndefinedError

    from minillm.models.template_sandbox import render_bounded

    compiled = _compile(template)
    try:
        try:
            return render_bounded(compiled, context)
        except (UndefinedError, TypeError):
            # A template that concatenates content cannot do with the missing content of a tool call.
            if all("content" in message for message in context["messages"]):
                raise
            filled = [{"content": "", **message} for message in context["messages"]]
            return render_bounded(compiled, {**context, "messages": filled})
    except TemplateError as error:
        raise ChatTemplateError(f"chat template: {_one_line(error.message or type(error).__name__)}") from error
    except RecursionError as error:
        raise ChatTemplateError("chat template: it recurses without end") from error
    except Exception as error:
        # Templates are programs from outside: any failure of theirs is the request's, not the engine's.
        raise ChatTemplateError(f"chat template: {type(error).__name__}: {_one_line(str(error))}") from error


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_MESSAGE_IN_ERROR else line[:_MAX_MESSAGE_IN_ERROR] + "..."


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> Template:
    from jinja2.exceptions import TemplateSyntaxError

    from minillm.models.template_sandbox import sandbox

    try:
        return sandbox().from_string(template)
    except TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"chat template: syntax error in line {error.lineno}: {_one_line(error.message or '')}"
        ) from error
