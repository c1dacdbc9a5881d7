"""Workers are drained and replaced through the `Admin` service, over real gRPC, in one process. No stream notices."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from microtome.actors.config import ServiceConfig
from microtome.actors.driver import DriverHost
from microtome.actors.text import ModelText, TextStream
from microtome.planner.types import SamplingParams
from microtome.v1 import admin_pb2 as admin
from microtome.v1 import admin_pb2_grpc
from microtome.v1 import generation_pb2 as pb
from microtome.v1 import generation_pb2_grpc as rpc
from tests.support.calls import collect, request, rest_of, status_when, tokens_of, undisturbed, until_idle
from tests.support.fake_model import generate
from tests.support.in_process import SECRET, InProcessWorkers, Service, fake_config, in_process

OTHER = "fake:step_ms=3,vocab=500,fingerprint=0ddb"


class Kept:
    """A store that outlives drivers."""

    def __init__(self) -> None:
        self.data = b""

    async def save(self, data: bytes) -> None:
        self.data = data

    async def load(self) -> bytes:
        return self.data


@asynccontextmanager
async def admin_of(service: Service) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield admin_pb2_grpc.AdminStub(channel)


def other_tokens(prompt: list[int], count: int) -> list[int]:
    """What the other model gives undisturbed."""
    return generate(prompt, SamplingParams(prompt_tokens=len(prompt)), count, (), 500)


def ready(status: pb.StatusResponse) -> list[str]:
    return sorted(worker.name for worker in status.workers if worker.state == "ready")


async def model_named(stub: Any, name: str) -> pb.GetModelResponse:
    """What is served, once it is called so."""
    while True:
        model: pb.GetModelResponse = await stub.GetModel(pb.GetModelRequest())
        if model.name == name:
            return model
        await asyncio.sleep(0.01)


async def test_drain_call_returns_when_the_worker_is_gone_and_streams_went_on() -> None:
    async with in_process(fake_config("fake:step_ms=3", workers__count=2)) as service, admin_of(service) as stub:
        running = [asyncio.create_task(collect(service.stub, request([n + 1], max_new_tokens=200))) for n in range(8)]
        await status_when(service.stub, lambda status: status.counters.output_tokens >= 100)
        await stub.DrainWorker(admin.DrainWorkerRequest(worker="worker-2"))
        assert "worker-2" not in service.workers.processes
        assert not any(task.done() for task in running)
        for n, task in enumerate(running):
            assert tokens_of(await task) == undisturbed([n + 1], 200)


async def test_update_of_settings_replaces_every_worker_and_streams_move() -> None:
    async with in_process(fake_config("fake:step_ms=3", workers__count=2)) as service, admin_of(service) as stub:
        running = [asyncio.create_task(collect(service.stub, request([n + 1], max_new_tokens=300))) for n in range(8)]
        await status_when(service.stub, lambda status: status.counters.output_tokens >= 100)
        answer = await stub.Update(admin.UpdateRequest(settings={"runtime.kv_tokens": "2048"}))
        assert answer.revision == 1
        assert not any(task.done() for task in running)
        status = await service.stub.Status(pb.StatusRequest())
        assert [w.cells_usable for w in status.workers if w.state == "ready"] == [2048, 2048]
        for n, task in enumerate(running):
            assert tokens_of(await task) == undisturbed([n + 1], 300)
        assert sorted(service.workers.processes) == ready(await until_idle(service.stub))


async def test_update_of_the_model_lets_streams_end_on_the_old_one_and_serves_new_ones_by_the_new() -> None:
    async with in_process(fake_config("fake:step_ms=3", workers__count=2)) as service, admin_of(service) as stub:
        old = [asyncio.create_task(collect(service.stub, request([n + 1], max_new_tokens=400))) for n in range(6)]
        await status_when(service.stub, lambda status: status.counters.output_tokens >= 100)
        updating = stub.Update(admin.UpdateRequest(settings={"model": "other", "runtime.model": OTHER}))
        model = await model_named(service.stub, "other")
        assert (model.fingerprint, model.vocab_size) == ("0ddb" * 16, 500)
        assert not any(task.done() for task in old)
        new = await asyncio.gather(*(collect(service.stub, request([n + 1], max_new_tokens=20)) for n in range(6)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(service.stub, request([600]))
        assert refused.value.details() == "token id 600 (number 1) is not below the vocabulary size 500"
        for n, responses in enumerate(new):
            assert tokens_of(responses) == other_tokens([n + 1], 20)
        for n, task in enumerate(old):
            assert tokens_of(await task) == undisturbed([n + 1], 400)
        assert (await updating).revision == 1
        assert ready(await until_idle(service.stub)) == ["worker-3", "worker-4"]


class SpelledTokenizer:
    """Text is token numbers behind a letter: "a7 a9 " is two tokens of model a."""

    has_chat_template = False

    def __init__(self, letter: str) -> None:
        self._letter = letter

    def encode(self, text: str) -> list[int]:
        assert text.startswith(self._letter), "the prompt was given to another model's tokenizer"
        return [int(word[1:]) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f"{self._letter}{token} " for token in tokens)

    def stream(self, context: Sequence[int]) -> TextStream:
        return TextStream(self.decode, (), context)


def spelled_text(host: DriverHost, config: ServiceConfig) -> Callable[[], ModelText]:
    """In place of a checkpoint's: the letter is "b" for the other model."""
    letter = "b" if config.runtime.model == OTHER else "a"
    return lambda: ModelText(tokenizer=SpelledTokenizer(letter), end_token_ids=(), architecture=letter)  # type: ignore[arg-type]


async def test_each_models_text_is_read_and_written_by_its_own_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DriverHost, "_text_loader", spelled_text)
    async with in_process(fake_config("fake:step_ms=3")) as service, admin_of(service) as stub:
        old = asyncio.create_task(rest_of(service.stub.Generate(pb.GenerateRequest(text="a1 a2", max_new_tokens=400))))
        await status_when(service.stub, lambda status: status.counters.output_tokens >= 20)
        updating = stub.Update(admin.UpdateRequest(settings={"model": "other", "runtime.model": OTHER}))
        assert (await model_named(service.stub, "other")).architecture == "b"
        new = await rest_of(service.stub.Generate(pb.GenerateRequest(text="b1 b2", max_new_tokens=20)))
        assert not old.done()
        texts = ["".join(response.text for response in responses) for responses in (await old, new)]
        assert texts[0] == SpelledTokenizer("a").decode(undisturbed([1, 2], 400))
        assert texts[1] == SpelledTokenizer("b").decode(other_tokens([1, 2], 20))
        await updating


async def test_a_session_ends_with_the_model_whose_tokens_it_holds() -> None:
    async with in_process(fake_config("fake:step_ms=3")) as service, admin_of(service) as stub:
        session = (await service.stub.OpenSession(pb.OpenSessionRequest())).session_id
        unspoken = (await service.stub.OpenSession(pb.OpenSessionRequest())).session_id
        await collect(service.stub, request([1, 2], max_new_tokens=5, session_id=session))
        old = asyncio.create_task(collect(service.stub, request([3], max_new_tokens=400)))
        await status_when(service.stub, lambda status: status.counters.output_tokens >= 20)
        updating = stub.Update(admin.UpdateRequest(settings={"model": "other", "runtime.model": OTHER}))
        await model_named(service.stub, "other")
        for why in ("was replaced", "is served no more"):  # while the old model's last generation runs; and behind it
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await collect(service.stub, request([3], session_id=session))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert refused.value.details() == f"session {session} is of a model that {why}"
            if why == "was replaced":
                assert tokens_of(await old) == undisturbed([3], 400)
                await updating
        spoken = await collect(service.stub, request([1, 2], max_new_tokens=20, session_id=unspoken))
        assert tokens_of(spoken) == other_tokens([1, 2], 20)
        for name in (session, unspoken):
            await service.stub.CloseSession(pb.CloseSessionRequest(session_id=name))
        await until_idle(service.stub)


async def test_update_that_no_worker_survives_changes_nothing_and_says_why() -> None:
    async with in_process(fake_config("fake:step_ms=3")) as service, admin_of(service) as stub:
        running = asyncio.create_task(collect(service.stub, request([5], max_new_tokens=200)))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Update(admin.UpdateRequest(settings={"runtime.model": "fake:colour=red"}))
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "colour" in failed.value.details()
        assert ready(await service.stub.Status(pb.StatusRequest())) == ["worker-1"]
        assert tokens_of(await running) == undisturbed([5], 200)
        assert (await stub.Update(admin.UpdateRequest(settings={"runtime.kv_tokens": "1024"}))).revision == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "no setting is given: an update changes one or more"),
        (
            {"service.port": "1"},
            "service.port cannot be changed while the service runs: only model and runtime settings can",
        ),
        ({"runtime.kv_tokes": "1"}, "no setting is named 'runtime.kv_tokes'; did you mean 'runtime.kv_tokens'?"),
        ({"runtime.kv_tokens": "many"}, "runtime.kv_tokens 'many' is not a whole number"),
        ({"runtime.max_step_tokens": "9999999"}, "link.max_message_bytes"),
    ],
)
async def test_settings_that_cannot_be_are_refused_before_anything_starts(
    settings: dict[str, str], sentence: str
) -> None:
    async with in_process(fake_config()) as service, admin_of(service) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Update(admin.UpdateRequest(settings=settings))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert str(refused.value.details()).startswith(sentence)
        assert service.workers.started == ["worker-1"]


async def test_second_update_is_refused_while_one_is_under_way() -> None:
    async with in_process(fake_config("fake:step_ms=3")) as service, admin_of(service) as stub:
        running = asyncio.create_task(collect(service.stub, request([5], max_new_tokens=300)))
        await status_when(service.stub, lambda status: status.counters.output_tokens > 0)
        first = stub.Update(admin.UpdateRequest(settings={"runtime.model": OTHER}))
        await status_when(service.stub, lambda status: any(w.name == "worker-2" for w in status.workers))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Update(admin.UpdateRequest(settings={"runtime.kv_tokens": "512"}))
        assert (refused.value.code(), refused.value.details()) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "an update is under way",
        )
        await first
        assert tokens_of(await running) == undisturbed([5], 300)


async def test_admin_calls_are_not_offered_where_they_are_switched_off() -> None:
    async with in_process(fake_config(service__admin="false")) as service, admin_of(service) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.DrainWorker(admin.DrainWorkerRequest(worker="worker-1"))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_worker_on_a_node_with_a_deadline_is_empty_before_it_though_nobody_can_take_over() -> None:
    config = fake_config("fake:step_ms=3", workers__count=1)
    async with in_process(config) as service:
        running = asyncio.create_task(collect(service.stub, request([5], max_new_tokens=900)))
        await status_when(service.stub, lambda status: status.counters.output_tokens > 20)
        service.workers.hold_starts = asyncio.Event()  # no place for another
        service.workers.places_taken_in_s = 5.5
        service.workers.places_taken.add(service.workers.started[0])
        await status_when(service.stub, lambda status: status.workers[0].state == "ended")
        assert not running.done()
        service.workers.hold_starts.set()
        assert tokens_of(await running) == undisturbed([5], 900)


async def test_restarted_driver_goes_on_with_the_settings_of_the_last_update() -> None:
    config, kept = fake_config("fake:step_ms=3", workers__count=2), Kept()
    workers = InProcessWorkers(config)
    broken: list[BaseException] = []
    first = DriverHost(config, SECRET, workers, failed=broken.append, store=kept)
    await first.start()
    await first.wait_ready()
    await first.update({"model": "other", "runtime.model": OTHER}, surge=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{first.port}") as channel:
        call = rpc.GenerationStub(channel).Generate(request([9], max_new_tokens=200, generation_id="g"))
        begun = list((await call.read()).token_ids)
        await first.leave()
    second = DriverHost(config, SECRET, workers, failed=broken.append, store=kept)
    await second.start(restarted=True)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{second.port}") as channel:
            stub = rpc.GenerationStub(channel)
            resumed = await rest_of(stub.Resume(pb.ResumeRequest(generation_id="g", offset=len(begun))))
            assert begun + [token for r in resumed for token in r.token_ids] == other_tokens([9], 200)
            await workers.kill(next(iter(workers.processes)))
            await status_when(stub, lambda status: ready(status) == ["worker-4", "worker-5"])
            assert (await stub.GetModel(pb.GetModelRequest())).name == "other"
            assert tokens_of(await collect(stub, request([8], max_new_tokens=20))) == other_tokens([8], 20)
    finally:
        await second.stop()
        await workers.end_all()
    assert not broken


async def test_fresh_driver_knows_nothing_of_an_earlier_services_update() -> None:
    kept = Kept()
    kept.data = b'{"revision": 3, "model": "other", "runtime": {"model": "fake:vocab=500"}}'
    config = fake_config()
    workers = InProcessWorkers(config)
    host = DriverHost(config, SECRET, workers, failed=lambda error: None, store=kept)
    await host.start()
    try:
        await host.wait_ready()
        assert kept.data == b""
        assert (await host.model()).vocab_size == 1000
    finally:
        await host.stop()
        await workers.end_all()
