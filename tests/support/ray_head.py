"""A Ray cluster of one node as `ray start` makes it, with a dashboard, so that jobs can be submitted to it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from ray.job_submission import JobStatus, JobSubmissionClient

START_S, JOB_S = 60.0, 180.0


@dataclass(frozen=True)
class RayHead:
    address: str  # "host:port" of the head
    dashboard: str  # its URL

    def run_job(self, entrypoint: str, working_dir: Path) -> tuple[JobStatus, str]:
        """Submit, wait for the end, and return how it ended and everything it printed."""
        client = JobSubmissionClient(self.dashboard)
        job = client.submit_job(entrypoint=entrypoint, runtime_env={"working_dir": str(working_dir)})
        end = time.monotonic() + JOB_S
        while not (status := client.get_job_status(job)).is_terminal():
            if time.monotonic() > end:
                client.stop_job(job)
                raise TimeoutError(f"{entrypoint!r} still ran after {JOB_S:g} s:\n{client.get_job_logs(job)}")
            time.sleep(0.2)
        return status, client.get_job_logs(job)


@contextmanager
def ray_head(temporary: Path, cpus: int = 8) -> Iterator[RayHead]:
    """Start it and end what was started, and nothing else. `temporary` is short: socket paths lie below it."""
    port, dashboard_port, agent_port = _free_ports(3)
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
    command += [f"--num-cpus={cpus}", "--num-gpus=0", "--include-dashboard=true", f"--dashboard-port={dashboard_port}"]
    command += [f"--dashboard-agent-listen-port={agent_port}"]  # by default the same one on every Ray of a machine
    command += [f"--temp-dir={temporary}", "--object-store-memory=100000000", "--disable-usage-stats"]
    with (temporary / "head.log").open("w+") as log:
        head = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            for listening in (port, dashboard_port, agent_port):
                _wait_for(listening, head, log.name)
            yield RayHead(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}")
        finally:
            _end(head)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for bound in sockets:
        bound.bind(("127.0.0.1", 0))
    ports = [bound.getsockname()[1] for bound in sockets]
    for bound in sockets:
        bound.close()
    return ports


def _wait_for(port: int, head: "subprocess.Popen[bytes]", log: str) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return
        except OSError:
            time.sleep(0.05)
        if head.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"ray start failed: {Path(log).read_text()[-2000:]}; {os.environ.get('RAY_TMPDIR')}")


def _end(head: "subprocess.Popen[bytes]") -> None:
    mine = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)] if head.poll() is None else []
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in mine:
            try:
                end(process)
            except psutil.NoSuchProcess:
                continue
        _, mine = psutil.wait_procs(mine, timeout=4)
    head.wait()
