"""What a worker that starts is about, on its way from the runtime's log to who waits for it.

The runtime logs each stage as it begins, with its name as the record's `stage`, and `compiles` where the stage makes
programs: that takes many times as long as the rest, once for each kind of machine, and no limit on a start counts it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stage:
    """Of one worker's start."""

    name: str  # for people
    compiles: bool = False


class StageListener(logging.Handler):
    """Knows the newest stage that was logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.newest: Stage | None = None

    def emit(self, record: logging.LogRecord) -> None:
        name = getattr(record, "stage", None)
        if name is not None:
            self.newest = Stage(str(name), bool(getattr(record, "compiles", False)))


async def within(
    limit_s: float,
    start: Awaitable[T],
    *,
    stage: Callable[[], Awaitable[Stage | None]],
    tell: Callable[[Stage], None],
    period_s: float,
) -> T:
    """The outcome of `start`; every `period_s` the stage it is in is asked for, and told.

    Raises `TimeoutError` after `limit_s`, in which time spent compiling does not count.
    """
    starting = asyncio.ensure_future(start)
    left_s = limit_s
    try:
        while True:
            began_s = time.monotonic()
            done, _ = await asyncio.wait([starting], timeout=max(0.0, min(left_s, period_s)))
            if done:
                return starting.result()
            now = await stage()
            if now is not None:
                tell(now)
            if now is None or not now.compiles:
                left_s -= time.monotonic() - began_s
                if left_s <= 0:
                    raise TimeoutError
    finally:
        starting.cancel()
