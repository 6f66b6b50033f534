"""Tools of a chat: what the model is told, what its output must be, and how calls are read out of it.

| `tool_choice` | the output | calls |
|---|---|---|
| `none` | free | none; the model is not told of the tools |
| `auto` | free; with `response_format` of that form, or calls | as the model writes them (`tool_parsers.py`) |
| `required` | a JSON array of calls, by a grammar | each object of the array |
| a function | the JSON of its arguments, by a grammar | one |
| `allowed_tools` | as its mode, `auto` or `required` | of those tools only |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minillm.core.errors import InvalidParameterError
from minillm.core.sampling_params import SamplingParams
from minillm.core.structured_outputs import StructuredOutputs, ToolCalls
from minillm.server.tool_parsers import ARRAY, NamedCallParser, ToolCallParser, ToolFormat

MAX_TOOLS = 128
MAX_CALLS = 16
"""Most calls under a grammar: models of little skill would go on until their tokens are spent."""

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_SCHEMA_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_DATA = frozenset(("const", "enum", "default", "examples"))


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request's tools mean for it. `mode` is none, auto, required or named."""

    mode: str
    tools: tuple[dict[str, Any], ...]
    """The tools that may be called."""
    template_tools: list[dict[str, Any]] | None
    """What the chat template is given; None where it is not to know of tools."""
    parallel: bool

    @property
    def names(self) -> list[str]:
        """Names of the tools that may be called."""
        return [tool["function"]["name"] for tool in self.tools]

    def apply(self, params: SamplingParams, form: ToolFormat) -> SamplingParams:
        """The parameters with what the tools ask of the output. `form` is how the model writes calls.

        Raises :class:`InvalidParameterError` if a call is forced and another form is asked for as well. With `auto` the
        output is of that form, or calls.
        """
        if self.mode == "none":
            return params
        asked = params.structured_outputs
        if self.mode == "auto":
            if asked is not None:
                asked = replace(asked, or_calls=self._calls(form))
            # The tags of calls are special tokens in some vocabularies.
            return replace(params, skip_special_tokens=False, structured_outputs=asked)
        if asked is not None:
            rule = "a forced call and response_format or structured_outputs exclude each other"
            raise InvalidParameterError("tool_choice", self.mode, rule)
        return replace(params, structured_outputs=self._form())

    @property
    def _is_strict(self) -> bool:
        return all(tool["function"].get("strict") for tool in self.tools)

    @property
    def _max_calls(self) -> int:
        return MAX_CALLS if self.parallel else 1

    def _form(self) -> StructuredOutputs:
        if self.mode == "named":
            schema = _parameters(self.tools[0])
        else:
            call = _call(self.tools, "parameters")
            definitions = call.pop("$defs")
            schema = {"type": "array", "minItems": 1, "maxItems": self._max_calls, "items": call, "$defs": definitions}
        return StructuredOutputs(json=schema, ignore_unsupported=not self._is_strict)

    def _calls(self, form: ToolFormat) -> ToolCalls:
        return ToolCalls(
            schema=_call(self.tools, form.arguments_key),
            tags=form.tags,
            bare=form.bare,
            prefix=form.prefix,
            separators=form.separators,
            max_calls=self._max_calls,
            ignore_unsupported=not self._is_strict,
        )

    def parser(self, form: ToolFormat, stream: bool) -> ToolCallParser | NamedCallParser | None:
        """Reads the text of one choice; None where no calls are looked for. `form` is how the model writes calls."""
        if self.mode == "none":
            return None
        if self.mode == "named":
            return NamedCallParser(self.names[0])
        limit = None if self.parallel else 1
        if self.mode == "required":
            return ToolCallParser(ARRAY, self.names, max_calls=limit, with_content=False)
        return ToolCallParser(form, self.names, incremental=stream, max_calls=limit)


def plan_tools(tools: object, tool_choice: object = None, parallel_tool_calls: object = None) -> ToolPlan | None:
    """What the tools of an OpenAI request mean; None for a request without.

    Raises :class:`InvalidParameterError` naming the tool and field.
    """
    checked = _checked_tools(tools)
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        raise InvalidParameterError("parallel_tool_calls", parallel_tool_calls, "it must be true or false")
    parallel = parallel_tool_calls is not False
    if not checked:
        if tool_choice not in (None, "none", "auto"):
            raise InvalidParameterError("tool_choice", tool_choice, "there are no tools")
        return None
    mode, names = _choice(tool_choice)
    known = {tool["function"]["name"]: tool for tool in checked}
    for name in names or ():
        if name not in known:
            raise InvalidParameterError("tool_choice", name, f"no tool has this name; there are {', '.join(known)}")
    callable_tools = tuple(checked if names is None else [known[name] for name in names])
    return ToolPlan(mode, callable_tools, None if mode == "none" else checked, parallel)


def _choice(choice: object) -> tuple[str, list[str] | None]:
    """The mode, and the names that may be called (None: all)."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str) and choice in ("none", "auto", "required"):
        return choice, None
    if isinstance(choice, Mapping):
        if choice.get("type") == "function":
            return "named", [_named(choice)]
        allowed = choice.get("allowed_tools")
        if choice.get("type") == "allowed_tools" and isinstance(allowed, Mapping):
            tools = allowed.get("tools")
            if allowed.get("mode") in ("auto", "required") and isinstance(tools, list) and tools:
                return allowed["mode"], list(dict.fromkeys(_named(tool) for tool in tools))
    rule = 'it must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or allowed_tools'
    raise InvalidParameterError("tool_choice", choice, rule)


def _named(choice: object) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidParameterError("tool_choice", choice, "function.name must be given")
    return name


def _checked_tools(tools: object) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise InvalidParameterError("tools", type(tools).__name__, "it must be a list of tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidParameterError("tools", len(tools), f"at most {MAX_TOOLS} are allowed")
    checked = [_checked_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names: set[str] = set()
    for i, tool in enumerate(checked):
        name = tool["function"]["name"]
        if name in names:
            raise InvalidParameterError(f"tools[{i}].function.name", name, "another tool has the same name")
        names.add(name)
    return checked


def _checked_tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise InvalidParameterError(where, tool, "a tool is an object with type and function")
    if tool.get("type", "function") != "function":
        raise InvalidParameterError(f"{where}.type", tool["type"], "only tools of type 'function' are supported")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParameterError(f"{where}.function", function, "it must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = "it must be 1 to 64 letters, digits, underscores, dots or dashes"
        raise InvalidParameterError(f"{where}.function.name", name, rule)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidParameterError(f"{where}.function.parameters", parameters, "it must be a JSON schema")
    for field, kind in (("description", str), ("strict", bool)):
        if not isinstance(function.get(field), kind | None):
            raise InvalidParameterError(f"{where}.function.{field}", function[field], f"it must be a {kind.__name__}")
    return {**tool, "type": "function", "function": dict(function)}


# -- schemas of forced calls -------------------------------------------------------------------------------------------


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments. They are always an object, whatever the schema leaves open."""
    parameters = tool["function"].get("parameters")
    if not parameters:
        return _NO_PARAMETERS
    return dict(parameters) if {"type", "$ref", "anyOf"} & parameters.keys() else {"type": "object", **parameters}


def _call(tools: Sequence[Mapping[str, Any]], arguments_key: str) -> dict[str, Any]:
    """A call of any of the tools, its `name` first: so it can be announced before its arguments come.

    Each tool's schema becomes a definition of its own, and its references are turned there.
    """
    definitions = {f"tool{i}": _relocated(_parameters(tool), f"#/$defs/tool{i}") for i, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, arguments_key: {"$ref": f"#/$defs/tool{i}"}},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": definitions}


def _relocated(schema: Any, root: str) -> Any:
    """The schema with its references to itself (`#`, `#/...`) pointing below `root`."""
    if isinstance(schema, list):
        return [_relocated(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _relocated_value(key, value, root) for key, value in schema.items()}


def _relocated_value(key: str, value: Any, root: str) -> Any:
    if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return root + value[1:]
    if key in _DATA:
        return value
    if key in _SCHEMA_MAPS and isinstance(value, Mapping):
        return {name: _relocated(inner, root) for name, inner in value.items()}
    return _relocated(value, root)
