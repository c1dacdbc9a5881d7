"""An autoscaled Ray cluster on this machine: Ray's own autoscaler, whose nodes are raylets with invented resources.

It uses Ray's provider for its own tests, by way of provider type `external`: the ready-made classes around it need
files that are not in the wheel, or end every Ray on the machine.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import psutil
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

START_S = 60.0
POLL_S = 0.05
_COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")


class FakeCloud:
    """A head node, and up to `max_workers` others that come when something wants them and go when idle."""

    def __init__(self, *, head_cpus: int, worker: dict[str, int], max_workers: int, idle_s: float) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self._head_cpus = head_cpus
        node_types = {
            "ray.head.default": {"resources": {"CPU": head_cpus}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": max_workers},
        }
        provider = {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "gcs_address": self.address,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
        }
        config = {
            "cluster_name": "fake",
            "max_workers": max_workers,
            "idle_timeout_minutes": idle_s / 60,
            "upscaling_speed": 1.0,
            "provider": provider,
            "head_node_type": "ray.head.default",
            "available_node_types": node_types,
            "auth": {},
            "cluster_synced_files": [],
            "file_mounts": {},
            **{f"{name}_commands": [] for name in _COMMANDS},
        }
        self._file = tempfile.NamedTemporaryFile("w", suffix=".yaml")  # noqa: SIM115 - closed by __exit__
        json.dump(config, self._file)
        self._file.flush()
        self._environment = dict(
            os.environ,
            RAY_FAKE_CLUSTER="1",
            AUTOSCALER_UPDATE_INTERVAL_S="1",
            RAY_OVERRIDE_NODE_ID_FOR_TESTING=FAKE_HEAD_NODE_ID,
            RAY_CLOUD_INSTANCE_ID=FAKE_HEAD_NODE_ID,
            RAY_NODE_TYPE_NAME="ray.head.default",
            RAY_AUTH_MODE="disabled",
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        )

    def __enter__(self) -> "FakeCloud":
        command = [
            str(Path(sys.executable).with_name("ray")),
            *("start", "--head", "--block", f"--port={self._port}", f"--num-cpus={self._head_cpus}", "--num-gpus=0"),
            *(f"--autoscaling-config={self._file.name}", "--include-dashboard=false", "--disable-usage-stats"),
            f"--object-store-memory={80 * 2**20}",
        ]
        self._process = subprocess.Popen(
            command,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 0.2).close()
                return self
            except OSError:
                time.sleep(POLL_S)
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("ray start failed")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends what this object started, and nothing else."""
        top = psutil.Process(self._process.pid)
        mine = [*top.children(recursive=True), top]
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in mine:
                try:
                    end(process)
                except psutil.Error:
                    continue
            mine = psutil.wait_procs(mine, 2)[1]
        self._process.wait()
        self._file.close()
