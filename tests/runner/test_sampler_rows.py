"""Rows are independent: of batch mates, order, failures beside them, and of what a slot held before."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from minillm.core.errors import InvalidParameterError
from minillm.core.sampling_params import SamplingParams
from minillm.runner import sampling_ops
from minillm.runner.sampler import Sampler

VOCAB = 2000
MIXTURE = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=50, top_p=0.95),
    SamplingParams(top_k=1),
    SamplingParams(min_p=0.05),
    SamplingParams(top_k=700, top_p=0.8, temperature=2.0),
    SamplingParams(temperature=0.0, repetition_penalty=2.0),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, top_k=20),
    SamplingParams(logit_bias={5: 20.0, 6: -100.0}),
    SamplingParams(min_tokens=100, stop_token_ids=[11], temperature=0.0, logprobs=3),
]


def make_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3


def sampler_of(
    params: list[SamplingParams], outputs: Callable[[int], list[int]] = lambda slot: [slot, slot, 7]
) -> Sampler:
    """A sampler whose slot i holds `params[i]` with seed 100 + i and a short history of its own."""
    sampler = Sampler(len(params), VOCAB, eos_token_ids=[2])
    for slot, each in enumerate(params):
        sampler.state.assign(slot, each, 100 + slot, 0, list(range(slot, slot + 30)), outputs(slot))
    return sampler


def test_a_row_gives_the_same_token_alone_with_mates_and_permuted() -> None:
    logits = make_logits(len(MIXTURE))
    indices = list(range(len(MIXTURE)))
    together = sampler_of(MIXTURE).sample(logits.clone(), indices, indices).token_ids.tolist()
    sampler = sampler_of(MIXTURE)
    alone = [sampler.sample(logits[i : i + 1].clone(), [i], [i]).token_ids.item() for i in indices]
    assert alone == together
    generator = np.random.default_rng(0)
    for _ in range(20):
        order = generator.permutation(len(MIXTURE))[: generator.integers(1, len(MIXTURE) + 1)].tolist()
        result = sampler.sample(logits[order].clone(), order, order)
        assert result.token_ids.tolist() == [together[i] for i in order]


@pytest.mark.parametrize("params", MIXTURE[1:7])
def test_slices_and_threads_do_not_change_a_token(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(9)
    slots = list(range(9))
    sampler = sampler_of([params] * 9)
    expected = [sampler.sample(logits.clone(), slots, [i] * 9).token_ids.tolist() for i in range(10)]
    threads = torch.get_num_threads()
    try:
        for slice_elements, head in ((1, 1), (2 * VOCAB, 8), (1 << 22, 1000)):
            monkeypatch.setattr(sampling_ops, "_HEAD", head)
            monkeypatch.setitem(sampling_ops._SLICE_ELEMENTS, "cpu", slice_elements)
            for count in (1, 2):
                torch.set_num_threads(count)
                assert [
                    sampler.sample(logits.clone(), slots, [i] * 9).token_ids.tolist() for i in range(10)
                ] == expected
    finally:
        torch.set_num_threads(threads)


def test_the_token_follows_the_seed_the_choice_and_the_index_and_nothing_else() -> None:
    logits = make_logits(1).div_(10)
    sampler = Sampler(4, VOCAB)
    tokens = {}
    for slot, (seed, choice) in enumerate([(1, 0), (1, 1), (2, 0)]):
        sampler.state.assign(slot, SamplingParams(), seed, choice)
        for index in range(3):
            tokens[seed, choice, index] = sampler.sample(logits, [slot], [index]).token_ids.item()
    assert len(set(tokens.values())) == len(tokens)
    sampler.state.assign(3, SamplingParams(), 1, 1)
    for index in (2, 0, 1):  # any order, another slot, as after a preemption or a discarded row
        assert sampler.sample(logits, [3], [index]).token_ids.item() == tokens[1, 1, index]


def test_choices_of_one_prompt_equal_each_choice_alone() -> None:
    logits = make_logits(1)
    together = Sampler(3, VOCAB)
    for choice in range(3):
        together.state.assign(choice, SamplingParams(n=3), 9, choice)
    tokens = together.sample(logits.expand(3, -1).clone(), [0, 1, 2], [0, 0, 0]).token_ids.tolist()
    for choice in range(3):
        alone = Sampler(1, VOCAB)
        alone.state.assign(0, SamplingParams(n=3), 9, choice)
        assert alone.sample(logits.clone(), [0], [0]).token_ids.item() == tokens[choice]


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize("params", MIXTURE)
def test_a_row_that_is_not_finite_fails_alone(bad: float | str, params: SamplingParams) -> None:
    logits = make_logits(4)
    mates = [SamplingParams(temperature=0.0), params, params, SamplingParams(top_p=0.9)]
    good = sampler_of(mates).sample(logits.clone(), [0, 1, 2, 3], [1] * 4)
    assert not good.failed.any()
    if bad == "all -inf":
        logits[1] = -math.inf
    else:
        logits[1, 1234] = bad
    result = sampler_of(mates).sample(logits, [0, 1, 2, 3], [1] * 4)
    assert result.failed.tolist() == [False, True, False, False]
    assert result.token_ids[1] == 0
    assert result.token_ids[[0, 2, 3]].tolist() == good.token_ids[[0, 2, 3]].tolist()


def test_nan_under_a_mask_still_fails_the_row() -> None:
    logits = make_logits(2)
    logits[0, 2] = math.nan
    sampler = sampler_of([SamplingParams(temperature=0.0, min_tokens=5)] * 2)  # masks id 2, the EOS
    assert sampler.sample(logits, [0, 1], [0, 0]).failed.tolist() == [True, False]


def test_a_mask_that_leaves_no_token_fails_the_row_alone() -> None:
    allowed = torch.ones(2, VOCAB, dtype=torch.bool)
    allowed[1] = False
    result = sampler_of([SamplingParams()] * 2).sample(make_logits(2), [0, 1], [0, 0], allowed)
    assert result.failed.tolist() == [False, True]


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-5, 1e-4])
@pytest.mark.parametrize("top_p", [1.0, 1e-4])
def test_tiny_temperature_equals_greedy_even_at_the_ends_of_half_precision(temperature: float, top_p: float) -> None:
    logits = make_logits(3)
    logits[0, ::3] = 60000.0
    logits[0, 0] = -60000.0
    logits[1] = logits[1].half().float()
    expected = logits.argmax(-1).tolist()
    sampler = sampler_of([SamplingParams(temperature=temperature, top_p=top_p)] * 2 + [SamplingParams()])
    result = sampler.sample(logits, [0, 1, 2], [0, 0, 0])
    assert result.token_ids[:2].tolist() == expected[:2]
    assert not result.failed.any()


def test_low_temperature_does_not_overflow_and_keeps_to_the_best_tokens() -> None:
    logits = make_logits(2)
    logits[:, :] = -60000.0
    logits[0, 17], logits[1, [4, 9]] = 60000.0, 60000.0
    sampler = sampler_of([SamplingParams(temperature=0.01), SamplingParams(temperature=1.1e-4)])
    for index in range(50):
        result = sampler.sample(logits, [0, 1], [index] * 2)
        assert not result.failed.any()
        assert result.token_ids[0] == 17
        assert result.token_ids[1] in (4, 9)


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1])
def test_top_k_off_means_the_whole_vocabulary(top_k: int) -> None:
    logits = make_logits(1).mul_(0.01)
    sampler = sampler_of([SamplingParams(top_k=top_k)])
    plain = sampler_of([SamplingParams()])
    tokens = [sampler.sample(logits, [0], [i]).token_ids.item() for i in range(100)]
    assert tokens == [plain.sample(logits, [0], [i]).token_ids.item() for i in range(100)]
    assert len(set(tokens)) > 80


@pytest.mark.parametrize("params", [SamplingParams(top_k=1), SamplingParams(top_p=0), SamplingParams(top_p=1e-9)])
def test_filters_that_leave_one_token_are_greedy_with_ties_to_the_lowest_id(params: SamplingParams) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [1700, 30, 900]] = 1.0
    sampler = sampler_of([params], outputs=lambda slot: [])
    assert {sampler.sample(logits, [0], [i]).token_ids.item() for i in range(30)} == {30}


def test_top_k_at_a_tie_keeps_the_lowest_ids() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1999] = 1.0
    for top_k, expected in ((3, {0, 1, 1999}), (300, {*range(299), 1999})):
        sampler = sampler_of([SamplingParams(top_k=top_k)])
        seen = set(sampler.sample(logits.expand(3000, -1), [0] * 3000, range(3000)).token_ids.tolist())
        assert seen <= expected
        assert len(seen) > 0.9 * len(expected)


@pytest.mark.parametrize("mate_top_k", [40, 256, 300, 0])
def test_top_k_is_each_rows_own(mate_top_k: int) -> None:
    sampler = sampler_of([SamplingParams(top_k=3), SamplingParams(top_k=mate_top_k)], outputs=lambda slot: [])
    logits = torch.zeros(400, VOCAB)
    tokens = sampler.sample(logits, [0, 1] * 200, [i // 2 for i in range(400)]).token_ids
    assert set(tokens[0::2].tolist()) == {0, 1, 2}
    assert 3 < len(set(tokens[1::2].tolist())) <= (mate_top_k or VOCAB)


@pytest.mark.parametrize("top_p", [5e-324, 1e-30, 1e-13])
def test_the_smallest_top_p_keeps_the_most_likely_token(top_p: float) -> None:
    sampler = sampler_of([SamplingParams(top_p=top_p, temperature=100.0), SamplingParams(top_p=0.99)])
    logits = make_logits(2)
    for index in range(10):
        result = sampler.sample(logits, [0, 1], [index] * 2)
        assert result.token_ids[0] == logits[0].argmax()


def test_padded_vocabulary_is_never_sampled_nor_seen_in_logprobs() -> None:
    vocab_size, real = 203, 190
    sampler = Sampler(4, vocab_size, invalid_token_ids=[*range(real, vocab_size), 77])
    params = [
        SamplingParams(temperature=0.0, logprobs=20),
        SamplingParams(temperature=50.0),
        SamplingParams(temperature=1e6, top_k=200, top_p=0.999),
        SamplingParams(temperature=1.0, logit_bias={195: 100.0, 77: 100.0}),
    ]
    for slot, each in enumerate(params):
        sampler.state.assign(slot, each, slot)
    clean = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0))
    logits = clean.clone()
    logits[:, real:] = math.nan  # whatever the padding's weights make of it
    logits[:, 77] = math.inf
    for index in range(200):
        result = sampler.sample(logits.clone(), range(4), [index] * 4)
        assert not result.failed.any()
        assert (result.token_ids < real).all()
        assert not (result.token_ids == 77).any()
    assert result.logprobs is not None
    (entry,) = result.logprobs.to_list()
    ids = [i for i in range(real) if i != 77]
    assert set(entry.top_ids) <= set(ids)
    expected = clean[0, ids].log_softmax(-1).max().item()
    assert entry.logprob == pytest.approx(expected, abs=1e-5)


def test_min_tokens_masks_every_eos_and_stop_id_until_the_index_is_reached() -> None:
    sampler = Sampler(2, VOCAB, eos_token_ids=[2, 7, 99999])
    params = SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=[11], ignore_eos=True)
    sampler.state.assign(0, params, 0)
    sampler.state.assign(1, SamplingParams(temperature=0.0), 0)
    logits = torch.zeros(2, VOCAB)
    for order, token in enumerate((7, 2, 11, 40)):
        logits[:, token] = 10.0 - order
    for index in range(8):
        tokens = sampler.sample(logits, [0, 1], [index] * 2).token_ids.tolist()
        assert tokens == [40 if index < 5 else 7, 7]


def test_logit_bias_adds_to_the_named_logits_only() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 50] = 1.0
    sampler = sampler_of([SamplingParams(temperature=0.0, logit_bias={60: 1.5, 50: -100}), SamplingParams(top_k=1)])
    assert sampler.sample(logits, [0, 1], [0, 0]).token_ids.tolist() == [60, 50]
    assert logits[0, 60] == 0.0


@pytest.mark.parametrize("vocab_size", [64, 100, 2000])
def test_bitmask_and_boolean_mask_are_the_same(vocab_size: int) -> None:
    numbers = np.random.default_rng(0)
    allowed = torch.from_numpy(numbers.random((3, vocab_size)) < 0.2)
    words = np.zeros((3, -(-vocab_size // 32)), dtype=np.uint32)
    for row, token in allowed.nonzero().tolist():
        words[row, token // 32] |= np.uint32(1 << (token % 32))
    bitmask = torch.from_numpy(words.view(np.int32))
    sampler = Sampler(3, vocab_size)
    for slot in range(3):
        sampler.state.assign(slot, SamplingParams(temperature=5.0), slot)
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0))
    for index in range(50):
        one = sampler.sample(logits, range(3), [index] * 3, allowed).token_ids
        other = sampler.sample(logits, range(3), [index] * 3, bitmask).token_ids
        assert one.tolist() == other.tolist()
        assert allowed[range(3), one].all()


def test_assigning_a_slot_anew_leaves_nothing_of_its_former_request() -> None:
    heavy = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, logit_bias={3: 100.0}, min_tokens=50, logprobs=2, top_k=9
    )
    logits = make_logits(1)
    sampler = sampler_of([heavy])
    sampler.sample(logits, [0], [0])
    sampler.state.assign(0, SamplingParams(temperature=0.0), 5)
    result = sampler.sample(logits, [0], [0])
    assert result.token_ids.item() == logits[0].argmax()
    assert result.logprobs is None
    assert sampler.state.penalties.num_slots == 0


def test_new_parameters_of_a_slot_hold_from_its_next_sample_on() -> None:
    logits = torch.zeros(1, VOCAB)
    sampler = Sampler(1, VOCAB)
    for params, expected in [
        (SamplingParams(top_k=5), set(range(5))),
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(temperature=0.0), {0}),
        (SamplingParams(top_k=4), set(range(4))),
        (SamplingParams(top_p=0.001), {0, 1}),
    ]:
        sampler.state.assign(0, params, 1)
        assert {sampler.sample(logits, [0], [i]).token_ids.item() for i in range(60)} == expected


def test_the_callers_logits_are_left_as_they_are() -> None:
    logits = make_logits(len(MIXTURE))
    before = logits.clone()
    slots = range(len(MIXTURE))
    sampler_of(MIXTURE).sample(logits, slots, [0] * len(MIXTURE), torch.ones(len(MIXTURE), VOCAB, dtype=torch.bool))
    assert torch.equal(logits, before)


def test_no_rows_give_an_empty_result() -> None:
    result = sampler_of(MIXTURE).sample(torch.zeros(0, VOCAB), [], [])
    assert result.token_ids.tolist() == []
    assert result.failed.tolist() == []
    assert result.logprobs is None


def test_ids_outside_the_vocabulary_are_refused_before_anything_changes() -> None:
    sampler = sampler_of([SamplingParams(temperature=0.0)])
    for params in (SamplingParams(logit_bias={VOCAB: 1.0}), SamplingParams(stop_token_ids=[VOCAB])):
        with pytest.raises(InvalidParameterError, match=str(VOCAB)):
            sampler.state.assign(0, params, 0)
    assert sampler.sample(make_logits(1), [0], [0]).token_ids.item() == make_logits(1)[0].argmax()
    with pytest.raises(ValueError, match="vocabulary"):
        Sampler(1, VOCAB, invalid_token_ids=[VOCAB])


def test_wrong_shapes_types_and_unassigned_rows_are_errors() -> None:
    sampler = sampler_of([SamplingParams()] * 2)
    for logits, rows, indices in (
        (make_logits(2), [0], [0]),
        (make_logits(1).double(), [0], [0]),
        (make_logits(1)[:, :-1], [0], [0]),
        (make_logits(1), [0], [0, 1]),
    ):
        with pytest.raises(ValueError, match="is needed"):
            sampler.sample(logits, rows, indices)
    sampler.state.release(1)
    with pytest.raises(ValueError, match=r"rows \[1\] are not assigned"):
        sampler.sample(make_logits(2), [0, 1], [0, 0])


def test_huge_limits_are_taken() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=10**30, top_k=10**30, seed=2**64 - 1)
    sampler = sampler_of([params])
    logits = make_logits(1)
    logits[0, 2] = 100.0  # the EOS
    assert sampler.sample(logits, [0], [10**6]).token_ids.item() != 2
