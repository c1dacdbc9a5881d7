"""Workers come and go under the driver: drained, missed, wanted, and none at all. No stream notices."""

import asyncio

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from microtome.actors.driver import GENERATION
from microtome.planner.types import WorkerId
from microtome.v1 import generation_pb2 as pb
from tests.support.calls import collect, read_until_broken, request, status_when, tokens_of, undisturbed, until_idle
from tests.support.in_process import fake_config, in_process


def states(status: pb.StatusResponse) -> dict[str, str]:
    return {worker.name: worker.state for worker in status.workers}


async def test_drained_worker_leaves_when_its_sessions_have_moved_and_another_takes_its_place() -> None:
    async with in_process(fake_config("fake:step_ms=3", workers__count=2)) as service:
        prompts = [[n + 1, 5] for n in range(10)]
        running = [asyncio.create_task(collect(service.stub, request(p, max_new_tokens=150))) for p in prompts]
        await status_when(service.stub, lambda status: status.counters.output_tokens >= 100)
        drained = asyncio.create_task(service.host.drain(WorkerId("worker-1")))
        status = await status_when(service.stub, lambda status: states(status)["worker-1"] == "ended")
        assert status.workers[0].cause == "drained: an operator asked for it"
        for prompt, task in zip(prompts, running, strict=True):
            assert tokens_of(await task) == undisturbed(prompt, 150)
        status = await until_idle(service.stub)
        assert service.workers.ended == ["worker-1"]
        assert states(status) == {"worker-1": "ended", "worker-2": "ready", "worker-3": "ready"}
        await drained


async def test_only_worker_is_drained_after_its_successor_has_come() -> None:
    async with in_process(fake_config("fake:step_ms=3")) as service:
        running = asyncio.create_task(collect(service.stub, request([3], max_new_tokens=150)))
        await status_when(service.stub, lambda status: status.counters.output_tokens >= 20)
        drained = asyncio.create_task(service.host.drain(WorkerId("worker-1")))
        assert tokens_of(await running) == undisturbed([3], 150)
        await drained
        status = await status_when(service.stub, lambda status: states(status)["worker-1"] == "ended")
        assert states(status)["worker-2"] == "ready"


async def test_worker_that_is_gone_is_shown_for_a_while_only() -> None:
    async with in_process(fake_config(workers__count=2, workers__gone_s=0.3)) as service:
        await service.host.drain(WorkerId("worker-1"))
        await status_when(service.stub, lambda status: states(status).get("worker-3") == "ready")
        status = await status_when(service.stub, lambda status: "worker-1" not in states(status))
        assert states(status) == {"worker-2": "ready", "worker-3": "ready"}


async def test_worker_whose_node_drains_is_drained() -> None:
    async with in_process(fake_config(workers__count=2)) as service:
        service.workers.places_taken.add(WorkerId("worker-2"))
        status = await status_when(
            service.stub, lambda status: states(status).get("worker-2") == "ended" and "worker-3" in states(status)
        )
        assert next(w for w in status.workers if w.name == "worker-2").cause == "drained: its node is draining"


async def test_load_brings_workers_and_its_end_sends_them_away_down_to_the_least() -> None:
    config = fake_config(
        "fake:step_ms=5",
        runtime__kv_tokens=512,
        workers__count=1,
        workers__min=1,
        workers__max=3,
        workers__target_occupancy=0.5,
        workers__settle_s=0.1,
        planner__prefix_cache="false",
    )
    async with in_process(config) as service:
        prompts = [[n + 1] * 40 for n in range(12)]
        running = [asyncio.create_task(collect(service.stub, request(p, max_new_tokens=200))) for p in prompts]
        await status_when(service.stub, lambda status: list(states(status).values()).count("ready") == 3)
        for prompt, task in zip(prompts, running, strict=True):
            assert tokens_of(await task) == undisturbed(prompt, 200)
        status = await status_when(service.stub, lambda status: list(states(status).values()).count("ready") == 1)
        assert sum(w.cause == "drained: fewer workers are wanted" for w in status.workers) == 2
        assert len(service.workers.processes) == 1


async def test_service_without_workers_starts_one_for_a_request_and_ends_it_when_idle() -> None:
    config = fake_config(workers__count=0, workers__min=0, workers__max=2, workers__settle_s=0, workers__idle_s=0.5)
    async with in_process(config) as service:
        assert not service.workers.started
        assert tokens_of(await collect(service.stub, request([4], max_new_tokens=5))) == undisturbed([4], 5)
        assert service.workers.started == ["worker-1"]
        await status_when(service.stub, lambda status: states(status)["worker-1"] == "ended")
        assert not service.workers.processes
        # What is served is known by now, so that requests are checked although nobody is there.
        model = await service.stub.GetModel(pb.GetModelRequest())
        assert model.vocab_size == 1000
        assert tokens_of(await collect(service.stub, request([5], max_new_tokens=5))) == undisturbed([5], 5)
        assert service.workers.started == ["worker-1", "worker-2"]


async def test_request_that_finds_no_worker_waits_no_longer_than_its_deadline() -> None:
    config = fake_config("fake:unknown=1", workers__count=0, workers__min=0, workers__max=1)
    async with in_process(config) as service:
        tokens: list[int] = []
        call = service.stub.Generate(request([4], max_new_tokens=5), timeout=0.5)
        assert await read_until_broken(call, tokens) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not tokens


async def test_bounds_can_be_moved_while_it_runs() -> None:
    async with in_process(fake_config(workers__settle_s=0)) as service:
        await service.host.scale(2, 2)
        await status_when(service.stub, lambda status: list(states(status).values()).count("ready") == 2)
        await service.host.scale(1, 1)
        status = await status_when(service.stub, lambda status: list(states(status).values()).count("ready") == 1)
        assert list(states(status).values()).count("ended") == 1


async def test_service_without_workers_is_healthy_only_where_a_call_starts_one() -> None:
    config = fake_config("fake:unknown=1", workers__count=0, workers__min=0, workers__max=1)  # its workers never start
    async with in_process(config) as service, grpc.aio.insecure_channel(f"127.0.0.1:{service.host.port}") as channel:
        shown = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=GENERATION))

        async def becomes(status: str) -> None:
            while (await shown.read()).status != health_pb2.HealthCheckResponse.ServingStatus.Value(status):
                pass

        await becomes("SERVING")
        assert not service.workers.started
        await service.host.scale(1, 1)
        await becomes("NOT_SERVING")
        await service.host.scale(0, 1)
        await becomes("SERVING")
        shown.cancel()
