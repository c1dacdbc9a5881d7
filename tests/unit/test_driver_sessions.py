"""Sessions over real gRPC, through the driver's loop and its front end: what clients see of them."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from microtome import errors
from microtome.actors.driver import DriverHost
from microtome.aio import AsyncClient
from microtome.planner.events import OpenSession
from microtome.planner.types import WorkerId
from microtome.v1 import generation_pb2 as pb
from microtome.v1 import generation_pb2_grpc as rpc
from tests.support.calls import collect, request, rest_of, tokens_of, undisturbed, until_idle
from tests.support.in_process import SECRET, InProcessWorkers, fake_config, in_process

NO_CACHE = {"planner__prefix_cache": "false"}  # what is found is the session's own


async def opened(stub: Any) -> str:
    return str((await stub.OpenSession(pb.OpenSessionRequest())).session_id)


async def length(stub: Any, session: str) -> int:
    return int((await stub.GetSession(pb.GetSessionRequest(session_id=session))).length)


async def turn(stub: Any, session: str, prompt: list[int], count: int) -> list[int]:
    return tokens_of(await collect(stub, request(prompt, max_new_tokens=count, session_id=session)))


async def refusal(call: Any) -> tuple[grpc.StatusCode, str | None]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details()


async def test_turns_in_a_session_are_one_undisturbed_run_and_run_only_what_is_new() -> None:
    async with in_process(fake_config(workers__count=2, **NO_CACHE)) as service:
        session, history, given = await opened(service.stub), [], 0
        for n, prompt in enumerate(([5] * 40, [6, 7], [8])):
            history += prompt
            tokens = await turn(service.stub, session, prompt, 10)
            assert tokens == undisturbed(history, 10)
            history += tokens
            # Behind the first, the token that was generated last is run together with the prompt.
            given += len(prompt) + (n > 0)
            status = await service.stub.Status(pb.StatusRequest())
            assert status.counters.prefilled_tokens == given
            assert await length(service.stub, session) == len(history) - 1
        await service.stub.CloseSession(pb.CloseSessionRequest(session_id=session))
        await until_idle(service.stub)


async def test_a_clone_goes_its_own_way_from_where_it_was_taken() -> None:
    async with in_process(fake_config(**NO_CACHE)) as service:
        session = await opened(service.stub)
        first = await turn(service.stub, session, [5] * 30, 10)
        history = [5] * 30 + first
        whole = await service.stub.CloneSession(pb.CloneSessionRequest(session_id=session))
        part = await service.stub.CloneSession(pb.CloneSessionRequest(session_id=session, upto=33))
        none = await service.stub.CloneSession(pb.CloneSessionRequest(session_id=session, upto=0))
        assert [one.length for one in (whole, part, none)] == [39, 33, 0]
        assert len({session, whole.session_id, part.session_id, none.session_id}) == 4
        before = (await service.stub.Status(pb.StatusRequest())).counters.prefilled_tokens
        assert await turn(service.stub, whole.session_id, [9], 5) == undisturbed([*history[:39], 9], 5)
        assert await turn(service.stub, part.session_id, [9], 5) == undisturbed([*history[:33], 9], 5)
        after = (await service.stub.Status(pb.StatusRequest())).counters.prefilled_tokens
        assert after == before + 2
        assert await turn(service.stub, none.session_id, [9], 5) == undisturbed([9], 5)
        assert await turn(service.stub, session, [9], 5) == undisturbed([*history, 9], 5)
        for name in (session, whole.session_id, part.session_id, none.session_id):
            await service.stub.CloseSession(pb.CloseSessionRequest(session_id=name))
        await until_idle(service.stub)


async def test_a_rewound_session_goes_on_from_where_it_was_rewound_to() -> None:
    async with in_process(fake_config(**NO_CACHE)) as service:
        session = await opened(service.stub)
        history = [5] * 30 + await turn(service.stub, session, [5] * 30, 10)
        before = (await service.stub.Status(pb.StatusRequest())).counters.prefilled_tokens
        for position in (39, 34, 30):
            asked = pb.RewindSessionRequest(session_id=session, position=position)
            assert (await service.stub.RewindSession(asked)).length == position
            del history[position:]
            assert await length(service.stub, session) == position
        assert await turn(service.stub, session, [9], 5) == undisturbed([*history, 9], 5)
        after = (await service.stub.Status(pb.StatusRequest())).counters.prefilled_tokens
        assert after == before + 1


async def test_calls_on_sessions_that_are_not_open_are_refused() -> None:
    async with in_process(fake_config("fake:step_ms=5")) as service:
        stub = service.stub
        running = stub.Generate(request([1], max_new_tokens=500))  # its own session is nobody else's to name
        await running.read()
        closed = await opened(stub)
        await stub.CloseSession(pb.CloseSessionRequest(session_id=closed))
        never = str(int(closed) + 1000)
        for name in (closed, never, "1", "nobody", "-1", "٣", "9" * 40):
            for call in (
                stub.CloneSession(pb.CloneSessionRequest(session_id=name)),
                stub.RewindSession(pb.RewindSessionRequest(session_id=name, position=1)),
                stub.GetSession(pb.GetSessionRequest(session_id=name)),
                stub.CloseSession(pb.CloseSessionRequest(session_id=name)),
                collect(stub, request([1], session_id=name)),
            ):
                code, sentence = await refusal(call)
                assert code is grpc.StatusCode.NOT_FOUND
                assert sentence in (f"no session {name}", f"no session {name[:40]!r}")
        running.cancel()
        await until_idle(stub)
        assert (await stub.Status(pb.StatusRequest())).counters.generations_finished == 1


async def test_a_refused_call_on_a_session_changes_nothing() -> None:
    async with in_process(fake_config("fake:step_ms=2")) as service:
        stub = service.stub
        session = await opened(stub)
        history = [5, 6] + await turn(stub, session, [5, 6], 8)

        def rewinds(position: int) -> Any:
            return stub.RewindSession(pb.RewindSessionRequest(session_id=session, position=position))

        invalid = grpc.StatusCode.INVALID_ARGUMENT
        assert await refusal(rewinds(10)) == (
            invalid,
            f"session {session} has 9 committed tokens, not 10 to rewind to",
        )
        assert await refusal(rewinds(0)) == (
            invalid,
            f"session {session} cannot rewind to 0: close it and open another",
        )
        assert await refusal(stub.CloneSession(pb.CloneSessionRequest(session_id=session, upto=10))) == (
            invalid,
            f"session {session} has 9 committed tokens; 10 cannot be cloned",
        )
        assert await refusal(collect(stub, request([1] * 4086, session_id=session))) == (
            invalid,
            "a history of 4096 tokens and 1 more do not fit a context of 4096 tokens",
        )
        given = request([1], session_id=session, generated_token_ids=[4])
        assert (await refusal(collect(stub, given)))[0] is invalid
        salt = await refusal(stub.OpenSession(pb.OpenSessionRequest(cache_salt="x" * 129)))
        assert salt == (invalid, f"cache_salt {'x' * 40!r} is not at most 128 printable characters")

        running = stub.Generate(request([7], max_new_tokens=200, session_id=session))
        begun = list((await running.read()).token_ids)
        busy = (grpc.StatusCode.FAILED_PRECONDITION, f"session {session} is generating")
        assert await refusal(rewinds(1)) == busy
        assert await refusal(collect(stub, request([1], session_id=session))) == busy
        begun += [token for response in await rest_of(running) for token in response.token_ids]
        assert begun == undisturbed([*history, 7], 200)
        history += [7, *begun]
        assert await turn(stub, session, [8], 5) == undisturbed([*history, 8], 5)


async def test_closing_a_session_cancels_what_it_generates() -> None:
    async with in_process(fake_config("fake:step_ms=5")) as service:
        session = await opened(service.stub)
        running = service.stub.Generate(request([7], max_new_tokens=2000, session_id=session))
        await running.read()
        await service.stub.CloseSession(pb.CloseSessionRequest(session_id=session))
        assert (await rest_of(running))[-1].finish_reason == pb.FINISH_REASON_CANCELLED
        await until_idle(service.stub)


async def test_no_more_sessions_are_open_than_may_be() -> None:
    async with in_process(fake_config(planner__max_sessions=2)) as service:
        first = await opened(service.stub)
        await service.stub.CloneSession(pb.CloneSessionRequest(session_id=first))
        for call in (
            service.stub.OpenSession(pb.OpenSessionRequest()),
            service.stub.CloneSession(pb.CloneSessionRequest(session_id=first)),
        ):
            assert (await refusal(call))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        await service.stub.CloseSession(pb.CloseSessionRequest(session_id=first))
        assert int(await opened(service.stub)) > int(first)


async def test_a_session_outlives_its_worker() -> None:
    async with in_process(fake_config(workers__count=2)) as service:
        session = await opened(service.stub)
        history = [5] * 20 + await turn(service.stub, session, [5] * 20, 10)
        status = await service.stub.Status(pb.StatusRequest())
        holder = next(worker.name for worker in status.workers if worker.cells_used)
        await service.workers.kill(WorkerId(holder))
        assert await turn(service.stub, session, [9], 5) == undisturbed([*history, 9], 5)


async def test_a_restarted_driver_knows_the_sessions_that_workers_hold_and_no_other() -> None:
    config = fake_config(**NO_CACHE)
    workers = InProcessWorkers(config)
    broken: list[BaseException] = []
    first = DriverHost(config, SECRET, workers, failed=broken.append)
    await first.start()
    await first.wait_ready()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{first.port}") as channel:
        stub = rpc.GenerationStub(channel)
        held, empty = await opened(stub), await opened(stub)  # nothing has run in the second: no worker knows it
        history = [5] * 20 + await turn(stub, held, [5] * 20, 10)
        await first.leave()
    second = DriverHost(config, SECRET, workers, failed=broken.append)
    await second.start(restarted=True)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{second.port}") as channel:
            stub = rpc.GenerationStub(channel)
            assert await length(stub, held) == len(history) - 1
            assert await turn(stub, held, [9], 5) == undisturbed([*history, 9], 5)
            status = await stub.Status(pb.StatusRequest())
            assert status.counters.prefilled_tokens == 2  # the token that was pending, and the prompt
            fresh = [await opened(stub) for _ in range(4)]
            assert not {held, empty} & set(fresh)
            code, _ = await refusal(stub.GetSession(pb.GetSessionRequest(session_id=empty)))
            assert code is grpc.StatusCode.NOT_FOUND
    finally:
        await second.stop()
        await workers.end_all()
    assert not broken


async def test_a_generation_in_a_session_goes_on_behind_a_restart_of_the_driver_and_so_does_the_session() -> None:
    config = fake_config("fake:step_ms=3", **NO_CACHE)
    workers = InProcessWorkers(config)
    broken: list[BaseException] = []
    first = DriverHost(config, SECRET, workers, failed=broken.append)
    await first.start()
    await first.wait_ready()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{first.port}") as channel:
        stub = rpc.GenerationStub(channel)
        session = await opened(stub)
        history = [5] * 20 + await turn(stub, session, [5] * 20, 10)
        call = stub.Generate(request([6], max_new_tokens=200, generation_id="g", session_id=session))
        tokens = list((await call.read()).token_ids)
        await first.leave()
    second = DriverHost(config, SECRET, workers, failed=broken.append)
    await second.start(restarted=True)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{second.port}") as channel:
            stub = rpc.GenerationStub(channel)
            resumed = await rest_of(stub.Resume(pb.ResumeRequest(generation_id="g", offset=len(tokens))))
            tokens += [token for response in resumed for token in response.token_ids]
            assert tokens == undisturbed([*history, 6], 200)
            assert await turn(stub, session, [9], 5) == undisturbed([*history, 6, *tokens, 9], 5)
    finally:
        await second.stop()
        await workers.end_all()
    assert not broken


# holds D21
async def test_the_session_of_a_caller_who_hangs_up_meanwhile_is_closed() -> None:
    async with in_process(fake_config(planner__max_sessions=1)) as service:
        asking = asyncio.create_task(service.host.ask(OpenSession(at_us=service.host.now_us(), ticket=0)))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await opened(service.stub)  # the one that may be open is not taken


async def test_the_clients_session_is_what_the_service_has() -> None:
    async with in_process(fake_config(**NO_CACHE)) as service, AsyncClient(service.address) as client:
        async with client.session(cache_salt="mine") as session:
            first = [t async for u in session.generate(token_ids=[5] * 20, max_new_tokens=10) for t in u.token_ids]
            history = [5] * 20 + first
            assert first == undisturbed([5] * 20, 10)
            assert await session.length() == 29
            async with session.clone(25) as twin:
                answer = await twin.complete(token_ids=[8], max_new_tokens=5)
                assert list(answer.token_ids) == undisturbed([*history[:25], 8], 5)
            await session.rewind(22)
            answer = await session.complete(token_ids=[8], max_new_tokens=5)
            assert list(answer.token_ids) == undisturbed([*history[:22], 8], 5)
            with pytest.raises(errors.InvalidRequest, match="has 27 committed tokens, not 28 to rewind to"):
                await session.rewind(28)
        with pytest.raises(errors.NotFound, match="no session"):
            await session.length()
        status = await until_idle(service.stub)
        assert status.counters.prefilled_tokens == 20 + 1 + 1
