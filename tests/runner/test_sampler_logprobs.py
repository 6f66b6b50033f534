"""Log-probabilities of sampled tokens and prompts: values, ranks, exactly k entries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from minillm.core.sampling_params import MAX_LOGPROBS, SamplingParams
from minillm.runner.logprobs import compute_logprobs
from minillm.runner.sampler import Sampler

VOCAB = 500


def make_logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def test_entries_equal_a_double_precision_log_softmax_in_sorted_order() -> None:
    logits = make_logits(6)
    logits[3] = logits[3].round()  # ties
    tokens = torch.tensor([0, 5, 499, 17, 17, 250])
    counts = [0, 1, 5, 20, 20, 3]
    entries = compute_logprobs(logits, tokens, counts).to_list()
    for row, entry in enumerate(entries):
        exact = logits[row].double().log_softmax(-1).tolist()
        order = sorted(range(VOCAB), key=lambda i: (-logits[row, i].item(), i))
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(exact[entry.token_id], abs=1e-5)
        assert entry.rank == order.index(entry.token_id) + 1
        assert entry.top_ids == order[: counts[row]]
        assert entry.top_logprobs == pytest.approx([exact[i] for i in entry.top_ids], abs=1e-5)


@pytest.mark.parametrize("k", [0, 1, 5, MAX_LOGPROBS])
def test_top_list_has_exactly_k_entries_and_the_sampled_token_apart(k: int) -> None:
    sampler = Sampler(1, VOCAB)
    sampler.state.assign(0, SamplingParams(temperature=1e6, logprobs=k), 3)
    logits = make_logits(1)
    outside = 0
    for index in range(30):
        result = sampler.sample(logits, [0], [index])
        assert result.logprobs is not None
        (entry,) = result.logprobs.to_list()
        assert entry.token_id == result.token_ids.item()
        assert len(entry.top_ids) == len(entry.top_logprobs) == k
        assert (entry.token_id in entry.top_ids) == (entry.rank <= k)
        outside += entry.rank > k
    assert outside > 20


def test_only_rows_that_ask_are_scored_each_with_its_own_k() -> None:
    sampler = Sampler(4, VOCAB)
    asked = [None, 2, None, 0]
    for slot, k in enumerate(asked):
        sampler.state.assign(slot, SamplingParams(logprobs=k), slot)
    logits = make_logits(4)
    result = sampler.sample(logits, [3, 2, 1, 0], [0] * 4)
    assert result.logprob_rows == [0, 2]
    assert result.logprobs is not None
    entries = result.logprobs.to_list()
    assert [len(entry.top_ids) for entry in entries] == [0, 2]
    assert [entry.token_id for entry in entries] == result.token_ids[[0, 2]].tolist()


def test_logprobs_are_of_the_models_own_distribution() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_k=3,
        logprobs=4,
        logit_bias={7: 50.0},
        repetition_penalty=3.0,
        presence_penalty=2.0,
        min_tokens=9,
        stop_token_ids=[1],
    )
    sampler = Sampler(1, VOCAB, eos_token_ids=[0])
    sampler.state.assign(0, params, 1, 0, [3], [4, 4])
    logits = make_logits(1)
    exact = logits[0].log_softmax(-1)
    result = sampler.sample(logits, [0], [2], torch.arange(VOCAB)[None] > 5)
    assert result.logprobs is not None
    (entry,) = result.logprobs.to_list()
    assert entry.token_id == 7
    assert entry.logprob == pytest.approx(exact[7].item(), abs=1e-5)
    assert entry.top_ids == exact.topk(4).indices.tolist()


def test_scoring_a_prompt_in_chunks_gives_the_same_entries_as_at_once() -> None:
    logits = make_logits(7)
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2])
    sampler = Sampler(1, VOCAB)
    whole = sampler.score(logits.clone(), tokens, 5).to_list()
    assert [entry.token_id for entry in whole] == tokens.tolist()
    for size in (1, 2, 3):
        parts = [
            sampler.score(logits[i : i + size].clone(), tokens[i : i + size], 5).to_list() for i in range(0, 7, size)
        ]
        assert [entry for part in parts for entry in part] == whole


def test_scoring_masks_ids_without_a_token() -> None:
    sampler = Sampler(1, VOCAB, invalid_token_ids=range(400, VOCAB))
    logits = make_logits(2)
    exact = logits[:, :400].log_softmax(-1)
    logits[:, 400:] = 1000.0
    entries = sampler.score(logits, torch.tensor([5, 450]), 3).to_list()
    assert entries[0].logprob == pytest.approx(exact[0, 5].item(), abs=1e-5)
    assert entries[0].top_ids == exact[0].topk(3).indices.tolist()
    assert entries[1].logprob == -math.inf


def test_scoring_without_rows_or_alternatives() -> None:
    sampler = Sampler(1, VOCAB)
    assert sampler.score(torch.zeros(0, VOCAB), torch.zeros(0, dtype=torch.int64), 5).to_list() == []
    (entry,) = sampler.score(make_logits(1), torch.tensor([8]), 0).to_list()
    assert (entry.top_ids, entry.top_logprobs) == ([], [])


def test_more_alternatives_than_the_vocabulary_are_all_of_it() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    (entry,) = compute_logprobs(logits, torch.tensor([0]), [20]).to_list()
    assert entry.top_ids == [1, 2, 0]
    assert entry.rank == 3
