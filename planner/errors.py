"""What can go wrong on purpose, grouped by what the caller does next.

BatchingError
├── Refused             nothing changed; try later or elsewhere
│   ├── AtCapacity        no room now: cells, sessions or queue; may carry a retry-after
│   ├── BadInput          it can never be done as asked: the caller's numbers
│   ├── UnknownId         no such generation, session or worker
│   ├── WrongState        not now, in this state: a session that is generating, a service that is stopping
│   └── StalePlan         driver and worker disagree about incarnation, step, digest or lengths
├── StepError           a step began and its effect is not known
├── SessionPoisoned     unknown after a failed step; close it, start again
├── DeadlineExpired     the generation's deadline passed
├── WorkerLost          the worker and every session on it are gone
└── BadConfig           found before anything starts

Arguments are positional and plain, so an error survives pickling, a journal and the wire.
"""


class BatchingError(Exception):
    """Base of all of ours. Catch a branch, not this, unless you are the outermost caller."""


class Refused(BatchingError):
    """A definite no, decided before anything changed."""


class AtCapacity(Refused):
    """`what` (cells, sessions, queued tokens …): `needed` of it asked for, `available` there."""

    def __init__(self, what: str, needed: int, available: int, retry_after_ms: int | None = None) -> None:
        super().__init__(what, needed, available, retry_after_ms)
        self.what, self.needed, self.available = what, needed, available
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        later = "" if self.retry_after_ms is None else f"; try again in {self.retry_after_ms} ms"
        return f"needs {self.needed} {self.what}, {self.available} available{later}"


class BadInput(Refused):
    """The caller's numbers; the message names the value and the limit."""


class UnknownId(Refused):
    """Nothing by that name, now or ever."""


class WrongState(Refused):
    """A sound call at the wrong moment."""


class StalePlan(Refused):
    """Incarnation, step number, digest or lengths do not match; nothing was touched."""


class StepError(BatchingError):
    """A step began and failed; what it wrote is not known."""


class SessionPoisoned(BatchingError):
    """The session's history on the device is unknown; it can only be closed."""


class DeadlineExpired(BatchingError):
    """The deadline passed before the generation was done."""


class WorkerLost(BatchingError):
    """The worker is gone, and what it held with it."""


class BadConfig(BatchingError):
    """A setting, a file or a model that cannot work; found before anything starts."""
