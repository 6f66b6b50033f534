"""The runtime: futures and streams, with callers in threads and event loops."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from engine_fakes import (
    GREEDY,
    LONG,
    WAIT,
    ScriptedRunner,
    Valve,
    check_events,
    eventually,
    letters,
    make_runtime,
    wait_idle,
)

from minillm.core.errors import (
    DuplicateRequestError,
    EmptyPromptError,
    EngineDeadError,
    InvalidParameterError,
    PromptTooLongError,
)
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.engine.runtime import Runtime


class TestFutures:
    def test_result_is_the_output_and_prompt_is_the_text(self) -> None:
        with make_runtime() as runtime:
            future = runtime.submit("abc", GREEDY)
            output = future.result(timeout=WAIT)
            assert output.request_id == future.request_id
            assert output.prompt == "abc"
            assert output.prompt_token_ids == letters("abc")
            assert output.outputs[0].finish_reason == "length"
            assert len(output.outputs[0].token_ids) == 8

    def test_every_kind_of_prompt(self) -> None:
        with make_runtime() as runtime:
            ids = letters("abc")
            texts = {
                runtime.submit(prompt, GREEDY).result(WAIT).outputs[0].text
                for prompt in ("abc", ids, tuple(ids), {"prompt": "abc"}, {"prompt_token_ids": ids, "cache_salt": "s"})
            }
            assert len(texts) == 1
            chat = runtime.submit([{"role": "user", "content": "hi"}], GREEDY).result(WAIT)
            assert chat.prompt is None
            assert runtime.tokenizer.decode(chat.prompt_token_ids, False) == "<turn>user:hi<end><turn>assistant:"
            options = {"add_generation_prompt": False}
            bare = runtime.submit([{"role": "user", "content": "hi"}], GREEDY, chat_options=options).result(WAIT)
            assert runtime.tokenizer.decode(bare.prompt_token_ids, False) == "<turn>user:hi<end>"

    def test_prepared_request_is_taken_once_and_keeps_its_fields(self) -> None:
        with make_runtime() as runtime:
            request = runtime.prepare("abc", GREEDY, priority=3, user="u", request_id="mine")
            assert runtime.stats().counters.submitted == 0
            future = runtime.submit(request)
            assert future.request_id == "mine"
            assert future.result(WAIT).outputs[0].text == runtime.submit("abc", GREEDY).result(WAIT).outputs[0].text
            with pytest.raises(InvalidParameterError, match="submitted before"):
                runtime.submit(request)
            own = Request("own", letters("abc"), GREEDY, arrival_time=-1e9)
            output = runtime.submit(own).result(WAIT)
            assert output.metrics.latency is not None
            assert output.metrics.latency < WAIT
            with pytest.raises(InvalidParameterError, match="give no others"):
                runtime.submit(Request("other", letters("abc"), GREEDY), priority=2)
            with pytest.raises(InvalidParameterError, match="prompt=-3"):
                runtime.submit(Request("bad", [-3], GREEDY))

    def test_model_defaults_hold_where_no_parameters_are_given(self) -> None:
        defaults = SamplingParams(temperature=0, max_tokens=3)
        with make_runtime(default_params=defaults) as runtime:
            assert runtime.default_sampling_params() == defaults
            assert len(runtime.submit("abc").result(WAIT).outputs[0].token_ids) == 3
            assert len(runtime.submit("abc", SamplingParams()).result(WAIT).outputs[0].token_ids) == 16

    def test_a_limit_from_the_model_is_cut_by_the_context_and_a_given_one_is_refused(self) -> None:
        defaults = SamplingParams(temperature=0, max_tokens=200)
        with make_runtime(default_params=defaults, num_blocks=10) as runtime:
            output = runtime.submit("abcd").result(WAIT)
            assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (36, "length")
            with pytest.raises(PromptTooLongError):
                runtime.submit("abcd", defaults)

    def test_order_of_priorities(self) -> None:
        order: list[str] = []
        gate = threading.Event()
        with make_runtime(ScriptedRunner(gate=gate), max_num_seqs=1) as runtime:
            first = runtime.submit("abc", GREEDY)
            futures = {level: runtime.submit("abc", GREEDY, priority=level) for level in (5, 1, 3)}
            for level, future in futures.items():
                future.add_done_callback(lambda _, level=level: order.append(level))
            gate.set()
            wait([first, *futures.values()], WAIT)
            assert order == [1, 3, 5]

    def test_callbacks_may_use_the_runtime(self) -> None:
        with make_runtime() as runtime:
            second: list = []
            done = threading.Event()

            def chain(future):
                second.append(runtime.submit("abcd", GREEDY, request_id=future.request_id))
                runtime.reset_prefix_cache()
                runtime.stats()
                done.set()

            runtime.submit("abc", GREEDY).add_done_callback(chain)
            assert done.wait(WAIT)
            assert second[0].result(WAIT).outputs[0].finish_reason == "length"

    def test_submit_many_is_all_or_nothing(self) -> None:
        with make_runtime() as runtime:
            requests = [{"prompt": prompt, "sampling_params": GREEDY} for prompt in ("ok", "", "ok")]
            with pytest.raises(EmptyPromptError):
                runtime.submit_many(requests)
            with pytest.raises(DuplicateRequestError):
                runtime.submit_many([{"prompt": "a", "request_id": "x"}, {"prompt": "b", "request_id": "x"}])
            assert runtime._thread.num_live == 0
            assert runtime.stats().counters.submitted == 0
            assert runtime.submit("abc", GREEDY, request_id="x").result(WAIT).finished


class TestStreams:
    def test_stream_equals_the_output(self) -> None:
        with make_runtime() as runtime:
            params = SamplingParams(seed=1, n=3, max_tokens=9, stop=["e"], logprobs=2)
            whole = runtime.submit("abc", params).result(WAIT)
            stream = runtime.stream("abc", params)
            events = list(stream)
            assert stream.output is not None
            assert stream.output.outputs == whole.outputs
            check_events(events, whole)
            assert {event.request_id for event in events} == {stream.request_id}
            assert next(stream, None) is None

    def test_stream_is_submitted_when_it_is_called(self) -> None:
        with make_runtime() as runtime:
            stream = runtime.stream("abc", GREEDY)
            eventually(lambda: stream.output is not None, "the end of a stream nobody reads")
            assert len(list(stream)) == 8
            with pytest.raises(EmptyPromptError):
                runtime.stream("", GREEDY)
            with pytest.raises(InvalidParameterError):
                runtime.stream([10**6], GREEDY)

    def test_prompt_logprobs_are_there_with_the_first_event(self) -> None:
        params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
        with make_runtime(max_num_batched_tokens=2, max_num_seqs=1) as runtime:
            stream = runtime.stream("abcdef", params)
            next(stream)
            assert stream.prompt_logprobs is not None
            assert len(stream.prompt_logprobs) == 6

    def test_scoring_a_prompt_gives_one_last_event_without_a_token(self) -> None:
        params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1)
        with make_runtime() as runtime:
            (event,) = runtime.stream("abcdef", params)
            assert (event.token_id, event.text, event.finish_reason) == (None, "", "length")

    def test_close_cancels_and_ends_the_iteration(self, valved) -> None:
        runtime, valve = valved
        before = wait_idle(runtime)
        stream = runtime.stream("abc", LONG)
        next(stream)
        stream.close()
        stream.close()
        assert list(stream) == []
        valve.open()
        assert wait_idle(runtime) == before
        assert runtime.stats().counters.cancelled == 1

    def test_close_from_another_thread_releases_a_waiting_reader(self, gated) -> None:
        runtime, runner, _ = gated
        stream = runtime.stream("abc", LONG)
        with ThreadPoolExecutor() as pool:
            reader = pool.submit(lambda: list(stream))
            assert runner.entered.wait(WAIT)
            stream.close()
            assert reader.result(WAIT) == []

    def test_leaving_the_loop_cancels(self, valved) -> None:
        runtime, valve = valved
        before = wait_idle(runtime)
        for event in runtime.stream("abc", LONG):
            if event.index == 2:
                break
        valve.allow(20)
        assert wait_idle(runtime) == before
        with runtime.stream("abc", LONG) as stream:
            next(stream)
        valve.open()
        assert wait_idle(runtime) == before
        assert runtime.stats().counters.cancelled == 2

    @pytest.mark.parametrize("overlap", [False, True])
    def test_300_abandoned_streams_leave_nothing_behind(self, overlap: bool) -> None:
        """B01."""
        valve = Valve()
        runner = ScriptedRunner(gate=valve)
        with make_runtime(runner, num_blocks=128, num_swap_blocks=16, overlap=overlap) as runtime:
            runtime.submit("abc", GREEDY).result(WAIT)
            before = wait_idle(runtime)
            for i in range(300):
                valve.allow(20)
                stream = runtime.stream("a" * 50, SamplingParams(seed=i, max_tokens=200, n=1 + i % 3))
                for _ in range(3):
                    next(stream)
                if i % 3 == 0:
                    stream.close()
                elif i % 3 == 1:
                    runtime.cancel(stream.request_id)
                del stream
            valve.open()
            assert wait_idle(runtime) == before
            assert runtime.stats().counters.cancelled >= 300
            assert runtime.submit("abc", GREEDY).result(WAIT).outputs[0].finish_reason == "length"
            assert wait_idle(runtime) == before
            assert runtime._engine.num_invariant_violations == 0
            assert runtime._thread._by_id == {}

    def test_a_slow_reader_holds_up_nobody(self) -> None:
        with make_runtime() as runtime:
            slow = runtime.stream("abc", LONG)
            assert len(runtime.submit("abc", LONG).result(WAIT).outputs[0].token_ids) == 200
            events = list(slow)
            assert len(events) == 200
            assert events[-1].finish_reason == "length"


class TestAsync:
    def test_astream_equals_stream(self) -> None:
        async def read(runtime: Runtime) -> list:
            return [event async for event in runtime.astream("abc", LONG)]

        with make_runtime() as runtime:
            events = asyncio.run(read(runtime))
            plain = list(runtime.stream("abc", LONG))
            assert [event[1:] for event in events] == [event[1:] for event in plain]

    def test_many_streams_in_one_loop_and_futures_beside_them(self) -> None:
        async def read(runtime: Runtime, i: int) -> str:
            return "".join([event.text async for event in runtime.astream("a" * (1 + i % 7), GREEDY)])

        async def main(runtime: Runtime) -> None:
            future = asyncio.wrap_future(runtime.submit("abc", GREEDY))
            texts = await asyncio.gather(*(read(runtime, i) for i in range(40)))
            for i, text in enumerate(texts):
                assert text == texts[i % 7]
            assert (await future).outputs[0].finish_reason == "length"

        with make_runtime() as runtime:
            asyncio.run(asyncio.wait_for(main(runtime), WAIT))

    def test_abandoning_and_closing_cancel(self, valved) -> None:
        async def main() -> None:
            async for event in runtime.astream("abc", LONG):
                if event.index == 2:
                    break
            valve.allow(20)
            stream = runtime.astream("abc", LONG)
            await stream.__anext__()
            await stream.aclose()
            assert [event async for event in stream] == []
            valve.allow(20)
            async with runtime.astream("abc", LONG) as stream:
                await stream.__anext__()
            task = asyncio.ensure_future(asyncio.wrap_future(runtime.submit("abc", LONG)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        runtime, valve = valved
        before = wait_idle(runtime)
        asyncio.run(asyncio.wait_for(main(), WAIT))
        valve.open()
        assert wait_idle(runtime) == before
        assert runtime.stats().counters.cancelled == 4

    def test_a_cancelled_task_cancels_its_request(self, gated) -> None:
        runtime, runner, gate = gated

        async def read() -> None:
            async for _ in runtime.astream("abc", LONG):
                pass

        async def main() -> None:
            task = asyncio.create_task(read())
            while not runner.entered.is_set():
                await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(asyncio.wait_for(main(), WAIT))
        gate.set()
        wait_idle(runtime)
        assert runtime.stats().counters.cancelled == 1

    def test_a_loop_that_is_gone_harms_nobody(self, gated) -> None:
        runtime, runner, gate = gated
        stream = runtime.astream("abc", GREEDY)
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(stream.__anext__())
        loop.run_until_complete(asyncio.sleep(0.01))
        assert runner.entered.wait(WAIT)
        waiting.cancel()
        loop.run_until_complete(asyncio.gather(waiting, return_exceptions=True))
        loop.close()
        gate.set()
        assert runtime.submit("abc", GREEDY).result(WAIT).outputs[0].finish_reason == "length"

    def test_engine_failure_reaches_asynchronous_readers(self) -> None:
        async def read(runtime: Runtime) -> None:
            async for _ in runtime.astream("abc", LONG):
                pass

        runtime = make_runtime(ScriptedRunner(raise_in={"collect": 4}))
        with runtime, pytest.raises(EngineDeadError, match="injected fault"):
            asyncio.run(asyncio.wait_for(read(runtime), WAIT))
