"""The prefill chunks that wait for one worker, and whose turn it is.

Each session has its own queue; sessions take turns. A session enters at the back, takes its turn with its head chunk,
and goes to the back again; one whose chunk does not fit keeps its place, and a later one that fits goes before it. A
priority counts as steps of waiting. With tenants, turns go to the tenant served least, and inside it as above.

Finding the next turn and taking it costs time logarithmic in what waits, also when nobody in front fits.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from microtome.planner.first_fit import FirstFit
from microtome.planner.tenant_shares import TenantShares
from microtome.planner.types import Input, Position, SessionId
from microtome.planner.waiting_decodes import STAMP_BITS, Rank


class _Queue:
    __slots__ = ("inputs", "key", "rank", "starts")

    def __init__(self, rank: Rank, key: int) -> None:
        self.inputs: deque[Input] = deque()
        self.starts: set[int] = set()
        self.rank = rank
        self.key = key


class WaitingPrefills:
    def __init__(self, shares: TenantShares | None, widest: int) -> None:
        """`shares`: who was served how much; None: all sessions rank as one tenant's. `widest`: no chunk is wider."""
        self._shares = shares
        self._widest = widest
        self._queues: dict[SessionId, _Queue] = {}
        self._lines: dict[str, FirstFit[SessionId, int]] = {}  # by tenant: sessions by place, as wide as their head
        self._tenants: FirstFit[str, tuple[int, int]] = FirstFit(widest)  # as wide as the narrowest head; with shares
        self._vacated: dict[SessionId, int] = {}  # places of sessions cancelled since the last batch
        self._aside: list[SessionId] = []

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, session: SessionId) -> bool:
        return session in self._queues

    def waits_at(self, session: SessionId, start: int) -> bool:
        """Whether the session, something of which waits, has a chunk that starts there."""
        return start in self._queues[session].starts

    def put(self, item: Input, rank: Rank, stamp: int) -> None:
        """Queue a chunk behind its session's others; a session without any enters at the back, place `stamp`."""
        queue = self._queues.get(item.session)
        if queue is None:
            # A session cancelled and back before the next batch keeps its place, so it gains nothing and loses nothing.
            place = self._vacated.pop(item.session, stamp)
            queue = self._queues[item.session] = _Queue(rank, place - (rank.lead_steps << STAMP_BITS))
        queue.inputs.append(item)
        queue.starts.add(item.start)
        if self._shares is not None:
            self._shares.queued(queue.rank.tenant)
        if len(queue.inputs) == 1:
            self._line_up(item.session, queue)

    def put_back(self, items: Sequence[Input], ranks: Sequence[Rank], first_stamp: int) -> None:
        """Queue chunks ahead of what waits, in the order given; `first_stamp` and on are below 0."""
        returned: dict[SessionId, list[Input]] = {}
        rank_of: dict[SessionId, Rank] = {}
        for item, rank in zip(items, ranks, strict=True):
            returned.setdefault(item.session, []).append(item)
            rank_of[item.session] = rank
        for place, (session, own) in enumerate(returned.items(), first_stamp):
            queue = self._queues.get(session)
            if queue is None:
                queue = self._queues[session] = _Queue(rank_of[session], place)
            queue.key = place
            queue.inputs.extendleft(reversed(own))
            queue.starts.update(item.start for item in own)
            if self._shares is not None:
                for item in own:
                    self._shares.given_back(queue.rank.tenant, item.width)
            self._line_up(session, queue)

    def begin_batch(self, decoding: Iterable[SessionId]) -> None:
        """Turns of a new batch follow. Sessions that decode in it have none."""
        for session in decoding:
            queue = self._queues.get(session)
            if queue is not None:
                self._aside.append(session)
                self._leave_line(session, queue)
        if self._shares is not None:
            for tenant in self._shares.served_now & self._lines.keys():
                self._rank_tenant(tenant)

    def end_batch(self) -> None:
        for session in self._aside:
            self._line_up(session, self._queues[session])
        self._aside.clear()

    def head(self, room: int) -> Input | None:
        """The chunk whose turn it is among those of `room` tokens at most."""
        tenant: str | None = ""
        if self._shares is not None:
            tenant = self._tenants.first(room)
        line = None if tenant is None else self._lines.get(tenant)
        session = None if line is None else line.first(room)
        return None if session is None else self._queues[session].inputs[0]

    def take(self, head: Input, stamp: int) -> None:
        """Run the chunk that `head` gave; its session goes to the back, place `stamp`, or leaves after its last."""
        session = head.session
        queue = self._queues[session]
        queue.inputs.popleft()
        queue.starts.discard(head.start)
        if self._shares is not None:
            self._shares.served(queue.rank.tenant, 1, head.width)
        if queue.inputs:
            queue.key = stamp - (queue.rank.lead_steps << STAMP_BITS)
            self._line_up(session, queue)
        else:
            del self._queues[session]
            self._leave_line(session, queue)

    def skip(self, session: SessionId, position: int) -> int:
        """Let a session's chunks begin at `position`; how many tokens wait no more. Its place stays."""
        queue = self._queues.get(session)
        if queue is None:
            return 0
        skipped = passed = 0
        while queue.inputs and queue.inputs[0].end <= position:
            gone = queue.inputs.popleft()
            queue.starts.discard(gone.start)
            skipped += gone.width
            passed += 1
        if self._shares is not None and passed:
            self._shares.dropped(queue.rank.tenant, passed)
        if not queue.inputs:
            del self._queues[session]
            self._leave_line(session, queue)
            return skipped
        head = queue.inputs[0]
        if head.start < position:
            queue.starts.discard(head.start)
            queue.starts.add(position)
            queue.inputs[0] = replace(head, start=Position(position), width=head.end - position)
            skipped += position - head.start
        if skipped:
            self._line_up(session, queue)
        return skipped

    def drop(self, session: SessionId) -> list[Input]:
        """Take out everything of a session, in order."""
        queue = self._queues.pop(session, None)
        if queue is None:
            return []
        self._vacated[session] = queue.key + (queue.rank.lead_steps << STAMP_BITS)
        if self._shares is not None:
            self._shares.dropped(queue.rank.tenant, len(queue.inputs))
        self._leave_line(session, queue)
        return list(queue.inputs)

    def forget_places(self) -> None:
        """A batch comes: places of cancelled sessions are kept no longer."""
        self._vacated.clear()

    def forget(self, session: SessionId) -> None:
        """A session is over: its place is not kept."""
        self._vacated.pop(session, None)

    def places(self) -> list[tuple[SessionId, Rank, int]]:
        """Every session with something waiting, its rank, and the stamp of its place."""
        return [
            (session, queue.rank, queue.key + (queue.rank.lead_steps << STAMP_BITS))
            for session, queue in self._queues.items()
        ]

    def _line_up(self, session: SessionId, queue: _Queue) -> None:
        tenant = queue.rank.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = FirstFit(self._widest)
        line.put(session, queue.key, queue.inputs[0].width)
        self._rank_tenant(tenant)

    def _leave_line(self, session: SessionId, queue: _Queue) -> None:
        tenant = queue.rank.tenant
        line = self._lines[tenant]
        line.remove(session)
        if not line:
            del self._lines[tenant]
        self._rank_tenant(tenant)

    def _rank_tenant(self, tenant: str) -> None:
        if self._shares is None:
            return
        line = self._lines.get(tenant)
        if line is None:
            self._tenants.remove(tenant)
        else:
            self._tenants.put(tenant, self._shares.key(tenant), line.narrowest())
