"""Text work beside the device: when it is done, and that what is not followed token by token comes out the same."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from engine_fakes import (
    EOS,
    GREEDY,
    TOKENIZER,
    EngineDriver,
    ScriptedRunner,
    by_request,
    counting_script,
    finished,
    letters,
    make_runtime,
    token,
)

from minillm.core.errors import EngineDeadError
from minillm.core.sampling_params import SamplingParams
from minillm.engine.detokenizer import make_detokenizer
from minillm.engine.streams import LoopWaker


class Diary(ScriptedRunner):
    """Writes down in which order the runner is called and text is made."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[str] = []

    def forward(self, plan):
        self.entries.append(f"forward {plan.step}")
        return super().forward(plan)

    def collect(self, handle):
        self.entries.append(f"collect {handle['plan'].step}")
        return super().collect(handle)


def diary(overlap: bool) -> list[str]:
    runner = Diary()
    driver = EngineDriver(runner, overlap=overlap)
    driver.add("r", "abc", SamplingParams(temperature=0, max_tokens=4))
    process = driver.engine.outputs.process

    def written(events, now):
        if len(events.tokens):
            runner.entries.append(f"text of token {events.tokens.indices[0]}")
        return process(events, now)

    driver.engine.outputs.process = written  # type: ignore[method-assign]
    driver.run()
    finished(driver)
    return runner.entries


def test_with_overlap_a_plan_is_queued_before_the_text_of_the_one_before_last_is_made() -> None:
    assert diary(True) == [
        "forward 0",
        "forward 1",
        "collect 0",
        "forward 2",
        "text of token 0",
        "collect 1",
        "forward 3",
        "text of token 1",
        "collect 2",
        "text of token 2",
        "collect 3",
        "text of token 3",
    ]


def test_without_overlap_text_does_not_wait_for_the_next_plan() -> None:
    assert diary(False)[:6] == [
        "forward 0",
        "collect 0",
        "text of token 0",
        "forward 1",
        "collect 1",
        "text of token 1",
    ]


def test_a_stop_string_is_found_with_two_plans_in_flight_and_nothing_after_it_is_delivered() -> None:
    """DESIGN overlap rule 3: found late, by two rows that are thrown away."""
    outputs = {}
    for overlap in (False, True):
        runner = ScriptedRunner(by_request({"r": letters("abcdefghij")}))
        driver = EngineDriver(runner, overlap=overlap)
        driver.add("r", "xyz", SamplingParams(temperature=0, max_tokens=10, stop=["cd"]))
        driver.add("other", "xyz", SamplingParams(temperature=0, max_tokens=10))
        driver.run()
        finished(driver)
        choice = driver.outputs["r"].outputs[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", "cd")
        assert choice.token_ids == letters("abcd")
        assert driver.engine.stats().counters.discarded_rows == (2 if overlap else 0)
        outputs[overlap] = driver.outputs["other"].outputs[0].token_ids
    assert outputs[True] == outputs[False]


def test_cancelling_delivers_what_is_committed_first() -> None:
    driver = EngineDriver(overlap=True)
    driver.add("r", "abc", SamplingParams(temperature=0, max_tokens=50))
    for _ in range(4):
        driver.step()
    committed = len(driver.engine.scheduler.get("r").generated_ids)
    assert committed > len(driver.events["r"])
    assert driver.cancel("r")
    assert len(driver.outputs["r"].outputs[0].token_ids) == committed
    driver.run()
    finished(driver)


def test_tokens_committed_before_a_failure_still_reach_their_reader() -> None:
    driver = EngineDriver(ScriptedRunner(raise_in={"forward": 4}), overlap=True)
    driver.add("r", "abc", SamplingParams(temperature=0, max_tokens=50))
    with pytest.raises(EngineDeadError):
        driver.run()
    driver.take(driver.engine.take_updates())
    assert [event.index for event in driver.events["r"]] == [0, 1]
    assert not driver.engine.has_work


def test_what_a_failed_device_holds_is_never_freed_and_an_ordinary_failure_frees_it() -> None:
    import torch

    for error, kept in (
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True),
        (ValueError(), False),
    ):
        runner = ScriptedRunner()

        def failing(handle, error=error):
            raise error

        driver = EngineDriver(runner, overlap=True)
        driver.add("r", "abc", GREEDY)
        runner.collect = failing  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError):
            driver.run()
        driver.engine.close()
        assert runner.closed is not kept
        assert any(held[:1] == (runner,) for held in gc.get_referrers(runner) if isinstance(held, tuple)) is kept


UNICODE = [*letters("a"), *TOKENIZER.encode("é😀", add_special_tokens=False), *letters("z")]
CUT = TOKENIZER.encode("x😀", add_special_tokens=False)[:3]
CASES = {
    "length": (counting_script, GREEDY),
    "characters of several tokens": (by_request({"r": [*UNICODE, EOS]}), GREEDY),
    "ends inside a character": (by_request({"r": CUT}), SamplingParams(temperature=0, max_tokens=3)),
    "stop token": (
        by_request({"r": [token("HI"), token("G"), token("J")]}),
        SamplingParams(stop_token_ids=[token("J")]),
    ),
    "stop token shown": (
        by_request({"r": [token("HI"), token("J")]}),
        SamplingParams(stop_token_ids=[token("J")], include_stop_str_in_output=True),
    ),
    "eos": (by_request({"r": [token("HI"), EOS]}), GREEDY),
    "stop token below min_tokens": (
        by_request({"r": [token("J"), token("HI"), token("J")]}),
        SamplingParams(stop_token_ids=[token("J")], min_tokens=2),
    ),
    "nothing": (counting_script, SamplingParams(max_tokens=0, prompt_logprobs=1)),
    "several choices": (counting_script, SamplingParams(n=3, seed=5, max_tokens=6)),
}


@pytest.mark.parametrize("case", CASES)
def test_an_output_that_nobody_follows_is_the_same(case: str, overlap: bool) -> None:
    script, params = CASES[case]
    found = []
    for wants_events in (True, False):
        driver = EngineDriver(ScriptedRunner(script), overlap=overlap)
        request, text = driver.parts.inputs.prepare("abc", params, request_id="r", now=0.0)
        tracked = driver.engine.add_request(request, text, "r", wants_events)
        assert all(choice.followed is wants_events for choice in tracked.choices)
        output = driver.run()["r"]
        assert bool(driver.events["r"]) is wants_events
        found.append(output.outputs)
    assert found[0] == found[1]
    assert all(choice.finish_reason in ("stop", "length") for choice in found[0])


def test_an_output_that_nobody_follows_brings_its_text_when_cancelled_and_when_its_row_fails() -> None:
    runner = ScriptedRunner(by_request({"bad": letters("abcdef")}), row_failures={("bad", 3): "NaN"})
    driver = EngineDriver(runner, overlap=True)
    for request_id in ("bad", "late"):
        request, text = driver.parts.inputs.prepare("abc", GREEDY, request_id=request_id, now=0.0)
        driver.engine.add_request(request, text, request_id, False)
    for _ in range(4):
        driver.step()
    assert driver.cancel("late")
    late = driver.outputs["late"].outputs[0]
    assert late.finish_reason == "cancelled" and len(late.token_ids) == 3 == len(late.text)
    bad = driver.run()["bad"].outputs[0]
    assert (bad.finish_reason, bad.text, bad.token_ids) == ("error", "abc", letters("abc"))


def test_a_text_that_cannot_be_made_at_the_end_fails_its_request_alone() -> None:
    driver = EngineDriver()
    trackeds = {}
    for request_id in ("bad", "good"):
        request, text = driver.parts.inputs.prepare("abc", GREEDY, request_id=request_id, now=0.0)
        trackeds[request_id] = driver.engine.add_request(request, text, request_id, False)

    class Broken:
        def push_all(self, token_ids):
            raise ValueError("no text today")

    trackeds["bad"].choices[0].text = Broken()  # type: ignore[assignment]
    outputs = driver.run()
    bad = outputs["bad"].outputs[0]
    assert bad.finish_reason == "error" and "no text today" in str(bad.error) and len(bad.token_ids) == 8
    assert outputs["good"].outputs[0].finish_reason == "length"


def test_all_tokens_at_once_give_the_text_of_one_by_one() -> None:
    ids = [*UNICODE, EOS, *CUT, 10**6, *letters("q"), *CUT]
    for prompt in ([], CUT):
        one, all_of_them = (make_detokenizer(TOKENIZER, prompt) for _ in range(2))
        text = "".join(map(one.add, ids)) + one.finish()
        assert all_of_them.add_all(ids[:5]) + all_of_them.add_all(ids[5:]) + all_of_them.finish() == text


def test_many_readers_of_one_loop_are_woken_by_few_calls() -> None:
    calls = 0

    async def main() -> list[str]:
        nonlocal calls
        loop = asyncio.get_running_loop()
        original = loop.call_soon_threadsafe

        def counted(*arguments, **options):
            nonlocal calls
            calls += 1
            return original(*arguments, **options)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        waiters = [loop.create_future() for _ in range(200)]
        waker = LoopWaker.of(loop)
        assert LoopWaker.of(loop) is waker
        thread = threading.Thread(target=lambda: [waker.wake(waiter) for waiter in waiters])
        thread.start()
        thread.join()  # the loop stands still meanwhile
        await asyncio.wait_for(asyncio.gather(*waiters), 10)
        assert calls == 1
        with make_runtime() as runtime:

            async def read(number: int) -> str:
                params = SamplingParams(seed=number, max_tokens=12)
                return "".join([event.text async for event in runtime.astream("abc", params)])

            return await asyncio.wait_for(asyncio.gather(*map(read, range(20))), 20)

    texts = asyncio.run(main())
    with make_runtime() as runtime:
        wanted = [
            runtime.submit("abc", SamplingParams(seed=i, max_tokens=12)).result(20).outputs[0].text for i in range(20)
        ]
    assert texts == wanted


def test_a_waker_of_a_closed_loop_wakes_nobody_and_raises_nothing() -> None:
    loop = asyncio.new_event_loop()
    waker, waiter = LoopWaker.of(loop), loop.create_future()
    loop.close()
    waker.wake(waiter)
    assert not waiter.done()
