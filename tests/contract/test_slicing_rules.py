"""How a packed batch is cut, rule by rule: two methods (A1 to A6), a ladder of widths (A7 to A13), both (A14 on)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtome.planner.errors import BadInput
from microtome.planner.slicing import (
    CheapestPlanner,
    Forward,
    Method,
    Slice,
    plan_cost_ns,
    plan_ladder,
    plan_slices,
)
from microtome.planner.types import MethodTable
from tests.support.builders import dynamic, ladder, static

LADDER = ladder(static(1), static(2), static(4), static(8), dynamic(32))


def cuts(total: int, table: MethodTable = LADDER) -> list[tuple[int, int, int, str]]:
    """A ladder plan as (offset, length, width, method's name)."""
    return [(f.offset, f.length, f.width, table.methods[f.method].name) for f in plan_ladder(total, table)]


def lengths(total: int, most: int, least: int) -> list[tuple[int, Method]]:
    return [(s.length, s.method) for s in plan_slices(total, most, least)]


# --- two methods ---


@pytest.mark.parametrize("total", [-1, 0, 5])
@pytest.mark.parametrize("max_step_tokens", [0, -3])
def test_A1_a_widest_step_below_one_is_refused_even_for_an_empty_batch(total: int, max_step_tokens: int) -> None:
    with pytest.raises(BadInput, match=f"max_step_tokens {max_step_tokens} "):
        plan_slices(total, max_step_tokens, 2)


@pytest.mark.parametrize("total", [0, -1])
def test_A2_a_total_of_zero_or_fewer_plans_nothing(total: int) -> None:
    assert plan_slices(total, 8, 2) == []


def test_A3_each_cut_takes_as_much_as_a_step_holds_or_what_is_left() -> None:
    assert lengths(20, 8, 2) == [(8, Method.PREFILL), (8, Method.PREFILL), (4, Method.PREFILL)]


@pytest.mark.parametrize(("total", "least"), [(2, 2), (2, 0), (5, 5), (8, 1)])
def test_A4_a_cut_of_at_least_two_tokens_and_at_least_the_bound_is_one_prefill(total: int, least: int) -> None:
    assert plan_slices(total, 8, least) == [Slice(0, total, Method.PREFILL)]


def test_A5_any_other_cut_becomes_decodes_of_one_token_at_consecutive_offsets() -> None:
    assert plan_slices(4, 8, 5) == [Slice(at, 1, Method.DECODE) for at in range(4)]
    assert plan_slices(1, 8, 0) == [Slice(0, 1, Method.DECODE)]
    assert plan_slices(3, 1, 0) == [Slice(at, 1, Method.DECODE) for at in range(3)]


@given(total=st.integers(0, 60), most=st.integers(1, 20))
def test_A6_bounds_zero_one_and_two_behave_alike(total: int, most: int) -> None:
    assert plan_slices(total, most, 0) == plan_slices(total, most, 1) == plan_slices(total, most, 2)


@given(total=st.integers(0, 60), most=st.integers(1, 20), above=st.integers(1, 5))
def test_A6_a_bound_above_the_widest_step_makes_every_batch_run_token_by_token(
    total: int, most: int, above: int
) -> None:
    assert lengths(total, most, most + above) == [(1, Method.DECODE)] * total


def test_A6_eleven_tokens_are_not_rebalanced() -> None:
    decodes = [Slice(at, 1, Method.DECODE) for at in (8, 9, 10)]
    assert plan_slices(11, 8, 5) == [Slice(0, 8, Method.PREFILL), *decodes]


@given(total=st.integers(0, 200), most=st.integers(1, 20), least=st.integers(0, 25))
def test_A6_only_the_last_cut_can_be_short(total: int, most: int, least: int) -> None:
    prefills = [s for s in plan_slices(total, most, least) if s.method is Method.PREFILL]
    assert all(s.length == most for s in prefills[:-1])


# --- a ladder ---


def test_A7_a_table_that_does_not_ascend_is_refused() -> None:
    with pytest.raises(BadInput, match="forward_4 takes 4 tokens and stands behind one of 8"):
        plan_ladder(3, MethodTable((static(8), static(4))))


@pytest.mark.parametrize("total", [0, 1, 100])
def test_A8_an_empty_table_plans_nothing_whatever_the_total(total: int) -> None:
    assert plan_ladder(total, MethodTable(())) == []


@pytest.mark.parametrize("total", [0, 1])
@pytest.mark.parametrize("widest", [0, -2])
def test_A8_a_widest_method_of_no_tokens_is_refused_even_for_an_empty_batch(total: int, widest: int) -> None:
    with pytest.raises(BadInput, match=f"takes {widest} tokens"):
        plan_ladder(total, MethodTable((static(widest),)))


def test_A9_a_ladder_cuts_greedily_by_its_widest_method() -> None:
    assert [f.length for f in plan_ladder(100, LADDER)] == [32, 32, 32, 4]


@pytest.mark.parametrize(("total", "name"), [(1, "forward_1"), (2, "forward_2"), (3, "forward_4"), (5, "forward_8")])
def test_A10_a_cut_runs_on_the_first_method_that_holds_it(total: int, name: str) -> None:
    assert [method for *_, method in cuts(total)] == [name]


def test_A11_a_static_forward_has_its_methods_width_and_a_dynamic_one_its_cuts() -> None:
    assert cuts(3) == [(0, 3, 4, "forward_4")]
    assert cuts(9) == [(0, 9, 9, "forward_others")]


@given(total=st.integers(1, 300), statics=st.sets(st.integers(1, 40), min_size=1), most=st.integers(1, 60))
def test_A12_a_cut_that_a_static_method_holds_never_goes_to_the_dynamic_one(
    total: int, statics: set[int], most: int
) -> None:
    table = ladder(*map(static, statics), dynamic(most))
    for forward in plan_ladder(total, table):
        assert table.methods[forward.method].static or forward.length > max(statics)


@pytest.mark.parametrize("least", [1, 2, 9])
def test_A12_a_dynamic_bound_up_to_the_widest_static_width_plus_one_is_never_felt(least: int) -> None:
    table = ladder(static(1), static(2), static(4), static(8), dynamic(32, least=least))
    for total in range(1, 100):
        assert plan_ladder(total, table) == plan_ladder(total, LADDER)


def test_A13_static_methods_alone_slice_at_the_widest_and_pad_the_tail_to_the_smallest_that_holds_it() -> None:
    table = ladder(static(1), static(4), static(8))
    assert cuts(19, table) == [(0, 8, 8, "forward_8"), (8, 8, 8, "forward_8"), (16, 3, 4, "forward_4")]


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (3, [(3, 4)]),
        (7, [(7, 8)]),
        (9, [(9, 9)]),
        (38, [(32, 32), (6, 8)]),
        (75, [(32, 32), (32, 32), (11, 11)]),
    ],
)
def test_A13_the_worked_examples_come_out(total: int, expected: list[tuple[int, int]]) -> None:
    assert [(f.length, f.width) for f in plan_ladder(total, LADDER)] == expected


# --- both ---


@given(total=st.integers(0, 300), most=st.integers(1, 40), least=st.integers(0, 45))
def test_A14_slices_tile_the_batch_in_order(total: int, most: int, least: int) -> None:
    covered = [at for s in plan_slices(total, most, least) for at in range(s.offset, s.offset + s.length)]
    assert covered == list(range(total))


@given(total=st.integers(0, 300))
def test_A14_forwards_tile_the_batch_in_order(total: int) -> None:
    for plan in (plan_ladder(total, LADDER), CheapestPlanner(COSTED).plan(total)):
        assert [at for f in plan for at in range(f.offset, f.offset + f.length)] == list(range(total))


@given(total=st.integers(1, 300), data=st.data())
def test_A15_each_row_falls_in_exactly_one_slice(total: int, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, total - 1))
    for plan in (plan_ladder(total, LADDER), CheapestPlanner(COSTED).plan(total)):
        assert sum(f.offset <= row < f.offset + f.length for f in plan) == 1
    assert sum(s.offset <= row < s.offset + s.length for s in plan_slices(total, 8, 5)) == 1


@given(totals=st.lists(st.integers(0, 200), max_size=8), total=st.integers(0, 200))
def test_A16_a_plan_does_not_depend_on_what_was_planned_before(totals: list[int], total: int) -> None:
    used = CheapestPlanner(COSTED)
    for earlier in totals:
        used.plan(earlier)
    assert used.plan(total) == CheapestPlanner(COSTED).plan(total)


def test_A17_the_widest_method_is_the_preferred_batch_and_wider_ones_are_sliced() -> None:
    assert LADDER.widest == 32
    assert len(plan_ladder(32, LADDER)) == 1
    assert len(plan_ladder(33, LADDER)) == 2


COSTED = ladder(static(1, 10), static(8, 12), static(16, 20), static(32, 38), dynamic(64, 2, 15, 900))


@given(total=st.integers(0, 500))
def test_A24_the_cheapest_plan_is_never_costlier_than_the_reference(total: int) -> None:
    planner = CheapestPlanner(COSTED)
    assert planner.cost_ns(total) <= plan_cost_ns(plan_ladder(total, COSTED), COSTED)


def test_A24_without_costs_the_cheapest_plan_is_the_reference() -> None:
    planner = CheapestPlanner(LADDER)
    for total in range(200):
        assert list(planner.plan(total)) == plan_ladder(total, LADDER)


def test_A24_seventeen_tokens_run_as_sixteen_and_one_where_that_is_cheaper() -> None:
    table = ladder(static(1, 10), static(8, 12), static(16, 20), static(32, 38))
    assert CheapestPlanner(table).plan(17) == (Forward(0, 16, 16, 2), Forward(16, 1, 1, 0))
    assert [f.width for f in plan_ladder(17, table)] == [32]
