"""SamplingParams: every field's limits, the types that are taken, and what is stored."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minillm.core.errors import InvalidParameterError, RequestError
from minillm.core.sampling_params import GREEDY_TEMPERATURE, MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS, SamplingParams

NUMBERS = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-300, 100.0),
}
INTEGERS = {
    "n": (1, MAX_N),
    "top_k": (-1, 10**12),
    "seed": (-(2**63), 2**64 - 1),
    "min_tokens": (0, 10**12),
    "max_tokens": (1, 10**12),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
UNBOUNDED_ABOVE = {"top_k", "min_tokens", "max_tokens"}
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


def refusal(**fields: Any) -> InvalidParameterError:
    """The error that SamplingParams(**fields) raises; it must name the (last) field."""
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**fields)
    name = list(fields)[-1]
    assert caught.value.field == name
    assert str(caught.value).startswith(f"{name}=")
    return caught.value


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.seed, params.max_tokens, params.min_tokens) == (None, None, 0)
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (False, False, True)


@pytest.mark.parametrize("name", NUMBERS)
def test_number_accepts_its_limits_and_refuses_beyond(name: str) -> None:
    low, high = NUMBERS[name]
    assert getattr(SamplingParams(**{name: low}), name) == low
    assert getattr(SamplingParams(**{name: high}), name) == high
    below = 0.0 if name == "repetition_penalty" else math.nextafter(low, -math.inf)
    for value in (below, math.nextafter(high, math.inf), -1e300, 1e300, -math.inf, math.inf, math.nan, 10**400):
        refusal(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
def test_number_refuses_other_types(name: str) -> None:
    for value in ("hot", "0.5", True, None, [1.0], 1j, b"1", {}, np.array([0.5, 0.5])):
        assert "must be a number" in refusal(**{name: value}).rule


@pytest.mark.parametrize("name", NUMBERS)
def test_number_of_any_real_type_is_stored_as_float(name: str) -> None:
    for value in (1, np.float32(1.0), np.float64(1.0), np.int64(1), np.float16(1.0), Fraction(1, 1)):
        stored = getattr(SamplingParams(**{name: value}), name)
        assert type(stored) is float
        assert stored == 1.0


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_accepts_its_limits_and_refuses_beyond(name: str) -> None:
    low, high = INTEGERS[name]
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    refusal(**{name: low - 1})
    if name not in UNBOUNDED_ABOVE:
        refusal(**{name: high + 1})


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_refuses_other_types(name: str) -> None:
    for value in ("1", 1.0, 1.5, True, False, math.nan, math.inf, [1], np.float64(1.0), np.bool_(True)):
        assert "must be an integer" in refusal(**{name: value}).rule


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_of_any_integer_type_is_stored_as_int(name: str) -> None:
    for value in (np.int64(3), np.int32(3), np.uint8(3), np.array(3)):
        stored = getattr(SamplingParams(**{name: value}), name)
        assert type(stored) is int
        assert stored == 3


@pytest.mark.parametrize("name", FLAGS)
def test_flag_takes_only_booleans(name: str) -> None:
    assert getattr(SamplingParams(**{name: True}), name) is True
    for value in (0, 1, "true", None, np.bool_(True)):
        refusal(**{name: value})


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 1e-5, GREEDY_TEMPERATURE])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).is_greedy


@pytest.mark.parametrize("temperature", [1.01e-4, 0.01, 1.0, 1e6])
def test_other_temperature_is_not_greedy(temperature: float) -> None:
    assert not SamplingParams(temperature=temperature).is_greedy


@pytest.mark.parametrize("top_k", [-1, 0, 1, 49151, 49152, 49153, 2**40])
def test_top_k_off_and_any_positive_value_are_taken(top_k: int) -> None:
    assert SamplingParams(top_k=top_k).top_k == top_k


@pytest.mark.parametrize("top_p", [0, 1e-9, 1e-4, 1, 1.0])
def test_top_p_edges_are_legal(top_p: float) -> None:
    assert SamplingParams(top_p=top_p).top_p == top_p


def test_max_tokens_zero_needs_prompt_logprobs() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    refusal(max_tokens=0)
    refusal(max_tokens=-1)
    refusal(prompt_logprobs=1, max_tokens=-1)


def test_min_tokens_may_equal_but_not_exceed_max_tokens() -> None:
    assert SamplingParams(max_tokens=200, min_tokens=200).min_tokens == 200
    error = refusal(max_tokens=4, min_tokens=5)
    assert "max_tokens=4" in error.rule


def test_stop_is_stored_as_a_tuple_of_strings() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert len(SamplingParams(stop=["x"] * MAX_STOP_STRINGS).stop) == MAX_STOP_STRINGS


@pytest.mark.parametrize(
    "stop", ["", ["a", ""], [1], ["a", None], 5, 1.5, b"END", [b"END"], {"a": 1}, {"a", "b"}, True, object()]
)
def test_bad_stop_is_refused(stop: Any) -> None:
    refusal(stop=stop)


def test_too_many_stop_strings_are_refused_with_the_limit() -> None:
    error = refusal(stop=["x"] * 100)
    assert error.value == 100
    assert str(MAX_STOP_STRINGS) in error.rule


def test_stop_token_ids_are_stored_as_a_tuple_of_ints() -> None:
    params = SamplingParams(stop_token_ids=[np.int64(7), 2])
    assert params.stop_token_ids == (7, 2)
    assert all(type(token_id) is int for token_id in params.stop_token_ids)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [7, "7", [-1], [1.0], ["1"], [None], [True], {1: 2}, {1}, b"\x07"])
def test_bad_stop_token_ids_are_refused(ids: Any) -> None:
    refusal(stop_token_ids=ids)


def test_logit_bias_keys_may_be_strings_of_digits() -> None:
    bias = SamplingParams(logit_bias={"5": -100, 7: np.float32(1.5), np.int64(9): 100}).logit_bias  # type: ignore[dict-item]
    assert bias == {5: -100.0, 7: 1.5, 9: 100.0}
    assert all(type(key) is int and type(value) is float for key, value in bias.items())
    assert SamplingParams(logit_bias=None).logit_bias == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bias",
    [{key: 1.0} for key in ("AI", "-1", -1, "", "1.5", 1.9, " 5", "1_0", "٣", True, None, "9" * 5000)]
    + [{5: value} for value in (1000, -100.1, 100.1, math.nan, math.inf, -math.inf, "1", None, True)]
    + [{5: 1.0, "5": 2.0}, [(5, 1.0)], 5, "5", {5}],
)
def test_bad_logit_bias_is_refused(bias: Any) -> None:
    refusal(logit_bias=bias)


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    SamplingParams(logit_bias={99: 1.0}, stop_token_ids=[99]).check_token_ids(100)
    with pytest.raises(InvalidParameterError, match=r"logit_bias=100 .*100 entries"):
        SamplingParams(logit_bias={3: 1.0, 100: 1.0}).check_token_ids(100)
    with pytest.raises(InvalidParameterError, match="stop_token_ids=999999"):
        SamplingParams(stop_token_ids=[3, 999999]).check_token_ids(100)
    with pytest.raises(InvalidParameterError, match="logit_bias=999999"):
        SamplingParams(logit_bias={"999999": 5}).check_token_ids(49152)  # type: ignore[dict-item]


def test_given_containers_are_copied() -> None:
    bias, stop, ids = {5: 1.0}, ["a"], [7]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids)
    bias[6], stop[0], ids[0] = 2.0, "b", 8
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({5: 1.0}, ("a",), (7,))


def test_fields_cannot_be_assigned() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[misc]
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_replace_validates_and_equality_is_by_value() -> None:
    params = SamplingParams(seed=5, stop="x", logit_bias={"3": 1})  # type: ignore[dict-item]
    assert dataclasses.replace(params, top_k=4) == SamplingParams(seed=5, stop=["x"], logit_bias={3: 1.0}, top_k=4)
    with pytest.raises(InvalidParameterError):
        dataclasses.replace(params, top_p=1.1)


def test_round_trip_through_json_and_deepcopy() -> None:
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), stop=["a", "b"], stop_token_ids=[1], logit_bias={7: -1}
    )
    again = SamplingParams(**json.loads(json.dumps(dataclasses.asdict(params))))
    assert again == params
    assert copy.deepcopy(params) == params


def test_error_is_a_request_error_of_status_400() -> None:
    error = refusal(top_p=1.5)
    assert isinstance(error, RequestError | ValueError)
    assert error.http_status == 400
    assert str(error) == "top_p=1.5 is not allowed: it must be between 0 and 1"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)]), ANYTHING, max_size=4))
def test_any_value_is_either_refused_with_the_typed_error_or_stored_in_plain_types(fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**fields)
    except InvalidParameterError as error:
        assert error.field.partition(".")[0] in fields
        return
    for name, low_high in NUMBERS.items():
        value = getattr(params, name)
        assert type(value) is float
        assert low_high[0] * (name != "repetition_penalty") <= value <= low_high[1]
    for name, (low, high) in INTEGERS.items():
        value = getattr(params, name)
        if value is not None:
            assert type(value) is int
            assert (0 if name == "max_tokens" else low) <= value
            assert value <= high or name in UNBOUNDED_ABOVE
    assert isinstance(params.stop, tuple)
    assert isinstance(params.stop_token_ids, tuple)
    assert SamplingParams(**dataclasses.asdict(params)) == params
