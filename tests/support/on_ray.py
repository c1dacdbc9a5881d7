"""Services of the fake executor on the tests' own Ray."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import psutil
import ray
from ray.util.placement_group import placement_group_table

from microtome.actors import cluster
from microtome.v1 import generation_pb2_grpc as rpc
from tests.support.in_process import fake_config


@asynccontextmanager
async def stub_of(endpoint: cluster.Endpoint) -> AsyncIterator[Any]:
    """A client's stub."""
    async with grpc.aio.insecure_channel(endpoint.address) as channel:
        yield rpc.GenerationStub(channel)


def up(name: str, model: str = "fake", **settings: object) -> cluster.Endpoint:
    return cluster.up(fake_config(model, service__name=name, **settings))


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def left_of(name: str, pids: list[int]) -> list[str]:
    """Everything of the service that is still there."""
    actors = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == name]
    groups = [
        g["name"] for g in placement_group_table().values() if f"/{name}/" in g["name"] and g["state"] != "REMOVED"
    ]
    return actors + groups + [str(pid) for pid in pids if runs(pid)]


def runs(pid: int) -> bool:
    """A process that has ended and was not yet collected by its parent does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_ended(pid: int) -> None:
    while runs(pid):
        time.sleep(0.02)


async def ended(pid: int) -> None:
    """Returns when the process has ended."""
    await asyncio.to_thread(wait_ended, pid)
