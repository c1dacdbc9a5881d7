"""A whole cluster in virtual time: one `Control`, workers that fail, callers that come, cancel and go.

`live(seed)` runs one life to its end: traffic and faults up to a horizon, then healthy workers until all is quiet.
After every event the invariants are checked; every token is compared with what the model gives undisturbed.
"""

from collections.abc import Callable
from random import Random

from microtome.planner.control import Control
from microtome.planner.events import (
    Deliver,
    DeliverPrompt,
    DrainBegun,
    Event,
    GiveUpWorker,
    Instruction,
    ReleaseWorker,
    Restored,
    RunStep,
    Scale,
    SessionAnswer,
    StartWorker,
    Tick,
    UpdateEnded,
    UpdateWorkers,
    WorkerDraining,
    WorkerGone,
    WorkerJoined,
    WorkerPlaced,
    WorkerStartFailed,
    spelled_out,
)
from microtome.planner.types import StepNumber, WorkerId
from tests.simulation.callers import Callers
from tests.simulation.clock import Clock
from tests.simulation.invariants import check
from tests.simulation.scenario import VOCAB, Scenario, crowd, scenario
from tests.simulation.sim_worker import SimWorker
from tests.simulation.story import Story
from tests.support.fake_executor import FakeExecutor

TICK_US = 10_000
QUIET_LIMIT_US = 60_000_000  # virtual time after the horizon within which everything has to end


class World:
    def __init__(self, seed: int, plot_of: Callable[[Random], Scenario] = scenario) -> None:
        self.rng = Random(seed)
        self.story = Story(seed)
        self.plot: Scenario = plot_of(self.rng)
        self.clock = Clock()
        self.control = Control(self.plot.config)
        self.workers: dict[WorkerId, SimWorker] = {}  # the newest life of each
        self.callers = Callers(self.rng, self.plot, self.clock, self.post)
        self.events = 0
        self._lives = 0
        self._coming: set[WorkerId] = set()  # asked for by the planner
        self._revision = 0  # of the workers' settings
        self._handling = False

    def live(self) -> None:
        self.story.tell(0, repr(self.plot))
        if self.plot.scaling is not None:
            self.post(Scale(at_us=0, scaling=self.plot.scaling, count=self.plot.workers))
            if self.plot.update_at_us:
                self.clock.after(self.plot.update_at_us, self._update)
        for number in range(0 if self.plot.scaling is not None else self.plot.workers):
            name = WorkerId(f"w{number}")
            self.clock.after(self.rng.randrange(0, 20_000), lambda name=name: self.join(name))
            if self.plot.death_every_us:
                self._plan_trouble(name)
        self.callers.begin()
        self.clock.after(TICK_US, self._tick)
        if self.plot.restart_at_us:
            self.clock.after(self.plot.restart_at_us, self.restart_driver)
        end = self.plot.horizon_us + QUIET_LIMIT_US
        while self.clock.now_us <= self.plot.horizon_us or not self._quiet():
            assert self.clock.step(), "nothing is left to happen and not all is quiet"
            assert self.clock.now_us < end, f"no end in sight: {self.callers.unfinished()}"
        self._check_end()

    # --- events in, instructions out ---

    def post(self, event: Event) -> None:
        assert not self._handling
        self._handling = True
        self.events += 1
        self.story.event(event)
        instructions = spelled_out(self.control.handle(event))
        for instruction in instructions:
            self.story.instruction(self.clock.now_us, instruction)
        self.callers.check_answers(event, instructions, self.control)
        if instructions or not isinstance(event, Tick):
            check(self.control)
        self._handling = False
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case RunStep(worker=name, plan=plan):
                worker = self.workers[name]
                assert worker.incarnation == plan.incarnation, "a plan for a worker that is not there"
                self._poison(worker)
                worker.send(plan)
            case GiveUpWorker(worker=name, incarnation=incarnation):
                worker = self.workers.get(name)
                if worker is not None and worker.incarnation == incarnation:
                    sound = worker.alive and not (worker.hung or worker.doomed or worker.refusals)
                    assert not sound, f"{name} is given up and was at no fault"
                    self._end(worker)
            case ReleaseWorker(worker=name):
                if name in self.workers:
                    self._end(self.workers[name])
                self._coming.discard(name)  # or it has not come yet
            case StartWorker(worker=name, revision=revision):
                self._coming.add(name)
                self.clock.after(self.rng.randrange(500, 5000), lambda: self._place(name))
                self.clock.after(self.rng.randrange(5000, 40_000), lambda: self._arrive(name, revision))
            case Deliver() | DeliverPrompt() | SessionAnswer() | Restored():
                pass  # the callers have seen it
            case DrainBegun() | UpdateEnded():
                pass  # nothing is to be done about it

    def _poison(self, worker: SimWorker) -> None:
        """Cells that nobody holds in the planner's table hold nothing on the worker, once it knows of it."""
        w = self.control._roster.get(worker.name)
        if w is None or w.incarnation != worker.incarnation or not worker.idle or w.in_flight:
            return
        if not w._ops:
            free = [c for c in range(w.table.usable_cells) if not w.table.references(c)]  # type: ignore[arg-type]
            worker.executor.poison(free)

    # --- workers ---

    def _place(self, name: WorkerId) -> None:
        if name in self._coming:
            self.post(WorkerPlaced(at_us=self.clock.now_us, worker=name))

    def _arrive(self, name: WorkerId, revision: int) -> None:
        """A worker that was asked for joins, or does not."""
        if name not in self._coming:
            return
        self._coming.remove(name)
        if self.clock.now_us < self.plot.horizon_us and self.rng.random() < self.plot.fault_rate * 2:
            self.post(WorkerStartFailed(at_us=self.clock.now_us, worker=name, cause="failed in the simulation"))
            return
        self.join(name, revision)
        if self.plot.death_every_us:
            self._plan_trouble(name)

    def _update(self) -> None:
        self._revision += 1
        surge = self.rng.random() < 0.5
        self.post(UpdateWorkers(at_us=self.clock.now_us, revision=self._revision, surge=surge))

    def join(self, name: WorkerId, revision: int = 0) -> None:
        self._lives += 1
        executor = FakeExecutor(
            incarnation=f"{self._lives:032x}",
            usable_cells=self.plot.usable_cells,
            max_sequences=self.plot.max_sequences,
            table=self.plot.table,
            vocab_size=VOCAB,
        )
        worker = SimWorker(
            name,
            executor,
            self.clock,
            Random(self.rng.random()),
            self.post,
            fault_rate=self.plot.fault_rate if self.clock.now_us < self.plot.horizon_us else 0.0,
            plan_ahead=self.plot.config.plan_ahead,
        )
        self.workers[name] = worker
        worker.revision = revision
        self.post(WorkerJoined(at_us=self.clock.now_us, worker=name, capability=worker.capability, revision=revision))

    def _end(self, worker: SimWorker) -> None:
        """The process is gone; another life of the worker starts after a while."""
        worker.alive = False
        if self.workers.get(worker.name) is worker:
            del self.workers[worker.name]
        if self.plot.scaling is not None:
            return  # the planner asks for another one, if it wants one
        self.clock.after(self.rng.randrange(1000, 30_000), lambda: self._rejoin(worker.name))
        if worker.hung and self.rng.random() < 0.5:
            self.clock.after(self.rng.randrange(1, 60_000), lambda: self._wake(worker))

    def _wake(self, worker: SimWorker) -> None:
        """A worker that hung and was given up is back, as it was."""
        if worker.incarnation not in self.control._roster._fenced:
            return  # this driver has never heard of it
        self.story.tell(self.clock.now_us, f"{worker.name} wakes up")
        self.post(
            WorkerJoined(
                at_us=self.clock.now_us,
                worker=worker.name,
                capability=worker.capability,
                held=worker.executor.snapshot(),
                last_step=StepNumber(worker.last_step),
            )
        )

    def _rejoin(self, name: WorkerId) -> None:
        if name not in self.workers:
            self.join(name)

    def _plan_trouble(self, name: WorkerId) -> None:
        delay = int(self.rng.expovariate(1 / self.plot.death_every_us)) + 1
        if self.clock.now_us + delay < self.plot.horizon_us:
            self.clock.after(delay, lambda: self._trouble(name))

    def _trouble(self, name: WorkerId) -> None:
        worker = self.workers.get(name)
        if worker is not None:
            kind = self.rng.choice(("die", "die silently", "hang", "drain", "come back as another"))
            self.story.tell(self.clock.now_us, f"{name}: {kind}")
            if kind == "die":
                self._die(worker)
            elif kind == "die silently":
                worker.alive = False  # found by the tick, as a hang
                if worker.idle:
                    self._die(worker)
            elif kind == "hang":
                worker.hung = True
                if worker.idle:
                    self._die(worker)  # a probe finds it
            elif kind == "drain":
                self.post(WorkerDraining(at_us=self.clock.now_us, worker=name))
            else:
                worker.alive = False
                self.join(name, worker.revision)  # its place was taken before anyone said that it was gone
        self._plan_trouble(name)

    def _die(self, worker: SimWorker) -> None:
        worker.alive = False
        gone = WorkerGone(
            at_us=self.clock.now_us, worker=worker.name, incarnation=worker.incarnation, cause="died in the simulation"
        )
        self.clock.after(self.rng.randrange(0, 5000), lambda: self._tell_gone(worker, gone))

    def _tell_gone(self, worker: SimWorker, gone: WorkerGone) -> None:
        self.post(gone)
        self._end(worker)

    def restart_driver(self) -> None:
        """A new driver finds the workers that are there, with what they hold; those with a step under way finish it."""
        self.story.tell(self.clock.now_us, "the driver restarts")
        self.control = Control(self.plot.config)
        self.callers.driver_lost()
        self._coming.clear()
        for name, worker in list(self.workers.items()):
            if not worker.alive or worker.hung or worker.doomed:
                self._end(worker)
                continue
            worker.forget_plans()
            self.post(
                WorkerJoined(
                    at_us=self.clock.now_us,
                    worker=name,
                    capability=worker.capability,
                    held=worker.executor.snapshot(),
                    last_step=StepNumber(worker.last_step),
                    revision=worker.revision,
                )
            )
        if self.plot.scaling is not None:
            if self._revision:
                self.post(UpdateWorkers(at_us=self.clock.now_us, revision=self._revision, tried=True))
            self.post(Scale(at_us=self.clock.now_us, scaling=self.plot.scaling, count=len(self.workers)))
        self.callers.ask_again(self.control)

    # --- the end ---

    def _tick(self) -> None:
        self.post(Tick(at_us=self.clock.now_us))
        self.clock.after(TICK_US, self._tick)

    def _quiet(self) -> bool:
        return not self.callers.unfinished() and all(worker.idle for worker in self.workers.values())

    def _staying(self) -> int:
        return sum(not w.draining for w in self.control._roster)

    def _check_end(self) -> None:
        self.callers.close_all()
        settle_until = self.clock.now_us + 1_000_000
        while self.clock.now_us < settle_until:
            self.clock.step()
        scaling, deadline_us = self.plot.scaling, self.clock.now_us + 2 * QUIET_LIMIT_US
        while scaling is not None and self._staying() != scaling.min_workers:
            self.clock.step()
            assert self.clock.now_us < deadline_us, f"{self._staying()} workers stay with nothing to do"
        status = self.control.status()
        assert status.running == status.waiting == status.sessions == 0, f"not all ended: {status}"
        for w in self.control._roster:
            assert not w.residents, f"{w.id} is not empty"
            assert not w.in_flight, f"{w.id} is not at rest"
            assert w.table.used_cells == w.cells_cached, f"{w.id} leaks cells"
            worker = self.workers[w.id]
            assert worker.executor.snapshot() == (), f"{w.id} was not told what ended"
        counters = status.counters
        assert counters.generations_started == counters.generations_finished


def live(seed: int, plot_of: Callable[[Random], Scenario] = scenario) -> World:
    """One simulated life. Raises `AssertionError` with the story of the seed."""
    world = World(seed, plot_of)
    run(world.live, world.story)
    return world


def live_crowded(seed: int) -> World:
    """A life whose callers come together and have most of their prompts in common."""
    return live(seed, crowd)


def run(life: Callable[[], None], story: Story) -> None:
    try:
        life()
    except Exception as error:
        raise AssertionError(f"{error!r}\n{story}") from error
