"""`minillm bench sampling`: from logits to tokens on a GPU, the sampling kernels beside the tensor path.

Rows of float32 logits at a real vocabulary's width (Qwen's 151,936: 0.6 MB a row), by batch size and kind of request.
Three figures of each:

- the kernels, replayed in a CUDA graph of up to 64 calls with logits of their own: together larger than the L2 cache
  from 8 rows on, and within it for one row, as the output head leaves it;
- the host's time of :meth:`Sampler.sample`: checks, one upload and the launches, nothing waited for;
- the tensor path for the same rows, timed by events around a call, with a cold cache.

Both must draw the same tokens first (one in a thousand may differ, if the exponentials do). GB/s counts the logits
once, although the kernels read them up to three times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm.bench import common
from minillm.bench.attention_batch import WrongResultError
from minillm.bench.common import Verdict
from minillm.bench.timing import PathTimer, ReplayTime, StepGraph, device_name, step_layers, time_graphs
from minillm.core.sampling_params import SamplingParams
from minillm.runner.sampler import Sampler

Progress = Callable[[str], None]

BATCHES = (1, 8, 32, 256)
VOCAB = 151_936
MODES = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "top-k, top-p, min-p": SamplingParams(top_k=50, top_p=0.9, min_p=0.02, temperature=0.8),
    "top-k 5000, top-p": SamplingParams(top_k=5000, top_p=0.9),
    "top-p, all equal": SamplingParams(top_p=0.9),
}
"""The last two are what the kernels do worst: too many tokens about the cut to sort them."""
_EQUAL = "top-p, all equal"
LIMITS_US = {
    (1, "greedy"): 15,
    (1, "plain"): 15,
    (1, "top-p 0.9"): 60,
    (256, "greedy"): 120,
    (256, "plain"): 120,
    (256, "top-k 50"): 600,
    (256, "top-p 0.9"): 600,
    (256, "top-k, top-p, min-p"): 600,
}
"""What the project asks of an H200 at the default vocabulary, microseconds."""
HOST_LIMIT_US = 60

_MOST_CALLS = 64
"""Of one graph."""
_CHECKED = 8
"""Draws of each row that are compared. One in a thousand may differ: see cuda_sampling on the exponential."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure."""

    device: torch.device
    batches: Sequence[int] = BATCHES
    vocab: int = VOCAB
    rounds: int = 30
    seed: int = 0


def measure(options: Options, progress: Progress) -> list[dict[str, Any]]:
    """Rows of the CSV file: one per batch size and kind."""
    where = common.environment(device_name(options.device), ("torch",))
    timer = PathTimer(options.device)
    rows = []
    with torch.inference_mode():
        for batch in options.batches:
            logits = _logits(options, batch)
            for mode, params in MODES.items():  # the one that overwrites the logits is the last
                if mode == _EQUAL:
                    logits = [each.zero_() for each in logits]
                figures = _figures(options, timer, logits, batch, params)
                progress(
                    f"{batch:4} rows, {mode}: {figures['kernel_us']} us, host {figures['host_us']} us, "
                    f"tensors {figures['tensor_us']} us"
                )
                rows.append({"batch": batch, "mode": mode, "vocab": options.vocab, **figures, "seed": options.seed})
            del logits
            torch.cuda.empty_cache()
    return [{**row, **where} for row in rows]


def _logits(options: Options, batch: int) -> list[Tensor]:
    """Logits of the calls of one step: normal, of standard deviation 3."""
    generator = torch.Generator(options.device).manual_seed(options.seed)
    calls = min(_MOST_CALLS, step_layers(4 * batch * options.vocab, options.device))
    shape = (batch, options.vocab)
    return [torch.randn(shape, device=options.device, generator=generator).mul_(3.0) for _ in range(calls)]


def _sampler(options: Options, batch: int, params: SamplingParams) -> Sampler:
    sampler = Sampler(batch, options.vocab, options.device)
    for row in range(batch):
        sampler.state.assign(row, params, seed=1000 + row)
    return sampler


def _figures(
    options: Options, timer: PathTimer, logits: list[Tensor], batch: int, params: SamplingParams
) -> dict[str, Any]:
    sampler, tensors = (_sampler(options, batch, params) for _ in range(2))
    tensors.kernels = None
    rows = list(range(batch))
    differing = 0
    for step in range(_CHECKED):
        found, right = (each.sample(logits[step % 3], rows, [step] * batch).token_ids for each in (sampler, tensors))
        differing += int((found != right).sum())
    if differing > _CHECKED * batch // 1000:
        raise WrongResultError(f"{differing} of {_CHECKED * batch} tokens differ from the tensor path's")
    replay = time_graphs({"kernels": StepGraph(_launches(sampler, logits))}, options.rounds)["kernels"]
    host_us = _host_us(sampler, logits, rows)
    tensor = timer.time(lambda: tensors.sample(logits[0], rows, [0] * batch), 10, max_seconds=0.3)
    return {
        **_replay_columns(replay),
        "gbps": f"{logits[0].nbytes / replay.median_us / 1e3:.1f}",
        "host_us": f"{host_us:.2f}",
        "tensor_us": f"{tensor.median_ms * 1e3:.2f}",
        "over_tensors": f"{tensor.median_ms * 1e3 / replay.median_us:.2f}",
        "calls": len(logits),
        "checked": _CHECKED * batch,
        "differing": differing,
    }


def _replay_columns(replay: ReplayTime) -> dict[str, str]:
    return {
        "rounds": str(replay.rounds),
        "kernel_us": f"{replay.median_us:.2f}",
        "kernel_min_us": f"{replay.min_us:.2f}",
        "kernel_max_us": f"{replay.max_us:.2f}",
    }


def _launches(sampler: Sampler, logits: list[Tensor]) -> list[Callable[[], object]]:
    """One call of the kernels for each of the logits, as a captured step makes it."""
    kernels, params = sampler.kernels, sampler.state.slot_params
    assert kernels is not None and params is not None
    batch, device = len(logits[0]), logits[0].device
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    indices = torch.zeros_like(slots)
    tokens = torch.empty(batch, dtype=torch.int64, device=device)
    failed = torch.empty(batch, dtype=torch.bool, device=device)
    kinds = sampler.kinds(slots.cpu().numpy().astype("int64"))
    on_device = params.on_device()

    def launch(each: Tensor) -> None:
        kernels.sample(each, slots, indices, on_device, tokens, failed, random=kinds.random, filtered=kinds.filtered)

    return [lambda each=each: launch(each) for each in logits]  # type: ignore[misc]


def _host_us(sampler: Sampler, logits: list[Tensor], rows: list[int], calls: int = 40) -> float:
    """Microseconds of the host per call; the best of five passes, as others share the machine."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for step in range(calls):
            sampler.sample(logits[step % len(logits)], rows, [step] * len(rows))
        best = min(best, (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return best * 1e6


def provenance(rows: Sequence[Mapping[str, str]]) -> str:
    """Where the figures are from."""
    row = rows[0]
    vocab = f"V = {int(row['vocab']):,}, float32"
    return f"{vocab}; {row['device']}, torch {row['torch']}, commit {row['commit']}, {row['date']}"


def table_cells(rows: Sequence[Mapping[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells of a saved run."""
    heads = ["rows", "kind", "kernels, us", "least-most", "GB/s of logits", "host, us", "tensors, us", "ratio"]
    cells = [
        [
            row["batch"],
            row["mode"],
            f"{float(row['kernel_us']):.1f}",
            f"{float(row['kernel_min_us']):.1f}-{float(row['kernel_max_us']):.1f}",
            f"{float(row['gbps']):,.0f}",
            f"{float(row['host_us']):.0f}",
            f"{float(row['tensor_us']):,.0f}",
            f"{float(row['over_tensors']):.1f}",
        ]
        for row in rows
    ]
    return heads, cells


def verdicts(rows: Sequence[Mapping[str, str]]) -> list[Verdict]:
    """The limits above, at the vocabulary that they are for."""
    found = []
    for row in rows:
        batch, mode = int(row["batch"]), row["mode"]
        limit = LIMITS_US.get((batch, mode))
        if int(row["vocab"]) == VOCAB and limit is not None:
            taken = float(row["kernel_us"])
            found.append(Verdict(f"{batch} rows, {mode}: at most {limit} us", f"{taken:.1f} us", taken <= limit))
    host = [float(row["host_us"]) for row in rows if int(row["batch"]) == 256]
    if host:
        requirement = f"host time at 256 rows: at most {HOST_LIMIT_US} us"
        found.append(Verdict(requirement, f"{max(host):.0f} us", max(host) <= HOST_LIMIT_US))
    return found
