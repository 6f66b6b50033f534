"""Stop strings against a reference that looks at the whole text, character by character (cases B40, B42, B43)."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.core.sampling_params import SamplingParams
from minillm.engine.stop_checker import StopChecker, TextStream, special_stop_ids
from minillm.models.tokenizer import Tokenizer
from tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()


def run(
    deltas: list[str], stops: list[str], include: bool = False, min_tokens: int = 0
) -> tuple[list[str], int | None, str | None]:
    """(texts given out, index of the ending token, stop string)."""
    checker = StopChecker(stops, include, min_tokens)
    out = []
    for index, delta in enumerate(deltas):
        result = checker.add(delta, index)
        out.append(result.text)
        if result.stop_index is not None:
            assert result.stop_index == index
            return out, index, result.stop
    return [*out, checker.finish()], None, None


def reference(
    deltas: list[str], stops: list[str], include: bool, min_tokens: int
) -> tuple[str, int | None, str | None]:
    """The rule, read literally: go through the text, stop at the first character that completes a stop string."""
    token_of = [index for index, delta in enumerate(deltas) for _ in delta]
    text = "".join(deltas)
    for end in range(1, len(text) + 1):
        if token_of[end - 1] < min_tokens:
            continue
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], token_of[end - 1], stop
    return text, None, None


DELTAS = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@given(DELTAS, STOPS, st.booleans(), st.integers(0, 5))
@settings(max_examples=1500, deadline=None)
def test_equals_the_reference_for_any_split(
    deltas: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    """Two letters only, so that overlaps and false alarms are everywhere."""
    out, index, stop = run(deltas, stops, include, min_tokens)
    assert ("".join(out), index, stop) == reference(deltas, stops, include, min_tokens)


@given(DELTAS, STOPS, st.integers(0, 5))
@settings(max_examples=800, deadline=None)
def test_holds_back_exactly_the_longest_suffix_that_can_become_a_stop_string(
    deltas: list[str], stops: list[str], min_tokens: int
) -> None:
    checker = StopChecker(stops, min_tokens=min_tokens)
    seen = out = ""
    for index, delta in enumerate(deltas):
        result = checker.add(delta, index)
        if result.stop_index is not None:
            return
        seen, out = seen + delta, out + result.text
        suffixes = (seen[start:] for start in range(len(seen) + 1))
        held = next(suffix for suffix in suffixes if any(stop.startswith(suffix) and stop != suffix for stop in stops))
        assert seen == out + held


@given(st.text("abc\n", max_size=30), STOPS, st.data())
@settings(max_examples=400, deadline=None)
def test_text_does_not_depend_on_how_it_is_cut_into_tokens(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    split = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    streamed, _, stop = run(split, stops)
    at_once, _, stop_at_once = run([text], stops)
    assert ("".join(streamed), stop) == ("".join(at_once), stop_at_once)


def test_front_of_a_stop_string_is_never_sent() -> None:
    out, index, stop = run(["DEF", "G", "HI", "J"], ["DEFGHIJ"])
    assert (out, index, stop) == (["", "", "", ""], 3, "DEFGHIJ")


def test_false_alarm_is_released_in_full() -> None:
    assert run(["DEF", "X"], ["DEFGHIJ"])[0] == ["", "DEFX", ""]
    assert run(["DEF"], ["DEFGHIJ"])[0] == ["", "DEF"]
    assert run(["DEFDE", "F", "G"], ["DEFG"])[0] == ["DEF", "", ""]


@pytest.mark.parametrize(
    ("deltas", "stops", "text", "index", "stop"),
    [
        (["ABCD"], ["ABC", "AB"], "", 0, "AB"),
        (["A", "B", "C"], ["ABC", "AB"], "", 1, "AB"),
        (["xxE", "NDyy"], ["END"], "xx", 1, "END"),
        (["aaab"], ["aab"], "a", 0, "aab"),
        (["a", "a", "a", "b"], ["aab"], "a", 3, "aab"),
        (["one\n", "\ntwo\n\nthree"], ["\n\n"], "one", 1, "\n\n"),
        (["late early"], ["early", "late"], "", 0, "late"),
        (["x한", "글y"], ["한글"], "x", 1, "한글"),
    ],
)
def test_cut_is_at_the_first_match(deltas: list[str], stops: list[str], text: str, index: int, stop: str) -> None:
    out, *end = run(deltas, stops)
    assert ["".join(out), *end] == [text, index, stop]


def test_stop_string_can_be_included() -> None:
    assert run(["one E", "ND two"], ["END"], include=True)[0] == ["one ", "END"]


def test_match_within_the_first_min_tokens_does_not_count() -> None:
    """B43: min_tokens=5, the stop string at tokens 3 and 9; then only within the first 200 of 200."""
    tokens = ["t"] * 12
    tokens[2] = tokens[8] = "\n"
    out, index, _ = run(tokens, ["\n"], min_tokens=5)
    assert (index, "".join(out)) == (8, "tt\nttttt")
    out, index, _ = run(["t", "\n", *["t"] * 198], ["\n"], min_tokens=200)
    assert index is None
    assert "".join(out) == "t\n" + "t" * 198


def test_match_that_ends_behind_min_tokens_counts_though_it_began_before() -> None:
    assert run(["E", "N", "D"], ["END"], min_tokens=2)[1] == 2
    assert run(["E", "N", "D"], ["END"], min_tokens=3)[1] is None


def test_ignored_match_is_not_found_again_when_more_text_comes() -> None:
    out, index, _ = run(["ab", "x", "ab"], ["ab", "abc"], min_tokens=1)
    assert (index, "".join(out)) == (2, "abx")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_stop_string_naming_a_special_token_is_found_by_its_id(tokenizer: Tokenizer) -> None:
    eos, eos_text = tokenizer.eos_token_id, tokenizer.eos_token
    assert eos is not None
    assert eos_text is not None
    assert special_stop_ids(tokenizer, ["\n", eos_text, "nothing", "<tool_call>"]) == {eos: eos_text}
    ids = [*tokenizer.encode("one two", add_special_tokens=False), eos]
    skipping = TextStream(tokenizer, SamplingParams(stop=[eos_text]), [])
    assert [skipping.push(i)[1] for i in ids] == [None] * len(ids)
    showing = TextStream(tokenizer, SamplingParams(stop=[eos_text], skip_special_tokens=False), [])
    assert [showing.push(i)[1] for i in ids] == [None] * (len(ids) - 1) + [eos_text]


def stream(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> tuple[str, int | None, str | None]:
    text_stream = TextStream(tokenizer, params, [])
    out = ""
    for index, token_id in enumerate(ids):
        text, stop = text_stream.push(token_id)
        out += text
        if stop is not None:
            return out, index, stop
    return out + text_stream.flush(), None, None


@given(
    st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 5), max_size=40),
    st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_text_of_a_stream_is_the_decoded_output_up_to_the_stop(
    ids: list[int], tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Stop strings are taken from the output itself: they begin and end inside tokens."""
    whole = tokenizer.decode(ids)
    start = data.draw(st.integers(0, max(0, len(whole) - 1)))
    stop = whole[start : start + data.draw(st.integers(1, 6))] or "zzz"
    text, index, found = stream(tokenizer, ids, SamplingParams(stop=[stop]))
    if found is None:
        assert text == whole
        # Only the U+FFFD of an unfinished last character is not looked at.
        assert stop not in whole or whole.endswith("\ufffd")
    else:
        assert index is not None
        assert text == whole[: whole.find(stop)]
        assert stop in tokenizer.decode(ids[: index + 1])


def test_text_without_stop_strings_passes_unchanged() -> None:
    ids = BYTE_LEVEL.encode("plain text, 한글 🚀")
    assert stream(BYTE_LEVEL, ids, SamplingParams()) == ("plain text, 한글 🚀", None, None)
    euro = BYTE_LEVEL.encode("€", add_special_tokens=False)
    assert stream(BYTE_LEVEL, [*ids, *euro[:-1]], SamplingParams()) == ("plain text, 한글 🚀\ufffd", None, None)


def test_held_text_comes_before_an_unfinished_character_at_the_end() -> None:
    euro = BYTE_LEVEL.encode("€", add_special_tokens=False)
    ids = [*BYTE_LEVEL.encode("one EN", add_special_tokens=False), *euro[:-1]]
    assert stream(BYTE_LEVEL, ids, SamplingParams(stop=["END"])) == ("one EN\ufffd", None, None)


def test_cost_of_a_token_is_small() -> None:
    stops = ["</s>", "\n\n\n", "User:", "a" * 40]
    deltas = ["hello", " world", "\n", "a", " aaaa", "."] * 2000
    times = []
    for _ in range(5):
        checker = StopChecker(stops)
        start = time.perf_counter()
        for index, delta in enumerate(deltas):
            checker.add(delta, index)
        times.append((time.perf_counter() - start) / len(deltas))
    assert min(times) < 10e-6
