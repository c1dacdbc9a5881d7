"""The sampler on CUDA: the tokens of the host's twin, the numbers of the CPU, and no wait but its own."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from microtome.cuda_runtime.log_probabilities import logprob_table
from microtome.cuda_runtime.logit_edits import SampledRow
from microtome.cuda_runtime.sampler import sample
from microtome.planner.types import SamplingParams
from tests.support import host_sampler

pytestmark = pytest.mark.gpu

ROWS, VOCABULARY = 48, 997


def policies(seed: int) -> list[SamplingParams]:
    random = Random(seed)
    return [
        SamplingParams(
            temperature=random.choice([0.0, 0.7, 1.0, 3.0]),
            top_k=random.choice([0, 0, 5, 100]),
            top_p=random.choice([1.0, 0.3, 0.95]),
            min_p=random.choice([0.0, 0.0, 0.05]),
            seed=random.getrandbits(64),
            repetition_penalty=random.choice([1.0, 1.3]),
            frequency_penalty=random.choice([0.0, 0.5]),
            logit_bias=random.choice([(), ((3, 5.0), (4, -5.0))]),
            banned_tokens=random.choice([(), (3, 9)]),
            logprobs=random.choice([None, 0, 4]),
            prompt_tokens=3,
        )
        for _ in range(ROWS)
    ]


# holds L3
@pytest.mark.parametrize("seed", range(6))
def test_cuda_and_host_pick_the_same_token(seed: int) -> None:
    logits_RV = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    history = [1, 5, 5, 3, 3, 3, 200]
    rows = [SampledRow(policy, len(history), lambda: np.asarray(history)) for policy in policies(seed)]
    sampled = sample(logits_RV.cuda(), rows)
    for row, logits in enumerate(logits_RV.tolist()):
        edited = host_sampler.edit(logits, rows[row].policy, len(history), history)
        assert sampled.tokens[row] == host_sampler.draw(edited, rows[row].policy, len(history))
        assert (sampled.logprobs[row] is None) == (rows[row].policy.logprobs is None)


def test_log_probabilities_are_those_of_the_cpu() -> None:
    logits_RV = torch.randn(40, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    tokens_R = torch.arange(40)
    here, there = logprob_table(logits_RV, tokens_R, 7), logprob_table(logits_RV.cuda(), tokens_R.cuda(), 7).cpu()
    assert torch.equal(here[:, 1:8], there[:, 1:8])
    assert torch.allclose(here, there, rtol=1e-6, atol=1e-6)


def test_greedy_and_drawn_rows_may_be_mixed_with_a_row_of_nans() -> None:
    logits_RV = torch.randn(4, VOCABULARY, device="cuda")
    logits_RV[2, 7] = float("nan")
    greedy = SamplingParams()
    chosen = [greedy, replace(greedy, temperature=1.0), greedy, replace(greedy, temperature=1.0, top_p=0.5)]
    tokens = sample(logits_RV, [SampledRow(policy, 0, lambda: np.zeros(0, dtype=np.int64)) for policy in chosen]).tokens
    assert tokens[2] == -1
    assert min(tokens[:2] + tokens[3:]) >= 0
