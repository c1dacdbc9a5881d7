"""What a scrape tells is what happened, under names with units, and it never disturbs the driver's loop."""

import asyncio
import socket
from urllib.request import urlopen

import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from microtome.planner.errors import BadConfig
from microtome.v1 import generation_pb2 as pb
from tests.support.calls import collect, request, until_idle
from tests.support.in_process import fake_config, in_process


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def read(port: int) -> dict[tuple[str, ...], float]:
    """Sample name and label values to value."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


async def test_scrape_tells_counters_gauges_and_latencies() -> None:
    port = free_port()
    async with in_process(fake_config(workers__count=2, service__metrics_port=port)) as service:
        await asyncio.gather(*(collect(service.stub, request([n + 1, 2, 3], max_new_tokens=10)) for n in range(6)))
        call = service.stub.Generate(request([9], max_new_tokens=3000))
        await call.read()
        call.cancel()
        await until_idle(service.stub)
        seen = await asyncio.to_thread(read, port)
        assert seen["microtome_generations_started_total",] == 7
        assert seen["microtome_generations_finished_total", "length"] == 6
        assert seen["microtome_generations_finished_total", "cancelled"] == 1
        assert seen["microtome_prompt_tokens_total",] == 19
        assert seen["microtome_output_tokens_total",] >= 61
        assert seen["microtome_workers", "ready"] == 2
        assert seen["microtome_workers", "lost"] == 0
        assert seen["microtome_generations_running",] == 0
        assert seen["microtome_cells_used", "worker-1"] == 0
        assert seen["microtome_cells_usable", "worker-2"] == 4096
        assert seen["microtome_time_to_first_token_seconds_count",] == 7
        assert seen["microtome_inter_token_seconds_count",] >= 6
        assert seen["microtome_generation_seconds_count",] == 7
        assert seen["microtome_step_seconds_total",] > 0
        assert seen["microtome_driver_seconds_total",] > 0


async def test_tenants_are_told_apart_as_far_as_the_configuration_names_them_and_no_further() -> None:
    port = free_port()
    config = fake_config(service__metrics_port=port, planner__tenant_weights="acme=4,blue=1")
    async with in_process(config) as service:
        for tenant in ("acme", "acme", "", *(f"made up {n}" for n in range(20))):
            await collect(service.stub, request([1, 2, 3], max_new_tokens=4, tenant=tenant))
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(service.stub, request([1], priority=5000, tenant="blue"))
        session = await service.stub.OpenSession(pb.OpenSessionRequest(tenant="blue"))
        await collect(service.stub, request([1], max_new_tokens=5, session_id=session.session_id))
        seen = await asyncio.to_thread(read, port)
    family = "microtome_tenant_generations_total"
    assert {key[1]: value for key, value in seen.items() if key[0] == family} == {"acme": 2, "blue": 1, "(other)": 21}
    assert seen["microtome_tenant_prompt_tokens_total", "acme"] == 6
    assert seen["microtome_tenant_output_tokens_total", "acme"] == 8
    assert seen["microtome_tenant_output_tokens_total", "blue"] == 5
    assert seen["microtome_tenant_refused_total", "blue"] == 1
    assert seen["microtome_tenant_time_to_first_token_seconds_count", "acme"] == 2
    assert seen["microtome_tenant_time_to_first_token_seconds_sum", "acme"] > 0


async def test_without_named_tenants_there_is_nothing_to_tell_apart() -> None:
    port = free_port()
    async with in_process(fake_config(service__metrics_port=port)) as service:
        await collect(service.stub, request([1], max_new_tokens=2, tenant="acme"))
        seen = await asyncio.to_thread(read, port)
    assert not [name for name, *_ in seen if "tenant" in name]


async def test_names_carry_units_and_counters_say_so() -> None:
    port = free_port()
    async with in_process(fake_config(service__metrics_port=port)):
        names = {name for name, *_ in await asyncio.to_thread(read, port)}
    assert all(name.startswith("microtome_") for name in names)
    assert not {name for name in names if name.endswith(("_us_total", "_ms", "_us"))}, "times are seconds"


async def test_metrics_port_in_use_is_refused_in_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(BadConfig) as refused:
            async with in_process(fake_config(service__metrics_port=port)):
                pass
    assert str(refused.value) == f"metrics port {port} on 127.0.0.1 cannot be bound: Address already in use"


async def test_service_that_has_ended_leaves_no_metrics_port() -> None:
    port = free_port()
    async with in_process(fake_config(service__metrics_port=port)):
        await asyncio.to_thread(read, port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)
