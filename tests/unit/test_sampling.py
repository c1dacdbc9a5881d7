"""A request carries what was asked; what the wire cannot carry is refused by name and value."""

import math
from typing import Any

import pytest

from microtome.errors import InvalidRequest
from microtome.sampling import GenerateOptions, positive_seconds, request_of, resume_request_of, seconds_or_none
from microtome.v1 import generation_pb2 as pb


def request(**options: Any) -> pb.GenerateRequest:
    return request_of("hi", None, None, options)


def refusal(**options: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        request(**options)
    return str(caught.value)


def test_none_is_the_same_as_absent() -> None:
    assert request(**dict.fromkeys(GenerateOptions.__annotations__)) == pb.GenerateRequest(text="hi")


def test_zero_is_not_absent() -> None:
    # Greedy by choice and greedy by default are one to the service, but only it may decide that.
    sent = request(temperature=0, top_k=0, seed=0)
    assert sent.HasField("temperature")
    assert sent.HasField("top_k")
    assert sent.HasField("seed")


@pytest.mark.parametrize("value", [float("nan"), math.inf, -1.0])
def test_a_number_that_makes_no_sense_is_the_services_to_refuse(value: float) -> None:
    sent = request(temperature=value).temperature
    assert sent == value or (math.isnan(sent) and math.isnan(value))


def test_every_option_but_the_timeout_changes_the_request() -> None:
    values: dict[str, Any] = {
        "max_new_tokens": 1,
        "temperature": 0.5,
        "top_k": 1,
        "top_p": 0.5,
        "min_p": 0.5,
        "seed": 1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {3: -1.0},
        "allowed_token_ids": [],
        "banned_token_ids": [4],
        "min_new_tokens": 1,
        "stop": "END",
        "stop_token_ids": [1],
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": 0,
        "generation_id": "g",
        "resumable": True,
        "n": 2,
        "priority": 1,
        "tenant": "acme",
        "cache_salt": "s",
        "ttft_target_s": 0.5,
        "timeout_s": 1.0,
    }
    assert set(values) == set(GenerateOptions.__annotations__)
    plain = request()
    same = [name for name, value in values.items() if request(**{name: value}) == plain]
    assert same == ["timeout_s"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 to 4294967295, not 0"),
        ({"max_new_tokens": -1}, "max_new_tokens must be 1 to 4294967295, not -1"),
        ({"max_new_tokens": 2**32}, "max_new_tokens must be 1 to 4294967295, not 4294967296"),
        ({"logprobs": -1}, "logprobs must be 0 to 4294967295, not -1"),
        ({"prompt_logprobs": True}, "prompt_logprobs must be a whole number, not True"),
        ({"min_new_tokens": -1}, "min_new_tokens must be 0 to 4294967295, not -1"),
        ({"repetition_penalty": "1"}, "repetition_penalty must be a number, not '1'"),
        ({"logit_bias": [(1, 2.0)]}, "logit_bias must be a mapping of token ids to numbers, not [(1, 2.0)]"),
        ({"logit_bias": {"1": 2.0}}, "a token id of logit_bias must be a whole number, not '1'"),
        ({"logit_bias": {1: None}}, "logit_bias[1] must be a number, not None"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids must be a list of token ids, not '12'"),
        ({"banned_token_ids": [-1]}, "banned_token_ids[0] must be 0 to 4294967295, not -1"),
        ({"stop": 7}, "stop must be text, or a list of texts, not 7"),
        ({"stop": ["a", b"b"]}, "stop[1] must be text, not b'b'"),
        ({"n": 0}, "n must be 1 to 4294967295, not 0"),
        ({"n": 1.5}, "n must be a whole number, not 1.5"),
        ({"tenant": 7}, "tenant must be text, not 7"),
        ({"cache_salt": b"s"}, "cache_salt must be text, not b's'"),
        ({"ttft_target_s": 0}, "ttft_target_s must be above 0 seconds and finite, not 0"),
        ({"ttft_target_s": float("nan")}, "ttft_target_s must be above 0 seconds and finite, not nan"),
        ({"ttft_target_s": 5e6}, "ttft_target_s in ms must be 1 to 4294967295, not 5000000000"),
        ({"top_k": -1}, "top_k must be 0 to 4294967295, not -1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be a whole number, not 1.5"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number, not True"),
        ({"top_k": "4"}, "top_k must be a whole number, not '4'"),
        ({"seed": 2**64}, "seed must be 0 to 18446744073709551615, not 18446744073709551616"),
        ({"priority": 2**31}, "priority must be -2147483648 to 2147483647, not 2147483648"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"top_p": True}, "top_p must be a number, not True"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, not 5"),
        ({"stop_token_ids": [5, -6]}, "stop_token_ids[1] must be 0 to 4294967295, not -6"),
        ({"stop_token_ids": "56"}, "stop_token_ids must be a list of token ids, not '56'"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, not 1"),
        ({"generation_id": 7}, "generation_id must be text, not 7"),
    ],
)
def test_what_the_wire_cannot_carry_is_named(options: dict[str, Any], told: str) -> None:
    assert refusal(**options) == told


def test_an_option_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(
        TypeError, match=r"there is no option 'max_tokens'; the options are max_new_tokens, temperature"
    ):
        request(max_tokens=3)


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ((None, None, None), "not none"),
        (("hi", None, [1]), "not prompt and token_ids"),
        (("hi", [{"role": "user", "content": "hi"}], [1]), "not prompt and messages and token_ids"),
    ],
)
def test_exactly_one_prompt_is_given(prompts: tuple[Any, Any, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^give one of prompt, messages and token_ids, {told}$"):
        request_of(*prompts, {})


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "messages must hold 1 message or more, not 0"),
        ("hi", "messages must be a list of messages, not 'hi'"),
        ({"role": "user", "content": "hi"}, "messages must be a list of messages, not {"),
        (["hi"], "messages[0] must be a mapping with role and content, not 'hi'"),
        ([{"role": "user"}], "messages[0] has no 'content'"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "messages[1] has no 'role'"),
        ([{"role": "user", "content": None}], "messages[0]['content'] must be text, not None"),
        ([{"role": "user", "content": "a", "name": "b"}], "messages[0] has 'name', which is not sent"),
    ],
)
def test_messages_that_are_none_are_named(messages: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of(None, messages, None, {})
    assert str(caught.value).startswith(told)


def test_an_empty_prompt_is_the_services_to_refuse() -> None:
    assert request_of("", None, None, {}).WhichOneof("prompt") == "text"
    assert request_of(None, None, [], {}).WhichOneof("prompt") == "token_ids"


def test_text_that_is_not_unicode_is_refused_with_its_place() -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt is not valid Unicode at character 2$"):
        request_of("ab\udcff", None, None, {})


def test_token_ids_of_other_libraries_are_whole_numbers_too() -> None:
    class Scalar:
        def __index__(self) -> int:
            return 7

    assert request_of(None, None, [Scalar()], {}).token_ids.ids == [7]  # type: ignore[list-item]
    assert request_of(None, None, range(3), {}).token_ids.ids == [0, 1, 2]


def test_resuming_needs_an_id_and_a_place() -> None:
    assert resume_request_of("g", 5) == pb.ResumeRequest(generation_id="g", offset=5)
    with pytest.raises(InvalidRequest, match="generation_id must name a generation; it is empty"):
        resume_request_of("", 0)
    with pytest.raises(InvalidRequest, match="offset must be 0 to 4294967295, not -1"):
        resume_request_of("g", -1)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_seconds_are_above_zero_and_finite(value: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s must be above 0 seconds and finite, not "):
        positive_seconds("timeout_s", value)
    assert positive_seconds("timeout_s", 2) == 2.0
    assert seconds_or_none("timeout_s", None) is None


def test_a_target_for_the_first_token_is_sent_in_whole_milliseconds_and_never_as_none() -> None:
    assert [request(ttft_target_s=s).ttft_target_ms for s in (1e-6, 0.25, 1.0001)] == [1, 250, 1001]


def test_offsets_of_several_completions_leave_out_those_that_are_none() -> None:
    assert resume_request_of("g", 3) == pb.ResumeRequest(generation_id="g", offset=3)
    places = [pb.CompletionOffset(index=0, offset=4), pb.CompletionOffset(index=2, offset=0)]
    assert resume_request_of("g", [4, None, 0]) == pb.ResumeRequest(generation_id="g", offsets=places)
    for offset, told in (
        ([None, None], "offset must name one completion or more to go on with; it names none"),
        ([1, -1], "offset[1] must be 0 to 4294967295, not -1"),
        ("12", "offset must be a whole number, not '12'"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            resume_request_of("g", offset)  # type: ignore[arg-type]
        assert str(refused.value) == told
