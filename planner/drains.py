"""Workers that are to go: what is on them moves away, and for how long they may wait for it.

Idle sessions give up their cells at once, running ones when another worker of their model stays; else they may end
where they are until the worker's time is up. That a worker is empty, and may go, is for `Control` to see.
"""

from microtome.planner.counters import Counters
from microtome.planner.resident import Resident
from microtome.planner.roster import Roster
from microtome.planner.worker_plan import WorkerPlan


class Drains:
    """Keeps nothing of its own: each worker knows whether it drains and until when."""

    def __init__(self, roster: Roster, counters: Counters, timeout_ms: int) -> None:
        self._roster = roster
        self._counters = counters
        self._timeout_us = timeout_ms * 1000

    def begin(self, w: WorkerPlan, now_us: int, deadline_us: int | None) -> None:
        """The worker takes nothing more. A second call may bring its end nearer, never put it off."""
        if w.draining and w.drain_until_us is None:
            return  # its time is up
        latest = w.drain_until_us or now_us + self._timeout_us
        w.drain_until_us = latest if deadline_us is None else min(latest, deadline_us)
        if not w.draining:
            w.draining = True
            w.served.line.recall()  # others that drain may be who takes them now
            self._move_away(w)

    def go_on(self) -> None:
        """A worker has joined: what had nowhere to go may have now."""
        for w in self._roster:
            if w.draining:
                self._move_away(w)

    def over(self, now_us: int) -> list[WorkerPlan]:
        """Those whose time is up; each is named once."""
        ended: list[WorkerPlan] = []
        for w in self._roster:
            if w.draining:
                self._roster.touch(w)  # what it alone might have taken may have left the line
            if w.drain_until_us is not None and now_us >= w.drain_until_us:
                w.drain_until_us = None
                ended.append(w)
        return ended

    def clear(self, w: WorkerPlan) -> None:
        """Everything leaves."""
        self._roster.touch(w)
        for r in list(w.residents.values()):
            self._send_away(w, r)

    def _move_away(self, w: WorkerPlan) -> None:
        self._roster.touch(w)
        elsewhere = self._roster.has_another(w)
        for r in list(w.residents.values()):
            if r.generation is None or elsewhere:
                self._send_away(w, r)

    def _send_away(self, w: WorkerPlan, r: Resident) -> None:
        g = r.generation
        if r.leaving or (g is None and r.rows):
            return
        w.leave(r)
        if g is not None:
            self._counters.moved += 1
            g.moved += 1
            if not r.rows:
                r.session.model.line.add_returning(g)
