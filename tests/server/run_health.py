"""/health and /metrics under load: ``PYTHONPATH=src python tests/server/run_health.py [minillm serve options ...]``.

Starts `minillm serve`, opens 64 streams, sends a prompt of about 4,000 tokens and then a chat of 5 MB, and polls both
paths from two further processes until that one has been refused. Prints the waits. Not a test: a busy machine gives
other figures.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import statistics
import subprocess
import sys
import threading
import time

import httpx

STREAMS = 64
PAUSE = 0.02


def poll(url: str, path: str, for_seconds: float) -> None:
    """The poller's process: prints the milliseconds of each answer, until its standard input ends."""
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=for_seconds)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    waits = []
    while not ended.is_set():
        begin = time.perf_counter()
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        waits.append((time.perf_counter() - begin) * 1e3)
        assert answer.status == 200
        time.sleep(PAUSE)
    print(json.dumps(waits))


async def stream(client: httpx.AsyncClient, number: int) -> None:
    """Read a stream until it is cancelled."""
    fields = {"prompt": f"Story {number}:", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=fields) as answer:
        async for _ in answer.aiter_raw():
            pass


async def measure(url: str) -> None:
    """Load the server and poll it."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        streams = [asyncio.create_task(stream(client, number)) for number in range(STREAMS)]
        await asyncio.sleep(5)
        command = [sys.executable, __file__, "--poll", url]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        polls = {path: subprocess.Popen([*command, path], **pipes) for path in ("/health", "/metrics")}
        long = asyncio.create_task(client.post("/v1/completions", json={"prompt": "word " * 4000, "max_tokens": 1}))
        chat = {"messages": [{"role": "user", "content": "some words " * 450_000}]}
        begin = time.perf_counter()
        refused = await client.post("/v1/chat/completions", json=chat)
        print(f"5 MB chat: {refused.status_code} after {time.perf_counter() - begin:.1f} s")
        for path, process in polls.items():
            waits = sorted(json.loads(process.communicate(timeout=60)[0]))
            p99 = waits[int(0.99 * len(waits))]
            middle = statistics.median(waits)
            print(f"{path}: {len(waits)} answers, median {middle:.1f} ms, p99 {p99:.1f}, longest {waits[-1]:.1f}")
        for task in (*streams, long):
            task.cancel()
        await asyncio.gather(*streams, long, return_exceptions=True)


def main() -> None:
    """Serve, measure, end."""
    if sys.argv[1:2] == ["--poll"]:
        poll(sys.argv[2], sys.argv[3], 600.0)
        return
    command = [sys.executable, "-m", "minillm", "serve", "--port", "0", "--grace", "0", *sys.argv[1:]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "the server ended"
            found = re.search(r"serving .* at (http://\S+)", line)
        asyncio.run(measure(found[1]))
        process.terminate()


if __name__ == "__main__":
    main()
