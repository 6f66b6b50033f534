"""The runner with the real scheduler on tiny models: equal to Transformers' generate however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from step_loop import (
    VOCAB,
    Loop,
    decoder_of,
    generate,
    greedy_reference,
    prompt,
    tiny_reference,
    wide_head_reference,
    windowed_reference,
)

from minillm.core.errors import EngineDeadError
from minillm.core.plan import BlockCopy, DecodeBatch, StepPlan, SwapIn, SwapOut

LENGTHS = [1, 7, 8, 9, 15, 16, 17, 24, 31, 40]
NEW = 20


@pytest.fixture(scope="module")
def model():
    return decoder_of(tiny_reference())


@pytest.fixture
def fallback_expected():
    """Says that the test makes a batched call raise."""


@pytest.fixture(autouse=True)
def no_silent_fallback(request, caplog):
    """Row-by-row repetition hides bugs of the batched path: only tests of failures may see it."""
    yield
    if "fallback_expected" not in request.fixturenames:
        assert "repeating it row by row" not in caplog.text


def submit_all(loop: Loop, tag: str = "") -> None:
    for i, length in enumerate(LENGTHS):
        loop.submit(f"{tag}{i}", prompt(length, i), max_tokens=NEW)


def expected(tag: str = "") -> dict[str, list[int]]:
    return {f"{tag}{i}": greedy_reference(tuple(prompt(n, i)), NEW) for i, n in enumerate(LENGTHS)}


@pytest.mark.parametrize("overlap", [False, True])
class TestGreedyEqualsTransformers:
    def test_solo(self, model, overlap):
        for i, length in enumerate(LENGTHS):
            loop = Loop(model, overlap=overlap)
            loop.submit("r", prompt(length, i), max_tokens=NEW)
            assert loop.run()["r"] == greedy_reference(tuple(prompt(length, i)), NEW)

    @pytest.mark.parametrize("block_size", [1, 5, 8, 16, 128])
    def test_batched_at_any_block_size(self, model, overlap, block_size):
        loop = Loop(model, num_blocks=1024 // block_size, block_size=block_size, overlap=overlap)
        submit_all(loop)
        assert loop.run() == expected()

    @pytest.mark.parametrize("budget", [16, 23])
    def test_chunked_prefill(self, model, overlap, budget):
        loop = Loop(
            model, overlap=overlap, options={"max_num_batched_tokens": budget, "max_prefill_tokens_per_step": 5}
        )
        submit_all(loop)
        assert loop.run() == expected()

    def test_preempted_by_swap(self, model, overlap):
        loop = Loop(
            model,
            num_blocks=14,
            num_swap_blocks=100,
            overlap=overlap,
            options={"preemption_mode": "swap", "enable_prefix_caching": False, "watermark_blocks": 0},
        )
        submit_all(loop)
        assert loop.run() == expected()
        assert loop.scheduler.counters.swapped_in_blocks > 10
        assert sum(outcome.timings.swap_out or 0 for outcome in loop.outcomes) > 0
        assert sum(outcome.timings.swap_in or 0 for outcome in loop.outcomes) > 0

    def test_preempted_and_recomputed(self, model, overlap):
        loop = Loop(
            model,
            num_blocks=14,
            overlap=overlap,
            options={"preemption_mode": "recompute", "enable_prefix_caching": False, "watermark_blocks": 0},
        )
        submit_all(loop)
        assert loop.run() == expected()
        assert loop.scheduler.counters.preemptions_recompute > 3

    def test_second_pass_hits_the_prefix_cache(self, model, overlap):
        loop = Loop(model, num_blocks=200, overlap=overlap)
        submit_all(loop, "first")
        loop.run()
        before = loop.scheduler.counters.cached_tokens
        submit_all(loop, "again")
        assert loop.run() == expected("first") | expected("again")
        assert loop.scheduler.counters.cached_tokens - before >= sum((n - 1) // 8 * 8 for n in LENGTHS)

    def test_whole_prompt_cached_in_the_same_batch_and_later(self, model, overlap):
        loop = Loop(model, num_blocks=200, block_size=16, overlap=overlap)
        for round_ in range(2):
            for twin in range(2):
                for n in (15, 16, 17, 31, 32, 33, 48):
                    loop.submit(f"{round_}-{twin}-{n}", prompt(n, n), max_tokens=6)
        tokens = loop.run()
        for name, got in tokens.items():
            n = int(name.split("-")[-1])
            assert got == greedy_reference(tuple(prompt(n, n)), 6)
        assert len(tokens) == 28

    def test_other_head_counts(self, model, overlap):
        loop = Loop(decoder_of(tiny_reference(14, 2)), overlap=overlap)
        submit_all(loop)
        want = {f"{i}": greedy_reference(tuple(prompt(n, i)), NEW, 14, 2) for i, n in enumerate(LENGTHS)}
        assert loop.run() == want


@pytest.mark.parametrize("budget", [512, 16])
@pytest.mark.parametrize("make", [windowed_reference, wide_head_reference])
def test_sliding_windows_and_wide_heads_equal_transformers(make, budget):
    """B28, B29: prompts around the window of 12, and decoding across it, whole and in chunks."""
    reference = make()
    loop = Loop(decoder_of(reference), options={"max_num_batched_tokens": budget})
    lengths = (1, 5, 11, 12, 13, 30)
    for n in lengths:
        loop.submit(f"{n}", prompt(n, n), max_tokens=16)
    tokens = loop.run()
    for n in lengths:
        assert tokens[f"{n}"] == generate(reference, prompt(n, n), 16)


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "max_tokens": 16}


def sampled_run(model, names, **loop_options) -> dict[str, list[int]]:
    loop = Loop(model, **loop_options)
    for i in names:
        loop.submit(f"{i}", prompt(LENGTHS[i], i), seed=100 + i, **SAMPLED)
    return loop.run()


def test_seeded_sampling_with_penalties_is_the_same_however_it_runs(model):
    names = range(len(LENGTHS))
    alone = {}
    for i in names:
        alone |= sampled_run(model, [i])
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)
    small = {"num_blocks": 12, "options": {"enable_prefix_caching": False, "watermark_blocks": 0}}
    assert sampled_run(model, names) == alone
    assert sampled_run(model, names, overlap=True) == alone
    assert sampled_run(model, names, overlap=True, **small) == alone
    assert sampled_run(model, names, num_swap_blocks=80, **small) == alone


def test_a_group_shares_its_prompt_and_each_choice_draws_for_itself(model):
    for length in (13, 16):
        loop = Loop(model, overlap=True)
        loop.submit("g", prompt(length, 1), n=4, seed=5, temperature=1.0, max_tokens=12)
        group = loop.run()
        assert sorted(group) == ["g", "g#1", "g#2", "g#3"]
        assert len({tuple(tokens) for tokens in group.values()}) == 4
        assert all(len(tokens) == 12 for tokens in group.values())
        again = Loop(model)
        again.submit("g", prompt(length, 1), n=4, seed=5, temperature=1.0, max_tokens=12)
        assert again.run() == group
        single = Loop(model)
        single.submit("g", prompt(length, 1), seed=5, temperature=1.0, max_tokens=12)
        assert single.run()["g"] == group["g"]


def reference_logprobs(ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return tiny_reference()(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("budget", [512, 16])
def test_prompt_logprobs_have_one_entry_per_position_also_across_chunks(model, budget, monkeypatch):
    monkeypatch.setattr("minillm.runner.pytorch_model_runner.PROMPT_LOGPROB_SLICE", 7)
    loop = Loop(model, options={"max_num_batched_tokens": budget})
    for name, n in (("a", 33), ("b", 1), ("c", 16), ("again", 33)):
        loop.submit(name, prompt(n, n), prompt_logprobs=2, logprobs=1, max_tokens=3)
    loop.run()
    assert not loop.prompt_logprobs["b"]
    for name, n in (("a", 33), ("c", 16), ("again", 33)):
        ids = prompt(n, n)
        wanted = reference_logprobs(ids + loop.tokens[name])
        assert sorted(loop.prompt_logprobs[name]) == list(range(1, n))
        for position, entry in loop.prompt_logprobs[name].items():
            assert entry.token_id == ids[position]
            assert entry.logprob == pytest.approx(wanted[position - 1, ids[position]].item(), abs=1e-4)
            top = wanted[position - 1].topk(2)
            assert entry.top_ids == top.indices.tolist()
            assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-4)
        for index, sampled in enumerate(loop.logprobs[name]):
            assert sampled is not None
            assert sampled.logprob == pytest.approx(wanted[n - 1 + index].max().item(), abs=1e-4)


def test_scoring_a_prompt_without_generating(model):
    loop = Loop(model)
    loop.submit("score", prompt(20, 3), prompt_logprobs=0, max_tokens=0)
    loop.run()
    assert loop.finished["score"] == ("length", None)
    assert not loop.tokens["score"]
    assert sorted(loop.prompt_logprobs["score"]) == list(range(1, 20))


def test_logprobs_only_for_rows_that_ask(model):
    loop = Loop(model)
    loop.submit("with", prompt(5, 1), logprobs=3)
    loop.submit("without", prompt(6, 2))
    loop.run()
    assert all(entry is not None and len(entry.top_ids) == 3 for entry in loop.logprobs["with"])
    assert all(entry is None for entry in loop.logprobs["without"])


class Faulty:
    """A decoder whose hidden states are spoilt for one token id (`nan`, `inf`), or that raises when it sees it."""

    def __init__(self, model, bad_id: int, how: str) -> None:
        self.inner, self.bad_id, self.how = model, bad_id, how
        self.config, self.dtype, self.layer_attention = model.config, model.dtype, model.layer_attention

    def forward(self, input_ids, positions, attn):
        if self.how == "raise" and (input_ids == self.bad_id).any():
            raise RuntimeError("no such row")
        if self.how == "raise always":
            raise RuntimeError("device lost")
        embedding = self.inner.embedding[self.bad_id].clone()
        try:
            if self.how in ("nan", "inf"):
                self.inner.embedding[self.bad_id] = float(self.how)
            return self.inner.forward(input_ids, positions, attn)
        finally:
            self.inner.embedding[self.bad_id] = embedding

    def compute_logits(self, hidden):
        return self.inner.compute_logits(hidden)


@pytest.mark.usefixtures("fallback_expected")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["nan", "inf", "raise"])
@pytest.mark.parametrize("where", ["first chunk", "last chunk", "decode"])
def test_one_rows_failure_is_its_own(model, how, where, overlap):
    """B33: the other rows get the tokens they would get anyway, nothing of the bad one is published or left behind."""
    bad = 130
    prompts = [[t % 129 for t in prompt(n, n)] for n in (20, 9, 26, 17)]
    healthy = Loop(model)
    for i, ids in enumerate(prompts):
        healthy.submit(f"{i}", ids, max_tokens=10, logit_bias={bad: -100, 129: -100})
    wanted = healthy.run()

    loop = Loop(Faulty(model, bad, how), overlap=overlap, options={"max_prefill_tokens_per_step": 40})
    for i, ids in enumerate(prompts):
        if i == 1:
            ids = {"first chunk": [bad, *ids * 9], "last chunk": [*ids * 9, bad], "decode": ids}[where]
        bias = {bad: 100.0} if i == 1 and where == "decode" else {bad: -100, 129: -100}
        loop.submit(f"{i}", ids, max_tokens=10, logit_bias=bias)
    tokens = loop.run()
    for i in (0, 2, 3):
        assert tokens[f"{i}"] == wanted[f"{i}"]
        assert loop.finished[f"{i}"] == ("length", None)
    reason, error = loop.finished["1"]
    assert reason == "error"
    assert error == ("RuntimeError: no such row" if how == "raise" else loop_error())
    assert len(tokens.get("1", [])) <= 1
    assert loop.cache.store.isfinite().all()

    loop.runner.model = model  # the bad row's blocks are used again, and its cached prefix must be sound
    loop.submit("again", [t % 129 for t in prompt(9, 9)] * 9, max_tokens=10)
    fresh = Loop(model)
    fresh.submit("again", [t % 129 for t in prompt(9, 9)] * 9, max_tokens=10)
    assert loop.run()["again"] == fresh.run()["again"]


def loop_error() -> str:
    from minillm.runner.pytorch_model_runner import NOT_FINITE

    return NOT_FINITE


@pytest.mark.usefixtures("fallback_expected")
def test_a_failure_of_every_row_is_the_engines(model):
    loop = Loop(Faulty(model, 0, "raise always"))
    loop.submit("a", [1, 2, 3])
    loop.submit("b", [4, 5, 6])
    with pytest.raises(RuntimeError, match="device lost"):
        loop.run()


@pytest.mark.usefixtures("fallback_expected")
def test_a_lone_row_that_raises_fails_and_the_loop_goes_on(model):
    loop = Loop(Faulty(model, 7, "raise"))
    loop.submit("bad", [1, 7, 3])
    loop.run()
    assert loop.finished["bad"] == ("error", "RuntimeError: no such row")
    loop.submit("good", [1, 2, 3])
    assert len(loop.run()["good"]) == 8


@pytest.mark.usefixtures("fallback_expected")
def test_sampling_that_raises_for_one_row_fails_that_row(model, monkeypatch):
    loop = Loop(model)
    sample = loop.runner.sampler.sample

    def sample_with_a_bad_row(logits, rows, indices, allowed=None):
        if any(
            loop.runner._rows[row].request_id == "bad" and index == 2 for row, index in zip(rows, indices, strict=True)
        ):
            raise ValueError("bad grammar")
        return sample(logits, rows, indices, allowed)

    monkeypatch.setattr(loop.runner.sampler, "sample", sample_with_a_bad_row)
    for name, n in (("x", 6), ("bad", 9), ("y", 12)):
        loop.submit(name, prompt(n, n), logprobs=0)
    tokens = loop.run()
    assert loop.finished["bad"] == ("error", "ValueError: bad grammar")
    assert len(tokens["bad"]) == 2
    for name, n in (("x", 6), ("y", 12)):
        assert tokens[name] == greedy_reference(tuple(prompt(n, n)), 8)
        assert all(entry is not None for entry in loop.logprobs[name])


def test_ids_without_a_token_are_never_sampled(model):
    """B32: greedy, biased towards, and at high temperature; their logprobs are those of the masked distribution."""
    padding = list(range(100, VOCAB))
    loop = Loop(model, runner_options={"invalid_token_ids": padding})
    loop.submit("biased", prompt(6, 1), logit_bias={120: 100.0}, max_tokens=20)
    loop.submit("hot", prompt(7, 2), temperature=50.0, max_tokens=60, seed=3, logprobs=20)
    loop.submit("cold", prompt(8, 3), max_tokens=40)
    tokens = loop.run()
    assert all(token < 100 for row in tokens.values() for token in row)
    assert len(set(tokens["hot"])) > 20
    assert all(top < 100 for entry in loop.logprobs["hot"] for top in entry.top_ids)
    free = Loop(model)
    free.submit("hot", prompt(7, 2), temperature=50.0, max_tokens=60, seed=3)
    assert any(token >= 100 for token in free.run()["hot"])


def test_allowed_masks_bound_what_is_sampled(model):
    loop = Loop(model)
    loop.submit("a", prompt(5, 1))
    loop.submit("b", prompt(6, 2))
    plan = loop.scheduler.schedule(1.0)
    handle = loop.runner.forward(plan)
    masks = np.zeros((2, VOCAB), dtype=bool)
    masks[0, 17] = masks[1, 99] = True
    loop.runner.sample(handle, masks)
    assert loop.runner.collect(handle).token_ids == [[17], [99]]


def test_swaps_without_a_swap_space_fail_and_copies_happen_in_order(model):
    loop = Loop(model, num_blocks=6)
    loop.cache.store.normal_()
    before = loop.cache.store.clone()
    plan = StepPlan(0, DecodeBatch(), [], swap_outs=[SwapOut("a", [1], [0])], copies=[BlockCopy(2, 3)])
    outcome = loop.runner.collect(loop.runner.forward(plan))
    assert outcome.failed_swaps == ["a"]
    before[:, :, 3] = before[:, :, 2]
    assert torch.equal(loop.cache.store, before)
    assert outcome.token_ids == []
    assert outcome.timings.swap_out is None


def test_swap_out_comes_before_swap_in_before_copies(model):
    loop = Loop(model, num_blocks=6, num_swap_blocks=4)
    loop.cache.store.normal_()
    before = loop.cache.store.clone()
    plan = StepPlan(
        0,
        DecodeBatch(),
        [],
        swap_outs=[SwapOut("a", [1, 2], [0, 3])],
        swap_ins=[SwapIn("b", [3, 0], [1, 5])],
        copies=[BlockCopy(1, 4)],
    )
    outcome = loop.runner.collect(loop.runner.forward(plan))
    expected_store = before.clone()
    expected_store[:, :, 1] = before[:, :, 2]
    expected_store[:, :, 5] = before[:, :, 1]
    expected_store[:, :, 4] = before[:, :, 2]
    assert torch.equal(loop.cache.store, expected_store)
    assert outcome.failed_swaps == []
    assert outcome.timings.swap_out > 0
    assert outcome.timings.swap_in > 0


def test_a_failing_swap_names_its_request_alone(model):
    loop = Loop(model, num_blocks=6, num_swap_blocks=4)
    loop.cache.store.normal_()
    plan = StepPlan(
        0, DecodeBatch(), [], swap_outs=[SwapOut("good", [1], [2]), SwapOut("bad", [2], [9]), SwapOut("fine", [4], [1])]
    )
    outcome = loop.runner.collect(loop.runner.forward(plan))
    assert outcome.failed_swaps == ["bad"]
    assert torch.equal(loop.runner.swap_space.slot(2), loop.cache.store[:, :, 1])
    assert torch.equal(loop.runner.swap_space.slot(1), loop.cache.store[:, :, 4])


def test_forward_and_sample_times_are_measured(model):
    loop = Loop(model)
    loop.submit("a", prompt(5, 1), max_tokens=3)
    loop.run()
    assert len(loop.outcomes) == 3
    assert all(outcome.timings.forward > 0 and outcome.timings.sample > 0 for outcome in loop.outcomes)


def test_a_closed_runner_refuses_work(model):
    loop = Loop(model)
    loop.runner.close()
    loop.runner.close()
    with pytest.raises(EngineDeadError):
        loop.runner.forward(StepPlan(0, DecodeBatch(), []))


def test_collect_before_sample_is_an_error(model):
    loop = Loop(model)
    loop.submit("a", [1, 2, 3])
    handle = loop.runner.forward(loop.scheduler.schedule(1.0))
    with pytest.raises(RuntimeError, match="not sampled"):
        loop.runner.collect(handle)


def test_bfloat16_paths_differ_by_rounding_only():
    """Chunked and whole prefill, solo and batched: logits within a bound of each other in bf16."""
    model = decoder_of(tiny_reference(), torch.bfloat16)
    scored = []
    for budget in (512, 16):
        loop = Loop(model, options={"max_num_batched_tokens": budget})
        for n in (30, 41):
            loop.submit(f"{n}", prompt(n, n), prompt_logprobs=0, max_tokens=0)
        loop.run()
        scored.append([entry.logprob for n in ("30", "41") for _, entry in sorted(loop.prompt_logprobs[n].items())])
    difference = (torch.tensor(scored[0]) - torch.tensor(scored[1])).abs()
    assert 0 < difference.max() < 0.25
    assert difference.mean() < 0.05
