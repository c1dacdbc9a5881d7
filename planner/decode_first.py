"""The scheduler that all policies share: decodes first, then prefill in turns.

A batch takes waiting decodes, at most one per session and `max_decodes` in all; then it spends what is left of its
tokens on prefill chunks, one head chunk a turn, until nothing that fits is left. So two prompts interleave, a lone one
may fill the batch, and a long one keeps nobody out. Limits leave room for one full chunk beside a full set of decodes:
the chunk whose turn it is always goes, and every session's turn comes.

A policy chooses what counts beside arrival; with equal priorities and one tenant all policies hand out the same
batches:

- `ageing_steps`: one more level of priority counts as that many steps of waiting. Higher goes first, and nothing
  starves: a session waits behind later ones of a priority higher by k for k * ageing_steps steps at most.
- `tenant_weights`: turns go to the tenant served least, by weighted tokens; see `tenant_shares`.
- `target_step_tokens`: where decodes run, prefill joins them only up to this many tokens in all: the most that a step
  of the wanted duration can run. A chunk that never fits beside them goes after `patience_steps` steps all the same.

Costs per batch follow its inputs, times the logarithm of what waits; neither the sessions that wait nor those that are
admitted are walked through.
"""

from collections.abc import Mapping, Sequence

from microtome.planner.errors import BadConfig
from microtome.planner.scheduler import Behind, Limits, Standing
from microtome.planner.tenant_shares import TenantShares
from microtome.planner.types import Batch, Input, Kind, SessionId
from microtome.planner.waiting_decodes import STAMP_BITS, Rank, WaitingDecodes
from microtome.planner.waiting_prefills import WaitingPrefills

_DEFAULT_RANK = Rank()
_CREDIT_BATCHES = 8  # full batches that a tenant may fall behind in its share


class DecodeFirstScheduler:
    def __init__(
        self,
        limits: Limits,
        *,
        ageing_steps: int | None = None,
        tenant_weights: Mapping[str, int] | None = None,
        target_step_tokens: int | None = None,
        patience_steps: int = 8,
    ) -> None:
        """None: priorities do not count, tenants do not count, prefill has no target. Raises `BadConfig`."""
        for name, value in (("ageing_steps", ageing_steps), ("patience_steps", patience_steps)):
            if value is not None and value < 1:
                raise BadConfig(f"{name} {value} is below 1")
        if target_step_tokens is not None and target_step_tokens < 0:
            raise BadConfig(f"target_step_tokens {target_step_tokens} is below 0")
        self.limits = limits
        self._ageing_steps = ageing_steps
        self._target = target_step_tokens
        self._patience = patience_steps
        self._overdue = 0  # steps in which the chunk whose turn it was did not fit the target
        self._shares: TenantShares | None = None
        if tenant_weights is not None:
            self._shares = TenantShares(tenant_weights, _CREDIT_BATCHES * limits.max_batch_tokens)
        self._ranks: dict[SessionId, Rank] = {}  # of admitted sessions that do not have the default rank
        self._decodes = WaitingDecodes(self._shares)
        self._prefills = WaitingPrefills(self._shares, limits.max_prefill_tokens)
        self._waiting_tokens = 0
        self._decoding: set[SessionId] = set()  # in the batch handed out last
        self._room = 0  # tokens of prefill that it could hold beside what it holds
        self._step = 0
        self._arrivals = 0
        self._front = -(1 << 120)  # stamps of what was given back: below every other place

    def admit(self, session: SessionId, *, priority: int = 0, tenant: str = "") -> None:
        rank = Rank(
            tenant if self._shares is not None else "",
            priority * self._ageing_steps if self._ageing_steps is not None else 0,
        )
        if rank == _DEFAULT_RANK:
            self._ranks.pop(session, None)
        else:
            self._ranks[session] = rank

    def submit(self, inputs: Sequence[Input]) -> bool:
        if not self._acceptable(inputs):
            return False
        ranks, decodes, prefills = self._ranks, self._decodes, self._prefills
        stamp = self._step << STAMP_BITS | self._arrivals
        for item in inputs:
            rank = ranks.get(item.session, _DEFAULT_RANK)
            if item.kind is Kind.DECODE:
                decodes.put(item, rank, stamp)
            else:
                prefills.put(item, rank, stamp)
            self._waiting_tokens += item.width
            stamp += 1
        self._arrivals += len(inputs)
        return True

    def next_batch(self, max_tokens: int | None = None) -> Batch:
        self._step += 1
        if self._shares is not None:
            self._shares.next_step()
        self._prefills.forget_places()
        budget = self.limits.max_batch_tokens
        if max_tokens is not None:
            budget = min(budget, max_tokens)
        batch = self._decodes.take(min(self.limits.max_decodes, budget)) if self._decodes else []
        self._room = 0
        if self._prefills:
            self._add_prefill(batch, budget - len(batch))
        self._waiting_tokens -= sum(item.width for item in batch)
        return tuple(batch)

    def more(self, unused: Sequence[tuple[SessionId, int]]) -> Batch:
        for session, tokens in unused:
            self._room += tokens
            if self._shares is not None:
                self._shares.not_run(self._ranks.get(session, _DEFAULT_RANK).tenant, tokens)
        batch: list[Input] = []
        if self._prefills:
            self._prefills.begin_batch(self._decoding)
            self._take_turns(batch, self._room)
            self._prefills.end_batch()
        self._waiting_tokens -= sum(item.width for item in batch)
        return tuple(batch)

    def skip(self, session: SessionId, position: int) -> None:
        self._waiting_tokens -= self._prefills.skip(session, position)

    def put_back(self, inputs: Sequence[Input]) -> None:
        ranks = self._ranks
        decodes = [item for item in inputs if item.kind is Kind.DECODE]
        prefills = [item for item in inputs if item.kind is Kind.PREFILL]
        self._front -= len(inputs)
        self._decodes.put_back(decodes, [ranks.get(item.session, _DEFAULT_RANK) for item in decodes], self._front)
        self._prefills.put_back(prefills, [ranks.get(item.session, _DEFAULT_RANK) for item in prefills], self._front)
        self._waiting_tokens += sum(item.width for item in inputs)

    def cancel(self, session: SessionId) -> list[Input]:
        dropped = self._decodes.drop(session) + self._prefills.drop(session)
        self._waiting_tokens -= sum(item.width for item in dropped)
        return dropped

    def dismiss(self, session: SessionId) -> list[Input]:
        self._ranks.pop(session, None)
        dropped = self.cancel(session)
        self._prefills.forget(session)
        return dropped

    def clear(self) -> list[Input]:
        sessions = [session for session, _, _ in self._decodes.places() + self._prefills.places()]
        return [item for session in dict.fromkeys(sessions) for item in self.cancel(session)]

    @property
    def has_work(self) -> bool:
        return bool(self._decodes) or bool(self._prefills)

    @property
    def waiting_tokens(self) -> int:
        return self._waiting_tokens

    def standing(self, session: SessionId) -> Standing | None:
        for queue in (self._decodes, self._prefills):
            places = queue.places()
            own = next(((rank, stamp) for other, rank, stamp in places if other == session), None)
            if own is not None:
                return self._standing(own, [(rank, stamp) for other, rank, stamp in places if other != session])
        return None

    def _acceptable(self, inputs: Sequence[Input]) -> bool:
        decodes, prefills = self._decodes, self._prefills
        widest = self.limits.max_prefill_tokens
        for item in inputs:
            limit = 1 if item.kind is Kind.DECODE else widest
            if not 1 <= item.width <= limit:
                return False
            session = item.session
            if session in decodes and decodes.waits_at(session, item.start):
                return False
            if session in prefills and prefills.waits_at(session, item.start):
                return False
        if len({item.session for item in inputs}) == len(inputs):
            return True  # nobody has two, so nobody has one twice
        return len({(item.session, item.start) for item in inputs}) == len(inputs)

    def _add_prefill(self, batch: list[Input], budget: int) -> None:
        """Spend at most `budget` tokens on chunks, in turns."""
        prefills = self._prefills
        self._decoding = {item.session for item in batch}
        prefills.begin_batch(self._decoding)
        room = budget
        overdue = False
        if self._target is not None and batch:
            room = min(room, self._target - len(batch))
            head = prefills.head(self.limits.max_prefill_tokens)
            if head is not None and head.width > room:
                self._overdue += 1
                overdue = self._overdue > self._patience
            else:
                self._overdue = 0
        if overdue and (head := prefills.head(budget)) is not None:
            self._overdue = 0
            batch.append(head)
            room -= head.width
            prefills.take(head, self._next_place())
        self._take_turns(batch, room)
        prefills.end_batch()

    def _take_turns(self, batch: list[Input], room: int) -> None:
        """Add chunks, one a turn, until nothing that fits is left."""
        prefills = self._prefills
        while room > 0 and (head := prefills.head(room)) is not None:
            batch.append(head)
            room -= head.width
            prefills.take(head, self._next_place())
        self._room = room

    def _next_place(self) -> int:
        """Behind everybody who waits."""
        self._arrivals += 1
        return self._step << STAMP_BITS | self._arrivals - 1

    def _standing(self, own: tuple[Rank, int], others: list[tuple[Rank, int]]) -> Standing:
        own_order = self._order(*own)
        ahead = [(rank, stamp) for rank, stamp in others if self._order(rank, stamp) < own_order]
        overtaken = [rank for rank, stamp in ahead if stamp > own[1]]
        behind = Behind.STEP_BUDGET
        if any(rank.tenant != own[0].tenant for rank in overtaken):
            behind = Behind.TENANT_SHARE
        elif any(rank.lead_steps > own[0].lead_steps for rank in overtaken):
            behind = Behind.PRIORITY
        return Standing(len(ahead), behind)

    def _order(self, rank: Rank, stamp: int) -> tuple[tuple[int, int], int]:
        share = (0, 0) if self._shares is None else self._shares.key(rank.tenant)
        return (share, stamp - (rank.lead_steps << STAMP_BITS))
