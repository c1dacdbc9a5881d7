"""The cell table against a dictionary, and the references that a prefix cache takes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from microtome.planner.cells import CellPlan, CellTable
from microtome.planner.errors import AtCapacity, BadInput, WrongState
from microtome.planner.types import Cell, SequenceId

CELLS, SEQUENCES = 14, 5
IDS = st.integers(0, SEQUENCES - 1)


class AgainstADictionary(RuleBasedStateMachine):
    """The model finds free cells by looking at everybody; it counts nothing and remembers nothing but histories."""

    def __init__(self) -> None:
        super().__init__()
        self.table = CellTable(CELLS, SEQUENCES)
        self.histories: dict[int, list[int]] = {}
        self.committed: dict[int, int] = {}
        self.held: set[int] = set()
        self.plans: list[tuple[CellPlan, list[tuple[int, int]]]] = []  # with each one's sequences and tokens, in order

    def free(self) -> list[int]:
        used = {cell for history in self.histories.values() for cell in history} | self.held
        return [cell for cell in range(CELLS) if cell not in used]

    def in_flight(self, sequence: int) -> bool:
        return any(sequence == one for _, grown in self.plans for one, _ in grown)

    @rule(source=IDS, upto=st.integers(0, 8), held_only=st.booleans())
    def open(self, source: int, upto: int, held_only: bool) -> None:
        """Empty, or with cells of somebody's committed prefix, or with what only the cache still has."""
        shared = self.histories.get(source, [])[: min(upto, self.committed.get(source, 0))]
        if held_only:
            shared = sorted(self.held)[:upto]
        ids = [n for n in range(SEQUENCES) if n not in self.histories]
        if not ids:
            with pytest.raises(AtCapacity):
                self.table.open([Cell(cell) for cell in shared])
            return
        assert self.table.open([Cell(cell) for cell in shared]) == ids[0]
        self.histories[ids[0]] = list(shared)
        self.committed[ids[0]] = len(shared)

    @rule(source=IDS, upto=st.integers(0, 8))
    def clone(self, source: int, upto: int) -> None:
        ids = [n for n in range(SEQUENCES) if n not in self.histories]
        if not self.histories.get(source) or upto > self.committed[source]:
            with pytest.raises(BadInput):
                self.table.clone(SequenceId(source), upto)
        elif not ids:
            with pytest.raises(AtCapacity):
                self.table.clone(SequenceId(source), upto)
        else:
            assert self.table.clone(SequenceId(source), upto) == ids[0]
            self.histories[ids[0]] = self.histories[source][:upto]
            self.committed[ids[0]] = upto

    @rule(sequence=IDS, position=st.integers(0, 10))
    def rewind(self, sequence: int, position: int) -> None:
        if sequence not in self.histories:
            with pytest.raises(BadInput):
                self.table.rewind(SequenceId(sequence), position)
        elif self.in_flight(sequence):
            with pytest.raises(WrongState):
                self.table.rewind(SequenceId(sequence), position)
        elif position > len(self.histories[sequence]):
            with pytest.raises(BadInput):
                self.table.rewind(SequenceId(sequence), position)
        else:
            self.table.rewind(SequenceId(sequence), position)
            del self.histories[sequence][position:]
            self.committed[sequence] = position

    @rule(sequence=IDS)
    def remove(self, sequence: int) -> None:
        if sequence not in self.histories:
            with pytest.raises(BadInput):
                self.table.remove(SequenceId(sequence))
        elif self.in_flight(sequence):
            with pytest.raises(WrongState):
                self.table.remove(SequenceId(sequence))
        else:
            self.table.remove(SequenceId(sequence))
            del self.histories[sequence], self.committed[sequence]

    @rule(wanted=st.lists(st.tuples(IDS, st.integers(1, 4)), min_size=1, max_size=4))
    def plan(self, wanted: list[tuple[int, int]]) -> None:
        lengths = {sequence: len(history) for sequence, history in self.histories.items()}
        inputs: list[tuple[SequenceId, int, int]] = []
        for sequence, width in wanted:
            inputs.append((SequenceId(sequence), lengths.get(sequence, 0), width))
            if sequence in lengths:
                lengths[sequence] += width
        free, needed = self.free(), sum(width for _, width in wanted)
        if any(sequence not in self.histories for sequence, _ in wanted):
            with pytest.raises(BadInput):
                self.table.plan(inputs)
        elif needed > len(free):
            with pytest.raises(AtCapacity):
                self.table.plan(inputs)
        else:
            plan = self.table.plan(inputs)
            assert plan.cells == free[:needed]
            self.plans.append((plan, wanted))
            for sequence, width in wanted:
                self.histories[sequence] += free[:width]
                free = free[width:]

    @rule()
    def begin(self) -> None:
        plan = self.table.begin()
        assert plan.cells == []
        self.plans.append((plan, []))

    @precondition(lambda self: self.plans)
    @rule(sequence=IDS, width=st.integers(1, 4), newest=st.booleans())
    def grow(self, sequence: int, width: int, newest: bool) -> None:
        plan, grown = self.plans[-1 if newest else 0]
        free, start = self.free(), len(self.histories.get(sequence, ()))
        if plan is not self.plans[-1][0]:
            with pytest.raises(WrongState):
                self.table.grow(plan, SequenceId(sequence), start, width)
        elif sequence not in self.histories:
            with pytest.raises(BadInput):
                self.table.grow(plan, SequenceId(sequence), start, width)
        elif width > len(free):
            with pytest.raises(AtCapacity):
                self.table.grow(plan, SequenceId(sequence), start, width)
        else:
            before = list(plan.cells)
            assert self.table.grow(plan, SequenceId(sequence), start, width) == free[:width]
            assert plan.cells == before + free[:width]
            self.histories[sequence] += free[:width]
            grown.append((sequence, width))

    @precondition(lambda self: self.plans)
    @rule(sequence=IDS, source=IDS, start=st.integers(0, 6), count=st.integers(1, 6), newest=st.booleans())
    def share(self, sequence: int, source: int, start: int, count: int, newest: bool) -> None:
        """What somebody else has planned, in this plan or in one before it, or committed."""
        plan, grown = self.plans[-1 if newest else 0]
        cells = [Cell(cell) for cell in self.histories.get(source, [])[start : start + count]]
        if plan is not self.plans[-1][0]:
            with pytest.raises(WrongState):
                self.table.share(plan, SequenceId(sequence), cells)
        elif sequence not in self.histories:
            with pytest.raises(BadInput):
                self.table.share(plan, SequenceId(sequence), cells)
        elif sequence != source and cells:
            self.table.share(plan, SequenceId(sequence), cells)
            self.histories[sequence] += cells
            grown.append((sequence, len(cells)))

    @rule(sequence=IDS, source=IDS, upto=st.integers(1, 6))
    def extend(self, sequence: int, source: int, upto: int) -> None:
        cells = self.histories.get(source, [])[: min(upto, self.committed.get(source, 0))]
        if sequence not in self.histories:
            with pytest.raises(BadInput):
                self.table.extend(SequenceId(sequence), [Cell(cell) for cell in cells])
        elif self.in_flight(sequence):
            with pytest.raises(WrongState):
                self.table.extend(SequenceId(sequence), [Cell(cell) for cell in cells])
        else:
            self.table.extend(SequenceId(sequence), [Cell(cell) for cell in cells])
            self.histories[sequence] += cells
            self.committed[sequence] += len(cells)

    @precondition(lambda self: self.plans)
    @rule()
    def commit(self) -> None:
        plan, grown = self.plans.pop(0)
        self.table.commit(plan)
        for sequence, width in grown:
            self.committed[sequence] += width

    @precondition(lambda self: self.plans)
    @rule()
    def abort(self) -> None:
        plan, grown = self.plans.pop()
        self.table.abort(plan)
        for sequence, width in reversed(grown):
            del self.histories[sequence][-width:]

    @rule(sequence=IDS, start=st.integers(0, 6), count=st.integers(0, 6))
    def hold(self, sequence: int, start: int, count: int) -> None:
        own = self.histories.get(sequence, [])[: self.committed.get(sequence, 0)]
        cells = [cell for cell in own[start : start + count] if cell not in self.held]
        self.table.hold([Cell(cell) for cell in cells])
        self.held.update(cells)

    @rule(cells=st.sets(st.integers(0, CELLS - 1)))
    def release(self, cells: set[int]) -> None:
        cells &= self.held
        self.table.release([Cell(cell) for cell in cells])
        self.held -= cells

    @rule()
    def move_to_a_new_table(self) -> None:
        """As after a restart of the driver: what the worker holds, committed, and no cache."""
        if self.plans or any(len(set(history)) < len(history) for history in self.histories.values()):
            return  # a worker's sequence holds no cell twice
        self.table = CellTable(CELLS, SEQUENCES)
        self.table.restore({SequenceId(s): [Cell(c) for c in h] for s, h in self.histories.items()})
        self.held.clear()

    @invariant()
    def everything_agrees(self) -> None:
        table = self.table
        free = self.free()
        assert (table.free_cells, table.used_cells) == (len(free), CELLS - len(free))
        assert table.live_sequences == len(self.histories)
        assert table.outstanding_plans == len(self.plans)
        owners = [sum(history.count(cell) for history in self.histories.values()) for cell in range(CELLS)]
        assert table.idle_cells == sum(not owners[cell] for cell in self.held)
        for cell in range(CELLS):
            assert table.references(Cell(cell)) == owners[cell] + (cell in self.held)
            assert table.is_held(Cell(cell)) == (cell in self.held)
        for n in range(SEQUENCES):
            sequence = SequenceId(n)
            assert table.is_live(sequence) == (n in self.histories)
            assert table.length(sequence) == len(self.histories.get(n, ()))
            assert table.committed(sequence) == self.committed.get(n, 0)
            if n in self.histories:
                assert list(table.cells(sequence)) == self.histories[n]
                assert list(table.cells(sequence, 1, 3)) == self.histories[n][1:3]


AgainstADictionary.TestCase.settings = settings(deadline=None, max_examples=120, stateful_step_count=40)
test_the_table_agrees_with_a_dictionary = AgainstADictionary.TestCase


def test_what_is_shared_of_an_aborted_plan_is_no_history_and_its_cells_are_free() -> None:
    table = CellTable(usable_cells=8, max_sequences=2)
    writer, reader = table.open(), table.open()
    first = table.plan([(writer, 0, 3)])
    second = table.begin()
    table.share(second, reader, first.cells)
    table.grow(second, reader, 3, 2)
    assert (table.length(reader), table.committed(reader), table.used_cells) == (5, 0, 5)
    table.abort(second)
    table.abort(first)
    assert (table.length(reader), table.length(writer), table.used_cells) == (0, 0, 0)


def test_what_is_shared_outlives_its_writer_once_both_plans_are_committed() -> None:
    table = CellTable(usable_cells=8, max_sequences=2)
    writer, reader = table.open(), table.open()
    plan = table.begin()
    cells = table.grow(plan, writer, 0, 3)
    table.share(plan, reader, cells)
    with pytest.raises(WrongState):
        table.remove(writer)
    table.commit(plan)
    table.remove(writer)
    assert (table.committed(reader), table.used_cells) == (3, 3)


def test_only_the_newest_plan_is_added_to() -> None:
    table = CellTable(usable_cells=8, max_sequences=2)
    sequence = table.open()
    older = table.plan([(sequence, 0, 2)])
    table.begin()
    with pytest.raises(WrongState, match="cannot be added to: the newest outstanding plan comes first"):
        table.grow(older, sequence, 2, 1)


@pytest.fixture
def table() -> CellTable:
    """One sequence of six committed tokens, cells 0 to 5."""
    table = CellTable(usable_cells=8, max_sequences=4)
    table.commit(table.plan([(table.open(), 0, 6)]))
    return table


def cells(*numbers: int) -> list[Cell]:
    return [Cell(number) for number in numbers]


def test_a_held_cell_stays_when_its_sequence_goes_and_is_idle_then(table: CellTable) -> None:
    table.hold(cells(0, 1, 2))
    assert table.idle_cells == 0
    table.remove(SequenceId(0))
    assert (table.used_cells, table.idle_cells) == (3, 3)
    assert table.open(cells(0, 1)) == 0
    assert table.idle_cells == 1
    table.release(cells(2, 1))
    assert (table.used_cells, table.idle_cells) == (2, 0)


@pytest.mark.parametrize("wrong", [cells(5, 7), cells(1, 1), cells(-1), cells(2)])
def test_only_a_cell_in_use_can_be_held_and_once(table: CellTable, wrong: list[Cell]) -> None:
    table.hold(cells(2))
    with pytest.raises(BadInput):
        table.hold(wrong)
    assert [table.references(Cell(cell)) for cell in range(8)] == [1, 1, 2, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("wrong", [cells(2, 3), cells(2, 2), cells(7)])
def test_only_a_held_cell_can_be_released_and_once(table: CellTable, wrong: list[Cell]) -> None:
    table.hold(cells(2))
    with pytest.raises(BadInput):
        table.release(wrong)
    assert table.is_held(Cell(2))


@pytest.mark.parametrize("wrong", [cells(6), cells(0, 99), cells(-1)])
def test_a_free_cell_cannot_be_shared(table: CellTable, wrong: list[Cell]) -> None:
    with pytest.raises(BadInput, match=f"cell {wrong[-1]} is free"):
        table.open(wrong)
    assert table.live_sequences == 1


def test_a_used_table_takes_over_nothing(table: CellTable) -> None:
    with pytest.raises(WrongState, match="unused"):
        table.restore({SequenceId(1): cells(7)})


@pytest.mark.parametrize(
    ("sequence", "own", "message"),
    [
        (4, cells(0), r"sequence 4 is outside \[0, 4\)"),
        (-1, cells(0), r"sequence -1 is outside"),
        (0, cells(8), r"outside \[0, 8\)"),
        (0, cells(-1), r"outside \[0, 8\)"),
        (0, cells(3, 3), "holds a cell twice"),
    ],
)
def test_a_takeover_that_does_not_fit_changes_nothing(sequence: int, own: list[Cell], message: str) -> None:
    table = CellTable(usable_cells=8, max_sequences=4)
    with pytest.raises(BadInput, match=message):
        table.restore({SequenceId(1): cells(5), SequenceId(sequence): own})
    assert (table.used_cells, table.live_sequences) == (0, 0)


def test_a_table_taken_over_goes_on_with_the_lowest_free_cells_and_ids() -> None:
    table = CellTable(usable_cells=8, max_sequences=4)
    table.restore({SequenceId(2): cells(4, 1), SequenceId(0): cells(4)})
    assert [table.open(), table.open()] == [1, 3]
    assert table.plan([(SequenceId(1), 0, 6)]).cells == [0, 2, 3, 5, 6, 7]
