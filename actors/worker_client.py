"""The driver's end of one worker's link: sends plans, posts what comes back as events, says when the worker is gone.

One per incarnation. All calls on the driver's event loop; none but `connect` and `close` waits.

Posts through `post`, in step order: `StepDone` and `StepFailed`; then, once and last, `WorkerGone` with the cause.
After that, or after `close`, it posts nothing more, so a fenced incarnation's late answers are dropped here.

A broken stream is opened again once under the same incarnation, and the steps without an answer are sent again, by
their numbers: the worker answers those it has run from their stored results. A worker is gone when that fails, when
the process behind it is known to be dead (`process_ended`), or when it hangs: no result within `hang_timeout_s` beside
the step's predicted time.
"""

from collections.abc import Callable

from microtome.actors.link import LinkSettings, WorkerEndpoint
from microtome.planner.events import StepDone, StepFailed, WorkerGone, WorkerJoined
from microtome.planner.types import StepPlan


class WorkerClient:
    def __init__(
        self,
        endpoint: WorkerEndpoint,
        secret: str,
        *,
        link: LinkSettings,
        hang_timeout_s: float,
        post: Callable[[StepDone | StepFailed | WorkerGone], None],
        now_us: Callable[[], int],
    ) -> None:
        raise NotImplementedError

    @property
    def endpoint(self) -> WorkerEndpoint:
        raise NotImplementedError

    @property
    def gone(self) -> str | None:
        """Why it is gone; None while it is not."""
        raise NotImplementedError

    async def connect(self) -> WorkerJoined:
        """Describe, open the step stream (which ends any other driver's), take the snapshot.

        The event is returned, not posted. Raises `WorkerLost` naming address and cause, with nothing left open.
        """
        raise NotImplementedError

    def send(self, plan: StepPlan) -> None:
        """Put the plan on the stream, behind those before it. Never blocks; a worker that is gone gets nothing."""
        raise NotImplementedError

    def process_ended(self, cause: str) -> None:
        """The process behind it is known to be dead: gone at once, without waiting for a time-out."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close stream and channel; post nothing more. Idempotent. The worker itself lives on."""
        raise NotImplementedError
