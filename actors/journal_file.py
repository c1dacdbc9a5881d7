"""The journal's file: what the driver decided, on disk, without the driver ever waiting for a disk.

`add` and `broke` are called on the driver's loop: they encode, and leave the bytes to a thread that writes them, ten
times a second, and has them synced once a second and at the end. So a driver that is killed loses a tenth of a second
of its journal, and a machine that stops a second or so; a record that was cut short is cut off when the file is next
opened.

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
from microtome.planner.events import Event, Instruction
from microtome.planner.journal import Encoder, is_journal, records_of

log = logging.getLogger(__name__)

WRITE_EVERY_S = 0.1
SYNC_EVERY_S = 1.0
CLOSE_TIMEOUT_S = 5.0  # for a disk that hangs
MAX_PENDING_BYTES = 64 * 2**20  # encoded and not yet written


class JournalFile:
    """Open, then `add` from one thread, then `close`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.written_bytes = 0  # of this life, handed to the operating system
        self._max_bytes = max_bytes
        self._encoder = Encoder()
        self._file = -1
        self._left = 0  # bytes that may still be added
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._lock = threading.Lock()  # of the two above
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
        self._put(self._encoder.header(config, version=version, unix_us=time.time_ns() // 1000))
        self._thread.start()

    def add(self, calls: Sequence[tuple[Event, Sequence[Instruction]]]) -> None:
        """Record what `Control.handle` was given and answered, in order. Never raises, never waits for the disk."""
        if self._stopped is not None:
            return
        try:
            self._put(b"".join([self._encoder.entry(event, instructions) for event, instructions in calls]))
        except Exception as error:  # a value that has no record: the journal is lost, the service is not
            log.exception("a record of the journal cannot be made")
            self._stop(f"a record cannot be made: {error}")

    def broke(self, event: Event, error: str) -> None:
        """Record the event that broke the planner, and close."""
        if self._stopped is None:
            try:
                self._put(self._encoder.raised(event, error))
            except Exception:
                log.exception("the journal's last record cannot be made")
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

    def _put(self, data: bytes) -> None:
        if len(data) > self._left:
            self._stop(f"it has reached journal.max_bytes {self._max_bytes}")
            return
        self._left -= len(data)
        with self._lock:
            self._pending.append(data)
            self._pending_bytes += len(data)
            late = self._pending_bytes > MAX_PENDING_BYTES
        if late:
            self._stop(f"the disk does not keep up: {self._pending_bytes} bytes wait to be written")

    def _stop(self, cause: str) -> None:
        if self._stopped is None:
            self._stopped = cause
            log.warning("journal %s: nothing more of this life is recorded: %s", self.path, cause)

    def _write(self) -> None:
        """The thread."""
        synced = time.monotonic()
        dirty = False
        try:
            while True:
                ending = self._ended.wait(WRITE_EVERY_S)
                with self._lock:
                    data, self._pending, self._pending_bytes = self._pending, [], 0
                if data:
                    self._write_all(b"".join(data))
                    dirty = True
                if dirty and (ending or time.monotonic() - synced >= SYNC_EVERY_S):
                    os.fsync(self._file)
                    synced, dirty = time.monotonic(), False
                if ending:
                    return
        except OSError as error:
            self._stop(error.strerror or str(error))
        finally:
            self._release()

    def _write_all(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            count = os.write(self._file, rest)
            self.written_bytes += count
            rest = rest[count:]
