"""Clients that send a little now and then, or nothing: none keeps a connection for longer than the bounds allow."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from engine_fakes import WAIT, ScriptedRunner, Valve, eventually
from server_fakes import RunningServer, serving

BOUND = 0.4
"""Seconds for a head, and for a body."""
SLACK = 5.0
"""Seconds more that a busy machine may take."""
BODY = json.dumps({"prompt": "abc", "max_tokens": 2, "temperature": 0}).encode()


def head(method: str, path: str, length: int | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", "content-type: application/json"]
    lines += [f"content-length: {length}"] if length is not None else []
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


@pytest.fixture(scope="module")
def impatient() -> Iterator[RunningServer]:
    with serving(config={"header_timeout": BOUND, "body_timeout": BOUND}) as server:
        yield server


@contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT) as client:
        yield client


def dripped(server: RunningServer, first: bytes, drop: bytes) -> tuple[bytes, float]:
    """Send `first`, then `drop` again and again until the server closes: what it said, and after how many seconds."""
    said = b""
    begun = time.monotonic()
    with connected(server) as client:
        client.settimeout(0.02)
        client.sendall(first)
        while time.monotonic() < begun + BOUND + SLACK:
            try:
                part = client.recv(65536)
                if not part:
                    return said, time.monotonic() - begun
                said += part
            except TimeoutError:
                client.sendall(drop)
            except ConnectionError:
                return said, time.monotonic() - begun
    raise AssertionError(f"still connected after {BOUND + SLACK} s; it said {said!r}")


def status_of(said: bytes) -> int:
    return int(said.split(maxsplit=2)[1])


@pytest.mark.parametrize("drop", [b"", b"x-more: 1\r\n"], ids=["silent", "dripping"])
def test_headers_that_never_end_are_answered_and_closed(impatient, drop: bytes) -> None:
    said, seconds = dripped(impatient, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", drop)
    assert status_of(said) == 408
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "header_timeout"
    assert seconds >= BOUND * 0.9


def test_a_connection_without_a_request_is_closed_in_silence(impatient) -> None:
    assert dripped(impatient, b"", b"")[0] == b""


def test_a_body_that_never_ends_is_answered_and_closed(impatient) -> None:
    said, _ = dripped(impatient, head("POST", "/v1/completions", 10_000), b" ")
    assert status_of(said) == 408
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/health", 200), ("POST", "/nowhere", 404)])
def test_a_body_that_nobody_reads_and_that_never_ends(impatient, method: str, path: str, status: int) -> None:
    said, _ = dripped(impatient, head(method, path, 10_000), b" ")
    assert status_of(said) == status, "the answer comes at once; the connection goes when the body should be in"
    assert said.count(b"HTTP/1.1") == 1


def test_empty_lines_behind_an_answer_keep_no_connection(impatient) -> None:
    said, _ = dripped(impatient, head("GET", "/health"), b"\r\n")
    assert status_of(said) == 200 and said.count(b"HTTP/1.1") == 1


def test_a_slow_second_head_leaves_the_first_answer_whole() -> None:
    valve = Valve(1)
    config = {"header_timeout": BOUND, "body_timeout": BOUND}
    with serving(ScriptedRunner(gate=valve), config=config) as server, connected(server) as client:
        client.sendall(head("POST", "/v1/completions", len(BODY)) + BODY + b"GET /hea")
        time.sleep(2 * BOUND)  # its time is over while the first request runs
        valve.open()
        said = b""
        while part := client.recv(65536):
            said += part
    assert status_of(said) == 200 and said.count(b"HTTP/1.1") == 1
    assert json.loads(said.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2


def test_the_bounds_are_of_a_request_not_of_a_connection(impatient) -> None:
    with connected(impatient) as client:
        for _ in range(3):
            request = head("POST", "/v1/completions", len(BODY)) + BODY
            for part in (request[:40], request[40:-5], request[-5:]):
                time.sleep(BOUND / 4)
                client.sendall(part)
            assert status_of(client.recv(65536)) == 200
            time.sleep(1.2 * BOUND)


def test_a_long_answer_is_not_cut() -> None:
    valve = Valve(1)
    config = {"header_timeout": BOUND, "body_timeout": BOUND}
    with serving(ScriptedRunner(gate=valve), config=config) as server, connected(server) as client:
        client.sendall(head("POST", "/v1/completions", len(BODY)) + BODY)
        eventually(lambda: server.runtime.stats().running == 1)
        time.sleep(2 * BOUND)
        valve.open()
        assert status_of(client.recv(65536)) == 200
