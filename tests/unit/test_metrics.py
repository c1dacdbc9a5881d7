"""What a scrape tells is what happened, under names with units, and it never disturbs the driver's loop."""

import asyncio
import socket
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from microtome.planner.errors import BadConfig
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
