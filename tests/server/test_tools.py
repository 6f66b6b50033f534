"""From an OpenAI request's tools and formats to template, grammar and parser."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from engine_fakes import EOS, TOKENIZER, toy_tokenizer

from minillm import SamplingParams, StructuredOutputs
from minillm.core.errors import InvalidParameterError
from minillm.server.response_format import structured_outputs_of
from minillm.server.tool_parsers import EITHER, HERMES, LLAMA3, NamedCallParser, ToolCallParser, ToolFormat
from minillm.server.tools import ToolPlan, plan_tools

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Node"}]}}}


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    function = {"name": name, **({} if parameters is None else {"parameters": parameters}), **fields}
    return {"type": "function", "function": function}


PICK = tool(
    "pick", {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
)
NOW = tool("now")
WALK = tool(
    "walk",
    {
        "type": "object",
        "properties": {"$ref": {"const": {"$ref": "#/data"}}, "to": {"$ref": "#/$defs/Place"}},
        "required": ["$ref", "to"],
        "additionalProperties": False,
        "$defs": {"Place": {"enum": ["here", "there"]}},
    },
)
TOOLS = [PICK, NOW, WALK]


def generate(params: SamplingParams, seed: int, limit: int = 900) -> str:
    """Random text under the form that the parameters ask for."""
    pytest.importorskip("llguidance")
    from minillm.engine.grammar import GrammarCompiler, mask_words

    compiler = GrammarCompiler(TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_token_ids=TOKENIZER.eos_token_ids)
    assert params.structured_outputs is not None
    draw, ids = random.Random(seed), []
    matcher = compiler.compile(params.structured_outputs).matcher(ids)
    row = np.zeros(mask_words(compiler.vocab_size), dtype=np.int32)
    while len(ids) < limit and matcher.fill(row):
        token = draw.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        if token in TOKENIZER.eos_token_ids:
            break
        ids.append(token)
        if matcher.advance():
            break
    return TOKENIZER.decode(ids)


def planned(*arguments: Any) -> ToolPlan:
    plan = plan_tools(*arguments)
    assert plan is not None
    return plan


def test_a_request_without_tools_has_no_plan() -> None:
    for tools in (None, []):
        for choice in (None, "none", "auto"):
            assert plan_tools(tools, choice) is None


def test_auto_is_the_default_and_shows_special_tokens() -> None:
    plan = planned(TOOLS)
    assert (plan.mode, plan.names, plan.template_tools) == ("auto", ["pick", "now", "walk"], TOOLS)
    params = plan.apply(SamplingParams(max_tokens=5), HERMES)
    assert params.structured_outputs is None and params.skip_special_tokens is False and params.max_tokens == 5
    parser = plan.parser(HERMES, stream=True)
    assert isinstance(parser, ToolCallParser)
    message = parser.message('<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    assert [call.name for call in message.tool_calls] == ["now"]


def test_none_tells_the_model_nothing() -> None:
    plan = planned(TOOLS, "none")
    params = SamplingParams()
    assert plan.template_tools is None and plan.parser(HERMES, stream=True) is None
    assert plan.apply(params, HERMES) == params


@pytest.mark.parametrize("stream", [True, False])
def test_required_brings_calls_whatever_the_model(stream: bool) -> None:
    plan = planned(TOOLS, "required")
    params = plan.apply(SamplingParams(), EITHER)
    seen = set()
    for seed in range(12):
        text = generate(params, seed)
        parser = plan.parser(EITHER, stream)
        assert isinstance(parser, ToolCallParser)
        message = parser.message(text)
        calls = json.loads(text)
        assert message.content is None
        assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [
            (c["name"], c["parameters"]) for c in calls
        ]
        assert parser.finish_reason("stop") == "tool_calls"
        for call in calls:
            seen.add(call["name"])
            if call["name"] == "pick":
                assert call["parameters"]["n"] in (1, 2)
            elif call["name"] == "now":
                assert call["parameters"] == {}
            else:
                assert call["parameters"]["$ref"] == {"$ref": "#/data"} and call["parameters"]["to"] in (
                    "here",
                    "there",
                )
    assert seen == {"pick", "now", "walk"}


def test_required_without_parallel_calls_brings_one() -> None:
    plan = planned(TOOLS, "required", False)
    for seed in range(5):
        assert len(json.loads(generate(plan.apply(SamplingParams(), EITHER), seed))) == 1


def test_a_named_function_gets_its_arguments() -> None:
    plan = planned(TOOLS, {"type": "function", "function": {"name": "pick"}})
    assert plan.mode == "named" and plan.template_tools == TOOLS
    parser = plan.parser(EITHER, stream=True)
    assert isinstance(parser, NamedCallParser)
    (call,) = parser.message(generate(plan.apply(SamplingParams(), EITHER), 1)).tool_calls
    assert call.name == "pick" and json.loads(call.arguments)["n"] in (1, 2)
    assert parser.finish_reason("stop") == "stop"


def test_references_to_the_whole_schema_and_recursion_hold_for_each_tool() -> None:
    linked = {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
              "required": ["next"], "additionalProperties": False}  # fmt: skip
    text = generate(planned([tool("a", linked), PICK], "required", False).apply(SamplingParams(), EITHER), 3)
    assert json.loads(text)[0]["name"] in ("a", "pick")
    for seed in range(6):
        arguments = json.loads(
            generate(planned([tool("a", linked)], "required", False).apply(SamplingParams(), EITHER), seed)
        )
        while arguments := arguments.get("next") if isinstance(arguments, dict) else arguments[0]["parameters"]:
            assert list(arguments) == ["next"]


def test_allowed_tools_bound_what_is_called_but_not_what_is_shown() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW, NOW]}}
    plan = planned(TOOLS, choice)
    assert (plan.mode, plan.names, plan.template_tools) == ("required", ["now"], TOOLS)
    choice["allowed_tools"]["mode"] = "auto"
    plan = planned(TOOLS, choice)
    parser = plan.parser(HERMES, stream=False)
    assert isinstance(parser, ToolCallParser)
    assert not parser.message('<tool_call>{"name": "pick", "arguments": {"n": 1}}</tool_call>').tool_calls


def test_strict_tools_refuse_what_cannot_be_enforced() -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (False, None, True):
        plan = planned([tool("a", unique, strict=strict)], "required")
        form = plan.apply(SamplingParams(), EITHER).structured_outputs
        assert form is not None and form.ignore_unsupported is not bool(strict)


def test_a_forced_call_excludes_another_form() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(json_object=True))
    with pytest.raises(InvalidParameterError, match="tool_choice"):
        planned(TOOLS, "required").apply(params, HERMES)
    assert planned(TOOLS, "none").apply(params, HERMES) == params


FORMS = {
    "json": StructuredOutputs(json=SCHEMA),
    "json_object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex="[a-c]{2,5}"),
    "choice": StructuredOutputs(choice=["yes", "no"]),
    "grammar": StructuredOutputs(grammar='start: "x" word\nword: /[a-z]{1,3}/'),
    "pattern": StructuredOutputs(json={"type": "string", "pattern": "^a{1,3}$"}),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("form", [HERMES, LLAMA3, EITHER], ids=["hermes", "llama3", "either"])
def test_auto_with_another_form_brings_that_form_or_calls(name: str, form: ToolFormat) -> None:
    plan = planned([PICK, NOW], "auto")
    params = plan.apply(SamplingParams(structured_outputs=FORMS[name]), form)
    num_calls = num_contents = 0
    for seed in range(16):
        text = generate(params, seed, limit=6000)
        parser = plan.parser(form, stream=False)
        assert isinstance(parser, ToolCallParser)
        message = parser.message(text)
        for call in message.tool_calls:
            arguments = json.loads(call.arguments)
            assert (arguments == {}) if call.name == "now" else (arguments["n"] in (1, 2)), text
        assert bool(message.tool_calls) is not bool(message.content), text
        num_calls += bool(message.tool_calls)
        num_contents += message.content is not None and generates(FORMS[name], message.content)
    assert num_calls + num_contents == 16
    if name != "json_object" or form is HERMES:  # an object of any kind can begin like a bare call
        assert num_calls and num_contents


def generates(form: StructuredOutputs, text: str) -> bool:
    """Whether the form alone allows this text."""
    from minillm.engine.grammar import GrammarCompiler, GrammarError, mask_words

    compiler = GrammarCompiler(TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_token_ids=TOKENIZER.eos_token_ids)
    matcher = compiler.compile(form).matcher(TOKENIZER.encode(text, add_special_tokens=False))
    row = np.zeros(mask_words(compiler.vocab_size), dtype=np.int32)
    try:
        return not matcher.fill(row) or bool(row[EOS >> 5] >> (EOS & 31) & 1)
    except GrammarError:
        return False


def test_one_call_without_parallel_calls_also_beside_a_form() -> None:
    plan = planned(TOOLS, "auto", False)
    params = plan.apply(SamplingParams(structured_outputs=FORMS["choice"]), HERMES)
    texts = {generate(params, seed) for seed in range(12)}
    assert {text.count("<tool_call>") for text in texts} == {0, 1}


def test_tags_that_are_tokens_are_written_as_such() -> None:
    pytest.importorskip("llguidance")
    from minillm.engine.grammar import GrammarCompiler, mask_words

    tokenizer = toy_tokenizer(("<tool_call>", "</tool_call>", "<|python_tag|>"))
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    for form, tag in ((HERMES, "<tool_call>"), (LLAMA3, "<|python_tag|>")):
        params = planned(TOOLS, "auto").apply(SamplingParams(structured_outputs=FORMS["choice"]), form)
        row = np.zeros(mask_words(compiler.vocab_size), dtype=np.int32)
        compiler.compile(params.structured_outputs).matcher([]).fill(row)
        first = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        assert tokenizer.piece_to_id(tag) in first
        assert tokenizer.encode("<", add_special_tokens=False)[0] not in first
        assert tokenizer.encode("y", add_special_tokens=False)[0] in first


def test_a_tool_that_cannot_be_enforced_is_named_beside_a_form() -> None:
    pytest.importorskip("llguidance")
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    plan = planned([tool("a", unique, strict=True)], "auto")
    with pytest.raises(InvalidParameterError, match=r"uniqueItems.*tools' parameters"):
        generate(plan.apply(SamplingParams(structured_outputs=FORMS["choice"]), HERMES), 0)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (({"a": 1},), "tools"),
        (("pick",), "tools"),
        (([PICK] * 129,), "tools"),
        ((["pick"],), "tools[0]"),
        (([PICK, {"type": "custom", "custom": {}}],), "tools[1].type"),
        (([{"type": "function"}],), "tools[0].function"),
        (([tool("")],), "tools[0].function.name"),
        (([tool("a b")],), "tools[0].function.name"),
        (([tool("x" * 65)],), "tools[0].function.name"),
        (([tool(5)],), "tools[0].function.name"),  # type: ignore[arg-type]
        (([PICK, PICK],), "tools[1].function.name"),
        (([tool("a", "schema")],), "tools[0].function.parameters"),
        (([tool("a", description=5)],), "tools[0].function.description"),
        (([tool("a", strict="yes")],), "tools[0].function.strict"),
        ((None, "required"), "tool_choice"),
        (([], {"type": "function", "function": {"name": "pick"}}), "tool_choice"),
        ((TOOLS, "any"), "tool_choice"),
        ((TOOLS, 5), "tool_choice"),
        ((TOOLS, {"type": "function"}), "tool_choice"),
        ((TOOLS, {"type": "function", "function": {"name": "no"}}), "tool_choice"),
        ((TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}), "tool_choice"),
        ((TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [NOW]}}), "tool_choice"),
        ((TOOLS, "auto", "no"), "parallel_tool_calls"),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[Any, ...], field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        plan_tools(*arguments)
    assert caught.value.field == field


# -- response_format ---------------------------------------------------------------------------------------------------


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **fields}}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        ({"response_format": json_schema()}, StructuredOutputs(json=SCHEMA, ignore_unsupported=True)),
        ({"response_format": json_schema(strict=True)}, StructuredOutputs(json=SCHEMA)),
        ({"response_format": json_schema(strict=None)}, StructuredOutputs(json=SCHEMA, ignore_unsupported=True)),
        ({"response_format": json_schema(schema=None)}, StructuredOutputs(json_object=True)),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, StructuredOutputs(regex="a")),
        ({"guided_json": SCHEMA}, StructuredOutputs(json=SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, StructuredOutputs(json=SCHEMA)),
        ({"guided_choice": ["a"]}, StructuredOutputs(choice=["a"])),
        ({"guided_grammar": "root ::= [a]"}, StructuredOutputs(grammar="root ::= [a]")),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
            StructuredOutputs(json=SCHEMA, whitespace_pattern=" "),
        ),
        ({"structured_outputs": {"regex": "a", "json": None}}, StructuredOutputs(regex="a")),
    ],
)
def test_forms_are_understood(fields: dict[str, Any], form: StructuredOutputs | None) -> None:
    assert structured_outputs_of(**fields) == form


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema(name="")}, "response_format.json_schema.name"),
        ({"response_format": json_schema(strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": json_schema(schema=[])}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "structured_outputs"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        ({"guided_choice": "ab"}, "structured_outputs.choice"),
    ],
)
def test_wrong_forms_are_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        structured_outputs_of(**fields)
    assert caught.value.field == field
