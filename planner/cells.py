"""Which cell of one worker's pool holds which token: the truth, as integers.

Owns the cells and sequence ids of one worker in one incarnation. Cells are counted by reference: by each sequence
whose history holds them, and once by the prefix cache. A cell is free exactly when nobody refers to it, and it never
changes its token while somebody does, so sharing needs no copy. Free cells and free ids are handed out lowest first.
The worker's scratch cell is none of `usable_cells` and is never seen here.

A step is planned, then settled once: committed or aborted. Several plans may be outstanding: they commit oldest first
and abort newest first, and an abort leaves the table as if the step had never been planned. Sequences of an
outstanding plan can be read, and their committed part cloned; rewinding or removing them has to wait for the plan.
The newest plan can be added to: more tokens, or cells that somebody else's tokens lie in, planned ones too. Steps run
in the order of their plans, so such a cell is written before it is read, and it is history when its reader's plan is.

Every refusal comes before any change. Work and memory follow the tokens touched: neither the pool's size nor the number
of resident sequences matters, because cells never used are a number, not entries. One thread calls it.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from microtome.planner.errors import AtCapacity, BadConfig, BadInput, WrongState
from microtome.planner.types import Cell, SequenceId


class _History:
    """One sequence: its cells by position, and how many of them are committed."""

    __slots__ = ("cells", "committed", "in_flight")

    def __init__(self, cells: list[Cell]) -> None:
        self.cells = cells
        self.committed = len(cells)
        self.in_flight = 0  # inputs of outstanding plans


@dataclass(slots=True, eq=False)
class CellPlan:
    """One step's claim on cells. `cells`: one per token, packed order. The rest is the table's own."""

    cells: list[Cell]
    _grown: list[tuple[_History, int]]  # sequence, tokens; in packed order
    _shared: list[tuple[_History, Sequence[Cell]]] = field(default_factory=list)  # sequence, cells others write


class CellTable:
    def __init__(self, usable_cells: int, max_sequences: int) -> None:
        """Raises `BadConfig` unless both are 1 at least."""
        if usable_cells < 1:
            raise BadConfig(f"usable_cells {usable_cells} is below 1")
        if max_sequences < 1:
            raise BadConfig(f"max_sequences {max_sequences} is below 1")
        self.usable_cells = usable_cells
        self.max_sequences = max_sequences
        self.clear()

    def clear(self) -> None:
        """Forget every sequence, cell and plan. A prefix cache over this table has to be thrown away with it."""
        # A cell at or above len(_references) was never used. Below it: how many refer to the cell.
        self._references: list[int] = []
        self._freed: list[Cell] = []  # heap of the cells below that are free again
        self._held: set[Cell] = set()  # the prefix cache refers to these
        self._idle = 0  # of those, how many nobody else refers to
        self._histories: dict[SequenceId, _History] = {}
        self._next_sequence = 0  # ids from here on were never used
        self._freed_sequences: list[SequenceId] = []  # heap
        self._outstanding: deque[CellPlan] = deque()

    # --- reading ---

    @property
    def free_cells(self) -> int:
        return self.usable_cells - len(self._references) + len(self._freed)

    @property
    def used_cells(self) -> int:
        return len(self._references) - len(self._freed)

    @property
    def idle_cells(self) -> int:
        """Cells that the prefix cache alone refers to."""
        return self._idle

    @property
    def live_sequences(self) -> int:
        return len(self._histories)

    @property
    def outstanding_plans(self) -> int:
        return len(self._outstanding)

    def is_live(self, sequence: SequenceId) -> bool:
        return sequence in self._histories

    def length(self, sequence: SequenceId) -> int:
        """Tokens planned or committed; 0 for a sequence that is not live."""
        history = self._histories.get(sequence)
        return len(history.cells) if history else 0

    def committed(self, sequence: SequenceId) -> int:
        """Tokens committed; 0 for a sequence that is not live."""
        history = self._histories.get(sequence)
        return history.committed if history else 0

    def cells(self, sequence: SequenceId, start: int = 0, end: int | None = None) -> Sequence[Cell]:
        """The cells of positions [start, end), planned ones included; `end` None: to the last."""
        return self._history(sequence).cells[start:end]

    def references(self, cell: Cell) -> int:
        """How many sequences and caches refer to a cell; 0: it is free."""
        return self._references[cell] if 0 <= cell < len(self._references) else 0

    def is_held(self, cell: Cell) -> bool:
        """Whether the prefix cache refers to a cell."""
        return cell in self._held

    # --- sequences ---

    def open(self, shared: Sequence[Cell] = ()) -> SequenceId:
        """Start a sequence, with `shared` as its committed history by reference.

        Raises `AtCapacity` if no sequence id is free, `BadInput` if a shared cell is free.
        """
        self._check_in_use(shared)
        sequence = self._new_sequence()
        self._refer(shared)
        self._histories[sequence] = _History(list(shared))
        return sequence

    def restore(self, histories: Mapping[SequenceId, Sequence[Cell]]) -> None:
        """Take over the sequences that a worker holds already, all of it committed; cells may be shared.

        Raises `WrongState` unless the table is unused, `BadInput` if an id or a cell is not one of the table's, or a
        sequence names a cell twice.
        """
        if self._references or self._histories or self._outstanding:
            raise WrongState("only an unused table can take over sequences")
        for sequence, cells in histories.items():
            if not 0 <= sequence < self.max_sequences:
                raise BadInput(f"sequence {sequence} is outside [0, {self.max_sequences})")
            if cells and not (min(cells) >= 0 and max(cells) < self.usable_cells):
                raise BadInput(f"sequence {sequence} holds a cell outside [0, {self.usable_cells})")
            if len(set(cells)) < len(cells):
                raise BadInput(f"sequence {sequence} holds a cell twice")
        top = max((max(cells) + 1 for cells in histories.values() if cells), default=0)
        self._references = [0] * top
        for sequence, cells in histories.items():
            self._histories[sequence] = _History(list(cells))
            for cell in cells:
                self._references[cell] += 1
        self._freed = [Cell(cell) for cell, references in enumerate(self._references) if not references]
        self._next_sequence = max(histories, default=-1) + 1
        self._freed_sequences = [SequenceId(s) for s in range(self._next_sequence) if s not in histories]

    def clone(self, source: SequenceId, upto: int) -> SequenceId:
        """Start a sequence that shares the committed positions [0, upto) of `source`.

        Neither gains the other's later cells.
        Raises `BadInput` if `source` is not live, holds no cell, or has committed less; `AtCapacity` if no id is free.
        """
        history = self._history(source)
        if not history.cells:
            raise BadInput(f"sequence {source} holds no cell to clone")
        if not 0 <= upto <= history.committed:
            raise BadInput(f"clone of [0, {upto}) of sequence {source}, which has committed {history.committed}")
        return self.open(history.cells[:upto])

    def extend(self, sequence: SequenceId, cells: Sequence[Cell]) -> None:
        """Lengthen a sequence's committed history by reference to cells in use, whose tokens are committed.

        Raises `BadInput` if it is not live or a cell is free; `WrongState` while a plan holds it. Nothing has changed
        then.
        """
        history = self._settled(sequence)
        self._check_in_use(cells)
        self._refer(cells)
        history.cells += cells
        history.committed += len(cells)

    def rewind(self, sequence: SequenceId, position: int) -> None:
        """Drop the sequence's claim on positions from `position` up; it stays live, even when empty.

        Raises `BadInput` if it is not live or `position` is not in [0, length]; `WrongState` while a plan holds it.
        """
        history = self._settled(sequence)
        if not 0 <= position <= len(history.cells):
            raise BadInput(f"rewind of sequence {sequence} to {position}, its length is {len(history.cells)}")
        dropped = history.cells[position:]
        del history.cells[position:]
        history.committed = position
        self._drop(dropped)

    def remove(self, sequence: SequenceId) -> None:
        """Drop all its claims and free its id.

        Raises `BadInput` if it is not live, `WrongState` while a plan holds it.
        """
        history = self._settled(sequence)
        del self._histories[sequence]
        heappush(self._freed_sequences, sequence)
        self._drop(history.cells)

    # --- steps ---

    def plan(self, inputs: Sequence[tuple[SequenceId, int, int]]) -> CellPlan:
        """Claim a cell for each token of `inputs`, in packed order. An input is (sequence, start, width).

        Raises `BadInput` if there is none, if a width is below 1, or if one does not start where its sequence ends,
        earlier inputs counted; `AtCapacity` if there are more tokens than free cells. Nothing has changed then.
        """
        if not inputs:
            raise BadInput("a step needs 1 input at least, this one has 0")
        histories = self._histories
        sequences, starts, widths = zip(*inputs, strict=True)
        try:
            grown = [histories[sequence] for sequence in sequences]
        except KeyError as missing:
            raise BadInput(f"sequence {missing.args[0]} is not live") from None
        # All at once where each sequence comes once, as in a step of decodes; one by one otherwise, and to name what
        # is wrong.
        alike = len(set(sequences)) == len(sequences) and min(widths) > 0
        if not alike or [len(history.cells) for history in grown] != list(starts):
            self._check_one_by_one(inputs)
        needed = sum(widths)
        if needed > self.free_cells:
            raise AtCapacity("cells", needed, self.free_cells)

        cells = self._claim(needed)
        if needed == len(inputs):
            for history, cell in zip(grown, cells, strict=True):
                history.cells.append(cell)
                history.in_flight += 1
        else:
            at = 0
            for history, width in zip(grown, widths, strict=True):
                history.cells += cells[at : at + width]
                history.in_flight += 1
                at += width
        plan = CellPlan(cells, list(zip(grown, widths, strict=True)))
        self._outstanding.append(plan)
        return plan

    def begin(self) -> CellPlan:
        """A plan without any token yet, to be added to."""
        plan = CellPlan([], [])
        self._outstanding.append(plan)
        return plan

    def grow(self, plan: CellPlan, sequence: SequenceId, start: int, width: int) -> list[Cell]:
        """Add an input to the newest plan; its cells.

        Raises as `plan` does, and `WrongState` unless the plan is the newest outstanding one. Nothing has changed then.
        """
        self._check_newest(plan)
        self._check_one_by_one([(sequence, start, width)])
        if width > self.free_cells:
            raise AtCapacity("cells", width, self.free_cells)
        history = self._history(sequence)
        cells = self._claim(width)
        history.cells += cells
        history.in_flight += 1
        plan.cells += cells
        plan._grown.append((history, width))
        return cells

    def share(self, plan: CellPlan, sequence: SequenceId, cells: Sequence[Cell]) -> None:
        """Lengthen a sequence by reference to cells in use; they are its history once the newest plan is committed.

        Raises `WrongState` unless the plan is the newest outstanding one, `BadInput` if the sequence is not live or a
        cell is free. Nothing has changed then.
        """
        self._check_newest(plan)
        history = self._history(sequence)
        self._check_in_use(cells)
        self._refer(cells)
        history.cells += cells
        history.in_flight += 1
        plan._shared.append((history, cells))

    def commit(self, plan: CellPlan) -> None:
        """Make the plan's tokens history. Raises `WrongState` unless it is the oldest outstanding plan."""
        if not self._outstanding or self._outstanding[0] is not plan:
            raise WrongState(self._out_of_turn(plan, "committed", "oldest"))
        self._outstanding.popleft()
        for history, width in plan._grown:
            history.committed += width
            history.in_flight -= 1
        for history, cells in plan._shared:
            history.committed += len(cells)
            history.in_flight -= 1

    def abort(self, plan: CellPlan) -> None:
        """Take the plan back as if it had never been. Raises `WrongState` unless it is the newest outstanding plan."""
        if not self._outstanding or self._outstanding[-1] is not plan:
            raise WrongState(self._out_of_turn(plan, "aborted", "newest"))
        self._outstanding.pop()
        for history, width in plan._grown:  # of one sequence, only how much all its parts are together matters
            del history.cells[-width:]
            history.in_flight -= 1
        for history, cells in plan._shared:
            del history.cells[len(history.cells) - len(cells) :]
            history.in_flight -= 1
            self._drop(cells)
        self._drop(plan.cells)

    # --- the prefix cache's references ---

    def hold(self, cells: Iterable[Cell]) -> None:
        """Refer to cells for the prefix cache, once each. Raises `BadInput` if one is free, or held already."""
        cells = list(cells)
        self._check_in_use(cells)
        if len(set(cells)) < len(cells) or not self._held.isdisjoint(cells):
            raise BadInput("a cell is held once at most")
        self._held.update(cells)
        for cell in cells:
            self._references[cell] += 1

    def release(self, cells: Iterable[Cell]) -> None:
        """Take `hold` back. Raises `BadInput` if a cell is not held."""
        cells = list(cells)
        if len(set(cells)) < len(cells) or not self._held.issuperset(cells):
            raise BadInput("only a held cell can be released, once")
        references = self._references
        self._idle -= sum(references[cell] == 1 for cell in cells)
        self._held.difference_update(cells)
        self._drop(cells)

    # --- inside ---

    def _check_one_by_one(self, inputs: Sequence[tuple[SequenceId, int, int]]) -> None:
        """Raise `BadInput` for the first input that does not start where its sequence ends, or is empty."""
        lengths: dict[SequenceId, int] = {}
        for sequence, start, width in inputs:
            length = lengths.get(sequence, self.length(sequence))
            if start != length:
                raise BadInput(f"an input of sequence {sequence} starts at {start}, its next position is {length}")
            if width < 1:
                raise BadInput(f"an input of sequence {sequence} has {width} tokens, it needs 1 at least")
            lengths[sequence] = length + width

    def _history(self, sequence: SequenceId) -> _History:
        history = self._histories.get(sequence)
        if history is None:
            raise BadInput(f"sequence {sequence} is not live")
        return history

    def _settled(self, sequence: SequenceId) -> _History:
        history = self._history(sequence)
        if history.in_flight:
            raise WrongState(f"sequence {sequence} is in {history.in_flight} inputs of plans that are not settled")
        return history

    def _check_newest(self, plan: CellPlan) -> None:
        if not self._outstanding or self._outstanding[-1] is not plan:
            raise WrongState(self._out_of_turn(plan, "added to", "newest"))

    def _out_of_turn(self, plan: CellPlan, verb: str, turn: str) -> str:
        if all(outstanding is not plan for outstanding in self._outstanding):
            return f"a plan of {len(plan.cells)} cells cannot be {verb}: it is settled already"
        return f"a plan of {len(plan.cells)} cells cannot be {verb}: the {turn} outstanding plan comes first"

    def _check_in_use(self, cells: Sequence[Cell]) -> None:
        references = self._references
        top = len(references)
        for cell in cells:
            if not (0 <= cell < top and references[cell]):
                raise BadInput(f"cell {cell} is free and cannot be shared")

    def _new_sequence(self) -> SequenceId:
        if self._freed_sequences:
            return heappop(self._freed_sequences)
        if self._next_sequence == self.max_sequences:
            raise AtCapacity("sequences", 1, 0)
        self._next_sequence += 1
        return SequenceId(self._next_sequence - 1)

    def _claim(self, count: int) -> list[Cell]:
        """The `count` lowest free cells, ascending. There are enough."""
        freed, references = self._freed, self._references
        reused = min(count, len(freed))
        cells = [heappop(freed) for _ in range(reused)]  # every freed cell is below every cell never used
        for cell in cells:
            references[cell] = 1
        first = len(references)
        cells += map(Cell, range(first, first + count - reused))
        references += [1] * (count - reused)
        return cells

    def _refer(self, cells: Sequence[Cell]) -> None:
        references, held = self._references, self._held
        for cell in cells:
            references[cell] += 1
            if references[cell] == 2 and cell in held:
                self._idle -= 1

    def _drop(self, cells: Sequence[Cell]) -> None:
        references, held, freed = self._references, self._held, self._freed
        for cell in cells:
            left = references[cell] = references[cell] - 1
            if not left:
                heappush(freed, cell)
            elif left == 1 and cell in held:
                self._idle += 1
