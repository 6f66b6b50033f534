"""The largest step: its size, that it leaves nothing behind, and that it runs on a pool of one block."""

from __future__ import annotations

import pytest
import torch
from step_loop import Loop, decoder_of, prompt, tiny_reference

from minillm.memory.paged_kv_cache import PagedKVCache
from minillm.runner.largest_step import (
    largest_decode,
    largest_prefill,
    run_largest_step,
    short_chunks_on_long_contexts,
)
from minillm.runner.pytorch_model_runner import PyTorchModelRunner, kv_cache_spec
from reference_kernels import ReferenceKernels


@pytest.mark.parametrize(
    ("max_num_seqs", "max_tokens", "max_model_len", "lengths"),
    [(4, 40, 100, [40]), (4, 40, 16, [16, 16, 8]), (2, 100, 16, [16, 16]), (8, 8, 1, [1] * 8)],
)
def test_it_fills_the_token_budget_and_samples_every_row(max_num_seqs, max_tokens, max_model_len, lengths):
    plan = largest_prefill(max_num_seqs, max_tokens, max_model_len, 8)
    assert [chunk.end for chunk in plan.prefills] == lengths
    assert plan.num_tokens == sum(lengths) <= max_tokens
    assert plan.num_sampling_rows == max_num_seqs
    assert {block for chunk in plan.prefills for block in chunk.block_table} == {0}
    assert largest_decode(max_num_seqs).num_sampling_rows == max_num_seqs


def test_it_runs_on_one_block_and_leaves_nothing_behind():
    model = decoder_of(tiny_reference())
    kernels = ReferenceKernels()
    cache = PagedKVCache(kv_cache_spec(model, 8), 1)
    tiny = PyTorchModelRunner(model, cache, max_num_seqs=16, max_model_len=50, kernels=kernels)
    run_largest_step(tiny, max_num_seqs=16, max_tokens=60, max_model_len=50, block_size=8)
    assert kernels.calls[0] == ("prefill", 2)
    assert kernels.calls[-1] == ("decode", 16)
    assert not cache.store[:, :, 0].any()
    assert not tiny.sampler.state.assigned.any()

    used, fresh = (Loop(model, runner_options={"kernels": ReferenceKernels()}) for _ in range(2))
    run_largest_step(used.runner, max_num_seqs=16, max_tokens=60, max_model_len=50, block_size=8)
    for loop in (used, fresh):
        for n in (5, 19):
            loop.submit(f"{n}", prompt(n, n), temperature=0.8, frequency_penalty=0.5, seed=n)
    assert used.run() == fresh.run()
    assert used.cache.store.isfinite().all()


def test_what_does_not_run_is_an_error_then_and_there(monkeypatch):
    loop = Loop(decoder_of(tiny_reference()), runner_options={"kernels": ReferenceKernels()})

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop.runner.model, "forward", no_memory)
    with pytest.raises(RuntimeError, match="60 tokens and 16 sequences: OutOfMemoryError: CUDA out of memory"):
        run_largest_step(loop.runner, max_num_seqs=16, max_tokens=60, max_model_len=60, block_size=8)


@pytest.mark.parametrize(("seqs", "tokens", "length"), [(256, 8192, 40_960), (8, 5, 64), (4, 4096, 100)])
def test_short_chunks_fill_the_budget_with_every_sequence_at_its_longest(seqs: int, tokens: int, length: int) -> None:
    plan = short_chunks_on_long_contexts(seqs, tokens, length, 16)
    assert len(plan.prefills) == min(seqs, tokens) and plan.num_tokens <= tokens
    assert all(chunk.end == length and len(chunk.token_ids) == chunk.end - chunk.start for chunk in plan.prefills)
    assert all(len(chunk.block_table) == -(-length // 16) for chunk in plan.prefills)
