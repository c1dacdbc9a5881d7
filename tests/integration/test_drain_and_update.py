"""Draining, updating and preempted nodes on real Ray, with streams running through: no token may differ."""

import asyncio
import os
import signal

import ray
from typer.testing import CliRunner

from microtome.cli import app
from microtome.planner.types import SamplingParams
from microtome.v1 import generation_pb2 as pb
from tests.support.calls import (
    collect,
    read_until_broken,
    request,
    resume_to_end,
    status_when,
    tokens_of,
    undisturbed,
    until_idle,
)
from tests.support.fake_model import generate
from tests.support.on_ray import ended, left_of, stub_of, up

PROMPTS = [[n + 1, n + 2] for n in range(12)]


def ready(status: pb.StatusResponse) -> list[pb.WorkerStatus]:
    return [worker for worker in status.workers if worker.state == "ready"]


async def command(*words: str) -> str:
    """What the command prints; it ends well."""
    result = await asyncio.to_thread(CliRunner().invoke, app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


async def test_drained_worker_ends_while_its_streams_go_on_elsewhere(service_name: str) -> None:
    endpoint = up(service_name, "fake:step_ms=5", workers__count=2)
    async with stub_of(endpoint) as stub:
        running = [asyncio.create_task(collect(stub, request(p, max_new_tokens=400))) for p in PROMPTS]
        status = await status_when(stub, lambda status: status.counters.output_tokens >= 200)
        victim = status.workers[0]
        assert victim.sessions > 0
        assert await command("drain", victim.name, "--address", endpoint.address) == f"{victim.name} is drained\n"
        assert not any(task.done() for task in running)
        await ended(victim.pid)
        for prompt, task in zip(PROMPTS, running, strict=True):
            assert tokens_of(await task) == undisturbed(prompt, 400)
        status = await status_when(stub, lambda status: len(ready(status)) == 2)
        assert victim.pid not in {worker.pid for worker in ready(status)}
        await until_idle(stub)


async def test_update_of_an_option_replaces_every_worker_under_running_streams(service_name: str) -> None:
    endpoint = up(service_name, "fake:step_ms=5", workers__count=2)
    async with stub_of(endpoint) as stub:
        before = {worker.pid for worker in ready(await stub.Status(pb.StatusRequest()))}
        running = [asyncio.create_task(collect(stub, request(p, max_new_tokens=700))) for p in PROMPTS]
        await status_when(stub, lambda status: status.counters.output_tokens >= 100)
        said = await command("update", "--option", "kv_tokens=8192", "--address", endpoint.address)
        assert said == "every worker has the new settings (revision 1)\n"
        assert not any(task.done() for task in running)
        status = await stub.Status(pb.StatusRequest())
        assert [worker.cells_usable for worker in ready(status)] == [8192, 8192]
        for pid in before:
            await ended(pid)
        for prompt, task in zip(PROMPTS, running, strict=True):
            assert tokens_of(await task) == undisturbed(prompt, 700)


async def test_update_of_the_model_survives_the_driver_and_is_forgotten_with_the_service(service_name: str) -> None:
    endpoint = up(service_name, "fake:step_ms=5", workers__count=1)
    other = "fake:step_ms=5,vocab=500,fingerprint=0ddb"
    sampling = SamplingParams(prompt_tokens=2)
    async with stub_of(endpoint) as stub:
        old = asyncio.create_task(collect(stub, request([1, 2], max_new_tokens=500)))
        await status_when(stub, lambda status: status.counters.output_tokens >= 20)
        await command("update", "--option", f"runtime.model={other}", "--address", endpoint.address)
        assert tokens_of(await old) == undisturbed([1, 2], 500)
        call = stub.Generate(request([1, 2], max_new_tokens=300, generation_id="g"))
        tokens = list((await call.read()).token_ids)
        os.kill(ray.get(ray.get_actor(service_name, namespace=service_name).pid.remote()), signal.SIGKILL)
        await read_until_broken(call, tokens)
    async with stub_of(endpoint) as stub:
        await resume_to_end(stub, "g", tokens)
        assert tokens == generate([1, 2], sampling, 300, (), 500)
        (worker,) = ready(await stub.Status(pb.StatusRequest()))
        os.kill(worker.pid, signal.SIGKILL)
        again = tokens_of(await collect(stub, request([1, 2], max_new_tokens=20)))
        assert again == generate([1, 2], sampling, 20, (), 500), "its successor has the settings of before the update"
    from microtome.actors import cluster, ray_private

    assert ray_private.kept(f"microtome/{service_name}/{service_name}")
    cluster.down(service_name)
    assert ray_private.kept(f"microtome/{service_name}/{service_name}") == b""
    assert left_of(service_name, []) == []


async def test_scale_changes_how_many_workers_there_are_under_streams_and_a_restarted_driver_keeps_to_it(
    service_name: str,
) -> None:
    endpoint = up(service_name, "fake:step_ms=5", workers__count=1, workers__settle_s=0)
    at = ("--address", endpoint.address)
    async with stub_of(endpoint) as stub:
        call = stub.Generate(request([1, 2], max_new_tokens=1000, generation_id="g"))
        tokens = list((await call.read()).token_ids)
        assert await command("scale", "--min", "2", "--max", "2", *at) == "2 workers from now on\n"
        await status_when(stub, lambda status: len(ready(status)) == 2)
        for wrong, sentence in (
            (["--max", "1"], "max_workers 1 is below 2"),
            (["--min", "3"], "2 is below 3"),
            ([], ""),
        ):
            result = await asyncio.to_thread(CliRunner().invoke, app, ["scale", *wrong, *at])
            assert result.exit_code != 0
            assert sentence in result.output
        os.kill(ray.get(ray.get_actor(service_name, namespace=service_name).pid.remote()), signal.SIGKILL)
        await read_until_broken(call, tokens)
    async with stub_of(endpoint) as stub:
        going_on = asyncio.create_task(resume_to_end(stub, "g", tokens))
        status = await stub.Status(pb.StatusRequest(), wait_for_ready=True)
        os.kill(ready(status)[1].pid, signal.SIGKILL)  # that it is replaced shows that two are wanted
        await status_when(stub, lambda status: len(ready(status)) == 2 and any(w.loss for w in status.workers))
        assert await command("scale", "--min", "1", *at) == "between 1 and 2 workers from now on\n"
        await status_when(stub, lambda status: len(ready(status)) == 1)
        await going_on
        assert tokens == undisturbed([1, 2], 1000)


async def test_update_whose_model_does_not_load_leaves_the_service_as_it_was(service_name: str) -> None:
    endpoint = up(service_name, "fake:step_ms=5", workers__count=1)
    async with stub_of(endpoint) as stub:
        before = ready(await stub.Status(pb.StatusRequest()))
        result = await asyncio.to_thread(
            CliRunner().invoke,
            app,
            ["update", "--option", "runtime.model=fake:colour=red", "--address", endpoint.address],
        )
        assert result.exit_code == 1
        assert "colour" in result.output
        after = ready(await stub.Status(pb.StatusRequest()))
        assert [worker.pid for worker in after] == [worker.pid for worker in before]
        assert tokens_of(await collect(stub, request([1], max_new_tokens=5))) == undisturbed([1], 5)
