"""What the executor knows of each sequence, on the host: length, how it is sampled, its last sampled token, its note.

`check` says what a plan's operations would leave behind, changing nothing; `apply` then does them. Cells are in the
row table, which `apply` keeps in step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np

from microtome.cuda_runtime.log_probabilities import KeptLogprobs
from microtome.cuda_runtime.rows import RowTable
from microtome.planner.errors import StalePlan
from microtome.planner.types import (
    Annotate,
    Cell,
    CloneSequence,
    DropSequence,
    ExtendSequence,
    OpenSequence,
    SamplingParams,
    SequenceId,
    SequenceOp,
    SequenceSnapshot,
    SetSampling,
    TruncateSequence,
)


@dataclass(slots=True)
class SequenceState:
    length: int = 0
    sampling: SamplingParams | None = None
    sampled_token: int = 0
    sampled_position: int | None = None  # where `sampled_token` belongs; None: nothing sampled that is still wanted
    note: bytes = b""
    logprobs: KeptLogprobs = field(default_factory=KeptLogprobs)  # what was reported of its tokens


@dataclass(slots=True)
class Prospect:
    """What a sequence would be after operations that were only checked."""

    length: int
    policy: SamplingParams | None
    sampled_position: int | None

    @property
    def sampled(self) -> bool:
        return self.policy is not None


class Sequences:
    def __init__(self, rows: RowTable, *, max_sequences: int, max_length: int, usable_cells: int) -> None:
        self._rows = rows
        self._max_sequences, self._max_length, self._usable_cells = max_sequences, max_length, usable_cells
        self._live: dict[int, SequenceState] = {}

    def __getitem__(self, sequence: int) -> SequenceState:
        return self._live[sequence]

    def prospect(self, sequence: int, changed: dict[int, Prospect | None]) -> Prospect:
        """The sequence as it stands, or as `changed` says it would. Raises `StalePlan` where it would not be live."""
        if sequence in changed:
            if (prospect := changed[sequence]) is not None:
                return prospect
        elif (state := self._live.get(sequence)) is not None:
            return Prospect(state.length, state.sampling, state.sampled_position)
        raise StalePlan(f"sequence {sequence} is not live")

    def check(self, ops: Sequence[SequenceOp]) -> dict[int, Prospect | None]:
        """Every sequence the operations touch, as they would leave it; None: dropped. Raises `StalePlan`."""
        changed: dict[int, Prospect | None] = {}
        for op in ops:
            match op:
                case OpenSequence(sequence, cells):
                    self._check_vacant(sequence, changed)
                    self._check_history(sequence, 0, cells)
                    changed[sequence] = Prospect(len(cells), None, None)
                case ExtendSequence(sequence, cells):
                    now = self.prospect(sequence, changed)
                    self._check_history(sequence, now.length, cells)
                    changed[sequence] = Prospect(now.length + len(cells), now.policy, now.sampled_position)
                case CloneSequence(sequence, source, upto):
                    self._check_vacant(sequence, changed)
                    self._check_upto(source, upto, self.prospect(source, changed).length)
                    changed[sequence] = Prospect(upto, None, None)
                case TruncateSequence(sequence, length):
                    now = self.prospect(sequence, changed)
                    self._check_upto(sequence, length, now.length)
                    changed[sequence] = Prospect(length, now.policy, _still_wanted(now.sampled_position, length))
                case DropSequence(sequence):
                    self.prospect(sequence, changed)
                    changed[sequence] = None
                case SetSampling(sequence, sampling):
                    now = self.prospect(sequence, changed)
                    changed[sequence] = Prospect(now.length, sampling, now.sampled_position)
                case Annotate(sequence, _):
                    self.prospect(sequence, changed)
                case _:
                    assert_never(op)
        return changed

    def apply(self, ops: Sequence[SequenceOp]) -> None:
        """Do what `check` has passed."""
        for op in ops:
            match op:
                case OpenSequence(sequence, cells):
                    self._live[sequence] = SequenceState(length=len(cells))
                    self._rows.write_run(sequence, 0, np.asarray(cells, dtype=np.int64))
                case CloneSequence(sequence, source, upto):
                    self._live[sequence] = SequenceState(length=upto)
                    self._rows.copy_head(sequence, source, upto)
                case ExtendSequence(sequence, cells):
                    state = self._live[sequence]
                    self._rows.write_run(sequence, state.length, np.asarray(cells, dtype=np.int64))
                    state.length += len(cells)
                case TruncateSequence(sequence, length):
                    state = self._live[sequence]
                    state.length = length
                    state.sampled_position = _still_wanted(state.sampled_position, length)
                    state.logprobs.cut(length + (state.sampled_position == length))
                case DropSequence(sequence):
                    del self._live[sequence]
                case SetSampling(sequence, sampling):
                    self._live[sequence].sampling = sampling
                case Annotate(sequence, note):
                    self._live[sequence].note = note
                case _:
                    assert_never(op)

    def snapshot(self, cell_tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[SequenceSnapshot, ...]:
        """Every live sequence, by id; `cell_tokens` says which token each cell holds."""
        snapshots = []
        for sequence, state in sorted(self._live.items()):
            cells = self._rows.cells(sequence, state.length)
            sampled = state.sampled_position == state.length
            snapshots.append(
                SequenceSnapshot(
                    sequence=SequenceId(sequence),
                    cells=tuple(map(Cell, cells.tolist())),
                    tokens=tuple(cell_tokens[cells].tolist()),
                    last_sampled=state.sampled_token if sampled else None,
                    sampling=state.sampling,
                    note=state.note,
                    logprobs=state.logprobs.upto(state.length + sampled),
                    logprobs_from=state.logprobs.start,
                )
            )
        return tuple(snapshots)

    def _check_vacant(self, sequence: int, changed: dict[int, Prospect | None]) -> None:
        if not 0 <= sequence < self._max_sequences:
            raise StalePlan(f"sequence {sequence} is outside [0, {self._max_sequences})")
        live = changed[sequence] is not None if sequence in changed else sequence in self._live
        if live:
            raise StalePlan(f"sequence {sequence} is live already")

    def _check_history(self, sequence: int, start: int, cells: Sequence[Cell]) -> None:
        """Whether a sequence of `start` tokens may go on with `cells`."""
        if start + len(cells) > self._max_length:
            raise StalePlan(f"sequence {sequence} would hold {start + len(cells)} tokens, {self._max_length} at most")
        if cells and (min(cells) < 0 or max(cells) >= self._usable_cells):
            raise StalePlan(f"sequence {sequence} takes over a cell outside [0, {self._usable_cells})")

    @staticmethod
    def _check_upto(sequence: int, upto: int, length: int) -> None:
        if not 0 <= upto <= length:
            raise StalePlan(f"sequence {sequence} holds {length} tokens, not {upto}")


def _still_wanted(sampled_position: int | None, length: int) -> int | None:
    """A token sampled beyond the new end was drawn from a history that is gone."""
    return None if sampled_position is None or sampled_position > length else sampled_position
