"""`minillm bench serve`: what it sends, and what it makes of what comes back."""

from __future__ import annotations

import csv
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_fakes import ScriptedRunner, Valve
from server_fakes import RunningServer, serving

from minillm.bench import serve
from minillm.bench.load import Answer, Goals, Target, good, run_load, served_models
from minillm.bench.serve import GENERATORS, PROGRAM, Options, make_workload, measure, own_server
from minillm.bench.workloads import fixed, multi_turn, uniform
from minillm.cli.app import run
from minillm.core.errors import ConfigError

VOCAB = 90


def target(server: RunningServer, **options: object) -> Target:
    return Target(**{"url": server.url, "model": served_models(server.url)[0], "vocab_size": VOCAB, **options})


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("concurrency", [None, 3])
def test_every_request_is_answered_in_full(server: RunningServer, endpoint: str, concurrency: int | None) -> None:
    load = uniform(12, (3, 9), (2, 7), seed=5)
    answers, seconds = run_load(target(server, endpoint=endpoint), load, concurrency=concurrency)
    assert [answer.error for answer in answers] == [""] * 12
    assert [answer.output_tokens for answer in answers] == [request.max_tokens for request in load.requests]
    if endpoint == "completions":
        assert [answer.prompt_tokens for answer in answers] == load.prompt_tokens()
    assert all(0 <= answer.due <= answer.first_token <= answer.end <= seconds for answer in answers)
    assert all(sum(answer.gaps) <= answer.end - answer.first_token + 1e-6 for answer in answers)


def test_the_open_loop_keeps_the_times_of_the_workload_whatever_the_server_does() -> None:
    load = fixed(6, 4, 3).with_arrivals(rate=40, cv=0)
    with serving(ScriptedRunner(gate=Valve(0)), max_num_seqs=1) as server:
        slow = Target(url=server.url, model="x", vocab_size=VOCAB, timeout=1.0)
        answers, _ = run_load(slow, load)
    assert [answer.due for answer in answers] == pytest.approx([i / 40 for i in range(1, 7)])
    assert all("404" in answer.error or "Timeout" in answer.error for answer in answers)


def test_the_closed_loop_never_has_more_at_a_time() -> None:
    with serving() as server:
        seen = []

        def look(done: int, total: int) -> None:
            seen.append(server.state.num_calls)

        run_load(target(server), fixed(20, 4, 6), concurrency=2, progress=look)
    assert max(seen) <= 2 and len(seen) == 20


def test_refusals_and_broken_streams_are_errors_of_their_request_alone(server: RunningServer) -> None:
    load = fixed(3, 4, 4)
    bad = target(server, extra={"temperature": -1})
    answers, _ = run_load(bad, load)
    assert all("HTTP 400" in answer.error and "temperature" in answer.error for answer in answers)
    answers, _ = run_load(target(server), load)
    assert not any(answer.error for answer in answers)


@contextmanager
def answering(*events: bytes) -> Iterator[str]:
    """The URL of a server that answers one request with these events and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.recv(65536)
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
            connection.sendall(head + b"".join(b"data: " + event + b"\n\n" for event in events))
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ((b'{"choices": [{"text": "a"}]}',), "[DONE]"),
        ((b'{"choices": [{"text": "a"}], "usage": {"total_tokens": 3}}', b"[DONE]"), "prompt_tokens"),
        ((b"[1, 2]", b"[DONE]"), "Error"),
        ((b'{"choices": ["text"]}', b"[DONE]"), "Error"),
        ((b"half of {", b"[DONE]"), "JSON"),
    ],
    ids=["no end", "half a usage", "a list", "a choice that is text", "no JSON"],
)
def test_a_stream_of_another_form_is_an_error_of_its_request(events: tuple[bytes, ...], says: str) -> None:
    with answering(*events) as url:
        answers, _ = run_load(Target(url=url, model="m"), fixed(1, 4, 4))
    assert says in answers[0].error


def test_an_address_may_end_in_the_apis_own_path(server: RunningServer) -> None:
    answers, _ = run_load(target(server, url=f"{server.url}/v1/"), fixed(1, 4, 4))
    assert not answers[0].error
    assert served_models(f"{server.url}/v1") == served_models(server.url)


def test_a_server_that_hangs_while_it_starts_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "START_TIMEOUT", 0.3)
    monkeypatch.setattr(serve, "SERVER", (sys.executable, "-c", "import time; time.sleep(60)"))
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="did not start"), own_server("any", "cpu", "auto", lambda text: None):
        pass
    assert time.monotonic() - begun < 15


def test_good_requests_keep_all_goals() -> None:
    quick = Answer(0, "", due=1.0, first_token=1.1, end=1.5, output_tokens=5)
    slow = Answer(1, "", due=1.0, first_token=1.4, end=1.5, output_tokens=2)
    one = Answer(2, "", due=1.0, first_token=1.1, end=1.1, output_tokens=1)
    failed = Answer(3, "", due=1.0, error="HTTP 500")
    answers = [quick, slow, one, failed]
    assert good(answers, Goals()) == 3
    assert good(answers, Goals(ttft_ms=200)) == 2
    assert good(answers, Goals(tpot_ms=99.0)) == 1 and math.isnan(one.tpot)
    assert good(answers, Goals(latency_ms=50)) == 0


@pytest.mark.parametrize("name", GENERATORS)
def test_every_workload_is_the_same_each_time(name: str) -> None:
    options = Options(workload=name, requests=20, prompt=40, output=8, rate=50.0)
    first, again = make_workload(options), make_workload(options)
    assert first == again and len(first) == 20
    gaps = first.duration / 20
    assert 0.005 < gaps < 0.08  # a mean of 1/50 s


def test_options_that_contradict_or_name_nothing() -> None:
    with pytest.raises(ConfigError, match="concurrency=2 and rate=5"):
        Options(concurrency=2, rate=5.0)
    with pytest.raises(ConfigError, match="workload='what'"):
        make_workload(Options(workload="what"))
    with pytest.raises(ConfigError, match="http://"):
        Target(url="localhost:8000", model="m")
    with pytest.raises(ConfigError, match="follow"):
        run_load(
            Target(url="http://127.0.0.1:9", model="m"), multi_turn(1, turns=2, system=0, message=(2, 2), output=(1, 1))
        )
    with pytest.raises(ConfigError, match="does not answer"):
        served_models("http://127.0.0.1:9", timeout=1.0)


def test_rows_and_their_section(server: RunningServer, tmp_path: Path) -> None:
    goals = Goals(ttft_ms=60_000, tpot_ms=60_000)
    options = Options(requests=10, prompt=8, output=4, concurrency=4, goals=goals)
    row = measure(target(server), options, "here", lambda text: None)
    assert (row["completed"], row["errors"], row["good"]) == (10, 0, 10)
    assert row["goodput_per_s"] == pytest.approx(10 / row["seconds"], rel=0.01)
    assert row["output_tok_per_s"] == pytest.approx(row["output_tokens"] / row["seconds"], rel=0.01)
    assert 0 < row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"] <= row["e2el_p99_ms"]
    text = [{key: str(value) for key, value in row.items()}]
    rates, latencies = PROGRAM.tables(text).values()
    assert rates[1][0][1] == "10" and len(latencies[1]) == 4


def test_the_command_loads_a_server_and_redraws(server: RunningServer, tmp_path: Path, capsys) -> None:
    csv_path = tmp_path / "serve.csv"
    arguments = ["bench", "serve", "--url", server.url, "--requests", "8", "--prompt", "8", "--output-tokens", "4"]
    assert run([*arguments, "--vocab-size", str(VOCAB), "--concurrency", "4", "--output", str(csv_path)]) == 0
    rows = list(csv.DictReader(csv_path.open()))
    assert rows[0]["completed"] == "8" and csv_path.with_suffix(".png").stat().st_size > 5_000
    csv_path.with_suffix(".png").unlink()
    assert run(["bench", "serve", "--from-csv", str(csv_path)]) == 0
    assert csv_path.with_suffix(".png").exists()
    assert "time to first token" in capsys.readouterr().out
