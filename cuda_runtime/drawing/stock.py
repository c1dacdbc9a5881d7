"""Draws tokens with torch's own operators, on any device; on CUDA without waiting for it.

Rows that restrict nothing keep the vocabulary's order; the others order what they keep by logit, ties by lower id.

R rows, V vocabulary, M tokens that are looked at in order of their logits.
"""

import torch
from torch import Tensor

from microtome.cuda_runtime.drawing.policies import DrawnRows
from microtome.cuda_runtime.log_probabilities import order_keys

FIRST_LOOK = 256  # tokens sorted at first on a CPU, where a full sort of a large vocabulary costs more than a forward


def draw_by_id(logits_RV: Tensor, policy: DrawnRows) -> Tensor:
    """Tokens [R], of all; float32 logits."""
    weights_RV = _weights(logits_RV, policy)
    running_RV = weights_RV.cumsum(dim=-1)
    passed_R1 = (running_RV <= policy.coin[:, None] * running_RV[:, -1:]).sum(dim=-1, keepdim=True)
    last_R1 = (running_RV < running_RV[:, -1:]).sum(dim=-1, keepdim=True)  # the last token with any mass
    return torch.minimum(passed_R1, last_R1)[:, 0]


def draw_by_rank(logits_RV: Tensor, policy: DrawnRows) -> Tensor:
    """Tokens [R], of those that top-k, top-p and min-p keep; float32 logits."""
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
        keep_RM = torch.arange(looked_at, device=logits_RV.device) < policy.top_k[:, None]
        before_RM = torch.nn.functional.pad(running_RM[:, :-1], (1, 0))
        keep_RM &= before_RM <= policy.top_p[:, None] * total_R1
        keep_RM &= ranked_RM >= policy.min_p[:, None]  # the likeliest weighs 1
        kept_R1 = keep_RM.sum(dim=-1, keepdim=True).clamp_min(1)  # at least one; the kept ones are a head of the order
        if looked_at == vocabulary or bool((kept_R1 < looked_at).all()):
            break
        looked_at *= 8
    mass_R1 = running_RM.gather(-1, kept_R1 - 1)
    passed_R1 = (running_RM <= policy.coin[:, None] * mass_R1).sum(dim=-1, keepdim=True)
    return order_RM.gather(-1, torch.minimum(passed_R1, kept_R1 - 1))[:, 0]


def _weights(logits_RV: Tensor, policy: DrawnRows) -> Tensor:
    """Unnormalised probabilities, the likeliest at 1."""
    scaled_RV = logits_RV.to(torch.float64)
    return torch.exp((scaled_RV - scaled_RV.amax(dim=-1, keepdim=True)) / policy.temperature[:, None])
