"""The fake executor keeps the promises that tests with it rest on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from microtome.planner.errors import StalePlan, StepError
from microtome.planner.types import (
    CloneSequence,
    DropSequence,
    InputFlag,
    OpenSequence,
    SamplingParams,
    SequenceId,
    SetSampling,
    StepNumber,
    StepPlan,
)
from tests.support.fake_executor import FakeExecutor, build_executor
from tests.support.fake_model import generate

GREEDY = SamplingParams()
BOTH = InputFlag.WANTS_OUTPUT | InputFlag.FEEDBACK


def plan(executor: FakeExecutor, **columns: object) -> StepPlan:
    own = executor.describe()
    cells = columns.get("cells", ())
    slices = {"slice_offsets": (0,), "slice_lengths": (len(cells),), "slice_methods": (2,)} if cells else {}
    step = StepNumber(executor.last_step + 1)
    return StepPlan(incarnation=own.incarnation, step=step, table_digest=own.table.digest, **slices | columns)


def opened(executor: FakeExecutor, cells: tuple[int, ...] = (0, 1, 2)) -> tuple[int, ...]:
    ops = (OpenSequence(SequenceId(0)), SetSampling(SequenceId(0), GREEDY))
    first = plan(
        executor,
        ops=ops,
        sequences=(0,),
        starts=(0,),
        widths=(3,),
        flags=(InputFlag.WANTS_OUTPUT,),
        cells=cells,
        tokens=(5, 6, 7),
    )
    return tuple(executor.run(first).tokens)


def decode(executor: FakeExecutor, cell: int, start: int = 3) -> StepPlan:
    return plan(executor, sequences=(0,), starts=(start,), widths=(1,), flags=(BOTH,), cells=(cell,))


def test_tokens_are_those_of_the_model_without_cells() -> None:
    executor = FakeExecutor()
    tokens = [*opened(executor, (9, 2, 30)), *executor.run(decode(executor, 4)).tokens]
    assert tokens == generate((5, 6, 7), GREEDY, 2, (), 1000)


def test_a_foreign_cell_in_the_history_changes_the_token() -> None:
    executor = FakeExecutor()
    opened(executor)
    executor._content[1] = 12345
    assert tuple(executor.run(decode(executor, 4)).tokens) != generate((5, 6, 7), GREEDY, 2, (), 1000)[1:]


def test_a_shared_prefix_gives_the_tokens_of_a_cold_run() -> None:
    executor = FakeExecutor()
    opened(executor)
    ops = (
        CloneSequence(SequenceId(1), SequenceId(0), 2),
        DropSequence(SequenceId(0)),
        OpenSequence(SequenceId(2), (0, 1)),
        SetSampling(SequenceId(1), GREEDY),
        SetSampling(SequenceId(2), GREEDY),
    )
    wants = InputFlag.WANTS_OUTPUT
    step = plan(
        executor,
        ops=ops,
        sequences=(1, 2),
        starts=(2, 2),
        widths=(1, 1),
        flags=(wants, wants),
        cells=(7, 8),
        tokens=(7, 7),
    )
    assert tuple(executor.run(step).tokens) == tuple(generate((5, 6, 7), GREEDY, 1, (), 1000)) * 2


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"step": 1}, "cannot follow"),
        ({"table_digest": 1}, "method table"),
        ({"incarnation": "0" * 32}, "incarnation"),
        ({"cells": (2,)}, "while a sequence holds it"),
        ({"cells": (4096,)}, "no cell 4096"),
        ({"starts": (4,)}, "starts at 4"),
        ({"sequences": (3,)}, "no sequence 3"),
        ({"slice_lengths": (2,)}, "cover 2 of 1"),
        ({"slice_offsets": (1,)}, "starts at 1"),
        ({"slice_methods": (99,)}, "no method"),
        ({"flags": (0,)}, "tokens are given"),
        ({"ops": (DropSequence(SequenceId(5)),)}, "no sequence 5"),
        ({"ops": (OpenSequence(SequenceId(0)),)}, "live already"),
    ],
)
def test_a_wrong_plan_is_refused_and_changes_nothing(change: dict[str, object], what: str) -> None:
    executor = FakeExecutor()
    first = opened(executor)
    before = executor.snapshot()
    good = decode(executor, 4)
    with pytest.raises(StalePlan, match=what):
        executor.run(replace(good, **change))
    assert executor.snapshot() == before
    assert [*first, *executor.run(good).tokens] == generate((5, 6, 7), GREEDY, 2, (), 1000)


def test_a_feedback_needs_a_sampled_token() -> None:
    executor = FakeExecutor()
    opened(executor)
    silent = replace(decode(executor, 4), flags=(InputFlag.FEEDBACK,))
    executor.run(silent)
    with pytest.raises(StalePlan, match="no sampled token"):
        executor.run(decode(executor, 5, start=4))


def test_scripted_faults_strike_once_each_at_their_step() -> None:
    executor = build_executor(SimpleNamespace(model="fake:refuse_at=2,fail_at=2"))
    opened(executor)
    step = decode(executor, 4)
    with pytest.raises(StalePlan, match="scripted"):
        executor.run(step)
    with pytest.raises(StepError, match="scripted"):
        executor.run(step)


def test_options_shape_the_capability() -> None:
    own = build_executor(
        SimpleNamespace(model="fake:vocab=77", kv_tokens=99, max_sequences=3, widths=(1, 4), max_step_tokens=16)
    ).describe()
    assert (own.vocab_size, own.usable_cells, own.max_sequences, own.max_session_tokens) == (77, 99, 3, 99)
    assert [m.max_tokens for m in own.table.methods] == [1, 4, 16]


def test_a_poisoned_cell_cannot_be_shared() -> None:
    executor = FakeExecutor()
    opened(executor)
    executor.run(plan(executor, ops=(DropSequence(SequenceId(0)),)))
    executor.poison([1])
    with pytest.raises(StalePlan, match="never written"):
        executor.run(plan(executor, ops=(OpenSequence(SequenceId(0), (0, 1)),)))
