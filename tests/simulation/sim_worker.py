"""A worker in virtual time: the fake executor behind the real step fence, on a link that may lose and repeat answers.

Plans are run one at a time, in order. A worker can be slow, hang for good, die, or fail a step; its answers arrive
late, twice, or after it was given up. It knows nothing of `Control`: it is given plans and calls `answered`.
"""

from collections import deque
from collections.abc import Callable
from random import Random
from typing import TypeVar

from microtome.planner.errors import StalePlan, StepError
from microtome.planner.events import Event, StepDone, StepFailed
from microtome.planner.fence import StepFence
from microtome.planner.types import StepPlan, WorkerId
from tests.simulation.clock import Clock
from tests.support.fake_executor import FakeExecutor

T = TypeVar("T")


class SimWorker:
    def __init__(
        self,
        name: WorkerId,
        executor: FakeExecutor,
        clock: Clock,
        rng: Random,
        answered: Callable[[Event], None],
        *,
        fault_rate: float,
        plan_ahead: int,
    ) -> None:
        self.name = name
        self.executor = executor
        self.capability = executor.describe()
        self.incarnation = self.capability.incarnation
        self.revision = 0  # of the settings it was started with
        self.alive = True  # the process is there
        self.hung = False
        self.doomed = False  # its state is unknown after a failed step
        self.refusals = 0  # of plans, by chance
        self._fence = StepFence(self.incarnation, self.capability.table.digest, kept=plan_ahead)
        self._clock = clock
        self._rng = rng
        self._answered = answered
        self._fault_rate = fault_rate
        self._inbox: deque[StepPlan] = deque()
        self._busy = False
        self._refused = 0  # the step that was refused and is to be planned anew
        self._driver = 0  # how often it was restarted

    @property
    def last_step(self) -> int:
        return self._fence.last_step

    @property
    def idle(self) -> bool:
        return not self._busy and not self._inbox

    def send(self, plan: StepPlan) -> None:
        self._inbox.append(plan)
        self._go_on()

    def forget_plans(self) -> None:
        """The driver that sent them is gone; answers on their way to it are lost."""
        self._inbox.clear()
        self._driver += 1

    def _go_on(self) -> None:
        if self._busy or not self._inbox or not self.alive or self.hung:
            return
        self._busy = True
        self._clock.after(self._rng.randrange(200, 4000), self._run)

    def _run(self) -> None:
        self._busy = False
        if not self.alive or self.hung or not self._inbox:
            return
        plan = self._inbox.popleft()
        fault = self._rng.random() < self._fault_rate
        kind = self._rng.choice(("fail", "refuse", "twice", "late", "repeat")) if fault else ""
        event = self._answer(plan, kind)
        delay = self._rng.randrange(50, 300) if kind != "late" else self._rng.randrange(300, 20_000)
        driver = self._driver
        double_after = self._rng.randrange(0, 9000) if kind == "twice" and isinstance(event, StepDone) else None
        self._clock.after_in_order(self.incarnation, delay, lambda: self._arrive(event, double_after, driver))
        if kind == "repeat" and isinstance(event, StepDone):
            # The link broke and the driver sent the step again: the fence answers it from what it kept.
            again = self._answer(plan, "")
            assert again == event, "a repeated step has another answer"
        self._go_on()

    @staticmethod
    def _sound(call: Callable[[], T]) -> T:
        """Nobody but chance may find fault with a plan."""
        try:
            return call()
        except (StalePlan, StepError) as error:
            raise AssertionError(f"the planner sent a plan that cannot be: {error}") from error

    def _arrive(self, event: Event, double_after_us: int | None, driver: int) -> None:
        if driver != self._driver:
            return
        self._answered(event)
        if double_after_us is not None:
            self._clock.after(double_after_us, lambda: self._arrive(event, None, driver))

    def _answer(self, plan: StepPlan, kind: str) -> Event:
        now = self._clock.now_us
        try:
            if self.doomed:
                raise StalePlan("a step before this one failed")
            if self._refused and plan.step > self._refused:
                raise StalePlan("a step before this one was refused")
            self._refused = 0
            result = self._sound(lambda: self._fence.check(plan))
            if result is None:
                if kind == "refuse":
                    self._refused = plan.step
                    self.refusals += 1
                    raise StalePlan("refused by chance")
                if kind == "fail":
                    self.doomed = True
                    raise StepError("failed by chance")
                result = self._sound(lambda: self.executor.run(plan))
                self._fence.done(result)
        except (StalePlan, StepError) as error:
            return StepFailed(
                at_us=now,
                worker=self.name,
                incarnation=self.incarnation,
                step=plan.step,
                refused=isinstance(error, StalePlan),
                message=str(error),
            )
        return StepDone(at_us=now, worker=self.name, result=result)
