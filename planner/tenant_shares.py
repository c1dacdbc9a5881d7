"""How much each tenant has been served, and so whose turn it is.

A tenant's level grows by the tokens served to it, divided by its weight; the tenant with the lowest level goes first.
So of tenants that keep asking, each gets tokens in proportion to its weight, and one that floods waits for itself
alone.

Beside the levels a mark rises: by the tokens of each step, divided by the weights of all that waited for it, as the
level of a tenant would that always gets its share. Who comes new starts at the mark. Who comes back is behind it by a
fixed credit at most, so idleness earns little; nobody is ahead of it by more, so using what nobody else wanted costs
little. And as it rises with every step that runs, everybody's turn comes, whoever else may come.

Levels are integers; UNIT of them is one token at weight 1. A tenant that is gone is forgotten when it owes nothing.
Sources: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", 2024; the virtual time
of Parekh and Gallager, "A Generalized Processor Sharing Approach to Flow Control", 1993.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from microtome.planner.errors import BadConfig

UNIT = 1 << 20
_STEPS_UNTIL_GONE = 16
_KEPT_AT_LEAST = 64  # tenants below which forgetting is not worth the look


@dataclass(slots=True)
class _Tenant:
    level: int
    order: int  # of arrival; settles equal levels
    weight: int
    waiting: int = 0  # inputs
    last_step: int = 0  # in which something of it was queued or served


class TenantShares:
    def __init__(self, weights: Mapping[str, int], credit_tokens: int) -> None:
        """`weights`: tokens a tenant gets for each one of a tenant of weight 1, the weight of those not named.

        `credit_tokens`: how far from the mark a tenant of weight 1 may stand. Raises `BadConfig` for a weight out of
        range.
        """
        for tenant, weight in weights.items():
            if not 1 <= weight <= UNIT:
                raise BadConfig(f"tenant {tenant!r} has weight {weight}, a weight is from 1 to {UNIT}")
        self._weights = dict(weights)
        self._credit = credit_tokens * UNIT
        self._tenants: dict[str, _Tenant] = {}
        self._arrivals = 0
        self._step = 0
        self._mark = 0
        self._waiting_weight = 0  # of all tenants something of which waits
        self._step_weight = 0  # the same when this step began
        self._step_tokens = 0  # served in this step
        self.served_now: set[str] = set()  # in this step
        self._sweep_above = _KEPT_AT_LEAST

    def __len__(self) -> int:
        return len(self._tenants)

    def next_step(self) -> None:
        """A new batch begins."""
        self._step += 1
        if self._step_tokens:
            self._mark += self._step_tokens * UNIT // self._step_weight
            self._step_tokens = 0
            self.served_now.clear()
        self._step_weight = self._waiting_weight

    def key(self, tenant: str) -> tuple[int, int]:
        """The tenant with the lowest goes first. Only of a tenant something of which waits."""
        state = self._tenants[tenant]
        return (state.level, state.order)

    def queued(self, tenant: str) -> None:
        """One more input of a tenant waits."""
        state = self._tenants.get(tenant)
        if state is None:
            self._forget_gone()
            self._arrivals += 1
            state = _Tenant(self._mark, self._arrivals, self._weights.get(tenant, 1))
            self._tenants[tenant] = state
        if not state.waiting:
            state.level = max(state.level, self._mark - self._credit)
            self._waiting_weight += state.weight
        state.waiting += 1
        state.last_step = self._step

    def dropped(self, tenant: str, inputs: int) -> None:
        """`inputs` of a tenant wait no longer, and were not served."""
        self._leave(self._tenants[tenant], inputs)

    def served(self, tenant: str, inputs: int, tokens: int) -> None:
        """`inputs` of a tenant wait no longer: they run, `tokens` together."""
        state = self._tenants[tenant]
        state.level = min(state.level + tokens * UNIT // state.weight, self._mark + self._credit)
        state.last_step = self._step
        self.served_now.add(tenant)
        self._step_tokens += tokens
        self._leave(state, inputs)

    def given_back(self, tenant: str, tokens: int) -> None:
        """An input of `tokens` that was served did not run after all, and waits again."""
        self.queued(tenant)
        self.not_run(tenant, tokens)

    def not_run(self, tenant: str, tokens: int) -> None:
        """Of what was served, so many tokens need not be run."""
        state = self._tenants[tenant]
        state.level = max(state.level - tokens * UNIT // state.weight, self._mark - self._credit)
        self._step_tokens = max(0, self._step_tokens - tokens)

    def _leave(self, state: _Tenant, inputs: int) -> None:
        state.waiting -= inputs
        if not state.waiting:
            self._waiting_weight -= state.weight

    def _forget_gone(self) -> None:
        """Paid for by the tenants that came since the last time."""
        if len(self._tenants) < self._sweep_above:
            return
        gone = [
            name
            for name, state in self._tenants.items()
            if not state.waiting and state.level <= self._mark and self._step - state.last_step > _STEPS_UNTIL_GONE
        ]
        for name in gone:
            del self._tenants[name]
        self._sweep_above = max(_KEPT_AT_LEAST, 2 * len(self._tenants))
