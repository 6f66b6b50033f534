"""Soak: clients that hang up at random beside clients that wait, against a server in its own process.

    PYTHONPATH=src python tests/server/run_soak.py --requests 2000 --clients 64

Every request that is not abandoned must get the answer that it gets alone; afterwards the engine is in the state that
it started in; the server's memory has hardly grown. The pool is small, so that requests are preempted both ways.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
import psutil

from minillm.bench.serve import own_server

ENGINE = ["max_num_seqs=16", "num_gpu_blocks_override=96", "max_model_len=256", "swap_space=0.01"]
STATE = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "num_requests_prefilling",
    "kv_blocks_free",
    "kv_blocks_quarantined",
    "kv_blocks_referenced",
    "kv_blocks_shared",
    "swap_slots_used",
    "swap_slots_total",
)
"""Gauges that must come back to their value. The prefix cache is off, so that all free blocks are free."""
IDLE_TIMEOUT = 60.0
MAX_GROWTH = 50 << 20


@dataclass(slots=True)
class Outcome:
    """What came of a soak."""

    answered: int = 0
    hung_up: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    start: dict[str, float] = field(default_factory=dict)
    end: dict[str, float] = field(default_factory=dict)
    grown_bytes: int = 0
    preemptions: float = 0.0
    seconds: float = 0.0

    @property
    def faults(self) -> list[str]:
        """Everything that is not as it should be."""
        faults = list(self.wrong)
        faults += [
            f"{name}: {self.start[name]} before, {self.end[name]} after"
            for name in STATE
            if self.start[name] != self.end[name]
        ]
        if self.grown_bytes > MAX_GROWTH:
            faults.append(f"the server grew by {self.grown_bytes / 2**20:.1f} MiB")
        return faults


def make_bodies(count: int, rng: Random) -> list[dict[str, Any]]:
    """Different requests of every kind that the server has for completions."""
    bodies = []
    for number in range(count):
        body: dict[str, Any] = {
            "prompt": [rng.randrange(3, 250) for _ in range(rng.randint(1, 120))],
            "max_tokens": rng.randint(1, 60),
            "ignore_eos": True,
            "temperature": rng.choice([0, 0, 0.8]),
            "seed": number,
            "user": f"u{number % 5}",
            "priority": rng.choice([0, 0, 1, 2]),
        }
        if number % 7 == 0:
            body["n"] = 2
        if number % 5 == 0:
            body["logprobs"] = 2
        bodies.append(body)
    return bodies


class Client:
    """One client of many: sends a request, waits for its answer or hangs up."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = f"{url}/v1/completions"
        self._session = session

    async def whole(self, body: dict[str, Any]) -> list[str]:
        """The texts of the answer, one per choice."""
        async with self._session.post(self._url, json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {answer}")
            return [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]

    async def streamed(self, body: dict[str, Any], stop_after: int | None = None) -> list[str] | None:
        """The same over a stream; None where it hung up after so many events."""
        texts = [""] * body.get("n", 1)
        events = 0
        async with self._session.post(self._url, json={**body, "stream": True}) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return texts
                if line.startswith(b"data: "):
                    for choice in json.loads(line[6:]).get("choices", ()):
                        texts[choice["index"]] += choice["text"]
                    events += 1
                    if events == stop_after:
                        response.close()
                        return None
        raise RuntimeError("the stream ended without [DONE]")

    async def hang_up(self, body: dict[str, Any], how: str, rng: Random) -> None:
        """Leave: before anything came, in the middle of a stream, or of a whole answer."""
        if how == "in a stream":
            await self.streamed(body, stop_after=rng.randint(1, 6))
            return
        call = self.whole(body) if how.startswith("whole") else self.streamed(body)
        delay = rng.random() * (0.01 if how.endswith("at once") else 0.5)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call, delay)


WAYS = ("in a stream", "stream, at once", "stream, later", "whole, at once", "whole, later")


async def drive(url: str, bodies: list[dict[str, Any]], requests: int, clients: int, seed: int) -> Outcome:
    """Solo answers first, then everything at once."""
    outcome = Outcome()
    connector = aiohttp.TCPConnector(limit=0, force_close=False)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        client = Client(url, session)
        alone = [await client.whole(body) for body in bodies]
        outcome.start = await idle_state(url)
        process = server_process(url)
        before = process.memory_info().rss
        begin = time.perf_counter()
        numbers = iter(range(requests))

        async def work(name: int) -> None:
            rng = Random(f"{seed} {name}")
            for _ in numbers:
                which = rng.randrange(len(bodies))
                body = bodies[which]
                if rng.random() < 1 / 3:
                    how = rng.choice(WAYS)
                    outcome.hung_up[how] += 1
                    await client.hang_up(body, how, rng)
                    continue
                try:
                    call = client.streamed(body) if rng.random() < 0.5 else client.whole(body)
                    texts = await call
                except Exception as error:
                    outcome.wrong.append(f"request {which}: {error!r}")
                    continue
                outcome.answered += 1
                if texts != alone[which]:
                    outcome.wrong.append(f"request {which}: {texts} instead of {alone[which]}")

        await asyncio.gather(*(work(name) for name in range(clients)))
        outcome.seconds = time.perf_counter() - begin
        outcome.end = await idle_state(url)
        outcome.grown_bytes = process.memory_info().rss - before
        outcome.preemptions = metrics(url)["num_preemptions_total"]
    return outcome


def metrics(url: str) -> dict[str, float]:
    """Every sample of /metrics without its labels; the last one of a name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(r"^\w+?:(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


async def idle_state(url: str) -> dict[str, float]:
    """The gauges once nothing runs."""
    end = time.monotonic() + IDLE_TIMEOUT
    while True:
        now = await asyncio.to_thread(metrics, url)
        busy = [now[name] for name in STATE[:4]]
        if (not any(busy) and not now["kv_blocks_referenced"]) or time.monotonic() > end:
            return {name: now[name] for name in STATE}
        await asyncio.sleep(0.1)


def server_process(url: str) -> psutil.Process:
    """The child process that listens there."""
    port = int(url.rsplit(":", 1)[1])
    for process in psutil.Process().children(recursive=True):
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("tcp")):
            return process
    raise RuntimeError(f"no child listens at {url}")


def soak(
    requests: int, clients: int, seed: int = 0, model: str = "random:tiny", kinds: int = 60, quiet: bool = False
) -> Outcome:
    """Start a server, drive it, and see how it is afterwards."""
    say = (lambda text: None) if quiet else print
    fields = [*ENGINE, "enable_prefix_caching=false"]
    with own_server(model, "cpu", "float32", say, fields) as url:
        return asyncio.run(drive(url, make_bodies(kinds, Random(seed)), requests, clients, seed))


def main() -> int:
    """Command line; exit code 1 for any fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--model", default="random:tiny")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcome = soak(options.requests, options.clients, options.seed, options.model)
    print(
        f"{outcome.answered} answered as alone, {sum(outcome.hung_up.values())} hung up {dict(outcome.hung_up)}, "
        f"{outcome.preemptions:.0f} preemptions, memory {outcome.grown_bytes / 2**20:+.1f} MiB, {outcome.seconds:.0f} s"
    )
    for fault in outcome.faults[:20]:
        print(f"FAULT {fault}")
    print(f"{len(outcome.faults)} faults")
    return bool(outcome.faults)


if __name__ == "__main__":
    sys.exit(main())
