"""Text and stops over HTTP: the stream says what the whole answer says, and nothing that a stop takes back."""

from __future__ import annotations

from typing import Any

import pytest
from engine_fakes import END, EOS, TOKENIZER, ScriptedRunner, letters, token, tokens_script
from server_fakes import RunningServer, events_of, serving

from tiny_tokenizers import sentencepiece_tokenizer

COMPLETIONS = "/v1/completions"


def both_ways(server: RunningServer, **fields: Any) -> tuple[str, str, int, list[str]]:
    """Text, finish reason and number of tokens, the same streamed and whole, and the stream's pieces."""
    fields = {"prompt": "p", "temperature": 0, "max_tokens": 20, **fields}
    whole = server.http.post(COMPLETIONS, json=fields).json()
    events = events_of(server, COMPLETIONS, **fields, stream=True, stream_options={"include_usage": True})
    choices = [event["choices"][0] for event in events[:-1]]
    pieces = [choice["text"] for choice in choices if choice["text"]]
    text, reason = whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]
    tokens = whole["usage"]["completion_tokens"]
    assert "".join(pieces) == text
    assert (choices[-1]["finish_reason"], events[-1]["usage"]["completion_tokens"]) == (reason, tokens)
    return text, reason, tokens, pieces


@pytest.mark.parametrize(
    ("script", "stop", "expected"),
    [
        (("DEF", "G", "HI", "J"), "DEFGHIJ", ("", "stop", 4)),
        (("X", "DEF", "X", "G"), "DEFG", ("XDEFXG", "stop", 5)),  # a false alarm, then the end
        (("DEF", "G", "HI"), ["EFGH", "FG"], ("DE", "stop", 2)),  # the earliest match, inside tokens
        (("aa", "aa", "b"), "aab", ("aa", "stop", 3)),
    ],
    ids=str,
)
def test_stop_strings_over_tokens(script, stop, expected) -> None:
    with serving(ScriptedRunner(tokens_script(*map(token, script), EOS))) as server:
        text, reason, tokens, pieces = both_ways(server, stop=stop)
        assert (text, reason, tokens) == expected
        if text == "":
            assert pieces == [], "no part of the stop string went out"


def test_stop_ids_take_no_text_away() -> None:
    script = tokens_script(token(" hello"), token("X"), token(" world"), END)
    with serving(ScriptedRunner(script)) as server:
        assert both_ways(server, stop_token_ids=[token(" world")])[:3] == (" helloX", "stop", 3)
        assert both_ways(server, stop_token_ids=[END])[:3] == (" helloX world", "stop", 4)
        assert both_ways(server, stop=["<end>"])[:3] == (" helloX world", "stop", 4), (
            "a special token's text stops by its id"
        )
        included = both_ways(server, stop_token_ids=[token(" world")], include_stop_str_in_output=True)
        assert included[:3] == (" helloX world", "stop", 3)


def test_several_eos_ids_ignore_eos_and_min_tokens() -> None:
    with serving(ScriptedRunner(tokens_script(END)), eos_token_ids=(EOS, END)) as server:
        assert both_ways(server)[1:3] == ("stop", 1)
        assert both_ways(server, ignore_eos=True)[1:3] == ("length", 20)
        assert both_ways(server, ignore_eos=True, stop_token_ids=[END])[1:3] == ("stop", 1), "the user's own ids hold"
    line = [letters(c)[0] for c in "ab\ncdefgh\nij"]
    with serving(ScriptedRunner(tokens_script(*line))) as server:
        assert both_ways(server, stop="\n")[:3] == ("ab", "stop", 3)
        assert both_ways(server, stop="\n", min_tokens=5)[:3] == ("ab\ncdefgh", "stop", 10)
        assert both_ways(server, stop="\n", min_tokens=20)[1:3] == ("length", 20)


@pytest.mark.parametrize("text", ["\U0001f469\U0001f3fd\u200d\U0001f33e!", "\ud55c\uae00" * 10, "a\ufffdb"], ids=ascii)
def test_no_piece_ends_inside_a_character(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    with serving(ScriptedRunner(tokens_script(*ids, EOS))) as server:
        assert both_ways(server, max_tokens=200)[0] == text
        cut, reason, _, pieces = both_ways(server, max_tokens=2)
        assert reason == "length"
        assert cut == TOKENIZER.decode(ids[:2])
        assert all("\ufffd" not in piece for piece in pieces[:-1])


@pytest.mark.parametrize("text", ["the quick brown fox", "    indented code", " and more"], ids=repr)
def test_spaces_of_sentencepiece_stay(text: str) -> None:
    tokenizer = sentencepiece_tokenizer()
    before = tokenizer.encode("the dog", add_special_tokens=False)
    full = tokenizer.encode(f"the dog {text}", add_special_tokens=False)
    after = full[len(before) :]
    assert full[: len(before)] == before
    with serving(ScriptedRunner(tokens_script(*after, EOS)), tokenizer=tokenizer) as server:
        got = both_ways(server, prompt=before, max_tokens=len(after))[0]
        assert got == tokenizer.decode(full)[len(tokenizer.decode(before)) :] == f" {text}"
