"""`minillm bench gpu-table`: the figures that engines are compared by, of one model on one card, in one command.

Offline throughput on the public workload, time per token of one request, the decode step at batch 32 and 256, the first
token, and the rate of long prefills; each beside its floor (:mod:`minillm.bench.floors`), from the card's copy rate and
a large product measured in the same run. One engine serves all of it, so nothing is tuned per figure. Its prefix cache
is off: no prompt shares anything with another, and an engine that looks for what cannot be there is not what is
compared. Text is made of every output, and every token is counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from minillm.bench import common, drawing, floors
from minillm.bench.common import Verdict
from minillm.bench.floors import Limits
from minillm.bench.history import Figure
from minillm.bench.models import open_model
from minillm.bench.program import Cells, Program, Rows, provenance
from minillm.bench.recording import RunResult
from minillm.bench.runs import Target, drive, open_target
from minillm.bench.workloads import Workload, WorkloadRequest, fixed
from minillm.bench.workloads import offline as offline_workload
from minillm.core.errors import MiniLLMError

MODELS = ("random:qwen3-0.6b", "random:llama-3.1-8b", "random:qwen2.5-0.5b")
BLOCK_SIZE = 16


class Peer(NamedTuple):
    """What is asked of a figure on an H200 in bfloat16: at least `must`, `goal` if it can be; and vLLM 0.25.1 there."""

    must: float
    goal: float
    vllm: float


PEERS = {
    ("random:qwen3-0.6b", "offline"): Peer(25_500, 30_000, 22_685),
    ("random:qwen3-0.6b", "token"): Peer(0.9, 0.5, 1.63),
    ("random:qwen3-0.6b", "decode 32"): Peer(1.7, 1.1, 2.28),
    ("random:qwen3-0.6b", "decode 256"): Peer(6.0, 4.8, 7.02),
    ("random:qwen3-0.6b", "first token"): Peer(5, 3, 7.7),
    ("random:qwen3-0.6b", "prefill"): Peer(280_000, 330_000, 277_551),
    ("random:llama-3.1-8b", "offline"): Peer(10_300, 11_000, 9_616),
    ("random:llama-3.1-8b", "token"): Peer(4.4, 3.8, 4.95),
    ("random:llama-3.1-8b", "decode 32"): Peer(5.3, 4.6, 5.85),
    ("random:llama-3.1-8b", "decode 256"): Peer(12.5, 10.5, 13.81),
    ("random:llama-3.1-8b", "first token"): Peer(7, 5, 10.7),
    ("random:llama-3.1-8b", "prefill"): Peer(38_400, 41_000, 38_389),
}
PEER_DEVICE = "H200"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths in tokens. The defaults are those of the public figures."""

    offline_requests: int = 256
    max_prompt: int | None = None
    max_output: int | None = None
    prompt: int = 128
    output: int = 256
    batches: tuple[int, ...] = (32, 256)
    context: int = 512
    steps: int = 33
    prefills: int = 4
    prefill: int = 8192
    budget: int = 8192
    max_num_seqs: int = 256


SMALL = Sizes(
    offline_requests=8,
    max_prompt=48,
    max_output=24,
    prompt=16,
    output=12,
    batches=(2, 4),
    context=48,
    steps=9,
    prefills=2,
    prefill=64,
    budget=64,
    max_num_seqs=8,
)
"""For a check that everything runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure."""

    models: Sequence[str] = MODELS
    device: str
    dtype: str = "auto"
    sizes: Sizes = Sizes()
    runs: int = 3
    repeats: int = 5
    """Of the short measurements within a run."""
    seed: int = 0
    prefix_caching: bool = False


class CountError(MiniLLMError):
    """A request did not get all of its tokens: the figure would not be of the workload."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure of one run. `host_ms`: the host's own work per step, where steps are alike."""

    figure: str
    unit: str
    value: float
    floor: float
    tokens: int
    characters: int
    host_ms: float | None = None


def measure(options: Options, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One row per model, run and figure."""
    rows: list[dict[str, Any]] = []
    for name in options.models:
        rows += _measure_model(name, options, progress)
    return rows


def _measure_model(name: str, options: Options, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    sizes = options.sizes
    model = open_model(name, options.dtype, options.device)
    workload = _offline(options)
    longest = max(workload.longest, sizes.prefill + 1, sizes.prompt + sizes.output, sizes.context + 4 * sizes.steps)
    gpu = options.device != "cpu"
    rows = []
    with open_target(
        model,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.budget,
        max_model_len=longest,
        enable_prefix_caching=options.prefix_caching,
        num_gpu_blocks_override=None if gpu else sizes.max_num_seqs * -(-longest // BLOCK_SIZE),
        swap_space=None if gpu else 0.0,
        block_size=BLOCK_SIZE,
    ) as target:
        where = common.environment(target.device_name)
        _warm_up(target)
        for run in range(options.runs):
            limits = floors.measure_limits(model.decoder.device, model.decoder.dtype)
            bench = _Bench(target, model.decoder, limits, options)
            for found in bench.figures(workload):
                rows.append(
                    {
                        "model": target.name,
                        "dtype": target.dtype,
                        "figure": found.figure,
                        "run": run,
                        "value": round(found.value, 4),
                        "unit": found.unit,
                        "floor": round(found.floor, 4),
                        "tokens": found.tokens,
                        "characters": found.characters,
                        "host_ms": "" if found.host_ms is None else round(found.host_ms, 4),
                        "prefix_caching": int(options.prefix_caching),
                        "copy_gbps": round(limits.bytes_per_second / 1e9, 1),
                        "matmul_tflops": round(limits.flops_per_second / 1e12, 2),
                        "seed": options.seed,
                        **where,
                    }
                )
                progress(f"{target.name}, run {run + 1}: {found.figure}: {found.value:,.2f} {found.unit}")
    return rows


def _offline(options: Options) -> Workload:
    whole = offline_workload(options.sizes.offline_requests, options.seed)
    if options.sizes.max_prompt is None and options.sizes.max_output is None:
        return whole
    return whole.limited(max_prompt=options.sizes.max_prompt, max_output=options.sizes.max_output)


def _warm_up(target: Target) -> None:
    """Steps of every batch size, as an offline run passes through them: what is made once per size is made here."""
    count = target.config.max_num_seqs
    requests = tuple(WorkloadRequest(ids=(5, 6, 7, index % 50), max_tokens=2 + index) for index in range(count))
    drive(target, Workload("warm-up", requests, 0, "outputs of 2, 3, 4, ... tokens"), temperature=0.6)


class _Bench:
    """The figures of one run on one engine."""

    def __init__(self, target: Target, decoder: Any, limits: Limits, options: Options) -> None:
        self.target = target
        self.decoder = decoder
        self.limits = limits
        self.options = options
        self.kv_bytes = target.bytes_per_block // target.config.block_size
        """Keys and values of one token."""

    def figures(self, workload: Workload) -> list[Measured]:
        """All of them, the long one first."""
        sizes = self.options.sizes
        return [
            self._throughput(workload),
            self._token(),
            *(self._decode(batch) for batch in sizes.batches),
            self._first_token(),
            self._prefill(),
        ]

    def _drive(self, workload: Workload, temperature: float = 0.0) -> RunResult:
        result = drive(self.target, workload, temperature=temperature)
        for request, record in zip(workload.requests, result.requests, strict=True):
            if (record.output_tokens, record.finish_reason) != (request.max_tokens, "length"):
                raise CountError(
                    f"{workload.source}: request {record.index} got {record.output_tokens} of {request.max_tokens} "
                    f"tokens ({record.finish_reason})"
                )
        if not result.characters:
            raise CountError(f"{workload.source}: no text was made")
        return result

    def _throughput(self, workload: Workload) -> Measured:
        result = self._drive(workload, temperature=0.6)
        floor = result.output_tokens / sum(self._step_floors(result))
        return Measured("offline", "tok/s", result.throughput, floor, result.output_tokens, result.characters)

    def _step_floors(self, result: RunResult) -> list[float]:
        """Least seconds of each step: its bytes or its operations, whichever take longer."""
        log, config = result.steps, self.decoder.config
        weights = floors.decode_bytes(self.decoder, self.target.config.max_num_seqs, 0, 0)
        head = self.decoder.head.in_features * self.decoder.head.out_features
        parameters = sum(linear.in_features * linear.out_features for linear in floors.linears(self.decoder)) - head
        per_pair = 4 * config.num_layers * config.num_heads * config.head_dim
        found = []
        for decodes, prefilled, chunks, context, pairs in zip(
            log.decode_rows, log.prefill_tokens, log.prefill_chunks, log.context_tokens, log.prefill_pairs, strict=True
        ):
            moved = (weights + context * self.kv_bytes) / self.limits.bytes_per_second
            products = 2 * parameters * (decodes + prefilled) + 2 * head * (decodes + chunks) + per_pair * pairs
            found.append(max(moved, products / self.limits.flops_per_second))
        return found

    def _token(self) -> Measured:
        sizes, samples = self.options.sizes, []
        for repeat in range(self.options.repeats):
            result = self._drive(fixed(1, sizes.prompt, sizes.output, seed=self.options.seed + repeat))
            samples.append(result.requests[0].tpot * 1e3)
        floor = floors.decode_bytes(self.decoder, 1, sizes.prompt + sizes.output // 2, self.kv_bytes)
        return Measured(
            "token",
            "ms",
            statistics.median(samples),
            floor / self.limits.bytes_per_second * 1e3,
            result.output_tokens,
            result.characters,
        )

    def _decode(self, batch: int) -> Measured:
        """Median time between commits of steps that decode the whole batch, at `context` tokens on average."""
        sizes = self.options.sizes
        # While the last prompts are computed the first requests decode already, about a token per step of prefill.
        ahead = -(-batch * sizes.context // (sizes.budget - batch))
        prompt = max(1, sizes.context - ahead - sizes.steps // 2)
        work = fixed(batch, prompt, sizes.steps + ahead, seed=self.options.seed + 1)
        times: list[float] = []
        contexts: list[float] = []
        host: list[float] = []
        for _ in range(max(1, self.options.repeats // 2)):
            result = self._drive(work)
            log = result.steps
            whole = [
                rows == batch and not chunks for rows, chunks in zip(log.decode_rows, log.prefill_chunks, strict=True)
            ]
            waits = [b - a for a, b in pairwise(log.waited)]
            for (a, b), wait, (before, now) in zip(pairwise(log.time), waits, pairwise(whole), strict=True):
                if before and now:
                    times.append((b - a) * 1e3)
                    host.append((b - a - wait) * 1e3)
            contexts += [c / batch for c, is_whole in zip(log.context_tokens, whole, strict=True) if is_whole]
        moved = floors.decode_bytes(self.decoder, batch, round(statistics.fmean(contexts)), self.kv_bytes)
        return Measured(
            f"decode {batch}",
            "ms",
            statistics.median(times),
            moved / self.limits.bytes_per_second * 1e3,
            result.output_tokens,
            result.characters,
            statistics.median(host),
        )

    def _first_token(self) -> Measured:
        prompt, samples = self.options.sizes.prompt, []
        for repeat in range(self.options.repeats):
            result = self._drive(fixed(1, prompt, 1, seed=self.options.seed + 100 + repeat))
            samples.append(result.requests[0].ttft * 1e3)
        reading = floors.decode_bytes(self.decoder, prompt, 0, 0) / self.limits.bytes_per_second
        computing = floors.prefill_flops(self.decoder, prompt) / self.limits.flops_per_second
        return Measured(
            "first token", "ms", statistics.median(samples), max(reading, computing) * 1e3, 1, result.characters
        )

    def _prefill(self) -> Measured:
        sizes, samples = self.options.sizes, []
        for repeat in range(max(1, self.options.repeats // 2)):
            result = self._drive(fixed(sizes.prefills, sizes.prefill, 1, seed=self.options.seed + 200 + repeat))
            samples.append(sizes.prefills * sizes.prefill / result.seconds)
        operations = floors.prefill_flops(self.decoder, sizes.prefill)
        floor = self.limits.flops_per_second * sizes.prefill / operations
        return Measured("prefill", "tok/s", statistics.median(samples), floor, sizes.prefills, result.characters)


# -- what was saved ---------------------------------------------------------------------------------------------------


def _name(figure: str) -> str:
    return {
        "offline": "offline, output tok/s",
        "token": "one request, ms/token",
        "first token": "first token, ms",
        "prefill": "long prefills, prompt tok/s",
    }.get(figure, f"{figure.replace('decode', 'decode step, batch')}, ms")


def _groups(rows: Rows) -> dict[tuple[str, str], Rows]:
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        groups.setdefault((row["model"], row["figure"]), []).append(row)
    return groups


def _summary(rows: Rows, column: str = "value") -> common.Summary:
    return common.Summary.of([float(row[column]) for row in rows])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def _over_floor(rows: Rows) -> float:
    """How far from the floor, 1 or more: of a time measured / floor, of a rate the other way round."""
    ratio = _summary(rows).median / _summary(rows, "floor").median
    return 1 / ratio if rows[0]["unit"] == "tok/s" else ratio


def tables(rows: Rows) -> dict[str, Cells]:
    """One table per model: medians of the runs with their range, floors, and vLLM's figure where there is one."""
    made: dict[str, Cells] = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        lines = []
        for (_, figure), group in _groups(mine).items():
            values, peer = _summary(group), PEERS.get((model, figure))
            host = [float(row["host_ms"]) for row in group if row["host_ms"]]
            lines.append(
                [
                    _name(figure),
                    f"{_number(values.median)} ({_number(values.least)}-{_number(values.greatest)})",
                    _number(_summary(group, "floor").median),
                    f"{_over_floor(group):.2f}",
                    "-" if peer is None else f"{_number(peer.must)} / {_number(peer.goal)}",
                    "-" if peer is None else _number(peer.vllm),
                    f"{statistics.median(host):.2f}" if host else "-",
                ]
            )
        row = mine[0]
        copy, product = _summary(mine, "copy_gbps").text(",.0f"), _summary(mine, "matmul_tflops").text(".0f")
        runs = len({row["run"] for row in mine})
        title = (
            f"{model}, {row['dtype']}: medians of {runs} runs (range); copy {copy} GB/s, product {product} TFLOP/s; "
            f"prefix cache {'on' if int(row['prefix_caching']) else 'off'} ({provenance(mine)})"
        )
        columns = ["figure", "measured", "floor", "from the floor", "aim: least / goal", "vLLM 0.25.1, H200"]
        made[title] = ([*columns, "host, ms per step"], lines)
    return made


def verdicts(rows: Rows) -> list[Verdict]:
    """Whether each figure reaches what is asked of it; on the card that the aims are for."""
    found = []
    for (model, figure), group in _groups(rows).items():
        peer = PEERS.get((model, figure))
        if peer is None or PEER_DEVICE not in group[0]["device"]:
            continue
        value, is_rate = _summary(group).median, group[0]["unit"] == "tok/s"
        met = value >= peer.must if is_rate else value <= peer.must
        asked = f"{model}: {_name(figure)} {'>=' if is_rate else '<='} {_number(peer.must)}"
        found.append(Verdict(asked, _number(value), met))
    return found


def draw(rows: Rows, path: Path) -> None:
    """How far every figure is from its floor, and vLLM's where there is one."""
    groups = _groups(rows)
    figure, axes = drawing.pyplot().subplots(figsize=(8, 0.36 * len(groups) + 1.6))
    labels = []
    for place, ((model, name), group) in enumerate(groups.items()):
        labels.append(f"{model.removeprefix('random:')}: {_name(name)}")
        axes.barh(place, _over_floor(group), color=drawing.PALETTE[0], label="measured" if not place else None)
        peer = PEERS.get((model, name))
        if peer is not None and PEER_DEVICE in group[0]["device"]:
            floor = _summary(group, "floor").median
            ratio = floor / peer.vllm if group[0]["unit"] == "tok/s" else peer.vllm / floor
            axes.plot([ratio], [place], "d", color=drawing.PALETTE[3], label="vLLM 0.25.1" if not place else None)
    axes.axvline(1, color="black", linewidth=0.8, ls="--")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times the floor (bytes or operations alone)")
    drawing.grid(axes, "From the floor", "")
    drawing.save(figure, path, provenance(rows))


def figures(rows: Rows) -> list[Figure]:
    """The median of every figure."""
    found = []
    for (model, figure), group in _groups(rows).items():
        values = _summary(group)
        better = "higher" if group[0]["unit"] == "tok/s" else "lower"
        found.append(Figure(f"{model}, {figure}", values.median, group[0]["unit"], better, values.spread))
    return found


PROGRAM = Program(
    name="gpu-table",
    title="The figures that engines are compared by",
    about="One engine per model, bfloat16, CUDA graphs and overlap as they are by default. Offline: 256 requests at "
    "once, 100-1024 tokens in and out, `random.seed(0)`, temperature 0.6, 133,966 output tokens, text made of all of "
    "them. One request: prompt 128, 256 new tokens, time per token after the first. Decode step: time between the "
    "commits of steps that decode the whole batch at a context of 512 on average; beside it the host's own work per "
    "step, waiting for the device left out. First token: prompt 128, from arrival. Long prefills: 4 prompts of 8,192. "
    "Floors are bytes over the copy rate or operations over the rate of an 8192-cubed product, both measured in the "
    "same run. vLLM's figures are without text.",
    tables=tables,
    plots={"": draw},
    figures=figures,
    settings=lambda rows: f"{rows[0]['dtype']}, prefix cache {rows[0]['prefix_caching']}",
    verdicts=verdicts,
)
