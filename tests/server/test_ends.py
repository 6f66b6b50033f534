"""How calls end that do not end by themselves: failures, deadlines, full queues, shutdown."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from engine_fakes import ScriptedRunner, Valve, eventually, wait_idle
from server_fakes import RunningServer, events_of, raw_events, serving

COMPLETIONS = "/v1/completions"
FIELDS = {"prompt": "abcdefgh", "max_tokens": 100, "temperature": 0}


def test_a_failure_in_mid_stream_ends_that_stream_with_an_error_frame() -> None:
    runner = ScriptedRunner(row_failures={("cmpl-bad", 5): "NaN logits"})
    with serving(runner) as server, ThreadPoolExecutor(3) as pool:
        fields = {**FIELDS, "stream": True, "max_tokens": 20}
        good = [pool.submit(events_of, server, COMPLETIONS, **fields, request_id=f"good-{i}") for i in range(2)]
        frames = raw_events(server, COMPLETIONS, **fields, request_id="bad")
        assert frames[-1] == "data: [DONE]"
        assert '"error"' in frames[-2] and "NaN logits" in frames[-2]
        assert len(frames) == 5 + 2
        assert not any('"finish_reason":"' in frame for frame in frames), "neither error nor cancelled is a reason"
        for future in good:
            assert len(future.result()) == 21


def test_the_official_client_raises_on_an_error_frame() -> None:
    with serving(ScriptedRunner(row_failures={("chatcmpl-bad", 2): "NaN logits"})) as server:
        stream = server.openai().chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=9,
            stream=True,
            extra_headers={"x-request-id": "bad"},
        )
        with pytest.raises(openai.APIError, match="NaN logits"):
            list(stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_engine_that_dies_ends_every_call(stream: bool) -> None:
    with serving(ScriptedRunner(raise_in={"forward": 6})) as server:
        if stream:
            frames = raw_events(server, COMPLETIONS, **FIELDS, stream=True)
            assert frames[-1] == "data: [DONE]"
            assert "engine_dead" in frames[-2]
        else:
            answer = server.http.post(COMPLETIONS, json=FIELDS)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert server.http.get("/health").status_code == 503
        later = server.http.post(COMPLETIONS, json=FIELDS)
        assert (later.status_code, later.json()["error"]["code"]) == (503, "engine_dead")


@pytest.mark.parametrize("where", ["body", "header"])
def test_deadlines(where: str) -> None:
    valve = Valve(3)
    with serving(ScriptedRunner(gate=valve)) as server:
        threading.Timer(0.4, valve.open).start()
        fields = {**FIELDS, "max_tokens": 200}
        given: dict[str, Any] = {"json": {**fields, "timeout": 0.2}}
        if where == "header":
            given = {"json": fields, "headers": {"x-request-timeout": "0.2"}}
        answer = server.http.post(COMPLETIONS, **given)
        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "timeout"
        assert answer.headers["x-should-retry"] == "false"
        wait_idle(server.runtime)
    with serving(ScriptedRunner(gate=Valve(3))) as server:
        threading.Timer(0.4, server.runtime._engine.runner.gate.open).start()
        frames = raw_events(server, COMPLETIONS, **fields, timeout=0.2, stream=True)
        assert '"code":"timeout"' in frames[-2]


def test_a_deadline_that_is_no_number(server) -> None:
    answer = server.http.post(COMPLETIONS, json=FIELDS, headers={"x-request-timeout": "soon"})
    assert answer.status_code == 400


def test_a_full_queue_is_told_when_to_come_again() -> None:
    valve = Valve(0)
    with serving(ScriptedRunner(gate=valve), max_num_seqs=1, max_waiting=2) as server, ThreadPoolExecutor(4) as pool:
        post = lambda: server.http.post(COMPLETIONS, json={**FIELDS, "max_tokens": 2})  # noqa: E731
        first = pool.submit(post)
        eventually(lambda: server.runtime.stats().running == 1, "one runs")
        queued = [pool.submit(post) for _ in range(2)]
        eventually(lambda: server.runtime._thread.num_live == 3, "two wait")
        answer = post()
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["code"] == "queue_full"
        listed = server.http.post(COMPLETIONS, json={**FIELDS, "prompt": ["a", "b"]})
        assert listed.status_code == 429, "a list is taken as a whole or not at all"
        valve.open()
        assert [future.result().status_code for future in [first, *queued]] == [200] * 3
        assert post().status_code == 200


def test_priorities_are_clamped_to_the_operators_range() -> None:
    valve = Valve(0)
    limits = {"priority_range": (-2, 5)}
    with serving(ScriptedRunner(gate=valve), limits, max_num_seqs=1) as server, ThreadPoolExecutor(4) as pool:
        seen: dict[str, int] = {}
        attach = server.runtime.attach

        def spy(requests: Any) -> Any:
            seen.update({arguments["request_id"]: arguments["priority"] for arguments, _ in requests})
            return attach(requests)

        server.runtime.attach = spy  # type: ignore[method-assign]
        fields = {**FIELDS, "max_tokens": 1}
        wanted = {"a": -100, "b": 3, "c": 100}
        futures = [
            pool.submit(server.http.post, COMPLETIONS, json={**fields, "priority": priority, "request_id": name})
            for name, priority in wanted.items()
        ]
        eventually(lambda: len(seen) == 3, "all submitted")
        valve.open()
        assert all(future.result().status_code == 200 for future in futures)
        assert seen == {"cmpl-a": -2, "cmpl-b": 3, "cmpl-c": 5}


class Draining:
    """Two running streams and a queued call of each kind, held by a valve that was shut."""

    def __init__(self, server: RunningServer, pool: ThreadPoolExecutor, valve: Valve) -> None:
        fields = {**FIELDS, "max_tokens": 60}
        self.streams = [pool.submit(raw_events, server, COMPLETIONS, **fields, stream=True) for _ in range(2)]
        eventually(lambda: server.runtime._thread.num_live == 2, "both are there")
        valve.allow(10)
        eventually(lambda: server.runtime.stats().running == 2, "both run")
        self.queued_stream = pool.submit(server.http.post, COMPLETIONS, json={**fields, "stream": True})
        self.queued = pool.submit(server.http.post, COMPLETIONS, json=fields)
        eventually(lambda: server.runtime._thread.num_live == 4, "two wait")


@pytest.mark.parametrize("signals", [1, 2])
def test_shutdown_lets_calls_end_within_the_grace(signals: int) -> None:
    valve = Valve(0)
    grace = {"grace": 20.0}
    with serving(ScriptedRunner(gate=valve), grace, max_num_seqs=2) as server, ThreadPoolExecutor(4) as pool:
        calls = Draining(server, pool, valve)
        server.call_in_loop(server.server.stop)
        assert server.http.get("/health").status_code == 503
        refused = server.http.post(COMPLETIONS, json=FIELDS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in refused.headers
        begin = time.monotonic()
        if signals == 2:
            server.call_in_loop(server.server.stop)
            threading.Timer(0.2, valve.open).start()
        else:
            valve.open()
        frames = [future.result() for future in calls.streams]
        answers = [calls.queued_stream.result(), calls.queued.result()]
        server.join()
        assert time.monotonic() - begin < 10
        assert all(lines[-1] == "data: [DONE]" for lines in frames)
        if signals == 1:
            assert all('"finish_reason":"length"' in lines[-2] for lines in frames)
            assert [answer.status_code for answer in answers] == [200, 200]
        else:
            assert all("shutting_down" in lines[-2] for lines in frames)
            assert [answer.status_code for answer in answers] == [503, 503]
        assert not server.runtime.is_alive


def test_shutdown_without_grace_tells_every_call() -> None:
    valve = Valve(0)
    with serving(ScriptedRunner(gate=valve), {"grace": 0.0}, max_num_seqs=2) as server, ThreadPoolExecutor(4) as pool:
        calls = Draining(server, pool, valve)
        threading.Timer(0.2, valve.open).start()
        server.call_in_loop(server.server.stop)
        frames = [future.result() for future in calls.streams]
        assert all("shutting_down" in lines[-2] and lines[-1] == "data: [DONE]" for lines in frames)
        for call in (calls.queued_stream, calls.queued):
            assert (call.result().status_code, call.result().json()["error"]["code"]) == (503, "shutting_down")
        server.join()


def test_a_runtime_that_cannot_be_closed_does_not_keep_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as server:
        server.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})

        def fail(*arguments: float) -> None:
            raise RuntimeError("out of order")

        with monkeypatch.context() as patch:
            patch.setattr(server.runtime, "close", fail)
            server.call_in_loop(server.server.stop)
            server.join()
    assert "out of order" in caplog.text
