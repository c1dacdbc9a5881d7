"""The decodes that wait for one worker, and which of them go first when a step cannot hold all.

They stand in lanes, one per tenant and priority, in order of arrival. When all fit, all go and nothing is compared.
When not, the tenant that was served least goes first; inside a tenant the decode that waits longest, where a priority
counts as steps of waiting. What was given back goes before what was not, inside a tenant.

Order is by stamps: integers that grow with arrival and tell the step of it. Queueing and taking a decode costs a few
dictionary operations, whatever waits behind it.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain
from typing import NamedTuple

from microtome.planner.tenant_shares import TenantShares
from microtome.planner.types import Input, SessionId

STAMP_BITS = 40  # a stamp is (step << STAMP_BITS) + a counter: an offset in steps is a shift


class Rank(NamedTuple):
    """What a policy lets count of a session."""

    tenant: str = ""
    lead_steps: int = 0  # the waiting that its priority is worth


class _Lane:
    __slots__ = ("inputs", "lead", "returned", "tenant")

    def __init__(self, rank: Rank) -> None:
        self.tenant = rank.tenant
        self.lead = rank.lead_steps << STAMP_BITS
        self.returned: dict[int, Input] = {}  # by stamp, ascending; all below 0
        self.inputs: dict[int, Input] = {}  # by stamp, ascending

    def __len__(self) -> int:
        return len(self.returned) + len(self.inputs)

    def in_order(self) -> Iterator[tuple[int, Input]]:
        return chain(self.returned.items(), self.inputs.items())

    def take(self, stamp: int) -> Input:
        return (self.returned if stamp < 0 else self.inputs).pop(stamp)


class WaitingDecodes:
    def __init__(self, shares: TenantShares | None) -> None:
        """`shares`: who was served how much; None: all sessions rank as one tenant's."""
        self._shares = shares
        self._lanes: dict[Rank, _Lane] = {}
        self._of_session: dict[SessionId, list[tuple[int, Rank]]] = {}  # stamp and lane of each, in order
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, session: SessionId) -> bool:
        return session in self._of_session

    def waits_at(self, session: SessionId, start: int) -> bool:
        """Whether the session, something of which waits, has a decode that starts there."""
        return any(item.start == start for item in self._waiting_of(session))

    def put(self, item: Input, rank: Rank, stamp: int) -> None:
        """Queue a decode behind what waits. Stamps grow from call to call."""
        own = self._of_session.get(item.session)
        if own is None:
            own = self._of_session[item.session] = []
        else:
            rank = own[-1][1]  # a session's decodes keep their order, even if it was ranked anew meanwhile
        lane = self._lanes.get(rank)
        if lane is None:
            lane = self._lanes[rank] = _Lane(rank)
        lane.inputs[stamp] = item
        own.append((stamp, rank))
        self._count += 1
        if self._shares is not None:
            self._shares.queued(rank.tenant)

    def put_back(self, items: Sequence[Input], ranks: Sequence[Rank], first_stamp: int) -> None:
        """Queue decodes ahead of what waits, in the order given. Their stamps, from `first_stamp` up, are below 0."""
        fresh: dict[Rank, dict[int, Input]] = {}
        heads: dict[SessionId, list[tuple[int, Rank]]] = {}
        for stamp, (item, rank) in enumerate(zip(items, ranks, strict=True), first_stamp):
            own = self._of_session.get(item.session)
            rank = own[0][1] if own else rank
            fresh.setdefault(rank, {})[stamp] = item
            heads.setdefault(item.session, []).append((stamp, rank))
            if self._shares is not None:
                self._shares.given_back(rank.tenant, item.width)
        for rank, returned in fresh.items():
            lane = self._lanes.setdefault(rank, _Lane(rank))
            lane.returned = returned | lane.returned
        for session, head in heads.items():
            self._of_session[session] = head + self._of_session.get(session, [])
        self._count += len(items)

    def take(self, limit: int) -> list[Input]:
        """Hand out at most `limit` decodes, one per session at most, in order."""
        if self._count > limit or len(self._of_session) < self._count:
            return self._choose(limit)
        taken: list[Input] = []
        for lane in self._lanes.values():
            taken += lane.returned.values()
            taken += lane.inputs.values()
            if self._shares is not None:
                self._shares.served(lane.tenant, len(lane), len(lane))
        self._lanes.clear()
        self._of_session.clear()
        self._count = 0
        return taken

    def drop(self, session: SessionId) -> list[Input]:
        """Take out everything of a session, in order."""
        own = self._of_session.pop(session, ())
        dropped = [self._remove(stamp, rank) for stamp, rank in own]
        if own and self._shares is not None:
            self._shares.dropped(own[0][1].tenant, len(own))
        return dropped

    def places(self) -> list[tuple[SessionId, Rank, int]]:
        """Every session with something waiting, its rank, and the stamp of its first decode."""
        return [(session, own[0][1], own[0][0]) for session, own in self._of_session.items()]

    def _waiting_of(self, session: SessionId) -> Iterator[Input]:
        for stamp, rank in self._of_session[session]:
            lane = self._lanes[rank]
            yield (lane.returned if stamp < 0 else lane.inputs)[stamp]

    def _remove(self, stamp: int, rank: Rank) -> Input:
        lane = self._lanes[rank]
        item = lane.take(stamp)
        if not lane:
            del self._lanes[rank]
        self._count -= 1
        return item

    def _choose(self, limit: int) -> list[Input]:
        """`take` where something stays behind."""
        chosen: dict[SessionId, tuple[int, Rank]] = {}  # a session's second decode waits for the next step
        if len(self._lanes) == 1:
            ((rank, lane),) = self._lanes.items()
            for stamp, item in lane.in_order():
                if len(chosen) == limit:
                    break
                chosen.setdefault(item.session, (stamp, rank))
            if self._shares is not None:
                self._shares.served(rank.tenant, len(chosen), len(chosen))
        else:
            self._choose_across_lanes(limit, chosen)

        taken: list[Input] = []
        for session, (stamp, rank) in chosen.items():
            own = self._of_session[session]
            own.pop(0)
            if not own:
                del self._of_session[session]
            taken.append(self._remove(stamp, rank))
        return taken

    def _choose_across_lanes(self, limit: int, chosen: dict[SessionId, tuple[int, Rank]]) -> None:
        """Fill `chosen` with the stamp and rank of one decode for each of `limit` sessions at most, in order."""
        # Per tenant a heap of its lanes' heads: (what orders, to settle equals, stamp, input, rank, the rest of the
        # lane).
        lines: dict[str, list[tuple[int, int, int, Input, Rank, Iterator[tuple[int, Input]]]]] = {}
        for number, (rank, lane) in enumerate(self._lanes.items()):
            rest = lane.in_order()
            stamp, item = next(rest)
            lines.setdefault(lane.tenant, []).append((stamp - lane.lead, number, stamp, item, rank, rest))
        for line in lines.values():
            heapify(line)
        shares = self._shares
        tenants = [((0, 0) if shares is None else shares.key(tenant), tenant) for tenant in lines]
        heapify(tenants)

        while tenants and len(chosen) < limit:
            tenant = tenants[0][1]
            line = lines[tenant]
            took = False
            while line and not took:
                _, number, stamp, item, rank, rest = line[0]
                following = next(rest, None)
                if following is None:
                    heappop(line)
                else:
                    lead = rank.lead_steps << STAMP_BITS
                    heapreplace(line, (following[0] - lead, number, following[0], following[1], rank, rest))
                if item.session not in chosen:
                    chosen[item.session] = (stamp, rank)
                    took = True
            if took and shares is not None:
                shares.served(tenant, 1, 1)
            if not line:
                heappop(tenants)
            elif shares is not None:
                heapreplace(tenants, (shares.key(tenant), tenant))
