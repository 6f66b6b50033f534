"""The built-in model behind the server: answers, structured output, tools, seeds, and mates that change nothing."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_fakes import RunningServer

from minillm import EngineConfig, Runtime
from minillm.server.config import ServerConfig
from minillm.server.metrics import EngineMetrics

pytestmark = pytest.mark.integration

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["name", "big"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    metrics = EngineMetrics()
    config = EngineConfig(MODEL, dtype="float32", max_num_seqs=8, num_gpu_blocks_override=256)
    with Runtime(config, observer=metrics) as runtime:
        running = RunningServer(runtime, ServerConfig(port=0), metrics)
        running.http.timeout = 120
        yield running
        running.close()


def test_chat_answers(server) -> None:
    answer = server.openai(timeout=120).chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_seeds_repeat_and_choices_differ(server) -> None:
    client = server.openai(timeout=120)
    options: Any = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 8,
        "temperature": 1.5,
        "seed": 5,
        "n": 2,
    }
    first, second = (client.completions.create(**options) for _ in range(2))
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    assert first.choices[0].text != first.choices[1].text
    chunks = list(client.completions.create(**options, stream=True))
    for choice in first.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text


def test_json_schema_holds(server) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    client = server.openai(timeout=120)
    options: Any = {"model": MODEL, "messages": MESSAGES, "response_format": form, "max_tokens": 60, "temperature": 0}
    answer = client.chat.completions.create(**options)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "big"}
    assert answer.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(**options, stream=True)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == answer.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}], ids=str)
def test_forced_tool_calls(server, choice: Any) -> None:
    client = server.openai(timeout=120)
    options: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 120}
    options |= {"parallel_tool_calls": False, "temperature": 0}
    answer = client.chat.completions.create(**options)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "look_up"
    assert set(json.loads(call.function.arguments)) == {"name", "big"}
    parts = [
        part
        for chunk in client.chat.completions.create(**options, stream=True)
        for one in chunk.choices
        for part in one.delta.tool_calls or []
    ]
    assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments


def test_penalties_do_not_depend_on_batch_mates(server) -> None:
    fields = {"prompt": "the the the cat", "max_tokens": 10, "temperature": 0, "repetition_penalty": 2.0}
    post = server.http.post
    alone = post("/v1/completions", json=fields).json()["choices"][0]["text"]
    mates = [{"prompt": "the dog " * n, "max_tokens": 12, "temperature": 0} for n in (1, 5, 9)]
    with ThreadPoolExecutor(5) as pool:
        bodies = [*mates, fields, mates[0], fields]
        answers = list(pool.map(lambda body: post("/v1/completions", json=body).json(), bodies))
    assert answers[3]["choices"][0]["text"] == answers[5]["choices"][0]["text"] == alone


def curl_commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    return [command for block in blocks for command in block.strip().split("\n\n") if command.startswith("curl ")]


@pytest.mark.parametrize("command", curl_commands(), ids=range(len(curl_commands())))
def test_curl_examples_of_the_readme(server, command: str) -> None:
    assert "http://127.0.0.1:8000" in command
    here = command.replace("http://127.0.0.1:8000", server.url).replace("curl ", "curl -sS --fail-with-body ", 1)
    done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    if '"stream": true' in command:
        assert done.stdout.endswith("data: [DONE]\n\n")
        assert '"usage":{"prompt_tokens"' in done.stdout
    elif "metrics" in command:
        assert "vllm:num_requests_running" in done.stdout
    else:
        assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0
    if "capital of France" in command:
        assert "Paris" in done.stdout


def test_the_readme_has_examples() -> None:
    assert len(curl_commands()) == 5
