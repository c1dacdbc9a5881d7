"""Which plans a worker may run: everything a lost, late, doubled or foreign message could bring."""

import dataclasses

import pytest

from microtome.planner.errors import StalePlan
from microtome.planner.fence import StepFence
from microtome.planner.types import DropSequence, Incarnation, SequenceId, StepNumber, StepPlan, StepResult

OURS = Incarnation("0123456789abcdef" * 2)
OTHER = Incarnation("f" * 32)
DIGEST = 0x1234


def plan(step: int, *, incarnation: Incarnation = OURS, digest: int = DIGEST, cell: int = 7) -> StepPlan:
    return StepPlan(
        incarnation=incarnation,
        step=StepNumber(step),
        table_digest=digest,
        ops=(DropSequence(SequenceId(3)),),
        sequences=[1],
        starts=[0],
        widths=[1],
        flags=[1],
        cells=[cell],
        tokens=[5],
        slice_offsets=[0],
        slice_lengths=[1],
        slice_methods=[0],
    )


def result(step: int) -> StepResult:
    return StepResult(incarnation=OURS, step=StepNumber(step), tokens=(step + 100,))


def fence_after(steps: int, kept: int = 1) -> StepFence:
    fence = StepFence(OURS, DIGEST, kept)
    for step in range(1, steps + 1):
        assert fence.check(plan(step)) is None
        fence.done(result(step))
    return fence


def test_steps_run_in_order_from_one() -> None:
    assert fence_after(3).last_step == 3


@pytest.mark.parametrize("step", [0, 2, 3])
def test_a_first_step_other_than_one_is_refused(step: int) -> None:
    fence = StepFence(OURS, DIGEST)
    with pytest.raises(StalePlan, match=rf"step {step} .* newest that ran is 0"):
        fence.check(plan(step))
    assert fence.last_step == 0
    assert fence.check(plan(1)) is None


def test_another_incarnation_is_refused_whatever_the_step() -> None:
    fence = fence_after(2)
    for step in (1, 2, 3):
        with pytest.raises(StalePlan, match=f"{OTHER}.*{OURS}"):
            fence.check(plan(step, incarnation=OTHER))
    assert fence.check(plan(3)) is None


def test_another_method_table_is_refused_even_for_a_repeat() -> None:
    fence = fence_after(2)
    for step in (2, 3):
        with pytest.raises(StalePlan, match=r"0x1235.*0x1234"):
            fence.check(plan(step, digest=DIGEST + 1))


def test_a_repeat_of_the_newest_is_answered_and_counts_as_nothing_new() -> None:
    fence = fence_after(2)
    assert fence.check(plan(2)) == result(2)
    assert fence.check(plan(2)) == result(2)
    assert fence.last_step == 2
    assert fence.check(plan(3)) is None


def test_a_repeat_is_recognised_whatever_sequence_type_holds_its_columns() -> None:
    fence = fence_after(1)
    repeat = dataclasses.replace(plan(1), cells=(7,), tokens=(5,), sequences=range(1, 2))
    assert fence.check(repeat) == result(1)


def test_the_newest_step_with_another_plan_is_refused_not_answered() -> None:
    # two drivers would otherwise each believe that the worker holds what it sent
    fence = fence_after(2)
    with pytest.raises(StalePlan, match="step 2 has run already, with another plan"):
        fence.check(plan(2, cell=8))
    with pytest.raises(StalePlan, match="another plan"):
        fence.check(dataclasses.replace(plan(2), ops=()))


def test_an_older_repeat_than_the_kept_ones_is_refused() -> None:
    fence = fence_after(5, kept=2)
    assert fence.check(plan(4)) == result(4)
    assert fence.check(plan(5)) == result(5)
    with pytest.raises(StalePlan, match="step 3 is too old to be repeated, the newest that ran is 5"):
        fence.check(plan(3))


def test_a_step_that_skips_ahead_is_refused_and_the_missing_one_still_runs() -> None:
    fence = fence_after(2)
    with pytest.raises(StalePlan, match="step 4 skips ahead, the newest that ran is 2"):
        fence.check(plan(4))
    assert fence.check(plan(3)) is None


def test_a_step_that_was_let_through_but_refused_by_the_device_may_come_again() -> None:
    fence = fence_after(1)
    assert fence.check(plan(2)) is None  # no `done`: the executor refused it
    assert fence.check(plan(2, cell=9)) is None
    fence.done(result(2))
    assert fence.check(plan(2, cell=9)) == result(2)


def test_a_closed_fence_lets_nothing_through() -> None:
    fence = fence_after(2)
    fence.close("the device failed")
    for step in (1, 2, 3):
        with pytest.raises(StalePlan, match=f"step {step} comes after the end .*: the device failed"):
            fence.check(plan(step))
