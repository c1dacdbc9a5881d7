"""Several completions of one prompt on the wire: each its index, seed, offsets and usage; resumed, lost, cancelled."""

import asyncio
from collections import defaultdict
from typing import Any

import grpc
import grpc.aio
import pytest

from microtome.actors.driver import DriverHost
from microtome.actors.requests import seed_of
from microtome.v1 import generation_pb2 as pb
from microtome.v1 import generation_pb2_grpc as rpc
from tests.support.calls import collect, request, rest_of, tokens_of, undisturbed, until_idle
from tests.support.in_process import SECRET, InProcessWorkers, fake_config, in_process

PROMPT = [5, 6, 7]
SEED = 11


def by_index(responses: list[pb.GenerateResponse]) -> dict[int, list[pb.GenerateResponse]]:
    found: defaultdict[int, list[pb.GenerateResponse]] = defaultdict(list)
    for response in responses:
        found[response.index].append(response)
    return dict(found)


def wanted(index: int, tokens: int) -> list[int]:
    return undisturbed(PROMPT, tokens, seed_of(SEED, index), 1.0)


def asked(n: int, tokens: int, **settings: Any) -> pb.GenerateRequest:
    return request(PROMPT, n=n, max_new_tokens=tokens, temperature=1.0, seed=SEED, **settings)


async def test_each_completion_has_its_index_its_seed_its_usage_and_an_end() -> None:
    async with in_process(fake_config()) as service:
        responses = await collect(service.stub, asked(4, 20, generation_id="g"))
        found = by_index(responses)
        assert sorted(found) == [0, 1, 2, 3]
        for index, own in found.items():
            assert tokens_of(own) == wanted(index, 20)
            assert {(r.generation_id, r.n, r.seed) for r in own} == {("g", 4, seed_of(SEED, index))}
            assert [bool(r.finish_reason) for r in own] == [False] * (len(own) - 1) + [True]
            assert own[-1].usage == pb.Usage(
                prompt_tokens=3, output_tokens=20, cached_tokens=own[-1].usage.cached_tokens
            )
        assert len({tuple(tokens_of(own)) for own in found.values()}) == 4
        # The seed that is told repeats a completion alone.
        alone = request(PROMPT, max_new_tokens=20, temperature=1.0, seed=found[2][0].seed)
        assert tokens_of(await collect(service.stub, alone)) == tokens_of(found[2])
        await until_idle(service.stub)


async def test_a_completion_that_ends_early_does_not_end_the_others() -> None:
    stop = wanted(1, 30)[4]
    async with in_process(fake_config()) as service:
        found = by_index(await collect(service.stub, asked(3, 30, stop_token_ids=[stop])))
        for index, own in found.items():
            full = wanted(index, 30)
            end = full.index(stop) + 1 if stop in full else 30
            assert tokens_of(own) == full[:end]
            reason = pb.FINISH_REASON_STOP if end < 30 or full[-1] == stop else pb.FINISH_REASON_LENGTH
            assert own[-1].finish_reason == reason


async def test_resuming_takes_each_completion_from_its_own_offset() -> None:
    async with in_process(fake_config("fake:step_ms=2")) as service:
        call = service.stub.Generate(asked(3, 60, generation_id="g", resumable=True))
        begun: dict[int, list[int]] = {0: [], 1: [], 2: []}
        while not all(begun.values()):
            message = await call.read()
            begun[message.index] += message.token_ids
        call.cancel()
        offsets = [pb.CompletionOffset(index=index, offset=len(tokens)) for index, tokens in begun.items()]
        resumed = by_index(await rest_of(service.stub.Resume(pb.ResumeRequest(generation_id="g", offsets=offsets))))
        for index, own in resumed.items():
            assert own[0].offset == len(begun[index])
            assert begun[index] + [t for r in own for t in r.token_ids] == wanted(index, 60)
        # Kept for a while: all from one offset, and one of them alone.
        again = by_index(await rest_of(service.stub.Resume(pb.ResumeRequest(generation_id="g", offset=58))))
        assert {i: [t for r in own for t in r.token_ids] for i, own in again.items()} == {
            i: wanted(i, 60)[58:] for i in range(3)
        }
        only = pb.ResumeRequest(generation_id="g", offsets=[pb.CompletionOffset(index=1, offset=60)])
        (last,) = await rest_of(service.stub.Resume(only))
        assert (last.index, list(last.token_ids), last.usage.output_tokens) == (1, [], 60)
        for places, code in (
            ([pb.CompletionOffset(index=3)], grpc.StatusCode.INVALID_ARGUMENT),
            ([pb.CompletionOffset(index=1, offset=61)], grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await service.stub.Resume(pb.ResumeRequest(generation_id="g", offsets=places)).read()
            assert refused.value.code() is code


@pytest.mark.parametrize("ended_by", ["hanging up", "Cancel"])
async def test_every_completion_ends_with_its_call(ended_by: str) -> None:
    async with in_process(fake_config("fake:step_ms=3")) as service:
        call = service.stub.Generate(asked(5, 2000, generation_id="g"))
        await call.read()
        if ended_by == "Cancel":
            await service.stub.Cancel(pb.CancelRequest(generation_id="g"))
            last = by_index(await rest_of(call))
            assert {i: own[-1].finish_reason for i, own in last.items()} == dict.fromkeys(
                range(5), pb.FINISH_REASON_CANCELLED
            )
        else:
            call.cancel()
        status = await until_idle(service.stub)
        assert status.counters.generations_finished == 5


async def test_a_worker_that_dies_changes_no_completion() -> None:
    async with in_process(fake_config("fake:step_ms=2", workers__count=2)) as service:
        call = service.stub.Generate(asked(4, 120))
        responses: list[pb.GenerateResponse] = []
        while len(responses) < 12:
            responses.append(await call.read())
        status = await service.stub.Status(pb.StatusRequest())
        await service.workers.kill(next(w.name for w in status.workers if w.cells_used))
        found = by_index(responses + await rest_of(call))
        assert {index: tokens_of(own) for index, own in found.items()} == {i: wanted(i, 120) for i in range(4)}


async def test_a_driver_that_dies_leaves_completions_that_are_gone_on_with_under_the_calls_own_id() -> None:
    config = fake_config("fake:step_ms=3")
    workers = InProcessWorkers(config)
    host = DriverHost(config, SECRET, workers, failed=lambda error: None)
    await host.start()
    await host.wait_ready()
    begun: dict[int, list[int]] = {0: [], 1: [], 2: []}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{host.port}") as channel:
        call = rpc.GenerationStub(channel).Generate(asked(3, 300, generation_id="g"))
        while min(map(len, begun.values())) < 5:
            message = await call.read()
            begun[message.index] += message.token_ids
        await host.leave()
    again = DriverHost(config, SECRET, workers, failed=lambda error: None)
    await again.start(restarted=True)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{again.port}") as channel:
            stub = rpc.GenerationStub(channel)
            offsets = [pb.CompletionOffset(index=index, offset=len(tokens)) for index, tokens in begun.items()]
            resumed = by_index(await rest_of(stub.Resume(pb.ResumeRequest(generation_id="g", offsets=offsets))))
            assert {i: begun[i] + [t for r in own for t in r.token_ids] for i, own in resumed.items()} == {
                i: wanted(i, 300) for i in range(3)
            }
            assert {(r.n, r.seed) for r in resumed[2]} == {(3, seed_of(SEED, 2))}
            status = await until_idle(stub)
            assert status.counters.prefilled_tokens == 0  # nothing was computed again
    finally:
        await again.stop()
        await workers.end_all()


async def test_completions_that_nobody_knows_any_more_go_on_behind_what_their_client_has() -> None:
    async with in_process(fake_config(workers__count=2)) as service:
        have = {0: 40, 2: 0, 3: 17}  # the second had come whole
        begun = [
            pb.BegunCompletion(index=index, seed=seed_of(SEED, index), token_ids=wanted(index, 40)[:count])
            for index, count in have.items()
        ]
        found = by_index(await collect(service.stub, asked(4, 40, begun=begun)))
        assert sorted(found) == sorted(have)
        for index, own in found.items():
            assert own[0].offset == have[index]
            assert [t for r in own for t in r.token_ids] == wanted(index, 40)[have[index] :]
            assert (own[-1].finish_reason, own[-1].usage.output_tokens) == (pb.FINISH_REASON_LENGTH, 40)
            assert own[-1].usage.prompt_tokens == 3
        await until_idle(service.stub)


async def test_more_completions_than_the_queue_holds_are_refused_together() -> None:
    async with in_process(fake_config(planner__max_waiting=3)) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(service.stub, asked(4, 5))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(refused.value.details()).startswith("needs 4 places in the queue, 3 available")
        status = await service.stub.Status(pb.StatusRequest())
        assert status.counters.generations_started == 0
        assert len(by_index(await collect(service.stub, asked(3, 5)))) == 3


async def test_in_a_session_the_first_completion_becomes_history_and_the_others_leave_nothing() -> None:
    async with in_process(fake_config()) as service:
        stub = service.stub
        session = (await stub.OpenSession(pb.OpenSessionRequest())).session_id
        found = by_index(await collect(stub, asked(3, 10, session_id=session)))
        history = PROMPT + tokens_of(found[0])
        assert tokens_of(found[2]) == wanted(2, 10)
        turn = await collect(stub, request([1], max_new_tokens=5, session_id=session))
        assert tokens_of(turn) == undisturbed([*history, 1], 5)


async def test_calls_of_many_completions_side_by_side_mix_nothing_up() -> None:
    async with in_process(fake_config("fake:step_ms=1", planner__max_decodes=8)) as service:
        calls = [request([n + 1], n=1 + n % 3, max_new_tokens=25, temperature=1.0, seed=n) for n in range(12)]
        answers = await asyncio.gather(*(collect(service.stub, call) for call in calls))
        for n, responses in enumerate(answers):
            found = by_index(responses)
            assert {i: tokens_of(own) for i, own in found.items()} == {
                i: undisturbed([n + 1], 25, seed_of(n, i), 1.0) for i in range(1 + n % 3)
            }
        await until_idle(service.stub)
