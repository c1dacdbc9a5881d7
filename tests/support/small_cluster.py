"""A planner with fake workers, stepped by hand: nothing happens that the test does not say.

Plans that the planner sends wait in `plans` until `answer` runs the oldest. What is delivered is kept per generation
and compared with what came before: offsets follow each other, and nothing follows an end.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from microtome.planner.config import PlannerConfig
from microtome.planner.control import Control
from microtome.planner.errors import BatchingError, StalePlan, StepError
from microtome.planner.events import (
    Cancel,
    CloneSession,
    CloseSession,
    Deliver,
    Event,
    Instruction,
    OpenSession,
    RewindSession,
    RunStep,
    SessionAnswer,
    StepDone,
    StepFailed,
    Submit,
    Tick,
    WorkerDraining,
    WorkerGone,
    WorkerJoined,
    spelled_out,
)
from microtome.planner.types import (
    FinishReason,
    GenerationId,
    GenerationOptions,
    SamplingParams,
    SessionId,
    StepNumber,
    StepPlan,
    Usage,
    WorkerId,
)
from tests.simulation.invariants import check
from tests.support.fake_executor import FakeExecutor, method_table
from tests.support.fake_model import generate

VOCAB = 1000


class SmallCluster:
    def __init__(self, config: PlannerConfig | None = None, *, workers: int = 1, **executor: object) -> None:
        """`executor`: arguments of `FakeExecutor`, for every worker that joins."""
        self.config = config or PlannerConfig()
        self.control = Control(self.config)
        self.now_us = 0
        self.executors: dict[str, FakeExecutor] = {}
        self.plans: dict[str, deque[StepPlan]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Deliver] = {}
        self.told: list[Instruction] = []  # everything, in order
        self.sent: list[StepPlan] = []  # every plan, in order
        self._executor = {"usable_cells": 4096, "vocab_size": VOCAB, **executor}
        self._lives = 0
        self._names = 0
        self._tickets = 0
        for number in range(workers):
            self.join(f"w{number}")

    # --- events ---

    def handle(self, event: Event) -> list[Instruction]:
        instructions = spelled_out(self.control_answers(event))
        check(self.control)
        self.told += instructions
        for instruction in instructions:
            if isinstance(instruction, RunStep):
                self.plans[instruction.worker].append(instruction.plan)
                self.sent.append(instruction.plan)
            elif isinstance(instruction, Deliver):
                self._take(instruction)
        return instructions

    def control_answers(self, event: Event) -> list[Instruction]:
        return self.control.handle(event)

    def _take(self, d: Deliver) -> None:
        assert d.generation not in self.ends, f"{d.generation} goes on after its end"
        so_far = self.tokens.setdefault(d.generation, [])
        if d.offset < len(so_far) and d.finish is FinishReason.STOP and not d.tokens:
            del so_far[d.offset :]  # the caller said how many it keeps
        assert d.offset == len(so_far)
        so_far += d.tokens
        if d.finish is not None:
            self.ends[d.generation] = d

    def join(self, name: str = "w0", **executor: object) -> list[Instruction]:
        self._lives += 1
        made = FakeExecutor(incarnation=f"{self._lives:032x}", **{**self._executor, **executor})  # type: ignore[arg-type]
        self.executors[name], self.plans[name] = made, deque()
        return self.handle(WorkerJoined(at_us=self.now_us, worker=WorkerId(name), capability=made.describe()))

    def restart_driver(self, config: PlannerConfig | None = None) -> None:
        """A new planner finds the workers with what they hold. What was delivered is told again, from the start."""
        self.control = Control(config or self.config)
        self.tokens.clear()
        self.ends.clear()
        for name, executor in self.executors.items():
            self.plans[name].clear()
            self.handle(
                WorkerJoined(
                    at_us=self.now_us,
                    worker=WorkerId(name),
                    capability=executor.describe(),
                    held=executor.snapshot(),
                    last_step=StepNumber(executor.last_step),
                )
            )

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 4,
        *,
        name: str | None = None,
        session: int | None = None,
        siblings: Sequence[tuple[str, int]] = (),
        seed: int | None = None,
        **options: object,
    ) -> str:
        """Greedy unless a seed is given."""
        self._names += 1
        name = name or f"g{self._names}"
        if seed is not None or siblings:
            options["sampling"] = SamplingParams(temperature=1.0, seed=seed or 0)
        event = Submit(
            at_us=self.now_us,
            generation=GenerationId(name),
            prompt=tuple(prompt),
            options=GenerationOptions(max_new_tokens=max_new_tokens, **options),  # type: ignore[arg-type]
            session=None if session is None else SessionId(session),
            siblings=tuple((GenerationId(sibling), coin) for sibling, coin in siblings),
        )
        self.handle(event)
        return name

    def cancel(self, name: str) -> list[Instruction]:
        return self.handle(Cancel(at_us=self.now_us, generation=GenerationId(name)))

    def tick(self, at_us: int | None = None) -> list[Instruction]:
        self.now_us = at_us if at_us is not None else self.now_us
        return self.handle(Tick(at_us=self.now_us))

    def lose(self, name: str = "w0") -> list[Instruction]:
        incarnation = self.executors[name].describe().incarnation
        return self.handle(
            WorkerGone(at_us=self.now_us, worker=WorkerId(name), incarnation=incarnation, cause="lost in a test")
        )

    def drain(self, name: str = "w0") -> list[Instruction]:
        return self.handle(WorkerDraining(at_us=self.now_us, worker=WorkerId(name)))

    # --- sessions ---

    def open(self, **what: str) -> int:
        answer = self._ask(OpenSession(at_us=self.now_us, ticket=self._ticket(), **what))
        assert answer.session is not None, answer.error
        return answer.session

    def clone(self, source: int, upto: int | None = None) -> SessionAnswer:
        return self._ask(CloneSession(at_us=self.now_us, ticket=self._ticket(), source=SessionId(source), upto=upto))

    def rewind(self, session: int, position: int) -> SessionAnswer:
        return self._ask(
            RewindSession(at_us=self.now_us, ticket=self._ticket(), session=SessionId(session), position=position)
        )

    def close(self, session: int) -> SessionAnswer:
        return self._ask(CloseSession(at_us=self.now_us, ticket=self._ticket(), session=SessionId(session)))

    def length(self, session: int) -> int:
        return self.control._sessions.get(SessionId(session)).length

    def transcript(self, session: int) -> list[int]:
        return list(self.control._sessions.get(SessionId(session)).transcript)

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _ask(self, event: OpenSession | CloneSession | RewindSession | CloseSession) -> SessionAnswer:
        answers = [a for a in self.handle(event) if isinstance(a, SessionAnswer)]
        assert [a.ticket for a in answers] == [event.ticket]
        return answers[0]

    # --- steps ---

    def answer(self, name: str = "w0") -> list[Instruction]:
        """Run the worker's oldest plan and tell the planner how that went."""
        plan = self.plans[name].popleft()
        try:
            event: Event = StepDone(at_us=self.now_us, worker=WorkerId(name), result=self.executors[name].run(plan))
        except (StalePlan, StepError) as error:
            event = self.failure(name, plan, str(error), refused=isinstance(error, StalePlan))
        return self.handle(event)

    def failure(self, name: str, plan: StepPlan, message: str = "by hand", *, refused: bool = False) -> StepFailed:
        return StepFailed(
            at_us=self.now_us,
            worker=WorkerId(name),
            incarnation=plan.incarnation,
            step=plan.step,
            refused=refused,
            message=message,
        )

    def run(self, limit: int = 2000) -> int:
        """Answer every plan, workers in turn, until none is left; how many there were."""
        steps = 0
        while any(self.plans.values()):
            for name, plans in self.plans.items():
                if plans:
                    self.answer(name)
                    steps += 1
                    assert steps <= limit, "no end in sight"
        return steps

    # --- what is to be seen ---

    def finish(self, name: str) -> FinishReason | None:
        end = self.ends.get(name)
        return end.finish if end else None

    def error(self, name: str) -> BatchingError | None:
        return self.ends[name].error

    def usage(self, name: str) -> Usage:
        usage = self.ends[name].usage
        assert usage is not None
        return usage

    def cells_used(self, name: str = "w0") -> int:
        return next(w.cells_used for w in self.control.status().workers if w.worker == name)


def expected(
    history: Sequence[int], max_new_tokens: int = 4, *, seed: int | None = None, stop: Sequence[int] = ()
) -> list[int]:
    """What the model gives undisturbed."""
    sampling = SamplingParams() if seed is None else SamplingParams(temperature=1.0, seed=seed)
    sampling = replace(sampling, prompt_tokens=len(history), stop_token_ids=tuple(stop))
    return generate(history, sampling, max_new_tokens, stop, VOCAB)


__all__ = ["VOCAB", "SmallCluster", "expected", "method_table"]
