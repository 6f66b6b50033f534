"""A step under way, and its units: what can fail by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from minillm.core.plan import DecodeBatch, PrefillChunk, StepPlan
from minillm.memory.swap_space import SwapCopy
from minillm.runner.batch_builder import StepBatch
from minillm.runner.device import Mark
from minillm.runner.logprobs import LogprobTensors


@dataclass(slots=True)
class StepHandle:
    """A step under way: what has been computed, and which rows failed so far.

    Host tensors are valid once the device has passed the last of `marks`.
    """

    plan: StepPlan
    batch: StepBatch
    hidden: Tensor | None = None
    logits: Tensor | None = None
    """float32 [R, vocab_size] where the forward pass made them too."""
    not_finite: Tensor | None = None
    """bool [T] on the host (until sampling maybe on the device): tokens whose hidden state is not finite, which
    `collect` fails."""
    prompt_logprobs: list[tuple[PrefillChunk, list[LogprobTensors]]] = field(default_factory=list)
    tokens: Tensor | None = None
    """int64 [R] on the host, once sampled; `unsampled` bool [R] marks rows for which no token could be."""
    unsampled: Tensor | None = None
    logprobs: list[tuple[list[int], LogprobTensors]] = field(default_factory=list)
    """Pieces: (sampling rows, their scores)."""
    marks: list[Mark] = field(default_factory=list)
    """Before and after the forward pass, before and after sampling."""
    failures: dict[int, str] = field(default_factory=dict)
    failed_requests: dict[str, str] = field(default_factory=dict)
    failed_swaps: list[str] = field(default_factory=list)
    swap_outs: list[SwapCopy] = field(default_factory=list)
    swap_ins: list[SwapCopy] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepUnit:
    """A decode row or a prefill chunk: its tokens of the flattened batch, and its sampling rows."""

    request_id: str
    tokens: slice
    sampling: range
    plan: StepPlan
    """The unit alone."""


def step_units(plan: StepPlan) -> Iterator[StepUnit]:
    """The plan's units in the order of the flattened batch."""
    columns = plan.decodes
    for i, request_id in enumerate(columns.request_ids):
        alone = DecodeBatch(
            [request_id],
            [columns.rows[i]],
            [columns.token_ids[i]],
            [columns.positions[i]],
            [columns.kv_slots[i]],
            [columns.output_indices[i]],
        )
        yield StepUnit(request_id, slice(i, i + 1), range(i, i + 1), StepPlan(plan.step, alone, []))
    token = sampling = len(columns)
    for chunk in plan.prefills:
        end, last = token + chunk.end - chunk.start, sampling + len(chunk.sample_rows)
        alone_plan = StepPlan(plan.step, DecodeBatch(), [chunk])
        yield StepUnit(chunk.request_id, slice(token, end), range(sampling, last), alone_plan)
        token, sampling = end, last
