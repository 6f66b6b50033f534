"""Structured output through the whole engine: masks reach the right rows, whatever the scheduler does meanwhile."""

from __future__ import annotations

import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fakes import (
    EOS,
    TOKENIZER,
    EngineDriver,
    ScriptedRunner,
    check_events,
    finished,
    idle_state,
    letters,
    make_runtime,
    wait_idle,
)

from minillm import EngineConfig, Runtime, SamplingParams, StructuredOutputs
from minillm.core.errors import EngineDeadError, InvalidParameterError
from minillm.core.plan import RowAssignment
from minillm.core.request import Request
from minillm.engine import grammar as grammar_module
from minillm.engine.factory import build_engine

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "b\u00e4", "c c"]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["id", "tags", "next"],
    "additionalProperties": False,
}


def params(seed: int = 1, **options: Any) -> SamplingParams:
    spec = options.pop("structured_outputs", StructuredOutputs(json=SCHEMA))
    return SamplingParams(**{"max_tokens": 160, "seed": seed, "structured_outputs": spec, **options})


def check_json(text: str) -> dict[str, Any]:
    value = json.loads(text)
    assert list(value) == ["id", "tags", "next"]
    assert 0 <= value["id"] <= 999 and len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "b\u00e4", "c c"}
    assert value["next"] in (None, True, False)
    return value


class MaskedRunner(ScriptedRunner):
    """Rows with a mask draw one of its tokens, by (seed, choice, output index); the others follow the script.

    Like a device, it would sample anything from a row whose mask says so. `order` is what was called, by step.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_masks = 0
        self.order: list[tuple[str, int]] = []

    def forward(self, plan: Any) -> dict[str, Any]:
        self.order.append(("forward", plan.step))
        return super().forward(plan)

    def collect(self, handle: dict[str, Any]) -> Any:
        self.order.append(("collect", handle["plan"].step))
        return super().collect(handle)

    def sample(self, handle: dict[str, Any], masks: Any | None = None) -> None:
        self.order.append(("sample", handle["plan"].step))
        script = self.script
        if masks is not None:
            self.num_masks += 1
            assert masks.dtype == np.int32 and masks.shape == (len(handle["samples"]), -(-TOKENIZER.vocab_size // 32))
            by_request = {
                self.rows[row].assignment.request_id: mask
                for row, mask in zip(handle["samples"], masks, strict=True)
                if not (mask == -1).all()
            }

            def masked(assignment: RowAssignment, index: int) -> int:
                mask = by_request.get(assignment.request_id)
                return script(assignment, index) if mask is None else draw(assignment, index, mask)

            self.script = masked
        try:
            super().sample(handle)
        finally:
            self.script = script


def draw(assignment: RowAssignment, index: int, mask: np.ndarray) -> int:
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    key = f"{assignment.seed} {assignment.choice} {index}".encode()
    return int(allowed[int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % len(allowed)])


def make_driver(**options: Any) -> EngineDriver:
    return EngineDriver(MaskedRunner(), **options)


def solo(request_params: SamplingParams, prompt: str = "abc") -> list[tuple[str, list[int], str]]:
    driver = make_driver()
    driver.add("solo", prompt, request_params)
    return summary(driver.run()["solo"])


def summary(output: Any) -> list[tuple[str, list[int], str]]:
    return [(choice.text, choice.token_ids, choice.finish_reason) for choice in output.outputs]


def test_an_output_is_json_and_ends_where_it_is_complete(overlap: bool) -> None:
    driver = make_driver(overlap=overlap)
    for seed in range(8):
        driver.add(f"r{seed}", f"prompt {seed}", params(seed))
    outputs = driver.run()
    values = []
    for name, output in outputs.items():
        (choice,) = output.outputs
        values.append(check_json(choice.text))
        assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
        assert choice.token_ids[-1] in letters("}"), "it ends with its last token, without an EOS"
        check_events(driver.events[name], output)
    assert len({json.dumps(value) for value in values}) > 4
    assert "its grammar is complete" in driver.engine.explain("r0")
    assert driver.engine.grammars.num_live == 0
    finished(driver)


def test_a_mixed_batch_leaves_the_other_rows_alone(overlap: bool) -> None:
    plain = SamplingParams(max_tokens=60, seed=5)
    driver = make_driver(overlap=overlap)
    driver.add("plain", "hello", plain)
    driver.step()
    driver.step()
    driver.add("json", "abc", params(3))
    driver.add("choice", "abd", params(4, structured_outputs={"choice": ["yes", "yes sir", "no"]}))
    driver.add("greedy", "xyz", SamplingParams(max_tokens=50, temperature=0))
    outputs = driver.run()
    alone = EngineDriver()
    alone.add("plain", "hello", plain)
    alone.add("greedy", "xyz", SamplingParams(max_tokens=50, temperature=0))
    for name, output in alone.run().items():
        assert summary(output) == summary(outputs[name])
    assert summary(outputs["json"]) == solo(params(3))
    assert outputs["choice"].outputs[0].text in ("yes", "yes sir", "no")
    finished(driver)


def test_steps_without_a_grammar_row_get_no_mask_and_keep_their_order() -> None:
    driver = make_driver(overlap=True)
    runner = driver.runner
    driver.add("plain", "hello", SamplingParams(max_tokens=6, temperature=0))
    driver.run()
    assert runner.num_masks == 0
    assert runner.order.index(("sample", 1)) < runner.order.index(("collect", 0))


def test_under_a_grammar_the_next_forward_runs_while_the_last_step_commits() -> None:
    driver = make_driver(overlap=True)
    driver.add("json", "hello", params(2))
    driver.run()
    order, steps = driver.runner.order, driver.engine.num_steps
    assert steps > 10
    for step in range(1, steps - 1):
        at = [order.index((name, n)) for name, n in (("forward", step), ("collect", step - 1), ("sample", step))]
        assert at == sorted(at), "forward n+1, collect n, sample n+1"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_go_on_where_they_were(overlap: bool, mode: str) -> None:
    options = {"num_swap_blocks": 64} if mode == "swap" else {}
    driver = make_driver(overlap=overlap, num_blocks=24, preemption_mode=mode, max_model_len=80, **options)
    for seed in range(6):
        driver.add(f"r{seed}", "abc", params(seed, max_tokens=70))
    outputs = driver.run()
    counters = driver.engine.stats().counters
    assert counters.preemptions_swap + counters.preemptions_recompute > 0
    for seed in range(6):
        assert summary(outputs[f"r{seed}"]) == solo(params(seed, max_tokens=70))
    finished(driver)


def test_each_choice_of_a_group_follows_its_own_path(overlap: bool) -> None:
    driver = make_driver(overlap=overlap)
    driver.add("group", "abc", params(7, n=3))
    output = driver.run()["group"]
    texts = [choice.text for choice in output.outputs]
    for text in texts:
        check_json(text)
    assert len(set(texts)) == 3
    check_events(driver.events["group"], output)
    assert summary(output) == solo(params(7, n=3))
    finished(driver)


def test_chunked_prompts_and_shared_prefixes_change_nothing(overlap: bool) -> None:
    prompt = "a long prompt " * 12
    driver = make_driver(overlap=overlap, max_num_batched_tokens=16)
    for round_ in range(2):
        for seed in range(3):
            driver.add(f"{round_} {seed}", prompt, params(seed, max_tokens=60, n=2))
    outputs = driver.run()
    for round_ in range(2):
        for seed in range(3):
            assert summary(outputs[f"{round_} {seed}"]) == solo(params(seed, max_tokens=60, n=2), prompt)
    finished(driver)


def test_cancelling_and_using_rows_again_leaves_no_trace(overlap: bool) -> None:
    driver = make_driver(overlap=overlap, max_num_seqs=2)
    before = idle_state(driver.engine)
    driver.add("json", "abc", params(1))
    driver.add("other", "abc", params(2))
    for _ in range(5):
        driver.step()
    assert driver.cancel("json")
    driver.add("plain", "hello", SamplingParams(max_tokens=40, temperature=0))
    outputs = driver.run()
    assert outputs["json"].outputs[0].finish_reason == "cancelled"
    assert outputs["plain"].outputs[0].finish_reason == "length"
    assert summary(outputs["other"]) == solo(params(2))
    assert idle_state(driver.engine) == before
    assert driver.engine.grammars.num_live == 0
    # the same ids again, now the other way round
    driver.outputs.clear()
    driver.add("plain", "abc", params(1))
    driver.add("json", "hello", SamplingParams(max_tokens=40, temperature=0))
    outputs = driver.run()
    assert summary(outputs["plain"]) == solo(params(1))
    assert outputs["json"].outputs[0].finish_reason == "length"


def test_length_cuts_an_output_short(overlap: bool) -> None:
    driver = make_driver(overlap=overlap)
    driver.add("r", "abc", params(1, max_tokens=5))
    (choice,) = driver.run()["r"].outputs
    assert choice.finish_reason == "length" and len(choice.token_ids) == 5
    finished(driver)


def test_a_stop_string_and_a_stop_token_end_it_as_ever(overlap: bool) -> None:
    driver = make_driver(overlap=overlap)
    driver.add("string", "abc", params(1, structured_outputs={"regex": "[a-c]{20}xy[a-z]{50}"}, stop=["xy"]))
    driver.add("token", "abc", params(1, structured_outputs={"regex": "[0-9]{8}z9*"}, stop_token_ids=letters("z")))
    outputs = driver.run()
    (choice,) = outputs["string"].outputs
    assert re.fullmatch("[a-c]{20}", choice.text) and choice.stop_reason == "xy"
    (choice,) = outputs["token"].outputs
    assert re.fullmatch("[0-9]{8}", choice.text) and choice.stop_reason == letters("z")[0]
    finished(driver)


def test_eos_ends_an_output_that_could_go_on_and_ignore_eos_does_not(overlap: bool) -> None:
    driver = make_driver(overlap=overlap)
    for seed in range(6):
        driver.add(f"eos {seed}", "abc", params(seed, structured_outputs={"regex": "[ab]{1,40}"}))
    driver.add("on", "abc", params(1, structured_outputs={"regex": "[ab]{1,40}"}, ignore_eos=True))
    outputs = driver.run()
    by_eos = [output.outputs[0] for name, output in outputs.items() if output.outputs[0].token_ids[-1] == EOS]
    assert by_eos and all(choice.finish_reason == "stop" and 1 <= len(choice.text) < 40 for choice in by_eos)
    (choice,) = outputs["on"].outputs
    assert re.fullmatch("[ab]{40}", choice.text) and choice.finish_reason == "stop"
    finished(driver)


def test_a_grammar_that_fails_in_use_fails_its_request_alone(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver(overlap=overlap)
    driver.add("bad", "abc", params(1, n=2))
    driver.add("good", "abc", params(2))
    driver.add("plain", "hello", SamplingParams(max_tokens=30, temperature=0))
    for _ in range(4):
        driver.step()
    follower = driver.engine.grammars._followers["bad"]

    def fail(row: np.ndarray) -> bool:
        raise grammar_module.GrammarError("out of fuel")

    class Broken:
        fill = staticmethod(fail)

        @staticmethod
        def advance() -> bool:
            return False

    follower._matcher = Broken
    outputs = driver.run()
    (first, second) = outputs["bad"].outputs
    assert first.finish_reason == second.finish_reason == "error"
    assert "out of fuel" in str(first.error)
    assert summary(outputs["good"]) == solo(params(2))
    assert outputs["plain"].outputs[0].finish_reason == "length"
    assert driver.engine.failure is None
    finished(driver)


def test_a_token_against_the_mask_fails_the_request_and_not_the_engine(overlap: bool) -> None:
    """A runner that ignores masks: the grammar notices at the commit."""

    class Deaf(ScriptedRunner):
        def sample(self, handle: dict[str, Any], masks: Any | None = None) -> None:
            super().sample(handle)

    driver = EngineDriver(Deaf(), overlap=overlap)
    driver.add("r", "abc", params(1))
    driver.add("plain", "hello", SamplingParams(max_tokens=10, temperature=0))
    outputs = driver.run()
    assert outputs["r"].outputs[0].finish_reason == "error"
    assert "grammar" in str(outputs["r"].outputs[0].error)
    assert outputs["plain"].outputs[0].finish_reason == "length"
    finished(driver)


def test_a_failing_engine_forgets_its_grammars(overlap: bool) -> None:
    driver = make_driver(overlap=overlap)
    driver.runner.raise_in = {"collect": 4}
    driver.add("r", "abc", params(1))
    with pytest.raises(EngineDeadError):
        driver.run()
    assert driver.engine.grammars.num_live == 0


def test_a_bad_grammar_is_refused_before_anything_is_queued() -> None:
    with make_runtime(MaskedRunner()) as runtime:
        with pytest.raises(InvalidParameterError, match=r"structured_outputs\.regex"):
            runtime.submit("abc", params(structured_outputs={"regex": "(a"}))
        with pytest.raises(InvalidParameterError, match="exactly one"):
            runtime.submit("abc", SamplingParams(structured_outputs={}))
        assert runtime.stats().counters.submitted == 0
        request = runtime.prepare("abc", params(2))
        assert summary(runtime.submit(request).result(20)) == solo(params(2))
        own = Request("own", letters("abc"), params(3), seed=3, eos_token_ids=(EOS,))
        assert summary(runtime.submit(own).result(20)) == solo(params(3))
        wait_idle(runtime)


def test_a_request_that_was_prepared_elsewhere_is_compiled_again() -> None:
    with make_runtime(MaskedRunner()) as first, make_runtime(MaskedRunner()) as second:
        request = first.prepare("abc", params(2))
        foreign = request.grammar
        assert summary(second.submit(request).result(20)) == solo(params(2))
        assert request.grammar is not foreign


def test_the_engine_takes_no_request_whose_grammar_was_not_compiled() -> None:
    driver = make_driver()
    with pytest.raises(InvalidParameterError, match="compiled"):
        driver.engine.add_request(Request("r", letters("abc"), params(1)))
    assert not driver.engine.has_work


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_gives_every_request_what_it_gets_alone(seed: int) -> None:
    """Arrivals, groups, priorities and cancels on a pool that is too small, with forms and without."""
    draw = random.Random(seed)
    forms: list[Any] = [
        None,
        StructuredOutputs(json=SCHEMA),
        {"choice": ["yes", "yes sir", "no"]},
        {"regex": "[ab]{1,40}"},
    ]
    driver = make_driver(
        overlap=bool(seed % 2),
        num_blocks=36,
        num_swap_blocks=draw.choice([0, 24]),
        max_model_len=90,
        max_num_seqs=5,
        max_num_batched_tokens=draw.choice([16, 64]),
    )
    before = idle_state(driver.engine)
    asked: dict[str, tuple[str, SamplingParams]] = {}
    cancelled: set[str] = set()
    while len(asked) < 24 or driver.engine.has_work:
        if len(asked) < 24 and draw.random() < 0.4:
            name, prompt = f"r{len(asked)}", "abcdefgh" * draw.randint(1, 3)
            one = params(
                draw.randint(0, 99),
                structured_outputs=draw.choice(forms),
                n=draw.choice([1, 1, 3]),
                max_tokens=draw.randint(3, 60),
                ignore_eos=draw.random() < 0.2,
                min_tokens=draw.choice([0, 2]),
            )
            asked[name] = prompt, one
            driver.add(name, prompt, one, priority=draw.randint(0, 2))
        if asked and draw.random() < 0.03:
            name = draw.choice(list(asked))
            if driver.cancel(name):
                cancelled.add(name)
        if driver.engine.has_work:
            driver.step()
    for name, (prompt, one) in asked.items():
        alone, found = solo(one, prompt), summary(driver.outputs[name])
        if name not in cancelled:
            assert found == alone, name
        else:
            for (_, ids, _), (_, all_ids, _) in zip(found, alone, strict=True):
                assert ids == all_ids[: len(ids)]
        check_events(driver.events[name], driver.outputs[name])
    assert idle_state(driver.engine) == before
    assert driver.engine.grammars.num_live == 0
    counters = driver.engine.stats().counters
    assert counters.preemptions_swap + counters.preemptions_recompute > 0


# -- a real model ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model of random weights whose logits are wider than its byte-level tokenizer."""
    from minillm.models.loader import load_model
    from model_folders import save_tiny_model
    from tiny_tokenizers import byte_level_tokenizer

    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=480)
    tokenizer = byte_level_tokenizer()
    assert tokenizer.vocab_size < 480
    return {"model": load_model(str(folder), "float32"), "tokenizer": tokenizer}


def real(tiny: dict[str, Any], **options: Any) -> Runtime:
    settings = {"dtype": "float32", "max_num_seqs": 8, "num_gpu_blocks_override": 128, "max_model_len": 256}
    config = EngineConfig("tiny", check_invariants=True, **{**settings, **options})
    return Runtime(parts=build_engine(config, **tiny))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_model_of_random_weights_writes_json(tiny: dict[str, Any], overlap: bool, temperature: float) -> None:
    wanted = [
        params(seed, temperature=temperature, max_tokens=200, n=2 if temperature else 1, logprobs=2)
        for seed in range(2)
    ]
    plain = SamplingParams(max_tokens=30, seed=9, temperature=temperature, ignore_eos=True)
    with real(tiny, overlap=overlap) as runtime:
        alone = runtime.submit("hello", plain).result(60)
        futures = [runtime.submit(f"prompt {i}", one) for i, one in enumerate(wanted)]
        beside = runtime.submit("hello", plain)
        for future in futures:
            for choice in future.result(60).outputs:
                assert choice.finish_reason == "stop", choice.text
                check_json(choice.text)
                assert len(choice.logprobs or []) == len(choice.token_ids)
        assert summary(beside.result(60)) == summary(alone)
        wait_idle(runtime)


def test_reported_logprobs_are_those_before_the_mask(tiny: dict[str, Any]) -> None:
    free = SamplingParams(max_tokens=1, temperature=0, logprobs=5)
    with real(tiny) as runtime:
        (unmasked,) = runtime.submit("hello", free).result(60).outputs
        (masked,) = runtime.submit("hello", params(temperature=0, max_tokens=1, logprobs=5)).result(60).outputs
    assert masked.text in ("{", "{\n", "{ ") and masked.token_ids != unmasked.token_ids
    top = {token: entry for token, entry in masked.logprobs[0].items() if token != masked.token_ids[0]}
    best = {token: entry for token, entry in unmasked.logprobs[0].items() if token in top}
    assert best == top
    assert masked.logprobs[0][masked.token_ids[0]].rank > 1


def test_outputs_validate_against_schemas_of_every_kind(tiny: dict[str, Any]) -> None:
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    schemas: list[dict[str, Any]] = [
        SCHEMA,
        {"type": "array", "items": {"type": "number", "minimum": -5, "maximum": 5}, "minItems": 1, "maxItems": 4},
        {"enum": [1, "two", None, [3], {"four": 5}]},
        {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {
                        "v": {"type": "boolean"},
                        "down": {"anyOf": [{"type": "null"}, {"type": "null"}, {"$ref": "#/$defs/tree"}]},
                    },
                    "required": ["v", "down"],
                    "additionalProperties": False,
                }
            },
        },
        {"type": "string", "pattern": "^[a-f]{3}-[0-9]{2}$"},
        {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False},
    ]
    with real(tiny, overlap=True) as runtime:
        for schema in schemas:
            specs = [params(seed, structured_outputs={"json": schema}, max_tokens=200) for seed in range(2)]
            futures = [runtime.submit("abc", spec) for spec in specs]
            done = 0
            for future in futures:
                (choice,) = future.result(60).outputs
                if choice.finish_reason == "stop":
                    jsonschema_rs.validate(schema, json.loads(choice.text))
                    done += 1
            assert done, schema
