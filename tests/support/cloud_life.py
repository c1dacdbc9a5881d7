"""A service's life on an autoscaled cluster, as a program: `python -m tests.support.cloud_life`.

A process of its own, because a process talks to one Ray. It prints what it saw, one JSON object a line.
"""

import asyncio
import json
import os
import signal
import time

import grpc.aio
import psutil
import ray
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import placement_group_table

from microtome.actors import cluster, ray_private
from microtome.v1 import generation_pb2 as pb
from microtome.v1 import generation_pb2_grpc as rpc
from tests.support.calls import collect, read_until_broken, request, status_when, tokens_of, undisturbed
from tests.support.fake_cloud import FakeCloud
from tests.support.in_process import fake_config

NAME = "cloud"
NODE_IDLE_S = 2.0
LIMIT_S = 240.0  # of the whole life, which takes half a minute: it ends what it has started even then


def nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


async def nodes_when(wanted: int) -> None:
    while len(await asyncio.to_thread(nodes)) != wanted:  # noqa: ASYNC110 - Ray tells nobody
        await asyncio.sleep(0.1)


def node_of(worker: str) -> str:
    (group,) = (g for g in placement_group_table().values() if g["name"].endswith(f"/{NAME}/{worker}"))
    return str(group["bundles_to_node_id"][0])


def drain_node(address: str, node: str) -> None:
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + 30) * 1000)
    accepted, why = GcsClient(address=address).drain_node(node, reason, "spot notice", deadline_ms)
    assert accepted, why


def lacks_room(worker: pb.WorkerStatus) -> bool:
    """It waits, and no node has come up for it in this very moment."""
    return worker.state == "starting" and bool(worker.cause) and ": has room" not in worker.cause


def say(what: str, since_s: float, **more: object) -> None:
    print(json.dumps({"what": what, "seconds": round(time.monotonic() - since_s, 2), **more}), flush=True)


async def live(address: str) -> None:
    begin = time.monotonic()
    config = fake_config(
        "fake:step_ms=10",
        service__name=NAME,
        workers__count=0,
        workers__min=0,
        workers__max=3,  # the cloud has nodes for two
        workers__settle_s=1,
        workers__idle_s=1,
    )
    endpoint = cluster.up(config, ray_address=address)
    driver = ray_private.actor_facts(ray.get_actor(NAME, namespace=NAME))
    on_head = driver is not None and nodes() == {driver.node}
    say("up", begin, nodes=len(nodes()), driver_on_head=on_head)
    async with grpc.aio.insecure_channel(endpoint.address) as channel:
        stub: rpc.GenerationStub = rpc.GenerationStub(channel)

        begin = time.monotonic()
        tokens = tokens_of(await collect(stub, request([1], max_new_tokens=5)))
        say("first answer from no worker and no node", begin, right=tokens == undisturbed([1], 5), nodes=len(nodes()))

        begin = time.monotonic()
        tokens, call = list[int](), stub.Generate(request([2], max_new_tokens=4000))
        reading = asyncio.create_task(read_until_broken(call, tokens))
        status = await status_when(stub, lambda s: any(w.sessions and w.steps > 50 for w in s.workers))
        first = next(worker for worker in status.workers if worker.sessions)
        drain_node(address, node_of(first.name))
        await status_when(stub, lambda s: any(w.name == first.name and w.state == "ended" for w in s.workers))
        status = await stub.Status(pb.StatusRequest())
        left = next(worker for worker in status.workers if worker.name == first.name)
        say("preempted node is left", begin, cause=left.cause)
        enough = len(tokens) + 50
        await status_when(stub, lambda s: len(tokens) > enough or reading.done())
        call.cancel()
        await asyncio.wait([reading])
        say("stream goes on elsewhere", begin, right=tokens == undisturbed([2], len(tokens)), tokens=len(tokens))

        begin = time.monotonic()
        status = await stub.Status(pb.StatusRequest())
        victim = next(worker for worker in status.workers if worker.state == "ready")
        os.kill(victim.pid, signal.SIGKILL)
        status = await status_when(
            stub, lambda s: any(w.name == victim.name and "SIGKILL" in w.cause for w in s.workers)
        )
        lost = next(worker for worker in status.workers if worker.name == victim.name)
        say("another node says how its worker ended", begin, loss=lost.loss, cause=lost.cause)

        begin = time.monotonic()
        asked = [[n + 1] * 600 for n in range(24)]
        calls = [(prompt, list[int](), stub.Generate(request(prompt, max_new_tokens=900))) for prompt in asked]
        reading_all = [asyncio.create_task(read_until_broken(call, tokens)) for _, tokens, call in calls]
        status = await status_when(stub, lambda s: sum(w.state == "ready" and w.sessions > 0 for w in s.workers) == 2)
        say("backlog has brought a second worker and node", begin, nodes=len(nodes()))
        status = await status_when(stub, lambda s: any(lacks_room(w) for w in s.workers))
        pending = next(worker for worker in status.workers if lacks_room(worker))
        say("third one says what it lacks", begin, cause=pending.cause)

        begin = time.monotonic()
        victim = next(w for w in (await stub.Status(pb.StatusRequest())).workers if w.state == "ready")
        psutil.Process(psutil.Process(victim.pid).ppid()).kill()  # its node's raylet: the rest of the node follows
        await status_when(stub, lambda s: any(w.name == victim.name and w.state == "lost" for w in s.workers))
        enough = sum(len(tokens) for _, tokens, _ in calls) + 100
        await status_when(stub, lambda s: sum(len(tokens) for _, tokens, _ in calls) > enough)
        broken = sum(task.done() and task.result() is not grpc.StatusCode.OK for task in reading_all)
        say("a lost node's streams go on elsewhere", begin, broken=broken)
        for _, _, call in calls:
            call.cancel()
        await asyncio.wait(reading_all)
        right = all(tokens == undisturbed(prompt, len(tokens)) for prompt, tokens, _ in calls)
        say("backlog is gone", begin, right=right, tokens=sum(len(tokens) for _, tokens, _ in calls))

        begin = time.monotonic()
        await nodes_when(1)
        status = await stub.Status(pb.StatusRequest())
        say("idle node is gone", begin, workers=sum(w.state == "ready" for w in status.workers))
    cluster.down(NAME)


if __name__ == "__main__":
    with FakeCloud(head_cpus=1, worker={"CPU": 1}, max_workers=2, idle_s=NODE_IDLE_S) as cloud:
        try:
            asyncio.run(asyncio.wait_for(live(cloud.address), LIMIT_S))
        finally:
            ray.shutdown()  # before its cluster goes: it would wait for that for a minute, and hide what went wrong
