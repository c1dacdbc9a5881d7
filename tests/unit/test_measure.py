"""Measured costs: the quickest of rounds in turns, and a narrow method always cheaper than a wide one."""

import torch
from torch import Tensor

from microtome.cuda_runtime.measure import LEAST_ROUNDS, MOST_ROUNDS, measured
from microtome.cuda_runtime.rows import RowTable
from microtome.planner.types import MethodSpec

ROWS = RowTable(4, 8, 100, torch.device("cpu"))


class Clockwork:
    """A clock that stands still but for what the methods take."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Scripted:
    """A method that takes what its script says, run by run; the last entry for ever."""

    def __init__(
        self, clock: Clockwork, spec: MethodSpec, *us: int, per_token_us: int = 0, visited: list[int] | None = None
    ) -> None:
        self.spec = spec
        self.visited = [] if visited is None else visited
        self.widths: list[int] = []
        self._clock, self._us, self._per_token_us = clock, us, per_token_us

    def width(self, length: int) -> int:
        return length

    def run(self, columns_5N: Tensor, rows: int) -> Tensor:
        assert set(columns_5N[2].tolist()) == {ROWS.padding_row}
        width = columns_5N.shape[1]
        self.visited.append(width)
        turn = sum(before == width for before in self.widths)
        self.widths.append(width)
        self._clock.now_ns += (self._us[min(turn, len(self._us) - 1)] + self._per_token_us * width) * 1000
        return torch.zeros(1, 3)


def static(width: int) -> MethodSpec:
    return MethodSpec(name=f"forward_{width}", max_tokens=width, static=True)


DYNAMIC = MethodSpec(name="forward_others", max_tokens=512, static=False, min_tokens=2)


def test_the_quickest_run_counts_and_the_first_never() -> None:
    clock = Clockwork()
    (spec,) = measured([Scripted(clock, static(1), 1, 900, 700, 800)], ROWS, clock)
    assert spec.cost_us == 700


def test_a_narrow_method_is_always_cheaper_than_a_wide_one() -> None:
    clock = Clockwork()
    methods = [Scripted(clock, static(width), us) for width, us in ((1, 477_000), (2, 90), (4, 120), (8, 110))]
    assert [spec.cost_us for spec in measured(methods, ROWS, clock)] == [89, 90, 109, 110]


def test_a_dynamic_method_costs_a_start_and_so_much_a_token() -> None:
    clock = Clockwork()
    methods = [Scripted(clock, static(1), 5000), Scripted(clock, DYNAMIC, 300, per_token_us=7)]
    found = measured(methods, ROWS, clock)
    assert (found[1].cost_us, found[1].cost_ns_per_token) == (300, 7000)
    assert found[0].cost_us == 5000  # a dynamic method says nothing about a static one
    assert set(methods[1].widths) == {64, 512}


def test_rounds_visit_every_method_in_turn_and_end_when_enough_time_has_passed() -> None:
    for us, rounds in ((10, 1 + MOST_ROUNDS), (900_000, 1 + LEAST_ROUNDS)):
        clock = Clockwork()
        order: list[int] = []
        methods = [Scripted(clock, static(width), us, visited=order) for width in (1, 2)]
        measured(methods, ROWS, clock)
        assert order == [1, 2] * rounds
