"""Tools through the official client, whole and streamed; the scripted model writes what it is told."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from engine_fakes import EOS, ScriptedRunner, letters, tokens_script, toy_tokenizer
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from server_fakes import serving

MESSAGES: Any = [{"role": "user", "content": "Weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
HERMES = 'Look: <tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    "{% for m in messages %}<turn>{{ m.role }}:{{ m.content }}<end>{% endfor %}<turn>assistant:"
)


def says(text: str) -> ScriptedRunner:
    """A model that writes this."""
    return ScriptedRunner(tokens_script(*letters(text), EOS))


@pytest.fixture(scope="module")
def hermes_server():
    tokenizer = toy_tokenizer(chat_templates={"default": TEMPLATE})
    with serving(says(HERMES), tokenizer=tokenizer, max_model_len=2048, num_blocks=1024) as running:
        yield running


def test_auto_reads_the_models_own_calls(hermes_server) -> None:
    answer = hermes_server.openai().chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (message.content or "").strip() == "Look:"
    (call,) = message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Paris"},
    )
    assert call.id


def test_auto_streams_calls_in_parts(hermes_server) -> None:
    client = hermes_server.openai()
    chunks = list(client.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS, stream=True))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert [part.id for part in parts if part.id] == [parts[0].id]
    assert parts[0].function.name == "weather"
    assert json.loads("".join(part.function.arguments or "" for part in parts)) == {"city": "Paris"}
    assert "".join(delta.content or "" for delta in deltas).strip() == "Look:"
    assert "tool_call>" not in "".join(delta.content or "" for delta in deltas)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}


def test_the_stream_helper_of_the_client_puts_calls_together(hermes_server) -> None:
    client = hermes_server.openai()
    with client.chat.completions.stream(model="toy", messages=MESSAGES, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "weather"


def test_none_leaves_the_text_alone(hermes_server) -> None:
    client = hermes_server.openai()
    answer = client.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == HERMES
    assert answer.choices[0].finish_reason == "stop"


def test_tools_that_are_wrong_are_refused(hermes_server) -> None:
    client = hermes_server.openai()
    for fields in (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "perhaps"},
    ):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="toy", messages=MESSAGES, **fields)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("calls", [True, False], ids=["calls", "answers"])
def test_auto_with_a_response_format_lets_the_model_choose(calls: bool, stream: bool) -> None:
    text = HERMES.removeprefix("Look: ") if calls else '{"city": "Oslo"}'
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    tokenizer = toy_tokenizer(chat_templates={"default": TEMPLATE})
    with serving(says(text), tokenizer=tokenizer, max_model_len=2048, num_blocks=1024) as server:
        fields = {"model": "toy", "messages": MESSAGES, "tools": TOOLS, "response_format": form}
        client = server.openai()
        if stream:
            with client.chat.completions.stream(**fields) as events:
                (choice,) = events.get_final_completion().choices
        else:
            (choice,) = client.chat.completions.create(**fields).choices
    if calls:
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    else:
        assert (choice.finish_reason, choice.message.content) == ("stop", text)
        assert not choice.message.tool_calls


def test_auto_with_a_response_format_leaves_no_third_way() -> None:
    tokenizer = toy_tokenizer(chat_templates={"default": TEMPLATE})
    with serving(says("Paris is fine"), tokenizer=tokenizer, max_model_len=2048, num_blocks=1024) as server:
        fields = {"messages": MESSAGES, "tools": TOOLS, "response_format": {"type": "json_object"}, "max_tokens": 40}
        answer = server.http.post("/v1/chat/completions", json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "request_failed") and "grammar" in error["message"]
