"""Faults that users of comparable engines reported (cases B05, B08, B18, B20, B21, B23, B24, B48).

Every run has the harness's checks on: each context is read back through the block table and compared with the oracle,
tokens and ends are those of the request alone, invariants hold after every operation.
"""

from __future__ import annotations

from random import Random

import pytest

from minillm.core.config import SchedulerConfig
from minillm.core.errors import PromptTooLongError
from minillm.core.plan import StepPlan
from minillm.core.prefix_cache import chain_digest
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.core.scheduler import ContinuousScheduler
from simulation.scripted import Scripted

BLOCK = 16
ROOMY = SchedulerConfig(num_blocks=64, block_size=BLOCK, max_num_seqs=8)


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


def run_alone(prompt: list[int], *, config: SchedulerConfig = ROOMY, overlap: bool = False, **options) -> Scripted:
    sim = Scripted(config, overlap=overlap)
    sim.add(prompt, **options)
    sim.run()
    return sim


# -- B05: never fits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_blocks", "prompt", "max_tokens"),
    [(10, 300, 1), (10, 161, None), (10, 160, 1), (10, 100, 500), (1, 17, None), (3, 40, 9)],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_b05_what_never_fits_is_refused_at_submit_and_holds_up_nobody(num_blocks, prompt, max_tokens, overlap):
    capacity = num_blocks * BLOCK
    sim = Scripted(SchedulerConfig(num_blocks=num_blocks, block_size=BLOCK, max_model_len=1000), overlap=overlap)
    request = Request("large", tokens(prompt), SamplingParams(max_tokens=max_tokens))
    with pytest.raises(PromptTooLongError) as refusal:
        sim.scheduler.submit(request, 0.0)
    assert str(prompt) in str(refusal.value) and str(capacity) in str(refusal.value)
    assert not sim.scheduler.has_live_requests
    sim.add(tokens(5), max_tokens=4)
    sim.run()
    assert sim.reasons == {"r0": "length"} and len(sim.tokens["r0"]) == 4


@pytest.mark.parametrize("prompt", [1, 100, 144, 159, 160])
def test_b05_without_max_tokens_the_end_is_length_at_capacity(prompt):
    sim = run_alone(tokens(prompt), config=SchedulerConfig(num_blocks=10, block_size=BLOCK), max_tokens=None)
    assert sim.reasons == {"r0": "length"}
    assert len(sim.tokens["r0"]) == max(1, 160 - prompt)


# -- B08: one token over the limit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_model_len", "num_blocks", "limit"), [(50, 64, 50), (1 << 30, 3, 48), (48, 3, 48)])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_b08_the_limit_is_the_reduced_one_and_is_checked_before_anything_is_queued(
    max_model_len, num_blocks, limit, over
):
    config = SchedulerConfig(num_blocks=num_blocks, block_size=BLOCK, max_model_len=max_model_len)
    assert config.effective_max_model_len == limit
    sim = Scripted(config)
    request = Request("edge", tokens(limit + over), SamplingParams())
    if over > 0:
        with pytest.raises(PromptTooLongError, match=f"{limit + 1} tokens.*{limit}"):
            sim.scheduler.submit(request, 0.0)
        assert sim.scheduler.get("edge") is None and sim.scheduler.num_waiting == 0
    else:
        sim.add(tokens(limit + over), max_tokens=None)
        sim.run()
        assert len(sim.tokens["r0"]) == 1
    sim.add(tokens(7), max_tokens=3)
    sim.run()
    assert [len(out) for out in sim.tokens.values()][-1] == 3


# -- B18: the whole prompt is cached ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
@pytest.mark.parametrize("together", [False, True], ids=["one-after-another", "in-one-batch"])
@pytest.mark.parametrize("overlap", [False, True])
def test_b18_a_prompt_sent_again_computes_at_least_its_last_token_and_answers_the_same(length, together, overlap):
    sim = Scripted(ROOMY, overlap=overlap)
    first = sim.add(tokens(length), max_tokens=20)
    if not together:
        sim.run()
    again = [sim.add(tokens(length), max_tokens=20) for _ in range(2)]
    sim.run()
    assert sim.tokens["r1"] == sim.tokens["r2"] == sim.tokens["r0"]
    if not together:
        assert first.request.cached_tokens == 0
        assert [tracked.request.cached_tokens for tracked in again] == [(length - 1) // BLOCK * BLOCK] * 2


@pytest.mark.parametrize("length", [2, 16, 17, 32, 33])
def test_b18_prompt_logprobs_have_an_entry_for_every_token_cached_or_not(length):
    sim = Scripted(ROOMY)
    sim.add(tokens(length), max_tokens=4)
    sim.run()
    scored = sim.add(tokens(length), max_tokens=4, prompt_logprobs=1)
    sim.run()
    assert scored.next_prompt_logprob == length
    assert scored.request.cached_tokens == 0
    assert sim.tokens["r1"] == sim.tokens["r0"]


# -- B20: what must not be shared -------------------------------------------------------------------------------------


def test_b20_hits_within_a_salt_and_never_across():
    sim = Scripted(ROOMY)
    order = [None, "a", "b", "a'", "('salt', 'a')"]
    for salt in order:
        cold = sim.add(tokens(64), max_tokens=2, cache_salt=salt)
        sim.run()
        assert cold.request.cached_tokens == 0, f"salt {salt!r} hit another's blocks"
    for salt in order:
        warm = sim.add(tokens(64), max_tokens=2, cache_salt=salt)
        sim.run()
        assert warm.request.cached_tokens == 48


def test_b20_an_empty_salt_is_no_salt():
    sim = Scripted(ROOMY)
    sim.add(tokens(64), max_tokens=2, cache_salt=None)
    sim.run()
    warm = sim.add(tokens(64), max_tokens=2, cache_salt="")
    sim.run()
    assert warm.request.cache_salt is None and warm.request.cached_tokens == 48


# -- B21: collisions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [0, 1, 15, 16, 17, 31])
def test_b21_with_a_constant_hash_prompts_that_differ_in_one_token_share_nothing_wrong(changed):
    sim = Scripted(ROOMY, constant_hash=True)
    one = tokens(40)
    other = list(one)
    other[changed] += 1
    sim.add(one, max_tokens=20)
    sim.run()
    hit = sim.add(other, max_tokens=20)
    again = sim.add(one, max_tokens=20)
    sim.run()
    assert hit.request.cached_tokens == (BLOCK if changed >= BLOCK else 0)
    assert again.request.cached_tokens == 2 * BLOCK
    assert sim.tokens["r2"] == sim.tokens["r0"]


@pytest.mark.parametrize("constant_hash", [False, True])
def test_b21_order_and_block_borders_count(constant_hash):
    config = SchedulerConfig(num_blocks=64, block_size=2, max_num_seqs=8)
    sim = Scripted(config, constant_hash=constant_hash)
    for prompt in ([1, 2, 3, 4, 5], [2, 1, 3, 4, 5], [1, 2, 4, 3, 5], [3, 4, 1, 2, 5], [1, 2, 3], [1, 2], [2, 3, 4]):
        sim.add(prompt, max_tokens=6)
        sim.run()


def test_b21_the_digest_depends_on_parent_and_fixed_width_ids():
    parent = chain_digest(b"", b"\x01\x00\x00\x00")
    assert len(parent) == 16
    assert chain_digest(parent, b"\x02\x00\x00\x00") != chain_digest(b"", b"\x01\x00\x00\x00\x02\x00\x00\x00")
    scheduler = ContinuousScheduler(SchedulerConfig(num_blocks=4, block_size=2))
    requests = [Request("a", [1, 256]), Request("b", [257, 0]), Request("c", [0x101, 0])]
    digests = [scheduler.prefix_cache.extend_keys(request, 1)[0] for request in requests]
    assert digests[0] != digests[1] == digests[2]


# -- B23: the second turn has other ids -------------------------------------------------------------------------------


@pytest.mark.parametrize("differs_at", [3, 15, 16, 40, 47, 48, 60])
def test_b23_reuse_stops_at_the_last_full_block_of_equal_ids(differs_at):
    sim = Scripted(ROOMY)
    sim.add(tokens(30), max_tokens=35)
    sim.run()
    history = tokens(30) + sim.tokens["r0"]
    second = [*history[:differs_at], 1001 % 1000, *history[differs_at:], 5, 6]
    if second[differs_at] == history[differs_at]:
        second[differs_at] += 1
    turn = sim.add(second, max_tokens=10)
    sim.run()
    assert turn.request.cached_tokens == differs_at // BLOCK * BLOCK


def test_b23_a_history_with_equal_ids_is_reused_into_the_generated_part():
    sim = Scripted(ROOMY)
    sim.add(tokens(30), max_tokens=35)
    sim.run()
    turn = sim.add(tokens(30) + sim.tokens["r0"] + [5, 6], max_tokens=10)
    sim.run()
    assert turn.request.cached_tokens == 64


# -- B24: block borders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 32])
@pytest.mark.parametrize("overlap", [False, True])
def test_b24_before_each_forward_the_table_covers_exactly_the_tokens_with_kv_after_it(block_size, prompt, overlap):
    sim = Scripted(SchedulerConfig(num_blocks=256, block_size=block_size, max_num_seqs=2), overlap=overlap)
    tracked = sim.add(tokens(prompt), max_tokens=40)
    forwards = 0
    while sim.scheduler.has_live_requests:
        plan = sim.step()
        if not isinstance(plan, StepPlan) or tracked.request.is_ended:
            continue
        after = plan.prefills[0].end if plan.prefills else plan.decodes.positions[0] + 1
        assert len(tracked.request.block_table) == -(-after // block_size)
        assert len(sim.runner.rows[tracked.request.row].table) == -(-after // block_size)
        forwards += 1
    assert forwards >= 39
    assert len(sim.tokens["r0"]) == 40


# -- B48: several choices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("prompt", [1, 16, 20, 32, 33])
@pytest.mark.parametrize("overlap", [False, True])
def test_b48_each_choice_is_its_own_stream_and_only_a_shared_partial_block_is_copied(n, prompt, overlap):
    sim = Scripted(ROOMY, overlap=overlap)
    sim.add(tokens(prompt), max_tokens=24, n=n)
    blocks_after_fork = None
    while sim.scheduler.has_live_requests:
        sim.step()
        running = [tracked.request for tracked in sim.live.values() if tracked.request.block_table]
        if blocks_after_fork is None and len(running) == n:
            blocks_after_fork = {block for request in running for block in request.block_table[: prompt // BLOCK]}
    names = ["r0"] + [f"r0#{choice}" for choice in range(1, n)]
    assert sorted(sim.tokens) == sorted(names)
    assert all(len(sim.tokens[name]) == 24 and sim.reasons[name] == "length" for name in names)
    assert len({tuple(sim.tokens[name]) for name in names}) == n
    assert blocks_after_fork is not None and len(blocks_after_fork) == prompt // BLOCK, "full blocks are shared"
    copies = sum(len(plan.copies) for plan in sim.plans)
    assert copies == (n - 1 if prompt % BLOCK else 0)
    assert sum(chunk.end - chunk.start for plan in sim.plans for chunk in plan.prefills) == prompt
    assert not any(sim.scheduler.blocks.ref_counts)


@pytest.mark.parametrize("overlap", [False, True])
def test_b48_choices_end_each_at_its_own_stop(overlap):
    probe = run_alone(tokens(20), max_tokens=20, n=3)
    stop = probe.tokens["r0#1"][5]
    assert stop not in probe.tokens["r0#1"][:5]
    sim = Scripted(ROOMY, overlap=overlap)
    sim.add(tokens(20), max_tokens=20, n=3, stop_ids=(stop,))
    sim.run()
    lengths = {name: len(out) for name, out in sim.tokens.items()}
    assert lengths["r0#1"] == 6 and sim.reasons["r0#1"] == "stop"
    for name in ("r0", "r0#2"):
        other = probe.tokens[name]
        expected = other.index(stop) + 1 if stop in other else 20
        assert lengths[name] == expected
        assert sim.tokens[name] == other[:expected]


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
@pytest.mark.parametrize("overlap", [False, True])
def test_b48_a_choice_that_is_cancelled_at_any_time_changes_nothing_for_the_others(steps_before, overlap):
    whole = run_alone(tokens(20), max_tokens=16, n=3)
    sim = Scripted(SchedulerConfig(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=12), overlap=overlap)
    sim.add(tokens(20), max_tokens=16, n=3)
    for _ in range(steps_before):
        sim.step()
    sim.cancel("r0#1")
    sim.run()
    assert sim.reasons == {"r0": "length", "r0#1": "cancelled", "r0#2": "length"}
    assert sim.tokens["r0"] == whole.tokens["r0"] and sim.tokens["r0#2"] == whole.tokens["r0#2"]
    assert sim.scheduler.blocks.num_referenced == 0
