"""The runtime: cancellation, refusals, failures and shutdown, with callers in many threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed, wait
from pathlib import Path

import pytest
from engine_fakes import (
    GREEDY,
    LONG,
    WAIT,
    ScriptedRunner,
    Valve,
    by_request,
    check_events,
    eventually,
    idle_state,
    make_parts,
    make_runtime,
    token,
    wait_idle,
)

from minillm.core.errors import (
    ConfigError,
    DuplicateRequestError,
    EmptyPromptError,
    EngineDeadError,
    InvalidParameterError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from minillm.core.observer import Observer
from minillm.core.sampling_params import SamplingParams
from minillm.engine.config import EngineConfig
from minillm.engine.engine_thread import LoaderThread
from minillm.engine.runtime import Runtime


class TestCancel:
    def test_cancel_resolves_with_the_partial_output(self, gated) -> None:
        runtime, _, gate = gated
        future = runtime.submit("abc", LONG, request_id="mine")
        queued = runtime.submit("abc", LONG)
        assert runtime.cancel("mine")
        assert not runtime.cancel("mine")
        assert not runtime.cancel("unknown")
        gate.set()
        output = future.result(WAIT)
        assert output.outputs[0].finish_reason == "cancelled"
        assert len(output.outputs[0].token_ids) < 200
        assert runtime.cancel(queued.request_id)
        assert queued.result(WAIT).outputs[0].finish_reason == "cancelled"
        assert not runtime.cancel("mine")

    def test_cancelled_stream_ends_with_cancelled_for_every_choice(self, valved) -> None:
        runtime, valve = valved
        stream = runtime.stream("abc", SamplingParams(n=2, seed=0, max_tokens=200))
        first = next(stream)
        assert runtime.cancel(stream.request_id)
        valve.open()
        events = [first, *stream]
        assert stream.output is not None
        check_events(events, stream.output)
        assert [choice.finish_reason for choice in stream.output.outputs] == ["cancelled"] * 2

    def test_cancelling_the_future_cancels_the_request(self, valved) -> None:
        runtime, valve = valved
        before = wait_idle(runtime)
        future = runtime.submit("abc", LONG)
        assert future.cancel()
        assert future.cancelled()
        with pytest.raises(CancelledError):
            future.result(WAIT)
        valve.open()
        done, _ = wait([future], WAIT)
        assert done == {future}
        assert wait_idle(runtime) == before
        assert runtime.stats().counters.cancelled == 1
        ended = runtime.submit("abc", GREEDY)
        ended.result(WAIT)
        assert not ended.cancel()

    def test_id_of_a_live_request_is_refused_and_the_first_is_unharmed(self, gated) -> None:
        """B57."""
        runtime, _, gate = gated
        first = runtime.submit("abc", GREEDY, request_id="x")
        group = runtime.submit("abc", SamplingParams(n=3, seed=0, max_tokens=4), request_id="g")
        with pytest.raises(DuplicateRequestError, match="'x'"):
            runtime.submit("abcd", GREEDY, request_id="x")
        with pytest.raises(DuplicateRequestError, match="'g#2'"):
            runtime.submit("abcd", GREEDY, request_id="g#2")
        assert not runtime.cancel("g#2")
        gate.set()
        assert first.result(WAIT).outputs[0].finish_reason == "length"
        assert len(group.result(WAIT).outputs) == 3
        assert runtime.submit("abcd", GREEDY, request_id="x").result(WAIT).prompt == "abcd"

    @pytest.mark.parametrize("overlap", [False, True])
    def test_abort_and_immediate_retry_get_each_their_own_tokens(self, overlap: bool) -> None:
        """B57: a hundred times in a row."""
        script = by_request({"x": [token("X")]})
        valve = Valve()
        with make_runtime(ScriptedRunner(script, gate=valve), overlap=overlap) as runtime:
            before = wait_idle(runtime)
            for i in range(100):
                valve.allow(40)
                old = runtime.stream("abc" * (1 + i % 3), LONG, request_id="x")
                if i % 2:
                    next(old)
                assert runtime.cancel("x")
                valve.allow(40)
                new = runtime.submit("wxyz", SamplingParams(temperature=0, max_tokens=3), request_id="x")
                output = new.result(WAIT)
                assert output.prompt == "wxyz"
                assert output.outputs[0].text == "XXX"
                rest = list(old)
                assert rest[-1].finish_reason == "cancelled"
            assert wait_idle(runtime) == before
            assert runtime._engine.num_invariant_violations == 0

    def test_timeout_cancels_and_says_so(self) -> None:
        class Slow(ScriptedRunner):
            def forward(self, plan):
                time.sleep(0.01)
                return super().forward(plan)

        with make_runtime(Slow()) as runtime:
            output = runtime.submit("abc", LONG, timeout=0.15).result(WAIT)
            assert output.outputs[0].finish_reason == "cancelled"
            assert output.outputs[0].stop_reason == "deadline passed"
            assert 0 < len(output.outputs[0].token_ids) < 100
            assert runtime.submit("abc", GREEDY, timeout=30).result(WAIT).outputs[0].finish_reason == "length"


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "options", "error"),
        [
            ("", {}, EmptyPromptError),
            ([], {}, EmptyPromptError),
            ([[]], {}, InvalidParameterError),
            ("a" * 300, {}, PromptTooLongError),
            ("abc", {"sampling_params": SamplingParams(max_tokens=254)}, PromptTooLongError),
            ("abc", {"sampling_params": SamplingParams(n=9)}, InvalidParameterError),
            ("abc", {"sampling_params": SamplingParams(logit_bias={10**6: 1})}, InvalidParameterError),
            ("abc", {"priority": "x"}, InvalidParameterError),
            ("abc", {"request_id": ""}, InvalidParameterError),
            ("\ud800", {}, InvalidParameterError),
            ([{"role": "user"}, "x"], {}, RequestError),
        ],
    )
    def test_raise_in_the_caller_with_nothing_queued(self, prompt, options, error) -> None:
        with make_runtime() as runtime:
            for method in (runtime.submit, runtime.stream, runtime.astream, runtime.prepare):
                with pytest.raises(error):
                    method(prompt, **options)
            assert runtime._thread.num_live == 0
            assert runtime.stats().counters.submitted == 0
            assert runtime.submit("abc", GREEDY).result(WAIT).outputs[0].finish_reason == "length"

    def test_unknown_keyword(self) -> None:
        with make_runtime() as runtime, pytest.raises(TypeError, match="temperature"):
            runtime.submit("abc", temperature=0)

    def test_full_queue(self) -> None:
        gate = threading.Event()
        runner = ScriptedRunner(gate=gate)
        with make_runtime(runner, max_num_seqs=2, max_waiting=3) as runtime:
            futures = [runtime.submit("abc", GREEDY) for _ in range(2 + 3)]
            with pytest.raises(QueueFullError, match="max_waiting=3"):
                runtime.submit("abc", GREEDY)
            with pytest.raises(QueueFullError):
                runtime.stream("abc", GREEDY)
            gate.set()
            wait(futures, WAIT)
            assert all(future.result().outputs[0].finish_reason == "length" for future in futures)
            runtime.submit("abc", GREEDY).result(WAIT)
            with pytest.raises(QueueFullError):
                runtime.submit_many([{"prompt": "abc"}] * 6)
            assert runtime._thread.num_live == 0

    def test_a_late_refusal_reaches_its_own_caller_alone(self) -> None:
        with make_runtime() as runtime:
            submit = runtime._engine.scheduler.submit

            def refuse(request, now):
                if request.user == "unlucky":
                    raise RuntimeError("refused late")
                submit(request, now)

            runtime._engine.scheduler.submit = refuse
            unlucky = runtime.submit("abc", GREEDY, user="unlucky")
            stream = runtime.stream("abc", GREEDY, user="unlucky")
            lucky = runtime.submit("abc", GREEDY)
            with pytest.raises(RuntimeError, match="refused late"):
                unlucky.result(WAIT)
            with pytest.raises(RuntimeError, match="refused late"):
                next(stream)
            assert lucky.result(WAIT).outputs[0].finish_reason == "length"
            assert runtime._thread._by_id == {}


class TestFailures:
    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("method", ["forward", "sample", "collect"])
    @pytest.mark.parametrize("call", [1, 3])
    def test_engine_failure_tells_everyone_the_cause(self, method: str, call: int, overlap: bool) -> None:
        runner = ScriptedRunner(raise_in={method: call})
        runtime = make_runtime(runner, max_num_seqs=2, overlap=overlap)
        handed = [runtime.submit("abc", LONG)]
        with contextlib.suppress(EngineDeadError):  # it may be dead before the last one
            for i in range(6):
                handed += [runtime.submit("abc", LONG) if i % 2 else runtime.stream("abc", LONG)]
        for handle in handed:
            with pytest.raises(EngineDeadError, match=f"injected fault in {method}") as caught:
                handle.result(WAIT) if hasattr(handle, "result") else list(handle)
            assert isinstance(caught.value.__cause__, RuntimeError)
        eventually(lambda: not runtime.is_alive, "the engine's death")
        with pytest.raises(EngineDeadError, match="injected fault") as caught:
            runtime.submit("abc", GREEDY)
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(EngineDeadError):
            runtime.reset_prefix_cache()
        assert runtime.stats().running == 0
        assert not runtime.cancel("x")
        runtime.close()
        assert runner.closed

    def test_streams_get_what_came_before_the_failure(self) -> None:
        with make_runtime(ScriptedRunner(raise_in={"forward": 6})) as runtime:
            stream = runtime.stream("abc", LONG)
            events = []
            with pytest.raises(EngineDeadError):
                events.extend(iter(lambda: next(stream), None))
            eventually(lambda: not runtime.is_alive)
            assert next(stream, None) is None

    def test_a_failed_close_of_the_runner_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        runtime = make_runtime(ScriptedRunner(raise_in={"close": 1}))
        runtime.close()
        assert "could not be closed" in caplog.text

    def test_one_failed_row_leaves_the_other_streams_alone(self) -> None:
        """B54."""
        with make_runtime(ScriptedRunner(row_failures={("bad", 5): "NaN"})) as runtime:
            streams = [runtime.stream("abc", LONG, request_id=name) for name in ("one", "bad", "two")]
            events = [list(stream) for stream in streams]
            assert [one[-1].finish_reason for one in events] == ["length", "error", "length"]
            assert [len(one) for one in events] == [200, 6, 200]
            assert "NaN" in str(events[1][-1].error)

    def test_a_reader_that_raises_is_logged_and_others_go_on(self, caplog: pytest.LogCaptureFixture) -> None:
        with make_runtime() as runtime:

            def broken(events, scores):
                raise OSError("reader is gone")

            stream = runtime.stream("abc", LONG)
            stream._buffer.on_events = broken  # type: ignore[method-assign]
            assert runtime.submit("abc", GREEDY).result(WAIT).outputs[0].finish_reason == "length"
        assert "reader is gone" in caplog.text

    def test_an_observer_that_raises_is_an_engine_failure(self) -> None:
        class Broken(Observer):
            def on_commit(self, plan, outcome, events, now):
                raise ValueError("observer")

        with make_runtime(observer=Broken()) as runtime, pytest.raises(EngineDeadError, match="observer"):
            runtime.submit("abc", GREEDY).result(WAIT)


class TestClose:
    def test_close_ends_everything_that_lives(self, gated) -> None:
        """B60: running, queued, swapped-out ones and a stream that nobody has iterated."""
        runtime, runner, gate = gated
        futures = [runtime.submit("abc", LONG) for _ in range(12)]
        stream = runtime.stream("abc", LONG)
        assert runner.entered.wait(WAIT)
        closer = threading.Thread(target=runtime.close)
        closer.start()
        eventually(lambda: runtime._thread._refusal is not None, "the refusal of new requests")
        with pytest.raises(EngineDeadError, match="closed"):
            runtime.submit("abc", GREEDY)
        gate.set()
        closer.join(WAIT)
        assert not closer.is_alive()
        assert not runtime.is_alive
        for future in futures:
            assert future.result(WAIT).outputs[0].finish_reason == "cancelled"
        assert list(stream)[-1].finish_reason == "cancelled"
        assert runner.closed
        assert idle_state(runtime._engine)[:4] == (0, 0, 0, 0)
        runtime.close()
        assert "cancelled" in runtime.explain(stream.request_id).lower()

    def test_grace_lets_requests_end(self) -> None:
        runtime = make_runtime()
        future = runtime.submit("abc", LONG)
        started = time.monotonic()
        runtime.close(grace=WAIT)
        assert future.result(0).outputs[0].finish_reason == "length"
        assert time.monotonic() - started < WAIT

    def test_grace_that_runs_out_cancels_the_rest(self) -> None:
        class Slow(ScriptedRunner):
            def forward(self, plan):
                time.sleep(0.02)
                return super().forward(plan)

        runtime = make_runtime(Slow())
        short, endless = runtime.submit("abc", SamplingParams(max_tokens=2)), runtime.submit("abc", LONG)
        runtime.close(grace=1.5)
        assert short.result(0).outputs[0].finish_reason == "length"
        assert endless.result(0).outputs[0].finish_reason == "cancelled"
        assert len(endless.result(0).outputs[0].token_ids) > 2

    def test_a_second_close_shortens_the_grace(self) -> None:
        class Slow(ScriptedRunner):
            def forward(self, plan):
                time.sleep(0.005)
                return super().forward(plan)

        runtime = make_runtime(Slow())
        future = runtime.submit("abc", LONG)
        closer = threading.Thread(target=runtime.close, kwargs={"grace": 600.0})
        closer.start()
        runtime.close()
        closer.join(WAIT)
        assert not closer.is_alive()
        assert future.result(0).outputs[0].finish_reason == "cancelled"

    def test_close_from_a_callback_does_not_wait_for_itself(self) -> None:
        runtime = make_runtime()
        other = runtime.submit("abc", LONG)
        runtime.submit("abc", GREEDY).add_done_callback(lambda _: runtime.close())
        assert other.result(WAIT).outputs[0].finish_reason == "cancelled"
        eventually(lambda: not runtime.is_alive)

    def test_leaving_the_with_block_with_an_exception_closes(self) -> None:
        with pytest.raises(KeyError), make_runtime() as runtime:
            future = runtime.submit("abc", LONG)
            raise KeyError
        assert future.done()
        assert not runtime.is_alive

    def test_a_dropped_runtime_ends_its_thread(self) -> None:
        runtime = make_runtime()
        runtime.submit("abc", GREEDY).result(WAIT)
        thread, ref = runtime._thread, weakref.ref(runtime)
        wait_idle(runtime)
        del runtime
        gc.collect()
        assert ref() is None
        eventually(lambda: not thread.is_alive, "the end of the thread")

    def test_a_dropped_runtime_lives_while_somebody_waits_for_it(self) -> None:
        assert make_runtime().submit("abc", LONG).result(WAIT).outputs[0].finish_reason == "length"
        assert len(list(make_runtime().stream("abc", LONG))) == 200

    def test_no_signal_handler_is_installed(self) -> None:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        with make_runtime() as runtime:
            runtime.submit("abc", GREEDY).result(WAIT)
            assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

    @pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "1 / 0"])
    def test_interpreter_exit_without_close_does_not_hang(self, ending: str) -> None:
        code = (
            "from engine_fakes import *\n"
            "runtime = make_runtime()\n"
            "stream = runtime.stream('abc', SamplingParams(temperature=0, max_tokens=200))\n"
            "future = runtime.submit('abc', SamplingParams(temperature=0, max_tokens=200))\n"
            "next(stream)\n"
            "print('ready', flush=True)\n" + ending
        )
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.stdout == "ready\n"
        assert result.returncode == {"pass": 0, "raise SystemExit(3)": 3, "1 / 0": 1}[ending]
        assert "Fatal" not in result.stderr


class TestLooking:
    def test_idle_engine_does_not_poll(self) -> None:
        with make_runtime() as runtime:
            runtime.submit("abc", GREEDY).result(WAIT)
            wait_idle(runtime)
            calls = []
            schedule = runtime._engine.scheduler.schedule
            runtime._engine.scheduler.schedule = lambda now: calls.append(now) or schedule(now)
            used = time.thread_time_ns()
            time.sleep(0.2)
            assert calls == []
            assert time.thread_time_ns() - used < 100_000_000

    def test_stats_and_explain_answer_while_a_step_runs(self, gated) -> None:
        runtime, runner, _ = gated
        future = runtime.submit("abc", LONG)
        assert runner.entered.wait(WAIT)
        handed = runtime.submit("abcd", LONG)
        started = time.monotonic()
        assert runtime.stats().running == 1
        assert future.request_id in runtime.explain(future.request_id)
        assert "handed over" in runtime.explain(handed.request_id)
        with pytest.raises(InvalidParameterError, match="nobody"):
            runtime.explain("nobody")
        assert time.monotonic() - started < 1.0

    def test_explain_tells_the_story_of_an_ended_request(self) -> None:
        with make_runtime() as runtime:
            future = runtime.submit("abc", GREEDY)
            future.result(WAIT)
            assert "max_tokens" in runtime.explain(future.request_id)

    def test_reset_prefix_cache_forgets(self) -> None:
        with make_runtime() as runtime:
            prompt = "abcdefghijkl"
            assert runtime.submit(prompt, GREEDY).result(WAIT).num_cached_tokens == 0
            assert runtime.submit(prompt, GREEDY).result(WAIT).num_cached_tokens == 8
            assert runtime.reset_prefix_cache()
            assert runtime.submit(prompt, GREEDY).result(WAIT).num_cached_tokens == 0

    def test_cache_salt_keeps_prefixes_apart(self) -> None:
        with make_runtime() as runtime:
            prompt = "abcdefghijkl"
            cached = [
                runtime.submit(prompt, GREEDY, cache_salt=salt).result(WAIT).num_cached_tokens
                for salt in (None, "a", "b", "a", "", None)
            ]
            assert cached == [0, 0, 0, 8, 8, 8]

    def test_config_and_reduced_limit_are_shown(self) -> None:
        with make_runtime(num_blocks=10) as runtime:
            assert runtime.max_model_len == runtime.model_info.max_model_len == runtime.stats().max_model_len == 40
            assert runtime.model_info.max_model_len_reduced
            assert runtime.config.model == "toy"
        with pytest.raises(InvalidParameterError, match="not both"):
            Runtime(make_parts().config, max_num_seqs=3)


class TestConcurrency:
    def test_many_threads_submit_stream_and_cancel(self) -> None:
        with make_runtime(num_blocks=48, num_swap_blocks=16, overlap=True) as runtime:
            before = wait_idle(runtime)
            alone = {
                i: runtime.submit("abcdefgh"[: 1 + i % 8], SamplingParams(seed=i, max_tokens=20)).result(WAIT)
                for i in range(8)
            }

            def work(worker: int) -> int:
                completed = 0
                for i in range(25):
                    which = (worker + i) % 8
                    prompt, params = "abcdefgh"[: 1 + which % 8], SamplingParams(seed=which, max_tokens=20)
                    kind = (worker * 7 + i) % 5
                    if kind == 0:
                        future = runtime.submit(prompt, params)
                        runtime.cancel(future.request_id)
                        assert future.result(WAIT).outputs[0].finish_reason in ("cancelled", "length")
                    elif kind == 1:
                        runtime.submit(prompt, params).cancel()
                    elif kind == 2:
                        stream = runtime.stream(prompt, params)
                        next(stream)
                        del stream
                    elif kind == 3:
                        stream = runtime.stream(prompt, params, priority=i % 3)
                        text = "".join(event.text for event in stream)
                        assert text == alone[which].outputs[0].text
                        completed += 1
                    else:
                        output = runtime.submit(prompt, params, priority=i % 3).result(WAIT)
                        assert output.outputs[0].token_ids == alone[which].outputs[0].token_ids
                        completed += 1
                return completed

            with ThreadPoolExecutor(8) as pool:
                results = [future.result() for future in as_completed([pool.submit(work, i) for i in range(8)])]
            assert sum(results) == 80
            # Blocks may stay cached; nothing else may differ.
            assert wait_idle(runtime) == before
            assert runtime._engine.num_invariant_violations == 0
            assert runtime.is_alive

    @pytest.mark.parametrize("ending", ["failure", "close"])
    def test_nobody_hangs_when_the_engine_ends_under_fire(self, ending: str) -> None:
        runner = ScriptedRunner(raise_in={"collect": 120} if ending == "failure" else {})
        runtime = make_runtime(runner, overlap=True, num_blocks=60, num_swap_blocks=8)

        async def read() -> str:
            try:
                return [event async for event in runtime.astream("abc", LONG)][-1].finish_reason
            except EngineDeadError:
                return "dead"

        def work(worker: int) -> list[str]:
            ends: list[str] = []
            while not ends or ends[-1] not in ("dead", "cancelled"):
                try:
                    if worker % 3 == 0:
                        ends.append(runtime.submit("abc", LONG).result(WAIT).outputs[0].finish_reason)
                    elif worker % 3 == 1:
                        ends.append(list(runtime.stream("abc", LONG))[-1].finish_reason)
                    else:
                        ends.append(asyncio.run(asyncio.wait_for(read(), WAIT)))
                except EngineDeadError:
                    ends.append("dead")
            return ends

        with ThreadPoolExecutor(9) as pool:
            workers = [pool.submit(work, i) for i in range(9)]
            if ending == "close":
                time.sleep(0.05)
                runtime.close()
            ends = [worker.result(WAIT) for worker in workers]
        assert all(end[-1] in ("dead", "cancelled") for end in ends)
        assert set(itertools.chain(*ends)) <= {"length", "dead", "cancelled"}
        eventually(lambda: not runtime._thread.is_alive, "the end of the thread")
        assert runtime._thread.num_live == 0
        runtime.close()


class TestLoading:
    def test_the_thread_that_loads_is_the_one_that_steps(self) -> None:
        seen: list[threading.Thread] = []
        loader = LoaderThread(lambda: seen.append(threading.current_thread()))
        loader.result()
        loader.go_on(lambda: seen.append(threading.current_thread()))
        loader.join(10)
        assert seen == [loader, loader] and not loader.is_alive()

    def test_what_loading_raises_is_raised_and_the_thread_ends(self) -> None:
        with pytest.raises(ConfigError, match="no-such-policy"):
            Runtime(EngineConfig(model="smollm2-135m", scheduling_policy="no-such-policy"))
        for thread in threading.enumerate():
            if isinstance(thread, LoaderThread):
                thread.join(10)
        assert not [thread for thread in threading.enumerate() if isinstance(thread, LoaderThread)]


def test_a_call_that_ends_the_engine_has_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = make_runtime()

    def leave() -> bool:
        raise SystemExit(3)

    monkeypatch.setattr(runtime._engine, "reset_prefix_cache", leave)
    with ThreadPoolExecutor(1) as pool, pytest.raises(SystemExit):
        pool.submit(runtime.reset_prefix_cache).result(WAIT)
    eventually(lambda: not runtime.is_alive)
    with pytest.raises(EngineDeadError):
        runtime.submit("abc")
