"""Philox4x32-10: known answers, a plain reference, and the uniform numbers made of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.runner.philox import UniformRows, philox4x32, uniform

ALL_ONES = 0xFFFFFFFF
# kat_vectors of Random123: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
WORD = st.integers(0, ALL_ONES)
SEED = st.integers(-(2**63), 2**63 - 1)


def reference(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The algorithm as its paper writes it, in Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & ALL_ONES, (p0 >> 32) ^ c3 ^ k1, p0 & ALL_ONES
        k0, k1 = (k0 + 0x9E3779B9) & ALL_ONES, (k1 + 0xBB67AE85) & ALL_ONES
    return c0, c1, c2, c3


def column(*words: int) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64)[:, None]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answer_vectors(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert tuple(philox4x32(column(*counter), column(*key))[:, 0].tolist()) == expected
    assert reference(counter, key) == expected


def test_known_answers_as_one_batch_are_the_same() -> None:
    counters = torch.tensor([counter for counter, _, _ in KNOWN_ANSWERS]).T
    keys = torch.tensor([key for _, key, _ in KNOWN_ANSWERS]).T
    assert philox4x32(counters, keys).T.tolist() == [list(expected) for _, _, expected in KNOWN_ANSWERS]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(WORD, WORD, WORD, WORD, WORD, WORD), min_size=1, max_size=5))
def test_equals_the_plain_reference(blocks: list[tuple[int, ...]]) -> None:
    words = torch.tensor(blocks, dtype=torch.int64).T
    result = philox4x32(words[:4].contiguous(), words[4:].contiguous())
    assert result.T.tolist() == [list(reference(block[:4], block[4:])) for block in blocks]


@settings(deadline=None, max_examples=50)
@given(SEED, WORD, WORD)
def test_uniform_is_the_stated_function_of_seed_choice_and_index(seed: int, choice: int, index: int) -> None:
    words = reference((choice, index, 0, 0), (seed & ALL_ONES, (seed >> 32) & ALL_ONES))
    expected = (((words[0] << 32 | words[1]) >> 12) + 0.5) / 2**52
    (value,) = uniform(*(torch.tensor([v]) for v in (seed, choice, index))).tolist()
    assert value == expected
    assert 0.0 < value < 1.0


def test_uniform_stays_inside_the_open_interval_for_extreme_words(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    for word, expected in ((0, 2.0**-53), (ALL_ONES, 1 - 2.0**-53)):
        monkeypatch.setattr("minillm.runner.philox.philox4x32", lambda c, k, w=word: torch.full_like(c, w))
        assert uniform(zero, zero, zero).item() == expected


def test_uniform_is_evenly_spread_and_uncorrelated_along_each_argument() -> None:
    many = torch.arange(20000)
    constant = torch.full_like(many, 3)
    for arguments in ((many, constant, constant), (constant, many, constant), (constant, constant, many)):
        values = uniform(*arguments)
        counts = torch.histc(values, bins=50, min=0.0, max=1.0)
        chi_square = ((counts - 400) ** 2 / 400).sum().item()
        assert chi_square < 94  # 49 degrees of freedom, p = 1e-4
        correlation = torch.corrcoef(torch.stack((values[1:], values[:-1])))[0, 1].item()
        assert abs(correlation) < 0.03


def direct(seed: int, choice: int, index: int) -> float:
    return uniform(*(torch.tensor([v]) for v in (seed, choice, index))).item()


def test_rows_give_the_same_numbers_in_any_order_of_asking() -> None:
    rows = UniformRows(4, window=8)
    for row, (seed, choice) in enumerate([(5, 0), (5, 1), (-1, 0), (2**63 - 1, 7)]):
        rows.assign(row, seed, choice)
    generator = np.random.default_rng(0)
    for _ in range(50):
        asked = generator.permutation(4)[: generator.integers(1, 5)]
        indices = generator.integers(0, 40, len(asked))
        expected = [
            direct(*[(5, 0), (5, 1), (-1, 0), (2**63 - 1, 7)][row], index)
            for row, index in zip(asked.tolist(), indices.tolist(), strict=True)
        ]
        assert rows.take(asked, indices).tolist() == expected


def test_one_row_asked_for_indices_of_two_windows_in_one_call() -> None:
    rows = UniformRows(2, window=8)
    rows.assign(1, 42, 0)
    indices = np.array([0, 100, 7, 8])
    assert rows.take(np.ones(4, dtype=np.int64), indices).tolist() == [direct(42, 0, i) for i in indices.tolist()]


def test_assigning_a_row_again_drops_its_cached_numbers() -> None:
    rows = UniformRows(1)
    zero = np.zeros(1, dtype=np.int64)
    rows.assign(0, 1, 0)
    first = rows.take(zero, zero).item()
    rows.assign(0, 2, 0)
    assert rows.take(zero, zero).item() == direct(2, 0, 0) != first
    rows.assign(0, 1, 0)
    assert rows.take(zero, zero).item() == first


def test_unsigned_seed_equals_its_twos_complement() -> None:
    rows = UniformRows(2)
    rows.assign(0, 2**64 - 5, 0)
    rows.assign(1, -5, 0)
    both = np.array([0, 1])
    values = rows.take(both, np.array([9, 9])).tolist()
    assert values[0] == values[1] == direct(-5, 0, 9)
