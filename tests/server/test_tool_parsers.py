"""Reading tool calls out of text: what is a call, what is content, and that cutting the text changes nothing."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.server.tool_parsers import (
    ARRAY,
    EITHER,
    HERMES,
    LLAMA3,
    CallDelta,
    Delta,
    NamedCallParser,
    ToolCallParser,
    ToolFormat,
    ToolMessage,
    format_of,
    join,
)

NAMES = ("get_weather", "add", "now")
WEATHER = '{"city": "Z\u00fcrich \\"West\\"", "days": [1, {"a": "}"}]}'
ADD = '{"a": 1.5e3, "b": -2}'

Calls = list[tuple[str, str]]


def hermes(name: str, arguments: str, key: str = "arguments") -> str:
    return f'<tool_call>\n{{"name": "{name}", "{key}": {arguments}}}\n</tool_call>'


def bare(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


WEATHER_CALL = ("get_weather", WEATHER)
ADD_CALL = ("add", ADD)

WELL_FORMED: list[tuple[str, ToolFormat, str, str | None, Calls]] = [
    ("no call", HERMES, "Just text, with <b>tags</b> and a < b.\n", "Just text, with <b>tags</b> and a < b.\n", []),
    ("empty", HERMES, "", "", []),
    ("one", HERMES, hermes(*WEATHER_CALL), None, [WEATHER_CALL]),
    ("text before", HERMES, "Let me see.\n\n" + hermes(*WEATHER_CALL), "Let me see.", [WEATHER_CALL]),
    ("text behind", HERMES, hermes(*ADD_CALL) + "\n\nDone. ", "Done. ", [ADD_CALL]),
    ("two", HERMES, hermes(*WEATHER_CALL) + "\n" + hermes(*ADD_CALL), None, [WEATHER_CALL, ADD_CALL]),
    ("text between", HERMES, hermes(*ADD_CALL) + " then " + hermes(*ADD_CALL), "then", [ADD_CALL, ADD_CALL]),
    ("no closing tag", HERMES, hermes(*ADD_CALL).removesuffix("\n</tool_call>"), None, [ADD_CALL]),
    ("closing tag cut off", HERMES, hermes(*ADD_CALL)[:-4], None, [ADD_CALL]),
    ("two in one tag", HERMES, f"<tool_call>{bare(*ADD_CALL)}\n{bare(*ADD_CALL)}</tool_call>", None, [ADD_CALL] * 2),
    ("tag not closed before the next", HERMES, hermes(*ADD_CALL)[:-12] + hermes(*ADD_CALL), None, [ADD_CALL] * 2),
    ("no white space", HERMES, hermes(*ADD_CALL).replace("\n", ""), None, [ADD_CALL]),
    ("parameters", HERMES, hermes(*ADD_CALL, key="parameters"), None, [ADD_CALL]),
    ("further keys", HERMES, '<tool_call>{"id": "1", "name": "now", "arguments": {}, "x": [1]}', None, [("now", "{}")]),
    ("arguments first", HERMES, f'<tool_call>{{"arguments": {ADD}, "name": "add"}}</tool_call>', None, [ADD_CALL]),
    ("no arguments", HERMES, '<tool_call>{"name": "now"}</tool_call>', None, [("now", "{}")]),
    ("null arguments", HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', None, [("now", "{}")]),
    ("arguments as text", HERMES, hermes("add", json.dumps(ADD)), None, [ADD_CALL]),
    ("an object is no call", HERMES, bare(*ADD_CALL), bare(*ADD_CALL), []),
    ("almost a tag", HERMES, "a <tool_cal b <tool_call", "a <tool_cal b <tool_call", []),
    ("space at the ends", HERMES, "  text \n ", "  text \n ", []),
    ("bare", LLAMA3, bare(*WEATHER_CALL), None, [WEATHER_CALL]),
    ("space before", LLAMA3, "\n\n " + bare(*ADD_CALL) + "\n", None, [ADD_CALL]),
    ("several", LLAMA3, bare(*ADD_CALL) + "; " + bare(*WEATHER_CALL) + ";", None, [ADD_CALL, WEATHER_CALL]),
    ("python tag", LLAMA3, "<|python_tag|>" + bare(*ADD_CALL), None, [ADD_CALL]),
    ("python tags", LLAMA3, "; ".join(["<|python_tag|> " + bare(*ADD_CALL)] * 2), None, [ADD_CALL] * 2),
    ("text, then an object", LLAMA3, "Sure: " + bare(*ADD_CALL), "Sure: " + bare(*ADD_CALL), []),
    ("call, then text", LLAMA3, bare(*ADD_CALL) + "; and so on", "; and so on", [ADD_CALL]),
    ("python code", LLAMA3, '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
    ("other JSON", LLAMA3, '{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
    ("JSON with more", LLAMA3, '{"answer": 1, "name": "add", "parameters": {}}',
     '{"answer": 1, "name": "add", "parameters": {}}', []),
    ("either: hermes", EITHER, "Hm. " + hermes(*ADD_CALL), "Hm.", [ADD_CALL]),
    ("either: bare", EITHER, bare(*ADD_CALL), None, [ADD_CALL]),
    ("array", ARRAY, f"[{bare(*ADD_CALL)}, {bare(*WEATHER_CALL)}]", None, [ADD_CALL, WEATHER_CALL]),
    ("spaced array", ARRAY, f"\n[ {bare(*ADD_CALL)}\n,{bare(*WEATHER_CALL)} ] ", None, [ADD_CALL, WEATHER_CALL]),
]  # fmt: skip

MALFORMED: list[tuple[str, ToolFormat, str]] = [
    ("unknown tool", HERMES, hermes("hack", "{}")),
    ("unknown tool, bare", LLAMA3, bare("hack", "{}") + "; " + bare(*ADD_CALL)),
    ("no JSON", HERMES, "<tool_call>add(1, 2)</tool_call>"),
    ("no name", HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    ("name is no text", HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("wrong quotes", HERMES, "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>"),
    ("list of arguments", HERMES, hermes("add", "[1, 2]")),
    ("number as arguments", HERMES, hermes("add", "5")),
    ("text as arguments", HERMES, hermes("add", '"not JSON"')),
    ("both keys", HERMES, '<tool_call>{"arguments": {}, "parameters": {}, "name": "add"}</tool_call>'),
    ("the same key twice", HERMES, '<tool_call>{"x": 1, "x": 2, "name": "add"}</tool_call>'),
    ("missing comma", HERMES, '<tool_call>{"id": 1 "name": "add", "arguments": {}}</tool_call>'),
    ("trailing comma", HERMES, '<tool_call>{"name": "now",}</tool_call>'),
    ("bad number", HERMES, '<tool_call>{"id": 1-2, "name": "now"}</tool_call>'),
    ("cut off before the name", HERMES, '<tool_call>{"na'),
    ("cut off in the name", HERMES, 'x <tool_call>{"name": "ad'),
    ("cut off, bare", LLAMA3, ' {"name": "add", "param'),
    ("tag alone", HERMES, "text <tool_call>\n"),
    ("brackets", HERMES, '<tool_call>{"id": [1}, "name": "now"}</tool_call>'),
    ("raw line break in text", HERMES, '<tool_call>{"id": "a\nb", "name": "now"}</tool_call>'),
]  # fmt: skip


def calls_of(message: ToolMessage) -> Calls:
    return [(call.name, call.arguments) for call in message.tool_calls]


def read(form: ToolFormat, pieces: Sequence[str], incremental: bool = True, **options: object) -> ToolMessage:
    parser = ToolCallParser(form, NAMES, incremental=incremental, **options)  # type: ignore[arg-type]
    deltas = [parser.feed(piece) for piece in pieces]
    check_deltas([*deltas, last := parser.finish()])
    message = join([*deltas, last])
    assert parser.num_calls == len(message.tool_calls)
    return message


def check_deltas(deltas: Sequence[Delta]) -> None:
    """What a client relies on: a call begins with its id and name, both once; its pieces follow in order."""
    begun: list[CallDelta] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.id is not None or call.name is not None:
            assert call.index == len(begun) and call.name in NAMES and re.fullmatch("call_[0-9a-f]{24}", call.id or "")
            begun.append(call)
        assert call.index == len(begun) - 1
    assert len({call.id for call in begun}) == len(begun)


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize(
    ("form", "text", "content", "calls"), [c[1:] for c in WELL_FORMED], ids=[c[0] for c in WELL_FORMED]
)
def test_calls_and_content(form: ToolFormat, text: str, content: str | None, calls: Calls, incremental: bool) -> None:
    options = {"with_content": False} if form is ARRAY else {}
    message = read(form, [text], incremental, **options)
    assert (message.content, calls_of(message)) == (content, calls)


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize(("form", "text"), [c[1:] for c in MALFORMED], ids=[c[0] for c in MALFORMED])
def test_what_is_no_call_is_content_as_it_was_written(form: ToolFormat, text: str, incremental: bool) -> None:
    message = read(form, [text], incremental)
    assert calls_of(message) == []
    assert message.content == text


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize(
    ("form", "text"),
    [(form, text) for _, form, text, *_ in [*WELL_FORMED, *MALFORMED]],
    ids=[case[0] for case in [*WELL_FORMED, *MALFORMED]],
)
def test_the_text_may_be_cut_anywhere(form: ToolFormat, text: str, incremental: bool) -> None:
    whole = read(form, [text], incremental)
    cuts = [[text[:i], text[i:]] for i in range(len(text) + 1)]
    cuts += [list(text), [text[i : i + 3] for i in range(0, len(text), 3)], ["", text, ""]]
    for pieces in cuts:
        message = read(form, pieces, incremental)
        assert (message.content, calls_of(message)) == (whole.content, calls_of(whole)), pieces


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "{", "}", "[", "]", '"', "\\", ":", ",", ";", " ", "\n", "name",
    '"name": "add"', '"arguments": ', '"parameters": {"a": 1}', '{"a": {}}', "null", "5", "text", "<", "\u00e9",
    hermes(*ADD_CALL), bare(*WEATHER_CALL), '{"name": "add", "arguments": {"a": [1, 2',
]  # fmt: skip


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.sampled_from([HERMES, LLAMA3, EITHER, ARRAY]),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.randoms(use_true_random=False),
)
def test_any_text_gives_the_same_however_it_is_cut(
    text: str, form: ToolFormat, incremental: bool, max_calls: int | None, draw: random.Random
) -> None:
    whole = read(form, [text], incremental, max_calls=max_calls)
    places = sorted(draw.randrange(len(text) + 1) for _ in range(6))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    for cut in (pieces, list(text)):
        message = read(form, cut, incremental, max_calls=max_calls)
        assert (message.content, calls_of(message)) == (whole.content, calls_of(whole))
    if not whole.tool_calls and max_calls is None:
        assert whole.content == text
    if not incremental:
        for call in whole.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)


def test_a_call_streams_its_name_first_and_its_arguments_as_they_come() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert not parser.feed("I look.\n<tool_").calls
    assert not parser.feed('call>{"name": "get_weather"')
    first = parser.feed(', "arguments": {"city"')
    assert [(call.index, call.name, call.arguments) for call in first.calls] == [
        (0, "get_weather", ""),
        (0, None, '{"city"'),
    ]
    assert parser.feed(': "Par').calls == [CallDelta(0, arguments=': "Par')]
    assert parser.feed('is"}}').calls == [CallDelta(0, arguments='is"}')]
    assert not parser.feed("\n</tool_call>")
    assert not parser.finish()
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"


def test_text_that_is_no_tag_is_not_held_back() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert [parser.feed(piece).content for piece in ("Hello", " <", "b>", " <tool", "s>")] == [
        "Hello", "", " <b>", "", " <tools>",
    ]  # fmt: skip
    assert parser.finish_reason("stop") == "stop"


def test_json_that_is_an_answer_is_not_held_back_to_its_end() -> None:
    parser = ToolCallParser(EITHER, NAMES)
    assert parser.feed('{"answer"').content == '{"answer"'
    assert parser.feed(": 5").content == ": 5"


def test_arguments_that_turn_malformed_after_the_call_was_announced_stand() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": [1}}</tool_call> so'
    streamed = read(HERMES, [text])
    assert calls_of(streamed) == [("add", '{"a": [1}')] or calls_of(streamed) == [("add", '{"a": [1')]
    whole = read(HERMES, [text], incremental=False)
    assert calls_of(whole) == [] and whole.content == text


def test_a_call_that_is_cut_off_streams_what_there_is_and_is_content_otherwise() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1'
    assert calls_of(read(HERMES, [text])) == [("add", '{"a": 1')]
    assert read(HERMES, [text], incremental=False) == ToolMessage(text, [])


def test_at_most_so_many_calls_are_delivered() -> None:
    text = "\n".join([hermes(*ADD_CALL), hermes(*WEATHER_CALL), hermes(*ADD_CALL)])
    for incremental in (True, False):
        message = read(HERMES, list(text), incremental, max_calls=1)
        assert (message.content, calls_of(message)) == (None, [ADD_CALL])


def test_a_named_call_is_all_text() -> None:
    parser = NamedCallParser("add")
    deltas = [parser.feed(piece) for piece in ("", '{"a"', ": 1}")]
    message = join([*deltas, parser.finish()])
    assert calls_of(message) == [("add", '{"a": 1}')]
    assert (message.content, parser.finish_reason("stop"), parser.finish_reason("length")) == (None, "stop", "length")
    assert calls_of(NamedCallParser("add").message("")) == [("add", "")]


def test_the_time_for_a_long_text_grows_with_its_length_alone() -> None:
    for text in ("<tool_call>" * 2_000, '<tool_call>{"' * 2_000, "<" * 20_000, '{"a":' * 4_000, " " * 20_000):
        for pieces in ([text], [text[i : i + 7] for i in range(0, len(text), 7)]):
            begun = time.process_time()
            assert read(EITHER, pieces).content == text
            assert time.process_time() - begun < 2.0


def test_nesting_without_end_is_no_call() -> None:
    text = hermes("add", '{"a":' * 50_000 + "1" + "}" * 50_000)
    assert read(HERMES, [text], incremental=False).content == text


def test_the_form_is_the_one_that_the_template_teaches() -> None:
    assert format_of("... <tool_call> ...") is HERMES
    assert format_of('{{ "<|python_tag|>" }}') is format_of("Environment: ipython") is LLAMA3
    assert format_of("plain") is format_of(None) is EITHER
