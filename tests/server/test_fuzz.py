"""A slice of the fuzz (`run_fuzz.py`), and what it once found."""

from __future__ import annotations

import json
import socket

import pytest
from engine_fakes import ScriptedRunner, Valve, eventually
from fuzz_http import hostile_request, message
from run_fuzz import fuzz
from server_fakes import serving


@pytest.mark.timeout(240)
def test_some_hundreds_of_hostile_requests() -> None:
    outcome = fuzz(count=300, seed=7, quiet=True)
    assert outcome.faults == []
    assert outcome.checks == 1 and sum(outcome.sent.values()) == 300
    assert {"200", "400", "404", "405", "413", "415"} <= set(outcome.statuses)


def test_a_seed_is_a_request() -> None:
    for number in range(50):
        assert hostile_request(3, number) == hostile_request(3, number)
    assert len({hostile_request(3, number).what for number in range(300)}) > 12


def completion(tokens: int, **fields: object) -> bytes:
    body = {"prompt": "abc", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
    return message("POST", "/v1/completions", json.dumps(body).encode(), close=False)


def test_garbage_behind_a_request_does_not_stand_in_its_answer() -> None:
    with serving() as server, socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as client:
        client.settimeout(20)
        client.sendall(completion(30, stream=True) + completion(2) + b"\x00garbage\r\n\r\n")
        text = b"".join(iter(lambda: client.recv(65536), b""))
        assert text.count(b"HTTP/1.1 200 OK") == 2 and b"HTTP/1.1 400" not in text
        assert text.count(b"data: [DONE]") == 1
        assert json.loads(text.rpartition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2


def test_a_pipelining_client_that_goes_cancels_what_runs() -> None:
    valve = Valve(3)
    with serving(ScriptedRunner(gate=valve)) as server:
        port = int(server.url.rsplit(":", 1)[1])
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(completion(200, stream=True) + message("GET", "/health", close=False))
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        valve.allow(60)  # writes find out that nobody is there
        eventually(lambda: server.runtime.stats().running == 0, "the stream was cancelled")
        assert server.runtime._engine.runner.calls["forward"] < 100
        assert server.http.get("/health").status_code == 200


def test_a_form_that_is_empty_and_a_least_length_exclude_each_other() -> None:
    fields = {"prompt": "abc", "max_tokens": 3, "structured_outputs": {"grammar": "root ::="}}
    with serving() as server:
        answer = server.http.post("/v1/completions", json={**fields, "min_tokens": 2})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")
