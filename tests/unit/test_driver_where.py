"""Where a generation is, asked over the wire: state, reason, forecast, worker; and what belongs to which tenant."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from microtome.v1 import admin_pb2, admin_pb2_grpc
from microtome.v1 import generation_pb2 as pb
from tests.support.calls import collect, request, rest_of, status_when, tokens_of, undisturbed
from tests.support.in_process import Service, fake_config, in_process


async def where(service: Service, name: str) -> list[pb.Whereabouts]:
    answer = await service.stub.Where(pb.WhereRequest(generation_id=name))
    assert answer.generation_id == name
    return list(answer.completions)


async def begun(service: Service, prompt: list[int], **settings: Any) -> Any:
    call = service.stub.Generate(request(prompt, **settings))
    await call.read()
    return call


async def test_a_running_generation_is_on_its_worker_and_counts_its_tokens() -> None:
    async with in_process(fake_config("fake:step_ms=5")) as service:
        call = await begun(service, [1, 2, 3], max_new_tokens=400, generation_id="g")
        (found,) = await where(service, "g")
        assert (found.state, found.waits_for) == (pb.GENERATION_STATE_RUNNING, pb.WAITING_REASON_NOTHING)
        assert (found.index, found.prompt_tokens, found.position, found.worker) == (0, 3, 0, "worker-1")
        assert found.output_tokens >= 1
        assert not found.HasField("predicted_ttft_ms")
        assert (found.parked, found.moved, found.finish_reason) == (0, 0, pb.FINISH_REASON_UNSPECIFIED)
        call.cancel()


async def test_those_that_wait_say_how_many_start_before_them_why_and_how_long_still() -> None:
    async with in_process(fake_config("fake:step_ms=5", runtime__max_sequences=1)) as service:
        first = await begun(service, [1], max_new_tokens=2000, priority=2)  # so that none takes its place
        others = [
            service.stub.Generate(request([2, 3, n], max_new_tokens=2, generation_id=f"g{n}", priority=n % 2))
            for n in range(3)
        ]
        await status_when(service.stub, lambda status: status.waiting == 3)
        places = {name: (await where(service, name))[0] for name in ("g0", "g1", "g2")}
        assert {name: place.position for name, place in places.items()} == {"g0": 1, "g1": 0, "g2": 2}
        assert {place.state for place in places.values()} == {pb.GENERATION_STATE_WAITING}
        assert places["g1"].waits_for == pb.WAITING_REASON_SEQUENCES
        assert places["g0"].waits_for == pb.WAITING_REASON_PRIORITY
        assert 0 < places["g1"].predicted_ttft_ms <= places["g0"].predicted_ttft_ms <= places["g2"].predicted_ttft_ms
        assert {place.worker for place in places.values()} == {""}
        first.cancel()
        for n, call in enumerate(others):
            assert tokens_of(await rest_of(call)) == undisturbed([2, 3, n], 2)


async def test_without_a_worker_that_is_what_is_waited_for() -> None:
    async with in_process(fake_config("fake:step_ms=5")) as service:
        call = await begun(service, [1], max_new_tokens=2000, generation_id="g")
        service.workers.hold_starts = asyncio.Event()
        await service.workers.kill("worker-1")  # type: ignore[arg-type]
        await status_when(service.stub, lambda status: status.running == 0)
        (found,) = await where(service, "g")
        assert (found.state, found.waits_for) == (pb.GENERATION_STATE_RETURNING, pb.WAITING_REASON_NO_WORKER)
        assert (found.moved, found.worker) == (1, "")
        service.workers.hold_starts.set()
        await call.read()
        call.cancel()


async def test_completions_are_told_one_by_one_and_ended_ones_with_their_reason_as_long_as_they_are_kept() -> None:
    async with in_process(fake_config("fake:step_ms=1")) as service:
        asked = request([1, 2], n=3, max_new_tokens=4, temperature=1.0, generation_id="g", resumable=True)
        await collect(service.stub, asked)
        found = await where(service, "g")
        assert [place.index for place in found] == [0, 1, 2]
        for place in found:
            assert (place.state, place.waits_for) == (pb.GENERATION_STATE_ENDED, pb.WAITING_REASON_UNSPECIFIED)
            assert (place.finish_reason, place.output_tokens) == (pb.FINISH_REASON_LENGTH, 4)


async def test_an_earlier_calls_tokens_count_as_the_callers_output() -> None:
    async with in_process(fake_config("fake:step_ms=5")) as service:
        have = undisturbed([1, 2], 30)
        call = await begun(service, [1, 2], max_new_tokens=900, generated_token_ids=have, generation_id="g")
        (found,) = await where(service, "g")
        assert found.prompt_tokens == 2
        assert found.output_tokens > 30
        call.cancel()


async def test_a_generation_that_nobody_knows_is_not_found() -> None:
    async with in_process(fake_config()) as service:
        await collect(service.stub, request([1], max_new_tokens=1, generation_id="gone"))
        for name in ("nobody", "gone"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await where(service, name)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            assert refused.value.details() == f"no generation {name!r} is running or kept"


async def test_an_operator_lists_what_waits_in_order_then_what_runs() -> None:
    async with (
        in_process(fake_config("fake:step_ms=5", runtime__max_sequences=1)) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        admin: Any = admin_pb2_grpc.AdminStub(channel)
        running = await begun(service, [1], max_new_tokens=2000, generation_id="runs", tenant="acme", priority=10)
        waiting = [
            service.stub.Generate(request([2], n=2, generation_id="two", temperature=1.0)),
            service.stub.Generate(request([3], generation_id="first", priority=9)),
        ]
        await status_when(service.stub, lambda status: status.waiting == 3)
        answer = await admin.ListGenerations(admin_pb2.ListGenerationsRequest())
        assert answer.total == 4
        listed = [(one.generation_id, one.whereabouts.index, one.tenant, one.priority) for one in answer.generations]
        assert listed == [("first", 0, "", 9), ("two", 0, "", 0), ("two", 1, "", 0), ("runs", 0, "acme", 10)]
        assert answer.generations[2].whereabouts.waits_for == pb.WAITING_REASON_SHARED_PROMPT
        short = await admin.ListGenerations(admin_pb2.ListGenerationsRequest(limit=1))
        assert ([one.generation_id for one in short.generations], short.total) == (["first"], 4)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await admin.ListGenerations(admin_pb2.ListGenerationsRequest(limit=257))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == "limit 257 is above 256"
        for call in (running, *waiting):
            call.cancel()


async def test_a_flooding_tenant_waits_for_itself_and_a_weight_is_honoured() -> None:
    config = fake_config(
        "fake:step_ms=2", runtime__max_sequences=1, planner__policy="fair", planner__tenant_weights="paid=4"
    )
    async with in_process(config) as service:
        holder = await begun(service, [1], max_new_tokens=2000)
        ended: list[str] = []

        async def finish(name: str, tenant: str) -> None:
            await collect(service.stub, request([2], max_new_tokens=2, tenant=tenant, generation_id=name))
            ended.append(name)

        tasks = []
        for name, tenant in [(f"flood{n}", "flood") for n in range(6)] + [(f"paid{n}", "paid") for n in range(4)]:
            tasks.append(asyncio.create_task(finish(name, tenant)))
            await status_when(service.stub, lambda status: status.waiting == len(tasks))
        (last,) = await where(service, "flood5")
        assert (last.position, last.waits_for) == (9, pb.WAITING_REASON_TENANT_SHARE)
        holder.cancel()
        await asyncio.gather(*tasks)
        # Four for one: every turn of the flood's comes behind four of the other's.
        assert ended.index("paid3") < ended.index("flood1")


async def test_salted_prompts_share_no_cached_prefix_with_others() -> None:
    async with in_process(fake_config()) as service:
        prompt = list(range(50))

        async def cached(salt: str) -> int:
            responses = await collect(service.stub, request(prompt, max_new_tokens=2, cache_salt=salt))
            return int(responses[-1].usage.cached_tokens)

        assert await cached("a") == 0
        assert await cached("a") == 49
        assert await cached("b") == 0
        assert await cached("") == 0


async def test_a_first_token_that_cannot_come_in_time_is_refused_with_a_time_to_try_again() -> None:
    async with in_process(fake_config("fake:step_ms=5", runtime__max_sequences=1)) as service:
        holder = await begun(service, [1], max_new_tokens=2000)
        waiting = service.stub.Generate(request([3] * 3000, max_new_tokens=2))
        await status_when(service.stub, lambda status: status.waiting == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(service.stub, request([4] * 3000, max_new_tokens=2, ttft_target_ms=1))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "ms to the first token, 1 available" in str(refused.value.details())
        trailing: Any = refused.value.trailing_metadata()
        assert int(dict(trailing)["retry-after-ms"]) > 0
        for call in (holder, waiting):
            call.cancel()
        easy = request([4], max_new_tokens=2, ttft_target_ms=60_000)
        assert tokens_of(await collect(service.stub, easy)) == undisturbed([4], 2)


async def test_a_session_has_a_tenant_and_a_salt_of_its_own() -> None:
    async with in_process(fake_config("fake:step_ms=5")) as service:
        stub = service.stub
        session = (await stub.OpenSession(pb.OpenSessionRequest(tenant="acme"))).session_id
        call = await begun(service, [1], max_new_tokens=900, session_id=session)
        async with grpc.aio.insecure_channel(service.address) as channel:
            admin: Any = admin_pb2_grpc.AdminStub(channel)
            (one,) = (await admin.ListGenerations(admin_pb2.ListGenerationsRequest())).generations
        assert one.tenant == "acme"
        call.cancel()
        for settings in ({"tenant": "other"}, {"cache_salt": "other"}):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await collect(stub, request([1], session_id=session, **settings))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as long:
            await stub.OpenSession(pb.OpenSessionRequest(tenant="x" * 129))
        assert long.value.details() == f"tenant {'x' * 40!r} is not at most 128 printable characters"
