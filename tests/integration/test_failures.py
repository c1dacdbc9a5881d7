"""What clients see when something is lost: each test kills real processes by pid, and no token may differ."""

import asyncio
import os
import re
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import ray

import microtome
from microtome.actors import ray_private
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
from tests.support.doomed_client import STREAMS, TOKENS
from tests.support.on_ray import ended, free_port, stub_of, up

ROOT = Path(__file__).resolve().parents[2]


async def told(stub: Any, name: str) -> pb.WorkerStatus:
    """A lost worker, once it is known what has become of its process: streams go on while that is looked into."""
    status = await status_when(stub, lambda s: any(w.name == name and "its process" in w.cause for w in s.workers))
    return next(worker for worker in status.workers if worker.name == name)


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
        await until_idle(stub)
        lost = await told(stub, victim.name)
        assert (lost.state, lost.loss) == ("lost", "died")
        assert re.search(r"^its process was killed by SIGKILL (in|after) step \d+ \(noticed: ", lost.cause), lost.cause
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
    # Of each session the token that was sampled last may be run again, and nothing else.
    assert after.counters.prefilled_tokens <= len(prompts)
    assert [(w.pid, w.incarnation) for w in after.workers] == [(w.pid, w.incarnation) for w in before.workers]
    handle = ray.get_actor(service_name, namespace=service_name)
    assert ray.get(handle.pid.remote()) != driver_pid


async def test_last_worker_killed_makes_sessions_wait_for_the_next_one(service_name: str) -> None:
    endpoint = up(service_name, "fake:step_ms=5", workers__count=1)
    async with stub_of(endpoint) as stub:
        prompts = [[n + 1] * 5 for n in range(6)]
        running = [asyncio.create_task(collect(stub, request(p, max_new_tokens=80))) for p in prompts]
        status = await status_when(stub, lambda status: status.counters.output_tokens >= 60)
        os.kill(status.workers[0].pid, signal.SIGKILL)
        # Submitted while there is no worker: it waits like the others.
        await status_when(stub, lambda status: not any(w.state == "ready" for w in status.workers))
        late = asyncio.create_task(collect(stub, request([99], max_new_tokens=10)))
        for prompt, task in zip(prompts, running, strict=True):
            assert tokens_of(await task) == undisturbed(prompt, 80)
        assert tokens_of(await late) == undisturbed([99], 10)
        await until_idle(stub)


async def test_stopped_worker_is_given_up_and_cannot_answer_when_it_goes_on(service_name: str) -> None:
    """SIGSTOP, and SIGCONT once it has been given up: what it still does reaches nobody."""
    endpoint = up(service_name, "fake:step_ms=5", workers__count=2)
    async with stub_of(endpoint) as stub:
        prompts = [[n + 1, 7] for n in range(12)]
        running = [asyncio.create_task(collect(stub, request(p, max_new_tokens=200))) for p in prompts]
        status = await status_when(stub, lambda status: status.counters.output_tokens >= 200)
        victim = status.workers[1]
        os.kill(victim.pid, signal.SIGSTOP)
        status = await status_when(stub, lambda status: status.workers[1].state == "lost")
        os.kill(victim.pid, signal.SIGCONT)
        for prompt, task in zip(prompts, running, strict=True):
            assert tokens_of(await task) == undisturbed(prompt, 200)
        await until_idle(stub)
        lost = await told(stub, victim.name)
        assert lost.incarnation == victim.incarnation
        assert lost.loss == "link"
        assert "its process still ran" in lost.cause, lost.cause
    await ended(victim.pid)


async def test_link_that_breaks_while_the_worker_lives_is_mended_and_nothing_is_moved_or_run_again(
    service_name: str,
) -> None:
    """A worker that is stopped for a moment answers no ping, so its link counts as broken; it has lost nothing."""
    endpoint = up(service_name, "fake:step_ms=5", workers__count=2, link__reconnect_timeout_s=20)
    log = driver_log(service_name)
    async with stub_of(endpoint) as stub:
        asked = [[n + 1, 3] for n in range(8)]
        running = [asyncio.create_task(collect(stub, request(p, max_new_tokens=300))) for p in asked]
        status = await status_when(stub, lambda status: status.counters.output_tokens >= 100)
        worker = status.workers[0]
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            await asyncio.to_thread(wait_for, log, f"stream broken worker={worker.name} ")
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        for prompt, task in zip(asked, running, strict=True):
            assert tokens_of(await task) == undisturbed(prompt, 300)
        status = await until_idle(stub)
    (after,) = (found for found in status.workers if found.name == worker.name)
    assert (after.incarnation, after.state) == (worker.incarnation, "ready")
    assert f"stream reopened worker={worker.name} " in log.read_text()
    assert status.counters.prefilled_tokens == 2 * len(asked), "a prompt was run again"


async def test_client_process_that_is_killed_leaves_nothing_running_and_no_cell_in_use(service_name: str) -> None:
    endpoint = up(service_name, "fake:step_ms=5", workers__count=1)
    words = (sys.executable, "-m", "tests.support.doomed_client", endpoint.address)
    async with stub_of(endpoint) as stub:
        client = await asyncio.create_subprocess_exec(*words, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        assert client.stdout is not None
        try:
            assert await client.stdout.readline() == b"READY\n"
            status = await status_when(stub, lambda status: status.running == STREAMS)
            assert status.workers[0].cells_used > 0
        finally:
            client.kill()
            await client.wait()
        begun = status.counters.output_tokens
        status = await until_idle(stub)
        assert status.counters.output_tokens - begun < STREAMS * TOKENS / 2, "it went on for nobody"
        assert tokens_of(await collect(stub, request([6], max_new_tokens=3))) == undisturbed([6], 3)


async def test_hung_step_is_told_from_a_death_and_its_sessions_move(service_name: str) -> None:
    endpoint = up(
        service_name,
        "fake:step_ms=2,stuck_at=40",
        workers__count=1,
        workers__executor="tests.support.stuck_executor:build_executor",
        workers__hang_timeout_s=0.5,
    )
    async with stub_of(endpoint) as stub:
        asked = [[n + 1] for n in range(4)]
        answers = await asyncio.gather(*(collect(stub, request(p, max_new_tokens=60)) for p in asked))
        for prompt, responses in zip(asked, answers, strict=True):
            assert tokens_of(responses) == undisturbed(prompt, 60)
        status = await until_idle(stub)
        first = next(worker for worker in status.workers if worker.state == "lost")
        lost = await told(stub, first.name)
    assert lost.loss == "hung"
    assert lost.cause.startswith("hung: step 40 has no result after 0.5 s"), lost.cause
    assert re.search(
        r"; its process still ran in step 40, at threading.py:\d+ in wait from .* from stuck_executor.py:\d+ in run$",
        lost.cause,
    ), lost.cause
    await ended(lost.pid)


@pytest.mark.parametrize(
    ("by", "loss", "process", "cause"),
    [
        (
            "segv",
            "died",
            "SIGSEGV",
            r"^its process was killed by SIGSEGV in step 40, at __init__\.py:\d+ in string_at from ",
        ),
        ("exit", "died", "exit 3", r"^its process ended with exit code 3 in step 40 "),
        ("error", "failed a step", "exit 1", r"^step 40 failed: ValueError: the numbers do not add up; its process "),
    ],
)
async def test_status_metrics_and_log_tell_how_a_process_ended_and_in_which_step(
    service_name: str, by: str, loss: str, process: str, cause: str
) -> None:
    port = free_port()
    endpoint = up(
        service_name,
        f"fake:step_ms=2,end_at=40,end_by={by}",
        workers__count=1,
        workers__executor="tests.support.ending_executor:build_executor",
        service__metrics_port=port,
    )
    async with stub_of(endpoint) as stub:
        answer = await collect(stub, request([1], max_new_tokens=60))
        assert tokens_of(answer) == undisturbed([1], 60)
        status = await status_when(stub, lambda s: any("its process" in w.cause for w in s.workers))
    (lost,) = (worker for worker in status.workers if worker.state == "lost")
    assert lost.loss == loss
    assert re.search(cause, lost.cause), lost.cause
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}").read().decode())
    assert f'microtome_workers_lost_total{{process="{process}",reason="{loss}"}} 1.0' in page
    assert lost.cause in driver_log(service_name).read_text(), "the driver's log does not say it"


async def test_request_that_fails_every_step_it_is_in_ends_and_the_service_goes_on(service_name: str) -> None:
    endpoint = up(service_name, "fake:fail_at=6", workers__count=1)
    async with stub_of(endpoint) as stub:
        tokens: list[int] = []
        code = await read_until_broken(stub.Generate(request([5], max_new_tokens=400)), tokens)
        assert code is grpc.StatusCode.INTERNAL
        assert tokens == undisturbed([5], len(tokens)), "a failed step's tokens were delivered"
        assert tokens_of(await collect(stub, request([6], max_new_tokens=3))) == undisturbed([6], 3)
        assert (await until_idle(stub)).counters.generations_finished == 2


async def test_full_pool_parks_and_loses_nothing(service_name: str) -> None:
    endpoint = up(service_name, runtime__kv_tokens=256, runtime__max_step_tokens=64)
    async with stub_of(endpoint) as stub:
        prompts = [[n + 1] * 20 for n in range(8)]
        answers = await asyncio.gather(*(collect(stub, request(p, max_new_tokens=100)) for p in prompts))
        for prompt, responses in zip(prompts, answers, strict=True):
            assert tokens_of(responses) == undisturbed(prompt, 100)
        await until_idle(stub)


async def test_full_queue_refuses_with_a_time_to_try_again(service_name: str) -> None:
    endpoint = up(service_name, "fake:step_ms=20", runtime__max_sequences=2, planner__max_waiting=3)
    async with stub_of(endpoint) as stub:
        running = [stub.Generate(request([n + 1], max_new_tokens=300)) for n in range(5)]
        await status_when(stub, lambda status: (status.running, status.waiting) == (2, 3))
        refused = stub.Generate(request([9], max_new_tokens=5))
        assert await read_until_broken(refused, []) is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(await refused.trailing_metadata())
        assert int(trailing["retry-after-ms"]) > 0
        for call in running:
            call.cancel()
        await until_idle(stub)


async def test_driver_killed_while_calls_wait_or_read_their_prompts_or_are_made_is_not_noticed_by_python_clients(
    service_name: str,
) -> None:
    """Of those the workers hold nothing that could be gone on with: the clients ask again, by themselves, once."""
    endpoint = up(service_name, "fake:step_ms=20", workers__count=1, runtime__max_sequences=2, runtime__kv_tokens=4096)
    asked = [([n + 1] * 8, 60) for n in range(6)]  # two run, the others wait
    long = [99] * 2000  # it waits too, and is read in several steps

    def in_thread(client: microtome.Client, prompt: list[int], tokens: int) -> list[int]:
        return list(client.complete(token_ids=prompt, max_new_tokens=tokens).token_ids)

    async with microtome.AsyncClient(endpoint.address) as client, stub_of(endpoint) as stub:
        with microtome.Client(endpoint.address) as blocking:
            running = [asyncio.create_task(asyncio.to_thread(in_thread, blocking, *one)) for one in asked[:3]]
            running += [asyncio.create_task(complete(client, *one)) for one in asked[3:]]
            running.append(asyncio.create_task(complete(client, long, 20)))
            waits = stub.Generate(request([5], max_new_tokens=5, generation_id="waits"))
            assert (await client.status()).service == blocking.status().service == service_name
            await status_when(stub, lambda status: (status.running, status.waiting) == (2, 6))
            os.kill(ray.get(ray.get_actor(service_name, namespace=service_name).pid.remote()), signal.SIGKILL)
            assert await read_until_broken(waits, []) is grpc.StatusCode.UNAVAILABLE
            new = [([7], 5), ([8], 6)]  # asked while it is away
            running += [asyncio.create_task(asyncio.to_thread(in_thread, blocking, *new[0]))]
            running += [asyncio.create_task(complete(client, *new[1]))]
            for (prompt, tokens), task in zip([*asked, (long, 20), *new], running, strict=True):
                assert await task == undisturbed(prompt, tokens)
    async with stub_of(endpoint) as stub:
        # A caller without a client library is told that it is not known, and may ask again under the same id.
        again = stub.Resume(pb.ResumeRequest(generation_id="waits"))
        assert await read_until_broken(again, []) is grpc.StatusCode.NOT_FOUND
        answer = await collect(stub, request([5], max_new_tokens=5, generation_id="waits"))
        assert tokens_of(answer) == undisturbed([5], 5)
        status = await until_idle(stub)
    # All ten once at the most by this driver, and what it has found of the two that ran.
    assert status.counters.generations_started <= len(asked) + 4 + 2


def driver_log(name: str) -> Path:
    pid = ray.get(ray.get_actor(name, namespace=name).pid.remote())
    (log,) = ray_private.logs_folder().glob(f"worker-*-{pid}.err")
    return log


def wait_for(log: Path, words: str) -> None:
    while words not in log.read_text():
        time.sleep(0.01)


async def complete(client: microtome.AsyncClient, prompt: list[int], tokens: int) -> list[int]:
    return list((await client.complete(token_ids=prompt, max_new_tokens=tokens)).token_ids)
