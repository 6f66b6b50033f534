"""What observing costs.

    PYTHONPATH=src:tests/engine python tests/server/run_observing.py

Prints the observer's share of a step's scheduling, the cost of a dashboard frame, and the times of GET /metrics beside
64 streams of a device with 10 ms steps, whose clients run in a process of their own.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from engine_fakes import ScriptedRunner, counting_script, make_runtime
from server_fakes import serving

from minillm.bench.scheduler_bench import OUTPUT_TOKENS, _Load, _steps
from minillm.core.config import SchedulerConfig
from minillm.core.scheduler import ContinuousScheduler
from minillm.server.dashboard.capture import capture
from minillm.server.dashboard.frame import encode_event, frame
from minillm.server.exposition import Exposition
from minillm.server.metrics import EngineMetrics


class Timed(EngineMetrics):
    """Adds up the CPU time of everything that a step has it do."""

    def __init__(self) -> None:
        super().__init__()
        self.spent = 0

    def timed(self, call: Callable[..., None], *arguments: Any) -> None:
        begin = time.thread_time_ns()
        call(*arguments)
        self.spent += time.thread_time_ns() - begin

    def on_submit(self, *arguments: Any) -> None:
        self.timed(super().on_submit, *arguments)

    def on_schedule(self, *arguments: Any) -> None:
        self.timed(super().on_schedule, *arguments)

    def on_commit(self, *arguments: Any) -> None:
        self.timed(super().on_commit, *arguments)


def observer_cost(running: int, steps: int = 400) -> tuple[float, float]:
    """Median CPU microseconds per step of the scheduler (observer included), and of the observer in it."""
    load = _Load(running, 0)
    metrics = load.scheduler.observer = Timed()
    for _ in range(running):
        load.join(already_generated=load.rng.randrange(OUTPUT_TOKENS[1]))
    stream = _steps(load)
    for _ in range(200):
        next(stream)
    whole, own = [], []
    for _ in range(steps):
        metrics.spent = 0
        _, _, cpu_ns, _ = next(stream)
        whole.append(cpu_ns / 1e3)
        own.append(metrics.spent / 1e3)
    return statistics.median(whole), statistics.median(own)


def capture_cost() -> tuple[float, float, int]:
    """CPU milliseconds under the engine's lock, and after it; bytes of a frame. 100,000 blocks, 512 run, 4,000 wait."""
    load = _Load(512, 0)
    config = SchedulerConfig(num_blocks=100_000, max_num_seqs=512, max_num_batched_tokens=8192)
    load.scheduler = ContinuousScheduler(config)
    for _ in range(4512):
        load.join()
    stream = _steps(load)
    for _ in range(60):
        next(stream)
    metrics = EngineMetrics()
    held, after, size = [], [], 0
    for _ in range(20):
        begin = time.thread_time()
        captured = capture(load.scheduler, metrics)
        middle = time.thread_time()
        size = len(encode_event("frame", frame(captured, load.now)))
        held.append((middle - begin) * 1e3)
        after.append((time.thread_time() - middle) * 1e3)
    return statistics.median(held), statistics.median(after), size


CLIENTS = """
import asyncio, json, sys
from urllib.parse import urlsplit
where = urlsplit(sys.argv[1])
body = json.dumps({"model": "toy", "prompt": "abc", "max_tokens": 8000, "stream": True, "ignore_eos": True})
head = f"Host: x\\r\\nContent-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
post = "POST /v1/completions HTTP/1.1\\r\\n" + head + body
get = "GET /dashboard/events HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"
async def drain(request):
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(request.encode())
    while await reader.read(1 << 16):
        pass
async def main():
    await asyncio.gather(*(drain(post) for _ in range(64)), *(drain(get) for _ in range(int(sys.argv[2]))))
asyncio.run(main())
"""


class TenMilliseconds(ScriptedRunner):
    """A device whose steps take 10 ms."""

    def forward(self, plan: Any) -> Any:
        time.sleep(0.01)
        return super().forward(plan)


def scrape_times(watch: bool, scrapes: int = 200) -> tuple[float, float, float]:
    """Milliseconds of GET /metrics (p50, p99) beside 64 streams, and the mean step; `watch`: beside a viewer too."""
    options = {"num_blocks": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 8192}
    with serving(TenMilliseconds(counting_script), check_invariants=False, **options) as server:
        clients = subprocess.Popen([sys.executable, "-c", CLIENTS, server.url, str(int(watch))])
        while server.runtime.stats().running < 64:
            time.sleep(0.1)
        times, steps, begin = [], server.runtime.stats().counters.steps, time.perf_counter()
        for _ in range(scrapes):
            start = time.perf_counter()
            assert server.http.get("/metrics").status_code == 200
            times.append((time.perf_counter() - start) * 1e3)
            time.sleep(0.05)
        step = (time.perf_counter() - begin) / (server.runtime.stats().counters.steps - steps) * 1e3
        clients.kill()
        clients.wait()
    times.sort()
    return times[len(times) // 2], times[int(len(times) * 0.99)], step


def scrape_cost() -> float:
    """CPU milliseconds of one rendering of /metrics."""
    metrics = EngineMetrics()
    with make_runtime(observer=metrics) as runtime:
        exposition = Exposition(runtime, metrics)
        times = []
        for _ in range(50):
            begin = time.thread_time()
            exposition.render()
            times.append((time.thread_time() - begin) * 1e3)
    return statistics.median(times)


def main() -> None:
    for running in (1, 16, 64, 256, 1024):
        whole, own = observer_cost(running)
        print(f"{running:5} running: {own:6.1f} us of the step's {whole:7.1f} us of scheduling are the observer's")
    print(f"a scrape: {scrape_cost():.1f} ms of CPU")
    held, after, size = capture_cost()
    print(f"a frame: {held:.1f} ms under the lock, {after:.1f} ms after it, {size:,} bytes")
    for watch in (False, True):
        p50, p99, step = scrape_times(watch)
        beside = "64 streams and a viewer" if watch else "64 streams"
        print(f"GET /metrics beside {beside}: p50 {p50:.1f} ms, p99 {p99:.1f} ms; a step takes {step:.1f} ms")


if __name__ == "__main__":
    main()
