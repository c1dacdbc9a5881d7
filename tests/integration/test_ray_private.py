"""Each private name of Ray that we use still does what we use it for."""

import contextlib
import inspect
import os
import subprocess
import time
from copy import copy
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray._private import worker
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from microtome.actors import ray_private


@ray.remote(num_cpus=0)
class Sleeper:
    def pid(self) -> int:
        return os.getpid()


def test_actor_facts_tell_process_node_and_death(ray_session: None) -> None:
    actor = Sleeper.remote()
    pid = ray.get(actor.pid.remote())
    facts, node = ray_private.actor_facts(actor), ray.get_runtime_context().get_node_id()
    assert facts == ray_private.ActorFacts("ALIVE", pid, ray.util.get_node_ip_address(), node)
    ray.kill(actor)
    while (facts := ray_private.actor_facts(actor)) is not None and facts.state != "DEAD":
        time.sleep(0.01)
    assert facts == ray_private.ActorFacts("DEAD", pid, ray.util.get_node_ip_address(), node)


def test_logs_folder_is_where_output_of_processes_goes(ray_session: None) -> None:
    pid = ray.get(Sleeper.remote().pid.remote())
    assert list(ray_private.logs_folder().glob(f"worker-*-{pid}.err"))


def test_resources_per_node_tell_free_from_total(ray_session: None) -> None:
    group = placement_group([{"CPU": 1}], lifetime="detached")
    assert group.wait(10)
    ((free, total),) = ray_private.resources_per_node().values()
    assert total["CPU"] - free["CPU"] >= 1
    remove_placement_group(group)


def test_placement_group_is_found_by_its_hex_id(ray_session: None) -> None:
    group = placement_group([{"CPU": 1}], lifetime="detached", name="found-by-id")
    (group_id,) = (i for i, g in placement_group_table().items() if g["name"] == "found-by-id")
    remove_placement_group(ray_private.placement_group_by_id(group_id))
    while placement_group_table()[group_id]["state"] != "REMOVED":
        time.sleep(0.01)
    assert group.id.hex() == group_id


def test_bytes_are_kept_under_their_key_until_they_are_forgotten(ray_session: None) -> None:
    assert ray_private.kept("tests/key") == b""
    ray_private.keep("tests/key", b"one")
    ray_private.keep("tests/key", b"two")
    assert ray_private.kept("tests/key") == b"two"
    ray_private.forget("tests/key")
    ray_private.forget("tests/key")
    assert ray_private.kept("tests/key") == b""


def test_shutdown_sends_no_sigterm_and_waits_for_nobody_to_heed_it(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, killed = copy(worker._global_node), []
    assert {"check_alive", "allow_graceful", "wait"} == set(inspect.signature(node.kill_all_processes).parameters)
    assert "_global_node.kill_all_processes(" in inspect.getsource(ray.shutdown)
    monkeypatch.setattr(node, "_kill_process_type", lambda kind, **how: killed.append((kind, how["allow_graceful"])))
    monkeypatch.setattr(worker, "_global_node", node)
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [])  # those of the Ray that the next tests use
    ray_private.shuts_down_by_sigkill()
    node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
    assert ("raylet", False) in killed
    assert ("gcs_server", False) in killed
    assert not any(graceful for _, graceful in killed)


def test_shutdown_ends_what_the_raylet_has_started(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sh", "-c", "sleep 1000 & wait"]) as raylet:
        while not (children := psutil.Process(raylet.pid).children()):
            time.sleep(0.01)
        node = copy(worker._global_node)
        monkeypatch.setattr(node, "all_processes", {"raylet": [SimpleNamespace(process=raylet, use_valgrind=False)]})
        monkeypatch.setattr(node, "_kill_process_type", lambda kind, **how: raylet.kill())
        monkeypatch.setattr(worker, "_global_node", node)
        ray_private.shuts_down_by_sigkill()
        node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []  # where nobody reaps orphans


def test_ray_started_here_keeps_to_loopback(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_private.binds_to_loopback()
    listening: set[str] = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            listening |= {
                connection.laddr.ip.removeprefix("::ffff:")
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
    assert listening
    assert listening <= {"127.0.0.1", "::1"}, "Ray listens to the network"
    monkeypatch.setattr(ray_private.ray_constants, "ENABLE_RAY_CLUSTER", True)
    assert not ray_private.binds_to_loopback()
    ray_private.bind_to_loopback()
    assert ray_private.binds_to_loopback()
