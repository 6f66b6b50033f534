"""The step loop, driven step by step: text, stops, logprobs, groups, failures, overlap."""

from __future__ import annotations

import pytest
from engine_fakes import (
    END,
    EOS,
    VOCAB,
    EngineDriver,
    ScriptedRunner,
    by_request,
    check_events,
    counting_script,
    idle_state,
    letters,
    token,
    tokens_script,
)

from minillm.core.errors import EmptyPromptError, EngineDeadError, InvalidParameterError, PromptTooLongError
from minillm.core.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


def finished(driver: EngineDriver) -> None:
    """After a run: every stream is in form, nothing is held, no invariant was broken."""
    for request_id, output in driver.outputs.items():
        check_events(driver.events[request_id], output)
    assert not driver.engine.has_work
    assert driver.engine.num_invariant_violations == 0
    state = idle_state(driver.engine)
    assert state == (0, 0, 0, 0, driver.parts.model_info.num_blocks, 0, 0, 0, 0)


def run_one(driver: EngineDriver, params: SamplingParams, prompt: object = "abc"):
    driver.add("r", prompt, params)
    output = driver.run()["r"]
    finished(driver)
    return output.outputs[0]


def test_generates_exactly_max_tokens_and_says_length(overlap: bool) -> None:
    choice = run_one(EngineDriver(overlap=overlap), GREEDY)
    assert len(choice.token_ids) == 8
    assert choice.finish_reason == "length"
    assert choice.text == "".join(chr(ord("a") + (sum(letters("abc")) * 7 + i * i + 3 * i) % 26) for i in range(8))


def test_one_token_is_exactly_one_token(overlap: bool) -> None:
    choice = run_one(EngineDriver(overlap=overlap), SamplingParams(temperature=0, max_tokens=1))
    assert (len(choice.token_ids), choice.finish_reason) == (1, "length")


def test_completion_without_max_tokens_gets_16_and_chat_the_rest_of_the_context(overlap: bool) -> None:
    driver = EngineDriver(overlap=overlap, max_model_len=60)
    driver.add("completion", "abc", SamplingParams(temperature=0))
    driver.add("chat", [{"role": "user", "content": "hi"}], SamplingParams(temperature=0))
    outputs = driver.run()
    finished(driver)
    assert len(outputs["completion"].outputs[0].token_ids) == 16
    chat = outputs["chat"]
    assert len(chat.prompt_token_ids) + len(chat.outputs[0].token_ids) == 60
    assert chat.outputs[0].finish_reason == "length"


def test_completion_near_the_limit_ends_with_length_at_the_limit(overlap: bool) -> None:
    driver = EngineDriver(overlap=overlap, max_model_len=20)
    choice = run_one(driver, SamplingParams(temperature=0), "a" * 15)
    assert (len(choice.token_ids), choice.finish_reason) == (5, "length")


class TestEos:
    """B42, B43: tokens that end the output."""

    def test_eos_is_counted_and_has_no_text(self, overlap: bool) -> None:
        runner = ScriptedRunner(tokens_script(token("HI"), token("J"), EOS))
        choice = run_one(EngineDriver(runner, overlap=overlap), GREEDY)
        assert choice.text == "HIJ"
        assert choice.token_ids == [token("HI"), token("J"), EOS]
        assert choice.finish_reason == "stop"
        assert choice.stop_reason is None

    def test_eos_is_left_out_also_where_special_tokens_are_shown(self, overlap: bool) -> None:
        runner = ScriptedRunner(tokens_script(token("HI"), END, EOS))
        params = SamplingParams(temperature=0, max_tokens=8, skip_special_tokens=False)
        assert run_one(EngineDriver(runner, overlap=overlap), params).text == "HI<end>"

    def test_every_eos_id_ends_and_ignore_eos_ignores_them_all(self, overlap: bool) -> None:
        ignoring = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        for end in (EOS, END):
            runner = ScriptedRunner(tokens_script(end))
            driver = EngineDriver(runner, overlap=overlap, eos_token_ids=(EOS, END))
            assert run_one(driver, GREEDY).token_ids == [end]
            runner = ScriptedRunner(tokens_script(end))
            driver = EngineDriver(runner, overlap=overlap, eos_token_ids=(EOS, END))
            choice = run_one(driver, ignoring)
            assert (len(choice.token_ids), choice.finish_reason) == (20, "length")

    def test_stop_token_of_the_user_holds_under_ignore_eos_too(self, overlap: bool) -> None:
        runner = ScriptedRunner(tokens_script(token("HI"), EOS))
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[EOS])
        choice = run_one(EngineDriver(runner, overlap=overlap), params)
        assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ([token("HI"), EOS], "stop", EOS)

    def test_ordinary_stop_token_takes_away_its_own_text_and_no_more(self, overlap: bool) -> None:
        runner = ScriptedRunner(tokens_script(token("HI"), token(" hello"), token("J")))
        params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[token("J")])
        assert run_one(EngineDriver(runner, overlap=overlap), params).text == "HI hello"

    def test_ordinary_stop_token_is_shown_on_demand(self, overlap: bool) -> None:
        runner = ScriptedRunner(tokens_script(token("HI"), token("J")))
        params = SamplingParams(
            temperature=0, max_tokens=8, stop_token_ids=[token("J")], include_stop_str_in_output=True
        )
        choice = run_one(EngineDriver(runner, overlap=overlap), params)
        assert (choice.text, choice.finish_reason) == ("HIJ", "stop")

    def test_stop_string_that_names_a_special_token_works_through_its_id(self, overlap: bool) -> None:
        runner = ScriptedRunner(tokens_script(token("HI"), END, token("J")))
        params = SamplingParams(temperature=0, max_tokens=8, stop=["<end>"])
        choice = run_one(EngineDriver(runner, overlap=overlap), params)
        assert (choice.text, choice.finish_reason, choice.token_ids) == ("HI", "stop", [token("HI"), END])

    def test_min_tokens_over_the_default_of_completions_is_refused(self) -> None:
        with pytest.raises(InvalidParameterError, match="min_tokens=17"):
            EngineDriver().add("r", "abc", SamplingParams(min_tokens=17))


class TestStopStrings:
    """B40: over tokens, streaming as not streaming."""

    def stop_run(self, tokens: list[int], overlap: bool, max_tokens: int = 12, **options: object):
        runner = ScriptedRunner(tokens_script(*tokens))
        params = SamplingParams(temperature=0, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
        driver = EngineDriver(runner, overlap=overlap)
        return run_one(driver, params), driver

    def test_nothing_of_a_stop_string_is_sent(self, overlap: bool) -> None:
        tokens = [token("DEF"), token("G"), token("HI"), token("J"), token("X")]
        choice, driver = self.stop_run(tokens, overlap, stop=["DEFGHIJ"])
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", "DEFGHIJ")
        assert choice.token_ids == tokens[:4]
        assert [event.text for event in driver.events["r"]] == ["", "", "", ""]

    def test_a_false_alarm_is_released_in_full(self, overlap: bool) -> None:
        choice, driver = self.stop_run([token("DEF"), token("X"), EOS], overlap, stop=["DEFGHIJ"])
        assert (choice.text, choice.finish_reason) == ("DEFX", "stop")
        assert [event.text for event in driver.events["r"]] == ["", "DEFX", ""]

    def test_text_held_back_comes_out_at_the_end(self, overlap: bool) -> None:
        choice, driver = self.stop_run([token("DEF"), token("G")], overlap, max_tokens=2, stop=["DEFGHIJ"])
        assert (choice.text, choice.finish_reason) == ("DEFG", "length")
        assert driver.events["r"][-1].text == "DEFG"

    def test_the_earliest_match_cuts_inside_a_token(self, overlap: bool) -> None:
        choice, _ = self.stop_run([token("X"), token("DEF"), token("G")], overlap, stop=["G", "EF"])
        assert (choice.text, choice.token_ids) == ("XD", [token("X"), token("DEF")])

    def test_overlapping_start(self, overlap: bool) -> None:
        choice, _ = self.stop_run([token("aa"), token("aa"), token("b"), token("X")], overlap, stop=["aab"])
        assert (choice.text, choice.stop_reason) == ("aa", "aab")

    def test_stop_string_is_shown_on_demand(self, overlap: bool) -> None:
        tokens = [token("X"), token("DEF"), token("G")]
        choice, _ = self.stop_run(tokens, overlap, stop=["EF"], include_stop_str_in_output=True)
        assert choice.text == "XDEF"

    def test_a_stop_string_within_min_tokens_does_not_count(self, overlap: bool) -> None:
        tokens = [*letters("ab\ncdefg\nxyz")]
        choice, _ = self.stop_run(tokens, overlap, stop=["\n"], min_tokens=5)
        assert (choice.text, len(choice.token_ids), choice.finish_reason) == ("ab\ncdefg", 9, "stop")

    def test_min_tokens_equal_to_max_tokens_runs_to_the_end(self, overlap: bool) -> None:
        tokens = [*letters("a\nb\n")]
        choice, _ = self.stop_run(tokens, overlap, stop=["\n"], min_tokens=12, max_tokens=12)
        assert (len(choice.token_ids), choice.finish_reason) == (12, "length")

    def test_a_stop_string_in_the_last_token_says_stop(self, overlap: bool) -> None:
        choice, _ = self.stop_run([token("X"), token("G")], overlap, max_tokens=2, stop=["G"])
        assert (choice.text, choice.finish_reason) == ("X", "stop")

    def test_tokens_after_the_match_are_neither_delivered_nor_counted(self, overlap: bool) -> None:
        _, driver = self.stop_run([token("X"), token("G"), token("J")], overlap, stop=["G"])
        assert [event.token_id for event in driver.events["r"]] == [token("X"), token("G")]
        assert driver.engine.stats().counters.finished == 1


class TestLogprobs:
    """B49, B51: one entry per token."""

    @pytest.mark.parametrize("count", [0, 1, 5, 20])
    def test_entries_are_the_top_k_then_the_token_if_it_is_not_among_them(self, count: int, overlap: bool) -> None:
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=count)
        driver = EngineDriver(overlap=overlap)
        choice = run_one(driver, params)
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids) == 6
        total = 0.0
        for token_id, entry, event in zip(choice.token_ids, choice.logprobs, driver.events["r"], strict=True):
            in_top = token_id % 2 == 0 and count > 0
            assert len(entry) == count + (not in_top)
            assert [e.rank for e in list(entry.values())[:count]][:1] == [1] * min(count, 1)
            assert event.logprob == entry[token_id].logprob
            assert event.logprobs is not None
            assert len(event.logprobs.top_ids) == count
            total += entry[token_id].logprob
        assert choice.cumulative_logprob == pytest.approx(total)
        assert choice.logprobs[0][choice.token_ids[0]].decoded_token == choice.text[0]

    def test_none_were_asked_for_none_come(self, overlap: bool) -> None:
        driver = EngineDriver(overlap=overlap)
        choice = run_one(driver, GREEDY)
        assert choice.logprobs is None
        assert choice.cumulative_logprob is None
        assert all(event.logprob is None for event in driver.events["r"])

    def test_a_part_of_a_character_has_an_entry_too(self, overlap: bool) -> None:
        tokens = [*letters("\u00e9"), EOS]
        assert len(tokens) == 3
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=1)
        choice = run_one(EngineDriver(ScriptedRunner(tokens_script(*tokens)), overlap=overlap), params)
        assert choice.text == "\u00e9"
        assert choice.logprobs is not None
        assert len(choice.logprobs) == 3

    @pytest.mark.parametrize("budget", [2, 3, 64])
    @pytest.mark.parametrize("max_tokens", [0, 1])
    def test_prompt_scores_come_once_and_in_order_whatever_the_chunks(
        self, budget: int, max_tokens: int, overlap: bool
    ) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=1)
        driver = EngineDriver(overlap=overlap, max_num_batched_tokens=budget, max_num_seqs=1)
        driver.add("r", "hello", params)
        output = driver.run()["r"]
        finished(driver)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == 5
        for token_id, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            assert token_id in entry
        choice = output.outputs[0]
        assert (len(choice.token_ids), choice.finish_reason) == (max_tokens, "length")

    def test_prompt_scores_are_the_same_the_second_time(self, overlap: bool) -> None:
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
        driver = EngineDriver(overlap=overlap)
        for request_id in ("first", "second"):
            driver.add(request_id, "hello world, this is long", params)
            driver.run()
        finished(driver)
        assert driver.outputs["first"].prompt_logprobs == driver.outputs["second"].prompt_logprobs
        assert len(driver.outputs["second"].prompt_logprobs or ()) == 25

    def test_missing_logprobs_fail_the_request_alone(self, overlap: bool) -> None:
        class Forgetful(ScriptedRunner):
            def collect(self, handle):
                outcome = super().collect(handle)
                outcome.logprobs = None
                return outcome

        driver = EngineDriver(Forgetful(), overlap=overlap)
        driver.add("scored", "abc", SamplingParams(temperature=0, max_tokens=4, logprobs=1))
        driver.add("plain", "abc", GREEDY)
        outputs = driver.run()
        finished(driver)
        assert outputs["scored"].outputs[0].finish_reason == "error"
        assert outputs["plain"].outputs[0].finish_reason == "length"


class TestGroups:
    """B48: n > 1."""

    def test_three_choices_end_each_on_its_own(self, overlap: bool) -> None:
        def script(assignment, index):
            return EOS if index == 2 + assignment.choice else token("HI")

        driver = EngineDriver(ScriptedRunner(script), overlap=overlap)
        driver.add("r", "a" * 20, SamplingParams(n=3, seed=5, max_tokens=4))
        output = driver.run()["r"]
        finished(driver)
        assert [choice.index for choice in output.outputs] == [0, 1, 2]
        assert [choice.finish_reason for choice in output.outputs] == ["stop", "stop", "length"]
        assert [len(choice.token_ids) for choice in output.outputs] == [3, 4, 4]
        assert [choice.text for choice in output.outputs] == ["HIHI", "HIHIHI", "HIHIHIHI"]
        assert driver.runner.prefilled["r"] == 20

    def test_each_choice_equals_the_script_for_it_alone(self, overlap: bool) -> None:
        driver = EngineDriver(overlap=overlap)
        driver.add("r", "abc", SamplingParams(n=3, seed=5, max_tokens=6))
        output = driver.run()["r"]
        finished(driver)
        texts = [choice.text for choice in output.outputs]
        assert len(set(texts)) == 3
        for choice, text in enumerate(texts):
            base = sum(letters("abc")) * 7 + 5 * 31 + choice * 17
            assert text == "".join(chr(ord("a") + (base + i * i + 3 * i) % 26) for i in range(6))

    def test_a_stop_string_ends_one_choice_only(self, overlap: bool) -> None:
        def script(assignment, index):
            return token("G") if (assignment.choice, index) == (1, 1) else token("X")

        driver = EngineDriver(ScriptedRunner(script), overlap=overlap)
        driver.add("r", "abc", SamplingParams(n=3, seed=0, max_tokens=5, stop=["G"]))
        output = driver.run()["r"]
        finished(driver)
        assert [choice.text for choice in output.outputs] == ["XXXXX", "X", "XXXXX"]
        assert [choice.finish_reason for choice in output.outputs] == ["length", "stop", "length"]

    @pytest.mark.parametrize("steps", [0, 1, 3])
    def test_cancel_ends_every_choice(self, steps: int, overlap: bool) -> None:
        driver = EngineDriver(overlap=overlap)
        driver.add("r", "a" * 20, SamplingParams(n=3, seed=0, max_tokens=50))
        for _ in range(steps):
            driver.step()
        assert driver.cancel("r")
        output = driver.outputs["r"]
        assert [choice.finish_reason for choice in output.outputs] == ["cancelled"] * 3
        driver.run()
        finished(driver)

    def test_cancel_reaches_the_others_after_the_first_choice_has_ended(self, overlap: bool) -> None:
        def script(assignment, index):
            return EOS if assignment.choice == 0 and index == 1 else token("HI")

        driver = EngineDriver(ScriptedRunner(script), overlap=overlap)
        driver.add("r", "abc", SamplingParams(n=3, seed=0, max_tokens=50))
        for _ in range(8):
            driver.step()
        assert driver.cancel("r")
        reasons = [choice.finish_reason for choice in driver.outputs["r"].outputs]
        assert reasons == ["stop", "cancelled", "cancelled"]
        driver.run()
        finished(driver)

    def test_broken_output_of_one_choice_ends_the_whole_request_and_frees_it(self, overlap: bool) -> None:
        def script(assignment, index):
            return EOS if assignment.choice == 0 and index == 1 else token("HI")

        class Broken:
            def push(self, token_id):
                raise ValueError("no text")

            def flush(self):
                return ""

        driver = EngineDriver(ScriptedRunner(script), overlap=overlap)
        driver.add("r", "abc", SamplingParams(n=3, seed=0, max_tokens=50))
        for _ in range(6):
            driver.step()
        tracked = driver.engine.outputs.get("r")
        assert tracked is not None
        tracked.choices[2].text = Broken()
        output = driver.run()["r"]
        assert [choice.finish_reason for choice in output.outputs] == ["stop", "error", "error"]
        finished(driver)


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
    assert driver.events == {}
    driver.step()
    assert driver.engine.stats().plans_in_flight == 1
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
