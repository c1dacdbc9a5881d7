"""Every error of ours has a status, and its status is read as that error again."""

from urllib.parse import quote

import grpc
import pytest

from microtome.actors.status import ERROR_KEY, RETRY_AFTER_KEY, STATUS, error_from_status, status_of
from microtome.planner import errors
from microtome.planner.errors import AtCapacity, BadInput, BatchingError, Refused, StalePlan, WorkerLost


def all_errors() -> list[type[BatchingError]]:
    found, todo = [], [BatchingError]
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo.extend(kind.__subclasses__())
    return [kind for kind in found if kind.__module__ == errors.__name__]


def example(kind: type[BatchingError]) -> BatchingError:
    return AtCapacity("cells", 512, 100, 250) if kind is AtCapacity else kind("7 is above 5")


@pytest.mark.parametrize("kind", all_errors())
def test_every_error_has_a_row_of_its_own(kind: type[BatchingError]) -> None:
    assert kind in STATUS


@pytest.mark.parametrize("kind", all_errors())
def test_an_error_comes_back_as_it_was(kind: type[BatchingError]) -> None:
    error = example(kind)
    status = status_of(error)
    back = error_from_status(status.code, status.details, status.trailing)
    assert type(back) is kind
    assert (back.args, str(back)) == (error.args, str(error))


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.AtCapacity, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.BadInput, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.UnknownId, grpc.StatusCode.NOT_FOUND),
        (errors.WrongState, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.StalePlan, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.SessionPoisoned, grpc.StatusCode.ABORTED),
        (errors.DeadlineExpired, grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.WorkerLost, grpc.StatusCode.UNAVAILABLE),
        (errors.StepError, grpc.StatusCode.INTERNAL),
    ],
)
def test_the_codes_that_clients_rely_on(kind: type[BatchingError], code: grpc.StatusCode) -> None:
    assert status_of(example(kind)).code is code


def test_a_retry_after_is_there_for_clients_that_know_nothing_else_of_ours() -> None:
    assert (RETRY_AFTER_KEY, "250") in status_of(AtCapacity("queued tokens", 9, 5, 250)).trailing
    assert RETRY_AFTER_KEY not in dict(status_of(AtCapacity("queued tokens", 9, 5)).trailing)


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_bare_code_is_read_as_an_error_with_its_sentence(code: grpc.StatusCode) -> None:
    error = error_from_status(code, "a sentence")
    assert str(error) == "a sentence"
    assert str(error_from_status(code, None)) == code.name


def test_a_bare_code_is_read_as_the_table_says() -> None:
    assert type(error_from_status(grpc.StatusCode.INVALID_ARGUMENT, "no")) is BadInput
    assert type(error_from_status(grpc.StatusCode.UNAVAILABLE, "gone")) is WorkerLost
    assert isinstance(error_from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), Refused)
    assert type(error_from_status(grpc.StatusCode.UNIMPLEMENTED, "what")) is BatchingError


@pytest.mark.parametrize(
    "described", [b"", b"\xff", b"3", b"{}", b"[]", b'["NoSuchError", "x"]', b'["AtCapacity"]', b'[{"a": 1}, "x"]']
)
def test_a_description_that_cannot_be_read_falls_back_on_the_code(described: bytes) -> None:
    error = error_from_status(grpc.StatusCode.INVALID_ARGUMENT, "sentence", ((ERROR_KEY, described),))
    assert type(error) is BadInput
    assert str(error) == "sentence"


def test_an_error_of_a_newer_kind_gets_the_row_of_its_base() -> None:
    class TooSalty(StalePlan):
        pass

    status = status_of(TooSalty("9 grams is above 3"))
    assert status.code is grpc.StatusCode.FAILED_PRECONDITION
    assert type(error_from_status(status.code, status.details, status.trailing)) is StalePlan


def test_an_error_that_is_not_ours_shows_its_class_and_nothing_of_its_inside() -> None:
    status = status_of(KeyError("secret"))
    assert status.code is grpc.StatusCode.INTERNAL
    assert status.details == "internal error: KeyError"
    assert status.trailing == ()


@pytest.mark.parametrize("letter", ["x", "ü", "文"])
def test_a_long_sentence_is_cut_to_what_metadata_can_carry(letter: str) -> None:
    status = status_of(BadInput(letter * 100_000))
    in_bytes = len(quote(status.details)) + sum(len(key) + len(value) * 4 // 3 for key, value in status.trailing)
    assert in_bytes < 8192 - 512
    assert error_from_status(status.code, status.details, status.trailing).args[0].startswith(letter * 400)
