"""The contract's rules of sampling (i) that cross a seam: seeds, when a policy holds, and ids that are none.

What a row's token is, given its logits, is `unit/test_sampler`'s.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from microtome.cuda_runtime.executor import build_executor
from microtome.cuda_runtime.logit_edits import SampledRow
from microtome.cuda_runtime.options import RuntimeOptions
from microtome.cuda_runtime.sampler import sample
from microtome.planner.errors import BadInput, StalePlan
from microtome.planner.events import StepDone
from microtome.planner.types import SamplingParams, SetSampling, StepPlan, WorkerId
from microtome.v1 import generation_pb2 as pb
from tests.support.calls import collect, request, rest_of, tokens_of, undisturbed
from tests.support.fake_executor import FakeExecutor
from tests.support.in_process import fake_config, in_process
from tests.support.small_cluster import VOCAB, SmallCluster, expected
from tests.support.step_driver import StepDriver, Work
from tests.support.toy_model import VOCABULARY, toy_directory

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_directory(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def policies(plans: list[StepPlan]) -> list[SamplingParams]:
    return [op.sampling for plan in plans for op in plan.ops if isinstance(op, SetSampling)]


def toy_driver(toy: Path) -> StepDriver:
    options = RuntimeOptions(model=str(toy), kv_tokens=256, max_step_tokens=16, widths=(1, 2, 4), max_sequences=8)
    return StepDriver(build_executor(options))


# --- I7: seeds ---


async def test_I7_a_seed_that_was_not_given_is_another_one_each_time_and_repeats_what_it_drew() -> None:
    async with in_process(fake_config()) as service:
        seeds = set()
        for _ in range(4):
            asked = request(PROMPT, max_new_tokens=12, temperature=1.0)
            responses = await collect(service.stub, asked)
            (seed,) = {response.seed for response in responses}  # told with every message
            seeds.add(seed)
            assert tokens_of(responses) == undisturbed(PROMPT, 12, seed, 1.0)
        assert len(seeds) == 4
        assert max(seeds) > 2**48  # of 64 bits


async def test_I7_each_of_several_completions_tells_its_own_seed() -> None:
    async with in_process(fake_config()) as service:
        responses = await collect(service.stub, request(PROMPT, max_new_tokens=12, temperature=1.0, n=3))
        told = {(response.index, response.seed) for response in responses}
        assert len(told) == len({seed for _, seed in told}) == 3
        for index, seed in told:
            own = [response for response in responses if response.index == index]
            assert tokens_of(own) == undisturbed(PROMPT, 12, seed, 1.0)


async def test_I7_whoever_resumes_is_told_the_seed_again() -> None:
    async with in_process(fake_config()) as service:
        asked = request(PROMPT, max_new_tokens=12, temperature=1.0, generation_id="g", resumable=True)
        responses = await collect(service.stub, asked)
        again = await rest_of(service.stub.Resume(pb.ResumeRequest(generation_id="g", offset=5)))
        assert {response.seed for response in again} == {responses[0].seed}


def test_I7_the_seed_is_with_the_worker_before_the_first_step_and_the_same_wherever_the_generation_goes() -> None:
    cluster = SmallCluster(workers=2)
    name = cluster.submit(PROMPT, 9, seed=2**64 - 1)
    home = next(worker for worker, plans in cluster.plans.items() if plans)
    assert [policy.seed for policy in policies([cluster.plans[home][0]])] == [2**64 - 1]
    cluster.answer(home)
    cluster.plans[home].clear()
    cluster.lose(home)
    cluster.run()
    assert {policy.seed for policy in policies(cluster.sent)} == {2**64 - 1}
    assert cluster.tokens[name] == expected(PROMPT, 9, seed=2**64 - 1)


def test_I7_seed_0_is_a_seed_and_seeds_of_more_than_64_bits_are_none() -> None:
    cluster = SmallCluster()
    name, other = cluster.submit(PROMPT, 9, seed=0), cluster.submit(PROMPT, 9, seed=1)
    wrong = cluster.submit(PROMPT, 9, seed=2**64)
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 9, seed=0) != cluster.tokens[other]
    assert isinstance(cluster.error(wrong), BadInput)


# --- I8: when a policy holds ---


def test_I8_a_policy_comes_with_the_generations_first_step_and_once() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 9, sampling=SamplingParams(temperature=0.5, seed=3))
    first = cluster.sent[0]
    assert first.sequences  # the step has inputs, and operations come before them
    assert [policy.temperature for policy in policies([first])] == [0.5]
    cluster.run()
    assert len(policies(cluster.sent)) == 1


def test_I8_the_next_generation_of_a_session_replaces_it() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    for temperature in (0.5, 0.0, 0.7):
        cluster.submit(PROMPT, 3, session=session, sampling=SamplingParams(temperature=temperature, seed=3))
        cluster.run()
    assert [policy.temperature for policy in policies(cluster.sent)] == [0.5, 0.0, 0.7]
    (held,) = cluster.executors["w0"].snapshot()
    assert held.sampling is not None
    assert held.sampling.temperature == 0.7  # and holds when its generation is over


def test_I8_a_generation_that_is_refused_installs_nothing() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    cluster.submit(PROMPT, 3, session=session, sampling=SamplingParams(temperature=0.5))
    cluster.run()
    wrong = SamplingParams(temperature=0.9, banned_tokens=(VOCAB,))
    refused = cluster.submit(PROMPT, 3, session=session, sampling=wrong)
    cluster.run()
    assert isinstance(cluster.error(refused), BadInput)
    (held,) = cluster.executors["w0"].snapshot()
    assert held.sampling is not None
    assert held.sampling.temperature == 0.5


def test_I8_a_clone_inherits_none() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    cluster.submit(PROMPT, 3, session=session, sampling=SamplingParams(temperature=0.5))
    cluster.run()
    cluster.clone(session)
    cluster.submit(PROMPT, 3)  # operations go with the next step that there is
    cluster.run()
    assert [held.sampling is None for held in cluster.executors["w0"].snapshot()] == [False, True]


@pytest.mark.parametrize("kind", ["fake", "toy"])
def test_I8_sampling_without_a_policy_is_refused_and_changes_nothing(kind: str, toy: Path) -> None:
    driver = StepDriver(FakeExecutor()) if kind == "fake" else toy_driver(toy)
    source = driver.open()
    driver.step(Work(source, PROMPT))
    before = driver.executor.snapshot()
    for sequence in (driver.open_without_policy(),):
        with pytest.raises(StalePlan, match="no sampling policy"):
            driver.step(Work(sequence, PROMPT))
    assert driver.executor.snapshot() == before


# --- I10: rows and ids that are none ---


@pytest.mark.parametrize("shape", [(3,), (3, 0), (0, 5), (2, 5), (4, 5), (1, 3, 5)])
def test_I10_logits_without_a_vocabulary_or_a_row_for_each_are_an_error(shape: tuple[int, ...]) -> None:
    rows = [SampledRow(SamplingParams(), 0, lambda: torch.zeros(0, dtype=torch.int64).numpy())] * 3
    with pytest.raises(ValueError, match="no vocabulary for each of 3 rows"):
        sample(torch.zeros(shape), rows)


def test_I10_a_given_token_outside_the_vocabulary_is_refused_by_the_worker(toy: Path) -> None:
    driver = toy_driver(toy)
    sequence = driver.open()
    with pytest.raises(StalePlan, match=f"token {VOCABULARY} is outside"):
        driver.step(Work(sequence, [5, VOCABULARY]))
    driver.step(Work(sequence, PROMPT))  # and nothing has changed


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 7, 2**32 - 1])
def test_I10_a_sampled_token_outside_the_vocabulary_is_caught_by_the_driver(token: int) -> None:
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 5)
    result = cluster.executors["w0"].run(cluster.plans["w0"].popleft())
    cluster.handle(StepDone(at_us=0, worker=WorkerId("w0"), result=replace(result, tokens=(token,))))
    assert not cluster.control.status().workers  # its state is unknown
    assert not cluster.tokens.get(name)
    cluster.join("w1")
    cluster.run()
    assert cluster.tokens[name] == expected(PROMPT, 5)


@pytest.mark.parametrize("seed", range(3))
def test_I10_whatever_the_policy_every_token_is_one_of_the_vocabulary(seed: int) -> None:
    random = Random(seed)
    logits_RV = torch.randn(64, 37, generator=torch.Generator().manual_seed(seed)) * 5
    rows = [
        SampledRow(
            SamplingParams(
                temperature=random.choice([0.0, 1e-6, 1.0, 1e6]),
                top_k=random.choice([0, 1, 36, 37, 1000]),
                top_p=random.choice([1e-12, 0.5, 1.0]),
                min_p=random.choice([0.0, 1.0]),
                seed=random.getrandbits(64),
                allowed_tokens=random.choice([None, (3,), ()]),
            ),
            position,
            lambda: torch.zeros(0, dtype=torch.int64).numpy(),
        )
        for position in range(64)
    ]
    assert all(0 <= token < 37 for token in sample(logits_RV, rows).tokens)
