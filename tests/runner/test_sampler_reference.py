"""The vectorised sampler against the plain-Python reference, over every parameter and mixture of rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampler_reference import choose, edited_logits

from minillm.core.sampling_params import SamplingParams
from minillm.runner import sampler as sampler_module
from minillm.runner import sampling_ops
from minillm.runner.sampler import Sampler

EOS = (0, 3)
INVALID = (5,)


@pytest.fixture(params=[(256, 1 << 18, 128), (0, 1 << 18, 4), (2, 1, 1), (0, 64, 2)], ids=str)
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each split of the work: candidates or histogram, one slice or many, long head or short."""
    candidates, slice_elements, head = request.param
    monkeypatch.setattr(sampling_ops, "_HEAD", head)
    monkeypatch.setattr(sampler_module, "MAX_CANDIDATES", candidates)
    monkeypatch.setitem(sampling_ops._SLICE_ELEMENTS, "cpu", slice_elements)


def params_strategy(vocab_size: int) -> st.SearchStrategy[SamplingParams]:
    ids = st.integers(0, vocab_size - 1)
    return st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 1e-8, 1e-4, 2e-4, 0.01, 0.3, 0.8, 1.5, 10.0, 1e6]),
            "top_k": st.integers(-1, vocab_size + 2),
            "top_p": st.sampled_from([0.0, 1e-9, 1e-4, 0.1, 0.5, 0.9, 0.999, 1.0]),
            "min_p": st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
            "repetition_penalty": st.sampled_from([1e-40, 0.5, 1.0, 1.1, 2.0, 100.0]),
            "presence_penalty": st.sampled_from([-2.0, 0.0, 0.5, 2.0]),
            "frequency_penalty": st.sampled_from([-2.0, 0.0, 0.3, 2.0]),
            "logit_bias": st.dictionaries(ids, st.sampled_from([-100.0, -1.0, 0.5, 3.0, 100.0]), max_size=3),
            "min_tokens": st.integers(0, 4),
            "stop_token_ids": st.lists(ids, max_size=2),
        },
    ).map(lambda fields: SamplingParams(**fields))


# Few distinct values make ties likely; -60000 and 60000 are where half precision ends.
TYING_LOGITS = np.array([-2.0, -0.5, -0.0, 0.0, 0.5, 1.0, 4.0, -math.inf, -60000.0, 60000.0], dtype=np.float32)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[dict[str, Any]]]:
    """A vocabulary size and rows; the bulk of the numbers comes from a drawn seed, which keeps drawing fast."""
    vocab_size = draw(st.integers(6, 40))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
        ties, masked = draw(st.booleans()), draw(st.sampled_from([None, None, 0.1, 0.7]))
        logits = numbers.normal(0.0, draw(st.sampled_from([0.1, 1.0, 10.0])), vocab_size).astype(np.float32)
        rows.append(
            {
                "logits": numbers.choice(TYING_LOGITS, vocab_size) if ties else logits,
                "params": draw(params_strategy(vocab_size)),
                "seed": draw(st.integers(-(2**63), 2**64 - 1)),
                "choice": draw(st.integers(0, 3)),
                "prompt": numbers.integers(0, vocab_size, numbers.integers(1, 7)).tolist(),
                "output": numbers.integers(0, vocab_size, numbers.integers(0, 7)).tolist(),
                "allowed": None if masked is None else (numbers.random(vocab_size) < masked).tolist(),
            }
        )
    return vocab_size, rows


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(batches())
def test_every_row_of_a_mixed_batch_equals_the_reference(limits: None, batch: tuple[int, list[dict[str, Any]]]) -> None:
    vocab_size, rows = batch
    sampler = Sampler(len(rows), vocab_size, eos_token_ids=EOS, invalid_token_ids=INVALID)
    for slot, row in enumerate(rows):
        sampler.state.assign(slot, row["params"], row["seed"], row["choice"], row["prompt"], row["output"])
    logits = torch.from_numpy(np.stack([row["logits"] for row in rows]))
    allowed = None
    if any(row["allowed"] is not None for row in rows):
        allowed = torch.tensor([row["allowed"] or [True] * vocab_size for row in rows])
    indices = [len(row["output"]) for row in rows]
    result = sampler.sample(logits, range(len(rows)), indices, allowed)
    for slot, row in enumerate(rows):
        edited = edited_logits(
            row["logits"],
            row["params"],
            indices[slot],
            row["prompt"],
            row["output"],
            EOS,
            INVALID,
            row["allowed"],
        )
        if max(edited) == -math.inf:
            assert result.failed[slot]
            assert result.token_ids[slot] == 0
            continue
        expected = choose(edited, row["params"], row["seed"], row["choice"], indices[slot])
        assert not result.failed[slot]
        assert result.token_ids[slot] == expected


@pytest.mark.parametrize(
    ("vocab_size", "spread"), [(257, 0.0), (257, 3.0), (1000, 0.01), (1000, 1.0), (1000, 5.0), (32003, 2.0)]
)
def test_large_vocabularies_equal_the_reference(vocab_size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    cases = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=3.0, top_p=0.6, min_p=0.01),
        SamplingParams(top_k=256, top_p=0.5),
        SamplingParams(top_k=vocab_size - 1),
        SamplingParams(temperature=1.3, top_k=300, top_p=0.95),
        SamplingParams(min_p=0.3),
    ]
    logits = torch.randn(len(cases), vocab_size, generator=generator) * spread
    logits[::2] = logits[::2].bfloat16().float()  # ties, as a head product in bfloat16 makes them
    sampler = Sampler(len(cases), vocab_size)
    for slot, params in enumerate(cases):
        sampler.state.assign(slot, params, seed=slot)
    for index in range(2 if vocab_size < 10000 else 1):
        result = sampler.sample(logits.clone(), range(len(cases)), [index] * len(cases))
        for slot, params in enumerate(cases):
            row = logits[slot].numpy()
            assert result.token_ids[slot] == choose(list(row), params, slot, 0, index)


def test_top_k_lowest_id_orders_by_value_then_id() -> None:
    generator = torch.Generator().manual_seed(0)
    for vocab_size, k in [(1, 1), (7, 7), (7, 9), (500, 1), (500, 20), (500, 499)]:
        logits = torch.randint(-3, 4, (30, vocab_size), generator=generator).float()
        logits[0] = -torch.inf
        logits[1] = -0.0
        logits[1, ::2] = 0.0
        values, ids = sampling_ops.top_k_lowest_id(logits, k)
        for row in range(30):
            order = sorted(range(vocab_size), key=lambda i: (-logits[row, i].item(), i))[:k]
            if row != 0:  # which of the impossible tokens come is left open
                assert ids[row].tolist() == order
            assert values[row].tolist() == [logits[row, i].item() for i in order]


def test_exp_of_an_element_does_not_depend_on_its_place() -> None:
    """What the weights stand on: torch's vectorised exp gives one element the same bits in any tensor."""
    values = -torch.rand(5003, generator=torch.Generator().manual_seed(1)) * 40
    whole = values.exp().numpy()
    for length in (1, 3, 15, 16, 17, 33, 250):
        for start in range(0, 4000, 97):
            part = values[start : start + length].clone().exp().numpy()
            assert np.array_equal(part, whole[start : start + length])
