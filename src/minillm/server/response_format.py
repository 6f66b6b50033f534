"""The form of an output, as OpenAI's `response_format` and vLLM's extra fields ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minillm.core.errors import InvalidParameterError
from minillm.core.structured_outputs import StructuredOutputs


def structured_outputs_of(
    *,
    response_format: object = None,
    structured_outputs: object = None,
    guided_json: Any = None,
    guided_regex: Any = None,
    guided_choice: Any = None,
    guided_grammar: Any = None,
    guided_whitespace_pattern: Any = None,
) -> StructuredOutputs | None:
    """The form that a request asks for, None if it asks for none. Values are plain JSON, as they came.

    `guided_*` are vLLM's older names of the fields of `structured_outputs`. Raises :class:`InvalidParameterError`,
    also if the form is asked for in more than one way.
    """
    guided = {"json": guided_json, "regex": guided_regex, "choice": guided_choice, "grammar": guided_grammar}
    guided = {kind: value for kind, value in guided.items() if value is not None}
    ways = [f"guided_{kind}" for kind in guided]
    ways += ["structured_outputs"] if structured_outputs is not None else []
    from_format = _from_response_format(response_format)
    ways += ["response_format"] if from_format is not None else []
    if len(ways) > 1:
        raise InvalidParameterError("structured_outputs", ", ".join(ways), "only one of them may be given")
    if structured_outputs is not None:
        form = StructuredOutputs.of(structured_outputs)
    elif guided:
        form = StructuredOutputs(**guided)
    elif from_format is not None:
        form = from_format
    else:
        return None
    return form if guided_whitespace_pattern is None else replace(form, whitespace_pattern=guided_whitespace_pattern)


def _from_response_format(value: object) -> StructuredOutputs | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind == "json_schema" and isinstance(value, Mapping):
        return _from_json_schema(value.get("json_schema"))
    rule = "its type must be text, json_object or json_schema"
    raise InvalidParameterError("response_format", kind if isinstance(value, Mapping) else value, rule)


def _from_json_schema(value: object) -> StructuredOutputs:
    """`strict` decides about keywords that cannot be enforced: refused with it, ignored without (OpenAI's default)."""
    if not isinstance(value, Mapping):
        raise InvalidParameterError("response_format.json_schema", value, "it must be an object with name and schema")
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise InvalidParameterError("response_format.json_schema.name", value.get("name"), "it must be given")
    strict = value.get("strict")
    if not isinstance(strict, bool | None):
        raise InvalidParameterError("response_format.json_schema.strict", strict, "it must be true or false")
    schema = value.get("schema")
    if not isinstance(schema, Mapping | None):
        raise InvalidParameterError("response_format.json_schema.schema", schema, "it must be a JSON schema")
    if schema is None:
        return StructuredOutputs(json_object=True)
    return StructuredOutputs(json=schema, ignore_unsupported=not strict)
