"""Our errors ↔ gRPC status: one table, read both ways, total over `planner/errors.py`.

A status carries the error's sentence as its details, and in its trailing metadata `microtome-error-bin` (class and
arguments, so the other end of ours can rebuild it) and, when known, `retry-after-ms` (a whole number, for everybody).
Without the former, `error_from_status` goes by the code.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from microtome.planner import errors
from microtome.planner.errors import BatchingError

RETRY_AFTER_KEY = "retry-after-ms"
ERROR_KEY = "microtome-error-bin"

# A call's trailing metadata has a limit of 8 KiB. Details ride in it percent-encoded, up to 9 bytes a character;
# the description in base64.
MAX_DETAIL_CHARACTERS = 500
MAX_DESCRIPTION_BYTES = 2000

Metadata = tuple[tuple[str, str | bytes], ...]

# Every class of planner/errors.py. Where two share a code, the first is what a bare code of it is read as.
STATUS: dict[type[BatchingError], grpc.StatusCode] = {
    errors.AtCapacity: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.BadInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownId: grpc.StatusCode.NOT_FOUND,
    errors.WrongState: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StalePlan: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Refused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.BadConfig: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StepError: grpc.StatusCode.INTERNAL,
    errors.BatchingError: grpc.StatusCode.INTERNAL,
    errors.SessionPoisoned: grpc.StatusCode.ABORTED,
    errors.DeadlineExpired: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.WorkerLost: grpc.StatusCode.UNAVAILABLE,
}

_BY_NAME = {kind.__name__: kind for kind in STATUS}


@dataclass(frozen=True, slots=True)
class Status:
    """What `context.abort` takes: code, details, trailing metadata."""

    code: grpc.StatusCode
    details: str
    trailing: Metadata = ()


def status_of(error: BaseException) -> Status:
    """The status to answer with. An error that is not ours is INTERNAL and shows its class only, never a traceback."""
    if not isinstance(error, BatchingError):
        return Status(grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}")
    kind = next(base for base in type(error).__mro__ if base in STATUS)
    sentence = _shortened(str(error))
    trailing: Metadata = ()
    described = json.dumps([kind.__name__, *(_shortened(a) if isinstance(a, str) else a for a in error.args)])
    if len(described) <= MAX_DESCRIPTION_BYTES:
        trailing += ((ERROR_KEY, described.encode()),)
    retry_after_ms = getattr(error, "retry_after_ms", None)
    if retry_after_ms is not None:
        trailing += ((RETRY_AFTER_KEY, str(retry_after_ms)),)
    return Status(STATUS[kind], sentence, trailing)


def error_from_status(
    code: grpc.StatusCode, details: str | None, trailing: Iterable[tuple[str, str | bytes]] = ()
) -> BatchingError:
    """The error that a status tells of. A code that is none of ours is a bare `BatchingError`."""
    metadata = dict(trailing)
    described = metadata.get(ERROR_KEY)
    if isinstance(described, bytes):
        rebuilt = _rebuilt(described)
        if rebuilt is not None:
            return rebuilt
    sentence = details or code.name
    kind = next((kind for kind, own in STATUS.items() if own is code), BatchingError)
    if kind is errors.AtCapacity:
        # How much was needed is not known, so the sentence stands as it came.
        return errors.Refused(sentence)
    return kind(sentence)


def _rebuilt(described: bytes) -> BatchingError | None:
    """The error itself, or None when it comes from a version of ours that knows others."""
    try:
        name, *arguments = json.loads(described)
        return _BY_NAME[name](*arguments)
    except (ValueError, TypeError, KeyError):
        return None


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_DETAIL_CHARACTERS else text[: MAX_DETAIL_CHARACTERS - 1] + "…"
