"""Draws one token per row, on the device, each row under its own policy, seed and position.

Promises: a row's token depends on its logits, policy, seed, position and history alone. Probabilities are computed in
float64. Greedy rows take the largest logit, the lowest id on ties. Rows with top-k, top-p or min-p order the kept
tokens by logit, ties by lower id; rows without keep the vocabulary's order. The token drawn by coin u is the first
whose running mass exceeds u x the kept mass. Log-probabilities are those of the model itself, before edits and
temperature. Tokens come down in one copy, the step's one wait; log-probabilities, where somebody asks, right behind.

R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from microtome.cuda_runtime.drawing import cpu_native, stock
from microtome.cuda_runtime.drawing.policies import drawn_rows, restricts
from microtome.cuda_runtime.log_probabilities import logprob_table, read_table
from microtome.cuda_runtime.logit_edits import SampledRow, edited
from microtome.cuda_runtime.upload import upload
from microtome.planner.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's tokens: on the device for feeding back, on the host for the answer."""

    tokens_R: Tensor  # int64
    tokens: list[int]  # -1 where the row's logits hold a NaN
    logprobs: tuple[TokenLogprobs | None, ...]  # empty where no row asked


def prepare(device: torch.device) -> None:
    """Build or load what drawing needs there: seconds the first time, on a machine with a compiler."""
    if device.type == "cpu":
        cpu_native.operators()


def sample(logits_RV: Tensor, rows: Sequence[SampledRow]) -> Sampled:
    """Draw one token per row, and wait for it. Raises `ValueError` for logits that are not a row of tokens for each."""
    if logits_RV.dim() != 2 or len(logits_RV) != len(rows) or not logits_RV.numel():
        raise ValueError(f"logits of shape {list(logits_RV.shape)} are no vocabulary for each of {len(rows)} rows")
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
        index = upload(np.asarray([at for at, _ in asking]), logits_RV.device)
        logits_RV, tokens_R = logits_RV.index_select(0, index), tokens_R.index_select(0, index)
    counts = [count for _, count in asking]
    found: list[TokenLogprobs | None] = [None] * len(rows)
    table = logprob_table(logits_RV, tokens_R, max(counts)).tolist()
    for (at, _), logprobs in zip(asking, read_table(table, counts), strict=True):
        found[at] = logprobs
    return tuple(found)


def _draw_the_rest(tokens_R: Tensor, logits_RV: Tensor, rows: Sequence[SampledRow]) -> None:
    """Put a drawn token in place of the likeliest where a row is not greedy; on CUDA without waiting for the device."""
    vocabulary, device = logits_RV.shape[-1], logits_RV.device
    drawn = [row for row, sampled in enumerate(rows) if sampled.policy.temperature > 0]
    if drawn and cpu_native.serves(logits_RV):
        index = torch.tensor(drawn)
        policies = drawn_rows([rows[row] for row in drawn], vocabulary, device)
        tokens_R[index] = cpu_native.draw(logits_RV, index, policies)
        return
    for restricted, draw_some in ((False, stock.draw_by_id), (True, stock.draw_by_rank)):
        some = [row for row in drawn if restricts(rows[row], vocabulary) is restricted]
        if some:
            index = upload(np.asarray(some), device)
            policies = drawn_rows([rows[row] for row in some], vocabulary, device)
            tokens_R[index] = draw_some(logits_RV.index_select(0, index).to(torch.float32), policies)
