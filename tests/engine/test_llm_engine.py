"""The step loop, driven step by step: text, stops, logprobs, groups, overlap."""

from __future__ import annotations

import pytest
from engine_fakes import (
    END,
    EOS,
    GREEDY,
    EngineDriver,
    ScriptedRunner,
    finished,
    letters,
    run_one,
    token,
    tokens_script,
)

from minillm.core.errors import InvalidParameterError
from minillm.core.sampling_params import SamplingParams


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
