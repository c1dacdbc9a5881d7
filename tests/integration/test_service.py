"""A whole service on real Ray and gRPC, its workers running the fake executor: life, load, faults, and the end."""

import asyncio
import socket

import grpc
import grpc.aio
import pytest
import ray

from microtome.actors import cluster
from microtome.planner.errors import BadConfig, BatchingError
from microtome.v1 import generation_pb2 as pb
from tests.support.calls import collect, request, tokens_of, undisturbed, until_idle
from tests.support.in_process import fake_config
from tests.support.on_ray import left_of, runs, stub_of, up


async def answering_at(endpoint: cluster.Endpoint) -> str | None:
    """The service at the address, if any: a free port may be somebody else's a moment later."""
    async with stub_of(endpoint) as stub:
        try:
            return str((await stub.Status(pb.StatusRequest(), timeout=2)).service)
        except grpc.aio.AioRpcError:
            return None


async def test_32_clients_complete_on_two_workers_and_down_leaves_nothing(service_name: str) -> None:
    endpoint = up(service_name, workers__count=2)
    async with stub_of(endpoint) as stub:
        prompts = [[n + 1, *range(n % 7)] for n in range(32)]
        answers = await asyncio.gather(*(collect(stub, request(p, max_new_tokens=24)) for p in prompts))
        for prompt, responses in zip(prompts, answers, strict=True):
            assert tokens_of(responses) == undisturbed(prompt, 24)
        status = await until_idle(stub)
    assert status.counters.generations_finished == 32
    assert all(worker.steps > 0 for worker in status.workers), "one worker did all the work"
    driver_pid = ray.get(ray.get_actor(service_name, namespace=service_name).pid.remote())
    pids = [driver_pid, *(worker.pid for worker in status.workers)]
    assert len(set(pids)) == 3
    assert all(runs(pid) for pid in pids)

    downed = cluster.down(service_name)

    assert set(downed.pids) == set(pids)
    assert left_of(service_name, pids) == []
    assert await answering_at(endpoint) != service_name
    assert cluster.down(service_name).actors == ()


# holds J17
async def test_client_that_hangs_up_frees_its_cells(service_name: str) -> None:
    endpoint = up(service_name, "fake:step_ms=20", planner__prefix_cache="false")
    async with stub_of(endpoint) as stub:
        call = stub.Generate(request([1] * 50, max_new_tokens=2000))
        await call.read()
        before = await stub.Status(pb.StatusRequest())
        assert before.workers[0].cells_used >= 50
        call.cancel()
        after = await until_idle(stub)
        assert after.counters.steps <= before.counters.steps + 4


async def test_bad_requests_leave_the_service_running_and_no_cell_used(service_name: str) -> None:
    endpoint = up(service_name)
    async with stub_of(endpoint) as stub:
        for asked in (
            request([]),
            request([1] * 4096),
            request([1], max_new_tokens=0),
            request([1], temperature=-1.0),
            request([1], temperature=float("nan")),
            request([1], top_p=0.0),
            request([1000]),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await collect(stub, asked)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Cancel(pb.CancelRequest(generation_id="nobody"))
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
        status = await until_idle(stub)
        assert status.counters.generations_started == 0
        assert tokens_of(await collect(stub, request([5], max_new_tokens=4))) == undisturbed([5], 4)


def test_name_in_use_is_refused_or_joined(service_name: str) -> None:
    endpoint = up(service_name)
    with pytest.raises(BadConfig) as refused:
        up(service_name)
    assert str(refused.value) == f"a service named {service_name!r} is up already, at {endpoint.address}"
    joined = cluster.up(fake_config(service__name=service_name), join=True)
    assert (joined.address, joined.joined) == (endpoint.address, True)
    assert cluster.address_of(service_name) == endpoint.address
    assert cluster.is_up(service_name)
    cluster.down(service_name)
    assert not cluster.is_up(service_name)
    with pytest.raises(BadConfig, match="no service named"):
        cluster.address_of(service_name)


async def test_what_a_lost_driver_left_behind_is_removed_when_its_service_is_started_again(service_name: str) -> None:
    async with stub_of(up(service_name, workers__count=2)) as stub:
        pids = [worker.pid for worker in (await stub.Status(pb.StatusRequest())).workers]
    ray.kill(ray.get_actor(service_name, namespace=service_name), no_restart=True)
    assert all(runs(pid) for pid in pids)
    async with stub_of(up(service_name)) as stub:
        assert tokens_of(await collect(stub, request([7], max_new_tokens=6))) == undisturbed([7], 6)
        (worker,) = (await stub.Status(pb.StatusRequest())).workers
    assert worker.pid not in pids
    assert not any(runs(pid) for pid in pids)


def test_port_in_use_is_refused_and_leaves_nothing(service_name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(BadConfig) as refused:
            up(service_name, service__port=port)
        assert str(refused.value) == f"port {port} on 127.0.0.1 cannot be bound: it is in use"
    assert left_of(service_name, []) == []


def test_model_that_cannot_be_loaded_is_refused_and_leaves_nothing(service_name: str) -> None:
    with pytest.raises(BadConfig) as refused:
        up(service_name, "no/such/model", workers__executor="microtome.cuda_runtime.executor:build_executor")
    assert str(refused.value) == "model no/such/model: no such file or directory"
    assert left_of(service_name, []) == []


def test_executor_that_refuses_its_model_is_refused_in_its_own_words(service_name: str) -> None:
    with pytest.raises(BadConfig) as refused:
        up(service_name, "fake:colour=red")
    assert "colour" in str(refused.value)
    assert left_of(service_name, []) == []


def test_place_that_no_node_has_is_named_resource_by_resource(service_name: str) -> None:
    with pytest.raises(BatchingError) as refused:
        up(service_name, workers__cpus=64, workers__place_timeout_s=0.5)
    assert str(refused.value).startswith(
        "no node had room for worker-1 within 0.5 s: node 127.0.0.1: CPU needs 64, free "
    )
    assert left_of(service_name, []) == []


async def test_two_services_do_not_see_each_other(service_name: str) -> None:
    other = f"{service_name}-b"
    first, second = up(service_name), up(other)
    try:
        cluster.down(service_name)
        async with stub_of(second) as stub:
            assert tokens_of(await collect(stub, request([7], max_new_tokens=6))) == undisturbed([7], 6)
            assert (await stub.Status(pb.StatusRequest())).service == other
    finally:
        cluster.down(other)
    assert first.address != second.address
