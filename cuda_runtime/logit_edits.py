"""What a policy does to its row's logits before a token is drawn: penalties, bias, and tokens that may not be drawn.

In this order, row by row: the repetition penalty divides positive logits of tokens in the history and multiplies
negative ones; presence and frequency penalties take from tokens of the generated part, once and per occurrence; the
bias adds; what is not allowed, is banned, or would stop the text before `min_new_tokens` becomes minus infinity. A
policy that would forbid every token forbids none. Rows without edits are untouched, and cost nothing.

What is edited is worked out on the host, from policies and transcripts, and goes to the device as sparse lists.

R rows, V vocabulary, E edits, F rows that forbid tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microtome.cuda_runtime.upload import upload
from microtome.planner.types import SamplingParams

Int64Array = NDArray[np.int64]

_LARGEST = 1e30  # of a bias or a penalty: far beyond any logit, far below float32's largest


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One token to draw: under which policy, for which position, after which tokens."""

    policy: SamplingParams
    position: int  # the one the token will take
    history: Callable[[], Int64Array]  # the sequence's tokens [position]; asked for only where a penalty needs them


def edited(logits_RV: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """The logits with every row's edits made: a new float32 tensor where there are any, else the one given."""
    vocabulary = logits_RV.shape[-1]
    touched = [row for row, sampled in enumerate(rows) if _edits(sampled)]
    if not touched:
        return logits_RV
    device = logits_RV.device
    result_RV = logits_RV.to(torch.float32, copy=True)
    flat = result_RV.view(-1)

    def send(array: NDArray[np.generic]) -> Tensor:
        return upload(array, device)

    penalties = _Gathered()
    additions = _Gathered()
    for row in touched:
        policy, base = rows[row].policy, row * vocabulary
        if policy.repetition_penalty != 1.0:
            tokens = np.unique(rows[row].history())
            factor = max(policy.repetition_penalty, 1 / _LARGEST)
            penalties.add(base + tokens, np.full(len(tokens), factor))
        if policy.presence_penalty or policy.frequency_penalty:
            tokens, counts = np.unique(rows[row].history()[policy.prompt_tokens :], return_counts=True)
            additions.add(base + tokens, -policy.presence_penalty - policy.frequency_penalty * counts)
        if policy.logit_bias:
            biased = np.asarray([token for token, _ in policy.logit_bias], dtype=np.int64)
            additions.add(base + biased, np.asarray([added for _, added in policy.logit_bias], dtype=np.float64))
    if len(penalties):
        index_E, factor_E = (send(array) for array in penalties.arrays())
        values_E = flat[index_E]
        flat[index_E] = torch.where(values_E > 0, values_E / factor_E, values_E * factor_E)
    if len(additions):
        index_E, added_E = (send(array) for array in additions.arrays())
        flat.index_add_(0, index_E, added_E)
    forbidding = [row for row in touched if rows[row].policy.allowed_tokens is not None or _forbidden(rows[row])]
    if not forbidding:
        return result_RV
    forbidden = []
    for row in forbidding:
        policy, base = rows[row].policy, row * vocabulary
        if policy.allowed_tokens is not None:
            allowed_E = send(np.asarray(policy.allowed_tokens, dtype=np.int64))
            kept_E = result_RV[row, allowed_E]
            result_RV[row] = float("-inf")
            result_RV[row, allowed_E] = kept_E
        forbidden.append(base + np.asarray(_forbidden(rows[row]), dtype=np.int64))
    flat[send(np.concatenate(forbidden))] = float("-inf")
    # Only these rows can have nothing left, and looking at a row takes as long as a copy of it.
    index = send(np.asarray(forbidding, dtype=np.int64))
    left_FV = result_RV.index_select(0, index)
    nothing_left_F1 = (left_FV == float("-inf")).all(dim=-1, keepdim=True)
    before_FV = logits_RV.index_select(0, index).to(torch.float32)
    return result_RV.index_copy_(0, index, torch.where(nothing_left_F1, before_FV, left_FV))


class _Gathered:
    """Edits of many rows: flat indices into [R x V], and a number for each."""

    def __init__(self) -> None:
        self._indices: list[Int64Array] = []
        self._values: list[NDArray[np.float32]] = []

    def add(self, indices: Int64Array, values: NDArray[np.floating[Any]]) -> None:
        self._indices.append(indices)
        # An infinity would make a NaN of the row's probabilities; numbers this large decide alone as well.
        self._values.append(np.clip(values, -_LARGEST, _LARGEST).astype(np.float32))

    def arrays(self) -> tuple[Int64Array, NDArray[np.float32]]:
        return np.concatenate(self._indices), np.concatenate(self._values)

    def __len__(self) -> int:
        return len(self._indices)


def _forbidden(row: SampledRow) -> tuple[int, ...]:
    policy = row.policy
    too_early = row.position - policy.prompt_tokens < policy.min_new_tokens
    return policy.banned_tokens + (policy.stop_token_ids if too_early else ())


def _edits(row: SampledRow) -> bool:
    policy = row.policy
    return bool(
        policy.repetition_penalty != 1.0
        or policy.presence_penalty
        or policy.frequency_penalty
        or policy.logit_bias
        or policy.allowed_tokens is not None
        or _forbidden(row)
    )
