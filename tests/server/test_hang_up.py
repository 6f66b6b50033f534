"""Clients that go away: in every state, streamed or not, and what they held comes back."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest
from engine_fakes import ScriptedRunner, Valve, eventually, wait_idle
from server_fakes import RunningServer, events_of, serving

FIELDS = {"prompt": "abcdefgh", "max_tokens": 200, "temperature": 0}


class RawClient:
    """A client on the level of the socket, that can go whenever it wants."""

    def __init__(self, server: RunningServer, **fields: Any) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        body = json.dumps({**FIELDS, **fields}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        self.socket.sendall(head.encode() + b"\r\n\r\n" + body)

    def read_chunks(self, count: int) -> None:
        data = b""
        while data.count(b'"text"') < count:
            part = self.socket.recv(4096)
            assert part, data
            data += part

    def hang_up(self) -> None:
        self.socket.close()


def test_three_hundred_abandoned_streams_leave_nothing_behind() -> None:
    with serving(num_blocks=256, max_model_len=256, check_invariants=False) as server:
        probe = {"prompt": "the probe", "max_tokens": 8, "temperature": 0}
        first = server.http.post("/v1/completions", json=probe).json()["choices"]
        start = wait_idle(server.runtime)
        for number in range(300):
            client = RawClient(server, prompt="a" * 50, stream=True)
            client.read_chunks(3 if number % 10 else 1)
            client.hang_up()
        assert wait_idle(server.runtime) == start
        assert server.http.post("/v1/completions", json=probe).json()["choices"] == first
        eventually(lambda: server.state.num_calls == 0, "all calls over")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_queued_request_is_never_run(stream: bool) -> None:
    valve = Valve(0)
    runner = ScriptedRunner(gate=valve)
    with serving(runner, max_num_seqs=1) as server:
        busy = RawClient(server, stream=True, request_id="busy")
        eventually(lambda: runner.entered.is_set(), "the first one runs")
        gone = RawClient(server, stream=stream, request_id="gone")
        eventually(lambda: server.runtime._thread.is_live("cmpl-gone"), "the second one is queued")
        gone.hang_up()
        eventually(lambda: not server.runtime._thread.is_live("cmpl-gone"), "it is cancelled")
        busy.hang_up()
        valve.open()
        wait_idle(server.runtime)
        assert runner.prefilled["cmpl-gone"] == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_in_prefill_gets_no_further_chunk(stream: bool) -> None:
    valve = Valve(2)
    runner = ScriptedRunner(gate=valve)
    with serving(runner, max_num_batched_tokens=8) as server:
        gone = RawClient(server, prompt="a" * 100, max_tokens=50, stream=stream, request_id="gone")
        eventually(lambda: runner.prefilled["cmpl-gone"] == 16, "two chunks")
        gone.hang_up()
        eventually(lambda: not server.runtime._thread.is_live("cmpl-gone"), "it is cancelled")
        valve.open()
        wait_idle(server.runtime)
        assert runner.prefilled["cmpl-gone"] <= 24, "the chunk that was on its way, and no more"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_decoding_request_ends(stream: bool) -> None:
    valve = Valve(10)
    with serving(ScriptedRunner(gate=valve)) as server:
        gone = RawClient(server, stream=stream, request_id="gone")
        eventually(lambda: server.runtime.stats().counters.generated_tokens >= 5, "it decodes")
        gone.hang_up()
        eventually(lambda: not server.runtime._thread.is_live("cmpl-gone"), "it is cancelled")
        valve.open()
        wait_idle(server.runtime)
        assert server.runtime.stats().counters.generated_tokens < 30


def test_a_swapped_out_request_gives_its_slots_back() -> None:
    valve = Valve(0)
    pool = {"num_blocks": 24, "num_swap_blocks": 64, "preemption_mode": "swap", "max_model_len": 96}
    with serving(ScriptedRunner(gate=valve), **pool) as server:
        clients = [RawClient(server, prompt=letter * 20, max_tokens=70, stream=True) for letter in "abcdef"]
        eventually(lambda: server.runtime._thread.num_live == 6, "all are there")
        while server.runtime.stats().swapped == 0:
            valve.allow(1)
            eventually(lambda: valve._left == 0, "a step")
        for client in clients:
            client.hang_up()
        eventually(lambda: not server.runtime._thread._by_id, "all are cancelled")
        valve.open()
        state = wait_idle(server.runtime)
        assert state == (0, 0, 0, 0, 24, 0, 0, 0, 0)


def test_a_call_whose_text_is_still_being_read_is_not_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        reading, may_go_on = threading.Event(), threading.Event()
        encode = server.runtime.tokenizer.encode

        def slow(text: str, **options: Any) -> list[int]:
            reading.set()
            assert may_go_on.wait(20)
            return encode(text, **options)

        monkeypatch.setattr(server.runtime.tokenizer, "encode", slow)
        before = server.runtime.stats().counters.submitted
        client = RawClient(server)
        assert reading.wait(20)
        client.hang_up()
        time.sleep(0.3)  # for the event loop to notice
        may_go_on.set()
        eventually(lambda: server.state.num_calls == 0, "the call is over")
        assert server.runtime.stats().counters.submitted == before


def test_a_reader_that_does_not_read_holds_up_nobody() -> None:
    with serving(num_blocks=4096, max_model_len=8192, block_size=16) as server:
        lazy = RawClient(server, stream=True, max_tokens=8000, n=4, temperature=1)
        other = events_of(server, "/v1/completions", **FIELDS, stream=True)
        assert len(other) == 201
        lazy.hang_up()
        wait_idle(server.runtime)


def test_the_same_id_twice() -> None:
    valve = Valve(5)
    with serving(ScriptedRunner(gate=valve)) as server:
        first = RawClient(server, stream=True, request_id="same")
        first.read_chunks(1)
        found: list[Any] = []

        def again() -> None:
            answer = server.http.post(
                "/v1/completions", json={**FIELDS, "max_tokens": 3}, headers={"x-request-id": "same"}
            )
            found.append(answer.json())

        thread = threading.Thread(target=again)
        thread.start()
        eventually(lambda: server.runtime._thread.num_live == 2, "both live")
        first.hang_up()
        valve.open()
        thread.join(20)
        assert found[0]["id"].startswith("cmpl-same-"), "made unique"
        assert found[0]["usage"]["completion_tokens"] == 3
        retry = server.http.post("/v1/completions", json={**FIELDS, "max_tokens": 3}, headers={"x-request-id": "same"})
        assert retry.json()["id"] == "cmpl-same", "free again after the end"
        assert retry.json()["choices"] == found[0]["choices"]
