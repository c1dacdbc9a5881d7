"""Who waits to prefill, found by where in the prefix tree the prompt goes on.

Owns an index and nothing else: sessions by the frontier that they have come to and the token that comes next in their
prompts. Whoever plans that token there is planning for all of them. Each session stands in one place at most. Entering,
leaving and looking up cost a few dictionary operations, whoever else waits.
"""

from microtome.planner.prefix import PrefixKey
from microtome.planner.resident import Resident
from microtome.planner.types import Cell, SessionId

Frontier = PrefixKey | Cell
Spot = tuple[Frontier, int]


class Followers:
    def __init__(self) -> None:
        self._at: dict[Spot, dict[SessionId, Resident]] = {}
        self._spots: dict[SessionId, Spot] = {}

    def __contains__(self, session: SessionId) -> bool:
        return session in self._spots

    def wait(self, resident: Resident, frontier: Frontier, token: int) -> None:
        """The resident's prompt goes on with `token` at `frontier`; it stands nowhere else any more."""
        session, spot = resident.session.id, (frontier, token)
        if self._spots.get(session) == spot:
            return
        self.leave(session)
        self._spots[session] = spot
        self._at.setdefault(spot, {})[session] = resident

    def leave(self, session: SessionId) -> None:
        """Nothing happens if it does not wait."""
        spot = self._spots.pop(session, None)
        if spot is not None:
            waiting = self._at[spot]
            del waiting[session]
            if not waiting:
                del self._at[spot]

    def of(self, frontier: Frontier, token: int) -> list[Resident]:
        """Those whose prompts go on like this, in the order in which they came."""
        return list(self._at.get((frontier, token), {}).values())
