"""Draws one token per row, on the device, each row under its own policy, seed and position.

Promises: a row's token depends on its logits, policy, seed, position and history alone. Probabilities are computed in
float64. Greedy rows take the largest logit, the lowest id on ties. Rows with top-k, top-p or min-p order the kept
tokens by logit, ties by lower id; rows without keep the vocabulary's order. The token drawn by coin u is the first
whose running mass exceeds u x the kept mass. Log-probabilities are those of the model itself, before edits and
temperature. Tokens come down in one copy, the step's one wait; log-probabilities, where somebody asks, right behind.

R rows, V vocabulary, M tokens that are looked at in order of their logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from microtome.cuda_runtime.coin import coins
from microtome.cuda_runtime.log_probabilities import logprob_table, order_keys, read_table
from microtome.cuda_runtime.logit_edits import SampledRow, edited
from microtome.planner.types import TokenLogprobs

FIRST_LOOK = 256  # tokens sorted at first on a CPU, where a full sort of a large vocabulary costs more than a forward


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The policies of rows that are not greedy, as device tensors [R, 1]."""

    temperature: Tensor  # float64, above 0
    top_k: Tensor  # int64; V where off
    top_p: Tensor  # float64; infinite where off, or where top_k is on
    min_p: Tensor  # float64; 0 where off
    coin: Tensor  # float64


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's tokens: on the device for feeding back, on the host for the answer."""

    tokens_R: Tensor  # int64
    tokens: list[int]  # -1 where the row's logits hold a NaN
    logprobs: tuple[TokenLogprobs | None, ...]  # empty where no row asked


def sample(logits_RV: Tensor, rows: Sequence[SampledRow]) -> Sampled:
    """Draw one token per row, and wait for it."""
    edited_RV = edited(logits_RV, rows)
    largest_R, tokens_R = edited_RV.max(dim=-1)  # the first of those alike; a NaN counts as the largest
    if edited_RV is not logits_RV:
        largest_R = logits_RV.amax(dim=-1)  # edits could hide it
    _draw_the_rest(tokens_R, edited_RV, rows)
    tokens_R.masked_fill_(largest_R.isnan(), -1)
    return Sampled(tokens_R, tokens_R.tolist(), _logprobs(logits_RV, tokens_R, rows))


def _logprobs(logits_RV: Tensor, tokens_R: Tensor, rows: Sequence[SampledRow]) -> tuple[TokenLogprobs | None, ...]:
    asking = [(at, row.policy.logprobs) for at, row in enumerate(rows) if row.policy.logprobs is not None]
    if not asking:
        return ()
    tokens_R = tokens_R.clamp_min(0)
    if len(asking) < len(rows):
        index = torch.tensor([at for at, _ in asking], device=logits_RV.device)
        logits_RV, tokens_R = logits_RV.index_select(0, index), tokens_R.index_select(0, index)
    counts = [count for _, count in asking]
    found: list[TokenLogprobs | None] = [None] * len(rows)
    table = logprob_table(logits_RV, tokens_R, max(counts)).tolist()
    for (at, _), logprobs in zip(asking, read_table(table, counts), strict=True):
        found[at] = logprobs
    return tuple(found)


def _draw_the_rest(tokens_R: Tensor, logits_RV: Tensor, rows: Sequence[SampledRow]) -> None:
    """Put a drawn token in place of the likeliest where a row is not greedy; on CUDA without waiting for the device."""
    vocabulary = logits_RV.shape[-1]
    drawn = [row for row, sampled in enumerate(rows) if sampled.policy.temperature > 0]
    for restricted, draw_some in ((False, _draw_by_id), (True, _draw_by_rank)):
        some = [row for row in drawn if _restricts(rows[row], vocabulary) is restricted]
        if some:
            index = torch.tensor(some, device=logits_RV.device)
            policies = _policy_tensors([rows[row] for row in some], vocabulary, logits_RV.device)
            tokens_R[index] = draw_some(logits_RV.index_select(0, index).to(torch.float32), policies)


def _restricts(row: SampledRow, vocabulary: int) -> bool:
    policy = row.policy
    return 0 < policy.top_k < vocabulary or 0 < policy.top_p < 1 or policy.min_p > 0


def _policy_tensors(rows: Sequence[SampledRow], vocabulary: int, device: torch.device) -> DrawnRows:
    floats = np.empty((3, len(rows)), dtype=np.float64)
    integers = np.empty((3, len(rows)), dtype=np.int64)
    for index, row in enumerate(rows):
        policy = row.policy
        by_rank = 0 < policy.top_k < vocabulary
        by_mass = 0 < policy.top_p < 1 and not by_rank
        floats[:, index] = policy.temperature, policy.top_p if by_mass else math.inf, policy.min_p
        seed = policy.seed & (2**64 - 1)
        integers[0, index] = policy.top_k if by_rank else vocabulary
        integers[1, index] = seed - (1 << 64) if seed >> 63 else seed
        integers[2, index] = row.position
    floats_3R = torch.from_numpy(floats).to(device, non_blocking=True)
    integers_3R = torch.from_numpy(integers).to(device, non_blocking=True)
    return DrawnRows(
        temperature=floats_3R[0, :, None],
        top_k=integers_3R[0, :, None],
        top_p=floats_3R[1, :, None],
        min_p=floats_3R[2, :, None],
        coin=coins(integers_3R[1], integers_3R[2])[:, None],
    )


def _weights(logits_RV: Tensor, policy: DrawnRows) -> Tensor:
    """Unnormalised probabilities, the likeliest at 1."""
    scaled_RV = logits_RV.to(torch.float64)
    return torch.exp((scaled_RV - scaled_RV.amax(dim=-1, keepdim=True)) / policy.temperature)


def _draw_by_id(logits_RV: Tensor, policy: DrawnRows) -> Tensor:
    weights_RV = _weights(logits_RV, policy)
    running_RV = weights_RV.cumsum(dim=-1)
    passed_R1 = (running_RV <= policy.coin * running_RV[:, -1:]).sum(dim=-1, keepdim=True)
    last_R1 = (running_RV < running_RV[:, -1:]).sum(dim=-1, keepdim=True)  # the last token with any mass
    return torch.minimum(passed_R1, last_R1)[:, 0]


def _draw_by_rank(logits_RV: Tensor, policy: DrawnRows) -> Tensor:
    weights_RV = _weights(logits_RV, policy)
    total_R1 = weights_RV.sum(dim=-1, keepdim=True)
    keys_RV = order_keys(logits_RV)
    vocabulary = logits_RV.shape[-1]
    looked_at = FIRST_LOOK if logits_RV.device.type == "cpu" else vocabulary
    while True:
        looked_at = min(looked_at, vocabulary)
        order_RM = torch.topk(keys_RV, looked_at, dim=-1).indices
        ranked_RM = weights_RV.gather(-1, order_RM)
        running_RM = ranked_RM.cumsum(dim=-1)
        keep_RM = torch.arange(looked_at, device=logits_RV.device) < policy.top_k
        before_RM = torch.nn.functional.pad(running_RM[:, :-1], (1, 0))
        keep_RM &= before_RM <= policy.top_p * total_R1
        keep_RM &= ranked_RM >= policy.min_p  # the likeliest weighs 1
        kept_R1 = keep_RM.sum(dim=-1, keepdim=True).clamp_min(1)  # at least one; the kept ones are a head of the order
        if looked_at == vocabulary or bool((kept_R1 < looked_at).all()):
            break
        looked_at *= 8
    mass_R1 = running_RM.gather(-1, kept_R1 - 1)
    passed_R1 = (running_RM <= policy.coin * mass_R1).sum(dim=-1, keepdim=True)
    return order_RM.gather(-1, torch.minimum(passed_R1, kept_R1 - 1))[:, 0]
