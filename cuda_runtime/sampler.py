"""Draws one token per row, on the device, each row under its own policy, seed and position.

Promises: a row's token depends on its logits, policy, seed and position alone. Probabilities are computed in float64.
Greedy rows take the largest logit, the lowest id on ties. Rows with top-k, top-p or min-p order the kept tokens by
logit, ties by lower id; rows without keep the vocabulary's order. The token drawn by coin u is the first whose running
mass exceeds u x the kept mass. Nothing here waits for the device, except on a CPU, where waiting costs nothing.

R rows, V vocabulary, M tokens that are looked at in order of their logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from microtome.cuda_runtime.coin import coins
from microtome.planner.types import SamplingParams

FIRST_LOOK = 256  # tokens sorted at first on a CPU, where a full sort of a large vocabulary costs more than a forward


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The policies of rows that are not greedy, as device tensors [R, 1]."""

    temperature: Tensor  # float64, above 0
    top_k: Tensor  # int64; V where off
    top_p: Tensor  # float64; infinite where off, or where top_k is on
    min_p: Tensor  # float64; 0 where off
    coin: Tensor  # float64


def sample(logits_RV: Tensor, policies: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """One token per row, int64 [R]; -1 where the logits hold a NaN. `positions` are those the tokens will take."""
    greedy = torch.argmax(logits_RV, dim=-1)
    broken = logits_RV.gather(-1, greedy[:, None])[:, 0].isnan()  # a NaN counts as the largest
    return _draw_the_rest(greedy, logits_RV, policies, positions).masked_fill_(broken, -1)


def _draw_the_rest(
    greedy: Tensor, logits_RV: Tensor, policies: Sequence[SamplingParams], positions: Sequence[int]
) -> Tensor:
    drawn = [row for row, policy in enumerate(policies) if policy.temperature > 0]
    if not drawn:
        return greedy
    for restricted in (False, True):
        rows = [row for row in drawn if _restricts(policies[row], logits_RV.shape[-1]) is restricted]
        if rows:
            index = torch.tensor(rows, device=logits_RV.device)
            policy = _policy_tensors(
                [policies[row] for row in rows], [positions[row] for row in rows], logits_RV.shape[-1], logits_RV.device
            )
            draw = _draw_by_rank if restricted else _draw_by_id
            greedy[index] = draw(logits_RV.index_select(0, index).to(torch.float32), policy)
    return greedy


def _restricts(policy: SamplingParams, vocabulary: int) -> bool:
    return 0 < policy.top_k < vocabulary or 0 < policy.top_p < 1 or policy.min_p > 0


def _policy_tensors(
    policies: Sequence[SamplingParams], positions: Sequence[int], vocabulary: int, device: torch.device
) -> DrawnRows:
    floats = np.empty((3, len(policies)), dtype=np.float64)
    integers = np.empty((3, len(policies)), dtype=np.int64)
    for row, policy in enumerate(policies):
        by_rank = 0 < policy.top_k < vocabulary
        by_mass = 0 < policy.top_p < 1 and not by_rank
        floats[:, row] = policy.temperature, policy.top_p if by_mass else math.inf, policy.min_p
        seed = policy.seed & (2**64 - 1)
        integers[0, row] = policy.top_k if by_rank else vocabulary
        integers[1, row] = seed - (1 << 64) if seed >> 63 else seed
        integers[2, row] = positions[row]
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
    keys_RV = _order_keys(logits_RV)
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
        kept_R1 = keep_RM.sum(dim=-1, keepdim=True)  # the kept ones are a head of the order
        if looked_at == vocabulary or bool((kept_R1 < looked_at).all()):
            break
        looked_at *= 8
    mass_R1 = running_RM.gather(-1, kept_R1 - 1)
    passed_R1 = (running_RM <= policy.coin * mass_R1).sum(dim=-1, keepdim=True)
    return order_RM.gather(-1, torch.minimum(passed_R1, kept_R1 - 1))[:, 0]


def _order_keys(logits_RV: Tensor) -> Tensor:
    """Int64 keys, no two alike in a row: larger for a larger logit, then for a lower id."""
    bits = (logits_RV + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: there is one zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    identifiers = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    return (ordered << 32) + (0xFFFFFFFF - identifiers)
