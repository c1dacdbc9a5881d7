"""What can be said of the service: its status and load, where a generation is, when a first token can be expected.

Reads the planner's books and changes nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from microtome.planner.counters import Counters
from microtome.planner.fleet import Fleet
from microtome.planner.forecast import ttft_us
from microtome.planner.generations import Generation, State
from microtome.planner.models import Models
from microtome.planner.placement import can_hold
from microtome.planner.roster import Roster
from microtome.planner.scaling import Load
from microtome.planner.served import Served
from microtome.planner.sessions import Sessions
from microtome.planner.status import ControlStatus, Listed, Waiting, Whereabouts, WorkerStatus
from microtome.planner.tenant_counters import TenantTally
from microtome.planner.types import GenerationId, WorkerId

_RETRY_MS = 1000  # where nothing is measured yet
RETRY_MAX_MS = 60_000


class Outlook:
    def __init__(
        self,
        roster: Roster,
        models: Models,
        sessions: Sessions,
        generations: Mapping[GenerationId, Generation],
        counters: Counters,
        tenants: TenantTally,
    ) -> None:
        self._roster = roster
        self._models = models
        self._sessions = sessions
        self._generations = generations
        self._counters = counters
        self._tenants = tenants

    def status(self) -> ControlStatus:
        """A snapshot, consistent in itself."""
        workers = tuple(
            WorkerStatus(
                worker=w.id,
                incarnation=w.incarnation,
                draining=w.draining,
                revision=w.revision,
                cells_used=w.table.used_cells - w.cells_cached,
                cells_cached=w.cells_cached,
                cells_usable=w.table.usable_cells,
                sessions=len(w.residents),
                running=w.running,
                steps=w.steps,
                steps_in_flight=len(w.in_flight),
                step_us=w.step_us,
                idle_us=w.idle_us,
            )
            for w in self._roster
        )
        running = sum(w.running for w in self._roster)
        return ControlStatus(
            workers=workers,
            running=running,
            waiting=len(self._generations) - running,
            sessions=self._sessions.opened,
            waiting_tokens=self._models.served.line.tokens,
            wait_us=self.forecast(self._models.served.line.tokens, 0),
            counters=replace(self._counters),
            tenants=self._tenants.snapshot(),
        )

    def where(self, generation: GenerationId) -> Whereabouts | None:
        """Where a generation is and what it waits for; None if it has ended or never was. Walks the line."""
        return self.places([generation]).get(generation)

    def places(self, generations: Iterable[GenerationId]) -> dict[GenerationId, Whereabouts]:
        """`where` of several, walking the line once. Without those that have ended or never were."""
        found: dict[GenerationId, Whereabouts] = {}
        waiting: dict[Served, dict[GenerationId, Generation]] = {}
        for name in generations:
            g = self._generations.get(name)
            if g is not None and g.state is State.RUNNING:
                found[name] = self._running(g)
            elif g is not None:
                waiting.setdefault(g.session.model, {})[name] = g
        for served, own in waiting.items():
            line = _Line()
            settling = any(g.state is State.SETTLING for g in own.values())
            for g in served.line.in_order():
                if own.pop(g.id, None) is not None:
                    found[g.id] = self._in_line(g, line, found)
                if not own:
                    break
                line.add(g)
            assert settling or not own, "those that wait are in line"
            for g in own.values():
                found[g.id] = self._in_line(g, line, found)
        return found

    def listed(self, limit: int) -> list[Listed]:
        """Generations that have not ended, `limit` at most: those in line, in their order, then the others."""
        names: list[GenerationId] = []
        for served in self._models.every:
            names += [g.id for g in islice(served.line.in_order(), limit - len(names))]
        for state in (State.SETTLING, State.RUNNING):
            names += islice((g.id for g in self._generations.values() if g.state is state), limit - len(names))
        found = self.places(names)
        options = [(name, self._generations[name].options) for name in names]
        return [
            Listed(generation=name, tenant=asked.tenant, priority=asked.priority, whereabouts=found[name])
            for name, asked in options
        ]

    def _running(self, g: Generation) -> Whereabouts:
        waits_for, ttft = Waiting.NOTHING, None
        r = g.session.resident
        worker = self._roster.home_of(r)
        if worker is not None and r is not None:
            standing = worker.scheduler.standing(g.session.id)
            if standing is not None and standing.ahead:
                waits_for = Waiting(standing.behind.value)
            if not g.delivered:
                ttft = ttft_us(worker, -r.undone, r.undone)
        return self._whereabouts(g, 0, waits_for, ttft, worker.id if worker is not None else None)

    def _in_line(self, g: Generation, line: "_Line", known: dict[GenerationId, Whereabouts]) -> Whereabouts:
        """Of one without a place on a worker; `line`: those that start earlier. `known` is added to."""
        ttft = None
        if g.state is State.SETTLING and g.leader is not None:
            if g.leader.id not in known:
                known |= self.places([g.leader.id])
            leader = known.get(g.leader.id)  # its own first token follows the leader's at once
            ttft = leader.predicted_ttft_us if leader is not None else None
        elif not g.delivered:
            ttft = self.forecast(line.tokens, _to_run(g), g.session.model)
        return self._whereabouts(g, len(line.generations), self._reason(g, line.generations), ttft, None)

    def _whereabouts(
        self, g: Generation, position: int, waits_for: Waiting, ttft: int | None, worker: WorkerId | None
    ) -> Whereabouts:
        return Whereabouts(
            state=g.state,
            position=position,
            waits_for=waits_for,
            predicted_ttft_us=ttft,
            delivered=g.delivered,
            worker=worker,
            prompt_tokens=g.prompt_tokens,
            submitted_us=g.submitted_us,
            parked=g.parked,
            moved=g.moved,
        )

    def forecast(self, ahead: int, own: int, served: Served | None = None) -> int | None:
        """Microseconds to the first token of a prompt of `own` tokens behind a line of `ahead`; None: unknown.

        `served` None: of the model that new generations go to.
        """
        staying = self._roster.takers(served or self._models.served)
        forecasts = [ttft_us(w, ahead // len(staying), own) for w in staying]
        known = [f for f in forecasts if f is not None]
        return min(known) if known else None

    def retry_after_ms(self) -> int:
        """When the line will have moved on by half."""
        predicted = self.forecast(self._models.served.line.tokens // 2, 0)
        return _RETRY_MS if predicted is None else max(1, min(predicted // 1000, RETRY_MAX_MS))

    def load(self, fleet: Fleet, now_us: int) -> Load:
        """What the workers, those to come included, have to do."""
        staying = self._roster.staying()
        cells = [w.capability.usable_cells for w in staying]
        return Load(
            at_us=now_us,
            ready=len(staying),
            starting=fleet.loading,
            generations=len(self._generations) + fleet.callers,
            waiting_tokens=self._models.served.line.tokens,
            cells_used=sum(w.table.used_cells - w.cells_cached for w in self._roster),
            cells_per_worker=min(cells, default=self._models.served.cells),
            sequences_per_worker=self._models.served.sequences,
            wait_us=self.forecast(self._models.served.line.tokens, 0),
            start_us=fleet.start_us,
        )

    def _reason(self, g: Generation, before: Sequence[Generation]) -> Waiting:
        if g.state is State.SETTLING:
            return Waiting.SHARED_PROMPT if g.leader else Waiting.OWN_SESSION
        staying = [w for w in self._roster.takers(g.session.model) if can_hold(w, g)]
        if not staying:
            return Waiting.NO_WORKER
        later = [other for other in before if other.rank[1] > g.rank[1]]  # those that came after it
        if any(other.options.priority > g.options.priority for other in later):
            return Waiting.PRIORITY
        if any(other.options.tenant != g.options.tenant for other in later):
            return Waiting.TENANT_SHARE
        return Waiting.CELLS if any(w.has_sequence or w.idle for w in staying) else Waiting.SEQUENCES


class _Line:
    """Those in line that have been walked past."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self.tokens = 0  # that they have to be prefilled with

    def add(self, g: Generation) -> None:
        self.generations.append(g)
        self.tokens += _to_run(g)


def _to_run(g: Generation) -> int:
    """Tokens that it has to be prefilled with, but for what a prefix cache may have."""
    r = g.session.resident
    return len(g.session.transcript) - (r.planned if r is not None else 0)
