"""Sessions: a token history, its committed length, its pending token, and who is generating on it.

The transcript is the truth: every token given or delivered. Which of it lies in cells on a worker is a `Resident`'s
business, so a session loses nothing when its worker does. `Sessions` issues ids and keeps the rules of opening,
cloning, rewinding and closing; each check precedes each change. Positions count tokens.

An ended generation leaves its last token pending: delivered, part of the transcript, not yet run (D4). The committed
length does not depend on steps that were under way when the generation ended.
"""

from typing import TYPE_CHECKING

from microtome.planner.errors import AtCapacity, BadInput, UnknownId, WrongState
from microtome.planner.types import SessionId

if TYPE_CHECKING:
    from microtome.planner.generations import Generation
    from microtome.planner.resident import Resident
    from microtome.planner.served import Served

LAST_SESSION_ID = 2**63 - 1
NUMBER_BITS = 40  # of an id that has a life in front: more sessions than one driver ever opens
LAST_NUMBER = (1 << NUMBER_BITS) - 1
LAST_LIFE = LAST_SESSION_ID >> NUMBER_BITS


class Session:
    """Mutable; changed by `Control` and its parts only."""

    __slots__ = (
        "cache_salt",
        "ended",
        "generation",
        "id",
        "model",
        "opened",
        "pending",
        "resident",
        "tenant",
        "transcript",
    )

    model: "Served"  # whose tokens the transcript is of; set by `Control` when the session is opened

    def __init__(self, session: SessionId, tenant: str, cache_salt: str, *, opened: bool) -> None:
        self.id = session
        self.tenant = tenant
        self.cache_salt = cache_salt
        self.opened = opened  # by a caller, who closes it; else it ends with its one generation
        self.transcript: list[int] = []
        self.pending = False  # the transcript's last token was delivered and not run
        self.generation: Generation | None = None
        self.ended: Generation | None = None  # the last one, where its text may turn out to have stopped before it did
        self.resident: Resident | None = None

    @property
    def length(self) -> int:
        """Committed tokens: what may be cloned, and where the next generation starts."""
        g = self.generation
        if g is None:
            return len(self.transcript) - self.pending
        if g.delivered:
            return len(self.transcript) - 1
        return max(g.base, g.consumed)

    def keep_prefix(self, length: int) -> None:
        """Forget the transcript from `length` up; nothing is pending afterwards."""
        del self.transcript[length:]
        self.pending = False


class Sessions:
    """All sessions by id. Ids start at 1, grow by one, and are never used twice (D11).

    A driver that was restarted does not know which ids its earlier life gave away: of that life's sessions it finds
    those that a worker holds. So the ids that callers keep have the driver's `life` in front, a number from 1 to
    `LAST_LIFE` that is another one after each restart; 0 leaves it out.
    """

    def __init__(self, max_opened: int) -> None:
        self._max_opened = max_opened
        self._opened = 0
        self._last_id = 0
        self._by_id: dict[SessionId, Session] = {}
        self._used_us: dict[SessionId, int] = {}  # of opened ones: when they were last used, the earliest first

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, session: SessionId) -> bool:
        return session in self._by_id

    @property
    def opened(self) -> int:
        return self._opened

    def get(self, session: SessionId) -> Session:
        """Raises `UnknownId` for one that was closed or never was."""
        found = self._by_id.get(session)
        if found is None:
            raise UnknownId(f"no session {session}")
        return found

    def open(self, tenant: str, cache_salt: str, *, opened: bool, life: int = 0) -> Session:
        """Raises `AtCapacity` when callers hold as many sessions as may be open (D12)."""
        if opened:
            self._check_room()
        return self._add(self._next_id(life), tenant, cache_salt, opened=opened)

    def clone(self, source: Session, upto: int | None, life: int = 0) -> Session:
        """A session with the first `upto` committed tokens of `source`, idle, nothing pending (D17, D18)."""
        length = source.length
        upto = length if upto is None else upto
        if not 0 <= upto <= length:
            raise BadInput(f"session {source.id} has {length} committed tokens; {upto} cannot be cloned")
        self._check_room()
        twin = self._add(self._next_id(life), source.tenant, source.cache_salt, opened=True)
        twin.transcript = source.transcript[:upto]
        return twin

    def rewind(self, session: Session, position: int) -> None:
        """Drop the history from `position` up, a pending token included (D6, D8)."""
        if session.generation is not None:
            raise WrongState(f"session {session.id} is generating")
        if not 0 <= position <= session.length:
            raise BadInput(f"session {session.id} has {session.length} committed tokens, not {position} to rewind to")
        if position == 0 and session.transcript:
            raise BadInput(f"session {session.id} cannot rewind to 0: close it and open another")
        session.keep_prefix(position)

    def restore(self, session: SessionId, tenant: str, cache_salt: str, *, opened: bool) -> Session:
        """A session of an earlier driver, under its own id."""
        if session in self._by_id:
            raise WrongState(f"session {session} is live already")
        return self._add(session, tenant, cache_salt, opened=opened)

    def used(self, session: Session, at_us: int) -> None:
        """A caller has just called for it, or its generation has ended. Times never go back."""
        if session.opened and session.id in self._by_id:
            self._used_us.pop(session.id, None)
            self._used_us[session.id] = at_us

    def unused_since(self, until_us: int) -> list[Session]:
        """Opened sessions that nobody has used after `until_us`. Those that generate are in use."""
        found: list[Session] = []
        for number, at_us in self._used_us.items():
            if at_us > until_us:
                break
            session = self._by_id[number]
            if session.generation is None:
                found.append(session)
        return found

    def close(self, session: Session) -> None:
        """Forget the session; its cells are the caller's business."""
        self._used_us.pop(session.id, None)
        if self._by_id.pop(session.id, None) is not None:
            self._opened -= session.opened

    def _check_room(self) -> None:
        if self._opened >= self._max_opened:
            raise AtCapacity("sessions", 1, 0)
        if self._last_id >= LAST_NUMBER:
            raise AtCapacity("session ids", 1, 0)

    def _next_id(self, life: int) -> SessionId:
        return SessionId((life << NUMBER_BITS) + self._last_id + 1)

    def _add(self, session: SessionId, tenant: str, cache_salt: str, *, opened: bool) -> Session:
        new = Session(session, tenant, cache_salt, opened=opened)
        self._by_id[session] = new
        self._last_id = max(self._last_id, number_of(session))
        self._opened += opened
        return new


def number_of(session: SessionId) -> int:
    """The id without the life in front of it."""
    return session & LAST_NUMBER


def life_of(session: SessionId) -> int:
    """Of the driver that opened it for a caller; 0: it has none in front, or is no session of a caller's."""
    return session >> NUMBER_BITS
