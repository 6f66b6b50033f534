"""A runtime that answers from a script, so that the command line is tested without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from minillm.cli import app, chat, generate
from minillm.core.errors import MiniLLMError
from minillm.core.sampling_params import SamplingParams
from minillm.engine.config import EngineConfig
from minillm.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenEvent


class ScriptedStream:
    """Yields the answer's pieces; counts closing; may be interrupted before piece `interrupt_at`."""

    request_id = "r0"

    def __init__(self, runtime: ScriptedRuntime, params: SamplingParams) -> None:
        self._runtime = runtime
        self._params = params
        self.output: RequestOutput | None = None

    def __iter__(self) -> Iterator[TokenEvent]:
        pieces = self._runtime.pieces
        for index, piece in enumerate(pieces):
            if index == self._runtime.interrupt_at:
                self._runtime.interrupt_at = None
                raise KeyboardInterrupt
            last = index == len(pieces) - 1
            yield TokenEvent("r0", 0, index, 100 + index, piece, finish_reason="stop" if last else None)
        self.output = self._runtime.output(self._params)

    def __enter__(self) -> ScriptedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.closed_streams += 1


class ScriptedRuntime:
    """The parts of Runtime that the command line uses; records what it was asked."""

    def __init__(self) -> None:
        self.pieces = ["Par", "is", "."]
        self.interrupt_at: int | None = None
        self.error: MiniLLMError | None = None
        self.config = EngineConfig()
        self.tokenizer = SimpleNamespace(chat_templates={"default": "{{ messages }}"})
        self.defaults = SamplingParams()
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.closed_streams = 0
        self.closed = False

    def open(self, engine: dict[str, Any]) -> ScriptedRuntime:
        self.config = EngineConfig(**engine)
        return self

    def __enter__(self) -> ScriptedRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def default_sampling_params(self) -> SamplingParams:
        return self.defaults

    def _record(self, prompt: Any, params: SamplingParams) -> None:
        if self.error is not None:
            raise self.error
        self.prompts.append(prompt)
        self.params.append(params)

    def stream(self, prompt: Any, params: SamplingParams) -> ScriptedStream:
        self._record(prompt, params)
        return ScriptedStream(self, params)

    def submit(self, prompt: Any, params: SamplingParams) -> Future[RequestOutput]:
        self._record(prompt, params)
        future: Future[RequestOutput] = Future()
        future.set_result(self.output(params))
        return future

    def output(self, params: SamplingParams) -> RequestOutput:
        logprobs = [{7: Logprob(-0.5, 1, "Par")}] if params.logprobs is not None else None
        choice = CompletionOutput(0, "".join(self.pieces), [100, 101, 102], "stop", logprobs=logprobs)
        metrics = RequestMetrics(1.0, 1.5, 2.0, 4.0, num_preemptions=3, num_cached_tokens=16)
        outputs = [replace(choice, index=index) for index in range(params.n)]
        return RequestOutput("r0", None, [1, 2, 3, 4], outputs, metrics=metrics)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> ScriptedRuntime:
    scripted = ScriptedRuntime()
    monkeypatch.setattr(generate, "open_runtime", scripted.open)
    monkeypatch.setattr(chat, "open_runtime", scripted.open)
    return scripted


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Run a command line in this process: code, out, err and the lines of err that are errors."""

    def call(*arguments: str) -> SimpleNamespace:
        code = app.run(arguments)
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if line.startswith("minillm: error:")]
        return SimpleNamespace(code=code, out=captured.out, err=captured.err, errors=errors)

    return call
