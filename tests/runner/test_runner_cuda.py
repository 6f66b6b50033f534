"""The GPU's way through the runner: on a GPU, and with the oracle's attention on the CPU where there is none.

Tokens in float32 must be those of the CPU's own path (which are Transformers'), however the work is cut.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_loop import VOCAB, Loop, decoder_of, prompt, tiny_reference, wide_head_reference, windowed_reference

from minillm.core.errors import KernelLaunchError
from minillm.core.plan import NoPlan
from minillm.core.sampling_params import SamplingParams
from minillm.runner.pytorch_model_runner import NOT_FINITE, PROMPT_LOGPROB_SLICE
from minillm.runner.sampler import Sampler
from reference_kernels import ReferenceKernels, ReferenceOps

LENGTHS = [1, 7, 8, 9, 15, 16, 17, 24, 31, 40]
NEW = 20
REFERENCES = {
    "llama 9/3": tiny_reference,
    "llama 14/2": lambda: tiny_reference(14, 2),
    "mistral, window 12": windowed_reference,
    "qwen3, wide heads": wide_head_reference,
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


@pytest.fixture(params=["fused", "plain"])
def make(device, request):
    """Makes a loop over a model on the device, by the GPU's way; on the CPU also without the fused forward pass."""
    if device == "cuda" and request.param == "plain":
        pytest.skip("a GPU always fuses what it can")

    def make_loop(model: Any = None, **options: Any) -> Loop:
        model = model if model is not None else decoder_of(tiny_reference(), device=device)
        runner_options = dict(options.pop("runner_options", {}))
        if device == "cpu":
            runner_options.setdefault("kernels", ReferenceKernels())
            if request.param == "fused":
                runner_options.setdefault("ops", ReferenceOps(few=4, some=8, rest=16))
        return Loop(model, device=device, runner_options=runner_options, **options)

    return make_loop


@pytest.fixture(autouse=True)
def no_silent_fallback(request, caplog):
    """Row-by-row repetition hides bugs of the batched path: only tests of failures may see it."""
    yield
    if "fallback_expected" not in request.fixturenames:
        assert "repeating it row by row" not in caplog.text


@pytest.fixture
def fallback_expected():
    """Says that the test makes a batched call raise."""


def submit_all(loop: Loop, tag: str = "", **params: Any) -> None:
    for i, length in enumerate(LENGTHS):
        loop.submit(f"{tag}{i}", prompt(length, i), **{"max_tokens": NEW, "seed": 100 + i, **params})


def cpu_tokens(reference: Any = None, **params: Any) -> dict[str, list[int]]:
    """The same requests by the CPU's own path."""
    loop = Loop(decoder_of(reference if reference is not None else tiny_reference()))
    submit_all(loop, **params)
    return loop.run()


WAYS = {
    "at once": {},
    "in chunks": {"options": {"max_num_batched_tokens": 23, "max_prefill_tokens_per_step": 5}},
    "swapped": {
        "num_blocks": 14,
        "num_swap_blocks": 100,
        "options": {"preemption_mode": "swap", "enable_prefix_caching": False, "watermark_blocks": 0},
    },
    "recomputed": {
        "num_blocks": 14,
        "options": {"preemption_mode": "recompute", "enable_prefix_caching": False, "watermark_blocks": 0},
    },
    "other blocks": {"num_blocks": 200, "block_size": 16},
}


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_are_the_cpus_however_they_are_run(make, way, overlap):
    loop = make(overlap=overlap, **WAYS[way])
    submit_all(loop)
    assert loop.run() == cpu_tokens()
    if way == "swapped":
        assert loop.scheduler.counters.swapped_in_blocks > 10
        assert sum(outcome.timings.swap_in or 0 for outcome in loop.outcomes) > 0
    if way == "recomputed":
        assert loop.scheduler.counters.preemptions_recompute > 3


@pytest.mark.parametrize("name", REFERENCES)
def test_every_family_gives_the_cpus_tokens(make, device, name):
    reference = REFERENCES[name]()
    loop = make(decoder_of(reference, device=device), overlap=True, options={"max_num_batched_tokens": 40})
    submit_all(loop)
    assert loop.run() == cpu_tokens(reference)


def test_a_second_pass_hits_the_prefix_cache(make):
    loop = make(num_blocks=200, overlap=True)
    submit_all(loop, "first ")
    loop.run()
    before = loop.scheduler.counters.cached_tokens
    submit_all(loop, "again ")
    tokens = loop.run()
    for name, wanted in cpu_tokens().items():
        assert tokens[f"first {name}"] == tokens[f"again {name}"] == wanted
    assert loop.scheduler.counters.cached_tokens - before >= sum((n - 1) // 8 * 8 for n in LENGTHS)


SAMPLING = {
    "penalties and top_p": {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "min_p and bias": {"temperature": 1.2, "min_p": 0.05, "logit_bias": {3: 2.0, 77: -5.0}},
    "plain with min_tokens": {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": [5, 9], "ignore_eos": True},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_seeded_sampling_draws_the_cpus_tokens(make, name):
    """The draw is a function of the logits and (seed, choice, index); logits differ by rounding alone."""
    small = {"num_blocks": 14, "num_swap_blocks": 100, "options": {"enable_prefix_caching": False}}
    wanted = cpu_tokens(**SAMPLING[name])
    for options in ({}, {"overlap": True, **small}):
        loop = make(**options)
        submit_all(loop, **SAMPLING[name])
        assert loop.run() == wanted


def test_a_group_shares_its_prompt_and_each_choice_draws_for_itself(make):
    groups = []
    for loop in (make(overlap=True), Loop(decoder_of(tiny_reference()))):
        loop.submit("g", prompt(13, 1), n=4, seed=5, temperature=1.0, max_tokens=12)
        groups.append(loop.run())
    assert sorted(groups[0]) == ["g", "g#1", "g#2", "g#3"]
    assert groups[0] == groups[1]


def scores(loop: Loop) -> list[float]:
    prompts = [entry.logprob for name in ("a", "c") for _, entry in sorted(loop.prompt_logprobs[name].items())]
    outputs = [entry.logprob for name in ("a", "b", "c") for entry in loop.logprobs[name]]
    return prompts + outputs


def test_logprobs_of_prompts_and_outputs_are_the_cpus(make, monkeypatch):
    monkeypatch.setattr("minillm.runner.pytorch_model_runner.PROMPT_LOGPROB_SLICE", 7)
    loops = [make(overlap=True, options={"max_num_batched_tokens": 16}), Loop(decoder_of(tiny_reference()))]
    for loop in loops:
        for name, n in (("a", 33), ("b", 1), ("c", 16)):
            loop.submit(name, prompt(n, n), prompt_logprobs=2, logprobs=3, max_tokens=5)
        loop.run()
    assert sorted(loops[0].prompt_logprobs["a"]) == list(range(1, 33))
    assert loops[0].tokens == loops[1].tokens
    assert scores(loops[0]) == pytest.approx(scores(loops[1]), abs=1e-4)
    assert [e.top_ids for e in loops[0].logprobs["a"]] == [e.top_ids for e in loops[1].logprobs["a"]]
    assert PROMPT_LOGPROB_SLICE > 7


class Spoilt:
    """A decoder that gives NaN hidden states, keys and values for one token id, or raises when it sees it."""

    def __init__(self, model: Any, bad_id: int, how: str = "nan") -> None:
        self.inner, self.bad_id, self.how = model, bad_id, how
        self.config, self.dtype, self.layer_attention = model.config, model.dtype, model.layer_attention

    def forward(self, input_ids, positions, attn):
        if self.how == "raise" and (input_ids == self.bad_id).any():
            raise RuntimeError("no such row")
        if self.how == "fault":
            raise KernelLaunchError("CUDA error: an illegal memory access was encountered")
        embedding = self.inner.embedding[self.bad_id].clone()
        try:
            if self.how == "nan":
                self.inner.embedding[self.bad_id].fill_(torch.nan)
            return self.inner.forward(input_ids, positions, attn)
        finally:
            self.inner.embedding[self.bad_id].copy_(embedding)

    def compute_logits(self, hidden):
        return self.inner.compute_logits(hidden)


@pytest.mark.usefixtures("fallback_expected")
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("how", ["nan", "raise"])
@pytest.mark.parametrize("where", ["first chunk", "last chunk", "decode"])
def test_one_rows_failure_is_its_own(make, device, how, where, overlap):
    """B33: the others get the tokens that they would get anyway; no NaN stays in the cache, nothing bad is shared."""
    bad = 130
    model = decoder_of(tiny_reference(), device=device)
    prompts = [[t % 129 for t in prompt(n, n)] for n in (20, 9, 26, 17)]
    healthy = make(model)
    for i, ids in enumerate(prompts):
        healthy.submit(f"{i}", ids, max_tokens=10, logit_bias={bad: -100, 129: -100})
    wanted = healthy.run()
    loop = make(Spoilt(model, bad, how), overlap=overlap, options={"max_prefill_tokens_per_step": 40})
    for i, ids in enumerate(prompts):
        if i == 1:
            ids = {"first chunk": [bad, *ids * 9], "last chunk": [*ids * 9, bad], "decode": ids}[where]
        bias = {bad: 100.0} if i == 1 and where == "decode" else {bad: -100, 129: -100}
        loop.submit(f"{i}", ids, max_tokens=10, logit_bias=bias)
    tokens = loop.run()
    for i in (0, 2, 3):
        assert tokens[f"{i}"] == wanted[f"{i}"]
        assert loop.finished[f"{i}"] == ("length", None)
    assert loop.finished["1"] == ("error", "RuntimeError: no such row" if how == "raise" else NOT_FINITE)
    assert len(tokens.get("1", [])) <= 1
    assert loop.cache.store.isfinite().all()
    loop.runner.model = model  # the bad row's blocks are used again, and its cached prefix must be sound
    again = [t % 129 for t in prompt(9, 9)] * 9
    fresh = make(model)
    for one in (loop, fresh):
        one.submit("again", again, max_tokens=10)
    assert loop.run()["again"] == fresh.run()["again"]


def test_a_prompt_that_is_not_finite_has_no_scores(make, device):
    loop = make(Spoilt(decoder_of(tiny_reference(), device=device), 7), options={"max_num_batched_tokens": 16})
    loop.submit("bad", [1, 2, 7, *prompt(30, 2)], prompt_logprobs=1)
    loop.submit("good", [1, 2, 3], prompt_logprobs=1)
    loop.run()
    assert loop.finished["bad"] == ("error", NOT_FINITE)
    assert not loop.prompt_logprobs["bad"]
    assert len(loop.prompt_logprobs["good"]) == 2


def test_a_failure_of_the_device_is_no_rows_even_if_it_is_alone(make, device):
    """After a kernel's fault nothing on the device can be relied on: the engine must end, not one request."""
    loop = make(Spoilt(decoder_of(tiny_reference(), device=device), 0, "fault"))
    loop.submit("a", [1, 2, 3])
    with pytest.raises(KernelLaunchError, match="illegal memory access"):
        loop.run()


def test_cancelling_in_the_middle_of_an_overlapped_step_leaves_the_rest_alone(make):
    wanted = cpu_tokens()
    loop = make(overlap=True)
    submit_all(loop)
    in_flight = []
    for step in range(6):
        plan = loop.scheduler.schedule(float(step))
        assert not isinstance(plan, NoPlan)
        handle = loop.runner.forward(plan)
        loop.runner.sample(handle)
        in_flight.append((plan, handle))
        if step == 3:
            loop.scheduler.cancel("2", 3.5)
        if len(in_flight) == 2:
            loop._commit(*in_flight.pop(0))
    loop._commit(*in_flight.pop())
    tokens = loop.run()
    assert len(tokens["2"]) < NEW
    assert {name: ids for name, ids in tokens.items() if name != "2"} == {
        name: ids for name, ids in wanted.items() if name != "2"
    }


def test_times_are_measured(make):
    loop = make()
    loop.submit("a", prompt(5, 1), max_tokens=3)
    loop.run()
    assert len(loop.outcomes) == 3
    assert all(outcome.timings.forward > 0 and outcome.timings.sample > 0 for outcome in loop.outcomes)


def test_bfloat16_differs_from_float32_by_rounding_only(make, device):
    scored = []
    for dtype in (torch.float32, torch.bfloat16):
        loop = make(decoder_of(tiny_reference(), dtype, device), options={"max_num_batched_tokens": 16})
        for n in (30, 41):
            loop.submit(f"{n}", prompt(n, n), prompt_logprobs=0, max_tokens=0)
        loop.run()
        scored.append([entry.logprob for n in ("30", "41") for _, entry in sorted(loop.prompt_logprobs[n].items())])
    difference = (torch.tensor(scored[0]) - torch.tensor(scored[1])).abs()
    assert 0 < difference.max() < 0.5
    assert difference.mean() < 0.05


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_sample_never_wait_for_the_device(dtype):
    """Mixed steps with every kind of parameter, logprobs, penalties, bias, groups: torch itself reports any wait."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = decoder_of(tiny_reference(), dtype, "cuda")
    loop = Loop(model, num_blocks=64, device="cuda", overlap=True, options={"max_num_batched_tokens": 32})
    for round_ in range(2):  # the second time everything is compiled and allocated
        for i, params in enumerate([*SAMPLING.values(), {"top_k": 400 % VOCAB + 1, "top_p": 0.8, "temperature": 1.0}]):
            more = {"logprobs": 3, "prompt_logprobs": 2} if i % 2 else {}
            loop.submit(f"{round_} {i}", prompt(11 + 9 * i, i), seed=i, max_tokens=8, **params, **more)
        loop.submit(f"{round_} g", prompt(12, 3), n=3, temperature=1.0, seed=1, max_tokens=5)
        loop.submit(f"{round_} greedy", prompt(40, 4), max_tokens=12)
        torch.cuda.set_sync_debug_mode("error" if round_ else "default")
        try:
            run_with_collect_apart(loop)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loop.tokens["0 greedy"] == loop.tokens["1 greedy"]


def run_with_collect_apart(loop: Loop) -> None:
    """Drive the loop with waits allowed in `collect` alone."""
    mode = torch.cuda.get_sync_debug_mode()
    in_flight: list[tuple[Any, Any]] = []
    while True:
        loop.now += 1.0
        plan = loop.scheduler.schedule(loop.now)
        if not isinstance(plan, NoPlan):
            handle = loop.runner.forward(plan)
            loop.runner.sample(handle)
            in_flight.append((plan, handle))
            if len(in_flight) == 1:
                continue
        elif not in_flight:
            return
        torch.cuda.set_sync_debug_mode("default")
        loop._commit(*in_flight.pop(0))
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("kind", ["top_k", "top_p", "both", "ties"])
def test_the_cuts_without_waiting_give_the_tokens_of_the_cpus_cuts(device, kind):
    """Flat and peaked rows, ties across the cut, and values that are all equal."""
    from minillm.runner import sampling_ops
    from minillm.runner.sampling_ops import DrawParams, Workspace

    generator = torch.Generator().manual_seed(3)
    rows, vocab = 24, 3000
    scale = torch.logspace(-2, 1, rows)[:, None]
    logits = torch.randn(rows, vocab, generator=generator) * scale
    if kind == "ties":
        logits = (logits * 2).round() / 2
        logits[0] = 0.0
    top_k = torch.randint(1, vocab, (rows,), generator=generator) if kind in ("top_k", "both") else None
    top_p = torch.ones(rows, dtype=torch.float64)
    if kind != "top_k":
        top_p = torch.rand(rows, dtype=torch.float64, generator=generator)
    params = DrawParams(
        temperature=torch.full((rows,), 0.9),
        min_p=torch.zeros(rows),
        top_p=top_p,
        top_k=top_k if top_k is not None else torch.full((rows,), vocab),
        uniform=torch.rand(rows, dtype=torch.float64, generator=generator),
        any_min_p=False,
        any_top_p=kind != "top_k",
        any_top_k=top_k is not None,
    )
    maxima = logits.amax(-1)
    wanted = sampling_ops.draw_from_all(logits, maxima, params, Workspace(torch.device("cpu")))
    on_device = DrawParams(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in params))
    workspace = Workspace(torch.device(device))
    moved, maxima = logits.to(device), maxima.to(device)
    _, weights = sampling_ops._weights(moved, maxima, on_device, workspace)
    got = sampling_ops._draw_dense(weights, moved, on_device, workspace)
    assert got.tolist() == wanted.tolist()


def test_b44_tiny_temperatures_and_nuclei_choose_the_best_token_beside_normal_rows(device):
    """B44: logits at the ends of float16, temperatures down to 0; a row that draws normally is not touched by them."""
    logits = torch.randn(8, 600, generator=torch.Generator().manual_seed(2)) * 2
    logits[:7] *= 60000 / logits[:7].abs().max()
    kinds = [{"temperature": t} for t in (0.0, 1e-8, 1e-5, 1e-4, 0.01)]
    kinds += [
        {"temperature": 1.0, "top_p": 1e-4},
        {"temperature": 1.0, "top_p": 1e-9, "top_k": 5},
        {"temperature": 1.0},
    ]
    rows = list(range(8))
    together, alone = Sampler(8, 600, device), Sampler(8, 600, device)
    for row, params in enumerate(kinds):
        for sampler in (together, alone):
            sampler.state.assign(row, SamplingParams(**params), seed=row)
    for index in range(20):
        result = together.sample(logits.to(device, copy=True), rows, [index] * 8)
        assert result.token_ids[:7].tolist() == logits[:7].argmax(-1).tolist()
        assert not result.failed.any()
        single = alone.sample(logits[7:].to(device, copy=True), [7], [index])
        assert result.token_ids[7] == single.token_ids[0]


@pytest.mark.cuda
def test_the_sampler_alone_gives_the_cpus_tokens_from_equal_logits():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    vocab, rows = 5000, 16
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3
    logits[3, 17] = torch.nan
    tokens = {}
    for device in ("cpu", "cuda"):
        sampler = Sampler(rows, vocab, device, eos_token_ids=[2], invalid_token_ids=[7, vocab - 1])
        kinds = list(SAMPLING.values())
        for row in range(rows):
            params = SamplingParams(**{**kinds[row % len(kinds)], "max_tokens": 9})
            sampler.state.assign(row, params, seed=row * 7919, prompt_ids=[1, 2, 3, row])
        results = []
        for index in range(20):
            result = sampler.sample(logits.to(device, copy=True), list(range(rows)), [index] * rows)
            sampler.state.append(list(range(rows)), result.token_ids)
            results.append((result.token_ids.tolist(), result.failed.tolist()))
        tokens[device] = results
    assert tokens["cuda"] == tokens["cpu"]
    assert all(failed[3] for _, failed in tokens["cpu"])
