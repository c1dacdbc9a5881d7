"""The cheapest plan against trying everything, and tables that cannot be planned on."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microtome.planner.errors import BadInput
from microtome.planner.slicing import (
    CheapestPlanner,
    Method,
    forward_cost_ns,
    is_measured,
    plan_cheapest,
    plan_cost_ns,
    plan_ladder,
    plan_slices,
)
from microtome.planner.types import MethodTable
from tests.support.builders import dynamic, ladder, static


@st.composite
def tables(draw: st.DrawFn) -> MethodTable:
    """Small tables with costs that are often equal, and a dynamic method that often cannot run few tokens."""
    widths = draw(st.sets(st.integers(1, 9), max_size=4))
    methods = [static(width, draw(st.integers(1, 12))) for width in sorted(widths)]
    if not methods or draw(st.booleans()):
        least = draw(st.integers(1, 6))
        most = draw(st.integers(least, 10))
        cost_us, per_token = draw(st.tuples(st.integers(0, 12), st.sampled_from([0, 500, 1000, 3000])))
        methods.append(dynamic(most, least, max(cost_us, not per_token), per_token))
    return ladder(*methods)


Widths = tuple[tuple[int, bool], ...]  # of each forward: minus its width, whether it is dynamic
Cover = tuple[int, int, Widths]  # cost, number of forwards, the forwards: dynamic ones first, wider first


def brute_force(table: MethodTable, total: int) -> Cover | None:
    """The least of all covers, each of them built. A static forward may be padded by any amount, wherever it stands."""

    @cache
    def covers(left: int) -> frozenset[Cover]:
        if left == 0:
            return frozenset({(0, 0, ())})
        found: set[Cover] = set()
        for method in table.methods:
            shortest = 1 if method.static else method.min_tokens
            for length in range(shortest, min(method.max_tokens, left) + 1):
                width = method.max_tokens if method.static else length
                for cost, count, widths in covers(left - length):
                    forwards = sorted((*widths, (-width, not method.static)), key=lambda f: (not f[1], f[0]))
                    found.add((cost + forward_cost_ns(method, length), count + 1, tuple(forwards)))
        return frozenset(found)

    return min(covers(total), default=None)


@settings(max_examples=150, deadline=None)
@given(table=tables(), total=st.integers(1, 10))
def test_the_cheapest_plan_equals_brute_force(table: MethodTable, total: int) -> None:
    best = brute_force(table, total)
    planner = CheapestPlanner(table)
    if best is None:
        with pytest.raises(BadInput, match=f"{total} tokens cannot be tiled"):
            planner.plan(total)
        return
    plan = planner.plan(total)
    cost, count, widths = best
    assert plan_cost_ns(plan, table) == planner.cost_ns(total) == cost
    assert len(plan) == count
    assert tuple((-f.width, not table.methods[f.method].static) for f in plan) == widths


@settings(max_examples=200, deadline=None)
@given(table=tables(), total=st.integers(1, 200))
def test_a_plan_fits_its_methods_and_pads_the_last_forward_only(table: MethodTable, total: int) -> None:
    try:
        plan = CheapestPlanner(table).plan(total)
    except BadInput:
        assert not any(method.static for method in table.methods)
        return
    assert [at for f in plan for at in range(f.offset, f.offset + f.length)] == list(range(total))
    for forward in plan:
        method = table.methods[forward.method]
        assert forward.width == (method.max_tokens if method.static else forward.length)
        assert (1 if method.static else method.min_tokens) <= forward.length <= method.max_tokens
    assert all(forward.length == forward.width for forward in plan[:-1])


@settings(max_examples=200, deadline=None)
@given(table=tables(), total=st.integers(1, 200))
def test_the_cheapest_plan_is_never_costlier_than_the_greedy_one(table: MethodTable, total: int) -> None:
    try:
        greedy = plan_ladder(total, table)
    except BadInput:
        return
    assert CheapestPlanner(table).cost_ns(total) <= plan_cost_ns(greedy, table)


@given(table=tables(), total=st.integers(-1, 40))
def test_the_function_and_the_planner_give_the_same_plan(table: MethodTable, total: int) -> None:
    try:
        plan = CheapestPlanner(table).plan(total)
    except BadInput as refusal:
        with pytest.raises(BadInput, match=str(refusal)):
            plan_cheapest(total, table)
    else:
        assert plan_cheapest(total, table) == list(plan)


@given(totals=st.permutations(list(range(0, 60, 3))))
def test_the_order_of_questions_does_not_change_a_plan(totals: list[int]) -> None:
    table = ladder(static(1, 5), static(4, 7), dynamic(16, 3, 6, 400))
    planner, other = CheapestPlanner(table), CheapestPlanner(table)
    assert {t: planner.plan(t) for t in totals} == {t: other.plan(t) for t in sorted(totals)}


@given(total=st.integers(0, 100), most=st.integers(2, 20), least=st.integers(1, 20))
def test_a_ladder_of_one_token_and_a_range_cuts_like_the_two_method_planner(total: int, most: int, least: int) -> None:
    least = max(2, min(least, most))
    table = ladder(static(1), dynamic(most, least))
    slices = [(s.offset, s.length, s.method is Method.DECODE) for s in plan_slices(total, most, least)]
    assert [(f.offset, f.length, f.width == 1) for f in plan_ladder(total, table)] == slices


def test_of_equally_cheap_plans_the_one_with_fewer_forwards_is_taken() -> None:
    table = ladder(static(4, 10), static(8, 20))
    assert [f.width for f in CheapestPlanner(table).plan(8)] == [8]


def test_of_equally_cheap_plans_of_equal_length_the_wider_forward_comes_first() -> None:
    table = ladder(static(2, 10), static(3, 15), static(4, 20))
    assert [f.width for f in CheapestPlanner(table).plan(6)] == [4, 2]


def test_padding_a_static_forward_makes_room_for_a_dynamic_one_that_has_a_lower_bound() -> None:
    # 16 = 5 + 5 + 5 and one padded static forward; a full static one leaves 12, which no two dynamic ones cover.
    table = ladder(static(4, 10), dynamic(5, 5, 1))
    plan = CheapestPlanner(table).plan(16)
    assert [(f.length, f.width) for f in plan] == [(5, 5), (5, 5), (5, 5), (1, 4)]


def test_one_method_without_a_cost_makes_the_table_unmeasured() -> None:
    table = ladder(static(1, 10), static(8), static(16, 1))
    assert not is_measured(table)
    assert CheapestPlanner(table).plan(17) == tuple(plan_ladder(17, table))
    assert CheapestPlanner(table).cost_ns(17) == 0


def test_a_cost_per_token_alone_counts_as_measured() -> None:
    assert is_measured(ladder(static(1, 10), dynamic(8, 2, 0, 500)))


@pytest.mark.parametrize(("budget_us", "tokens"), [(4, 0), (5, 1), (6, 1), (7, 4), (12, 5), (14, 8), (1000, 8)])
def test_tokens_within_a_budget_are_the_most_that_cost_no_more(budget_us: int, tokens: int) -> None:
    planner = CheapestPlanner(ladder(static(1, 5), static(4, 7)))
    assert planner.tokens_within(budget_us, limit=8) == tokens


def test_tokens_within_a_budget_are_unlimited_without_costs() -> None:
    assert CheapestPlanner(ladder(static(4))).tokens_within(1, limit=100) == 100


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ((static(0),), "takes 0 tokens"),
        ((static(4), static(4)), "second static one of width 4"),
        ((dynamic(4), dynamic(8)), "both dynamic"),
        ((dynamic(4, least=5),), "5 to 4"),
        ((dynamic(4, least=0),), "0 to 4"),
        ((static(4, -1),), "costs -1 us"),
        ((dynamic(4, 1, 0, -7),), "-7 ns per token"),
    ],
)
def test_a_table_that_cannot_be_planned_on_is_refused_by_name_and_number(methods: tuple, message: str) -> None:
    table = MethodTable(methods)
    with pytest.raises(BadInput, match=message):
        CheapestPlanner(table)
    with pytest.raises(BadInput, match=message):
        plan_ladder(0, table)


def test_a_total_that_no_method_can_tile_is_refused_and_others_still_plan() -> None:
    planner = CheapestPlanner(ladder(dynamic(8, 5, 10)))
    with pytest.raises(BadInput, match="9 tokens cannot be tiled by methods of which each takes 5 at least"):
        planner.plan(9)
    assert [f.length for f in planner.plan(10)] == [5, 5]


def test_a_greedy_cut_that_no_method_can_run_is_refused() -> None:
    with pytest.raises(BadInput, match="3 tokens cannot be tiled"):
        plan_ladder(11, ladder(dynamic(8, 5)))


def test_equal_widths_go_to_the_static_method() -> None:
    table = ladder(static(8, 10), dynamic(8, 1, 10))
    assert [table.methods[f.method].static for f in CheapestPlanner(table).plan(16)] == [True, True]
    assert [table.methods[f.method].static for f in plan_ladder(16, table)] == [True, True]
