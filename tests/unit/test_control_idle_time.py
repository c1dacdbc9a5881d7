"""A worker's gap between steps is idling only while work waited."""

from collections import deque
from dataclasses import replace

import pytest

from microtome.planner.config import PlannerConfig
from microtome.planner.control import Control
from microtome.planner.events import Instruction, RunStep, StepDone, Submit, WorkerJoined
from microtome.planner.types import GenerationId, GenerationOptions, StepPlan, WorkerId
from tests.support.fake_executor import FakeExecutor

GAP_US = 7


@pytest.mark.parametrize("plan_ahead", [1, 2, 3])
def test_gap_before_the_first_step_after_a_pause_is_not_counted(plan_ahead: int) -> None:
    control, executor, plans = Control(PlannerConfig(plan_ahead=plan_ahead)), FakeExecutor(), deque[StepPlan]()

    def take(instructions: list[Instruction]) -> None:
        plans.extend(instruction.plan for instruction in instructions if isinstance(instruction, RunStep))

    take(control.handle(WorkerJoined(at_us=0, worker=WorkerId("w"), capability=executor.describe())))
    for number in (1, 2):
        options = GenerationOptions(max_new_tokens=5)
        take(control.handle(Submit(at_us=0, generation=GenerationId(f"g{number}"), prompt=(1, 2), options=options)))
        while plans:
            result = replace(executor.run(plans.popleft()), idle_us=GAP_US)
            take(control.handle(StepDone(at_us=0, worker=WorkerId("w"), result=result)))
        counters = control.status().counters
        assert counters.idle_us == GAP_US * (counters.steps - number)
