"""A worker in a process of its own, without Ray: what tests kill, stop and starve.

`with worker_child(spec) as child:` starts one and waits until it is ready. `child.ended(timeout_s)` is the sentence it
gave for ending itself. The process ends with the block, and with the test process however that ends.
"""

import asyncio
import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from microtome.actors.link import WorkerEndpoint, WorkerSpec
from microtome.actors.worker import WorkerProcess
from microtome.planner.errors import BatchingError
from microtome.planner.types import Incarnation, WorkerId

ROOT = Path(__file__).resolve().parents[2]


class WorkerChild:
    def __init__(self, process: subprocess.Popen[str], endpoint: WorkerEndpoint) -> None:
        self._process = process
        self.endpoint = endpoint

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def ended(self, timeout_s: float = 10) -> str:
        """Wait until it has ended by itself; the cause it named."""
        self._process.wait(timeout_s)
        assert self._process.stdout is not None
        return self._process.stdout.read().strip().removeprefix("ENDED ")

    @property
    def exit_status(self) -> int | None:
        return self._process.poll()


@contextmanager
def worker_child(spec: WorkerSpec) -> Iterator[WorkerChild]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.worker_child"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(base64.b64encode(pickle.dumps(spec)).decode() + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line.startswith("READY "), line or "it ended before it was ready"
        told = json.loads(line.removeprefix("READY "))
        told["worker"], told["incarnation"] = WorkerId(told["worker"]), Incarnation(told["incarnation"])
        yield WorkerChild(process, WorkerEndpoint(**told))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


async def _serve(spec: WorkerSpec) -> None:
    worker = WorkerProcess(spec, _end)
    try:
        endpoint = await worker.start()
    except BatchingError as error:
        _end(str(error))
        return
    told = {name: getattr(endpoint, name) for name in ("worker", "address", "incarnation", "pid", "device")}
    print("READY", json.dumps(told), flush=True)
    await asyncio.Event().wait()


def _end(cause: str) -> None:
    print("ENDED", cause, flush=True)
    os._exit(1)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    given = pickle.loads(base64.b64decode(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_serve(given))
