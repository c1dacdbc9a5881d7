"""Rounds in which all engines take their turns, so that a drift of the machine meets each alike.

An engine whose answers have other lengths than were asked for, or that fails, is out from then on, and is named with
the reason: what it did before is not reported either.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.peer_engines.engine_process import EngineFailed, EngineProcess
from bench.peer_engines.figures import Figures, WrongLengths, figures_of, median_figures
from bench.peer_engines.records import Record
from bench.peer_engines.roster import LIMITS, OURS, Engine
from bench.peer_engines.turns import processor_seconds
from bench.peer_engines.workload import Load, load

LOAD_S = 400.0  # of one load, at most
SHORT_S, MOST_RUNS = 1.0, 4  # a load that is shorter is run again, up to so often, and the median counts
WARM_UP = ("W1", "W2", "W3")
WARM_UP_REQUESTS = 16


@dataclass(frozen=True)
class Plan:
    """What to measure at one dtype."""

    engines: tuple[Engine, ...]
    dtype: str
    works: tuple[str, ...]
    rounds: int
    minutes: float  # no round begins that would end beyond
    home: Path
    cores: tuple[int, ...]
    settings: Mapping[str, object]  # of ours
    all_new: bool = False  # no engine stays from one round to the next
    look_s: float = 0.5  # before each turn, for what else the machine does
    limits: Engine = LIMITS


@dataclass
class Entrant:
    """An engine and what it did."""

    engine: Engine
    process: EngineProcess | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Figures]] = field(default_factory=list)  # by work
    cores: list[dict[str, float]] = field(default_factory=list)  # busy and stolen while its load ran, and busy before
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)  # of the first round, by work
    start_s: list[float] = field(default_factory=list)
    out: str = ""  # why it is


@dataclass
class Measured:
    """At one dtype."""

    dtype: str
    entrants: list[Entrant]
    limits: list[Mapping[str, Any]] = field(default_factory=list)  # per round

    def of(self, name: str) -> Entrant | None:
        """The engine of that name, if it was measured."""
        return next((one for one in self.entrants if one.engine.name == name and one.rounds), None)


Tell = Callable[[str], None]


class Bench:
    """Owns the processes; leaving the block ends them."""

    def __init__(self, plan: Plan, logs: Path, tell: Tell) -> None:
        self._plan = plan
        self._logs = logs  # emptied of what an earlier run left
        self._tell = tell
        self._limits: EngineProcess | None = None
        there = [Entrant(engine) for engine in plan.engines if plan.dtype in engine.dtypes]
        self.measured = Measured(plan.dtype, there)

    def __enter__(self) -> "Bench":
        self._logs.mkdir(parents=True, exist_ok=True)
        for entrant in self.measured.entrants:
            self._log(entrant).unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for entrant in self.measured.entrants:
            self._end(entrant)
        if self._limits is not None:
            self._limits.close()

    def run(self) -> Measured:
        began_s = time.monotonic()
        for entrant in self.measured.entrants:
            if missing := entrant.engine.missing(self._plan.home):
                self._leave(entrant, f"it is not installed: there is no {missing}")
        for number in range(1, self._plan.rounds + 1):
            round_s = time.monotonic()
            self._round(number)
            now_s = time.monotonic()
            done_minutes, next_minutes = (now_s - began_s) / 60, (now_s - began_s + (now_s - round_s)) / 60
            self._tell(f"round {number} of {self._plan.rounds} is done after {done_minutes:.1f} min")
            if number < self._plan.rounds and next_minutes > self._plan.minutes:
                self._tell(f"the next would end beyond {self._plan.minutes:g} min: no more")
                break
        return self.measured

    def leads(self, contexts: Sequence[Sequence[int]]) -> list[float]:
        """Ours asked by how much its likeliest token after each of these leads the second."""
        entrant = self.measured.of(OURS)
        if entrant is None or entrant.process is None:
            return []
        entrant.process.go_on()
        return list(entrant.process.ask({"contexts": contexts}, LOAD_S)["leads"])

    def _round(self, number: int) -> None:
        self.measured.limits.append(self._measure_limits())
        entrants = [entrant for entrant in self.measured.entrants if not entrant.out]
        first = (number - 1) % len(entrants) if entrants else 0
        for entrant in entrants[first:] + entrants[:first]:
            try:
                self._turn(entrant, number)
            except (EngineFailed, WrongLengths) as error:
                self._leave(entrant, str(error))

    def _turn(self, entrant: Entrant, number: int) -> None:
        began_s = time.monotonic()
        process = self._started(entrant)
        ready_s = time.monotonic() - began_s
        before = _cores_busy(self._plan.look_s)
        figures: dict[str, Figures] = {}
        busy, stolen = [], []
        for work in self._plan.works:
            runs: list[Figures] = []
            work_s = time.monotonic()
            while not runs or (len(runs) < MOST_RUNS and time.monotonic() - work_s < SHORT_S):
                asked = load_of(work, number, len(runs))
                answer = process.ask(asdict(asked), LOAD_S)
                records = [Record(**record) for record in answer["records"]]
                runs.append(figures_of(work, asked, records))
                busy.append(answer["cores_busy"])
                stolen.append(answer["cores_stolen"])
                if number == 1 and len(runs) == 1:
                    entrant.tokens[work] = [record.tokens for record in records]
            figures[work] = median_figures(runs)
        entrant.rounds.append(figures)
        entrant.cores.append({"busy": fmean(busy), "stolen": fmean(stolen), "before": before})
        took_s = time.monotonic() - began_s
        told = ", ".join(f"{work} {next(iter(found.values())):.4g}" for work, found in figures.items())
        self._tell(f"round {number}: {self._name(entrant)}: {told} ({took_s:.0f} s, {ready_s:.0f} of them to be ready)")
        if self._plan.all_new or not entrant.engine.stays:
            self._end(entrant)
        else:
            process.hold()

    def _started(self, entrant: Entrant) -> EngineProcess:
        if entrant.process is not None:
            entrant.process.go_on()
            return entrant.process
        began_s = time.monotonic()
        engine, plan = entrant.engine, self._plan
        settings = plan.settings if engine.name.startswith(OURS) else {}
        entrant.process = EngineProcess(
            engine.command(plan.home),
            engine.asked(plan.home, plan.dtype, plan.cores, settings),
            self._log(entrant),
        )
        entrant.start_s.append(time.monotonic() - began_s)
        entrant.facts = entrant.process.facts
        for work in WARM_UP:
            entrant.process.ask(asdict(_head(load(work, f"warm-up {len(entrant.start_s)}"))), LOAD_S)
        return entrant.process

    def _name(self, entrant: Entrant) -> str:
        return f"{entrant.engine.name} {self._plan.dtype}"

    def _log(self, entrant: Entrant) -> Path:
        return self._logs / f"{entrant.engine.name}-{self._plan.dtype}.log"

    def _measure_limits(self) -> Mapping[str, Any]:
        plan = self._plan
        if self._limits is None:
            environment = plan.limits.asked(plan.home, plan.dtype, plan.cores, {})
            self._limits = EngineProcess(plan.limits.command(plan.home), environment, self._logs / "limits.log")
        self._limits.go_on()
        found = self._limits.ask({}, LOAD_S)
        self._limits.hold()
        return found

    def _leave(self, entrant: Entrant, why: str) -> None:
        self._tell(f"{self._name(entrant)} is out: {why}")
        entrant.out = why
        entrant.rounds.clear()
        self._end(entrant)

    def _end(self, entrant: Entrant) -> None:
        if entrant.process is not None:
            with suppress(EngineFailed):
                entrant.process.close()
            entrant.process = None


def load_of(work: str, number: int, run: int) -> Load:
    """Of a round, counted from 1, and a run in it, from 0."""
    return load(work, f"round {number}, run {run}")


def _cores_busy(seconds: float) -> float:
    """By whatever runs while this sleeps. No engine has anything to do then."""
    if not seconds:
        return 0.0
    before, _ = processor_seconds()
    time.sleep(seconds)
    return (processor_seconds()[0] - before) / seconds


def _head(asked: Load) -> Load:
    return Load(asked.requests[:WARM_UP_REQUESTS], asked.in_flight)
