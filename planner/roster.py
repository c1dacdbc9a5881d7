"""The workers that have joined, the incarnations that may not come back, and which worker may take what.

Owns who is there, not what is on them: a `WorkerPlan` keeps each one's books. Iterating goes in the order of joining.
"""

from collections.abc import Collection, Iterator

from microtome.planner.models import Models
from microtome.planner.resident import Resident
from microtome.planner.served import Served
from microtome.planner.types import Incarnation, WorkerId
from microtome.planner.worker_plan import WorkerPlan

_FENCED_REMEMBERED = 1024  # incarnations given up, against one that comes back


class Roster:
    """Mutable; `Control` adds and removes."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._workers: dict[WorkerId, WorkerPlan] = {}
        self._fenced: dict[Incarnation, None] = {}
        self._changed: dict[WorkerId, WorkerPlan] = {}  # those that may have a step to form

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[WorkerPlan]:
        """A worker may be removed meanwhile."""
        return iter(list(self._workers.values()))

    def __contains__(self, w: WorkerPlan) -> bool:
        return self._workers.get(w.id) is w

    def get(self, worker: WorkerId) -> WorkerPlan | None:
        return self._workers.get(worker)

    def incarnated(self, worker: WorkerId, incarnation: Incarnation) -> WorkerPlan | None:
        """The worker, if this is its incarnation."""
        w = self._workers.get(worker)
        return w if w is not None and w.incarnation == incarnation else None

    def home_of(self, resident: Resident | None) -> WorkerPlan | None:
        return self._workers.get(resident.worker) if resident is not None else None

    # --- coming and going ---

    def add(self, w: WorkerPlan) -> None:
        self._workers[w.id] = w
        self._changed[w.id] = w

    def remove(self, w: WorkerPlan) -> None:
        """It is planned for no more, and what it may still answer is not heard."""
        self.fence(w.incarnation)
        del self._workers[w.id]
        self._changed.pop(w.id, None)

    def fence(self, incarnation: Incarnation) -> None:
        self._fenced[incarnation] = None
        if len(self._fenced) > _FENCED_REMEMBERED:
            del self._fenced[next(iter(self._fenced))]

    def is_fenced(self, incarnation: Incarnation) -> bool:
        return incarnation in self._fenced

    def touch(self, w: WorkerPlan) -> None:
        """It may have a step to form."""
        self._changed[w.id] = w

    def take_changed(self) -> Collection[WorkerPlan]:
        """Those touched since the last time."""
        changed = self._changed
        if changed:
            self._changed = {}
        return changed.values()

    # --- who may take what ---

    def of_model(self, served: Served) -> list[WorkerPlan]:
        return [w for w in self._workers.values() if w.served is served]

    def staying(self) -> list[WorkerPlan]:
        return [w for w in self._workers.values() if not w.draining]

    def has_another(self, w: WorkerPlan) -> bool:
        """Another worker of the same model stays."""
        return any(other.served is w.served and not other.draining for other in self._workers.values())

    def takers(self, served: Served) -> list[WorkerPlan]:
        """Who may be given a generation of this model. Of one that was replaced, those that drain, if nobody else."""
        own = self.of_model(served)
        staying = [w for w in own if not w.draining]
        if staying or served is self._models.served:
            return staying
        return [w for w in own if w.drain_until_us is not None]
