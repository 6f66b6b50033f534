"""The shape checks of structured-output requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minillm.core.errors import InvalidParameterError
from minillm.core.sampling_params import SamplingParams
from minillm.core.structured_outputs import MAX_CHOICES, MAX_DEPTH, MAX_TEXT, StructuredOutputs, expanded_size

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_each_kind_is_taken() -> None:
    assert StructuredOutputs(json=SCHEMA).kind == "json"
    assert StructuredOutputs(json_object=True).kind == "json_object"
    assert StructuredOutputs(regex="a+").kind == "regex"
    assert StructuredOutputs(choice=["a", "b", "a"]).choice == ("a", "b")
    assert StructuredOutputs(grammar='start: "a"').kind == "grammar"
    assert StructuredOutputs(json=True).json == "true"


def test_a_schema_is_the_same_as_text_and_as_a_mapping_and_keeps_its_order() -> None:
    spec = StructuredOutputs(json=SCHEMA)
    assert spec == StructuredOutputs(json=json.dumps(SCHEMA, indent=4))
    assert hash(spec) == hash(StructuredOutputs(json=json.dumps(SCHEMA)))
    assert list(json.loads(str(spec.json))["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"json": SCHEMA, "json_object": True}, "structured_outputs"),
        ({"json": "{"}, "json"),
        ({"json": "[1]"}, "json"),
        ({"json": 5}, "json"),
        ({"json": False}, "json"),
        ({"json": "false"}, "json"),
        ({"json": {"const": float("nan")}}, "json"),
        ({"json": {"const": object()}}, "json"),
        ({"json": nested(MAX_DEPTH)}, "json"),
        ({"json": "[" * 100_000}, "json"),
        ({"json": '{"const": ' + "9" * 5000 + "}"}, "json"),
        ({"json": {"description": "x" * MAX_TEXT}}, "json"),
        ({"json": " " * (MAX_TEXT + 1)}, "json"),
        ({"regex": ""}, "regex"),
        ({"regex": 1}, "regex"),
        ({"regex": "a" * (MAX_TEXT + 1)}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"grammar": ""}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": "ab"}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": ["a", 1]}, "choice"),
        ({"choice": ["x"] * (MAX_CHOICES + 1)}, "choice"),
        ({"choice": ["x" * 200_000, "y" * 200_000]}, "choice"),
        ({"json_object": 1}, "json_object"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace"),
        ({"choice": ["a"], "ignore_unsupported": True}, "ignore_unsupported"),
        ({"json_object": True, "whitespace_pattern": ""}, "whitespace_pattern"),
        ({"json_object": True, "whitespace_pattern": " *", "disable_any_whitespace": True}, "whitespace_pattern"),
        ({"json_object": True, "whitespace_pattern": " " * 1000}, "whitespace_pattern"),
    ],
)
def test_what_has_a_wrong_shape_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        StructuredOutputs(**fields)
    assert caught.value.field.removeprefix("structured_outputs.") == name
    assert len(str(caught.value)) < 500


def test_sampling_parameters_take_a_mapping_and_refuse_unknown_fields() -> None:
    params = SamplingParams(structured_outputs={"regex": "a", "json_object": None, "disable_any_whitespace": None})
    assert params.structured_outputs == StructuredOutputs(regex="a")
    assert SamplingParams().structured_outputs is None
    with pytest.raises(InvalidParameterError, match="schema"):
        SamplingParams(structured_outputs={"schema": SCHEMA})
    with pytest.raises(InvalidParameterError, match="mapping"):
        SamplingParams(structured_outputs="json")


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("ab", 2),
        ("a{3}", 3),
        ("a{2,}b", 3),
        (r"\d{4}-\d{2}", 7),
        ("(ab|c{2,5}){2}", 16),
        ("[{3}]{2}", 2),
        (r"\{3}", 3),
        ("{5}", 0),
        ("((", 0),
        (")a)", 3),
        ("(a{1000}){1000}{1000}", 10**9),
        ("(" * 50 + "a" + "){999999999}" * 50, 10**18),
    ],
)
def test_repetitions_are_counted_as_if_written_out(pattern: str, size: int) -> None:
    assert expanded_size(pattern) == size


def test_repetitions_are_bounded() -> None:
    StructuredOutputs(regex="a{100000}")
    StructuredOutputs(json_object=True, whitespace_pattern="[ \\n]{0,1000}")
    with pytest.raises(InvalidParameterError, match=r"regex.*100001 parts; at most 100000"):
        StructuredOutputs(regex="a{100001}")
    with pytest.raises(InvalidParameterError, match=r"whitespace_pattern.*1001 parts; at most 1000"):
        StructuredOutputs(json_object=True, whitespace_pattern="[ \\n]{0,1001}")
