"""What clients see when something is lost: each test kills real processes by pid, and no token may differ."""

import asyncio
import os
import signal

import grpc
import grpc.aio
import ray

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
from tests.support.on_ray import stub_of, up


async def test_worker_killed_in_mid_stream_changes_no_token_and_is_replaced(service_name: str) -> None:
    endpoint = up(service_name, "fake:step_ms=5", workers__count=2)
    async with stub_of(endpoint) as stub:
        prompts = [[n + 1, n + 2] for n in range(16)]
        running = [asyncio.create_task(collect(stub, request(p, max_new_tokens=120))) for p in prompts]
        status = await status_when(stub, lambda status: status.counters.output_tokens >= 300)
        victim = status.workers[0]
        assert victim.sessions > 0
        os.kill(victim.pid, signal.SIGKILL)
        for prompt, task in zip(prompts, running, strict=True):
            assert tokens_of(await task) == undisturbed(prompt, 120)
        status = await until_idle(stub)
        lost = next(worker for worker in status.workers if worker.name == victim.name)
        assert lost.state == "lost"
        assert lost.cause
        await status_when(stub, lambda status: sum(w.state == "ready" for w in status.workers) == 2)


async def test_driver_killed_under_load_loses_repeats_and_recomputes_nothing(service_name: str) -> None:
    endpoint = up(service_name, "fake:step_ms=10", workers__count=2)
    prompts = [[n + 1] * 40 for n in range(16)]
    async with stub_of(endpoint) as stub:
        before = await stub.Status(pb.StatusRequest())
        driver_pid = ray.get(ray.get_actor(service_name, namespace=service_name).pid.remote())
        calls = [stub.Generate(request(p, max_new_tokens=150, generation_id=f"g{n}")) for n, p in enumerate(prompts)]
        begun = [list((await call.read()).token_ids) for call in calls]
        os.kill(driver_pid, signal.SIGKILL)
        for tokens, call in zip(begun, calls, strict=True):
            assert await read_until_broken(call, tokens) == grpc.StatusCode.UNAVAILABLE
    async with stub_of(endpoint) as stub:  # the same port
        for n, (prompt, tokens) in enumerate(zip(prompts, begun, strict=True)):
            assert len(tokens) < 150, "the generation was over before the driver was killed"
            await resume_to_end(stub, f"g{n}", tokens)
            assert tokens == undisturbed(prompt, 150)
        after = await until_idle(stub)
    assert [(w.pid, w.incarnation) for w in after.workers] == [(w.pid, w.incarnation) for w in before.workers]
    handle = ray.get_actor(service_name, namespace=service_name)
    assert ray.get(handle.pid.remote()) != driver_pid
