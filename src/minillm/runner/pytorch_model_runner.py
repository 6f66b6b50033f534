"""The model runner on PyTorch: executes a StepPlan on the device and reports a StepOutcome.

A step goes through swap-outs, swap-ins, block copies, row assignments, table updates, the forward pass and sampling,
in the order that :mod:`minillm.core.plan` states. Everything that a later plan needs from an earlier one (last sampled
tokens, penalty counts, KV) stays on the device; the host reads results only in :meth:`PyTorchModelRunner.collect`.

Failures are confined to rows:

- hidden states that are not finite fail their row, in the very step that made them, sampling or not: so a block that
  holds such keys or values is never published. The slots that the row wrote are cleared (the cache's rule that all
  slots are finite).
- an exception out of the batched forward pass or the batched sampling repeats it row by row, and fails the rows that
  raise alone as well. If every one of several rows raises, it is not a row's fault: the exception goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from minillm.attention.cpu import GatherWorkspace, PagedAttentionContext
from minillm.attention.interface import AttentionContext, LayerAttention
from minillm.core.errors import ConfigError, EngineDeadError
from minillm.core.plan import (
    DecodeBatch,
    PrefillChunk,
    RowAssignment,
    StepOutcome,
    StepPlan,
    StepTimings,
    TokenLogprobs,
)
from minillm.memory.paged_kv_cache import KVCacheSpec, PagedKVCache
from minillm.memory.swap_space import SwapCopy, SwapSpace
from minillm.runner.batch_builder import BatchBuilder, StepBatch
from minillm.runner.logprobs import LogprobTensors
from minillm.runner.sampler import Sampler

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_SLICE = 256
"""Most rows that go through the output head at once when a prompt is scored (rows x vocabulary floats)."""

NOT_FINITE = "the model's output for this request is not finite (NaN or inf)"
NO_TOKEN = "no token can be sampled: the logits are not finite or every token is masked"


class DecoderModel(Protocol):
    """What the runner needs from a model (:class:`minillm.models.decoder.Decoder` is one)."""

    config: Any
    """With `vocab_size` (width of the logits), `num_layers`, `num_kv_heads` and `head_dim`."""
    dtype: torch.dtype
    layer_attention: list[LayerAttention]

    def forward(self, input_ids: Tensor, positions: Tensor, attn: AttentionContext) -> Tensor:
        """int64 [T], int64 [T] -> hidden [T, hidden_size]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> float32 [R, vocab_size]."""
        ...


def kv_cache_spec(model: DecoderModel, block_size: int) -> KVCacheSpec:
    """The KV cache's shape for this model, in the model's dtype."""
    config = model.config
    return KVCacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=model.dtype,
    )


@dataclass(slots=True)
class StepHandle:
    """A step under way: what has been computed, and which rows failed so far."""

    plan: StepPlan
    batch: StepBatch
    hidden: Tensor | None = None
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    tokens: Tensor | None = None
    """int64 [R], once sampled; `unsampled` bool [R] marks rows for which no token could be."""
    unsampled: Tensor | None = None
    logprobs: list[tuple[list[int], LogprobTensors]] = field(default_factory=list)
    """Pieces: (sampling rows, their scores)."""
    failures: dict[int, str] = field(default_factory=dict)
    failed_requests: dict[str, str] = field(default_factory=dict)
    failed_swaps: list[str] = field(default_factory=list)
    swap_outs: list[SwapCopy] = field(default_factory=list)
    swap_ins: list[SwapCopy] = field(default_factory=list)
    timings: StepTimings = field(default_factory=StepTimings)


@dataclass(frozen=True, slots=True)
class _Unit:
    """A decode row or a prefill chunk: its tokens of the flattened batch, and its sampling rows."""

    request_id: str
    tokens: slice
    sampling: range
    plan: StepPlan
    """The unit alone."""


class PyTorchModelRunner:
    """Runs `model` over `cache` on the CPU (see the module's text). Implements `ModelRunner`.

    `max_model_len` bounds positions; `invalid_token_ids` are ids below the logits' width that stand for no token and
    are masked before sampling; `swap_space` None makes every swap of a plan fail (and the scheduler recompute).
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: PagedKVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        swap_space: SwapSpace | None = None,
        eos_token_ids: Sequence[int] = (),
        invalid_token_ids: Sequence[int] = (),
    ) -> None:
        if cache.device.type != "cpu":
            raise ConfigError(f"device={cache.device} is not supported by this runner; it runs on the CPU")
        self.model = model
        self.cache = cache
        self.swap_space = swap_space
        self.builder = BatchBuilder(max_num_seqs, max_model_len, cache.spec.block_size)
        vocab_size = model.config.vocab_size
        self.sampler = Sampler(max_num_seqs, vocab_size, cache.device, eos_token_ids, invalid_token_ids)
        self._workspace = GatherWorkspace()
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=cache.device)
        self._rows: dict[int, RowAssignment] = {}
        self._closed = False

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> StepHandle:
        """Copies, assignments and the forward pass of `plan`."""
        if self._closed:
            raise EngineDeadError("the model runner is closed")
        failed_swaps, outs, ins = self._copy(plan)
        self.builder.update_tables(plan.table_updates)
        assign_errors = self._assign(plan.assignments)
        begin = time.perf_counter()
        handle = StepHandle(plan, self.builder.build(plan), failed_swaps=failed_swaps, swap_outs=outs, swap_ins=ins)
        if handle.batch.num_tokens:
            handle.hidden = self._forward_batch(handle)
            if handle.hidden is not None:
                self._fail_not_finite(handle, handle.hidden)
                self._score_prompts(handle, handle.hidden)
            handle.timings.forward = time.perf_counter() - begin
        for index, row in enumerate(handle.batch.sampling_rows) if assign_errors else ():
            if row in assign_errors:
                handle.failures[index] = assign_errors[row]
        return handle

    @torch.inference_mode()
    def sample(self, handle: StepHandle, masks: Any | None = None) -> None:
        """Sample the step's sampling rows; their tokens are where the next plan's placeholders look for them."""
        batch = handle.batch
        if not batch.sampling_rows:
            return
        begin = time.perf_counter()
        if handle.hidden is None:  # the only row raised in the forward pass
            tokens = torch.zeros(len(batch.sampling_rows), dtype=torch.int64)
            handle.tokens, handle.unsampled = tokens, tokens == 0
        else:
            tokens = self._sample_rows(handle, self._logits(handle.hidden, batch), masks)
            handle.hidden = None
        self._last_tokens.index_copy_(0, torch.tensor(batch.sampling_rows), tokens)
        self.sampler.state.append(batch.sampling_rows, tokens)
        handle.timings.sample = time.perf_counter() - begin

    def collect(self, handle: StepHandle) -> StepOutcome:
        """Wait for the step's end and report it."""
        timings = handle.timings
        tokens: list[list[int]] = []
        logprobs: list[TokenLogprobs | None] | None = None
        if handle.batch.sampling_rows:
            if handle.tokens is None or handle.unsampled is None:
                raise RuntimeError(f"step {handle.plan.step} was not sampled")
            tokens = handle.tokens[:, None].tolist()
            if handle.unsampled.any():
                for index in handle.unsampled.nonzero()[:, 0].tolist():
                    handle.failures.setdefault(index, NO_TOKEN)
            if handle.logprobs:
                logprobs = [None] * len(tokens)
                for indices, scores in handle.logprobs:
                    for index, entry in zip(indices, scores.to_list(), strict=True):
                        logprobs[index] = entry
        if handle.swap_outs:
            timings.swap_out = sum(copy.seconds() for copy in handle.swap_outs)
        if handle.swap_ins:
            timings.swap_in = sum(copy.seconds() for copy in handle.swap_ins)
        return StepOutcome(
            step=handle.plan.step,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=handle.prompt_logprobs,
            failures=handle.failures,
            failed_requests=handle.failed_requests,
            failed_swaps=handle.failed_swaps,
            timings=timings,
        )

    def close(self) -> None:
        """Drop the model, the cache and the swap space; further calls are errors. Idempotent."""
        self._closed = True
        self._rows.clear()
        for name in ("model", "cache", "swap_space", "sampler", "_workspace"):
            self.__dict__.pop(name, None)

    # -- before the forward pass ------------------------------------------------------------------------------------

    def _copy(self, plan: StepPlan) -> tuple[list[str], list[SwapCopy], list[SwapCopy]]:
        """Swap-outs, swap-ins and block copies. Returns the requests whose swap failed, and the copies made."""
        failed: list[str] = []
        outs, ins = [], []
        if plan.swap_outs:
            moves = [(swap.request_id, swap.blocks, swap.swap_slots) for swap in plan.swap_outs]
            outs = self._swap(moves, self.swap_space.swap_out if self.swap_space else None, failed)
        if plan.swap_ins:
            moves = [(swap.request_id, swap.swap_slots, swap.blocks) for swap in plan.swap_ins]
            ins = self._swap(moves, self.swap_space.swap_in if self.swap_space else None, failed)
        if plan.copies:
            self.cache.copy_blocks(plan.copies)
        return failed, outs, ins

    def _swap(
        self,
        moves: list[tuple[str, list[int], list[int]]],
        copy: Callable[[list[int], list[int]], SwapCopy] | None,
        failed: list[str],
    ) -> list[SwapCopy]:
        """All moves (request, from, to) of one direction in one copy; request by request if that raises."""
        if copy is None:
            failed.extend(request_id for request_id, _, _ in moves)
            return []
        try:
            return [copy([i for _, source, _ in moves for i in source], [i for _, _, target in moves for i in target])]
        except Exception as error:
            logger.warning("a swap copy failed (%s); trying its %d requests one by one", error, len(moves))
        copies = []
        for request_id, source, target in moves:
            try:
                copies.append(copy(source, target))
            except Exception:
                failed.append(request_id)
        return copies

    def _assign(self, assignments: list[RowAssignment]) -> dict[int, str]:
        """Give rows to their requests. Returns the error of each row whose parameters the sampler refuses."""
        errors = {}
        for assignment in assignments:
            row, _, params, seed, choice, input_ids, output_ids = assignment
            self._rows[row] = assignment
            try:
                self.sampler.state.assign(row, params, seed, choice, input_ids, output_ids)
            except Exception as error:
                errors[row] = str(error)
        return errors

    # -- the forward pass -------------------------------------------------------------------------------------------

    def _forward_batch(self, handle: StepHandle) -> Tensor | None:
        """Hidden states [T, hidden_size]; rows that raise are recorded as failed and left zero (None: all there is)."""
        try:
            return self._run_model(handle.batch)
        except Exception as error:
            return self._forward_units(handle, error)

    def _run_model(self, batch: StepBatch) -> Tensor:
        if batch.placeholders is not None:
            tokens, rows = batch.placeholders
            batch.input_ids[tokens] = self._last_tokens[rows]
        context = PagedAttentionContext(self.cache, self.model.layer_attention, batch.metadata, self._workspace)
        return self.model.forward(batch.input_ids, batch.positions, context)

    def _forward_units(self, handle: StepHandle, cause: Exception) -> Tensor | None:
        """The forward pass repeated unit by unit after a batched one raised `cause`."""
        units = list(self._units(handle.plan))
        logger.warning("the forward pass of step %d raised (%s); repeating it row by row", handle.plan.step, cause)
        parts: list[Tensor | None] = []
        for unit in units:
            try:
                parts.append(self._run_model(self.builder.build(unit.plan)))
            except Exception as error:
                parts.append(None)
                self._fail(handle, unit, f"{type(error).__name__}: {error}")
        done = [part for part in parts if part is not None]
        if not done:
            if len(units) > 1:
                raise cause
            return None
        hidden = done[0].new_zeros(handle.batch.num_tokens, done[0].shape[1])
        for unit, part in zip(units, parts, strict=True):
            if part is not None:
                hidden[unit.tokens] = part
        return hidden

    def _fail_not_finite(self, handle: StepHandle, hidden: Tensor) -> None:
        """Fail every row with a hidden state that is not finite."""
        if hidden.sum(dtype=torch.float32).isfinite() or hidden.isfinite().all():
            return  # a finite sum has finite terms; only the rare other case looks at all of them
        bad = hidden.isfinite().all(-1).logical_not_()
        for unit in self._units(handle.plan):
            if bad[unit.tokens].any():
                self._fail(handle, unit, NOT_FINITE)

    def _fail(self, handle: StepHandle, unit: _Unit, error: str) -> None:
        """Record the unit's failure and clear what it wrote, so that whoever gets the block next reads no NaN."""
        if unit.sampling:
            handle.failures.update(dict.fromkeys(unit.sampling, error))
        else:
            handle.failed_requests[unit.request_id] = error
        self.cache.clear_slots(handle.batch.metadata.slot_mapping[unit.tokens])

    def _units(self, plan: StepPlan) -> Iterator[_Unit]:
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
            yield _Unit(request_id, slice(i, i + 1), range(i, i + 1), StepPlan(plan.step, alone, []))
        token = sampling = len(columns)
        for chunk in plan.prefills:
            end, last = token + chunk.end - chunk.start, sampling + len(chunk.sample_rows)
            alone_plan = StepPlan(plan.step, DecodeBatch(), [chunk])
            yield _Unit(chunk.request_id, slice(token, end), range(sampling, last), alone_plan)
            token, sampling = end, last

    def _score_prompts(self, handle: StepHandle, hidden: Tensor) -> None:
        """Log-probabilities of the prompt positions that this step's chunks predict, for those that ask."""
        start = len(handle.plan.decodes)
        for chunk in handle.plan.prefills:
            if chunk.prompt_logprobs and not self._has_failed(handle, chunk):
                entries = self._score_chunk(chunk, hidden[start:])
                if entries:
                    handle.prompt_logprobs[chunk.request_id] = (chunk.start + 1, entries)
            start += chunk.end - chunk.start

    def _has_failed(self, handle: StepHandle, chunk: PrefillChunk) -> bool:
        if chunk.request_id in handle.failed_requests:
            return True
        return bool(handle.failures) and any(
            handle.batch.sampling_rows[index] in chunk.sample_rows for index in handle.failures
        )

    def _score_chunk(self, chunk: PrefillChunk, hidden: Tensor) -> list[TokenLogprobs]:
        """Scores of prompt positions [start + 1, end]: row i predicts the token behind it, also the next chunk's."""
        assignment = self._rows[chunk.row]
        targets = torch.tensor(assignment.input_ids[chunk.start + 1 : chunk.end + 1], dtype=torch.int64)
        num_top = assignment.sampling_params.prompt_logprobs or 0
        entries: list[TokenLogprobs] = []
        for begin in range(0, len(targets), PROMPT_LOGPROB_SLICE):
            ids = targets[begin : begin + PROMPT_LOGPROB_SLICE]
            logits = self.model.compute_logits(hidden[begin : begin + len(ids)])
            entries.extend(self.sampler.score(logits, ids, num_top).to_list())
        return entries

    # -- sampling ---------------------------------------------------------------------------------------------------

    def _logits(self, hidden: Tensor, batch: StepBatch) -> Tensor:
        """float32 [R, vocab_size] of the sampling rows; a token that several rows sample goes through the head once."""
        if len(batch.logit_tokens) != len(hidden):
            hidden = hidden.index_select(0, batch.logit_tokens)
        logits = self.model.compute_logits(hidden)
        return logits if batch.logit_rows is None else logits.index_select(0, batch.logit_rows)

    def _sample_rows(self, handle: StepHandle, logits: Tensor, masks: Any | None) -> Tensor:
        """Sample all rows; returns their tokens int64 [R]."""
        batch = handle.batch
        try:
            result = self.sampler.sample(logits, batch.sampling_rows, batch.output_indices, masks)
        except Exception as error:
            logger.warning("sampling of step %d raised (%s); repeating it row by row", handle.plan.step, error)
            return self._sample_one_by_one(handle, logits, masks, error)
        handle.tokens, handle.unsampled = result.token_ids, result.failed
        if result.logprobs is not None:
            handle.logprobs.append((result.logprob_rows, result.logprobs))
        return result.token_ids

    def _sample_one_by_one(self, handle: StepHandle, logits: Tensor, masks: Any | None, cause: Exception) -> Tensor:
        """Row by row, after a batched call raised `cause`; what raises again fails its row."""
        batch = handle.batch
        tokens = torch.zeros(len(batch.sampling_rows), dtype=torch.int64)
        unsampled = torch.zeros(len(tokens), dtype=torch.bool)
        raised = 0
        for i, (row, index) in enumerate(zip(batch.sampling_rows, batch.output_indices, strict=True)):
            try:
                allowed = None if masks is None else masks[i : i + 1]
                result = self.sampler.sample(logits[i : i + 1], [row], [index], allowed)
            except Exception as error:
                raised += 1
                unsampled[i] = True
                handle.failures.setdefault(i, f"{type(error).__name__}: {error}")
                continue
            tokens[i], unsampled[i] = result.token_ids[0], result.failed[0]
            if result.logprobs is not None:
                handle.logprobs.append(([i], result.logprobs))
        if raised == len(tokens) > 1:
            raise cause
        handle.tokens, handle.unsampled = tokens, unsampled
        return tokens
