"""A load generator for OpenAI-compatible servers: requests out on time, every token's arrival noted.

Open loop: each request goes out when the workload says that it is due, whatever the server does; what the server
makes late counts. Closed loop: `concurrency` requests at a time, the next when one has ended.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minillm.bench.workloads import Workload
from minillm.core.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and how it is asked.

    `vocab_size` bounds the random ids of prompts (completions); chat prompts are as many common words, which are about
    as many tokens. `extra` goes into every body.
    """

    url: str
    model: str
    endpoint: str = "completions"
    api_key: str | None = None
    vocab_size: int = 10_000
    ignore_eos: bool = True
    timeout: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(f"endpoint={self.endpoint!r} must be one of {', '.join(ENDPOINTS)}")
        server_root(self.url)
        if self.vocab_size < 1:
            raise ConfigError(f"vocab_size={self.vocab_size} must be at least 1")

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return authorization(self.api_key)

    @property
    def address(self) -> str:
        """Where requests go."""
        return server_root(self.url) + ENDPOINTS[self.endpoint]

    def body(self, workload: Workload, index: int) -> bytes:
        """A request of the workload as JSON."""
        request = workload.requests[index]
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **({"user": request.user} if request.user else {}),
            **({"priority": request.priority} if request.priority else {}),
            **self.extra,
        }
        ids = workload.token_ids(index, self.vocab_size)
        if self.endpoint == "completions":
            body["prompt"] = ids
        else:
            body["messages"] = [{"role": "user", "content": " ".join(_WORDS[i % len(_WORDS)] for i in ids)}]
        return json.dumps(body).encode()


@dataclass(slots=True)
class Answer:
    """One request's answer; times in seconds from the start of the run, NaN for what never came."""

    index: int
    label: str
    due: float
    first_token: float = math.nan
    end: float = math.nan
    prompt_tokens: int = 0
    output_tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    """Seconds between the chunks that brought text: inter-token latencies, if a chunk is a token."""
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to the first token."""
        return self.first_token - self.due

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; NaN for an output of one."""
        return (self.end - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan

    @property
    def latency(self) -> float:
        """Seconds from when it was due to the end."""
        return self.end - self.due


def server_root(url: str) -> str:
    """A server's address without what clients may add to it: the official one wants the API's `/v1` in it."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url={url!r} must start with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that carries a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def served_models(url: str, api_key: str | None = None, timeout: float = 30.0) -> list[str]:
    """Names of the models that the server lists, at least one. Raises :class:`ConfigError` where no server answers."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    request = Request(f"{server_root(url)}/v1/models", headers=authorization(api_key))
    try:
        with urlopen(request, timeout=timeout) as answer:
            names = [str(entry["id"]) for entry in json.load(answer)["data"]]
        if names:
            return names
        reason = "it lists none"
    except HTTPError as error:
        reason = f"HTTP {error.code}: {error_message(error.read(1 << 16))}"
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        reason = str(error)
    raise ConfigError(f"url={url!r} does not answer as a server of models: {reason}")


def error_message(body: bytes | str) -> str:
    """A server's words in an error body of whatever form, in one line of at most 200 characters."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        pass
    return " ".join(text.split())[:200]


def run_load(
    target: Target,
    workload: Workload,
    *,
    concurrency: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Answer], float]:
    """Send the workload; returns one answer per request, and the seconds from the start to the last end.

    `concurrency` None is the open loop. Raises :class:`ConfigError` for a workload whose requests follow each other's
    answers: their tokens are not known here.
    """
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ConfigError("the load generator needs aiohttp: pip install 'minillm-runtime[benchmark]'") from error
    if any(request.follows is not None for request in workload.requests):
        raise ConfigError(
            f"workload {workload.name}: its requests follow each other's answers, which HTTP does not tell"
        )
    return asyncio.run(_run(target, workload, concurrency, progress))


async def _run(
    target: Target, workload: Workload, concurrency: int | None, progress: Callable[[int, int], None] | None
) -> tuple[list[Answer], float]:
    import aiohttp

    bodies = [target.body(workload, index) for index in range(len(workload))]
    places = asyncio.Semaphore(concurrency) if concurrency is not None else None
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=target.timeout)
    done = 0
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=target.headers) as session:
        start = time.perf_counter()

        async def one(index: int) -> Answer:
            nonlocal done
            request = workload.requests[index]
            if places is None:
                await asyncio.sleep(start + request.arrival - time.perf_counter())
                answer = Answer(index, request.label, request.arrival)
                await _ask(session, target, bodies[index], answer, start)
            else:
                async with places:
                    answer = Answer(index, request.label, time.perf_counter() - start)
                    await _ask(session, target, bodies[index], answer, start)
            done += 1
            if progress is not None:
                progress(done, len(workload))
            return answer

        answers = await asyncio.gather(*(one(index) for index in range(len(workload))))
        return list(answers), time.perf_counter() - start


async def _ask(session: aiohttp.ClientSession, target: Target, body: bytes, answer: Answer, start: float) -> None:
    """Send one request and read its stream to the end; what goes wrong is noted in the answer."""
    import aiohttp

    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(target.address, data=body, headers=headers) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {error_message(await response.read())}"
                return
            await _read(response.content, answer, start)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        # Of a connection, or of events that are not what the API says: either is this request's alone.
        answer.error = f"{type(error).__name__}: {error}"


async def _read(stream: aiohttp.StreamReader, answer: Answer, start: float) -> None:
    last = math.nan
    ended = False
    async for line in stream:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        now = time.perf_counter() - start
        if data == b"[DONE]":
            ended = True
            break
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"])[:200]
            continue
        if event.get("usage"):
            answer.prompt_tokens = event["usage"]["prompt_tokens"]
            answer.output_tokens = event["usage"]["completion_tokens"]
        if _brings_text(event):
            if math.isnan(last):
                answer.first_token = now
            else:
                answer.gaps.append(now - last)
            last = now
    answer.end = time.perf_counter() - start
    if not ended and not answer.error:
        answer.error = "the stream ended without [DONE]"
    if not answer.output_tokens and not answer.error:
        answer.output_tokens = len(answer.gaps) + (not math.isnan(last))


def _brings_text(event: dict[str, Any]) -> bool:
    for choice in event.get("choices", ()):
        delta = choice.get("delta", choice)
        if delta.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """What a request must keep to count as good, in milliseconds; None asks for nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None

    def kept_by(self, answer: Answer) -> bool:
        """Whether the request ended without error and kept all of them (an output of one token has no TPOT)."""
        if answer.error:
            return False
        pairs = ((self.ttft_ms, answer.ttft), (self.tpot_ms, answer.tpot), (self.latency_ms, answer.latency))
        return all(goal is None or math.isnan(seconds) or seconds * 1e3 <= goal for goal, seconds in pairs)


def good(answers: Sequence[Answer], goals: Goals) -> int:
    """Requests that kept the goals."""
    return sum(goals.kept_by(answer) for answer in answers)
