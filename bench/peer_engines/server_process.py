"""Another engine's server as a child of this process, ended with it. Standard library only."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from os import environ
from socket import create_server

READY_S = 240.0
END_S = 20.0
HOST = "127.0.0.1"


def free_port() -> int:
    with create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def server(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Iterator[None]:
    """Runs until the block is left; the block begins when `/health` answers. Raises RuntimeError when it never does."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr, env={**environ, **environment}
    )
    try:
        deadline = time.monotonic() + READY_S
        while not _healthy(port):
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended with status {process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} was not ready after {READY_S:g} s")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _healthy(port: int) -> bool:
    connection = HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def first_line(command: Sequence[str]) -> str:
    """Of what a command says, for a version."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return next(line for line in (done.stdout + done.stderr).splitlines() if line.strip()).strip()
