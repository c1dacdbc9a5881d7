"""A planner that starts and drains its own fake workers, in virtual time: what it asks for happens, after a while.

A worker joins `start_us` after it was asked for, unless its revision is among those that `fail`. Every `STEP_US` each
worker answers one plan.
"""

from collections import deque
from dataclasses import dataclass

from microtome.planner.config import PlannerConfig
from microtome.planner.events import (
    DrainBegun,
    Event,
    Instruction,
    ReleaseWorker,
    Scale,
    StartWorker,
    UpdateEnded,
    UpdateWorkers,
    WorkerJoined,
    WorkerPlaced,
    WorkerStartFailed,
)
from microtome.planner.scaling import ScalingConfig
from microtome.planner.types import WorkerId
from tests.support.fake_executor import FakeExecutor
from tests.support.small_cluster import SmallCluster

STEP_US = 50_000
TICK_STEPS = 4  # a tick each so many steps


@dataclass(slots=True)
class Coming:
    worker: WorkerId
    revision: int
    placed_us: int
    ready_us: int
    placed: bool = False


class ScaledCluster(SmallCluster):
    def __init__(
        self,
        scaling: ScalingConfig,
        count: int = 0,
        *,
        config: PlannerConfig | None = None,
        place_us: int = 0,
        start_us: int = 1_000_000,
        **executor: object,
    ) -> None:
        super().__init__(config, workers=0, **executor)
        self.place_us, self.start_us = place_us, start_us
        self.coming: list[Coming] = []
        self.fail: set[int] = set()  # revisions that do not start
        self.models: dict[int, dict[str, object]] = {}  # by revision: arguments of its executors beside the common ones
        self.changes: list[tuple[int, str, str]] = []  # when, what, which worker
        self.updates: list[UpdateEnded] = []
        self.handle(Scale(at_us=0, scaling=scaling, count=count))

    def handle(self, event: Event) -> list[Instruction]:
        instructions = super().handle(event)
        for instruction in instructions:
            match instruction:
                case StartWorker(worker=worker, revision=revision):
                    placed_us = self.now_us + self.place_us
                    self.coming.append(Coming(worker, revision, placed_us, placed_us + self.start_us))
                    self.changes.append((self.now_us, "start", worker))
                case DrainBegun(worker=worker):
                    self.changes.append((self.now_us, "drain", worker))
                case ReleaseWorker(worker=worker):
                    self.coming = [c for c in self.coming if c.worker != worker]
                    self.executors.pop(worker, None)
                    self.plans.pop(worker, None)
                    self.changes.append((self.now_us, "release", worker))
                case UpdateEnded():
                    self.updates.append(instruction)
        return instructions

    @property
    def names(self) -> list[str]:
        return list(self.executors)

    def update(self, revision: int, *, surge: bool = True) -> None:
        self.handle(UpdateWorkers(at_us=self.now_us, revision=revision, surge=surge))

    def die(self, name: str) -> None:
        self.lose(name)
        del self.executors[name], self.plans[name]

    def advance(self, us: int) -> None:
        """Let so much time pass."""
        for number in range(us // STEP_US):
            self.now_us += STEP_US
            for coming in list(self.coming):
                self._come(coming)
            for name in list(self.plans):
                if self.plans.get(name):
                    self.answer(name)
            if number % TICK_STEPS == 0:
                self.tick()

    def _come(self, coming: Coming) -> None:
        if not coming.placed and self.now_us >= coming.placed_us:
            coming.placed = True
            self.handle(WorkerPlaced(at_us=self.now_us, worker=coming.worker))
        if self.now_us < coming.ready_us or coming not in self.coming:
            return
        self.coming.remove(coming)
        if coming.revision in self.fail:
            self.handle(WorkerStartFailed(at_us=self.now_us, worker=coming.worker, cause="as the test says"))
            return
        self._lives += 1
        arguments = {"incarnation": f"{self._lives:032x}", **self._executor, **self.models.get(coming.revision, {})}
        made = FakeExecutor(**arguments)  # type: ignore[arg-type]
        self.executors[coming.worker] = made
        self.plans[coming.worker] = deque()
        self.handle(
            WorkerJoined(at_us=self.now_us, worker=coming.worker, capability=made.describe(), revision=coming.revision)
        )
