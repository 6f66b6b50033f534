"""`minillm bench prefix`: what sharing prefixes is worth, on a trace in virtual time and on a real model.

**Trace.** The Mooncake conversation trace names who shares what: every 512 prompt tokens have a hash id. The real
scheduler runs it with blocks of 512 tokens, so that an id is a block, in pools of a share of the distinct blocks; steps
are charged by a cost model. Beside its hit ratio stands that of a plain LRU list over the same ids, served in order of
arrival. What the scheduler loses against it goes to blocks that running requests hold, to outputs, which are cached
too, and to requests that come while the prefix they share is still being computed.

**Model.** One request at a time: system prompts of several lengths, each shared by several requests, with the cache and
without. The first request of each prompt pays for it.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from minillm.bench import common
from minillm.bench.recording import RunResult, latency_columns, percentile
from minillm.bench.runs import Target, drive, open_target, virtual_target, warm_up
from minillm.bench.traces import MOONCAKE_BLOCK, read_mooncake
from minillm.bench.virtual import H200_8B
from minillm.bench.wait_bound import Server, offered_load
from minillm.bench.workloads import LAWS, Segment, Workload, WorkloadRequest, arrivals, shared_prefix
from minillm.core.block_manager import blocks_for
from minillm.core.config import SchedulerConfig
from minillm.core.errors import ConfigError

Log = Callable[[str], None]

POOL_SHARES = (0.1, 0.3, 1.0)
"""Pools, as shares of the trace's distinct blocks."""
TURNS = 8
"""Of a generated conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run. `trace` is a Mooncake jsonl file; None makes conversations instead. `requests`: the first so many.

    `load` is work per second without a cache (see :mod:`minillm.bench.wait_bound`).
    """

    trace: Path | None = None
    requests: int | None = None
    pools: tuple[float, ...] = POOL_SHARES
    load: float = 0.8
    slots: int = 64
    prefill_tokens: int = 8192
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The run on a real model: `requests` per prefix length, `prompts` different system prompts, `repeats` rounds."""

    model: str = "smollm2-135m"
    prefixes: tuple[int, ...] = (64, 128, 256, 512, 1024)
    prompts: int = 2
    requests: int = 12
    suffix: tuple[int, int] = (8, 32)
    output: int = 4
    repeats: int = 3
    seed: int = 0


def make_workload(options: Options) -> Workload:
    """The trace, or conversations in its manner."""
    if options.trace is not None:
        return read_mooncake(options.trace, rows=options.requests, seed=options.seed)
    return conversations(max(1, (options.requests or 2000) // TURNS), seed=options.seed)


def conversations(count: int, *, rate: float = 0.4, pause: float = 60.0, seed: int = 0) -> Workload:
    """`count` conversations of eight turns, as a trace shows them: each prompt says all that was said before.

    They start at `rate` per second, with gaps like the trace's (CV 3), and a turn comes `pause` seconds after the last.
    All share one block; a turn adds 1 to 5 blocks and a few tokens that no later turn repeats (as in the trace, where a
    partly filled block's id is not found again).
    """
    rng = Random(f"{seed} conversations")
    requests = []
    for number, start in enumerate(arrivals(count, rate, 3.03, rng)):
        said = [Segment("system", MOONCAKE_BLOCK)]
        for turn in range(TURNS):
            said += [Segment(f"c{number}.{len(said) + i}", MOONCAKE_BLOCK) for i in range(rng.randint(1, 5))]
            tail = Segment(f"t{number}.{turn}", rng.randint(1, MOONCAKE_BLOCK - 1))
            output = LAWS["mooncake-conv"].output.draw(rng)
            requests.append(WorkloadRequest(arrival=start + pause * turn, segments=(*said, tail), max_tokens=output))
    requests.sort(key=lambda request: request.arrival)
    source = f"{count} conversations of {TURNS} turns, {MOONCAKE_BLOCK} tokens shared by all, 1-5 blocks more per turn"
    return Workload("conversations", tuple(requests), seed, source)


# -- the trace in virtual time ----------------------------------------------------------------------------------------


def full_blocks(workload: Workload) -> list[list[str]]:
    """Keys of each prompt's full blocks; ConfigError if its segments are no blocks."""
    prompts = []
    for index, request in enumerate(workload.requests):
        *whole, last = request.segments
        if any(segment.length != MOONCAKE_BLOCK for segment in whole) or last.length > MOONCAKE_BLOCK:
            raise ConfigError(f"workload {workload.name}: request {index} is not made of {MOONCAKE_BLOCK}-token blocks")
        prompts.append([segment.key for segment in request.segments if segment.length == MOONCAKE_BLOCK])
    return prompts


def lru_hit_ratio(prompts: Sequence[Sequence[str]], lengths: Sequence[int], capacity: int) -> float:
    """Share of blocks found in an LRU list of `capacity` blocks, prompt after prompt, each done at once.

    As in the scheduler, at least one token of a prompt is computed: of `length` tokens (length - 1) // 512 blocks are
    looked up, and what follows a miss is a miss. A prompt's last block is the first to go.
    """
    cached: OrderedDict[str, None] = OrderedDict()
    hits = lookups = 0
    for keys, length in zip(prompts, lengths, strict=True):
        wanted = (length - 1) // MOONCAKE_BLOCK
        lookups += wanted
        for key in keys[:wanted]:
            if key not in cached:
                break
            hits += 1
        for key in reversed(keys):
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits / lookups if lookups else 0.0


def measure(options: Options, log: Log) -> Iterator[dict[str, str]]:
    """Run the trace without a cache, then in every pool; yields a row each."""
    from minillm.doctor import cpu_name

    workload = make_workload(options)
    server = Server(H200_8B, options.slots, options.prefill_tokens)
    workload = workload.scaled(offered_load(workload, server) / options.load)
    prompts = full_blocks(workload)
    lengths = [request.own_tokens for request in workload.requests]
    distinct = len({segment.key for request in workload.requests for segment in request.segments})
    where = common.environment(f"virtual time (8B on one H200), simulated on {cpu_name()}", packages=())
    log(f"{len(workload)} requests, {sum(lengths):,} prompt tokens, {distinct:,} distinct blocks")
    for share in (None, *options.pools):
        blocks = distinct if share is None else math.ceil(distinct * share)
        begin = time.perf_counter()
        with virtual_target(H200_8B, _config(blocks, options, enabled=share is not None)) as target:
            result = drive(target, workload)
            counters = target.engine.scheduler.prefix_cache.counters
        took = time.perf_counter() - begin
        row = {
            "cache": "off" if share is None else "on",
            "pool_share": "" if share is None else f"{share:g}",
            "pool_blocks": str(blocks),
            "load": f"{options.load:g}",
            "requests": str(len(workload)),
            "prompt_tokens": str(sum(lengths)),
            "cached_tokens": str(result.counters.cached_tokens),
            "hit_ratio": f"{counters.hits / max(1, counters.hits + counters.misses):.5f}",
            "lru_hit_ratio": "" if share is None else f"{lru_hit_ratio(prompts, lengths, blocks):.5f}",
            "evictions": str(counters.evictions),
            "preemptions": str(result.counters.preemptions_swap + result.counters.preemptions_recompute),
            **_latencies(result),
            "took_s": f"{took:.1f}",
            "seed": str(options.seed),
            "workload": workload.source,
            **where,
        }
        log(f"pool {row['pool_share'] or 'without cache'}: hits {row['hit_ratio']}, {took:.0f} s for {row['run_s']} s")
        yield row


def _config(blocks: int, options: Options, *, enabled: bool) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=blocks,
        block_size=MOONCAKE_BLOCK,
        max_num_seqs=options.slots,
        max_num_batched_tokens=options.prefill_tokens + options.slots,
        max_prefill_tokens_per_step=options.prefill_tokens,
        enable_prefix_caching=enabled,
    )


def _latencies(result: RunResult) -> dict[str, str]:
    columns = {name: f"{value:.5f}" for name, value in latency_columns(result.requests).items() if "ttft" in name}
    return {**columns, "steps": str(len(result.steps)), "run_s": f"{result.seconds:.1f}"}


# -- the real model ---------------------------------------------------------------------------------------------------


def measure_model(options: ModelOptions, log: Log) -> Iterator[dict[str, str]]:
    """Time prompts that share system prompts, with the cache and without in turn; yields a row per run."""
    longest = max(options.prefixes) + options.suffix[1] + options.output
    contenders: dict[str, Target] = {}
    try:
        for cache in ("off", "on"):
            contenders[cache] = open_target(
                options.model,
                enable_prefix_caching=cache == "on",
                max_num_seqs=1,
                max_num_batched_tokens=max(2048, longest),
                max_model_len=longest,
                # Room for all: what eviction costs is the trace's subject.
                num_gpu_blocks_override=blocks_for(longest, 16) * (options.prompts + options.requests),
            )
            warm_up(contenders[cache])
        for prefix in options.prefixes:
            workload = shared_prefix(
                options.requests,
                groups=options.prompts,
                prefix=prefix,
                suffix=options.suffix,
                output=(options.output, options.output),
                seed=options.seed,
            )
            for repeat in range(options.repeats):
                for cache in ("off", "on") if repeat % 2 else ("on", "off"):
                    yield _model_row(contenders[cache], workload, prefix, cache, repeat, options)
            log(f"prefixes of {prefix} tokens: done")
    finally:
        for target in contenders.values():
            target.engine.close()


def _model_row(
    target: Target, workload: Workload, prefix: int, cache: str, repeat: int, options: ModelOptions
) -> dict[str, str]:
    result = drive(target, workload, concurrency=1)
    prompt = sum(request.own_tokens for request in workload.requests)
    ttfts = [record.ttft * 1000 for record in result.requests]
    return {
        "prefix": str(prefix),
        "cache": cache,
        "repeat": str(repeat),
        "requests": str(len(workload)),
        "prompt_tokens": str(prompt),
        "cached_tokens": str(result.counters.cached_tokens),
        "ttft_mean_ms": f"{sum(ttfts) / len(ttfts):.3f}",
        **{f"ttft_p{share}_ms": f"{percentile(ttfts, share / 100):.3f}" for share in (50, 90)},
        "seed": str(options.seed),
        "workload": f"{target.name}, {target.dtype}; {workload.source}",
        **common.environment(target.device),
    }
