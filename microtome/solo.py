"""One planner and one executor in one plain process: no Ray, no gRPC, no thread. For debugging, profiling, measuring.

`run` is the whole loop: what `Control` decides is done at once, in order, and what comes of it is told back. The clock
is this process's monotonic one. The same requests under the same settings are planned as a service would plan them for
its one worker, except that a step's answer is there before the next step is sent.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from microtome.planner.control import Control
from microtome.planner.errors import BatchingError, WorkerLost
from microtome.planner.events import (
    Deliver,
    DeliverPrompt,
    Event,
    GiveUpWorker,
    Instruction,
    RunStep,
    StepDone,
    Submit,
    WorkerJoined,
    spelled_out,
)
from microtome.planner.protocols import Executor
from microtome.planner.types import (
    FinishReason,
    GenerationId,
    GenerationOptions,
    StepPlan,
    TokenLogprobs,
    Usage,
    WorkerId,
)

WORKER = WorkerId("solo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation to run. It is submitted once `after_steps` steps have been run, or nothing else is left to do."""

    prompt: tuple[int, ...]
    options: GenerationOptions
    after_steps: int = 0


@dataclass(slots=True)
class Answer:
    """What became of a request; times are microseconds of the monotonic clock."""

    submitted_us: int
    tokens: list[int] = field(default_factory=list)
    token_times_us: list[int] = field(default_factory=list)  # one per token
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: BatchingError | None = None

    @property
    def ttft_us(self) -> int | None:
        return self.token_times_us[0] - self.submitted_us if self.token_times_us else None

    @property
    def gaps_us(self) -> list[int]:
        """Between one token and the next."""
        times = self.token_times_us
        return [after - before for before, after in pairwise(times)]


@dataclass(slots=True)
class Engine:
    """What the executor did meanwhile."""

    steps: int = 0
    tokens_run: int = 0  # through forwards, padding not counted
    step_us: int = 0
    idle_us: int = 0  # between a step's result and the next one's start: planning and delivery
    forwards: dict[str, int] = field(default_factory=dict)  # per method, how often it ran
    started_us: int = 0
    ended_us: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    answers: list[Answer]  # in the order of the requests
    engine: Engine


OnTokens = Callable[[int, Sequence[int], FinishReason | None], None]  # request's index, its new tokens, its end


def run(
    executor: Executor,
    control: Control,
    requests: Sequence[Request],
    *,
    concurrency: int | None = None,
    on_tokens: OnTokens | None = None,
) -> Report:
    """Run the requests to their ends, at most `concurrency` of them submitted and unfinished at a time.

    `control` has no other worker. A failing executor's error is raised as it is; a request that is refused or fails
    for itself has its error in its answer.
    """
    loop = _Loop(executor, control, requests, concurrency or len(requests), on_tokens)
    loop.run()
    return Report([loop.answers[index] for index in range(len(requests))], loop.engine)


class _Loop:
    def __init__(
        self,
        executor: Executor,
        control: Control,
        requests: Sequence[Request],
        concurrency: int,
        on_tokens: OnTokens | None,
    ) -> None:
        self._executor = executor
        self._control = control
        self._waiting = deque(enumerate(requests))
        self._concurrency = concurrency
        self._on_tokens = on_tokens
        self._plans: deque[StepPlan] = deque()
        self._unfinished: dict[GenerationId, int] = {}  # the request's index
        self._methods = [method.name for method in executor.describe().table.methods]
        self.answers: dict[int, Answer] = {}
        self.engine = Engine(forwards=dict.fromkeys(self._methods, 0))

    def run(self) -> None:
        self.engine.started_us = now_us()
        if not self._control.status().workers:
            self._tell(WorkerJoined(at_us=now_us(), worker=WORKER, capability=self._executor.describe()))
        while self._waiting or self._unfinished or self._plans:
            self._submit_what_is_due()
            if self._plans:
                self._run_step(self._plans.popleft())
            elif self._unfinished and not self._can_submit():
                raise WorkerLost(f"{len(self._unfinished)} generations wait and no step was planned for them")
        self.engine.ended_us = now_us()

    def _can_submit(self) -> bool:
        return bool(self._waiting) and len(self._unfinished) < self._concurrency

    def _submit_what_is_due(self) -> None:
        while self._can_submit():
            index, request = self._waiting[0]
            if request.after_steps > self.engine.steps and self._plans:
                break
            self._waiting.popleft()
            generation = GenerationId(f"solo-{index}")
            self._unfinished[generation] = index
            self.answers[index] = Answer(submitted_us=now_us())
            self._tell(Submit(at_us=now_us(), generation=generation, prompt=request.prompt, options=request.options))

    def _run_step(self, plan: StepPlan) -> None:
        result = self._executor.run(plan)
        self.engine.steps += 1
        self.engine.tokens_run += len(plan.cells)
        self.engine.step_us += result.step_us
        self.engine.idle_us += result.idle_us
        for name, count in zip(self._methods, result.forwards, strict=True):
            self.engine.forwards[name] += count
        self._tell(StepDone(at_us=now_us(), worker=WORKER, result=result))

    def _tell(self, event: Event) -> None:
        for instruction in spelled_out(self._control.handle(event)):
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case RunStep(plan=plan):
                self._plans.append(plan)
            case Deliver():
                self._deliver(instruction)
            case DeliverPrompt():
                self.answers[self._unfinished[instruction.generation]].prompt_logprobs += instruction.logprobs
            case GiveUpWorker(cause=cause):
                raise WorkerLost(cause)
            case _:
                raise AssertionError(f"nothing here asks for {instruction}")

    def _deliver(self, delivery: Deliver) -> None:
        index = self._unfinished[delivery.generation]
        answer = self.answers[index]
        answer.tokens += delivery.tokens
        answer.token_times_us += [now_us()] * len(delivery.tokens)
        answer.logprobs += delivery.logprobs
        if delivery.finish is not None:
            answer.finish, answer.usage, answer.error = delivery.finish, delivery.usage, delivery.error
            del self._unfinished[delivery.generation]
        if self._on_tokens is not None:
            self._on_tokens(index, delivery.tokens, delivery.finish)


def now_us() -> int:
    return time.perf_counter_ns() // 1000


def percentiles(values: Sequence[float], *wanted: float) -> Iterator[float]:
    """Nearest-rank percentiles of `values`, which are not empty."""
    ranked = sorted(values)
    for share in wanted:
        yield ranked[min(len(ranked) - 1, int(share / 100 * len(ranked)))]
