"""One thread that owns a device: jobs run on it one at a time, in the order they came.

The event loop hands jobs over and never waits for one; a job hands its outcome back through the loop. The thread is a
daemon: a device call that never returns cannot keep the process from ending.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StepThread:
    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Any thread. The job deals with its own errors: one that escapes is logged, and the next job runs."""
        self._jobs.put(job)

    async def call(self, job: Callable[[], T]) -> T:
        """Run `job` behind those before it and wait for its outcome, error included."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: Exception | None) -> None:
            if outcome.cancelled():
                return
            if error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(value)  # type: ignore[arg-type]  # T may be None itself

        def run() -> None:
            try:
                value = job()
            except Exception as error:
                _tell(loop, settle, None, error)
            except BaseException as error:  # a library that calls `sys.exit`: it ends no thread of ours, nor the loop
                _tell(loop, settle, None, RuntimeError(f"{type(error).__name__}: {error}"))
            else:
                _tell(loop, settle, value, None)

        self.submit(run)
        return await outcome

    def stop(self) -> None:
        """No job after those already here. Returns at once: whether one of them ever ends is not ours to say."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end. False: it is still in a job."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:
                logger.exception("job failed thread=%s", self._thread.name)


def _tell(loop: asyncio.AbstractEventLoop, settle: Callable[..., None], *arguments: object) -> None:
    try:
        loop.call_soon_threadsafe(settle, *arguments)
    except RuntimeError:
        logger.debug("an outcome came after the event loop was closed")
