"""A fake executor that never comes back from one step: "fake:…,stuck_at=7" in the model's name."""

import threading
from types import SimpleNamespace

from microtome.planner.types import StepPlan, StepResult
from tests.support.fake_executor import FakeExecutor
from tests.support.fake_executor import build_executor as build_fake


class StuckExecutor:
    def __init__(self, executor: FakeExecutor, stuck_at: int) -> None:
        self._executor, self._stuck_at = executor, stuck_at
        self.describe, self.snapshot, self.probe = executor.describe, executor.snapshot, executor.probe

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step == self._stuck_at:
            threading.Event().wait()
        return self._executor.run(plan)


def build_executor(options: object) -> StuckExecutor:
    model = str(getattr(options, "model", ""))
    name, _, stuck_at = model.rpartition(",stuck_at=")
    plain = SimpleNamespace(**{key: getattr(options, key) for key in options.__dataclass_fields__} | {"model": name})  # type: ignore[attr-defined]
    return StuckExecutor(build_fake(plain), int(stuck_at))
