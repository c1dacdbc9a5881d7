"""The client's errors: one table, one sentence, and they survive a process boundary."""

import pickle

import grpc
import pytest

from microtome import errors


def test_every_status_but_ok_has_its_error() -> None:
    assert set(errors.BY_STATUS) == {code.name for code in grpc.StatusCode} - {"OK"}


def test_a_status_of_the_future_is_a_failure_of_the_service() -> None:
    assert type(errors.error_for("TEAPOT", "short and stout")) is errors.ServiceFailed


@pytest.mark.parametrize("status", sorted(errors.BY_STATUS))
def test_an_error_survives_pickling_whole(status: str) -> None:
    error = errors.error_for(status, "the queue holds 64 generations", 250)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.status, copy.retry_after_ms) == ("the queue holds 64 generations", status, 250)


def test_every_error_is_listed_and_in_the_tree_that_the_module_draws() -> None:
    assert errors.__doc__ is not None
    drawn = [line.split()[1 if line[0] in "├└│" else 0] for line in errors.__doc__.splitlines() if "Error" in line]
    assert "MicrotomeError" in drawn
    classes = [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]
    assert [name for name in classes if name not in errors.__doc__] == []
    assert all(issubclass(getattr(errors, name), errors.MicrotomeError) for name in classes)
