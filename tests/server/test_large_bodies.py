"""Large bodies are read in another process: same answers, same refusals, and nothing else waits for them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from engine_fakes import CHAT_TEMPLATE, TOKENIZER, ScriptedRunner, eventually
from server_fakes import RunningServer, serving

from minillm.models.tokenizer import load_tokenizer
from minillm.server.intake import LARGE_BODY

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PADDING = "x" * LARGE_BODY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy tokenizer as a folder that another process can load."""
    path = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER._backend.save(str(path / "tokenizer.json"))
    config = {"eos_token": "<eos>", "chat_template": CHAT_TEMPLATE, "add_bos_token": False}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with serving(tokenizer=load_tokenizer(folder), num_blocks=4096, max_model_len=2048) as running:
        running.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "metadata": PADDING})
        assert len(children()) == 1, "the process is there"
        yield running
    assert children() == [], "and it is gone when the server ends"


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "intake_worker" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": ["abc", "xyz"], "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0}),
        (COMPLETIONS, {"prompt": [[1, 2], [3]], "stop": ["q"], "logit_bias": {"5": 1}, "seed": 3, "max_tokens": 3}),
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}),
        (CHAT, {"messages": [{"role": "user", "content": "<end>"}], "top_k": 3, "seed": 1, "max_tokens": 4}),
    ],
    ids=str,
)
def test_answers_are_the_same(server, path: str, fields: dict[str, Any]) -> None:
    small = server.http.post(path, json=fields)
    large = server.http.post(path, json={**fields, "metadata": PADDING})
    assert (small.status_code, large.status_code) == (200, 200), large.text
    assert large.json()["choices"] == small.json()["choices"]
    assert large.json()["usage"]["prompt_tokens"] == small.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "abc", "n": 0}),
        (COMPLETIONS, {"prompt": "abc", "model": "other"}),
        (COMPLETIONS, {"prompt": "abc", "seed": 10**40}),
        (COMPLETIONS, {"prompt": ["abc", ""]}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [{"role": "user"}]}),
        ("/tokenize", {"prompt": "a", "messages": []}),
    ],
    ids=str,
)
def test_refusals_are_the_same(server, path: str, body: dict[str, Any]) -> None:
    padded = f"{json.dumps(body)}{' ' * LARGE_BODY}"
    small, large = (server.http.post(path, content=text) for text in (json.dumps(body), padded))
    assert large.status_code == small.status_code
    assert 400 <= large.status_code < 500
    assert large.json()["error"]["param"] == small.json()["error"]["param"] or "64 bits" in large.text


def test_a_prompt_that_is_too_long_names_both_sizes(server) -> None:
    for path, fields in (
        (COMPLETIONS, {"prompt": "a" * 150_000}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 150_000}]}),
    ):
        answer = server.http.post(path, json=fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "2048" in error["message"] and "1500" in error["message"]


def test_large_texts_can_be_tokenised(server) -> None:
    tokens = server.http.post("/tokenize", json={"prompt": "ab" * 100_000}).json()
    assert tokens["count"] == 200_000
    text = server.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert text == "ab" * 100_000


def test_a_process_that_dies_costs_one_request(server) -> None:
    children()[0].kill()
    eventually(lambda: not children() or children()[0].status() == psutil.STATUS_ZOMBIE, "it is dead")
    fields = {"prompt": "abc", "max_tokens": 2, "metadata": PADDING}
    assert server.http.post(COMPLETIONS, json=fields).status_code in (200, 500)
    assert server.http.post(COMPLETIONS, json=fields).status_code == 200


def test_a_terminal_ctrl_c_does_not_reach_the_process(server) -> None:
    child = children()[0]
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    fields = {"prompt": "abc", "max_tokens": 2, "metadata": PADDING}
    assert server.http.post(COMPLETIONS, json=fields).status_code == 200
    assert [one.pid for one in children()] == [child.pid]


@pytest.mark.parametrize("content", ["word " * 100_000, "<" * 500_000], ids=["text", "many tag starts"])
def test_health_metrics_and_streams_go_on_while_a_large_body_is_read(folder: Path, content: str) -> None:
    """The bound is generous for busy machines; docs/server.md has what was measured."""
    runner = PacedRunner()
    pool = {"num_blocks": 4096, "max_model_len": 2048, "check_invariants": False}
    with serving(runner, tokenizer=load_tokenizer(folder), **pool) as server:
        waits, gap, stall, answer = observe(server, content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert max(*waits.values(), gap) < 1.0 + 3 * stall, (waits, gap, stall)


class PacedRunner(ScriptedRunner):
    """Steps of 10 ms, as a device's are, which leave the processor to others."""

    def collect(self, handle: dict[str, Any]) -> Any:
        time.sleep(0.01)
        return super().collect(handle)


def observe(server: RunningServer, content: str) -> tuple[dict[str, float], float, float, httpx.Response]:
    """The longest waits for /health and /metrics and the longest gap of a stream while a chat of `content` is read; and
    how long the machine let this process wait for nothing."""
    done = threading.Event()
    waits: dict[str, float] = {"/health": 0.0, "/metrics": 0.0}
    gaps, stalls = [0.0], [0.0]

    def poll(path: str) -> None:
        while not done.is_set():
            begin = time.monotonic()
            assert server.http.get(path).status_code == 200
            waits[path] = max(waits[path], time.monotonic() - begin)
            time.sleep(0.02)

    def stream() -> None:
        fields = {"prompt": "abc", "max_tokens": 1900, "stream": True, "temperature": 0}
        while not done.is_set():
            with server.http.stream("POST", COMPLETIONS, json=fields) as answer:
                last = time.monotonic()
                for _ in answer.iter_raw():
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()

    def sleep() -> None:
        while not done.is_set():
            begin = time.monotonic()
            time.sleep(0.01)
            stalls.append(time.monotonic() - begin)

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(poll, path) for path in waits] + [pool.submit(stream), pool.submit(sleep)]
        try:
            answer = server.http.post(CHAT, json={"messages": [{"role": "user", "content": content}]}, timeout=120)
        finally:
            done.set()
        for other in others:
            other.result()
    return waits, max(gaps), max(stalls), answer
