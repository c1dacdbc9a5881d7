"""Runs a model over cells by hand, forward by forward, and hands back the logits of every token.

The pool starts full of NaN but for the scratch cell, cells are handed out in a random order, and every forward ends in
padding: whatever reads what it must not, returns NaN.
"""

from collections.abc import Sequence
from random import Random

import numpy as np
import torch
from torch import Tensor

from microtome.cuda_runtime.kv_pool import allocate_pool
from microtome.cuda_runtime.model import CellModel, LayerGeometry
from microtome.cuda_runtime.rows import RowTable

PADDING = 3  # tokens behind each forward's own
CPU = torch.device("cpu")


class CellRunner:
    """`cells` cells for up to `sequences` sequences of up to `length` tokens, in float32 on a CPU."""

    def __init__(
        self,
        model: CellModel,
        layers: Sequence[LayerGeometry],
        *,
        cells: int = 512,
        sequences: int = 8,
        length: int = 64,
    ) -> None:
        self.model = model
        self.pool = allocate_pool(layers, cells, device=CPU, dtype=torch.float32)
        for layer in (*self.pool.k, *self.pool.v):
            layer[:cells] = float("nan")
        self.rows = RowTable(sequences, length, self.pool.scratch_cell, CPU)
        self._lengths = [0] * sequences
        self._free = list(range(cells))
        Random(0).shuffle(self._free)

    def clone(self, source: int, child: int, upto: int) -> None:
        """Row `child` becomes the first `upto` tokens of row `source`, by reference."""
        self.rows.copy_head(child, source, upto)
        self._lengths[child] = upto

    def truncate(self, sequence: int, length: int) -> None:
        self._lengths[sequence] = length

    def columns(self, *work: tuple[int, Sequence[int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens and positions [1, T + padding], rows [T + padding], selector [T]; the inputs' cells are given out."""
        tokens, positions, rows = [], [], []
        for sequence, given in work:
            start = self._lengths[sequence]
            tokens += given
            positions += range(start, start + len(given))
            rows += [sequence] * len(given)
            self._lengths[sequence] += len(given)
        cells = np.array([self._free.pop() for _ in tokens], dtype=np.int64)
        self.rows.write(np.array(rows, dtype=np.int64), np.array(positions, dtype=np.int64), cells)
        self.rows.upload()
        padding = [0] * PADDING
        return (
            torch.tensor([tokens + padding]),
            torch.tensor([positions + padding]),
            torch.tensor(rows + [self.rows.padding_row] * PADDING),
            torch.arange(len(tokens)),
        )

    @torch.inference_mode()
    def forward(self, *work: tuple[int, Sequence[int]]) -> list[Tensor]:
        """One forward over the inputs (sequence, tokens); per input the logits [its tokens, V]."""
        logits_TV = self.model(*self.columns(*work), self.rows.device, self.pool.k, self.pool.v)
        return list(logits_TV.split([len(given) for _, given in work]))
