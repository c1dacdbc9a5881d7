"""Draws tokens on a CPU, and says how likely some are, with kernels in C++ that put next to nothing in order.

The same tokens as `stock` gives, and the numbers of `log_probabilities`: the same rules, in float64 too, with sums in
another order. What a row gives does not depend on the rows beside it or on the number of threads. Float32 and bfloat16
logits.
"""

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microtome.cuda_runtime.drawing.policies import DrawnRows
from microtome.cuda_runtime.native_library import build_library
from microtome.planner.errors import BadConfig

SOURCES = Path(__file__).parent / "native"
_log = logging.getLogger(__name__)


@cache
def operators() -> Any:
    """The native operators, built or found in the cache; None where they cannot be. Once per process."""
    try:
        library = build_library("draw", SOURCES)
    except BadConfig as problem:
        _log.warning("tokens are drawn with stock operators, which are slower: %s", problem)
        return None
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    return torch.ops.microtome


def serves(logits_RV: Tensor) -> bool:
    return (
        logits_RV.device.type == "cpu"
        and logits_RV.dtype in (torch.float32, torch.bfloat16)
        and logits_RV.stride(-1) == 1
        and operators() is not None
    )


def draw(logits_RV: Tensor, rows: Tensor, policy: DrawnRows) -> Tensor:
    """Tokens, one per entry of `rows` (int64: of which row of the logits) and of the policies."""
    drawn: Tensor = operators().draw(
        logits_RV, rows, policy.temperature, policy.top_k, policy.top_p, policy.min_p, policy.coin.contiguous()
    )
    return drawn


def likelihoods(logits_RV: Tensor, tokens_R: Tensor, count: int) -> Tensor:
    """As `log_probabilities.logprob_table`, for at most V likeliest tokens."""
    table: Tensor = operators().likelihoods(logits_RV, tokens_R.contiguous(), count)
    return table
