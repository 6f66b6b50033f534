"""Captures and frames against the scheduler, the sampler of frames, and the routes."""

from __future__ import annotations

import asyncio
import json
import re
import time
from base64 import b64decode, b64encode
from collections import Counter
from hashlib import sha256
from itertools import pairwise
from typing import Any

import pytest
from engine_fakes import WAIT, EngineDriver, ScriptedRunner, make_runtime

from minillm.core.config import SchedulerConfig
from minillm.core.plan import StepOutcome
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.core.scheduler import ContinuousScheduler
from minillm.server.dashboard import frame as frames
from minillm.server.dashboard.capture import MAX_QUEUED, MAX_RUNNING, capture, colour_of, first_queued, wait_reason
from minillm.server.dashboard.explanation import explanation
from minillm.server.dashboard.hub import MAX_SHARE, FrameHub
from minillm.server.dashboard.routes import load_page
from minillm.server.metrics import EngineMetrics


def tokens(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **options)


def pressed(seed: int = 0, **options: Any) -> tuple[EngineDriver, EngineMetrics]:
    """An engine in the middle of things: some run, some share a prefix, some are swapped out, some wait."""
    metrics = EngineMetrics()
    driver = EngineDriver(
        observer=metrics, num_blocks=24, num_swap_blocks=32, preemption_mode="swap", max_num_seqs=5, **options
    )
    for i in range(9):
        driver.add(f"r{i}", "a common beginning " + "x" * i, tokens(30), priority=i % 2, user="u")
    for _ in range(200):
        driver.step()
        stats = driver.engine.stats()
        queue = driver.engine.scheduler.waiting.in_order()
        if stats.swapped and stats.blocks_shared and len(queue) > 2 and wait_reason(queue[0].history):
            return driver, metrics
    raise AssertionError("nothing was swapped out")


def frame_of(driver: EngineDriver, metrics: EngineMetrics) -> dict[str, Any]:
    captured = driver.engine.inspect(lambda scheduler: capture(scheduler, metrics))
    made = frames.frame(captured, driver.engine.clock())
    return json.loads(json.dumps(made))


class TestFrame:
    def test_the_block_map_is_the_schedulers(self) -> None:
        driver, metrics = pressed()
        made, stats = frame_of(driver, metrics), driver.engine.stats()
        states = Counter(b64decode(made["blocks"]["states"]))
        assert states[frames.FREE] == stats.blocks_free
        assert states[frames.CACHED] == stats.blocks_evictable
        assert states[frames.QUARANTINED] == stats.blocks_quarantined
        assert states[frames.SHARED] == stats.blocks_shared > 0
        assert states[frames.HELD] + states[frames.SHARED] == stats.blocks_referenced
        owners = b64decode(made["blocks"]["owners"])
        for request in driver.engine.scheduler.running:
            for block in request.block_table:
                holders = [r for r in driver.engine.scheduler.running if block in r.block_table]
                assert owners[block] in {colour_of(holder.arrival_seq) for holder in holders}
        held = {b for r in driver.engine.scheduler.running for b in r.block_table}
        assert all(owners[block] == 0 for block in range(24) if block not in held)

    def test_rows_and_reasons(self) -> None:
        driver, metrics = pressed()
        made, scheduler = frame_of(driver, metrics), driver.engine.scheduler
        assert [row["id"] for row in made["running"]] == [r.request_id for r in scheduler.running]
        assert [row["id"] for row in made["queue"]] == [r.request_id for r in scheduler.waiting.in_order()]
        assert re.search(r"waits for \d+ (more KV blocks|sequence slots)", made["queue"][0]["reason"])
        assert made["queue"][2]["reason"].endswith("behind 2 others")
        swapped = [row for row in made["queue"] if row["state"] == "swapped"]
        assert swapped and all(row["swap_slots"] > 0 for row in swapped)
        assert any("swapped out: " in row["reason"] for row in swapped)
        assert made["swap"]["used"] == sum(slots for _, slots in made["swap"]["owners"]) > 0
        assert made["stats"]["waiting"] + made["stats"]["swapped"] == len(made["queue"])
        for row in made["running"]:
            request = scheduler.get(row["id"])
            assert (row["output_tokens"], row["blocks"]) == (len(request.generated_ids), len(request.block_table))
        assert "common beginning" not in json.dumps(made)

    def test_timelines_have_no_gaps_and_no_overlaps(self) -> None:
        driver, metrics = pressed()
        driver.run()
        made = frame_of(driver, metrics)
        assert made["running"] == made["queue"] == []
        assert len(made["timelines"]) == 9
        seen = set()
        for row in made["timelines"]:
            assert row["finish_reason"] == "length"
            for before, after in pairwise(row["spans"]):
                assert before[2] == after[1] and before[0] != after[0]
            assert all(begin >= end for _, begin, end in row["spans"])
            assert row["spans"][0][0] == "waiting" and row["spans"][-1][0] == "decoding"
            seen |= {span[0] for span in row["spans"]}
        assert "swapped" in seen
        assert made["latency"]["ttft"]["count"] == made["latency"]["tpot"]["count"] == 9
        assert sum(row[1] for row in made["throughput"]) == 9 * 30

    def test_percentiles_are_by_nearest_rank(self) -> None:
        assert frames.percentiles([float(i) for i in range(1, 101)]) == {"count": 100, "p50": 50, "p90": 90, "p99": 99}
        assert frames.percentiles([2.0]) == {"count": 1, "p50": 2.0, "p90": 2.0, "p99": 2.0}
        assert frames.percentiles([]) == {"count": 0, "p50": None, "p90": None, "p99": None}

    def test_throughput_is_by_age_and_ends_after_two_minutes(self) -> None:
        seconds = [(100, 5, 1), (850, 7, 0), (969, 1, 2), (970, 3, 0)]
        assert frames.throughput(seconds, 970.5) == [[120, 7, 0], [1, 1, 2], [0, 3, 0]]

    def test_size_and_time_are_bounded_however_large_the_engine(self) -> None:
        scheduler = ContinuousScheduler(
            SchedulerConfig(num_blocks=100_000, max_num_seqs=512, max_num_batched_tokens=16_384), observer=None
        )
        for i in range(4000):
            request = Request(f"{'long' * 500}-{i}", [1] * 40, SamplingParams(max_tokens=4000), priority=i % 7)
            scheduler.submit(request, float(i))
        for step in range(3):
            plan = scheduler.schedule(5000.0 + step)
            scheduler.commit(plan, StepOutcome(plan.step, [[7]] * plan.num_sampling_rows), 5000.0 + step)
        assert scheduler.num_running == 512
        metrics = EngineMetrics()
        under_lock = 1e9
        for _ in range(3):  # the garbage collector, which can take longer than this, may come in between
            begin = time.thread_time()
            captured = capture(scheduler, metrics)
            under_lock = min(under_lock, time.thread_time() - begin)
        made = frames.frame(captured, 6000.0)
        assert len(made["running"]) == MAX_RUNNING and len(made["queue"]) == MAX_QUEUED
        assert made["hidden"] == {"running": 512 - MAX_RUNNING, "queue": 4000 - 512 - MAX_QUEUED}
        assert made["blocks"]["stride"] == 13
        assert len(b64decode(made["blocks"]["states"])) <= frames.MAX_CELLS
        assert len(frames.encode_event("frame", made)) < 200_000
        assert under_lock < 0.1, "seconds of CPU while the engine waits, 4 times a second"
        order = [r.request_id for r in scheduler.waiting.in_order()[:MAX_QUEUED]]
        assert [r.request_id for r in first_queued(scheduler.waiting, MAX_QUEUED)] == order


class TestHub:
    def test_frames_are_made_only_while_somebody_watches(self) -> None:
        made: list[float] = []

        def make() -> bytes:
            made.append(time.monotonic())
            return b"frame %d" % len(made)

        async def watch(hub: FrameHub, count: int) -> list[bytes]:
            got = []
            async for data in hub.watch():
                got.append(data)
                if len(got) == count:
                    break
            return got

        async def main() -> None:
            hub = FrameHub(make, interval=0.02)
            await asyncio.sleep(0.1)
            assert made == []
            first, second = await asyncio.gather(watch(hub, 3), watch(hub, 4))
            assert first == second[:3], "watchers share frames"
            await asyncio.sleep(0.05)
            assert hub.num_watchers == 0
            count = len(made)
            await asyncio.sleep(0.15)
            assert len(made) == count, "nobody watches"
            assert (await watch(hub, 1))[0] == b"frame %d" % (count + 1)
            assert made[2] - made[0] >= 0.03, "two intervals, but for the time until a thread runs"
            hub.close()

        asyncio.run(main())

    def test_frames_that_cost_much_are_made_less_often(self) -> None:
        made: list[float] = []

        def make() -> bytes:
            made.append(time.monotonic())
            end = time.thread_time() + 0.01
            while time.thread_time() < end:
                pass
            return b"x"

        async def main() -> None:
            hub = FrameHub(make, interval=0.01)
            async for _ in hub.watch():
                if len(made) == 4:
                    break
            hub.close()

        asyncio.run(main())
        assert min(b - a for a, b in pairwise(made)) >= 0.01 / MAX_SHARE

    def test_closing_ends_every_watcher(self) -> None:
        async def main() -> None:
            hub = FrameHub(lambda: b"x", interval=0.01, max_watchers=2)

            async def watch() -> int:
                return len([data async for data in hub.watch()])

            watchers = [asyncio.create_task(watch()) for _ in range(2)]
            await asyncio.sleep(0.1)
            assert hub.is_full
            hub.close()
            hub.close()
            assert all(count > 0 for count in await asyncio.wait_for(asyncio.gather(*watchers), 2))
            assert hub.is_full, "closed"
            assert [data async for data in hub.watch()] == []

        asyncio.run(main())

    def test_a_frame_that_cannot_be_made_ends_the_streams_and_the_next_watcher_tries_again(self, caplog) -> None:
        answers: list[Any] = [b"first", ValueError("planted")]

        def make() -> bytes:
            answer = answers.pop(0) if answers else b"again"
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def main() -> None:
            hub = FrameHub(make, interval=0.01)
            got = await asyncio.wait_for(_all(hub), 2)
            assert got == [b"first"]
            async for data in hub.watch():
                assert data == b"again"
                break
            hub.close()

        async def _all(hub: FrameHub) -> list[bytes]:
            return [data async for data in hub.watch()]

        asyncio.run(main())
        assert "planted" in caplog.text


class TestExplanation:
    def test_of_requests_in_every_state(self) -> None:
        driver, _ = pressed()
        runtime = _RuntimeOf(driver)
        now = driver.engine.clock()
        states = {}
        for request in driver.engine.scheduler.live_requests:
            told = explanation(runtime, request.request_id, now)
            states[told["state"]] = told
            assert told["timeline"][0] == {"seconds": 0, "step": None, "state": "waiting", "reason": "submitted"}
            times = [entry["seconds"] for entry in told["timeline"]]
            assert times == sorted(times)
            assert told["story"] == driver.engine.explain(request.request_id)
            assert "prompt" not in told
        assert {"swapped", "decoding"} <= states.keys()
        head = driver.engine.scheduler.waiting.in_order()[0].request_id
        told = explanation(runtime, head, now)
        assert told["place"] == 0 and told["waits_for"]
        assert states["decoding"]["place"] is None
        driver.run()
        told = explanation(runtime, "r0", now)
        assert (told["state"], told["finish_reason"], told["output_tokens"]) == ("finished", "length", 30)

    def test_text_is_shown_only_where_the_operator_says_so(self) -> None:
        driver, _ = pressed()
        runtime, now = _RuntimeOf(driver), driver.engine.clock()
        running = next(iter(driver.engine.scheduler.running)).request_id
        assert "common beginning" not in json.dumps(explanation(runtime, running, now))
        told = explanation(runtime, running, now, show_text=True)
        assert told["prompt"].startswith("a common beginning")
        assert len(told["output"]) == told["output_tokens"]


class _RuntimeOf:
    """A driver's engine as far as explanations need a runtime."""

    def __init__(self, driver: EngineDriver) -> None:
        self.inspect = driver.engine.inspect
        self.explain = driver.engine.explain
        self.tokenizer = driver.parts.inputs.tokenizer


class TestPage:
    def test_it_is_whole_and_its_policy_allows_exactly_its_own_code(self) -> None:
        body, policy = load_page()
        text = body.decode()
        for tag, directive in (("script", "script-src"), ("style", "style-src")):
            (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
            digest = b64encode(sha256(inline.encode()).digest()).decode()
            assert f"{directive} 'sha256-{digest}'" in policy
            assert len(inline) > 1000
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert re.findall(r"https?://", text) == [], "no outside host"
        assert not re.search(r"\son\w+=|\sstyle=|innerHTML|insertAdjacentHTML|document\.write", text)

    def test_every_control_has_a_name(self) -> None:
        text = load_page()[0].decode()
        labelled = set(re.findall(r'<label[^>]* for="([^"]+)"', text))
        inside = re.findall(r"<label[^>]*>[^<]*<(?:input|select)[^>]* ?id=\"([^\"]+)\"", text)
        controls = re.findall(r"<(?:input|textarea|select) [^>]*id=\"([^\"]+)\"", text)
        assert len(controls) >= 5
        assert set(controls) <= labelled | set(inside)
        assert all('role="img"' in tag and "aria-label" in tag for tag in re.findall(r"<canvas[^>]*>", text))


class TestDeadEngine:
    def test_a_dead_engine_is_shown_as_dead(self) -> None:
        metrics = EngineMetrics()
        with make_runtime(ScriptedRunner(raise_in={"forward": 2}), observer=metrics) as runtime:
            with pytest.raises(Exception, match="injected"):
                runtime.submit("abc", tokens(8)).result(WAIT)
            assert not runtime.is_alive
            captured = runtime.inspect(lambda scheduler: capture(scheduler, metrics))
            made = frames.frame(captured, time.monotonic())
            assert made["running"] == [] and made["stats"]["ended"]["failed"] == 1
