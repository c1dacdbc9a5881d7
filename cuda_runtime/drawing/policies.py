"""The policies of rows that are not greedy, as tensors on the device of their logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from microtome.cuda_runtime.coin import coins
from microtome.cuda_runtime.logit_edits import SampledRow
from microtome.cuda_runtime.upload import upload


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """One entry per row, [R]."""

    temperature: Tensor  # float64, above 0
    top_k: Tensor  # int64; V where off
    top_p: Tensor  # float64; infinite where off, or where top_k is on
    min_p: Tensor  # float64; 0 where off
    coin: Tensor  # float64


def restricts(row: SampledRow, vocabulary: int) -> bool:
    """Whether its policy keeps some tokens only, of `vocabulary` many."""
    policy = row.policy
    return 0 < policy.top_k < vocabulary or 0 < policy.top_p < 1 or policy.min_p > 0


def drawn_rows(rows: Sequence[SampledRow], vocabulary: int, device: torch.device) -> DrawnRows:
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
    floats_3R = upload(floats, device)
    integers_3R = upload(integers, device)
    return DrawnRows(
        temperature=floats_3R[0],
        top_k=integers_3R[0],
        top_p=floats_3R[1],
        min_p=floats_3R[2],
        coin=coins(integers_3R[1], integers_3R[2]),
    )
