"""Which logits rows of a step say how likely the prompt's own tokens are, and what they say.

A row belongs to one token of the step, and is about the one behind it. A forward's rows are looked at before the next
forward runs, so that no more of them are held than one forward gives. Nothing waits for the device before `read`.

R logits rows of a step, in packed order, V vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microtome.cuda_runtime.log_probabilities import logprob_table, read_table
from microtome.cuda_runtime.upload import upload
from microtome.planner.types import TokenLogprobs

Int64Array = NDArray[np.int64]


class PromptRows:
    def __init__(
        self,
        *,
        widths: Int64Array,
        asks: NDArray[np.bool_],
        wants_output: NDArray[np.bool_],
        counts: Int64Array,
        tokens: Int64Array,
        next_tokens: Int64Array,
    ) -> None:
        """Of a step's inputs; `counts`: likeliest tokens to report per input; `tokens`: of the step, packed order.

        `asks`: inputs whose tokens are asked about; `next_tokens`: of those that want no output, the token behind.
        """
        last = np.cumsum(widths) - 1  # packed index of each input's last token
        of_prompt = np.repeat(asks, widths)
        of_prompt[last[wants_output]] = False  # its row is for the token that is sampled
        selected = of_prompt.copy()
        selected[last[wants_output]] = True
        following = np.append(tokens[1:], 0)
        following[last[asks & ~wants_output]] = next_tokens
        self.selected = np.flatnonzero(selected)  # packed index of each row's token
        self._of_prompt = of_prompt[self.selected]
        self._following = following[self.selected]
        self._counts = np.repeat(counts, widths)[of_prompt].tolist()
        self._count = max(self._counts, default=0)
        self._at = 0
        self._tables: list[Tensor] = []

    def take(self, logits_RV: Tensor) -> Tensor:
        """The next rows: look at those about given tokens, and hand back the others."""
        begin, self._at = self._at, self._at + len(logits_RV)
        of_prompt = self._of_prompt[begin : self._at]
        if not of_prompt.any():
            return logits_RV
        index = upload(np.flatnonzero(of_prompt), logits_RV.device)
        following = upload(self._following[begin : self._at][of_prompt], logits_RV.device)
        about = logits_RV if of_prompt.all() else logits_RV.index_select(0, index)
        self._tables.append(logprob_table(about, following, self._count))
        return logits_RV[:0] if of_prompt.all() else logits_RV[upload(np.flatnonzero(~of_prompt), logits_RV.device)]

    def read(self) -> tuple[TokenLogprobs, ...]:
        """Of every given token asked about, in packed order. Raises `ArithmeticError` where logits held a NaN."""
        if not self._tables:
            return ()
        table = torch.cat(self._tables)
        if bool(table[:, 0].isnan().any()):
            raise ArithmeticError("a forward's logits hold a NaN")
        return tuple(read_table(table.tolist(), self._counts))
