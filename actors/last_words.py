"""What a worker process leaves behind for whoever asks why it ended: a small file on its node.

Written so that the words survive any end: the number of the step under way lies in a mapped page, which the kernel
keeps when the process is killed; a crash (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) is written by `faulthandler` from
the signal handler itself; the status of `exit()`, from C too, by the C library on the way out; a cause that the worker
knows, by the worker. What leaves no word: SIGKILL, another signal without a handler, `_exit`.

The file is locked while the process lives, which tells whoever looks whether it does, without its process id. One that
lives writes down where each of its threads is when it gets `WHERE`: how a step that hangs is looked into.

One `LastWords` to a process, since crashes are the process's own; `began` and `ended` are the step thread's, the rest
anybody's.
"""

import ctypes
import faulthandler
import fcntl
import mmap
import os
import re
import signal
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

WHERE = signal.SIGUSR2  # ends a process that has not called `heed_crashes`: for one that is to be ended anyway
SHOWN_FRAMES = 3  # the innermost ones

_HEADER = struct.Struct("<8sQBBxxxxxxQ")  # magic, step, whether it is under way, exit status, the step thread
_MAGIC = b"mtwords1"
_STEP, _STATUS_AT = struct.Struct("<QB"), 17
_STEP_AT, _THREAD_AT, _TEXT_AT = 8, 24, 64
_NO_STATUS = 0xFF  # exit status 255 cannot be told from none
_OOM_KILLS = Path("/proc/vmstat")

_FAULTS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_FAULT = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+) .*\n((?:  .*\n?)+)", re.MULTILINE)
_CAUSE = re.compile(r"^cause: (.+)$", re.MULTILINE)
_OOM = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class LastWords:
    """The process's own side."""

    def __init__(self, path: Path) -> None:
        """Begin the file, which must not be there yet. Raises `OSError`."""
        self.path = path
        self._thread: int | None = None  # the step thread, once it has begun a step
        # Never closed: the lock ends with the process, and the crash handler keeps the descriptor.
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._file, _HEADER.pack(_MAGIC, 0, 0, _NO_STATUS, 0).ljust(_TEXT_AT, b"\0"))
        self._header = mmap.mmap(self._file, _TEXT_AT)
        self._write(f"oom_kill {oom_kills()}\n")

    def heed_crashes(self) -> None:
        """From now on a crash or an `exit()` of this process is written down, too."""
        faulthandler.enable(self._file, all_threads=False)  # the thread that crashed; others may hold locks
        faulthandler.register(WHERE, self._file, all_threads=True)
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        status = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        os.lseek(status, _STATUS_AT, os.SEEK_SET)
        stream = ctypes.c_void_p(libc.fdopen(status, b"r+b"))
        libc.setvbuf(stream, None, 2, 0)  # 2: unbuffered
        # `on_exit` calls its function with the exit status and the argument, and `fputc` writes a byte to a stream: the
        # status gets written with no interpreter involved, which may be gone by then.
        libc.on_exit(ctypes.cast(libc.fputc, ctypes.c_void_p), stream)

    def began(self, step: int) -> None:
        if self._thread is None:
            self._thread = threading.get_ident()
            struct.pack_into("<Q", self._header, _THREAD_AT, self._thread)
        _STEP.pack_into(self._header, _STEP_AT, step, 1)

    def ended(self, step: int) -> None:
        _STEP.pack_into(self._header, _STEP_AT, step, 0)

    def say(self, cause: str) -> None:
        """Why the process ends, as it knows itself."""
        self._write(f"cause: {' '.join(cause.split())}\n")

    def _write(self, text: str) -> None:
        os.write(self._file, text.encode(errors="replace"))


@dataclass(frozen=True, slots=True)
class Words:
    """What was found."""

    lives: bool
    step: int  # the last one that began; 0: none did
    in_step: bool  # it had not ended
    exit_code: int | None  # of an `exit()`
    fault: str  # the signal of a crash, as "SIGSEGV"; empty: none was written
    where: str  # of the crash: the innermost Python frames
    stands: str  # where the step thread was, when it was last asked for; empty: it was not
    cause: str  # in the process's own words; empty: it had none
    oom_kills: int  # that the node had seen when the process began


def read_words(path: Path) -> Words | None:
    """None: there is no such file, or it is none of ours."""
    try:
        with path.open("rb") as file:
            data = file.read()
            lives = not _unlocked(file.fileno())
    except OSError:
        return None
    if len(data) < _TEXT_AT or not data.startswith(_MAGIC):
        return None
    _, step, in_step, status, thread = _HEADER.unpack_from(data)
    text = data[_TEXT_AT:].decode(errors="replace")
    fault = _FAULT.search(text)
    stands = [stack for number, stack in _THREAD.findall(text) if int(number, 16) == thread]
    causes, oom = _CAUSE.findall(text), _OOM.search(text)
    return Words(
        lives=lives,
        step=step,
        in_step=bool(in_step),
        exit_code=None if status == _NO_STATUS else status,
        fault=_FAULTS.get(fault[1], fault[1]) if fault else "",
        where=_innermost(text[fault.end() :]) if fault else "",
        stands=_innermost(stands[-1]) if stands else "",
        cause=causes[0] if causes else "",  # the first one: what follows is its consequence
        oom_kills=int(oom[1]) if oom else 0,
    )


def _innermost(stack: str) -> str:
    frames = _FRAME.findall(stack.partition("\n\nExtension modules")[0])[:SHOWN_FRAMES]
    return " from ".join(f"{Path(path).name}:{line} in {function}" for path, line, function in frames)


def _unlocked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True  # closing the file gives the lock back


def oom_kills() -> int:
    """Processes that this node's kernel has killed for want of memory since it started; 0 where it does not say."""
    try:
        found = _OOM.search(_OOM_KILLS.read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0
