"""Randomised workloads through the whole engine, against an oracle that knows nothing of scheduling.

The scripted runner's tokens are a pure function of the request, so what every choice must bring can be said in
advance; pool, chunks, swap, priorities, cancels and overlap may not change it.
"""

from __future__ import annotations

import random

import pytest
from engine_fakes import TOKENIZER, EngineDriver, check_events, counting_script, idle_state, make_runtime

from minillm.core.errors import RequestError
from minillm.core.plan import RowAssignment
from minillm.core.sampling_params import SamplingParams


def expected(prompt: str, params: SamplingParams, choice: int) -> tuple[list[int], str, str]:
    """Token ids, text and finish reason of one choice, computed token by token from the script."""
    owner = RowAssignment(0, "", params, params.seed or 0, choice, TOKENIZER.encode(prompt), [])
    ids: list[int] = []
    text = ""
    assert params.max_tokens is not None
    while len(ids) < params.max_tokens:
        ids.append(counting_script(owner, len(ids)))
        text += TOKENIZER.decode(ids[-1:])
        stops = [text.index(stop) for stop in params.stop if stop in text]
        if stops:
            return ids, text[: min(stops)], "stop"
    return ids, text, "length"


def random_params(rng: random.Random) -> SamplingParams:
    stop = rng.choice([(), (), ("q",), ("ab", "xyz"), ("e", "k", "m")])
    return SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(1000),
        max_tokens=rng.randint(1, 40),
        stop=stop,
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )


def random_options(rng: random.Random) -> dict[str, object]:
    return {
        "overlap": rng.random() < 0.5,
        "num_blocks": rng.choice([18, 24, 60]),
        "num_swap_blocks": rng.choice([0, 6, 40]),
        "max_num_batched_tokens": rng.choice([8, 13, 64]),
        "max_prefill_tokens_per_step": rng.choice([None, 5]),
        "victim_policy": rng.choice(["lifo", "fifo", "largest", "cost_based"]),
        "scheduling_policy": rng.choice(["priority", "fcfs", "shortest_prompt", "fair"]),
        "enable_prefix_caching": rng.random() < 0.7,
        "max_num_seqs": rng.choice([3, 8]),
    }


@pytest.mark.parametrize("seed", range(40))
def test_random_workload_brings_what_the_oracle_says(seed: int) -> None:
    rng = random.Random(seed)
    driver = EngineDriver(**random_options(rng))
    wanted: dict[str, tuple[str, SamplingParams]] = {}
    cancelled: set[str] = set()
    steps = 0
    while len(wanted) < 25 or driver.engine.has_work:
        if len(wanted) < 25 and rng.random() < 0.4:
            request_id, prompt, params = f"r{len(wanted)}", "abcdefghijkl"[: rng.randint(1, 12)], random_params(rng)
            driver.add(request_id, prompt, params, priority=rng.randint(0, 2), user=rng.choice("uvw"))
            wanted[request_id] = (prompt, params)
        if rng.random() < 0.03 and wanted:
            request_id = rng.choice(list(wanted))
            if driver.cancel(request_id):
                cancelled.add(request_id)
        if driver.engine.has_work:
            driver.step()
        steps += 1
        assert steps < 20_000
    assert set(driver.outputs) == set(wanted)
    for request_id, (prompt, params) in wanted.items():
        output = driver.outputs[request_id]
        check_events(driver.events[request_id], output)
        assert len(output.outputs) == params.n
        if params.prompt_logprobs is not None and request_id not in cancelled:
            assert len(output.prompt_logprobs or ()) == len(prompt)
        for choice in output.outputs:
            ids, text, reason = expected(prompt, params, choice.index)
            if choice.finish_reason == "cancelled":
                assert request_id in cancelled
                assert choice.token_ids == ids[: len(choice.token_ids)]
                assert text.startswith(choice.text)
            else:
                assert (choice.token_ids, choice.text, choice.finish_reason) == (ids, text, reason)
            assert choice.logprobs is None or len(choice.logprobs) == len(choice.token_ids)
    assert driver.engine.num_invariant_violations == 0
    assert idle_state(driver.engine) == (0, 0, 0, 0, driver.parts.model_info.num_blocks, 0, 0, 0, 0)


def test_the_random_workloads_meet_preemption_swaps_and_overlap() -> None:
    """The test above is worth something only if its workloads go where it hurts."""
    met = {"swap": 0, "recompute": 0, "forks": 0, "drains": 0, "discarded": 0}
    for seed in range(40):
        rng = random.Random(seed)
        driver = EngineDriver(**random_options(rng))
        for i in range(25):
            driver.add(f"r{i}", "abcdefghijkl"[: rng.randint(1, 12)], random_params(rng), priority=rng.randint(0, 2))
        driver.run()
        counters = driver.engine.stats().counters
        met["swap"] += counters.preemptions_swap
        met["recompute"] += counters.preemptions_recompute
        met["forks"] += counters.forks
        met["drains"] += counters.drains
        met["discarded"] += counters.discarded_rows
    assert all(count > 20 for count in met.values()), met


BAD_PROMPTS = ["", [], [[]], [-1], [10**9], None, 3, "a" * 400, [{"role": "user"}], [{"content": "x"}], [{}], "\udcff"]
BAD_PARAMS: list[dict] = [
    {"temperature": "hot"},
    {"temperature": float("nan")},
    {"temperature": -1},
    {"n": 0},
    {"n": 100},
    {"stop": [""]},
    {"stop": ["x"] * 100},
    {"stop": 5},
    {"max_tokens": -1},
    {"max_tokens": 0},
    {"max_tokens": 10**9},
    {"top_p": 1.0001},
    {"top_k": -2},
    {"logprobs": 21},
    {"logit_bias": {"AI": -100}},
    {"logit_bias": {"999999": 5}},
    {"logit_bias": {"-1": 5}},
    {"logit_bias": {1: 1000}},
    {"logit_bias": 3},
    {"seed": 2**70},
    {"stop_token_ids": [10**6]},
    {"min_tokens": 5, "max_tokens": 4},
]
BAD_FIELDS: list[dict] = [{"priority": "x"}, {"timeout": 0}, {"user": 3}, {"cache_salt": 4}, {"request_id": ""},
                            {"user": "u" * 513}, {"cache_salt": "s" * 513}]  # fmt: skip


def test_any_bad_input_is_a_typed_refusal_and_the_engine_gives_the_same_ids_after_it() -> None:
    """B53: every kind alone, and 500 random mixtures."""
    cases: list[tuple[object, dict, dict]] = [(prompt, {}, {}) for prompt in BAD_PROMPTS]
    cases += [("abc", params, {}) for params in BAD_PARAMS]
    cases += [("abc", {}, fields) for fields in BAD_FIELDS]
    rng = random.Random(7)
    for _ in range(500):
        prompt = rng.choice(["abc", [1, 2], *BAD_PROMPTS])
        params = {**rng.choice([{}, *BAD_PARAMS]), **rng.choice([{}, *BAD_PARAMS])}
        cases.append((prompt, params, rng.choice([{}, {}, *BAD_FIELDS])))
    probe = SamplingParams(temperature=0, max_tokens=6)
    with make_runtime() as runtime:
        ids = runtime.submit("probe", probe).result(20).outputs[0].token_ids
        refused = 0
        for prompt, params, fields in cases:
            try:
                runtime.submit(prompt, SamplingParams(**params), **fields).result(20)  # type: ignore[arg-type]
            except RequestError as error:
                assert "\n" not in str(error)
                refused += 1
            else:
                assert prompt in ("abc", [1, 2])
                assert not params
                assert not fields
            if refused % 25 == 0:
                assert runtime.submit("probe", probe).result(20).outputs[0].token_ids == ids
        assert refused > 500
        assert runtime._thread.num_live == 0
