"""Forms of outputs that take long to compile: they hold up each other, and nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from engine_fakes import EOS, WAIT, ScriptedRunner, eventually, letters, tokens_script
from server_fakes import RunningServer, serving

from minillm.core.structured_outputs import StructuredOutputs
from minillm.server import intake

pytest.importorskip("llguidance")

COMPLETIONS = "/v1/completions"
KNOWN = "a{3}"


class SlowCompiler:
    """Lets the server's compiler wait for a gate; which forms came to it."""

    def __init__(self, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler = server.runtime._inputs.grammars
        compile_now = compiler._compile
        self.gate = threading.Event()
        self.begun: list[str | None] = []

        def compile_later(spec: StructuredOutputs) -> object:
            self.begun.append(spec.regex)
            assert self.gate.wait(WAIT)
            return compile_now(spec)

        monkeypatch.setattr(compiler, "_compile", compile_later)


def formed(server: RunningServer, regex: str, **options: float) -> httpx.Response:
    fields = {"prompt": "abc", "max_tokens": 8, "guided_regex": regex}
    return httpx.post(server.url + COMPLETIONS, json=fields, **{"timeout": WAIT, **options})


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunningServer, SlowCompiler]]:
    with serving(ScriptedRunner(tokens_script(*letters("a" * 20), EOS))) as server:
        assert formed(server, KNOWN).status_code == 200
        compiler = SlowCompiler(server, monkeypatch)
        yield server, compiler
        compiler.gate.set()


def test_other_calls_go_on_while_forms_are_compiled(slow: tuple[RunningServer, SlowCompiler]) -> None:
    server, compiler = slow
    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(formed, server, f"a{{{n}}}") for n in range(4, 16)]
        eventually(lambda: len(compiler.begun) == intake.NUM_COMPILERS)
        eventually(lambda: server.state.num_calls == len(calls))
        many_entries = {"prompt": "abc", "max_tokens": 200, "logprobs": 20, "n": 3}
        many_prompts = {"prompt": ["abc"] * 20, "max_tokens": 2}
        for fields in (many_entries, many_prompts, {"prompt": "abc", "guided_regex": KNOWN}):
            assert server.http.post(COMPLETIONS, json=fields).status_code == 200
        assert not any(call.done() for call in calls)
        compiler.gate.set()
        for n, call in enumerate(calls, 4):
            assert call.result().json()["choices"][0]["text"] == "a" * min(n, 8)


def test_a_form_that_nobody_waits_for_is_not_compiled(slow: tuple[RunningServer, SlowCompiler]) -> None:
    server, compiler = slow
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(formed, server, f"a{{{n}}}") for n in (2, 5)]
        eventually(lambda: len(compiler.begun) == intake.NUM_COMPILERS)
        with pytest.raises(httpx.ReadTimeout):
            formed(server, "a{4}", timeout=0.3)
        compiler.gate.set()
        assert [call.result().status_code for call in calls] == [200, 200]
    eventually(lambda: server.state.num_calls == 0)
    assert "a{4}" not in compiler.begun


def test_too_many_are_told_to_come_again(
    slow: tuple[RunningServer, SlowCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, compiler = slow
    monkeypatch.setattr(intake, "MAX_COMPILING", 1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(formed, server, "a{2}")
        eventually(lambda: len(compiler.begun) == 1)
        second = formed(server, "a{5}")
        assert (second.status_code, second.headers["retry-after"]) == (429, "5")
        compiler.gate.set()
        assert first.result().status_code == 200


def test_the_end_waits_for_no_form_that_has_not_begun(slow: tuple[RunningServer, SlowCompiler]) -> None:
    server, compiler = slow
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(formed, server, f"a{{{n}}}") for n in range(4, 12)]
        eventually(lambda: server.state.num_calls == len(calls))
        server.call_in_loop(server.server.stop)
        server.call_in_loop(server.server.stop)
        eventually(lambda: not server.runtime.is_alive)
        compiler.gate.set()
        answers = [call.result() for call in calls]
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {(503, "shutting_down")}
    server.join()
    assert len(compiler.begun) == intake.NUM_COMPILERS
