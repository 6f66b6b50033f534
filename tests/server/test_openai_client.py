"""The official client against the server: every call works unchanged and all types validate."""

from __future__ import annotations

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_models(server) -> None:
    client = server.openai()
    cards = client.models.list().data
    assert [card.id for card in cards] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "minillm"


def test_completion(server) -> None:
    answer = server.openai().completions.create(model="toy", prompt="abc", max_tokens=5, temperature=0)
    Completion.model_validate(answer.model_dump(), strict=True)
    assert answer.object == "text_completion"
    assert len(answer.choices[0].text) == 5
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)


def test_chat_whole_and_streamed_are_the_same_text(server) -> None:
    client = server.openai()
    options = {"model": "toy", "messages": MESSAGES, "max_tokens": 7, "temperature": 0}
    answer = client.chat.completions.create(**options)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert len(text) == 7
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens == answer.usage.prompt_tokens + 7
