"""Who else holds memory of a device: a worker that starts there would get less than it counts on, or push it out.

Asked of `nvidia-smi`, before this process has touched the device. Inside a container it may not see the processes of
others; then the memory in use tells that there are some, and not who.
"""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from microtome.planner.errors import BadConfig

IDLE_MIB = 1024  # of a device that nobody works on: the driver's own, and what runs a display
QUERY_TIMEOUT_S = 20.0
MIB = 2**20

Query = Callable[[str], str]  # arguments of nvidia-smi → what it prints; raises OSError when it cannot be asked


@dataclass(frozen=True, slots=True)
class Holder:
    pid: int
    name: str
    mib: int | None  # None: not told


def check_unheld(device_uuid: str, query: "Query | None" = None) -> None:
    """Raises `BadConfig` naming the processes, or the amount, when somebody holds memory of the device.

    `device_uuid`: with or without the "GPU-" before it. Nothing is checked where `nvidia-smi` is missing.
    """
    ask = query or _nvidia_smi
    uuid = device_uuid if device_uuid.startswith(("GPU-", "MIG-")) else f"GPU-{device_uuid}"
    try:
        apps = ask("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
        used = ask("--query-gpu=uuid,memory.used")
    except OSError:
        return
    holders = [holder for holder in _holders(apps, uuid) if holder.pid != os.getpid()]
    if holders:
        who = ", ".join(f"process {h.pid} ({h.name}{'' if h.mib is None else f', {h.mib} MiB'})" for h in holders)
        raise BadConfig(f"device {uuid} is held by {who}; runtime.shared_device allows it")
    held = _used_mib(used, uuid)
    if held is not None and held > IDLE_MIB:
        raise BadConfig(
            f"device {uuid} has {held} MiB in use, {IDLE_MIB} is the limit, "
            "by a process that is not visible from here; runtime.shared_device allows it"
        )


def _holders(text: str, uuid: str) -> list[Holder]:
    found: list[Holder] = []
    for line in text.splitlines():
        # A process name may hold commas: the three other columns are taken from the ends.
        head, _, rest = line.partition(",")
        pid, _, rest = rest.partition(",")
        name, _, mib = rest.rpartition(",")
        if head.strip() == uuid and pid.strip().isdecimal():
            found.append(Holder(int(pid), os.path.basename(name.strip()) or "?", _whole(mib)))
    return found


def _used_mib(text: str, uuid: str) -> int | None:
    for line in text.splitlines():
        head, _, mib = line.partition(",")
        if head.strip() == uuid:
            return _whole(mib)
    return None


def _whole(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _nvidia_smi(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
    return done.stdout
