"""The journal's file: what the driver decided, on disk, without the driver ever waiting for it.

`add` and `broke` are called on the driver's loop, and hand over what never changes any more: events and instructions.
A thread turns them into bytes and writes these, ten times a second, and has them synced once a second and at the end.
So a driver that is killed loses a tenth of a second of its journal, and of ticks that led to nothing ten seconds; a
machine that stops loses a second or so. A record that was cut short is cut off when the file is next opened.

The thread shares the interpreter with the loop: what encoding costs is the process's. But many calls at once cost less
than each by itself; and after `ENCODED_AT_ONCE` calls it rests, so that the loop never waits longer than for these.

A life is recorded from its start without a gap, because events are of use only behind all those before them. When the
next record would pass `max_bytes`, when the disk is full or fails, or when it does not keep up, recording ends for this
life: one warning, and the metrics say so. The service goes on. A driver that starts appends its life to the file; where
that holds half of `max_bytes` already, or is damaged, it is first moved to the same name with ".1" behind it, and takes
the place of the one that was there. So there are never more than two files, of `max_bytes` each.
"""

import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadConfig
from microtome.planner.events import Event, Instruction, RunStep, Submit
from microtome.planner.journal import Encoder, is_journal, records_of

Call = tuple[Event, Sequence[Instruction]]

log = logging.getLogger(__name__)

WRITE_EVERY_S = 0.1
SYNC_EVERY_S = 1.0
CLOSE_TIMEOUT_S = 5.0  # for a disk that hangs
ENCODED_AT_ONCE = 16  # calls; a millisecond or so
REST_S = 0.0005  # between as many, for whoever waits for the interpreter
MAX_PENDING_TOKENS = 2**22  # of plans and prompts that wait to be written: some hundred MiB


class JournalFile:
    """Open, then `add` from one thread, then `close`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.written_bytes = 0  # of this life, handed to the operating system
        self._max_bytes = max_bytes
        self._encoder = Encoder()
        self._file = -1
        self._left = 0  # bytes that may still be written
        self._over = False  # what is handed over now would stand behind a gap
        self._header = b""
        self._pending: list[Call] = []
        self._pending_tokens = 0
        self._last: tuple[Event, str] | None = None  # the event that broke the planner, and how
        self._lock = threading.Lock()  # of the three above
        self._ended = threading.Event()
        self._stopped: str | None = "it is not open"  # why nothing more is recorded
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)

    @property
    def recording(self) -> bool:
        return self._stopped is None

    def open(self, config: PlannerConfig, version: str) -> None:
        """Begin a life. May read all of the file. Raises `BadConfig` if it is none of ours or cannot be written."""
        try:
            size = self._prepare()
        except OSError as error:
            self._release()
            raise BadConfig(f"journal {str(self.path)!r} cannot be written: {error.strerror or error}") from error
        except BadConfig:
            self._release()
            raise
        self._left, self._stopped = self._max_bytes - size, None
        self._header = self._encoder.header(config, version=version, unix_us=time.time_ns() // 1000)
        self._thread.start()

    def add(self, calls: Sequence[Call]) -> None:
        """Record what `Control.handle` was given and answered, in order. Never raises, never waits for the disk.

        The sequence is kept: neither it nor what is in it is to be changed.
        """
        if self._stopped is not None:
            return
        tokens = sum(map(_tokens, calls))
        with self._lock:
            self._pending += calls
            self._pending_tokens += tokens
            late = self._pending_tokens > MAX_PENDING_TOKENS
        if late:
            self._stop(f"the disk does not keep up: {self._pending_tokens} tokens of plans and prompts wait for it")

    def broke(self, event: Event, error: str) -> None:
        """Record the event that broke the planner, and close."""
        if self._stopped is None:
            with self._lock:
                self._last = event, error
        self.close()

    def close(self) -> None:
        """Write what is pending, and sync; not longer than a disk may take."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        self._stopped = self._stopped or "it is closed"

    # --- inside ---

    def _prepare(self) -> int:
        """Lock the file, and cut off what a crash tore. Returns its size."""
        self._lock_file()
        size = os.fstat(self._file).st_size
        if not size:
            return 0
        with mmap.mmap(self._file, size, access=mmap.ACCESS_READ) as data:
            if not is_journal(data):
                raise BadConfig(f"journal {str(self.path)!r} is a file of something else: it is left alone")
            extent = records_of(data)
        if extent.damage is not None or extent.end > self._max_bytes // 2:
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            self._release()
            self._lock_file()
            return 0
        os.ftruncate(self._file, extent.end)
        return extent.end

    def _lock_file(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends
        except BlockingIOError as error:
            raise BadConfig(f"journal {str(self.path)!r} is being written by another service") from error

    def _release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _stop(self, cause: str) -> None:
        if self._stopped is None:
            self._stopped = cause
            log.warning("journal %s: nothing more of this life is recorded: %s", self.path, cause)

    def _write(self) -> None:
        """The thread."""
        synced = time.monotonic()
        dirty = False
        try:
            dirty = self._write_all(self._within_bound([self._header]))
            while True:
                ending = self._ended.wait(WRITE_EVERY_S)
                with self._lock:
                    calls, self._pending, self._pending_tokens = self._pending, [], 0
                dirty |= self._write_all(self._encoded(calls, ending))
                if dirty and (ending or time.monotonic() - synced >= SYNC_EVERY_S):
                    os.fsync(self._file)
                    synced, dirty = time.monotonic(), False
                if ending:
                    return
        except OSError as error:
            self._stop(error.strerror or str(error))
        finally:
            self._release()

    def _encoded(self, calls: list[Call], ending: bool) -> bytes:
        """Their records; with the last, the end's. A call that has no record ends the recording, not the service."""
        records: list[bytes] = []
        try:
            for first in range(0, len(calls), ENCODED_AT_ONCE):
                if first and not ending:
                    time.sleep(REST_S)
                for event, instructions in calls[first : first + ENCODED_AT_ONCE]:
                    records.append(self._encoder.entry(event, instructions))
            if ending:
                records.append(self._encoder.raised(*self._last) if self._last else self._encoder.waiting())
        except Exception as error:
            log.exception("a record of the journal cannot be made")
            self._stop(f"a record cannot be made: {error}")
            data, self._over = self._within_bound(records), True
            return data
        return self._within_bound(records)

    def _within_bound(self, records: list[bytes]) -> bytes:
        """Those in front that the file has room for. Nothing once recording has ended: there is no gap in a life."""
        if self._over:
            return b""
        data = b"".join(records)
        if len(data) > self._left:
            self._over = True
            room, fit = self._left, 0
            while len(records[fit]) <= room:
                room -= len(records[fit])
                fit += 1
            data = b"".join(records[:fit])
            self._stop(f"it has reached journal.max_bytes {self._max_bytes}")
        self._left -= len(data)
        return data

    def _write_all(self, data: bytes) -> bool:
        """Whether there was anything to write."""
        rest = memoryview(data)
        while rest:
            count = os.write(self._file, rest)
            self.written_bytes += count
            rest = rest[count:]
        return bool(data)


def _tokens(call: Call) -> int:
    """How much memory it keeps, about."""
    event, instructions = call
    count = len(event.prompt) if type(event) is Submit else 1
    for one in instructions:
        if type(one) is RunStep:
            count += len(one.plan.cells)
    return count
