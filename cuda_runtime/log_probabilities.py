"""How likely tokens are, and which are likeliest, from a forward's logits; and those of a sequence, kept for a while.

Natural logarithms of the model's own probabilities, normalised in float64 and rounded to float32, so that no wire, file
or language on their way changes one. The likeliest are in order of their logits, ties by lower id. Whole rows are
widened a few at a time: what is computed with takes little room, however many rows there are.

R rows, V vocabulary, M likeliest tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from microtome.cuda_runtime.drawing import cpu_native
from microtome.planner.packed_logprobs import PackedLogprobs
from microtome.planner.types import TokenLogprobs

_ROWS_AT_A_TIME = 16
KEPT_NUMBERS = 1 << 18  # of one sequence at most: 1 MiB, which is 6000 tokens with 20 likeliest each


def order_keys(logits_RV: Tensor) -> Tensor:
    """Int64 keys, no two alike in a row: larger for a larger float32 logit, then for a lower id."""
    bits = (logits_RV + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: there is one zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    identifiers = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    return (ordered << 32) + (0xFFFFFFFF - identifiers)


def logprob_table(logits_RV: Tensor, tokens_R: Tensor, count: int) -> Tensor:
    """Per row the token's log-probability, the M = min(count, V) likeliest tokens, and theirs: float64 [R, 1 + 2M].

    A token id is exact in float64, so all travels in one array. Logits with a NaN give NaNs.
    """
    count = min(count, logits_RV.shape[-1])
    if cpu_native.serves(logits_RV):
        return cpu_native.likelihoods(logits_RV, tokens_R, count)
    return stock_logprob_table(logits_RV, tokens_R, count)


def stock_logprob_table(logits_RV: Tensor, tokens_R: Tensor, count: int) -> Tensor:
    """The same with torch's own operators, on any device."""
    parts = []
    for begin in range(0, len(logits_RV), _ROWS_AT_A_TIME):
        some_RV = logits_RV[begin : begin + _ROWS_AT_A_TIME].to(torch.float32)
        total_R1 = torch.logsumexp(some_RV.to(torch.float64), dim=-1, keepdim=True)
        own_R1 = tokens_R[begin : begin + _ROWS_AT_A_TIME, None]
        top_RM = torch.topk(order_keys(some_RV), count, dim=-1).indices if count else own_R1[:, :0]
        values = some_RV.gather(-1, torch.cat((own_R1, top_RM), dim=-1)).to(torch.float64) - total_R1
        values = values.to(torch.float32).to(torch.float64)
        parts.append(torch.cat((values[:, :1], top_RM.to(torch.float64), values[:, 1:]), dim=-1))
    return torch.cat(parts)


def read_table(lines: Sequence[Sequence[float]], counts: Sequence[int]) -> list[TokenLogprobs]:
    """A table brought to the host, line by line with the first `counts[i]` of its likeliest tokens."""
    read = []
    for line, count in zip(lines, counts, strict=True):
        top = len(line) // 2
        count = min(count, top)
        likeliest = zip(map(int, line[1 : 1 + count]), line[1 + top : 1 + top + count], strict=True)
        read.append(TokenLogprobs(line[0], tuple(likeliest)))
    return read


class KeptLogprobs:
    """What was reported of one sequence's newest tokens, position by position without a gap.

    Beyond `KEPT_NUMBERS` the oldest are forgotten.
    """

    def __init__(self) -> None:
        self.start = 0  # position of the first
        self._packed = PackedLogprobs()

    @property
    def end(self) -> int:
        return self.start + len(self._packed)

    def put(self, position: int, logprobs: TokenLogprobs | None) -> None:
        """Of the token at `position`; what was kept from there on is forgotten, and all of it where a gap would be."""
        if not self.start <= position <= self.end:
            self._packed.cut(0)
            self.start = position
        self.cut(position)
        self._packed.extend((logprobs,))
        if self._packed.numbers > KEPT_NUMBERS:
            half = len(self._packed) // 2
            self._packed.forget(half)
            self.start += half

    def cut(self, position: int) -> None:
        """Forget what is kept from `position` on."""
        self._packed.cut(max(0, position - self.start))

    def upto(self, end: int) -> tuple[TokenLogprobs | None, ...]:
        """Of the tokens from `start` to below `end`."""
        return self._packed.entries(0, max(0, end - self.start))
