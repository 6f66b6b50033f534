"""Penalty counts: what is counted, how it survives preemption, and that rows do not touch each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampler_reference import edited_logits
from torch import Tensor

from minillm.core.sampling_params import SamplingParams
from minillm.runner.penalties import PenaltyState
from minillm.runner.sampler import Sampler

VOCAB = 300
ALL = SamplingParams(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4)


def make_logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def applied(state: PenaltyState, logits: Tensor, rows: list[int]) -> Tensor:
    """A copy of the logits after the penalties of `rows`."""
    result = logits.clone()
    slots = np.asarray(rows)
    positions = state.active(slots)
    if len(positions):
        state.apply(result, positions, slots[positions])
    return result


def expected(row: Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    return [float(v) for v in edited_logits(row.tolist(), params, 0, prompt, output)]


def new_state(max_num_seqs: int = 8) -> PenaltyState:
    return PenaltyState(max_num_seqs, VOCAB, torch.device("cpu"))


@pytest.mark.parametrize(
    "params",
    [
        ALL,
        SamplingParams(repetition_penalty=2.0),
        SamplingParams(repetition_penalty=0.5),
        SamplingParams(presence_penalty=-1.0),
        SamplingParams(frequency_penalty=2.0),
    ],
)
def test_appending_equals_rebuilding_equals_the_reference(params: SamplingParams) -> None:
    logits = make_logits(1)
    prompt, outputs = [1, 2, 3, 3, 3], [3, 9, 9, 250, 3, 9] * 60
    live, rebuilt = new_state(), new_state()
    live.assign(0, params, prompt)
    for length, token in enumerate(outputs, start=1):
        live.append(np.array([0]), torch.tensor([token]))
        if length in (1, 2, 5, len(outputs)):
            rebuilt.assign(0, params, prompt, outputs[:length])
            want = expected(logits[0], params, prompt, outputs[:length])
            assert applied(live, logits, [0])[0].tolist() == want
            assert applied(rebuilt, logits, [0])[0].tolist() == want


def test_prompt_counts_for_repetition_only() -> None:
    logits = make_logits(1)
    state = new_state()
    state.assign(0, SamplingParams(presence_penalty=2.0, frequency_penalty=2.0), [5, 6, 7])
    assert torch.equal(applied(state, logits, [0]), logits)
    state.assign(0, SamplingParams(repetition_penalty=2.0), [5, 6, 7])
    changed = (applied(state, logits, [0]) != logits).nonzero()[:, 1].tolist()
    assert changed == [5, 6, 7]


def test_a_resumed_request_counts_its_tokens_as_output_not_as_prompt() -> None:
    logits = torch.zeros(1, VOCAB)
    state = new_state()
    state.assign(0, SamplingParams(presence_penalty=1.0), [4, 4], [5, 5])
    row = applied(state, logits, [0])[0]
    assert (row[4].item(), row[5].item()) == (0.0, -1.0)


def test_mates_of_other_lengths_and_without_penalties_change_nothing() -> None:
    logits = make_logits(4)
    histories = [([1], []), ([7] * 200, [7, 8]), (list(range(100)), list(range(150, 300))), ([2], [3])]
    params = [ALL, SamplingParams(), ALL, SamplingParams(repetition_penalty=2.0)]
    state = new_state()
    for row in (2, 0, 3, 1):
        state.assign(row, params[row], *histories[row])
    want = [expected(logits[row], params[row], *histories[row]) for row in range(4)]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0], [2], [0, 2]):
        result = applied(state, logits[order], order)
        assert result.tolist() == [want[row] for row in order]


def test_append_counts_each_row_apart_and_skips_rows_without_state() -> None:
    logits = make_logits(3)
    state = new_state()
    for row in (0, 2):
        state.assign(row, ALL, [10 + row])
    for _ in range(3):
        state.append(np.array([2, 1, 0]), torch.tensor([20, 21, 22]))
    state.append(np.array([1]), torch.tensor([23]))
    result = applied(state, logits, [0, 1, 2])
    assert result[0].tolist() == expected(logits[0], ALL, [10], [22] * 3)
    assert torch.equal(result[1], logits[1])
    assert result[2].tolist() == expected(logits[2], ALL, [12], [20] * 3)


def test_empty_history_changes_nothing_and_starts_with_the_first_token() -> None:
    logits = make_logits(2).abs()
    state = new_state()
    state.assign(0, ALL)
    state.assign(1, ALL, list(range(100, 200)))  # a longer mate, so that row 0 is padded
    assert torch.equal(applied(state, logits, [0, 1])[0], logits[0])
    state.append(np.array([0]), torch.tensor([33]))
    assert applied(state, logits, [0, 1])[0].tolist() == expected(logits[0], ALL, [], [33])


def test_slots_exist_only_for_rows_that_need_them_and_are_reused() -> None:
    state = new_state(64)
    for row in range(32):
        state.assign(row, SamplingParams())
    assert (state.num_slots, len(state._counts)) == (0, 0)
    for row in range(10):
        state.assign(row, ALL, [row])
    assert state.num_slots == 10
    size = len(state._counts)
    for cycle in range(20):
        state.release(cycle % 10)
        state.release(cycle % 10)
        state.assign(cycle % 10, ALL, [1])
    assert (state.num_slots, len(state._counts)) == (10, size)
    for row in range(10):
        state.release(row)
    assert state.num_slots == 0


def test_every_row_may_need_a_slot() -> None:
    state = new_state(5)
    logits = make_logits(5)
    for row in range(5):
        state.assign(row, ALL, [row], [row + 100])
    result = applied(state, logits, list(range(5)))
    for row in range(5):
        assert result[row].tolist() == expected(logits[row], ALL, [row], [row + 100])


def test_reused_slot_has_no_count_of_its_former_request() -> None:
    state = new_state(1)
    logits = make_logits(1)
    state.assign(0, ALL, list(range(50)), list(range(290)))
    state.assign(0, ALL, [1], [2])
    assert applied(state, logits, [0])[0].tolist() == expected(logits[0], ALL, [1], [2])


def test_ids_outside_the_vocabulary_are_refused_and_take_no_slot() -> None:
    state = new_state()
    for prompt, output in (([VOCAB], []), ([-1], []), ([1], [VOCAB])):
        with pytest.raises(ValueError, match="vocabulary"):
            state.assign(0, ALL, prompt, output)
    assert state.num_slots == 0


def test_greedy_decoding_with_repetition_penalty_is_the_same_alone_with_mates_and_after_preemption() -> None:
    """case B47: twenty steps of a stub model whose logits depend on the last token alone."""
    table = make_logits(VOCAB, seed=3)
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.2)
    mate = SamplingParams(temperature=0.9, top_p=0.9)

    def decode(row: int, mates: dict[int, SamplingParams], preempt_at: int | None) -> list[int]:
        sampler = Sampler(4, VOCAB)
        sampler.state.assign(row, params, 1, 0, [5, 6])
        for slot, each in mates.items():
            sampler.state.assign(slot, each, slot, 0, [7] * (10 * slot + 1))
        tokens = {slot: [slot] for slot in [row, *mates]}
        tokens[row] = [6]
        for index in range(20):
            if index == preempt_at:
                sampler.state.release(row)
                sampler.state.assign(row, params, 1, 0, [5, 6], tokens[row][1:])
            slots = sorted(tokens)
            logits = table[[tokens[slot][-1] for slot in slots]]
            result = sampler.sample(logits, slots, [index] * len(slots))
            sampler.state.append(slots, result.token_ids)
            for slot, token in zip(slots, result.token_ids.tolist(), strict=True):
                tokens[slot].append(token)
        return tokens[row][1:]

    alone = decode(0, {}, None)
    assert len(set(alone)) > 10
    assert decode(2, {0: mate, 1: mate}, None) == alone
    assert decode(0, {1: params, 3: mate}, None) == alone
    assert decode(1, {0: params, 3: params}, 7) == alone
    assert decode(0, {}, 1) == alone
