import pytest

from minillm.core.errors import DuplicateRequestError, InvalidParameterError, RequestError, shorten
from minillm.core.sampling_params import SamplingParams


@pytest.mark.parametrize("value", [10**5000, "x" * 10**6, list(range(10**5))], ids=["int", "str", "list"])
def test_messages_stay_one_short_line_whatever_the_client_sent(value):
    for error in (InvalidParameterError("field", value, "a rule"), DuplicateRequestError("x" * 10**5)):
        assert len(str(error)) < 200 and "\n" not in str(error)
    assert len(shorten(value)) <= 80


def test_refusals_of_parameters_are_value_errors_and_name_field_and_value():
    with pytest.raises(ValueError, match=r"top_p=1\.1 is not allowed: it must be between 0 and 1") as caught:
        SamplingParams(top_p=1.1)
    assert isinstance(caught.value, RequestError) and caught.value.http_status == 400
    assert (caught.value.field, caught.value.value) == ("top_p", 1.1)
