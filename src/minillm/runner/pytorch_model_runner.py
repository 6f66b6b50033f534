"""The model runner on PyTorch: executes a StepPlan on the device and reports a StepOutcome.

A step goes through swap-outs, swap-ins, block copies, row assignments, table updates, the forward pass and sampling,
in the order that :mod:`minillm.core.plan` states. Everything that a later plan needs from an earlier one (last sampled
tokens, penalty counts, KV) stays on the device; the host reads results only in :meth:`PyTorchModelRunner.collect`.

On a GPU `forward` and `sample` only enqueue: results travel to page-locked memory behind the step's work, and `collect`
waits for the event behind them. Everything else is the same code for every device (:mod:`minillm.runner.device`).

Failures are confined to rows:

- hidden states that are not finite fail their row, in the very step that made them, sampling or not: so a block that
  holds such keys or values is never published. The slots that the row wrote are cleared (the cache's rule that all
  slots are finite). On a GPU that is found out in `collect`. A plan in flight behind it may spoil slots of the same row
  again and clears them in its own `collect`; the row's blocks are quarantined until then.
- an exception out of the batched forward pass or the batched sampling repeats it row by row, and fails the rows that
  raise alone as well. If every one of several rows raises, it is not a row's fault: the exception goes on. So does a
  failure of the device itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from minillm.attention.cpu import GatherWorkspace, PagedAttentionContext
from minillm.attention.cuda import AttentionKernels, CudaAttention
from minillm.attention.interface import AttentionContext, LayerAttention
from minillm.core.errors import EngineDeadError
from minillm.core.plan import (
    PrefillChunk,
    RowAssignment,
    StepOutcome,
    StepPlan,
    StepTimings,
    TokenLogprobs,
)
from minillm.memory.paged_kv_cache import KVCacheSpec, PagedKVCache
from minillm.memory.swap_space import SwapCopy, SwapSpace
from minillm.models.cuda_decoder import DecoderOps
from minillm.runner.batch_builder import BatchBuilder, StepBatch
from minillm.runner.cuda_batch_builder import CudaBatchBuilder
from minillm.runner.cuda_forward import CudaForward, fused_decoder
from minillm.runner.device import is_device_failure, step_device
from minillm.runner.finite_rows import flag_not_finite
from minillm.runner.logprobs import LogprobTensors
from minillm.runner.sampler import Sampler
from minillm.runner.step_handle import StepHandle, StepUnit, step_units

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_SLICE = 256
"""Most rows that go through the output head at once when a prompt is scored (rows x vocabulary floats)."""

NOT_FINITE = "the model's output for this request is not finite (NaN or inf)"
NO_TOKEN = "no token can be sampled: the logits are not finite or every token is masked"


class DecoderModel(Protocol):
    """What the runner needs from a model (:class:`minillm.models.decoder.Decoder` is one)."""

    config: Any
    """With `vocab_size` (width of the logits), `num_layers`, `num_heads`, `num_kv_heads` and `head_dim`."""
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


class PyTorchModelRunner:
    """Runs `model` over `cache`, on the device of both (see the module's text). Implements `ModelRunner`.

    `max_model_len` bounds positions; `invalid_token_ids` are ids below the logits' width that stand for no token and
    are masked before sampling; `swap_space` None makes every swap of a plan fail (and the scheduler recompute).
    `kernels` replace the device's own attention; given on a CPU, the GPU's way through this class runs there, and with
    `ops` also its fused forward pass. `max_num_batched_tokens` says for how many tokens of a step that has memory from
    the start; `enforce_eager` leaves out its CUDA graphs.
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
        kernels: AttentionKernels | None = None,
        ops: DecoderOps | None = None,
        max_num_batched_tokens: int | None = None,
        enforce_eager: bool = False,
    ) -> None:
        self.model = model
        self.cache = cache
        self.swap_space = swap_space
        self._device = step_device(cache.device)
        self._asynchronous = cache.device.type == "cuda" or kernels is not None
        self.cuda_forward: CudaForward | None = None
        with self._device.active():
            self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=cache.device)
            self.builder: BatchBuilder | CudaBatchBuilder
            if self._asynchronous:
                attention = CudaAttention(
                    cache,
                    model.layer_attention,
                    num_heads=model.config.num_heads,
                    max_num_seqs=max_num_seqs,
                    max_model_len=max_model_len,
                    kernels=kernels,
                )
                builder = CudaBatchBuilder(attention, cache.spec.block_size, self._device.upload)
                self.builder = builder
                self._attention: Callable[[Any], AttentionContext] = attention.begin
                on_gpu = cache.device.type == "cuda"
                decoder = fused_decoder(model, attention, ops) if on_gpu or ops is not None else None
                if decoder is not None:
                    self.cuda_forward = CudaForward(
                        decoder,
                        attention,
                        builder,
                        self._device,
                        self._last_tokens,
                        max_num_batched_tokens=max_num_batched_tokens or max_num_seqs,
                        graphs=on_gpu and not enforce_eager,
                    )
            else:
                workspace = GatherWorkspace()
                self.builder = BatchBuilder(max_num_seqs, max_model_len, cache.spec.block_size)
                self._attention = lambda meta: PagedAttentionContext(cache, model.layer_attention, meta, workspace)
            self.sampler = Sampler(
                max_num_seqs,
                model.config.vocab_size,
                cache.device,
                eos_token_ids,
                invalid_token_ids,
                self._device.upload,
            )
        self._rows: dict[int, RowAssignment] = {}
        self._closed = False

    @property
    def graph_bytes(self) -> int:
        """Device memory, beside torch's own, that CUDA graphs may come to take."""
        return 0 if self.cuda_forward is None else self.cuda_forward.graph_bytes

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Do ahead of the first request what would hold up later ones: CUDA graphs of decode steps."""
        if self.cuda_forward is not None:
            with self._device.active():
                self.cuda_forward.warm_up()
                self.cache.clear_slots(torch.zeros(1, dtype=torch.int64))

    @torch.inference_mode()
    def reserve(self, plan: StepPlan) -> None:
        """Take the memory that attention plans for `plan`, without running it."""
        if self._asynchronous:
            with self._device.active():
                self._attention(self.builder.build(plan).metadata)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> StepHandle:
        """Copies, assignments and the forward pass of `plan`."""
        if self._closed:
            raise EngineDeadError("the model runner is closed")
        with self._device.active():
            failed_swaps, outs, ins = self._copy(plan)
            self.builder.update_tables(plan.table_updates)
            assign_errors = self._assign(plan.assignments)
            start = self._device.mark()
            fused = self.cuda_forward
            batch = self.builder.build(plan) if fused is None else fused.prepare(plan)
            handle = StepHandle(plan, batch, failed_swaps=failed_swaps, swap_outs=outs, swap_ins=ins)
            if fused is not None and fused.takes(plan):
                fused.decode(handle)
            elif batch.num_tokens:
                handle.hidden = self._forward_batch(handle)
                if handle.hidden is not None:
                    self._look_for_not_finite(handle, handle.hidden)
                    self._score_prompts(handle, handle.hidden)
                    if handle.batch.padded is not None and handle.batch.sampling_rows:
                        handle.logits = self._logits(handle.hidden, handle.batch)
            handle.marks = [start, self._device.mark()]
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
        with self._device.active():
            start = handle.marks[-1] if masks is None else self._device.mark()
            fused = self.cuda_forward if handle.logits is not None and masks is None else None
            if fused is None or not fused.sample(handle, self.sampler):
                self._sample(handle, masks)
            handle.hidden = handle.logits = None
            handle.marks += [start, self._device.mark()]

    @torch.inference_mode()
    def collect(self, handle: StepHandle) -> StepOutcome:
        """Wait for the step's end and report it."""
        with self._device.active():
            self._device.wait(handle.marks[-1])
            if handle.not_finite is not None:
                self._fail_tokens(handle, handle.not_finite)
            tokens, logprobs = self._results(handle)
            timings = self._timings(handle)
        prompt_logprobs = {
            chunk.request_id: (chunk.start + 1, [entry for piece in pieces for entry in piece.to_list()])
            for chunk, pieces in handle.prompt_logprobs
            if not self._has_failed(handle, chunk)
        }
        return StepOutcome(
            step=handle.plan.step,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failures=handle.failures,
            failed_requests=handle.failed_requests,
            failed_swaps=handle.failed_swaps,
            timings=timings,
        )

    def close(self) -> None:
        """Drop the model, the cache and the swap space; further calls are errors. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._rows.clear()
        # A device that failed still has to let go of the memory.
        with contextlib.suppress(Exception):
            self._device.wait(self._device.mark())
            if self.cuda_forward is not None:
                self.cuda_forward.close()
        for name in (
            "model",
            "cuda_forward",
            "cache",
            "swap_space",
            "sampler",
            "builder",
            "_attention",
            "_last_tokens",
        ):
            self.__dict__.pop(name, None)
        with contextlib.suppress(Exception):
            self._device.release()

    # -- the end of a step ------------------------------------------------------------------------------------------

    def _results(self, handle: StepHandle) -> tuple[list[list[int]], list[TokenLogprobs | None] | None]:
        """Tokens of the sampling rows and the scores of those that asked; rows without a token are noted as failed."""
        if not handle.batch.sampling_rows:
            return [], None
        if handle.tokens is None or handle.unsampled is None:
            raise RuntimeError(f"step {handle.plan.step} was not sampled")
        if handle.unsampled.any():
            for index in handle.unsampled.nonzero()[:, 0].tolist():
                handle.failures.setdefault(index, NO_TOKEN)
        tokens = handle.tokens[:, None].tolist()
        if not handle.logprobs:
            return tokens, None
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        for indices, scores in handle.logprobs:
            for index, entry in zip(indices, scores.to_list(), strict=True):
                logprobs[index] = entry
        return tokens, logprobs

    def _timings(self, handle: StepHandle) -> StepTimings:
        """What was measured; waits for the swap copies."""
        timings, marks = StepTimings(), handle.marks
        if handle.batch.num_tokens:
            timings.forward = self._device.seconds(marks[0], marks[1])
        if len(marks) == 4:
            timings.sample = self._device.seconds(marks[2], marks[3])
        if handle.swap_outs:
            timings.swap_out = sum(copy.seconds() for copy in handle.swap_outs)
        if handle.swap_ins:
            timings.swap_in = sum(copy.seconds() for copy in handle.swap_ins)
        return timings

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
            if is_device_failure(error):
                raise
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
                if is_device_failure(error):
                    raise
                errors[row] = str(error)
        return errors

    # -- the forward pass -------------------------------------------------------------------------------------------

    def _forward_batch(self, handle: StepHandle) -> Tensor | None:
        """Hidden states [T, hidden_size]; rows that raise are recorded as failed and left zero (None: all there is)."""
        try:
            return self._run_model(handle.batch)
        except Exception as error:
            if is_device_failure(error):
                raise
            return self._forward_units(handle, error)

    def _run_model(self, batch: StepBatch) -> Tensor:
        if batch.placeholders is not None:
            tokens, rows = batch.placeholders
            batch.input_ids.index_copy_(0, tokens, self._last_tokens.index_select(0, rows))
        if self.cuda_forward is not None:
            return self.cuda_forward.run(batch)
        return self.model.forward(batch.input_ids, batch.positions, self._attention(batch.metadata))

    def _forward_units(self, handle: StepHandle, cause: Exception) -> Tensor | None:
        """The forward pass repeated unit by unit after a batched one raised `cause`."""
        units = list(step_units(handle.plan))
        logger.warning("the forward pass of step %d raised (%s); repeating it row by row", handle.plan.step, cause)
        parts: list[Tensor | None] = []
        for unit in units:
            try:
                parts.append(self._run_model(self.builder.build(unit.plan)).clone())  # the next one may overwrite it
            except Exception as error:
                if is_device_failure(error):
                    raise
                parts.append(None)
                self._fail(handle, unit, f"{type(error).__name__}: {error}")
        done = [part for part in parts if part is not None]
        if not done:
            if len(units) > 1:
                raise cause
            return None
        handle.batch = self.builder.build(handle.plan)  # its tensors made way for the units'
        hidden = done[0].new_zeros(handle.batch.num_tokens, done[0].shape[1])
        for unit, part in zip(units, parts, strict=True):
            if part is not None:
                hidden[unit.tokens] = part
        return hidden

    def _look_for_not_finite(self, handle: StepHandle, hidden: Tensor) -> None:
        """Fail every row with a hidden state that is not finite, or leave that to `collect`."""
        if self.cuda_forward is not None and handle.batch.padded is not None:
            flags = self.cuda_forward.flags(handle.batch)
            # Those of a step that samples travel with its tokens.
            handle.not_finite = flags if handle.batch.sampling_rows else self._device.to_host(flags)
            return
        if self._asynchronous:
            flags = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
            handle.not_finite = self._device.to_host(flag_not_finite(hidden, flags))
            return
        if hidden.sum(dtype=torch.float32).isfinite() or hidden.isfinite().all():
            return  # a finite sum has finite terms; only the rare other case looks at all of them
        self._fail_tokens(handle, hidden.isfinite().all(-1).logical_not_())

    def _fail_tokens(self, handle: StepHandle, bad: Tensor) -> None:
        """Fail every row that has a token in `bad` (bool [T], on the host)."""
        if bad.any():
            for unit in step_units(handle.plan):
                if bad[unit.tokens].any():
                    self._fail(handle, unit, NOT_FINITE)

    def _fail(self, handle: StepHandle, unit: StepUnit, error: str) -> None:
        """Record the unit's failure and clear what it wrote, so that whoever gets the block next reads no NaN."""
        if unit.sampling:
            handle.failures.update(dict.fromkeys(unit.sampling, error))
        else:
            handle.failed_requests[unit.request_id] = error
        self.cache.clear_slots(torch.as_tensor(handle.batch.slots[unit.tokens], dtype=torch.int64))

    def _score_prompts(self, handle: StepHandle, hidden: Tensor) -> None:
        """Log-probabilities of the prompt positions that this step's chunks predict, for those that ask."""
        start = len(handle.plan.decodes)
        for chunk in handle.plan.prefills:
            if chunk.prompt_logprobs:
                pieces = self._score_chunk(chunk, hidden[start:])
                if pieces:
                    handle.prompt_logprobs.append((chunk, pieces))
            start += chunk.end - chunk.start

    def _has_failed(self, handle: StepHandle, chunk: PrefillChunk) -> bool:
        if chunk.request_id in handle.failed_requests:
            return True
        return bool(handle.failures) and any(
            handle.batch.sampling_rows[index] in chunk.sample_rows for index in handle.failures
        )

    def _score_chunk(self, chunk: PrefillChunk, hidden: Tensor) -> list[LogprobTensors]:
        """Scores of prompt positions [start + 1, end]: row i predicts the token behind it, also the next chunk's."""
        assignment = self._rows[chunk.row]
        targets = self._device.upload(np.array(assignment.input_ids[chunk.start + 1 : chunk.end + 1], dtype=np.int64))
        num_top = assignment.sampling_params.prompt_logprobs or 0
        pieces = []
        for begin in range(0, len(targets), PROMPT_LOGPROB_SLICE):
            ids = targets[begin : begin + PROMPT_LOGPROB_SLICE]
            logits = self._compute_logits(hidden[begin : begin + len(ids)])
            pieces.append(self.sampler.score(logits, ids, num_top).moved(self._device.to_host))
        return pieces

    # -- sampling ---------------------------------------------------------------------------------------------------

    def _sample(self, handle: StepHandle, masks: Any | None) -> None:
        """Any mixture of rows; their tokens on their way to the host."""
        batch = handle.batch
        if handle.hidden is None:  # the only row raised in the forward pass
            tokens = torch.zeros(len(batch.sampling_rows), dtype=torch.int64, device=self.cache.device)
            unsampled = tokens == 0
        else:
            if masks is not None:
                masks = self._device.upload(masks)
            logits = handle.logits if handle.logits is not None else self._logits(handle.hidden, batch)
            tokens, unsampled = self._sample_rows(handle, logits, masks)
        self._last_tokens.index_copy_(0, batch.sampling_index, tokens)
        self.sampler.state.append(batch.sampling_rows, tokens)
        handle.tokens, handle.unsampled = self._device.to_host(tokens), self._device.to_host(unsampled)
        if handle.logits is not None and handle.not_finite is not None:
            handle.not_finite = self._device.to_host(handle.not_finite)

    def _logits(self, hidden: Tensor, batch: StepBatch) -> Tensor:
        """float32 [R, vocab_size] of the sampling rows; a token that several rows sample goes through the head once."""
        if len(batch.logit_tokens) != len(hidden):
            hidden = hidden.index_select(0, batch.logit_tokens)
        logits = self._compute_logits(hidden)
        return logits if batch.logit_rows is None else logits.index_select(0, batch.logit_rows)

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """Through the way that the forward pass takes, so that decode and prefill round alike."""
        return (self.model if self.cuda_forward is None else self.cuda_forward).compute_logits(hidden)

    def _sample_rows(self, handle: StepHandle, logits: Tensor, masks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sample all rows; returns their tokens int64 [R], and bool [R] for which there is none."""
        batch = handle.batch
        try:
            result = self.sampler.sample(logits, batch.sampling_rows, batch.output_indices, masks)
        except Exception as error:
            if is_device_failure(error):
                raise
            logger.warning("sampling of step %d raised (%s); repeating it row by row", handle.plan.step, error)
            return self._sample_one_by_one(handle, logits, masks, error)
        if result.logprobs is not None:
            handle.logprobs.append((result.logprob_rows, result.logprobs.moved(self._device.to_host)))
        return result.token_ids, result.failed

    def _sample_one_by_one(
        self, handle: StepHandle, logits: Tensor, masks: Tensor | None, cause: Exception
    ) -> tuple[Tensor, Tensor]:
        """Row by row, after a batched call raised `cause`; what raises again fails its row."""
        batch = handle.batch
        tokens = torch.zeros(len(batch.sampling_rows), dtype=torch.int64, device=logits.device)
        unsampled = torch.zeros(len(tokens), dtype=torch.bool, device=logits.device)
        raised = 0
        for i, (row, index) in enumerate(zip(batch.sampling_rows, batch.output_indices, strict=True)):
            try:
                allowed = None if masks is None else masks[i : i + 1]
                result = self.sampler.sample(logits[i : i + 1], [row], [index], allowed)
            except Exception as error:
                if is_device_failure(error):
                    raise
                raised += 1
                unsampled[i] = True
                handle.failures.setdefault(i, f"{type(error).__name__}: {error}")
                continue
            tokens[i], unsampled[i] = result.token_ids[0], result.failed[0]
            if result.logprobs is not None:
                handle.logprobs.append(([i], result.logprobs.moved(self._device.to_host)))
        if raised == len(tokens) > 1:
            raise cause
        return tokens, unsampled
