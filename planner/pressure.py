"""What gives way when a step needs more cells than are free.

First cached prefixes, the least recently used. Then sessions that are idle between generations, the one used longest
ago first. Then a running session is parked: the most junior one, lowest priority and then newest. A parked session
keeps its transcript and comes back when there is room.

**Progress.** Ranks are a total order that never changes, and a session gives way only to a more senior one. Take the
most senior of the sessions that run. It is never parked. If its next input finds no cell, every other resident is
junior to it, so all are parked, one after the other, until the input fits; those with a step under way give up their
cells when that step is settled, and no further step is planned for them meanwhile. Admission let it in only if its
whole length fits the pool, so at the latest when it is alone it fits. Hence it takes a step again after at most
`plan_ahead` steps, each of its steps brings it nearer to its end, and its end is bounded by its limit. When it is done
the next is most senior; so all end. A session that cannot get a cell and has nobody junior waits for a senior one,
holding what it has.
"""

from collections.abc import Iterable, Sequence

from microtome.planner.generations import Rank
from microtome.planner.resident import Resident
from microtome.planner.types import Input, SessionId


def most_junior(residents: Iterable[Resident], than: Rank) -> Resident | None:
    """Which running session gives way to one of rank `than`; None if none may. Those that leave do not count."""
    junior: Resident | None = None
    worst = than
    for r in residents:
        if r.generation is not None and not r.leaving and r.generation.rank > worst:
            junior, worst = r, r.generation.rank
    return junior


def by_seniority(batch: Sequence[Input], ranks: dict[SessionId, Rank]) -> list[Input]:
    """The batch with the most senior session's inputs first; one session's inputs keep their order."""
    return sorted(batch, key=lambda one: (ranks[one.session], one.start))
