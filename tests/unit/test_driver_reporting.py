"""Texts to stop at, and log-probabilities, through a whole service of fake workers: streams, breaks and restarts."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from microtome.actors.config import ServiceConfig
from microtome.actors.driver import DriverHost
from microtome.actors.text import ModelText, TextStream
from microtome.answers import TokenLogprobs, Update, completion_of, update_of
from microtome.planner.types import SamplingParams
from microtome.v1 import generation_pb2 as pb
from microtome.v1 import generation_pb2_grpc as rpc
from tests.support.calls import collect, request, rest_of, status_when, tokens_of, undisturbed, until_idle
from tests.support.fake_model import content, logprobs_of
from tests.support.in_process import SECRET, InProcessWorkers, fake_config, in_process

PROMPT = list(range(3, 40))
TOKENS = undisturbed(PROMPT, 60)


class Spelled:
    """A tokenizer whose text is token numbers: "7 9 " is two tokens."""

    has_chat_template = False

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    def stream(self, context: Sequence[int]) -> TextStream:
        return TextStream(self.decode, (), context)


@pytest.fixture
def spelled(monkeypatch: pytest.MonkeyPatch) -> Spelled:
    def loader(host: DriverHost, config: ServiceConfig) -> Callable[[], ModelText]:
        return lambda: ModelText(tokenizer=Spelled(), end_token_ids=(), architecture="")  # type: ignore[arg-type]

    monkeypatch.setattr(DriverHost, "_text_loader", loader)
    return Spelled()


def likely(prompt: list[int], tokens: list[int], count: int) -> list[TokenLogprobs | None]:
    """Of every token of both, as the fake model says; of the first nothing."""
    attended, found = 0, []
    for position, token in enumerate([*prompt, *tokens]):
        one = logprobs_of(token, position, attended, count)
        assert one is not None
        found.append(TokenLogprobs(token_id=token, logprob=one.logprob, top=one.top))
        attended += content(token, position, attended)
    return [None, *found[1:]]


def updates_of(responses: list[pb.GenerateResponse]) -> list[Update]:
    return [update_of(response) for response in responses]


def text_of(responses: list[pb.GenerateResponse]) -> str:
    return "".join(response.text for response in responses)


# --- texts to stop at ---


async def test_a_stop_ends_the_generation_in_front_of_it_and_frees_its_place(spelled: Spelled) -> None:
    async with in_process(fake_config()) as service:
        # Across two tokens, and not found in what a longer number contains.
        stop = spelled.decode(TOKENS[9:11])
        responses = await collect(service.stub, request(PROMPT, max_new_tokens=60, stop=["no such", stop]))
        assert tokens_of(responses) == TOKENS[:11]
        assert text_of(responses) == spelled.decode(TOKENS[:9])
        assert responses[-1].finish_reason == pb.FINISH_REASON_STOP
        assert responses[-1].usage == pb.Usage(prompt_tokens=len(PROMPT), output_tokens=11, cached_tokens=0)
        status = await until_idle(service.stub)
        assert status.counters.output_tokens == 11


async def test_what_might_have_become_a_stop_is_sent_when_the_generation_ends(spelled: Spelled) -> None:
    async with in_process(fake_config()) as service:
        stop = spelled.decode([*TOKENS[18:20], 1001])  # begins like the end of the output
        responses = await collect(service.stub, request(PROMPT, max_new_tokens=20, stop=[stop]))
        assert text_of(responses) == spelled.decode(TOKENS[:20])
        assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH
        assert responses[-1].text.endswith(spelled.decode(TOKENS[18:20]))


async def test_no_stop_is_looked_for_before_the_least_number_of_tokens(spelled: Spelled) -> None:
    async with in_process(fake_config()) as service:
        stop = spelled.decode(TOKENS[3:4])
        again = next((at for at in range(8, 60) if stop in spelled.decode(TOKENS[8 : at + 1])), None)
        responses = await collect(service.stub, request(PROMPT, max_new_tokens=60, stop=[stop], min_new_tokens=8))
        assert tokens_of(responses) == TOKENS[: 60 if again is None else again + 1]


async def test_a_sessions_history_ends_with_the_stop(spelled: Spelled) -> None:
    async with in_process(fake_config("fake:step_ms=1")) as service:
        session = (await service.stub.OpenSession(pb.OpenSessionRequest())).session_id
        stop = spelled.decode(TOKENS[9:11])
        await collect(service.stub, request(PROMPT, max_new_tokens=60, stop=[stop], session_id=session))
        state = await service.stub.GetSession(pb.GetSessionRequest(session_id=session))
        assert state.length == len(PROMPT) + 10  # the last token is not committed, as ever
        responses = await collect(service.stub, request([7], max_new_tokens=8, session_id=session))
        assert tokens_of(responses) == undisturbed([*PROMPT, *TOKENS[:11], 7], 8)


async def test_going_on_behind_what_an_earlier_call_brought_finds_the_stop_across_the_seam(spelled: Spelled) -> None:
    async with in_process(fake_config()) as service:
        stop = spelled.decode(TOKENS[9:11])
        for known in (5, 10, 11):
            asked = request(PROMPT, max_new_tokens=60, stop=[stop], generated_token_ids=TOKENS[:known])
            responses = await collect(service.stub, asked)
            assert [t for response in responses for t in response.token_ids] == TOKENS[known:11]
            assert responses[-1].finish_reason == pb.FINISH_REASON_STOP
            assert responses[-1].usage.output_tokens == 11
        await until_idle(service.stub)


async def test_a_service_without_a_tokenizer_refuses_texts_to_stop_at() -> None:
    async with in_process(fake_config()) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(service.stub, request(PROMPT, stop=["x"]))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == "this service has no tokenizer: it can stop at token ids, not at texts"


# --- log-probabilities ---


async def test_each_token_comes_with_how_likely_it_was_and_the_prompt_ahead_of_all() -> None:
    async with in_process(fake_config()) as service:
        responses = await collect(service.stub, request(PROMPT, max_new_tokens=20, logprobs=2, prompt_logprobs=0))
        completion = completion_of(updates_of(responses))
        assert list(completion.logprobs) == likely(PROMPT, TOKENS[:20], 2)[len(PROMPT) :]
        assert list(completion.prompt_logprobs) == likely(PROMPT, [], 0)
        assert list(completion.prompt_token_ids) == PROMPT
        ahead = [bool(response.prompt_token_ids) for response in responses]
        assert ahead == sorted(ahead, reverse=True)
        assert not any(r.token_ids and r.prompt_token_ids for r in responses)


async def test_nothing_is_told_that_nobody_asked_for() -> None:
    async with in_process(fake_config()) as service:
        for response in await collect(service.stub, request(PROMPT, max_new_tokens=20)):
            assert not response.HasField("logprobs")
            assert not response.HasField("prompt_logprobs")
            assert not response.prompt_token_ids


async def test_whoever_resumes_from_the_start_is_told_of_the_prompt_again_and_others_are_not() -> None:
    async with in_process(fake_config("fake:step_ms=1")) as service:
        asked = request(PROMPT, max_new_tokens=60, logprobs=1, prompt_logprobs=1, generation_id="g", resumable=True)
        call = service.stub.Generate(asked)
        while not (await call.read()).token_ids:
            pass
        call.cancel()
        for offset in (0, 1, 40):
            await status_when(service.stub, lambda status: status.counters.output_tokens >= 50)
            resumed = await rest_of(service.stub.Resume(pb.ResumeRequest(generation_id="g", offset=offset)))
            completion = completion_of(updates_of(resumed))
            assert list(completion.logprobs) == likely(PROMPT, TOKENS, 1)[len(PROMPT) + offset :]
            assert list(completion.prompt_logprobs) == ([] if offset else likely(PROMPT, [], 1))


async def test_of_several_completions_the_first_tells_of_the_prompt() -> None:
    async with in_process(fake_config()) as service:
        responses = await collect(service.stub, request(PROMPT, max_new_tokens=5, n=3, prompt_logprobs=1, logprobs=0))
        assert {response.index for response in responses if response.prompt_token_ids} == {0}
        for index in range(3):
            own = [update for update in updates_of(responses) if update.index == index]
            assert [one.token_id for update in own for one in update.logprobs if one] == TOKENS[:5]


async def test_many_log_probabilities_come_in_messages_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microtome.actors.streams._NUMBERS_PER_MESSAGE", 200)
    async with in_process(fake_config()) as service:
        asked = request(PROMPT, max_new_tokens=60, logprobs=20, prompt_logprobs=20, generation_id="g", resumable=True)
        await collect(service.stub, asked)
        responses = await rest_of(service.stub.Resume(pb.ResumeRequest(generation_id="g")))
        assert max(len(r.logprobs.top_tokens) + len(r.prompt_logprobs.top_tokens) for r in responses) <= 100
        completion = completion_of(updates_of(responses))
        assert list(completion.token_ids) == TOKENS
        assert [*completion.prompt_logprobs, *completion.logprobs] == likely(PROMPT, TOKENS, 20)


@pytest.mark.parametrize("offset", [0, 3])
async def test_a_restarted_driver_tells_the_same_numbers_and_finds_the_same_stop(spelled: Spelled, offset: int) -> None:
    config = fake_config("fake:step_ms=4", service__port=0)
    workers = InProcessWorkers(config)
    broken: list[BaseException] = []
    first = DriverHost(config, SECRET, workers, failed=broken.append)
    await first.start()
    await first.wait_ready()
    stop = spelled.decode(TOKENS[40:42])
    settings: dict[str, Any] = {"logprobs": 1, "prompt_logprobs": 1, "stop": [stop], "frequency_penalty": 0.5}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{first.port}") as channel:
        stub = rpc.GenerationStub(channel)
        call = stub.Generate(request(PROMPT, max_new_tokens=60, generation_id="g", **settings))
        known: list[int] = []
        while len(known) < 4:
            known += (await call.read()).token_ids
        await first.leave()
    second = DriverHost(config, SECRET, workers, failed=broken.append)
    await second.start(restarted=True)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{second.port}") as channel:
            stub = rpc.GenerationStub(channel)
            responses = await rest_of(stub.Resume(pb.ResumeRequest(generation_id="g", offset=offset)))
            completion = completion_of(updates_of(responses))
            everything = likely(PROMPT, TOKENS[:42], 1)
            assert list(completion.logprobs) == everything[len(PROMPT) + offset :]
            assert list(completion.prompt_logprobs) == ([] if offset else everything[: len(PROMPT)])
            assert completion.finish_reason == "stop"
            assert completion.text == spelled.decode(TOKENS[offset:40])
    finally:
        await second.stop()
        await workers.end_all()
    assert not broken


async def test_a_moved_generation_tells_each_number_once() -> None:
    async with in_process(fake_config("fake:step_ms=2", workers__count=2)) as service:
        asked = request(PROMPT, max_new_tokens=60, logprobs=1, prompt_logprobs=2)
        running = asyncio.create_task(collect(service.stub, asked))
        status = await status_when(service.stub, lambda status: status.counters.output_tokens >= 5)
        home = next(worker.name for worker in status.workers if worker.sessions)
        await service.workers.kill(home)  # type: ignore[arg-type]
        completion = completion_of(updates_of(await running))
        assert list(completion.logprobs) == likely(PROMPT, TOKENS, 1)[len(PROMPT) :]
        assert list(completion.prompt_logprobs) == likely(PROMPT, [], 2)


def test_policies_of_before_have_no_word_of_it() -> None:
    assert SamplingParams().logprobs is None
    assert SamplingParams().prompt_logprobs is None
