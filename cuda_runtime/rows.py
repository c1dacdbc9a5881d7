"""Which cells a sequence's positions lie in: one row of cells per sequence, on the host and on the device.

The device table is int32 `[sequences + 1, length]`; the last row belongs to padding and its entry 0 is the scratch
cell. The host's copy is the truth: changes are made there, and `upload` brings what changed to the device in one copy.
On a CPU both are one memory. Entries beyond a sequence's length hold whatever they held.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microtome.cuda_runtime.upload import upload

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


class RowTable:
    def __init__(self, sequences: int, length: int, scratch_cell: int, device: torch.device) -> None:
        self.padding_row = sequences
        self._length = length
        self._host: Int32Array = np.zeros((sequences + 1, length), dtype=np.int32)
        self._host[self.padding_row, 0] = scratch_cell
        self._shared = device.type == "cpu"
        self.device: Tensor = torch.from_numpy(self._host) if self._shared else torch.from_numpy(self._host).to(device)
        self._changed: list[Int64Array] = []  # flat indices, since the last upload

    def write(self, rows: Int64Array, positions: Int64Array, cells: Int64Array) -> None:
        """Entry [rows[i], positions[i]] becomes cells[i]."""
        self._host[rows, positions] = cells
        self._note(rows * self._length + positions)

    def write_run(self, row: int, start: int, cells: Int64Array) -> None:
        """The row's entries from `start` on become `cells`."""
        self._host[row, start : start + len(cells)] = cells
        self._note(row * self._length + start + np.arange(len(cells), dtype=np.int64))

    def copy_head(self, row: int, source: int, upto: int) -> None:
        """The row's first `upto` entries become those of row `source`."""
        self.write_run(row, 0, self._host[source, :upto].astype(np.int64))

    def cells(self, row: int, upto: int) -> Int32Array:
        return self._host[row, :upto]

    def upload(self) -> None:
        """Make the device's table equal to the host's: at most one copy and one scatter."""
        if not self._changed:
            return
        flat = np.concatenate(self._changed)
        self._changed.clear()
        # Values are read here, not when noted: an entry written twice carries its last value in both places.
        columns = upload(np.stack((flat, self._host.reshape(-1)[flat].astype(np.int64))), self.device.device)
        self.device.view(-1).index_copy_(0, columns[0], columns[1].to(torch.int32))

    def _note(self, flat: Int64Array) -> None:
        if not self._shared:
            self._changed.append(flat)
