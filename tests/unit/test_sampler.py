"""The device's sampler against its twin in plain Python, and the promises of each row."""

from dataclasses import replace
from random import Random

import pytest
import torch

from microtome.cuda_runtime.coin import coins
from microtome.cuda_runtime.sampler import sample
from microtome.planner.types import SamplingParams
from tests.support import host_sampler

VOCABULARY = 400


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


def expected(logits_RV: torch.Tensor, policies: list[SamplingParams], positions: list[int]) -> list[int]:
    rows = zip(logits_RV.tolist(), policies, positions, strict=True)
    return [host_sampler.draw(logits, policy, position) for logits, policy, position in rows]


@pytest.mark.parametrize("seed", range(12))
def test_device_and_host_pick_the_same_token_for_every_policy(seed: int) -> None:
    random = Random(seed)
    policies = [random_policy(random) for _ in range(24)]
    positions = [random.randrange(1 << 20) for _ in policies]
    logits_RV = random_logits(len(policies), seed)
    assert sample(logits_RV, policies, positions).tolist() == expected(logits_RV, policies, positions)


@pytest.mark.parametrize("policy", [SamplingParams(temperature=1, top_k=3), SamplingParams(temperature=1, top_p=0.6)])
def test_ties_go_to_the_lower_id(policy: SamplingParams) -> None:
    logits_RV = torch.zeros(200, VOCABULARY)
    logits_RV[:, 100:107] = 5.0  # seven alike, of which the policy keeps some
    logits_RV[:, 50] = -0.0  # the two zeros are one number
    policies = [replace(policy, seed=seed) for seed in range(200)]
    tokens = sample(logits_RV, policies, [9] * 200).tolist()
    assert tokens == expected(logits_RV, policies, [9] * 200)
    assert max(tokens) < 107
    assert set(tokens) <= {100, 101, 102} or policy.top_k == 0


def test_greedy_takes_the_lowest_id_of_the_largest() -> None:
    logits_RV = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 1.0, 3.0, 3.0]])
    greedy = SamplingParams(top_k=1, top_p=0.1, seed=3)
    assert sample(logits_RV, [greedy, greedy], [0, 7]).tolist() == [1, 0]


def test_a_row_draws_the_same_token_alone_and_in_any_company() -> None:
    random = Random(5)
    policies = [random_policy(random) for _ in range(16)]
    positions = [random.randrange(1000) for _ in policies]
    logits_RV = random_logits(16, 5)
    together = sample(logits_RV, policies, positions).tolist()
    alone = [
        sample(logits_RV[row : row + 1], [policy], [position]).item()
        for row, (policy, position) in enumerate(zip(policies, positions, strict=True))
    ]
    order = list(range(16))
    random.shuffle(order)
    shuffled = sample(logits_RV[order], [policies[row] for row in order], [positions[row] for row in order]).tolist()
    assert together == alone
    assert [together[row] for row in order] == shuffled


def test_a_long_tail_is_sorted_as_far_as_top_p_reaches() -> None:
    """A nearly flat distribution over a vocabulary wider than the first look."""
    logits_RV = random_logits(6, 1, vocabulary=9000) * 0.01
    policies = [
        SamplingParams(temperature=1, top_p=p, seed=s) for s, p in enumerate([0.1, 0.5, 0.9, 0.99, 0.9999, 0.3])
    ]
    positions = list(range(6))
    assert sample(logits_RV, policies, positions).tolist() == expected(logits_RV, policies, positions)


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


def test_frequencies_follow_the_probabilities() -> None:
    logits_RV = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]])).expand(4000, 4)
    policies = [SamplingParams(temperature=1.0, seed=11)] * 4000
    counts = torch.bincount(sample(logits_RV, policies, list(range(4000))), minlength=4) / 4000
    assert torch.allclose(counts, torch.tensor([0.5, 0.25, 0.125, 0.125]), atol=0.03)


def test_a_nan_anywhere_in_a_row_is_reported_for_that_row_only() -> None:
    logits_RV = random_logits(4, 2)
    logits_RV[2, 7] = float("nan")
    policies = [SamplingParams(), SamplingParams(temperature=1), SamplingParams(temperature=1), SamplingParams()]
    tokens = sample(logits_RV, policies, [0, 1, 2, 3]).tolist()
    assert tokens[2] == -1
    assert min(tokens[:2] + tokens[3:]) >= 0
