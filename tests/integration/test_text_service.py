"""Text in, text out: the real tokenizer, executor and driver on the toy model, in one process over real gRPC."""

import asyncio
import importlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from microtome.actors.link import DEFAULT_EXECUTOR
from microtome.actors.text import Message, Tokenizer
from microtome.cuda_runtime.checkpoint import find_checkpoint
from microtome.v1 import generation_pb2 as pb
from tests.support.calls import collect, tokens_of
from tests.support.in_process import Service, fake_config, in_process
from tests.support.toy_model import toy_directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = toy_directory(tmp_path_factory.mktemp("models"))
    # The library imports its parts on first use, which two threads must not do at once. A service's driver and worker
    # are two processes; here they share one.
    importlib.import_module("microtome.cuda_runtime.executor")
    Tokenizer(find_checkpoint(str(directory)))
    return directory


@pytest.fixture
async def service(model: Path) -> AsyncIterator[Service]:
    config = fake_config(
        str(model),
        workers__executor=DEFAULT_EXECUTOR,
        runtime__kv_tokens=2048,
        runtime__max_step_tokens=64,
        runtime__threads=1,
    )
    async with in_process(config) as running:
        yield running


def chat(*contents: str) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user", content=content) for content in contents])


async def test_pieces_of_text_are_the_text_of_all_tokens(service: Service, model: Path) -> None:
    tokenizer = Tokenizer(find_checkpoint(str(model)))
    asked = [
        pb.GenerateRequest(text="the quick brown", max_new_tokens=60, temperature=1.5, seed=1, ignore_eos=True),
        pb.GenerateRequest(text="größe 你好 😀", max_new_tokens=60, temperature=1.5, seed=2, ignore_eos=True),
        pb.GenerateRequest(chat=chat("once upon a time"), max_new_tokens=60, temperature=1.5, seed=3, ignore_eos=True),
    ]
    answers = await asyncio.gather(*(collect(service.stub, request) for request in asked))
    for responses in answers:
        tokens = tokens_of(responses)
        assert len(tokens) == 60
        assert "".join(response.text for response in responses) == tokenizer.decode(tokens)


async def test_each_completions_text_is_that_of_its_own_tokens(service: Service, model: Path) -> None:
    tokenizer = Tokenizer(find_checkpoint(str(model)))
    sampled = {"max_new_tokens": 40, "temperature": 1.5, "ignore_eos": True}
    together = pb.GenerateRequest(text="größe 你好", n=3, seed=5, **sampled)
    found: dict[int, list[pb.GenerateResponse]] = {}
    for response in await collect(service.stub, together):
        found.setdefault(response.index, []).append(response)
    assert len({tuple(tokens_of(own)) for own in found.values()}) == 3
    for own in found.values():
        assert "".join(response.text for response in own) == tokenizer.decode(tokens_of(own))
        alone = pb.GenerateRequest(text="größe 你好", seed=own[0].seed, **sampled)
        assert tokens_of(await collect(service.stub, alone)) == tokens_of(own)


async def test_prompts_are_tokenized_as_the_library_does(service: Service, model: Path) -> None:
    tokenizer = Tokenizer(find_checkpoint(str(model)))
    text, message = "a thin slice", Message("user", "hello")
    forms = [
        (pb.GenerateRequest(text=text), tokenizer.encode(text)),
        (pb.GenerateRequest(chat=chat("hello")), tokenizer.encode_chat([message])),
    ]
    for asked, ids in forms:
        asked.max_new_tokens = 5
        same = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), max_new_tokens=5)
        first, second = await collect(service.stub, asked), await collect(service.stub, same)
        assert tokens_of(first) == tokens_of(second)
        assert first[-1].usage.prompt_tokens == len(ids)


async def test_stop_token_is_among_the_tokens_and_not_in_the_text(service: Service, model: Path) -> None:
    tokenizer = Tokenizer(find_checkpoint(str(model)))
    asked = pb.GenerateRequest(text="the lens is", max_new_tokens=30, ignore_eos=True)
    tokens = tokens_of(await collect(service.stub, asked))
    stop = next(t for t in tokens if tokenizer.decode([t]).strip() and tokens.index(t) > 0)
    asked.stop_token_ids.append(stop)
    responses = await collect(service.stub, asked)
    kept = tokens[: tokens.index(stop) + 1]
    assert tokens_of(responses) == kept
    assert responses[-1].finish_reason == pb.FINISH_REASON_STOP
    assert "".join(response.text for response in responses) == tokenizer.decode(kept[:-1])


async def test_model_is_described(service: Service) -> None:
    model = await service.stub.GetModel(pb.GetModelRequest())
    assert model.architecture == "LlamaForCausalLM"
    assert model.has_chat_template
    assert list(model.end_token_ids) == [2]
    assert (model.vocab_size, model.context_tokens) == (320, 1024)
    assert len(model.fingerprint) == 64


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (pb.GenerateRequest(text=""), "the prompt is empty: it needs 1 character or more"),
        (pb.GenerateRequest(chat=pb.Chat()), "the chat is empty: it needs 1 message or more"),
        (
            pb.GenerateRequest(text="a thin slice " * 1000),
            "tokens, and 1023 is the limit: the context holds 1024, one of them generated",
        ),
    ],
)
async def test_text_that_cannot_be_a_prompt_is_refused_and_the_service_goes_on(
    service: Service, asked: pb.GenerateRequest, sentence: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await collect(service.stub, asked)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert str(refused.value.details()).endswith(sentence)
    responses = await collect(service.stub, pb.GenerateRequest(text="a", max_new_tokens=2, ignore_eos=True))
    assert len(tokens_of(responses)) == 2
