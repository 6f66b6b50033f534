"""The step loop, driven step by step: failures and refusals."""

from __future__ import annotations

import pytest
from engine_fakes import (
    GREEDY,
    VOCAB,
    EngineDriver,
    ScriptedRunner,
    by_request,
    counting_script,
    finished,
    letters,
)

from minillm.core.errors import EmptyPromptError, EngineDeadError, InvalidParameterError, PromptTooLongError
from minillm.core.sampling_params import SamplingParams


class TestFailures:
    """B33, B53, B54: what fails alone, and what fails all."""

    def test_a_failed_row_ends_its_request_alone(self, overlap: bool) -> None:
        runner = ScriptedRunner(row_failures={("bad", 4): "logits are NaN"})
        driver = EngineDriver(runner, overlap=overlap)
        for request_id in ("one", "bad", "two"):
            driver.add(request_id, "abc", GREEDY)
        outputs = driver.run()
        finished(driver)
        bad = outputs["bad"].outputs[0]
        assert (bad.finish_reason, len(bad.token_ids)) == ("error", 4)
        assert "NaN" in str(bad.error)
        with pytest.raises(type(bad.error), match="NaN"):
            outputs["bad"].raise_for_error()
        assert outputs["one"].outputs[0].text == outputs["two"].outputs[0].text == outputs["one"].outputs[0].text
        assert outputs["one"].raise_for_error().outputs[0].finish_reason == "length"
        assert driver.events["bad"][-1].error is bad.error

    def test_an_exception_in_output_processing_fails_that_request_alone(self, overlap: bool) -> None:
        driver = EngineDriver(overlap=overlap)
        for request_id in ("one", "bad", "two"):
            driver.add(request_id, "abc", GREEDY)
        tracked = driver.engine.outputs.get("bad")
        assert tracked is not None

        class Broken:
            calls = 0

            def push(self, token_id):
                self.calls += 1
                if self.calls == 3:
                    raise ValueError("no text today")
                return "t", None

            def flush(self):
                return ""

        tracked.choices[0].text = Broken()
        outputs = driver.run()
        finished(driver)
        bad = outputs["bad"].outputs[0]
        assert bad.finish_reason == "error"
        assert "no text today" in str(bad.error)
        assert isinstance(bad.error.__cause__, ValueError)
        assert outputs["one"].outputs[0].token_ids == outputs["two"].outputs[0].token_ids
        assert len(outputs["one"].outputs[0].token_ids) == 8

    def test_an_exception_at_the_last_flush_fails_that_request_alone(self, overlap: bool) -> None:
        driver = EngineDriver(overlap=overlap)
        driver.add("bad", "abc", GREEDY)
        driver.add("good", "abc", GREEDY)
        tracked = driver.engine.outputs.get("bad")
        assert tracked is not None

        class Broken:
            def push(self, token_id):
                return "t", None

            def flush(self):
                raise ValueError("no tail")

        tracked.choices[0].text = Broken()
        outputs = driver.run()
        finished(driver)
        assert outputs["bad"].outputs[0].finish_reason == "error"
        assert outputs["bad"].outputs[0].text == "t" * 8
        assert outputs["good"].outputs[0].finish_reason == "length"

    @pytest.mark.parametrize("method", ["forward", "sample", "collect"])
    @pytest.mark.parametrize("call", [1, 2, 5])
    def test_an_exception_in_the_runner_is_an_engine_failure(self, method: str, call: int, overlap: bool) -> None:
        driver = EngineDriver(ScriptedRunner(raise_in={method: call}), overlap=overlap)
        driver.add("one", "abc", GREEDY)
        driver.add("two", "abcd", GREEDY)
        with pytest.raises(EngineDeadError, match=f"injected fault in {method}") as caught:
            driver.run()
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert {tracked.request.request_id for tracked in driver.engine.abandon()} == {"one", "two"}
        assert not driver.engine.has_work
        assert not driver.engine.scheduler.has_live_requests
        with pytest.raises(EngineDeadError):
            driver.add("three", "abc", GREEDY)
        with pytest.raises(EngineDeadError):
            driver.engine.step()
        driver.engine.close()
        assert driver.runner.closed

    def test_a_scheduler_that_stalls_is_an_engine_failure_and_not_a_hang(self) -> None:
        driver = EngineDriver()
        driver.add("r", "abc", GREEDY)
        from minillm.core.plan import NoPlan

        driver.engine.scheduler.schedule = lambda now: NoPlan.IDLE  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError, match="no plan"):
            driver.run(limit=10)

    def test_a_violated_invariant_is_reported_and_traffic_goes_on(self, caplog: pytest.LogCaptureFixture) -> None:
        pytest.importorskip("minillm.core.invariants")
        driver = EngineDriver()
        driver.add("r", "abc", GREEDY)
        driver.step()
        driver.engine.scheduler.blocks.free_blocks.pop()  # type: ignore[attr-defined]
        output = driver.run()["r"]
        assert output.outputs[0].finish_reason == "length"
        assert driver.engine.num_invariant_violations > 0
        assert "invariant violated" in caplog.text


class TestRefusals:
    """B05, B08, B52, B53: before anything is queued."""

    def test_prompt_over_the_pool_names_both_sizes_and_the_next_request_runs(self) -> None:
        driver = EngineDriver(num_blocks=10, block_size=16, max_model_len=1000)
        assert driver.parts.model_info.max_model_len == 160
        assert driver.parts.model_info.max_model_len_reduced
        with pytest.raises(PromptTooLongError, match=r"300.*160"):
            driver.add("big", "a" * 300, GREEDY)
        assert not driver.engine.has_work
        driver.add("small", "a" * 5, GREEDY)
        assert driver.run()["small"].outputs[0].finish_reason == "length"
        finished(driver)

    def test_prompt_and_max_tokens_that_cannot_fit_at_the_end_are_refused(self) -> None:
        driver = EngineDriver(num_blocks=10, block_size=16, max_model_len=1000)
        with pytest.raises(PromptTooLongError, match="600"):
            driver.add("r", "a" * 100, SamplingParams(max_tokens=500))

    @pytest.mark.parametrize("num_blocks", [64, 8], ids=["model's limit", "reduced"])
    @pytest.mark.parametrize("chat", [False, True])
    def test_lengths_around_the_limit(self, num_blocks: int, chat: bool) -> None:
        driver = EngineDriver(num_blocks=num_blocks, max_model_len=64, overlap=True)
        limit = driver.parts.model_info.max_model_len
        assert limit == min(64, num_blocks * 4)
        frame = len(driver.parts.inputs.encode_chat([{"role": "user", "content": ""}])) if chat else 0
        for length in (limit - 1, limit, limit + 1):
            text = "a" * (length - frame)
            prompt = [{"role": "user", "content": text}] if chat else text
            if length > limit:
                with pytest.raises(PromptTooLongError, match=f"{length}.*{limit}"):
                    driver.add(str(length), prompt, SamplingParams(temperature=0))
                continue
            driver.add(str(length), prompt, SamplingParams(temperature=0))
            output = driver.run()[str(length)]
            assert len(output.prompt_token_ids) == length
            assert output.outputs[0].finish_reason == "length"
            assert len(output.outputs[0].token_ids) == 1
        finished(driver)

    @pytest.mark.parametrize("prompt", ["", [], {"prompt_token_ids": []}])
    def test_empty_prompt(self, prompt: object) -> None:
        with pytest.raises(EmptyPromptError):
            EngineDriver().add("r", prompt, GREEDY)

    @pytest.mark.parametrize("bad", [-1, VOCAB, 10**9])
    def test_token_id_out_of_range(self, bad: int) -> None:
        with pytest.raises(InvalidParameterError, match=f"prompt={bad}"):
            EngineDriver().add("r", [1, 2, bad, 3], GREEDY)

    @pytest.mark.parametrize("prompt", [None, 5, 1.5, b"abc", [1, "a"], [1.5], [True], {"text": "a"}, {"prompt": [1]}])
    def test_prompt_of_no_known_kind(self, prompt: object) -> None:
        with pytest.raises(InvalidParameterError, match="prompt"):
            EngineDriver().add("r", prompt, GREEDY)

    @pytest.mark.parametrize(
        "params",
        [SamplingParams(logit_bias={VOCAB: 5}), SamplingParams(stop_token_ids=[VOCAB + 7])],
        ids=["logit_bias", "stop_token_ids"],
    )
    def test_ids_outside_the_vocabulary_in_parameters(self, params: SamplingParams) -> None:
        with pytest.raises(InvalidParameterError, match="vocabulary"):
            EngineDriver().add("r", "abc", params)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("priority", "x"),
            ("priority", 1.5),
            ("priority", True),
            ("priority", 1 << 63),
            ("user", None),
            ("cache_salt", 3),
            ("timeout", 0),
            ("timeout", -1),
            ("timeout", float("nan")),
            ("timeout", float("inf")),
            ("timeout", "5"),
        ],
    )
    def test_other_fields(self, name: str, value: object) -> None:
        with pytest.raises(InvalidParameterError, match=name):
            EngineDriver().add("r", "abc", GREEDY, **{name: value})

    def test_parameters_of_another_type(self) -> None:
        with pytest.raises(InvalidParameterError, match="sampling_params"):
            EngineDriver().add("r", "abc", {"temperature": 0})  # type: ignore[arg-type]


def test_overlap_changes_no_token_and_no_text() -> None:
    def run(overlap: bool) -> dict[str, list[tuple[list[int], str, str | None]]]:
        driver = EngineDriver(overlap=overlap, num_blocks=20, num_swap_blocks=8, max_num_batched_tokens=12)
        for i in range(12):
            params = SamplingParams(
                seed=i, n=1 + (i % 4 == 3), max_tokens=5 + 3 * i, stop=["xy", "q"] if i % 3 == 0 else []
            )
            driver.add(f"r{i}", "abcdefgh"[: 1 + i % 8] * 3, params, priority=i % 2)
        outputs = driver.run()
        finished(driver)
        assert driver.engine.overlap is overlap
        return {
            request_id: [(choice.token_ids, choice.text, choice.finish_reason) for choice in output.outputs]
            for request_id, output in outputs.items()
        }

    assert run(True) == run(False)


def test_overlap_keeps_one_plan_in_flight() -> None:
    driver = EngineDriver(overlap=True)
    driver.add("r", "abc", GREEDY)
    driver.step()
    assert driver.engine.stats().plans_in_flight == 1
    driver.step()
    assert driver.engine.stats().plans_in_flight == 1
    assert driver.events == {}, "the first token is committed; its text waits for the next plan to be issued"
    driver.step()
    assert len(driver.events["r"]) == 1
    driver.run()
    finished(driver)


@pytest.mark.parametrize("num_swap_blocks", [0, 32], ids=["recompute", "swap"])
def test_preemption_changes_no_token(num_swap_blocks: int, overlap: bool) -> None:
    roomy = EngineDriver(overlap=overlap)
    tight = EngineDriver(overlap=overlap, num_blocks=14, num_swap_blocks=num_swap_blocks)
    for driver in (roomy, tight):
        for i in range(4):
            driver.add(f"r{i}", "abcdefgh" * (1 + i % 2), SamplingParams(seed=i, max_tokens=30, logprobs=1))
        driver.run()
        finished(driver)
    counters = tight.engine.stats().counters
    assert (counters.preemptions_swap if num_swap_blocks else counters.preemptions_recompute) > 0
    for request_id, output in roomy.outputs.items():
        assert tight.outputs[request_id].outputs[0].token_ids == output.outputs[0].token_ids
        assert len(tight.outputs[request_id].outputs[0].logprobs or ()) == 30
    preempted = [output.metrics.num_preemptions for output in tight.outputs.values()]
    assert sum(preempted) == counters.preemptions_swap + counters.preemptions_recompute


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_cancel_in_any_phase_frees_everything_and_runs_no_further(steps: int, overlap: bool) -> None:
    """B01, B03: queued, in the middle of a chunked prefill, decoding."""
    driver = EngineDriver(overlap=overlap, max_num_seqs=1, max_num_batched_tokens=8)
    driver.add("r", "a" * 20, SamplingParams(temperature=0, max_tokens=40))
    for _ in range(steps):
        driver.step()
    before = driver.runner.prefilled["r"]
    assert driver.cancel("r")
    assert not driver.cancel("r")
    assert driver.outputs["r"].outputs[0].finish_reason == "cancelled"
    driver.add("next", "b" * 5, GREEDY)
    driver.run()
    assert driver.runner.prefilled["r"] == before
    assert driver.outputs["next"].outputs[0].finish_reason == "length"
    finished(driver)


def test_a_queued_request_that_is_cancelled_never_runs(overlap: bool) -> None:
    driver = EngineDriver(overlap=overlap, max_num_seqs=1)
    driver.add("running", "abc", SamplingParams(temperature=0, max_tokens=20))
    for _ in range(3):
        driver.step()
    driver.add("A", "abcd", GREEDY)
    driver.add("B", "abcde", GREEDY)
    driver.step()
    assert driver.cancel("A")
    driver.run()
    assert driver.runner.prefilled["A"] == 0
    assert driver.outputs["A"].outputs[0].token_ids == []
    assert driver.outputs["B"].outputs[0].finish_reason == "length"
    finished(driver)


def test_a_swapped_out_request_can_be_cancelled(overlap: bool) -> None:
    driver = EngineDriver(overlap=overlap, num_blocks=12, num_swap_blocks=16)
    for i in range(3):
        driver.add(f"r{i}", "abcdefgh", SamplingParams(seed=i, max_tokens=32))
    for _ in range(200):
        driver.step()
        if driver.engine.stats().swapped:
            break
    victims = [f"r{i}" for i in range(3) if driver.engine.scheduler.get(f"r{i}").state.value == "swapped"]
    assert victims
    assert driver.cancel(victims[0])
    assert driver.outputs[victims[0]].outputs[0].finish_reason == "cancelled"
    driver.run()
    finished(driver)


def test_an_id_can_be_used_again_at_once_after_a_cancel(overlap: bool) -> None:
    """B57: with a step of the old request still in flight."""
    driver = EngineDriver(ScriptedRunner(by_request({"r": letters("abcdefghijklmnop")})), overlap=overlap)
    driver.add("r", "xyz", SamplingParams(temperature=0, max_tokens=10))
    for _ in range(4):
        driver.step()
    assert driver.cancel("r")
    first = driver.outputs.pop("r")
    driver.events.pop("r")
    assert first.outputs[0].text == "abcdefghij"[: len(first.outputs[0].token_ids)]
    driver.add("r", "uvw", SamplingParams(temperature=0, max_tokens=5))
    second = driver.run()["r"]
    finished(driver)
    assert second.outputs[0].text == "abcde"
    assert second.prompt_token_ids == letters("uvw")


def test_a_deadline_ends_a_request_in_the_queue_and_one_that_runs(overlap: bool) -> None:
    now = [100.0]
    driver = EngineDriver(overlap=overlap, max_num_seqs=1, clock=lambda: now[0])
    driver.add("running", "abc", SamplingParams(temperature=0, max_tokens=100), timeout=5.0)
    driver.add("queued", "abc", SamplingParams(temperature=0, max_tokens=100), timeout=3.0)
    for _ in range(12):
        now[0] += 0.5
        if driver.engine.has_work:
            driver.step()
    driver.run()
    finished(driver)
    queued, running = driver.outputs["queued"], driver.outputs["running"]
    assert queued.outputs[0].finish_reason == running.outputs[0].finish_reason == "cancelled"
    assert queued.outputs[0].stop_reason == running.outputs[0].stop_reason == "deadline passed"
    assert queued.outputs[0].token_ids == []
    assert queued.metrics.first_scheduled_time is None
    assert 5 <= len(running.outputs[0].token_ids) < 20
    assert running.metrics.latency == pytest.approx(5.0, abs=1.0)


def test_metrics_are_on_one_clock_and_in_order(overlap: bool) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.25
        return now[0]

    driver = EngineDriver(overlap=overlap, clock=clock, max_num_seqs=1)
    prompt = "abcdefghijkl"
    for request_id in ("first", "second"):
        driver.add(request_id, prompt, GREEDY)
    driver.run()
    finished(driver)
    first, second = driver.outputs["first"].metrics, driver.outputs["second"].metrics
    for metrics in (first, second):
        assert metrics.arrival_time <= metrics.first_scheduled_time < metrics.first_token_time < metrics.finished_time
        assert metrics.time_to_first_token == metrics.first_token_time - metrics.arrival_time
        assert metrics.latency == metrics.time_to_first_token + metrics.decode_time
    assert second.time_in_queue > first.time_in_queue
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)


def test_seeds_are_drawn_from_the_engine_seed_and_given_ones_are_kept() -> None:
    def seeds(engine_seed: int | None) -> list[int]:
        driver = EngineDriver(seed=engine_seed)
        for i in range(3):
            driver.add(f"r{i}", "abc", SamplingParams(max_tokens=2))
        return [tracked.request.seed for tracked in driver.engine.outputs.live()]

    assert seeds(0) == seeds(0)
    assert len(set(seeds(0))) == 3
    assert seeds(1) != seeds(0)
    assert seeds(None) != seeds(None)
    driver = EngineDriver()
    driver.add("r", "abc", SamplingParams(seed=-1))
    assert driver.engine.outputs.live()[0].request.seed == 2**64 - 1


def test_counting_script_is_a_function_of_its_arguments() -> None:
    """The oracle of the tests above must not depend on anything else."""
    driver = EngineDriver()
    driver.add("r", "abc", GREEDY)
    driver.run()
    assignment = driver.runner.rows[0].assignment
    assert [counting_script(assignment, i) for i in range(8)] == driver.outputs["r"].outputs[0].token_ids


def test_without_events_the_output_is_the_same() -> None:
    def outputs(wants_events: bool):
        driver = EngineDriver(ScriptedRunner(row_failures={("bad", 2): "NaN"}))
        driver.add("r", "abc", SamplingParams(n=3, seed=1, max_tokens=9, stop=["q"], logprobs=1))
        driver.add("bad", "abcd", SamplingParams(seed=1, max_tokens=9))
        for tracked in driver.engine.outputs.live():
            tracked.wants_events = wants_events
        driver.run()
        events = sum(map(len, driver.events.values()))
        return driver.outputs["r"].outputs, driver.outputs["bad"].outputs[0].text, events

    *with_events, count = outputs(True)
    *without, none = outputs(False)
    assert without == with_events
    assert (count > 0, none) == (True, 0)
