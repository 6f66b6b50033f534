"""What is refused: with an error object that names field and value, before anything is queued or opened."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from engine_fakes import VOCAB, ScriptedRunner, idle_state
from server_fakes import RunningServer, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEEP = b'{"prompt":"a","metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.fixture
def checked(server: RunningServer) -> Iterator[RunningServer]:
    """The server; afterwards nothing was submitted, and a normal request has its usual answer."""
    before = server.runtime.stats().counters.submitted
    yield server
    assert server.runtime.stats().counters.submitted == before
    answer = server.http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 4, "temperature": 0})
    assert answer.status_code == 200
    assert len(answer.json()["choices"][0]["text"]) == 4
    assert idle_state(server.runtime._engine)[:4] == (0, 0, 0, 0)


def refused(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json", "never a stream"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert param is None or error["param"] == param
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"stop": ""}, "stop"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"priority": "x"}, "priority"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 1.0001}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": 10**40}, "seed"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"user": 7}, "user"),
        ({"user": "u" * 513}, "user"),
        ({"cache_salt": "s" * 513}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
        ({"suffix": "end"}, "suffix"),
        ({"temprature": 0.5}, "temprature"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
    ids=str,
)
def test_bad_fields_are_named(checked, fields: dict[str, Any], param: str, stream: bool) -> None:
    refused(checked.http.post(COMPLETIONS, json={"prompt": "abc", "stream": stream, **fields}), 400, param)


def test_messages_name_the_value_the_limit_and_near_names(checked) -> None:
    post = checked.http.post
    assert "1000" in refused(post(COMPLETIONS, json={"prompt": "a", "n": 1000}), 400)["message"]
    assert (
        "did you mean temperature" in refused(post(COMPLETIONS, json={"prompt": "a", "temprature": 1}), 400)["message"]
    )
    assert "'hot'" in refused(post(COMPLETIONS, json={"prompt": "a", "temperature": "hot"}), 400)["message"]
    assert refused(post(COMPLETIONS, json={}), 400)["message"] == "prompt is missing"


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [[]], [], ["ok", ""], [VOCAB], [-1], [10**30], [True], ["a", 1], [[1], "a"], [1.5], None, 7],
    ids=str,
)
def test_prompts_that_cannot_run_refuse_the_whole_list(checked, prompt: Any) -> None:
    refused(checked.http.post(COMPLETIONS, json={"prompt": prompt}), 400)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        ["hi"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "", "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "hi",
        None,
    ],
    ids=str,
)
def test_messages_that_cannot_be_rendered(checked, messages: Any) -> None:
    refused(checked.http.post(CHAT, json={"messages": messages}), 400)


def test_an_empty_message_runs(server) -> None:
    answer = server.http.post(CHAT, json={"messages": [{"role": "user", "content": ""}], "max_tokens": 1})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"  ", "empty"),
        (b"{", "char 1"),
        (b'{"model": "a",}', "line 1 column"),
        (b'{"model": NaN}', "not valid JSON"),
        (b'{"model": "\\ud800"}', "lone surrogate"),
        (b'{"model": "\xff"}', "not valid JSON"),
        (b"\xff\xfe{", "not valid JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'"x"', "object"),
        (DEEP, ""),
    ],
    ids=lambda value: str(value[:20]),
)
def test_bodies_that_are_no_json_object(checked, path: str, body: bytes, says: str) -> None:
    error = refused(checked.http.post(path, content=body, headers={"content-type": "application/json"}), 400)
    assert says in error["message"]


def test_text_behind_the_object(checked) -> None:
    body = b'{"prompt": "a"}\n\n x'
    error = refused(checked.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"}), 400)
    assert "line 3 column 2" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"abc","temperature":1e400}',
        b'{"prompt":"abc","temperature":' + b"9" * 5000 + b"}",
        b'{"prompt":"abc","max_tokens":' + b"9" * 5000 + b"}",
        b'{"prompt":"abc","metadata":' + b"9" * 5000 + b"}",
    ],
    ids=range(4),
)
def test_numbers_without_end(checked, body: bytes) -> None:
    refused(checked.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"}), 400)


def test_odd_but_valid_text_runs(server) -> None:
    for content in (b'"a\\u0000b"', b'"\\ud83d\\ude00"', b'"\\uffff\\u202e"', b'"<eos><turn>"'):
        body = b'{"prompt":' + content + b',"prompt":' + content + b',"max_tokens":1}'  # the last of two keys counts
        answer = server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text


def test_fields_without_effect_are_accepted(server) -> None:
    fields = {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "user": "me", "suffix": None, "n": None}
    answer = server.http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-5, 1e-4])
def test_tiny_temperatures_are_greedy(server, temperature: float) -> None:
    fields = {"prompt": "abc", "max_tokens": 6}
    greedy = server.http.post(COMPLETIONS, json={**fields, "temperature": 0}).json()["choices"]
    assert server.http.post(COMPLETIONS, json={**fields, "temperature": temperature}).json()["choices"] == greedy


@pytest.mark.parametrize("fields", [{"top_k": -1}, {"top_k": 0}, {"top_k": 10**6}, {"top_p": 0}, {"top_p": 1}], ids=str)
def test_edges_of_sampling_are_allowed(server, fields: dict[str, Any]) -> None:
    assert server.http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 2, **fields}).status_code == 200


def test_unknown_model_and_routes(checked) -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        error = refused(checked.http.post(path, json={"model": "gpt-9", **fields}), 404, "model")
        assert error["code"] == "model_not_found"
        assert "toy" in error["message"]
    refused(checked.http.get("/v1/nothing"), 404)
    refused(checked.http.get("/v1/models/a/b"), 404)
    answer = checked.http.delete(COMPLETIONS)
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_a_list_that_the_queue_could_never_take() -> None:
    with serving(max_waiting=4, max_num_seqs=2) as server:
        error = refused(server.http.post(COMPLETIONS, json={"prompt": ["a"] * 7}), 400, "prompt")
        assert "7 prompts" in error["message"] and "max_waiting=4" in error["message"]


def test_odd_requests_of_http(server) -> None:
    assert server.http.head("/health").status_code == 200
    refused(server.http.post(f"{COMPLETIONS}/", json={"prompt": "a"}), 404)
    refused(server.http.get("/health", headers={"x-large": "a" * 400_000}), 431)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_long_answers_with_many_alternatives(server) -> None:
    fields = {"prompt": "abc", "max_tokens": 200, "logprobs": 20, "n": 3, "temperature": 1, "seed": 1}
    choices = server.http.post(COMPLETIONS, json=fields).json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [200] * 3


def test_other_content_types(checked) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        refused(checked.http.post(COMPLETIONS, content=b'{"prompt":"a"}', headers={"content-type": kind}), 415)


def test_never_fits() -> None:
    with serving(num_blocks=10, block_size=16, max_model_len=1000) as server:
        for extra in ({}, {"stream": True}):
            error = refused(server.http.post(COMPLETIONS, json={"prompt": "a" * 300, **extra}), 400, "prompt")
            assert "300" in error["message"] and "160" in error["message"]
            assert error["code"] == "context_length_exceeded"
            error = refused(server.http.post(COMPLETIONS, json={"prompt": "a" * 100, "max_tokens": 500, **extra}), 400)
            assert "600" in error["message"] and "160" in error["message"]
        answer = server.http.post(COMPLETIONS, json={"prompt": "abcde"})
        assert answer.json()["usage"]["total_tokens"] == 21
        messages = [{"role": "user", "content": "a" * 80}]
        usage = server.http.post(CHAT, json={"messages": messages}).json()["usage"]
        assert usage["total_tokens"] == 160, "without max_tokens it ends at capacity"


@pytest.mark.parametrize(("over", "status"), [(0, 200), (1, 400)])
def test_one_token_over_the_limit(over: int, status: int) -> None:
    with serving(max_model_len=64) as server:
        fields = {"prompt": "a" * 60, "max_tokens": 4 + over}
        assert server.http.post(COMPLETIONS, json=fields).status_code == status
        assert server.http.post(COMPLETIONS, json={"prompt": "a" * (63 + over)}).status_code == status
        answer = server.http.post(COMPLETIONS, json={"prompt": "a" * 64})
        assert "64" in refused(answer, 400)["message"]


def test_bodies_over_the_limit() -> None:
    with serving(config={"max_body_size": 1000}) as server:
        fits = json.dumps({"prompt": "a", "max_tokens": 1, "metadata": "x" * 900})
        assert server.http.post(COMPLETIONS, content=fits).status_code == 200
        large = json.dumps({"prompt": "a" * 2000}).encode()
        assert "1000" in refused(server.http.post(COMPLETIONS, content=large), 413)["message"]

        def parts() -> Iterator[bytes]:
            for _ in range(200):
                yield b" " * 100

        # The connection may be closed while it is being sent: that stops a client that never ends.
        with suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            refused(server.http.post(COMPLETIONS, content=parts()), 413)
        assert server.http.post(COMPLETIONS, content=fits).status_code == 200


def test_api_key() -> None:
    with serving(config={"api_keys": ("secret-1", "secret-2")}) as server:
        get = server.http.get
        assert get("/health").status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret-1"},
            {"authorization": "Bearer"},
        ):
            for path in ("/v1/models", "/metrics", "/version", "/nowhere", "/openapi.json"):
                error = refused(get(path, headers=headers), 401)
                assert error["code"] == "invalid_api_key"
                assert "secret" not in error["message"]
        assert get("/v1/models", headers={"authorization": "Bearer secret-2"}).status_code == 200
        assert server.openai(api_key="secret-1").models.list().data
        assert "secret" not in repr(server.state.config)


def test_a_failing_row_fails_its_own_request_alone() -> None:
    runner = ScriptedRunner(row_failures={("cmpl-bad", 3): "NaN logits"})
    with serving(runner) as server:
        good = server.http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 6, "temperature": 0})
        answer = server.http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 6, "request_id": "bad"})
        assert "NaN logits" in refused(answer, 500)["message"]
        again = server.http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 6, "temperature": 0})
        assert again.json()["choices"] == good.json()["choices"]


def test_cors_is_off_unless_origins_are_given() -> None:
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    with serving() as server:
        assert "access-control-allow-origin" not in server.http.get("/health", headers=headers).headers
    with serving(config={"cors_origins": ("https://page.example",), "api_keys": ("k",)}) as server:
        asked = {**headers, "access-control-request-headers": "authorization,content-type,x-stainless-os"}
        answer = server.http.options(COMPLETIONS, headers=asked)
        assert answer.status_code == 200, "the browser's question before the call has no key"
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"], "the official client sends it"
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        other = server.http.get("/health", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
