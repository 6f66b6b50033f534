"""The engine on the built-in model, in float32: what users see, and that scheduling never changes a token."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from engine_fakes import check_events, idle_state

from minillm import LLM, EngineConfig, Runtime, SamplingParams
from minillm.core.errors import InvalidParameterError, PromptTooLongError
from minillm.engine.factory import build_engine

pytestmark = pytest.mark.integration

CONFIG = EngineConfig("smollm2-135m", dtype="float32", max_num_seqs=8, num_gpu_blocks_override=256)
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von \u00d6sterreich hei\u00dft",
]


@pytest.fixture(scope="module")
def loaded():
    """The model and the tokenizer, loaded once for all engines of this file."""
    from minillm.models.loader import load_model
    from minillm.models.tokenizer import load_tokenizer

    model = load_model("smollm2-135m", "float32")
    return {"model": model, "tokenizer": load_tokenizer(model.path)}


@pytest.fixture(scope="module")
def make(loaded):
    """Makes a runtime with changed options on the shared weights."""

    def make_runtime(**options) -> Runtime:
        config = dataclasses.replace(CONFIG, check_invariants=True, **options)
        return Runtime(parts=build_engine(config, **loaded))

    return make_runtime


@pytest.fixture(scope="module")
def llm(make):
    with LLM(runtime=make()) as made:
        yield made


@pytest.fixture(scope="module")
def reference(llm: LLM) -> list[list[int]]:
    """Greedy tokens of each prompt alone."""
    return [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_completion_knows_the_capital_of_france(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=4))
    assert output.outputs[0].text.startswith(" Paris")
    assert output.outputs[0].finish_reason == "length"
    assert output.metrics.time_to_first_token is not None
    assert output.metrics.time_to_first_token > 0


def test_chat_answers_and_ends_by_itself(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(question, SamplingParams(temperature=0))
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] in llm.get_tokenizer().eos_token_ids
    assert "<|im_end|>" not in output.outputs[0].text
    (ids,) = llm.generate([output.prompt_token_ids], SamplingParams(temperature=0, max_tokens=40))
    assert ids.outputs == output.outputs


def test_min_tokens_and_ignore_eos_keep_the_answer_going(llm: LLM) -> None:
    """B43: every EOS id is masked for the first `min_tokens` tokens; under ignore_eos none of them ends the output."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    plain = SamplingParams(temperature=0, max_tokens=24)
    short = llm.chat(question, plain)[0].outputs[0]
    assert short.finish_reason == "stop"
    count = len(short.token_ids)
    assert count < 20
    eos = llm.get_tokenizer().eos_token_ids
    longer = llm.chat(question, dataclasses.replace(plain, min_tokens=count + 3))[0].outputs[0]
    assert len(longer.token_ids) > count + 3 or longer.finish_reason == "length"
    assert eos.isdisjoint(longer.token_ids[: count + 3])
    ignoring = llm.chat(question, dataclasses.replace(plain, ignore_eos=True))[0].outputs[0]
    assert ignoring.token_ids[:count] == short.token_ids
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (24, "length")


def test_streamed_text_is_the_decoded_output(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True)
    for prompt in (PROMPTS[3], "\u4eca\u65e5\u306f\u5929\u6c17\u304c \U0001f600 \ud55c\uad6d\uc5b4"):
        stream = llm.runtime.stream(prompt, params)
        events = list(stream)
        assert stream.output is not None
        check_events(events, stream.output)
        choice = stream.output.outputs[0]
        assert choice.text == tokenizer.decode(choice.token_ids)


def test_greedy_tokens_are_the_same_batched_as_alone(llm: LLM, reference) -> None:
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == reference


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"max_num_batched_tokens": 8, "overlap": True},
        {"scheduler": "static"},
        {"enable_prefix_caching": False, "block_size": 5},
    ],
    ids=["overlap", "chunked", "static", "no cache, odd blocks"],
)
def test_the_way_of_running_changes_no_token(make, reference, options) -> None:
    with LLM(runtime=make(**options)) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == reference
        assert llm.runtime._engine.num_invariant_violations == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_changes_no_token(make, reference, mode: str) -> None:
    swap_space = 0.25 if mode == "swap" else 0.0
    options = {"preemption_mode": mode, "swap_space": swap_space, "num_gpu_blocks_override": 12, "block_size": 4}
    with LLM(runtime=make(**options)) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == reference
        counters = llm.stats().counters
        assert (counters.preemptions_swap if mode == "swap" else counters.preemptions_recompute) > 0
        assert llm.runtime._engine.num_invariant_violations == 0


def test_a_cached_prefix_changes_no_token(llm: LLM) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    llm.reset_prefix_cache()
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 16
    assert second.outputs == first.outputs


def test_seeded_sampling_is_the_same_alone_batched_and_in_a_group(llm: LLM) -> None:
    params = [SamplingParams(seed=seed, max_tokens=12, top_k=50, ignore_eos=True) for seed in range(4)]
    alone = [llm.generate(PROMPTS[0], one)[0].outputs[0].token_ids for one in params]
    assert len({tuple(ids) for ids in alone}) == 4
    assert tokens_of(llm.generate([PROMPTS[0]] * 4, params)) == alone
    (group,) = llm.generate(PROMPTS[0], dataclasses.replace(params[2], n=3))
    assert group.outputs[0].token_ids == alone[2]
    assert len({tuple(choice.token_ids) for choice in group.outputs}) == 3


def test_scores_of_prompt_and_output(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate(PROMPTS[0], params)
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(entry)) == token_id  # greedy: the token is the most likely one
        assert entry[token_id].rank == 1
        values = [one.logprob for one in entry.values()]
        assert values == sorted(values, reverse=True)
        assert all(value <= 0 for value in values)
    # The prompt and its continuation, scored as a prompt, have the scores that they were generated with.
    ids = output.prompt_token_ids + choice.token_ids
    (scored,) = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert scored.outputs[0].finish_reason == "length"
    assert scored.outputs[0].token_ids == []
    again = [entry[token_id].logprob for token_id, entry in zip(ids[1:], scored.prompt_logprobs[1:], strict=True)]
    generated = [entry[token_id].logprob for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert again[-4:] == pytest.approx(generated, abs=1e-4)


def test_stop_string_cuts_the_text_of_stream_and_output_alike(llm: LLM) -> None:
    free = llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].text
    stop = free[10:14]
    params = dataclasses.replace(GREEDY, stop=[stop])
    stream = llm.runtime.stream(PROMPTS[1], params)
    events = list(stream)
    assert stream.output is not None
    choice = stream.output.outputs[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.text == "".join(event.text for event in events) == free[: free.index(stop)]


def test_asyncio_streams_run_together(llm: LLM, reference) -> None:
    async def read(prompt: str) -> list[int | None]:
        return [event.token_id async for event in llm.runtime.astream(prompt, GREEDY)]

    async def main() -> list[list[int | None]]:
        return list(await asyncio.gather(*(read(prompt) for prompt in PROMPTS)))

    assert asyncio.run(main()) == reference


def test_refusals_leave_the_engine_working_and_idle(llm: LLM, reference) -> None:
    idle = idle_state(llm.runtime._engine)
    with pytest.raises(PromptTooLongError, match="4096"):
        llm.generate([[1] * 4097], GREEDY)
    with pytest.raises(InvalidParameterError, match="49152"):
        llm.generate([[49152]], GREEDY)
    stream = llm.runtime.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    del stream
    assert tokens_of(llm.generate(PROMPTS[:1], GREEDY)) == reference[:1]
    assert idle_state(llm.runtime._engine) == idle
    assert llm.runtime._engine.num_invariant_violations == 0
