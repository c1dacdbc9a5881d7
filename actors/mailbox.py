"""From the step thread to the event loop, without giving up the interpreter on the way.

`loop.call_soon_threadsafe` writes to a pipe, and lets go of the GIL to do so. The loop, woken by that write, takes it
and works on the answer: a few hundred microseconds in which the next step could have begun. With a plan waiting, that
was most of a worker's idle time (`bench.link`). Here the write happens with the GIL held, so the loop starts when the
step thread first lets go of it, which is when the device has its next step.
"""

import asyncio
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable

# PyDLL, unlike CDLL, keeps the GIL during a call. This one never blocks: its descriptor is non-blocking.
_write_with_gil = ctypes.PyDLL(None).eventfd_write
_write_with_gil.argtypes = (ctypes.c_int, ctypes.c_uint64)


class Mailbox:
    """`post` from any thread; the callbacks run on the loop, in the order they were posted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._closing = threading.Lock()  # a descriptor that is closed may be somebody else's a moment later
        self._bell: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._bell, self._deliver)

    def post(self, callback: Callable[..., None], *arguments: object) -> None:
        """After `close` nothing happens."""
        self._letters.append((callback, arguments))
        with self._closing:
            if self._bell is not None:
                _write_with_gil(self._bell, 1)

    def close(self) -> None:
        """On the loop. What was posted and not delivered is dropped. Idempotent."""
        with self._closing:
            bell, self._bell = self._bell, None
        if bell is not None:
            self._loop.remove_reader(bell)
            os.close(bell)

    def _deliver(self) -> None:
        if self._bell is None:
            return
        os.eventfd_read(self._bell)  # before the letters: one posted from here on rings again
        for _ in range(len(self._letters)):
            callback, arguments = self._letters.popleft()
            self._loop.call_soon(callback, *arguments)  # one that raises keeps nobody's letter back
