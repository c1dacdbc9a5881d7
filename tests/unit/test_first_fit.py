"""First fit against looking at everything."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from microtome.planner.first_fit import FirstFit

WIDEST = 9


class AgainstAScan(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.line: FirstFit[int, int] = FirstFit(WIDEST)
        self.model: dict[int, tuple[int, int]] = {}
        self.stamp = 0

    @rule(item=st.integers(0, 12), width=st.integers(0, WIDEST), in_front=st.booleans())
    def put(self, item: int, width: int, in_front: bool) -> None:
        self.stamp += 1
        key = -self.stamp if in_front else self.stamp
        self.line.put(item, key, width)
        self.model[item] = (key, width)

    @rule(item=st.integers(0, 12), width=st.integers(0, WIDEST))
    def put_with_the_key_it_has(self, item: int, width: int) -> None:
        if item in self.model:
            key = self.model[item][0]
            self.line.put(item, key, width)
            self.model[item] = (key, width)

    @rule(item=st.integers(0, 12))
    def remove(self, item: int) -> None:
        self.line.remove(item)
        self.model.pop(item, None)

    @rule(item=st.integers(0, 12), times=st.integers(60, 90))
    def come_and_go(self, item: int, times: int) -> None:
        """Often enough that the line throws out what is gone."""
        for _ in range(times):
            self.put(item, 3, in_front=False)
            self.remove(item)

    @invariant()
    def every_question_has_the_scans_answer(self) -> None:
        assert len(self.line) == len(self.model)
        for room in range(-1, WIDEST + 3):
            fitting = [(key, item) for item, (key, width) in self.model.items() if width <= room]
            assert self.line.first(room) == (min(fitting)[1] if fitting else None)
        for item, (key, _) in self.model.items():
            assert item in self.line
            assert self.line.key(item) == key
        if self.model:
            assert self.line.narrowest() == min(width for _, width in self.model.values())


AgainstAScan.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
test_first_fit_finds_what_a_scan_finds = AgainstAScan.TestCase


def test_items_that_are_gone_take_no_room() -> None:
    line: FirstFit[int, int] = FirstFit(WIDEST)
    line.put(0, -1, 4)  # stays in front, so that nothing behind it ever comes to the top
    for stamp in range(10_000):
        line.put(1, stamp, 4)
        line.remove(1)
    assert sum(len(heap) for heap in line._heaps.values()) < 200
