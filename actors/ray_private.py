"""Everything of Ray that we use and that is no public name, for `ray==2.60.*`; one test each.

Calls need a connection to a cluster, but the one about loopback. Blocking, a few milliseconds each.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants, worker
from ray._private.state import actors, available_resources_per_node, state, total_resources_per_node
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup


@dataclass(frozen=True, slots=True)
class ActorFacts:
    """What the cluster knows of one actor."""

    state: str  # "ALIVE", "RESTARTING", "DEAD", or on the way to the first
    pid: int  # 0: it has no process yet
    node_address: str
    node: str  # its hex id


def actor_facts(actor: Any) -> ActorFacts | None:
    """Of the actor behind a handle; None when the cluster has forgotten it."""
    found = actors(actor._actor_id.hex())
    if not found:
        return None
    return ActorFacts(found["State"], int(found["Pid"]), found["Address"]["IPAddress"], found["Address"]["NodeID"])


def logs_folder() -> Path:
    """Of this process's node: where Ray keeps the logs of the processes that it has started there."""
    return Path(worker._global_node.get_logs_dir_path())


def resources_per_node() -> Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]]:
    """Node id to (free, total) resources. `ray.nodes()` knows the totals only."""
    free, total = available_resources_per_node(), total_resources_per_node()
    return {node: (free.get(node, {}), total[node]) for node in total}


def draining_nodes() -> Mapping[str, int]:
    """Node id to deadline, in milliseconds since 1970; 0: no deadline. `ray.nodes()` never shows it."""
    return dict(state.get_draining_nodes())


def placement_group_by_id(group_id: str) -> PlacementGroup:
    """A handle made from the hex id of `placement_group_table`, which public calls give by name and namespace only."""
    return PlacementGroup(ray._raylet.PlacementGroupID(bytes.fromhex(group_id)))


def keep(key: str, value: bytes) -> None:
    """Keep bytes with the cluster's head, under one key, until they are forgotten or the cluster ends."""
    internal_kv._internal_kv_put(key.encode(), value, overwrite=True)


def kept(key: str) -> bytes:
    """What was kept; empty: nothing."""
    return internal_kv._internal_kv_get(key.encode()) or b""


def forget(key: str) -> None:
    internal_kv._internal_kv_del(key.encode())


def shuts_down_by_sigkill() -> None:
    """Have `ray.shutdown` end the Ray that this process has started by SIGKILL at once.

    It sends SIGTERM first and waits a second for each of five processes: in vain where they do not get that signal.
    What the raylet has started, its agents and workers, is ended too: by themselves they take seconds to notice.
    """
    node = worker._global_node
    kill_all = node.kill_all_processes

    def at_once(check_alive: bool = True, allow_graceful: bool = False, wait: bool = False) -> None:
        started: list[psutil.Process] = []
        for raylet in node.all_processes.get(ray_constants.PROCESS_TYPE_RAYLET, ()):
            with suppress(psutil.NoSuchProcess):
                started += psutil.Process(raylet.process.pid).children(recursive=True)
        kill_all(check_alive=check_alive, allow_graceful=False, wait=wait)
        for process in started:
            with suppress(psutil.NoSuchProcess):  # it also knows a number that another process has by now
                process.kill()

    node.kill_all_processes = at_once


def binds_to_loopback() -> bool:
    """Whether a Ray started by this process keeps to 127.0.0.1; decided by the environment when ray is imported."""
    return not ray_constants.ENABLE_RAY_CLUSTER


def bind_to_loopback() -> None:
    """Make it so although ray has been imported already. Children read the environment variable by themselves."""
    ray_constants.ENABLE_RAY_CLUSTER = False
