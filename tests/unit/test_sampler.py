"""The device's sampler against its twin in plain Python, and the promises of each row."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from microtome.cuda_runtime import sampler
from microtome.cuda_runtime.coin import coins
from microtome.cuda_runtime.drawing import cpu_native
from microtome.cuda_runtime.logit_edits import SampledRow, edited
from microtome.planner.types import SamplingParams
from tests.support import host_sampler

VOCABULARY = 400


@pytest.fixture(params=["native", "stock"], autouse=True)
def draws_with(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds with our kernel, where there is a compiler, and with torch's operators."""
    if request.param == "stock":
        monkeypatch.setattr(cpu_native, "operators", lambda: None)


def random_logits(rows: int, seed: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def random_policy(random: Random) -> SamplingParams:
    return SamplingParams(
        temperature=random.choice([0.0, 0.01, 0.7, 1.0, 2.5, 20.0]),
        top_k=random.choice([0, 0, 1, 2, 40, 299, VOCABULARY, VOCABULARY + 5]),
        top_p=random.choice([1.0, 1.0, 0.001, 0.5, 0.9, 0.9999, 0.0, 1.5]),
        min_p=random.choice([0.0, 0.0, 0.0, 0.05, 1.0]),
        seed=random.choice([0, 1, 2**63, 2**64 - 1, random.getrandbits(64)]),
    )


def sample(logits_RV: torch.Tensor, policies: list[SamplingParams], positions: list[int]) -> list[int]:
    """The sampler on rows whose history nobody asks for."""
    rows = [SampledRow(policy, position, _no_history) for policy, position in zip(policies, positions, strict=True)]
    return sampler.sample(logits_RV, rows).tokens


def _no_history() -> NDArray[np.int64]:
    raise AssertionError("a policy without penalties needs no history")


def expected(logits_RV: torch.Tensor, policies: list[SamplingParams], positions: list[int]) -> list[int]:
    rows = zip(logits_RV.tolist(), policies, positions, strict=True)
    return [host_sampler.draw(logits, policy, position) for logits, policy, position in rows]


# holds I2, I3, I4, I5, L3
@pytest.mark.parametrize("seed", range(12))
def test_device_and_host_pick_the_same_token_for_every_policy(seed: int) -> None:
    random = Random(seed)
    policies = [random_policy(random) for _ in range(24)]
    positions = [random.randrange(1 << 20) for _ in policies]
    logits_RV = random_logits(len(policies), seed)
    assert sample(logits_RV, policies, positions) == expected(logits_RV, policies, positions)


# holds I4
@pytest.mark.parametrize("policy", [SamplingParams(temperature=1, top_k=3), SamplingParams(temperature=1, top_p=0.6)])
def test_ties_go_to_the_lower_id(policy: SamplingParams) -> None:
    logits_RV = torch.zeros(200, VOCABULARY)
    logits_RV[:, 100:107] = 5.0  # seven alike, of which the policy keeps some
    logits_RV[:, 50] = -0.0  # the two zeros are one number
    policies = [replace(policy, seed=seed) for seed in range(200)]
    tokens = sample(logits_RV, policies, [9] * 200)
    assert tokens == expected(logits_RV, policies, [9] * 200)
    assert max(tokens) < 107
    assert set(tokens) <= {100, 101, 102} or policy.top_k == 0


# holds I1
def test_greedy_takes_the_lowest_id_of_the_largest() -> None:
    logits_RV = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 1.0, 3.0, 3.0]])
    greedy = SamplingParams(top_k=1, top_p=0.1, seed=3)
    assert sample(logits_RV, [greedy, greedy], [0, 7]) == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_id_in_any_number_format(dtype: torch.dtype) -> None:
    """Rounded logits are often alike, and a wide row is searched by several threads in several pieces."""
    logits_RV = random_logits(5, 8, vocabulary=60_000).to(dtype)
    largest = logits_RV.amax(dim=-1, keepdim=True)
    for row, alike in enumerate(((59_999, 40), (31, 33, 32), (7, 30_000), (59_998, 59_999), (0, 59_999))):
        logits_RV[row, list(alike)] = largest[row] + 1
    assert sample(logits_RV, [SamplingParams()] * 5, [0] * 5) == [40, 31, 7, 59_998, 0]


# holds I9
def test_a_row_draws_the_same_token_alone_and_in_any_company() -> None:
    random = Random(5)
    policies = [random_policy(random) for _ in range(16)]
    positions = [random.randrange(1000) for _ in policies]
    logits_RV = random_logits(16, 5)
    together = sample(logits_RV, policies, positions)
    alone = [
        sample(logits_RV[row : row + 1], [policy], [position])[0]
        for row, (policy, position) in enumerate(zip(policies, positions, strict=True))
    ]
    order = list(range(16))
    random.shuffle(order)
    shuffled = sample(logits_RV[order], [policies[row] for row in order], [positions[row] for row in order])
    assert together == alone
    assert [together[row] for row in order] == shuffled


def test_a_long_tail_is_sorted_as_far_as_top_p_reaches() -> None:
    """A nearly flat distribution over a vocabulary wider than the first look."""
    logits_RV = random_logits(6, 1, vocabulary=9000) * 0.01
    policies = [
        SamplingParams(temperature=1, top_p=p, seed=s) for s, p in enumerate([0.1, 0.5, 0.9, 0.99, 0.9999, 0.3])
    ]
    positions = list(range(6))
    assert sample(logits_RV, policies, positions) == expected(logits_RV, policies, positions)


# holds I6
def test_coins_are_those_of_the_host_and_spread_evenly() -> None:
    seeds = [0, 1, 2, 2**63 - 1, -1, -(2**63)]
    positions = list(range(500))
    grid = [(seed, position) for seed in seeds for position in positions]
    drawn = coins(torch.tensor([seed for seed, _ in grid]), torch.tensor([position for _, position in grid])).tolist()
    assert drawn == [host_sampler.coin(seed % 2**64, position) for seed, position in grid]
    assert len(set(drawn)) == len(drawn)
    for index in range(len(seeds)):  # seed 0 is an ordinary seed
        part = drawn[index * 500 : (index + 1) * 500]
        assert 0.44 < sum(part) / 500 < 0.56
        assert 0.0 <= min(part) < 0.02 < 0.98 < max(part) < 1.0


# holds I2, I5
def test_frequencies_follow_the_probabilities() -> None:
    logits_RV = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]])).expand(4000, 4)
    policies = [SamplingParams(temperature=1.0, seed=11)] * 4000
    counts = torch.bincount(torch.tensor(sample(logits_RV, policies, list(range(4000)))), minlength=4) / 4000
    assert torch.allclose(counts, torch.tensor([0.5, 0.25, 0.125, 0.125]), atol=0.03)


def test_a_nan_anywhere_in_a_row_is_reported_for_that_row_only() -> None:
    logits_RV = random_logits(4, 2)
    logits_RV[2, 7] = float("nan")
    policies = [SamplingParams(), SamplingParams(temperature=1), SamplingParams(temperature=1), SamplingParams()]
    tokens = sample(logits_RV, policies, [0, 1, 2, 3])
    assert tokens[2] == -1
    assert min(tokens[:2] + tokens[3:]) >= 0


def row(policy: SamplingParams, history: list[int]) -> SampledRow:
    return SampledRow(policy, len(history), lambda: np.asarray(history, dtype=np.int64))


EDITS = {
    "none": SamplingParams(),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "presence": SamplingParams(presence_penalty=0.8, prompt_tokens=4),
    "frequency": SamplingParams(frequency_penalty=-0.6, prompt_tokens=4),
    "bias": SamplingParams(logit_bias=((3, 5.0), (9, -100.0))),
    "allowed": SamplingParams(allowed_tokens=(4, 5, 311)),
    "banned": SamplingParams(banned_tokens=(0, 1, 399)),
    "too early to stop": SamplingParams(stop_token_ids=(2, 17), min_new_tokens=5, prompt_tokens=5),
    "may stop": SamplingParams(stop_token_ids=(2, 17), min_new_tokens=4, prompt_tokens=5),
    "all at once": SamplingParams(
        repetition_penalty=0.7,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((7, 1.0), (8, 2.0)),
        allowed_tokens=(7, 8, 9, 10),
        banned_tokens=(10,),
        prompt_tokens=2,
    ),
    "nothing left": SamplingParams(allowed_tokens=(3, 4), banned_tokens=(3, 4)),
}


def test_edits_are_those_of_the_host_and_stay_in_their_row() -> None:
    history = [7, 8, 8, 1, 7, 7, 9, 2, 8]
    logits_RV = random_logits(len(EDITS), 3)
    rows = [row(policy, history) for policy in EDITS.values()]
    result = edited(logits_RV, rows)
    for name, policy, logits, ours in zip(EDITS, EDITS.values(), logits_RV.tolist(), result, strict=True):
        twin = torch.tensor(host_sampler.edit(logits, policy, len(history), history))
        assert torch.allclose(ours, twin, rtol=1e-6, atol=1e-6), name
    assert torch.equal(result[0], logits_RV[0])
    assert torch.equal(logits_RV, random_logits(len(EDITS), 3))  # a new tensor: the model's logits stay


def test_edits_hold_for_greedy_and_drawn_tokens() -> None:
    logits_RV = random_logits(2, 4)
    likeliest = int(logits_RV[0].argmax())
    policies = [
        SamplingParams(banned_tokens=(likeliest,)),
        SamplingParams(temperature=5.0, allowed_tokens=(6, 60), seed=8),
    ]
    tokens = sample(logits_RV, policies, [1, 1])
    assert tokens[0] == int(logits_RV[0].topk(2).indices[1])
    assert tokens[1] in (6, 60)


def test_logprobs_are_the_models_own_whatever_the_policy() -> None:
    logits_RV = random_logits(4, 6)
    banned = int(logits_RV[1].argmax())
    policies = [
        SamplingParams(logprobs=3),
        SamplingParams(logprobs=2, banned_tokens=(banned,)),
        SamplingParams(),
        SamplingParams(temperature=3.0, logprobs=1, seed=2),
    ]
    sampled = sampler.sample(logits_RV, [row(policy, [1, 2]) for policy in policies])
    own = torch.log_softmax(logits_RV.double(), dim=-1)
    assert sampled.logprobs[2] is None
    for index, count in ((0, 3), (1, 2), (3, 1)):
        answer = sampled.logprobs[index]
        assert answer is not None
        best = own[index].topk(count)
        assert answer.logprob == pytest.approx(float(own[index, sampled.tokens[index]]), abs=1e-6)
        assert [token for token, _ in answer.top] == best.indices.tolist()
        assert [value for _, value in answer.top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert sampled.tokens[1] != banned == sampled.logprobs[1].top[0][0]  # type: ignore[union-attr]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "policy",
    [
        SamplingParams(logit_bias=((7, 1e300),)),
        SamplingParams(repetition_penalty=1e-300),
        SamplingParams(frequency_penalty=-1e300),
    ],
)
def test_a_number_that_float32_cannot_hold_still_decides(policy: SamplingParams, temperature: float) -> None:
    logits_RV = random_logits(1, 5)
    logits_RV[0, 7] = 0.5
    row = SampledRow(replace(policy, temperature=temperature), 3, lambda: np.array([7, 7, 7]))
    assert sampler.sample(logits_RV, [row]).tokens == [7]
