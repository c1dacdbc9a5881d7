"""The process of one engine, seen from the bench: started, asked, ended. It has a process group of its own.

Raises EngineFailed, with the log's path, for whatever keeps it from answering.
"""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

START_S = 900.0  # compiling on first use included, on a machine that has other things to do
END_S = 60.0


class EngineFailed(Exception):
    """It did not start, ended, or is silent."""


class EngineProcess:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("ab") as said:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
            )
        self._begun = b""  # of a line that is not yet whole
        try:
            self.facts: Mapping[str, Any] = self._line(START_S)["ready"]
        except BaseException:
            self.close(END_S if self._process.poll() is not None else 0)
            raise

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("it has ended") from None
        return self._line(timeout_s)

    def hold(self) -> None:
        """Its whole group stands still until `go_on`: whatever spins or ticks in it costs the others nothing."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self, timeout_s: float = END_S) -> None:
        """It ends by itself when its lines end; after `timeout_s`, its whole group is ended."""
        self.go_on()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _line(self, timeout_s: float) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._begun:
                if not ready.select(deadline - time.monotonic()):
                    raise self._failed(f"no answer after {timeout_s:g} s")
                got = os.read(self._process.stdout.fileno(), 1 << 20)
                if not got:
                    raise self._failed("it has ended")
                self._begun += got
        line, _, self._begun = self._begun.partition(b"\n")
        value: Mapping[str, Any] = json.loads(line)
        return value

    def _failed(self, how: str) -> EngineFailed:
        return EngineFailed(f"{how}; see {self._log}")
