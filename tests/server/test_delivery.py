"""The way of a token out of the engine: one wake-up a step for all streams, one write a step for each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_fakes import ScriptedRunner, Valve, eventually, wait_idle
from server_fakes import events_of, serving

from minillm.engine.runtime import Runtime
from minillm.server.completions import Completions
from minillm.server.delivery import Collector, Mailbox, StreamSink
from minillm.server.errors import ClientGone
from minillm.server.logprobs import CompletionLogprobs

STREAMS, TOKENS = 16, 40


def test_one_wake_up_and_one_write_per_stream_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    valve = Valve(0)
    sizes: list[int] = []
    flush = Mailbox.flush

    def counted(self: Mailbox) -> None:
        if self._batch:
            sizes.append(len(self._batch))
        flush(self)

    monkeypatch.setattr(Mailbox, "flush", counted)
    pool = {"num_blocks": 1024, "max_num_seqs": STREAMS, "max_num_batched_tokens": 256}
    with serving(ScriptedRunner(gate=valve), **pool) as server, ThreadPoolExecutor(STREAMS) as threads:
        fields = {"prompt": "abc", "max_tokens": TOKENS, "temperature": 0, "stream": True}
        calls = [threads.submit(events_of, server, "/v1/completions", **fields) for _ in range(STREAMS)]
        eventually(lambda: server.runtime._thread.num_live == STREAMS, "all are there")
        valve.open()
        for call in calls:
            assert len(call.result()) == TOKENS + 1
        wait_idle(server.runtime)
        steps = server.runtime.stats().counters.steps
    assert len(sizes) <= steps, "one wake-up a step, and none for steps that brought nothing"
    assert max(sizes) >= STREAMS


def test_a_collector_wakes_its_reader_and_knows_a_hang_up() -> None:
    async def run() -> None:
        collector = Collector()
        reader = asyncio.create_task(collector.take())
        await asyncio.sleep(0)
        collector.put(0, [])
        collector.put(1, RuntimeError("x"))
        assert [index for index, _ in await reader] == [0, 1]
        reader = asyncio.create_task(collector.take())
        await asyncio.sleep(0)
        collector.hang_up()
        with pytest.raises(ClientGone):
            await reader
        collector.put(0, [])
        with pytest.raises(ClientGone):
            await collector.take()

    asyncio.run(run())


def test_news_for_a_loop_that_is_gone_is_dropped() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    sink = StreamSink(mailbox, Collector(), 0, True)
    loop.close()
    sink.on_error(RuntimeError("late"))
    thread = threading.Thread(target=mailbox.flush)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


@pytest.fixture
def threads_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, set[bool]]]:
    """Makes a call; for each kind of long work, whether it was done on the event loop."""

    def call(**fields: object) -> dict[str, set[bool]]:
        seen: dict[str, set[bool]] = {"check": set(), "submit": set(), "write": set()}
        params, attach, build = Completions.params, Runtime.attach, CompletionLogprobs.build

        def noted(kind: str, function: Callable[..., object]) -> Callable[..., object]:
            def run(*arguments: object) -> object:
                seen[kind].add(threading.current_thread() is server._thread)
                return function(*arguments)

            return run

        with monkeypatch.context() as patch, serving(num_blocks=1024, block_size=16, max_model_len=8192) as server:
            patch.setattr(Completions, "params", noted("check", params))
            patch.setattr(Runtime, "attach", noted("submit", attach))
            patch.setattr(CompletionLogprobs, "build", noted("write", build))
            answer = server.http.post("/v1/completions", json={"max_tokens": 2, **fields})
            assert answer.status_code == 200, answer.text
        return seen

    return call


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_long_work_is_done_off_the_event_loop(threads_of, stream: bool) -> None:
    fields = {"logprobs": 1, "stream": stream}
    on, off = {True}, {False}
    echo = {**fields, "echo": True}
    assert threads_of(prompt="a" * 100, **echo) == {"check": on, "submit": on, "write": on}
    assert threads_of(prompt="a" * 1500, **echo) == {"check": on, "submit": on, "write": off}
    assert threads_of(prompt=["a"] * 9, **fields) == {"check": on, "submit": off, "write": on}
    assert threads_of(prompt="a", metadata="x" * 9000, **fields) == {"check": off, "submit": off, "write": on}
