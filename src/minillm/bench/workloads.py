"""Workloads: lists of requests with arrival times, made from a seed or read from a trace, the same every time.

A prompt is not stored as token ids but as *segments*: (key, length). The tokens of a segment follow from the
workload's seed and its key alone, so two requests that start with the same segments share a real prefix, and a trace of
100 million prompt tokens costs only its descriptions. Prompts that are given as ids (text) are kept as they are.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import NamedTuple

from minillm.core.errors import ConfigError


class Segment(NamedTuple):
    """`length` tokens that are the same wherever the key is; a shorter segment is the beginning of a longer one."""

    key: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request, before it is one.

    - ``arrival``: seconds from the start of the workload.
    - ``segments``, or ``ids`` where the prompt's tokens themselves are given.
    - ``max_tokens``: output tokens; all of them are generated (end-of-sequence ids are ignored).
    - ``label``: the class that results are grouped by ("chat", "code"); ``priority``: lower runs first.
    - ``follows``: index of the request whose prompt and actual output come before this prompt (the next turn of a
      conversation); it is due ``think`` seconds after that one's end, or at ``arrival`` if that is later.
    """

    arrival: float = 0.0
    segments: tuple[Segment, ...] = ()
    ids: tuple[int, ...] = ()
    max_tokens: int
    priority: int = 0
    label: str = ""
    user: str = ""
    salt: str | None = None
    follows: int | None = None
    think: float = 0.0

    @property
    def own_tokens(self) -> int:
        """Prompt tokens, without those of the conversation before."""
        return len(self.ids) if self.ids else sum(segment.length for segment in self.segments)


@lru_cache(maxsize=8192)
def _segment_ids(seed: int, key: str, length: int, vocab_size: int) -> tuple[int, ...]:
    import numpy

    generator = numpy.random.Generator(numpy.random.PCG64([seed & (2**64 - 1), zlib.crc32(key.encode()), len(key)]))
    # Scaling uniform doubles draws one number per token, so that a shorter segment is a prefix of a longer one.
    return tuple((generator.random(length) * vocab_size).astype(numpy.int64).tolist())


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival (a request that `follows` another comes after it), and where they are from."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    seed: int = 0
    source: str = ""
    """In words: the generator with its parameters, or the trace."""

    def __post_init__(self) -> None:
        previous = 0.0
        for index, request in enumerate(self.requests):
            if request.own_tokens < 1 or request.max_tokens < 1:
                raise ConfigError(
                    f"workload {self.name}: request {index} has {request.own_tokens} prompt tokens and "
                    f"max_tokens={request.max_tokens}; both must be at least 1"
                )
            if not previous <= request.arrival < math.inf:
                raise ConfigError(f"workload {self.name}: request {index} arrives at {request.arrival}, out of order")
            if request.follows is not None and not 0 <= request.follows < index:
                raise ConfigError(f"workload {self.name}: request {index} follows {request.follows}, not before it")
            previous = request.arrival

    def __len__(self) -> int:
        return len(self.requests)

    def token_ids(self, index: int, vocab_size: int) -> list[int]:
        """Own prompt tokens of a request, all below `vocab_size` (given ids beyond it wrap around)."""
        request = self.requests[index]
        if request.ids:
            return [token_id % vocab_size for token_id in request.ids]
        ids: list[int] = []
        for segment in request.segments:
            ids += _segment_ids(self.seed, segment.key, segment.length, vocab_size)
        return ids

    def prompt_tokens(self) -> list[int]:
        """Prompt tokens of each request, with those of the conversation before it."""
        totals: list[int] = []
        for request in self.requests:
            before = 0
            if request.follows is not None:
                before = totals[request.follows] + self.requests[request.follows].max_tokens
            totals.append(before + request.own_tokens)
        return totals

    @property
    def output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(request.max_tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Most prompt + output tokens of a request."""
        pairs = zip(self.prompt_tokens(), self.requests, strict=True)
        return max((prompt + request.max_tokens for prompt, request in pairs), default=0)

    @property
    def duration(self) -> float:
        """Seconds from the start to the last arrival."""
        return self.requests[-1].arrival if self.requests else 0.0

    def scaled(self, time: float) -> Workload:
        """The same with all times multiplied: 0.5 doubles the request rate."""
        if not 0 <= time < math.inf:
            raise ConfigError(f"time scale {time} must be a finite number >= 0")
        requests = (replace(r, arrival=r.arrival * time, think=r.think * time) for r in self.requests)
        return replace(self, requests=tuple(requests), source=f"{self.source}, times x {time:g}")

    def limited(
        self,
        *,
        rows: int | None = None,
        max_prompt: int | None = None,
        max_output: int | None = None,
        max_total: int | None = None,
        until: float | None = None,
    ) -> Workload:
        """The first `rows` requests, or those before `until` seconds, and lengths cut to at most so many tokens.

        Prompts are cut at their end, so that shared beginnings stay shared. `max_total` bounds prompt + output: the
        prompt is cut first, to leave room for the output (but never below one token).
        """
        requests = []
        for request in self.requests[:rows]:
            if until is not None and request.arrival >= until:
                break
            output = min(request.max_tokens, max_output or request.max_tokens)
            prompt = min(request.own_tokens, max_prompt or request.own_tokens)
            if max_total is not None:
                output = min(output, max(1, max_total - 1))
                prompt = max(1, min(prompt, max_total - output))
            requests.append(replace(_cut(request, prompt), max_tokens=output))
        limits = {"rows": rows, "prompt": max_prompt, "output": max_output, "total": max_total, "seconds": until}
        said = "".join(f", {name} <= {limit}" for name, limit in limits.items() if limit is not None)
        return replace(self, requests=tuple(requests), source=self.source + said)

    def labelled(self, label: str, *, priority: int = 0, user: str = "", salt: str | None = None) -> Workload:
        """The same with all requests of one class."""
        requests = (replace(r, label=label, priority=priority, user=user, salt=salt) for r in self.requests)
        return replace(self, requests=tuple(requests))

    def with_arrivals(self, rate: float, cv: float = 1.0) -> Workload:
        """The same requests arriving at `rate` per second, gamma-distributed gaps with variation `cv` (1: Poisson)."""
        times = arrivals(len(self), rate, cv, Random(f"{self.seed} arrivals"))
        requests = (replace(r, arrival=at) for r, at in zip(self.requests, times, strict=True))
        return replace(self, requests=tuple(requests), source=f"{self.source}, {rate:g} requests/s (CV {cv:g})")


def _cut(request: WorkloadRequest, length: int) -> WorkloadRequest:
    """The request with only the first `length` tokens of its own prompt."""
    if length >= request.own_tokens:
        return request
    if request.ids:
        return replace(request, ids=request.ids[:length])
    kept: list[Segment] = []
    for segment in request.segments:
        kept.append(segment._replace(length=min(segment.length, length)))
        length -= kept[-1].length
        if length == 0:
            break
    return replace(request, segments=tuple(kept))


def merged(name: str, *workloads: Workload) -> Workload:
    """Several workloads as one, by arrival time. Segments keep their own workload's tokens (by its place here)."""
    entries = heapq.merge(
        *(
            [(request.arrival, number, index) for index, request in enumerate(workload.requests)]
            for number, workload in enumerate(workloads)
        )
    )
    places: dict[tuple[int, int], int] = {}
    requests: list[WorkloadRequest] = []
    for _, number, index in entries:
        request = workloads[number].requests[index]
        segments = tuple(Segment(f"{number}/{segment.key}", segment.length) for segment in request.segments)
        follows = None if request.follows is None else places[number, request.follows]
        places[number, index] = len(requests)
        requests.append(replace(request, segments=segments, follows=follows))
    seed = workloads[0].seed if workloads else 0
    return Workload(name, tuple(requests), seed, " + ".join(workload.source for workload in workloads))


def arrivals(count: int, rate: float, cv: float, rng: Random) -> list[float]:
    """`count` arrival times in seconds at `rate` per second (infinite: all at once); gaps have variation `cv`."""
    if not rate > 0 or not cv >= 0:
        raise ConfigError(f"rate={rate} must be > 0 and cv={cv} must be >= 0")
    if rate == math.inf:
        return [0.0] * count
    now, times = 0.0, []
    for _ in range(count):
        now += rng.gammavariate(1 / cv**2, cv**2) / rate if cv else 1 / rate
        times.append(now)
    return times


# -- generators -------------------------------------------------------------------------------------------------------


def offline(requests: int = 256, seed: int = 0) -> Workload:
    """The public offline benchmark of nano-vllm and mini-sglang, to the token (`bench.py` of either).

    Python's `random.seed(0)`; per request a prompt length of 100 to 1024 and that many ids of 0 to 10,000; then, for
    all, an output length of 100 to 1024. All arrive at once. 256 requests make 133,966 output tokens.
    """
    rng = Random(seed)
    prompts = [tuple(rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))) for _ in range(requests)]
    made = tuple(WorkloadRequest(ids=ids, max_tokens=rng.randint(100, 1024)) for ids in prompts)
    return Workload("offline", made, seed, f"{requests} requests, 100-1024 in, 100-1024 out")


def fixed(requests: int, prompt: int, output: int, *, seed: int = 0) -> Workload:
    """Every request alike in length, different in tokens; all arrive at once."""
    made = (WorkloadRequest(segments=(Segment(f"r{i}", prompt),), max_tokens=output) for i in range(requests))
    return Workload("fixed", tuple(made), seed, f"{requests} requests, {prompt} in, {output} out")


def uniform(requests: int, prompt: tuple[int, int], output: tuple[int, int], *, seed: int = 0) -> Workload:
    """Lengths drawn evenly from ranges (both ends included); all arrive at once."""
    rng = Random(f"{seed} uniform")
    made = tuple(
        WorkloadRequest(segments=(Segment(f"r{i}", rng.randint(*prompt)),), max_tokens=rng.randint(*output))
        for i in range(requests)
    )
    source = f"{requests} requests, {prompt[0]}-{prompt[1]} in, {output[0]}-{output[1]} out"
    return Workload("uniform", made, seed, source)


def shared_prefix(
    requests: int, *, groups: int, prefix: int, suffix: tuple[int, int], output: tuple[int, int], seed: int = 0
) -> Workload:
    """`groups` system prompts of `prefix` tokens, drawn evenly; each request adds a suffix of its own."""
    rng = Random(f"{seed} shared_prefix")
    made = tuple(
        WorkloadRequest(
            segments=(Segment(f"g{rng.randrange(groups)}", prefix), Segment(f"r{i}", rng.randint(*suffix))),
            max_tokens=rng.randint(*output),
        )
        for i in range(requests)
    )
    source = f"{requests} requests, {groups} prefixes of {prefix}, {suffix[0]}-{suffix[1]} more"
    return Workload("shared-prefix", made, seed, f"{source}, {output[0]}-{output[1]} out")


def multi_turn(
    conversations: int,
    *,
    turns: int,
    system: int,
    message: tuple[int, int],
    output: tuple[int, int],
    rate: float = math.inf,
    think: float = 0.0,
    seed: int = 0,
) -> Workload:
    """Conversations that start at `rate` per second; each turn sends all that came before (answers as generated).

    `system` tokens are the same in all of them. The next turn comes `think` seconds after the answer.
    """
    rng = Random(f"{seed} multi_turn")
    starts = arrivals(conversations, rate, 1.0, rng)
    requests: list[WorkloadRequest] = []
    last: dict[int, int] = {}
    for turn in range(turns):
        for number, start in enumerate(starts):
            words = (Segment(f"c{number}.{turn}", rng.randint(*message)),)
            first = (Segment("system", system),) if system and not turn else ()
            requests.append(
                WorkloadRequest(
                    arrival=start,
                    segments=first + words,
                    max_tokens=rng.randint(*output),
                    user=f"c{number}",
                    follows=last.get(number),
                    think=think,
                )
            )
            last[number] = len(requests) - 1
    source = f"{conversations} conversations of {turns} turns, {system} shared + {message[0]}-{message[1]} tokens each"
    return Workload("multi-turn", tuple(_by_arrival(requests)), seed, f"{source}, {output[0]}-{output[1]} out")


def _by_arrival(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """Requests in order of arrival; equal arrivals keep their order, so those that follow others stay behind them."""
    order = sorted(range(len(requests)), key=lambda i: requests[i].arrival)
    place = {old: new for new, old in enumerate(order)}
    return [
        replace(requests[old], follows=None if (before := requests[old].follows) is None else place[before])
        for old in order
    ]


class LengthLaw(NamedTuple):
    """Lognormal token counts by two published percentiles: ln x is normal, mean ln p50, deviation ln(p90/p50)/1.2816.

    1.2816 is the 90th percentile of the standard normal distribution. Draws are cut to [1, most].
    """

    p50: float
    p90: float
    most: int

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm."""
        return math.log(self.p90 / self.p50) / 1.2815515655446004

    def draw(self, rng: Random) -> int:
        """One length in tokens."""
        return max(1, min(self.most, round(rng.lognormvariate(math.log(self.p50), self.sigma))))


class TraceLaw(NamedTuple):
    """Published figures of a production trace: lengths, requests per second, variation of the gaps."""

    prompt: LengthLaw
    output: LengthLaw
    rate: float
    cv: float
    source: str


AZURE_TRACE = "Azure LLM inference trace 2023 (Patel et al., Splitwise, ISCA 2024; CC-BY-4.0)"
LAWS = {
    "azure-conv": TraceLaw(
        LengthLaw(1020, 2734, 14050), LengthLaw(129, 424, 1000), 5.530, 1.09, f"{AZURE_TRACE}, conversation"
    ),
    "azure-code": TraceLaw(
        LengthLaw(1469, 5188, 7437), LengthLaw(13, 55, 1899), 2.567, 13.15, f"{AZURE_TRACE}, code completion"
    ),
    "mooncake-conv": TraceLaw(
        LengthLaw(6909, 27367, 126195),
        LengthLaw(350, 597, 2000),
        3.401,
        3.03,
        "Mooncake conversation trace (Qin et al., FAST 2025; Apache-2.0)",
    ),
    "servegen-reason": TraceLaw(
        LengthLaw(208, 2092, 57284),
        LengthLaw(792, 3432, 32768),
        16.01,
        2.28,
        "ServeGen, reasoning model (Xiang et al., 2025; Apache-2.0)",
    ),
}
"""Medians and 90th percentiles of tokens, mean rates and variation of gaps, over the whole of each trace."""


def lognormal(law: str | TraceLaw, requests: int, *, scale: float = 1.0, seed: int = 0) -> Workload:
    """Requests after a production trace's published figures; lengths times `scale`; arrivals at the trace's rate.

    Gaps are gamma-distributed with the trace's mean and variation (ServeGen finds gamma in most of its clients).
    """
    if isinstance(law, str):
        if law not in LAWS:
            raise ConfigError(f"law={law!r} is not known; known: {', '.join(LAWS)}")
        name, law = law, LAWS[law]
    else:
        name = "lognormal"
    if not 0 < scale < math.inf:
        raise ConfigError(f"scale={scale} must be a finite number > 0")
    rng = Random(f"{seed} {name}")

    def length(draw: Callable[[Random], int]) -> int:
        return max(1, round(draw(rng) * scale))

    times = arrivals(requests, law.rate, law.cv, rng)
    made = tuple(
        WorkloadRequest(
            arrival=at, segments=(Segment(f"r{i}", length(law.prompt.draw)),), max_tokens=length(law.output.draw)
        )
        for i, at in enumerate(times)
    )
    scaled = f", lengths x {scale:g}" if scale != 1 else ""
    return Workload(name, made, seed, f"{requests} requests, lognormal after: {law.source}{scaled}")


def at_once(workload: Workload) -> Workload:
    """The same with everything there from the start (an offline batch)."""
    requests = tuple(replace(request, arrival=0.0) for request in workload.requests)
    return replace(workload, requests=requests, source=f"{workload.source}, all at once")


def labels(requests: Iterable[WorkloadRequest]) -> list[str]:
    """The classes of requests, in order of first appearance."""
    return list(dict.fromkeys(request.label for request in requests))
