"""The cell table, rule by rule. Masks, layers and the read extent are no business of it; E1 is a reported limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtome.planner.cells import CellPlan, CellTable
from microtome.planner.errors import AtCapacity, BadConfig, BadInput, Refused, WrongState
from microtome.planner.types import Cell, SequenceId


@pytest.fixture
def table() -> CellTable:
    return CellTable(usable_cells=16, max_sequences=4)


def grow(table: CellTable, sequence: SequenceId, tokens: int) -> list[Cell]:
    """Plan and commit one input."""
    plan = table.plan([(sequence, table.length(sequence), tokens)])
    table.commit(plan)
    return plan.cells


def sequence_of(table: CellTable, tokens: int) -> SequenceId:
    sequence = table.open()
    grow(table, sequence, tokens)
    return sequence


def state(table: CellTable, sequences: int = 8) -> object:
    """Everything that can be seen from outside; what the next cells would be, too."""
    ids = [SequenceId(n) for n in range(sequences)]
    seen = [(s, table.length(s), table.committed(s), tuple(table.cells(s))) for s in ids if table.is_live(s)]
    references = [table.references(Cell(cell)) for cell in range(table.usable_cells)]
    return (seen, references, table.free_cells, table.used_cells, table.idle_cells, table.outstanding_plans)


# --- sequences and ownership ---


def test_E1_sequences_end_at_the_limit_the_table_was_given() -> None:
    table = CellTable(usable_cells=1, max_sequences=1000)
    assert [table.open() for _ in range(1000)] == list(range(1000))
    with pytest.raises(AtCapacity, match="needs 1 sequences, 0 available"):
        table.open()


@pytest.mark.parametrize(("cells", "sequences"), [(0, 1), (-1, 1), (1, 0), (1, -4)])
def test_E1_a_table_without_cells_or_sequences_is_refused(cells: int, sequences: int) -> None:
    with pytest.raises(BadConfig, match="below 1"):
        CellTable(cells, sequences)


def test_E2_open_gives_the_lowest_id_that_is_not_live_and_marks_it_live_while_empty(table: CellTable) -> None:
    opened = [table.open() for _ in range(4)]
    assert opened == [0, 1, 2, 3]
    table.remove(opened[2])
    table.remove(opened[1])
    assert table.is_live(opened[0])
    assert not table.is_live(opened[1])
    assert [table.open(), table.open()] == [1, 2]


def test_E3_a_cell_is_free_exactly_when_nobody_refers_to_it(table: CellTable) -> None:
    source = sequence_of(table, 3)
    twin = table.clone(source, 2)
    assert [table.references(Cell(cell)) for cell in range(4)] == [2, 2, 1, 0]
    assert table.free_cells == 16 - 3
    table.remove(source)
    assert [table.references(Cell(cell)) for cell in range(4)] == [1, 1, 0, 0]
    table.remove(twin)
    assert table.free_cells == 16
    assert table.references(Cell(-1)) == table.references(Cell(99)) == 0


def test_E4_the_length_of_an_empty_unknown_or_impossible_sequence_is_zero(table: CellTable) -> None:
    assert table.length(table.open()) == 0
    assert table.length(SequenceId(3)) == 0
    assert table.length(SequenceId(-1)) == table.length(SequenceId(999)) == 0
    assert table.length(sequence_of(table, 5)) == 5


def test_E5_a_clone_shares_the_prefix_claims_no_cell_and_grows_apart(table: CellTable) -> None:
    source = sequence_of(table, 5)
    twin = table.clone(source, 3)
    assert table.used_cells == 5
    assert table.cells(twin) == [0, 1, 2]
    assert table.committed(twin) == 3
    assert grow(table, twin, 1) == [5]
    assert grow(table, source, 1) == [6]
    assert table.cells(twin) == [0, 1, 2, 5]
    assert table.cells(source) == [0, 1, 2, 3, 4, 6]


def test_E5_a_clone_of_nothing_known_or_of_no_cells_is_refused_without_using_an_id(table: CellTable) -> None:
    empty = table.open()
    before = state(table)
    for source in (SequenceId(3), SequenceId(-1), SequenceId(99), empty):
        with pytest.raises(BadInput):
            table.clone(source, 0)
    assert state(table) == before
    assert table.open() == 1


def test_E5_a_clone_without_a_free_id_is_refused(table: CellTable) -> None:
    source = sequence_of(table, 1)
    for _ in range(3):
        table.open()
    before = state(table)
    with pytest.raises(AtCapacity):
        table.clone(source, 1)
    assert state(table) == before


@pytest.mark.parametrize("upto", [-1, 4])
def test_E5_a_clone_above_what_is_committed_is_refused(table: CellTable, upto: int) -> None:
    source = sequence_of(table, 3)
    table.plan([(source, 3, 1)])
    before = state(table)
    with pytest.raises(BadInput, match=rf"\[0, {upto}\) of sequence 0, which has committed 3"):
        table.clone(source, upto)
    assert state(table) == before


def test_E6_a_shared_cell_keeps_its_place_in_every_history(table: CellTable) -> None:
    source = sequence_of(table, 4)
    twins = [table.clone(source, upto) for upto in (1, 4)]
    table.rewind(source, 1)
    grow(table, source, 2)
    assert table.cells(twins[1]) == [0, 1, 2, 3]
    assert table.cells(source) == [0, 4, 5]


def test_E7_remove_frees_cells_and_id_and_a_shared_cell_survives_to_its_last_owner(table: CellTable) -> None:
    source = sequence_of(table, 4)
    twin = table.clone(source, 2)
    table.remove(source)
    assert table.used_cells == 2
    assert table.live_sequences == 1
    table.remove(twin)
    assert table.used_cells == 0


@pytest.mark.parametrize("sequence", [-1, 2, 99])
def test_E7_removing_what_is_not_live_is_refused(table: CellTable, sequence: int) -> None:
    sequence_of(table, 2)
    before = state(table)
    with pytest.raises(BadInput, match=f"sequence {sequence} is not live"):
        table.remove(SequenceId(sequence))
    assert state(table) == before


def test_E9_a_live_id_stays_live_at_length_zero_until_it_is_removed(table: CellTable) -> None:
    sequence = sequence_of(table, 2)
    table.rewind(sequence, 0)
    assert table.is_live(sequence)
    assert table.open() == 1


def test_E10_clear_frees_every_cell_and_id_and_forgets_plans(table: CellTable) -> None:
    sequence = sequence_of(table, 5)
    plan = table.plan([(sequence, 5, 2)])
    table.hold(table.cells(sequence, 0, 2))
    table.clear()
    assert state(table) == state(CellTable(16, 4))
    with pytest.raises(WrongState):
        table.commit(plan)
    assert table.open() == 0


def test_E11_rewind_drops_the_positions_from_there_up(table: CellTable) -> None:
    sequence = sequence_of(table, 6)
    table.rewind(sequence, 6)
    assert table.length(sequence) == 6
    table.rewind(sequence, 2)
    assert table.cells(sequence) == [0, 1]
    assert table.committed(sequence) == 2
    table.rewind(sequence, 0)
    assert table.length(sequence) == 0
    assert table.free_cells == 16


def test_E11_a_rewind_leaves_clones_their_cells(table: CellTable) -> None:
    source = sequence_of(table, 6)
    twin = table.clone(source, 6)
    table.rewind(source, 1)
    assert table.cells(twin) == [0, 1, 2, 3, 4, 5]
    assert table.used_cells == 6


@pytest.mark.parametrize("position", [-1, 4])
def test_E11_a_rewind_below_zero_or_above_the_length_is_refused(table: CellTable, position: int) -> None:
    sequence = sequence_of(table, 3)
    before = state(table)
    with pytest.raises(BadInput, match=f"to {position}, its length is 3"):
        table.rewind(sequence, position)
    assert state(table) == before


def test_E11_a_rewind_of_what_is_not_live_is_refused(table: CellTable) -> None:
    with pytest.raises(BadInput, match="not live"):
        table.rewind(SequenceId(0), 0)


# --- planning a step ---


def test_E12_a_step_without_inputs_is_refused(table: CellTable) -> None:
    with pytest.raises(BadInput, match="needs 1 input"):
        table.plan([])


def test_E12_more_tokens_than_free_cells_are_refused_with_both_numbers(table: CellTable) -> None:
    sequence = sequence_of(table, 10)
    before = state(table)
    with pytest.raises(AtCapacity, match="needs 7 cells, 6 available") as refusal:
        table.plan([(sequence, 10, 7)])
    assert (refusal.value.needed, refusal.value.available) == (7, 6)
    assert state(table) == before


@pytest.mark.parametrize("sequence", [-1, 1, 99])
def test_E12_a_sequence_that_is_not_live_is_refused(table: CellTable, sequence: int) -> None:
    table.open()
    before = state(table)
    with pytest.raises(BadInput, match=f"sequence {sequence} is not live"):
        table.plan([(SequenceId(0), 0, 2), (SequenceId(sequence), 0, 1)])
    assert state(table) == before


@pytest.mark.parametrize("width", [0, -3])
def test_E12_an_input_of_no_tokens_is_refused(table: CellTable, width: int) -> None:
    sequence = table.open()
    with pytest.raises(BadInput, match=f"has {width} tokens"):
        table.plan([(sequence, 0, width)])
    assert table.free_cells == 16


def test_E13_a_step_of_exactly_the_free_cells_has_room(table: CellTable) -> None:
    sequence = table.open()
    assert len(table.plan([(sequence, 0, 16)]).cells) == 16
    assert table.free_cells == 0


@pytest.mark.parametrize("start", [0, 2, 4, -1])
def test_E15_an_input_that_repeats_descends_or_leaves_a_gap_is_refused(table: CellTable, start: int) -> None:
    sequence = sequence_of(table, 3)
    before = state(table)
    with pytest.raises(BadInput, match=f"starts at {start}, its next position is 3"):
        table.plan([(sequence, start, 1)])
    assert state(table) == before


def test_E15_earlier_inputs_of_the_step_and_of_steps_under_way_count(table: CellTable) -> None:
    sequence = table.open()
    table.plan([(sequence, 0, 2), (sequence, 2, 3)])
    plan = table.plan([(sequence, 5, 1), (sequence, 6, 1)])
    assert plan.cells == [5, 6]
    with pytest.raises(BadInput, match="starts at 7, its next position is 8"):
        table.plan([(sequence, 7, 1), (sequence, 7, 1)])


def test_E16_after_a_refusal_the_corrected_step_is_planned_as_if_nothing_had_been(table: CellTable) -> None:
    first, second = table.open(), table.open()
    with pytest.raises(BadInput):
        table.plan([(first, 0, 2), (second, 1, 2)])
    assert table.plan([(first, 0, 2), (second, 0, 2)]).cells == [0, 1, 2, 3]


def test_E17_tokens_take_the_lowest_free_cells_in_packed_order(table: CellTable) -> None:
    a, b, c = (sequence_of(table, tokens) for tokens in (2, 3, 2))
    table.remove(b)
    table.rewind(a, 1)
    # Free: 1, 2, 3, 4 and from 7 on.
    plan = table.plan([(c, 2, 3), (a, 1, 3)])
    assert plan.cells == [1, 2, 3, 4, 7, 8]
    assert table.cells(c) == [5, 6, 1, 2, 3]
    assert table.cells(a) == [0, 4, 7, 8]


@pytest.mark.parametrize("verb", ["rewind", "remove"])
def test_E20_no_verb_touches_a_sequence_between_plan_and_settlement(table: CellTable, verb: str) -> None:
    sequence = sequence_of(table, 2)
    plan = table.plan([(sequence, 2, 1)])
    before = state(table)
    with pytest.raises(WrongState, match="sequence 0 is in 1 inputs of plans that are not settled"):
        table.rewind(sequence, 0) if verb == "rewind" else table.remove(sequence)
    assert state(table) == before
    table.commit(plan)
    table.rewind(sequence, 0) if verb == "rewind" else table.remove(sequence)
    assert table.used_cells == 0


def test_E20_verbs_on_other_sequences_and_clones_run_between_plan_and_settlement(table: CellTable) -> None:
    sequence, other = sequence_of(table, 2), sequence_of(table, 3)
    plan = table.plan([(sequence, 2, 2)])
    table.remove(other)
    twin = table.clone(sequence, 2)
    table.rewind(twin, 1)
    table.abort(plan)
    assert table.cells(sequence) == [0, 1]
    assert table.used_cells == 2


# --- capacity ---


def test_E25_a_shared_prefix_counts_once_so_lengths_may_sum_past_capacity(table: CellTable) -> None:
    source = sequence_of(table, 12)
    twins = [table.clone(source, 12) for _ in range(3)]
    assert sum(table.length(sequence) for sequence in [source, *twins]) == 48
    assert table.used_cells == 12


@given(data=st.data())
def test_E26_no_refusal_changes_anything(data: st.DataObject) -> None:
    table = CellTable(usable_cells=6, max_sequences=2)
    sequence = sequence_of(table, 3)
    table.plan([(sequence, 3, 1)])
    table.hold(table.cells(sequence, 0, 1))
    ids, numbers = st.integers(-1, 3), st.integers(-2, 8)
    for _ in range(5):
        before = state(table)
        verb, arguments = data.draw(
            st.one_of(
                st.tuples(st.just("plan"), st.tuples(st.lists(st.tuples(ids, numbers, numbers), max_size=3))),
                st.tuples(st.just("clone"), st.tuples(ids, numbers)),
                st.tuples(st.just("rewind"), st.tuples(ids, numbers)),
                st.tuples(st.just("remove"), st.tuples(ids)),
                st.tuples(st.just("open"), st.tuples(st.lists(numbers, max_size=3))),
                st.tuples(st.sampled_from(["hold", "release"]), st.tuples(st.lists(numbers, max_size=3))),
                st.tuples(st.sampled_from(["commit", "abort"]), st.tuples(st.just(CellPlan([Cell(0)], [])))),
            )
        )
        try:
            getattr(table, verb)(*arguments)
        except Refused:
            assert state(table) == before


def test_E27_a_pool_of_two_million_cells_keeps_entries_for_the_touched_ones_only() -> None:
    table = CellTable(usable_cells=2_000_000, max_sequences=1_000_000)
    for _ in range(50):
        sequence = sequence_of(table, 20)
        table.remove(sequence)
    kept = len(table._references) + len(table._freed) + len(table._freed_sequences) + len(table._histories)
    assert kept <= 100
    assert table.free_cells == 2_000_000


def test_E28_the_scratch_cell_is_not_one_of_the_tables(table: CellTable) -> None:
    sequence = table.open()
    assert max(table.plan([(sequence, 0, 16)]).cells) == table.usable_cells - 1


def test_E29_a_commit_makes_planned_tokens_history(table: CellTable) -> None:
    sequence = table.open()
    plan = table.plan([(sequence, 0, 3)])
    assert (table.length(sequence), table.committed(sequence)) == (3, 0)
    table.commit(plan)
    assert (table.length(sequence), table.committed(sequence)) == (3, 3)


def test_E29_an_abort_restores_the_table_exactly(table: CellTable) -> None:
    a, b = sequence_of(table, 3), sequence_of(table, 2)
    table.rewind(a, 1)
    before = state(table)
    plan = table.plan([(b, 2, 3), (a, 1, 2), (b, 5, 1)])
    planned = list(plan.cells)
    table.abort(plan)
    assert state(table) == before
    assert table.plan([(b, 2, 3), (a, 1, 2), (b, 5, 1)]).cells == planned


# holds E14
def test_E29_plans_commit_oldest_first_and_abort_newest_first(table: CellTable) -> None:
    sequence = table.open()
    plans = [table.plan([(sequence, at, 1)]) for at in range(3)]
    with pytest.raises(WrongState, match="cannot be committed: the oldest outstanding plan comes first"):
        table.commit(plans[1])
    with pytest.raises(WrongState, match="cannot be aborted: the newest outstanding plan comes first"):
        table.abort(plans[1])
    table.commit(plans[0])
    table.abort(plans[2])
    table.abort(plans[1])
    assert (table.length(sequence), table.committed(sequence), table.used_cells) == (1, 1, 1)


@pytest.mark.parametrize("first", ["commit", "abort"])
@pytest.mark.parametrize("second", ["commit", "abort"])
def test_E29_a_plan_is_settled_once(table: CellTable, first: str, second: str) -> None:
    sequence = table.open()
    plan = table.plan([(sequence, 0, 2)])
    getattr(table, first)(plan)
    before = state(table)
    with pytest.raises(WrongState, match="settled already"):
        getattr(table, second)(plan)
    assert state(table) == before
