"""The way of a token out of the engine: one wake-up a step for all streams, one write a step for each."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_fakes import ScriptedRunner, Valve, eventually, wait_idle
from server_fakes import events_of, serving

from minillm.server.delivery import Collector, Mailbox, StreamSink
from minillm.server.errors import ClientGone

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
