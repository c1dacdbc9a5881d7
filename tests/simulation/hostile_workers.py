"""Workers that mean no good: unequal, in tiny pools, with answers that fail, repeat, lie, or come after their end.

A sound worker may be given up only for its silence. One that was sent a plan it cannot run would raise: the fake
executor checks all that it is given.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from microtome.planner.control import Control
from microtome.planner.events import (
    CallersWait,
    Event,
    GiveUpWorker,
    Instruction,
    ReleaseWorker,
    RunStep,
    StepDone,
    StepFailed,
    WorkerDraining,
    WorkerGone,
    WorkerJoined,
    WorkerPlaced,
    WorkerStartFailed,
)
from microtome.planner.types import Incarnation, MethodTable, StepNumber, StepPlan, StepResult, WorkerId
from tests.support.fake_executor import FakeExecutor

_FINGERPRINT, _ANOTHER = "fa4e", "beef"
_MOST = 3
_NOBODY = WorkerId("nobody")
_NEVER = Incarnation("1" * 32)


class _Life:
    """One incarnation."""

    def __init__(self, name: WorkerId, executor: FakeExecutor) -> None:
        self.name = name
        self.executor = executor
        self.incarnation = executor.describe().incarnation
        self.plans: deque[StepPlan] = deque()  # sent, not run
        self.sound = True
        self.last: StepResult | None = None


class HostileWorkers:
    def __init__(
        self,
        rng: Random,
        control: Control,
        vocab: int,
        usable_cells: int,
        tables: Sequence[MethodTable],
        post: Callable[[Event], list[Instruction]],
        *,
        unequal: bool,
    ) -> None:
        self._rng = rng
        self._control = control
        self._vocab = vocab
        self._usable_cells = usable_cells
        self._tables = tables
        self._post = post
        self._unequal = unequal
        self._here: dict[WorkerId, _Life] = {}
        self._dead: list[_Life] = []
        self._lives = 0

    @property
    def names(self) -> list[WorkerId]:
        return list(self._here)

    @property
    def busy(self) -> bool:
        return any(life.plans for life in self._here.values())

    def executor(self, name: WorkerId) -> FakeExecutor:
        return self._here[name].executor

    def carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case RunStep(worker=name, plan=plan):
                    life = self._here[name]
                    assert life.incarnation == plan.incarnation, "a plan for a worker that is not there"
                    life.plans.append(plan)
                case GiveUpWorker(worker=name, incarnation=incarnation, cause=cause):
                    life = self._here.get(name)
                    if life is not None and life.incarnation == incarnation:
                        silent = bool(life.plans) and cause.startswith("no answer")
                        assert silent or not life.sound, f"{name} is given up and was at no fault: {cause}"
                        self._dead.append(self._here.pop(name))
                case ReleaseWorker(worker=name):
                    if name in self._here:
                        self._dead.append(self._here.pop(name))

    def join(self, now_us: int, name: WorkerId, *, roomy: bool = False) -> None:
        """`roomy`: of the model that is served, with cells for all that any worker could ever hold."""
        rng, cells = self._rng, self._usable_cells
        if roomy:
            fingerprint, cells = (self._control.fingerprint or _FINGERPRINT)[:4], 2 * cells
        elif self._unequal:
            fingerprint = _FINGERPRINT if rng.random() < 0.93 else _ANOTHER
            cells = rng.choice((cells, max(4, cells // 3), 2 * cells))
        else:
            fingerprint = _FINGERPRINT
        self._lives += 1
        executor = FakeExecutor(
            incarnation=f"{self._lives:032x}",
            usable_cells=cells,
            max_sequences=rng.choice((1, 2, 5, 12)),
            table=rng.choice(self._tables) if self._unequal else self._tables[0],
            vocab_size=self._vocab,
            fingerprint=fingerprint,
        )
        if name in self._here:
            self._dead.append(self._here[name])
        life = self._here[name] = _Life(name, executor)
        served = self._control.fingerprint
        life.sound = served is None or served == executor.describe().fingerprint
        self._post(WorkerJoined(at_us=now_us, worker=name, capability=executor.describe()))

    def come_or_go(self, now_us: int) -> None:
        choice = self._rng.random()
        if choice < 0.6 or not self._here:
            if len(self._here) < _MOST or self._rng.random() < 0.1:
                self.join(now_us, WorkerId(f"w{self._rng.randrange(_MOST)}"))
            return
        life = self._rng.choice(list(self._here.values()))
        if choice < 0.8:
            deadline_us = self._rng.choice((None, now_us, now_us - 5, now_us + 1000))
            self._post(WorkerDraining(at_us=now_us, worker=life.name, deadline_us=deadline_us))
        elif choice < 0.9:
            self._dead.append(self._here.pop(life.name))
            self._post(WorkerGone(at_us=now_us, worker=life.name, incarnation=life.incarnation, cause="died"))
        else:
            self._post(WorkerGone(at_us=now_us, worker=life.name, incarnation=_NEVER, cause="another one died"))

    def answer(self, now_us: int, *, soundly: bool = False) -> None:
        """Some worker runs its next plan, and answers it as it likes."""
        busy = [life for life in self._here.values() if life.plans]
        if not busy:
            return
        life = self._rng.choice(busy)
        mood = 1.0 if soundly else self._rng.random()
        if mood < 0.004:
            life.sound = False
            self._post(self._failed(now_us, life, life.plans.popleft(), refused=False))
        elif mood < 0.012:
            life.sound = False
            plans = list(life.plans)
            life.plans.clear()
            for plan in plans:
                if self._here.get(life.name) is life:
                    self._post(self._failed(now_us, life, plan, refused=True))
        else:
            result = life.last = life.executor.run(life.plans.popleft())
            if mood < 0.016:
                life.sound = False
                result = self._lie(result)
            self._post(StepDone(at_us=now_us, worker=life.name, result=result))
            if self._rng.random() < 0.1:
                self._post(StepDone(at_us=now_us, worker=life.name, result=result))

    def haunt(self, now_us: int) -> None:
        """Word of workers that never were, and of those that are no more."""
        first = WorkerId("w0")
        stray: Event = self._rng.choice(
            (
                StepDone(at_us=now_us, worker=_NOBODY, result=StepResult(incarnation=_NEVER, step=StepNumber(1))),
                StepDone(
                    at_us=now_us,
                    worker=first,
                    result=StepResult(incarnation=_NEVER, step=StepNumber(-1), tokens=(1, 2)),
                ),
                StepFailed(
                    at_us=now_us, worker=first, incarnation=_NEVER, step=StepNumber(4), refused=True, message=""
                ),
                WorkerPlaced(at_us=now_us, worker=_NOBODY),
                WorkerStartFailed(at_us=now_us, worker=_NOBODY, cause="never asked for"),
                WorkerDraining(at_us=now_us, worker=_NOBODY),
                WorkerGone(at_us=now_us, worker=_NOBODY, incarnation=_NEVER, cause=""),
                CallersWait(at_us=now_us, count=3),
                CallersWait(at_us=now_us, count=0),
            )
        )
        self._post(stray)
        if not self._dead:
            return
        ghost = self._rng.choice(self._dead)
        if ghost.last is not None:
            self._post(StepDone(at_us=now_us, worker=ghost.name, result=ghost.last))
        if ghost.incarnation in self._control._roster._fenced and self._rng.random() < 0.3:
            self._post(WorkerJoined(at_us=now_us, worker=ghost.name, capability=ghost.executor.describe()))

    def _lie(self, result: StepResult) -> StepResult:
        tokens = result.tokens
        return self._rng.choice(
            (
                replace(result, tokens=(*tokens, 0)),
                replace(result, tokens=tokens[:-1] if tokens else (1,)),
                replace(result, tokens=(self._vocab,) * max(1, len(tokens))),
                replace(result, step=StepNumber(result.step + 5)),
            )
        )

    @staticmethod
    def _failed(now_us: int, life: _Life, plan: StepPlan, *, refused: bool) -> StepFailed:
        return StepFailed(
            at_us=now_us,
            worker=life.name,
            incarnation=plan.incarnation,
            step=plan.step,
            refused=refused,
            message="failed by ill will",
        )
