"""Which workers there should be: how many, with which settings, and which one goes.

Owns the workers that were asked for and have not come, how long that takes, and the update under way. `Scaler` says how
many are wanted; a `Fleet` says which to start and which to drain. It waits for nothing: time is what it is told.

Promises. It asks for no worker before it was given its bounds. A worker that loads is never sent away; one that still
waits for a place is, when it is not wanted any more. Who goes is the one with the least to move, those with older
settings before all others. After a start that failed, or a second worker that died young, the next start waits, twice
as long each time; while starts fail they are tried one at a time. An update that no worker has survived is taken back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from microtome.planner.events import DrainBegun, Instruction, ReleaseWorker, StartWorker, UpdateEnded
from microtome.planner.scaling import Load, Scaler, ScalingConfig
from microtome.planner.types import WorkerId
from microtome.planner.worker_plan import WorkerPlan

_FIRST_RETRY_US, _LAST_RETRY_US = 500_000, 60_000_000
_SOUND_US = 30_000_000  # a worker that lived this long was no failed try

FEWER = "fewer workers are wanted"
UPDATED = "a worker with newer settings takes its place"


@dataclass(slots=True)
class Start:
    """A worker that was asked for."""

    revision: int
    asked_us: int
    placed: bool = False  # it loads


class Fleet:
    """Mutable; `Control` is its one caller."""

    def __init__(self) -> None:
        self.revision = 0  # of the settings that new workers are started with
        self.updating = False
        self.starting: dict[WorkerId, Start] = {}  # in the order of asking
        self.start_us: int | None = None  # how long the newest took, from asking to joining
        self.callers = 0  # calls that wait for a first worker
        self._scaler: Scaler | None = None
        self._surge = True
        self._before: int | None = None  # the revision to go back to, while no worker has joined with the new one
        self._last_number = 0
        self._failed_starts = 0  # in a row
        self._young_deaths = 0  # with little time between them
        self._last_death_us = 0
        self._not_before_us = 0

    @property
    def active(self) -> bool:
        return self._scaler is not None

    @property
    def loading(self) -> int:
        """Workers that were asked for and have their place."""
        return sum(start.placed for start in self.starting.values())

    # --- what happens ---

    def scale(self, config: ScalingConfig, count: int, now_us: int) -> None:
        self._scaler = Scaler(config, count, now_us)

    def joined(self, worker: WorkerId, revision: int, now_us: int) -> None:
        start = self.starting.pop(worker, None)
        if start is not None:
            self.start_us = now_us - start.asked_us
        self._failed_starts = self.callers = 0
        self._last_number = max(self._last_number, _number(worker))
        if revision > self.revision:  # an update that an earlier driver began
            self.revision, self._before, self.updating = revision, None, True
        if revision == self.revision:
            self._before = None

    def placed(self, worker: WorkerId) -> None:
        if worker in self.starting:
            self.starting[worker].placed = True

    def lost(self, worker: WorkerPlan, now_us: int) -> None:
        """A worker that had joined died, or was given up. The first one is replaced at once."""
        if now_us - worker.joined_us >= _SOUND_US or now_us - self._last_death_us >= _SOUND_US:
            self._young_deaths = 0
        self._last_death_us = now_us
        if now_us - worker.joined_us < _SOUND_US:
            if self._young_deaths:
                self._pause(self._young_deaths, now_us)
            self._young_deaths += 1

    def start_failed(self, worker: WorkerId, cause: str, now_us: int) -> list[Instruction]:
        start = self.starting.pop(worker, None)
        if start is None:
            return []
        if self.updating and self._before is not None and start.revision == self.revision:
            failed, self.revision = self.revision, self._before
            self.updating, self._before = False, None
            return [UpdateEnded(revision=failed, error=cause)]
        self._failed_starts += 1
        self._pause(self._failed_starts, now_us)
        return []

    def update(self, revision: int, surge: bool, tried: bool) -> None:
        """A second update before the first has ended takes its place."""
        if revision > self.revision:
            if tried:
                self._before = None
            elif self._before is None:
                self._before = self.revision
            self.revision, self._surge, self.updating = revision, surge, True
            self._failed_starts = self._young_deaths = self._not_before_us = 0

    # --- what to do ---

    def decide(self, load: Load, workers: Sequence[WorkerPlan]) -> list[Instruction]:
        """Whom to start, whom to drain. `workers`: all that have joined, draining ones included."""
        if self._scaler is None:
            return []
        wanted = self._scaler.wanted(load)
        staying = [w for w in workers if not w.draining]
        old = [w for w in staying if w.revision != self.revision]
        out: list[Instruction] = []
        if old:
            out += self._replace(old, staying, workers, wanted, load.at_us)
        else:
            missing = wanted - len(staying) - len(self.starting)
            if missing > 0:
                out += self._start(missing, load.at_us)
            elif missing < 0:
                out += self._send_away(-missing, staying)
        if self.updating and self._is_updated(workers, wanted):
            self.updating, self._before = False, None
            out.append(UpdateEnded(revision=self.revision))
        return out

    def start_one(self, revision: int, now_us: int) -> list[Instruction]:
        """One more, whatever is wanted: for generations that nobody else can serve."""
        if now_us < self._not_before_us or any(start.revision == revision for start in self.starting.values()):
            return []
        return [self._ask(revision, now_us)]

    def _replace(
        self,
        old: Sequence[WorkerPlan],
        staying: Sequence[WorkerPlan],
        workers: Sequence[WorkerPlan],
        wanted: int,
        at: int,
    ) -> list[Instruction]:
        """One step of an update."""
        missing = wanted - len(staying) - len(self.starting)
        if missing > 0 and (self._surge or not any(w.draining for w in workers)):
            return self._start(missing, at)
        if self.starting:
            return []
        if len(staying) > wanted or not self._surge:
            count = len(staying) - wanted if self._surge else 1
            drained = [] if not self._surge and any(w.draining for w in workers) else _by_weight(old)[:count]
            return [DrainBegun(worker=w.id, cause=UPDATED) for w in drained]
        return self._start(1, at)

    def _is_updated(self, workers: Sequence[WorkerPlan], wanted: int) -> bool:
        current = [w for w in workers if w.revision == self.revision and not w.draining]
        return all(w.revision == self.revision for w in workers) and (bool(current) or not wanted) and not self.starting

    def _send_away(self, count: int, staying: Sequence[WorkerPlan]) -> list[Instruction]:
        out: list[Instruction] = []
        for worker in [worker for worker, start in reversed(self.starting.items()) if not start.placed][:count]:
            del self.starting[worker]
            out.append(ReleaseWorker(worker=worker))
        if not self.starting:  # the load that one was asked for may be what made the difference
            left = max(0, count - len(out))
            out += [DrainBegun(worker=w.id, cause=FEWER) for w in _by_weight(staying)[:left]]
        return out

    def _start(self, count: int, now_us: int) -> list[Instruction]:
        if now_us < self._not_before_us:
            return []
        if self._failed_starts:
            count = 0 if self.starting else 1
        return [self._ask(self.revision, now_us) for _ in range(count)]

    def _ask(self, revision: int, now_us: int) -> StartWorker:
        self._last_number += 1
        worker = WorkerId(f"worker-{self._last_number}")
        self.starting[worker] = Start(revision, now_us)
        return StartWorker(worker=worker, revision=revision)

    def _pause(self, failures: int, now_us: int) -> None:
        pause_us = min(_LAST_RETRY_US, _FIRST_RETRY_US << min(failures - 1, 20))
        self._not_before_us = max(self._not_before_us, now_us + pause_us)


def _by_weight(workers: Sequence[WorkerPlan]) -> list[WorkerPlan]:
    """The one with the least K/V to move first; equals: the one that joined last."""
    newest_first = list(workers)[::-1]  # the sort keeps that among equals
    return sorted(newest_first, key=lambda w: (w.table.used_cells - w.cells_cached, w.running, w.cells_cached))


def _number(worker: WorkerId) -> int:
    number = worker.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
