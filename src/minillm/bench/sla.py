"""`minillm bench sla`: what priority classes get under load, by queue policy.

Three classes share one engine: *interactive* (three quarters of the Azure conversation trace), *code* (the code
completion trace, which comes in bursts of hundreds) and *batch* (the rest of the conversations). The traces are merged
by time, each from its own first request; without files, requests are drawn after their published figures. Loads are
work per second (see :mod:`minillm.bench.wait_bound`): up to 1 a full engine is sure to keep up in the long run.

The hour is run in virtual time: the real scheduler and step loop, steps charged by a cost model. The pool holds what
the slots can, and nobody is preempted, so that only the order of the queue differs between the policies. With `--model`
a short piece of the same is run on a real model, at a load measured there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from minillm.bench import common
from minillm.bench.recording import RequestRecord, RunResult, percentile
from minillm.bench.runs import Target, drive, open_target, virtual_target, warm_up
from minillm.bench.traces import read_azure
from minillm.bench.virtual import H200_8B
from minillm.bench.wait_bound import Server, offered_load, wait_bounds
from minillm.bench.workloads import LAWS, Workload, at_once, lognormal, merged
from minillm.core.block_manager import blocks_for
from minillm.core.config import SchedulerConfig

Log = Callable[[str], None]

BLOCK_SIZE = 16
AGED = "priority + ageing"
"""Name of the policy, before its interval."""


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """A class with its objectives in seconds: to the first token, and per token after it."""

    name: str
    priority: int
    ttft: float
    tpot: float


CLASSES = (
    ServiceClass("interactive", 0, 1.0, 0.05),
    ServiceClass("code", 1, 20.0, 0.05),
    ServiceClass("batch", 2, 120.0, 0.10),
)
MODEL_CLASSES = (
    ServiceClass("interactive", 0, 1.0, 0.25),
    ServiceClass("code", 1, 5.0, 0.25),
    ServiceClass("batch", 2, 30.0, 0.50),
)
"""Objectives of the short run on a real model, which takes seconds where the trace takes minutes."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A contender. `fair` gives each class the same share of tokens, so its requests carry no priority."""

    name: str
    queue_policy: str
    ageing: float | None = None
    uses_priority: bool = True

    @property
    def bounded(self) -> bool:
        """Whether the longest wait has a bound that is known before the run."""
        return self.ageing is not None or self.queue_policy == "fcfs"


def policies(ageing: Sequence[float]) -> list[Policy]:
    """The contenders, with one of `priority` for each ageing interval in seconds."""
    return [
        Policy("fcfs", "fcfs", uses_priority=False),
        Policy("fair", "fair", uses_priority=False),
        Policy("priority", "priority"),
        *(Policy(f"{AGED} {interval:g} s", "priority", ageing=interval) for interval in ageing),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run. `conversation` and `code` are Azure 2023 csv files; None draws after their published figures.

    `minutes` of the traces are taken. `ageing` are intervals in seconds; `prefill_tokens` is a step's prefill budget.
    """

    conversation: Path | None = None
    code: Path | None = None
    minutes: float = 20.0
    loads: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
    ageing: tuple[float, ...] = (60.0, 20.0)
    slots: int = 64
    prefill_tokens: int = 1024
    batch_share: float = 0.25
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The short run on a real model: lengths are the trace's divided by `shrink`; policies take turns in `rounds`."""

    model: str = "smollm2-135m"
    requests: int = 120
    rounds: int = 2
    shrink: float = 16.0
    load: float = 0.9
    ageing: tuple[float, ...] = (30.0,)
    slots: int = 8
    prefill_tokens: int = 128
    batch_share: float = 0.25
    seed: int = 0
    conversation: Path | None = None
    code: Path | None = None


def make_workload(options: Options) -> Workload:
    """The classes merged by time."""
    span = options.minutes * 60
    parts = []
    for law, path in (("azure-conv", options.conversation), ("azure-code", options.code)):
        if path is None:
            parts.append(lognormal(law, math.ceil(span * LAWS[law].rate), seed=options.seed).limited(until=span))
        else:
            parts.append(read_azure(path, seed=options.seed).limited(until=span))
    conversation, code = parts
    interactive, code_class, batch = CLASSES
    rng = Random(f"{options.seed} classes")
    requests = tuple(
        _in_class(request, batch if rng.random() < options.batch_share else interactive)
        for request in conversation.requests
    )
    code = replace(code, requests=tuple(_in_class(request, code_class) for request in code.requests))
    return merged("sla", replace(conversation, requests=requests), code)


def _in_class(request: Any, klass: ServiceClass) -> Any:
    return replace(request, label=klass.name, user=klass.name, priority=klass.priority)


def measure(options: Options, log: Log) -> Iterator[list[dict[str, str]]]:
    """Run every load under every policy in virtual time; yields each run's rows, one per class."""
    from minillm.doctor import cpu_name

    workload = make_workload(options)
    server = Server(H200_8B, options.slots, options.prefill_tokens)
    where = common.environment(f"virtual time (8B on one H200), simulated on {cpu_name()}", packages=())
    for load in options.loads:
        scaled = workload.scaled(offered_load(workload, server) / load)
        for policy in policies(options.ageing):
            bounds = wait_bounds(scaled, server, policy.ageing) if policy.bounded else None
            with virtual_target(H200_8B, _config(scaled, policy, server)) as target:
                result = drive(target, _under(policy, scaled))
            log(f"load {load:g}, {policy.name}: {result.seconds:.0f} s of traffic, {len(result.steps)} steps")
            yield _rows(CLASSES, load, policy, scaled, result, bounds, options.seed, where)


def _config(workload: Workload, policy: Policy, server: Server) -> SchedulerConfig:
    """A pool that the slots cannot exhaust, and no preemption for waiting requests: only the order matters."""
    totals = sorted(request.own_tokens + request.max_tokens for request in workload.requests)[-server.slots :]
    return SchedulerConfig(
        num_blocks=sum(blocks_for(total, BLOCK_SIZE) + 1 for total in totals),
        block_size=BLOCK_SIZE,
        max_num_seqs=server.slots,
        max_num_batched_tokens=server.prefill_tokens + server.slots,
        max_prefill_tokens_per_step=server.prefill_tokens,
        queue_policy=policy.queue_policy,
        ageing_interval=policy.ageing,
        max_preemptions=0,
        enable_prefix_caching=False,
    )


def _under(policy: Policy, workload: Workload) -> Workload:
    """The workload as the policy is to see it."""
    if policy.uses_priority:
        return workload
    return replace(workload, requests=tuple(replace(request, priority=0) for request in workload.requests))


# -- the real model ---------------------------------------------------------------------------------------------------


def measure_model(options: ModelOptions, log: Log) -> Iterator[list[dict[str, str]]]:
    """The same classes on a real model. Load 1 is the rate at which it serves them when all are there at once."""
    workload = _model_workload(options)
    contenders = policies(options.ageing)
    targets: list[Target] = []
    results: list[list[RunResult]] = [[] for _ in contenders]
    try:
        for policy in contenders:
            targets.append(_open(options, policy, workload.longest))
            warm_up(targets[-1])
        seconds = drive(targets[0], at_once(_under(contenders[0], workload))).seconds
        scaled = workload.scaled(seconds / workload.duration / options.load)
        log(f"all at once: {seconds:.1f} s, so load {options.load:g} is {scaled.duration:.1f} s of arrivals")
        for number in range(options.rounds):
            order = [(number + index) % len(contenders) for index in range(len(contenders))]
            for index in order:
                results[index].append(drive(targets[index], _under(contenders[index], scaled)))
                log(f"round {number + 1}, {contenders[index].name}: {results[index][-1].seconds:.1f} s")
        where = common.environment(targets[0].device)
    finally:
        for target in targets:
            target.engine.close()
    for policy, runs in zip(contenders, results, strict=True):
        together = replace(runs[0], requests=[record for run in runs for record in run.requests])
        yield _rows(MODEL_CLASSES, options.load, policy, scaled, together, None, options.seed, where)


def _open(options: ModelOptions, policy: Policy, longest: int) -> Target:
    return open_target(
        options.model,
        scheduling_policy=policy.queue_policy,
        ageing_interval=policy.ageing,
        max_num_seqs=options.slots,
        max_num_batched_tokens=options.prefill_tokens + options.slots,
        max_prefill_tokens_per_step=options.prefill_tokens,
        max_model_len=longest,
        max_preemptions=0,
        enable_prefix_caching=False,
    )


def _model_workload(options: ModelOptions) -> Workload:
    """The first requests of the trace, lengths divided."""
    source = Options(
        conversation=options.conversation,
        code=options.code,
        batch_share=options.batch_share,
        seed=options.seed,
        minutes=60.0,
    )
    workload = make_workload(source).limited(rows=options.requests)

    def shrunk(tokens: int) -> int:
        return max(1, round(tokens / options.shrink))

    requests = []
    for request in workload.requests:
        (segment,) = request.segments
        segments = (segment._replace(length=shrunk(segment.length)),)
        requests.append(replace(request, segments=segments, max_tokens=shrunk(request.max_tokens)))
    return replace(workload, requests=tuple(requests), source=f"{workload.source}, lengths / {options.shrink:g}")


# -- rows -------------------------------------------------------------------------------------------------------------


def _rows(
    classes: Sequence[ServiceClass],
    load: float,
    policy: Policy,
    workload: Workload,
    result: RunResult,
    bounds: Sequence[float] | None,
    seed: int,
    where: Mapping[str, str],
) -> list[dict[str, str]]:
    rows = []
    for klass in classes:
        records = result.of_label(klass.name)
        if records:
            row = {
                "load": f"{load:g}",
                "policy": policy.name,
                "ageing_s": f"{policy.ageing:g}" if policy.ageing else "",
                "class": klass.name,
                "priority": str(klass.priority),
                "requests": str(len(records)),
                **_class_columns(klass, records, bounds),
                "preemptions": str(sum(record.preemptions for record in records)),
                "requests_per_s": f"{len(workload) / workload.duration:.3f}",
                "mean_batch": f"{result.mean_batch:.1f}",
                "run_s": f"{result.seconds:.1f}",
                "seed": str(seed),
                "workload": workload.source,
                **where,
            }
            rows.append(row)
    return rows


def _class_columns(
    klass: ServiceClass, records: Sequence[RequestRecord], bounds: Sequence[float] | None
) -> dict[str, str]:
    """Objectives, attainment and percentiles of a class. An output of one token has no TPOT and meets it."""
    ttfts = [record.ttft for record in records]
    tpots = [record.tpot for record in records if not math.isnan(record.tpot)]
    in_time = [record.ttft <= klass.ttft for record in records]
    in_pace = [math.isnan(record.tpot) or record.tpot <= klass.tpot for record in records]
    both = [a and b for a, b in zip(in_time, in_pace, strict=True)]
    limits = [] if bounds is None else [bounds[record.index] for record in records]
    spare = [limit - record.wait for limit, record in zip(limits, records, strict=False)]
    return {
        "ttft_slo_s": f"{klass.ttft:g}",
        "tpot_slo_s": f"{klass.tpot:g}",
        "ttft_attained": f"{sum(in_time) / len(records):.4f}",
        "tpot_attained": f"{sum(in_pace) / len(records):.4f}",
        "both_attained": f"{sum(both) / len(records):.4f}",
        **{f"ttft_p{share}_s": f"{percentile(ttfts, share / 100):.4f}" for share in (50, 90, 99)},
        **{f"tpot_p{share}_s": f"{percentile(tpots, share / 100):.5f}" for share in (50, 90, 99)},
        "wait_max_s": f"{max(record.wait for record in records):.3f}",
        "wait_bound_s": f"{max(limits):.3f}" if limits else "",
        "least_spare_s": f"{min(spare):.3f}" if spare else "",
    }
