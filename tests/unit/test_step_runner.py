"""What becomes of a plan on the step thread: a result, a refusal, or the end of this life of the worker."""

import pytest

from microtome.actors.step_runner import StepRunner
from microtome.actors.wire import StepFault
from microtome.planner.types import StepPlan, StepResult
from tests.support.fake_executor import FakeExecutor
from tests.support.plan_script import PlanScript


class Clock:
    """Nanoseconds that pass by 1000 at every look."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


def runner_and_script(executor: FakeExecutor, kept: int = 2) -> tuple[StepRunner, PlanScript]:
    return StepRunner(executor, kept, Clock()), PlanScript(executor.describe())


def test_a_result_says_how_long_the_step_took_and_the_device_was_idle_before() -> None:
    runner, script = runner_and_script(FakeExecutor())
    first, second = runner.run(script.next()), runner.run(script.next())
    assert isinstance(first, StepResult)
    assert isinstance(second, StepResult)
    assert (first.step_us, first.idle_us) == (1, 0)
    assert (second.step_us, second.idle_us) == (1, 1)


def test_a_repeat_is_the_same_result_times_included_and_is_not_run() -> None:
    executor = FakeExecutor(keep_plans=True)
    runner, script = runner_and_script(executor)
    plan = script.next()
    result = runner.run(plan)
    assert runner.run(plan) == result
    assert executor.seen == [plan]


def test_a_refusal_of_the_executor_leaves_everything_as_it_was() -> None:
    executor = FakeExecutor(refuse_at=2)
    runner, script = runner_and_script(executor)
    runner.run(script.next())
    before, plan = runner.snapshot(), script.next()
    fault = runner.run(plan)
    assert fault == StepFault(
        incarnation=plan.incarnation, step=plan.step, refused=True, message="step 2 is refused as scripted"
    )
    assert runner.snapshot() == before
    assert runner.failure is None
    assert isinstance(runner.run(plan), StepResult)


class Breaking(FakeExecutor):
    """An executor whose device breaks with an error that is none of ours, with pages of advice."""

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step == 2:
            raise RuntimeError("CUDA error: an illegal memory access\nFor debugging consider\n" + "advice " * 500)
        return super().run(plan)


@pytest.mark.parametrize("executor", [FakeExecutor(fail_at=2, keep_plans=True), Breaking(keep_plans=True)])
def test_after_a_failure_nothing_is_run_and_nothing_is_repeated(executor: FakeExecutor) -> None:
    runner, script = runner_and_script(executor)
    plans = [script.next() for _ in range(3)]
    runner.run(plans[0])
    fault = runner.run(plans[1])
    assert isinstance(fault, StepFault)
    assert not fault.refused
    assert "\n" not in fault.message
    assert len(fault.message) <= 500
    assert runner.failure == f"step 2 failed: {fault.message}"
    for plan in plans:
        late = runner.run(plan)
        assert isinstance(late, StepFault)
        assert late.refused
    assert executor.seen == plans[:1]


def test_a_snapshot_names_the_newest_step_and_holds_what_the_executor_holds() -> None:
    executor = FakeExecutor()
    runner, script = runner_and_script(executor)
    assert (runner.snapshot().last_step, runner.snapshot().sequences) == (0, ())
    runner.run(script.next())
    assert runner.snapshot().last_step == 1
    assert runner.snapshot().sequences == executor.snapshot() != ()


def test_a_probe_that_fails_is_the_end() -> None:
    executor = FakeExecutor()
    runner, script = runner_and_script(executor)
    assert runner.probe()
    executor.fail_probe = True
    assert not runner.probe()
    assert runner.failure == "an idle probe failed: the probe fails as scripted"
    executor.fail_probe = False
    assert not runner.probe()
    assert isinstance(runner.run(script.next()), StepFault)
