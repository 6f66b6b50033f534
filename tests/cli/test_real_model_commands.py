"""The commands in processes of their own, on the built-in model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from minillm.bench import cpu_bench

pytestmark = pytest.mark.integration

QUESTION = "What is the capital of France?"
COMMAND = [sys.executable, "-m", "minillm"]


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=240)


def test_generate_says_paris_and_reports_its_speed() -> None:
    done = run("generate", QUESTION, "--temperature", "0", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "tokens/s" in done.stderr and "time to first token" in done.stderr


def test_json_and_stream_give_the_same_text() -> None:
    arguments = ("generate", QUESTION, "--seed", "3", "--max-tokens", "12", "--dtype", "float32")
    answer = json.loads(run(*arguments, "--json").stdout)
    assert run(*arguments).stdout.rstrip("\n") == answer["choices"][0]["text"].rstrip("\n")
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"])
    assert answer["metrics"]["time_to_first_token"] > 0


def test_chat_answers_two_turns() -> None:
    done = run(
        "chat",
        "--temperature",
        "0",
        "--max-tokens",
        "12",
        "--dtype",
        "float32",
        stdin=f"{QUESTION}\nAnd of Italy?\n/exit\n",
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert "Paris" in first and second


def test_ctrl_c_during_an_answer_exits_130_without_traceback() -> None:
    command = [*COMMAND, "generate", "Tell me a long story.", "--max-tokens", "4000", "--ignore-eos"]

    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    def heed() -> object:
        return signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed) as process:
        assert process.stdout is not None and process.stderr is not None
        assert os.read(process.stdout.fileno(), 1)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=60)
        error = process.stderr.read().decode()
    assert code == 130
    assert "Traceback" not in error
    assert time.monotonic() - start < 30


def test_generating_for_64_requests_stays_under_2_gib() -> None:
    child = cpu_bench.generate_many(requests=64, new_tokens=16)
    assert int(child.stdout.split()[-1]) == 64 * 16
    assert child.peak_bytes < 2 << 30


def test_self_check_finds_every_way_equal() -> None:
    done = run("doctor", "--self-check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("8 of 8") == 7
