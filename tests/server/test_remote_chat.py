"""`minillm chat --url`: a conversation with a running server."""

from __future__ import annotations

import io
import socket
import sys
import threading

import pytest
from engine_fakes import ScriptedRunner
from server_fakes import RunningServer, serving

from minillm.cli.app import run
from minillm.cli.remote import RemoteModel
from minillm.core.errors import ConfigError, RequestError


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_two_turns_then_the_end(server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    say(monkeypatch, "one", "two", "/exit")
    assert run(["chat", "--url", server.url, "--max-tokens", "5", "--temperature", "0"]) == 0
    done = capsys.readouterr()
    answers = done.out.splitlines()
    assert len(answers) >= 2 and all(answers)
    assert done.err.count("time to first token") == 2 and "5 generated" in done.err


def test_what_is_written_is_the_answer_of_the_server(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    fields = {"temperature": 0, "max_tokens": 6}
    pieces: list[str] = []
    RemoteModel(server.url + "/v1").stream(messages, fields, pieces.append)
    whole = server.openai().chat.completions.create(model=RemoteModel(server.url).model, messages=messages, **fields)
    assert "".join(pieces) == whole.choices[0].message.content


def test_refusals_are_one_line_and_the_conversation_goes_on(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    say(monkeypatch, "x" * 5000, "/reset", "short", "/exit")
    assert run(["chat", "--url", server.url, "--max-tokens", "3"]) == 0
    done = capsys.readouterr()
    errors = [line for line in done.err.splitlines() if "HTTP 400" in line]
    assert len(errors) == 1 and "/reset" in errors[0]
    assert "3 generated" in done.err


def test_keys_models_and_addresses_that_do_not_fit() -> None:
    with serving(config={"api_keys": ("sesame",)}) as server:
        with pytest.raises(ConfigError, match="HTTP 401"):
            RemoteModel(server.url)
        name = RemoteModel(server.url, api_key="sesame").model
        with pytest.raises(ConfigError, match=f"model='other'.*{name}"):
            RemoteModel(server.url, "other", "sesame")
        assert run(["chat", "--url", server.url, "--max-num-seqs", "4"]) == 2
    with pytest.raises(ConfigError, match="does not answer"):
        RemoteModel("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="must start with"):
        RemoteModel("ftp://host")


def test_a_request_that_fails_in_the_middle_says_so() -> None:
    runner = ScriptedRunner()
    with serving(runner) as server:
        remote = RemoteModel(server.url)
        pieces: list[str] = []

        def write(text: str) -> None:
            pieces.append(text)
            server.runtime.close(0.0, 5.0)

        with pytest.raises(RequestError):
            remote.stream([{"role": "user", "content": "hello"}], {"max_tokens": 50, "temperature": 0}, write)
        assert pieces


@pytest.mark.parametrize(
    "broken",
    [
        b"5\r\ndata:",
        b'1d\r\ndata: {"choices": [1, 2, 3]}\n\n\r\n0\r\n\r\n',
        b'19\r\ndata: {"error": "wrong"}\n\n\r\n0\r\n\r\n',
    ],
    ids=["cut in a chunk", "not of the API", "an error that is text"],
)
def test_a_server_that_answers_nonsense_is_a_refusal(broken: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            models = b'{"data": [{"id": "m"}]}'
            head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
            for reply in (
                b"%scontent-length: %d\r\n\r\n%s" % (head, len(models), models),
                head + b"transfer-encoding: chunked\r\n\r\n" + broken,
            ):
                connection, _ = listener.accept()
                connection.recv(65536)
                connection.sendall(reply)
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        remote = RemoteModel(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(RequestError):
            remote.stream([{"role": "user", "content": "hello"}], {}, print)
