"""One `Control` under siege: any event may come at any moment, from callers and workers that keep to no manners.

`live(seed)` runs one life. Unlike in `world`, nobody waits for anybody: between two steps of a worker a session may be
cancelled, rewound and submitted to, cloned and closed. After every event the invariants are checked, and that each
cached cell holds the token that it is kept under; at the end all that was accepted has ended, and no cell is lost.
"""

from random import Random

from microtome.planner.config import PlannerConfig
from microtome.planner.control import Control
from microtome.planner.events import Event, Instruction, Tick, spelled_out
from microtome.planner.policies import POLICIES
from microtome.planner.types import WorkerId
from microtome.planner.worker_plan import WorkerPlan
from tests.simulation.hostile_callers import HostileCallers
from tests.simulation.hostile_workers import HostileWorkers
from tests.simulation.invariants import check
from tests.simulation.story import Story
from tests.simulation.world import run
from tests.support.fake_executor import FakeExecutor, method_table

_ACTS = 400
_ROUNDS = 4000  # to come to rest after them


class Siege:
    def __init__(self, seed: int) -> None:
        rng = self._rng = Random(seed)
        self.story = Story(seed)
        self.events = 0
        vocab = rng.choice((7, 50, 300))
        usable_cells = rng.choice((6, 12, 24, 40, 80, 200))
        unequal = rng.random() < 0.5
        tables = [
            method_table(rng.choice(((1, 2, 4, 8), (1, 4, 16), (1,), (2, 8))), rng.choice((8, 16, 32)))
            for _ in range(2)
        ]
        config = _config(rng, usable_cells)
        self.story.tell(0, f"{config} cells={usable_cells} vocab={vocab} unequal={unequal}")
        self._control = Control(config)
        self._now_us = 0
        self._callers = HostileCallers(rng, self._control, vocab, usable_cells, self._post)
        self._workers = HostileWorkers(rng, self._control, vocab, usable_cells, tables, self._post, unequal=unequal)

    def live(self) -> None:
        for _ in range(_ACTS):
            self._now_us += self._rng.choice((0, 1, 100, 1000, self._rng.randrange(3000)))
            choice = self._rng.random()
            if choice < 0.48:
                self._callers.act(self._now_us)
            elif choice < 0.88:
                self._workers.answer(self._now_us)
            elif choice < 0.93:
                self._workers.come_or_go(self._now_us)
            elif choice < 0.95:
                self._workers.haunt(self._now_us)
            else:
                self._post(Tick(at_us=self._now_us))
            unfinished = self._callers.unfinished()
            for name in unfinished[:3]:
                self._control.where(name)
            listed = self._control.listed(len(unfinished) + 1)
            assert {one.generation for one in listed} <= set(unfinished)
            assert len(listed) == self._control.status().running + self._control.status().waiting
            self._control.status()
        self._come_to_rest()
        self._check_end()

    def _post(self, event: Event) -> list[Instruction]:
        self.events += 1
        self.story.event(event)
        instructions = spelled_out(self._control.handle(event))
        for instruction in instructions:
            self.story.instruction(event.at_us, instruction)
        self._callers.check_answers(instructions)
        self._workers.carry_out(instructions)
        check(self._control)
        for w in self._control._roster:
            check_labels(w, self._workers.executor(w.id))
        return instructions

    def _come_to_rest(self) -> None:
        """From now on workers are sound, and one with room for all joins when nothing goes on without it."""
        for _ in range(_ROUNDS):
            self._now_us += 500
            if self._workers.busy:
                self._workers.answer(self._now_us, soundly=True)
            elif not self._callers.unfinished():
                return
            else:
                self._post(Tick(at_us=self._now_us))
                if self._callers.unfinished() and not self._workers.busy:
                    self._workers.join(self._now_us, WorkerId("roomy"), roomy=True)
        raise AssertionError(f"no end in sight: {self._callers.unfinished()}")

    def _check_end(self) -> None:
        self._callers.close_all(self._now_us)
        while self._workers.busy:
            self._workers.answer(self._now_us, soundly=True)
        for w in self._control._roster:
            assert not w.residents, f"{w.id} is not empty"
            assert w.table.used_cells == w.cells_cached, f"{w.id} leaks cells"
        status = self._control.status()
        assert status.running == status.waiting == status.sessions == 0, f"not all ended: {status}"
        counters = status.counters
        assert counters.generations_started == counters.generations_finished


def check_labels(w: WorkerPlan, executor: FakeExecutor) -> None:
    """A cell that the prefix cache keeps under a token was written for that token, or is only planned as yet."""
    if w.prefix is None:
        return
    nodes = list(w.prefix._roots.values())
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        for token, cell in zip(node.tokens, node.cells, strict=True):
            held = executor.token_of(cell)
            known = held == token or cell in w.prefix._planned
            assert known, f"cell {cell} is kept under token {token} and holds {held}"


def _config(rng: Random, usable_cells: int) -> PlannerConfig:
    return PlannerConfig(
        policy=rng.choice(sorted(POLICIES)),
        plan_ahead=rng.choice((1, 2, 3, 4)),
        max_waiting=rng.choice((3, 16, 64)),
        max_waiting_tokens=rng.choice((60, 5000)),
        max_sessions=rng.choice((2, 6)),
        max_session_tokens=rng.choice((None, None, max(2, usable_cells // 2))),
        prefix_cache=rng.random() < 0.85,
        headroom_tokens=rng.choice((0, 1, 4, 16)),
        step_attempts=rng.choice((1, 2, 3)),
        step_timeout_ms=50,
        priority_ageing_ms=rng.choice((1, 100, 10_000)),
        tenant_weights=("a=3",),
        target_step_ms=rng.choice((None, None, 0.5, 1.5)),
        drain_timeout_ms=rng.choice((0, 5, 1000)),
    )


def live(seed: int) -> Siege:
    """One life under siege. Raises `AssertionError` with the story of the seed."""
    siege = Siege(seed)
    run(siege.live, siege.story)
    return siege
