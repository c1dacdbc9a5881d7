"""What has become of a worker's process: looked at on its own node, when its driver has lost it.

Two witnesses. The file of its last words (`last_words`), on any kernel. And the kernel itself, through a `ProcessWatch`
held since the process was alive: Linux 6.15 and later tell its exit status to anybody, so that even SIGKILL, which
leaves no word, has a name. Blocking calls, less than a second.
"""

import fcntl
import os
import select
import signal
import struct
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from microtome.actors.last_words import WHERE, Words, oom_kills, read_words

DEATH_WAIT_S = 0.5  # its sockets close before it is gone: a big process takes a moment longer
ANSWER_WAIT_S = 0.2  # for a process that is asked where it is
LOOK_S = 0.01

# `struct pidfd_info` of linux/pidfd.h, as of its first version with an exit code: mask, cgroup, 11 ids, exit code.
_INFO = struct.Struct("=QQ11Ii")
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11  # _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)
_INFO_EXIT = 1 << 3


class Loss(Enum):
    """How a worker was lost."""

    DIED = "died"  # its process ended
    HUNG = "hung"  # its process lived, and no step finished
    FAILED = "failed a step"  # or a probe: the device's state is unknown, so its process ends
    LINK = "link"  # its process lived, and could not be reached, or answered what it should not
    NOT_STARTED = "not started"  # it never was ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Where a worker process is to be looked for. Plain values: it can be pickled."""

    node: str  # Ray's hex id
    pid: int
    words: str  # path of its last words, on its node; empty: it could write none


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What was found. Plain values: it can be pickled."""

    lives: bool
    stopped: bool = False  # it lives, and a signal or a tracer has stopped it
    signal: str = ""  # that ended it, as "SIGKILL"; empty: none did, or nobody can say
    exit_code: int | None = None
    step: int = 0  # the last one that began; 0: none did, or nobody can say
    in_step: bool = False
    where: str = ""  # of a crash, or of a step that is under way: the innermost Python frames
    cause: str = ""  # in the process's own words
    oom_kills: int = 0  # of any process on its node, while it lived

    @property
    def how(self) -> str:
        """In a word or two: "SIGKILL", "exit 3"; empty: it lives, or nobody can say."""
        return self.signal or ("" if self.exit_code is None else f"exit {self.exit_code}")

    def __str__(self) -> str:
        if self.lives:
            text = "its process still ran" + (f" in step {self.step}" if self.step and self.in_step else "")
            text += f", at {self.where}" if self.where else ""
            return text + (", stopped by a signal" if self.stopped else "")
        if self.signal:
            text = f"its process was killed by {self.signal}"
        elif self.exit_code is not None:
            text = f"its process ended with exit code {self.exit_code}"
        else:
            text = "its process ended without a word, as after SIGKILL"
        if self.step:
            text += f" {'in' if self.in_step else 'after'} step {self.step}"
        if self.where:
            text += f", at {self.where}"
        if self.oom_kills and self.signal in ("", "SIGKILL") and self.exit_code is None:
            text += f"; out of memory its node killed {self.oom_kills} process(es) since it started"
        if self.cause:
            text += f"; its last words: {self.cause}"
        return text


class ProcessWatch:
    """A hold on a living process of this machine, by which its exit status can be had once it has ended.

    The number may be another process's by then; the hold is not.
    """

    def __init__(self, pid: int) -> None:
        """Raises `OSError` when there is no such process."""
        self._pidfd = os.pidfd_open(pid)

    def ended(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def wait_status(self) -> int | None:
        """As `os.waitpid` has it. None: it has not ended, or this kernel does not tell."""
        info = bytearray(_INFO.pack(_INFO_EXIT, *([0] * 13)))
        try:
            fcntl.ioctl(self._pidfd, _GET_INFO, info)
        except OSError:
            return None
        mask, *_, status = _INFO.unpack(info)
        return int(status) if mask & _INFO_EXIT else None

    def close(self) -> None:
        os.close(self._pidfd)


def examine(trace: Trace, watch: ProcessWatch | None = None) -> Remains | None:
    """Look at the process on this machine, giving one that dies a moment to do so. None: nothing is known of it.

    One that is still in a step is asked where, with a signal that may end it: only for a process that is to be ended.
    """
    path = Path(trace.words) if trace.words else None
    end_s = time.monotonic() + DEATH_WAIT_S
    while True:
        words = read_words(path) if path is not None else None
        if watch is None and words is None:
            return None
        lives = not watch.ended() if watch is not None else words is not None and words.lives
        stopped = lives and _state(trace.pid) in ("T", "t")
        if not lives or stopped or time.monotonic() >= end_s:
            break
        time.sleep(LOOK_S)
    if lives:
        if words is not None and words.in_step and not stopped:
            words = _asked_where(trace, words)
        return _found(words, lives=True, stopped=stopped)
    return _found(words, status=_status_soon(watch))


def _asked_where(trace: Trace, words: Words) -> Words:
    """The words, with where the step thread is."""
    try:
        os.kill(trace.pid, WHERE)
    except OSError:
        return words
    end_s = time.monotonic() + ANSWER_WAIT_S
    while time.monotonic() < end_s:
        time.sleep(LOOK_S)
        told = read_words(Path(trace.words))
        if told is not None and told.stands:
            return told
    return words


def _status_soon(watch: ProcessWatch | None) -> int | None:
    """The status is there when the parent has taken note of the end, which may be a moment after it."""
    if watch is None:
        return None
    end_s = time.monotonic() + LOOK_S * 5
    while (status := watch.wait_status()) is None and time.monotonic() < end_s:
        time.sleep(LOOK_S / 5)
    return status


def _found(words: Words | None, *, lives: bool = False, stopped: bool = False, status: int | None = None) -> Remains:
    name, exit_code = "", None
    if status is not None:
        code = os.waitstatus_to_exitcode(status)
        name, exit_code = (_signal_name(-code), None) if code < 0 else ("", code)
    elif words is not None and not lives:
        name, exit_code = words.fault, None if words.fault else words.exit_code
    if words is None:
        return Remains(lives=lives, stopped=stopped, signal=name, exit_code=exit_code)
    return Remains(
        lives=lives,
        stopped=stopped,
        signal=name,
        exit_code=exit_code,
        step=words.step,
        in_step=words.in_step,
        where=words.stands if lives else words.where,
        cause=words.cause,
        oom_kills=max(0, oom_kills() - words.oom_kills),
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one


def _state(pid: int) -> str:
    """The kernel's letter for the process; empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
