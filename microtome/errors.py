"""What a client can be told instead of an answer, grouped by what the caller does next.

MicrotomeError
├── Refused                the service did nothing; change the call
│   ├── InvalidRequest       a value is out of range; the message names it and the limit
│   ├── NotFound             no such generation, or nothing of that name
│   ├── AlreadyExists        the generation id is in use
│   ├── WrongState           a sound call at the wrong moment
│   ├── Denied               this caller may not
│   └── Unsupported          this service does not offer it
├── TryLater               the service did nothing, or has said nothing yet; the same call may work later
│   ├── CapacityExhausted    no room now; `retry_after_ms` says when, if the service knows
│   └── Unavailable          nobody answers, or the connection is lost
├── DeadlineExceeded       the call's own time is over
├── Cancelled              somebody cancelled the call
├── ServiceFailed          the service began and could not finish
└── ClientClosed           the client was closed before the call

`str(error)` is one sentence, the service's own where it sent one. `error.status` is the gRPC status' name, or None when
no call was made. Which status becomes which class is the table `BY_STATUS`, and nowhere else.
"""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "BY_STATUS",
    "AlreadyExists",
    "Cancelled",
    "CapacityExhausted",
    "ClientClosed",
    "DeadlineExceeded",
    "Denied",
    "InvalidRequest",
    "MicrotomeError",
    "NotFound",
    "Refused",
    "ServiceFailed",
    "TryLater",
    "Unavailable",
    "Unsupported",
    "WrongState",
    "error_for",
]


class MicrotomeError(Exception):
    """Base of all of ours."""

    def __init__(self, message: str, status: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message, status, retry_after_ms)  # positional, so that pickle can rebuild it
        self.message = message
        self.status = status
        self.retry_after_ms = retry_after_ms  # milliseconds; None: the service did not say

    def __str__(self) -> str:
        return self.message


class Refused(MicrotomeError):
    """A definite no; nothing was changed."""


class InvalidRequest(Refused):
    """A value is out of range, of the wrong kind, or missing."""


class NotFound(Refused):
    """Nothing by that name."""


class AlreadyExists(Refused):
    """The name is in use."""


class WrongState(Refused):
    """Not now, in this state."""


class Denied(Refused):
    """The caller has shown no sufficient credentials."""


class Unsupported(Refused):
    """The service does not offer this call."""


class TryLater(MicrotomeError):
    """The same call may work later."""


class CapacityExhausted(TryLater):
    """No room now: queue, cells or sessions."""


class Unavailable(TryLater):
    """Nobody answers at the address, or the connection was lost."""


class DeadlineExceeded(MicrotomeError):
    """The call's time, the caller's or the service's, is over."""


class Cancelled(MicrotomeError):
    """The call was cancelled, by this client or by the service."""


class ServiceFailed(MicrotomeError):
    """The service began and could not finish."""


class ClientClosed(MicrotomeError):
    """A call on a client that was closed."""


BY_STATUS: Mapping[str, type[MicrotomeError]] = MappingProxyType(
    {
        "CANCELLED": Cancelled,
        "UNKNOWN": ServiceFailed,
        "INVALID_ARGUMENT": InvalidRequest,
        "DEADLINE_EXCEEDED": DeadlineExceeded,
        "NOT_FOUND": NotFound,
        "ALREADY_EXISTS": AlreadyExists,
        "PERMISSION_DENIED": Denied,
        "RESOURCE_EXHAUSTED": CapacityExhausted,
        "FAILED_PRECONDITION": WrongState,
        "ABORTED": ServiceFailed,
        "OUT_OF_RANGE": InvalidRequest,
        "UNIMPLEMENTED": Unsupported,
        "INTERNAL": ServiceFailed,
        "UNAVAILABLE": Unavailable,
        "DATA_LOSS": ServiceFailed,
        "UNAUTHENTICATED": Denied,
    }
)


def error_for(status: str, message: str, retry_after_ms: int | None = None) -> MicrotomeError:
    """The error that a gRPC status, by name, stands for. A status this table does not know is a ServiceFailed."""
    return BY_STATUS.get(status, ServiceFailed)(message, status, retry_after_ms)
