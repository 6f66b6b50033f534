"""Fuzz: malformed and extreme requests, against a server in its own process.

    PYTHONPATH=src python tests/server/run_fuzz.py --count 17000 --documented 3300

No answer may be a 5xx, every connection has its answer or its end in time, a normal request has its right answer after
each 1,000, and afterwards the engine is idle as before. `--first` goes on elsewhere; `--show N` prints request N.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import struct
import sys
import time
import urllib.request
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fuzz_http import Sent, hostile_request
from run_soak import STATE, idle_state, server_process

from minillm.bench.serve import own_server

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if tools %}{{ tools }}{% endif %}"
ENGINE = [
    *("max_num_seqs=16", "num_gpu_blocks_override=96", "max_model_len=128", "swap_space=0.01"),
    *("enable_prefix_caching=false", "max_waiting=256", f"chat_template={json.dumps(TEMPLATE)}"),
]
CLIENTS = 12
ANSWER_TIME = 120.0
"""Seconds that any request may take on a busy machine; a hang is more."""
ROUND = 1000
NORMAL = {"prompt": [5, 60, 7, 90], "max_tokens": 24, "temperature": 0, "ignore_eos": True}


class Fault(Exception):
    """The server did what it must not do."""


class CutOff(Exception):
    """An answer that ends too early: only a client that has closed its own side may see one."""


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    documented: int = 0
    checks: int = 0
    grown: list[float] = field(default_factory=list)
    """MiB of the server's memory above the first round's begin, after each round."""
    slowest: tuple[float, str] = (0.0, "")
    """Seconds, and which mutation."""


# -- one connection ----------------------------------------------------------------------------------------------------


async def _response(reader: asyncio.StreamReader, is_head: bool) -> tuple[int, bytes, bytes]:
    """The next response: status, head, body. EOFError where the connection ends before it begins."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise Fault(f"the connection ended in a head: {error.partial[:200]!r}") from None
        raise EOFError("closed") from None
    match = re.match(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n", head)
    if match is None:
        raise Fault(f"no status line: {head[:200]!r}")
    status = int(match[1])
    if 100 <= status < 200:
        return await _response(reader, is_head)
    fields = dict(re.findall(rb"\r\n([^:\r\n]+): ([^\r\n]*)", head.lower()))
    try:
        if is_head or status in (204, 304):
            body = b""
        elif fields.get(b"transfer-encoding") == b"chunked":
            body = await _chunked(reader)
        else:
            body = await reader.readexactly(int(fields[b"content-length"]))
    except asyncio.IncompleteReadError as error:
        raise CutOff(f"status {status}, but its body ends after {error.partial[-200:]!r}") from None
    except (KeyError, ValueError) as error:
        raise Fault(f"status {status} without a length: {error!r}") from None
    return status, head, body


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(parts)


def check_response(status: int, head: bytes, body: bytes) -> None:
    """Nothing is the server's fault; errors are error objects; streams have their end."""
    if status >= 500:
        raise Fault(f"status {status}: {body[:500]!r}")
    if b"text/event-stream" in head.lower():
        *frames, last, end = body.split(b"\n\n")
        if (last, end) != (b"data: [DONE]", b""):
            raise Fault(f"a stream without its end: ...{body[-300:]!r}")
        if any(b'"server_error"' in frame for frame in frames if frame.startswith(b'data: {"error"')):
            raise Fault(f"a stream failed: ...{body[-500:]!r}")
    elif b"application/json" in head.lower():
        value = json.loads(body) if body else {}
        if status >= 400 and body and set(value["error"]) != {"message", "type", "param", "code"}:
            raise Fault(f"status {status} without an error object: {body[:300]!r}")
    elif status >= 400 and body:
        raise Fault(f"status {status} without an error object: {body[:300]!r}")


async def converse(port: int, sent: Sent, statuses: Counter[str]) -> None:
    """Send it all and read all that comes. Raises :class:`Fault`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writing = asyncio.create_task(_write(writer, sent))
    came = 0
    try:
        if sent.end == "abort":
            await writing
            return
        while sent.answers is None or came < sent.answers:
            status, head, body = await _response(reader, sent.is_head)
            statuses[str(status)] += 1
            came += 1
            check_response(status, head, body)
        if rest := await reader.read(1000):
            raise Fault(f"after the last answer came {rest[:200]!r}")
    except (EOFError, CutOff) as error:
        if sent.answers is not None:
            raise Fault(f"{error} after {came} of {sent.answers} answers") from None
        statuses["closed"] += not came
    except ConnectionError as error:
        # An early refusal whose client still sends: the reset may overtake the answer.
        size = sum(len(part) for part in sent.parts if isinstance(part, bytes))
        if sent.answers is not None and came < sent.answers and size < 60_000:
            raise Fault(f"{error!r} after {came} of {sent.answers} answers") from None
        statuses["reset"] += 1
    finally:
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await writing
        writer.close()


async def _write(writer: asyncio.StreamWriter, sent: Sent) -> None:
    for part in sent.parts:
        if isinstance(part, float):
            await asyncio.sleep(part)
            continue
        writer.write(part)
        await writer.drain()
    if sent.end == "half":
        with contextlib.suppress(OSError):  # closed by the server already
            writer.write_eof()
    elif sent.end == "abort":
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()


# -- the whole run -----------------------------------------------------------------------------------------------------


def normal_answers(url: str) -> list[Any]:
    """What a normal completion, chat and stream bring."""

    def post(path: str, body: dict[str, Any]) -> bytes:
        request = urllib.request.Request(
            f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_TIME) as answer:
            return answer.read()

    whole = json.loads(post("/v1/completions", NORMAL))["choices"]
    frames = post("/v1/completions", {**NORMAL, "stream": True}).split(b"\n\n")
    texts = [json.loads(frame[6:])["choices"][0]["text"] for frame in frames if frame.startswith(b"data: {")]
    assert "".join(texts) == whole[0]["text"], "the stream differs from the whole answer"
    chat = {name: value for name, value in NORMAL.items() if name != "prompt"}
    chat["messages"] = [{"role": "user", "content": "hello"}]
    answer = json.loads(post("/v1/chat/completions", chat))
    return [whole, answer["choices"][0], answer["usage"]]


async def mutations(url: str, seed: int, first: int, count: int, outcome: Outcome) -> None:
    """Requests `first` to `first + count - 1` of a seed, by some clients at once."""
    port = int(url.rsplit(":", 1)[1])
    numbers = iter(range(first, first + count))

    async def work() -> None:
        for number in numbers:
            sent = hostile_request(seed, number)
            outcome.sent[sent.what] += 1
            begin = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_TIME):
                    await converse(port, sent, outcome.statuses)
            except Exception as error:
                what = f"a hang of {ANSWER_TIME:g} s" if isinstance(error, TimeoutError) else f"{error!r}"
                shown = b" | ".join(p if isinstance(p, bytes) else b"<%.3f s>" % p for p in sent.parts)
                outcome.faults.append(f"--seed {seed} --show {number} ({sent.what}): {what}\n  sent {shown[:1500]!r}")
            if (seconds := time.monotonic() - begin) > outcome.slowest[0]:
                outcome.slowest = (seconds, f"{number}, {sent.what}")

    await asyncio.gather(*(work() for _ in range(CLIENTS)))


def documented(url: str, seed: int, count: int, outcome: Outcome) -> None:
    """Cases that schemathesis makes of the server's own OpenAPI document, right ones and wrong ones."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error

    warnings.simplefilter("ignore")
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [operation for operation in operations if operation.path != "/dashboard/events"]  # has no end
    posts = [operation for operation in operations if operation.body]
    for operation in operations:
        others = len(operations) - len(posts)
        share, modes = count // 10 // others, [GenerationMode.POSITIVE]
        if operation in posts:
            share, modes = int(count * 0.9) // len(posts), list(GenerationMode)
        for mode in modes:
            strategy = operation.as_strategy(generation_mode=mode)

            @seeded(seed)
            @settings(
                max_examples=max(1, share // len(modes)),
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=strategy)
            def one(case: Any) -> None:
                if isinstance(case.body, dict):
                    if len(str(case.body)) % 8:  # most names are not served, and then nothing else is looked at
                        case.body.pop("model", None)
                    if isinstance(case.body.get("max_tokens"), int):
                        case.body["max_tokens"] %= 16
                outcome.documented += 1
                response = case.call(timeout=ANSWER_TIME)
                outcome.statuses[str(response.status_code)] += 1
                case.validate_response(response, checks=[not_a_server_error])

            try:
                one()
            except Exception as error:
                text = "\n".join([str(error), *getattr(error, "__notes__", ())])
                outcome.faults.append(f"schemathesis, {operation.label}: {text[:3000]}")


def fuzz(count: int, documented_count: int = 0, seed: int = 0, first: int = 0, quiet: bool = False) -> Outcome:
    """Start a server, send it all, and see how it is afterwards."""
    say = (lambda text: None) if quiet else lambda text: print(text, flush=True)
    outcome = Outcome()
    with own_server("random:tiny", "cpu", "float32", say, ENGINE) as url:
        right = normal_answers(url)
        before = asyncio.run(idle_state(url))
        process = server_process(url)
        memory = process.memory_info().rss
        begin = time.perf_counter()

        def look() -> None:
            outcome.checks += 1
            try:
                if (now := normal_answers(url)) != right:
                    outcome.faults.append(f"a normal request brings {now} instead of {right}")
            except Exception as error:
                outcome.faults.append(f"a normal request fails: {error!r}")
            outcome.grown.append((process.memory_info().rss - memory) / 2**20)
            total = sum(outcome.sent.values()) + outcome.documented
            say(
                f"{total} requests, {time.perf_counter() - begin:.0f} s, {outcome.grown[-1]:+.0f} MiB, "
                f"slowest {outcome.slowest[0]:.1f} s ({outcome.slowest[1]}), {len(outcome.faults)} faults"
            )

        for start in range(first, first + count, ROUND):
            asyncio.run(mutations(url, seed, start, min(ROUND, first + count - start), outcome))
            look()
        for part in range(0, documented_count, ROUND):
            documented(url, seed + part, min(ROUND, documented_count - part), outcome)
            look()
        after = asyncio.run(idle_state(url))
        outcome.faults += [f"{n}: {before[n]} before, {after[n]} after" for n in STATE if before[n] != after[n]]
    return outcome


def main() -> int:
    """Command line; exit code 1 for any fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=17_000, help="own mutations")
    parser.add_argument("--documented", type=int, default=3300, help="cases from the OpenAPI document")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--show", type=int, help="print this mutation and end")
    options = parser.parse_args()
    if options.show is not None:
        sent = hostile_request(options.seed, options.show)
        print(sent.what, sent.answers, sent.end, *sent.parts, sep="\n")
        return 0
    outcome = fuzz(options.count, options.documented, options.seed, options.first)
    print(f"own mutations: {sum(outcome.sent.values())} {dict(outcome.sent.most_common())}")
    print(f"schemathesis: {outcome.documented}")
    print(f"answers: {dict(outcome.statuses.most_common())}")
    print(f"normal requests right {outcome.checks} times; memory {outcome.grown[-1] if outcome.grown else 0:+.0f} MiB")
    for fault in outcome.faults[:40]:
        print(f"FAULT {fault}")
    print(f"{len(outcome.faults)} faults")
    return bool(outcome.faults)


if __name__ == "__main__":
    sys.exit(main())
