"""/v1/completions: the forms of a prompt, echo, log-probabilities, best_of, and streams that say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_fakes import END, TOKENIZER, ScriptedRunner, letters, tokens_script
from openai.types import Completion
from server_fakes import RunningServer, events_of, serving


def complete(server: RunningServer, **fields: Any) -> dict[str, Any]:
    answer = server.http.post("/v1/completions", json={"temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    if not (fields.get("echo") and "logprobs" in fields):  # the type lacks the first token's null
        Completion.model_validate(answer.json(), strict=True)
    return answer.json()


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a reader of a stream has at its end, in the form of a whole choice."""
    mine = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    result: dict[str, Any] = {"text": "".join(choice["text"] for choice in mine), "logprobs": None}
    for choice in mine:
        if choice["logprobs"] is not None:
            result["logprobs"] = result["logprobs"] or {name: [] for name in choice["logprobs"]}
            for name, values in choice["logprobs"].items():
                if values is None:
                    result["logprobs"][name] = None
                else:
                    result["logprobs"][name] += values
    reasons = [choice["finish_reason"] for choice in mine]
    assert all(reason is None for reason in reasons[:-1])
    return {**result, "finish_reason": reasons[-1]}


def test_four_forms_of_a_prompt(server) -> None:
    solo = {text: complete(server, prompt=text)["choices"][0]["text"] for text in ("abc", "xy")}
    assert complete(server, prompt=letters("abc"))["choices"][0]["text"] == solo["abc"]
    for prompts in (["abc", "xy"], [letters("abc"), letters("xy")]):
        answer = complete(server, prompt=prompts)
        assert [choice["text"] for choice in answer["choices"]] == [solo["abc"], solo["xy"]]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["prompt_tokens"] == 5
        assert answer["usage"]["completion_tokens"] == 32, "16 each, as in the OpenAI API"


def test_choices_of_prompts_are_numbered_through(server) -> None:
    answer = complete(server, prompt=["abc", "xy"], n=2, temperature=1, seed=5, max_tokens=6)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 5
    events = events_of(
        server, "/v1/completions", prompt=["abc", "xy"], n=2, temperature=1, seed=5, max_tokens=6, stream=True
    )
    for choice in answer["choices"]:
        assert joined(events, choice["index"])["text"] == choice["text"]
        assert joined(events, choice["index"])["finish_reason"] == "length"


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_logprobs_whole_and_streamed(server, count: int, echo: bool, max_tokens: int) -> None:
    fields = {"prompt": "abcde", "logprobs": count, "echo": echo, "max_tokens": max_tokens}
    choice = complete(server, **fields)["choices"][0]
    logprobs = choice["logprobs"]
    entries = max_tokens + (5 if echo else 0)
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == entries
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(entries))
    assert (logprobs["token_logprobs"][0] is None) is echo
    if count == 0:
        assert logprobs["top_logprobs"] is None
    else:
        tops = logprobs["top_logprobs"][1:] if echo else logprobs["top_logprobs"]
        for name, value, top in zip(
            logprobs["tokens"][-len(tops) :], logprobs["token_logprobs"][-len(tops) :], tops, strict=True
        ):
            assert top[name] == value
            assert len(top) in (count, count + 1), "the token itself comes on top where it is not among the k"
    streamed = joined(events_of(server, "/v1/completions", **fields, temperature=0, stream=True))
    assert streamed == {name: choice[name] for name in streamed}


def test_without_logprobs_there_are_none(server) -> None:
    assert complete(server, prompt="abc")["choices"][0]["logprobs"] is None


def test_scoring_a_prompt(server) -> None:
    answer = complete(server, prompt="abcde", echo=True, max_tokens=0, logprobs=1)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abcde", "length")
    assert [value is None for value in choice["logprobs"]["token_logprobs"]] == [True, False, False, False, False]
    assert answer["usage"]["completion_tokens"] == 0
    events = events_of(server, "/v1/completions", prompt="abcde", echo=True, max_tokens=0, logprobs=1, stream=True)
    streamed = joined(events)
    assert streamed == {name: choice[name] for name in streamed}
    assert complete(server, prompt="abcde", echo=True, max_tokens=0)["choices"][0]["text"] == "abcde"


def test_prompt_scores_in_chunks_are_the_same(server) -> None:
    fields = {"prompt": "abcdefghij", "echo": True, "max_tokens": 2, "logprobs": 1}
    whole = complete(server, **fields)["choices"][0]
    with serving(max_num_batched_tokens=8, max_prefill_tokens_per_step=2) as chunked:
        assert complete(chunked, **fields)["choices"][0] == whole


def test_scoring_without_echo_is_refused(server) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 0})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"


def test_echo_of_ids_is_their_text(server) -> None:
    ids = [*letters("ab"), END]
    assert complete(server, prompt=ids, echo=True, max_tokens=1)["choices"][0]["text"].startswith("ab<end>")


def test_best_of(server) -> None:
    fields = {"prompt": "abc", "temperature": 1, "seed": 3, "max_tokens": 4}
    best = complete(server, **fields, best_of=5, n=2)
    assert len(best["choices"]) == 2
    assert best["usage"]["completion_tokens"] == 20, "all that was generated counts"
    every = complete(server, **fields, n=5, logprobs=0)["choices"]
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert best["choices"][0]["logprobs"] is None
    for wrong in ({"best_of": 1, "n": 2}, {"best_of": 3, "stream": True}, {"best_of": 1000}):
        answer = server.http.post("/v1/completions", json={**fields, **wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")


def test_a_part_of_a_character_is_spelled_as_bytes() -> None:
    first, second = TOKENIZER.encode("\u00e9", add_special_tokens=False)
    with serving(ScriptedRunner(tokens_script(first, second, letters("a")[0]))) as server:
        choice = complete(server, prompt="x", max_tokens=3, logprobs=0)["choices"][0]
        assert choice["text"] == "\u00e9a"
        assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "a"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 1]
        events = events_of(server, "/v1/completions", prompt="x", max_tokens=3, temperature=0, stream=True)
        assert joined(events)["text"] == "\u00e9a"
        assert not any("\ufffd" in json.dumps(event, ensure_ascii=False) for event in events)
        ids = complete(server, prompt="x", max_tokens=1, logprobs=0, return_tokens_as_token_ids=True)
        assert ids["choices"][0]["logprobs"]["tokens"] == [f"token_id:{first}"]
