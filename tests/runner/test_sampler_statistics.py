"""Chi-square tests of drawn tokens against the exact distribution; seeds are fixed, so they never flake."""

from __future__ import annotations

import math

import pytest
import torch

from minillm.core.sampling_params import SamplingParams
from minillm.runner import sampler as sampler_module
from minillm.runner import sampling_ops
from minillm.runner.sampler import Sampler

VOCAB = 400
DRAWS = 4000


def exact_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Textbook distribution in double precision: temperature, min_p, top_k, top_p, each renormalising."""
    probabilities = (logits.double() / params.temperature).softmax(-1)
    probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    order = probabilities.argsort(descending=True)
    if params.top_k > 0:
        probabilities[order[params.top_k :]] = 0.0
    probabilities /= probabilities.sum()
    before = probabilities[order].cumsum(0) - probabilities[order]
    probabilities[order[before >= params.top_p]] = 0.0
    return probabilities / probabilities.sum()


def upper_bound(degrees: int, sigmas: float = 4.0) -> float:
    """Quantile of chi-square at `sigmas`, by Wilson and Hilferty's cube."""
    return degrees * (1 - 2 / (9 * degrees) + sigmas * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(("candidates", "head"), [(256, 128), (0, 3)])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=10),
        SamplingParams(top_k=40, top_p=0.8),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.3, temperature=2.0),
        SamplingParams(min_p=0.1),
        SamplingParams(min_p=0.02, top_k=300, top_p=0.95, temperature=1.5),
    ],
)
def test_frequencies_fit_the_distribution(
    params: SamplingParams, candidates: int, head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "MAX_CANDIDATES", candidates)
    monkeypatch.setattr(sampling_ops, "_HEAD", head)
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)) * 1.5
    expected = exact_probabilities(row, params) * DRAWS
    sampler = Sampler(1, VOCAB)
    sampler.state.assign(0, params, seed=12345)
    batch = 500
    counts = torch.zeros(VOCAB)
    logits = row.expand(batch, -1).contiguous()
    for start in range(0, DRAWS, batch):
        tokens = sampler.sample(logits, [0] * batch, range(start, start + batch)).token_ids
        counts += torch.bincount(tokens, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    pooled = torch.cat((counts[common], counts[~common].sum()[None]))
    pooled_expected = torch.cat((expected[common], expected[~common].sum()[None]))
    if pooled_expected[-1] < 5:
        pooled, pooled_expected = pooled[:-1], pooled_expected[:-1]
    chi_square = ((pooled - pooled_expected) ** 2 / pooled_expected).sum().item()
    assert len(pooled) > 3
    assert chi_square < upper_bound(len(pooled) - 1)


def test_different_seeds_and_choices_draw_independently() -> None:
    """Pairs of tokens of two uniform streams fill a contingency table evenly."""
    streams = [(1, 0), (1, 1), (2, 0), (2**63, 0)]
    sampler = Sampler(len(streams), 16)
    for slot, (seed, choice) in enumerate(streams):
        sampler.state.assign(slot, SamplingParams(), seed, choice)
    tokens = torch.stack(
        [sampler.sample(torch.zeros(DRAWS, 16), [slot] * DRAWS, range(DRAWS)).token_ids for slot in range(len(streams))]
    )
    for one in range(len(streams)):
        for other in range(one):
            table = torch.bincount(tokens[one] * 16 + tokens[other], minlength=256)
            chi_square = ((table - DRAWS / 256) ** 2 / (DRAWS / 256)).sum().item()
            assert chi_square < upper_bound(255)


def test_unlikely_tokens_are_drawn_as_often_as_they_should_be() -> None:
    """A tail of 399 tokens with 1 % in all: what a low-precision cumulative sum would lose."""
    row = torch.full((VOCAB,), math.log(0.01 / (VOCAB - 1)))
    row[123] = math.log(0.99)
    sampler = Sampler(1, VOCAB)
    sampler.state.assign(0, SamplingParams(), seed=8)
    tokens = torch.cat(
        [
            sampler.sample(row.expand(2000, -1).contiguous(), [0] * 2000, range(i, i + 2000)).token_ids
            for i in range(0, 20000, 2000)
        ]
    )
    tail = (tokens != 123).sum().item()
    assert abs(tail - 200) < 4 * math.sqrt(200)
