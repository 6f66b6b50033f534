"""The largest step that the limits allow, run once at start-up.

It shows how much memory steps need, compiles every kernel that the model will use, and makes what cannot run on this
device fail when the engine is built instead of at somebody's request.
"""

from __future__ import annotations

import torch

from minillm.core.plan import DecodeBatch, PrefillChunk, RowAssignment, StepPlan, TableUpdate
from minillm.core.sampling_params import SamplingParams
from minillm.runner.pytorch_model_runner import NO_TOKEN, NOT_FINITE, PyTorchModelRunner

_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1, prompt_logprobs=1, frequency_penalty=0.1)
"""What needs most memory in sampling."""


def largest_prefill(max_num_seqs: int, max_tokens: int, max_model_len: int, block_size: int) -> StepPlan:
    """A prefill of `max_tokens` tokens, as few sequences as they fit, that samples `max_num_seqs` rows.

    Every block table names block 0 alone, so a pool of one block will do; what is computed means nothing.
    """
    chunks, updates = [], []
    left = max_tokens
    for row in range(max_num_seqs):
        length = min(left, max_model_len)
        if length < 1:
            break
        left -= length
        table = [0] * -(-length // block_size)
        chunks.append(PrefillChunk(f"{row}", row, [0] * length, 0, length, table, (), 0, row == 0))
        updates.append(TableUpdate(row, 0, table))
    chunks[-1] = chunks[-1]._replace(sample_rows=tuple(range(max_num_seqs)))
    assignments = [
        RowAssignment(row, f"{row}", _PARAMS, row, 0, chunks[row].token_ids if row < len(chunks) else [0], [])
        for row in range(max_num_seqs)
    ]
    return StepPlan(0, DecodeBatch(), chunks, assignments=assignments, table_updates=updates)


def largest_decode(max_num_seqs: int) -> StepPlan:
    """One token of each row, all in block 0."""
    rows = list(range(max_num_seqs))
    names, zeros = [f"{row}" for row in rows], [0] * max_num_seqs
    decodes = DecodeBatch(names, rows, [-1] * max_num_seqs, zeros, zeros, [1] * max_num_seqs)
    return StepPlan(1, decodes, [], table_updates=[TableUpdate(row, 0, [0]) for row in rows])


def short_chunks_on_long_contexts(max_num_seqs: int, max_tokens: int, max_model_len: int, block_size: int) -> StepPlan:
    """Every sequence computes its last few tokens: where attention splits most and so keeps most partial results."""
    count = min(max_num_seqs, max_tokens)
    length = min(max_tokens // count, max_model_len)
    table = [0] * -(-max_model_len // block_size)
    chunks = [
        PrefillChunk(f"{row}", row, [0] * length, max_model_len - length, max_model_len, table, (), 0, False)
        for row in range(count)
    ]
    return StepPlan(0, DecodeBatch(), chunks)


def run_largest_step(
    runner: PyTorchModelRunner, *, max_num_seqs: int, max_tokens: int, max_model_len: int, block_size: int
) -> None:
    """Run both steps; block 0 is zeros again afterwards, and rows are unassigned.

    Raises RuntimeError if a row failed with an exception (out of memory, say); numbers that are not finite are no
    matter here.
    """
    runner.reserve(short_chunks_on_long_contexts(max_num_seqs, max_tokens, max_model_len, block_size))
    for plan in (
        largest_prefill(max_num_seqs, max_tokens, max_model_len, block_size),
        largest_decode(max_num_seqs),
    ):
        handle = runner.forward(plan)
        runner.sample(handle)
        failures = runner.collect(handle).failures.values()
        error = next((text for text in failures if text not in (NOT_FINITE, NO_TOKEN)), None)
        if error is not None:
            raise RuntimeError(f"a step of {plan.num_tokens} tokens and {max_num_seqs} sequences: {error}")
    runner.cache.clear_slots(torch.arange(block_size))
    for row in range(max_num_seqs):
        runner.sampler.state.release(row)
