"""What a hostile or unlucky caller does: it gets a typed error or the right result, and the engine goes on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_fakes import ScriptedRunner, Valve, idle_state, make_runtime

from minillm import LLM, Runtime, SamplingParams
from minillm.core.request import Request
from minillm.errors import ConfigError, EngineDeadError, InvalidParameterError, WouldDeadlockError

PARAMS = SamplingParams(max_tokens=4)
MESSAGES = [{"role": "user", "content": "hi"}]
HUGE = 10**400
"""An integer that no float holds."""


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with make_runtime() as runtime:
        yield runtime


def still_answers(runtime: Runtime) -> bool:
    """Whether a plain request works and nothing is left over after it."""
    tokens = runtime.submit("hello", PARAMS).result(10).outputs[0].token_ids
    return len(tokens) == 4 and idle_state(runtime._engine)[:4] == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"priority": HUGE},
        {"timeout": HUGE},
        {"timeout": float("nan")},
        {"chat_options": {"tools": []}},
        {"chat_options": "abc"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_odd_fields_of_a_request_are_refused(runtime: Runtime, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError):
        runtime.submit("hello", PARAMS, **options)
    assert still_answers(runtime)


@pytest.mark.parametrize(
    "options",
    [
        "abc",
        5,
        {1: 2},
        {"tokenize": False},
        {"messages": []},
        {"self": 1},
        {"chat_template": 5},
        {"chat_template_kwargs": 5},
    ],
    ids=str,
)
def test_odd_chat_options_are_refused(runtime: Runtime, options: Any) -> None:
    with pytest.raises(InvalidParameterError):
        runtime.submit(MESSAGES, PARAMS, chat_options=options)
    assert still_answers(runtime)


def test_a_mapping_prompt_with_keys_of_mixed_types_is_refused(runtime: Runtime) -> None:
    with pytest.raises(InvalidParameterError, match="exactly one of"):
        runtime.submit({1: "x", "a": "y"}, PARAMS)


@pytest.mark.parametrize(
    "values",
    [{"stop": ["\ud800"]}, {"max_tokens": 10**5000}, {"seed": 2**64}],
    ids=lambda values: next(iter(values)),
)
def test_sampling_values_that_no_engine_can_hold_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("ids", "fields"),
    [
        ([1.5], {}),
        (["a"], {}),
        ([True], {}),
        ([1], {"seed": "x"}),
        ([1], {"seed": -1}),
        ([1], {"seed": 2**64}),
        ([1], {"deadline": float("nan")}),
        ([1], {"deadline": "soon"}),
    ],
    ids=str,
)
def test_odd_prepared_requests_are_refused_before_they_reach_the_engine(
    runtime: Runtime, ids: list[Any], fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidParameterError):
        runtime.submit(Request("odd", ids, PARAMS, **fields))
    assert still_answers(runtime)


@pytest.mark.parametrize("grace", [float("nan"), "soon"])
def test_close_with_an_odd_grace_changes_nothing(runtime: Runtime, grace: Any) -> None:
    with pytest.raises(InvalidParameterError):
        runtime.close(grace=grace)
    assert still_answers(runtime)


def test_odd_weights_of_users_are_config_errors() -> None:
    for weights in ({"a": "x"}, {5: 1.0}, {"a": float("inf")}, {"a": float("nan")}):
        with pytest.raises(ConfigError, match="user_weights"):
            make_runtime(user_weights=weights)


def test_a_callback_that_calls_exit_does_not_end_the_engine(runtime: Runtime) -> None:
    def leave(_: object) -> None:
        raise SystemExit(3)

    future = runtime.submit("hello", PARAMS)
    future.add_done_callback(leave)
    future.result(10)
    assert still_answers(runtime)


def wait_for_future(runtime: Runtime) -> None:
    runtime.submit("again", PARAMS).result()


def wait_for_error(runtime: Runtime) -> None:
    runtime.submit("again", PARAMS).exception()


def read_stream(runtime: Runtime) -> None:
    list(runtime.stream("again", PARAMS))


def generate(runtime: Runtime) -> None:
    LLM(runtime=runtime).generate("again", PARAMS)


@pytest.mark.parametrize("wait", [wait_for_future, wait_for_error, read_stream, generate])
def test_waiting_for_the_engine_in_its_own_thread_is_refused(runtime: Runtime, wait: Callable[[Runtime], None]) -> None:
    gate = threading.Event()
    seen: list[BaseException] = []

    def callback(_: object) -> None:
        try:
            wait(runtime)
        except BaseException as error:
            seen.append(error)
        gate.set()

    runtime._engine.runner.gate = valve = Valve(0)  # type: ignore[attr-defined]
    future = runtime.submit("hello", PARAMS)
    future.add_done_callback(callback)
    valve.open()
    assert gate.wait(10)
    assert [type(error) for error in seen] == [WouldDeadlockError]
    assert still_answers(runtime)


def test_the_result_of_an_ended_request_may_be_read_in_a_callback(runtime: Runtime) -> None:
    texts: list[str] = []
    future = runtime.submit("hello", PARAMS)
    future.add_done_callback(lambda done: texts.append(done.result().outputs[0].text))
    text = future.result(10).outputs[0].text
    assert still_answers(runtime) and texts == [text]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_and_its_parent_served(runtime: Runtime) -> None:
    runtime.submit("hello", PARAMS).result(10)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            runtime.submit("hello", PARAMS)
        except EngineDeadError as error:
            code = 0 if "forked" in str(error) else 2
        runtime.stats()
        runtime.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert still_answers(runtime)


def test_several_readers_of_one_asynchronous_stream_all_end() -> None:
    valve = Valve(2)

    async def read() -> list[list[int]]:
        with make_runtime(ScriptedRunner(gate=valve)) as runtime:
            stream = runtime.astream("hello", SamplingParams(max_tokens=6))

            async def reader() -> list[int]:
                return [event.index async for event in stream]

            readers = [asyncio.create_task(reader()) for _ in range(3)]
            await asyncio.sleep(0.05)  # all of them wait
            valve.open()
            return await asyncio.wait_for(asyncio.gather(*readers), 10)

    assert sorted(index for indices in asyncio.run(read()) for index in indices) == list(range(6))


def test_several_threads_that_read_one_stream_all_end() -> None:
    valve = Valve(2)
    with make_runtime(ScriptedRunner(gate=valve)) as runtime:
        stream = runtime.stream("hello", SamplingParams(max_tokens=6))
        seen: list[int] = []
        threads = [
            threading.Thread(target=lambda: seen.extend(event.index for event in stream), daemon=True) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        valve.open()
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)
        assert sorted(seen) == list(range(6))
