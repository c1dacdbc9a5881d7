"""A fake executor whose process ends in the middle of a step: "fake:…,end_at=40,end_by=segv" in the model's name."""

import ctypes
import os
import sys
from types import SimpleNamespace

from microtome.planner.types import StepPlan, StepResult
from tests.support.fake_executor import FakeExecutor
from tests.support.fake_executor import build_executor as build_fake

EXIT_CODE = 3


def end(by: str) -> None:
    match by:
        case "segv":
            ctypes.string_at(0)
        case "exit":  # as C code does it
            ctypes.CDLL(None).exit(EXIT_CODE)
        case "_exit":
            os._exit(EXIT_CODE)
        case "sys_exit":
            sys.exit(EXIT_CODE)
        case "error":
            raise ValueError("the numbers do not add up")
        case _:
            raise AssertionError(f"no way to end is called {by!r}")


class EndingExecutor:
    def __init__(self, executor: FakeExecutor, at: int, by: str) -> None:
        self._executor, self._at, self._by = executor, at, by
        self.describe, self.snapshot, self.probe = executor.describe, executor.snapshot, executor.probe

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step == self._at:
            end(self._by)
        return self._executor.run(plan)


def build_executor(options: object) -> EndingExecutor:
    model, _, by = str(getattr(options, "model", "")).rpartition(",end_by=")
    model, _, at = model.rpartition(",end_at=")
    plain = SimpleNamespace(**{key: getattr(options, key) for key in options.__dataclass_fields__} | {"model": model})  # type: ignore[attr-defined]
    return EndingExecutor(build_fake(plain), int(at), by)
