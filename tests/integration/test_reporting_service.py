"""What may be asked of sampling, end to end on the toy model: both clients, the service, the real executor.

The numbers are the transformers library's own: log_softmax of its logits over the whole text, in one forward.
"""

import asyncio
import importlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import microtome
from microtome.actors.link import DEFAULT_EXECUTOR
from microtome.actors.text import Tokenizer
from microtome.answers import Completion
from microtome.cuda_runtime.checkpoint import find_checkpoint
from microtome.planner.types import SamplingParams
from microtome.v1 import generation_pb2 as pb
from tests.support import host_sampler
from tests.support.calls import status_when
from tests.support.in_process import Service, fake_config, in_process
from tests.support.toy_model import toy_directory

PROMPT = "once upon a time there was a small machine"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = toy_directory(tmp_path_factory.mktemp("models"))
    importlib.import_module("microtome.cuda_runtime.executor")  # its parts are imported on first use, by one thread
    Tokenizer(find_checkpoint(str(directory)))
    return directory


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(find_checkpoint(str(model)))


@pytest.fixture
async def service(model: Path) -> AsyncIterator[Service]:
    config = fake_config(
        str(model),
        workers__executor=DEFAULT_EXECUTOR,
        workers__count=2,
        runtime__kv_tokens=2048,
        runtime__max_step_tokens=16,  # prompts go in chunks
        runtime__threads=1,
    )
    async with in_process(config) as running:
        yield running


@pytest.fixture
async def client(service: Service) -> AsyncIterator[microtome.AsyncClient]:
    async with microtome.AsyncClient(service.address) as connected:
        yield connected


def logits(model: Path, tokens: list[int]) -> torch.Tensor:
    """The library's, [len(tokens), V]: each row is for the token behind."""
    library = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        return library(torch.tensor([tokens])).logits[0]


def check_numbers(completion: Completion, model: Path, top: int, prompt_top: int) -> None:
    prompt, tokens = list(completion.prompt_token_ids), list(completion.token_ids)
    own = torch.log_softmax(logits(model, prompt + tokens).double(), dim=-1)
    told = [*completion.prompt_logprobs, *completion.logprobs]
    assert len(told) == len(prompt) + len(tokens)
    assert told[0] is None
    for position, one in enumerate(told[1:], 1):
        assert one is not None
        row = own[position - 1]
        best = row.topk(prompt_top if position < len(prompt) else top)
        assert one.token_id == (prompt + tokens)[position]
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


async def test_numbers_are_the_librarys_own_whatever_the_policy_and_the_cache(
    client: microtome.AsyncClient, model: Path, tokenizer: Tokenizer
) -> None:
    plain = await client.complete(PROMPT, max_new_tokens=12, ignore_eos=True)  # leaves its prompt in the cache
    asked = await client.complete(PROMPT, max_new_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=5)
    assert asked.token_ids == plain.token_ids
    assert list(asked.prompt_token_ids) == tokenizer.encode(PROMPT)
    assert asked.usage.cached_tokens == 0
    check_numbers(asked, model, 3, 5)
    drawn = await client.complete(
        PROMPT,
        max_new_tokens=30,
        ignore_eos=True,
        temperature=1.7,
        top_p=0.9,
        seed=5,
        frequency_penalty=0.7,
        banned_token_ids=[plain.token_ids[0]],
        logprobs=0,
        prompt_logprobs=0,
    )
    check_numbers(drawn, model, 0, 0)
    assert drawn.token_ids[0] != plain.token_ids[0]


def test_the_synchronous_client_and_completions_of_one_prompt(model: Path) -> None:
    async def serve() -> None:
        config = fake_config(
            str(model), workers__executor=DEFAULT_EXECUTOR, runtime__kv_tokens=1024, runtime__threads=1
        )
        async with in_process(config) as service:
            await asyncio.to_thread(ask, service.address)

    def ask(address: str) -> None:
        with microtome.Client(address) as client:
            generation = client.generate(
                PROMPT, max_new_tokens=6, ignore_eos=True, n=2, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1
            )
            ahead = [update.index for update in generation if update.prompt_token_ids]
            assert set(ahead) == {0}
            first, second = generation.completions
            check_numbers(first, model, 2, 1)
            assert second.prompt_logprobs == ()
            assert [one.token_id for one in second.logprobs if one] == list(second.token_ids)

    asyncio.run(serve())


async def test_tokens_are_those_of_the_host_sampler_over_the_librarys_logits(
    client: microtome.AsyncClient, model: Path
) -> None:
    policies = [
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(temperature=0.9, seed=4, presence_penalty=2.0, frequency_penalty=0.5),
        SamplingParams(temperature=1.2, seed=8, top_k=20, logit_bias=((60, 4.0), (61, -50.0))),
        SamplingParams(temperature=1.0, seed=9, min_p=0.01, allowed_tokens=tuple(range(40, 90)), banned_tokens=(50,)),
        SamplingParams(min_new_tokens=9, stop_token_ids=tuple(range(100, 320))),
    ]
    answers = await asyncio.gather(
        *(
            client.complete(
                PROMPT,
                max_new_tokens=16,
                ignore_eos=True,
                temperature=p.temperature,
                seed=p.seed,
                top_k=p.top_k,
                min_p=p.min_p,
                repetition_penalty=p.repetition_penalty,
                presence_penalty=p.presence_penalty,
                frequency_penalty=p.frequency_penalty,
                logit_bias=dict(p.logit_bias),
                allowed_token_ids=p.allowed_tokens,
                banned_token_ids=p.banned_tokens,
                min_new_tokens=p.min_new_tokens,
                stop_token_ids=p.stop_token_ids,
                prompt_logprobs=0,
            )
            for p in policies
        )
    )
    for policy, answer in zip(policies, answers, strict=True):
        prompt, tokens = list(answer.prompt_token_ids), list(answer.token_ids)
        rows = logits(model, prompt + tokens).float().tolist()
        policy = replace(policy, prompt_tokens=len(prompt))
        for at, token in enumerate(tokens, len(prompt)):
            edited = host_sampler.edit(rows[at - 1], policy, at, (prompt + tokens)[:at])
            assert token == host_sampler.draw(edited, policy, at)
    assert len(answers[-1].token_ids) >= 10  # nothing stops it sooner


async def test_a_text_to_stop_at_ends_the_text_in_front_of_it(
    client: microtome.AsyncClient, tokenizer: Tokenizer
) -> None:
    whole = await client.complete(PROMPT, max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=2)
    stop = whole.text[7:10]
    cut = whole.text.index(stop)
    asked = await client.complete(PROMPT, max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=2, stop=stop)
    assert asked.text == whole.text[:cut]
    assert asked.finish_reason == "stop"
    assert asked.token_ids == whole.token_ids[: len(asked.token_ids)]
    assert stop in tokenizer.decode(asked.token_ids)
    assert stop not in tokenizer.decode(asked.token_ids[:-1])
    assert asked.usage.output_tokens == len(asked.token_ids)


async def test_whoever_loses_its_worker_goes_on_under_the_same_penalties_and_tells_each_number_once(
    service: Service, client: microtome.AsyncClient, model: Path
) -> None:
    options = microtome.GenerateOptions(
        max_new_tokens=200,
        ignore_eos=True,
        temperature=1.0,
        seed=6,
        frequency_penalty=0.8,
        repetition_penalty=1.1,
        logprobs=2,
        prompt_logprobs=2,
    )
    undisturbed = await client.complete(PROMPT, **options)
    before = (await service.stub.Status(pb.StatusRequest())).counters.output_tokens
    running = asyncio.create_task(client.complete(PROMPT, **options))
    status = await status_when(service.stub, lambda status: status.counters.output_tokens >= before + 20)
    home = next(worker.name for worker in status.workers if worker.sessions)
    await service.workers.kill(home)  # type: ignore[arg-type]
    moved = await running
    assert moved.token_ids == undisturbed.token_ids
    check_numbers(moved, model, 2, 2)
