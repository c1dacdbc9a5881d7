"""The driver's loop and its front end, over real gRPC, in one process: what clients see."""

import asyncio

import grpc
import grpc.aio
import pytest

from microtome.actors.driver import DriverHost
from microtome.v1 import generation_pb2 as pb
from microtome.v1 import generation_pb2_grpc as rpc
from tests.support.calls import (
    collect,
    read_until_broken,
    request,
    rest_of,
    status_when,
    tokens_of,
    undisturbed,
    until_idle,
)
from tests.support.in_process import SECRET, InProcessWorkers, fake_config, in_process


async def test_concurrent_clients_get_the_undisturbed_tokens_and_leave_no_cell_used() -> None:
    async with in_process(fake_config(workers__count=2)) as service:
        prompts = [[n + 1, *range(n)] for n in range(40)]
        answers = await asyncio.gather(*(collect(service.stub, request(p, max_new_tokens=20)) for p in prompts))
        for prompt, responses in zip(prompts, answers, strict=True):
            assert tokens_of(responses) == undisturbed(prompt, 20)
            last = responses[-1]
            assert last.finish_reason == pb.FINISH_REASON_LENGTH
            assert (last.usage.prompt_tokens, last.usage.output_tokens) == (len(prompt), 20)
        status = await until_idle(service.stub)
        assert status.counters.generations_finished == 40
        assert status.counters.output_tokens == 800
        assert sorted(w.state for w in status.workers) == ["ready", "ready"]


async def test_seed_is_told_and_repeats_the_tokens() -> None:
    async with in_process(fake_config()) as service:
        first = await collect(service.stub, request([1, 2], max_new_tokens=8, temperature=1.0))
        seed = first[0].seed
        again = await collect(service.stub, request([1, 2], max_new_tokens=8, temperature=1.0, seed=seed))
        assert tokens_of(first) == tokens_of(again) == undisturbed([1, 2], 8, seed, 1.0)


async def test_client_that_hangs_up_frees_its_cells_within_a_step() -> None:
    async with in_process(fake_config("fake:step_ms=20", planner__prefix_cache="false")) as service:
        call = service.stub.Generate(request([1] * 50, max_new_tokens=2000))
        await call.read()
        before = await service.stub.Status(pb.StatusRequest())
        assert before.workers[0].cells_used >= 50
        call.cancel()
        status = await until_idle(service.stub)
        # Sent already when the client hung up: two steps ahead; one more may have been sent while the news travelled.
        assert status.counters.steps <= before.counters.steps + 4
        assert status.workers[0].cells_cached == 0


async def test_cancelled_generation_ends_with_that_reason_and_its_neighbours_go_on() -> None:
    async with in_process(fake_config("fake:step_ms=2")) as service:
        doomed = service.stub.Generate(request([1, 2, 3], max_new_tokens=2000, generation_id="doomed"))
        neighbour = asyncio.create_task(collect(service.stub, request([4, 5], max_new_tokens=30)))
        await doomed.read()
        await service.stub.Cancel(pb.CancelRequest(generation_id="doomed"))
        responses = await rest_of(doomed)
        assert responses[-1].finish_reason == pb.FINISH_REASON_CANCELLED
        assert tokens_of(await neighbour) == undisturbed([4, 5], 30)
        await until_idle(service.stub)


async def test_slow_client_delays_nobody_and_misses_nothing() -> None:
    async with in_process(fake_config()) as service:
        slow = service.stub.Generate(request([9], max_new_tokens=3000))
        first = await slow.read()
        others = await asyncio.gather(*(collect(service.stub, request([n + 1], max_new_tokens=50)) for n in range(8)))
        for n, responses in enumerate(others):
            assert tokens_of(responses) == undisturbed([n + 1], 50)
        rest = await rest_of(slow)
        assert tokens_of([first, *rest])[:200] == undisturbed([9], 200)
        assert rest[-1].usage.output_tokens == 3000


@pytest.mark.parametrize(
    ("asked", "code", "sentence"),
    [
        (request([]), grpc.StatusCode.INVALID_ARGUMENT, "the prompt is empty: it needs 1 token or more"),
        (
            request([1] * 4096),
            grpc.StatusCode.INVALID_ARGUMENT,
            "the prompt has 4096 tokens, and 4095 is the limit: the context holds 4096, one of them generated",
        ),
        (request([1], max_new_tokens=0), grpc.StatusCode.INVALID_ARGUMENT, "max_new_tokens 0 is below 1"),
        (
            request([1], temperature=float("nan")),
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature nan is not a number of 0 or more",
        ),
        (
            request([1000]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "token id 1000 (number 1) is not below the vocabulary size 1000",
        ),
        (request([1], priority=1001), grpc.StatusCode.INVALID_ARGUMENT, "priority 1001 is not in -1000 to 1000"),
        (
            pb.GenerateRequest(text="hello"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "this service has no tokenizer: the prompt must be token ids",
        ),
    ],
)
async def test_refused_request_is_one_sentence_and_changes_nothing(
    asked: pb.GenerateRequest, code: grpc.StatusCode, sentence: str
) -> None:
    async with in_process(fake_config()) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(service.stub, asked)
        assert (refused.value.code(), refused.value.details()) == (code, sentence)
        status = await service.stub.Status(pb.StatusRequest())
        assert (status.running, status.waiting, status.counters.generations_started) == (0, 0, 0)
        assert tokens_of(await collect(service.stub, request([1], max_new_tokens=3))) == undisturbed([1], 3)


async def test_unknown_and_doubled_generation_ids_are_told_apart() -> None:
    async with in_process(fake_config("fake:step_ms=5")) as service:
        for call in (
            service.stub.Cancel(pb.CancelRequest(generation_id="nobody")),
            service.stub.Resume(pb.ResumeRequest(generation_id="nobody")).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() == grpc.StatusCode.NOT_FOUND
            assert "'nobody'" in str(refused.value.details())
        running = service.stub.Generate(request([1], max_new_tokens=500, generation_id="mine"))
        await running.read()
        with pytest.raises(grpc.aio.AioRpcError) as doubled:
            await collect(service.stub, request([2], generation_id="mine"))
        assert doubled.value.code() == grpc.StatusCode.ALREADY_EXISTS
        assert doubled.value.details() == "generation id 'mine' is in use"
        running.cancel()


async def test_deadline_of_the_call_ends_its_generation() -> None:
    async with in_process(fake_config("fake:step_ms=20")) as service:
        with pytest.raises(grpc.aio.AioRpcError) as expired:
            await rest_of(service.stub.Generate(request([1], max_new_tokens=2000), timeout=0.3))
        assert expired.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until_idle(service.stub)


async def test_resumable_generation_goes_on_without_its_client_and_is_resumed_at_any_offset() -> None:
    async with in_process(fake_config("fake:step_ms=1")) as service:
        call = service.stub.Generate(request([1, 2], max_new_tokens=60, generation_id="g", resumable=True))
        first = await call.read()
        call.cancel()
        expected = undisturbed([1, 2], 60)
        for offset in (len(first.token_ids), 0, 59, 60):
            resumed = await rest_of(service.stub.Resume(pb.ResumeRequest(generation_id="g", offset=offset)))
            assert resumed[0].offset == offset
            assert [token for r in resumed for token in r.token_ids] == expected[offset:]
            assert resumed[-1].finish_reason == pb.FINISH_REASON_LENGTH
            assert resumed[-1].usage.output_tokens == 60
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await service.stub.Resume(pb.ResumeRequest(generation_id="g", offset=61)).read()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_generation_that_nobody_knows_any_more_goes_on_behind_the_tokens_of_its_client(
    temperature: float,
) -> None:
    """As after the loss of the driver and of all workers at once: the client has all that is needed."""
    prompt, seed = [4, 5, 6], 77
    expected = undisturbed(prompt, 40, seed, temperature)
    async with in_process(fake_config("fake:step_ms=1", workers__count=2)) as service:
        for have in (0, 1, 25, 39, 40):
            asked = request(
                prompt,
                max_new_tokens=40,
                seed=seed,
                temperature=temperature,
                generated_token_ids=expected[:have],
            )
            responses = await collect(service.stub, asked)
            assert responses[0].offset == have
            assert [token for r in responses for token in r.token_ids] == expected[have:]
            last = responses[-1]
            assert last.finish_reason == pb.FINISH_REASON_LENGTH
            assert (last.usage.prompt_tokens, last.usage.output_tokens) == (3, 40)
        stopped = request(prompt, max_new_tokens=40, seed=seed, temperature=temperature, stop_token_ids=[expected[9]])
        first = expected.index(expected[9]) + 1
        stopped.generated_token_ids.extend(expected[:first])
        (only,) = await collect(service.stub, stopped)
        assert (only.offset, list(only.token_ids), only.finish_reason) == (first, [], pb.FINISH_REASON_STOP)
        await until_idle(service.stub)


async def test_later_resume_takes_the_stream_over_and_the_earlier_one_is_told() -> None:
    async with in_process(fake_config("fake:step_ms=5")) as service:
        first = service.stub.Generate(request([3], max_new_tokens=80, generation_id="g"))
        begun = await first.read()
        second = service.stub.Resume(pb.ResumeRequest(generation_id="g", offset=0))
        taken = await rest_of(second)
        assert tokens_of(taken) == undisturbed([3], 80)
        with pytest.raises(grpc.aio.AioRpcError) as over:
            await rest_of(first)
        assert over.value.code() == grpc.StatusCode.ABORTED
        assert len(begun.token_ids) >= 1


async def test_dead_worker_costs_no_token_and_is_replaced() -> None:
    async with in_process(fake_config("fake:step_ms=3", workers__count=2)) as service:
        prompts = [[n + 1, n + 2] for n in range(12)]
        running = [asyncio.create_task(collect(service.stub, request(p, max_new_tokens=100))) for p in prompts]
        await status_when(service.stub, lambda status: status.counters.output_tokens >= 300)
        await service.workers.kill(next(iter(service.workers.processes)))
        for prompt, task in zip(prompts, running, strict=True):
            assert tokens_of(await task) == undisturbed(prompt, 100)
        await service.host.wait_ready()
        status = await until_idle(service.stub)
        assert sorted((w.name, w.state) for w in status.workers) == [
            ("worker-1", "lost"),
            ("worker-2", "ready"),
            ("worker-3", "ready"),
        ]
        lost = next(w for w in status.workers if w.state == "lost")
        assert "killed by the test" in lost.cause


# holds J24
async def test_stopping_ends_every_stream_once_with_what_it_was_given_and_takes_the_workers_along() -> None:
    async with in_process(fake_config("fake:step_ms=3", planner__max_decodes=4)) as service:
        prompts = [[n + 1, n + 2] for n in range(12)]  # more than decode at a time
        received: list[list[int]] = [[] for _ in prompts]
        calls = [service.stub.Generate(request(prompt, max_new_tokens=400)) for prompt in prompts]
        ended = [
            asyncio.create_task(read_until_broken(call, tokens)) for call, tokens in zip(calls, received, strict=True)
        ]
        await status_when(service.stub, lambda status: status.counters.output_tokens >= 100)
        await service.host.stop()
        assert await asyncio.gather(*ended) == [grpc.StatusCode.UNAVAILABLE] * 12
        assert any(received)
        for prompt, tokens in zip(prompts, received, strict=True):
            assert tokens == undisturbed(prompt, 400)[: len(tokens)]
        assert not service.workers.processes


async def test_workers_that_outlive_their_driver_are_adopted_with_what_they_hold() -> None:
    """The next driver serves what runs: nothing is lost, doubled or computed again."""
    config = fake_config("fake:step_ms=5", workers__count=2)
    workers = InProcessWorkers(config)
    broken: list[BaseException] = []
    first = DriverHost(config, SECRET, workers, failed=broken.append)
    await first.start()
    await first.wait_ready()
    prompts = [[n + 1] * 30 for n in range(6)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{first.port}") as channel:
        stub = rpc.GenerationStub(channel)
        calls = [stub.Generate(request(p, max_new_tokens=100, generation_id=f"g{n}")) for n, p in enumerate(prompts)]
        # One of them is the continuation of an earlier call.
        calls[5].cancel()
        await calls[5].code()
        prompts[5], known = [77] * 30, undisturbed([77] * 30, 100)[:7]
        asked = request(prompts[5], max_new_tokens=100, generation_id="g5+", generated_token_ids=known)
        calls[5] = stub.Generate(asked)
        begun = [list((await call.read()).token_ids) for call in calls]
        begun[5] = known + begun[5]
        await first.leave()
    second = DriverHost(config, SECRET, workers, failed=broken.append)
    await second.start(restarted=True)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{second.port}") as channel:
            stub = rpc.GenerationStub(channel)
            for n, (prompt, tokens) in enumerate(zip(prompts, begun, strict=True)):
                resumed = stub.Resume(pb.ResumeRequest(generation_id=f"g{n}" + "+" * (n == 5), offset=len(tokens)))
                rest = [token for response in await rest_of(resumed) for token in response.token_ids]
                assert tokens + rest == undisturbed(prompt, 100)
        assert workers.started == ["worker-1", "worker-2"]
    finally:
        await second.stop()
        await workers.end_all()
    assert not broken
