"""`minillm chat` against a scripted runtime."""

from __future__ import annotations

import io
import sys

import pytest

from minillm.core.errors import PromptTooLongError


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def roles(messages: list[dict[str, str]]) -> list[str]:
    return [message["role"] for message in messages]


def test_each_turn_carries_the_conversation(cli, runtime, monkeypatch) -> None:
    say(monkeypatch, "one", "two", "/exit", "never")
    done = cli("chat", "--system", "Be brief.")
    assert (done.code, done.out) == (0, "Paris.\nParis.\n")
    assert roles(runtime.prompts[1]) == ["system", "user", "assistant", "user"]
    assert runtime.prompts[1][2]["content"] == "Paris."
    assert len(runtime.prompts) == 2


def test_reset_keeps_only_the_system_message(cli, runtime, monkeypatch) -> None:
    say(monkeypatch, "one", "/reset", "two")
    assert cli("chat", "--system", "Be brief.").code == 0
    assert roles(runtime.prompts[1]) == ["system", "user"]


def test_system_command_replaces_the_system_message(cli, runtime, monkeypatch) -> None:
    say(monkeypatch, "/system Speak French.", "one")
    cli("chat")
    assert runtime.prompts[0][0] == {"role": "system", "content": "Speak French."}


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(cli, runtime, monkeypatch) -> None:
    runtime.interrupt_at = 2
    say(monkeypatch, "one", "two")
    done = cli("chat")
    assert (done.code, done.out) == (0, "Paris\nParis.\n")
    assert runtime.prompts[1][1] == {"role": "assistant", "content": "Paris"}
    assert runtime.closed_streams == 2


def test_a_refused_turn_is_taken_back_and_the_conversation_goes_on(cli, runtime, monkeypatch) -> None:
    say(monkeypatch, "much too long", "/exit")
    runtime.error = PromptTooLongError(9000, None, 8192)
    done = cli("chat")
    assert done.code == 0 and len(done.errors) == 1 and "/reset" in done.errors[0]


def test_a_model_without_template_is_refused(cli, runtime, monkeypatch) -> None:
    runtime.tokenizer.chat_templates = {}
    done = cli("chat")
    assert done.code == 2 and "--chat-template" in done.errors[0]


def test_unknown_command_shows_help_and_asks_nothing(cli, runtime, monkeypatch) -> None:
    say(monkeypatch, "/what")
    assert "/reset" in cli("chat").err
    assert runtime.prompts == []
