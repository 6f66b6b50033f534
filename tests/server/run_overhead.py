"""What HTTP costs per streamed token: ``PYTHONPATH=src:tests/engine python tests/server/run_overhead.py [TOKENS]``.

64 streams of a scripted model whose step takes 10 ms, in one process without HTTP and then over HTTP (metrics on, as
`minillm serve` has them); the clients run in another process. Prints the server process's CPU time per token and the
times between steps. Not a test: a busy machine gives other figures.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

STREAMS = 64
STEP = 0.010


def serve(tokens: int) -> None:
    """The server's process; one line of JSON per figure, and one with the port."""
    from engine_fakes import ScriptedRunner, letters, make_runtime

    from minillm import SamplingParams
    from minillm.server.app import create_app
    from minillm.server.config import ServerConfig
    from minillm.server.lifecycle import SWITCH_INTERVAL, listen, make_server
    from minillm.server.metrics import EngineMetrics

    class PacedRunner(ScriptedRunner):
        begins: list[tuple[float, int]] = []

        def forward(self, plan: Any) -> Any:
            self.begins.append((time.perf_counter(), len(plan.decodes.rows)))
            return super().forward(plan)

        def collect(self, handle: Any) -> Any:
            time.sleep(STEP)
            return super().collect(handle)

    class Waiter:
        wants_events = True

        def __init__(self) -> None:
            self.ended = threading.Event()

        def on_events(self, *_: Any) -> None: ...

        def on_output(self, _: Any) -> None:
            self.ended.set()

        on_error = on_output

    letter = letters("a")[0]
    runner = PacedRunner(lambda *_: letter)
    metrics = EngineMetrics()
    limits = {"max_num_seqs": STREAMS, "max_num_batched_tokens": 512, "max_model_len": 1024, "num_blocks": 4096}
    runtime = make_runtime(runner, observer=metrics, check_invariants=False, **limits)
    sys.setswitchinterval(SWITCH_INTERVAL)
    begin = time.process_time()

    def report(name: str) -> None:
        cpu = time.process_time() - begin
        pairs = zip(runner.begins, runner.begins[1:], strict=False)
        gaps = [(b - a) * 1e3 for (a, rows), (b, more) in pairs if rows == more == STREAMS]
        figures = {"cpu_us_per_token": cpu / (STREAMS * tokens) * 1e6, "step_ms": statistics.median(gaps)}
        print(json.dumps({"name": name, **figures}), flush=True)
        runner.begins.clear()

    params = SamplingParams(temperature=0, max_tokens=tokens)
    waiters = [Waiter() for _ in range(STREAMS)]
    runtime.attach([({"prompt": "abc", "sampling_params": params}, waiter) for waiter in waiters])
    for waiter in waiters:
        waiter.ended.wait()
    report("engine alone")

    config = ServerConfig(port=0)
    listener = listen(config)
    app = create_app(runtime, config, metrics)
    app.state.server.on_drain.append(lambda: report("over HTTP"))

    def ready() -> None:
        nonlocal begin
        begin = time.process_time()
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)

    make_server(app, ready).run(sockets=[listener])


async def stream(port: int, tokens: int) -> int:
    """One client; the number of tokens that came."""
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": tokens, "temperature": 0, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + data)
    answer = await reader.read(-1)
    writer.close()
    return answer.count(b'"delta":{"content":"a"}')


async def measure(tokens: int) -> list[dict[str, Any]]:
    """Figures of both ways."""
    command = [sys.executable, __file__, "--serve", str(tokens)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    alone = json.loads(await process.stdout.readline())
    port = json.loads(await process.stdout.readline())["port"]
    counts = await asyncio.gather(*(stream(port, tokens) for _ in range(STREAMS)))
    assert set(counts) == {tokens}, counts
    process.terminate()
    served = json.loads(await process.stdout.readline())
    await process.wait()
    return [alone, served]


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]))
        return
    alone, served = asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 500))
    for name, cpu, step in ((one["name"], one["cpu_us_per_token"], one["step_ms"]) for one in (alone, served)):
        print(f"{name}: {cpu:.1f} us of CPU per token, {step:.2f} ms a step")
    print(f"HTTP: {served['cpu_us_per_token'] - alone['cpu_us_per_token']:.1f} us of CPU per token", end=", ")
    print(f"step {100 * (served['step_ms'] / alone['step_ms'] - 1):+.1f} %")


if __name__ == "__main__":
    main()
