"""What both clients owe their caller, against a scripted service on loopback: one suite, run over each.

The plain client's calls are made in threads, so that one test body serves both.
"""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from microtome import errors
from microtome.aio import AsyncClient, AsyncGeneration, AsyncSession
from microtome.answers import (
    Completion,
    FinishReason,
    GenerationState,
    ListedGeneration,
    TokenLogprobs,
    Update,
    Usage,
    WaitingReason,
    Whereabouts,
    whereabouts_of,
)
from microtome.client import Client, Generation, Session
from microtome.retry import Retry
from microtome.v1 import admin_pb2
from microtome.v1 import generation_pb2 as pb
from microtome.v1.logprobs_pb2 import Logprobs
from tests.support.fake_generation import (
    HELLO,
    WAIT_S,
    Endless,
    FakeGeneration,
    Held,
    Served,
    refuses,
    response,
    says,
)

QUICK = Retry(attempts=3, resume_attempts=4, first_s=0.002, most_s=0.004)
BROKEN = "Socket closed"  # as gRPC puts it when a connection goes
OTHER_STATUSES = [code for code in grpc.StatusCode if code.name not in ("OK", "UNAVAILABLE")]


class Plain:
    """The plain client, its waiting done in threads."""

    def __init__(self, address: str, **options: Any) -> None:
        self.client = Client(address, **options)

    def generate(self, *args: Any, **options: Any) -> "PlainGeneration":
        return PlainGeneration(self.client.generate(*args, **options))

    def resume(self, *args: Any, **options: Any) -> "PlainGeneration":
        return PlainGeneration(self.client.resume(*args, **options))

    @asynccontextmanager
    async def session(self, **options: Any) -> "AsyncIterator[PlainSession]":
        opened = await asyncio.to_thread(self.client.session, **options)
        with opened as session:
            yield PlainSession(session)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            return await asyncio.to_thread(getattr(self.client, name), *args, **options)

        return call


class PlainSession:
    def __init__(self, session: Session) -> None:
        self.session = session

    def generate(self, *args: Any, **options: Any) -> "PlainGeneration":
        return PlainGeneration(self.session.generate(*args, **options))

    @asynccontextmanager
    async def clone(self, upto: int | None = None) -> "AsyncIterator[PlainSession]":
        with await asyncio.to_thread(self.session.clone, upto) as twin:
            yield PlainSession(twin)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            return await asyncio.to_thread(getattr(self.session, name), *args, **options)

        return call


class PlainGeneration:
    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.close, self.detach = generation.close, generation.detach

    @property
    def generation_id(self) -> str:
        return self.generation.generation_id

    @property
    def completions(self) -> tuple[Completion, ...]:
        return self.generation.completions

    def __aiter__(self) -> "PlainGeneration":
        return self

    async def __anext__(self) -> Update:
        update = await asyncio.to_thread(next, self.generation, None)
        if update is None:
            raise StopAsyncIteration
        return update


Face = Plain | AsyncClient
Connect = Callable[..., Any]


@pytest.fixture(params=[Plain, AsyncClient], ids=["plain", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Connect:
    """Makes a client; what it made is closed when the block is left."""

    @asynccontextmanager
    async def connected(address: str, **options: Any) -> AsyncIterator[Face]:
        face = request.param(address, **{"retry": QUICK, **options})
        try:
            yield face
        finally:
            await face.close()

    return connected


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(FakeGeneration())
    yield served
    served.stop()


async def happens(event: Any) -> bool:
    return await asyncio.to_thread(event.wait, WAIT_S)


async def all_of(generation: Any) -> list[Update]:
    return [update async for update in generation]


def tokens_of(updates: list[Update]) -> list[int]:
    return [token for update in updates for token in update.token_ids]


# --- what a generation brings ---


async def test_an_update_is_handed_on_before_the_next_one_is_made(connect: Connect, served: Served) -> None:
    held = Held()
    served.service.scripts = [held]
    async with connect(served.address) as client:
        generation = client.generate("hi")
        first = await anext(generation)
        assert await happens(held.waiting)
        assert (first.text, first.token_ids, first.offset, first.seed) == ("Hel", (10, 11), 0, 7)
        held.gate.set()
        assert tokens_of(await all_of(generation)) == [12, 13, 14]


async def test_only_the_last_update_has_finish_reason_and_usage(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client:
        *before, last = await all_of(client.generate("hi"))
    assert [(update.finish_reason, update.usage) for update in before] == [(None, None)] * 2
    assert last.finish_reason == "length"
    assert (last.usage.prompt_tokens, last.usage.output_tokens, last.usage.cached_tokens) == (3, 5, 1)


async def test_a_completion_is_the_updates_joined(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client:
        completion = await client.complete("hi")
    assert completion.text == "Hello world"
    assert completion.token_ids == (10, 11, 12, 13, 14)
    assert (completion.finish_reason, completion.seed, completion.generation_id) == ("length", 7, "g-1")
    assert completion.usage.output_tokens == 5


async def test_every_option_is_put_on_the_wire(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client:
        await client.complete(
            "hi",
            max_new_tokens=9,
            temperature=0.5,
            top_k=4,
            top_p=0.25,
            min_p=0.125,
            seed=2**64 - 1,
            repetition_penalty=1.25,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={7: -2.5},
            allowed_token_ids=[7, 8],
            banned_token_ids=[9],
            min_new_tokens=2,
            stop=["END", "\n"],
            stop_token_ids=[5, 6],
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=3,
            generation_id="mine",
            priority=-3,
            timeout_s=30,
        )
    assert served.service.seen == [
        pb.GenerateRequest(
            text="hi",
            max_new_tokens=9,
            temperature=0.5,
            top_k=4,
            top_p=0.25,
            min_p=0.125,
            seed=2**64 - 1,
            repetition_penalty=1.25,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={7: -2.5},
            allowed_token_ids=pb.TokenIds(ids=[7, 8]),
            banned_token_ids=[9],
            min_new_tokens=2,
            stop=["END", "\n"],
            stop_token_ids=[5, 6],
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=3,
            generation_id="mine",
            priority=-3,
        )
    ]


async def test_options_that_are_not_given_stay_absent(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client:
        generation = client.generate(token_ids=[1, 2], temperature=None)
        await all_of(generation)
    [request] = served.service.seen
    assert request == pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), generation_id=generation.generation_id)
    assert not request.HasField("temperature")


async def test_chat_messages_keep_their_order_and_roles(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client:
        await client.complete(messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])
    [request] = served.service.seen
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "be brief"), ("user", "hi")]


async def test_the_call_is_on_its_way_before_anybody_iterates(connect: Connect, served: Served) -> None:
    held = Held()
    served.service.scripts = [held]
    async with connect(served.address) as client:
        generation = client.generate("hi")
        assert await happens(held.waiting)
        generation.close()


async def test_generations_of_one_client_do_not_wait_for_each_other(connect: Connect, served: Served) -> None:
    held = Held()
    served.service.scripts = [held, HELLO]
    async with connect(served.address) as client:
        slow = client.generate("first")
        await anext(slow)
        assert (await client.complete("second")).text == "Hello world"
        held.gate.set()
        assert tokens_of(await all_of(slow)) == [12, 13, 14]


# --- leaving early ---


async def test_closing_a_generation_cancels_it_on_the_service(connect: Connect, served: Served) -> None:
    endless = Endless()
    served.service.scripts = [endless]
    async with connect(served.address) as client:
        generation = client.generate("hi")
        await anext(generation)
        generation.close()
        assert await happens(endless.cancelled)
        assert await all_of(generation) == []
        generation.close()  # twice is once


async def test_a_generation_that_was_read_to_its_end_stays_ended(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client:
        generation = client.generate("hi")
        assert len(await all_of(generation)) == 3
        assert await all_of(generation) == []
    assert len(served.service.seen) == 1


def _leave_plainly(client: Client, how: str) -> None:
    for _ in client.generate("hi"):
        if how == "break":
            break
        raise KeyError("of the caller")


async def _leave_async(client: AsyncClient, how: str) -> None:
    async for _ in client.generate("hi"):
        if how == "break":
            break
        raise KeyError("of the caller")


@pytest.mark.parametrize("how", ["break", "raise"])
async def test_leaving_the_loop_cancels_the_generation_on_the_service(
    connect: Connect, served: Served, how: str
) -> None:
    endless = Endless()
    served.service.scripts = [endless]
    async with connect(served.address) as client:
        try:
            if isinstance(client, AsyncClient):
                await _leave_async(client, how)
            else:
                await asyncio.to_thread(_leave_plainly, client.client, how)
        except KeyError as error:
            assert how == "raise"
            error.__traceback__ = None  # it holds the frame, and the frame the generation
        assert await happens(endless.cancelled)


async def test_cancelling_the_task_that_reads_cancels_the_generation(served: Served) -> None:
    endless = Endless()
    served.service.scripts = [endless]
    async with AsyncClient(served.address) as client:
        began = asyncio.Event()

        async def read() -> None:
            async for _ in client.generate("hi"):
                began.set()

        task = asyncio.create_task(read())
        await asyncio.wait_for(began.wait(), WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await happens(endless.cancelled)


async def test_a_completion_that_fails_half_way_cancels_the_generation(connect: Connect, served: Served) -> None:
    held = Held()
    served.service.scripts = [held]
    async with connect(served.address) as client:
        with pytest.raises(errors.DeadlineExceeded, match=r"took longer than 0\.5 s; 2 tokens had come"):
            await client.complete("hi", timeout_s=0.5)
        assert await happens(held.cancelled)


async def test_closing_the_client_ends_what_is_under_way(connect: Connect, served: Served) -> None:
    held = Held()
    served.service.scripts = [held]
    async with connect(served.address) as client:
        generation = client.generate("hi")
        await anext(generation)
        reading = asyncio.create_task(all_of(generation))
        assert await happens(held.waiting)
        await client.close()
        with pytest.raises(errors.Cancelled, match="the client was closed while the call ran"):
            await reading
        assert await happens(held.cancelled)
        await client.close()  # twice is once


async def test_a_closed_client_says_so(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client:
        await client.model()
        await client.close()
        for call in (client.complete("hi"), client.model(), client.wait_ready(1), client.drain("worker-1")):
            with pytest.raises(errors.ClientClosed, match="the client is closed"):
                await call


# --- what the service refuses ---


@pytest.mark.parametrize("code", OTHER_STATUSES, ids=lambda code: code.name)
async def test_each_status_becomes_its_error_with_the_services_own_sentence(
    connect: Connect, served: Served, code: grpc.StatusCode
) -> None:
    served.service.scripts = [refuses(code, "temperature is -1; it must be 0 or more"), HELLO]
    async with connect(served.address) as client:
        with pytest.raises(errors.BY_STATUS[code.name]) as caught:
            await client.complete("hi")
    assert str(caught.value) == "temperature is -1; it must be 0 or more"
    assert caught.value.status == code.name
    assert len(served.service.seen) == 1  # a refusal is never tried again


@pytest.mark.parametrize("code", OTHER_STATUSES, ids=lambda code: code.name)
async def test_each_status_of_a_plain_call_becomes_its_error(
    connect: Connect, served: Served, code: grpc.StatusCode
) -> None:
    served.service.failures = [(code, "not today")]
    async with connect(served.address) as client:
        with pytest.raises(errors.BY_STATUS[code.name], match=r"^not today$"):
            await client.model()
    assert len(served.service.seen) == 1


async def test_a_full_service_says_when_to_try_again(connect: Connect, served: Served) -> None:
    full = refuses(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue holds 64 generations", retry_after_ms="250")
    served.service.scripts = [full]
    async with connect(served.address) as client:
        with pytest.raises(errors.CapacityExhausted) as caught:
            await client.complete("hi")
    assert caught.value.retry_after_ms == 250


async def test_what_came_before_a_failure_is_handed_on_first(connect: Connect, served: Served) -> None:
    fails = refuses(grpc.StatusCode.INTERNAL, "step 12 failed", after=(response("Hel", 10, 11),))
    served.service.scripts = [fails, HELLO]
    async with connect(served.address) as client:
        generation = client.generate("hi")
        assert (await anext(generation)).text == "Hel"
        with pytest.raises(errors.ServiceFailed, match=r"^step 12 failed$"):
            await anext(generation)
        assert await all_of(generation) == []
    assert len(served.service.seen) == 1


async def test_a_stream_without_a_finish_reason_is_a_failure(connect: Connect, served: Served) -> None:
    served.service.scripts = [says(response("Hel", 10, 11))]
    async with connect(served.address) as client:
        with pytest.raises(errors.ServiceFailed, match="ended the stream without a finish reason"):
            await client.complete("hi")


async def test_a_stream_that_skips_a_token_is_a_failure(connect: Connect, served: Served) -> None:
    skips = says(response("Hel", 10, 11), response("lo", 13, offset=3, last=True))
    served.service.scripts = [skips]
    async with connect(served.address) as client:
        with pytest.raises(errors.ServiceFailed, match="went on at token 3, not at 2"):
            await client.complete("hi")


async def test_time_that_runs_out_before_the_first_token_is_told(connect: Connect, served: Served) -> None:
    served.service.scripts = [_silent]
    async with connect(served.address) as client:
        with pytest.raises(errors.DeadlineExceeded, match=r"no answer from 127\.0\.0\.1:\d+ within 0\.2 s"):
            await client.complete("hi", timeout_s=0.2)


def _silent(request: Any, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    gone = threading.Event()
    if context.add_callback(gone.set):
        gone.wait(WAIT_S)
    yield from ()


async def test_bad_arguments_never_reach_the_service(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client:
        for options in ({"temperature": "hot"}, {"max_new_tokens": -1}, {"timeout_s": 0}):
            with pytest.raises(errors.InvalidRequest, match=next(iter(options))):
                await client.complete("hi", **options)
        with pytest.raises(errors.InvalidRequest, match="not none"):
            await client.complete()
        with pytest.raises(TypeError, match="there is no option 'max_tokens'"):
            await client.complete("hi", max_tokens=3)
    assert served.service.seen == []


# --- trying again ---


async def test_a_service_that_was_unavailable_is_asked_again(connect: Connect, served: Served) -> None:
    away = refuses(grpc.StatusCode.UNAVAILABLE, "no worker is ready")
    served.service.scripts = [away, away, HELLO]
    async with connect(served.address) as client:
        assert (await client.complete("hi")).text == "Hello world"
    first, second, third = (request.generation_id for request in served.service.seen)
    assert len({first, second, third}) == 3  # what may be left of an attempt is not taken for the next


async def test_attempts_are_bounded_and_the_last_sentence_is_told(connect: Connect, served: Served) -> None:
    served.service.scripts = [refuses(grpc.StatusCode.UNAVAILABLE, "no worker is ready")]
    async with connect(served.address) as client:
        with pytest.raises(errors.Unavailable, match=r"^no worker is ready$"):
            await client.complete("hi")
    assert len(served.service.seen) == QUICK.attempts


async def test_plain_calls_are_asked_again_while_the_service_is_unavailable(connect: Connect, served: Served) -> None:
    served.service.failures = [(grpc.StatusCode.UNAVAILABLE, "starting")] * 2
    async with connect(served.address) as client:
        assert (await client.model()).name == "toy"
        served.service.failures = [(grpc.StatusCode.UNAVAILABLE, "starting")] * 3
        with pytest.raises(errors.Unavailable, match=r"^starting$"):
            await client.status()
    assert len(served.service.seen) == 6


async def test_no_service_is_told_with_its_address(connect: Connect, served: Served) -> None:
    address = served.address
    served.stop()
    async with connect(address) as client:
        for call in (client.complete("hi"), client.model()):
            with pytest.raises(errors.Unavailable, match=f"^no service answers at {address} .connection refused.$"):
                await call


async def test_a_service_that_comes_up_meanwhile_is_found(connect: Connect, served: Served) -> None:
    served.stop()
    async with connect(served.address, retry=Retry(attempts=200, first_s=0.02, most_s=0.05)) as client:
        waiting = asyncio.create_task(client.complete("hi"))
        await asyncio.sleep(0)
        await asyncio.to_thread(served.start)
        assert (await waiting).text == "Hello world"


# --- resuming ---


async def test_a_stream_that_breaks_is_resumed_from_the_last_token(connect: Connect, served: Served) -> None:
    served.service.scripts = [refuses(grpc.StatusCode.UNAVAILABLE, BROKEN, after=(response("Hel", 10, 11),))]
    served.service.resumes = [
        refuses(grpc.StatusCode.UNAVAILABLE, BROKEN),
        refuses(grpc.StatusCode.UNAVAILABLE, BROKEN, after=(response("lo", 12, offset=2),)),
        says(response(" world", 13, 14, offset=3, last=True)),
    ]
    async with connect(served.address) as client:
        generation = client.generate("hi")
        updates = await all_of(generation)
    assert tokens_of(updates) == [10, 11, 12, 13, 14]
    assert "".join(update.text for update in updates) == "Hello world"
    resumed = served.service.asked(pb.ResumeRequest)
    assert [(r.generation_id, r.offset) for r in resumed] == [(generation.generation_id, n) for n in (2, 2, 3)]
    assert len(served.service.asked(pb.GenerateRequest)) == 1  # never started over


async def test_a_generation_that_the_service_has_lost_is_asked_for_again_behind_what_came(
    connect: Connect, served: Served
) -> None:
    served.service.scripts = [
        refuses(grpc.StatusCode.UNAVAILABLE, BROKEN, after=(response("Hel", 10, 11),)),
        says(response("lo", 12, offset=2, last=True)),
    ]
    async with connect(served.address) as client:
        completion = await client.complete("hi", max_new_tokens=3)
    assert (completion.text, list(completion.token_ids)) == ("Hello", [10, 11, 12])
    first, second = served.service.asked(pb.GenerateRequest)
    assert len(served.service.asked(pb.ResumeRequest)) == 1
    assert (list(second.generated_token_ids), second.seed, second.text) == ([10, 11], 7, "hi")
    assert second.max_new_tokens == 3
    assert second.generation_id != first.generation_id


async def test_a_resumed_generation_that_the_service_has_lost_is_told_as_a_lost_connection(
    connect: Connect, served: Served
) -> None:
    served.service.resumes = [
        refuses(grpc.StatusCode.UNAVAILABLE, BROKEN, after=(response("Hel", 10, 11, offset=5),)),
        refuses(grpc.StatusCode.NOT_FOUND, "no generation 'g-1' is running or kept"),
    ]
    async with connect(served.address) as client:
        with pytest.raises(errors.Unavailable, match=r"connection to the service at .* was lost after 2 tokens$"):
            await all_of(client.resume("g-1", 5))
    assert not served.service.asked(pb.GenerateRequest)


async def test_a_generation_that_the_break_has_cancelled_is_told_as_a_lost_connection(
    connect: Connect, served: Served
) -> None:
    breaks = refuses(grpc.StatusCode.UNAVAILABLE, BROKEN, after=(response("Hel", 10, 11),))
    served.service.scripts = [breaks]
    served.service.resumes = [says(response("", offset=2, last=True, finish_reason=pb.FINISH_REASON_CANCELLED))]
    async with connect(served.address) as client:
        with pytest.raises(errors.Unavailable, match=r"was lost after 2 tokens$"):
            await client.complete("hi")
        # One that outlives its stream can only have been cancelled by somebody.
        served.service.scripts = [breaks]
        assert (await client.complete("hi", resumable=True)).finish_reason == "cancelled"


async def test_resuming_is_bounded_and_counts_anew_after_each_token(connect: Connect, served: Served) -> None:
    served.service.scripts = [refuses(grpc.StatusCode.UNAVAILABLE, BROKEN, after=(response("Hel", 10, 11),))]
    away = refuses(grpc.StatusCode.UNAVAILABLE, BROKEN)
    served.service.resumes = [
        away,
        refuses(grpc.StatusCode.UNAVAILABLE, BROKEN, after=(response("", 12, offset=2),)),
        away,
    ]
    async with connect(served.address) as client:
        with pytest.raises(errors.Unavailable, match=r"was lost after 3 tokens$"):
            await client.complete("hi")
    # The break itself is the first of four attempts; and so it is once more, after the token.
    assert len(served.service.asked(pb.ResumeRequest)) == 2 + (QUICK.resume_attempts - 1)


async def test_a_stream_goes_on_over_a_restart_of_the_service(connect: Connect, served: Served) -> None:
    held = Held()
    served.service.scripts = [held]
    served.service.resumes = [says(response("lo", 12, offset=2), response(" world", 13, 14, offset=3, last=True))]
    async with connect(served.address, retry=Retry(resume_attempts=200, first_s=0.02, most_s=0.05)) as client:
        generation = client.generate("hi")
        assert (await anext(generation)).text == "Hel"
        await asyncio.to_thread(served.stop)
        rest = asyncio.create_task(all_of(generation))
        await asyncio.to_thread(served.start)
        assert tokens_of(await rest) == [12, 13, 14]


async def test_a_generation_is_resumed_by_id_from_where_the_caller_is(connect: Connect, served: Served) -> None:
    served.service.resumes = [says(response(" world", 13, 14, offset=3, last=True))]
    async with connect(served.address) as client:
        generation = client.resume("g-1", 3)
        assert tokens_of(await all_of(generation)) == [13, 14]
        served.service.resumes = []
        with pytest.raises(errors.NotFound, match="no generation 'g-9' is running or kept"):
            await all_of(client.resume("g-9"))
    assert [(r.generation_id, r.offset) for r in served.service.seen] == [("g-1", 3), ("g-9", 0)]


async def test_an_id_that_is_in_use_is_told(connect: Connect, served: Served) -> None:
    served.service.scripts = [refuses(grpc.StatusCode.ALREADY_EXISTS, "generation id 'mine' is in use")]
    async with connect(served.address) as client:
        with pytest.raises(errors.AlreadyExists, match="'mine' is in use"):
            await client.complete("hi", generation_id="mine")


async def test_an_attempt_that_had_arrived_after_all_is_gone_on_with(connect: Connect, served: Served) -> None:
    served.service.scripts = [
        refuses(grpc.StatusCode.UNAVAILABLE, BROKEN),
        refuses(grpc.StatusCode.ALREADY_EXISTS, "generation id 'mine' is in use"),
    ]
    served.service.resumes = [HELLO]
    async with connect(served.address) as client:
        assert (await client.complete("hi", generation_id="mine")).text == "Hello world"
    assert [r.generation_id for r in served.service.seen] == ["mine"] * 3
    assert served.service.seen[-1].offset == 0


async def test_closing_what_outlives_its_stream_cancels_it_by_id(connect: Connect, served: Served) -> None:
    endless = Endless()
    served.service.scripts = [endless]
    async with connect(served.address) as client:
        generation = client.generate("hi", resumable=True)
        await anext(generation)
        generation.close()
    # The client's own close has waited for the answer.
    assert served.service.asked(pb.CancelRequest) == [pb.CancelRequest(generation_id=generation.generation_id)]
    assert served.service.asked(pb.GenerateRequest)[0].resumable


async def test_letting_go_of_what_outlives_its_stream_cancels_it_by_id(connect: Connect, served: Served) -> None:
    endless = Endless()
    served.service.scripts = [endless]
    async with connect(served.address) as client:
        generation = client.generate("hi", resumable=True)
        name = generation.generation_id
        await anext(generation)
        del generation
        assert await happens(endless.cancelled)
        await asyncio.sleep(0)
    assert served.service.asked(pb.CancelRequest) == [pb.CancelRequest(generation_id=name)]


async def test_detaching_leaves_a_resumable_generation_alone(connect: Connect, served: Served) -> None:
    endless = Endless()
    served.service.scripts = [endless]
    async with connect(served.address) as client:
        generation = client.generate("hi", resumable=True)
        await anext(generation)
        generation.detach()
        assert await happens(endless.cancelled)  # the call, not the generation
        assert await all_of(generation) == []
    assert served.service.asked(pb.CancelRequest) == []


# --- the plain calls ---


async def test_cancel_names_the_generation(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client:
        await client.cancel("g-1")
        with pytest.raises(errors.NotFound, match="no generation 'g-none' is running"):
            await client.cancel("g-none")


async def test_model_and_status_are_told_in_full(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client:
        model, status = await client.model(), await client.status()
    assert (model.name, model.architecture, model.fingerprint) == ("toy", "ToyForCausalLM", "ab12")
    assert (model.vocab_size, model.context_tokens, model.end_token_ids) == (32, 64, (2,))
    assert model.has_chat_template
    assert (status.service, status.version, status.uptime_s) == ("microtome", "0.1.0", 61.5)
    assert (status.running, status.waiting, status.ray_address) == (2, 1, "127.0.0.1:6379")
    assert status.counters["generations_started"] == 5
    [worker] = status.workers
    assert (worker.name, worker.state, worker.pid, worker.cells_used, worker.cells_usable) == (
        "worker-0",
        "ready",
        4242,
        12,
        4096,
    )


async def test_wait_ready_returns_once_the_service_serves(connect: Connect, served: Served) -> None:
    served.service.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    async with connect(served.address) as client:
        waiting = asyncio.create_task(client.wait_ready(WAIT_S))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        served.service.health.set("", health_pb2.HealthCheckResponse.SERVING)
        await waiting


async def test_wait_ready_waits_for_a_service_that_is_not_there_yet(connect: Connect, served: Served) -> None:
    served.stop()
    async with connect(served.address) as client:
        waiting = asyncio.create_task(client.wait_ready(WAIT_S))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        await asyncio.to_thread(served.start)
        await waiting


async def test_wait_ready_says_why_it_gave_up(connect: Connect, served: Served) -> None:
    served.service.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    async with connect(served.address) as client:
        with pytest.raises(errors.DeadlineExceeded, match=r"is not ready; waited 0\.3 s$"):
            await client.wait_ready(0.3)
        await asyncio.to_thread(served.stop)
        with pytest.raises(errors.DeadlineExceeded, match=r"no service answers at .*; waited 0\.3 s$"):
            await client.wait_ready(0.3)


# --- for operators ---


async def test_drain_and_update_say_what_was_asked(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client:
        await client.drain("worker-1")
        assert await client.update({"runtime.dtype": "bfloat16", "model": "other"}, drain_first=True) == 3
    assert served.service.seen == [
        admin_pb2.DrainWorkerRequest(worker="worker-1"),
        admin_pb2.UpdateRequest(settings={"runtime.dtype": "bfloat16", "model": "other"}, drain_first=True),
    ]


async def test_what_may_have_begun_on_the_service_is_not_begun_again(connect: Connect, served: Served) -> None:
    served.service.failures = [(grpc.StatusCode.UNAVAILABLE, "no worker starts with them")] * 2
    async with connect(served.address) as client:
        for call in (client.update({"model": "other"}), client.drain("worker-1")):
            with pytest.raises(errors.Unavailable, match=r"^no worker starts with them$"):
                await call
    assert len(served.service.seen) == 2


# --- sessions ---


async def test_a_sessions_calls_name_it_and_carry_what_was_asked(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client, client.session(cache_salt="mine") as session:
        assert (await session.complete("hi", max_new_tokens=3)).text == "Hello world"
        assert tokens_of(await all_of(session.generate(token_ids=[4]))) == [10, 11, 12, 13, 14]
        assert await session.length() == 17
        await session.rewind(9)
        async with session.clone(4), session.clone():
            pass
        await session.close()  # leaving the block closes it no second time
    for request in served.service.asked(pb.GenerateRequest):
        request.generation_id = ""  # minted
    assert served.service.seen == [
        pb.OpenSessionRequest(cache_salt="mine"),
        pb.GenerateRequest(text="hi", max_new_tokens=3, session_id="s-1"),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[4]), session_id="s-1"),
        pb.GetSessionRequest(session_id="s-1"),
        pb.RewindSessionRequest(session_id="s-1", position=9),
        pb.CloneSessionRequest(session_id="s-1", upto=4),
        pb.CloneSessionRequest(session_id="s-1"),
        pb.CloseSessionRequest(session_id="s-2"),
        pb.CloseSessionRequest(session_id="s-2"),
        pb.CloseSessionRequest(session_id="s-1"),
    ]


async def test_an_asyncio_session_may_be_opened_without_a_block(served: Served) -> None:
    async with AsyncClient(served.address) as client:
        session = await client.session()
        twin = await session.clone(0)
        assert (session.session_id, twin.session_id) == ("s-1", "s-2")
        await twin.close()
    assert served.service.seen[1] == pb.CloneSessionRequest(session_id="s-1", upto=0)


async def test_the_error_of_a_sessions_block_is_not_hidden_by_a_close_that_fails(
    connect: Connect, served: Served
) -> None:
    async def fail(client: Face) -> None:
        async with client.session():
            served.service.failures = [(grpc.StatusCode.INTERNAL, "not today")]
            raise KeyError("of the caller")

    async with connect(served.address) as client:
        with pytest.raises(KeyError, match="of the caller"):
            await fail(client)
    assert len(served.service.asked(pb.CloseSessionRequest)) == 1


async def test_closing_a_session_that_is_lost_already_is_no_error(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client, client.session() as session:
        served.service.failures = [(grpc.StatusCode.NOT_FOUND, "no session s-1")] * 2
        with pytest.raises(errors.NotFound, match=r"^no session s-1$"):
            await session.length()
        await session.close()
    assert not served.service.failures


async def test_a_session_is_not_opened_or_cloned_twice_when_the_answer_is_lost(
    connect: Connect, served: Served
) -> None:
    lost = (grpc.StatusCode.UNAVAILABLE, "going away")
    async with connect(served.address) as client:
        served.service.failures = [lost]
        with pytest.raises(errors.Unavailable, match=r"^going away$"):
            async with client.session():
                pass
        async with client.session() as session:
            served.service.failures = [lost]
            with pytest.raises(errors.Unavailable, match=r"^going away$"):
                async with session.clone():
                    pass
            served.service.failures = [lost]
            assert await session.length() == 17  # asked again
    assert len(served.service.asked(pb.OpenSessionRequest)) == 2
    assert len(served.service.asked(pb.CloneSessionRequest)) == 1
    assert len(served.service.asked(pb.GetSessionRequest)) == 2


async def test_a_sessions_generation_is_not_asked_for_twice(connect: Connect, served: Served) -> None:
    served.service.scripts = [refuses(grpc.StatusCode.UNAVAILABLE, BROKEN), HELLO]
    async with connect(served.address) as client, client.session() as session:
        with pytest.raises(errors.Unavailable, match="was lost"):
            await session.complete("hi")
    assert len(served.service.asked(pb.GenerateRequest)) == 1


async def test_a_sessions_generation_that_broke_is_resumed_or_fails(connect: Connect, served: Served) -> None:
    breaks = refuses(grpc.StatusCode.UNAVAILABLE, BROKEN, after=(response("Hel", 10, 11),))
    rest = says(response("lo", 12, offset=2), response(" world", 13, 14, offset=3, last=True))
    served.service.scripts = [breaks]
    async with connect(served.address) as client, client.session() as session:
        with pytest.raises(errors.Unavailable, match="was lost after 2 tokens"):
            await session.complete("hi")  # nothing is known of it any more
        assert len(served.service.asked(pb.GenerateRequest)) == 1
        served.service.resumes = [rest]
        assert tokens_of(await all_of(session.generate("hi"))) == [10, 11, 12, 13, 14]
    assert len(served.service.asked(pb.GenerateRequest)) == 2


async def test_positions_the_wire_cannot_carry_never_reach_the_service(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client, client.session() as session:
        for position in (-1, 2**32, "3"):
            with pytest.raises(errors.InvalidRequest, match="position must be"):
                await session.rewind(position)
            with pytest.raises(errors.InvalidRequest, match="upto must be"):
                async with session.clone(position):
                    pass
    assert len(served.service.seen) == 2  # opened, and closed


# --- several completions ---


def part(index: int, text: str, *token_ids: int, **fields: Any) -> pb.GenerateResponse:
    return response(text, *token_ids, index=index, n=3, seed=70 + index, **fields)


THREE = (
    part(0, "a", 1),
    part(2, "x", 7, 8),
    part(1, "", last=True),
    part(0, "b", 2, offset=1, last=True),
    part(2, "y", 9, offset=2, last=True),
)


async def test_completions_come_with_their_index_and_are_joined_by_it(connect: Connect, served: Served) -> None:
    served.service.scripts = [says(*THREE)]
    async with connect(served.address) as client:
        generation = client.generate("hi", n=3)
        updates = await all_of(generation)
        assert [(u.index, u.text, u.offset) for u in updates] == [
            (0, "a", 0), (2, "x", 0), (1, "", 0), (0, "b", 1), (2, "y", 2),
        ]  # fmt: skip
        joined = generation.completions
        assert [(c.index, c.text, c.token_ids, c.seed) for c in joined] == [
            (0, "ab", (1, 2), 70), (1, "", (), 71), (2, "xy", (7, 8, 9), 72),
        ]  # fmt: skip
        assert joined[2].usage == Usage(prompt_tokens=3, output_tokens=3, cached_tokens=1)
        assert joined == await client.completions("hi", n=3)
    assert [request.n for request in served.service.asked(pb.GenerateRequest)] == [3, 3]


async def test_completions_that_have_ended_can_be_read_before_the_others_end(connect: Connect, served: Served) -> None:
    served.service.scripts = [says(*THREE)]
    async with connect(served.address) as client:
        generation = client.generate("hi", n=3)
        seen = [[c.index for c in generation.completions] async for _ in generation]
    assert seen == [[], [], [1], [0, 1], [0, 1, 2]]


async def test_one_completion_is_not_mistaken_for_several(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client:
        with pytest.raises(errors.InvalidRequest, match="complete brings 1 completion, and n 2 are asked for"):
            await client.complete("hi", n=2)
        assert (await client.complete("hi", n=1)).text == "Hello world"
        (only,) = await client.completions("hi")
        assert (only.index, only.finish_reason) == (0, FinishReason.LENGTH)


async def test_a_broken_stream_of_completions_is_resumed_from_all_its_offsets_without_those_that_have_ended(
    connect: Connect, served: Served
) -> None:
    broken = grpc.StatusCode.UNAVAILABLE
    served.service.scripts = [refuses(broken, BROKEN, after=THREE[:3])]
    served.service.resumes = [refuses(broken, BROKEN, after=THREE[3:4]), says(THREE[4])]
    async with connect(served.address) as client:
        generation = client.generate("hi", n=3, generation_id="g-1")
        assert len(await all_of(generation)) == 5
        assert [c.text for c in generation.completions] == ["ab", "", "xy"]
    asked = [[(p.index, p.offset) for p in r.offsets] for r in served.service.asked(pb.ResumeRequest)]
    assert asked == [[(0, 1), (2, 2)], [(2, 2)]]


async def test_completions_that_the_service_has_lost_are_asked_for_again_behind_what_came(
    connect: Connect, served: Served
) -> None:
    rest = (part(2, "y", 9, offset=2, last=True), part(0, "b", 2, offset=1, last=True))
    served.service.scripts = [refuses(grpc.StatusCode.UNAVAILABLE, BROKEN, after=THREE[:3]), says(*rest)]
    async with connect(served.address) as client:
        generation = client.generate("hi", n=3)
        await all_of(generation)
        assert [c.token_ids for c in generation.completions] == [(1, 2), (), (7, 8, 9)]
    again = served.service.asked(pb.GenerateRequest)[1]
    assert [(b.index, b.seed, list(b.token_ids)) for b in again.begun] == [(0, 70, [1]), (2, 72, [7, 8])]
    assert again.n == 3
    assert not again.generated_token_ids


async def test_a_generation_of_several_completions_is_resumed_by_id(connect: Connect, served: Served) -> None:
    served.service.resumes = [says(*THREE), says(*THREE[3:])]
    async with connect(served.address) as client:
        # How many there are is not known to who resumes: the service says so.
        whole = client.resume("g-1")
        assert len(await all_of(whole)) == 5
        assert [c.text for c in whole.completions] == ["ab", "", "xy"]
        rest = client.resume("g-1", [1, None, 2])
        assert [u.index for u in await all_of(rest)] == [0, 2]
    first, second = served.service.asked(pb.ResumeRequest)
    assert (first.offset, list(first.offsets)) == (0, [])
    assert [(p.index, p.offset) for p in second.offsets] == [(0, 1), (2, 2)]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ((part(3, "a", 1),), "completion 3, which was not asked for"),
        ((THREE[2], part(1, "a", 1)), "completion 1, which has ended"),
        ((THREE[0], part(0, "c", 3, offset=2)), "went on at token 2, not at 1"),
        (THREE[:4], "ended the stream without a finish reason"),
    ],
)
async def test_completions_that_do_not_fit_together_are_a_failure(
    connect: Connect, served: Served, messages: tuple[pb.GenerateResponse, ...], told: str
) -> None:
    served.service.scripts = [says(*messages)]
    async with connect(served.address) as client:
        with pytest.raises(errors.ServiceFailed, match=told):
            await all_of(client.generate("hi", n=3))


# --- where a generation is ---


async def test_where_and_queue_are_told_in_full(connect: Connect, served: Served) -> None:
    running = Whereabouts(
        index=0,
        state=GenerationState.RUNNING,
        waits_for=WaitingReason.NOTHING,
        position=0,
        predicted_ttft_s=None,
        prompt_tokens=5,
        output_tokens=17,
        worker="worker-0",
        parked=1,
        moved=2,
        age_s=2.5,
    )
    async with connect(served.address) as client:
        first, second = await client.where("g-7")
        assert first == running
        assert (second.state, second.waits_for, second.position, second.predicted_ttft_s) == (
            "waiting", "tenant share", 3, 1.25,
        )  # fmt: skip
        listed = await client.queue(limit=2)
        assert listed[0] == ListedGeneration(generation_id="g-0", tenant="acme", priority=0, whereabouts=running)
        assert len(listed) == 2
        with pytest.raises(errors.InvalidRequest, match="generation_id must name a generation"):
            await client.where("")
    assert served.service.asked(pb.WhereRequest) == [pb.WhereRequest(generation_id="g-7")]
    assert [r.limit for r in served.service.asked(admin_pb2.ListGenerationsRequest)] == [2]


async def test_states_and_reasons_of_a_newer_service_are_no_error(connect: Connect, served: Served) -> None:
    served.service.places = [pb.Whereabouts(state=99, waits_for=98, finish_reason=97)]  # type: ignore[arg-type]
    async with connect(served.address) as client:
        (place,) = await client.where("g")
    assert (place.state, place.waits_for, place.finish_reason) == ("running", "other", None)


@pytest.mark.parametrize("kind", [pb.GenerationState, pb.WaitingReason])
def test_every_state_and_reason_of_the_wire_has_a_word(kind: Any) -> None:
    for number in kind.values():
        place = whereabouts_of(pb.Whereabouts(state=number, waits_for=number))
        assert (place.state if kind is pb.GenerationState else place.waits_for) != "other"
    words = {whereabouts_of(pb.Whereabouts(state=n, waits_for=n)).waits_for for n in pb.WaitingReason.values()}
    assert words == set(WaitingReason) - {WaitingReason.OTHER}


async def test_a_session_may_have_a_tenant(connect: Connect, served: Served) -> None:
    async with connect(served.address) as client, client.session(tenant="acme", cache_salt="s"):
        pass
    assert served.service.asked(pb.OpenSessionRequest) == [pb.OpenSessionRequest(tenant="acme", cache_salt="s")]


# --- the two faces ---


@pytest.mark.parametrize(
    ("plain", "asynchronous"), [(Client, AsyncClient), (Generation, AsyncGeneration), (Session, AsyncSession)]
)
def test_the_two_faces_have_the_same_methods_with_the_same_arguments(plain: type, asynchronous: type) -> None:
    def public(face: type) -> dict[str, str]:
        return {
            name: str(inspect.signature(member).replace(return_annotation=inspect.Signature.empty))
            for name, member in inspect.getmembers(face, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    ours, theirs = public(plain), public(asynchronous)
    theirs.pop("aclose", None)  # asyncio's name for close
    if plain is Generation:
        assert ours.pop("__init__") == theirs.pop("__init__")
    if plain is Session:  # made by a client only, each by its own
        del ours["__init__"], theirs["__init__"]
    assert ours == theirs


def test_an_asyncio_client_may_be_made_outside_of_a_loop() -> None:
    client = AsyncClient("127.0.0.1:1")
    with pytest.raises(RuntimeError, match="no running event loop"):
        client.generate("hi")


@pytest.mark.parametrize(
    "address", ["", "localhost", "localhost:", "http://localhost:1", "a:b:1", "h:0", "h:65536", ":1"]
)
def test_what_is_no_address_is_refused_by_both_constructors(address: str) -> None:
    for face in (Client, AsyncClient):
        with pytest.raises(errors.InvalidRequest, match="an address is"):
            face(address)


async def test_log_probabilities_come_with_their_tokens_and_the_prompts_ahead(connect: Connect, served: Served) -> None:
    served.service.scripts = [
        says(
            response("", prompt_token_ids=[7, 8], prompt_logprobs=Logprobs(counts=[0, 1], logprobs=[-0.5])),
            response(
                "Hel",
                10,
                11,
                logprobs=Logprobs(counts=[3, 0], logprobs=[-1.5], top_tokens=[10, 4], top_logprobs=[-1.5, -2.0]),
            ),
            response("lo", 12, offset=2, last=True, logprobs=Logprobs(counts=[1], logprobs=[-0.25])),
        )
    ]
    async with connect(served.address) as client:
        completion = await client.complete("hi", logprobs=2, prompt_logprobs=0)
    assert completion.prompt_token_ids == (7, 8)
    assert completion.prompt_logprobs == (None, TokenLogprobs(token_id=8, logprob=-0.5))
    assert completion.logprobs == (
        TokenLogprobs(token_id=10, logprob=-1.5, top=((10, -1.5), (4, -2.0))),
        None,
        TokenLogprobs(token_id=12, logprob=-0.25),
    )


async def test_what_is_known_of_the_prompt_is_handed_on_once_over_a_break(connect: Connect, served: Served) -> None:
    def part(offset: int, *token_ids: int) -> pb.GenerateResponse:
        told = Logprobs(counts=[1] * len(token_ids), logprobs=[-0.5] * len(token_ids))
        return response("", prompt_token_ids=token_ids, prompt_logprobs=told, prompt_offset=offset)

    served.service.scripts = [refuses(grpc.StatusCode.UNAVAILABLE, BROKEN, after=(part(0, 5, 6), part(2, 7)))]
    served.service.resumes = [says(part(0, 5, 6, 7, 8), response("x", 9, last=True))]
    async with connect(served.address, retry=QUICK) as client:
        completion = await client.complete("hi", prompt_logprobs=0)
    assert completion.prompt_token_ids == (5, 6, 7, 8)
    assert len(completion.prompt_logprobs) == 4
    assert completion.token_ids == (9,)
    served.service.scripts = [says(part(1, 6), response("x", 9, last=True))]
    async with connect(served.address, retry=QUICK) as client:
        with pytest.raises(errors.ServiceFailed, match="told of the prompt from token 1 on, not from 0"):
            await client.complete("hi", prompt_logprobs=0)
