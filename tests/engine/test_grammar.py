"""Compiling and following grammars: what the masks allow, which requests are refused, and what hostile ones cost."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from engine_fakes import TOKENIZER, toy_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm.core.errors import InvalidParameterError, RequestError, StructuredOutputsUnavailableError
from minillm.core.structured_outputs import StructuredOutputs
from minillm.engine import grammar as grammar_module
from minillm.engine.grammar import GrammarCompiler, GrammarError, is_plain, mask_words
from minillm.models.tokenizer import Tokenizer
from tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

pytest.importorskip("llguidance")

PADDING = 37
"""Ids that the logits have and the tokenizer does not."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["x", "\u00e9\U0001f600", '"']},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
TOKENIZERS = {"toy": TOKENIZER, "byte-level": byte_level_tokenizer(), "sentencepiece": sentencepiece_tokenizer()}


@pytest.fixture(scope="module", params=TOKENIZERS)
def compiler(request: pytest.FixtureRequest) -> GrammarCompiler:
    return compiler_for(TOKENIZERS[request.param])


@pytest.fixture(scope="module")
def toy() -> GrammarCompiler:
    return compiler_for(TOKENIZER)


def compiler_for(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(
        tokenizer, vocab_size=tokenizer.vocab_size + PADDING, eos_token_ids=tokenizer.eos_token_ids or {2}
    )


def allowed(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def generate(
    compiler: GrammarCompiler, spec: StructuredOutputs, seed: int, limit: int = 400, may_end: bool = True
) -> tuple[str, str]:
    """Text of tokens drawn at random from the masks, and why it ended: complete, eos or length."""
    tokenizer, draw, ids = compiler._tokenizer, random.Random(seed), []
    matcher = compiler.compile(spec).matcher(ids, may_end=may_end)
    row = np.zeros(mask_words(compiler.vocab_size), dtype=np.int32)

    def text() -> str:
        return b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", "replace")

    while len(ids) < limit:
        if not matcher.fill(row):
            return text(), "complete"
        choices = allowed(row)
        assert all(tokenizer.has_token(i) for i in choices)
        assert not (set(choices) - set(compiler.eos_token_ids)) & tokenizer.control_ids
        token = draw.choice(choices)
        if token in compiler.eos_token_ids:
            assert may_end or not ids
            return text(), "eos"
        ids.append(token)
        if matcher.advance():
            return text(), "complete"
    return text(), "length"


def test_random_tokens_under_a_schema_are_that_schemas_json(compiler: GrammarCompiler) -> None:
    for seed in range(12):
        text, why = generate(compiler, StructuredOutputs(json=PERSON), seed)
        assert why == "complete"
        value = json.loads(text)
        assert list(value) == ["name", "age", "kind"]
        assert isinstance(value["name"], str) and len(value["name"]) <= 8
        assert 0 <= value["age"] <= 150
        assert value["kind"] in PERSON["properties"]["kind"]["enum"]


def test_choices_come_out_as_they_are(compiler: GrammarCompiler) -> None:
    choices = ["yes", "no", " maybe \u00e9\U0001f600", 'a"b\\c\n\x07', "yes and no", "<eos>"]
    seen = {generate(compiler, StructuredOutputs(choice=choices), seed)[0] for seed in range(60)}
    assert seen <= set(choices) and len(seen) > 3


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (StructuredOutputs(regex=r"[ab]{2,4}(x|yz)"), r"[ab]{2,4}(x|yz)"),
        (StructuredOutputs(grammar='start: "a" start "b" | "c"'), r"a*cb*"),
        (StructuredOutputs(grammar='root ::= "(" root ")" | [0-9]'), r"\(*[0-9]\)*"),
        (StructuredOutputs(json={"type": "integer"}), r"-?(0|[1-9][0-9]*)"),
        (StructuredOutputs(json=True, disable_any_whitespace=True), r"\S.*"),
    ],
)
def test_outputs_match_their_expression(toy: GrammarCompiler, spec: StructuredOutputs, pattern: str) -> None:
    import re

    for seed in range(20):
        text, why = generate(toy, spec, seed)
        if why != "length":
            assert re.fullmatch(pattern, text, re.DOTALL), text


def test_whitespace_is_bounded_unless_told_otherwise(toy: GrammarCompiler) -> None:
    schema = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 3}
    texts = [generate(toy, StructuredOutputs(json=schema), seed)[0] for seed in range(20)]
    assert any(" " in text for text in texts)
    assert all(len(line) < 40 for text in texts for line in text.split("\n"))
    for seed in range(10):
        text, _ = generate(toy, StructuredOutputs(json=schema, disable_any_whitespace=True), seed)
        assert not any(character.isspace() for character in text)
        text, _ = generate(toy, StructuredOutputs(json=schema, whitespace_pattern=r"\t"), seed)
        assert set(text) <= set("[]0123456789,\t")


def test_an_eos_is_offered_only_where_the_output_is_complete(toy: GrammarCompiler) -> None:
    ids: list[int] = []
    matcher = toy.compile(StructuredOutputs(regex="ab|abc")).matcher(ids)
    row = np.zeros(mask_words(toy.vocab_size), dtype=np.int32)
    offered = []
    for token in TOKENIZER.encode("ab"):
        assert matcher.fill(row)
        offered.append(bool(set(allowed(row)) & TOKENIZER.eos_token_ids))
        ids.append(token)
        assert not matcher.advance()
    assert matcher.fill(row) and offered == [False, False]
    assert set(allowed(row)) == {*TOKENIZER.eos_token_ids, *TOKENIZER.encode("c")}
    ids += TOKENIZER.encode("c")
    assert matcher.advance()
    assert not matcher.fill(row)


def test_without_eos_the_output_goes_on_as_long_as_it_can(toy: GrammarCompiler) -> None:
    assert generate(toy, StructuredOutputs(regex="a{1,30}"), 1, may_end=False) == ("a" * 30, "complete")
    assert generate(toy, StructuredOutputs(regex="a?"), 1, may_end=False) == ("a", "complete")


def test_the_empty_output_is_ended_by_an_eos(toy: GrammarCompiler) -> None:
    spec = StructuredOutputs(grammar='start: ""')
    assert generate(toy, spec, 1) == generate(toy, spec, 1, may_end=False) == ("", "eos")
    assert toy.compile(spec).only_empty
    assert not toy.compile(StructuredOutputs(regex="a?")).only_empty


def test_a_token_that_does_not_fit_breaks_the_matcher(toy: GrammarCompiler) -> None:
    ids: list[int] = []
    matcher = toy.compile(StructuredOutputs(regex="ab")).matcher(ids)
    ids += TOKENIZER.encode("b")
    with pytest.raises(GrammarError):
        matcher.advance()


def test_full_lexer_tables_are_replaced_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are shared by all requests of a grammar: without this a popular one would fail for good some day."""
    spec = StructuredOutputs(regex=r"([0-9a-f]{32}|[a-z ]+){1,50}(?:x[a-z]*y){30}")
    wanted = [generate(compiler_for(TOKENIZER), spec, seed, 60) for seed in range(3)]
    monkeypatch.setitem(grammar_module.LIMITS, "max_lexer_states", 150)
    compiler = compiler_for(TOKENIZER)
    for _ in range(5):
        assert [generate(compiler, spec, seed, 60) for seed in range(3)] == wanted
    assert compiler.compile(spec).tables > 0


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (StructuredOutputs(regex="(a"), "unclosed group"),
        (StructuredOutputs(regex="(?=a)b"), "look-around"),
        (StructuredOutputs(grammar="start: missing"), "missing"),
        (StructuredOutputs(grammar="nonsense" * 50), "Error"),
        (StructuredOutputs(grammar="start: " + "(" * 5000), "nested"),
        (StructuredOutputs(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (StructuredOutputs(json={"type": "no such type"}), "no such type"),
        (StructuredOutputs(json={"$ref": "http://example.com/schema"}), "example.com"),
        (StructuredOutputs(json={"$ref": "#/$defs/missing"}), "missing"),
        (StructuredOutputs(json={"enum": []}), "nsatisfiable"),
        (StructuredOutputs(json={"type": "string", "minLength": 5, "maxLength": 2}), "minLength"),
        (StructuredOutputs(json={"properties": 5}), "properties"),
        (StructuredOutputs(json={"$ref": "#"}), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_does_not_compile_is_refused_with_the_reason(
    toy: GrammarCompiler, spec: StructuredOutputs, message: str
) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidParameterError) as caught:
            toy.compile(spec)
        assert caught.value.field == f"structured_outputs.{spec.kind}"
        assert message in str(caught.value)
        assert len(str(caught.value)) < 600


def test_unsupported_keywords_can_be_ignored(toy: GrammarCompiler) -> None:
    schema = {"type": "array", "uniqueItems": True, "maxItems": 2, "items": {"type": "string", "format": "zip-code"}}
    text, _ = generate(toy, StructuredOutputs(json={**schema, "maxItems": 0}, ignore_unsupported=True), 1)
    assert json.loads(text) == []


@pytest.mark.parametrize(
    "tokenizer", [toy_tokenizer(eos_token_id=None), Tokenizer(Backend(models.WordLevel({"a": 0})))]
)
def test_a_tokenizer_that_cannot_be_followed_is_refused(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    with pytest.raises(StructuredOutputsUnavailableError):
        compiler.compile(StructuredOutputs(choice=["a"]))


def test_without_the_library_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["llguidance"] = None
from engine_fakes import TOKENIZER
from minillm.core.errors import StructuredOutputsUnavailableError
from minillm.core.structured_outputs import StructuredOutputs
from minillm.engine.grammar import GrammarCompiler
try:
    GrammarCompiler(TOKENIZER, vocab_size=300, eos_token_ids={2}).compile(StructuredOutputs(choice=["a"]))
except StructuredOutputsUnavailableError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "minillm-runtime[structured]" in done.stdout, done.stderr


def test_the_library_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, minillm.engine.inputs; print('llguidance' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"], capture_output=True, timeout=60
    )
    assert done.stdout.strip() == b"False"


# -- hostile requests ------------------------------------------------------------------------------------


def multiplied(levels: int, keyword: str) -> dict[str, Any]:
    definitions = {
        f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 4} if i < levels else {"type": "string", "pattern": "a+"}
        for i in range(levels + 1)
    }
    return {"$ref": "#/$defs/d0", "$defs": definitions}


HOSTILE = {
    "nested allOf": StructuredOutputs(json=multiplied(12, "allOf")),
    "a long forced text": StructuredOutputs(regex="a{100000}"),
    "a pattern without end": StructuredOutputs(json={"type": "string", "pattern": "a{100000000}"}),
    "long whitespace": StructuredOutputs(json_object=True, whitespace_pattern="((a|b){3}){90}"),
    "wide from the first byte": StructuredOutputs(regex=".*" * 5000),
    "nested anyOf": StructuredOutputs(json=multiplied(12, "anyOf")),
    "nested oneOf": StructuredOutputs(json=multiplied(6, "oneOf")),
    "many properties": StructuredOutputs(json={"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}),
    "many patterns": StructuredOutputs(
        json={"type": "object", "patternProperties": {f"^(a|b)*a(a|b){{{i}}}$": {"type": "string"} for i in range(30)}}
    ),
    "product of choices": StructuredOutputs(
        json={"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(4)]} for i in range(10)]}
    ),
    "deep": StructuredOutputs(json=json.dumps({"$ref": "#/a", "a": {"items": {"items": {"$ref": "#/a"}}}})),
    "long string": StructuredOutputs(json={"type": "string", "minLength": 1_000_000}),
    "long array": StructuredOutputs(json={"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}}),
    "repetition": StructuredOutputs(regex="((a{0,99}){0,99}){0,9}"),
    "large repetition": StructuredOutputs(regex="a{1,40000}b{1,40000}"),
    "exponential": StructuredOutputs(regex="(a|b)*a(a|b){200}c"),
    "optional": StructuredOutputs(regex="(a?){500}a{500}"),
    "unicode": StructuredOutputs(regex=r"(?i)[\w\s]{1,5000}\p{L}{1000}"),
    "alternatives": StructuredOutputs(regex="|".join(f"w{i}" for i in range(20_000))),
    "groups": StructuredOutputs(regex="(" * 10_000 + ")" * 10_000),
    "ambiguous": StructuredOutputs(grammar='start: a\na: a a | a a a | "x" | ""'),
    "left recursion": StructuredOutputs(grammar='start: start start | "c" |'),
    "odd GBNF": StructuredOutputs(grammar='root ::= ("a"{1,1000}){1,1000}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_requests_cost_a_bounded_amount(toy: GrammarCompiler, name: str) -> None:
    """Refused or followed: neither may take more than some seconds of CPU time, nor memory that is noticed."""
    before, begun = resident_bytes(), time.process_time()
    with contextlib.suppress(RequestError, GrammarError):
        generate(toy, HOSTILE[name], 1, limit=40)
    assert time.process_time() - begun < 6.0
    assert resident_bytes() - before < 200 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_what_multiplies_is_stopped_in_its_own_process(toy: GrammarCompiler) -> None:
    with pytest.raises(InvalidParameterError, match="CPU time"):
        toy.compile(HOSTILE["nested allOf"])


def test_what_the_library_could_not_follow_is_refused_before_it_is_queued(toy: GrammarCompiler) -> None:
    """Not found out by compiling, nor by the first mask: it is the first property's name that is too much."""
    properties = {f"p{i}": {"type": "string"} for i in range(2400)}
    with pytest.raises(InvalidParameterError, match="items"):
        toy.compile(StructuredOutputs(json={"properties": properties}))


def test_a_check_that_a_busy_machine_did_not_finish_is_not_held_against_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler, spec = compiler_for(TOKENIZER), StructuredOutputs(regex="ab")
    with monkeypatch.context() as patch:
        patch.setattr(grammar_module, "CHECK_TIMEOUT", 0.001)
        with pytest.raises(InvalidParameterError, match="try again"):
            compiler.compile(spec)
    assert generate(compiler, spec, 1) == ("ab", "complete")


def test_the_memory_of_grammars_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_for(TOKENIZER)
    monkeypatch.setattr(grammar_module, "CACHE_ENTRIES", 4)
    first = compiler.compile(StructuredOutputs(choice=["first"]))
    for i in range(3):
        compiler.compile(StructuredOutputs(choice=[f"text {i}"]))
    assert compiler.compile(StructuredOutputs(choice=["first"])) is first  # used again: the newest now
    compiler.compile(StructuredOutputs(choice=["one more"]))
    assert compiler.compile(StructuredOutputs(choice=["first"])) is first
    assert len(compiler._cache) == 4
    monkeypatch.setattr(grammar_module, "CACHE_CHARACTERS", 100)
    compiler.compile(StructuredOutputs(choice=["x" * 60]))
    compiler.compile(StructuredOutputs(choice=["y" * 60]))
    assert len(compiler._cache) == 1


def test_a_mask_that_is_too_dear_fails(toy: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = toy.compile(StructuredOutputs(regex="a{5}")).matcher([])
    monkeypatch.setattr(grammar_module, "MAX_MASK_SECONDS", 0.0)
    with pytest.raises(GrammarError, match="limit"):
        matcher.fill(np.zeros(mask_words(toy.vocab_size), dtype=np.int32))


def test_plain_schemas_are_told_from_others() -> None:
    assert is_plain(PERSON)
    recursive = {"properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}
    assert is_plain({"$ref": "#/$defs/n", "$defs": {"n": recursive}, "title": "N"})
    for other in (
        {"allOf": [PERSON]},
        {"properties": {"a": {"pattern": "a"}}},
        {"$ref": "#", "minLength": 1},
        {"properties": {f"p{i}": {} for i in range(1000)}},
        {"anyOf": [{}] * 100},
        {"properties": 5},
        {"items": [1]},
        {"$defs": []},
    ):
        assert not is_plain(other), other
