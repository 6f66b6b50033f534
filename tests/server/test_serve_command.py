"""`minillm serve` as a process: options, keys, signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from minillm.cli.serve import parse_range, parse_size
from minillm.core.errors import ConfigError
from minillm.server.config import ServerConfig
from minillm.server.lifecycle import address, listen

TIME = 120.0


class Serving:
    """A running process and where it listens."""

    def __init__(self, process: subprocess.Popen[str], url: str, first_lines: str) -> None:
        self.process = process
        self.url = url
        self.first_lines = first_lines

    def end(self, *signals: int, within: float) -> str:
        """Send the signals; the rest of standard error."""
        begin = time.monotonic()
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.2)
        rest = self.process.communicate(timeout=TIME)[1]
        assert time.monotonic() - begin < within
        return rest


@contextmanager
def serve(*options: str, **environment: str) -> Iterator[Serving]:
    command = [sys.executable, "-m", "minillm", "serve", "--port", "0", "--num-gpu-blocks-override", "600", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    lines = ""
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines += line
            if match := re.search(r"serving .* at (http://\S+)", line):
                yield Serving(process, match[1], lines)
                break
        else:
            raise AssertionError(lines)
    finally:
        process.kill()
        process.wait()


def stream_in_thread(url: str, fields: dict[str, Any]) -> tuple[threading.Thread, list[str]]:
    found: list[str] = []

    def run() -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=fields, timeout=TIME) as answer:
            found.append(str(answer.status_code))
            found.extend(line for line in answer.iter_lines() if line)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


@pytest.mark.integration
def test_serves_with_a_key_from_the_environment_and_ends_on_sigterm() -> None:
    with serve("--served-model-name", "tiny", MINILLM_API_KEY="very-secret") as server:
        headers = {"authorization": "Bearer very-secret"}
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        cards = httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"]
        assert [card["id"] for card in cards] == ["tiny"]
        fields = {"model": "tiny", "prompt": "The sea is", "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=fields, headers=headers, timeout=TIME)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert "vllm:num_requests_running" in httpx.get(f"{server.url}/metrics", headers=headers).text
        large = {"model": "tiny", "prompt": "The sea is", "max_tokens": 4, "metadata": "x" * 100_000}
        assert httpx.post(f"{server.url}/v1/completions", json=large, headers=headers, timeout=TIME).status_code == 200
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children, "the process that reads large bodies"
        log = server.first_lines + server.end(signal.SIGTERM, within=20)
        assert server.process.returncode == 0
        assert "very-secret" not in log
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


@pytest.mark.integration
@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)], ids=str)
def test_a_stream_that_runs_gets_its_end(signals: tuple[int, ...]) -> None:
    grace = 60.0 if len(signals) == 2 else 1.0
    with serve("--grace", str(grace)) as server:
        fields = {"prompt": "The sea", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        thread, lines = stream_in_thread(server.url, fields)
        while len(lines) < 3:
            time.sleep(0.01)
        server.end(*signals, within=20.0)  # the grace and what is promised are 3 s; busy machines need more
        thread.join(TIME)
        assert server.process.returncode == 0
        assert lines[0] == "200"
        assert lines[-1] == "data: [DONE]"
        assert "shutting_down" in lines[-2] or '"finish_reason":"length"' in lines[-2]


def gauges(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", timeout=TIME).text
    return {
        name: float(value) for name, value in re.findall(r"^vllm:(num_requests_\w+){[^}]*} (\S+)$", text, re.MULTILINE)
    }


@pytest.mark.integration
def test_two_stream_one_is_swapped_three_wait_and_sigterm_ends_all() -> None:
    """The pool holds two of three sequences to their ends: one is swapped out, and the queue behind it waits."""
    grace = 1.0
    pool = (
        "--num-gpu-blocks-override",
        "70",
        "--max-num-seqs",
        "3",
        "--preemption-mode",
        "swap",
        "--swap-space",
        "0.1",
    )
    fields = {"prompt": "The sea " * 100, "max_tokens": 700, "ignore_eos": True, "stream": True}
    with serve(*pool, "--no-enable-prefix-caching", "--grace", str(grace)) as server:
        streams = [stream_in_thread(server.url, fields) for _ in range(3)]
        calls = [stream_in_thread(server.url, {**fields, "stream": i > 0}) for i in range(3)]
        end = time.monotonic() + TIME
        while (seen := gauges(server.url))["num_requests_swapped"] != 1 or seen["num_requests_running"] != 2:
            assert time.monotonic() < end, seen
        assert seen["num_requests_waiting"] >= 3
        children = psutil.Process(server.process.pid).children(recursive=True)
        begin = time.monotonic()
        server.end(signal.SIGTERM, within=20.0)
        print(f"ended {time.monotonic() - begin:.2f} s after SIGTERM, grace {grace} s")
        assert server.process.returncode == 0
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
        for thread, lines in [*streams, *calls]:
            thread.join(TIME)
            assert lines and (lines[-1] == "data: [DONE]" or "shutting_down" in lines[-1]), lines[-3:]


def test_a_port_that_is_taken_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-m", "minillm", "serve", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert port in done.stderr


def test_a_unix_socket_takes_the_place_of_a_dead_one_and_of_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for _ in range(2):  # the second time the first one's file is there still
        with listen(ServerConfig(uds=str(path))) as listener:
            assert address(listener) == f"unix:{path}"
            with pytest.raises(ConfigError, match=r"cannot be listened on: .*in use"):
                listen(ServerConfig(uds=str(path)))
    path.unlink()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="cannot be listened on"):
        listen(ServerConfig(uds=str(path)))
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["header_timeout", "body_timeout"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_times_in_which_nobody_could_send_anything(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: value})


def test_sizes_and_ranges() -> None:
    assert [parse_size(text) for text in ("8MiB", "512K", "1000", "2 mb", "1G")] == [
        8 << 20,
        512 << 10,
        1000,
        2 << 20,
        1 << 30,
    ]
    assert parse_range("-10:10") == (-10, 10)
    wrongs = {parse_size: ("8 apples", "", "-1"), parse_range: ("5", "a:b", "1:2:3")}
    for parse, wrong in ((parse, text) for parse, texts in wrongs.items() for text in texts):
        with pytest.raises(ConfigError, match="is not a"):
            parse(wrong)


@pytest.mark.parametrize(
    "option",
    [
        ("--priority-range", "5:1"),
        ("--max-body-size", "0"),
        ("--grace", "-1"),
        ("--port", "70000"),
        ("--max-waiting", "0"),
        ("--metrics-prefix", "other"),
        ("--host", "no.such.host.invalid"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_before_loading(option: tuple[str, str], capsys) -> None:
    from minillm.cli.app import run

    arguments = option if option[0] == "--port" else (*option, "--port", "0")
    assert run(["serve", "-m", "no-such-model", *arguments]) == 2
    assert option[0].lstrip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")
