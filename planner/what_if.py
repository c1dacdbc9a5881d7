"""What a recorded day would have cost under another policy or with more workers, in virtual time.

The callers are those of the journal: each generation is submitted when it was, asks for the tokens that it was given,
and is cancelled if it was. The workers are copies of those that joined, without faults; a step takes what the cost
table says, or, where nothing was measured, the recorded mean per token. A session's next turn is submitted no earlier
than its last one ends. So the figures compare plans, not machines: quote them beside `simulated` of the same journal
under its own policy, not beside what the clock said.

Where the journal tells how many workers there may be (`Scale`), the planner starts and drains them in the simulation,
too: each takes as long to come as those of the journal did on average, and updates and drains happen when they did.
Asked for a number of workers, it has so many all the time, copies of the first.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from microtome.planner.config import PlannerConfig
from microtome.planner.control import Control
from microtome.planner.errors import BadConfig, BadInput
from microtome.planner.events import (
    CallersWait,
    Cancel,
    CloneSession,
    CloseSession,
    Deliver,
    Event,
    GiveUpWorker,
    Instruction,
    LookUpSession,
    OpenSession,
    ReleaseWorker,
    RewindSession,
    RunStep,
    Scale,
    SessionAnswer,
    StartWorker,
    StepDone,
    Submit,
    Tick,
    UpdateWorkers,
    WorkerDraining,
    WorkerGone,
    WorkerJoined,
    WorkerPlaced,
    WorkerStartFailed,
    spelled_out,
)
from microtome.planner.journal import Entry
from microtome.planner.policies import POLICIES
from microtome.planner.slicing import CheapestPlanner
from microtome.planner.types import (
    Capability,
    GenerationId,
    Incarnation,
    InputFlag,
    SessionId,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkerId,
)

_TICK_US = 100_000
_QUIET_TICK_US = 1_000_000  # while nothing is under way
_STUCK_US = 3_600_000_000  # without a delivery, while something is under way
_UNSAID = TokenLogprobs(0.0)  # a number that decides nothing
_START_US = 10_000_000  # of a worker, where none was seen to start


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds; all 0 where there is no sample."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float

    @staticmethod
    def of(samples_us: Iterable[int]) -> "Percentiles":
        ordered = sorted(samples_us)
        if not ordered:
            return Percentiles(0, 0.0, 0.0, 0.0)
        ranks = [ordered[min(len(ordered) - 1, len(ordered) * p // 100)] / 1000 for p in (50, 90, 99)]
        return Percentiles(len(ordered), *ranks)


@dataclass(frozen=True, slots=True)
class Figures:
    """One life, measured at the planner: from a submission to a delivery."""

    ttft: Percentiles
    itl: Percentiles  # between a generation's deliveries
    generations: int  # that delivered a token
    refused: int  # ended without one, with an error
    output_tokens: int
    span_ms: float  # from the first submission to the last delivery
    tokens_per_s: float
    workers: float  # on average over that span


@dataclass(frozen=True, slots=True)
class WhatIfReport:
    recorded: Figures  # by the journal's own times
    own: Figures  # simulated: the journal's policy and workers
    other: Figures  # simulated: those asked for
    policy: str
    workers: int | None  # None: as recorded

    @property
    def asked(self) -> str:
        return f"{self.policy}, workers {'as recorded' if self.workers is None else self.workers}"

    def rows(self) -> list[tuple[str, float, float, float]]:
        """Each figure's name and values: recorded, simulated as recorded, simulated as asked."""
        columns = [dict(_rows(figures)) for figures in (self.recorded, self.own, self.other)]
        return [(name, *(column[name] for column in columns)) for name in columns[0]]  # type: ignore[misc]

    def as_dict(self) -> dict[str, object]:
        """For a JSON file."""
        columns = {"recorded": self.recorded, "simulated": self.own, "what_if": self.other}
        return {
            "policy": self.policy,
            "workers": self.workers,
            **{name: dict(_rows(figures)) for name, figures in columns.items()},
        }

    def __str__(self) -> str:
        titles = ["", "recorded", "simulated", self.asked]
        lines = [titles] + [[name, *(f"{figure:.6g}" for figure in figures)] for name, *figures in self.rows()]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        return "\n".join(
            "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines
        )


def _rows(figures: Figures) -> list[tuple[str, float]]:
    rows: list[tuple[str, float]] = []
    for name, p in (("ttft", figures.ttft), ("itl", figures.itl)):
        rows += [(f"{name}_p50_ms", p.p50_ms), (f"{name}_p90_ms", p.p90_ms), (f"{name}_p99_ms", p.p99_ms)]
    rows += [
        ("generations", figures.generations),
        ("refused", figures.refused),
        ("output_tokens", figures.output_tokens),
        ("span_ms", figures.span_ms),
        ("tokens_per_s", figures.tokens_per_s),
        ("workers", figures.workers),
    ]
    return rows


def what_if(
    entries: Iterable[Entry], config: PlannerConfig, *, policy: str | None = None, workers: int | None = None
) -> WhatIfReport:
    """Simulate the journal twice: as it was configured, and as asked. None: as it was.

    Raises `BadConfig` for an unknown policy or fewer than one worker, `BadInput` for a journal in which no worker
    joined or nothing was submitted.
    """
    policy = config.policy if policy is None else policy
    if policy not in POLICIES:
        raise BadConfig(f"policy {policy!r} is none of {', '.join(sorted(POLICIES))}")
    day = _read_day(entries)
    if workers is not None and workers < 1:
        raise BadConfig(f"workers {workers} is below 1")
    return WhatIfReport(
        recorded=day.times.figures(),
        own=_simulate(day, config, None),
        other=_simulate(day, replace(config, policy=policy), workers),
        policy=policy,
        workers=workers,
    )


# --- what the journal says ---


@dataclass(slots=True)
class _Times:
    """When tokens came: fed with submissions and deliveries, in order."""

    submitted: dict[GenerationId, int] = field(default_factory=dict)
    last: dict[GenerationId, int] = field(default_factory=dict)
    ttft_us: list[int] = field(default_factory=list)
    gaps_us: list[int] = field(default_factory=list)
    output_tokens: int = 0
    refused: int = 0
    end_us: int = 0
    came: list[int] = field(default_factory=list)  # when a worker did
    went: list[int] = field(default_factory=list)

    def submit(self, event: Submit) -> None:
        for generation in (event.generation, *(name for name, _ in event.siblings)):
            self.submitted.setdefault(generation, event.at_us)

    def deliver(self, d: Deliver, at_us: int) -> None:
        if d.tokens:
            before = self.last.get(d.generation)
            if before is not None:
                self.gaps_us.append(at_us - before)
            elif d.generation in self.submitted:
                self.ttft_us.append(at_us - self.submitted[d.generation])
            self.last[d.generation] = at_us
            self.output_tokens += len(d.tokens)
            self.end_us = max(self.end_us, at_us)
        elif d.error is not None and d.generation not in self.last:
            self.refused += 1

    def figures(self) -> Figures:
        begin_us = min(self.submitted.values(), default=0)
        span_us = max(1, self.end_us - begin_us)
        worker_us = sum(max(0, self.end_us - max(at, begin_us)) for at in self.came)
        worker_us -= sum(max(0, self.end_us - max(at, begin_us)) for at in self.went)
        return Figures(
            ttft=Percentiles.of(self.ttft_us),
            itl=Percentiles.of(self.gaps_us),
            generations=len(self.last),
            refused=self.refused,
            output_tokens=self.output_tokens,
            span_ms=span_us / 1000,
            tokens_per_s=self.output_tokens / span_us * 1e6,
            workers=worker_us / span_us,
        )


@dataclass(slots=True)
class _Day:
    """A journal as traffic: what callers did, and the tokens that each generation was given."""

    capabilities: dict[int, Capability]  # by revision of the workers' settings; the first is the first's
    workers: int  # at most at a time
    scaled: bool  # the planner was told how many there may be
    first: list[WorkerJoined]  # those that were there before it was
    start_us: int  # from asking for a worker to having it
    asked: list[Event]  # by callers and operators, in order
    tokens: dict[GenerationId, list[int]]
    sessions: dict[int, SessionId]  # by ticket
    times: _Times
    us_per_token: int  # of a step, on average: where the table has no costs


def _read_day(entries: Iterable[Entry]) -> _Day:
    capabilities: dict[int, Capability] = {}
    present: set[WorkerId] = set()
    asked_for: dict[WorkerId, int] = {}  # when a worker was
    starts_us: list[int] = []
    first: list[WorkerJoined] = []
    workers = 0
    scaled = False
    asked: list[Event] = []
    tokens: dict[GenerationId, list[int]] = {}
    sessions: dict[int, SessionId] = {}
    times = _Times()
    step_us = step_tokens = 0

    def gone(worker: WorkerId, at_us: int) -> None:
        if worker in present:
            present.discard(worker)
            times.went.append(at_us)

    for entry in entries:
        event = entry.event
        match event:
            case WorkerJoined():
                capabilities.setdefault(event.revision, event.capability)
                gone(event.worker, event.at_us)  # it came back
                present.add(event.worker)
                times.came.append(event.at_us)
                workers = max(workers, len(present))
                if event.worker in asked_for:
                    starts_us.append(event.at_us - asked_for.pop(event.worker))
                if not scaled:
                    first.append(event)
            case WorkerGone():
                gone(event.worker, event.at_us)
            case Submit():
                asked.append(event)
                times.submit(event)
            case Scale() | UpdateWorkers() | WorkerDraining() | CallersWait():
                asked.append(event)
                scaled = scaled or isinstance(event, Scale)
            case Cancel() | OpenSession() | CloneSession() | RewindSession() | LookUpSession() | CloseSession():
                asked.append(event)
            case StepDone():
                step_us += event.result.step_us
        for instruction in spelled_out(entry.instructions):
            if isinstance(instruction, Deliver):
                times.deliver(instruction, event.at_us)
                tokens.setdefault(instruction.generation, []).extend(instruction.tokens)
            elif isinstance(instruction, SessionAnswer) and instruction.session is not None:
                sessions[instruction.ticket] = instruction.session
            elif isinstance(instruction, RunStep):
                step_tokens += len(instruction.plan.cells)
            elif isinstance(instruction, StartWorker):
                asked_for[instruction.worker] = event.at_us
            elif isinstance(instruction, GiveUpWorker | ReleaseWorker):
                gone(instruction.worker, event.at_us)
    if not capabilities:
        raise BadInput("no worker joined in this journal: nothing can be simulated")
    if not times.submitted:
        raise BadInput("nothing was submitted in this journal: nothing can be simulated")
    return _Day(
        capabilities=capabilities,
        workers=workers,
        scaled=scaled,
        first=first,
        start_us=sum(starts_us) // len(starts_us) if starts_us else _START_US,
        asked=asked,
        tokens=tokens,
        sessions=sessions,
        times=times,
        us_per_token=max(1, step_us // max(1, step_tokens)),
    )


# --- the simulation ---

_Operator = Scale | UpdateWorkers | WorkerDraining | CallersWait


def _simulate(day: _Day, config: PlannerConfig, workers: int | None) -> Figures:
    simulation = _Simulation(day, config)
    simulation.run(workers)
    return simulation.times.figures()


class _Simulation:
    """`Control` in virtual time, with workers that answer from the journal's tokens."""

    def __init__(self, day: _Day, config: PlannerConfig) -> None:
        self._day = day
        self._control = Control(config)
        self._slicers = {revision: CheapestPlanner(c.table) for revision, c in day.capabilities.items()}
        self._clock = 0
        self._asked = 0
        self._calls: list[tuple[int, int, Callable[[], Event | None]]] = []
        self._plans: dict[WorkerId, deque[StepPlan]] = {}
        self._turns: dict[SessionId, deque[Event]] = {}  # by the journal's id: what waits for the session
        self._sessions: dict[SessionId, SessionId] = {}  # the journal's ids → those here
        self._talking: dict[GenerationId, SessionId] = {}
        self._recorded: dict[GenerationId, SessionId] = {}  # the same by the journal's ids
        self._open: set[GenerationId] = set()
        self._left = 0  # of what callers and operators ask, how much is still to come
        self._starting: dict[WorkerId, int] = {}  # workers asked for, and their revision
        self._revisions: dict[WorkerId, int] = {}
        self._lives = 0
        self._scaled = False
        self._moved_us = 0  # when something was last submitted or delivered
        self.times = _Times()

    def run(self, workers: int | None) -> None:
        """`workers`: so many all the time; None: as the journal has it."""
        day = self._day
        self._scaled = day.scaled and workers is None
        asked = day.asked if self._scaled else [e for e in day.asked if not isinstance(e, _Operator)]
        begin = min(event.at_us for event in asked)
        if self._scaled:
            for joined in day.first:
                self._at(joined.at_us, lambda e=joined: self._join(e.worker, e.revision))  # type: ignore[misc]
            self._at(begin, self._tick)
        else:
            revision = next(iter(day.capabilities))
            for number in range(workers or day.workers):
                self._clock = begin
                self._handle(self._join(WorkerId(f"worker-{number}"), revision))
        self._left = len(asked)
        for event in asked:
            self._at(event.at_us, lambda event=event: self._arrive(event))  # type: ignore[misc]
        while self._calls:
            self._clock, _, call = heapq.heappop(self._calls)
            if (happened := call()) is not None:
                self._handle(happened)
            if not self._calls and self._open:
                self._at(self._clock + _TICK_US, self._tick)

    def _tick(self) -> Event | None:
        """Time passes while anything is to come: how many workers there should be is decided by it."""
        if not (self._left or self._open):
            return None
        if self._open and self._clock > self._moved_us + _STUCK_US:
            raise BadInput(f"the simulation comes to no end: {len(self._open)} generations got no token for an hour")
        if self._scaled:
            self._at(self._clock + (_TICK_US if self._open else _QUIET_TICK_US), self._tick)
        return Tick(at_us=self._clock)

    def _arrive(self, event: Event) -> Event | None:
        self._left -= 1
        return event if isinstance(event, _Operator) else self._ask(event)

    def _join(self, worker: WorkerId, revision: int) -> Event:
        self._lives += 1
        self._plans[worker], self._revisions[worker] = deque(), revision
        self.times.came.append(self._clock)
        capability = replace(self._day.capabilities[revision], incarnation=Incarnation(f"{self._lives:032x}"))
        return WorkerJoined(at_us=self._clock, worker=worker, capability=capability, revision=revision)

    def _start(self, instruction: StartWorker) -> None:
        worker, revision = instruction.worker, instruction.revision
        self._starting[worker] = revision
        self._at(self._clock, lambda: WorkerPlaced(at_us=self._clock, worker=worker))
        self._at(self._clock + self._day.start_us, lambda: self._started(worker))

    def _started(self, worker: WorkerId) -> Event | None:
        revision = self._starting.pop(worker, None)
        if revision is None:
            return None  # it is not wanted any more
        if revision not in self._day.capabilities:
            cause = f"no worker of revision {revision} has joined in the journal"
            return WorkerStartFailed(at_us=self._clock, worker=worker, cause=cause)
        return self._join(worker, revision)

    def _end(self, worker: WorkerId) -> None:
        self._starting.pop(worker, None)
        if self._plans.pop(worker, None) is not None:
            self.times.went.append(self._clock)

    def _at(self, at_us: int, call: Callable[[], Event | None]) -> None:
        self._asked += 1
        heapq.heappush(self._calls, (at_us, self._asked, call))

    def _ask(self, event: Event) -> Event | None:
        """The event, now; None: it waits until its session is there, or for its turn on it."""
        was = getattr(event, "source", None) or getattr(event, "session", None)
        if was is not None:
            session = self._sessions.get(was)
            if session is None or session in self._talking.values():
                self._turns.setdefault(was, deque()).append(event)
                return None
            event = _on_session(event, session)
        if isinstance(event, Submit):
            limit = max(1, len(self._day.tokens.get(event.generation, ())))
            options = replace(event.options, max_new_tokens=limit, stop_token_ids=(), deadline_us=None)
            event = replace(event, options=options, fingerprint=event.fingerprint if self._scaled else "")
            self._open.update([event.generation, *(name for name, _ in event.siblings)])
            if event.session is not None and was is not None:
                self._talking[event.generation] = event.session
                self._recorded[event.generation] = was
        return _moved(event, self._clock)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Submit):
            self.times.submit(event)
            self._moved_us = self._clock
        for instruction in spelled_out(self._control.handle(event)):
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case RunStep():
                self._send(instruction)
            case Deliver():
                self.times.deliver(instruction, self._clock)
                self._moved_us = self._clock
                if instruction.finish is not None:
                    self._ended(instruction.generation)
            case SessionAnswer(ticket=ticket, session=session) if session is not None:
                was = self._day.sessions.get(ticket)
                if was is not None and was not in self._sessions:
                    self._sessions[was] = session
                    self._take_turns(was)
            case StartWorker():
                self._start(instruction)
            case ReleaseWorker(worker=worker) | GiveUpWorker(worker=worker):
                self._end(worker)

    def _ended(self, generation: GenerationId) -> None:
        self._open.discard(generation)
        self._talking.pop(generation, None)
        was = self._recorded.pop(generation, None)
        if was is not None:
            self._take_turns(was)

    def _take_turns(self, session: SessionId) -> None:
        """Let what waited for a session go on, up to its next generation."""
        waiting = self._turns.pop(session, deque())
        while waiting:
            event = waiting.popleft()
            self._at(self._clock, lambda event=event: self._ask(event))  # type: ignore[misc]
            if isinstance(event, Submit):
                break
        if waiting:
            self._turns[session] = waiting

    def _send(self, instruction: RunStep) -> None:
        plans = self._plans[instruction.worker]
        plans.append(instruction.plan)
        if len(plans) == 1:
            self._run_next(instruction.worker, plans[0])

    def _run_next(self, worker: WorkerId, plan: StepPlan) -> None:
        took_us = self._step_us(worker, len(plan.cells))
        self._at(self._clock + took_us, lambda: self._answer(worker, plan, took_us))

    def _answer(self, worker: WorkerId, plan: StepPlan, took_us: int) -> Event | None:
        plans = self._plans.get(worker)
        if not plans or plans[0] is not plan:
            return None  # its worker has gone
        plans.popleft()
        if plans:
            self._run_next(worker, plans[0])
        result = StepResult(
            incarnation=plan.incarnation,
            step=plan.step,
            tokens=self._tokens(worker),
            step_us=took_us,
            prompt_logprobs=(_UNSAID,) * _prompt_rows(plan),
        )
        return StepDone(at_us=self._clock, worker=worker, result=result)

    def _step_us(self, worker: WorkerId, tokens: int) -> int:
        if not tokens:
            return 1
        slicer = self._slicers[self._revisions[worker]]
        return max(1, slicer.cost_ns(tokens) // 1000 or tokens * self._day.us_per_token)

    def _tokens(self, worker: WorkerId) -> tuple[int, ...]:
        """What the journal's generations were given next, for the step that is answered; 0 beyond what is known."""
        step = self._control.awaited_outputs(worker)
        given = self._day.tokens
        return tuple(given[name][at] if name in given and at < len(given[name]) else 0 for name, at in step)


def _prompt_rows(plan: StepPlan) -> int:
    """Tokens of prompts of which it is asked how likely they are."""
    inputs = zip(plan.widths, plan.flags, strict=True)
    asked = [(width, flags) for width, flags in inputs if flags & InputFlag.PROMPT_LOGPROBS]
    return sum([width - bool(flags & InputFlag.WANTS_OUTPUT) for width, flags in asked])


def _on_session(event: Any, session: SessionId) -> Event:
    field_name = "source" if isinstance(event, CloneSession) else "session"
    moved: Event = replace(event, **{field_name: session})
    return moved


def _moved(event: Any, at_us: int) -> Event:
    moved: Event = replace(event, at_us=at_us)
    return moved
