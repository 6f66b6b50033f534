"""The dashboard's routes over real connections."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
from engine_fakes import WAIT, ScriptedRunner, eventually, wait_idle
from pressure_scene import dashboard_server, press

from minillm.core.sampling_params import SamplingParams

ODD_ID = "a/b c?<img src=x onerror=alert(1)>\u00e9"


def tokens(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def read_events(lines: Iterator[str], count: int) -> list[tuple[str, dict[str, Any]]]:
    """The next events. `lines` is the caller's: httpx closes a response whose iterator is dropped."""
    found, name = [], ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            found.append((name, json.loads(line[6:])))
            if len(found) == count:
                break
    return found


class TestRoutes:
    def test_frames_over_http_and_the_end_of_a_watcher(self) -> None:
        with dashboard_server() as server:
            futures = press(server.runtime, 16)
            with server.http.stream("GET", "/dashboard/events") as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                (hello_name, hello), *rest = read_events(response.iter_lines(), 4)
                assert hello_name == "hello"
                assert (hello["num_blocks"], hello["block_size"], hello["model"]) == (120, 16, "toy")
                assert [name for name, _ in rest] == ["frame"] * 3
                assert rest[-1][1]["stats"]["generated_tokens"] > rest[0][1]["stats"]["generated_tokens"]
                assert rest[-1][1]["alive"] is True
            eventually(lambda: server.app.state.dashboard.hub.num_watchers == 0, "the watcher's end")
            for future in futures:
                future.cancel()

    def test_requests_and_their_stories(self) -> None:
        gate = threading.Event()
        runner = ScriptedRunner(gate=gate)
        with dashboard_server(runner=runner, max_num_seqs=1) as server:
            running = server.runtime.submit("secret prompt", tokens(4), request_id="first")
            assert runner.entered.wait(WAIT)
            odd = server.runtime.submit("abc", tokens(4), request_id=ODD_ID)
            queued = server.http.get(f"/v1/requests/{quote(ODD_ID, safe='')}/explain").json()
            assert queued["story"].endswith("the scheduler sees it after the present step")
            listed = server.http.get("/v1/requests").json()
            assert listed["object"] == "list" and listed["total"] == 1
            assert [(row["id"], row["state"]) for row in listed["data"]] == [("first", "decoding")]
            told = server.http.get("/v1/requests/first/explain").json()
            assert told["state"] == "decoding" and told["prompt_tokens"] == len("secret prompt")
            assert "secret" not in json.dumps([listed, told])
            gate.set()
            running.result(WAIT), odd.result(WAIT)
            wait_idle(server.runtime)
            told = server.http.get(f"/v1/requests/{quote(ODD_ID, safe='')}/explain").json()
            assert (told["id"], told["finish_reason"]) == (ODD_ID, "length")
            missing = server.http.get("/v1/requests/nothing/explain")
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "request_not_found"

    def test_the_page_needs_no_key_and_everything_else_does(self) -> None:
        with dashboard_server({"api_keys": ("right",)}) as server:
            page = server.http.get("/dashboard")
            assert page.status_code == 200
            assert page.headers["content-security-policy"].startswith("default-src 'none'")
            assert page.headers["x-content-type-options"] == "nosniff"
            for path in ("/dashboard/events", "/v1/requests", "/v1/requests/x/explain"):
                assert server.http.get(path).status_code == 401, path
            key = {"Authorization": "Bearer right"}
            assert server.http.get("/v1/requests", headers=key).json()["data"] == []

    def test_too_many_watchers_are_told_so(self) -> None:
        with dashboard_server() as server:
            server.app.state.dashboard.hub.max_watchers = 1
            with server.http.stream("GET", "/dashboard/events") as response:
                lines = response.iter_lines()
                read_events(lines, 1)
                with httpx.stream("GET", f"{server.url}/dashboard/events", timeout=WAIT) as refused:
                    assert refused.status_code == 503 and refused.headers["retry-after"] == "10"

    def test_stories_are_told_while_the_server_drains(self) -> None:
        with dashboard_server() as server:
            running = server.runtime.submit("abc", tokens(900), request_id="long")
            server.app.state.dashboard.end_streams()
            assert server.http.get("/dashboard/events").status_code == 503
            assert server.http.get("/v1/requests/long/explain").json()["id"] == "long"
            assert server.http.get("/v1/requests").status_code == 200
            running.cancel()

    def test_a_watcher_does_not_hold_up_the_end(self) -> None:
        with dashboard_server() as server, server.http.stream("GET", "/dashboard/events") as response:
            lines = response.iter_lines()
            read_events(lines, 2)
            begin = time.monotonic()
            body = {"model": "toy", "prompt": "abc", "max_tokens": 1}
            assert server.http.post("/v1/completions", json=body).status_code == 200
            server.call_in_loop(server.server.stop)
            server.join()
            deque(lines, maxlen=0)  # the stream has an end
            assert time.monotonic() - begin < 5
